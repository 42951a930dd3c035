//! Accesses to the ports of the platform's own devices.
#![no_main]
#![allow(dead_code, reason = "each target runs one of the cases")]

#[path = "../core_cases.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cases::ports(bytes));
