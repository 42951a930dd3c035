//! The board: who answers a port or a memory address. What nobody answers reads as ones.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use types::{ids::MachineId, operations::VmEventKind, vm::HyperV};

use super::{
    chipset::Chipset,
    control::{Control, Ending, Kind},
    deadline::Press,
    hotplug::Hotplug,
    pause::{HoldError, Holder, Pauses},
};
use crate::{
    console::Console,
    counters::{Exits, Registry},
    devices::{
        ioapic,
        pit::{self, Pit},
        power::{self, Power, Request},
        pvpanic::{self, Report},
        serial::{self, Serial},
    },
    dump::Cut,
    events::Events,
    layout,
    pci::bus::{Answered, Bus},
    sys::{
        kvm::{MemorySlot, Vm},
        memory::Ram,
    },
    vfio::alarms::{Alarm, Alarms, Said},
};

/// How long virtual CPUs, and then devices, have to leave guest memory alone.
const HOLD_LIMIT: Duration = Duration::from_secs(5);
/// How often devices are asked.
const HOLD_STEP: Duration = Duration::from_millis(1);

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
    /// The clock, and what firmware finds.
    pub chipset: Chipset,
    /// When the machine was built: zero of the PM timer.
    pub built: Instant,
    /// Guest memory, as KVM maps it.
    pub ram_slots: Vec<MemorySlot>,
    /// Devices that come and go.
    pub hotplug: Arc<Hotplug>,
    /// Guest memory, as a dump reads it.
    pub ram: Ram,
    /// What happened.
    pub events: Events,
    /// What virtual CPUs do, in order.
    pub exits: Vec<Exits>,
    /// APIC ids of virtual CPUs, in order.
    pub apic_ids: Vec<u32>,
    /// What devices do.
    pub activity: Registry,
    /// Whether the guest finds Hyper-V's interfaces.
    pub hyperv: HyperV,
    /// Who holds the virtual CPUs.
    pub pauses: Pauses,
    /// Held by whoever changes that, so that devices and virtual CPUs agree.
    pub turn: Mutex<()>,
    /// The interval timer, where KVM has none.
    pub pit: Option<Mutex<Pit>>,
    /// What the host's kernel says of passed-through devices, if there may be any.
    pub alarms: Option<Alarms>,
    /// The dump that is being read.
    pub dump: Mutex<Option<Cut>>,
}

impl Board {
    /// Answers a read of I/O ports.
    pub fn read_port(&self, port: u16, data: &mut [u8]) {
        if let Some(offset) = within(port, serial::BASE, serial::LENGTH) {
            let mut serial = locked(&self.serial);
            data.iter_mut().for_each(|byte| *byte = serial.read(offset));
        } else if let Some(offset) = within(port, power::PM_BASE, power::PM_LENGTH) {
            let (mut power, uptime) = (locked(&self.power), self.built.elapsed());
            for (at, byte) in (u16::from(offset)..).zip(data) {
                *byte = power.read(at, uptime);
            }
        } else if port == power::RESET_PORT && data.len() == 1 {
            data.fill(0);
        } else if port == power::KEYBOARD_PORT {
            data.fill(power::KEYBOARD_STATUS);
        } else if port == pvpanic::PORT && data.len() == 1 {
            data.fill(pvpanic::read());
        } else if port == power::CONTROL_A_PORT {
            data.fill(power::CONTROL_A);
        } else if let (Some(pit), Some(offset)) = (&self.pit, within(port, pit::PORT, pit::LENGTH))
        {
            let (mut pit, now) = (locked(pit), self.built.elapsed());
            data.iter_mut().for_each(|byte| *byte = pit.read(offset, now));
        } else if let (Some(pit), pit::GATE_PORT) = (&self.pit, port) {
            data.fill(locked(pit).read_gate(self.built.elapsed()));
        } else if self.chipset.read_port(port, data) == Answered::Yes {
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
            let uptime = self.built.elapsed();
            return ending(locked(&self.power).write(u16::from(offset), data, uptime));
        }
        if port == power::RESET_PORT && data.len() == 1 {
            return ending(power::reset_control(first));
        }
        if port == power::KEYBOARD_PORT {
            return ending(power::keyboard(first));
        }
        if port == power::CONTROL_A_PORT {
            return ending(power::control_a(first));
        }
        if port == pvpanic::PORT && data.len() == 1 {
            self.note_panic(pvpanic::write(first));
            return None;
        }
        if let (Some(pit), Some(offset)) = (&self.pit, within(port, pit::PORT, pit::LENGTH)) {
            locked(pit).write(offset, first, self.built.elapsed());
            return None;
        }
        if let (Some(pit), pit::GATE_PORT) = (&self.pit, port) {
            locked(pit).write_gate(first, self.built.elapsed());
            return None;
        }
        if self.chipset.write_port(port, data) == Answered::Yes {
            return None;
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
        if let Some(offset) = self.chipset.ecam.offset(address) {
            self.read_bus(|bus| bus.read_ecam(offset, data));
        } else if let Some(offset) = ioapic_offset(address)
            && self.vm.read_ioapic(offset, data)
        {
        } else if self.read_bus(|bus| bus.read_memory(address, data)) == Answered::No
            && self.chipset.read_memory(address, data) == Answered::No
        {
            data.fill(0xff);
        }
    }

    /// Answers a write to guest-physical memory that is not RAM. Returns how the machine ends, if
    /// it does.
    pub fn write_memory(&self, address: u64, data: &[u8]) -> Option<Ending> {
        if let Some(offset) = self.chipset.ecam.offset(address) {
            self.write_bus(|bus| bus.write_ecam(offset, data));
        } else if let Some(offset) = ioapic_offset(address) {
            return interrupted(self.vm.write_ioapic(offset, data));
        } else if self.read_bus(|bus| bus.write_memory(address, data)) == Answered::No {
            self.chipset.write_memory(address, data);
        }
        // A write that nobody answers is lost, as on any board.
        None
    }

    /// A local APIC has ended the level-triggered interrupts of `vector`. Returns how the machine
    /// ends, if it does.
    pub fn end_interrupt(&self, vector: u8) -> Option<Ending> {
        interrupted(self.vm.end_of_interrupt(vector))
    }

    /// Notes what the guest says of itself. A guest may say it as often as it likes: only what is
    /// new is an event.
    pub fn note_panic(&self, report: Report) {
        match report {
            Report::Nothing => {}
            Report::Panicked => self.events.push_once(VmEventKind::GuestPanicked, ""),
            Report::CrashKernel => self.events.push_once(VmEventKind::GuestCrashKernel, ""),
        }
    }

    /// Makes virtual CPUs and the VMM's devices leave guest memory alone until [`Self::release`]. Passed-through
    /// devices go on with what they were told: a GPU that may not reach memory while it works is lost.
    pub fn hold(&self, holder: Holder) -> Result<(), HoldError> {
        let _turn = locked(&self.turn);
        self.hold_in_turn(holder)
    }

    fn hold_in_turn(&self, holder: Holder) -> Result<(), HoldError> {
        self.pauses.hold(holder, HOLD_LIMIT)?;
        let functions = self.read_bus(Bus::functions);
        functions.iter().for_each(|function| locked(function).hold());
        let deadline = Instant::now() + HOLD_LIMIT;
        while !functions.iter().all(|function| locked(function).is_held()) {
            if Instant::now() >= deadline {
                // A disk that hangs: its requests end when it does.
                self.let_go(holder);
                return Err(HoldError::Devices { limit_ms: HOLD_LIMIT.as_millis() });
            }
            std::thread::sleep(HOLD_STEP);
        }
        Ok(())
    }

    /// Lets them go on, when nobody else holds them. Returns whether `holder` did.
    pub fn release(&self, holder: Holder) -> bool {
        let _turn = locked(&self.turn);
        self.let_go(holder)
    }

    fn let_go(&self, holder: Holder) -> bool {
        if self.pauses.is_held_by(holder) && self.pauses.holders() == 1 {
            let functions = self.read_bus(Bus::functions);
            functions.iter().for_each(|function| locked(function).go_on());
        }
        self.pauses.release(holder)
    }

    /// The host's kernel says something of a passed-through device. One that it wants back is taken from the guest, or
    /// the guest from it: the kernel waits, and the host's other devices with it.
    pub fn take_alarm(&self, Said { device, since, alarm }: Said) {
        if alarm == Alarm::Failed {
            let reason = format!("{device}: it reported an error that it cannot get over (AER)");
            eprintln!("holdfast-vmm: {reason}");
            return self.events.push(VmEventKind::DeviceFailed, reason);
        }
        eprintln!(
            "holdfast-vmm: the host wants {device} back: it was removed, or gets another driver"
        );
        if !self.hotplug.pull(device, since, || self.control.is_ended()) {
            let reason =
                format!("the host wants {device} back: it was removed, or gets another driver");
            self.control.end(Ending::host_fault(reason));
        }
    }

    /// A dump begins: as [`Self::hold`], for it. It can be cut from the first on.
    pub fn dump_begins(&self, cut: &Cut) -> Result<(), HoldError> {
        let mut dump = locked(&self.dump);
        if dump.is_some() {
            return Err(HoldError::Held);
        }
        *dump = Some(cut.clone());
        drop(dump);
        let held = self.hold_for(cut);
        if held.is_err() {
            locked(&self.dump).take_if(|current| current.is(cut));
        }
        held
    }

    fn hold_for(&self, cut: &Cut) -> Result<(), HoldError> {
        let _turn = locked(&self.turn);
        self.hold_in_turn(Holder::Dump)?;
        if cut.is_cut() {
            self.let_go(Holder::Dump);
            return Err(HoldError::Cut);
        }
        Ok(())
    }

    /// A dump has ended, unless [`Self::cut_dump`] has ended it already.
    pub fn dump_ends(&self, cut: &Cut) {
        let current = locked(&self.dump).take_if(|current| current.is(cut));
        if current.is_some() && self.release(Holder::Dump) {
            self.events.push(VmEventKind::Dumped, "");
        }
    }

    /// Ends a dump before its time: its guest is to do something, and would not.
    pub fn cut_dump(&self, because: &str) {
        // The next one begins when this has let go: it would let go of that.
        let mut dump = locked(&self.dump);
        let Some(cut) = dump.take() else { return };
        cut.cut();
        if self.release(Holder::Dump) {
            self.events.push(VmEventKind::Dumped, format!("broken off: {because}"));
        }
    }

    /// Presses the guest's power button because the deadline is near, and says so the first time. A guest
    /// that waits would not see it, so it goes on.
    pub fn press_for_deadline(&self, press: Press) {
        if self.release(Holder::Request) {
            self.events.push(VmEventKind::Resumed, "the deadline is near");
        }
        self.cut_dump("the deadline is near");
        locked(&self.power).press_button();
        if press == Press::First {
            self.events.push(VmEventKind::DeadlineNear, "");
            eprintln!("holdfast-vmm: the deadline is near: the guest's power button was pressed");
        }
    }

    /// Sends every virtual CPU a non-maskable interrupt.
    pub fn interrupt(&self) -> std::io::Result<()> {
        self.apic_ids.iter().try_for_each(|id| self.vm.send_nmi(*id))
    }

    fn read_bus<T>(&self, act: impl FnOnce(&Bus) -> T) -> T {
        act(&self.bus.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write_bus<T>(&self, act: impl FnOnce(&mut Bus) -> T) -> T {
        act(&mut self.bus.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Locks one device.
pub(crate) fn locked<T: ?Sized>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

fn within(port: u16, base: u16, length: u16) -> Option<u8> {
    let offset = port.checked_sub(base).filter(|offset| *offset < length)?;
    u8::try_from(offset).ok()
}

fn ioapic_offset(address: u64) -> Option<u64> {
    let offset = address.checked_sub(u64::from(layout::IO_APIC))?;
    Some(offset).filter(|offset| *offset < ioapic::LENGTH)
}

fn interrupted(done: std::io::Result<()>) -> Option<Ending> {
    let error = done.err()?;
    Some(Ending::host_fault(format!("KVM does not take an interrupt: {error}")))
}

fn ending(request: Request) -> Option<Ending> {
    let (kind, reason) = match request {
        Request::None => return None,
        Request::Off => (Kind::PoweredOff, "the guest powered off"),
        Request::Reset => (Kind::Reset, "the guest asked for a reset"),
    };
    Some(Ending { kind, reason: reason.to_owned() })
}
