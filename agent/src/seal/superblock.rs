//! The superblock of ext4 on STATE and DATA, mended where a power cut tore it.
//!
//! It has 1024 bytes with a checksum over all of them, and the kernel writes it at each mount. A disk
//! that writes sectors of 512 bytes one by one can lose its power in between; the kernel then refuses
//! to mount what has nothing wrong but that checksum. The backup in the second block group decides: where
//! all that never changes is as it says, the checksum is made anew, and the journal does the rest. Where
//! it is not, a disk has altered the superblock, and the backup takes its place.
//!
//! Format: the kernel's Documentation/filesystems/ext4/super.rst.

use std::{io, ops::Range, os::unix::fs::FileExt};

use super::descriptors::{self, Checked};

/// Where it is, in bytes, and its length.
pub(super) const AT: u64 = 1024;
pub(super) const BYTES: usize = 1024;
/// Place and value of `s_magic`.
const MAGIC: (usize, [u8; 2]) = (0x38, [0x53, 0xef]);
/// Place of `s_checksum`, at the end of what it covers.
const CHECKSUM: usize = 0x3fc;
/// Place of `s_feature_ro_compat` and its bit for checksums of metadata.
const RO_COMPAT: usize = 0x64;
const METADATA_CSUM: u32 = 0x400;
/// Places of `s_log_block_size` and `s_blocks_per_group`.
pub(super) const LOG_BLOCK: usize = 0x18;
pub(super) const PER_GROUP: usize = 0x20;
/// Place of `s_feature_incompat` and its bit for a journal that is to be replayed.
pub(super) const INCOMPAT: usize = 0x60;
const RECOVER: u8 = 0x04;
/// Place of `s_state` and its bit for errors that were met, and place of their count.
const STATE: usize = 0x3a;
const ERRORS_MET: u8 = 0x02;
const ERROR_COUNT: usize = 0x194;

/// Places of `s_blocks_count_lo` and `_hi`, and of `s_block_group_nr`, which says where a copy lies.
pub(super) const BLOCKS: (usize, usize) = (0x04, 0x150);
const GROUP: Range<usize> = 0x5a..0x5c;
/// Places of `s_r_blocks_count_lo` and `_hi`, and of `s_reserved_gdt_blocks`.
const RESERVED: (usize, usize) = (0x08, 0x154);
const GROWTH: usize = 0xce;
/// Where the backup lies in the file systems that the image's builder makes: blocks of 4096 bytes, 32768 of
/// them in a group. An altered superblock may not say it.
const USUAL_BACKUP: u64 = 32_768 * 4096;

/// Fields that change in use, or that differ between the superblock and its backups.
const CHANGING: &[Range<usize>] = &[
    0x04..0x14,   // blocks, reserved ones, free ones, free inodes
    0x2c..0x38,   // times of mount and write, count of mounts
    0x3a..0x3c,   // state
    0x3c..0x3e,   // what to do about errors
    0x40..0x48,   // time and interval of checks
    0x5a..0x5c,   // which group this copy is in
    0x88..0xc8,   // where it was mounted last
    0xcc..0xd0,   // reserved blocks for growing
    0xe8..0xec,   // first orphan
    0x10c..0x150, // the journal's blocks, once more
    0x150..0x15c, // high halves of the counts of blocks
    0x178..0x180, // kibibytes written
    0x194..0x240, // errors, and options of the last mount
    0x248..0x24c, // overhead
    0x274..0x280, // high bytes of times
    CHECKSUM..BYTES,
];

/// How a superblock was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// It is whole, or no superblock with a checksum.
    Whole,
    /// Its checksum was wrong and is right now.
    Mended,
    /// It was altered, and its backup is in its place.
    Restored {
        /// Offset of the first byte that was not as in the backup.
        at: usize,
    },
    /// Its checksum is wrong, and there is no good backup.
    Damaged,
    /// It counted block groups whose descriptors were not written yet; the journal had them.
    AheadOfGroups,
    /// Its journal's own superblock was altered, and is one that can be made anew now.
    JournalAltered,
    /// This group's descriptor was altered, and where the group's tables lie was taken from a backup.
    GroupRestored {
        /// Number of the block group.
        group: u64,
    },
    /// This group's descriptor has a wrong checksum, and neither journal nor backups say what was altered.
    GroupDamaged {
        /// Number of the block group.
        group: u64,
    },
}

/// Looks at the superblock of a volume, the descriptors of its block groups and the head of its journal, and
/// mends what can be mended of them.
///
/// # Errors
/// When the volume cannot be read or written.
pub fn mend(volume: &impl FileExt) -> io::Result<Found> {
    let found = mend_checksum(volume)?;
    let mut own = [0; BYTES];
    volume.read_exact_at(&mut own, AT)?;
    if !is_superblock(&own) || found == Found::Damaged {
        return Ok(found);
    }
    if descriptors::settle_journal(volume, &own)? {
        return Ok(Found::JournalAltered);
    }
    Ok(match descriptors::mend(volume, &own)? {
        Checked::Whole => found,
        Checked::Mended => Found::AheadOfGroups,
        Checked::Restored { group } => Found::GroupRestored { group },
        Checked::Damaged { group } => Found::GroupDamaged { group },
    })
}

fn mend_checksum(volume: &impl FileExt) -> io::Result<Found> {
    let mut own = [0; BYTES];
    volume.read_exact_at(&mut own, AT)?;
    if is_whole(&own) {
        return Ok(Found::Whole);
    }
    let Some(mut backup) = backup(volume, &own) else {
        return Ok(if is_superblock(&own) { Found::Damaged } else { Found::Whole });
    };
    let Some(at) = first_altered(volume, &own, &backup) else {
        volume.write_all_at(&checksum(&own).to_le_bytes(), AT + CHECKSUM as u64)?;
        return Ok(Found::Mended);
    };
    backup[GROUP].fill(0);
    // What the journal holds is newer; an empty one does no harm.
    backup[INCOMPAT] |= RECOVER;
    let sum = checksum(&backup).to_le_bytes();
    backup[CHECKSUM..].copy_from_slice(&sum);
    volume.write_all_at(&backup, AT)?;
    Ok(Found::Restored { at })
}

/// Returns the backup in the second block group, if it is whole.
fn backup(volume: &impl FileExt, own: &[u8; BYTES]) -> Option<[u8; BYTES]> {
    let block = 1024_u64.checked_shl(word(own, LOG_BLOCK)).unwrap_or_default();
    // With blocks of 1024 bytes the first group begins at block 1, as does each backup.
    let first = u64::from(block == 1024);
    let told = (u64::from(word(own, PER_GROUP)) + first).checked_mul(block);
    [told, Some(USUAL_BACKUP)].into_iter().flatten().find_map(|place| {
        let mut found = [0; BYTES];
        // What lies beyond the volume's end is no backup.
        volume.read_exact_at(&mut found, place).ok()?;
        // One that lies elsewhere in the superblock's own group is not of this file system.
        let second = found[GROUP] == [1, 0];
        (is_whole(&found) && second).then_some(found)
    })
}

/// Returns the offset of the first byte that no use of the file system explains.
fn first_altered(volume: &impl FileExt, own: &[u8; BYTES], backup: &[u8; BYTES]) -> Option<usize> {
    // It may have grown since the backup was written, but not beyond its volume.
    let (now, then) = (count(own, BLOCKS), count(backup, BLOCKS));
    let block = 1024_u64.checked_shl(word(backup, LOG_BLOCK)).unwrap_or_default();
    let end = now.checked_mul(block).and_then(|end| end.checked_sub(1));
    let there = end.is_some_and(|end| volume.read_exact_at(&mut [0], end).is_ok());
    if now < then || now > then && !there {
        return Some(BLOCKS.0);
    }
    // More is reserved in no file system, and neither e2fsck nor the kernel would take it for one.
    if count(own, RESERVED) > now / 2 {
        return Some(RESERVED.0);
    }
    if u64::from(u16::from_le_bytes([own[GROWTH], own[GROWTH + 1]])) > block / 4 {
        return Some(GROWTH);
    }
    (0..BYTES).find(|&at| differs(own, backup, at))
}

/// Returns a number of which these are the places of both halves.
fn count(bytes: &[u8; BYTES], (low, high): (usize, usize)) -> u64 {
    u64::from(word(bytes, high)) << 32 | u64::from(word(bytes, low))
}

fn is_superblock(bytes: &[u8; BYTES]) -> bool {
    let (at, magic) = MAGIC;
    bytes[at..at + 2] == magic && word(bytes, RO_COMPAT) & METADATA_CSUM != 0
}

pub(super) fn is_whole(bytes: &[u8; BYTES]) -> bool {
    is_superblock(bytes) && checksum(bytes) == stored(bytes)
}

/// Returns what superblock and descriptors say of their file system.
///
/// # Errors
/// When the volume cannot be read.
pub(super) fn marks(volume: &impl FileExt) -> io::Result<Marks> {
    let mut own = [0; BYTES];
    volume.read_exact_at(&mut own, AT)?;
    let met = own[STATE] & ERRORS_MET != 0 || word(&own, ERROR_COUNT) != 0;
    let damaged = met || !is_superblock(&own) || !descriptors::are_whole(volume, &own)?;
    Ok(Marks { damaged, replay: own[INCOMPAT] & RECOVER != 0 })
}

/// What superblock and descriptors say of their file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    /// The kernel met errors in it since it was checked, or would not mount it.
    pub(super) damaged: bool,
    /// Its journal is to be replayed.
    pub(super) replay: bool,
}

fn differs(own: &[u8; BYTES], backup: &[u8; BYTES], at: usize) -> bool {
    let ignored = if at == INCOMPAT { RECOVER } else { 0 };
    (own[at] ^ backup[at]) & !ignored != 0 && !CHANGING.iter().any(|range| range.contains(&at))
}

pub(super) fn word(bytes: &[u8; BYTES], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn stored(bytes: &[u8; BYTES]) -> u32 {
    word(bytes, CHECKSUM)
}

fn checksum(bytes: &[u8; BYTES]) -> u32 {
    crc32c(u32::MAX, &bytes[..CHECKSUM])
}

/// What a byte does to a CRC-32C, with 0 to 7 bytes behind it.
static STEPS: [[u32; 256]; 8] = steps();

const fn steps() -> [[u32; 256]; 8] {
    let mut steps = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let (mut sum, mut bit) = (byte as u32, 0);
        while bit < 8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        steps[0][byte as usize] = sum;
        byte += 1;
    }
    let mut behind = 1;
    while behind < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = steps[behind - 1][byte];
            steps[behind][byte] = before >> 8 ^ steps[0][(before & 0xff) as usize];
            byte += 1;
        }
        behind += 1;
    }
    steps
}

/// CRC-32C of `bytes` behind those that `sum` is of, without the inversion at the end, as ext4 has it.
pub(super) fn crc32c(sum: u32, bytes: &[u8]) -> u32 {
    let (eights, rest) = bytes.as_chunks::<8>();
    let eight = |sum: u32, eight: &[u8; 8]| {
        let mixed = u64::from_le_bytes(*eight) ^ u64::from(sum);
        let step = |sum, (byte, steps): (u8, &[u32; 256])| sum ^ steps[usize::from(byte)];
        mixed.to_le_bytes().into_iter().zip(STEPS.iter().rev()).fold(0, step)
    };
    let byte = |sum: u32, byte: &u8| sum >> 8 ^ STEPS[0][usize::from(sum.to_le_bytes()[0] ^ byte)];
    rest.iter().fold(eights.iter().fold(sum, eight), byte)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::{fs::File, process::Command};

    use super::*;

    fn volume(folder: &std::path::Path) -> Option<File> {
        let path = folder.join("volume");
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        file.set_len(256 << 20).unwrap();
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-b", "4096"])
            .arg(&path)
            .status();
        if made.is_ok_and(|status| status.success()) {
            return Some(file);
        }
        println!("skipped: a torn superblock: mke2fs cannot be started");
        None
    }

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, appendix B.4, and the usual nine digits.
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, sum) in [
            (&[0; 32][..], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (b"123456789", 0xe306_9283),
        ] {
            assert_eq!(!crc32c(u32::MAX, bytes), sum);
        }
    }

    #[test]
    fn a_torn_superblock_is_mended() {
        let folder = tempfile::tempdir().unwrap();
        let Some(file) = volume(folder.path()) else { return };
        assert_eq!(mend(&file).unwrap(), Found::Whole);
        // The first half of a later write: times, count of mounts, journal to be replayed.
        let mut first = [0; 512];
        file.read_exact_at(&mut first, AT).unwrap();
        first[0x2c] ^= 0x55;
        first[0x34] += 1;
        first[INCOMPAT] |= RECOVER;
        file.write_all_at(&first, AT).unwrap();
        assert_eq!(mend(&file).unwrap(), Found::Mended);
        assert_eq!(mend(&file).unwrap(), Found::Whole);
        let checked = Command::new("e2fsck").arg("-fy").arg(folder.path().join("volume")).output();
        assert!(checked.unwrap().status.code().unwrap() <= 1);
    }

    /// Alters bits of a byte of the superblock.
    fn flip(file: &File, at: usize, bits: u8) {
        let (mut byte, at) = ([0], AT + at as u64);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ bits], at).unwrap();
    }

    #[test]
    fn an_altered_superblock_is_replaced_by_its_backup() {
        let folder = tempfile::tempdir().unwrap();
        let Some(file) = volume(folder.path()) else { return };
        let path = folder.path().join("volume");
        // An identity, a feature that nobody knows, fewer blocks, where the backup lies, and the magic.
        for (at, bits) in
            [(0x68, 0x77), (0x63, 0x80), (0x05, 0x01), (PER_GROUP, 0x55), (MAGIC.0, 0x12)]
        {
            flip(&file, at, bits);
            let found = mend(&file).unwrap();
            let Found::Restored { at: told } = found else { panic!("{at:#x}: {found:?}") };
            assert!(told == at || at == 0x05, "{told:#x} instead of {at:#x}");
            assert_eq!(mend(&file).unwrap(), Found::Whole);
            let checked = Command::new("e2fsck").arg("-fy").arg(&path).output().unwrap();
            assert!(checked.status.code().unwrap() <= 1, "{at:#x}: {checked:?}");
        }
        // Without a backup there is nothing to be done.
        file.write_all_at(&[0; BYTES], USUAL_BACKUP).unwrap();
        flip(&file, 0x68, 0x77);
        assert_eq!(mend(&file).unwrap(), Found::Damaged);
    }

    #[test]
    fn a_copy_of_the_journals_map_that_leads_out_of_the_volume_stops_nobody() {
        // Place of the first piece's beginning: its high half, then its low one.
        const BEGIN: u64 = 0x10c + 12 + 6;
        let folder = tempfile::tempdir().unwrap();
        let Some(file) = volume(folder.path()) else { return };
        for begin in [[0; 2], [0xff; 2]] {
            file.write_all_at(&begin, AT + BEGIN).unwrap();
            file.write_all_at(&[0x17, 0, 0x23, 0x45], AT + BEGIN + 2).unwrap();
            assert_eq!(mend(&file).unwrap(), Found::Mended);
            assert_eq!(mend(&file).unwrap(), Found::Whole);
        }
        let path = folder.path().join("volume");
        let checked = Command::new("e2fsck").arg("-fy").arg(&path).output().unwrap();
        assert!(checked.status.code().unwrap() <= 1, "{checked:?}");
    }

    #[test]
    fn what_is_no_file_system_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(folder.path().join("x"))
            .unwrap();
        file.set_len(8192).unwrap();
        assert_eq!(mend(&file).unwrap(), Found::Whole);
    }
}
