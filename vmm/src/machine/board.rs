//! The board: who answers a port or a memory address. What nobody answers reads as ones.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Instant,
};

use types::ids::MachineId;

use super::{
    control::{Control, Ending, Kind},
    hotplug::Hotplug,
};
use crate::{
    console::Console,
    devices::{
        power::{self, Power, Request},
        serial::{self, Serial},
    },
    layout,
    pci::bus::{Answered, Bus},
    sys::kvm::{MemorySlot, Vm},
};

/// Address and data ports of configuration mechanism 1.
const MECHANISM1: std::ops::RangeInclusive<u16> = 0xcf8..=0xcff;

/// Everything that virtual CPUs reach, and what the API shows of it.
pub struct Board {
    /// The machine's name.
    pub machine: MachineId,
    /// KVM's part of it.
    pub vm: Arc<Vm>,
    /// Start and end.
    pub control: Control,
    /// Console output.
    pub console: Console,
    /// PCI.
    pub bus: RwLock<Bus>,
    /// The serial port.
    pub serial: Mutex<Serial>,
    /// Power and reset.
    pub power: Mutex<Power>,
    /// When the machine was built: zero of the PM timer.
    pub built: Instant,
    /// Guest memory, as KVM maps it.
    pub ram_slots: Vec<MemorySlot>,
    /// Devices that come and go.
    pub hotplug: Arc<Hotplug>,
}

impl Board {
    /// Answers a read of I/O ports.
    pub fn read_port(&self, port: u16, data: &mut [u8]) {
        if let Some(offset) = within(port, serial::BASE, serial::LENGTH) {
            let mut serial = locked(&self.serial);
            data.iter_mut().for_each(|byte| *byte = serial.read(offset));
        } else if let Some(offset) = within(port, power::PM_BASE, power::PM_LENGTH) {
            let (power, uptime) = (locked(&self.power), self.built.elapsed());
            for (at, byte) in (u16::from(offset)..).zip(data) {
                *byte = power.read(at, uptime);
            }
        } else if port == power::RESET_PORT && data.len() == 1 || port == power::KEYBOARD_PORT {
            // Nothing pending, nothing being reset, and the keyboard controller ready.
            data.fill(0);
        } else if MECHANISM1.contains(&port) {
            self.read_bus(|bus| bus.read_mechanism1(port - MECHANISM1.start(), data));
        } else if self.read_bus(|bus| bus.read_port(port, data)) == Answered::No {
            data.fill(0xff);
        }
    }

    /// Answers a write to I/O ports. Returns how the machine ends, if it does.
    pub fn write_port(&self, port: u16, data: &[u8]) -> Option<Ending> {
        let first = data.first().copied().unwrap_or_default();
        if let Some(offset) = within(port, serial::BASE, serial::LENGTH) {
            let mut serial = locked(&self.serial);
            data.iter().for_each(|byte| serial.write(offset, *byte));
            return None;
        }
        if let Some(offset) = within(port, power::PM_BASE, power::PM_LENGTH) {
            return ending(locked(&self.power).write(u16::from(offset), data));
        }
        if port == power::RESET_PORT && data.len() == 1 {
            return ending(power::reset_control(first));
        }
        if port == power::KEYBOARD_PORT {
            return ending(power::keyboard(first));
        }
        if MECHANISM1.contains(&port) {
            self.write_bus(|bus| bus.write_mechanism1(port - MECHANISM1.start(), data));
        } else {
            // A write that nobody answers is lost, as on any board.
            let _ = self.read_bus(|bus| bus.write_port(port, data));
        }
        None
    }

    /// Answers a read of guest-physical memory that is not RAM.
    pub fn read_memory(&self, address: u64, data: &mut [u8]) {
        if let Some(offset) = ecam(address) {
            self.read_bus(|bus| bus.read_ecam(offset, data));
        } else if self.read_bus(|bus| bus.read_memory(address, data)) == Answered::No {
            data.fill(0xff);
        }
    }

    /// Answers a write to guest-physical memory that is not RAM.
    pub fn write_memory(&self, address: u64, data: &[u8]) {
        if let Some(offset) = ecam(address) {
            self.write_bus(|bus| bus.write_ecam(offset, data));
        } else {
            // A write that nobody answers is lost, as on any board.
            let _ = self.read_bus(|bus| bus.write_memory(address, data));
        }
    }

    fn read_bus<T>(&self, act: impl FnOnce(&Bus) -> T) -> T {
        act(&self.bus.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write_bus<T>(&self, act: impl FnOnce(&mut Bus) -> T) -> T {
        act(&mut self.bus.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Locks one device.
pub(crate) fn locked<T>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

fn within(port: u16, base: u16, length: u16) -> Option<u8> {
    let offset = port.checked_sub(base).filter(|offset| *offset < length)?;
    u8::try_from(offset).ok()
}

fn ecam(address: u64) -> Option<u64> {
    address.checked_sub(layout::ECAM).filter(|offset| *offset < layout::ECAM_SIZE)
}

fn ending(request: Request) -> Option<Ending> {
    let (kind, reason) = match request {
        Request::None => return None,
        Request::Off => (Kind::PoweredOff, "the guest powered off"),
        Request::Reset => (Kind::Reset, "the guest asked for a reset"),
    };
    Some(Ending { kind, reason: reason.to_owned() })
}
