//! The floors that a TPM or a file holds, which whoever had the server before can have written.
#![no_main]

use agent::floors::Floors;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((floors, held)) = Floors::from_bytes(bytes) {
        assert_eq!(floors.to_bytes(held)[..], bytes[..]);
    }
});
