//! See `virtio_scripts::control`.

#![no_main]

#[path = "../../tests/common/virtio.rs"]
mod virtio;
#[path = "../../tests/common/virtio_scripts.rs"]
mod virtio_scripts;

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtio_scripts::control(data));
