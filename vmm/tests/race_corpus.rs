//! Replays what fuzzing found worth keeping, and some noise, through devices whose queues change
//! while they are served.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "common/nvme.rs"]
mod nvme;
#[path = "common/nvme_races.rs"]
mod nvme_races;
#[path = "common/racing.rs"]
mod racing;
#[path = "common/virtio.rs"]
mod virtio;
#[path = "common/virtio_races.rs"]
mod virtio_races;
#[path = "common/virtio_scripts.rs"]
mod virtio_scripts;

use std::{fs, path::Path};

use proptest::prelude::*;

/// How often each file is run: who comes first differs each time.
const REPEATS: usize = 4;

/// Runs every file of a target's corpus; returns how many there were.
fn replay(target: &str, run: fn(&[u8])) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let runs = files.map(|path| [(); REPEATS].map(|()| run(&fs::read(&path).unwrap())));
    runs.count()
}

#[test]
fn block_corpus() {
    assert!(replay("virtio_race", virtio_races::block_race) > 20);
}

#[test]
fn entropy_corpus() {
    assert!(replay("virtio_rng_race", virtio_races::entropy_race) > 10);
}

#[test]
fn control_corpus() {
    assert!(replay("virtio_control_race", virtio_races::control_race) > 10);
}

#[test]
fn nvme_corpus() {
    assert!(replay("nvme_race", nvme_races::controller_race) > 10);
}

#[test]
fn nvme_function_corpus() {
    assert!(replay("nvme_function_race", nvme_races::function_race) > 5);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn noise_on_a_block_queue(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_races::block_race(&data);
    }

    #[test]
    fn noise_on_an_entropy_queue(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_races::entropy_race(&data);
    }

    #[test]
    fn noise_on_a_control_queue(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_races::control_race(&data);
    }

    #[test]
    fn noise_on_an_nvme_controller(data in prop::collection::vec(any::<u8>(), 0..800)) {
        nvme_races::controller_race(&data);
    }
}
