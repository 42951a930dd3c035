//! Replays the fuzz corpus of the file that says which leases were used.

use std::{fs, path::Path};

use agent::machines::used::Used;

#[test]
fn files_of_the_corpus_are_read_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/used_leases");
    let mut read = Vec::new();
    for entry in fs::read_dir(corpus).expect("the corpus is there") {
        let entry = entry.expect("an entry");
        let bytes = fs::read(entry.path()).expect("a file");
        if let Ok(used) = Used::parse(&bytes) {
            assert_eq!(used.bytes(), bytes);
            read.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    read.sort();
    assert_eq!(read, ["empty", "three"]);
}
