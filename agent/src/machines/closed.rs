//! What a store looked like when it was closed in order, noted beside it. One that is still the same, byte
//! for byte, needs no look at its sums by a process of its own, which takes a fifth of a second of an
//! emulated start. Whatever else happened, a power cut or a disk that alters what it holds, it differs.
//!
//! Not against attackers: whoever can write to STATE can do as they like. The sum is the standard library's
//! hasher, so another compiler's may differ, and costs one look.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hasher},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

/// Extension of the note's name: `LENGTH SUM`, the sum in hexadecimal.
const EXTENSION: &str = "closed";
/// Longest note, in bytes: two numbers of 64 bits.
const MAX_NOTE: u64 = 64;
/// Bytes that are read at once.
const PIECE: usize = 64 << 10;

/// Notes how the closed file at `path` looks, durably.
pub fn note(path: &Path) -> io::Result<()> {
    let text = sum(path)?;
    let note = path.with_extension(EXTENSION);
    let unfinished = path.with_extension("closing");
    let mut file = File::create(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, &note)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Whether the file at `path` is what it was when it was closed. Anything that cannot be read says no.
pub fn is_unchanged(path: &Path) -> bool {
    let noted = File::open(noted(path)).and_then(|file| {
        let mut text = String::new();
        file.take(MAX_NOTE).read_to_string(&mut text).map(|_| text)
    });
    matches!((noted, sum(path)), (Ok(noted), Ok(sum)) if noted == sum)
}

fn noted(path: &Path) -> PathBuf {
    path.with_extension(EXTENSION)
}

fn sum(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let (mut hasher, mut length, mut piece) = (DefaultHasher::new(), 0_u64, vec![0; PIECE]);
    loop {
        let count = match file.read(&mut piece) {
            Ok(0) => return Ok(format!("{length} {:016x}", hasher.finish())),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hasher.write(&piece[..count]);
        length += count as u64;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn a_file_that_changed_in_any_way_is_not_what_was_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.redb");
        let bytes: Vec<u8> = (0..150_000_u32).map(|at| at.to_le_bytes()[0]).collect();
        fs::write(&path, &bytes).unwrap();
        assert!(!is_unchanged(&path), "nothing was noted");
        note(&path).unwrap();
        assert!(is_unchanged(&path));
        for at in [0, PIECE - 1, PIECE, bytes.len() - 1] {
            let mut altered = bytes.clone();
            altered[at] ^= 1;
            fs::write(&path, altered).unwrap();
            assert!(!is_unchanged(&path), "byte {at}");
        }
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(!is_unchanged(&path));
        fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
        assert!(!is_unchanged(&path));
        fs::write(&path, &bytes).unwrap();
        assert!(is_unchanged(&path));
        for bad in [&b""[..], b"150000 ", b"\xff\xfe", &[b'1'; 200]] {
            fs::write(noted(&path), bad).unwrap();
            assert!(!is_unchanged(&path), "{bad:?}");
        }
        note(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!is_unchanged(&path));
    }
}
