//! What comes back from a server of authenticated time. Nothing that the fuzzer makes is signed.
#![no_main]

use agent::time::nts::{
    extension::{Randomness, open, request},
    records::{Keys, parse},
};

/// NTPv4, AES-SIV-CMAC-256, one cookie, end.
const AGREED: [u8; 24] =
    [0x80, 1, 0, 2, 0, 0, 0x80, 4, 0, 2, 0, 15, 0, 5, 0, 4, 1, 2, 3, 4, 0x80, 0, 0, 0];

libfuzzer_sys::fuzz_target!(|answer: &[u8]| {
    let keys = Keys { to_server: [1; 32], to_client: [2; 32] };
    let mut session = parse(&AGREED, keys).expect("it is well formed");
    let random = Randomness { nonce: 7, unique: [5; 32], cipher: [6; 16] };
    request(&mut session, &random).expect("there is a cookie");
    assert!(open(&mut session, &random, answer).is_err());
});
