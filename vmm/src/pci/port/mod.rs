//! A PCI Express port: root port, or upstream or downstream port of a switch. What it says of its
//! link and abilities is what the host's port says; what the guest programs goes no further.
//! Source: PCI Express Base Specification 6.0 §7.5.1.3 (type 1 header), §7.5.2 (power management),
//! §7.5.3 (PCI Express capability), §7.7.1 (MSI), §7.7.11 (access control); PCI-to-PCI Bridge
//! Architecture 1.2 §13 (slot numbering), §3.2.5.13 (subsystem).
//!
//! | Offset in the capability | Register              | Content                                |
//! |--------------------------|-----------------------|----------------------------------------|
//! | 0x02                     | capabilities          | version 2, kind, slot                  |
//! | 0x04, 0x08               | device                | host's; control is the guest's to write |
//! | 0x0c, 0x10, 0x12         | link                  | host's; active while something is there |
//! | 0x14, 0x18, 0x1a         | slot                  | see `slot`                             |
//! | 0x1c                     | root control          | the guest's to write (root ports)      |
//! | 0x24, 0x28               | device 2              | host's; control is the guest's to write |
//! | 0x2c, 0x30, 0x32         | link 2                | host's; control is the guest's to write |
//!
//! AtomicOps of device 2 are told for the device behind where there is no such port on the host: see
//! `atomics`.
//!
//! Other capabilities: MSI with one vector, subsystem, power management (every function has it: D0 and
//! D3hot, in which nothing passes the port and it interrupts for nothing), slot numbering (ports with a
//! slot), what firmware is to keep (spare ports); extended: access control, where the host's port has
//! it, read-only, because it is the host's to decide.

mod atomics;
mod slot;

use std::io;

pub use atomics::{AtomicOps, Behind};
pub use slot::{Alarm, Kept, Power, SlotSpec, SlotWatch};
use types::topology::PortRegisters;

use super::{
    config::{ConfigError, ConfigSpace, Identity},
    function::{Bar, PciFunction},
};
use slot::Slot;

/// Red Hat's generic PCIe root port, which every guest's port driver knows by class.
const ROOT: (u16, u16) = (0x1b36, 0x000c);
/// Texas Instruments' XIO3130 switch: upstream and downstream ports without oddities of their own.
const UPSTREAM: (u16, u16) = (0x104c, 0x8232);
const DOWNSTREAM: (u16, u16) = (0x104c, 0x8233);
/// Base class bridge, PCI to PCI, decoding normally.
const CLASS: u32 = 0x06_04_00;

/// Capability identifiers.
const SLOT_NUMBERING: u8 = 0x04;
const MSI: u8 = 0x05;
const SUBSYSTEM: u8 = 0x0d;
const EXPRESS: u8 = 0x10;
/// Extended capability: access control services.
const ACCESS_CONTROL: u16 = 0x0d;

/// Where the PCI Express capability lies: it is the first.
pub(super) const EXPRESS_AT: u16 = 0x40;
/// Bytes of its body, behind identifier and pointer.
const EXPRESS_BODY: usize = 0x3a;
/// Version of the capability.
const EXPRESS_VERSION: u16 = 2;
/// Capabilities: a slot is implemented.
const SLOT_IMPLEMENTED: u16 = 1 << 8;

/// Device capabilities that a port can repeat: payload size, extended tags, role-based errors;
/// slot power (upstream ports).
const DEVICE_CAPABILITIES: u32 = 0x0000_8027;
const SLOT_POWER: u32 = 0x0ffc_0000;
/// Role-based error reporting, which every port since 1.1 has to say.
const ROLE_BASED: u32 = 1 << 15;
/// Link status: training, bandwidth notifications: events that do not happen here.
const LINK_EVENTS: u16 = 1 << 11 | 1 << 14 | 1 << 15;
/// Link status: the data link layer is active.
const LINK_ACTIVE: u16 = 1 << 13;
/// Link capabilities: the greatest speed and width.
const LINK_MOST: u16 = 0x03ff;
/// Link capabilities: the port reports the data link layer's state.
const LINK_ACTIVE_CAPABLE: u32 = 1 << 20;
/// Link control: the link is disabled.
const LINK_DISABLE: u16 = 1 << 4;
/// Bits of device control and of link control that are told as the host's port has them: not that it
/// hands on retries or resets, nor that the link is off or retrains.
const DEVICE_CONTROL: u16 = 0x7fff;
const LINK_CONTROL: u16 = 0x0fcf;
/// Link control bits that are the guest's: power management, common clock, extended synch, widths
/// on its own. The read completion boundary is the port's; retraining (bit 5) is over at once.
const LINK_CONTROL_WRITABLE: u16 = 0x02c3;
/// Link control: interrupts for changes of the bandwidth, and the capability that they need.
const LINK_BANDWIDTH_INTERRUPTS: u16 = 3 << 10;
const LINK_BANDWIDTH_CAPABLE: u32 = 1 << 21;
/// Link control: clock power management, of an upstream port, and the capability that it needs.
const LINK_CLOCK: u16 = 1 << 8;
const LINK_CLOCK_CAPABLE: u32 = 1 << 18;
/// Device control bits that are the guest's: error reporting, relaxed order, payload, no snoop, read
/// requests. No port has phantom functions or auxiliary power.
const DEVICE_CONTROL_WRITABLE: u16 = 0x78ff;
/// Device control: extended tags, and the capability that they need.
const EXTENDED_TAGS: u16 = 1 << 8;
const EXTENDED_TAGS_CAPABLE: u32 = 1 << 5;
/// Root control: system errors and PME. Visible retries (bit 4) need a capability that is not told.
const ROOT_CONTROL_WRITABLE: u16 = 0x000f;
/// MSI: 64-bit address; enabled.
const MSI_64: u16 = 1 << 7;
const MSI_ENABLE: u16 = 1 << 0;
/// Bridge control, and its bit that holds the bus behind in reset.
const BRIDGE_CONTROL: u16 = 0x3e;
const SECONDARY_BUS_RESET: u16 = 1 << 6;

/// Speed and width of a link, in the encoding of the link registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// 1 = 2.5 GT/s, 2 = 5, 3 = 8, 4 = 16, 5 = 32, 6 = 64.
    pub speed: u8,
    /// Lanes, 1..=32.
    pub width: u8,
}

impl Link {
    /// Returns the state of a link that is always this one.
    pub const fn fixed(self) -> LinkState {
        LinkState { most: self, now: self }
    }

    /// Returns the fields of link status, and those of link capabilities, which are alike.
    fn fields(self) -> u16 {
        u16::from(self.speed.clamp(1, 6)) | u16::from(self.width.clamp(1, 32)) << 4
    }
}

/// What a link can be and what it is: GPUs slow theirs down while they idle, and drivers and libraries
/// go by the most that the ports above say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkState {
    /// The fastest and widest that it can be.
    pub most: Link,
    /// What it is.
    pub now: Link,
}

impl LinkState {
    /// Returns what a port with this link and nothing else to tell says of itself.
    pub fn registers(self) -> PortRegisters {
        let most = self.most.fields();
        let speed = most & 0xf;
        PortRegisters {
            device_capabilities: ROLE_BASED,
            link_capabilities: most.into(),
            link_status: self.now.fields(),
            // Supported link speeds: bit 1 for 2.5 GT/s and one more for each step.
            link_capabilities2: ((1u32 << speed) - 1) << 1,
            link_control2: speed,
            ..PortRegisters::default()
        }
    }
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

/// Which end of a link a port is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Below a host bridge.
    Root,
    /// The upper end of a switch.
    Upstream,
    /// A lower end of a switch.
    Downstream,
}

impl Kind {
    fn express_type(self) -> u16 {
        match self {
            Self::Root => 4,
            Self::Upstream => 5,
            Self::Downstream => 6,
        }
    }

    fn identity(self) -> Identity {
        let (vendor, device) = match self {
            Self::Root => ROOT,
            Self::Upstream => UPSTREAM,
            Self::Downstream => DOWNSTREAM,
        };
        Identity { vendor, device, class: CLASS, revision: 0, subsystem_vendor: 0, subsystem: 0 }
    }
}

/// A port.
pub struct Port {
    config: ConfigSpace,
    kind: Kind,
    slot: Option<Slot>,
    msi: u16,
    /// The guest has begun to reset the bus behind.
    bus_reset: bool,
    /// The guest has switched off the link below.
    link_down: bool,
}

impl Port {
    /// Makes a port that says `registers` of itself. Ports that lead to a device have a slot.
    pub fn new(
        kind: Kind,
        registers: &PortRegisters,
        slot: Option<SlotSpec>,
    ) -> Result<Self, ConfigError> {
        let mut config = ConfigSpace::new_bridge(kind.identity());
        let mut body = [0u8; EXPRESS_BODY];
        let mut put =
            |at: usize, bytes: &[u8]| body[at - 2..at - 2 + bytes.len()].copy_from_slice(bytes);
        let has_slot = if slot.is_some() { SLOT_IMPLEMENTED } else { 0 };
        put(0x02, &(EXPRESS_VERSION | kind.express_type() << 4 | has_slot).to_le_bytes());
        let power = if kind == Kind::Upstream { SLOT_POWER } else { 0 };
        let device = registers.device_capabilities & (DEVICE_CAPABILITIES | power) | ROLE_BASED;
        put(0x04, &device.to_le_bytes());
        let writable = Writable::of(kind, registers);
        put(0x08, &(registers.device_control & DEVICE_CONTROL).to_le_bytes());
        let downward = if kind == Kind::Upstream { 0 } else { LINK_ACTIVE_CAPABLE };
        put(0x0c, &(registers.link_capabilities | downward).to_le_bytes());
        put(0x10, &(registers.link_control & LINK_CONTROL).to_le_bytes());
        put(0x12, &(registers.link_status & !(LINK_EVENTS | LINK_ACTIVE)).to_le_bytes());
        put(0x24, &registers.device_capabilities2.to_le_bytes());
        put(0x28, &registers.device_control2.to_le_bytes());
        put(0x2c, &registers.link_capabilities2.to_le_bytes());
        put(0x30, &registers.link_control2.to_le_bytes());
        put(0x32, &registers.link_status2.to_le_bytes());
        config.add_capability(EXPRESS, &body, &writable.mask(kind))?;
        header(&mut config);
        let mut msi = [0; 12];
        msi[..2].copy_from_slice(&MSI_64.to_le_bytes());
        let writable = [1, 0, 0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        let msi = config.add_capability(MSI, &msi, &writable)?;
        let (vendor, device) = (ROOT.0.to_le_bytes(), kind.identity().device.to_le_bytes());
        config.add_capability(
            SUBSYSTEM,
            &[0, 0, vendor[0], vendor[1], device[0], device[1]],
            &[],
        )?;
        config.add_power_management()?;
        if let Some(acs) = registers.access_control {
            let [c0, c1] = acs.capabilities.to_le_bytes();
            let [e0, e1] = acs.control.to_le_bytes();
            config.add_extended_capability(ACCESS_CONTROL, 1, &[c0, c1, e0, e1])?;
        }
        let slot = slot.map(|spec| Slot::new(spec, &mut config)).transpose()?;
        let mut port = Self { config, kind, slot, msi, bus_reset: false, link_down: false };
        port.set_windows(Windows::default());
        port.show_link();
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

    /// Returns the fastest link that the port says it can have.
    pub fn link(&self) -> Link {
        let [capabilities, width] = self.config.read_u16(EXPRESS_AT + 0x0c).to_le_bytes();
        Link { speed: capabilities & 0xf, width: capabilities >> 4 | (width & 3) << 4 }
    }

    /// Puts a device into the slot and tells the guest, which gives it power; the
    /// slot's watch hears of that. The port says that it can have the most of that link: no link is
    /// faster or wider than its port (PCIe 6.0 §7.5.3.6, §7.5.3.8). A root port says which AtomicOps
    /// are completed for the device.
    pub fn insert(&mut self, behind: Behind) -> io::Result<()> {
        let registers = behind.link.registers();
        let most = self.config.read_u16(EXPRESS_AT + 0x0c) & !LINK_MOST;
        let [low, high, ..] = registers.link_capabilities.to_le_bytes();
        let most = most | u16::from_le_bytes([low, high]) & LINK_MOST;
        self.config.set(EXPRESS_AT + 0x0c, &most.to_le_bytes());
        self.config.set(EXPRESS_AT + 0x12, &registers.link_status.to_le_bytes());
        self.config.set(EXPRESS_AT + 0x2c, &registers.link_capabilities2.to_le_bytes());
        self.config.set(EXPRESS_AT + 0x30, &registers.link_control2.to_le_bytes());
        self.complete(behind.atomics);
        self.change(|slot, config| slot.insert(config))
    }

    /// The device answers: the link comes up.
    pub fn connect(&mut self) -> io::Result<()> {
        self.change(|slot, config| slot.connect(config))
    }

    /// The device has lost its power: the link goes down.
    pub fn disconnect(&mut self) -> io::Result<()> {
        self.change(|slot, config| slot.disconnect(config))
    }

    /// Takes the device out of the slot and tells the guest.
    pub fn remove(&mut self) -> io::Result<()> {
        self.complete(AtomicOps::NONE);
        self.change(|slot, config| slot.remove(config))
    }

    /// Says which AtomicOps are completed for the device in the slot.
    fn complete(&mut self, atomics: AtomicOps) {
        if self.kind == Kind::Root && self.slot.is_some() {
            let word = self.config.read_u16(EXPRESS_AT + 0x24);
            let others = u32::from(word) & !atomics::COMPLETED;
            let [low, high, ..] = (others | atomics.completed()).to_le_bytes();
            self.config.set(EXPRESS_AT + 0x24, &[low, high]);
        }
    }

    /// Presses the slot's attention button, with which a user asks for the device.
    pub fn press_button(&mut self) -> io::Result<()> {
        self.change(|slot, config| slot.press_button(config))
    }

    /// Returns whether the guest gave the slot of this device power and took it away before the link came
    /// up: guests wait for that (Linux's pciehp for a second).
    pub fn has_given_up(&self) -> bool {
        self.slot.as_ref().is_some_and(Slot::has_given_up)
    }

    /// Returns whether the guest gives the slot power.
    pub fn power(&self) -> Power {
        self.slot.as_ref().map_or(Power::On, |slot| slot.power(&self.config))
    }

    /// Returns whether there is a device in the slot whose link is up: the guest has not taken its power.
    pub fn is_connected(&self) -> bool {
        self.slot.as_ref().is_none_or(Slot::is_connected)
    }

    fn change(&mut self, act: impl FnOnce(&mut Slot, &mut ConfigSpace)) -> io::Result<()> {
        let Some(slot) = &mut self.slot else { return Ok(()) };
        act(slot, &mut self.config);
        self.show_link();
        self.sound()
    }

    /// Whether configuration requests reach the other side.
    fn is_link_active(&self) -> bool {
        let connected = self.is_connected();
        let reset = self.is_resetting() && self.kind != Kind::Upstream;
        connected && !reset && !self.is_link_disabled()
    }

    /// Whether the guest has switched off the link below. That resets what is there as bridge control does (PCIe 6.0
    /// §6.6.1, "hot reset"), here when the link comes back: until then it only sends nothing, nobody sees more, and what
    /// is about to be unplugged, as Linux 3.10 begins it, is not held up.
    fn is_link_disabled(&self) -> bool {
        let disabled = self.config.read_u16(EXPRESS_AT + 0x10) & LINK_DISABLE != 0;
        disabled && self.kind != Kind::Upstream
    }

    fn is_resetting(&self) -> bool {
        self.config.read_u16(BRIDGE_CONTROL) & SECONDARY_BUS_RESET != 0
    }

    fn show_link(&mut self) {
        let active = self.kind != Kind::Upstream && self.is_link_active();
        let status = self.config.read_u16(EXPRESS_AT + 0x12) & !LINK_ACTIVE;
        let shown = status | if active { LINK_ACTIVE } else { 0 };
        self.config.set(EXPRESS_AT + 0x12, &shown.to_le_bytes());
    }

    /// Interrupts the guest if the slot has something to tell.
    fn sound(&mut self) -> io::Result<()> {
        let control = self.config.read_u16(self.msi + 2);
        let word = |at| {
            let (low, high) = (self.config.read_u16(at), self.config.read_u16(at + 2));
            u32::from(low) | u32::from(high) << 16
        };
        let message =
            (control & MSI_ENABLE != 0 && self.config.is_awake()).then(|| crate::irq::MsiMessage {
                address: u64::from(word(self.msi + 8)) << 32 | u64::from(word(self.msi + 4)),
                data: word(self.msi + 12) & 0xffff,
            });
        match &mut self.slot {
            Some(slot) => slot.sound(&mut self.config, message),
            None => Ok(()),
        }
    }
}

/// What the guest may write of the PCI Express capability: bits whose capability a port does not tell
/// are zero for good (PCIe 6.0 §7.5.3.4, §7.5.3.7, §7.5.3.12, §7.5.3.16).
struct Writable {
    device: u16,
    link: u16,
    device2: u16,
}

impl Writable {
    fn of(kind: Kind, registers: &PortRegisters) -> Self {
        let when = |told: bool, bits: u16| if told { bits } else { 0 };
        let (device, link) = (registers.device_capabilities, registers.link_capabilities);
        let upstream = kind == Kind::Upstream;
        let bandwidth = !upstream && link & LINK_BANDWIDTH_CAPABLE != 0;
        Self {
            device: DEVICE_CONTROL_WRITABLE
                | when(device & EXTENDED_TAGS_CAPABLE != 0, EXTENDED_TAGS),
            link: LINK_CONTROL_WRITABLE
                | when(!upstream, LINK_DISABLE)
                | when(bandwidth, LINK_BANDWIDTH_INTERRUPTS)
                | when(upstream && link & LINK_CLOCK_CAPABLE != 0, LINK_CLOCK),
            device2: device2_writable(registers.device_capabilities2),
        }
    }

    /// Returns the bits of the whole capability, behind its header.
    fn mask(&self, kind: Kind) -> [u8; EXPRESS_BODY] {
        let mut mask = [0u8; EXPRESS_BODY];
        let mut allow =
            |at: usize, bits: u16| mask[at - 2..at].copy_from_slice(&bits.to_le_bytes());
        allow(0x08, self.device);
        allow(0x10, self.link);
        if kind == Kind::Root {
            allow(0x1c, ROOT_CONTROL_WRITABLE);
        }
        allow(0x28, self.device2);
        allow(0x30, 0xffff);
        mask
    }
}

/// Returns the bits of device control 2 whose capabilities are told (PCIe 6.0 §7.5.3.15, §7.5.3.16).
///
/// | Capability | Control | Meaning                                                   |
/// |------------|---------|-----------------------------------------------------------|
/// | 3:0        | 3:0     | ranges of completion timeouts                             |
/// | 4          | 4       | completion timeouts off                                   |
/// | 5          | 5       | ARI forwarding                                            |
/// | 6          | 7       | AtomicOps: routed, and stopped on the way out             |
/// | 9:7        | 6       | AtomicOps: the port makes some                            |
/// |            | 9:8     | order by identifier: kept                                 |
/// | 11         | 10      | latency tolerance                                         |
/// | 17         | 12      | requests with 10-bit tags                                 |
/// | 19:18      | 14:13   | buffer flushes                                            |
/// | 21         | 15      | prefixes from end to end are stopped                      |
fn device2_writable(capabilities: u32) -> u16 {
    let table: [(u32, u16); 9] = [
        (0xf, 0xf),
        (1 << 4, 1 << 4),
        (1 << 5, 1 << 5),
        (7 << 7, 1 << 6),
        (1 << 6, 1 << 7),
        (1 << 11, 1 << 10),
        (1 << 17, 1 << 12),
        (3 << 18, 3 << 13),
        (1 << 21, 1 << 15),
    ];
    let told = table.iter().filter(|(capability, _)| capabilities & capability != 0);
    told.fold(3 << 8, |mask, (_, control)| mask | control)
}

/// The parts of the header that are a bridge's.
fn header(config: &mut ConfigSpace) {
    config.set_interrupt_pin(1);
    // Primary, secondary and subordinate bus.
    config.allow_write(0x18, &[0xff, 0xff, 0xff]);
    // I/O base and limit (16-bit), memory and prefetchable windows (64-bit), bridge control.
    config.allow_write(0x1c, &[0xf0, 0xf0]);
    config.allow_write(0x20, &[0xf0, 0xff, 0xf0, 0xff, 0xf0, 0xff, 0xf0, 0xff]);
    config.allow_write(0x28, &[0xff; 8]);
    config.allow_write(BRIDGE_CONTROL, &[0x43, 0x00]);
    config.set(0x24, &[1, 0, 1, 0]);
}

impl PciFunction for Port {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        let before = self.slot.as_ref().map(|_| slot::registers(&self.config));
        let (was_resetting, was_disabled) = (self.is_resetting(), self.is_link_disabled());
        self.config.write(offset, data);
        let resets = !was_resetting && self.is_resetting();
        self.bus_reset |= resets || (was_disabled && !self.is_link_disabled());
        self.link_down |= !was_disabled && self.is_link_disabled();
        if let (Some(slot), Some(before)) = (&mut self.slot, before) {
            slot.written(&mut self.config, offset, data, before);
        }
        self.show_link();
        // KVM refuses only on a machine that is going away.
        let _ = self.sound();
    }

    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }

    fn place_bar(&mut self, _index: u8, _address: u64) {}

    fn read_bar(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}

    fn buses(&self) -> Option<(u8, u8)> {
        let [secondary, subordinate] = self.config.read_u16(0x19).to_le_bytes();
        let reached = self.is_link_active() && !self.is_resetting() && self.config.is_awake();
        reached.then_some((secondary, subordinate))
    }

    fn took_bus_reset(&mut self) -> bool {
        std::mem::take(&mut self.bus_reset)
    }

    fn took_link_down(&mut self) -> bool {
        std::mem::take(&mut self.link_down)
    }

    /// Decoding, buses, windows and bridge control; what is told of the host's port stays.
    fn bus_reset(&mut self) {
        self.config.write(0x04, &[0, 0]);
        self.config.wake();
        self.set_buses(0, 0, 0);
        self.set_windows(Windows::default());
        self.config.set(BRIDGE_CONTROL, &[0, 0]);
        self.show_link();
    }
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
