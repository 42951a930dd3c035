//! Everything of an ELF core file that comes before the memory: header, segments and notes.
//! Source: System V ABI, "ELF Header" and "Program Header"; Linux include/uapi/linux/elfcore.h and
//! arch/x86/include/asm/user_64.h (`elf_prstatus`, `user_regs_struct`); QEMU
//! target/i386/arch_dump.c (`QEMUCPUState`, which crash(8) reads for page tables).
//!
//! | Part                | Bytes                       |
//! |---------------------|-----------------------------|
//! | ELF header          | 64                          |
//! | program headers     | 56 each: notes, then memory |
//! | notes per CPU       | CORE NT_PRSTATUS, then QEMU |
//! | the guest's note    | VMCOREINFO, if it has one   |
//! | padding to a page   |                             |
//! | memory, in order    | what is stored of each      |
//!
//! Addresses are guest-physical, in both address fields of a segment.

use kvm_bindings::kvm_segment;

use super::vmcoreinfo;
use crate::vcpu::Registers;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// Segments of memory begin on a page of the file.
const PAGE: usize = 4096;

const TYPE_CORE: u16 = 4;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;
const READABLE_WRITABLE_EXECUTABLE: u32 = 7;

const NOTE_PRSTATUS: u32 = 1;
const PRSTATUS: usize = 336;
/// Offsets in `elf_prstatus`: the process id, and the 27 registers.
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGISTERS: usize = 112;

/// Version of `QEMUCPUState`.
const QEMU_STATE_VERSION: u32 = 1;
/// Version and size; 18 registers; ten segments of 24 bytes; five control registers; GS base.
const QEMU_STATE: usize = 8 + 18 * 8 + 10 * 24 + 5 * 8 + 8;

/// A piece of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Bytes of it that are in the file, from the first on. The others are zero.
    pub stored: u64,
}

/// Returns what comes before `memory`, whose pieces follow in order without gaps. `guest` is what the guest
/// says of itself in VMCOREINFO.
pub fn head(memory: &[Segment], cpus: &[Registers], guest: Option<&[u8]>) -> Vec<u8> {
    let mut notes = Vec::new();
    for (number, registers) in (1u32..).zip(cpus) {
        note(&mut notes, "CORE", NOTE_PRSTATUS, &status(number, registers));
        note(&mut notes, "QEMU", 0, &qemu_state(registers));
    }
    if let Some(contents) = guest {
        note(&mut notes, vmcoreinfo::NAME, 0, contents);
    }
    let count = memory.len() + 1;
    let notes_at = HEADER + count * PROGRAM_HEADER;
    let memory_at = (notes_at + notes.len()).next_multiple_of(PAGE);
    let mut bytes = header(count);
    let notes_size = notes.len() as u64;
    let place = Placed { offset: notes_at as u64, address: 0, stored: notes_size, size: 0 };
    bytes.extend(program_header(SEGMENT_NOTE, &place));
    let mut offset = memory_at as u64;
    for Segment { address, size, stored } in memory.iter().copied() {
        bytes.extend(program_header(SEGMENT_LOAD, &Placed { offset, address, stored, size }));
        offset += stored;
    }
    bytes.extend(notes);
    bytes.resize(memory_at, 0);
    bytes
}

fn header(segments: usize) -> Vec<u8> {
    // 64-bit, little-endian, version 1, no particular system.
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    bytes.extend(TYPE_CORE.to_le_bytes());
    bytes.extend(MACHINE_X86_64.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    // Entry; where the program headers are; where the section headers are; flags.
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((HEADER as u64).to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    // Sizes: this header, a program header; their number; sections, of which there are none.
    let segments = u16::try_from(segments).unwrap_or(u16::MAX);
    for field in [64u16, 56, segments, 0, 0, 0] {
        bytes.extend(field.to_le_bytes());
    }
    bytes
}

/// Where a segment lies in the file and in the guest.
struct Placed {
    offset: u64,
    address: u64,
    /// Bytes in the file.
    stored: u64,
    /// Bytes in the guest.
    size: u64,
}

fn program_header(kind: u32, place: &Placed) -> Vec<u8> {
    let is_memory = kind == SEGMENT_LOAD;
    let flags = if is_memory { READABLE_WRITABLE_EXECUTABLE } else { 0 };
    let mut bytes = Vec::with_capacity(PROGRAM_HEADER);
    bytes.extend(kind.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    for field in [place.offset, place.address, place.address, place.stored, place.size, 0] {
        bytes.extend(field.to_le_bytes());
    }
    bytes
}

fn note(notes: &mut Vec<u8>, name: &str, kind: u32, body: &[u8]) {
    let word = |length: usize| u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes();
    notes.extend(word(name.len() + 1));
    notes.extend(word(body.len()));
    notes.extend(kind.to_le_bytes());
    notes.extend(name.as_bytes());
    // The name ends with a zero, and both parts are padded to four bytes.
    notes.resize((notes.len() + 1).next_multiple_of(4), 0);
    notes.extend(body);
    notes.resize(notes.len().next_multiple_of(4), 0);
}

/// `elf_prstatus` of a CPU; `number` stands for the process id that debuggers tell threads by.
fn status(number: u32, registers: &Registers) -> Vec<u8> {
    let (general, special) = (&registers.general, &registers.special);
    let user_registers = [
        general.r15,
        general.r14,
        general.r13,
        general.r12,
        general.rbp,
        general.rbx,
        general.r11,
        general.r10,
        general.r9,
        general.r8,
        general.rax,
        general.rcx,
        general.rdx,
        general.rsi,
        general.rdi,
        // No system call is under way.
        u64::MAX,
        general.rip,
        u64::from(special.cs.selector),
        general.rflags,
        general.rsp,
        u64::from(special.ss.selector),
        special.fs.base,
        special.gs.base,
        u64::from(special.ds.selector),
        u64::from(special.es.selector),
        u64::from(special.fs.selector),
        u64::from(special.gs.selector),
    ];
    let mut bytes = vec![0; PRSTATUS_PID];
    bytes.extend(number.to_le_bytes());
    bytes.resize(PRSTATUS_REGISTERS, 0);
    bytes.extend(user_registers.iter().flat_map(|register| register.to_le_bytes()));
    bytes.resize(PRSTATUS, 0);
    bytes
}

fn qemu_state(registers: &Registers) -> Vec<u8> {
    let (general, special) = (&registers.general, &registers.special);
    let mut bytes = Vec::with_capacity(QEMU_STATE);
    bytes.extend(QEMU_STATE_VERSION.to_le_bytes());
    bytes.extend(u32::try_from(QEMU_STATE).unwrap_or(u32::MAX).to_le_bytes());
    let numbers = [
        general.rax,
        general.rbx,
        general.rcx,
        general.rdx,
        general.rsi,
        general.rdi,
        general.rsp,
        general.rbp,
        general.r8,
        general.r9,
        general.r10,
        general.r11,
        general.r12,
        general.r13,
        general.r14,
        general.r15,
        general.rip,
        general.rflags,
    ];
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    let named = [special.cs, special.ds, special.es, special.fs, special.gs, special.ss];
    for segment in named.iter().chain([&special.ldt, &special.tr]) {
        bytes.extend(qemu_segment(segment));
    }
    for table in [special.gdt, special.idt] {
        let segment =
            kvm_segment { base: table.base, limit: table.limit.into(), ..Default::default() };
        bytes.extend(qemu_segment(&segment));
    }
    // CR1 does not exist, and its place is kept.
    let control = [special.cr0, 0, special.cr2, special.cr3, special.cr4];
    bytes.extend(control.iter().flat_map(|register| register.to_le_bytes()));
    bytes.extend(registers.kernel_gs_base.to_le_bytes());
    bytes
}

/// Selector, limit, attributes as in the high half of a descriptor, padding, base.
fn qemu_segment(segment: &kvm_segment) -> Vec<u8> {
    let attributes = u32::from(segment.type_) << 8
        | u32::from(segment.s) << 12
        | u32::from(segment.dpl) << 13
        | u32::from(segment.present) << 15
        | u32::from(segment.avl) << 20
        | u32::from(segment.l) << 21
        | u32::from(segment.db) << 22
        | u32::from(segment.g) << 23;
    let mut bytes = Vec::with_capacity(24);
    for word in [u32::from(segment.selector), segment.limit, attributes, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(segment.base.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use std::{io::Write, process::Command};

    use kvm_bindings::{kvm_regs, kvm_sregs};

    use super::*;

    fn cpu(rip: u64) -> Registers {
        let general = kvm_regs { rip, rax: 0x1122, rsp: 0x8000, ..Default::default() };
        let mut special = kvm_sregs { cr3: 0x1000, ..Default::default() };
        special.cs.selector = 0x10;
        Registers { general, special, kernel_gs_base: 7 }
    }

    fn word(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    #[test]
    fn segments_follow_each_other_from_a_page_on() {
        let memory = [
            Segment { address: 0, size: 1 << 24, stored: 1 << 20 },
            Segment { address: 1 << 32, size: 4096, stored: 4096 },
        ];
        let bytes = head(&memory, &[cpu(1), cpu(2)], None);
        assert_eq!(bytes.len() % PAGE, 0);
        let load = |number: usize| HEADER + (number + 1) * PROGRAM_HEADER;
        assert_eq!(word(&bytes, load(0) + 8), bytes.len() as u64);
        assert_eq!(word(&bytes, load(1) + 8), bytes.len() as u64 + (1 << 20));
        // In the file, in the guest.
        assert_eq!((word(&bytes, load(0) + 32), word(&bytes, load(0) + 40)), (1 << 20, 1 << 24));
        assert_eq!((word(&bytes, load(1) + 24), word(&bytes, load(1) + 32)), (1 << 32, 4096));
    }

    #[test]
    fn notes_have_the_sizes_that_debuggers_expect() {
        let registers = cpu(0x1234);
        let status = status(1, &registers);
        // `rip` is the seventeenth of the registers.
        assert_eq!((status.len(), word(&status, 112 + 16 * 8)), (336, 0x1234));
        let state = qemu_state(&registers);
        assert_eq!((state.len(), word(&state, 8)), (QEMU_STATE, 0x1122));
        // CR3 is the fourth of five control registers, before the base of GS.
        assert_eq!((word(&state, QEMU_STATE - 24), word(&state, QEMU_STATE - 8)), (0x1000, 7));
    }

    #[test]
    fn another_program_reads_it() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let memory = [Segment { address: 0x10_0000, size: 4 << 20, stored: 4096 }];
        let mut bytes = head(&memory, &[cpu(0x1234), cpu(0x5678)], Some(b"OSRELEASE=6.1.0\n"));
        bytes.resize(bytes.len() + 4096, 0);
        file.write_all(&bytes).expect("written");
        let Ok(output) = Command::new("readelf").arg("-hlnW").arg(file.path()).output() else {
            println!("skipped: readelf on a dump: there is no readelf");
            return;
        };
        let text = String::from_utf8_lossy(&output.stdout);
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && complaints.is_empty(), "{complaints}");
        assert!(text.contains("CORE (Core file)") && text.contains("X86-64"), "{text}");
        assert_eq!(text.matches("NT_PRSTATUS").count(), 2, "{text}");
        // Sixteen bytes of contents.
        let note = text.lines().find(|line| line.contains("VMCOREINFO")).unwrap_or_default();
        assert!(note.contains("0x00000010"), "{text}");
        assert!(text.contains("0x0000000000100000 0x0000000000100000 0x001000 0x400000"), "{text}");
    }
}
