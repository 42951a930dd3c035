//! The bus: finds the function for a configuration access, and the BAR for a memory or port
//! access. What nobody answers reads as ones, and writes to it are lost.
//! Source: PCI Express Base Specification 6.0 §7.2.2 (ECAM); PCI Local Bus 3.0 §3.2.2.3.2 (0xcf8).

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    config,
    function::{Bar, BarKind, PciFunction},
};

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
    /// Memory BARs where they decoded last, by index: something of them may be there still.
    left: BTreeMap<u8, Bar>,
}

impl Seat {
    fn new(function: Shared, parent: Option<Address>) -> Self {
        Self { function, parent, bars: Vec::new(), left: BTreeMap::new() }
    }
}

/// Offset of the command register.
const COMMAND: u16 = 0x04;

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
        self.seats.insert(address, Seat::new(function, None));
        self.refresh(address);
    }

    /// Seats a function behind the bridge at `parent`. Its `address.bus` is only its name here: the
    /// guest finds it under the secondary bus number it gave the bridge.
    pub fn add_behind(&mut self, parent: Address, address: Address, function: Shared) {
        self.seats.insert(address, Seat::new(function, Some(parent)));
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
            if lock(&function).took_link_down() {
                self.below(seat, stop_mastering);
            }
            if lock(&function).took_bus_reset() {
                self.below(seat, |function| function.bus_reset());
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

    /// Does something to all functions behind the bridge named `bridge`.
    fn below(&mut self, bridge: Address, act: impl Fn(&mut dyn PciFunction)) {
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
                act(&mut *lock(function));
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
            self.decode(bar, &function);
        }
        let memory = |bars: &[Bar]| -> Vec<Bar> {
            let decodes = |bar: &&Bar| bar.decoding && bar.address != 0 && bar.kind != BarKind::Io;
            bars.iter().filter(decodes).copied().collect()
        };
        let (gone, come) = (memory(&old), memory(&bars));
        self.make_room(address, &come);
        if let Some(seat) = self.seats.get_mut(&address) {
            seat.left.extend(come.into_iter().map(|bar| (bar.index, bar)));
        }
        lock(&function).bars_changed();
        self.let_others_in(address, &gone);
    }

    /// Has what other functions left where they decode no longer go from where `come` decode.
    fn make_room(&mut self, newcomer: Address, come: &[Bar]) {
        for (_, seat) in self.seats.iter_mut().filter(|(name, _)| **name != newcomer) {
            let decodes = |left: &Bar| seat.bars.iter().any(|bar| bar == left);
            let in_the_way =
                |left: &Bar| !decodes(left) && come.iter().any(|bar| overlap(bar, left));
            let going: Vec<u8> =
                seat.left.values().filter(|left| in_the_way(left)).map(|left| left.index).collect();
            for index in going {
                seat.left.remove(&index);
                lock(&seat.function).make_room(index);
            }
        }
    }

    /// Functions that decode where `gone` did have the place to themselves now.
    fn let_others_in(&self, leaver: Address, gone: &[Bar]) {
        for (_, seat) in self.seats.iter().filter(|(name, _)| **name != leaver) {
            let waits = |bar: &Bar| bar.decoding && gone.iter().any(|gone| overlap(bar, gone));
            if seat.bars.iter().any(waits) {
                lock(&seat.function).bars_changed();
            }
        }
    }

    fn table(&mut self, kind: BarKind) -> &mut BTreeMap<u64, Decoded> {
        if kind == BarKind::Io { &mut self.ports } else { &mut self.memory }
    }

    fn decode(&mut self, bar: &Bar, function: &Shared) {
        let function = Arc::clone(function);
        let decoded = Decoded { size: bar.size, bar: bar.index, function };
        self.table(bar.kind).insert(bar.address, decoded);
    }

    /// Takes decoded BARs of a function out of the tables. Another that decodes there too is reached again.
    fn forget(&mut self, bars: &[Bar], function: &Shared) {
        for gone in bars.iter().filter(|bar| bar.decoding) {
            let there = self.table(gone.kind).get(&gone.address);
            if !there.is_some_and(|there| Arc::ptr_eq(&there.function, function)) {
                continue;
            }
            self.table(gone.kind).remove(&gone.address);
            let same = |bar: &&Bar| {
                let same_space = (bar.kind == BarKind::Io) == (gone.kind == BarKind::Io);
                bar.decoding && bar.address == gone.address && same_space
            };
            let other = self.seats.values().find_map(|seat| {
                seat.bars.iter().find(same).map(|bar| (*bar, Arc::clone(&seat.function)))
            });
            if let Some((bar, function)) = other {
                self.decode(&bar, &function);
            }
        }
    }
}

/// Has a function send no requests of its own any more.
fn stop_mastering(function: &mut dyn PciFunction) {
    let mut command = [0; 2];
    function.read_config(COMMAND, &mut command);
    let command = u16::from_le_bytes(command) & !config::COMMAND_MASTER;
    function.write_config(COMMAND, &command.to_le_bytes());
}

/// Whether two BARs have an address in common.
fn overlap(one: &Bar, other: &Bar) -> bool {
    let last = |bar: &Bar| bar.address.saturating_add(bar.size - 1);
    one.address <= last(other) && other.address <= last(one)
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
#[path = "bus_tests.rs"]
mod tests;
