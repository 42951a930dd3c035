//! Encryption of a disk on the way between its file and the guest's memory (`types::disk_key`).
//!
//! What is written is encrypted in a copy; the guest may change its own buffer meanwhile. What is
//! read arrives as ciphertext in the guest's buffer and is decrypted there, in pieces: the guest, whose
//! data it is, could look at it, and altering it harms nobody else.

use std::io;

use types::disk_key::{DiskKey, SECTOR, SectorCipher};
use vm_memory::{Address, Bytes, GuestAddress};

use crate::sys::memory::GuestRam;

/// Longest write that is encrypted at once, in bytes. The rest of a longer one follows as that of a short write
/// does.
const WRITE_LIMIT: usize = 64 << 10;
/// Bytes of copies in flight from which on no other command is begun: they are the process's memory, which has a
/// bound, and a guest can have many queues. File systems write a file one piece after the other anyway.
const COPIES: usize = 2 << 20;
/// Bytes that are decrypted at once.
const PIECE: usize = 16 << 10;

/// Bytes of a sector, as completions count.
const SECTOR_BYTES: u32 = 512;
const _: () =
    assert!(SECTOR_BYTES as usize == SECTOR && (WRITE_LIMIT | PIECE).is_multiple_of(SECTOR));

/// Encrypts and decrypts for one engine.
pub(super) struct Seal {
    cipher: SectorCipher,
    ram: GuestRam,
    /// Reads in flight, by token.
    reads: Vec<Option<Read>>,
    /// Bytes of the copies that are written, by token, and of all together.
    copies: Vec<usize>,
    copied: usize,
    piece: Vec<u8>,
}

struct Read {
    offset: u64,
    into: Vec<(GuestAddress, u32)>,
}

impl Seal {
    /// Makes one for up to `depth` commands in flight.
    pub(super) fn new(key: &DiskKey, ram: GuestRam, depth: u16) -> Self {
        Self {
            cipher: SectorCipher::new(key),
            ram,
            reads: (0..depth).map(|_| None).collect(),
            copies: vec![0; depth.into()],
            copied: 0,
            piece: vec![0; PIECE],
        }
    }

    /// Remembers where a read goes, until [`Self::finish`] or [`Self::forget`].
    pub(super) fn begin_read(
        &mut self,
        token: u16,
        offset: u64,
        into: &[(GuestAddress, u32)],
    ) -> io::Result<()> {
        check(offset, into)?;
        let place = self.reads.get_mut(usize::from(token)).ok_or(io::ErrorKind::InvalidInput)?;
        *place = Some(Read { offset, into: into.to_vec() });
        Ok(())
    }

    /// A command failed or was not started: the next one with this token is another.
    pub(super) fn forget(&mut self, token: u16) {
        self.take(token);
    }

    /// Ends a command that moved `moved` bytes; returns how many of them count: whole sectors. Fails
    /// when less than a sector was moved, or when the bytes of a read are not memory.
    pub(super) fn finish(&mut self, token: u16, moved: u32) -> io::Result<u32> {
        let read = self.take(token);
        let whole = moved - moved % SECTOR_BYTES;
        if moved > 0 && whole == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some(read) = read else { return Ok(whole) };
        let mut segments = Segments { list: &read.into, skip: 0 };
        let mut left = usize::try_from(whole).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut sector = read.offset / SECTOR as u64;
        while left > 0 {
            let length = left.min(PIECE);
            let piece = &mut self.piece[..length];
            let mut back = segments;
            segments.fill(&self.ram, piece)?;
            self.cipher.decrypt_sparse(sector, piece);
            back.empty(&self.ram, piece)?;
            sector += (length / SECTOR) as u64;
            left -= length;
        }
        Ok(whole)
    }

    /// Returns whether another command may begin.
    pub(super) fn has_room(&self) -> bool {
        self.copied < COPIES
    }

    /// Returns where a read goes, and forgets it, or the copy of a write.
    fn take(&mut self, token: u16) -> Option<Read> {
        if let Some(copy) = self.copies.get_mut(usize::from(token)) {
            self.copied -= std::mem::take(copy);
        }
        self.reads.get_mut(usize::from(token)).and_then(Option::take)
    }

    /// Returns the encrypted bytes of a write, or of its first part, which count until [`Self::finish`] or
    /// [`Self::forget`].
    pub(super) fn encrypt(
        &mut self,
        token: u16,
        offset: u64,
        from: &[(GuestAddress, u32)],
    ) -> io::Result<Box<[u8]>> {
        let length = check(offset, from)?.min(WRITE_LIMIT as u64);
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        Segments { list: from, skip: 0 }.fill(&self.ram, &mut bytes)?;
        self.cipher.encrypt(offset / SECTOR as u64, &mut bytes);
        let copy = self.copies.get_mut(usize::from(token)).ok_or(io::ErrorKind::InvalidInput)?;
        *copy = bytes.len();
        self.copied += bytes.len();
        Ok(bytes.into_boxed_slice())
    }
}

/// Returns the length of a transfer, which must be of whole sectors.
fn check(offset: u64, segments: &[(GuestAddress, u32)]) -> io::Result<u64> {
    let length: u64 = segments.iter().map(|(_, length)| u64::from(*length)).sum();
    let whole = offset.is_multiple_of(SECTOR as u64) && length.is_multiple_of(SECTOR as u64);
    if whole { Ok(length) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// A place in a list of pieces of the guest's memory.
#[derive(Clone, Copy)]
struct Segments<'a> {
    list: &'a [(GuestAddress, u32)],
    /// Bytes of the first piece that lie behind.
    skip: u32,
}

impl Segments<'_> {
    /// Returns where the next piece is and how long, at most `wanted`, and moves behind it.
    fn next(&mut self, wanted: usize) -> io::Result<(GuestAddress, usize)> {
        loop {
            let Some((&(address, length), rest)) = self.list.split_first() else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            let left = length - self.skip;
            if left == 0 {
                (self.list, self.skip) = (rest, 0);
                continue;
            }
            let count = left.min(u32::try_from(wanted).unwrap_or(u32::MAX));
            let start = address.checked_add(self.skip.into());
            let start = start.ok_or(io::ErrorKind::InvalidInput)?;
            self.skip += count;
            return Ok((start, usize::try_from(count).map_err(io::Error::other)?));
        }
    }

    /// Copies from the guest's memory.
    fn fill(&mut self, ram: &GuestRam, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (address, count) = self.next(bytes.len())?;
            let (now, later) = std::mem::take(&mut bytes).split_at_mut(count);
            ram.read_slice(now, address).map_err(outside)?;
            bytes = later;
        }
        Ok(())
    }

    /// Copies into the guest's memory.
    fn empty(&mut self, ram: &GuestRam, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (address, count) = self.next(bytes.len())?;
            let (now, later) = bytes.split_at(count);
            ram.write_slice(now, address).map_err(outside)?;
            bytes = later;
        }
        Ok(())
    }
}

fn outside(_: vm_memory::GuestMemoryError) -> io::Error {
    io::Error::from_raw_os_error(libc::EFAULT)
}
