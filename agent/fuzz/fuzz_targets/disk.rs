//! What the installer reads of a disk: whoever had it before, or put it in, chose these bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| agent::install::probe::everything(bytes));
