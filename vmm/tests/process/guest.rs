//! A guest of a few instructions that does what it is told over the serial port.
//!
//! | Input | What it does                                                         |
//! |-------|----------------------------------------------------------------------|
//! | p     | tells the panic device that it panicked                              |
//! | q     | powers off                                                           |
//! | h     | says the hypervisor's name of CPUID, 12 bytes                        |
//! | s     | says that it sleeps, or that it no longer does                       |
//! | b     | says whether its power button was pressed since it last looked: 1, 0 |
//! | other | nothing                                                              |
//!
//! It says `A` first, and counts at [`COUNTER`] whenever it looks for input. It has no interrupt
//! table, so an interrupt that cannot be masked is the end of it.

/// Where the program lies and starts.
const PROGRAM: u32 = 0x10_0000;
/// A 32-bit number that grows while the guest runs.
pub(crate) const COUNTER: u64 = 0x20_0000;

/// 32-bit code.
const CODE: &[u8] = &[
    0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xb0, b'A', 0xee, // mov al, 'A'; out dx, al
    // loop:
    0xff, 0x05, 0x00, 0x00, 0x20, 0x00, // inc dword [COUNTER]
    0xba, 0xfd, 0x03, 0x00, 0x00, // mov edx, 0x3fd
    0xec, 0xa8, 0x01, // in al, dx; test al, 1
    0x74, 0xf0, // jz loop
    0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xec, // in al, dx
    0x3c, b'p', // cmp al, 'p'
    0x75, 0x0a, // jne next
    0xba, 0x05, 0x05, 0x00, 0x00, // mov edx, 0x505
    0xb0, 0x01, 0xee, // mov al, 1; out dx, al
    0xeb, 0xdc, // jmp loop
    // next:
    0x3c, b'q', // cmp al, 'q'
    0x75, 0x0d, // jne after
    0xba, 0x04, 0x06, 0x00, 0x00, // mov edx, 0x604
    0x66, 0xb8, 0x00, 0x20, // mov ax, 0x2000
    0x66, 0xef, // out dx, ax
    0xeb, 0xcb, // jmp loop
    // after:
    0x3c, b'h', // cmp al, 'h'
    0x75, 0x2d, // jne sleep
    0xb8, 0x00, 0x00, 0x00, 0x40, // mov eax, 0x40000000
    0x0f, 0xa2, // cpuid
    0x89, 0x1d, 0x10, 0x00, 0x20, 0x00, // mov [0x200010], ebx
    0x89, 0x0d, 0x14, 0x00, 0x20, 0x00, // mov [0x200014], ecx
    0x89, 0x15, 0x18, 0x00, 0x20, 0x00, // mov [0x200018], edx
    0xbe, 0x10, 0x00, 0x20, 0x00, // mov esi, 0x200010
    0xb9, 0x0c, 0x00, 0x00, 0x00, // mov ecx, 12
    0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xfc, 0xf3, 0x6e, // cld; rep outsb
    0xeb, 0x9a, // jmp loop
    // sleep:
    0x3c, b's', // cmp al, 's'
    0x75, 0x0b, // jne button
    0xba, 0x0c, 0x06, 0x00, 0x00, // mov edx, 0x60c
    0xec, 0x34, 0x01, 0xee, // in al, dx; xor al, 1; out dx, al
    0xeb, 0x8b, // jmp loop
    // button:
    0x3c, b'b', // cmp al, 'b'
    0x75, 0x87, // jne loop
    0xba, 0x00, 0x06, 0x00, 0x00, // mov edx, 0x600
    0x66, 0xed, 0x66, 0xef, // in ax, dx; out dx, ax
    0x88, 0xe0, // mov al, ah
    0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xee, // out dx, al
    0xeb, 0xe7, // jmp to the jump before
];

/// Returns the guest as an ELF file with a PVH entry (Xen docs/misc/pvh.pandoc).
pub(crate) fn image() -> Vec<u8> {
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
    segment(1, code_at, CODE.len(), 1);
    segment(4, HEADERS, note.len(), 4);
    file.extend(note);
    file.extend(CODE);
    file
}
