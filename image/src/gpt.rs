//! The partition table of `holdfast.img`.
//!
//! Pure: it says which bytes go where; writing them is left to `disk`.
//! Source: UEFI Specification 2.10, §5.2.3 (protective MBR) and §5.3 (GPT).
//!
//! | Field of the header    | Offset  | | Field of an entry (128 bytes) | Offset   |
//! |------------------------|---------|-|-------------------------------|----------|
//! | `EFI PART`             | 0       | | type GUID                     | 0        |
//! | revision 1.0           | 8       | | unique GUID                   | 16       |
//! | header size (92)       | 12      | | first block                   | 32       |
//! | CRC of the header      | 16      | | last block, inclusive         | 40       |
//! | this header's block    | 24      | | attributes                    | 48       |
//! | the other one's block  | 32      | | name, UTF-16LE                | 56       |
//! | first, last usable     | 40, 48  | |                               |          |
//! | disk GUID              | 56      | |                               |          |
//! | entries' block         | 72      | |                               |          |
//! | entries, size of one   | 80, 84  | |                               |          |
//! | CRC of the entries     | 88      | |                               |          |

use crc::{CRC_32_ISO_HDLC, Crc};
pub use uuid::Uuid;

/// Bytes in a block.
pub const BLOCK: u64 = 512;
/// Partitions start at multiples of this many blocks (1 MiB): right for every flash and RAID size.
pub const ALIGNMENT: u64 = 2048;
/// Entries in the table; the specification asks for room for at least 16 KiB, that is 128.
const ENTRIES: usize = 128;
/// Bytes of an entry.
const ENTRY: usize = 128;
/// Blocks that the entries take.
const ENTRY_BLOCKS: u64 = (ENTRIES * ENTRY) as u64 / BLOCK;
const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);

/// EFI system partition.
pub const TYPE_ESP: Uuid = Uuid::from_u128(0xc12a7328_f81f_11d2_ba4b_00a0c93ec93b);
/// Linux file system data.
pub const TYPE_LINUX: Uuid = Uuid::from_u128(0x0fc63daf_8483_4772_8e79_3d69d8477de4);

/// One partition to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// What it holds.
    pub kind: Uuid,
    /// Its own identity.
    pub id: Uuid,
    /// Name, at most 36 UTF-16 units.
    pub name: &'static str,
    /// Length in blocks, a multiple of `ALIGNMENT`.
    pub blocks: u64,
}

/// A table with every partition in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The disk's own identity.
    pub disk: Uuid,
    /// Partitions with their first blocks.
    pub placed: Vec<(u64, Partition)>,
    /// Length of the whole disk in blocks.
    pub blocks: u64,
}

/// Why partitions cannot be laid out.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum GptError {
    #[error(
        "the partition {name} has {blocks} blocks; it must have a positive multiple of {ALIGNMENT}"
    )]
    Unaligned { name: &'static str, blocks: u64 },
    #[error("the partition name {0} is longer than 36 UTF-16 units")]
    LongName(&'static str),
    #[error("{0} partitions do not fit into {ENTRIES} entries")]
    TooMany(usize),
}

impl Table {
    /// Places `partitions` one after the other from the first aligned block on.
    pub fn new(disk: Uuid, partitions: Vec<Partition>) -> Result<Self, GptError> {
        if partitions.len() > ENTRIES {
            return Err(GptError::TooMany(partitions.len()));
        }
        let mut next = ALIGNMENT;
        let mut placed = Vec::new();
        for partition in partitions {
            if partition.blocks == 0 || !partition.blocks.is_multiple_of(ALIGNMENT) {
                return Err(GptError::Unaligned { name: partition.name, blocks: partition.blocks });
            }
            if partition.name.encode_utf16().count() > 36 {
                return Err(GptError::LongName(partition.name));
            }
            let first = next;
            next += partition.blocks;
            placed.push((first, partition));
        }
        Ok(Self {
            disk,
            placed,
            // The backup table needs 33 blocks; a whole unit keeps the disk's size round.
            blocks: next + ALIGNMENT,
        })
    }

    /// What to write: byte offsets with their bytes, in ascending order.
    pub fn writes(&self) -> Vec<(u64, Vec<u8>)> {
        let entries = self.entries();
        let backup = self.blocks - 1;
        vec![
            (0, self.protective_mbr()),
            (BLOCK, self.header(1, backup, 2, &entries)),
            (2 * BLOCK, entries.clone()),
            ((backup - ENTRY_BLOCKS) * BLOCK, entries.clone()),
            (backup * BLOCK, self.header(backup, 1, backup - ENTRY_BLOCKS, &entries)),
        ]
    }

    fn entries(&self) -> Vec<u8> {
        let mut bytes = vec![0; ENTRIES * ENTRY];
        for ((first, partition), entry) in self.placed.iter().zip(bytes.chunks_mut(ENTRY)) {
            entry[..16].copy_from_slice(&partition.kind.to_bytes_le());
            entry[16..32].copy_from_slice(&partition.id.to_bytes_le());
            entry[32..40].copy_from_slice(&first.to_le_bytes());
            entry[40..48].copy_from_slice(&(first + partition.blocks - 1).to_le_bytes());
            for (unit, slot) in partition.name.encode_utf16().zip(entry[56..].chunks_mut(2)) {
                slot.copy_from_slice(&unit.to_le_bytes());
            }
        }
        bytes
    }

    fn header(&self, own: u64, other: u64, entries_at: u64, entries: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        bytes[..8].copy_from_slice(b"EFI PART");
        bytes[8..12].copy_from_slice(&0x0001_0000_u32.to_le_bytes());
        bytes[12..16].copy_from_slice(&92_u32.to_le_bytes());
        bytes[24..32].copy_from_slice(&own.to_le_bytes());
        bytes[32..40].copy_from_slice(&other.to_le_bytes());
        bytes[40..48].copy_from_slice(&(2 + ENTRY_BLOCKS).to_le_bytes());
        bytes[48..56].copy_from_slice(&(self.blocks - ENTRY_BLOCKS - 2).to_le_bytes());
        bytes[56..72].copy_from_slice(&self.disk.to_bytes_le());
        bytes[72..80].copy_from_slice(&entries_at.to_le_bytes());
        bytes[80..84].copy_from_slice(&128_u32.to_le_bytes());
        bytes[84..88].copy_from_slice(&128_u32.to_le_bytes());
        bytes[88..92].copy_from_slice(&CRC.checksum(entries).to_le_bytes());
        let sum = CRC.checksum(&bytes[..92]);
        bytes[16..20].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn protective_mbr(&self) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        let length = u32::try_from(self.blocks - 1).unwrap_or(u32::MAX);
        bytes[446..454].copy_from_slice(&[0x00, 0x00, 0x02, 0x00, 0xee, 0xff, 0xff, 0xff]);
        bytes[454..458].copy_from_slice(&1_u32.to_le_bytes());
        bytes[458..462].copy_from_slice(&length.to_le_bytes());
        bytes[510..].copy_from_slice(&[0x55, 0xaa]);
        bytes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;
    use std::io::Cursor;

    fn partition(name: &'static str, blocks: u64) -> Partition {
        Partition { kind: TYPE_LINUX, id: Uuid::from_u128(u128::from(blocks)), name, blocks }
    }

    fn image(table: &Table) -> Vec<u8> {
        let mut image = vec![0; usize::try_from(table.blocks * BLOCK).unwrap()];
        for (offset, bytes) in table.writes() {
            let start = usize::try_from(offset).unwrap();
            image[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        image
    }

    #[test]
    fn another_reader_finds_the_same_partitions() {
        let disk = Uuid::from_u128(7);
        let table =
            Table::new(disk, vec![partition("state", 4096), partition("data", 2048)]).unwrap();
        let read = ::gpt::GptConfig::new()
            .writable(false)
            .open_from_device(Cursor::new(image(&table)))
            .unwrap();
        let found: Vec<_> = read
            .partitions()
            .values()
            .map(|p| (p.name.clone(), p.first_lba, p.last_lba, p.part_guid))
            .collect();
        assert_eq!(read.guid(), &disk);
        assert_eq!(
            found,
            [
                ("state".to_owned(), 2048, 6143, Uuid::from_u128(4096)),
                ("data".to_owned(), 6144, 8191, Uuid::from_u128(2048)),
            ]
        );
    }

    #[test]
    fn the_backup_alone_is_enough() {
        let table = Table::new(Uuid::from_u128(7), vec![partition("state", 4096)]).unwrap();
        let mut image = image(&table);
        image[512..1024].fill(0);
        let read = ::gpt::GptConfig::new()
            .writable(false)
            .only_valid_headers(false)
            .open_from_device(Cursor::new(image))
            .unwrap();
        assert_eq!(read.partitions().len(), 1);
    }

    #[test]
    fn a_crooked_length_is_refused() {
        assert_eq!(
            Table::new(Uuid::nil(), vec![partition("x", 2049)]),
            Err(GptError::Unaligned { name: "x", blocks: 2049 })
        );
    }
}
