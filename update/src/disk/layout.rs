//! Which partitions the appliance's disk has. Design §3: the EFI system partition with room for two
//! releases and a fallback, STATE for what the node must not forget, DATA for what machines keep.

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

    #[test]
    fn no_two_disks_are_taken_for_each_other() {
        assert_ne!(Identities::random(), Identities::random());
    }
}
