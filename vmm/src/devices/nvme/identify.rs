//! What the controller says of itself and of its namespace.
//! Source: NVMe 1.4 §5.15.2 "Identify Data Structures", figures 245 to 249.

use crate::devices::{
    backing::Geometry,
    virtio::blk::request::{Access, Support},
};

/// Bytes of every Identify data structure.
pub const SIZE: usize = 4096;
/// Bytes of a serial number.
pub const SERIAL_SIZE: usize = 20;
/// The only namespace.
pub const NAMESPACE: u32 = 1;
/// Largest transfer, as a power of two of pages (MDTS): 1 MiB.
pub const MAX_TRANSFER_PAGES_LOG2: u8 = 8;
/// Largest transfer, in bytes.
pub const MAX_TRANSFER: u64 = 4096 << MAX_TRANSFER_PAGES_LOG2;
/// Asynchronous Event Requests that wait at once (AERL, plus one).
pub const MAX_EVENT_REQUESTS: usize = 4;
/// Entries of the error log (ELPE, plus one).
pub const ERROR_ENTRIES: usize = 16;

const MODEL: &[u8; 40] = b"Holdfast NVMe disk                      ";
const FIRMWARE: &[u8; 8] = b"1       ";
/// Warning and critical temperature, in kelvin: 70 and 80 °C. What is measured never changes.
const WARNING_KELVIN: u16 = 343;
const CRITICAL_KELVIN: u16 = 353;

/// RTD3E: how long a shutdown may take, in microseconds. It flushes, and without a word Linux waits for 5 s only.
const SHUTDOWN_US: u32 = 60_000_000;
/// ONCS: Dataset Management, Write Zeroes, Select and Save in commands for features.
const COMMAND_DEALLOCATE: u16 = 1 << 2;
const COMMAND_ZERO: u16 = 1 << 3;
const SELECT_AND_SAVE: u16 = 1 << 4;
/// DLFEAT: what was given back reads as zeroes; Write Zeroes can give back.
const READS_ZEROES: u8 = 0b001;
const ZEROES_DEALLOCATE: u8 = 1 << 3;

/// What there is to say.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Serial number, padded.
    pub serial: [u8; SERIAL_SIZE],
    /// I/O queue pairs.
    pub pairs: u16,
    /// Logical blocks.
    pub blocks: u64,
    /// Binary logarithm of a logical block's bytes, 9 or more.
    pub block_log2: u8,
    /// Logical blocks that the medium writes at once, at least one.
    pub blocks_at_once: u16,
    /// Whether the driver may change anything.
    pub access: Access,
    /// Whether ranges can be given back.
    pub deallocate: Support,
    /// Whether ranges can be zeroed and keep their space.
    pub zero: Support,
}

impl Profile {
    /// Returns what there is to say of a disk.
    pub(super) fn new(geometry: &Geometry, serial: [u8; SERIAL_SIZE], pairs: u16) -> Self {
        let block_log2 = u8::try_from(geometry.logical_block.max(512).ilog2()).unwrap_or(9);
        let ratio = geometry.physical_block / geometry.logical_block.max(1);
        Self {
            serial,
            pairs,
            blocks: geometry.sectors.saturating_mul(512) >> block_log2,
            block_log2,
            blocks_at_once: u16::try_from(ratio).unwrap_or(1).max(1),
            access: geometry.access,
            deallocate: geometry.discard,
            zero: geometry.zero,
        }
    }

    /// Returns the bytes of the namespace.
    pub fn bytes(&self) -> u64 {
        self.blocks << self.block_log2
    }

    /// Returns whether Write Zeroes is offered: what was given back reads as zeroes too.
    pub fn zeroes(&self) -> Support {
        if self.zero == Support::Yes { Support::Yes } else { self.deallocate }
    }

    /// Returns the controller's structure (CNS 01h).
    pub fn controller(&self) -> Box<[u8; SIZE]> {
        let supported = |support, bit| if support == Support::Yes { bit } else { 0 };
        let commands = supported(self.deallocate, COMMAND_DEALLOCATE)
            | supported(self.zeroes(), COMMAND_ZERO)
            | SELECT_AND_SAVE;
        let [limit, errors] =
            [MAX_EVENT_REQUESTS, ERROR_ENTRIES].map(|count| u8::try_from(count - 1).unwrap_or(0));
        structure(&[
            (0, &super::VENDOR.to_le_bytes()),
            (2, &super::VENDOR.to_le_bytes()),
            (4, &self.serial),
            (24, MODEL),
            (64, FIRMWARE),
            (77, &[MAX_TRANSFER_PAGES_LOG2]),
            (80, &super::registers::VERSION.to_le_bytes()),
            (88, &SHUTDOWN_US.to_le_bytes()),
            // CNTRLTYPE: an I/O controller.
            (111, &[1]),
            // ACL: four Aborts at once; AERL.
            (258, &[3, limit]),
            // FRMW: one slot, read-only; LPA: long log pages; ELPE; NPSS: one power state.
            (260, &[0b11, 0b100, errors, 0]),
            (266, &WARNING_KELVIN.to_le_bytes()),
            (268, &CRITICAL_KELVIN.to_le_bytes()),
            (280, &u128::from(self.bytes()).to_le_bytes()),
            // SQES and CQES: 64 and 16 bytes, neither more nor less.
            (512, &[0x66, 0x44]),
            (516, &NAMESPACE.to_le_bytes()),
            (520, &commands.to_le_bytes()),
            // VWC: there is a cache, and Flush may name all namespaces.
            (525, &[0b111]),
            (768, self.qualified_name().as_bytes()),
            // The one power state: 5 W at most, which nobody measures.
            (2048, &500u16.to_le_bytes()),
        ])
    }

    /// Returns the namespace's structure (CNS 00h).
    pub fn namespace(&self) -> Box<[u8; SIZE]> {
        let blocks = self.blocks.to_le_bytes();
        let at_once = (self.blocks_at_once - 1).to_le_bytes();
        let protected = u8::from(self.access == Access::ReadOnly);
        let deallocated = match self.deallocate {
            Support::Yes => READS_ZEROES | ZEROES_DEALLOCATE,
            Support::No => READS_ZEROES,
        };
        structure(&[
            (0, &blocks),
            (8, &blocks),
            (16, &blocks),
            // NSFEAT: the preferred sizes below are set (OPTPERF).
            (24, &[1 << 4]),
            (33, &[deallocated]),
            // NPWG, NPWA, NPDG, NPDA, NOWS: the last is no multiple of the others where it is left out, and Linux
            // takes it for the best size of a transfer.
            (64, &at_once),
            (66, &at_once),
            (68, &at_once),
            (70, &at_once),
            (72, &at_once),
            // NSATTR: write protected.
            (99, &[protected]),
            // LBAF 0: size of a block, no metadata.
            (130, &[self.block_log2]),
        ])
    }

    /// Returns the list of active namespaces behind `after` (CNS 02h).
    pub fn active_namespaces(&self, after: u32) -> Box<[u8; SIZE]> {
        let first = if after < NAMESPACE { NAMESPACE } else { 0 };
        structure(&[(0, &first.to_le_bytes())])
    }

    /// Returns the identification descriptors (CNS 03h): one UUID.
    pub fn descriptors(&self) -> Box<[u8; SIZE]> {
        structure(&[(0, &[3, 16]), (4, &self.uuid())])
    }

    /// Returns the subsystem's NVMe qualified name, of the kind that needs no domain (§7.9).
    fn qualified_name(&self) -> String {
        let hex: String = self.uuid().iter().map(|byte| format!("{byte:02x}")).collect();
        let parts =
            [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)].map(|(from, to)| &hex[from..to]);
        format!("nqn.2014-08.org.nvmexpress:uuid:{}", parts.join("-"))
    }

    /// Returns a UUID of version 8 that follows from the serial number alone, so that it stays the
    /// disk's across restarts.
    fn uuid(&self) -> [u8; 16] {
        // FNV-1a of 128 bits (draft-eastlake-fnv): no secret, only spread.
        let offset = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
        let prime = 0x0000_0000_0100_0000_0000_0000_0000_013b_u128;
        let hash = self
            .serial
            .iter()
            .fold(offset, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(prime));
        let mut uuid = hash.to_be_bytes();
        uuid[6] = uuid[6] & 0x0f | 0x80;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        uuid
    }

    /// Returns the firmware slot log (§5.14.1.3): slot 1 is active.
    pub fn firmware_log(&self) -> [u8; 512] {
        let mut log = [0; 512];
        log[0] = 1;
        log[8..16].copy_from_slice(FIRMWARE);
        log
    }
}

fn structure(fields: &[(usize, &[u8])]) -> Box<[u8; SIZE]> {
    let mut bytes = Box::new([0; SIZE]);
    for (offset, field) in fields {
        bytes[*offset..*offset + field.len()].copy_from_slice(field);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        let geometry = Geometry {
            sectors: 2049,
            logical_block: 512,
            physical_block: 4096,
            access: Access::ReadOnly,
            discard: Support::Yes,
            zero: Support::No,
        };
        Profile::new(&geometry, *b"0123456789abcdef    ", 3)
    }

    #[test]
    fn the_controller_says_who_it_is_and_what_it_can() {
        let bytes = profile().controller();
        assert_eq!(&bytes[4..24], b"0123456789abcdef    ");
        assert_eq!(&bytes[24..37], b"Holdfast NVMe");
        assert_eq!((bytes[77], bytes[111], bytes[258], bytes[259]), (8, 1, 3, 3));
        assert_eq!(bytes[88..92], 60_000_000u32.to_le_bytes());
        assert_eq!(&bytes[512..514], &[0x66, 0x44]);
        assert_eq!(&bytes[516..522], &[1, 0, 0, 0, 0b1_1100, 0]);
        assert_eq!(&bytes[768..800], b"nqn.2014-08.org.nvmexpress:uuid:");
        assert_eq!(
            (bytes[808], bytes[835], bytes[836]),
            (b'-', bytes[835].to_ascii_lowercase(), 0)
        );
    }

    #[test]
    fn the_namespace_has_its_size_and_its_block() {
        let bytes = profile().namespace();
        assert_eq!(bytes[0..8], 2049u64.to_le_bytes());
        assert_eq!(bytes[8..16], bytes[0..8]);
        assert_eq!((bytes[25], bytes[26], bytes[33], bytes[99]), (0, 0, 0b1001, 1));
        assert_eq!(bytes[64..74], [7, 0].repeat(5));
        assert_eq!(bytes[128..132], [0, 0, 9, 0]);
    }

    #[test]
    fn large_blocks_count_whole() {
        let geometry = Geometry {
            sectors: 17,
            logical_block: 4096,
            physical_block: 4096,
            access: Access::ReadWrite,
            discard: Support::No,
            zero: Support::No,
        };
        let profile = Profile::new(&geometry, [b' '; 20], 1);
        assert_eq!((profile.blocks, profile.block_log2, profile.bytes()), (2, 12, 8192));
    }

    #[test]
    fn the_list_of_namespaces_goes_on_behind_the_one_named() {
        let profile = profile();
        assert_eq!(profile.active_namespaces(0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(profile.active_namespaces(1)[..4], [0; 4]);
    }

    #[test]
    fn the_uuid_follows_from_the_serial_number() {
        let bytes = profile().descriptors();
        assert_eq!(&bytes[..4], &[3, 16, 0, 0]);
        assert_eq!((bytes[10] >> 4, bytes[12] >> 6), (8, 2));
        assert_eq!(bytes[4..20], profile().descriptors()[4..20]);
        let other = Profile { serial: [b'1'; 20], ..profile() };
        assert_ne!(bytes[4..20], other.descriptors()[4..20]);
        assert_eq!(bytes[20..24], [0; 4]);
    }
}
