//! Where the console is (SPCR): firmware and systems that ask nobody else find the serial port by it,
//! as Windows' Emergency Management Services and FreeBSD's loader do. Linux on x86 takes it for `earlycon` only.
//! Source: Microsoft "Serial Port Console Redirection Table", revision 2.

use acpi_tables::sdt::Sdt;

use super::{OEM, OEM_REVISION, OEM_TABLE, fadt::io_register};
use crate::{devices::serial, sys::kvm::Controllers};

/// Bytes of the table.
const LENGTH: u32 = 80;
/// Revision of the table: interface types are those of the debug port table 2.
const REVISION: u8 = 2;
/// Interface type: compatible with a 16550.
const COMPATIBLE_16550: u8 = 0;
/// Interrupt types, a bit each: to the PICs of a PC, and to an I/O APIC.
const PICS: u8 = 1 << 0;
const IO_APIC: u8 = 1 << 1;
/// Baud rate: 115200.
const BAUD_115200: u8 = 7;
/// No parity; one stop bit; no flow control.
const FORMAT: [u8; 3] = [0, 1, 0];
/// Terminal type: VT100 and more, in UTF-8.
const VT_UTF8: u8 = 2;
/// Vendor and device of a port that is no PCI device.
const NO_PCI: u16 = 0xffff;

/// Builds the table of a machine with these interrupt controllers.
pub(super) fn build(controllers: Controllers) -> Vec<u8> {
    let mut table = Sdt::new(*b"SPCR", LENGTH, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.write_u8(36, COMPATIBLE_16550);
    table.write_bytes(40, &io_register(serial::BASE, 8, 1));
    let irq = match controllers {
        Controllers::Kernel => [PICS | IO_APIC, serial::GSI.to_le_bytes()[0]],
        Controllers::Split => [IO_APIC, 0],
    };
    table.write_bytes(52, &irq);
    table.write_u32(54, serial::GSI);
    table.write_u8(58, BAUD_115200);
    table.write_bytes(59, &FORMAT);
    table.write_u8(62, VT_UTF8);
    table.write_u16(64, NO_PCI);
    table.write_u16(66, NO_PCI);
    table.as_slice().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_is_the_serial_port() {
        let table = build(Controllers::Kernel);
        assert_eq!((&table[..4], table.len(), table[8]), (&b"SPCR"[..], 80, 2));
        // A 16550 in I/O space at 0x3f8, registers of eight bits, read by bytes.
        assert_eq!(table[36..40], [0; 4]);
        assert_eq!(table[40..52], [1, 8, 0, 1, 0xf8, 3, 0, 0, 0, 0, 0, 0]);
        // IRQ 4 of the PICs, global interrupt 4.
        assert_eq!(table[52..58], [3, 4, 4, 0, 0, 0]);
        // 115200 baud, no parity, one stop bit, no flow control, VT-UTF8, a reserved byte.
        assert_eq!(table[58..64], [7, 0, 1, 0, 2, 0]);
        // No PCI device: no bus, device, function, flags nor segment; nothing is reserved behind.
        assert_eq!(table[64..68], [0xff; 4]);
        assert_eq!(table[68..], [0; 12]);
    }

    #[test]
    fn without_pics_it_has_no_irq_of_theirs() {
        assert_eq!(build(Controllers::Split)[52..58], [2, 0, 4, 0, 0, 0]);
    }
}
