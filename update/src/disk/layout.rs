//! Which partitions the appliance's disk has. Design §3: the EFI system partition with room for two
//! releases and a fallback, STATE for what the node must not forget, DATA for what machines keep.

use std::io::{Read, Seek, SeekFrom};

use uuid::Uuid;

use super::{
    gpt::{ALIGNMENT, BlockSize, GptError, Partition, TYPE_ESP, TYPE_LINUX, Table},
    table::{self, Found},
};

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
    with_data(identities, block, DATA_BYTES)
}

/// Lays out a disk of `bytes`; DATA takes what the others leave.
///
/// Fails when the disk is shorter than [`SMALLEST_DISK`] or no whole number of blocks.
pub fn filling(identities: Identities, block: BlockSize, bytes: u64) -> Result<Table, GptError> {
    let Some(spare) = bytes.checked_sub(SMALLEST_DISK) else {
        return Err(GptError::DiskTooSmall { bytes, wanted: SMALLEST_DISK });
    };
    with_data(identities, block, DATA_BYTES + spare / ALIGNMENT * ALIGNMENT)?.on_disk_of(bytes)
}

/// Lays out the disk again that has `bytes` by now and this layout already, with the same identities
/// and a longer DATA; `None` when it has another layout, or no room to grow.
pub fn grown<D: Read + Seek>(disk: D, block: BlockSize, bytes: u64) -> Option<Table> {
    let (found, wanted) = laid_out(disk, block, bytes)?;
    let [_, _, (_, data)] = &wanted.placed[..] else { return None };
    (found.partitions[2].bytes < data.bytes).then_some(wanted)
}

/// Returns the table of a disk of `bytes` that has this layout up to its end, when one of the two copies or
/// what stands before them is not as it was written: writing it once more mends them. `None` when nothing is
/// to be mended, and when the disk has another layout.
pub fn mended<D: Read + Seek>(mut disk: D, block: BlockSize, bytes: u64) -> Option<Table> {
    let (found, wanted) = laid_out(&mut disk, block, bytes)?;
    let [_, _, (_, data)] = &wanted.placed[..] else { return None };
    if found.partitions[2].bytes != data.bytes {
        return None;
    }
    let differs = |(offset, written): (u64, Vec<u8>)| {
        let mut there = vec![0; written.len()];
        // A part that cannot be read may be one that can be written.
        let read = disk.seek(SeekFrom::Start(offset)).and_then(|_| disk.read_exact(&mut there));
        read.is_err() || there != written
    };
    wanted.writes().into_iter().any(differs).then_some(wanted)
}

/// Reads a disk's table, and lays the disk out anew with its identities, as long as it is. `None` unless the
/// two are the same but for the length of DATA.
fn laid_out<D: Read + Seek>(disk: D, block: BlockSize, bytes: u64) -> Option<(Found, Table)> {
    let found = table::read(disk, block).ok()?;
    let [esp, state, data] = &found.partitions[..] else { return None };
    let identities = Identities { disk: found.disk, esp: esp.id, state: state.id, data: data.id };
    let wanted = filling(identities, block, bytes).ok()?;
    let same =
        wanted.placed.iter().zip(&found.partitions).zip(1..).all(|((placed, found), number)| {
            let (start, partition) = placed;
            let as_long = partition.name == DATA || found.bytes == partition.bytes;
            let named = (found.number, found.name.as_str()) == (number, partition.name);
            named && as_long && found.start == *start
        });
    same.then_some((found, wanted))
}

fn with_data(identities: Identities, block: BlockSize, data: u64) -> Result<Table, GptError> {
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
