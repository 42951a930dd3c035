//! The EFI system partition: a FAT volume that holds our programs, each one whole release.
//!
//! Works on anything that reads, writes and seeks. Deterministic: no clock is read, so every date is
//! the FAT epoch. Source of the fallback path: UEFI Specification 2.10, §3.5.1.1.

use std::io::{self, Read, Seek, Write};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};

use super::{Bounded, LOOKING, gpt::BlockSize};

/// Where firmware looks on removable media, and on disks without a boot entry.
pub const FALLBACK: &str = "EFI/BOOT/BOOTX64.EFI";
/// Where the first of the two releases lies.
pub const SLOT_A: &str = "EFI/HOLDFAST/A.EFI";
/// Where the second of the two releases lies.
pub const SLOT_B: &str = "EFI/HOLDFAST/B.EFI";

/// Most folders around a file.
const DEPTH: usize = 8;
/// Volume serial number: any constant.
const VOLUME_ID: u32 = 0x484f_4c44;
/// The volume's label; not `HOLDFAST`, which names the volume with the configuration.
const LABEL: [u8; 11] = *b"ESP        ";

/// Formats `volume` and writes `program` to each of `paths`, whose folders it makes. The volume's
/// sectors are as long as the disk's blocks: the kernel mounts no shorter ones.
pub fn write<V: Read + Write + Seek>(
    mut volume: V,
    block: BlockSize,
    program: &[u8],
    paths: &[&str],
) -> io::Result<()> {
    let sector = u16::try_from(block.bytes()).map_err(io::Error::other)?;
    let options = FormatVolumeOptions::new()
        .volume_id(VOLUME_ID)
        .volume_label(LABEL)
        .bytes_per_sector(sector);
    fatfs::format_volume(&mut volume, options)?;
    let fs = FileSystem::new(&mut volume, FsOptions::new())?;
    for path in paths {
        let mut folder = fs.root_dir();
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        for part in folders.split('/').filter(|part| !part.is_empty()) {
            folder = folder.create_dir(part)?;
        }
        let mut file = folder.create_file(name)?;
        file.write_all(program)?;
        file.flush()?;
    }
    fs.unmount()
}

/// Adds a file to a volume, with the folders above it, in the place of one that is there.
pub fn put<V: Read + Write + Seek>(volume: V, path: &str, content: &[u8]) -> io::Result<()> {
    let fs = FileSystem::new(volume, FsOptions::new().update_accessed_date(false))?;
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    let mut folder = fs.root_dir();
    for part in folders.split('/').filter(|part| !part.is_empty()) {
        folder = folder.create_dir(part)?;
    }
    let mut file = folder.create_file(name)?;
    file.truncate()?;
    file.write_all(content)?;
    file.flush()?;
    drop(file);
    drop(folder);
    fs.unmount()
}

/// Returns the paths of all files on a volume, at most `limit` of them.
///
/// Fails when the volume is none, and when it has more files, or folders within folders within folders
/// beyond [`DEPTH`].
pub fn files<V: Read + Seek>(volume: V, limit: usize) -> io::Result<Vec<String>> {
    let fs = FileSystem::new(
        Bounded::new(volume, LOOKING),
        FsOptions::new().update_accessed_date(false),
    )?;
    let mut found = Vec::new();
    let mut folders = vec![(String::new(), fs.root_dir(), 0)];
    while let Some((path, folder, depth)) = folders.pop() {
        if depth > DEPTH {
            return Err(io::Error::other(format!("{path} lies too deep")));
        }
        for entry in folder.iter() {
            let entry = entry?;
            let name = entry.file_name();
            if name == "." || name == ".." {
                continue;
            }
            if found.len() + folders.len() >= limit {
                return Err(io::Error::other(format!("it holds more than {limit} files")));
            }
            if entry.is_dir() {
                folders.push((format!("{path}{name}/"), entry.to_dir(), depth + 1));
            } else {
                found.push(format!("{path}{name}"));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the file at `path`, of at most `limit` bytes.
///
/// Fails when the volume is none, when it has no such file, and when the file is longer.
pub fn read<V: Read + Seek>(volume: V, path: &str, limit: u64) -> io::Result<Vec<u8>> {
    let bounded = Bounded::new(volume, LOOKING.saturating_add(limit));
    let fs = FileSystem::new(bounded, FsOptions::new().update_accessed_date(false))?;
    let mut program = Vec::new();
    fs.root_dir().open_file(path)?.take(limit + 1).read_to_end(&mut program)?;
    if program.len() as u64 > limit {
        return Err(io::Error::other(format!("{path} has more than {limit} bytes")));
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::io::Cursor;

    use fatfs::FatType;

    use super::*;

    /// A FAT32 volume whose top folder fills its first cluster and, by one flipped bit, goes on where it begins.
    fn endless() -> Vec<u8> {
        let mut bytes = vec![0; 40 << 20];
        let options = FormatVolumeOptions::new().fat_type(FatType::Fat32).bytes_per_cluster(512);
        fatfs::format_volume(Cursor::new(&mut bytes), options).unwrap();
        let fs = FileSystem::new(Cursor::new(&mut bytes), FsOptions::new()).unwrap();
        (0..16).for_each(|n| drop(fs.root_dir().create_file(&format!("F{n}")).unwrap()));
        fs.unmount().unwrap();
        // Reserved sectors; the top folder's first cluster is 2.
        let table = usize::from(u16::from_le_bytes([bytes[14], bytes[15]])) * 512;
        let entry = table + 4 * 2;
        assert_eq!(bytes[entry..entry + 4], [3, 0, 0, 0]);
        bytes[entry] ^= 1;
        bytes
    }

    #[test]
    fn a_volume_without_an_end_is_given_up() {
        let volume = endless();
        let missing = read(Cursor::new(&volume), "G", 100).unwrap_err();
        assert!(missing.to_string().contains("the volume has no end"), "{missing}");
        let all = files(Cursor::new(&volume), usize::MAX).unwrap_err();
        assert!(all.to_string().contains("the volume has no end"), "{all}");
        assert!(read(Cursor::new(&volume), "F3", 100).is_ok(), "what is there is found");
    }

    fn volume(block: BlockSize) -> Vec<u8> {
        let mut bytes = vec![0xa5; 40 << 20];
        let program = vec![7; 100_000];
        write(Cursor::new(&mut bytes), block, &program, &[FALLBACK, SLOT_A]).unwrap();
        bytes
    }

    #[test]
    fn every_program_is_read_back() {
        for block in [BlockSize::B512, BlockSize::B4096] {
            for path in [FALLBACK, SLOT_A] {
                let found = read(Cursor::new(volume(block)), path, 100_000).unwrap();
                assert_eq!(found, vec![7; 100_000]);
            }
        }
    }

    #[test]
    fn files_are_added_and_replaced() {
        let mut volume = volume(BlockSize::B512);
        for content in [&[1; 5000][..], &[2; 10]] {
            put(Cursor::new(&mut volume), "loader/keys/auto/db.auth", content).unwrap();
            put(Cursor::new(&mut volume), "loader/keys/auto/PK.auth", content).unwrap();
        }
        for path in ["loader/keys/auto/db.auth", "loader/keys/auto/PK.auth"] {
            assert_eq!(read(Cursor::new(&mut volume), path, 100).unwrap(), [2; 10]);
        }
        assert_eq!(read(Cursor::new(&mut volume), FALLBACK, 100_000).unwrap(), vec![7; 100_000]);
        let all = [FALLBACK, SLOT_A, "loader/keys/auto/PK.auth", "loader/keys/auto/db.auth"];
        assert_eq!(files(Cursor::new(&mut volume), 10).unwrap(), all);
        assert!(files(Cursor::new(&mut volume), 3).is_err());
    }

    #[test]
    fn what_is_missing_or_too_long_is_refused() {
        let volume = volume(BlockSize::B512);
        assert!(read(Cursor::new(volume.clone()), SLOT_B, 1 << 20).is_err());
        let long = read(Cursor::new(volume), SLOT_A, 99_999).unwrap_err();
        assert!(long.to_string().contains("more than 99999 bytes"), "{long}");
        assert!(read(Cursor::new(vec![0; 1 << 20]), SLOT_A, 1).is_err());
    }
}
