//! Registers of the chipset, as a hostile guest accesses them.
#![no_main]

#[path = "../chipset_case.rs"]
mod case;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| case::run(bytes));
