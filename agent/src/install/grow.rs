//! Growing DATA to the disk: images hold the smallest one there is, and disks are larger.
//!
//! First the partition, in its table and in the kernel, then the file system in it, both while it is
//! mounted. A table that is not exactly ours is left alone.

use std::{
    fmt,
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::fs::FileExt},
    path::{Path, PathBuf},
};

use rustix::fs::stat;
use update::disk::{gpt::BlockSize, layout};

use super::write;
use crate::sys;

/// Bytes of an ext4 block, as the image's builder makes them.
const BLOCK: u64 = 4096;
/// Bytes of an ext4 superblock, and where it begins.
const SUPERBLOCK: usize = 1024;
/// Number of DATA's partition.
const DATA_NUMBER: i32 = 3;

/// What was grown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grown {
    /// How long the device is that the file system lies on, in bytes.
    pub bytes: u64,
    /// How much of that the file system cannot use, in bytes: it was made with too many inodes.
    pub unused: u64,
    /// What was mended of the disk's table, in a sentence.
    pub mended: Option<String>,
}

/// Why DATA stays as it is.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub struct GrowError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl fmt::Display for GrowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} {}", self.action, self.path.display())
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> GrowError {
    let path = path.to_owned();
    move |source| GrowError { action, path, source }
}

/// Grows the file system mounted at `path`, and the partition it lies on when its disk has room.
/// Returns `None` for one that lies in memory.
pub fn grow(path: &Path) -> Result<Option<Grown>, GrowError> {
    let device = stat(path).map_err(|error| failed("look at", path)(error.into()))?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let link = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let Ok(folder) = fs::canonicalize(&link) else { return Ok(None) };
    let mended = match folder.parent().filter(|_| folder.join("partition").exists()) {
        Some(disk) => grow_partition(disk)?,
        None => None,
    };
    let bytes = sectors(&folder)? * 512;
    let device = Path::new("/dev").join(folder.file_name().unwrap_or_default());
    let mut superblock = [0; SUPERBLOCK];
    let read = File::open(&device)
        .and_then(|device| device.read_exact_at(&mut superblock, SUPERBLOCK as u64));
    read.map_err(failed("read", &device))?;
    let blocks = (bytes / BLOCK).min(most_blocks(&superblock));
    let root = File::open(path).map_err(failed("open", path))?;
    sys::block::resize_ext4(root.as_fd(), blocks).map_err(failed("grow", path))?;
    Ok(Some(Grown { bytes, unused: (bytes / BLOCK - blocks) * BLOCK, mended }))
}

/// Returns how many blocks the file system with this superblock may have: the kernel refuses to grow one whose
/// inodes no number of 32 bits would count. Source: `ext4_resize_fs` in the kernel's fs/ext4/resize.c; for the
/// fields (`s_magic`, `s_blocks_per_group`, `s_inodes_per_group`), its Documentation/filesystems/ext4/super.rst.
fn most_blocks(superblock: &[u8; SUPERBLOCK]) -> u64 {
    let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| superblock[at + byte]));
    let (blocks, inodes) = (number(0x20), number(0x28));
    match u32::MAX.checked_div(inodes) {
        Some(groups) if superblock[0x38..0x3a] == [0x53, 0xef] => {
            u64::from(groups.saturating_sub(1)) * u64::from(blocks)
        }
        // No ext4, which the kernel says itself.
        Some(_) | None => u64::MAX,
    }
}

/// Grows the partition with this name, and no file system, when its disk has room. Returns what was mended of
/// the disk's table, in a sentence.
pub fn grow_below(partition: &Path) -> Result<Option<String>, GrowError> {
    let link = Path::new("/sys/class/block").join(partition);
    let folder = fs::canonicalize(&link).map_err(failed("find", &link))?;
    match folder.parent().filter(|_| folder.join("partition").exists()) {
        Some(disk) => grow_partition(disk),
        None => Ok(None),
    }
}

fn sectors(folder: &Path) -> Result<u64, GrowError> {
    let path = folder.join("size");
    let text = fs::read_to_string(&path).map_err(failed("read", &path))?;
    text.trim().parse().map_err(|error| failed("understand", &path)(io::Error::other(error)))
}

/// Grows the last partition of the disk with this folder in sysfs, if its table is ours. Where nothing grows, a
/// table of which a copy was altered is written once more, and what happened is returned: the kernel takes the
/// first copy only, firmware the backup as long as the first is damaged, and nobody else compares them.
fn grow_partition(folder: &Path) -> Result<Option<String>, GrowError> {
    let path = Path::new("/dev").join(folder.file_name().unwrap_or_default());
    let bytes = sectors(folder)? * 512;
    let queue = folder.join("queue/logical_block_size");
    let block = fs::read_to_string(&queue).ok().and_then(|text| text.trim().parse().ok());
    let Some(block) = block.and_then(BlockSize::from_bytes) else { return Ok(None) };
    let disk = File::options().read(true).write(true).open(&path).map_err(failed("open", &path))?;
    let Some(table) = layout::grown(&disk, block, bytes) else {
        let mended = mend(&disk, block, bytes).map_err(failed("mend the table of", &path))?;
        return Ok(mended.map(|what| format!("{}: {what}", path.display())));
    };
    write::write_table(&disk, &table).map_err(failed("write the table of", &path))?;
    let Some((start, partition)) = table.placed.last() else { return Ok(None) };
    sys::block::resize_partition(disk.as_fd(), DATA_NUMBER, (*start, partition.bytes))
        .map_err(failed("tell the kernel of the new length of a partition of", &path))?;
    Ok(None)
}

/// Writes our table once more to a disk of `bytes` where something of it was altered, and returns what to say.
fn mend(disk: &File, block: BlockSize, bytes: u64) -> io::Result<Option<&'static str>> {
    let Some(table) = layout::mended(disk, block, bytes) else { return Ok(None) };
    write::write_table(disk, &table)?;
    Ok(Some(
        "the partition table was altered in one of its copies, and was written again as it was",
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn superblock(inodes_per_group: u32) -> [u8; SUPERBLOCK] {
        let mut bytes = [0; SUPERBLOCK];
        bytes[0x20..0x24].copy_from_slice(&32_768_u32.to_le_bytes());
        bytes[0x28..0x2c].copy_from_slice(&inodes_per_group.to_le_bytes());
        bytes[0x38..0x3a].copy_from_slice(&[0x53, 0xef]);
        bytes
    }

    #[test]
    fn no_file_system_is_grown_past_its_inodes() {
        const TIB: u64 = (1 << 40) / BLOCK;
        for inodes in [512, 8192] {
            let most = most_blocks(&superblock(inodes));
            // What the kernel compares.
            assert!((most - 1) / 32_768 < u64::from(u32::MAX / inodes));
        }
        // As earlier releases made DATA, and as it is made now.
        let (before, now) = (most_blocks(&superblock(8192)), most_blocks(&superblock(512)));
        assert!((63 * TIB..64 * TIB).contains(&before), "{before}");
        assert!((1023 * TIB..1024 * TIB).contains(&now), "{now}");
        assert_eq!(most_blocks(&[0; SUPERBLOCK]), u64::MAX);
    }

    #[test]
    fn an_altered_table_is_written_again_as_it_was_and_told() {
        let identities = layout::Identities::random();
        let bytes = layout::SMALLEST_DISK + (7 << 20);
        let table = layout::filling(identities, BlockSize::B512, bytes).unwrap();
        let disk = tempfile::tempfile().unwrap();
        disk.set_len(bytes).unwrap();
        write::write_table(&disk, &table).unwrap();
        assert_eq!(mend(&disk, BlockSize::B512, bytes).unwrap(), None);
        // The mark of a boot program, headers, entries; at either end.
        for at in [510, 512, 600, 1024, 1200, bytes - 512, bytes - 500, bytes - 16_000] {
            let mut byte = [0];
            disk.read_exact_at(&mut byte, at).unwrap();
            disk.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            let said = mend(&disk, BlockSize::B512, bytes).unwrap();
            assert!(said.is_some_and(|what| what.contains("written again")), "{at}");
            for (offset, written) in table.writes() {
                let mut found = vec![0; written.len()];
                disk.read_exact_at(&mut found, offset).unwrap();
                assert!(found == written, "{at}: {offset}");
            }
        }
        // What is another's is left alone, whatever is wrong with it.
        disk.write_all_at(&[1], 1024 + 3 * 128).unwrap();
        disk.write_all_at(&[1], bytes - 512).unwrap();
        assert_eq!(mend(&disk, BlockSize::B512, bytes).unwrap(), None);
    }

    #[test]
    fn what_lies_in_memory_stays_as_it_is() {
        assert_eq!(grow(Path::new("/proc")).unwrap(), None);
        let missing = grow(Path::new("/nonexistent")).unwrap_err();
        assert_eq!(missing.to_string(), "cannot look at /nonexistent");
    }
}
