//! A slot's registers while devices come and go.
#![no_main]
#![allow(dead_code, reason = "each target runs one of the cases")]

#[path = "../port_cases.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cases::slot(bytes));
