//! Kernel images: bzImage and ELF.
#![no_main]
#![allow(dead_code, reason = "each target runs one of the cases")]

#[path = "../core_cases.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cases::kernel(bytes));
