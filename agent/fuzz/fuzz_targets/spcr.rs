//! The table in which firmware tells of its console.
#![no_main]

use agent::init::serial::{self, Place};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(line) = serial::parse(bytes) {
        assert!(!matches!(line.place, Place::Port(0) | Place::Memory(0)));
        assert_ne!(line.speed, Some(0));
    }
});
