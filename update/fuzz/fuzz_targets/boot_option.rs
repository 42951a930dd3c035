#![no_main]

#[path = "../boot_option.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::boot_option(bytes));
