//! One file in the top folder of an ISO 9660 volume, which BMCs' virtual media mostly are.
//! Source: ECMA-119 §8.4 (primary volume descriptor), §9.1 (directory records).
//!
//! | Field of the descriptor   | Offset | | Field of a record     | Offset  |
//! |---------------------------|--------|-|-----------------------|---------|
//! | type 1, `CD001`           | 0      | | length of the record  | 0       |
//! | volume's identifier       | 40, 32 | | first block           | 2, u32  |
//! | record of the top folder  | 156    | | length of the file    | 10, u32 |
//! |                           |        | | flags: 2 is a folder  | 25      |
//! |                           |        | | name                  | 32, 33… |

use std::io::{self, Read, Seek, SeekFrom};

/// Bytes of a block, and of a descriptor.
const BLOCK: u64 = 2048;
/// Where the primary descriptor is.
const DESCRIPTOR: u64 = 16 * BLOCK;
/// Longest top folder that is looked at, in bytes.
const MAX_FOLDER: u64 = 256 << 10;
/// Flag of a record: it is a folder.
const FOLDER: u8 = 2;

/// The file of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// There is no such volume, or it has another label.
    NotOurs,
    /// Its bytes, at most `limit` of them.
    File(Vec<u8>),
}

/// Reads the file called `name`, in any case, of the volume labelled `label`. Names are also found as discs of the first
/// level of interchange shorten them: three characters behind the dot.
///
/// Whoever can put a volume into the server chose these bytes.
pub(super) fn read(
    mut storage: impl Read + Seek,
    label: &str,
    name: &str,
    limit: u64,
) -> io::Result<Found> {
    // What cannot be read is not known to be ours.
    let head = bytes(&mut storage, DESCRIPTOR, BLOCK).unwrap_or_default();
    let is_ours = head.starts_with(b"\x01CD001")
        && head.get(40..72).is_some_and(|found| {
            let found = String::from_utf8_lossy(found);
            found.trim_end_matches([' ', '\0']).eq_ignore_ascii_case(label)
        });
    if !is_ours {
        return Ok(Found::NotOurs);
    }
    let (at, length) = head.get(156..).and_then(extent).unwrap_or_default();
    let folder = bytes(&mut storage, at, length.min(MAX_FOLDER))?;
    // A record never crosses a block; what is left of one is zero.
    let records = folder.chunks(2048).flat_map(|mut block| {
        std::iter::from_fn(move || {
            let length = usize::from(*block.first()?);
            let (record, rest) = block.split_at_checked(length).filter(|_| length > 33)?;
            block = rest;
            Some(record)
        })
    });
    let mut files = records.filter(|record| record[25] & FOLDER == 0);
    let record = files.find(|record| {
        let found = record.get(33..33 + usize::from(record[32])).unwrap_or_default();
        is_called(&String::from_utf8_lossy(found), name)
    });
    let missing = || io::Error::new(io::ErrorKind::NotFound, format!("{name} is not there"));
    let (at, length) = record.and_then(extent).ok_or_else(missing)?;
    let file = bytes(&mut storage, at, length.min(limit))?;
    if file.len() as u64 != length.min(limit) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Found::File(file))
}

/// Whether a record's name is `name`: with a version behind it, and maybe with the extension cut.
fn is_called(found: &str, name: &str) -> bool {
    let found = found.split_once(';').map_or(found, |(found, _)| found);
    let cut = name.split_once('.').map(|(stem, rest)| format!("{stem}.{rest:.3}"));
    found.eq_ignore_ascii_case(name) || cut.is_some_and(|cut| found.eq_ignore_ascii_case(&cut))
}

/// Returns where a record's file starts, and its length, in bytes.
fn extent(record: &[u8]) -> Option<(u64, u64)> {
    let field = |at: usize| Some(u64::from(u32::from_le_bytes(*record.get(at..)?.first_chunk()?)));
    Some((field(2)? * BLOCK, field(10)?))
}

/// Returns what is there of so many bytes.
fn bytes(storage: &mut (impl Read + Seek), at: u64, count: u64) -> io::Result<Vec<u8>> {
    storage.seek(SeekFrom::Start(at))?;
    let mut found = Vec::new();
    storage.take(count).read_to_end(&mut found)?;
    Ok(found)
}
