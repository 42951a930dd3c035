//! A partition table, as it is written to a new disk.
//!
//! Pure: it says which bytes go where; writing them is left to whoever has the disk.
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

/// Partitions start and end at multiples of this many bytes: right for every flash and RAID size.
pub const ALIGNMENT: u64 = 1 << 20;
/// Entries in the table; the specification asks for room for at least 16 KiB, that is 128.
const ENTRIES: usize = 128;
/// Bytes of an entry.
pub(super) const ENTRY: usize = 128;
/// Bytes that all entries take.
const ENTRY_BYTES: u64 = (ENTRIES * ENTRY) as u64;
pub(super) const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);

/// EFI system partition.
pub const TYPE_ESP: Uuid = Uuid::from_u128(0xc12a7328_f81f_11d2_ba4b_00a0c93ec93b);
/// Linux file system data.
pub const TYPE_LINUX: Uuid = Uuid::from_u128(0x0fc63daf_8483_4772_8e79_3d69d8477de4);

/// How long a disk's logical blocks are, in which its table counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockSize {
    /// 512 bytes: disk images, and most disks.
    B512,
    /// 4,096 bytes: NVMe and SAS disks formatted so.
    B4096,
}

impl BlockSize {
    /// Returns the length in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::B512 => 512,
            Self::B4096 => 4096,
        }
    }

    /// Returns the size that is `bytes` long; `None` for lengths that no disk has.
    pub const fn from_bytes(bytes: u64) -> Option<Self> {
        match bytes {
            512 => Some(Self::B512),
            4096 => Some(Self::B4096),
            _ => None,
        }
    }
}

/// One partition to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// What it holds.
    pub kind: Uuid,
    /// Its own identity.
    pub id: Uuid,
    /// Name, at most 36 UTF-16 units.
    pub name: &'static str,
    /// Length in bytes, a positive multiple of [`ALIGNMENT`].
    pub bytes: u64,
}

/// A table with every partition in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The disk's own identity.
    pub disk: Uuid,
    /// Partitions with the bytes at which they start.
    pub placed: Vec<(u64, Partition)>,
    /// Length of the whole disk in bytes.
    pub bytes: u64,
    block: BlockSize,
}

/// Why partitions cannot be laid out.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum GptError {
    #[error(
        "the partition {name} has {bytes} bytes; it must have a positive multiple of {ALIGNMENT}"
    )]
    Unaligned { name: &'static str, bytes: u64 },
    #[error("the partition name {0} is longer than 36 UTF-16 units")]
    LongName(&'static str),
    #[error("{0} partitions do not fit into {ENTRIES} entries")]
    TooMany(usize),
    #[error(
        "the disk has {bytes} bytes, which {wanted} bytes of partitions and tables do not fit into"
    )]
    DiskTooSmall { bytes: u64, wanted: u64 },
    #[error("the disk has {bytes} bytes, which are no whole blocks of {block}")]
    PartOfBlock { bytes: u64, block: u64 },
}

impl Table {
    /// Places `partitions` one after the other from the first aligned byte on, on a disk that is
    /// just large enough.
    pub fn new(disk: Uuid, block: BlockSize, partitions: Vec<Partition>) -> Result<Self, GptError> {
        if partitions.len() > ENTRIES {
            return Err(GptError::TooMany(partitions.len()));
        }
        let mut next = ALIGNMENT;
        let mut placed = Vec::new();
        for partition in partitions {
            if partition.bytes == 0 || !partition.bytes.is_multiple_of(ALIGNMENT) {
                return Err(GptError::Unaligned { name: partition.name, bytes: partition.bytes });
            }
            if partition.name.encode_utf16().count() > 36 {
                return Err(GptError::LongName(partition.name));
            }
            let first = next;
            next += partition.bytes;
            placed.push((first, partition));
        }
        // The backup table is shorter; a whole unit keeps the disk's size round.
        Ok(Self { disk, placed, bytes: next + ALIGNMENT, block })
    }

    /// Says that the disk has `bytes`, so that the backup table goes to its end.
    pub fn on_disk_of(self, bytes: u64) -> Result<Self, GptError> {
        let block = self.block.bytes();
        if !bytes.is_multiple_of(block) {
            return Err(GptError::PartOfBlock { bytes, block });
        }
        if bytes < self.bytes {
            return Err(GptError::DiskTooSmall { bytes, wanted: self.bytes });
        }
        Ok(Self { bytes, ..self })
    }

    /// What to write: byte offsets with their bytes, in ascending order.
    pub fn writes(&self) -> Vec<(u64, Vec<u8>)> {
        let block = self.block.bytes();
        let entries = self.entries();
        let backup = self.last_block();
        let backup_entries = backup - ENTRY_BYTES / block;
        vec![
            (0, self.protective_mbr()),
            (block, self.header(1, backup, 2, &entries)),
            (2 * block, entries.clone()),
            (backup_entries * block, entries.clone()),
            (backup * block, self.header(backup, 1, backup_entries, &entries)),
        ]
    }

    fn last_block(&self) -> u64 {
        self.bytes / self.block.bytes() - 1
    }

    fn entries(&self) -> Vec<u8> {
        let block = self.block.bytes();
        let mut bytes = vec![0; ENTRIES * ENTRY];
        for ((start, partition), entry) in self.placed.iter().zip(bytes.chunks_mut(ENTRY)) {
            let (first, last) = (start / block, (start + partition.bytes) / block - 1);
            entry[..16].copy_from_slice(&partition.kind.to_bytes_le());
            entry[16..32].copy_from_slice(&partition.id.to_bytes_le());
            entry[32..40].copy_from_slice(&first.to_le_bytes());
            entry[40..48].copy_from_slice(&last.to_le_bytes());
            for (unit, slot) in partition.name.encode_utf16().zip(entry[56..].chunks_mut(2)) {
                slot.copy_from_slice(&unit.to_le_bytes());
            }
        }
        bytes
    }

    fn header(&self, own: u64, other: u64, entries_at: u64, entries: &[u8]) -> Vec<u8> {
        let block = self.block.bytes();
        let entry_blocks = ENTRY_BYTES / block;
        let mut bytes = vec![0; if block == 512 { 512 } else { 4096 }];
        bytes[..8].copy_from_slice(b"EFI PART");
        bytes[8..12].copy_from_slice(&0x0001_0000_u32.to_le_bytes());
        bytes[12..16].copy_from_slice(&92_u32.to_le_bytes());
        bytes[24..32].copy_from_slice(&own.to_le_bytes());
        bytes[32..40].copy_from_slice(&other.to_le_bytes());
        bytes[40..48].copy_from_slice(&(2 + entry_blocks).to_le_bytes());
        bytes[48..56].copy_from_slice(&(self.last_block() - entry_blocks - 1).to_le_bytes());
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
        let length = u32::try_from(self.last_block()).unwrap_or(u32::MAX);
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
    use std::io::Cursor;

    use ::gpt::{GptConfig, disk::LogicalBlockSize};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn partition(name: &'static str, mib: u64) -> Partition {
        Partition { kind: TYPE_LINUX, id: Uuid::from_u128(u128::from(mib)), name, bytes: mib * MIB }
    }

    fn image(table: &Table) -> Vec<u8> {
        let mut image = vec![0; usize::try_from(table.bytes).unwrap()];
        for (offset, bytes) in table.writes() {
            let start = usize::try_from(offset).unwrap();
            image[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        image
    }

    #[test]
    fn another_reader_finds_the_same_partitions() {
        let disk = Uuid::from_u128(7);
        for (block, size) in [
            (BlockSize::B512, LogicalBlockSize::Lb512),
            (BlockSize::B4096, LogicalBlockSize::Lb4096),
        ] {
            let partitions = vec![partition("state", 2), partition("data", 1)];
            let table = Table::new(disk, block, partitions).unwrap().on_disk_of(7 * MIB).unwrap();
            let read = GptConfig::new()
                .writable(false)
                .logical_block_size(size)
                .open_from_device(Cursor::new(image(&table)))
                .unwrap();
            let unit = block.bytes();
            let found: Vec<_> = read
                .partitions()
                .values()
                .map(|p| (p.name.clone(), p.first_lba * unit, (p.last_lba + 1) * unit, p.part_guid))
                .collect();
            assert_eq!(read.guid(), &disk);
            assert_eq!(
                found,
                [
                    ("state".to_owned(), MIB, 3 * MIB, Uuid::from_u128(2)),
                    ("data".to_owned(), 3 * MIB, 4 * MIB, Uuid::from_u128(1)),
                ]
            );
        }
    }

    #[test]
    fn the_backup_alone_is_enough() {
        let table =
            Table::new(Uuid::from_u128(7), BlockSize::B512, vec![partition("state", 2)]).unwrap();
        let mut image = image(&table);
        image[512..1024].fill(0);
        let read = GptConfig::new()
            .writable(false)
            .only_valid_headers(false)
            .open_from_device(Cursor::new(image))
            .unwrap();
        assert_eq!(read.partitions().len(), 1);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let crooked = Partition { bytes: MIB + 512, ..partition("x", 1) };
        assert_eq!(
            Table::new(Uuid::nil(), BlockSize::B512, vec![crooked]),
            Err(GptError::Unaligned { name: "x", bytes: MIB + 512 })
        );
        let table = Table::new(Uuid::nil(), BlockSize::B4096, vec![partition("x", 1)]).unwrap();
        assert_eq!(
            table.clone().on_disk_of(2 * MIB),
            Err(GptError::DiskTooSmall { bytes: 2 * MIB, wanted: 3 * MIB })
        );
        assert_eq!(
            table.on_disk_of(3 * MIB + 512),
            Err(GptError::PartOfBlock { bytes: 3 * MIB + 512, block: 4096 })
        );
    }
}
