//! Ledgers.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(lease::ledger::Ledger::open(bytes)));
