//! What keeps a function from working in any guest, whoever asks for it: firmware has not placed its
//! memory, or has plans of its own for it. And which network card is none, but rules over all GPUs.
//! Source: Linux Documentation/PCI/sysfs-pci.rst (`resource`), include/linux/ioport.h,
//! Documentation/ABI/testing/sysfs-kernel-iommu_groups; PCI Local Bus Specification 3.0 §6.2.5.

use std::{fs, path::Path};

/// BARs of a device, and where the first register is.
const BARS: usize = 6;
const FIRST_BAR: usize = 0x10;
/// Bit 0 of a BAR's register: I/O ports. Bits 2:1 of one for memory: 64 bits take the next register, too.
const IO: u32 = 1 << 0;
const WIDTH: u32 = 3 << 1;
const WIDE: u32 = 2 << 1;

/// Flags of a line of `resource`: memory, and that it has no address.
const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_UNSET: u64 = 0x2000_0000;

/// A reason why a function works in no guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Firmware lets it use memory of the host for good (Intel's RMRR, AMD's unity mappings), which the kernel
    /// takes for a reason to give it to nobody.
    FirmwareMemory,
    /// The BAR of this number, 0 to 5, has no address: there was no room.
    NoAddress(u8),
}

/// Reads what is wrong with a function: `folder` is its folder in sysfs, `config` the beginning of its
/// configuration space, which has a device's header.
pub fn read(folder: &Path, config: &[u8]) -> Vec<Flaw> {
    let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let reserved = is_firmwares(&text("iommu_group/reserved_regions"));
    let bar = without_address(config, &text("resource")).map(Flaw::NoAddress);
    reserved.then_some(Flaw::FirmwareMemory).into_iter().chain(bar).collect()
}

/// Whether a group's reserved regions, lines of first and last address and kind, have one that devices must
/// always reach. What is `direct-relaxable` they need until an operating system runs only.
fn is_firmwares(regions: &str) -> bool {
    regions.lines().any(|line| line.split_whitespace().nth(2) == Some("direct"))
}

/// Returns the first BAR for memory that the device has and the kernel gave no address to. It forgets such a
/// one (`reset_resource` in drivers/pci/setup-bus.c), so that only the register's lower bits tell of it, and
/// those of a BAR of 32 bits do not. I/O ports do not count: GPUs have some, and do without.
fn without_address(config: &[u8], resource: &str) -> Option<u8> {
    let lines: Vec<&str> = resource.lines().collect();
    let mut index = 0;
    while index < BARS {
        let at = FIRST_BAR + 4 * index;
        let register = u32::from_le_bytes(*config.get(at..)?.first_chunk()?);
        let line = Line::parse(lines.get(index)?)?;
        let has_memory = register & IO == 0 && register != 0;
        if line.is_unset() || (has_memory && !line.is_memory()) {
            return u8::try_from(index).ok();
        }
        let wide = register & (IO | WIDTH) == WIDE;
        index += if wide { 2 } else { 1 };
    }
    None
}

/// The flags of a line of first address, last address and flags.
struct Line(u64);

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let flags = line.split_whitespace().nth(2)?;
        Some(Self(u64::from_str_radix(flags.trim_start_matches("0x"), 16).ok()?))
    }

    fn is_memory(&self) -> bool {
        self.0 & IORESOURCE_MEM != 0
    }

    fn is_unset(&self) -> bool {
        self.is_memory() && self.0 & IORESOURCE_UNSET != 0
    }
}

/// Mellanox, and its word in the vital product data of a ConnectX that is the way to the NVSwitches of a server:
/// those of NVLink 5 (HGX B200, B300) are on no PCI bus. Whoever has it rules over what all GPUs there say to
/// each other. Source: NVIDIA Fabric Manager User Guide, "Systems Using Fourth Generation NVSwitches".
pub const MELLANOX: u16 = 0x15b3;
const SWITCH_MANAGEMENT: &[u8] = b"SMDL=SW_MNG";

/// Whether vital product data are those of a way to NVSwitches.
pub fn leads_to_switches(vital: &[u8]) -> bool {
    vital.windows(SWITCH_MANAGEMENT.len()).any(|bytes| bytes == SWITCH_MANAGEMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration space with these BAR registers.
    fn config(registers: [u32; 6]) -> Vec<u8> {
        let mut config = vec![0; FIRST_BAR];
        registers.iter().for_each(|register| config.extend(register.to_le_bytes()));
        config
    }

    const NONE: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
    /// An RTX 4090 as firmware places it: registers, memory, 32 MiB more, I/O ports.
    const REGISTERS: &str = "0x00000000f6000000 0x00000000f6ffffff 0x0000000000040200\n";
    const MEMORY: &str = "0x0000006000000000 0x00000067ffffffff 0x000000000014220c\n";
    const MORE: &str = "0x0000006800000000 0x0000006801ffffff 0x000000000014220c\n";
    const PORTS: &str = "0x000000000000f000 0x000000000000f07f 0x0000000000040101\n";
    const RTX: [u32; 6] = [0xf600_0000, 0x0000_000c, 0x60, 0x0000_000c, 0x68, 0xf001];

    #[test]
    fn a_gpu_whose_memory_found_no_room_is_told() {
        let lacking =
            |registers, lines: [&str; 6]| without_address(&config(registers), &lines.concat());
        let whole = [REGISTERS, MEMORY, NONE, MORE, NONE, PORTS];
        assert_eq!(lacking(RTX, whole), None);
        assert_eq!(lacking(RTX, [REGISTERS, NONE, NONE, MORE, NONE, PORTS]), Some(1));
        assert_eq!(lacking(RTX, [REGISTERS, MEMORY, NONE, NONE, NONE, PORTS]), Some(3));
        assert_eq!(lacking(RTX, [REGISTERS, MEMORY, NONE, MORE, NONE, NONE]), None, "ports only");
        let high = [0xf600_0000, 0xc, 0x0000_000c, 0x0000_000c, 0x68, 0xf001];
        assert_eq!(lacking(high, whole), None, "an upper half is no register of its own");
        let unset = "0x0000000000000000 0x00000007ffffffff 0x000000002014220c\n";
        assert_eq!(lacking(RTX, [REGISTERS, unset, NONE, MORE, NONE, PORTS]), Some(1));
        let unset = "0x0000000000000000 0x0000000000ffffff 0x0000000020040200\n";
        assert_eq!(lacking([0; 6], [unset, NONE, NONE, NONE, NONE, NONE]), Some(0));
    }

    /// What Linux 7.3 and QEMU's test device show when 8 TiB are wanted of a bus that has less.
    #[test]
    fn a_bar_that_the_kernel_gave_up_shows_in_its_register() {
        let registers = [0xfea0_2000, 0xc001, 0x0000_000c, 0x800, 0, 0];
        let lines = "0x00000000fea02000 0x00000000fea02fff 0x0000000000040200\n\
                     0x000000000000c000 0x000000000000c0ff 0x0000000000040101\n";
        let found = without_address(&config(registers), &[lines, &NONE.repeat(4)].concat());
        assert_eq!(found, Some(2));
    }

    #[test]
    fn what_cannot_be_known_is_no_flaw() {
        assert_eq!(without_address(&config(RTX), ""), None);
        assert_eq!(without_address(&config(RTX), "nonsense\n"), None);
        assert_eq!(without_address(&[], &NONE.repeat(6)), None);
        assert_eq!(without_address(&config([u32::MAX; 6]), &NONE.repeat(6)), None, "it is gone");
        assert_eq!(without_address(&config([0; 6]), &NONE.repeat(6)), None, "a virtual function");
    }

    #[test]
    fn memory_that_firmware_keeps_a_device_on_is_told_from_what_it_lets_go() {
        let message = "0x00000000fee00000 0x00000000feefffff msi\n";
        let relaxed = "0x000000007b800000 0x000000007fffffff direct-relaxable\n";
        let kept = "0x00000000000e8000 0x00000000000e8fff direct\n";
        assert!(!is_firmwares(&[message, relaxed].concat()) && !is_firmwares(""));
        assert!(is_firmwares(&[kept, message].concat()));
    }

    #[test]
    fn flaws_are_read_where_sysfs_tells_them() {
        let (kept, lines) =
            ("0x0 0xfff direct\n", [REGISTERS, NONE, NONE, MORE, NONE, PORTS].concat());
        let root = crate::testing::root(&[
            ("device/iommu_group/reserved_regions", kept.as_bytes()),
            ("device/resource", lines.as_bytes()),
        ]);
        let flaws = read(&root.path().join("device"), &config(RTX));
        assert_eq!(flaws, [Flaw::FirmwareMemory, Flaw::NoAddress(1)]);
        assert_eq!(read(&root.path().join("nowhere"), &config(RTX)), []);
    }

    #[test]
    fn a_way_to_the_switches_says_so() {
        let card = b"\x82\x05\x00NVIDA\x90\x10\x00V0\x0dSMDL=SW_MNGab\x78";
        assert!(leads_to_switches(card));
        assert!(!leads_to_switches(b"\x82\x05\x00NVIDA\x78") && !leads_to_switches(b""));
    }
}
