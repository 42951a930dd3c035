//! The thread that plugs and unplugs.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use types::{
    devices::{AttachDevice, AttachRequest, AttachedDevice, AttachedState},
    operations::VmEventKind,
    vm::{Disk, DiskModel},
};

use super::{Hotplug, Order, PlugError, Removal};
use crate::{
    devices::{
        DeviceError,
        nvme::Nvme,
        virtio::{self, blk::engine::EngineChoice},
    },
    events::Events,
    irq::PinRoute,
    machine::Board,
    pci::{
        bus::{Address, Bus},
        express,
        function::{Bar, BarKind, PciFunction},
        port::{Behind, LinkState, Port, Power},
    },
    vfio::{assign::Closer, plug::Plug, reset::ResetError},
};

/// How long a guest may take to react to the attention button before it is pressed again. It waits
/// five seconds itself, in which a second press takes the first back (PCIe 6.0 §6.7.1.5).
const BUTTON_PAUSE: Duration = Duration::from_secs(15);
/// How often it is looked whether a device that left has finished what it had begun.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Link that a port tells for an emulated function.
const EMULATED: LinkState = express::LINK.fixed();
/// Smallest piece of memory that a BAR takes in a window.
const PAGE: u64 = 4096;

/// A spare port.
pub(in super::super) struct Spare {
    /// Number of its slot.
    pub(in super::super) number: u16,
    /// The port, and where it is.
    pub(in super::super) port: Arc<Mutex<Port>>,
    pub(in super::super) address: Address,
    /// Where its device sits, and how its pin goes.
    pub(in super::super) behind: Address,
    pub(in super::super) route: PinRoute,
    /// Bytes of 32-bit and of 64-bit prefetchable memory behind it.
    pub(in super::super) memory: u64,
    pub(in super::super) prefetchable: u64,
}

/// What devices are made with.
pub(in super::super) struct Supplies {
    pub(in super::super) plug: Option<Plug>,
    pub(in super::super) platform: virtio::Platform,
    pub(in super::super) vcpus: u32,
}

/// A device in its slot.
struct Held {
    device: Device,
    id: String,
    seat: Seat,
    /// When the button was last pressed for it to leave.
    asked: Option<Instant>,
    offer: Offer,
    /// Whether the guest had it before: it may switch its power as often as it likes.
    known: bool,
}

/// A device that is out of its slot, and has not finished what it had begun: it may still write to its disk, which
/// is nobody else's until then.
struct Leaving {
    device: Device,
    id: String,
}

/// How often the guest was told of a device since it came or was last on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Offer {
    First,
    Second,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seat {
    OnBus,
    Off,
}

struct Device {
    function: Arc<Mutex<dyn PciFunction>>,
    behind: Behind,
    closer: Option<Closer>,
}

/// What the thread shares with virtual CPUs.
#[derive(Clone, Copy)]
struct Wiring<'a> {
    bus: &'a RwLock<Bus>,
    turn: &'a Mutex<()>,
    events: &'a Events,
}

/// Carries out orders.
pub(in super::super) struct Manager {
    inbox: Receiver<Order>,
    slots: Vec<(Spare, Option<Held>)>,
    leaving: Vec<Leaving>,
    supplies: Supplies,
}

impl Manager {
    /// Makes the manager of `spares`.
    pub(in super::super) fn new(
        inbox: Receiver<Order>,
        spares: Vec<Spare>,
        supplies: Supplies,
    ) -> Self {
        let slots = spares.into_iter().map(|spare| (spare, None)).collect();
        Self { inbox, slots, leaving: Vec::new(), supplies }
    }

    /// Returns whether there is any port to plug into; without one there is no work.
    pub(in super::super) fn has_ports(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Works until the machine has ended.
    pub(in super::super) fn run(mut self, board: &Board, shared: &Hotplug) {
        let board = Wiring { bus: &board.bus, turn: &board.turn, events: &board.events };
        loop {
            match self.next() {
                Ok(Order::Attach(request, files, reply)) => {
                    reply.unless_abandoned(|| self.attach(request, files, board, shared));
                }
                Ok(Order::Detach(id, removal, reply)) => {
                    reply.unless_abandoned(|| self.detach(&id, removal, board, shared));
                }
                Ok(Order::Look) => shared.begin_look(),
                Ok(Order::Close(reply)) => {
                    let _ = reply.send(self.close(board));
                    return;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.leaving.extend(follow_power(&mut self.slots, board, shared));
            let (quiet, busy) = std::mem::take(&mut self.leaving).into_iter().partition(is_quiet);
            self.leaving = busy;
            quiet.into_iter().for_each(|left: Leaving| end(left, board, shared));
        }
    }

    /// Waits for the next order, and not for long while a device has something to finish.
    fn next(&self) -> Result<Order, RecvTimeoutError> {
        let waits = |held: &Held| held.seat == Seat::Off && !held.device.is_quiet();
        let any = self.slots.iter().filter_map(|(_, held)| held.as_ref()).any(waits);
        if any || !self.leaving.is_empty() {
            return self.inbox.recv_timeout(LOOK_AGAIN);
        }
        self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
    }

    fn attach(
        &mut self,
        request: AttachRequest,
        files: (OwnedFd, Vec<OwnedFd>),
        board: Wiring<'_>,
        shared: &Hotplug,
    ) -> Result<AttachedDevice, PlugError> {
        let AttachRequest { id, device } = request;
        if shared.list().iter().any(|known| known.id == id) {
            return Err(PlugError::Taken { id });
        }
        // A device gets the largest port, a disk the smallest, so that each finds one.
        let free = self.slots.iter_mut().filter(|(_, held)| held.is_none());
        let room = |(spare, _): &&mut (Spare, Option<Held>)| (spare.prefetchable, spare.memory);
        let slot = match &device {
            AttachDevice::Pci { .. } => free.max_by_key(room),
            AttachDevice::Disk { .. } => free.min_by_key(room),
        };
        let (spare, held) = slot.ok_or(PlugError::NoPort)?;
        let made = make(&device, files, spare.route, &self.supplies)?;
        let bars = locked(&made.function).bars();
        if let Err(error) = fits(&bars, spare) {
            let failures = take_back([made], board.turn);
            failures.iter().for_each(|failure| eprintln!("holdfast-vmm: {failure}"));
            return Err(error);
        }
        let state = AttachedState::Waiting;
        let device = device.without_key();
        let shown = AttachedDevice { id: id.clone(), device, slot: spare.number, state };
        shared.list().push(shown.clone());
        // KVM refuses the interrupt only on a machine that is going away.
        let _ = locked(&spare.port).insert(made.behind);
        let (seat, offer) = (Seat::Off, Offer::First);
        *held = Some(Held { device: made, id, seat, asked: None, offer, known: false });
        Ok(shown)
    }

    fn detach(
        &mut self,
        id: &str,
        removal: Removal,
        board: Wiring<'_>,
        shared: &Hotplug,
    ) -> Result<AttachedDevice, PlugError> {
        let unknown = || PlugError::Unknown { id: id.to_owned() };
        let slot =
            self.slots.iter_mut().find(|(_, held)| held.as_ref().is_some_and(|h| h.id == id));
        let Some((spare, place)) = slot else {
            return dismiss(id, shared).ok_or_else(unknown);
        };
        let held = place.as_mut().ok_or_else(unknown)?;
        show(shared, id, AttachedState::Leaving);
        let shown = shared.list().iter().find(|known| known.id == id).cloned();
        match removal {
            Removal::Asked => {
                if held.asked.is_none_or(|last| last.elapsed() >= BUTTON_PAUSE) {
                    held.asked = Some(Instant::now());
                    let _ = locked(&spare.port).press_button();
                }
            }
            Removal::Pulled => {
                if let Some(held) = place.take() {
                    leave_bus(spare, held.seat, board);
                    self.leaving.extend(release(spare, held, board, shared));
                }
            }
        }
        shown.ok_or_else(unknown)
    }

    fn close(&mut self, board: Wiring<'_>) -> Vec<ResetError> {
        let mut devices = Vec::new();
        for (spare, place) in &mut self.slots {
            if let Some(held) = place.take() {
                leave_bus(spare, held.seat, board);
                devices.push(held.device);
            }
        }
        take_back(devices, board.turn)
    }
}

/// Takes a device that is in no slot from the list if it is there as a warning; one that has not finished stays,
/// as its disk is nobody else's until then. Returns how it is listed.
fn dismiss(id: &str, shared: &Hotplug) -> Option<AttachedDevice> {
    let mut list = shared.list();
    let shown = list.iter().find(|known| known.id == id).cloned()?;
    if matches!(shown.state, AttachedState::Unclean { .. }) {
        list.retain(|known| known.id != id);
    }
    Some(shown)
}

/// Lets devices join and leave the bus with the power of their slots. All that can join do so before each
/// that leaves: a guest that has switched power on waits a second for the link (Linux's pciehp), and a
/// reset may take longer.
///
/// Returns devices that left and have not finished yet.
fn follow_power(
    slots: &mut [(Spare, Option<Held>)],
    board: Wiring<'_>,
    shared: &Hotplug,
) -> Vec<Leaving> {
    let mut leaving = Vec::new();
    for number in 0..slots.len() {
        slots.iter_mut().for_each(|(spare, place)| join(spare, place, board, shared));
        let (spare, place) = &mut slots[number];
        leaving.extend(leave(spare, place, board, shared));
        // The guest may have switched power off and on again.
        join(spare, place, board, shared);
    }
    leaving
}

/// Lets a device join the bus if its slot has power, and it has finished what it had begun before.
fn join(spare: &Spare, place: &mut Option<Held>, board: Wiring<'_>, shared: &Hotplug) {
    let Some(held) = place.as_mut().filter(|held| held.seat == Seat::Off) else { return };
    if !held.device.is_quiet() {
        return;
    }
    if locked(&spare.port).power() == Power::On {
        let function = Arc::clone(&held.device.function);
        let mut bus = board.bus.write().unwrap_or_else(PoisonError::into_inner);
        bus.add_behind(spare.address, spare.behind, function);
        drop(bus);
        (held.seat, held.offer) = (Seat::OnBus, Offer::First);
        let _ = locked(&spare.port).connect();
        show(shared, &held.id, AttachedState::Connected);
        if !std::mem::replace(&mut held.known, true) {
            board.events.push(VmEventKind::DeviceAttached, held.id.clone());
        }
    } else if held.asked.is_none() && held.offer == Offer::First {
        // The guest may have tried while another device was being taken.
        let mut port = locked(&spare.port);
        if port.has_given_up() {
            held.offer = Offer::Second;
            let _ = port.press_button();
        }
    }
}

/// Lets a device leave the bus if its slot has no power or had none, and its slot if it was asked to.
fn leave(
    spare: &Spare,
    place: &mut Option<Held>,
    board: Wiring<'_>,
    shared: &Hotplug,
) -> Option<Leaving> {
    let held = place.as_mut()?;
    if held.seat == Seat::OnBus && !locked(&spare.port).is_connected() {
        leave_bus(spare, held.seat, board);
        held.seat = Seat::Off;
        let _ = locked(&spare.port).disconnect();
        if held.asked.is_none() {
            // What comes back is as after power-on.
            locked(&held.device.function).reset();
            show(shared, &held.id, AttachedState::Waiting);
        }
    }
    let leaves = held.asked.is_some() && held.seat == Seat::Off;
    place.take_if(|_| leaves).and_then(|held| release(spare, held, board, shared))
}

fn make(
    device: &AttachDevice,
    (file, more): (OwnedFd, Vec<OwnedFd>),
    route: PinRoute,
    supplies: &Supplies,
) -> Result<Device, PlugError> {
    match device {
        AttachDevice::Pci { address } => {
            let plug = supplies.plug.as_ref().ok_or(PlugError::NoPassthrough)?;
            let opened = plug.open(*address, file, route);
            let (assigned, closer) = opened.map_err(|error| PlugError::Assign(Box::new(error)))?;
            let function = Arc::new(Mutex::new(assigned.function));
            Ok(Device { function, behind: assigned.behind, closer: Some(closer) })
        }
        AttachDevice::Disk { read_only, serial, model, limit, key } => {
            let (read_only, serial, key) = (*read_only, serial.clone(), key.clone());
            let (model, limit, more_fds) = (*model, *limit, Vec::new());
            let disk = Disk { fd: -1, more_fds, read_only, serial, model, limit, key };
            let function = open_disk(&disk, (file, more), route.slot, supplies)?;
            Ok(Device { function, behind: EMULATED.into(), closer: None })
        }
    }
}

fn open_disk(
    disk: &Disk,
    (file, more): (OwnedFd, Vec<OwnedFd>),
    slot: u8,
    supplies: &Supplies,
) -> Result<Arc<Mutex<dyn PciFunction>>, DeviceError> {
    let Supplies { platform, vcpus, .. } = supplies;
    match disk.model {
        DiskModel::VirtioBlk => {
            let mut function = virtio::blk::open(disk, (file, more), *vcpus, slot, platform)?;
            function.set_below_port()?;
            function.start()?;
            Ok(Arc::new(Mutex::new(function)))
        }
        DiskModel::Nvme => {
            let mut function =
                Nvme::open(disk, file, (slot, *vcpus), EngineChoice::Best, platform)?;
            function.set_below_port();
            function.start()?;
            Ok(Arc::new(Mutex::new(function)))
        }
    }
}

/// Whether BARs fit the windows that a port keeps.
fn fits(bars: &[Bar], spare: &Spare) -> Result<(), PlugError> {
    let need = |wanted: &[BarKind]| {
        let mine = bars.iter().filter(|bar| wanted.contains(&bar.kind));
        mine.fold(0u64, |sum, bar| sum.saturating_add(bar.size.max(PAGE)))
    };
    let memory = need(&[BarKind::Memory32, BarKind::Memory64]);
    let prefetchable = need(&[BarKind::Memory64Prefetchable]);
    let Spare { number, memory: kept, prefetchable: kept_prefetchable, .. } = *spare;
    if memory > kept || prefetchable > kept_prefetchable {
        let slot = number;
        return Err(PlugError::Window { slot, memory, prefetchable, kept, kept_prefetchable });
    }
    Ok(())
}

fn leave_bus(spare: &Spare, seat: Seat, board: Wiring<'_>) {
    if seat == Seat::OnBus {
        let _turn = locked(board.turn);
        board.bus.write().unwrap_or_else(PoisonError::into_inner).remove(spare.behind);
    }
}

/// Takes a device that is off the bus out of its slot. Returns it if it has not finished what it had begun.
fn release(spare: &Spare, held: Held, board: Wiring<'_>, shared: &Hotplug) -> Option<Leaving> {
    let _ = locked(&spare.port).remove();
    let Held { device, id, .. } = held;
    device.silence();
    let left = Leaving { device, id };
    if !is_quiet(&left) {
        eprintln!("holdfast-vmm: {} is detached, and its disk has still to be written", left.id);
        return Some(left);
    }
    end(left, board, shared);
    None
}

fn is_quiet(left: &Leaving) -> bool {
    left.device.is_quiet()
}

/// Forgets a device that is out of its slot and quiet.
fn end(left: Leaving, board: Wiring<'_>, shared: &Hotplug) {
    let Leaving { device, id } = left;
    let failures = take_back([device], board.turn);
    let failures: Vec<String> = failures.iter().map(ToString::to_string).collect();
    if failures.is_empty() {
        shared.list().retain(|known| known.id != id);
        board.events.push(VmEventKind::DeviceDetached, id);
        return;
    }
    let reason = failures.join("; ");
    eprintln!("holdfast-vmm: {reason}");
    board.events.push(VmEventKind::DeviceFailed, format!("{id}: {reason}"));
    show(shared, &id, AttachedState::Unclean { reason });
}

impl Device {
    /// Has an emulated device end what it does; one that is passed through is reset when it is closed.
    fn silence(&self) {
        if self.closer.is_none() {
            locked(&self.function).reset();
        }
    }

    fn is_quiet(&self) -> bool {
        self.closer.is_some() || locked(&self.function).is_quiet()
    }
}

/// Drops devices, which are off the bus: the guest's mappings of them first, then they are silenced and
/// reset, all at once.
///
/// Whoever holds the virtual CPUs has all functions of the bus in hand during its `turn`. The last
/// hand unmaps and unroutes, which threads of the API and of the timer may not: it is this one, as
/// in its own turn nobody else has any.
fn take_back(devices: impl IntoIterator<Item = Device>, turn: &Mutex<()>) -> Vec<ResetError> {
    let mut closers = Vec::new();
    for device in devices {
        device.silence();
        let Device { function, closer, .. } = device;
        let ours = locked(turn);
        drop(function);
        drop(ours);
        closers.extend(closer);
    }
    Closer::close_all(closers)
}

fn show(shared: &Hotplug, id: &str, state: AttachedState) {
    if let Some(known) = shared.list().iter_mut().find(|known| known.id == id) {
        known.state = state;
    }
}

fn locked<T: ?Sized>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "manager_tests.rs"]
mod tests;
