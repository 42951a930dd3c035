//! Replays the fuzz corpus of what the installer reads of disks.

use std::{fs, path::Path};

#[test]
fn no_disk_of_the_corpus_makes_the_installer_panic() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/disk");
    let mut read = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is there") {
        let bytes = fs::read(entry.expect("an entry").path()).expect("a file");
        agent::install::probe::everything(&bytes);
        read += 1;
    }
    assert!(read >= 9, "{read} files");
}
