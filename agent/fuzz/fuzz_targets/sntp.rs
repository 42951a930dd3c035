//! What a time server answers.
#![no_main]

use agent::time::sntp::{Exchange, UnixNanos, parse};

libfuzzer_sys::fuzz_target!(|answer: &[u8]| {
    let sent = UnixNanos(1_796_083_200_000_000_000);
    let _ = parse(answer, &Exchange { nonce: 7, sent, received: UnixNanos(sent.0 + 1_000_000) });
});
