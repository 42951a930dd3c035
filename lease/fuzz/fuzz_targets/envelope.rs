//! DSSE envelopes of leases.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = lease::document::Envelope::from_json(bytes).map(|e| e.unverified_lease().is_ok());
});
