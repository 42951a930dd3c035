//! The Linux boot protocol for bzImage, by its 64-bit entry.
//! Source: Linux Documentation/arch/x86/boot.rst; arch/x86/include/uapi/asm/bootparam.h.
//!
//! | Offset | Bytes | Field of the boot parameters  |
//! |--------|-------|-------------------------------|
//! | 0x070  | 8     | acpi_rsdp_addr                |
//! | 0x1e8  | 1     | e820_entries                  |
//! | 0x1f1  |       | setup header, from the file   |
//! | 0x210  | 1     | type_of_loader                |
//! | 0x211  | 1     | loadflags                     |
//! | 0x214  | 4     | code32_start                  |
//! | 0x218  | 4     | ramdisk_image                 |
//! | 0x21c  | 4     | ramdisk_size                  |
//! | 0x228  | 4     | cmd_line_ptr                  |
//! | 0x230  | 4     | kernel_alignment              |
//! | 0x234  | 1     | relocatable_kernel            |
//! | 0x258  | 8     | pref_address                  |
//! | 0x260  | 4     | init_size                     |
//! | 0x2d0  | 20 n  | e820_table                    |

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    num::NonZeroU32,
};

use super::{
    BootError, Entry, Linux, load_initrd, low_end, memory_map, read_into, write, write_cmdline,
};
use crate::{layout, sys::memory::Ram};

const HEADER: usize = 0x1f1;
const PAGE: usize = 4096;
const E820_TABLE: usize = 0x2d0;
/// Entries that fit the boot parameters.
const E820_MAX: usize = 128;
/// "Undefined" loader (boot.rst, type_of_loader).
const LOADER_UNDEFINED: u8 = 0xff;
/// loadflags: the protected-mode code is loaded at 1 MiB.
const LOADED_HIGH: u8 = 1;
/// xloadflags: there is a 64-bit entry at 0x200.
const XLF_KERNEL_64: u8 = 1;
/// Oldest protocol with a 64-bit entry and `init_size`.
const OLDEST_PROTOCOL: u16 = 0x020c;

/// The setup header, as far as loading needs it.
struct Header {
    bytes: Vec<u8>,
    setup_bytes: u64,
    code_bytes: u64,
    initrd_max: u32,
    cmdline_max: u32,
    init_size: u32,
    pref_address: u64,
    /// A power of two, on multiples of which the kernel runs; none if it runs at `pref_address` only.
    kernel_alignment: Option<NonZeroU32>,
}

impl Header {
    /// Returns the end of the memory that a kernel at `address` overwrites before it looks at its memory
    /// map: it unpacks itself where it is going to run, not where it was put (boot.rst, `init_size`; a
    /// kernel never runs below `pref_address`: arch/x86/boot/compressed/head_64.S).
    fn runtime_end(&self, address: u64) -> u64 {
        let start = match self.kernel_alignment {
            Some(step) => {
                let aligned = address.next_multiple_of(u64::from(step.get()));
                aligned.max(self.pref_address)
            }
            None => self.pref_address,
        };
        start.saturating_add(self.init_size.into())
    }
}

pub(super) fn load(linux: Linux<'_>, ram: &Ram) -> Result<Entry, BootError> {
    let header = read_header(linux.kernel)?;
    let read = |source| BootError::Read { file: "kernel", source };
    let total = linux.kernel.seek(SeekFrom::End(0)).map_err(read)?;
    let payload = total
        .checked_sub(header.setup_bytes)
        .filter(|payload| *payload > 0x200)
        .ok_or(BootError::Damaged("it ends before its code"))?;
    // Signatures may follow the code; less than the header promises is a broken download.
    if payload < header.code_bytes {
        return Err(BootError::Damaged("it is cut short: its header promises more code"));
    }
    linux.kernel.seek(SeekFrom::Start(header.setup_bytes)).map_err(read)?;
    let address = layout::HIGH_RAM;
    read_into(linux.kernel, "kernel", address, payload, ram)?;
    let kernel_end = header.runtime_end(address).max(address + payload);
    let available = low_end(ram);
    if kernel_end > available {
        return Err(BootError::TooLarge { file: "kernel", end: kernel_end, available });
    }
    let most = usize::try_from(header.cmdline_max).unwrap_or(usize::MAX).saturating_add(1);
    let room = usize::try_from(layout::COMMAND_LINE_MAX).unwrap_or(usize::MAX);
    write_cmdline(linux.cmdline, most.min(room), ram)?;
    let (initrd, initrd_size) =
        load_initrd(linux.initrd, kernel_end, u64::from(header.initrd_max), ram)?;
    let mut page = vec![0u8; PAGE];
    page[HEADER..HEADER + header.bytes.len()].copy_from_slice(&header.bytes);
    page[0x70..0x78].copy_from_slice(&linux.acpi.to_le_bytes());
    page[0x210] = LOADER_UNDEFINED;
    page[0x211] |= LOADED_HIGH;
    put_u32(&mut page, 0x214, address);
    put_u32(&mut page, 0x218, initrd);
    put_u32(&mut page, 0x21c, initrd_size);
    put_u32(&mut page, 0x228, layout::COMMAND_LINE);
    let map = memory_map(ram);
    let entries = map.iter().take(E820_MAX);
    page[0x1e8] = u8::try_from(entries.len()).unwrap_or(u8::MAX);
    for (index, (start, length, kind)) in entries.enumerate() {
        let at = E820_TABLE + 20 * index;
        page[at..at + 8].copy_from_slice(&start.to_le_bytes());
        page[at + 8..at + 16].copy_from_slice(&length.to_le_bytes());
        page[at + 16..at + 20].copy_from_slice(&kind.to_le_bytes());
    }
    write(ram, layout::ZERO_PAGE, &page)?;
    Ok(Entry::Linux64 { address: address + 0x200 })
}

fn read_header(kernel: &mut File) -> Result<Header, BootError> {
    let read = |source| BootError::Read { file: "kernel", source };
    kernel.seek(SeekFrom::Start(0)).map_err(read)?;
    let mut start = [0u8; 0x290];
    kernel
        .read_exact(&mut start)
        .map_err(|_| BootError::Damaged("its setup header is cut short"))?;
    let u16_at = |at: usize| u16::from_le_bytes([start[at], start[at + 1]]);
    let u32_at =
        |at: usize| u32::from_le_bytes([start[at], start[at + 1], start[at + 2], start[at + 3]]);
    // Older protocols have shorter headers, which are no damage: those of iPXE and memdisk, for instance.
    if u16_at(0x206) < OLDEST_PROTOCOL || start[0x236] & XLF_KERNEL_64 == 0 {
        return Err(BootError::Unsupported("bzImage without a 64-bit entry"));
    }
    // boot.rst: the header ends at 0x202 plus the byte at 0x201.
    let end = 0x202 + usize::from(start[0x201]);
    if end < 0x264 || end > start.len() {
        return Err(BootError::Damaged("its setup header has an impossible length"));
    }
    let is_relocatable = start[0x234] != 0;
    let kernel_alignment = NonZeroU32::new(u32_at(0x230)).filter(|_| is_relocatable);
    if is_relocatable && !kernel_alignment.is_some_and(NonZeroU32::is_power_of_two) {
        return Err(BootError::Damaged("it is relocatable, but its alignment is no power of two"));
    }
    let pref_address = u64::from(u32_at(0x258)) | u64::from(u32_at(0x25c)) << 32;
    let sectors = if start[0x1f1] == 0 { 4 } else { u64::from(start[0x1f1]) };
    Ok(Header {
        bytes: start[HEADER..end].to_vec(),
        setup_bytes: (sectors + 1) * 512,
        // syssize counts in units of 16 bytes, rounded up.
        code_bytes: (u64::from(u32_at(0x1f4)) * 16).saturating_sub(15),
        initrd_max: u32_at(0x22c),
        cmdline_max: u32_at(0x238),
        init_size: u32_at(0x260),
        pref_address,
        kernel_alignment,
    })
}

/// Puts an address that lies below 4 GiB.
fn put_u32(page: &mut [u8], at: usize, value: u64) {
    page[at..at + 4].copy_from_slice(&value.to_le_bytes()[..4]);
}
