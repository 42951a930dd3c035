//! Other releases than the image's: the same program under another name of the same length, with
//! everything that seals the name made anew.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
};

use anyhow::{Result, ensure};

/// The release of the image.
pub const IMAGE: &str = "0.1.0";
/// How many bytes at a disk's start hold its programs, in an image that nothing was written to.
const PROGRAMS: u64 = 128 << 20;
/// Copies of the program on such a disk: its slot and the fallback path.
const COPIES: usize = 2;

/// Returns the image's program as another release.
///
/// # Panics
/// When the program does not say twice which release it is: for firmware and in its root.
pub fn program(program: &[u8], release: &str) -> Vec<u8> {
    let mut renamed = program.to_vec();
    assert!(rename(&mut renamed, release, 1), "no program as the image has it");
    renamed
}

/// Writes a copy of the disk image in `image` to `disk`, with another release on it.
pub fn disk(image: &Path, disk: &Path, release: &str) -> Result<()> {
    fs::copy(image.join("holdfast.img"), disk)?;
    let mut file = File::options().read(true).write(true).open(disk)?;
    let mut begin = Vec::new();
    (&file).take(PROGRAMS).read_to_end(&mut begin)?;
    ensure!(rename(&mut begin, release, COPIES), "the disk image has not {COPIES} programs");
    file.seek(SeekFrom::Start(0))?;
    Ok(file.write_all(&begin)?)
}

/// Renames as many programs as `bytes` hold; false when they are not `copies`.
fn rename(bytes: &mut [u8], release: &str, copies: usize) -> bool {
    let old = format!("VERSION_ID={IMAGE}\n").into_bytes();
    let new = format!("VERSION_ID={release}\n").into_bytes();
    let names = places(bytes, &old);
    let roots = places(bytes, b"root.erofs\0");
    if new.len() != old.len() || names.len() != 2 * copies || roots.len() != copies {
        return false;
    }
    names.into_iter().for_each(|at| bytes[at..at + new.len()].copy_from_slice(&new));
    roots.into_iter().for_each(|at| seal_root(&mut bytes[at..]));
    true
}

/// Returns where `wanted` begins.
fn places(bytes: &[u8], wanted: &[u8]) -> Vec<usize> {
    let windows = bytes.windows(wanted.len()).enumerate();
    windows.filter(|(_, window)| *window == wanted).map(|(at, _)| at).collect()
}

/// Sets the checksum of the first block of the first root file system here, in which its superblock is:
/// CRC-32C from there to the block's end, with the field itself zero. Source: the kernel's
/// fs/erofs/erofs_fs.h.
fn seal_root(bytes: &mut [u8]) {
    const BLOCK: usize = 4096;
    const SUPERBLOCK: usize = 1024;
    let magic = 0xe0f5_e1e2_u32.to_le_bytes();
    let Some(at) = bytes.windows(4).position(|window| window == magic) else { return };
    bytes[at + 4..at + 8].fill(0);
    let block = &bytes[at..at + BLOCK - SUPERBLOCK];
    let sum = block.iter().fold(u32::MAX, |sum, byte| {
        let step = |sum: u32, _| sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        (0..8).fold(sum ^ u32::from(*byte), step)
    });
    bytes[at + 4..at + 8].copy_from_slice(&sum.to_le_bytes());
}
