//! A virtio device as a PCI function: capabilities, one BAR, MSI-X or INTx, doorbells.
//! Source: virtio §4.1 "Virtio Over PCI Bus"; §4.1.4 "Virtio Structure PCI Capabilities".
//!
//! | BAR 0 offset | Bytes        | Structure                                  |
//! |--------------|--------------|--------------------------------------------|
//! | 0x0000       | 0x3c         | common configuration, see `transport`      |
//! | 0x1000       | 1            | ISR status, cleared by reading             |
//! | 0x2000       | 0x1000       | device configuration                       |
//! | 0x3000       | 4 a queue    | doorbells                                  |
//! | 0x4000       | 16 a vector  | MSI-X table                                |
//! | 0x6000       | 0x1000       | MSI-X pending bits                         |
//!
//! On a root bus it is a device of conventional PCI, below a port a PCI Express endpoint.

use std::{
    io,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use super::{
    Activation, Distress, DistressFlag, Doorbells, Interrupts, Platform, QueueSignal, ReadyQueue,
    Ring, VirtioDevice, VirtioError,
    transport::{COMMON_CONFIG_SIZE, Effect, QueueLayout, Transport},
};
use crate::{
    devices::master::{self, Mastery, Running, Until},
    pci::{
        config::{COMMAND_INTX_DISABLE, ConfigError, ConfigSpace, Identity},
        express::{Express, FunctionReset},
        function::{Bar, BarKind, PciFunction},
        msix::{self, MsixTable},
    },
    sys::{kvm::Vm, memory::GuestRam},
};

/// PCI vendor id of virtio devices (virtio §4.1.2).
const VENDOR: u16 = 0x1af4;
/// Device id of the virtio device with id 0 (virtio §4.1.2).
const FIRST_DEVICE: u16 = 0x1040;
/// Modern devices have revision 1 or more (virtio §4.1.2.1).
const REVISION: u8 = 1;
/// As QEMU's modern devices have it, since drivers of Windows that somebody put into an image beforehand are bound by
/// it. The specification asks for 0x40 or higher, by which drivers tell that there is no legacy interface.
const SUBSYSTEM: u16 = 0x1100;

const BAR: u8 = 0;
const BAR_SIZE: u64 = 0x8000;
const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const PENDING: u64 = 0x6000;
/// Where the common configuration has the device's status.
const STATUS: u64 = 0x14;
/// Bytes from one structure to the next, except the table, which has two of these.
const PAGE: u64 = 0x1000;
/// Bytes from one queue's doorbell to the next.
const NOTIFY_MULTIPLIER: u32 = 4;

/// Capability identifier "vendor specific" (PCI 3.0 appendix H).
const CAPABILITY: u8 = 0x09;
/// `cfg_type` values (virtio §4.1.4).
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;
/// Offsets in the PCI configuration access capability (virtio §4.1.4.9).
const WINDOW_BAR: u16 = 4;
const WINDOW_OFFSET: u16 = 8;
const WINDOW_LENGTH: u16 = 12;
const WINDOW_DATA: u16 = 16;

/// How long a reset of the whole machine waits for a device to let go of guest memory: an I/O
/// error of a dying disk takes some seconds.
const RESET_DEADLINE: Duration = Duration::from_secs(10);
/// How often it looks.
const RESET_STEP: Duration = Duration::from_millis(1);
/// How long a driver's own reset waits for that, inside the write of the register, and a driver that takes bus
/// mastering. Virtio §4.1.4.3.2 has drivers read the status until it is zero, but NetBSD's and edk2's, and Linux'
/// before 4.6, go on at once: they set the device up again, or give its buffers to somebody else.
const DRIVER_DEADLINE: Duration = Duration::from_secs(1);
/// How often it looks.
const DRIVER_STEP: Duration = Duration::from_micros(20);

impl Doorbells for Vm {
    fn register(&self, address: u64, event: &EventFd) -> io::Result<()> {
        self.register_ioeventfd(address, event).map_err(io::Error::other)
    }

    fn unregister(&self, address: u64, event: &EventFd) -> io::Result<()> {
        self.unregister_ioeventfd(address, event).map_err(io::Error::other)
    }
}

/// A virtio device behind a PCI function.
pub struct VirtioPci {
    device: Box<dyn VirtioDevice>,
    name: &'static str,
    transport: Transport,
    config: ConfigSpace,
    /// Configuration space at power-on.
    pristine: ConfigSpace,
    msix: MsixTable,
    msix_capability: u16,
    window_capability: u16,
    interrupts: Arc<Interrupts>,
    kicks: Vec<Arc<EventFd>>,
    /// Interrupts of the queues that the device was given.
    signals: Vec<(u16, QueueSignal)>,
    doorbells: Arc<dyn Doorbells>,
    /// Address of the BAR at which the doorbells are registered, and whether all of them are.
    doorbells_at: Option<(u64, Registered)>,
    ram: GuestRam,
    distress: Arc<DistressFlag>,
    mastery: Mastery,
}

impl VirtioPci {
    /// Puts `device` at `slot` of the root bus. [`Self::start`] has to follow.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        slot: u8,
        platform: &Platform,
    ) -> Result<Self, VirtioError> {
        let name = device.identity().name;
        let host = |what| move |source| VirtioError::Host { device: name, what, source };
        let queues = device.queue_count();
        let msix = MsixTable::new(queues + 1, &*platform.interrupts)
            .map_err(host("cannot have interrupt vectors"))?;
        let line = platform.interrupts.line(slot, 1).map_err(host("cannot have a line"))?;
        let vectors = (0..msix.len()).filter_map(|index| msix.vector(index).cloned());
        let vectors: Vec<_> = vectors.collect();
        let interrupts =
            Interrupts::new(&vectors, line).map_err(host("cannot have interrupt vectors"))?;
        let kicks = (0..queues)
            .map(|_| Ok(Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?)))
            .collect::<io::Result<_>>()
            .map_err(host("cannot have doorbells"))?;
        let built = describe(&*device, &msix)
            .map_err(|error| VirtioError::Refused { device: name, problem: error.to_string() })?;
        Ok(Self {
            transport: Transport::new(device.features(), queues, msix.len()),
            device,
            name,
            pristine: built.config.clone(),
            config: built.config,
            msix,
            msix_capability: built.msix,
            window_capability: built.window,
            interrupts: Arc::new(interrupts),
            kicks,
            signals: Vec::new(),
            doorbells: Arc::clone(&platform.doorbells),
            doorbells_at: None,
            ram: platform.ram.clone(),
            distress: Arc::new(DistressFlag::new(name, platform.events.clone())),
            mastery: Mastery::new(Until::Reset),
        })
    }

    /// Makes it say that it sits below a port, at the end of a link. Call it before anybody looks.
    pub fn set_below_port(&mut self) -> Result<(), VirtioError> {
        let config = endpoint(self.pristine.clone()).map_err(|error| VirtioError::Refused {
            device: self.name,
            problem: error.to_string(),
        })?;
        self.pristine = config.clone();
        self.config = config;
        Ok(())
    }

    /// Starts the device's threads. Call it after `sandbox::enter`, before the caller filters its
    /// own thread and before the guest runs.
    pub fn start(&mut self) -> Result<(), VirtioError> {
        self.device.start()
    }

    /// Returns the device's name, as `blk`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    fn write_common(&mut self, offset: u64, data: &[u8]) {
        match self.transport.write(offset, data, &self.ram) {
            Effect::None => {}
            Effect::Activate(queues) => self.activate(queues),
            Effect::Reset => {
                self.stop();
                await_end(DRIVER_DEADLINE, DRIVER_STEP, || self.device.stopped());
                self.finish_reset_if_stopped();
            }
        }
        self.interrupts.set_config_vector(self.transport.config_vector());
        let mut changed = false;
        for (index, signal) in &self.signals {
            changed |= signal.set_vector(self.transport.queue_vector(*index));
        }
        if changed {
            self.device.signals_changed();
        }
    }

    fn activate(&mut self, layouts: Vec<(u16, QueueLayout)>) {
        let distress = Distress::new(Arc::clone(&self.distress), Arc::clone(&self.interrupts));
        let features = self.transport.features();
        let mut queues = Vec::with_capacity(layouts.len());
        self.signals.clear();
        for (index, layout) in layouts {
            let ring = match Ring::new(layout, features, self.ram.clone()) {
                Ok(ring) => ring,
                Err(error) => return distress.raise(&error),
            };
            let Some(kick) = self.kicks.get(usize::from(index)).map(Arc::clone) else { continue };
            let signal =
                QueueSignal::new(Arc::clone(&self.interrupts), self.transport.queue_vector(index));
            self.signals.push((index, signal.clone()));
            queues.push(ReadyQueue { index, ring, kick, signal });
        }
        let activation = Activation { features, queues, distress: distress.clone() };
        if let Err(error) = self.device.activate(activation) {
            distress.raise(&error);
        }
    }

    /// Tells the device to let go of its rings, also where it waits for bus mastering.
    fn stop(&mut self) {
        self.device.stop();
        let effect = self.mastery.reset();
        self.follow(effect);
    }

    /// Takes over what the command register, which was `before`, says of bus mastering now.
    fn take_mastery(&mut self, before: u16) {
        let live = self.transport.is_live() && !self.transport.is_resetting();
        let running = if live { Running::Yes } else { Running::No };
        let effect = self.mastery.written(before, self.config.command(), running);
        self.follow(effect);
        if effect == master::Effect::Hold {
            // Whoever took it goes on to use the memory.
            await_end(DRIVER_DEADLINE, DRIVER_STEP, || self.device.is_held());
        }
    }

    fn follow(&mut self, effect: master::Effect) {
        match effect {
            master::Effect::None => {}
            master::Effect::Hold => self.device.hold(),
            master::Effect::GoOn => self.device.go_on(),
        }
    }

    /// Ends a reset as soon as the device's threads have let go.
    fn finish_reset_if_stopped(&mut self) {
        if self.transport.is_resetting() && self.device.stopped() {
            self.transport.finish_reset();
            self.signals.clear();
            self.interrupts.reset();
            self.distress.clear();
        }
    }

    /// Rings the doorbell at `offset` for writes that KVM did not take.
    fn notify(&self, offset: u64) {
        let queue = usize::try_from(offset / u64::from(NOTIFY_MULTIPLIER));
        if let Some(kick) = queue.ok().and_then(|queue| self.kicks.get(queue)) {
            // A full counter is a kick that is pending already.
            let _ = kick.write(1);
        }
    }

    /// Registers the doorbells where the BAR is now.
    fn move_doorbells(&mut self, address: Option<u64>) {
        if let Some((old, _)) = self.doorbells_at.take() {
            self.each_doorbell(old, |doorbells, at, kick| {
                // One that was never registered is no loss.
                let _ = doorbells.unregister(at, kick);
            });
        }
        if let Some(new) = address {
            let mut registered = Registered::All;
            self.each_doorbell(new, |doorbells, at, kick| {
                // Without it the write leaves the guest and ends in `notify`.
                if doorbells.register(at, kick).is_err() {
                    registered = Registered::Some;
                }
            });
            self.doorbells_at = Some((new, registered));
        }
    }

    fn each_doorbell(&self, base: u64, mut act: impl FnMut(&dyn Doorbells, u64, &EventFd)) {
        for (index, kick) in (0u64..).zip(&self.kicks) {
            let at = base.checked_add(NOTIFY + index * u64::from(NOTIFY_MULTIPLIER));
            if let Some(at) = at {
                act(&*self.doorbells, at, kick);
            }
        }
    }

    /// Returns the offset and length that the guest set for the access window, if they are an
    /// aligned access inside the BAR (virtio §4.1.4.9.1).
    fn window(&self) -> Option<(u64, usize)> {
        let capability = self.window_capability;
        let mut bar = [0];
        let mut offset = [0; 4];
        let mut length = [0; 4];
        self.config.read(capability + WINDOW_BAR, &mut bar);
        self.config.read(capability + WINDOW_OFFSET, &mut offset);
        self.config.read(capability + WINDOW_LENGTH, &mut length);
        let offset = u64::from(u32::from_le_bytes(offset));
        let length = u32::from_le_bytes(length);
        let sound = bar == [BAR]
            && matches!(length, 1 | 2 | 4)
            && offset.is_multiple_of(u64::from(length))
            && offset < BAR_SIZE;
        sound.then_some((offset, usize::try_from(length).ok()?))
    }

    /// Whether a configuration access hits the data of the access window.
    fn hits_window(&self, offset: u16, length: usize) -> bool {
        let start = usize::from(self.window_capability + WINDOW_DATA);
        let offset = usize::from(offset);
        offset < start + 4 && start < offset + length
    }

    fn read_through_window(&mut self) {
        let Some((offset, length)) = self.window() else { return };
        let mut data = [0; 4];
        let (part, _) = data.split_at_mut(length.min(4));
        self.read_bar(BAR, offset, part);
        self.config.set(self.window_capability + WINDOW_DATA, &data);
    }

    fn write_through_window(&mut self) {
        let Some((offset, length)) = self.window() else { return };
        let mut data = [0; 4];
        self.config.read(self.window_capability + WINDOW_DATA, &mut data);
        let (part, _) = data.split_at(length.min(4));
        self.write_bar(BAR, offset, part);
    }
}

/// How many of a device's doorbells KVM has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Registered {
    All,
    Some,
}

impl PciFunction for VirtioPci {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        if self.hits_window(offset, data.len()) {
            self.read_through_window();
        }
        self.config.set_interrupt_status(self.interrupts.status());
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        let before = self.config.command();
        self.config.write(offset, data);
        self.take_mastery(before);
        if let Some(inside) = offset.checked_sub(self.msix_capability).filter(|at| *at < 12) {
            // A vector that cannot be routed loses interrupts, which the driver survives or not.
            let _ = self.msix.write_capability(inside, data);
            self.config.set(self.msix_capability + 2, &self.msix.control().to_le_bytes());
        }
        let intx_disabled = self.config.command() & COMMAND_INTX_DISABLE != 0;
        if self.interrupts.set_mode(self.msix.is_enabled(), intx_disabled) {
            self.device.signals_changed();
        }
        if self.hits_window(offset, data.len()) {
            self.write_through_window();
        }
    }

    fn bars(&self) -> Vec<Bar> {
        self.config.bars()
    }

    fn place_bar(&mut self, index: u8, address: u64) {
        self.config.place_bar(index, address);
    }

    fn read_bar(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if bar != BAR {
            return;
        }
        self.finish_reset_if_stopped();
        let inside = offset % PAGE;
        match offset - inside {
            COMMON => {
                if self.distress.is_raised() {
                    self.transport.set_needs_reset();
                }
                self.transport.read(inside, data);
            }
            ISR => {
                if let (0, Some(first)) = (inside, data.first_mut()) {
                    *first = self.interrupts.take_isr();
                }
            }
            DEVICE => self.device.read_config(inside, data),
            TABLE..PENDING => self.msix.read_table(offset - TABLE, data),
            PENDING => self.msix.read_pending(inside, data),
            _ => {}
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if bar != BAR {
            return;
        }
        self.finish_reset_if_stopped();
        let inside = offset % PAGE;
        match offset - inside {
            COMMON => self.write_common(inside, data),
            NOTIFY => self.notify(inside),
            TABLE..PENDING => {
                // As for the capability.
                let _ = self.msix.write_table(offset - TABLE, data);
            }
            // Nothing in any device's configuration is writable.
            _ => {}
        }
    }

    fn bars_changed(&mut self) {
        let Some(bar) = self.config.bars().into_iter().find(|bar| bar.index == BAR) else { return };
        // While decoding is off the guest may be sizing; the doorbells stay where they were.
        if bar.decoding && self.doorbells_at != Some((bar.address, Registered::All)) {
            self.move_doorbells(Some(bar.address));
        }
    }

    fn make_room(&mut self, bar: u8) {
        if bar == BAR {
            self.move_doorbells(None);
        }
    }

    fn hold(&mut self) {
        if !self.mastery.is_taken() {
            self.device.hold();
        }
    }

    fn is_held(&mut self) -> bool {
        self.device.is_held()
    }

    fn go_on(&mut self) {
        if !self.mastery.is_taken() {
            self.device.go_on();
        }
    }

    fn bus_reset(&mut self) {
        // The device lets go of its rings in its own time.
        let _ = self.transport.write(STATUS, &[0], &self.ram);
        self.stop();
        self.finish_reset_if_stopped();
        self.interrupts.set_config_vector(self.transport.config_vector());
        self.move_doorbells(None);
        // As in `write_config`.
        let _ = self.msix.reset();
        self.config = self.pristine.clone();
        self.interrupts.set_mode(false, false);
    }

    fn is_quiet(&mut self) -> bool {
        self.device.stopped()
    }

    fn reset(&mut self) {
        self.stop();
        await_end(RESET_DEADLINE, RESET_STEP, || self.device.stopped());
        self.move_doorbells(None);
        self.transport.finish_reset();
        self.distress.clear();
        self.interrupts.reset();
        // As in `write_config`.
        let _ = self.msix.reset();
        self.config = self.pristine.clone();
        self.interrupts.set_mode(false, false);
    }
}

impl Drop for VirtioPci {
    fn drop(&mut self) {
        self.move_doorbells(None);
    }
}

/// Waits until a device's threads have `ended` what they were told to end, at most for `limit`.
fn await_end(limit: Duration, step: Duration, mut ended: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !ended() && Instant::now() < deadline {
        thread::sleep(step);
    }
}

/// Configuration space, and where two of its capabilities are.
struct Built {
    config: ConfigSpace,
    msix: u16,
    window: u16,
}

fn describe(device: &dyn VirtioDevice, msix: &MsixTable) -> Result<Built, ConfigError> {
    let identity = device.identity();
    let [class, subclass, interface] = identity.class;
    let mut config = ConfigSpace::new(Identity {
        vendor: VENDOR,
        device: FIRST_DEVICE + identity.virtio_id,
        class: u32::from_be_bytes([0, class, subclass, interface]),
        revision: REVISION,
        subsystem_vendor: VENDOR,
        subsystem: SUBSYSTEM,
    });
    config.add_bar(BAR, BarKind::Memory32, BAR_SIZE)?;
    config.set_interrupt_pin(1);
    let doorbells = u64::from(device.queue_count()) * u64::from(NOTIFY_MULTIPLIER);
    let add = |config: &mut ConfigSpace, kind, offset, length, extra: &[u8]| {
        config.add_capability(CAPABILITY, &structure(kind, offset, length, extra), &[])
    };
    add(&mut config, CFG_COMMON, COMMON, COMMON_CONFIG_SIZE.into(), &[])?;
    add(&mut config, CFG_NOTIFY, NOTIFY, doorbells, &NOTIFY_MULTIPLIER.to_le_bytes())?;
    add(&mut config, CFG_ISR, ISR, 1, &[])?;
    add(&mut config, CFG_DEVICE, DEVICE, PAGE, &[])?;
    let window = add(&mut config, CFG_PCI, 0, 0, &[0; 4])?;
    config.allow_write(window + WINDOW_BAR, &[0xff]);
    config.allow_write(window + WINDOW_OFFSET, &[0xff; 12]);
    let table = msix.capability((BAR, offset_in_bar(TABLE)), (BAR, offset_in_bar(PENDING)));
    let msix = config.add_capability(msix::CAPABILITY, &table, &[])?;
    Ok(Built { config, msix, window })
}

/// Returns a configuration space as a function below a port has it: with the capability of PCI Express, and
/// with power management (PCIe 6.0 §7.5.2, §7.5.3), which keeps all that the device knows.
fn endpoint(mut config: ConfigSpace) -> Result<ConfigSpace, ConfigError> {
    Express::add(&mut config, FunctionReset::Absent)?.set_below_port(&mut config);
    config.add_power_management()?;
    Ok(config)
}

/// Returns the body of `struct virtio_pci_cap`, behind identifier and next pointer:
/// length of the capability, type, BAR, id, padding, offset, length, and what follows.
fn structure(kind: u8, offset: u64, length: u64, extra: &[u8]) -> Vec<u8> {
    let bytes = u8::try_from(16 + extra.len()).unwrap_or(16);
    let mut body = vec![bytes, kind, BAR, 0, 0, 0];
    body.extend(offset_in_bar(offset).to_le_bytes());
    body.extend(offset_in_bar(length).to_le_bytes());
    body.extend(extra);
    body
}

fn offset_in_bar(offset: u64) -> u32 {
    u32::try_from(offset).unwrap_or(0)
}
