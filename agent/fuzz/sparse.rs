// A volume of which few blocks are not zero, as the fuzz targets and the replays of their corpora
// write it down: a number of a block of 1 KiB (16 bits, little-endian) and its bytes, again and again.

use std::{cell::RefCell, io, os::unix::fs::FileExt};

/// Bytes of a block, and blocks of a volume.
const BLOCK: usize = 1024;
const BLOCKS: usize = 16 << 10;

/// The volume.
pub(crate) struct Sparse(RefCell<Vec<u8>>);

impl Sparse {
    /// Reads what is written down; the last block may be short.
    pub(crate) fn new(records: &[u8]) -> Self {
        let mut bytes = vec![0; BLOCKS * BLOCK];
        for record in records.chunks(2 + BLOCK).filter(|record| record.len() > 2) {
            let at = usize::from(u16::from_le_bytes([record[0], record[1]])) % BLOCKS * BLOCK;
            bytes[at..at + record.len() - 2].copy_from_slice(&record[2..]);
        }
        Self(RefCell::new(bytes))
    }
}

impl FileExt for Sparse {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let bytes = self.0.borrow();
        let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize> {
        let mut bytes = self.0.borrow_mut();
        let rest = usize::try_from(at).ok().and_then(|at| bytes.get_mut(at..)).unwrap_or_default();
        let count = rest.len().min(from.len());
        rest[..count].copy_from_slice(&from[..count]);
        Ok(count)
    }
}
