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

use linux_loader::loader::{Elf, KernelLoader, PvhBootCapability};
use vm_memory::GuestAddress;

use super::{BootError, Entry, Linux, load_initrd, low_end, memory_map, write, write_cmdline};
use crate::{layout, sys::memory::Ram};

const MAGIC: u32 = 0x336e_c578;

/// Where an ELF file's head has its class, and the one of 32 bits (ELF-64 Object File Format §3).
const CLASS: usize = 4;
const CLASS_32: u8 = 1;
/// Where it has its machine, and x86-64 (System V ABI, AMD64 supplement §4.1).
const MACHINE: usize = 18;
const X86_64: [u8; 2] = 62u16.to_le_bytes();

/// Says what an ELF file is that no x86-64 processor starts in its own mode.
pub(super) fn of_another_machine(head: &[u8]) -> Option<&'static str> {
    if head.get(CLASS) == Some(&CLASS_32) {
        return Some("32-bit ELF file");
    }
    let machine = head.get(MACHINE..MACHINE + X86_64.len())?;
    (machine != X86_64).then_some("ELF file for another kind of processor")
}

pub(super) fn load(linux: Linux<'_>, ram: &Ram) -> Result<Entry, BootError> {
    let start = Some(GuestAddress(layout::HIGH_RAM));
    let loaded = Elf::load(&ram.memory, None, linux.kernel, start).map_err(refusal)?;
    let entry = match loaded.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(address) => address.0,
        PvhBootCapability::PvhEntryNotPresent | PvhBootCapability::PvhEntryIgnored => {
            return Err(BootError::Unsupported("vmlinux without a PVH note (CONFIG_PVH)"));
        }
    };
    if loaded.kernel_end > low_end(ram) {
        let (end, available) = (loaded.kernel_end, low_end(ram));
        return Err(BootError::TooLarge { file: "kernel", end, available });
    }
    let room = usize::try_from(layout::COMMAND_LINE_MAX).unwrap_or(usize::MAX);
    write_cmdline(linux.cmdline, room, ram)?;
    let (initrd, initrd_size) = load_initrd(linux.initrd, loaded.kernel_end, u64::MAX - 1, ram)?;
    let map = memory_map(ram);
    let mut table = Vec::new();
    for (address, length, kind) in &map {
        table.extend(address.to_le_bytes());
        table.extend(length.to_le_bytes());
        table.extend(kind.to_le_bytes());
        table.extend([0; 4]);
    }
    write(ram, layout::PVH_MEMORY_MAP, &table)?;
    let mut module = [0u8; 32];
    module[..8].copy_from_slice(&initrd.to_le_bytes());
    module[8..16].copy_from_slice(&initrd_size.to_le_bytes());
    write(ram, layout::PVH_MODULES, &module)?;
    let mut info = [0u8; 56];
    let modules = u32::from(initrd_size > 0);
    let entries = u32::try_from(map.len()).unwrap_or(0);
    info[..4].copy_from_slice(&MAGIC.to_le_bytes());
    info[4..8].copy_from_slice(&1u32.to_le_bytes());
    info[12..16].copy_from_slice(&modules.to_le_bytes());
    info[16..24].copy_from_slice(&layout::PVH_MODULES.to_le_bytes());
    info[24..32].copy_from_slice(&layout::COMMAND_LINE.to_le_bytes());
    info[32..40].copy_from_slice(&linux.acpi.to_le_bytes());
    info[40..48].copy_from_slice(&layout::PVH_MEMORY_MAP.to_le_bytes());
    info[48..52].copy_from_slice(&entries.to_le_bytes());
    write(ram, layout::PVH_START_INFO, &info)?;
    Ok(Entry::Pvh { address: entry })
}

fn refusal(error: linux_loader::loader::Error) -> BootError {
    use linux_loader::loader::{Error, elf};
    if matches!(error, Error::Elf(elf::Error::BigEndianElfOnLittle)) {
        return BootError::Unsupported("big-endian ELF file");
    }
    if matches!(error, Error::Elf(elf::Error::ReadKernelImage)) {
        return BootError::Damaged("a segment is cut short or does not fit guest memory");
    }
    BootError::Damaged("its ELF headers are wrong or cut short")
}
