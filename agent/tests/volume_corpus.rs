//! Replays the fuzz corpora of the configuration volume, and of volumes that are labelled as one.

use std::{collections::BTreeMap, fs, io::Cursor, path::Path};

use agent::config::labels::{self, FileSystem};

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
    assert_eq!(valid, ["chain-loop", "good", "iso", "iso-folder-too-long", "iso-level-1"]);
}

#[test]
fn labels_of_the_corpus_are_read() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/label");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        let entry = entry.expect("an entry");
        let bytes = fs::read(entry.path()).expect("a file");
        let label = labels::read(Cursor::new(bytes)).expect("memory can be read");
        found.insert(entry.file_name().to_string_lossy().into_owned(), label);
    }
    let label = |name: &str| found[name].as_ref().map(|(kind, label)| (*kind, label.as_str()));
    assert_eq!(label("exfat"), Some((FileSystem::ExFat, "holdfast")));
    assert_eq!(label("exfat-other"), Some((FileSystem::ExFat, "Photos")));
    assert_eq!(label("ext4"), Some((FileSystem::Ext, "HOLDFAST")));
    assert_eq!(label("ntfs"), Some((FileSystem::Ntfs, "Holdfast")));
    assert_eq!(label("fat16"), Some((FileSystem::Fat, "HOLDFAST")));
    assert_eq!(label("fat32-no-fsinfo"), Some((FileSystem::Fat, "HOLDFAST")));
    assert_eq!(label("fat32-small"), Some((FileSystem::Fat, "HOLDFAST")));
    let broken = ["ntfs-no-length", "ntfs-content-too-long", "ntfs-attributes-outside", "short"];
    assert_eq!(broken.map(label), [None; 4]);
    assert_eq!(["exfat-shifts", "exfat-root-0", "nothing"].map(label), [None; 3]);
}
