//! A whole passed-through device, hostile on both sides.
#![no_main]

#[path = "../assigned_case.rs"]
mod case;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| case::run(bytes));
