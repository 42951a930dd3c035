//! Replays the fuzz corpus of the configuration volume.

use std::{fs, io::Cursor, path::Path};

#[test]
fn every_volume_of_the_corpus_is_read_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/volume");
    let entries = fs::read_dir(corpus).expect("the corpus is committed");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let documents = paths.iter().filter(|path| {
        let bytes = fs::read(path).expect("a file");
        let document = agent::config::read_document(Cursor::new(bytes));
        matches!(document, Ok(Some(document)) if types::config::NodeSpec::parse(&document).is_ok())
    });
    let valid: Vec<_> = documents.filter_map(|path| path.file_name()).collect();
    assert!(valid.contains(&std::ffi::OsStr::new("good")), "{valid:?}");
}
