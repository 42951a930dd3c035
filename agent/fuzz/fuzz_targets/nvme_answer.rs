//! What an NVMe drive answers, as it comes from its admin queue.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (_, formats) = agent::assign::erase::nvme::everything(bytes);
    assert!(formats < 1024);
});
