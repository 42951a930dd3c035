//! See `nvme::function`.

#![no_main]

#[path = "../../tests/common/nvme.rs"]
mod nvme;
#[path = "../../tests/common/virtio.rs"]
mod virtio;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nvme::function(data);
    nvme::wait_for_threads();
});
