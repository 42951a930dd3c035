//! Replays the fuzz corpus of clean file systems.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use agent::seal::{
    glance::{Budget, Glance, glance},
    inodes::{Settled, settle},
};

#[path = "../fuzz/sparse.rs"]
mod sparse;

#[test]
fn every_file_of_the_corpus_is_judged() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/glance");
    let judge = |name: &str| {
        let volume = sparse::Sparse::new(&fs::read(corpus.join(name)).unwrap());
        let budget = Budget { until: Instant::now() + Duration::from_secs(60), bytes: 64 << 20 };
        let (glance, settled) = (glance(&volume, budget), settle(&volume, budget.until));
        let whole = glance == Glance::Whole;
        assert!(!whole || matches!(settled, Ok(Settled { attributes: 0, marks: 0 })), "{name}");
        glance
    };
    assert_eq!(judge("empty"), Glance::Whole);
    assert_eq!(judge("filled"), Glance::Whole);
    let doubted = |name: &str, expected: &str| {
        let Glance::Doubtful { what } = judge(name) else { panic!("{name} is not doubted") };
        assert!(what.contains(expected), "{name}: {what}");
    };
    // Their checksums are good.
    doubted("extents-of-extents", "extents of inode 12");
    doubted("beyond-the-end", "inode 12 lies beyond the end");
    doubted("twice", "used otherwise than marked");
    doubted("table-elsewhere", "metadata of group 0");
    doubted("long-name", "block 0 of folder 2");
    doubted("short-end", "block 0 of folder 2");
    doubted("other-name", "links and names");
    for entry in fs::read_dir(&corpus).unwrap() {
        judge(entry.unwrap().file_name().to_str().unwrap());
    }
}
