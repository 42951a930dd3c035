#![no_main]

#[path = "../secure_boot.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::secure_boot(bytes));
