//! An ELF kernel: its segments, and where PVH enters it.
//! Source: System V ABI chapter 4 "ELF Header", chapter 5 "Program Header", "Note Section"; AMD64 supplement §4.1;
//! Xen xen/include/public/elfnote.h, `XEN_ELFNOTE_PHYS32_ENTRY`.
//!
//! | Offset | Bytes | Field of the header | Offset | Bytes | Field of a program header |
//! |--------|-------|---------------------|--------|-------|---------------------------|
//! | 4      | 1     | class: 2 is 64 bits | 0      | 4     | type: 1 load, 4 note      |
//! | 5      | 1     | data: 1 is little   | 8      | 8     | offset in the file        |
//! | 18     | 2     | machine: 62 is x86  | 24     | 8     | physical address          |
//! | 32     | 8     | program headers     | 32     | 8     | bytes in the file         |
//! | 54     | 2     | bytes of each       | 40     | 8     | bytes in memory           |
//! | 56     | 2     | how many            |        |       |                           |

use std::{fs::File, io, os::unix::fs::FileExt};

use super::BootError;

/// Bytes of the header and of a program header.
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;

const CLASS: usize = 4;
const CLASS_32: u8 = 1;
const DATA: usize = 5;
const BIG_ENDIAN: u8 = 2;
const MACHINE: usize = 18;
const X86_64: [u8; 2] = 62u16.to_le_bytes();

const LOAD: u32 = 1;
const NOTE: u32 = 4;
/// Bytes of a note before its name: the name's length, the content's, and a type.
const NOTE_HEADER: usize = 12;
/// The longest notes that are read, in bytes.
const MOST_NOTES: u64 = 1 << 20;
/// Name and type of the note that PVH enters by.
const XEN: &[u8] = b"Xen\0";
const PHYS32_ENTRY: u32 = 18;

const CUT: BootError = BootError::Damaged("its ELF headers are wrong or cut short");

/// Bytes of the file that belong into memory; zeros follow up to `size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    /// Where they are in the file.
    pub(super) offset: u64,
    /// Where they belong, physically.
    pub(super) address: u64,
    /// How many they are.
    pub(super) length: u64,
    /// Bytes that the segment takes in memory.
    pub(super) size: u64,
}

/// What is known of a kernel.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    /// Segments that take memory.
    pub(super) segments: Vec<Segment>,
    /// Where PVH enters it; one without the note has no such entry.
    pub(super) entry: Option<u64>,
}

/// Says what an ELF file is that no x86-64 processor starts in its own mode.
pub(super) fn of_another_machine(head: &[u8]) -> Option<&'static str> {
    if head.get(CLASS) == Some(&CLASS_32) {
        return Some("32-bit ELF file");
    }
    if head.get(DATA) == Some(&BIG_ENDIAN) {
        return Some("big-endian ELF file");
    }
    let machine = head.get(MACHINE..MACHINE + X86_64.len())?;
    (machine != X86_64).then_some("ELF file for another kind of processor")
}

/// Reads what `file` says of itself.
pub(super) fn read(file: &File) -> Result<Kernel, BootError> {
    let mut header = [0; HEADER];
    read_at(file, &mut header, 0)?;
    let count = u16_at(&header, 56);
    if usize::from(u16_at(&header, 54)) != PROGRAM_HEADER && count > 0 {
        return Err(CUT);
    }
    let mut list = vec![0; usize::from(count) * PROGRAM_HEADER];
    read_at(file, &mut list, u64_at(&header, 32))?;
    let mut kernel = Kernel::default();
    for program in list.chunks_exact(PROGRAM_HEADER) {
        let segment = Segment {
            offset: u64_at(program, 8),
            address: u64_at(program, 24),
            length: u64_at(program, 32),
            size: u64_at(program, 40),
        };
        match u32_at(program, 0) {
            LOAD if segment.length > segment.size => return Err(CUT),
            LOAD if segment.size > 0 => kernel.segments.push(segment),
            NOTE if kernel.entry.is_none() => {
                let length = usize::try_from(segment.length.min(MOST_NOTES)).map_err(|_| CUT)?;
                let mut notes = vec![0; length];
                read_at(file, &mut notes, segment.offset)?;
                // Linkers that merge notes align the segment to 8 bytes where one of them is so, while Linux' and Xen's
                // stay at 4; others align each note to 8.
                kernel.entry = entry_of(&notes, 4).or_else(|| entry_of(&notes, 8));
            }
            _ => {}
        }
    }
    Ok(kernel)
}

/// Returns the entry that one of `notes` names, whose parts are aligned from the note's start.
fn entry_of(mut notes: &[u8], alignment: usize) -> Option<u64> {
    loop {
        let head = notes.get(..NOTE_HEADER)?;
        let name = usize::try_from(u32_at(head, 0)).ok()?;
        let size = usize::try_from(u32_at(head, 4)).ok()?;
        let at = (NOTE_HEADER + name).next_multiple_of(alignment);
        let content = notes.get(at..at + size)?;
        let is_xen = notes.get(NOTE_HEADER..NOTE_HEADER + name) == Some(XEN);
        if is_xen && u32_at(head, 8) == PHYS32_ENTRY {
            return match size {
                4 => Some(u32_at(content, 0).into()),
                8 => Some(u64_at(content, 0)),
                _ => None,
            };
        }
        notes = notes.get((at + size).next_multiple_of(alignment)..)?;
    }
}

fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> Result<(), BootError> {
    file.read_exact_at(bytes, offset).map_err(|source| {
        // A place past what a file can have is an invalid argument.
        let cut = [io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidInput];
        if cut.contains(&source.kind()) { CUT } else { BootError::Read { file: "kernel", source } }
    })
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = bytes.get(at..at + N).and_then(|part| part.try_into().ok());
    found.unwrap_or([0; N])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(bytes, at))
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use super::*;

    /// A note of somebody's.
    pub(in crate::boot) fn note(name: &[u8], kind: u32, content: &[u8], align: usize) -> Vec<u8> {
        let mut note = Vec::new();
        for word in [name.len(), content.len()] {
            note.extend(u32::try_from(word).expect("short").to_le_bytes());
        }
        note.extend(kind.to_le_bytes());
        for part in [name, content] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(align), 0);
        }
        note
    }

    /// A file of segments: type, physical address, bytes in memory, alignment, and the bytes in the file.
    pub(in crate::boot) fn elf(segments: &[(u32, u64, u64, u64, &[u8])]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(HEADER, 0);
        file[MACHINE..MACHINE + 2].copy_from_slice(&X86_64);
        file[32] = 64;
        file[54] = 56;
        file[56] = u8::try_from(segments.len()).expect("few");
        let mut offset = HEADER + segments.len() * PROGRAM_HEADER;
        for (kind, address, size, align, bytes) in segments {
            file.extend(kind.to_le_bytes());
            file.extend(7u32.to_le_bytes());
            for word in [offset as u64, 0, *address, bytes.len() as u64, *size, *align] {
                file.extend(word.to_le_bytes());
            }
            offset += bytes.len();
        }
        segments.iter().for_each(|(.., bytes)| file.extend(*bytes));
        file
    }

    fn read_bytes(bytes: &[u8]) -> Result<Kernel, BootError> {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(bytes).expect("written");
        read(&file)
    }

    #[test]
    fn the_entry_is_found_among_notes_of_any_alignment_and_segment() {
        let enter = 0x10_0040u32.to_le_bytes();
        let property = note(b"GNU\0", 5, &[1; 16], 8);
        let odd = note(b"Hello\0", 1, &[1; 5], 4);
        let four = [odd.clone(), note(XEN, 1, &[9; 4], 4), note(XEN, PHYS32_ENTRY, &enter, 4)];
        let four = four.concat();
        let wide = note(XEN, PHYS32_ENTRY, &0x10_0080u64.to_le_bytes(), 8);
        let eight = [note(b"Hello\0", 1, &[1; 5], 8), wide].concat();
        let found = |segments: &[_]| read_bytes(&elf(segments)).expect("sound").entry;
        fn segment(align: u64, bytes: &[u8]) -> (u32, u64, u64, u64, &[u8]) {
            (NOTE, 0, 0, align, bytes)
        }
        assert_eq!(found(&[segment(4, &four)]), Some(0x10_0040));
        assert_eq!(found(&[segment(8, &eight)]), Some(0x10_0080));
        assert_eq!(found(&[segment(4, &four), segment(8, &property)]), Some(0x10_0040));
        assert_eq!(found(&[segment(8, &property), segment(0, &four)]), Some(0x10_0040));
        let merged = [property.clone(), four.clone()].concat();
        assert_eq!(found(&[segment(8, &merged)]), Some(0x10_0040));
        assert_eq!(found(&[segment(4, &odd)]), None);
        assert_eq!(found(&[segment(4, &four[..four.len() - 1])]), None);
        assert_eq!(found(&[]), None);
    }

    #[test]
    fn segments_are_what_takes_memory() {
        let segments: [(u32, u64, u64, u64, &[u8]); 4] = [
            (LOAD, 0x10_0000, 0x3000, 1, &[7; 9]),
            (LOAD, 0x20_0000, 0x1000, 1, &[]),
            (LOAD, 0, 0, 1, &[]),
            (7, 0x30_0000, 0x1000, 1, &[]),
        ];
        let file = elf(&segments);
        let kernel = read_bytes(&file).expect("sound");
        let offset = file.len() as u64 - 9;
        let code = Segment { offset, address: 0x10_0000, length: 9, size: 0x3000 };
        let bss = Segment { offset: offset + 9, address: 0x20_0000, length: 0, size: 0x1000 };
        assert_eq!(kernel, Kernel { segments: vec![code, bss], entry: None });
    }

    #[test]
    fn headers_that_are_wrong_or_cut_short_are_damage() {
        let file = elf(&[(LOAD, 0x10_0000, 16, 1, &[7; 16])]);
        let damaged = |bytes: &[u8]| matches!(read_bytes(bytes), Err(BootError::Damaged(_)));
        assert!(!damaged(&file));
        assert!(damaged(&file[..HEADER - 1]) && damaged(&file[..HEADER + PROGRAM_HEADER - 1]));
        for (at, value) in [(54, 55), (HEADER + 40, 15), (39, 0xff)] {
            let mut wrong = file.clone();
            wrong[at] = value;
            assert!(damaged(&wrong), "{at}");
        }
        let note = elf(&[(NOTE, 0, 0, 4, &[7; 16])]);
        assert!(damaged(&note[..note.len() - 1]));
    }
}
