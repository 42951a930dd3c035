//! A file system's superblock, descriptors and journal, which whoever had the disk can have written.
#![no_main]

#[path = "../sparse.rs"]
mod sparse;

use agent::seal::superblock::{Found, mend};

libfuzzer_sys::fuzz_target!(|records: &[u8]| {
    let volume = sparse::Sparse::new(records);
    // What was mended once is whole, or not to be mended.
    let mended = |found| {
        matches!(found, Ok(Found::Mended | Found::AheadOfGroups | Found::GroupRestored { .. }))
    };
    if mended(mend(&volume)) {
        assert!(!mended(mend(&volume)));
    }
});
