//! The note VMCOREINFO: what a Linux guest says of itself to those who read its dump, as where its symbols
//! are. The guest chose place and contents, so nothing of it is believed.
//! Source: QEMU docs/specs/vmcoreinfo.rst; Linux kernel/crash_core.c (`append_elf_note`), include/linux/
//! elfcore.h; System V ABI, "Note Section".
//!
//! | Offset | Bytes | Field, little-endian               |
//! |--------|-------|------------------------------------|
//! | 0      | 4     | bytes of the name, 11              |
//! | 4      | 4     | bytes of the contents              |
//! | 8      | 4     | type, 0                            |
//! | 12     | 12    | name: VMCOREINFO, zero, padding    |
//! | 24     |       | contents                           |

use vm_memory::{Bytes, GuestAddress};

use crate::{devices::fw_cfg::NotePlace, sys::memory::GuestRam};

/// Name of the note.
pub const NAME: &str = "VMCOREINFO";

/// Most that a note may have, in bytes. A kernel's has a page or a few.
const MAX_SIZE: u32 = 1 << 20;
/// Bytes before the contents.
const CONTENTS: usize = 24;

/// Why a note is not in a dump.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum NoteError {
    #[error("the guest's note VMCOREINFO has {size} bytes; 24 to 1048576 are possible")]
    Size { size: u32 },
    #[error("the guest's note VMCOREINFO of {size} bytes at {address:#x} is not all in its memory")]
    Outside { address: u64, size: u32 },
    #[error("what the guest has at {address:#x} is no note VMCOREINFO of at most {size} bytes")]
    NoNote { address: u64, size: u32 },
}

/// Returns the contents of the note that is said to be at `place`.
pub fn read(place: NotePlace, ram: &GuestRam) -> Result<Vec<u8>, NoteError> {
    let NotePlace { address, size } = place;
    let bytes = usize::try_from(size).ok().filter(|bytes| size <= MAX_SIZE && *bytes >= CONTENTS);
    let mut note = vec![0; bytes.ok_or(NoteError::Size { size })?];
    let outside = NoteError::Outside { address, size };
    if address.checked_add(size.into()).is_none() {
        return Err(outside);
    }
    ram.read_slice(&mut note, GuestAddress(address)).map_err(|_| outside)?;
    contents(&note).map(<[u8]>::to_vec).ok_or(NoteError::NoNote { address, size })
}

/// Returns the contents of a note; more may follow it.
fn contents(note: &[u8]) -> Option<&[u8]> {
    let (header, contents) = note.split_at_checked(CONTENTS)?;
    let (numbers, name) = header.split_at_checked(12)?;
    let word = |at: usize| {
        let bytes = numbers.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let named = name.strip_prefix(NAME.as_bytes())?.first() == Some(&0);
    let length = usize::try_from(word(4)?).ok()?;
    let is_it = named && word(0) == u32::try_from(NAME.len() + 1).ok() && word(8) == Some(0);
    contents.get(..length).filter(|_| is_it)
}

#[cfg(test)]
mod tests {
    use types::vm::MemoryBacking;

    use super::*;
    use crate::sys::memory::Ram;

    const SAID: &[u8] = b"OSRELEASE=6.1.0-28-amd64\n";

    fn note(name_size: u32, size: usize, kind: u32, name: &[u8; 12]) -> Vec<u8> {
        let size = u32::try_from(size).expect("small");
        let mut note: Vec<u8> = [name_size, size, kind].map(u32::to_le_bytes).concat();
        note.extend(name);
        note.extend(SAID);
        note.resize(64, 0);
        note
    }

    /// Reads the note at the very end of memory.
    fn found(note: &[u8], size: u32) -> Result<Vec<u8>, NoteError> {
        let ram = Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).expect("memory").memory;
        let address = (1 << 20) - note.len() as u64;
        ram.write_slice(note, GuestAddress(address)).expect("inside");
        read(NotePlace { address, size }, &ram)
    }

    #[test]
    fn the_contents_of_a_note_are_found() {
        let note = note(11, SAID.len(), 0, b"VMCOREINFO\0\0");
        assert_eq!(found(&note, 64).as_deref(), Ok(SAID));
    }

    #[test]
    fn a_note_that_cannot_be_is_told() {
        let right = note(11, SAID.len(), 0, b"VMCOREINFO\0\0");
        assert_eq!(found(&right, 23), Err(NoteError::Size { size: 23 }));
        assert_eq!(found(&right, MAX_SIZE + 1), Err(NoteError::Size { size: MAX_SIZE + 1 }));
        let address = (1 << 20) - 64;
        assert_eq!(found(&right, 65), Err(NoteError::Outside { address, size: 65 }));
        let ram = Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).expect("memory").memory;
        let wraps = read(NotePlace { address: u64::MAX - 30, size: 64 }, &ram);
        assert!(matches!(wraps, Err(NoteError::Outside { .. })), "{wraps:?}");
        let none = Err(NoteError::NoNote { address, size: 64 });
        assert_eq!(found(&note(10, SAID.len(), 0, b"VMCOREINFO\0\0"), 64), none);
        assert_eq!(found(&note(11, SAID.len(), 1, b"VMCOREINFO\0\0"), 64), none);
        assert_eq!(found(&note(11, SAID.len(), 0, b"VMCOREINFOS\0"), 64), none);
        // Its contents end with what was said to be there, and 24 bytes come before them.
        assert!(found(&note(11, 40, 0, b"VMCOREINFO\0\0"), 64).is_ok());
        assert_eq!(found(&note(11, 41, 0, b"VMCOREINFO\0\0"), 64), none);
    }
}
