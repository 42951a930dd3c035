//! What one altered byte of a partition table does, wherever it is: the other copy is read, and both are
//! mended. And what a table does whose checksums are right and whose numbers are not.

#![allow(clippy::unwrap_used, reason = "fixtures that cannot fail")]

use std::io::{self, Read, Seek, SeekFrom};

use crc::{CRC_32_ISO_HDLC, Crc};
use update::disk::{
    gpt::{ALIGNMENT, BlockSize, Table},
    layout::{self, Identities, SMALLEST_DISK},
    medium,
    table::{self, Fault, Found, TableError},
};

const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);
const BLOCKS: [BlockSize; 2] = [BlockSize::B512, BlockSize::B4096];
/// Where things are in [`Table::writes`].
const FIRST: usize = 1;
const FIRST_ENTRIES: usize = 2;
const BACKUP_ENTRIES: usize = 3;
const BACKUP: usize = 4;

/// A disk of zeros with a table, which cannot be written.
#[derive(Clone)]
struct Disk {
    parts: Vec<(u64, Vec<u8>)>,
    bytes: u64,
    at: u64,
}

impl Disk {
    fn of(table: &Table) -> Self {
        Self { parts: table.writes(), bytes: table.bytes, at: 0 }
    }

    fn flip(&mut self, part: usize, byte: usize, mask: u8) {
        self.parts[part].1[byte] ^= mask;
    }

    /// Gives a header the checksum of what it says.
    fn seal(&mut self, part: usize) {
        let header = &mut self.parts[part].1;
        header[16..20].fill(0);
        let sum = CRC.checksum(&header[..92]);
        header[16..20].copy_from_slice(&sum.to_le_bytes());
    }
}

impl Read for Disk {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.bytes.saturating_sub(self.at);
        let count = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        buffer[..count].fill(0);
        let (from, to) = (self.at, self.at + count as u64);
        for (start, content) in &self.parts {
            let (first, last) = (from.max(*start), to.min(start + content.len() as u64));
            if first < last {
                let place = |at: u64, of: u64| usize::try_from(at - of).unwrap();
                buffer[place(first, from)..place(last, from)]
                    .copy_from_slice(&content[place(first, *start)..place(last, *start)]);
            }
        }
        self.at = to;
        Ok(count)
    }
}

impl Seek for Disk {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let place = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.bytes.checked_add_signed(by),
        };
        self.at = place.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

fn ours(block: BlockSize) -> Table {
    layout::smallest(Identities::random(), block).unwrap()
}

/// Entries that nobody uses, and what follows a header, are altered at every so many bytes.
const STRIDE: usize = 37;

/// The bits of a byte that are flipped: all of what says something, else one here and there, by its place.
fn masks(part: usize, byte: usize) -> Vec<u8> {
    let used = if [FIRST_ENTRIES, BACKUP_ENTRIES].contains(&part) { 3 * 128 } else { 92 };
    match (byte < used, byte % STRIDE) {
        (true, _) if used == 92 => (0..8).map(|bit| 1 << bit).collect(),
        (true, _) | (false, 0) => vec![1 << (byte % 8)],
        (false, _) => Vec::new(),
    }
}

/// Calls `check` for a disk with each single alteration of these parts of its table.
fn each(block: BlockSize, parts: &[usize], check: impl Fn(&mut Disk, &str)) {
    let whole = Disk::of(&ours(block));
    let mut disk = whole.clone();
    for &part in parts {
        for byte in 0..whole.parts[part].1.len() {
            for mask in masks(part, byte) {
                disk.flip(part, byte, mask);
                check(&mut disk, &format!("{block:?}: part {part}, byte {byte}, {mask:#x}"));
                disk.flip(part, byte, mask);
            }
        }
    }
}

fn read(disk: &mut Disk, block: BlockSize) -> Result<Found, TableError> {
    table::read(disk, block)
}

#[test]
fn either_copy_is_enough_whatever_byte_of_the_other_is_altered() {
    for block in BLOCKS {
        let all = [0, FIRST, FIRST_ENTRIES, BACKUP_ENTRIES, BACKUP];
        let esp = [(ALIGNMENT, layout::ESP_BYTES)];
        each(block, &all, |disk, what| {
            assert_eq!(medium::esp_partitions(disk, block), esp, "{what}");
        });
    }
}

#[test]
fn whatever_byte_is_altered_the_table_is_written_again_as_it_was() {
    let block = BlockSize::B512;
    let whole = Disk::of(&ours(block));
    assert_eq!(layout::mended(whole.clone(), block, whole.bytes), None, "nothing to mend");
    each(block, &[0, FIRST, BACKUP], |disk, what| {
        let mended = layout::mended(&mut *disk, block, SMALLEST_DISK).expect(what);
        assert_eq!(read(&mut Disk::of(&mended), block), read(disk, block), "{what}");
        let again = Disk::of(&mended);
        assert_eq!(layout::mended(again.clone(), block, again.bytes), None, "{what}");
    });
}

#[test]
fn every_partition_is_as_it_was_by_the_backup_alone() {
    for block in BLOCKS {
        let whole = Disk::of(&ours(block));
        let found = read(&mut whole.clone(), block).unwrap();
        assert_eq!(found.partitions.len(), 3);
        for (part, byte) in [(FIRST, 0), (FIRST, 16), (FIRST_ENTRIES, 40), (FIRST_ENTRIES, 16_000)]
        {
            let mut disk = whole.clone();
            disk.flip(part, byte, 1);
            assert_eq!(read(&mut disk, block).unwrap(), found);
        }
    }
}

#[test]
fn a_disk_that_became_longer_has_its_backup_where_the_first_header_says() {
    for block in BLOCKS {
        let mut disk = Disk::of(&ours(block));
        let longer = SMALLEST_DISK + (7 << 30);
        disk.bytes = longer;
        let grown = layout::grown(disk.clone(), block, longer).unwrap();
        disk.flip(FIRST_ENTRIES, 3 * 128 - 1, 4);
        assert_eq!(layout::grown(disk.clone(), block, longer), Some(grown));
        // Nothing says where it would be.
        disk.flip(FIRST, 32, 1);
        assert_eq!(layout::grown(disk.clone(), block, longer), None);
        assert_eq!(layout::mended(disk, block, longer), None);
    }
}

#[test]
fn a_table_with_both_copies_altered_is_refused_and_both_are_named() {
    let mut disk = Disk::of(&ours(BlockSize::B512));
    disk.flip(FIRST, 60, 1);
    disk.flip(BACKUP_ENTRIES, 3, 1);
    let refused = read(&mut disk, BlockSize::B512).unwrap_err();
    assert_eq!(refused, TableError { first: Fault::Header, backup: Fault::Entries });
    let said = refused.to_string();
    assert!(said.contains("first copy has an altered header"), "{said}");
    assert!(said.contains("its backup has altered entries"), "{said}");
    assert_eq!(layout::mended(disk, BlockSize::B512, SMALLEST_DISK), None);
    let mut nothing = Disk { parts: Vec::new(), bytes: 1 << 20, at: 0 };
    let absent = TableError { first: Fault::Absent, backup: Fault::Absent };
    assert_eq!(read(&mut nothing, BlockSize::B512), Err(absent));
}

/// Numbers that somebody may put into a table, in each field that has one.
const NUMBERS: [u64; 8] = [0, 1, 127, 129, 256, 1 << 31, (1 << 32) - 1, u64::MAX];

#[test]
fn numbers_that_no_table_has_are_refused_although_their_checksum_is_right() {
    // Header size, own block, other block, first entry, entries, their size.
    for (at, length) in [(12, 4), (24, 8), (32, 8), (72, 8), (80, 4), (84, 4)] {
        for number in NUMBERS {
            let table = ours(BlockSize::B512);
            let mut disk = Disk::of(&table);
            let before = read(&mut disk, BlockSize::B512).unwrap();
            for part in [FIRST, BACKUP] {
                let field = &mut disk.parts[part].1[at..at + length];
                field.copy_from_slice(&number.to_le_bytes()[..length]);
                disk.seal(part);
            }
            // Where the other copy lies is not asked while this one is whole, and one is where the first one is.
            let harmless = at == 32 || (at, number) == (24, 1);
            let found = read(&mut disk, BlockSize::B512).ok();
            assert_eq!(found, harmless.then_some(before), "{at}: {number}");
        }
    }
}

#[test]
fn partitions_that_no_disk_has_are_none() {
    for (first, last) in [(0, u64::MAX), (u64::MAX, 7), (5, 4), (1 << 56, 1 << 57)] {
        let mut disk = Disk::of(&ours(BlockSize::B512));
        let entries = &mut disk.parts[FIRST_ENTRIES].1;
        entries[32..40].copy_from_slice(&u64::to_le_bytes(first));
        entries[40..48].copy_from_slice(&u64::to_le_bytes(last));
        let sum = CRC.checksum(entries).to_le_bytes();
        disk.parts[FIRST].1[88..92].copy_from_slice(&sum);
        disk.seal(FIRST);
        let found = read(&mut disk, BlockSize::B512).unwrap();
        assert_eq!(found.partitions.iter().map(|p| p.number).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(medium::esp_partitions(&mut disk, BlockSize::B512), []);
        assert_eq!(layout::mended(disk, BlockSize::B512, SMALLEST_DISK), None);
    }
}

/// The next number of a fixed sequence (xorshift64).
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn whatever_a_table_says_below_right_checksums_it_is_read_or_refused() {
    let mut seed = 0x686f_6c64_6661_7374;
    for block in BLOCKS {
        let whole = Disk::of(&ours(block));
        for round in 0..600 {
            let mut disk = whole.clone();
            for _ in 0..=next(&mut seed) % 4 {
                let part = [FIRST, FIRST_ENTRIES, BACKUP_ENTRIES, BACKUP][round % 4];
                let limit = if round % 4 % 3 == 0 { 92 } else { 3 * 128 };
                let at = usize::try_from(next(&mut seed) % limit).unwrap();
                let number = next(&mut seed) >> (next(&mut seed) % 64);
                let field = &mut disk.parts[part].1[at..];
                let length = field.len().min([1, 2, 4, 8][usize::try_from(number % 4).unwrap()]);
                field[..length].copy_from_slice(&number.to_le_bytes()[..length]);
            }
            for (header, entries) in [(FIRST, FIRST_ENTRIES), (BACKUP, BACKUP_ENTRIES)] {
                let sum = CRC.checksum(&disk.parts[entries].1).to_le_bytes();
                disk.parts[header].1[88..92].copy_from_slice(&sum);
                disk.seal(header);
            }
            let found = read(&mut disk, block).map(|found| found.partitions).unwrap_or_default();
            let fits = |start: u64, bytes: u64| start.checked_add(bytes).map(i64::try_from);
            assert!(
                found.iter().all(|p| p.bytes > 0 && matches!(fits(p.start, p.bytes), Some(Ok(_))))
            );
            let _ = layout::grown(disk.clone(), block, 1 << 40);
            let _ = layout::mended(disk, block, whole.bytes);
        }
    }
}
