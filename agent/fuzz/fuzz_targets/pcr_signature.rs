//! A release's key and the signatures of its measurements, separated by a zero.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    agent::seal::signature::everything(bytes);
});
