//! Trees of ports as a specification might have them.
#![no_main]
#![allow(dead_code, reason = "each target runs one of the cases")]

#[path = "../port_cases.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cases::tree(bytes));
