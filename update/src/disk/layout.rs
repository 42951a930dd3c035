//! Which partitions the appliance's disk has. Design §3: the EFI system partition with room for two
//! releases and a fallback, STATE for what the node must not forget, DATA for what machines keep.

use std::io::{Read, Seek, Write};

use gpt::{GptConfig, disk::LogicalBlockSize};
use uuid::Uuid;

use super::gpt::{ALIGNMENT, BlockSize, GptError, Partition, TYPE_ESP, TYPE_LINUX, Table};

/// Name of the EFI system partition.
pub const ESP: &str = "holdfast-esp";
/// Name of the partition with the node's identity and records.
pub const STATE: &str = "holdfast-state";
/// Name of the partition with machines' disks and images.
pub const DATA: &str = "holdfast-data";

/// Length of the EFI system partition in bytes. Slots cannot grow later, so it has room for
/// releases several times as large as today's.
pub const ESP_BYTES: u64 = 512 << 20;
/// Length of STATE in bytes.
pub const STATE_BYTES: u64 = 256 << 20;
/// Shortest DATA in bytes; also its length in disk images, which are to be quick to write.
pub const DATA_BYTES: u64 = 1 << 30;
/// Bytes of STATE and DATA in front of what is encrypted in them: the header of LUKS2.
pub const HEADER_BYTES: u64 = 16 << 20;
/// Shortest disk that the appliance can be installed on, in bytes: three partitions, and a MiB for
/// the table at each end.
pub const SMALLEST_DISK: u64 = ESP_BYTES + STATE_BYTES + DATA_BYTES + 2 * ALIGNMENT;

/// The identities that a disk's table holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identities {
    /// Of the disk.
    pub disk: Uuid,
    /// Of the EFI system partition, by which firmware's boot entries find it.
    pub esp: Uuid,
    /// Of STATE.
    pub state: Uuid,
    /// Of DATA.
    pub data: Uuid,
}

impl Identities {
    /// Returns new identities, which no other disk has.
    pub fn random() -> Self {
        let [disk, esp, state, data] = [(); 4].map(|()| Uuid::new_v4());
        Self { disk, esp, state, data }
    }
}

/// Lays out the smallest disk.
pub fn smallest(identities: Identities, block: BlockSize) -> Result<Table, GptError> {
    table(identities, block, DATA_BYTES)
}

/// Lays out a disk of `bytes`; DATA takes what the others leave.
///
/// Fails when the disk is shorter than [`SMALLEST_DISK`] or no whole number of blocks.
pub fn filling(identities: Identities, block: BlockSize, bytes: u64) -> Result<Table, GptError> {
    let Some(spare) = bytes.checked_sub(SMALLEST_DISK) else {
        return Err(GptError::DiskTooSmall { bytes, wanted: SMALLEST_DISK });
    };
    table(identities, block, DATA_BYTES + spare / ALIGNMENT * ALIGNMENT)?.on_disk_of(bytes)
}

/// Lays out the disk again that has `bytes` by now and this layout already, with the same identities
/// and a longer DATA; `None` when it has another layout, or no room to grow.
pub fn grown<D>(disk: D, block: BlockSize, bytes: u64) -> Option<Table>
where
    D: Read + Write + Seek + std::fmt::Debug,
{
    let size = match block {
        BlockSize::B512 => LogicalBlockSize::Lb512,
        BlockSize::B4096 => LogicalBlockSize::Lb4096,
    };
    let config = GptConfig::new().writable(false).logical_block_size(size);
    // A disk that became longer has no backup where its end is now; the first copy counts.
    let found = config.only_valid_headers(false).open_from_device(disk).ok()?;
    let partition = |number: u32| found.partitions().get(&number);
    let identities = Identities {
        disk: *found.guid(),
        esp: partition(1)?.part_guid,
        state: partition(2)?.part_guid,
        data: partition(3)?.part_guid,
    };
    let wanted = filling(identities, block, bytes).ok()?;
    let unit = block.bytes();
    let same = wanted.placed.iter().zip(1..).all(|((start, wanted), number)| {
        partition(number).is_some_and(|found| {
            let ends = found.last_lba.checked_add(1).and_then(|end| end.checked_mul(unit));
            let length = ends.and_then(|end| end.checked_sub(*start));
            let fits = |length| {
                if wanted.name == DATA { length < wanted.bytes } else { length == wanted.bytes }
            };
            found.name == wanted.name
                && found.first_lba.checked_mul(unit) == Some(*start)
                && length.is_some_and(fits)
        })
    });
    (same && found.partitions().values().filter(|p| p.is_used()).count() == 3).then_some(wanted)
}

fn table(identities: Identities, block: BlockSize, data: u64) -> Result<Table, GptError> {
    let partition = |kind, id, name, bytes| Partition { kind, id, name, bytes };
    let partitions = vec![
        partition(TYPE_ESP, identities.esp, ESP, ESP_BYTES),
        partition(TYPE_LINUX, identities.state, STATE, STATE_BYTES),
        partition(TYPE_LINUX, identities.data, DATA, data),
    ];
    Table::new(identities.disk, block, partitions)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn data_takes_what_is_left() {
        let bytes = SMALLEST_DISK + 5 * ALIGNMENT + 512;
        let table = filling(Identities::random(), BlockSize::B512, bytes).unwrap();
        let [_, _, (start, data)] = &table.placed[..] else { panic!("three partitions") };
        assert_eq!(data.bytes, DATA_BYTES + 5 * ALIGNMENT);
        assert!(start + data.bytes + ALIGNMENT <= bytes);
        assert_eq!(table.bytes, bytes);
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused() {
        let refused = filling(Identities::random(), BlockSize::B512, SMALLEST_DISK - 512);
        assert_eq!(
            refused,
            Err(GptError::DiskTooSmall { bytes: SMALLEST_DISK - 512, wanted: SMALLEST_DISK })
        );
    }

    /// The start of a disk, as far as its table goes.
    fn disk(table: &Table) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 20];
        for (offset, content) in table.writes() {
            let at = usize::try_from(offset).unwrap();
            if let Some(place) = bytes.get_mut(at..at + content.len()) {
                place.copy_from_slice(&content);
            }
        }
        bytes
    }

    #[test]
    fn an_image_on_a_longer_disk_grows_and_keeps_its_identities() {
        let identities = Identities::random();
        for block in [BlockSize::B512, BlockSize::B4096] {
            let small = smallest(identities, block).unwrap();
            let longer = SMALLEST_DISK + (7 << 30);
            let grown = grown(std::io::Cursor::new(disk(&small)), block, longer).unwrap();
            assert_eq!(grown, filling(identities, block, longer).unwrap());
            let again = super::grown(std::io::Cursor::new(disk(&grown)), block, longer);
            assert_eq!(again, None);
        }
    }

    #[test]
    fn a_table_that_is_not_ours_is_left_alone() {
        let mut other = smallest(Identities::random(), BlockSize::B512).unwrap();
        other.placed[1].1.name = "swap";
        let longer = SMALLEST_DISK + (7 << 30);
        let at = |bytes| grown(std::io::Cursor::new(bytes), BlockSize::B512, longer);
        assert_eq!(at(disk(&other)), None);
        assert_eq!(at(vec![0; 1 << 20]), None);
        assert_eq!(at(Vec::new()), None);
    }

    #[test]
    fn no_two_disks_are_taken_for_each_other() {
        assert_ne!(Identities::random(), Identities::random());
    }
}
