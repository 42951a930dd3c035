//! Reading a partition table: whichever of its two copies is whole.
//!
//! A copy counts when all its checksums are right and it lies where it says. The first one counts before
//! the backup; what is damaged in one is never mixed with the other. Whoever had the disk before chose
//! these bytes, so nothing here trusts a number that it did not check. Writes nothing.
//!
//! Source: UEFI Specification 2.10, §5.3.2 (which copy is valid) and §5.3.3 (entries); offsets are in
//! `gpt`. As for the kernel (block/partitions/efi.c, `is_gpt_valid`), an entry has 128 bytes.

use std::{
    fmt,
    io::{self, Read, Seek, SeekFrom},
};

use super::gpt::{BlockSize, CRC, ENTRY, Uuid};

/// Most entries that are read; the specification asks for 128, and tools write up to a few hundred.
const MAX_ENTRIES: usize = 4096;
/// Bytes of the header that are known.
const HEADER: usize = 92;

/// A table as it lies on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The disk's own identity.
    pub disk: Uuid,
    /// Partitions in the order of their entries.
    pub partitions: Vec<Entry>,
}

/// A partition as it lies on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its number, from 1 on.
    pub number: usize,
    /// What it holds.
    pub kind: Uuid,
    /// Its own identity.
    pub id: Uuid,
    /// Name, as far as it is text.
    pub name: String,
    /// Where it starts, in bytes.
    pub start: u64,
    /// How long it is, in bytes: more than none, and it ends below 2^63.
    pub bytes: u64,
}

/// Why no table was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the partition table (GPT) cannot be used: its first copy {first}, and its backup {backup}"
)]
pub struct TableError {
    /// What is wrong with the copy at the start of the disk.
    pub first: Fault,
    /// And with the one at its end.
    pub backup: Fault,
}

/// What is wrong with a copy of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// There is none.
    Absent,
    /// The entries do not have the checksum that the header says.
    Entries,
    /// The header does not have its checksum, or says what no header says.
    Header,
    /// The disk cannot be read there.
    Unreadable,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "is not there",
            Self::Entries => "has altered entries (their checksum differs)",
            Self::Header => "has an altered header (its checksum differs, or it lies elsewhere)",
            Self::Unreadable => "cannot be read",
        })
    }
}

/// Reads the table of a disk with blocks of this size.
pub fn read<D: Read + Seek>(mut disk: D, block: BlockSize) -> Result<Found, TableError> {
    let unreadable = |_: io::Error| Fault::Unreadable;
    let bytes = disk.seek(SeekFrom::End(0));
    let last = bytes.map(|bytes| (bytes / block.bytes()).saturating_sub(1)).map_err(unreadable);
    let first = match copy(&mut disk, block, 1) {
        Ok(found) => return Ok(found),
        Err(fault) => fault,
    };
    // Where the disk became longer, its last block is not where the backup is; a first header says where.
    let told = header(&mut disk, block, 1).ok().map(|header| header.other);
    let places = told.map(Ok).into_iter().chain([last]);
    let mut backup = Fault::Absent;
    for place in places {
        match place.and_then(|place| copy(&mut disk, block, place)) {
            Ok(found) => return Ok(found),
            Err(fault) => backup = fault,
        }
    }
    Err(TableError { first, backup })
}

/// What a header says, as far as it is used.
struct Header {
    /// Block of the other copy's header.
    other: u64,
    disk: Uuid,
    /// Block of the first entry.
    entries: u64,
    count: usize,
    checksum: u32,
}

fn copy<D: Read + Seek>(disk: &mut D, block: BlockSize, place: u64) -> Result<Found, Fault> {
    let header = header(disk, block, place)?;
    let entries = read_at(disk, block, header.entries, header.count * ENTRY)?;
    if CRC.checksum(&entries) != header.checksum {
        return Err(Fault::Entries);
    }
    let numbered = entries.chunks_exact(ENTRY).zip(1..);
    let partitions = numbered.filter_map(|(bytes, number)| entry(bytes, number, block)).collect();
    Ok(Found { disk: header.disk, partitions })
}

fn header<D: Read + Seek>(disk: &mut D, block: BlockSize, place: u64) -> Result<Header, Fault> {
    let length = usize::try_from(block.bytes()).map_err(|_| Fault::Header)?;
    let bytes = read_at(disk, block, place, length)?;
    if !bytes.starts_with(b"EFI PART") {
        return Err(Fault::Absent);
    }
    let size = usize::try_from(u32_at(&bytes, 12)).map_err(|_| Fault::Header)?;
    let count = usize::try_from(u32_at(&bytes, 80)).map_err(|_| Fault::Header)?;
    if !(HEADER..=length).contains(&size) {
        return Err(Fault::Header);
    }
    let mut sum = CRC.digest();
    [&bytes[..16], &[0; 4], &bytes[20..size]].into_iter().for_each(|part| sum.update(part));
    let entry = usize::try_from(u32_at(&bytes, 84));
    let right = sum.finalize() == u32_at(&bytes, 16)
        && u64_at(&bytes, 24) == place
        && entry == Ok(ENTRY)
        && (1..=MAX_ENTRIES).contains(&count);
    right
        .then(|| Header {
            other: u64_at(&bytes, 32),
            disk: uuid_at(&bytes, 56),
            entries: u64_at(&bytes, 72),
            count,
            checksum: u32_at(&bytes, 88),
        })
        .ok_or(Fault::Header)
}

/// Reads an entry; `None` for one that is not used, or that no disk has.
fn entry(bytes: &[u8], number: usize, block: BlockSize) -> Option<Entry> {
    let kind = uuid_at(bytes, 0);
    let start = u64_at(bytes, 32).checked_mul(block.bytes())?;
    let end = u64_at(bytes, 40).checked_add(1)?.checked_mul(block.bytes())?;
    if kind.is_nil() || end <= start || i64::try_from(end).is_err() {
        return None;
    }
    let units = bytes[56..].chunks_exact(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]]));
    let name: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    let (id, name) = (uuid_at(bytes, 16), String::from_utf16_lossy(&name));
    Some(Entry { number, kind, id, name, start, bytes: end - start })
}

fn read_at<D: Read + Seek>(
    disk: &mut D,
    block: BlockSize,
    place: u64,
    length: usize,
) -> Result<Vec<u8>, Fault> {
    let unreadable = |_: io::Error| Fault::Unreadable;
    let at = place.checked_mul(block.bytes()).filter(|at| i64::try_from(*at).is_ok());
    disk.seek(SeekFrom::Start(at.ok_or(Fault::Header)?)).map_err(unreadable)?;
    let mut bytes = vec![0; length];
    disk.read_exact(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| bytes[at + byte])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn uuid_at(bytes: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes_le(array(bytes, at))
}
