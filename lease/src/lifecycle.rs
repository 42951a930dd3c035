//! What is to happen to a machine at a time: design §6 as one pure function.
