//! What a TPM answers: on the way it may be anybody's.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    agent::seal::tpm::wire::everything(bytes);
});
