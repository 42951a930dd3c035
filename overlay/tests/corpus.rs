//! Replays the corpora of the fuzz targets, and damaged copies, through the same entries.

use std::{fs, path::Path};

use overlay::random::Random;

#[path = "../fuzz/entries.rs"]
mod entries;

/// Damaged copies of each file that are tried.
const DAMAGED: usize = 400;

fn replay(target: &str, entry: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|file| file.expect("a readable folder").path())
        .collect();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let mut random = Random::new(1);
    for file in files {
        let bytes = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        entry(&bytes);
        for _ in 0..DAMAGED {
            entry(&damaged(&bytes, &mut random));
        }
    }
}

/// Returns `bytes` with up to four of them changed and the end cut off, now and then.
fn damaged(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        if !bytes.is_empty() {
            let at = random.below(bytes.len());
            bytes[at] = random.draw().to_le_bytes()[0];
        }
    }
    if random.below(4) == 0 {
        bytes.truncate(random.below(bytes.len() + 1));
    }
    bytes
}

#[test]
fn links() {
    replay("link", entries::link);
}

#[test]
fn openings() {
    replay("opening", entries::opening);
}

#[test]
fn sealed_messages() {
    replay("sealed", entries::sealed);
}

#[test]
fn claims() {
    replay("claim", entries::claim);
}

#[test]
fn tunnels() {
    replay("tunnel", entries::tunnel);
}
