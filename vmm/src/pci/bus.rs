//! The bus: finds the function for a configuration access, and the BAR for a memory or port
//! access. What nobody answers reads as ones, and writes to it are lost.
//! Source: PCI Express Base Specification 6.0 §7.2.2 (ECAM); PCI Local Bus 3.0 §3.2.2.3.2 (0xcf8).

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::function::{Bar, BarKind, PciFunction};

/// Bus, device and function of an emulated function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Bus.
    pub bus: u8,
    /// Device, 0..=31.
    pub device: u8,
    /// Function, 0..=7.
    pub function: u8,
}

type Shared = Arc<Mutex<dyn PciFunction>>;

/// A decoded range: which BAR of which function.
#[derive(Clone)]
struct Decoded {
    size: u64,
    bar: u8,
    function: Shared,
}

/// A function on the bus and the bridge above it.
struct Seat {
    function: Shared,
    /// The bridge above: its seat; none on the bus of a root complex. A device is reached under the
    /// bus number that the bridge has.
    parent: Option<Address>,
    bars: Vec<Bar>,
}

/// Most bridges above a function; the VMM builds no deeper trees.
const MAX_DEPTH: usize = 16;

/// All functions of a machine.
#[derive(Default)]
pub struct Bus {
    seats: BTreeMap<Address, Seat>,
    memory: BTreeMap<u64, Decoded>,
    ports: BTreeMap<u64, Decoded>,
    /// The address register at port 0xcf8.
    selected: u32,
}

impl Bus {
    /// Seats a function on the bus of a root complex, which is there from then on.
    pub fn add(&mut self, address: Address, function: Shared) {
        self.seats.insert(address, Seat { function, parent: None, bars: Vec::new() });
        self.refresh(address);
    }

    /// Seats a function behind the bridge at `parent`. Its `address.bus` is only its name here: the
    /// guest finds it under the secondary bus number it gave the bridge.
    pub fn add_behind(&mut self, parent: Address, address: Address, function: Shared) {
        self.seats.insert(address, Seat { function, parent: Some(parent), bars: Vec::new() });
        self.refresh(address);
    }

    /// Takes away the function named `address`: it decodes nothing any more.
    pub fn remove(&mut self, address: Address) {
        if let Some(seat) = self.seats.remove(&address) {
            self.forget(&seat.bars, &seat.function);
        }
    }

    /// Returns all functions, in no particular order.
    pub fn functions(&self) -> Vec<Arc<Mutex<dyn PciFunction>>> {
        self.seats.values().map(|seat| Arc::clone(&seat.function)).collect()
    }

    /// Reads configuration space through ECAM at `offset` from its base.
    pub fn read_ecam(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let (address, register) = ecam(offset);
        if let Some((_, function)) = self.find(address) {
            let mut function = lock(&function);
            for (at, piece) in pieces_mut(u64::from(register), data, CONFIG_STEP) {
                if let Some(at) = config_register(at) {
                    function.read_config(at, piece);
                }
            }
        }
    }

    /// Writes configuration space through ECAM at `offset` from its base.
    pub fn write_ecam(&mut self, offset: u64, data: &[u8]) {
        let (address, register) = ecam(offset);
        if let Some((seat, function)) = self.find(address) {
            for (at, piece) in pieces(u64::from(register), data, CONFIG_STEP) {
                if let Some(at) = config_register(at) {
                    lock(&function).write_config(at, piece);
                }
            }
            self.refresh(seat);
            if lock(&function).took_bus_reset() {
                self.reset_below(seat);
            }
        }
    }

    /// Reads ports 0xcf8..=0xcff; `port` is relative to 0xcf8.
    pub fn read_mechanism1(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if port < 4 {
            let bytes = self.selected.to_le_bytes();
            for (index, byte) in data.iter_mut().enumerate() {
                *byte = bytes.get(usize::from(port) + index).copied().unwrap_or(0xff);
            }
        } else if let Some(offset) = self.mechanism1_offset(port) {
            self.read_ecam(offset, data);
        }
    }

    /// Writes ports 0xcf8..=0xcff; `port` is relative to 0xcf8.
    pub fn write_mechanism1(&mut self, port: u16, data: &[u8]) {
        if port == 0 && data.len() == 4 {
            self.selected = u32::from_le_bytes([data[0], data[1], data[2], data[3]]);
        } else if port >= 4
            && let Some(offset) = self.mechanism1_offset(port)
        {
            self.write_ecam(offset, data);
        }
    }

    /// Reads guest memory that a BAR decodes. Returns whether one does.
    pub fn read_memory(&self, address: u64, data: &mut [u8]) -> Answered {
        access(&self.memory, address, data.len(), |function, bar, offset| {
            for (at, piece) in pieces_mut(offset, data, BAR_STEP) {
                function.read_bar(bar, at, piece);
            }
        })
    }

    /// Writes guest memory that a BAR decodes. Returns whether one does.
    pub fn write_memory(&self, address: u64, data: &[u8]) -> Answered {
        access(&self.memory, address, data.len(), |function, bar, offset| {
            for (at, piece) in pieces(offset, data, BAR_STEP) {
                function.write_bar(bar, at, piece);
            }
        })
    }

    /// Reads ports that a BAR decodes. Returns whether one does.
    pub fn read_port(&self, port: u16, data: &mut [u8]) -> Answered {
        access(&self.ports, u64::from(port), data.len(), |function, bar, offset| {
            for (at, piece) in pieces_mut(offset, data, BAR_STEP) {
                function.read_bar(bar, at, piece);
            }
        })
    }

    /// Writes ports that a BAR decodes. Returns whether one does.
    pub fn write_port(&self, port: u16, data: &[u8]) -> Answered {
        access(&self.ports, u64::from(port), data.len(), |function, bar, offset| {
            for (at, piece) in pieces(offset, data, BAR_STEP) {
                function.write_bar(bar, at, piece);
            }
        })
    }

    fn mechanism1_offset(&self, port: u16) -> Option<u64> {
        let enabled = self.selected & 1 << 31 != 0;
        let function = u64::from(self.selected >> 8 & 0xffff);
        let register = u64::from(self.selected & 0xfc) + u64::from(port - 4);
        enabled.then_some(function << 12 | register)
    }

    /// Resets all functions behind the bridge named `bridge`.
    fn reset_below(&mut self, bridge: Address) {
        let mut bridges = vec![bridge];
        for _ in 0..MAX_DEPTH {
            let on_bus = |seat: &Seat| seat.parent.is_some_and(|above| bridges.contains(&above));
            let below: Vec<_> = self
                .seats
                .iter()
                .filter(|(_, seat)| on_bus(seat))
                .map(|(name, seat)| (*name, Arc::clone(&seat.function)))
                .collect();
            for (name, function) in &below {
                lock(function).bus_reset();
                self.refresh(*name);
            }
            bridges = below.into_iter().map(|(name, _)| name).collect();
        }
    }

    /// Finds the function that answers to `address` with the bridges as the guest set them: from
    /// the root complex down, each bridge takes the buses between its secondary and subordinate.
    fn find(&self, address: Address) -> Option<(Address, Shared)> {
        let roots = self.seats.iter().filter(|(_, seat)| seat.parent.is_none());
        let root = roots.map(|(name, _)| name.bus).rfind(|bus| *bus <= address.bus)?;
        if root == address.bus {
            let seat = self.seats.get(&address).filter(|seat| seat.parent.is_none())?;
            return Some((address, Arc::clone(&seat.function)));
        }
        let mut above = self.bridge_to(address.bus, None, root)?;
        for _ in 0..MAX_DEPTH {
            let (bridge, secondary) = above;
            if secondary == address.bus {
                return self.seats.iter().find_map(|(name, seat)| {
                    let here = seat.parent == Some(bridge)
                        && (name.device, name.function) == (address.device, address.function);
                    here.then(|| (*name, Arc::clone(&seat.function)))
                });
            }
            above = self.bridge_to(address.bus, Some(bridge), 0)?;
        }
        None
    }

    /// Returns the bridge below `parent` (or on the root complex's bus `root`) that takes requests
    /// for `bus`, and its secondary bus.
    fn bridge_to(&self, bus: u8, parent: Option<Address>, root: u8) -> Option<(Address, u8)> {
        self.seats.iter().find_map(|(name, seat)| {
            if seat.parent != parent || parent.is_none() && name.bus != root {
                return None;
            }
            let (secondary, subordinate) = lock(&seat.function).buses()?;
            (secondary..=subordinate).contains(&bus).then_some((*name, secondary))
        })
    }

    /// Takes note of a function's BARs after its registers were written.
    fn refresh(&mut self, address: Address) {
        let Some(seat) = self.seats.get_mut(&address) else { return };
        let function = Arc::clone(&seat.function);
        let bars = lock(&function).bars();
        if bars == seat.bars {
            return;
        }
        let old = std::mem::replace(&mut seat.bars, bars.clone());
        self.forget(&old, &function);
        for bar in bars.iter().filter(|bar| bar.decoding && bar.address != 0) {
            let table = if bar.kind == BarKind::Io { &mut self.ports } else { &mut self.memory };
            let decoded =
                Decoded { size: bar.size, bar: bar.index, function: Arc::clone(&function) };
            table.insert(bar.address, decoded);
        }
        lock(&function).bars_changed();
    }

    /// Takes decoded BARs of a function out of the tables.
    fn forget(&mut self, bars: &[Bar], function: &Shared) {
        for bar in bars.iter().filter(|bar| bar.decoding) {
            let table = if bar.kind == BarKind::Io { &mut self.ports } else { &mut self.memory };
            let ours = table.get(&bar.address).is_some_and(|d| Arc::ptr_eq(&d.function, function));
            if ours {
                table.remove(&bar.address);
            }
        }
    }
}

/// Whether somebody decoded an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    /// A BAR did.
    Yes,
    /// Nobody did.
    No,
}

fn access(
    table: &BTreeMap<u64, Decoded>,
    address: u64,
    length: usize,
    act: impl FnOnce(&mut dyn PciFunction, u8, u64),
) -> Answered {
    let Some((base, decoded)) = table.range(..=address).next_back() else { return Answered::No };
    let offset = address - base;
    let inside = offset.checked_add(length as u64).is_some_and(|end| end <= decoded.size);
    if !inside {
        return Answered::No;
    }
    act(&mut *lock(&decoded.function), decoded.bar, offset);
    Answered::Yes
}

/// Largest access that a function sees in configuration space.
const CONFIG_STEP: usize = 4;
/// Largest access that a function sees in a BAR.
const BAR_STEP: usize = 8;

/// Returns the register of a piece, if it lies in the function's 4 KiB.
fn config_register(at: u64) -> Option<u16> {
    u16::try_from(at).ok().filter(|at| usize::from(*at) < super::config::SIZE)
}

/// Returns how many bytes the first piece of `left` bytes at `at` has: a power of two, at most
/// `step`, aligned to itself. Guests may ask for any length anywhere; functions see only these.
fn piece_length(at: u64, left: usize, step: usize) -> usize {
    let mut length = step;
    while length > left || !at.is_multiple_of(length as u64) {
        length /= 2;
    }
    length
}

fn pieces(mut at: u64, mut data: &[u8], step: usize) -> Vec<(u64, &[u8])> {
    let mut pieces = Vec::with_capacity(1);
    while !data.is_empty() {
        let length = piece_length(at, data.len(), step);
        let (piece, rest) = data.split_at(length);
        pieces.push((at, piece));
        (at, data) = (at.wrapping_add(length as u64), rest);
    }
    pieces
}

fn pieces_mut(mut at: u64, mut data: &mut [u8], step: usize) -> Vec<(u64, &mut [u8])> {
    let mut pieces = Vec::with_capacity(1);
    while !data.is_empty() {
        let length = piece_length(at, data.len(), step);
        let (piece, rest) = data.split_at_mut(length);
        pieces.push((at, piece));
        (at, data) = (at.wrapping_add(length as u64), rest);
    }
    pieces
}

fn ecam(offset: u64) -> (Address, u16) {
    let byte = |shift: u32, mask: u64| u8::try_from(offset >> shift & mask).unwrap_or(u8::MAX);
    let address = Address { bus: byte(20, 0xff), device: byte(15, 0x1f), function: byte(12, 7) };
    (address, u16::try_from(offset & 0xfff).unwrap_or(0xfff))
}

fn lock(function: &Shared) -> std::sync::MutexGuard<'_, dyn PciFunction + 'static> {
    function.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
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
    }

    impl PciFunction for Plain {
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
        Plain { config, cell: 9, resets: 0 }
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
        let resets =
            || [&below, &beside].map(|function| function.lock().expect("one thread").resets);
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
}
