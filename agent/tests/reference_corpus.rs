//! Replays the fuzz corpus of references to configurations.

use std::{fs, path::Path};

use agent::config::reference::{Facts, Reference};

#[test]
fn every_reference_of_the_corpus_is_taken_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/reference");
    let entries = fs::read_dir(corpus).expect("the corpus is committed");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let taken = paths.iter().filter(|path| {
        let bytes = fs::read(path).expect("a file");
        let serial = String::from_utf8_lossy(&bytes).into_owned();
        let facts = Facts { mac: "../@".into(), serial };
        let named = Reference::parse(&bytes);
        let url = named.as_ref().map(|named| named.url(&facts));
        assert!(url.iter().all(|url| url.is_ascii() && !url.contains(['@', ' ', '#'])));
        named.is_ok()
    });
    let taken: Vec<_> = taken.filter_map(|path| path.file_name()?.to_str()).collect();
    assert_eq!(taken, ["ended-with-zero", "http", "https-marks", "pinned", "upper-digest"]);
}
