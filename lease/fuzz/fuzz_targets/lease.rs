//! Lease documents: what is read is written the same.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(lease) = lease::document::Lease::from_bytes(bytes) {
        assert!(lease.to_bytes().is_ok_and(|written| written == bytes));
    }
});
