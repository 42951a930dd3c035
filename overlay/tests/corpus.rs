//! Replays the corpora of the fuzz targets through the same entries.

use std::{fs, path::Path};

#[path = "../fuzz/entries.rs"]
mod entries;

fn replay(target: &str, entry: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|file| file.expect("a readable folder").path())
        .collect();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    for file in files {
        entry(&fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())));
    }
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
fn tunnels() {
    replay("tunnel", entries::tunnel);
}
