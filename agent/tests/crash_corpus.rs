//! Replays the fuzz corpus of what firmware keeps of crashes.

use std::{fs, path::Path};

#[test]
fn every_crash_of_the_corpus_is_put_together() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/crash");
    let mut found = Vec::new();
    for entry in fs::read_dir(corpus).expect("the corpus is there") {
        let entry = entry.expect("an entry");
        let bytes = fs::read(entry.path()).expect("a file");
        let crashes = agent::evidence::parts::everything(&bytes);
        found.push((entry.file_name().to_string_lossy().into_owned(), crashes));
    }
    found.sort();
    let wanted = [("names".to_owned(), 2), ("panic".to_owned(), 1), ("two".to_owned(), 2)];
    assert_eq!(found, wanted);
}
