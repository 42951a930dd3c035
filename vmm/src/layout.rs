//! The guest's address map. Every constant derives from its neighbours; relations are asserted.
//!
//! | From           | To             | What                                        |
//! |----------------|----------------|---------------------------------------------|
//! | 0              | 0x9_fc00       | RAM; boot structures from 0x500             |
//! | 0xe_0000       | 0xf_e000       | ACPI tables                                 |
//! | 0xf_e000       | 0x10_0000      | SMBIOS                                      |
//! | 0x10_0000      | 0xc000_0000    | RAM: the kernel first, the initramfs last   |
//! | 0xc000_0000    | 0xe000_0000    | 32-bit PCI memory                           |
//! | 0xe000_0000    | 0xf000_0000    | ECAM, 256 buses                             |
//! | 0xfec0_0000    | 0xfef0_0000    | I/O APIC, local APICs, MSI                  |
//! | 0xfeff_c000    | 0xff00_0000    | pages of KVM's own, on Intel                |
//! | 0xff00_0000    | 0x1_0000_0000  | firmware, at the end                        |
//! | 0x1_0000_0000  | end of RAM     | RAM                                         |
//! | behind it      |                | 64-bit PCI memory                           |
//!
//! With firmware, RAM below 4 GiB ends at 0x8000_0000, there are no boot structures nor tables, and
//! the firmware may move the ECAM to between there and 0xc000_0000.

/// Global descriptor table for the first instruction.
pub const GDT: u64 = 0x500;
/// PVH start information.
pub const PVH_START_INFO: u64 = 0x6000;
/// PVH list of modules: the initramfs.
pub const PVH_MODULES: u64 = 0x6040;
/// PVH memory map.
pub const PVH_MEMORY_MAP: u64 = 0x7000;
/// Linux boot parameters ("zero page").
pub const ZERO_PAGE: u64 = 0x8000;
/// Initial stack, growing down.
pub const STACK: u64 = 0xa000;
/// Page tables for the first instruction: one page of each level, identity-mapping 1 GiB.
pub const PAGE_TABLES: u64 = 0xa000;
/// Kernel command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Largest command line, with its terminating zero (COMMAND_LINE_SIZE of x86 Linux).
pub const COMMAND_LINE_MAX: u64 = 2048;
/// End of the RAM below 640 KiB that firmware tables do not claim.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// ACPI: the root pointer, then all tables.
pub const ACPI: u64 = 0xe_0000;
/// End of the room for ACPI tables.
pub const ACPI_END: u64 = SMBIOS;
/// SMBIOS: the entry point, then the structures, where Linux searches for them without firmware.
pub const SMBIOS: u64 = 0xf_e000;
/// End of the area that is searched.
pub const SMBIOS_END: u64 = 0x10_0000;
/// Where RAM goes on above the firmware area, and where a kernel goes.
pub const HIGH_RAM: u64 = 0x10_0000;
/// End of RAM below 4 GiB; 32-bit PCI memory begins.
pub const RAM_GAP: u64 = 0xc000_0000;
/// End of RAM below 4 GiB in a machine with firmware: OVMF of some releases wants nothing but its
/// configuration space between 0xb000_0000 and PCI memory, and one MTRR to cover all from here on.
pub const FIRMWARE_RAM_GAP: u64 = 0x8000_0000;
/// End of 32-bit PCI memory that firmware may use (edk2 OvmfPkg/Library/PlatformInitLib).
pub const FIRMWARE_MMIO32_END: u64 = 0xfc00_0000;
/// 32-bit PCI memory in a machine without firmware; with it, from [`FIRMWARE_RAM_GAP`] on.
pub const MMIO32: u64 = RAM_GAP;
/// End of 32-bit PCI memory.
pub const MMIO32_END: u64 = ECAM;
/// Enhanced configuration space.
pub const ECAM: u64 = 0xe000_0000;
/// Buses that the enhanced configuration space reaches.
pub const ECAM_BUSES: u64 = 256;
/// Bytes of it: 1 MiB for each bus.
pub const ECAM_SIZE: u64 = ECAM_BUSES << 20;
/// I/O APIC.
pub const IO_APIC: u32 = 0xfec0_0000;
/// Local APICs.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// Where RAM goes on above 4 GiB.
pub const RAM_ABOVE: u64 = 1 << 32;
/// I/O ports for BARs: all above those of ISA devices, as each bridge takes 4 KiB of them.
pub const PIO: u16 = 0x1000;
/// Last I/O port for BARs.
pub const PIO_LAST: u16 = 0xffff;

const _: () = {
    assert!(STACK <= PAGE_TABLES && PAGE_TABLES + 0x3000 <= COMMAND_LINE);
    assert!(COMMAND_LINE + COMMAND_LINE_MAX <= LOW_RAM_END);
    assert!(ECAM + ECAM_SIZE <= IO_APIC as u64);
    assert!(MMIO32 < MMIO32_END && RAM_GAP.is_multiple_of(1 << 30));
};
