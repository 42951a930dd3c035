//! Replays the fuzz corpora of what the disk's encryption reads: headers, signatures, a TPM's answers.

use std::{fs, path::Path};

use agent::seal::{luks, signature, tpm::wire};

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let entries = fs::read_dir(folder).expect("the corpus is committed");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let read = |path: std::path::PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read(path).expect("a file"))
    };
    paths.map(read).collect()
}

/// The names of those that are understood, in order.
fn understood(target: &str, read: impl Fn(&[u8]) -> bool) -> Vec<String> {
    let all = corpus(target).into_iter();
    let mut names: Vec<_> = all.filter(|(_, bytes)| read(bytes)).map(|(name, _)| name).collect();
    names.sort();
    names
}

#[test]
fn headers() {
    assert_eq!(understood("luks_header", luks::everything), ["cryptsetup-4096", "slot-outside"]);
}

#[test]
fn signatures() {
    assert_eq!(understood("pcr_signature", |bytes| signature::everything(bytes) > 0), ["signed"]);
}

#[test]
fn answers() {
    let found = understood("tpm_answer", wire::everything);
    assert_eq!(found, ["refused", "session", "session-short", "storage-key"]);
}
