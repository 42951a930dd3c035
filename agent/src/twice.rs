//! Short secrets on STATE that nobody could make anew: each in a file that holds nothing else, and in a
//! copy beside it with a digest, by which a damaged one is known and mended. Files without a copy, as
//! earlier releases made them, get one.
//!
//! | Bytes of the copy | Meaning                              |
//! |-------------------|--------------------------------------|
//! | 0..n              | what the file holds                  |
//! | n..n + 32         | SHA-256 of a fixed label and of that |

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::events::Event;

/// What is hashed before a secret, so that the digest is of no use elsewhere.
const LABEL: &[u8] = b"holdfast copy of a secret";
/// Bytes of a digest.
const DIGEST: usize = 32;

/// End of the name of what is not yet whole, and of what was damaged.
const NEW: &str = ".new";
const DAMAGED: &str = ".damaged";

/// What a file holds.
enum Found<const N: usize> {
    Missing,
    Damaged(io::Error),
    Whole(Zeroizing<[u8; N]>),
}

/// Reads the secret at `path`; `None` when there is none. A damaged file is set aside as `….damaged` and
/// made anew of its copy, a damaged copy of its file, and both are said.
///
/// Fails when neither is whole: then nothing is changed.
pub fn read<const N: usize>(path: &Path) -> io::Result<Option<Zeroizing<[u8; N]>>> {
    match (whole(path), checked(&copy_of(path))) {
        (Found::Missing, Found::Missing) => Ok(None),
        (Found::Whole(secret), Found::Whole(copy)) if secret == copy => Ok(Some(secret)),
        (Found::Whole(secret), Found::Missing) => {
            tell_failure(path, write_copy(path, &secret));
            Ok(Some(secret))
        }
        (Found::Whole(secret), Found::Damaged(error)) => {
            tell(&copy_of(path), &format!("{error}; made anew of {}", path.display()));
            tell_failure(path, write_copy(path, &secret));
            Ok(Some(secret))
        }
        (found, Found::Whole(copy)) => {
            let reason = match found {
                Found::Missing => "it is gone".to_owned(),
                Found::Damaged(error) => error.to_string(),
                Found::Whole(_) => "it is not what its copy holds".to_owned(),
            };
            tell(path, &format!("{reason}; mended by its copy"));
            tell_failure(path, mend(path, &copy));
            Ok(Some(copy))
        }
        (Found::Damaged(error), _) | (Found::Missing, Found::Damaged(error)) => Err(error),
    }
}

/// Writes a new secret, durable when this returns. The file comes first: where a cut leaves no copy, the
/// next reader makes one.
pub fn write<const N: usize>(path: &Path, secret: &[u8; N]) -> io::Result<()> {
    replace(path, secret)?;
    write_copy(path, secret)
}

/// Where the copy is.
pub fn copy_of(path: &Path) -> PathBuf {
    with_end(path, ".copy")
}

/// Every file that may hold the secret at `path`, the copy first and the secret itself last.
pub fn all_of(path: &Path) -> [PathBuf; 5] {
    let copy = copy_of(path);
    [with_end(&copy, NEW), copy, with_end(path, NEW), with_end(path, DAMAGED), path.to_owned()]
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    PathBuf::from(name)
}

fn digest(secret: &[u8]) -> [u8; DIGEST] {
    Sha256::new().chain_update(LABEL).chain_update(secret).finalize().into()
}

fn whole<const N: usize>(path: &Path) -> Found<N> {
    let bytes = match content(path, N) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Found::Missing,
        Err(error) => return Found::Damaged(error),
    };
    match <[u8; N]>::try_from(bytes.as_slice()) {
        Ok(secret) => Found::Whole(Zeroizing::new(secret)),
        Err(_) => Found::Damaged(length(path, bytes.len(), N)),
    }
}

fn checked<const N: usize>(path: &Path) -> Found<N> {
    let bytes = match content(path, N + DIGEST) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Found::Missing,
        Err(error) => return Found::Damaged(error),
    };
    let Some((secret, sum)) = bytes.split_first_chunk::<N>() else {
        return Found::Damaged(length(path, bytes.len(), N + DIGEST));
    };
    match sum == digest(secret) {
        true => Found::Whole(Zeroizing::new(*secret)),
        false => Found::Damaged(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} has another checksum", path.display()),
        )),
    }
}

/// Reads a file, and one byte more than there should be.
fn content(path: &Path, length: usize) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(length + 1));
    File::open(path)?.take(length as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn length(path: &Path, found: usize, wanted: usize) -> io::Error {
    let text = format!("{} has {found} bytes instead of {wanted}", path.display());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn mend<const N: usize>(path: &Path, secret: &[u8; N]) -> io::Result<()> {
    set_aside(path)?;
    replace(path, secret)
}

/// Keeps a damaged file under another name, if it is there at all.
pub(crate) fn set_aside(path: &Path) -> io::Result<()> {
    match fs::rename(path, with_end(path, DAMAGED)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Err(_) | Ok(()) => Ok(()),
    }
}

fn write_copy<const N: usize>(path: &Path, secret: &[u8; N]) -> io::Result<()> {
    let bytes = Zeroizing::new([secret.as_slice(), &digest(secret)].concat());
    replace(&copy_of(path), &bytes)
}

/// Replaces a file in one step; durable when this returns.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let unfinished = with_end(path, NEW);
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

fn tell(path: &Path, reason: &str) {
    let reason = format!("{}: {reason}", path.display());
    eprintln!("{}", Event::Trouble { place: "state", reason });
}

/// What cannot be mended now is tried again at the next start; the secret is known all the same.
fn tell_failure(path: &Path, done: io::Result<()>) {
    if let Err(error) = done {
        tell(path, &format!("cannot be kept twice: {error}"));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    const SECRET: [u8; 32] = [7; 32];

    fn kept() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.key");
        write(&path, &SECRET).unwrap();
        (folder, path)
    }

    fn found(path: &Path) -> [u8; 32] {
        *read::<32>(path).unwrap().unwrap()
    }

    #[test]
    fn no_altered_byte_of_either_changes_the_secret() {
        for at in 0..32 + 64 {
            let (folder, path) = kept();
            let (file, at) = if at < 32 { (path.clone(), at) } else { (copy_of(&path), at - 32) };
            let mut bytes = fs::read(&file).unwrap();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&file, bytes).unwrap();
            assert_eq!(found(&path), SECRET, "{at} of {}", file.display());
            // Both are whole again, and what was damaged is kept.
            assert_eq!(fs::read(&path).unwrap(), SECRET);
            fs::remove_file(&path).unwrap();
            assert_eq!(found(&path), SECRET);
            assert_eq!(folder.path().join("node.key.damaged").exists(), file == path);
        }
    }

    #[test]
    fn files_of_any_other_length_are_mended_and_those_without_a_copy_get_one() {
        let (_folder, path) = kept();
        for bytes in [vec![], vec![7; 31], vec![7; 33]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(found(&path), SECRET);
        }
        fs::remove_file(copy_of(&path)).unwrap();
        assert_eq!(found(&path), SECRET);
        assert!(copy_of(&path).exists());
        fs::write(copy_of(&path), [7; 64]).unwrap();
        assert_eq!(found(&path), SECRET);
    }

    #[test]
    fn without_anything_whole_nothing_is_invented() {
        let (_folder, path) = kept();
        fs::write(&path, [1; 31]).unwrap();
        fs::write(copy_of(&path), [1; 64]).unwrap();
        assert!(read::<32>(&path).is_err());
        fs::remove_file(&path).unwrap();
        assert!(read::<32>(&path).is_err());
        fs::remove_file(copy_of(&path)).unwrap();
        assert!(read::<32>(&path).unwrap().is_none());
    }
}
