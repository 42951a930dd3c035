//! A disk in memory: what was never written is read from a base file, or is zero. A copy costs little,
//! and shares all blocks with its original.

use std::{
    collections::BTreeMap,
    fs::File,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
};

use anyhow::{Context, Result};
use update::slots::fat::Storage;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;

/// A block that was written.
#[derive(Debug)]
pub(crate) struct Content {
    /// Differs from that of every block that holds something else.
    pub(crate) id: u64,
    /// Its bytes.
    pub(crate) bytes: [u8; BLOCK],
}

fn digest(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// A disk.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    /// Its length in bytes.
    pub(crate) length: u64,
    blocks: BTreeMap<u64, Arc<Content>>,
    position: u64,
}

impl Disk {
    /// Makes a disk of `length` bytes that holds what the file at `base` holds, which has holes where it
    /// is empty.
    pub(crate) fn new(base: Option<&Path>, length: u64) -> Result<Self> {
        let mut disk = Self { length, blocks: BTreeMap::new(), position: 0 };
        let Some(path) = base else { return Ok(disk) };
        let file = File::open(path).with_context(|| format!("{}", path.display()))?;
        let end = file.metadata()?.len();
        let mut offset = 0;
        while offset < end {
            let Ok(data) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(offset)) else {
                break;
            };
            offset = data / BLOCK as u64 * BLOCK as u64;
            let mut bytes = [0; BLOCK];
            let count = file.read_at(&mut bytes, offset)?;
            if bytes[..count].iter().any(|&byte| byte != 0) {
                disk.put(offset, &bytes, 0)?;
            }
            offset += BLOCK as u64;
        }
        Ok(disk)
    }

    /// Returns a block; `None` where nothing was written.
    pub(crate) fn block(&self, number: u64) -> Option<Arc<Content>> {
        self.blocks.get(&number).map(Arc::clone)
    }

    /// Writes `bytes` at `offset`. Writes with the same `tag` write the same there.
    pub(crate) fn put(&mut self, offset: u64, bytes: &[u8], tag: u64) -> io::Result<()> {
        let mut offset = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (number, within) = (offset / BLOCK as u64, offset % BLOCK as u64);
            let within = usize::try_from(within).map_err(io::Error::other)?;
            let (now, later) = rest.split_at(rest.len().min(BLOCK - within));
            let (before, mut bytes) = match self.block(number) {
                Some(block) if now.len() < BLOCK => (block.id, block.bytes),
                _ => (0, [0; BLOCK]),
            };
            bytes[within..within + now.len()].copy_from_slice(now);
            let id = digest((before, tag, offset, now.len()));
            self.blocks.insert(number, Arc::new(Content { id, bytes }));
            offset += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Makes a region read as zeros.
    pub(crate) fn give_up(&mut self, offset: u64, length: u64) -> io::Result<()> {
        const PIECE: u64 = 1 << 20;
        for start in (0..length).step_by(1 << 20) {
            let piece = usize::try_from(PIECE.min(length - start)).map_err(io::Error::other)?;
            self.put(offset + start, &vec![0; piece], 0)?;
        }
        Ok(())
    }

    /// Reads `length` bytes at `offset`.
    pub(crate) fn get(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut disk = self.clone_at(offset);
        let mut bytes = vec![0; length];
        disk.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn clone_at(&self, position: u64) -> Self {
        Self { position, ..self.clone() }
    }

    /// Returns the numbers of all blocks in a region that were written.
    pub(crate) fn numbers(&self, start: u64, length: u64) -> Vec<u64> {
        let unit = BLOCK as u64;
        let range = start / unit..(start + length) / unit;
        self.blocks.range(range).map(|(number, _)| *number).collect()
    }

    /// Returns a number that differs when what was written to a region differs.
    pub(crate) fn fingerprint(&self, start: u64, length: u64) -> u64 {
        let unit = BLOCK as u64;
        let mut hasher = DefaultHasher::new();
        for (number, block) in self.blocks.range(start / unit..(start + length) / unit) {
            (number, block.id).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Writes the disk to a file, leaving out what is zero.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let file = File::create(path).with_context(|| format!("{}", path.display()))?;
        file.set_len(self.length)?;
        for number in self.numbers(0, self.length) {
            if let Some(block) = self.block(number) {
                file.write_all_at(&block.bytes, number * BLOCK as u64)?;
            }
        }
        Ok(())
    }
}

impl Read for Disk {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.length.saturating_sub(self.position)).unwrap_or(BLOCK);
        let within = usize::try_from(self.position % BLOCK as u64).map_err(io::Error::other)?;
        let count = buffer.len().min(left).min(BLOCK - within);
        let block = self.block(self.position / BLOCK as u64);
        match block {
            Some(block) => buffer[..count].copy_from_slice(&block.bytes[within..within + count]),
            None => buffer[..count].fill(0),
        }
        self.position += count as u64;
        Ok(count)
    }
}

impl Write for Disk {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Disk {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let target = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
        };
        self.position = target.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// A part of a disk, as the EFI system partition's reader takes it.
#[derive(Debug)]
pub(crate) struct Part {
    disk: Disk,
    start: u64,
    length: u64,
}

impl Part {
    /// The `length` bytes from `start` on.
    pub(crate) fn new(disk: &Disk, start: u64, length: u64) -> Self {
        Self { disk: disk.clone_at(start), start, length }
    }
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = (self.start + self.length).saturating_sub(self.disk.position);
        let count = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.disk.read(&mut buffer[..count])
    }
}

impl Write for Part {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Part {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(offset) => SeekFrom::Start(self.start + offset),
            SeekFrom::End(by) => {
                let end = (self.start + self.length).checked_add_signed(by);
                SeekFrom::Start(end.ok_or(io::ErrorKind::InvalidInput)?)
            }
            SeekFrom::Current(by) => SeekFrom::Current(by),
        };
        Ok(self.disk.seek(to)?.saturating_sub(self.start))
    }
}

impl Storage for Part {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn forget(&mut self) -> io::Result<()> {
        Ok(())
    }
}
