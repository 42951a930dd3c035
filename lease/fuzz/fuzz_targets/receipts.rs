//! What a node answers about usage, as a renter's program reads and checks it.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(answer) = serde_json::from_slice::<lease::api::Receipts>(bytes) {
        answer.receipts.iter().for_each(|signed| drop(lease::metering::verify(signed)));
    }
});
