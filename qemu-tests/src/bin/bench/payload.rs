//! The smallest guest: an ELF file with a PVH note whose first instructions say that they run.
//! Sources: System V ABI, "ELF Header" and "Program Header"; Xen docs/misc/pvh.pandoc.

/// What the guest writes.
pub(crate) const FIRST: &str = "!";

/// Where the guest is loaded and entered.
const ADDRESS: u32 = 0x10_0000;
/// Bytes of the ELF header and of one program header.
const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// Type of the note that holds the 32-bit entry point (XEN_ELFNOTE_PHYS32_ENTRY).
const PHYS32_ENTRY: u32 = 18;

/// mov dx, 0x3f8; mov al, '!'; out dx, al; mov al, '\n'; out dx, al; then hlt for ever.
const CODE: [u8; 14] =
    [0x66, 0xba, 0xf8, 0x03, 0xb0, b'!', 0xee, 0xb0, b'\n', 0xee, 0xfa, 0xf4, 0xeb, 0xfd];

/// Returns the file.
pub(crate) fn elf() -> Vec<u8> {
    let note_at = ELF_HEADER + 2 * PROGRAM_HEADER;
    let note = [
        4u32.to_le_bytes().as_slice(),
        &4u32.to_le_bytes(),
        &PHYS32_ENTRY.to_le_bytes(),
        b"Xen\0",
        &ADDRESS.to_le_bytes(),
    ]
    .concat();
    let code_at = 4096;
    let mut file = vec![0; code_at];
    file[..8].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0]);
    put(&mut file, 16, &2u16.to_le_bytes()); // e_type: executable
    put(&mut file, 18, &62u16.to_le_bytes()); // e_machine: x86-64
    put(&mut file, 20, &1u32.to_le_bytes()); // e_version
    put(&mut file, 24, &u64::from(ADDRESS).to_le_bytes()); // e_entry
    put(&mut file, 32, &size(ELF_HEADER).to_le_bytes()); // e_phoff
    put(&mut file, 52, &64u16.to_le_bytes()); // e_ehsize
    put(&mut file, 54, &56u16.to_le_bytes()); // e_phentsize
    put(&mut file, 56, &2u16.to_le_bytes()); // e_phnum
    put(&mut file, 58, &64u16.to_le_bytes()); // e_shentsize
    program_header(&mut file, 0, (1, 5), (code_at, CODE.len()));
    program_header(&mut file, 1, (4, 4), (note_at, note.len()));
    put(&mut file, note_at, &note);
    file.extend(CODE);
    file
}

fn program_header(file: &mut [u8], number: usize, kind: (u32, u32), (at, length): (usize, usize)) {
    let header = ELF_HEADER + number * PROGRAM_HEADER;
    let address = if kind.0 == 1 { u64::from(ADDRESS) } else { size(at) };
    put(file, header, &kind.0.to_le_bytes()); // p_type
    put(file, header + 4, &kind.1.to_le_bytes()); // p_flags
    put(file, header + 8, &size(at).to_le_bytes()); // p_offset
    put(file, header + 16, &address.to_le_bytes()); // p_vaddr
    put(file, header + 24, &address.to_le_bytes()); // p_paddr
    put(file, header + 32, &size(length).to_le_bytes()); // p_filesz
    put(file, header + 40, &size(length).to_le_bytes()); // p_memsz
    put(file, header + 48, &4u64.to_le_bytes()); // p_align
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

fn size(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
