//! What a machine used, second by second, as receipts that its node signs.
