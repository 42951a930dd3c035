//! Configuration space of one emulated function: bytes, which bits the guest may write, BARs and
//! the capability chain.
//! Source: PCI Express Base Specification 6.0 §7.5.1; PCI Local Bus 3.0 §6.2.5.1 and §6.7.
//!
//! | Offset | Field                | Writable                     |
//! |--------|----------------------|------------------------------|
//! | 0x00   | vendor, device       | no                           |
//! | 0x04   | command              | bits 0, 1, 2, 6, 8, 10       |
//! | 0x06   | status               | no                           |
//! | 0x08   | revision, class      | no                           |
//! | 0x0c   | cache line size      | yes                          |
//! | 0x10   | BARs (type 0)        | above the size               |
//! | 0x2c   | subsystem            | no                           |
//! | 0x34   | first capability     | no                           |
//! | 0x3c   | interrupt line       | yes                          |
//! | 0x3d   | interrupt pin        | no                           |

use super::function::{Bar, BarKind};

/// Bytes of conventional configuration space.
pub const LEGACY_SIZE: usize = 256;
/// Bytes of extended configuration space.
pub const SIZE: usize = 4096;

/// Offset of the command register.
pub const COMMAND: usize = 0x04;
/// Offset of the first BAR.
pub const BAR0: usize = 0x10;
/// Command: decode I/O BARs.
pub const COMMAND_IO: u16 = 1 << 0;
/// Command: decode memory BARs.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: the function may master the bus.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command: INTx is switched off.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Writable bits of the command register: I/O, memory, master, parity response, SERR#, INTx off.
const COMMAND_WRITABLE: u16 = 0x0547;

const STATUS: usize = 0x06;
const STATUS_INTERRUPT: u16 = 1 << 3;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const CAPABILITIES_POINTER: usize = 0x34;
/// Power management capability: identifier; version 3 of the interface, no D1, no D2, no PME.
const POWER_MANAGEMENT: u8 = 0x01;
const POWER_CAPABILITIES: u16 = 3;
/// Control and status: the power state, and that nothing is lost between D3hot and D0.
const POWER_STATE: u8 = 0b11;
const NO_SOFT_RESET: u8 = 1 << 3;
const D0: u8 = 0;
const D3_HOT: u8 = 3;
/// Where the first capability goes: right behind the header.
const FIRST_CAPABILITY: usize = 0x40;
/// Where the first extended capability has to be (PCIe 6.0 §7.6.2).
const FIRST_EXTENDED_CAPABILITY: usize = 0x100;

/// Who a function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Base class, subclass, programming interface, from bit 23 down.
    pub class: u32,
    /// Revision.
    pub revision: u8,
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem id.
    pub subsystem: u16,
}

/// Why a function cannot be described.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ConfigError {
    #[error("BAR {index} of {size} bytes: {why}")]
    Bar { index: u8, size: u64, why: &'static str },
    #[error("no room for a capability of {bytes} bytes")]
    NoRoom { bytes: usize },
}

/// Configuration space.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    bytes: Box<[u8; SIZE]>,
    writable: Box<[u8; SIZE]>,
    bars: [Option<BarSlot>; 6],
    /// Offset of the last capability, whose next pointer a new one fills in.
    last: Option<usize>,
    free: usize,
    last_extended: Option<usize>,
    free_extended: usize,
    /// Offset of the power state, if the function manages its power.
    power: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
struct BarSlot {
    kind: BarKind,
    size: u64,
}

impl ConfigSpace {
    /// Describes a type 0 function.
    pub fn new(identity: Identity) -> Self {
        let mut space = Self::blank(identity);
        space.set_u16(0x2c, identity.subsystem_vendor);
        space.set_u16(0x2e, identity.subsystem);
        space
    }

    /// Describes a type 1 function (bridge). Bus numbers and windows are for the bridge to fill in.
    pub fn new_bridge(identity: Identity) -> Self {
        let mut space = Self::blank(identity);
        space.bytes[0x0e] = 1;
        space
    }

    fn blank(identity: Identity) -> Self {
        let mut space = Self {
            bytes: Box::new([0; SIZE]),
            writable: Box::new([0; SIZE]),
            bars: [None; 6],
            last: None,
            free: FIRST_CAPABILITY,
            last_extended: None,
            free_extended: FIRST_EXTENDED_CAPABILITY,
            power: None,
        };
        space.set_u16(0x00, identity.vendor);
        space.set_u16(0x02, identity.device);
        space.set_u32(0x08, identity.class << 8 | u32::from(identity.revision));
        space.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(0x0c, &[0xff]);
        space.allow(0x3c, &[0xff]);
        space
    }

    /// Adds a BAR. `size` is a power of two: at least 16 for memory, 4 to 256 for I/O ports.
    pub fn add_bar(&mut self, index: u8, kind: BarKind, size: u64) -> Result<(), ConfigError> {
        let refuse = |why| Err(ConfigError::Bar { index, size, why });
        let wide = matches!(kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
        let slots = if wide { 2 } else { 1 };
        if usize::from(index) + slots > 6 {
            return refuse("there are six registers, and a 64-bit BAR takes two");
        }
        if !size.is_power_of_two() {
            return refuse("the size is not a power of two");
        }
        match kind {
            BarKind::Io if !(4..=256).contains(&size) => {
                return refuse("I/O BARs have 4 to 256 bytes");
            }
            BarKind::Memory32 if size > 1 << 31 => return refuse("32-bit BARs have at most 2 GiB"),
            _ if kind != BarKind::Io && size < 16 => {
                return refuse("memory BARs have at least 16 bytes");
            }
            BarKind::Io | BarKind::Memory32 | BarKind::Memory64 | BarKind::Memory64Prefetchable => {
            }
        }
        let offset = BAR0 + 4 * usize::from(index);
        let mask = !(size - 1);
        if wide {
            self.allow(offset, &mask.to_le_bytes());
        } else {
            self.allow(offset, &mask.to_le_bytes()[..4]);
        }
        self.bytes[offset] = match kind {
            BarKind::Io => 0b01,
            BarKind::Memory32 => 0b0000,
            BarKind::Memory64 => 0b0100,
            BarKind::Memory64Prefetchable => 0b1100,
        };
        self.bars[usize::from(index)] = Some(BarSlot { kind, size });
        Ok(())
    }

    /// Says that the function raises INTx on `pin` (1 = INTA).
    pub fn set_interrupt_pin(&mut self, pin: u8) {
        self.bytes[0x3d] = pin;
    }

    /// Adds a capability with identifier `id`; `body` follows the two header bytes, and
    /// `writable`, as long as `body` or shorter, says which bits of it the guest may write.
    /// Returns its offset.
    pub fn add_capability(
        &mut self,
        id: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<u16, ConfigError> {
        let bytes = body.len() + 2;
        let offset = self.free;
        if offset + bytes > LEGACY_SIZE {
            return Err(ConfigError::NoRoom { bytes });
        }
        let pointer = self.last.map_or(CAPABILITIES_POINTER, |last| last + 1);
        self.bytes[pointer] = u8::try_from(offset).map_err(|_| ConfigError::NoRoom { bytes })?;
        self.bytes[offset] = id;
        self.bytes[offset + 2..offset + bytes].copy_from_slice(body);
        self.allow(offset + 2, writable);
        self.last = Some(offset);
        self.free = (offset + bytes).next_multiple_of(4);
        self.set_u16(STATUS, self.u16(STATUS) | STATUS_CAPABILITIES);
        u16::try_from(offset).map_err(|_| ConfigError::NoRoom { bytes })
    }

    /// Adds power management: D0 and D3hot, in which no BAR decodes (PCIe 6.0 §5.3.1.4, §7.5.2).
    pub fn add_power_management(&mut self) -> Result<(), ConfigError> {
        let [low, high] = POWER_CAPABILITIES.to_le_bytes();
        let body = [low, high, NO_SOFT_RESET, 0, 0, 0];
        let at = self.add_capability(POWER_MANAGEMENT, &body, &[0, 0, POWER_STATE])?;
        self.power = Some(usize::from(at) + 4);
        Ok(())
    }

    /// Returns whether the function is in D0: below, it answers to configuration requests and to nothing
    /// else (PCIe 6.0 §5.3.1.4.1).
    pub fn is_awake(&self) -> bool {
        self.power_state() == D0
    }

    /// Puts the function into D0, as a reset does.
    pub fn wake(&mut self) {
        if let Some(at) = self.power {
            self.bytes[at] &= !POWER_STATE;
        }
    }

    /// Returns the power state.
    fn power_state(&self) -> u8 {
        self.power.map_or(D0, |at| self.bytes[at] & POWER_STATE)
    }

    /// Adds an extended capability; `body` follows the four header bytes. Returns its offset.
    pub fn add_extended_capability(
        &mut self,
        id: u16,
        version: u8,
        body: &[u8],
    ) -> Result<u16, ConfigError> {
        let bytes = body.len() + 4;
        let offset = self.free_extended;
        if offset + bytes > SIZE {
            return Err(ConfigError::NoRoom { bytes });
        }
        let pointer = u16::try_from(offset).map_err(|_| ConfigError::NoRoom { bytes })?;
        if let Some(last) = self.last_extended {
            let old = self.u16(last + 2) & 0x000f;
            self.set_u16(last + 2, old | pointer << 4);
        }
        self.set_u16(offset, id);
        self.set_u16(offset + 2, u16::from(version & 0xf));
        self.bytes[offset + 4..offset + bytes].copy_from_slice(body);
        self.last_extended = Some(offset);
        self.free_extended = (offset + bytes).next_multiple_of(4);
        Ok(pointer)
    }

    /// Reads `data.len()` bytes at `offset`; past the end everything reads as ones.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = self.bytes.get(usize::from(offset) + index).copied().unwrap_or(0xff);
        }
    }

    /// Writes the bits that the guest may write.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        let before = self.power_state();
        for (index, byte) in data.iter().enumerate() {
            let at = usize::from(offset) + index;
            if let Some(mask) = self.writable.get(at).copied() {
                self.bytes[at] = self.bytes[at] & !mask | byte & mask;
            }
        }
        // A state that is not supported is not taken over (PCIe 6.0 §7.5.2.2).
        if let (Some(at), true) = (self.power, !matches!(self.power_state(), D0 | D3_HOT)) {
            self.bytes[at] = self.bytes[at] & !POWER_STATE | before;
        }
    }

    /// Sets bytes whatever the guest may write.
    pub fn set(&mut self, offset: u16, data: &[u8]) {
        for (index, byte) in data.iter().enumerate() {
            if let Some(place) = self.bytes.get_mut(usize::from(offset) + index) {
                *place = *byte;
            }
        }
    }

    /// Lets the guest write the bits of `mask` at `offset`.
    pub fn allow_write(&mut self, offset: u16, mask: &[u8]) {
        self.allow(usize::from(offset), mask);
    }

    /// Returns the command register.
    pub fn command(&self) -> u16 {
        self.u16(COMMAND)
    }

    /// Returns the two bytes at `offset`, below 4095.
    pub fn read_u16(&self, offset: u16) -> u16 {
        self.u16(usize::from(offset))
    }

    /// Sets or clears the interrupt status bit.
    pub fn set_interrupt_status(&mut self, level: crate::irq::Level) {
        let status = self.u16(STATUS) & !STATUS_INTERRUPT;
        let bit = if level == crate::irq::Level::High { STATUS_INTERRUPT } else { 0 };
        self.set_u16(STATUS, status | bit);
    }

    /// Returns all BARs as the guest programmed them.
    pub fn bars(&self) -> Vec<Bar> {
        let command = if self.is_awake() { self.command() } else { 0 };
        let slots = self.bars.iter().enumerate();
        slots
            .filter_map(|(index, slot)| {
                let BarSlot { kind, size } = (*slot)?;
                let enable = if kind == BarKind::Io { COMMAND_IO } else { COMMAND_MEMORY };
                Some(Bar {
                    index: u8::try_from(index).ok()?,
                    kind,
                    size,
                    address: self.bar_address(index, kind, size),
                    decoding: command & enable != 0,
                })
            })
            .collect()
    }

    /// Places BAR `index`.
    pub fn place_bar(&mut self, index: u8, address: u64) {
        let Some(Some(slot)) = self.bars.get(usize::from(index)).copied() else { return };
        let offset = BAR0 + 4 * usize::from(index);
        let flags = self.bytes[offset] & !self.writable[offset];
        let wide = matches!(slot.kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
        let bytes = address.to_le_bytes();
        let length = if wide { 8 } else { 4 };
        self.bytes[offset..offset + length].copy_from_slice(&bytes[..length]);
        self.bytes[offset] = self.bytes[offset] & self.writable[offset] | flags;
    }

    fn bar_address(&self, index: usize, kind: BarKind, size: u64) -> u64 {
        let offset = BAR0 + 4 * index;
        let low = u64::from(self.u16(offset)) | u64::from(self.u16(offset + 2)) << 16;
        let high = u64::from(self.u16(offset + 4)) | u64::from(self.u16(offset + 6)) << 16;
        let wide = matches!(kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
        let raw = if wide { low | high << 32 } else { low };
        raw & !(size - 1)
    }

    fn allow(&mut self, offset: usize, mask: &[u8]) {
        for (index, bits) in mask.iter().enumerate() {
            if let Some(place) = self.writable.get_mut(offset + index) {
                *place = *bits;
            }
        }
    }

    fn u16(&self, offset: usize) -> u16 {
        u16::from_le_bytes([self.bytes[offset], self.bytes[offset + 1]])
    }

    fn set_u16(&mut self, offset: usize, value: u16) {
        self.bytes[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn set_u32(&mut self, offset: usize, value: u32) {
        self.bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity {
        vendor: 0x1af4,
        device: 0x1042,
        class: 0x01_80_00,
        revision: 1,
        subsystem_vendor: 0x1af4,
        subsystem: 2,
    };

    fn read_u32(space: &ConfigSpace, offset: u16) -> u32 {
        let mut data = [0; 4];
        space.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn header_says_who_it_is_and_cannot_be_written() {
        let mut space = ConfigSpace::new(IDENTITY);
        space.write(0, &[0; 4]);
        assert_eq!(read_u32(&space, 0), 0x1042_1af4);
        assert_eq!(read_u32(&space, 8), 0x0180_0001);
        assert_eq!(read_u32(&space, 0x2c), 0x0002_1af4);
    }

    #[test]
    fn writing_ones_to_a_bar_reads_back_its_size() {
        let mut space = ConfigSpace::new(IDENTITY);
        space.add_bar(0, BarKind::Memory64Prefetchable, 1 << 33).expect("fits");
        space.write(0x10, &[0xff; 4]);
        space.write(0x14, &[0xff; 4]);
        assert_eq!((read_u32(&space, 0x10), read_u32(&space, 0x14)), (0xc, 0xffff_fffe));
        space.place_bar(0, 0x40_0000_0000);
        space.write(0x04, &COMMAND_MEMORY.to_le_bytes());
        let bar = space.bars()[0];
        assert_eq!((bar.address, bar.decoding), (0x40_0000_0000, true));
        assert_eq!(read_u32(&space, 0x10), 0xc);
    }

    #[test]
    fn wrong_bars_are_refused() {
        let mut space = ConfigSpace::new(IDENTITY);
        assert!(space.add_bar(5, BarKind::Memory64, 16).is_err());
        assert!(space.add_bar(0, BarKind::Memory32, 24).is_err());
        assert!(space.add_bar(0, BarKind::Io, 512).is_err());
    }

    #[test]
    fn capabilities_form_a_chain() {
        let mut space = ConfigSpace::new(IDENTITY);
        let first = space.add_capability(0x09, &[1, 2, 3, 4], &[]).expect("room");
        let second = space.add_capability(0x11, &[0; 10], &[0x00, 0xc0]).expect("room");
        let mut byte = [0];
        space.read(0x34, &mut byte);
        assert_eq!(u16::from(byte[0]), first);
        space.read(first + 1, &mut byte);
        assert_eq!(u16::from(byte[0]), second);
        space.write(second + 2, &[0xff, 0xff]);
        assert_eq!(space.read_u16(second + 2), 0xc000);
    }

    /// PCIe 6.0 §5.3.1.4 (D3hot), §7.5.2.2 (PowerState).
    #[test]
    fn bars_decode_in_d0_only_and_other_states_are_d0_or_d3() {
        let mut space = ConfigSpace::new(IDENTITY);
        space.add_bar(0, BarKind::Memory32, 4096).expect("fits");
        space.add_power_management().expect("room");
        space.write(4, &COMMAND_MEMORY.to_le_bytes());
        let states = [3, 1, 2, 0, 1, 3].map(|state| {
            space.write(0x44, &[state, 0xff]);
            (space.read_u16(0x44), space.bars()[0].decoding)
        });
        let (on, off) = ((8, true), (0xb, false));
        assert_eq!(states, [off, off, off, on, on, off]);
        assert_eq!(space.read_u16(0x42), 3, "version 3, D0 and D3hot only, no PME");
    }

    #[test]
    fn reads_past_the_end_are_ones() {
        let mut data = [0; 4];
        ConfigSpace::new(IDENTITY).read(4094, &mut data);
        assert_eq!(data, [0, 0, 0xff, 0xff]);
    }
}
