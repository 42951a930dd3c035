//! Other releases than the image's: the same program under another name of the same length, with
//! everything that seals the name made anew; and such as do not work.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};

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

/// Returns a release whose kernel is told `words` besides. They go into what the section of its command line
/// has left of its last block. Source: Microsoft "PE Format", "Section Table".
pub fn with_words(program: &[u8], words: &str) -> Result<Vec<u8>> {
    const NAME: &[u8; 8] = b".cmdline";
    let number = |at: usize| -> Result<usize> {
        let bytes = program.get(at..at + 4).context("a section's entry is cut off")?;
        Ok(usize::try_from(u32::from_le_bytes(bytes.try_into()?))?)
    };
    let entry = places(program, NAME).into_iter().next().context("no command line")?;
    let (length, room, at) = (number(entry + 8)?, number(entry + 16)?, number(entry + 20)?);
    let mut changed = program.to_vec();
    let old = program.get(at..at + length).context("no command line")?;
    let end = old.iter().rposition(|byte| *byte > b' ').map_or(0, |last| last + 1);
    let text = [&old[..end], b" ", words.as_bytes(), b"\0"].concat();
    ensure!(text.len() <= room, "{words:?} does not fit into the command line's {room} bytes");
    changed[at..at + text.len()].copy_from_slice(&text);
    changed[entry + 8..entry + 12].copy_from_slice(&u32::try_from(text.len())?.to_le_bytes());
    Ok(changed)
}

/// Returns a release whose first program is `init`.
pub fn with_init(program: &[u8], init: &[u8]) -> Result<Vec<u8>> {
    let elf = |at: usize| {
        let after = program.get(at..at + 8)?;
        after.windows(4).position(|window| window == b"\x7fELF").map(|more| at + more)
    };
    let ends = places(program, b"init\0").into_iter().map(|at| at + b"init\0".len());
    let at = ends.filter_map(elf).next().context("no init in the program")?;
    let mut changed = program.to_vec();
    changed.get_mut(at..at + init.len()).context("init is too long")?.copy_from_slice(init);
    Ok(changed)
}

/// Returns a release that has nothing in the first blocks of a file of its root, as `/usr/bin/agent`.
pub fn without(program: &[u8], file: &str, folder: &Path) -> Result<Vec<u8>> {
    const BLOCK: usize = 4096;
    let name = places(program, b"root.erofs\0").into_iter().next().context("no root")?;
    let root = name + erofs(&program[name..]).context("no root file system")?;
    let copy = folder.join("root.erofs");
    fs::write(&copy, &program[root..])?;
    let asked =
        Command::new("dump.erofs").arg("-e").arg(format!("--path={file}")).arg(&copy).output();
    let asked = asked.context("cannot start dump.erofs (package erofs-utils)")?;
    let said = String::from_utf8_lossy(&asked.stdout).into_owned();
    // The first extent: where it is in the file, its length, and behind a colon, where on the disk.
    let extent = said.lines().find_map(|line| line.trim().strip_prefix("0:"));
    let begins = extent.and_then(|line| line.split(':').nth(1)?.split("..").next());
    let begins: Option<usize> = begins.and_then(|number| number.trim().parse().ok());
    let at = root + begins.with_context(|| format!("where is {file}? {said}"))?;
    let mut changed = program.to_vec();
    changed.get_mut(at..at + BLOCK).context("the root ends before the file")?.fill(0);
    Ok(changed)
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

/// Where the superblock of a file system of this kind is.
const SUPERBLOCK: usize = 1024;

/// Returns where the first file system of the root's kind begins.
fn erofs(bytes: &[u8]) -> Option<usize> {
    let magic = 0xe0f5_e1e2_u32.to_le_bytes();
    bytes.windows(4).position(|window| window == magic)?.checked_sub(SUPERBLOCK)
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
    let Some(at) = erofs(bytes).map(|begin| begin + SUPERBLOCK) else { return };
    bytes[at + 4..at + 8].fill(0);
    let block = &bytes[at..at + BLOCK - SUPERBLOCK];
    let sum = block.iter().fold(u32::MAX, |sum, byte| {
        let step = |sum: u32, _| sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        (0..8).fold(sum ^ u32::from(*byte), step)
    });
    bytes[at + 4..at + 8].copy_from_slice(&sum.to_le_bytes());
}
