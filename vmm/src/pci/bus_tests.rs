use super::*;
use crate::pci::{
    config::{ConfigSpace, Identity},
    port::{Kind, Link, Port},
};

#[test]
fn functions_see_only_aligned_powers_of_two() {
    let lengths = |at, length, step| {
        let data = vec![0; length];
        pieces(at, &data, step).iter().map(|(at, piece)| (*at, piece.len())).collect::<Vec<_>>()
    };
    assert_eq!(lengths(0x10, 8, CONFIG_STEP), [(0x10, 4), (0x14, 4)]);
    assert_eq!(lengths(0x11, 4, CONFIG_STEP), [(0x11, 1), (0x12, 2), (0x14, 1)]);
    assert_eq!(lengths(6, 7, BAR_STEP), [(6, 2), (8, 4), (12, 1)]);
}

struct Plain {
    config: ConfigSpace,
    cell: u8,
    resets: u32,
    /// How often it was told that its BARs changed, and that it has to make room.
    told: (u32, u32),
}

impl PciFunction for Plain {
    fn bars_changed(&mut self) {
        self.told.0 += 1;
    }
    fn make_room(&mut self, _bar: u8) {
        self.told.1 += 1;
    }
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
    }
    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.config.write(offset, data);
    }
    fn bars(&self) -> Vec<Bar> {
        self.config.bars()
    }
    fn place_bar(&mut self, index: u8, address: u64) {
        self.config.place_bar(index, address);
    }
    fn read_bar(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(self.cell);
    }
    fn write_bar(&mut self, _bar: u8, _offset: u64, data: &[u8]) {
        self.cell = data[0];
    }
    fn bus_reset(&mut self) {
        self.config.write(4, &[0, 0]);
        self.resets += 1;
    }
}

fn plain() -> Plain {
    let identity = Identity {
        vendor: 0x1234,
        device: 0x5678,
        class: 0,
        revision: 0,
        subsystem_vendor: 0,
        subsystem: 0,
    };
    let mut config = ConfigSpace::new(identity);
    config.add_bar(0, BarKind::Memory32, 0x1000).expect("fits");
    config.place_bar(0, 0xc000_0000);
    Plain { config, cell: 9, resets: 0, told: (0, 0) }
}

fn bus() -> Bus {
    let link = Link { speed: 1, width: 1 }.fixed().registers();
    let port = Port::new(Kind::Root, &link, None).expect("room");
    let mut bus = Bus::default();
    let above = Address { bus: 0, device: 2, function: 0 };
    bus.add(above, Arc::new(Mutex::new(port)));
    let name = Address { bus: 1, device: 0, function: 0 };
    bus.add_behind(above, name, Arc::new(Mutex::new(plain())));
    bus
}

const PORT: u64 = 2 << 15;

#[test]
fn devices_move_with_their_bridge() {
    let mut bus = bus();
    let mut data = [0; 4];
    bus.write_ecam(PORT | 0x18, &[0, 7, 7, 0]);
    bus.read_ecam(7 << 20, &mut data);
    assert_eq!(u32::from_le_bytes(data), 0x5678_1234);
    bus.read_ecam(1 << 20, &mut data);
    assert_eq!(data, [0xff; 4]);
}

#[test]
fn requests_go_down_through_switches() {
    let mut bus = Bus::default();
    let link = Link { speed: 4, width: 16 }.fixed().registers();
    let at = |bus, device| Address { bus, device, function: 0 };
    let mut seat = |parent: Option<Address>, name, kind, buses: (u8, u8, u8)| {
        let mut port = Port::new(kind, &link, None).expect("room");
        port.set_buses(buses.0, buses.1, buses.2);
        let port = Arc::new(Mutex::new(port));
        match parent {
            None => bus.add(name, port),
            Some(parent) => bus.add_behind(parent, name, port),
        }
    };
    seat(None, at(0x40, 0), Kind::Root, (0x40, 0x41, 0x44));
    seat(Some(at(0x40, 0)), at(0x41, 0), Kind::Upstream, (0x41, 0x42, 0x44));
    seat(Some(at(0x41, 0)), at(0x42, 0), Kind::Downstream, (0x42, 0x43, 0x43));
    seat(Some(at(0x41, 0)), at(0x42, 1), Kind::Downstream, (0x42, 0x44, 0x44));
    bus.add_behind(at(0x42, 1), at(0x44, 0), Arc::new(Mutex::new(plain())));
    let identity = |bus: &Bus, number: u64, device: u64| {
        let mut data = [0; 4];
        bus.read_ecam(number << 20 | device << 15, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(identity(&bus, 0x42, 1), 0x8233_104c);
    assert_eq!(identity(&bus, 0x44, 0), 0x5678_1234);
    assert_eq!(identity(&bus, 0x43, 0), u32::MAX);
    assert_eq!(identity(&bus, 0x04, 0), u32::MAX);
    // A bridge above that stops short hides what is below.
    bus.write_ecam(0x41 << 20 | 0x1a, &[0x43]);
    assert_eq!((identity(&bus, 0x44, 0), identity(&bus, 0x42, 1)), (u32::MAX, 0x8233_104c));
    bus.write_ecam(0x41 << 20 | 0x1a, &[0x44]);
    bus.remove(at(0x44, 0));
    assert_eq!(identity(&bus, 0x44, 0), u32::MAX);
}

#[test]
fn bars_answer_only_while_decoding_and_inside() {
    let mut bus = bus();
    let mut data = [0; 4];
    bus.write_ecam(PORT | 0x18, &[0, 1, 1, 0]);
    assert_eq!(bus.read_memory(0xc000_0000, &mut data), Answered::No);
    bus.write_ecam(1 << 20 | 4, &[2, 0]);
    assert_eq!(bus.read_memory(0xc000_0ffc, &mut data), Answered::Yes);
    assert_eq!(data, [9; 4]);
    assert_eq!(bus.read_memory(0xc000_0ffe, &mut data), Answered::No);
    bus.write_ecam(1 << 20 | 0x10, &[0, 0, 0, 0xd0]);
    assert_eq!(bus.read_memory(0xc000_0000, &mut data), Answered::No);
    assert_eq!(bus.read_memory(0xd000_0000, &mut data), Answered::Yes);
}

/// Bridge control, secondary bus reset.
#[test]
fn a_bridge_resets_what_is_below_it_once() {
    let link = Link { speed: 1, width: 1 }.fixed().registers();
    let mut bus = Bus::default();
    let at = |bus, device| Address { bus, device, function: 0 };
    let port = |kind| Arc::new(Mutex::new(Port::new(kind, &link, None).expect("room")));
    let (below, beside) = (Arc::new(Mutex::new(plain())), Arc::new(Mutex::new(plain())));
    bus.add(at(0, 2), port(Kind::Root));
    bus.add(at(0, 3), port(Kind::Root));
    bus.add_behind(at(0, 2), at(1, 0), port(Kind::Upstream));
    bus.add_behind(at(1, 0), at(2, 0), port(Kind::Downstream));
    bus.add_behind(at(2, 0), at(3, 0), Arc::<Mutex<Plain>>::clone(&below));
    bus.add_behind(at(0, 3), at(4, 0), Arc::<Mutex<Plain>>::clone(&beside));
    let resets = || [&below, &beside].map(|function| function.lock().expect("one thread").resets);
    let program = |bus: &mut Bus| {
        bus.write_ecam(PORT | 0x18, &[0, 1, 3, 0]);
        bus.write_ecam(1 << 20 | 0x18, &[1, 2, 3, 0]);
        bus.write_ecam(2 << 20 | 0x18, &[2, 3, 3, 0]);
        bus.write_ecam(3 << 20 | 4, &[2, 0]);
    };
    let identity = |bus: &Bus| {
        let mut data = [0; 4];
        bus.read_ecam(3 << 20, &mut data);
        u32::from_le_bytes(data)
    };
    program(&mut bus);
    assert_eq!((identity(&bus), resets()), (0x5678_1234, [0, 0]));
    bus.write_ecam(PORT | 0x3e, &[0x40, 0]);
    bus.write_ecam(PORT | 0x3e, &[0x43, 0]);
    assert_eq!((identity(&bus), resets()), (u32::MAX, [1, 0]));
    let mut data = [0; 4];
    assert_eq!(bus.read_memory(0xc000_0000, &mut data), Answered::No);
    // Over: the switch below has forgotten its buses.
    bus.write_ecam(PORT | 0x3e, &[0, 0]);
    assert_eq!((identity(&bus), resets()), (u32::MAX, [1, 0]));
    program(&mut bus);
    assert_eq!((identity(&bus), resets()), (0x5678_1234, [1, 0]));
    bus.write_ecam(PORT | 0x3e, &[0x40, 0]);
    assert_eq!(resets(), [2, 0]);
}

/// PCI Express 6.0 §6.6.1: it is reset when the link comes back, and quiet until then.
#[test]
fn what_is_below_a_disabled_link_masters_no_bus() {
    let link = Link { speed: 1, width: 1 }.fixed().registers();
    let mut bus = Bus::default();
    let above = Address { bus: 0, device: 2, function: 0 };
    let below = Arc::new(Mutex::new(plain()));
    bus.add(above, Arc::new(Mutex::new(Port::new(Kind::Root, &link, None).expect("room"))));
    let name = Address { bus: 1, device: 0, function: 0 };
    bus.add_behind(above, name, Arc::<Mutex<Plain>>::clone(&below));
    bus.write_ecam(PORT | 0x18, &[0, 1, 1, 0]);
    bus.write_ecam(1 << 20 | 4, &[6, 0]);
    let seen = || {
        let mut below = below.lock().expect("one thread");
        let mut command = [0; 2];
        below.read_config(4, &mut command);
        (command[0], below.resets)
    };
    assert_eq!(seen(), (6, 0));
    // Link control of the capability at 0x40.
    bus.write_ecam(PORT | 0x50, &[1 << 4, 0]);
    assert_eq!(seen(), (2, 0));
    bus.write_ecam(PORT | 0x50, &[0, 0]);
    assert_eq!(seen(), (0, 1));
}

#[test]
fn the_old_ports_reach_the_same_registers() {
    let mut bus = bus();
    let mut data = [0; 2];
    bus.write_mechanism1(0, &(1u32 << 31 | 2 << 11).to_le_bytes());
    bus.read_mechanism1(4, &mut data);
    assert_eq!(u16::from_le_bytes(data), 0x1b36);
    bus.write_mechanism1(0, &0u32.to_le_bytes());
    bus.read_mechanism1(4, &mut data);
    assert_eq!(data, [0xff; 2]);
}

/// PCI Express 6.0 §7.5.1.1.3: who does not decode answers nothing.
#[test]
fn a_place_goes_to_whoever_decodes_there() {
    let mut bus = Bus::default();
    let functions = [(2, 0x11), (3, 0x22)].map(|(device, cell)| {
        let function = Arc::new(Mutex::new(Plain { cell, ..plain() }));
        let name = Address { bus: 0, device, function: 0 };
        bus.add(name, Arc::<Mutex<Plain>>::clone(&function));
        function
    });
    let [a, b] = [2 << 15, 3 << 15];
    let place = |bus: &mut Bus, function: u64, address: u32| {
        bus.write_ecam(function | 0x10, &address.to_le_bytes());
    };
    let decode = |bus: &mut Bus, function: u64, on| {
        bus.write_ecam(function | 4, &[if on { 2 } else { 0 }, 0])
    };
    let told =
        || functions.each_ref().map(|f| std::mem::take(&mut f.lock().expect("one thread").told));
    let at = |bus: &Bus, address| {
        let mut data = [0];
        (bus.read_memory(address, &mut data) == Answered::Yes).then_some(data[0])
    };
    let (x, y) = (0xc000_0000, 0xc100_0000);
    place(&mut bus, b, y);
    decode(&mut bus, a, true);
    decode(&mut bus, b, true);
    assert_eq!((at(&bus, x.into()), at(&bus, y.into())), (Some(0x11), Some(0x22)));
    told();
    // B stays where it was until A wants the place.
    decode(&mut bus, b, false);
    place(&mut bus, a, x + 0x1000);
    assert_eq!(told(), [(1, 0), (1, 0)]);
    place(&mut bus, a, y);
    assert_eq!(told(), [(1, 0), (0, 1)]);
    assert_eq!((at(&bus, x.into()), at(&bus, y.into())), (None, Some(0x11)));
    place(&mut bus, b, x);
    decode(&mut bus, b, true);
    assert_eq!((at(&bus, x.into()), told()), (Some(0x22), [(0, 0), (2, 0)]));
    // Both at one place: whoever is left there has it when the other goes.
    place(&mut bus, a, x);
    assert_eq!((at(&bus, x.into()), told()), (Some(0x11), [(1, 0), (0, 0)]));
    place(&mut bus, a, y);
    assert_eq!((at(&bus, x.into()), at(&bus, y.into())), (Some(0x22), Some(0x11)));
    assert_eq!(told(), [(1, 0), (1, 0)]);
}
