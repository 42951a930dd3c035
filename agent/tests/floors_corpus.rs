//! Replays the fuzz corpus of the floors' records.

use std::{fs, path::Path};

use agent::floors::Floors;

#[test]
fn records_of_the_corpus_are_read_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/floors");
    let mut read = Vec::new();
    for entry in fs::read_dir(corpus).expect("the corpus is there") {
        let entry = entry.expect("an entry");
        let bytes = fs::read(entry.path()).expect("a file");
        if let Some((floors, held)) = Floors::from_bytes(&bytes) {
            assert_eq!(floors.to_bytes(held)[..], bytes[..]);
            read.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    read.sort();
    assert_eq!(read, ["any", "both"]);
}
