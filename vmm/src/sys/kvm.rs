//! KVM: one virtual machine, its memory slots, its fast paths and its interrupts.
//! Source: Linux Documentation/virt/kvm/api.rst.

mod modes;
mod pins;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread::{self, JoinHandle},
};

use kvm_bindings::{
    CpuId, KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC,
    KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MEM_READONLY, KvmIrqRouting,
    kvm_irq_routing_entry, kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_msi,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuFd, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use modes::MSR_MICROCODE;
pub use pins::{Controllers, NARROW_ID_LIMIT};

use super::{
    memory::{Access, Mapping, Ram},
    vcpu::ask_for_tiles,
};
use crate::irq::{InterruptLine, InterruptSource, Level, MsiMessage, MsiVector};

/// Pins of the I/O APIC; the first GSIs are these.
const IOAPIC_PINS: u32 = 24;
/// The first slot of the root bus that has functions of the machine's own; below are ports.
pub const FIRST_OWN_SLOT: u8 = 0x10;
/// First I/O APIC pin that PCI lines go to; eight follow.
pub const FIRST_PCI_GSI: u32 = 16;
/// Pins that PCI lines share.
pub const PCI_GSIS: u32 = 8;
/// Routes that KVM takes in all (`KVM_MAX_IRQ_ROUTES`); GSIs have to be below it as well.
const MAX_ROUTES: u32 = 4096;
/// Most message-signalled vectors of one machine: what the pins of the I/O APIC, of which the first
/// 16 are those of the PICs too, leave.
const MAX_MSI: u32 = MAX_ROUTES - IOAPIC_PINS - 16;
/// Address of MSI messages, and in their data the delivery mode of a non-maskable interrupt.
const MSI_WINDOW: u32 = 0xfee0_0000;
const DELIVER_NMI: u32 = 4 << 8;
/// Where KVM on Intel keeps three pages for real mode: below the 16 MiB of firmware.
const TSS_ADDRESS: usize = 0xfeff_d000;
/// Where KVM on Intel keeps one page of identity map.
const IDENTITY_MAP_ADDRESS: u64 = 0xfeff_c000;

/// Why KVM did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum KvmError {
    #[error(
        "this is not KVM: the descriptor given as kvm_fd reports API version {0} instead of 12"
    )]
    NotKvm(i32),
    #[error("{asked} virtual CPUs were asked for; KVM on this host runs {most} at most")]
    Vcpus { asked: u32, most: usize },
    #[error(
        "the packages, caches and cores of the virtual CPUs need APIC ids below {asked}; KVM on this host has those \
         below {limit}"
    )]
    Ids { asked: u32, limit: usize },
    #[error("cannot ask for the state of AMX tiles in guests")]
    Tiles { source: io::Error },
    #[error("cannot start the thread that sets the interval timer up")]
    Thread { source: io::Error },
    #[error("KVM cannot {what}")]
    Call { what: &'static str, source: io::Error },
}

fn call(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |error| KvmError::Call { what, source: io::Error::from_raw_os_error(error.errno()) }
}

/// One virtual machine.
pub struct Vm {
    fd: VmFd,
    features: CpuId,
    microcode: Option<u64>,
    slots: Mutex<BTreeSet<u32>>,
    interrupts: Mutex<Interrupts>,
    this: Weak<Vm>,
}

#[derive(Default)]
struct Interrupts {
    /// MSI routes by GSI.
    routes: BTreeMap<u32, MsiMessage>,
    /// GSIs handed out.
    used: BTreeSet<u32>,
    /// Who holds each line high.
    asserted: BTreeMap<u32, BTreeSet<u64>>,
    /// Names of lines given so far.
    lines: u64,
    /// The I/O APIC, when it is not KVM's.
    pins: Option<pins::Pins>,
}

impl Vm {
    /// Creates a machine for `vcpus` virtual CPUs, whose APIC ids are below `id_limit`, over an open
    /// `/dev/kvm`, with the interrupt controllers that such ids need.
    pub fn new(kvm: OwnedFd, vcpus: u32, id_limit: u32) -> Result<Arc<Self>, KvmError> {
        // SAFETY: the descriptor is owned here and given away once.
        let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
        let version = kvm.get_api_version();
        if version != 12 {
            return Err(KvmError::NotKvm(version));
        }
        let most = kvm.get_max_vcpus();
        if usize::try_from(vcpus).is_ok_and(|asked| asked > most) {
            return Err(KvmError::Vcpus { asked: vcpus, most });
        }
        let limit = kvm.get_max_vcpu_id();
        if usize::try_from(id_limit).is_ok_and(|asked| asked > limit) {
            return Err(KvmError::Ids { asked: id_limit, limit });
        }
        ask_for_tiles().map_err(|source| KvmError::Tiles { source })?;
        let features =
            modes::features(&kvm).map_err(call("tell which features guests may have"))?;
        let fd = kvm.create_vm().map_err(call("create a machine"))?;
        fd.set_tss_address(TSS_ADDRESS).map_err(call("place the task state segment"))?;
        fd.set_identity_map_address(IDENTITY_MAP_ADDRESS)
            .map_err(call("place the identity map"))?;
        let pins = pins::create(&kvm, &fd, Controllers::of(id_limit))?;
        modes::tell_bus_locks(&kvm, &fd).map_err(call("tell of locks of the memory bus"))?;
        modes::withhold_counters(&kvm, &fd).map_err(call("keep performance counters"))?;
        modes::bound_stays(&kvm, &fd).map_err(call("bound how long guests keep interrupts out"))?;
        let vm = Arc::new_cyclic(|this| Self {
            fd,
            features,
            microcode: modes::microcode(&kvm),
            slots: Mutex::default(),
            interrupts: Mutex::new(Interrupts { pins, ..Interrupts::default() }),
            this: this.clone(),
        });
        vm.apply_routes(&vm.interrupts())
            .map_err(|source| KvmError::Call { what: "route interrupts", source })?;
        Ok(vm)
    }

    /// Has a thread set the interval timer up to drop ticks that it could not deliver. KVM waits for grace
    /// periods meanwhile, tens of milliseconds, in which everything else can be set up. No guest may run
    /// before the thread ends.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn settle_timer(self: &Arc<Self>) -> Result<JoinHandle<Result<(), KvmError>>, KvmError> {
        let vm = Arc::clone(self);
        let settle = move || match vm.has_pins() {
            true => Ok(()),
            false => pins::drop_lost_ticks(&vm.fd),
        };
        let started = thread::Builder::new().name("interval-timer".to_owned()).spawn(settle);
        started.map_err(|source| KvmError::Thread { source })
    }

    /// Returns which CPU features guests may have on this host.
    pub fn features(&self) -> &CpuId {
        &self.features
    }

    /// Returns the release of the host's microcode, as register [`MSR_MICROCODE`] has it, if the kernel tells it.
    pub fn microcode(&self) -> Option<u64> {
        self.microcode
    }

    /// Creates the virtual CPU with APIC id `id`.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuFd, KvmError> {
        self.fd.create_vcpu(u64::from(id)).map_err(call("create a virtual CPU"))
    }

    /// Maps all guest memory. The slots stay as long as the machine.
    pub fn map_ram(self: &Arc<Self>, ram: &Ram) -> Result<Vec<MemorySlot>, KvmError> {
        let keep: Arc<dyn Send + Sync> = Arc::new(ram.memory.clone());
        ram.regions
            .iter()
            .map(|region| {
                let place = Place { guest: region.address, size: region.size };
                self.add_slot(place, region.host_address, Access::ReadWrite, Arc::clone(&keep))
            })
            .collect()
    }

    /// Makes `size` bytes of `mapping`, from `offset`, guest memory at `guest` until the slot is
    /// dropped.
    pub fn map(
        self: &Arc<Self>,
        place: Place,
        mapping: &Arc<Mapping>,
        offset: u64,
        access: Access,
    ) -> Result<MemorySlot, KvmError> {
        let inside = offset.checked_add(place.size).is_some_and(|end| end <= mapping.size() as u64);
        if !inside {
            let source = io::Error::other("the slot passes the end of its mapping");
            return Err(KvmError::Call { what: "map memory", source });
        }
        let keep: Arc<dyn Send + Sync> = Arc::<Mapping>::clone(mapping);
        self.add_slot(place, mapping.host_address() + offset, access, keep)
    }

    fn add_slot(
        self: &Arc<Self>,
        place: Place,
        host: u64,
        access: Access,
        keep: Arc<dyn Send + Sync>,
    ) -> Result<MemorySlot, KvmError> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            let slot = (0..u32::MAX).find(|slot| !slots.contains(slot)).unwrap_or(u32::MAX);
            slots.insert(slot);
            slot
        };
        let flags = if access == Access::ReadOnly { KVM_MEM_READONLY } else { 0 };
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: place.guest,
            memory_size: place.size,
            userspace_addr: host,
        };
        // SAFETY: the host range is mapped as long as `keep`, which the slot holds until after it
        // has removed itself.
        let done = unsafe { self.fd.set_user_memory_region(region) };
        if let Err(error) = done {
            self.slots.lock().unwrap_or_else(PoisonError::into_inner).remove(&slot);
            return Err(call("map memory")(error));
        }
        Ok(MemorySlot { vm: Arc::clone(self), slot, place, _keep: keep })
    }

    /// Lets writes of any length to guest address `address` signal `event` without leaving the
    /// kernel.
    pub fn register_ioeventfd(&self, address: u64, event: &EventFd) -> Result<(), KvmError> {
        self.fd
            .register_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)
            .map_err(call("register an I/O event"))
    }

    /// Undoes [`Self::register_ioeventfd`].
    pub fn unregister_ioeventfd(&self, address: u64, event: &EventFd) -> Result<(), KvmError> {
        self.fd
            .unregister_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)
            .map_err(call("unregister an I/O event"))
    }

    /// Sets the level of I/O APIC pin `gsi` for `holder`; the pin is high while anybody holds it.
    fn set_line(&self, gsi: u32, holder: u64, level: Level) -> io::Result<()> {
        let mut interrupts = self.interrupts();
        let Interrupts { asserted, pins, .. } = &mut *interrupts;
        let holders = asserted.entry(gsi).or_default();
        match level {
            Level::High => holders.insert(holder),
            Level::Low => holders.remove(&holder),
        };
        let high = !holders.is_empty();
        let Some(pins) = pins else { return self.fd.set_irq_line(gsi, high).map_err(os_error) };
        let message = pins.set_level(gsi, if high { Level::High } else { Level::Low });
        message.map_or(Ok(()), |message| pins::send(&self.fd, message))
    }

    /// Sends the virtual CPU with APIC id `id` a non-maskable interrupt: as an MSI message with that delivery
    /// mode, which needs no cooperation of the thread that runs the CPU (Intel SDM vol. 3A, "Message Signalled
    /// Interrupts"). One whose local APIC the guest switched off gets none.
    pub fn send_nmi(&self, id: u32) -> io::Result<()> {
        let message = kvm_msi {
            address_lo: MSI_WINDOW | (id & 0xff) << 12,
            address_hi: id & 0xffff_ff00,
            data: DELIVER_NMI,
            ..Default::default()
        };
        pins::forgiven(self.fd.signal_msi(message))
    }

    /// Returns the line of an ISA interrupt, such as 4 for the serial port.
    pub fn isa_line(&self, gsi: u32) -> io::Result<Arc<dyn InterruptLine>> {
        self.make_line(gsi)
    }

    fn make_line(&self, gsi: u32) -> io::Result<Arc<dyn InterruptLine>> {
        let vm = self.this.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let holder = {
            let mut interrupts = self.interrupts();
            interrupts.lines += 1;
            interrupts.lines
        };
        let resample = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        // Beside an I/O APIC of ours, all lines of a pin share the event that asserts it.
        let shared = self.interrupts().pins.as_ref().and_then(|pins| pins.event(gsi).ok());
        let trigger = shared.map_or_else(|| EventFd::new(EFD_NONBLOCK).map(Arc::new), Ok)?;
        Ok(Arc::new(KvmLine {
            vm,
            gsi,
            holder,
            trigger,
            resample,
            attached: Mutex::new(Attached::No),
        }))
    }

    fn interrupts(&self) -> MutexGuard<'_, Interrupts> {
        self.interrupts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn apply_routes(&self, interrupts: &Interrupts) -> io::Result<()> {
        let mut entries = Vec::new();
        if let Some(pins) = &interrupts.pins {
            let routes = pins.routes().chain(interrupts.routes.iter().map(|(gsi, to)| (*gsi, *to)));
            entries.extend(routes.map(|(gsi, to)| msi_route(gsi, pins::widened(to))));
            return self.set_routes(&entries);
        }
        for pin in 0..IOAPIC_PINS {
            entries.push(chip_route(pin, KVM_IRQCHIP_IOAPIC, pin));
            if pin < 16 {
                let chip = if pin < 8 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE };
                entries.push(chip_route(pin, chip, pin % 8));
            }
        }
        for (gsi, message) in &interrupts.routes {
            entries.push(msi_route(*gsi, *message));
        }
        self.set_routes(&entries)
    }

    fn set_routes(&self, entries: &[kvm_irq_routing_entry]) -> io::Result<()> {
        let routing = KvmIrqRouting::from_entries(entries)
            .map_err(|error| io::Error::other(format!("{error:?}")))?;
        self.fd.set_gsi_routing(&routing).map_err(os_error)
    }
}

fn os_error(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

fn chip_route(gsi: u32, chip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry =
        kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip: chip, pin };
    entry
}

fn msi_route(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    let [low, high] = halves(message.address);
    entry.u.msi = kvm_irq_routing_msi {
        address_lo: low,
        address_hi: high,
        data: message.data,
        ..Default::default()
    };
    entry
}

fn halves(value: u64) -> [u32; 2] {
    let bytes = value.to_le_bytes();
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    [word(0), word(4)]
}

/// Where a slot lies in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Guest-physical address.
    pub guest: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Memory that the guest has until this is dropped.
pub struct MemorySlot {
    vm: Arc<Vm>,
    slot: u32,
    place: Place,
    _keep: Arc<dyn Send + Sync>,
}

impl MemorySlot {
    /// Returns where the slot lies.
    pub fn place(&self) -> Place {
        self.place
    }
}

impl Drop for MemorySlot {
    fn drop(&mut self) {
        let gone = kvm_userspace_memory_region {
            slot: self.slot,
            guest_phys_addr: self.place.guest,
            ..Default::default()
        };
        // SAFETY: a size of zero removes the slot; no host memory is named.
        let removed = unsafe { self.vm.fd.set_user_memory_region(gone) };
        if removed.is_ok() {
            self.vm.slots.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.slot);
        }
    }
}

impl InterruptSource for Vm {
    fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>> {
        let vm = self.this.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let gsi = {
            let mut interrupts = self.interrupts();
            let mut free = IOAPIC_PINS..IOAPIC_PINS + MAX_MSI;
            let gsi = free.find(|gsi| !interrupts.used.contains(gsi)).ok_or_else(|| {
                io::Error::other(format!("all {MAX_MSI} message-signalled interrupts are in use"))
            })?;
            interrupts.used.insert(gsi);
            gsi
        };
        let event = EventFd::new(EFD_NONBLOCK)?;
        Ok(Arc::new(KvmVector { vm, gsi, event, attached: Mutex::new(Attached::No) }))
    }

    fn line(&self, slot: u8, pin: u8) -> io::Result<Arc<dyn InterruptLine>> {
        self.make_line(pci_gsi(slot, pin))
    }
}

/// Returns the I/O APIC pin of INTx `pin` (1..=4) of the bus-0 device at `slot`; the same formula is
/// in the `_PRT` of the ACPI tables. Ports, with what is behind them, have the lower half of the pins, and the
/// machine's own functions the upper: see [`InterruptLine::release`].
pub fn pci_gsi(slot: u8, pin: u8) -> u32 {
    let half = PCI_GSIS / 2;
    let first = if slot < FIRST_OWN_SLOT { FIRST_PCI_GSI } else { FIRST_PCI_GSI + half };
    first + (u32::from(slot) + u32::from(pin.max(1)) - 1) % half
}

/// Whether an eventfd is wired to its interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attached {
    No,
    Yes,
}

struct KvmVector {
    vm: Arc<Vm>,
    gsi: u32,
    event: EventFd,
    attached: Mutex<Attached>,
}

impl MsiVector for KvmVector {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(message) = message else {
            if *attached == Attached::Yes {
                self.vm.fd.unregister_irqfd(&self.event, self.gsi).map_err(os_error)?;
                *attached = Attached::No;
            }
            return Ok(());
        };
        let mut interrupts = self.vm.interrupts();
        if interrupts.routes.get(&self.gsi) != Some(&message) {
            let before = interrupts.routes.insert(self.gsi, message);
            if let Err(error) = self.vm.apply_routes(&interrupts) {
                // KVM takes all routes or none: one that it refuses must not stay among them.
                match before {
                    Some(before) => interrupts.routes.insert(self.gsi, before),
                    None => interrupts.routes.remove(&self.gsi),
                };
                return Err(error);
            }
        }
        drop(interrupts);
        if *attached == Attached::No {
            self.vm.fd.register_irqfd(&self.event, self.gsi).map_err(os_error)?;
            *attached = Attached::Yes;
        }
        Ok(())
    }

    fn eventfd(&self) -> BorrowedFd<'_> {
        borrowed(&self.event)
    }

    fn trigger(&self) -> io::Result<()> {
        self.event.write(1)
    }
}

impl Drop for KvmVector {
    fn drop(&mut self) {
        // The machine may be gone already; then there is nothing to detach.
        let _ = self.route(None);
        let mut interrupts = self.vm.interrupts();
        interrupts.used.remove(&self.gsi);
        if interrupts.routes.remove(&self.gsi).is_some() {
            let _ = self.vm.apply_routes(&interrupts);
        }
    }
}

struct KvmLine {
    vm: Arc<Vm>,
    gsi: u32,
    holder: u64,
    trigger: Arc<EventFd>,
    resample: Arc<EventFd>,
    attached: Mutex<Attached>,
}

impl KvmLine {
    /// Wires the trigger on first use: lines that only ever use levels need no irqfd.
    fn attach(&self) {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pins) = &mut self.vm.interrupts().pins {
            // Whoever watches the pins takes the trigger.
            return pins.listen(self.gsi, self.holder, &self.resample);
        }
        let registered = *attached == Attached::Yes
            || self
                .vm
                .fd
                .register_irqfd_with_resample(&self.trigger, &self.resample, self.gsi)
                .is_ok();
        if registered {
            *attached = Attached::Yes;
        }
    }
}

impl InterruptLine for KvmLine {
    fn set_level(&self, asserted: Level) -> io::Result<()> {
        self.vm.set_line(self.gsi, self.holder, asserted)
    }

    fn trigger_fd(&self) -> BorrowedFd<'_> {
        self.attach();
        borrowed(&self.trigger)
    }

    fn resample_fd(&self) -> BorrowedFd<'_> {
        self.attach();
        borrowed(&self.resample)
    }

    fn release(&self) {
        if let Some(pins) = &mut self.vm.interrupts().pins {
            return pins.forget(self.gsi, self.holder);
        }
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *attached, Attached::No) == Attached::Yes {
            // The machine may be gone already; then there is nothing to detach.
            let _ = self.vm.fd.unregister_irqfd(&self.trigger, self.gsi);
        }
    }
}

impl Drop for KvmLine {
    fn drop(&mut self) {
        self.release();
    }
}

fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor stays open as long as `event`, to whose life the result is bound.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
