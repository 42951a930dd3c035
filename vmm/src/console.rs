//! The guest's console output, kept so that a late reader gets it in full: a ring of the newest
//! bytes, addressed by their offset since the guest started.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use types::console as kept;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// Bytes of output kept.
pub const CAPACITY: usize = 1 << 20;

/// The output. Clones share it.
#[derive(Clone, Default)]
pub struct Console {
    shared: Arc<(Mutex<Ring>, Condvar)>,
}

#[derive(Default)]
struct Ring {
    bytes: VecDeque<u8>,
    end: u64,
    kept: Option<Kept>,
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Offset of its first byte.
    pub from: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Offset behind the newest byte there is.
    pub end: u64,
}

impl Console {
    /// Makes an empty console that also keeps its newest output in `file`, in the form of
    /// `types::console`: whatever ends the process, the output is there.
    pub fn kept_in(file: File) -> io::Result<Self> {
        let console = Self::default();
        console.ring().kept = Some(Kept::new(file)?);
        Ok(console)
    }

    /// Adds output; the oldest goes when the ring is full.
    pub fn push(&self, bytes: &[u8]) {
        let (_, changed) = &*self.shared;
        let mut ring = self.ring();
        for byte in bytes {
            if ring.bytes.len() == CAPACITY {
                ring.bytes.pop_front();
            }
            ring.bytes.push_back(*byte);
            if let Some(kept) = &ring.kept {
                kept.put(ring.end, *byte);
            }
            ring.end += 1;
        }
        if let Some(kept) = &ring.kept {
            kept.finish(ring.end);
        }
        changed.notify_all();
    }

    /// Returns output from offset `from`, or from the oldest byte kept if that is later; at most
    /// `most` bytes. Waits up to `wait` for a byte to be there. An offset behind the end is that of an earlier
    /// process, whose reader has seen nothing of this one: it gets the oldest byte. [`u64::MAX`] is the end itself.
    pub fn read(&self, from: u64, most: usize, wait: Duration) -> Piece {
        let (_, changed) = &*self.shared;
        let ring = self.ring();
        let from = if from > ring.end && from < u64::MAX { 0 } else { from };
        let (ring, _) = changed
            .wait_timeout_while(ring, wait, |ring| ring.end <= from)
            .unwrap_or_else(PoisonError::into_inner);
        let start = ring.end - ring.bytes.len() as u64;
        let from = from.clamp(start, ring.end);
        let skip = usize::try_from(from - start).unwrap_or(usize::MAX);
        let bytes = ring.bytes.iter().skip(skip).take(most).copied().collect();
        Piece { from, bytes, end: ring.end }
    }

    /// Returns the offsets of the oldest byte kept and behind the newest.
    pub fn range(&self) -> (u64, u64) {
        let ring = self.ring();
        (ring.end - ring.bytes.len() as u64, ring.end)
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The file that keeps output.
struct Kept(MmapRegion);

impl Kept {
    fn new(file: File) -> io::Result<Self> {
        file.set_len(kept::FILE_SIZE as u64)?;
        let map = MmapRegion::from_file(FileOffset::new(file, 0), kept::FILE_SIZE);
        let this = Self(map.map_err(io::Error::other)?);
        this.finish(0);
        this.write(0, &kept::MAGIC);
        Ok(this)
    }

    fn put(&self, number: u64, byte: u8) {
        self.write(kept::place(number), &[byte]);
    }

    fn finish(&self, end: u64) {
        self.write(kept::MAGIC.len(), &end.to_le_bytes());
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        // Every place is inside: the mapping has the size of the form.
        let _ = self.0.as_volatile_slice().write_slice(bytes, at);
    }
}

impl io::Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_readers_get_what_is_kept() {
        let console = Console::default();
        console.push(b"hello");
        let piece = console.read(1, 3, Duration::ZERO);
        assert_eq!(piece, Piece { from: 1, bytes: b"ell".to_vec(), end: 5 });
        console.push(&vec![b'x'; CAPACITY]);
        let piece = console.read(0, 1, Duration::ZERO);
        assert_eq!((piece.from, piece.end), (5, 5 + CAPACITY as u64));
        assert_eq!(console.read(u64::MAX, 9, Duration::ZERO).bytes, b"");
        let behind = console.read(9 + CAPACITY as u64, 1, Duration::from_secs(30));
        assert_eq!((behind.from, behind.bytes.len()), (5, 1), "at once, from the oldest on");
    }

    #[test]
    fn output_outlives_the_console() {
        let mut file = tempfile::tempfile().expect("a file");
        let console = Console::kept_in(file.try_clone().expect("a copy")).expect("mapped");
        let output: Vec<u8> = (0..=250u8).cycle().take(kept::KEPT + 1000).collect();
        console.push(&output);
        drop(console);
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut file, &mut bytes).expect("read");
        let tail = kept::parse(&bytes).expect("of that form");
        assert_eq!((tail.from, tail.bytes.as_slice()), (1000, &output[1000..]));
    }
}
