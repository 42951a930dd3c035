//! See `nvme_races::function_race`.

#![no_main]

#[path = "../../tests/common/nvme.rs"]
mod nvme;
#[path = "../../tests/common/nvme_races.rs"]
mod nvme_races;
#[path = "../../tests/common/racing.rs"]
mod racing;
#[path = "../threads.rs"]
mod threads;
#[path = "../../tests/common/virtio.rs"]
mod virtio;

libfuzzer_sys::fuzz_target!(|data: &[u8]| threads::alone(|| nvme_races::function_race(data)));
