//! A dump of the guest: registers and memory as an ELF core file, made while virtual CPUs wait.
//!
//! `elf` makes everything before the memory and touches nothing; here the memory is read, through
//! its file: pages that the guest never touched then stay without memory of the host, and large
//! stretches of them are not in the dump either (`pieces`).

pub mod elf;
mod pieces;
pub mod vmcoreinfo;

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use pieces::{Piece, pieces};

use crate::{devices::fw_cfg::NotePlace, sys::memory::Ram, vcpu::Registers};

/// Bytes read at a time.
const PIECE: usize = 256 << 10;

/// Whether a dump is to end before all of it is written: the guest cannot wait any longer.
#[derive(Debug, Clone, Default)]
pub struct Cut(Arc<AtomicBool>);

impl Cut {
    /// Has the dump end.
    pub fn cut(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Returns whether it is to end.
    pub fn is_cut(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Returns whether both are of the same dump.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A dump that is ready to be written.
pub struct Dump {
    cut: Cut,
    head: Vec<u8>,
    file: Arc<File>,
    pieces: Vec<Piece>,
}

impl Dump {
    /// Makes the dump of guest memory `ram` and virtual CPUs with `registers`, in order. `note` is where the
    /// guest says that its VMCOREINFO is; one that cannot be is told and left out.
    pub fn new(ram: &Ram, registers: &[Registers], note: Option<NotePlace>, cut: Cut) -> Self {
        let pieces = pieces(&ram.file, &ram.regions);
        let segment = |piece: &Piece| elf::Segment {
            address: piece.address,
            size: piece.size,
            stored: piece.stored,
        };
        let memory: Vec<elf::Segment> = pieces.iter().map(segment).collect();
        let guest = note.and_then(|place| match vmcoreinfo::read(place, &ram.memory) {
            Ok(contents) => Some(contents),
            Err(error) => {
                eprintln!("holdfast-vmm: the dump goes without the note VMCOREINFO: {error}");
                None
            }
        });
        let head = elf::head(&memory, registers, guest.as_deref());
        Self { cut, head, file: Arc::clone(&ram.file), pieces }
    }

    /// Returns the dump's length in bytes.
    pub fn length(&self) -> u64 {
        let memory: u64 = self.pieces.iter().map(|piece| piece.stored).sum();
        self.head.len() as u64 + memory
    }

    /// Returns what it ends by before its time.
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// Writes all of it. Fails when it is cut: what comes after that is not of the same moment.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.head)?;
        let mut buffer = vec![0; PIECE];
        for piece in &self.pieces {
            let mut done = 0;
            while done < piece.stored {
                let left = usize::try_from(piece.stored - done).unwrap_or(PIECE).min(PIECE);
                let (part, _) = buffer.split_at_mut(left);
                self.file.read_exact_at(part, piece.offset + done)?;
                if self.cut.is_cut() {
                    return Err(io::Error::other("the guest could not wait any longer"));
                }
                out.write_all(part)?;
                done += left as u64;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use types::vm::MemoryBacking;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    #[test]
    fn memory_follows_the_head_piece_by_piece() {
        let ranges = [(0, 1 << 20), (1 << 32, 1 << 20)];
        let ram = Ram::new(&ranges, MemoryBacking::Memfd).expect("memory");
        ram.memory.write_slice(b"low", GuestAddress(0x1234)).expect("inside");
        ram.memory.write_slice(b"high", GuestAddress((1 << 32) + 0xffff0)).expect("inside");
        let dump = Dump::new(&ram, &[Registers::default()], None, Cut::default());
        let mut bytes = Vec::new();
        dump.write_to(&mut bytes).expect("a vector takes all");
        assert_eq!(bytes.len() as u64, dump.length());
        let head = dump.head.len();
        assert_eq!(&bytes[head + 0x1234..][..3], b"low");
        // Both pages of the first region that have contents are next to each other.
        assert_eq!(&bytes[head + 0x2000 + 0xffff0..][..4], b"high");
    }

    #[test]
    fn a_dump_that_is_cut_ends_there() {
        let ram = Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).expect("memory");
        ram.memory.write_slice(b"here", GuestAddress(0)).expect("inside");
        let dump = Dump::new(&ram, &[], None, Cut::default());
        dump.cut().cut();
        let mut bytes = Vec::new();
        assert!(dump.write_to(&mut bytes).is_err());
        assert_eq!(bytes.len(), dump.head.len());
    }

    #[test]
    fn memory_that_was_never_touched_is_not_sent() {
        let ram = Ram::new(&[(0, 64 << 20)], MemoryBacking::Memfd).expect("memory");
        ram.memory.write_slice(b"here", GuestAddress(32 << 20)).expect("inside");
        let dump = Dump::new(&ram, &[], None, Cut::default());
        assert_eq!(dump.length(), dump.head.len() as u64 + 2 * 4096);
        let mut bytes = Vec::new();
        dump.write_to(&mut bytes).expect("a vector takes all");
        assert_eq!(&bytes[dump.head.len() + 4096..][..4], b"here");
    }

    #[test]
    fn what_the_guest_says_of_itself_is_in_the_head() {
        let ram = Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).expect("memory");
        let mut note = [11u32, 10, 0].map(u32::to_le_bytes).concat();
        note.extend(b"VMCOREINFO\0\0OSRELEASE=");
        ram.memory.write_slice(&note, GuestAddress(0x3000)).expect("inside");
        let has = |address| {
            let place = Some(NotePlace { address, size: 64 });
            let head = Dump::new(&ram, &[Registers::default()], place, Cut::default()).head;
            head.windows(note.len()).filter(|part| *part == note).count()
        };
        assert_eq!((has(0x3000), has(0x3004), has(1 << 40)), (1, 0, 0));
    }

    #[test]
    fn untouched_memory_stays_untouched() {
        let ram = Ram::new(&[(0, 8 << 20)], MemoryBacking::Memfd).expect("memory");
        let dump = Dump::new(&ram, &[], None, Cut::default());
        dump.write_to(&mut io::sink()).expect("a sink takes all");
        assert_eq!(ram.resident(), Some(0));
    }
}
