//! Files that describe the board to firmware.
//! Source: QEMU docs/specs/fw_cfg.rst ("All Other Data Items") and hw/i386/e820_memory_layout.h for
//! `etc/e820`; edk2 OvmfPkg/Library/QemuBootOrderLib for `bootorder` (OpenFirmware device paths,
//! IEEE 1275 PCI binding §2.2.1); edk2 OvmfPkg/Library/HardwareInfoLib for `etc/hardware-info`.

use std::fmt::Write as _;

/// A piece of memory that is RAM, in `etc/e820`.
const E820_RAM: u32 = 1;

/// `etc/e820`: for each piece of RAM, (address, length, kind), 20 bytes little-endian.
pub fn e820(ram: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (address, length) in ram {
        bytes.extend(address.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(E820_RAM.to_le_bytes());
    }
    bytes
}

/// How a disk is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    /// virtio-blk.
    VirtioBlk,
    /// The first namespace of an NVMe controller.
    Nvme,
}

/// A disk on bus 0 that may be started from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    /// Device on bus 0.
    pub device: u8,
    /// What it is.
    pub kind: DiskKind,
}

/// `bootorder`: one device path a line, the first first, and a zero byte. Firmware knows NVMe
/// controllers by QEMU's identity in the path, whatever they really are.
pub fn bootorder(disks: &[Disk]) -> Vec<u8> {
    let mut lines = String::new();
    for Disk { device, kind } in disks {
        // Writing to a string cannot fail.
        let _ = match kind {
            DiskKind::VirtioBlk => writeln!(lines, "/pci@i0cf8/scsi@{device:x}/disk@0,0"),
            DiskKind::Nvme => {
                writeln!(lines, "/pci@i0cf8/pci8086,5845@{device:x}/namespace@1,0")
            }
        };
    }
    let mut bytes = lines.into_bytes();
    bytes.push(0);
    bytes
}

/// A range of addresses; none when its size is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Aperture {
    /// First address.
    pub base: u64,
    /// Length in bytes.
    pub size: u64,
}

/// One PCI root bridge as firmware has to take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBridge {
    /// First bus.
    pub first_bus: u8,
    /// Last bus.
    pub last_bus: u8,
    /// I/O ports for BARs.
    pub io: Aperture,
    /// 32-bit memory for BARs.
    pub memory32: Aperture,
    /// 64-bit memory for BARs.
    pub memory64: Aperture,
}

/// Type of an entry: a PCI host bridge.
const TYPE_HOST_BRIDGE: u64 = 1;
/// Bytes of a host bridge's description, version 0.
const HOST_BRIDGE_BYTES: u64 = 120;
/// EFI_PCI_ATTRIBUTE_ISA_MOTHERBOARD_IO and _ISA_IO_16: the serial port is behind the first. With _ISA_IO
/// beside _ISA_IO_16 edk2's OvmfPkg/SioBusDxe takes neither.
const ATTRIBUTES: u64 = 1 << 0 | 1 << 16;
/// DMA above 4 GiB works; one window takes prefetchable BARs and others.
const FLAGS: u32 = 1 << 0 | 1 << 2;

/// `etc/hardware-info`: every root bridge with its windows.
///
/// | Offset | Bytes | Field, little-endian                              |
/// |--------|-------|---------------------------------------------------|
/// | 0      | 8     | type, 1                                           |
/// | 8      | 8     | bytes that follow, 120                            |
/// | 16     | 8     | version, 0                                        |
/// | 24     | 8     | attributes                                        |
/// | 32     | 4     | flags                                             |
/// | 36     | 2     | first and last bus                                |
/// | 40     | 16    | I/O ports: base and size, as all that follow      |
/// | 56     | 32    | 32-bit memory, prefetchable 32-bit memory         |
/// | 88     | 32    | 64-bit memory, prefetchable 64-bit memory         |
/// | 120    | 16    | enhanced configuration space; not told here       |
pub fn hardware_info(bridges: &[HostBridge]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, bridge) in bridges.iter().enumerate() {
        let none = Aperture::default();
        let attributes = if number == 0 { ATTRIBUTES } else { 0 };
        for word in [TYPE_HOST_BRIDGE, HOST_BRIDGE_BYTES, 0, attributes] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(FLAGS.to_le_bytes());
        bytes.extend([bridge.first_bus, bridge.last_bus, 0, 0]);
        for range in [bridge.io, bridge.memory32, none, bridge.memory64, none, none] {
            bytes.extend(range.base.to_le_bytes());
            bytes.extend(range.size.to_le_bytes());
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_twenty_bytes_a_piece() {
        let bytes = e820(&[(0, 1 << 30), (4 << 30, 1 << 20)]);
        assert_eq!(bytes.len(), 40);
        assert_eq!(bytes[8..20], [0, 0, 0, 0x40, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(bytes[20..28], (4u64 << 30).to_le_bytes());
    }

    #[test]
    fn disks_are_named_by_their_paths() {
        let disks = [
            Disk { device: 0x1a, kind: DiskKind::VirtioBlk },
            Disk { device: 2, kind: DiskKind::Nvme },
        ];
        let expected = "/pci@i0cf8/scsi@1a/disk@0,0\n/pci@i0cf8/pci8086,5845@2/namespace@1,0\n\0";
        assert_eq!(bootorder(&disks), expected.as_bytes());
        assert_eq!(bootorder(&[]), [0]);
    }

    #[test]
    fn root_bridges_have_their_fields_in_place() {
        let aperture = |base, size| Aperture { base, size };
        let bytes = hardware_info(&[HostBridge {
            first_bus: 0,
            last_bus: 255,
            io: aperture(0xc000, 0x4000),
            memory32: aperture(0xc000_0000, 1 << 29),
            memory64: aperture(1 << 38, 1 << 38),
        }]);
        let word =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        assert_eq!(bytes.len() as u64, 16 + HOST_BRIDGE_BYTES);
        assert_eq!((word(0), word(8), word(16), bytes[36], bytes[37]), (1, 120, 0, 0, 255));
        assert_eq!(
            (word(40), word(48), word(56), word(64)),
            (0xc000, 0x4000, 0xc000_0000, 1 << 29)
        );
        assert_eq!((word(72), word(80), word(88), word(96)), (0, 0, 1 << 38, 1 << 38));
    }
}
