//! A kernel of a few instructions, as a file that the VMM boots.

/// Where the program lies and starts.
const PROGRAM: u32 = 0x10_0000;

/// Returns 32-bit code as an ELF file with a PVH entry (Xen docs/misc/pvh.pandoc).
pub(crate) fn elf(code: &[u8]) -> Vec<u8> {
    const HEADERS: usize = 64 + 2 * 56;
    // Name "Xen", number 18 (XEN_ELFNOTE_PHYS32_ENTRY), the address.
    let mut note = Vec::new();
    for word in [4u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(PROGRAM.to_le_bytes());
    let code_at = HEADERS + note.len();
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend(2u16.to_le_bytes());
    file.extend(62u16.to_le_bytes());
    file.extend(1u32.to_le_bytes());
    for word in [u64::from(PROGRAM), 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 2, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let mut segment = |kind: u32, at: usize, length: usize, align: u64| {
        file.extend(kind.to_le_bytes());
        file.extend(5u32.to_le_bytes());
        for word in [at as u64, PROGRAM.into(), PROGRAM.into(), length as u64, length as u64, align]
        {
            file.extend(word.to_le_bytes());
        }
    };
    segment(1, code_at, code.len(), 1);
    segment(4, HEADERS, note.len(), 4);
    file.extend(note);
    file.extend(code);
    file
}
