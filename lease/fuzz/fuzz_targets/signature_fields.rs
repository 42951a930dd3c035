//! `Signature-Input` and `Signature`, separated by a line feed.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let (input, signature) = text.split_once('\n').unwrap_or((&text, ""));
    let _ = lease::request::parse(input, signature);
});
