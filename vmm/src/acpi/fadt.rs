//! The fixed hardware description (FADT) and the firmware control structure (FACS).
//! Source: ACPI 6.5 §5.2.9 and §5.2.10.

use super::{OEM, OEM_REVISION, OEM_TABLE};
use crate::devices::{cmos, power};

/// Bytes of a FADT of revision 6.
const LENGTH: usize = 276;
/// WBINVD works, and flushes.
const WBINVD: u32 = 1 << 0;
/// C1 works on all processors.
const PROC_C1: u32 = 1 << 2;
/// There is no fixed sleep button.
const SLEEP_BUTTON: u32 = 1 << 5;
/// There is no clock that wakes by a fixed event.
const NO_FIXED_RTC: u32 = 1 << 6;
/// The PM timer has 32 bits.
const TIMER_32: u32 = 1 << 8;
/// The reset register works.
const RESET_REGISTER: u32 = 1 << 10;
/// Logical destinations have clusters.
const CLUSTERS: u32 = 1 << 18;
/// Boot flags: there is a serial port; no VGA, no ASPM control by the OS; the 8042 answers only to reset. The clock with CMOS memory
/// is there (bit 5 clear).
const BOOT_LEGACY_DEVICES: u16 = 1 << 0;
const BOOT_NO_VGA: u16 = 1 << 2;
const BOOT_NO_ASPM: u16 = 1 << 4;
/// Address space "system I/O" of a generic address.
const SYSTEM_IO: u8 = 1;

pub(super) fn build(facs: u64, dsdt: u64, cpus: u32) -> Vec<u8> {
    let mut table = vec![0u8; LENGTH];
    let mut put = |at: usize, bytes: &[u8]| table[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"FACP");
    put(4, &u32::try_from(LENGTH).unwrap_or(u32::MAX).to_le_bytes());
    put(8, &[6]);
    put(10, &OEM);
    put(16, &OEM_TABLE);
    put(24, &OEM_REVISION.to_le_bytes());
    put(28, b"HFVM");
    put(32, &1u32.to_le_bytes());
    put(36, &facs.to_le_bytes()[..4]);
    put(40, &dsdt.to_le_bytes()[..4]);
    // Preferred profile 4: enterprise server.
    put(45, &[4]);
    put(46, &u16::try_from(power::SCI).unwrap_or(9).to_le_bytes());
    put(56, &u32::from(power::PM1_EVENT).to_le_bytes());
    put(64, &u32::from(power::PM1_CONTROL).to_le_bytes());
    put(76, &u32::from(power::PM_TIMER).to_le_bytes());
    // Lengths of the event, control and timer blocks.
    put(88, &[4]);
    put(89, &[2]);
    put(91, &[4]);
    // C2 and C3 latencies that say "not supported".
    put(96, &101u16.to_le_bytes());
    put(98, &1001u16.to_le_bytes());
    put(108, &[cmos::CENTURY]);
    put(109, &(BOOT_LEGACY_DEVICES | BOOT_NO_VGA | BOOT_NO_ASPM).to_le_bytes());
    let flags = WBINVD | PROC_C1 | SLEEP_BUTTON | NO_FIXED_RTC | TIMER_32 | RESET_REGISTER;
    // Flat logical destinations name eight CPUs (ACPI 6.5 table 5.10).
    let flags = if cpus > 8 { flags | CLUSTERS } else { flags };
    put(112, &flags.to_le_bytes());
    put(116, &io_register(power::RESET_PORT, 8, 1));
    put(128, &[power::RESET_VALUE]);
    put(131, &[5]);
    put(140, &dsdt.to_le_bytes());
    put(148, &io_register(power::PM1_EVENT, 32, 0));
    put(172, &io_register(power::PM1_CONTROL, 16, 0));
    put(208, &io_register(power::PM_TIMER, 32, 0));
    put(268, b"HOLDFAST");
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    table[9] = 0u8.wrapping_sub(sum);
    table
}

/// The FACS has no checksum; it must lie on 64 bytes and hold the global lock.
pub(super) fn facs() -> Vec<u8> {
    let mut table = vec![0u8; 64];
    table[..4].copy_from_slice(b"FACS");
    table[4..8].copy_from_slice(&64u32.to_le_bytes());
    table[32] = 2;
    table
}

/// A generic address of I/O ports (ACPI 6.5 §5.2.3.2).
pub(super) fn io_register(port: u16, bits: u8, access: u8) -> [u8; 12] {
    let mut register = [SYSTEM_IO, bits, 0, access, 0, 0, 0, 0, 0, 0, 0, 0];
    register[4..6].copy_from_slice(&port.to_le_bytes());
    register
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_hardware_is_what_the_registers_have() {
        let table = build(0x1000, 0x2000, 8);
        let flags = u32::from_le_bytes([table[112], table[113], table[114], table[115]]);
        // A power button (bit 4 clear), no sleep button, no clock that wakes, no S4 by such a clock.
        assert_eq!(flags & 0xf0, 1 << 5 | 1 << 6);
        // A serial port, no VGA, no ASPM; a clock with CMOS memory, and where its century is.
        assert_eq!(table[108..111], [0x32, 1 << 0 | 1 << 2 | 1 << 4, 0]);
        // No ports that would switch ACPI off, no general-purpose events.
        assert_eq!((table[48..56].to_vec(), table[92..94].to_vec()), (vec![0; 8], vec![0; 2]));
        // The sleep that processors idle through is not told as good as S3 (bit 21).
        assert_eq!(flags & 1 << 21, 0);
        // More CPUs than flat logical destinations can name are in clusters.
        let many = build(0x1000, 0x2000, 9);
        assert_eq!((table[114] & 1 << 2, many[114] & 1 << 2), (0, 1 << 2));
    }
}
