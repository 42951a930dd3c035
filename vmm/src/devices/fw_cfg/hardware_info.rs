//! `etc/hardware-info`: the root complexes, for firmware that takes its windows from us.
//! Source: edk2 OvmfPkg/Include/Library/HardwareInfoLib.h (elements) and
//! OvmfPkg/Library/HardwareInfoLib/HardwareInfoPciHostBridgeLib.h (host bridges); EFI_PCI_ATTRIBUTE_*
//! of UEFI 2.10 §14.2.
//!
//! Each element has a header, then its data. All numbers are little-endian.
//!
//! | Offset | Bytes | Field                                                                   |
//! |--------|-------|-------------------------------------------------------------------------|
//! | 0      | 8     | type: 1 for a host bridge                                               |
//! | 8      | 8     | bytes of data                                                           |
//! | 16     | 8     | version, 0                                                              |
//! | 24     | 8     | attributes: what decodes for whom of old                                |
//! | 32     | 4     | bit 0 DMA above 4 GiB, 1 no extended configuration space, 2 prefetchable |
//! |        |       | and other memory together                                               |
//! | 36     | 2     | first and last bus; two bytes of padding                                |
//! | 40     | 16    | I/O ports: first, and how many                                          |
//! | 56     | 16    | memory below 4 GiB, likewise                                            |
//! | 72     | 16    | prefetchable memory below 4 GiB: none, it is together with the other    |
//! | 88     | 16    | memory above 4 GiB                                                      |
//! | 104    | 16    | prefetchable memory above 4 GiB: none, likewise                         |
//! | 120    | 16    | configuration space: none, the firmware moves it where it likes         |
//!
//! Releases before 2024.11 leave the field `Translation` of each window as it was on the stack
//! (OvmfPkg/Library/PciHostBridgeUtilityLib), so that no BAR finds a place: they must not be told.
//! With prefetchable memory apart, later ones, too, take one range for another.

use crate::acpi::Root;

const TYPE_HOST_BRIDGE: u64 = 1;
/// Bytes of a host bridge. Firmware takes no other size.
const HOST_BRIDGE: u64 = 120;
const VERSION: u64 = 0;
/// What firmware gives its own root bridge: ISA I/O of the board and with 16 bits, VGA memory and
/// I/O with 16 bits, its palette, both IDE channels.
const ATTRIBUTES: u64 = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 16 | 1 << 17 | 1 << 18;
const DMA_ABOVE_4G: u32 = 1 << 0;
const MEMORY_TOGETHER: u32 = 1 << 2;

/// Returns the file for these root complexes.
pub fn hardware_info(roots: &[Root]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for Root { buses: (first, last), apertures, .. } in roots {
        let io = apertures.io.map(|(first, last)| (first.into(), last.into()));
        let low = apertures.low.first().map(|(first, last)| ((*first).into(), (*last).into()));
        bytes.extend(TYPE_HOST_BRIDGE.to_le_bytes());
        bytes.extend(HOST_BRIDGE.to_le_bytes());
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(ATTRIBUTES.to_le_bytes());
        bytes.extend((DMA_ABOVE_4G | MEMORY_TOGETHER).to_le_bytes());
        bytes.extend([*first, *last, 0, 0]);
        for window in [io, low, None, apertures.told, None, None] {
            let (start, size) =
                window.map_or((0, 0), |(start, last): (u64, u64)| (start, last - start + 1));
            bytes.extend(start.to_le_bytes());
            bytes.extend(size.to_le_bytes());
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::apertures::Apertures;

    fn root() -> Root {
        let apertures = Apertures {
            io: Some((0x1000, 0xffff)),
            low: vec![(0x8000_0000, 0xdfff_ffff), (0xf000_0000, 0xfbff_ffff)],
            high: vec![(0x1_0000_0000, 0xff_ffff_ffff)],
            told: Some((0x10_0000_0000, 0x17_ffff_ffff)),
        };
        Root { buses: (0, 127), apertures, node: Some(0) }
    }

    fn number(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"))
    }

    #[test]
    fn a_host_bridge_is_told_field_by_field() {
        let bytes = hardware_info(&[root()]);
        assert_eq!(bytes.len(), 16 + 120);
        let numbers = |range: std::ops::Range<usize>| {
            range.step_by(8).map(|at| number(&bytes, at)).collect::<Vec<u64>>()
        };
        // Type, size, version; the attributes are those that OVMF prints of its own root bridge.
        assert_eq!(numbers(0..32), [1, 120, 0, 0x7_0069]);
        assert_eq!(bytes[32..40], [0b101, 0, 0, 0, 0, 127, 0, 0]);
        assert_eq!(numbers(40..56), [0x1000, 0xf000]);
        assert_eq!(numbers(56..88), [0x8000_0000, 0x6000_0000, 0, 0]);
        assert_eq!(numbers(88..120), [0x10_0000_0000, 0x8_0000_0000, 0, 0]);
        assert_eq!(numbers(120..136), [0, 0]);
    }

    #[test]
    fn root_complexes_follow_each_other_and_may_lack_a_window() {
        let second = Root { buses: (128, 255), apertures: Apertures::default(), node: None };
        let bytes = hardware_info(&[root(), second]);
        assert_eq!(bytes.len(), 2 * 136);
        assert_eq!((number(&bytes, 136), number(&bytes, 144)), (1, 120));
        assert_eq!(bytes[172..174], [128, 255]);
        assert!(bytes[176..].iter().all(|byte| *byte == 0));
    }
}
