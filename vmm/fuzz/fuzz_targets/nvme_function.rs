//! See `nvme::function`.

#![no_main]

#[path = "../../tests/common/nvme.rs"]
mod nvme;
#[path = "../threads.rs"]
mod threads;
#[path = "../../tests/common/virtio.rs"]
mod virtio;

libfuzzer_sys::fuzz_target!(|data: &[u8]| threads::alone(|| nvme::function(data)));
