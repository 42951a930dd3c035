//! The file that says which leases were used, as a disk may give it back.
#![no_main]

use agent::machines::used::Used;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(used) = Used::parse(bytes) {
        assert_eq!(Used::parse(&used.bytes()).ok(), Some(used));
    }
});
