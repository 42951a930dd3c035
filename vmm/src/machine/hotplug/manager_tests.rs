use std::sync::atomic::{AtomicBool, Ordering};

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
    busy: Arc<AtomicBool>,
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

    fn is_quiet(&mut self) -> bool {
        !self.busy.load(Ordering::Relaxed)
    }
}

/// Two slots with a device each, neither on the bus.
struct Bench {
    slots: Vec<(Spare, Option<Held>)>,
    shared: Arc<Hotplug>,
    bus: RwLock<Bus>,
    turn: Mutex<()>,
    events: Events,
    /// How the devices were when one of them was reset.
    seen: Arc<Mutex<Vec<AttachedState>>>,
    /// Whether they have something to finish.
    busy: Arc<AtomicBool>,
}

impl Bench {
    fn new() -> Self {
        let shared = Hotplug::absent();
        let seen = Arc::<Mutex<Vec<AttachedState>>>::default();
        let busy = Arc::<AtomicBool>::default();
        let slots = (1..3).map(|number| {
            let (shown, seen) = (Arc::clone(&shared), Arc::clone(&seen));
            let function = Reset { shared: shown, seen, busy: Arc::clone(&busy) };
            let function = Arc::new(Mutex::new(function));
            let (id, state) = (number.to_string(), AttachedState::Waiting);
            let device = AttachDevice::Pci { address: "0000:01:00.0".parse().expect("one") };
            shared.list().push(AttachedDevice { id: id.clone(), device, slot: number, state });
            let device = Device { function, behind: EMULATED.into(), closer: None };
            let (seat, offer) = (Seat::Off, Offer::First);
            (spare(number), Some(Held { device, id, seat, asked: None, offer, known: false }))
        });
        let slots = slots.collect();
        let (bus, turn, events) = (RwLock::default(), Mutex::default(), Events::default());
        Self { slots, shared, bus, turn, events, seen, busy }
    }

    fn switch(&self, slot: usize, control: u16) {
        let mut port = locked(&self.slots[slot].0.port);
        port.write_config(CONTROL, &control.to_le_bytes());
    }

    fn follow_power(&mut self) {
        let board = Wiring { bus: &self.bus, turn: &self.turn, events: &self.events };
        let left = follow_power(&mut self.slots, board, &self.shared);
        assert!(left.is_empty(), "all of these are quiet at once");
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
    // Once it has taken the device, all begins anew.
    bench.switch(0, 0);
    bench.follow_power();
    assert_eq!(bench.slots[0].1.as_ref().map(|held| held.offer), Some(Offer::First));
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
    let failures = take_back([Device { function, behind: EMULATED.into(), closer: None }], &turn);
    assert!(failures.is_empty() && turn.try_lock().is_ok());
    assert_eq!(*locked(&taken), [true]);
}

#[test]
fn what_has_not_finished_keeps_its_name_and_a_warning_goes() {
    let mut bench = Bench::new();
    bench.busy.store(true, Ordering::Relaxed);
    let (spare, place) = &mut bench.slots[0];
    let held = place.take().expect("a device");
    let board = Wiring { bus: &bench.bus, turn: &bench.turn, events: &bench.events };
    let shared = &*bench.shared;
    show(shared, "1", AttachedState::Leaving);
    let left = release(spare, held, board, shared).expect("it is busy");
    for _ in 0..2 {
        let shown = dismiss("1", shared).expect("listed");
        assert_eq!(shown.state, AttachedState::Leaving);
    }
    bench.busy.store(false, Ordering::Relaxed);
    end(left, board, shared);
    assert_eq!(dismiss("1", shared), None);
    show(shared, "2", AttachedState::Unclean { reason: String::new() });
    assert!(dismiss("2", shared).is_some() && dismiss("2", shared).is_none());
}
