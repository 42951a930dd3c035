//! The documents in STATE, each with a copy beside it: a disk that alters a byte of one does not give the node
//! another configuration, or none. A document that somebody wrote since is no damage: the copy knows when its
//! document was written, and a disk that alters bytes leaves that as it is. Documents without a copy, as earlier
//! releases made them, get one.
//!
//! | Bytes of the copy | Meaning                                                              |
//! |-------------------|----------------------------------------------------------------------|
//! | 0..n              | the document                                                         |
//! | n..n + 24         | the file: its inode, and when it was written (s, ns), all big-endian |
//! | n + 24..n + 56    | SHA-256 of a fixed label and of all that                             |

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::Path,
};

use sha2::{Digest, Sha256};
use types::config::MAX_CONFIG;

use super::{CLAIMED, INSTALLED};
use crate::{
    events::Event,
    init::boot::chain,
    twice::{copy_of, replace, set_aside},
};

/// What is hashed first, so that the digest is of no use elsewhere.
const LABEL: &[u8] = b"holdfast copy of a document";
const DIGEST: usize = 32;
/// Bytes that tell one writing from another.
const WRITING: usize = 24;

/// Which file was written, and when, as its file system knows.
type Written = [u8; WRITING];

/// What a file holds.
enum Found {
    Missing,
    Damaged(io::Error),
    Whole(Vec<u8>, Written),
}

/// Looks at the documents in STATE, and mends what the disk altered; told where something was. What cannot be mended
/// now is tried again at the next start.
pub fn settle(state: &Path) {
    for path in [INSTALLED, CLAIMED].map(|name| state.join(name)) {
        let reason = match settle_one(&path) {
            Ok(None) => continue,
            Ok(Some(told)) => format!("{}: {told}", path.display()),
            Err(error) => format!("{} cannot be kept twice: {}", path.display(), chain(&error)),
        };
        eprintln!("{}", Event::Trouble { place: "configuration", reason });
    }
}

/// Makes both what the one that is whole holds. Returns what there is to tell.
fn settle_one(path: &Path) -> io::Result<Option<String>> {
    let copy = copy_of(path);
    match (document(path), checked(&copy)) {
        (Found::Missing, Found::Missing) => Ok(None),
        (Found::Whole(document, written), Found::Whole(kept, then))
            if document == kept && written == then =>
        {
            Ok(None)
        }
        (Found::Whole(document, written), Found::Whole(_, then)) if written != then => {
            write_copy(&copy, &document, written).map(|()| None)
        }
        (Found::Whole(document, written), Found::Missing) => {
            write_copy(&copy, &document, written).map(|()| None)
        }
        (Found::Whole(document, written), Found::Damaged(error)) => {
            write_copy(&copy, &document, written)?;
            Ok(Some(format!("its copy is damaged, {error}, and was made anew")))
        }
        (found, Found::Whole(kept, _)) => {
            mend(path, &kept)?;
            let reason = match found {
                Found::Missing => "it was gone".to_owned(),
                Found::Damaged(error) => format!("it could not be read, {error}"),
                Found::Whole(..) => "the disk had altered it".to_owned(),
            };
            Ok(Some(format!("{reason}, and was made anew of its copy")))
        }
        // Who loads the document says what is wrong with it.
        (Found::Damaged(_), Found::Missing) => Ok(None),
        (Found::Damaged(_) | Found::Missing, Found::Damaged(error)) => Err(error),
    }
}

fn document(path: &Path) -> Found {
    match content(path, MAX_CONFIG) {
        Ok((document, written)) => Found::Whole(document, written),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Missing,
        Err(error) => Found::Damaged(error),
    }
}

fn checked(path: &Path) -> Found {
    let bytes = match content(path, MAX_CONFIG + WRITING + DIGEST) {
        Ok((bytes, _)) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Found::Missing,
        Err(error) => return Found::Damaged(error),
    };
    let parts = bytes.split_last_chunk::<DIGEST>().filter(|(all, sum)| digest(all) == **sum);
    match parts.and_then(|(all, _)| all.split_last_chunk::<WRITING>()) {
        Some((document, written)) => Found::Whole(document.to_vec(), *written),
        None => {
            let text = format!("{} has another checksum", path.display());
            Found::Damaged(io::Error::new(io::ErrorKind::InvalidData, text))
        }
    }
}

/// Reads a file of at most `most` bytes, and when it was written.
fn content(path: &Path, most: usize) -> io::Result<(Vec<u8>, Written)> {
    let file = File::open(path)?;
    let written = written(&file.metadata()?);
    let mut bytes = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > most {
        let text = format!("{} has more than {most} bytes", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok((bytes, written))
}

fn written(metadata: &fs::Metadata) -> Written {
    let mut written = [0; WRITING];
    written[..8].copy_from_slice(&metadata.ino().to_be_bytes());
    written[8..16].copy_from_slice(&metadata.mtime().to_be_bytes());
    written[16..].copy_from_slice(&metadata.mtime_nsec().to_be_bytes());
    written
}

fn digest(bytes: &[u8]) -> [u8; DIGEST] {
    Sha256::new().chain_update(LABEL).chain_update(bytes).finalize().into()
}

fn write_copy(copy: &Path, document: &[u8], written: Written) -> io::Result<()> {
    let all = [document, &written].concat();
    replace(copy, &[&all[..], &digest(&all)].concat())
}

/// Puts the document back. The copy follows, since it is of another time now.
fn mend(path: &Path, kept: &[u8]) -> io::Result<()> {
    set_aside(path)?;
    replace(path, kept)?;
    write_copy(&copy_of(path), kept, written(&fs::metadata(path)?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::path::PathBuf;

    use super::*;

    const DOCUMENT: &[u8] = b"version = 1\nname = \"rack 7\"\n";

    fn kept() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INSTALLED);
        fs::write(&path, DOCUMENT).unwrap();
        assert_eq!(settle_one(&path).unwrap(), None);
        (folder, path)
    }

    /// Alters a file as a disk does: nobody wrote to it.
    fn alter(path: &Path, bytes: &[u8]) {
        let then = fs::metadata(path).unwrap().modified().unwrap();
        fs::write(path, bytes).unwrap();
        File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
    }

    #[test]
    fn no_altered_byte_of_either_changes_the_document() {
        let copy = DOCUMENT.len() + WRITING + DIGEST;
        for at in 0..DOCUMENT.len() + copy {
            let (folder, path) = kept();
            let (file, at) = match at.checked_sub(DOCUMENT.len()) {
                None => (path.clone(), at),
                Some(at) => (copy_of(&path), at),
            };
            let mut bytes = fs::read(&file).unwrap();
            bytes[at] ^= 1 << (at % 8);
            alter(&file, &bytes);
            let told = settle_one(&path).unwrap().expect("told");
            assert!(told.contains("made anew"), "{told}");
            assert_eq!(fs::read(&path).unwrap(), DOCUMENT, "{at} of {}", file.display());
            // Both are whole again, and stay so.
            assert_eq!(settle_one(&path).unwrap(), None);
            fs::remove_file(&path).unwrap();
            assert!(settle_one(&path).unwrap().expect("told").starts_with("it was gone"));
            assert_eq!(fs::read(&path).unwrap(), DOCUMENT);
            assert_eq!(folder.path().join("holdfast.toml.damaged").exists(), file == path);
        }
    }

    #[test]
    fn what_somebody_wrote_counts_and_is_kept_twice_from_then_on() {
        let (_folder, path) = kept();
        let other = b"version = 1\nname = \"rack 8\"\n";
        replace(&path, other).unwrap();
        assert_eq!(settle_one(&path).unwrap(), None);
        assert_eq!(fs::read(&path).unwrap(), other);
        alter(&path, DOCUMENT);
        assert!(settle_one(&path).unwrap().expect("told").contains("the disk had altered it"));
        assert_eq!(fs::read(&path).unwrap(), other);
    }

    #[test]
    fn without_anything_whole_nothing_is_invented() {
        let (_folder, path) = kept();
        alter(&path, &vec![b'#'; MAX_CONFIG + 1]);
        fs::write(copy_of(&path), b"no copy").unwrap();
        assert!(settle_one(&path).is_err());
        assert_eq!(fs::metadata(&path).unwrap().len(), MAX_CONFIG as u64 + 1);
        fs::remove_file(&path).unwrap();
        assert!(settle_one(&path).is_err());
        fs::remove_file(copy_of(&path)).unwrap();
        assert_eq!(settle_one(&path).unwrap(), None);
        assert!(!path.exists());
    }
}
