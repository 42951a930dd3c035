//! What a node answers when it is to prove what it runs: evidence, its parts, and a release's description.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = lease::attestation::everything(bytes);
});
