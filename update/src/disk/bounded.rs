//! A volume that is only read, and not for ever.

use std::io::{self, Read, Seek, SeekFrom, Write};

/// Bytes that are read of a volume to find a file on it: enough for folders of many thousand files.
pub const LOOKING: u64 = 32 << 20;

/// Storage of a volume that somebody else made, or that is damaged: its folders or files may be tied in a loop,
/// which `fatfs` follows without end. What is found pays for itself: reading a file costs what it has, and its
/// chain.
#[derive(Debug)]
pub struct Bounded<T> {
    storage: T,
    left: u64,
}

impl<T> Bounded<T> {
    /// Reads `bytes` of `storage` at most, the same ones counted each time.
    pub fn new(storage: T, bytes: u64) -> Self {
        Self { storage, left: bytes }
    }
}

impl<T: Read> Read for Bounded<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.storage.read(buffer)?;
        let left = self.left.checked_sub(count as u64);
        let endless = "the volume has no end: a folder or a file leads back to itself";
        self.left = left.ok_or_else(|| io::Error::other(endless))?;
        Ok(count)
    }
}

impl<T: Seek> Seek for Bounded<T> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.storage.seek(to)
    }
}

/// `fatfs` wants storage that can be written; this one refuses.
impl<T> Write for Bounded<T> {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
