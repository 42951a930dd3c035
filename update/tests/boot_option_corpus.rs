//! Replays the corpus of the fuzz target for firmware's boot options.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

#[path = "../fuzz/boot_option.rs"]
mod entry;

use std::{fs, path::Path};

#[test]
fn what_the_fuzzer_found_worth_keeping_does_no_harm() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/boot_option");
    let mut replayed = 0;
    for entry in fs::read_dir(folder).unwrap() {
        entry::boot_option(&fs::read(entry.unwrap().path()).unwrap());
        replayed += 1;
    }
    assert!(replayed >= 6, "only {replayed} inputs");
}
