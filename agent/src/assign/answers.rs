//! Whether a device answers, and is as the kernel configured it.
//!
//! A device that was without power, or that something reset behind the kernel's back, answers again but decodes
//! nothing: its base address registers are those of a new device. The kernel does not look, VFIO maps where the
//! device was, and a renter gets memory that nobody answers for. So the registers are compared with what the
//! kernel assigned.
//!
//! Sources: Linux Documentation/PCI/sysfs-pci.rst, `resource`; include/linux/ioport.h; PCI Local Bus Specification
//! 3.0 §6.2.5.1; of virtual functions PCI Express Base Specification 6.0 §9.3.4, and Linux drivers/pci/iov.c,
//! `pci_read_vf_config_common`.

use std::{fs, io, ops::Range, path::Path};

use types::node::Bdf;

use super::{AssignError, device_path};

/// Revision and class in a device's header.
const CLASS: Range<usize> = 8..12;
/// Place of the first base address register, and their number in a device's header.
const FIRST: usize = 0x10;
const COUNT: usize = 6;
/// Bits of the kernel's flags of a resource: ports, memory, an address that no register holds (Enhanced Allocation),
/// 64 bits, nothing assigned.
const PORTS: u64 = 0x100;
const MEMORY: u64 = 0x200;
const FIXED: u64 = 0x10;
const WIDE: u64 = 0x10_0000;
const UNSET: u64 = 0x2000_0000;

/// Reads the vendor id and the base address registers from configuration space itself, not from the kernel's
/// memory of them; of a virtual function, which has neither, revision and class.
///
/// # Errors
/// [`AssignError::Gone`] when another vendor is read, as where nobody answers; [`AssignError::Forgotten`] when the
/// device is not where the kernel put it.
pub fn check_answers(root: &Path, device: Bdf, vendor: u16) -> Result<(), AssignError> {
    let read = |name| {
        let path = device_path(root, device).join(name);
        fs::read(&path).map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound {
                AssignError::Absent { device }
            } else {
                AssignError::Open { device, path: path.display().to_string(), source }
            }
        })
    };
    let config = read("config")?;
    // The ids of a virtual function read as ones by design, and its base addresses are its physical function's to
    // tell. Revision and class are its own, and never all ones.
    if device_path(root, device).join("physfn").exists() {
        let silent = config.get(CLASS).is_none_or(|class| class.iter().all(|byte| *byte == 0xff));
        let gone = AssignError::Gone { device, seen: 0xffff, expected: vendor };
        return if silent { Err(gone) } else { Ok(()) };
    }
    let seen = config.get(..2).map_or(0xffff, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    if seen != vendor {
        return Err(AssignError::Gone { device, seen, expected: vendor });
    }
    let resources = String::from_utf8_lossy(&read("resource")?).into_owned();
    match first_moved(&config, &resources) {
        Some((bar, seen, expected)) => Err(AssignError::Forgotten { device, bar, seen, expected }),
        None => Ok(()),
    }
}

/// Returns the first base address register that is not as the kernel has it: its number, what it says, and what
/// it should.
fn first_moved(config: &[u8], resources: &str) -> Option<(usize, u64, u64)> {
    let register = |index: usize| {
        let at = FIRST + 4 * index;
        config.get(at..at + 4).map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
    };
    resources.lines().take(COUNT).enumerate().find_map(|(index, line)| {
        let mut numbers = line.split_whitespace().map(|word| {
            word.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok())
        });
        let (start, _, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
        if flags & (PORTS | MEMORY) == 0 || flags & (FIXED | UNSET) != 0 {
            return None;
        }
        let low = register(index)?;
        let high = if flags & WIDE != 0 { u64::from(register(index + 1)?) << 32 } else { 0 };
        let low = if flags & PORTS != 0 { low & !0x3 } else { low & !0xf };
        let seen = high | u64::from(low);
        (seen != start).then_some((index, seen, start))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;
    use crate::testing;

    const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
    /// What the kernel writes of 64 bits of memory, ports, memory it could not place, and 32 bits of memory.
    const RESOURCES: &str = "\
        0x0000004000000000 0x0000007fffffffff 0x000000000014220c\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x000000000000c000 0x000000000000c07f 0x0000000000040101\n\
        0x0000000000000000 0x00000000000fffff 0x0000000020040200\n\
        0x00000000fe000000 0x00000000feffffff 0x0000000000040200\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x00000000c0000000 0x00000000c007ffff 0x0000000000046200\n";

    fn config() -> Vec<u8> {
        let mut config = vec![0; 64];
        config[..2].copy_from_slice(&0x10de_u16.to_le_bytes());
        let registers = [0x0000_000c_u32, 0x40, 0xc001, 0, 0xfe00_0000, 0];
        for (index, register) in registers.into_iter().enumerate() {
            config[FIRST + 4 * index..][..4].copy_from_slice(&register.to_le_bytes());
        }
        config
    }

    fn path(name: &str) -> String {
        format!("sys/bus/pci/devices/{DEVICE}/{name}")
    }

    fn checked(config: &[u8]) -> Result<(), AssignError> {
        let root =
            testing::root(&[(&path("config"), config), (&path("resource"), RESOURCES.as_bytes())]);
        check_answers(root.path(), DEVICE, 0x10de)
    }

    #[test]
    fn a_device_is_where_the_kernel_put_it() {
        checked(&config()).unwrap();
        for (at, index) in [(0x11, 0), (0x14, 0), (0x19, 2), (0x23, 4)] {
            let mut config = config();
            config[at] ^= 0x10;
            let moved = checked(&config).unwrap_err();
            let AssignError::Forgotten { bar, .. } = moved else { panic!("{moved}") };
            assert_eq!(bar, index, "{at:#x}");
        }
        let mut config = config();
        config[FIRST..FIRST + 24].fill(0);
        let said = checked(&config).unwrap_err().to_string();
        assert!(said.contains("BAR 0 at 0x0 instead of 0x4000000000"), "{said}");
    }

    #[test]
    fn nobody_answers_with_ones() {
        let gone = checked(&[0xff; 64]).unwrap_err();
        assert!(matches!(gone, AssignError::Gone { seen: 0xffff, .. }), "{gone}");
        assert!(matches!(checked(&[]).unwrap_err(), AssignError::Gone { .. }));
    }

    #[test]
    fn a_virtual_function_answers_by_its_class() {
        let checked = |config: &[u8]| {
            let root = testing::root(&[(&path("config"), config), (&path("physfn"), &[])]);
            check_answers(root.path(), DEVICE, 0x10de)
        };
        let mut config = vec![0u8; 64];
        config[..4].fill(0xff);
        config[8..12].copy_from_slice(&[0xa1, 0x00, 0x02, 0x03]);
        checked(&config).unwrap();
        for silent in [&[0xff; 64][..], &config[..8]] {
            let gone = checked(silent).unwrap_err();
            assert!(matches!(gone, AssignError::Gone { seen: 0xffff, .. }), "{gone}");
        }
    }
}
