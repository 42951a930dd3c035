//! Who turns pins into interrupts: KVM, or for machines whose processors have ids that eight bits
//! do not hold, our I/O APIC over KVM's local APICs ("split irqchip").
//! Source: Linux Documentation/virt/kvm/api.rst, "KVM_CAP_SPLIT_IRQCHIP", "KVM_CAP_X2APIC_API",
//! "KVM_EXIT_IOAPIC_EOI", "KVM_SIGNAL_MSI".

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_CAP_X2APIC_API, KVM_PIT_SPEAKER_DUMMY,
    KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, KVM_X2APIC_API_USE_32BIT_IDS, kvm_enable_cap, kvm_msi,
    kvm_pit_config, kvm_reinject_control,
};
use kvm_ioctls::{Kvm, VmFd};
use rustix::event::{PollFd, PollFlags};
use vmm_sys_util::{
    eventfd::{EFD_NONBLOCK, EventFd},
    ioctl::ioctl_with_ref,
};

use super::{
    FIRST_PCI_GSI, IOAPIC_PINS, Interrupts, KvmError, PCI_GSIS, Vm, call, halves, os_error,
};
use crate::{
    devices::ioapic::{Effect, IoApic, PINS},
    irq::{Level, MsiMessage},
    sys::io::borrow_eventfd,
};

/// APIC ids of a machine whose I/O APIC is KVM's are below this: they have eight bits, of which the I/O
/// APIC gets one of its own, and 255 means all.
pub const NARROW_ID_LIMIT: u32 = 254;
/// `KVM_X2APIC_DISABLE_SUPPRESS_EOI_BROADCAST`: local APICs do not say that they can keep the end of
/// an interrupt from I/O APICs, which KVM did not do when told to.
const NO_SUPPRESSION: u64 = 1 << 3;
/// `KVM_REINJECT_CONTROL`, `_IO(KVMIO, 0x71)` (linux/kvm.h).
const KVM_REINJECT_CONTROL: libc::c_ulong = 0xae71;
/// Who holds a line that an eventfd asserts.
const EVENT: u64 = 0;

const _: () = assert!(PINS as u32 == IOAPIC_PINS);

/// Where interrupt controllers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controllers {
    /// All of them in the kernel, with PICs and the interval timer.
    Kernel,
    /// Local APICs in the kernel, the I/O APIC here; there are no PICs, and the interval timer is `devices::pit`.
    Split,
}

impl Controllers {
    /// Returns those of a machine whose APIC ids are below `id_limit`.
    pub fn of(id_limit: u32) -> Self {
        if id_limit > NARROW_ID_LIMIT { Self::Split } else { Self::Kernel }
    }
}

/// The I/O APIC here, and what belongs to its pins.
pub(super) struct Pins {
    chip: IoApic,
    /// By pin that PCI lines share: what asserts it from outside.
    events: BTreeMap<u32, Arc<EventFd>>,
    /// By pin and holder: who is told that the interrupt has ended.
    listeners: BTreeMap<u32, BTreeMap<u64, Arc<EventFd>>>,
}

/// Creates the interrupt controllers of `fd`.
pub(super) fn create(
    kvm: &Kvm,
    fd: &VmFd,
    controllers: Controllers,
) -> Result<Option<Pins>, KvmError> {
    if controllers == Controllers::Kernel {
        fd.create_irq_chip().map_err(call("create interrupt controllers"))?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        fd.create_pit2(pit).map_err(call("create the interval timer"))?;
        return Ok(None);
    }
    let on = |cap, first| kvm_enable_cap { cap, args: [first, 0, 0, 0], ..Default::default() };
    fd.enable_cap(&on(KVM_CAP_SPLIT_IRQCHIP, IOAPIC_PINS.into()))
        .map_err(call("leave the I/O APIC to this process"))?;
    let known = kvm.check_extension_raw(KVM_CAP_X2APIC_API.into());
    let wide = u64::from(KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK);
    let quiet = u64::try_from(known).unwrap_or(0) & NO_SUPPRESSION;
    fd.enable_cap(&on(KVM_CAP_X2APIC_API, wide | quiet))
        .map_err(call("address more than 255 local APICs"))?;
    let event = |pin| Ok((pin, Arc::new(EventFd::new(EFD_NONBLOCK)?)));
    let events: io::Result<_> = (FIRST_PCI_GSI..FIRST_PCI_GSI + PCI_GSIS).map(event).collect();
    let events = events.map_err(|source| KvmError::Call { what: "make event files", source })?;
    Ok(Some(Pins { chip: IoApic::default(), events, listeners: BTreeMap::new() }))
}

/// Has ticks of the interval timer that could not be delivered dropped. KVM would deliver them later, one
/// straight after the other: a guest that was paused, or whose host is busy, would do nothing else. No guest
/// of today keeps its time by counting them.
/// Source: Linux Documentation/virt/kvm/api.rst, "`KVM_REINJECT_CONTROL`".
pub(super) fn drop_lost_ticks(fd: &VmFd) -> Result<(), KvmError> {
    let control = kvm_reinject_control { pit_reinject: 0, ..Default::default() };
    // SAFETY: the call reads the structure, which lives across it; the result is checked.
    let result = unsafe { ioctl_with_ref(fd, KVM_REINJECT_CONTROL, &control) };
    if result == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    Err(KvmError::Call { what: "drop lost ticks of the interval timer", source })
}

impl Pins {
    /// Returns the messages of all pins that have one, by pin.
    pub(super) fn routes(&self) -> impl Iterator<Item = (u32, MsiMessage)> + '_ {
        (0..PINS).filter_map(|pin| Some((u32::from(pin), self.chip.route(pin)?)))
    }

    /// Returns what asserts `gsi` from outside.
    pub(super) fn event(&self, gsi: u32) -> io::Result<Arc<EventFd>> {
        self.events.get(&gsi).cloned().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Tells `event` of each end of an interrupt of `gsi` until [`Self::forget`].
    pub(super) fn listen(&mut self, gsi: u32, holder: u64, event: &Arc<EventFd>) {
        self.listeners.entry(gsi).or_default().insert(holder, Arc::clone(event));
    }

    /// Undoes [`Self::listen`].
    pub(super) fn forget(&mut self, gsi: u32, holder: u64) {
        self.listeners.entry(gsi).or_default().remove(&holder);
    }

    /// Asserts a pin or takes that back.
    pub(super) fn set_level(&mut self, gsi: u32, level: Level) -> Option<MsiMessage> {
        self.chip.set_level(u8::try_from(gsi).ok()?, level)
    }
}

/// A message as KVM takes it when local APICs have ids of 32 bits: what a device writes to bits 11:5
/// of the address, as bits 14:8 of the destination, goes to bits 46:40. Addresses that are none of
/// local APICs stay, and so do those in remappable format (bit 4), which no guest is told of; but for
/// bits 39:32, with which KVM would take no route at all.
pub(super) fn widened(message: MsiMessage) -> MsiMessage {
    let plain = message.address >> 20 == 0xfee && message.address & 1 << 4 == 0;
    if !plain {
        return MsiMessage { address: message.address & !(0xff << 32), ..message };
    }
    let high = message.address >> 5 & 0x7f;
    MsiMessage { address: message.address & !0xfe0 | high << 40, ..message }
}

/// Sends a message to local APICs. One that names none is lost, as on any board; KVM says so.
pub(super) fn send(fd: &VmFd, message: MsiMessage) -> io::Result<()> {
    let [address_lo, address_hi] = halves(widened(message).address);
    let message = kvm_msi { address_lo, address_hi, data: message.data, ..Default::default() };
    forgiven(fd.signal_msi(message))
}

/// Returns what came of a message, where one that no local APIC takes is no failure.
pub(super) fn forgiven(sent: Result<i32, kvm_ioctls::Error>) -> io::Result<()> {
    match sent {
        Err(error) if error.errno() != libc::EPERM => Err(os_error(error)),
        Ok(_) | Err(_) => Ok(()),
    }
}

impl Vm {
    /// Answers a read of the I/O APIC's registers; false when KVM has them.
    pub fn read_ioapic(&self, offset: u64, data: &mut [u8]) -> bool {
        let interrupts = self.interrupts();
        let Some(pins) = &interrupts.pins else { return false };
        pins.chip.read(offset, data);
        true
    }

    /// Takes a write to the I/O APIC's registers; nothing happens when KVM has them.
    pub fn write_ioapic(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut interrupts = self.interrupts();
        let Some(pins) = &mut interrupts.pins else { return Ok(()) };
        let before: Vec<_> = pins.routes().collect();
        match pins.chip.write(offset, data) {
            Effect::None => Ok(()),
            Effect::Entry(pin) => {
                let message = pins.chip.service(pin);
                // KVM has to know of a level's vector before it is sent: it tells of the end of
                // those only that some pin has.
                if !before.into_iter().eq(pins.routes()) {
                    self.apply_routes(&interrupts)?;
                }
                message.map_or(Ok(()), |message| send(&self.fd, message))
            }
            Effect::End(vector) => self.end(&mut interrupts, vector),
        }
    }

    /// A local APIC has ended the level-triggered interrupts of `vector`.
    pub fn end_of_interrupt(&self, vector: u8) -> io::Result<()> {
        self.end(&mut self.interrupts(), vector)
    }

    fn end(&self, interrupts: &mut Interrupts, vector: u8) -> io::Result<()> {
        let Interrupts { pins: Some(pins), asserted, .. } = interrupts else { return Ok(()) };
        for pin in pins.chip.end(vector) {
            let gsi = u32::from(pin);
            let holders = asserted.entry(gsi).or_default();
            let level = |high: bool| if high { Level::High } else { Level::Low };
            let released = holders.remove(&EVENT);
            let again =
                released.then(|| pins.chip.set_level(pin, level(!holders.is_empty()))).flatten();
            for listener in pins.listeners.get(&gsi).into_iter().flat_map(BTreeMap::values) {
                // A counter that is full is a signal that is pending already.
                let _ = listener.write(1);
            }
            // Who still asserts it interrupts once more.
            if let Some(message) = again.or_else(|| pins.chip.service(pin)) {
                send(&self.fd, message)?;
            }
        }
        Ok(())
    }

    /// Returns whether somebody has to call [`Self::watch_pins`].
    pub fn has_pins(&self) -> bool {
        self.interrupts().pins.is_some()
    }

    /// Asserts pins when the event files say so that devices of the host signal; returns only with
    /// an error.
    pub fn watch_pins(&self) -> io::Result<()> {
        let events: Vec<_> = match &self.interrupts().pins {
            Some(pins) => {
                pins.events.iter().map(|(gsi, event)| (*gsi, Arc::clone(event))).collect()
            }
            None => return Ok(()),
        };
        let fds: Vec<BorrowedFd<'_>> =
            events.iter().map(|(_, event)| borrow_eventfd(event)).collect();
        let mut polled: Vec<PollFd<'_>> =
            fds.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
        loop {
            match rustix::event::poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for (gsi, event) in &events {
                if event.read().is_ok() {
                    self.set_line(*gsi, EVENT, Level::High)?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_keeps_what_it_can() {
        assert_eq!(Controllers::of(254), Controllers::Kernel);
        assert_eq!(Controllers::of(255), Controllers::Split);
    }

    #[test]
    fn destinations_go_where_kvm_looks_for_them() {
        let widen = |address| widened(MsiMessage { address, data: 0x4041 }).address;
        assert_eq!(widen(0xfee1_f020), 0x100_fee1_f000);
        assert_eq!(widen(0xfeef_ffec), 0x7f00_feef_f00c);
        assert_eq!(widen(0xfee1_f000), 0xfee1_f000);
        // Remappable format, and no local APIC.
        assert_eq!(widen(0xfee1_f030), 0xfee1_f030);
        // An address with which KVM would refuse all routes.
        assert_eq!(widen(0x1_fee1_f020), 0xfee1_f020);
        assert_eq!(widen(0xfed1_f020), 0xfed1_f020);
    }
}
