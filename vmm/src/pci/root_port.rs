//! A PCIe root port: a bridge with one slot, behind which one passed-through device sits.
//! Source: PCI Express Base Specification 6.0 §7.5.1.3 (type 1 header), §7.5.3 (PCI Express
//! capability).
//!
//! | Offset in the capability | Register              | Content                              |
//! |--------------------------|-----------------------|--------------------------------------|
//! | 0x02                     | capabilities          | version 2, root port, slot           |
//! | 0x0c                     | link capabilities     | as told by the host's port           |
//! | 0x12                     | link status           | as told by the host's port           |
//! | 0x14                     | slot capabilities     | physical slot number                 |
//! | 0x1a                     | slot status           | presence detected                    |
//! | 0x2c                     | link capabilities 2   | speeds up to the link's              |

use super::{
    config::{ConfigError, ConfigSpace, Identity},
    function::{Bar, PciFunction},
};

/// Red Hat's generic PCIe root port, which every guest's port driver knows by class.
const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x000c,
    class: 0x06_04_00,
    revision: 0,
    subsystem_vendor: 0,
    subsystem: 0,
};
/// Capability identifier of PCI Express.
const EXPRESS: u8 = 0x10;
/// Version 2, device/port type root port (4), slot implemented.
const EXPRESS_ROOT_PORT: u16 = 0x0002 | 4 << 4 | 1 << 8;
/// Slot status: a device is there.
const PRESENCE: u16 = 1 << 6;
/// Link status: the data link layer is active.
const LINK_ACTIVE: u16 = 1 << 13;
/// Link capabilities: the port reports the data link layer's state.
const LINK_ACTIVE_CAPABLE: u32 = 1 << 20;

/// Speed and width of a link, in the encoding of the link registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// 1 = 2.5 GT/s, 2 = 5, 3 = 8, 4 = 16, 5 = 32, 6 = 64.
    pub speed: u8,
    /// Lanes, 1..=32.
    pub width: u8,
}

/// What a bridge forwards downstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Windows {
    /// I/O ports: base and last address; none when the base is the larger.
    pub io: Option<(u16, u16)>,
    /// 32-bit memory: base and last address, in steps of 1 MiB.
    pub memory: Option<(u32, u32)>,
    /// 64-bit prefetchable memory: base and last address, in steps of 1 MiB.
    pub prefetchable: Option<(u64, u64)>,
}

/// A root port.
pub struct RootPort {
    config: ConfigSpace,
}

impl RootPort {
    /// Makes a port for physical slot `slot`, with `link`.
    pub fn new(slot: u8, link: Link) -> Result<Self, ConfigError> {
        let mut config = ConfigSpace::new_bridge(IDENTITY);
        let speed = u16::from(link.speed.clamp(1, 6));
        let width = u16::from(link.width.clamp(1, 32));
        let mut body = [0u8; 0x3a];
        let mut put =
            |at: usize, bytes: &[u8]| body[at - 2..at - 2 + bytes.len()].copy_from_slice(bytes);
        let link_word = u32::from(speed) | u32::from(width) << 4;
        put(0x02, &EXPRESS_ROOT_PORT.to_le_bytes());
        put(0x0c, &(link_word | LINK_ACTIVE_CAPABLE | u32::from(slot) << 24).to_le_bytes());
        put(0x12, &(speed | width << 4 | LINK_ACTIVE).to_le_bytes());
        put(0x14, &(u32::from(slot) << 19).to_le_bytes());
        put(0x1a, &PRESENCE.to_le_bytes());
        // Supported link speeds vector: bit 1 for 2.5 GT/s and one more for each step.
        put(0x2c, &(((1u32 << speed) - 1) << 1).to_le_bytes());
        put(0x30, &speed.to_le_bytes());
        // Writable: device control, link control, slot control, root control, the "2" controls.
        let mut writable = [0u8; 0x3a];
        let mut allow =
            |at: usize, mask: u16| writable[at - 2..at].copy_from_slice(&mask.to_le_bytes());
        allow(0x08, 0xffff);
        allow(0x10, 0x03df);
        allow(0x18, 0x1fff);
        allow(0x1c, 0x001f);
        allow(0x28, 0x07ff);
        config.add_capability(EXPRESS, &body, &writable)?;
        config.set_interrupt_pin(1);
        // Primary, secondary and subordinate bus, secondary latency timer.
        config.allow_write(0x18, &[0xff, 0xff, 0xff]);
        // I/O base and limit (16-bit), memory and prefetchable windows (64-bit), bridge control.
        config.allow_write(0x1c, &[0xf0, 0xf0]);
        config.allow_write(0x20, &[0xf0, 0xff, 0xf0, 0xff, 0xf0, 0xff, 0xf0, 0xff]);
        config.allow_write(0x28, &[0xff; 8]);
        config.allow_write(0x3e, &[0x43, 0x00]);
        config.set(0x24, &[1, 0, 1, 0]);
        let mut port = Self { config };
        port.set_windows(Windows::default());
        Ok(port)
    }

    /// Gives the port its buses.
    pub fn set_buses(&mut self, primary: u8, secondary: u8, subordinate: u8) {
        self.config.set(0x18, &[primary, secondary, subordinate]);
    }

    /// Opens the windows. A window that is absent is closed.
    pub fn set_windows(&mut self, windows: Windows) {
        let (io_base, io_last) = windows.io.unwrap_or((0xf000, 0x0fff));
        self.config.set(0x1c, &[io_base.to_le_bytes()[1] & 0xf0, io_last.to_le_bytes()[1] & 0xf0]);
        let (base, last) = windows.memory.unwrap_or((0xfff0_0000, 0x000f_ffff));
        self.config.set(0x20, &[base.to_le_bytes()[2] & 0xf0, base.to_le_bytes()[3]]);
        self.config.set(0x22, &[last.to_le_bytes()[2] & 0xf0, last.to_le_bytes()[3]]);
        let (base, last) = windows.prefetchable.unwrap_or((0xfff0_0000, 0x000f_ffff));
        let (base, last) = (base.to_le_bytes(), last.to_le_bytes());
        self.config.set(0x24, &[base[2] & 0xf0 | 1, base[3], last[2] & 0xf0 | 1, last[3]]);
        self.config.set(0x28, &base[4..]);
        self.config.set(0x2c, &last[4..]);
    }

    /// Returns the bus right behind the port and the last bus behind it.
    pub fn buses(&self) -> (u8, u8) {
        let mut bytes = [0; 2];
        self.config.read(0x19, &mut bytes);
        (bytes[0], bytes[1])
    }
}

impl PciFunction for RootPort {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.config.write(offset, data);
    }

    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }

    fn place_bar(&mut self, _index: u8, _address: u64) {}

    fn read_bar(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_and_slot_are_told() {
        let mut port = RootPort::new(5, Link { speed: 5, width: 16 }).expect("room");
        let mut data = [0; 4];
        port.read_config(0x40 + 0x0c, &mut data);
        assert_eq!(u32::from_le_bytes(data) & 0x3ff, 5 | 16 << 4);
        port.read_config(0x40 + 0x14, &mut data);
        assert_eq!(u32::from_le_bytes(data) >> 19, 5);
    }

    #[test]
    fn windows_are_programmed_and_can_be_moved() {
        let mut port = RootPort::new(1, Link { speed: 1, width: 1 }).expect("room");
        port.set_windows(Windows {
            io: None,
            memory: Some((0xc000_0000, 0xc00f_ffff)),
            prefetchable: Some((0x80_0000_0000, 0xbf_ffff_ffff)),
        });
        let mut data = [0; 4];
        port.read_config(0x20, &mut data);
        assert_eq!(data, [0x00, 0xc0, 0x00, 0xc0]);
        port.read_config(0x28, &mut data);
        assert_eq!(u32::from_le_bytes(data), 0x80);
        port.write_config(0x20, &[0x10, 0xd0]);
        port.read_config(0x20, &mut data);
        assert_eq!(data[..2], [0x10, 0xd0]);
    }
}
