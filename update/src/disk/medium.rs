//! The release on a medium: a disk, stick or CD with an EFI system partition in a GPT, or a FAT volume of any
//! other kind, from which firmware starts removable media as well.
//!
//! Sources: UEFI Specification 2.10 §5.3 (GPT), §3.5.1.1 and §13.3 (removable media); PE/COFF Specification §3 (section table); the UAPI
//! Group's specification of unified kernel images for `.osrel`.

use std::io::{Read, Seek, SeekFrom};

use super::{Slice, esp, gpt::BlockSize, gpt::TYPE_ESP, table};

/// Largest program that is read from a medium, in bytes: half of what a slot has room for.
pub const PROGRAM_LIMIT: u64 = 128 << 20;
/// Largest text of a section, in bytes.
const OSREL_LIMIT: usize = 16 << 10;
/// Most sections that are looked at.
const SECTIONS: usize = 96;

/// Returns the bytes at which the EFI system partitions of a disk start, and their lengths. None
/// when the disk has no partition table that can be read with this block size.
pub fn esp_partitions<D: Read + Seek>(disk: D, block: BlockSize) -> Vec<(u64, u64)> {
    let partitions = table::read(disk, block).map(|found| found.partitions).unwrap_or_default();
    let esp = partitions.into_iter().filter(|found| found.kind == TYPE_ESP);
    esp.map(|found| (found.start, found.bytes)).collect()
}

/// Returns the first program on a medium whose `.osrel` is `release`, the text of the running
/// system's `/etc/os-release`: the very program that it was started from.
///
/// Images keep their table in blocks of 512 bytes also when they lie on a CD, whose own are longer.
pub fn find_program<D>(mut disk: D, release: &str) -> Option<Vec<u8>>
where
    D: Read + Seek,
{
    for block in [BlockSize::B512, BlockSize::B4096] {
        disk.seek(SeekFrom::Start(0)).ok()?;
        for (start, length) in esp_partitions(&mut disk, block) {
            let slice = Slice::new(&mut disk, start, length);
            if let Some(program) = find_on_volume(slice, release) {
                return Some(program);
            }
        }
    }
    None
}

/// Returns the same of a FAT volume: a partition of any kind, or a whole stick without partitions.
pub fn find_on_volume<V>(mut volume: V, release: &str) -> Option<Vec<u8>>
where
    V: Read + Seek,
{
    let paths = [esp::FALLBACK, esp::SLOT_A, esp::SLOT_B].into_iter();
    let mut programs = paths.filter_map(|path| {
        volume.rewind().ok()?;
        esp::read(&mut volume, path, PROGRAM_LIMIT).ok()
    });
    programs.find(|program| os_release(program).as_deref() == Some(release))
}

/// Returns the file at `path`, of at most `limit` bytes, on the first EFI system partition of a medium
/// that has one.
pub fn read_beside<D>(mut disk: D, path: &str, limit: u64) -> Option<Vec<u8>>
where
    D: Read + Seek,
{
    for block in [BlockSize::B512, BlockSize::B4096] {
        disk.seek(SeekFrom::Start(0)).ok()?;
        for (start, length) in esp_partitions(&mut disk, block) {
            let slice = Slice::new(&mut disk, start, length);
            if let Ok(content) = esp::read(slice, path, limit) {
                return Some(content);
            }
        }
    }
    None
}

/// Returns the text of a unified kernel image's section `.osrel`; `None` when it has none.
pub fn os_release(program: &[u8]) -> Option<String> {
    let header = usize::try_from(u32_at(program, 0x3c)?).ok()?;
    if program.get(header..header.checked_add(4)?)? != b"PE\0\0" {
        return None;
    }
    let count = usize::from(u16_at(program, header.checked_add(6)?)?).min(SECTIONS);
    let optional = usize::from(u16_at(program, header.checked_add(20)?)?);
    let table = header.checked_add(24)?.checked_add(optional)?;
    for section in 0..count {
        let at = table.checked_add(section * 40)?;
        if program.get(at..at.checked_add(8)?)? != b".osrel\0\0" {
            continue;
        }
        // VirtualSize is the text's length; SizeOfRawData is rounded up.
        let length = usize::try_from(u32_at(program, at + 8)?).ok()?.min(OSREL_LIMIT);
        let start = usize::try_from(u32_at(program, at + 20)?).ok()?;
        let text = program.get(start..start.checked_add(length)?)?;
        return String::from_utf8(text.to_vec()).ok();
    }
    None
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;
    use crate::disk::layout::{Identities, smallest};

    const RELEASE: &str = "ID=holdfast\nBUILD_ID=7\n";

    /// A PE file with one section.
    fn program(text: &str) -> Vec<u8> {
        let mut bytes = vec![0; 0x400];
        bytes[0x3c] = 0x80;
        bytes[0x80..0x84].copy_from_slice(b"PE\0\0");
        bytes[0x86] = 1;
        bytes[0x94] = 0xf0;
        let section = 0x98 + 0xf0;
        bytes[section..section + 6].copy_from_slice(b".osrel");
        bytes[section + 8] = u8::try_from(text.len()).unwrap();
        bytes[section + 20..section + 24].copy_from_slice(&0x300_u32.to_le_bytes());
        bytes[0x300..0x300 + text.len()].copy_from_slice(text.as_bytes());
        bytes
    }

    fn medium(block: BlockSize, program: &[u8]) -> Vec<u8> {
        let table = smallest(Identities::random(), block).unwrap();
        let (start, partition) = &table.placed[0];
        // The file system partitions are not looked at.
        let mut disk = vec![0; usize::try_from(start + partition.bytes).unwrap()];
        let volume = Slice::new(Cursor::new(&mut disk), *start, partition.bytes);
        esp::write(volume, block, program, &[esp::FALLBACK]).unwrap();
        for (offset, bytes) in table.writes() {
            let at = usize::try_from(offset).unwrap();
            if let Some(place) = disk.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(&bytes);
            }
        }
        disk
    }

    #[test]
    fn the_running_release_is_found_and_no_other() {
        for block in [BlockSize::B512, BlockSize::B4096] {
            let disk = medium(block, &program(RELEASE));
            let found = find_program(Cursor::new(disk.clone()), RELEASE);
            assert_eq!(found, Some(program(RELEASE)));
            assert_eq!(find_program(Cursor::new(disk), "ID=holdfast\nBUILD_ID=8\n"), None);
        }
    }

    /// A FAT32 volume of 40 MiB with a program on it, as people format sticks.
    fn volume(program: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 40 << 20];
        esp::write(Cursor::new(&mut bytes), BlockSize::B512, program, &[esp::FALLBACK]).unwrap();
        bytes
    }

    #[test]
    fn a_release_is_found_on_a_volume_without_any_table() {
        let bytes = volume(&program(RELEASE));
        assert_eq!(find_program(Cursor::new(bytes.clone()), RELEASE), None, "there is no GPT");
        let found = find_on_volume(Cursor::new(bytes.clone()), RELEASE);
        assert_eq!(found, Some(program(RELEASE)));
        assert_eq!(find_on_volume(Cursor::new(bytes), "ID=another\n"), None);
        assert_eq!(find_on_volume(Cursor::new(vec![0; 1 << 20]), RELEASE), None);
    }

    #[test]
    fn disks_without_a_release_have_none() {
        assert_eq!(find_program(Cursor::new(vec![0; 1 << 20]), RELEASE), None);
        assert_eq!(find_program(Cursor::new(vec![0xff; 1 << 20]), RELEASE), None);
        assert_eq!(find_program(Cursor::new(Vec::new()), RELEASE), None);
    }

    proptest! {
        #[test]
        fn no_program_makes_it_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..600),
            at in 0_u8..255,
        ) {
            if bytes.len() > 0x40 {
                bytes[0x3c..0x40].copy_from_slice(&u32::from(at).to_le_bytes());
                if let Some(place) = bytes.get_mut(usize::from(at)..usize::from(at) + 4) {
                    place.copy_from_slice(b"PE\0\0");
                }
            }
            let _ = os_release(&bytes);
        }
    }
}
