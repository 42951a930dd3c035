//! Replays the fuzz corpus of superblocks, descriptors and journals.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, path::Path};

use agent::seal::superblock::{Found, mend};

#[path = "../fuzz/sparse.rs"]
mod sparse;

#[test]
fn every_file_of_the_corpus_is_judged() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/superblock");
    let judge = |name: &str| {
        let volume = sparse::Sparse::new(&fs::read(corpus.join(name)).unwrap());
        (mend(&volume).unwrap(), mend(&volume).unwrap())
    };
    assert_eq!(judge("ahead"), (Found::AheadOfGroups, Found::Whole));
    assert_eq!(judge("replayed"), (Found::Whole, Found::Whole));
    let damaged = Found::GroupDamaged { group: 1 };
    assert_eq!(judge("altered-copy"), (damaged.clone(), damaged.clone()));
    assert_eq!(judge("torn-commit"), (damaged.clone(), damaged));
    for entry in fs::read_dir(&corpus).unwrap() {
        let volume = sparse::Sparse::new(&fs::read(entry.unwrap().path()).unwrap());
        // Nothing panics; what cannot be read is an error.
        mend(&volume).ok();
    }
}
