//! Certificates that a node says are its TPM's, and files of authorities: the bytes as they are, and the bytes as
//! two certificates with right lengths, so that the fuzzer need not find those.

#![no_main]

use lease::attestation::judge_certificate;

fn framed(bytes: &[u8]) -> Vec<u8> {
    let (authority, own) = bytes.split_at(bytes.len() / 2);
    let one = |part: &[u8]| {
        let length = u16::try_from(part.len()).unwrap_or(0).to_be_bytes();
        [&[0x30, 0x82][..], &length, part].concat()
    };
    [one(authority), one(own)].concat()
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = judge_certificate(bytes);
    let _ = judge_certificate(&framed(&bytes[..bytes.len().min(4096)]));
});
