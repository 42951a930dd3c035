//! The header of an encrypted volume: whoever had the disk in hand may have written it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    agent::seal::luks::everything(bytes);
});
