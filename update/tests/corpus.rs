//! Replays the corpora of the fuzz targets, and damaged copies, through the same entries.

use std::{fs, path::Path};

#[path = "../fuzz/entries.rs"]
mod entries;

/// Damaged copies of each file that are tried.
const DAMAGED: u64 = 100;

/// A small generator, so that a failure repeats (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or(0) % bound.max(1)
    }
}

fn replay(target: &str, entry: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|file| file.expect("a readable folder").path())
        .collect();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let mut random = Random(1);
    for file in files {
        let bytes = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        entry(&bytes);
        for _ in 0..DAMAGED {
            entry(&damaged(&bytes, &mut random));
        }
    }
}

/// Returns `bytes` with up to four of them changed, and now and then cut off.
fn damaged(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        if !bytes.is_empty() {
            let at = random.below(bytes.len());
            bytes[at] = u8::try_from(random.below(256)).unwrap_or(0);
        }
    }
    if random.below(4) == 0 {
        bytes.truncate(random.below(bytes.len() + 1));
    }
    bytes
}

#[test]
fn channel() {
    replay("channel", entries::channel);
}

#[test]
fn metadata() {
    replay("metadata", entries::metadata);
}

#[test]
fn workflow() {
    replay("workflow", entries::workflow);
}

#[test]
fn journal() {
    replay("journal", entries::journal);
}

#[test]
fn volume() {
    replay("volume", entries::volume);
}

#[test]
fn chunks() {
    replay("chunks", entries::chunks);
}
