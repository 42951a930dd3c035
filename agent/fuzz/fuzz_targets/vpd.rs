//! Vital product data, as a device has it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (product, serial) = agent::inventory::facts::words(bytes);
    for word in [product, serial].into_iter().flatten() {
        assert!(word.bytes().all(|byte| (0x20..0x7f).contains(&byte)));
    }
});
