//! The PVH boot protocol for an ELF vmlinux with a PVH note.
//! Source: Xen docs/misc/pvh.pandoc; xen/include/public/arch-x86/hvm/start_info.h.
//!
//! | Offset | Bytes | Field of the start information |
//! |--------|-------|--------------------------------|
//! | 0      | 4     | magic 0x336ec578               |
//! | 4      | 4     | version 1                      |
//! | 12     | 4     | number of modules              |
//! | 16     | 8     | list of modules                |
//! | 24     | 8     | command line                   |
//! | 32     | 8     | ACPI root pointer              |
//! | 40     | 8     | memory map                     |
//! | 48     | 4     | entries of the memory map      |

use std::{
    fs::File,
    io::{Seek, SeekFrom},
};

use vm_memory::{Bytes, GuestAddress};

use super::{
    BootError, Entry, Linux,
    elf::{self, Kernel},
    load_initrd, low_end, memory_map, write, write_cmdline,
};
use crate::{layout, sys::memory::Ram};

const MAGIC: u32 = 0x336e_c578;

pub(super) fn load(linux: Linux<'_>, ram: &Ram) -> Result<Entry, BootError> {
    let kernel = elf::read(linux.kernel)?;
    let entry =
        kernel.entry.ok_or(BootError::Unsupported("vmlinux without a PVH note (CONFIG_PVH)"))?;
    let kernel_end = load_segments(&kernel, linux.kernel, ram)?;
    if !(layout::HIGH_RAM..kernel_end).contains(&entry) {
        return Err(BootError::Damaged("its PVH entry is not in its segments"));
    }
    let room = usize::try_from(layout::COMMAND_LINE_MAX).unwrap_or(usize::MAX);
    write_cmdline(linux.cmdline, room, ram)?;
    let (initrd, initrd_size) = load_initrd(linux.initrd, kernel_end, u64::MAX - 1, ram)?;
    let map = memory_map(ram);
    let mut table = Vec::new();
    for (address, length, kind) in &map {
        table.extend(address.to_le_bytes());
        table.extend(length.to_le_bytes());
        table.extend(kind.to_le_bytes());
        table.extend([0; 4]);
    }
    write(ram, layout::PVH_MEMORY_MAP, &table)?;
    let mut info = [0u8; 56];
    // FreeBSD takes a list's address for the word that there are modules (sys/x86/xen/pv.c).
    if initrd_size > 0 {
        let mut module = [0u8; 32];
        module[..8].copy_from_slice(&initrd.to_le_bytes());
        module[8..16].copy_from_slice(&initrd_size.to_le_bytes());
        write(ram, layout::PVH_MODULES, &module)?;
        info[12..16].copy_from_slice(&1u32.to_le_bytes());
        info[16..24].copy_from_slice(&layout::PVH_MODULES.to_le_bytes());
    }
    let entries = u32::try_from(map.len()).unwrap_or(0);
    info[..4].copy_from_slice(&MAGIC.to_le_bytes());
    info[4..8].copy_from_slice(&1u32.to_le_bytes());
    info[24..32].copy_from_slice(&layout::COMMAND_LINE.to_le_bytes());
    info[32..40].copy_from_slice(&linux.acpi.to_le_bytes());
    info[40..48].copy_from_slice(&layout::PVH_MEMORY_MAP.to_le_bytes());
    info[48..52].copy_from_slice(&entries.to_le_bytes());
    write(ram, layout::PVH_START_INFO, &info)?;
    Ok(Entry::Pvh { address: entry })
}

/// Puts the kernel where it belongs, and returns where it ends, with what it finds zeroed.
fn load_segments(kernel: &Kernel, file: &mut File, ram: &Ram) -> Result<u64, BootError> {
    let ends = kernel.segments.iter().map(|part| part.address.saturating_add(part.size));
    let end = ends.max().unwrap_or(0);
    let available = low_end(ram);
    if end > available {
        return Err(BootError::TooLarge { file: "kernel", end, available });
    }
    const CUT: BootError = BootError::Damaged("a segment is cut short");
    for part in &kernel.segments {
        // What it is told by is there. Between that and 1 MiB linkers put ELF headers, over which tables may come.
        if part.address < layout::LOW_RAM_END {
            return Err(BootError::Unsupported("PVH kernel with a segment below 640 KiB"));
        }
        let length = usize::try_from(part.length).map_err(|_| CUT)?;
        // Where no file can have anything, this one is cut short.
        file.seek(SeekFrom::Start(part.offset)).map_err(|_| CUT)?;
        ram.memory
            .read_exact_volatile_from(GuestAddress(part.address), file, length)
            .map_err(|_| CUT)?;
    }
    Ok(end)
}
