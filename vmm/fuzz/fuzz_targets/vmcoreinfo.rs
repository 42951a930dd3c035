//! The note VMCOREINFO that a guest names for its dump.
#![no_main]
#![allow(dead_code, reason = "each target runs one of the cases")]

#[path = "../firmware_cases.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cases::vmcoreinfo(bytes));
