//! The slot of a port: its number, and, where devices come and go while the guest runs, native
//! hot-plug.
//! Source: PCI Express Base Specification 6.0 §6.7 (hot-plug), §7.5.3.9 to §7.5.3.11 (slot
//! registers).
//!
//! | Offset | Register     | Bits                                                               |
//! |--------|--------------|--------------------------------------------------------------------|
//! | 0x14   | capabilities | 0 button, 1 power control, 3 4 indicators, 5 surprise, 6 hot-plug, |
//! |        |              | 31:19 number                                                       |
//! | 0x18   | control      | 0 button, 3 presence, 4 command, 12 link: which events interrupt   |
//! |        |              | 5 interrupts on, 7:6 9:8 indicators, 10 power off                  |
//! | 0x1a   | status       | 0 button, 3 presence changed, 4 command completed, 8 link changed: |
//! |        |              | cleared by writing ones; 6 a device is there                       |
//!
//! A slot without hot-plug has its number, and its device for good.

use std::{io, sync::Arc};

use super::{EXPRESS_AT, SLOT_NUMBERING};
use crate::{
    irq::{InterruptLine, Level, MsiMessage, MsiVector},
    pci::config::{COMMAND_INTX_DISABLE, ConfigError, ConfigSpace},
};

const CAPABILITIES: u16 = EXPRESS_AT + 0x14;
const CONTROL: u16 = EXPRESS_AT + 0x18;
const STATUS: u16 = EXPRESS_AT + 0x1a;

/// Capability identifier "vendor specific".
const VENDOR_SPECIFIC: u8 = 0x09;
/// Capabilities: attention button, power controller, attention and power indicator, surprise, hot-plug. Without
/// "surprise" Linux before 4.19 does not see that a device went unasked.
const HOT_PLUG: u32 = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6;
/// Control: what the guest may write when there is hot-plug. There are no latches and no power
/// faults, so their enables stay off.
const CONTROL_WRITABLE: u16 =
    BUTTON | PRESENCE_CHANGED | COMMAND_COMPLETED | 1 << 5 | 0x07c0 | 1 << 12;
/// Control: the slot interrupts.
const INTERRUPT_ENABLE: u16 = 1 << 5;
/// Control: both indicators off.
const INDICATORS_OFF: u16 = 3 << 6 | 3 << 8;
/// Control: power is off.
const POWER_OFF: u16 = 1 << 10;
/// Control: changes of the link interrupt. Its status bit is another.
const LINK_ENABLE: u16 = 1 << 12;

/// Status: the button was pressed. In control, the same bit enables its interrupt, as for the next
/// two.
const BUTTON: u16 = 1 << 0;
/// Status: a device came or went.
const PRESENCE_CHANGED: u16 = 1 << 3;
/// Status: a write to control is carried out.
const COMMAND_COMPLETED: u16 = 1 << 4;
/// Status: a device is there.
const PRESENT: u16 = 1 << 6;
/// Status: the link came up or went down.
const LINK_CHANGED: u16 = 1 << 8;
/// Status bits that are events.
const EVENTS: u16 = BUTTON | PRESENCE_CHANGED | COMMAND_COMPLETED | LINK_CHANGED;

/// Whether the guest gives a slot power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// It does.
    On,
    /// It does not.
    Off,
}

/// Hears of power that the guest switches. Called with the port locked: it takes note and returns.
pub trait SlotWatch: Send + Sync {
    /// The guest has switched the power of `slot`.
    fn power_switched(&self, slot: u16);
}

/// How a slot reaches the guest and the VMM.
pub struct Alarm {
    /// Its message-signalled interrupt.
    pub vector: Arc<dyn MsiVector>,
    /// Its pin, for guests without message-signalled interrupts.
    pub line: Arc<dyn InterruptLine>,
    /// Who hears of power.
    pub watch: Arc<dyn SlotWatch>,
}

/// Memory that firmware is to keep for a device that comes later, in bytes; 0 for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// 32-bit memory.
    pub memory: u64,
    /// 64-bit prefetchable memory.
    pub prefetchable: u64,
}

impl Kept {
    /// Returns the body of the vendor-specific capability by which QEMU's root ports tell OVMF what
    /// to keep. Source: QEMU docs/pcie_pci_bridge.txt, "Resource reservation capability".
    ///
    /// | Offset in the capability | Field                                             |
    /// |--------------------------|---------------------------------------------------|
    /// | 2, 3                     | length, 32; type, 1                               |
    /// | 4, 8                     | buses; I/O ports (8 bytes): no wish               |
    /// | 16, 20                   | 32-bit memory; 32-bit prefetchable memory: none   |
    /// | 24                       | 64-bit prefetchable memory (8 bytes)              |
    fn capability(self) -> [u8; 30] {
        let mut body = [0xff; 30];
        (body[0], body[1]) = (32, 1);
        let memory = u32::try_from(self.memory).unwrap_or(u32::MAX);
        body[14..18].copy_from_slice(&memory.to_le_bytes());
        if self.prefetchable > 0 {
            body[22..].copy_from_slice(&self.prefetchable.to_le_bytes());
        }
        body
    }
}

/// What a slot is.
pub struct SlotSpec {
    /// Its number, 1..=8191, its own in the machine. Its chassis has the same, up to 255: more slots than
    /// buses are not possible.
    pub number: u16,
    /// Present for slots that start empty and can be plugged.
    pub alarm: Option<Alarm>,
    /// What firmware is to keep for them.
    pub kept: Option<Kept>,
}

/// A slot.
pub(super) struct Slot {
    number: u16,
    alarm: Option<Alarm>,
    connected: Connection,
    /// Whether the last look found something to interrupt for: messages go with the change.
    raised: Level,
    /// Level of the pin.
    pin: Level,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Connection {
    Up,
    Down,
    /// Down, and the guest has switched power off again without it.
    GivenUp,
}

/// Control and status as they are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Registers {
    control: u16,
    status: u16,
}

pub(super) fn registers(config: &ConfigSpace) -> Registers {
    Registers { control: config.read_u16(CONTROL), status: config.read_u16(STATUS) }
}

impl Slot {
    pub(super) fn new(spec: SlotSpec, config: &mut ConfigSpace) -> Result<Self, ConfigError> {
        let SlotSpec { number, alarm, kept } = spec;
        let number = number & 0x1fff;
        let chassis = u8::try_from(number).unwrap_or(u8::MAX);
        let hot = if alarm.is_some() { HOT_PLUG } else { 0 };
        config.set(CAPABILITIES, &(u32::from(number) << 19 | hot).to_le_bytes());
        let (control, status) = match &alarm {
            Some(_) => (INDICATORS_OFF | POWER_OFF, 0),
            // What is not there has zeros (§7.5.3.10): no indicators, and power that is never off.
            None => (0, PRESENT),
        };
        config.set(CONTROL, &control.to_le_bytes());
        config.set(STATUS, &status.to_le_bytes());
        if alarm.is_some() {
            config.allow_write(CONTROL, &CONTROL_WRITABLE.to_le_bytes());
        }
        // Expansion slot: this bridge is the first of a chassis of its own, and has one slot.
        config.add_capability(SLOT_NUMBERING, &[1 | 1 << 5, chassis], &[])?;
        if let Some(kept) = kept {
            config.add_capability(VENDOR_SPECIFIC, &kept.capability(), &[])?;
        }
        let connected = if alarm.is_some() { Connection::Down } else { Connection::Up };
        Ok(Self { number, alarm, connected, raised: Level::Low, pin: Level::Low })
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected == Connection::Up
    }

    pub(super) fn power(&self, config: &ConfigSpace) -> Power {
        power(registers(config).control)
    }

    /// With the button, because a guest that finds one listens to nothing else of an empty slot.
    pub(super) fn insert(&mut self, config: &mut ConfigSpace) {
        self.connected = Connection::Down;
        self.raise(config, PRESENT | PRESENCE_CHANGED | BUTTON);
    }

    pub(super) fn has_given_up(&self) -> bool {
        self.connected == Connection::GivenUp
    }

    pub(super) fn connect(&mut self, config: &mut ConfigSpace) {
        if self.connected != Connection::Up && self.power(config) == Power::On {
            self.connected = Connection::Up;
            self.raise(config, LINK_CHANGED);
        }
    }

    pub(super) fn disconnect(&mut self, config: &mut ConfigSpace) {
        if self.connected == Connection::Up {
            self.connected = Connection::Down;
            self.raise(config, LINK_CHANGED);
        }
    }

    pub(super) fn remove(&mut self, config: &mut ConfigSpace) {
        self.disconnect(config);
        let status = registers(config).status & !PRESENT;
        config.set(STATUS, &status.to_le_bytes());
        self.raise(config, PRESENCE_CHANGED);
    }

    pub(super) fn press_button(&mut self, config: &mut ConfigSpace) {
        self.raise(config, BUTTON);
    }

    fn raise(&mut self, config: &mut ConfigSpace, bits: u16) {
        let status = registers(config).status | bits;
        config.set(STATUS, &status.to_le_bytes());
    }

    /// The guest wrote `data` at `offset`; control has changed already, status is ours.
    pub(super) fn written(
        &mut self,
        config: &mut ConfigSpace,
        offset: u16,
        data: &[u8],
        before: Registers,
    ) {
        let Some(alarm) = &self.alarm else { return };
        let touched = |register: u16| {
            (0..2u16).filter_map(move |byte| {
                let at = usize::from((register + byte).checked_sub(offset)?);
                Some((byte, *data.get(at)?))
            })
        };
        let mut status = before.status;
        for (byte, value) in touched(STATUS) {
            status &= !(u16::from(value) << (8 * byte) & EVENTS);
        }
        let now = registers(config).control;
        if touched(CONTROL).next().is_some() {
            status |= COMMAND_COMPLETED;
            if power(now) != power(before.control) {
                alarm.watch.power_switched(self.number);
                match (power(now), self.connected) {
                    // Without power there is no link, at once (§6.7.1.8): guests wait a second for that, and the
                    // thread that takes the device off the bus may have others at hand.
                    (Power::Off, Connection::Up) => {
                        self.connected = Connection::Down;
                        status |= LINK_CHANGED;
                    }
                    (Power::Off, Connection::Down) => self.connected = Connection::GivenUp,
                    _ => {}
                }
            }
        }
        config.set(STATUS, &status.to_le_bytes());
    }

    /// Interrupts the guest when there is something new to tell; `message` is where to, if it uses
    /// messages.
    pub(super) fn sound(
        &mut self,
        config: &mut ConfigSpace,
        message: Option<MsiMessage>,
    ) -> io::Result<()> {
        let Some(alarm) = &self.alarm else { return Ok(()) };
        let Registers { control, status } = registers(config);
        let link = if control & LINK_ENABLE != 0 { LINK_CHANGED } else { 0 };
        let enabled = control & (BUTTON | PRESENCE_CHANGED | COMMAND_COMPLETED) | link;
        let due = control & INTERRUPT_ENABLE != 0 && status & enabled != 0 && config.is_awake();
        let level = if due { Level::High } else { Level::Low };
        // The status register tells of the pin alone (PCIe 6.0 §7.5.1.1.4).
        config.set_interrupt_status(if message.is_none() { level } else { Level::Low });
        alarm.vector.route(message)?;
        if message.is_some() && due && self.raised == Level::Low {
            alarm.vector.trigger()?;
        }
        self.raised = level;
        let by_pin = message.is_none() && config.command() & COMMAND_INTX_DISABLE == 0;
        let pin = if by_pin { level } else { Level::Low };
        if std::mem::replace(&mut self.pin, pin) != pin {
            alarm.line.set_level(pin)?;
        }
        Ok(())
    }
}

fn power(control: u16) -> Power {
    if control & POWER_OFF == 0 { Power::On } else { Power::Off }
}
