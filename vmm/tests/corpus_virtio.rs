//! Replays what fuzzing found worth keeping, and some noise, through the virtio devices.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "common/virtio.rs"]
mod virtio;
#[path = "common/virtio_scripts.rs"]
mod virtio_scripts;

use std::{fs, path::Path};

use proptest::prelude::*;

/// Runs every file of a target's corpus; returns how many there were.
fn replay(target: &str, run: fn(&[u8])) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| run(&fs::read(path).unwrap())).count()
}

#[test]
fn transport_corpus() {
    assert!(replay("virtio_transport", virtio_scripts::transport) > 5);
}

#[test]
fn function_corpus() {
    assert!(replay("virtio_pci", virtio_scripts::function) > 5);
}

#[test]
fn block_corpus() {
    assert!(replay("virtio_blk", virtio_scripts::block) > 20);
}

#[test]
fn entropy_corpus() {
    assert!(replay("virtio_rng", virtio_scripts::entropy) > 20);
}

#[test]
fn control_corpus() {
    assert!(replay("virtio_control", virtio_scripts::control) > 20);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn noise_on_the_transport(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_scripts::transport(&data);
    }

    #[test]
    fn noise_on_the_function(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_scripts::function(&data);
    }

    #[test]
    fn noise_on_a_block_queue(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_scripts::block(&data);
    }

    #[test]
    fn noise_on_an_entropy_queue(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_scripts::entropy(&data);
    }

    #[test]
    fn noise_on_a_control_queue(data in prop::collection::vec(any::<u8>(), 0..600)) {
        virtio_scripts::control(&data);
    }
}
