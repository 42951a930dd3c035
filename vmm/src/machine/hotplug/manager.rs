//! The thread that plugs and unplugs.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, mpsc::Receiver},
    time::{Duration, Instant},
};

use types::{
    devices::{AttachDevice, AttachRequest, AttachedDevice, AttachedState},
    vm::{Disk, DiskModel},
};

use super::{Hotplug, Order, PlugError, Removal};
use crate::{
    devices::{
        DeviceError,
        nvme::Nvme,
        virtio::{self, blk::engine::EngineChoice},
    },
    irq::PinRoute,
    machine::Board,
    pci::{
        bus::{Address, Bus},
        function::{Bar, BarKind, PciFunction},
        port::{Behind, Link, LinkState, Port, Power},
    },
    vfio::{assign::Closer, plug::Plug, reset::ResetError},
};

/// How long a guest may take to react to the attention button before it is pressed again. It waits
/// five seconds itself, in which a second press takes the first back (PCIe 6.0 §6.7.1.5).
const BUTTON_PAUSE: Duration = Duration::from_secs(15);
/// Link that a port tells for an emulated function: that of NVMe controllers; others are no PCI
/// Express devices.
const EMULATED: LinkState = Link { speed: 1, width: 1 }.fixed();
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
}

/// How often the guest was told of a device.
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
}

/// Carries out orders.
pub(in super::super) struct Manager {
    inbox: Receiver<Order>,
    slots: Vec<(Spare, Option<Held>)>,
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
        Self { inbox, slots, supplies }
    }

    /// Returns whether there is any port to plug into; without one there is no work.
    pub(in super::super) fn has_ports(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Works until the machine has ended.
    pub(in super::super) fn run(mut self, board: &Board, shared: &Hotplug) {
        let board = Wiring { bus: &board.bus, turn: &board.turn };
        while let Ok(order) = self.inbox.recv() {
            match order {
                Order::Attach(request, file, reply) => {
                    reply.unless_abandoned(|| self.attach(request, file, board, shared));
                }
                Order::Detach(id, removal, reply) => {
                    reply.unless_abandoned(|| self.detach(&id, removal, board, shared));
                }
                Order::Look => shared.begin_look(),
                Order::Close(reply) => {
                    let _ = reply.send(self.close(board));
                    return;
                }
            }
            follow_power(&mut self.slots, board, shared);
        }
    }

    fn attach(
        &mut self,
        request: AttachRequest,
        file: OwnedFd,
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
        let made = make(&device, file, spare.route, &self.supplies)?;
        let bars = locked(&made.function).bars();
        if let Err(error) = fits(&bars, spare) {
            let failures = take_back(made, board.turn);
            failures.iter().for_each(|failure| eprintln!("holdfast-vmm: {failure}"));
            return Err(error);
        }
        let state = AttachedState::Waiting;
        let device = device.without_key();
        let shown = AttachedDevice { id: id.clone(), device, slot: spare.number, state };
        shared.list().push(shown.clone());
        // KVM refuses the interrupt only on a machine that is going away.
        let _ = locked(&spare.port).insert(made.behind);
        *held = Some(Held { device: made, id, seat: Seat::Off, asked: None, offer: Offer::First });
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
            // What was taken out already and is listed as a warning goes from the list.
            let mut list = shared.list();
            let at = list.iter().position(|known| known.id == id).ok_or_else(unknown)?;
            return Ok(list.remove(at));
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
                    release(spare, held, board, shared);
                }
            }
        }
        shown.ok_or_else(unknown)
    }

    fn close(&mut self, board: Wiring<'_>) -> Vec<ResetError> {
        let mut failures = Vec::new();
        for (spare, place) in &mut self.slots {
            if let Some(held) = place.take() {
                leave_bus(spare, held.seat, board);
                failures.extend(take_back(held.device, board.turn));
            }
        }
        failures
    }
}

/// Lets devices join and leave the bus with the power of their slots. All that can join do so before each
/// that leaves: a guest that has switched power on waits a second for the link (Linux's pciehp), and a
/// reset may take longer.
fn follow_power(slots: &mut [(Spare, Option<Held>)], board: Wiring<'_>, shared: &Hotplug) {
    for number in 0..slots.len() {
        slots.iter_mut().for_each(|(spare, place)| join(spare, place, board, shared));
        let (spare, place) = &mut slots[number];
        leave(spare, place, board, shared);
    }
}

/// Lets a device join the bus if its slot has power.
fn join(spare: &Spare, place: &mut Option<Held>, board: Wiring<'_>, shared: &Hotplug) {
    let Some(held) = place.as_mut().filter(|held| held.seat == Seat::Off) else { return };
    if locked(&spare.port).power() == Power::On {
        let function = Arc::clone(&held.device.function);
        let mut bus = board.bus.write().unwrap_or_else(PoisonError::into_inner);
        bus.add_behind(spare.address, spare.behind, function);
        drop(bus);
        held.seat = Seat::OnBus;
        let _ = locked(&spare.port).connect();
        show(shared, &held.id, AttachedState::Connected);
    } else if held.asked.is_none() && held.offer == Offer::First {
        // The guest may have tried while another device was being taken.
        let mut port = locked(&spare.port);
        if port.has_given_up() {
            held.offer = Offer::Second;
            let _ = port.press_button();
        }
    }
}

/// Lets a device leave the bus if its slot has no power, and its slot if it was asked to.
fn leave(spare: &Spare, place: &mut Option<Held>, board: Wiring<'_>, shared: &Hotplug) {
    let Some(held) = place else { return };
    if held.seat == Seat::OnBus && locked(&spare.port).power() == Power::Off {
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
    if leaves && let Some(held) = place.take() {
        release(spare, held, board, shared);
    }
}

fn make(
    device: &AttachDevice,
    file: OwnedFd,
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
            let disk = Disk { fd: -1, read_only, serial, model: *model, limit: *limit, key };
            let function = open_disk(&disk, file, route.slot, supplies)?;
            Ok(Device { function, behind: EMULATED.into(), closer: None })
        }
    }
}

fn open_disk(
    disk: &Disk,
    file: OwnedFd,
    slot: u8,
    supplies: &Supplies,
) -> Result<Arc<Mutex<dyn PciFunction>>, DeviceError> {
    let Supplies { platform, vcpus, .. } = supplies;
    match disk.model {
        DiskModel::VirtioBlk => {
            let mut function = virtio::blk::open(disk, file, *vcpus, slot, platform)?;
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

/// Takes a device that is off the bus out of its slot.
fn release(spare: &Spare, held: Held, board: Wiring<'_>, shared: &Hotplug) {
    let _ = locked(&spare.port).remove();
    let failures = take_back(held.device, board.turn);
    let failures: Vec<String> = failures.iter().map(ToString::to_string).collect();
    if failures.is_empty() {
        shared.list().retain(|known| known.id != held.id);
        return;
    }
    let reason = failures.join("; ");
    eprintln!("holdfast-vmm: {reason}");
    show(shared, &held.id, AttachedState::Unclean { reason });
}

/// Drops a device, which is off the bus: the guest's mappings of it first, then it is silenced and
/// reset.
///
/// Whoever holds the virtual CPUs has all functions of the bus in hand during its `turn`. The last
/// hand unmaps and unroutes, which threads of the API and of the timer may not: it is this one, as
/// in its own turn nobody else has any.
fn take_back(device: Device, turn: &Mutex<()>) -> Vec<ResetError> {
    let Device { function, closer, .. } = device;
    if closer.is_none() {
        locked(&function).reset();
    }
    let ours = locked(turn);
    drop(function);
    drop(ours);
    closer.map(Closer::close).unwrap_or_default()
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
mod tests {
    use super::*;
    use crate::pci::port::tests::hot_port;

    /// Where a port has its slot's control and status, the bit of control that switches power off, and that
    /// of status that is the button.
    const CONTROL: u16 = 0x58;
    const STATUS: u16 = 0x5a;
    const POWER_OFF: u16 = 1 << 10;
    const BUTTON: u8 = 1 << 0;

    /// A function that notes, when it is reset, what the devices of the machine are like.
    struct Reset {
        shared: Arc<Hotplug>,
        seen: Arc<Mutex<Vec<AttachedState>>>,
    }

    impl PciFunction for Reset {
        fn read_config(&mut self, _offset: u16, _data: &mut [u8]) {}

        fn write_config(&mut self, _offset: u16, _data: &[u8]) {}

        fn bars(&self) -> Vec<Bar> {
            Vec::new()
        }

        fn place_bar(&mut self, _index: u8, _address: u64) {}

        fn read_bar(&mut self, _bar: u8, _offset: u64, _data: &mut [u8]) {}

        fn write_bar(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}

        fn reset(&mut self) {
            let states = self.shared.devices().into_iter().map(|device| device.state);
            locked(&self.seen).extend(states);
        }
    }

    /// Two slots with a device each, neither on the bus.
    struct Bench {
        slots: Vec<(Spare, Option<Held>)>,
        shared: Arc<Hotplug>,
        bus: RwLock<Bus>,
        turn: Mutex<()>,
        /// How the devices were when one of them was reset.
        seen: Arc<Mutex<Vec<AttachedState>>>,
    }

    impl Bench {
        fn new() -> Self {
            let shared = Hotplug::absent();
            let seen = Arc::<Mutex<Vec<AttachedState>>>::default();
            let slots = (1..3).map(|number| {
                let function = Reset { shared: Arc::clone(&shared), seen: Arc::clone(&seen) };
                let function = Arc::new(Mutex::new(function));
                let (id, state) = (number.to_string(), AttachedState::Waiting);
                let device = AttachDevice::Pci { address: "0000:01:00.0".parse().expect("one") };
                shared.list().push(AttachedDevice { id: id.clone(), device, slot: number, state });
                let device = Device { function, behind: EMULATED.into(), closer: None };
                let (seat, offer) = (Seat::Off, Offer::First);
                (spare(number), Some(Held { device, id, seat, asked: None, offer }))
            });
            let slots = slots.collect();
            Self { slots, shared, bus: RwLock::default(), turn: Mutex::default(), seen }
        }

        fn switch(&self, slot: usize, control: u16) {
            let mut port = locked(&self.slots[slot].0.port);
            port.write_config(CONTROL, &control.to_le_bytes());
        }

        fn follow_power(&mut self) {
            let board = Wiring { bus: &self.bus, turn: &self.turn };
            follow_power(&mut self.slots, board, &self.shared);
        }

        /// Returns whether the button of a slot was pressed since the last time.
        fn takes_press(&self, slot: usize) -> bool {
            let mut port = locked(&self.slots[slot].0.port);
            let mut status = [0];
            port.read_config(STATUS, &mut status);
            port.write_config(STATUS, &[BUTTON]);
            status[0] & BUTTON != 0
        }
    }

    fn spare(number: u16) -> Spare {
        let bus = number.to_le_bytes()[0];
        let (mut port, _) = hot_port();
        port.insert(EMULATED.into()).expect("recorded");
        port.write_config(STATUS, &[BUTTON]);
        Spare {
            number,
            port: Arc::new(Mutex::new(port)),
            address: Address { bus: 0, device: bus, function: 0 },
            behind: Address { bus, device: 0, function: 0 },
            route: PinRoute { slot: bus, turn: 0 },
            memory: 0,
            prefetchable: 0,
        }
    }

    #[test]
    fn what_has_power_joins_before_another_device_is_reset() {
        let mut bench = Bench::new();
        bench.switch(0, 0);
        bench.follow_power();
        bench.switch(0, POWER_OFF);
        bench.switch(1, 0);
        bench.follow_power();
        assert_eq!(*locked(&bench.seen), [AttachedState::Connected, AttachedState::Connected]);
        let states: Vec<_> = bench.shared.devices().into_iter().map(|one| one.state).collect();
        assert_eq!(states, [AttachedState::Waiting, AttachedState::Connected]);
    }

    #[test]
    fn a_guest_that_gave_up_is_told_of_a_device_once_more() {
        let mut bench = Bench::new();
        bench.follow_power();
        assert!(!bench.takes_press(0), "it has not tried yet");
        bench.switch(0, 0);
        bench.switch(0, POWER_OFF);
        bench.follow_power();
        assert!(bench.takes_press(0) && !bench.takes_press(1));
        bench.switch(0, 0);
        bench.switch(0, POWER_OFF);
        bench.follow_power();
        assert!(!bench.takes_press(0), "twice is enough");
    }

    #[test]
    fn a_guest_that_puts_a_device_out_is_not_told_of_it_again() {
        let mut bench = Bench::new();
        bench.switch(0, 0);
        bench.follow_power();
        bench.switch(0, POWER_OFF);
        bench.follow_power();
        bench.follow_power();
        assert!(!bench.takes_press(0));
    }

    /// A function that notes, when it is dropped, whether it is somebody's turn.
    struct Dropped {
        turn: Arc<Mutex<()>>,
        taken: Arc<Mutex<Vec<bool>>>,
    }

    impl Drop for Dropped {
        fn drop(&mut self) {
            locked(&self.taken).push(self.turn.try_lock().is_err());
        }
    }

    impl PciFunction for Dropped {
        fn read_config(&mut self, _offset: u16, _data: &mut [u8]) {}

        fn write_config(&mut self, _offset: u16, _data: &[u8]) {}

        fn bars(&self) -> Vec<Bar> {
            Vec::new()
        }

        fn place_bar(&mut self, _index: u8, _address: u64) {}

        fn read_bar(&mut self, _bar: u8, _offset: u64, _data: &mut [u8]) {}

        fn write_bar(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}
    }

    #[test]
    fn a_function_is_dropped_in_a_turn_of_its_own() {
        let (turn, taken) = (Arc::<Mutex<()>>::default(), Arc::<Mutex<Vec<bool>>>::default());
        let function = Dropped { turn: Arc::clone(&turn), taken: Arc::clone(&taken) };
        let function = Arc::new(Mutex::new(function));
        let failures = take_back(Device { function, behind: EMULATED.into(), closer: None }, &turn);
        assert!(failures.is_empty() && turn.try_lock().is_ok());
        assert_eq!(*locked(&taken), [true]);
    }
}
