//! Files that describe the board to firmware.
//! Source: QEMU docs/specs/fw_cfg.rst ("All Other Data Items") and hw/i386/e820_memory_layout.h for
//! `etc/e820`; edk2 OvmfPkg/Library/QemuBootOrderLib for `bootorder` (OpenFirmware device paths,
//! IEEE 1275 PCI binding §2.2.1); edk2 OvmfPkg/Library/PlatformInitLib/MemDetect.c for
//! `opt/ovmf/X-PciMmio64Mb`.

use std::fmt::Write as _;

/// Kinds of addresses in `etc/e820`.
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// `etc/e820`: for each piece of RAM, and for each range that nothing may lie in, (address, length,
/// kind), 20 bytes little-endian.
pub fn e820(ram: &[(u64, u64)], reserved: &[(u64, u64)]) -> Vec<u8> {
    let ram = ram.iter().map(|piece| (piece, E820_RAM));
    let mut bytes = Vec::new();
    for ((address, length), kind) in ram.chain(reserved.iter().map(|piece| (piece, E820_RESERVED)))
    {
        bytes.extend(address.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
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

/// What firmware makes the 64-bit window for BARs unless told otherwise, in bytes.
const WINDOW_DEFAULT: u64 = 32 << 30;
/// Most that it takes, in bytes.
const WINDOW_MAX: u64 = 16 << 40;

/// `opt/ovmf/X-PciMmio64Mb`: the size of the 64-bit window for BARs that need `bytes`, in MiB, as
/// text. Twice as much, because firmware places them in an order of its own.
pub fn window_mib(bytes: u64) -> Vec<u8> {
    let size = bytes.min(WINDOW_MAX / 2).next_power_of_two() * 2;
    (size.max(WINDOW_DEFAULT) >> 20).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_twenty_bytes_a_piece() {
        let bytes = e820(&[(0, 1 << 30), (4 << 30, 1 << 20)], &[(1 << 40, 4096)]);
        assert_eq!((bytes.len(), bytes[56]), (60, 2));
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
    fn the_window_has_twice_the_room_within_what_firmware_takes() {
        let told = |bytes| String::from_utf8(window_mib(bytes)).expect("digits");
        assert_eq!((told(1 << 30), told(20 << 30)), ("32768".into(), "65536".into()));
        assert_eq!((told(3 << 38), told(u64::MAX)), ("2097152".into(), "16777216".into()));
    }
}
