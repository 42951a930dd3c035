//! See `virtio_races::block_race`.

#![no_main]

#[path = "../../tests/common/racing.rs"]
mod racing;
#[path = "../../tests/common/virtio.rs"]
mod virtio;
#[path = "../../tests/common/virtio_races.rs"]
mod virtio_races;
#[path = "../../tests/common/virtio_scripts.rs"]
mod virtio_scripts;

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtio_races::block_race(data));
