//! The label of a volume that the node cannot read, so that one that is meant for it is told and not passed over:
//! exFAT, ext2 to ext4, NTFS, and a FAT that is damaged. Reads a few sectors and changes nothing.
//!
//! Sources: Microsoft, "exFAT file system specification" §3.1 (boot sector), §7.3 (volume label); the kernel's
//! fs/ext4/ext4.h (`struct ext4_super_block`); Microsoft, "FAT32 File System Specification" 1.03 (BPB); NTFS as
//! the kernel's fs/ntfs3/ntfs.h has it.
//!
//! | File system | Sign               | Label                                                     |
//! |-------------|--------------------|-----------------------------------------------------------|
//! | exFAT       | 3: `EXFAT   `      | entry 0x83 of the root directory: length 1, UTF-16        |
//! | ext         | 1080: 0xef53       | 1144, 16 bytes                                            |
//! | NTFS        | 3: `NTFS    `      | record 3 of the MFT, attribute 0x60: UTF-16               |
//! | FAT32       | 82: `FAT32   `     | 71, 11 bytes                                              |
//! | FAT12, 16   | 54: `FAT`          | 43, 11 bytes                                              |

use std::{
    fmt,
    io::{self, Read, Seek, SeekFrom},
};

/// Bytes of a volume's first sectors, which say what it is.
const HEAD: usize = 2048;
/// Most bytes of a directory or of a record that are looked at.
const MAX_BYTES: u64 = 64 << 10;
/// Bytes of an entry of an exFAT directory.
const ENTRY: usize = 32;

/// A file system that the node does not read a configuration from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// exFAT.
    ExFat,
    /// ext2, ext3 or ext4.
    Ext,
    /// FAT, but for what is wrong with it.
    Fat,
    /// NTFS.
    Ntfs,
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ExFat => "exFAT",
            Self::Ext => "ext4",
            Self::Fat => "a FAT that is damaged or not as the specification wants it",
            Self::Ntfs => "NTFS",
        })
    }
}

/// Returns what file system is on `storage`, and its label. `None` when it is none of these.
///
/// Whoever can put a volume into the server chose these bytes.
pub fn read(mut storage: impl Read + Seek) -> io::Result<Option<(FileSystem, String)>> {
    let head = bytes(&mut storage, 0, HEAD as u64)?;
    let named = |at: usize, name: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(name));
    let plain = |at: usize, length: usize| {
        let text = head.get(at..at + length).unwrap_or_default();
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        String::from_utf8_lossy(&text[..end]).trim_end().to_owned()
    };
    Ok(if named(3, b"EXFAT   ") {
        exfat(&mut storage, &head)?.map(|label| (FileSystem::ExFat, label))
    } else if named(3, b"NTFS    ") {
        ntfs(&mut storage, &head)?.map(|label| (FileSystem::Ntfs, label))
    } else if named(82, b"FAT32   ") {
        Some((FileSystem::Fat, plain(71, 11)))
    } else if named(54, b"FAT") {
        Some((FileSystem::Fat, plain(43, 11)))
    } else if named(1080, &0xef53_u16.to_le_bytes()) {
        Some((FileSystem::Ext, plain(1144, 16)))
    } else {
        None
    })
}

/// The label in the root directory: its first cluster is looked at, where tools put the label first.
fn exfat(storage: &mut (impl Read + Seek), head: &[u8]) -> io::Result<Option<String>> {
    let place = || {
        let sector = 1_u64.checked_shl(u32::from(*head.get(108)?).min(63))?;
        let cluster = sector.checked_mul(1_u64.checked_shl(u32::from(*head.get(109)?).min(63))?)?;
        let heap = u64::from(u32_at(head, 88)?).checked_mul(sector)?;
        let root = u64::from(u32_at(head, 96)?).checked_sub(2)?.checked_mul(cluster)?;
        Some((heap.checked_add(root)?, cluster))
    };
    let Some((at, cluster)) = place() else { return Ok(None) };
    let folder = bytes(storage, at, cluster.min(MAX_BYTES))?;
    let mut entries = folder.chunks_exact(ENTRY).take_while(|entry| entry[0] != 0);
    let label = entries.find(|entry| entry[0] == 0x83);
    Ok(label.map(|entry| utf16(&entry[2..2 + 2 * usize::from(entry[1]).min(11)])))
}

/// The content of attribute `$VOLUME_NAME` of the file `$Volume`, which lies in its record.
fn ntfs(storage: &mut (impl Read + Seek), head: &[u8]) -> io::Result<Option<String>> {
    let place = || {
        let sector = u64::from(u16_at(head, 11)?);
        let cluster = sector.checked_mul(u64::from(*head.get(13)?))?;
        // Clusters, or what power of two of bytes with a sign.
        let record = match head.get(64)?.cast_signed() {
            clusters @ 0.. => cluster.checked_mul(u64::from(clusters.unsigned_abs()))?,
            power => 1_u64.checked_shl(u32::from(power.unsigned_abs()).min(63))?,
        };
        let table = u64::from_le_bytes(*head.get(48..)?.first_chunk()?).checked_mul(cluster)?;
        Some((table.checked_add(record.checked_mul(3)?)?, record))
    };
    let Some((at, length)) = place() else { return Ok(None) };
    let record = bytes(storage, at, length.min(MAX_BYTES))?;
    let label = || {
        let mut rest = record.get(usize::from(u16_at(&record, 20)?)..)?;
        while record.starts_with(b"FILE") && u32_at(rest, 0)? != u32::MAX {
            let length = usize::try_from(u32_at(rest, 4)?).ok().filter(|length| *length >= 24)?;
            if u32_at(rest, 0)? == 0x60 && *rest.get(8)? == 0 {
                let (length, at) = (u32_at(rest, 16)?, usize::from(u16_at(rest, 20)?));
                return rest.get(at..at.checked_add(usize::try_from(length).ok()?)?).map(utf16);
            }
            rest = rest.get(length..)?;
        }
        None
    };
    Ok(label())
}

/// Returns what is there of so many bytes.
fn bytes(storage: &mut (impl Read + Seek), at: u64, count: u64) -> io::Result<Vec<u8>> {
    storage.seek(SeekFrom::Start(at))?;
    let mut found = Vec::new();
    storage.take(count).read_to_end(&mut found)?;
    Ok(found)
}

fn utf16(bytes: &[u8]) -> String {
    let units = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    char::decode_utf16(units.take_while(|unit| *unit != 0))
        .map(|c| c.unwrap_or('\u{fffd}'))
        .collect()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}
