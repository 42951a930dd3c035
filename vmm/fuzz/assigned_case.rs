//! Runs one fuzz case of a whole passed-through device: hostile registers, and a hostile guest's
//! accesses to them.
//!
//! | Bytes | Meaning                                                                          |
//! |-------|----------------------------------------------------------------------------------|
//! | 0     | bit 0: 4096 bytes of configuration space, else 256; 1: MSI-X cannot grow;        |
//! |       | 2: NVIDIA's, in a clique; 3: resets fail; 4: the table starts a page;            |
//! |       | 6:5 the table's BAR: 0, 0, 2, 4                                                  |
//! | 1..5  | sizes of BARs 0, 2, 3 (ports) and 4, as exponents; 0 for none but for BAR 0      |
//! | 5     | two bits each for BARs 0, 2, 4: what of them can be mapped                       |
//! | 6     | bits 6:0 MSI-X table's vectors, minus 1                                          |
//! | 7     | MSI-X vectors of the host, 0 for no MSI-X                                        |
//! | 8     | bits 2:0 MSI vectors, as an exponent; 3: no MSI; 4: no pin                       |
//! | 9     | bits 6:0 vectors that the host has for the device                                |
//! | 10    | where in its BAR the table is, in units of 16 or pages                           |
//! | 11    | bits 3:0 how many bytes of configuration space are otherwise                     |
//! | then  | those bytes, 3 each: offset, little endian; value                                |
//! | then  | steps of 8 bytes, as [`Bench::step`] has it                                      |

#[path = "assigned_device.rs"]
mod fake;

use std::{ops::Range, sync::Arc};

use fake::{
    ADVANCED_FEATURES, COMMAND, DECODING, ENTRY, EXPRESS, HEADER, Hostile, MSI, MSIX, Memory, PAGE,
    PATCH, POWER, Supply, VENDOR, lock, pattern,
};
use types::node::Bdf;
use vmm::{
    irq::{InterruptSource, MsiMessage, PinRoute},
    pci::function::{Bar, BarKind, PciFunction},
    vfio::{
        assign::{Function, Host},
        capabilities,
        device::{Device, IrqKind},
        neighbours::Neighbours,
        reset::{Confinement, Resetter},
        rom,
    },
};

const STEP: usize = 8;
/// Most steps of a case.
const STEPS: usize = 256;
/// How long capabilities are as far as the rules change them.
const LENGTHS: [(u8, u8); 6] =
    [(POWER, 8), (MSI, 24), (VENDOR, 8), (EXPRESS, 12), (MSIX, 12), (ADVANCED_FEATURES, 8)];

/// Decodes and runs a case. Panics when the guest reaches what it must not, or misses what it has.
pub(crate) fn run(bytes: &[u8]) {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return };
    let patches = (usize::from(header[11] & 0xf) * PATCH).min(rest.len() / PATCH * PATCH);
    let (patches, steps) = rest.split_at(patches);
    let device = Arc::new(Hostile::new(header, patches));
    let Some(mut bench) = Bench::new(device, header) else { return };
    bench.check();
    for step in steps.chunks_exact(STEP).take(STEPS) {
        let before = bench.function.bars();
        bench.step(step);
        let bars = bench.function.bars();
        if bars != before {
            bench.function.bars_changed();
        }
        bench.check();
    }
}

/// What the guest finds in the device's capabilities at first.
#[derive(Default)]
struct Found {
    /// No two of them overlap, and each is there once: what the guest reads is what counts.
    plain: bool,
    msi: Option<u16>,
    msix: Option<u16>,
    /// Bytes and the bit in each that resets the function.
    resets: Vec<(u16, u8)>,
}

impl Found {
    fn of(config: &[u8]) -> Self {
        let mut all = capabilities::walk(config);
        all.sort_unstable_by_key(|one| one.offset);
        let mut found = Self { plain: true, ..Self::default() };
        for (index, one) in all.iter().enumerate() {
            let length =
                LENGTHS.iter().find(|(id, _)| *id == one.id).map_or(4, |(_, length)| *length);
            let end = u16::from(one.offset) + u16::from(length);
            let next = all.get(index + 1).map_or(256, |next| next.offset.into());
            let twice = all[index + 1..].iter().any(|other| other.id == one.id);
            found.plain &= end <= next && !twice;
            let at = u16::from(one.offset);
            let byte = |offset: u16| config.get(usize::from(at + offset)).copied().unwrap_or(0);
            match one.id {
                MSI => found.msi = Some(at),
                MSIX => found.msix = Some(at),
                EXPRESS if byte(7) & 0x10 != 0 => found.resets.push((at + 9, 0x80)),
                ADVANCED_FEATURES if byte(3) & 2 != 0 => found.resets.push((at + 4, 1)),
                _ => {}
            }
        }
        found
    }
}

struct Bench {
    device: Arc<Hostile>,
    supply: Arc<Supply>,
    memory: Memory,
    function: Function,
    found: Found,
    pin: bool,
    /// What of its command register has to stay set.
    decoding: u8,
    /// Where the table is, and what it has to read as.
    table: Option<(u8, Range<u64>)>,
    entries: Vec<u8>,
}

impl Bench {
    /// Assigns the device, unless it is refused.
    fn new(device: Arc<Hostile>, header: &[u8; HEADER]) -> Option<Self> {
        let address: Bdf = "0000:01:00.0".parse().expect("an address");
        let supply = Arc::new(Supply::new(usize::from(header[9] & 0x7f)));
        let memory = Memory::default();
        let on_bus: Arc<dyn Device> = Arc::<Hostile>::clone(&device);
        let resetter = Arc::clone(&on_bus);
        let none = Neighbours::default();
        let resetter = Resetter::start(address, resetter, &none, Confinement::Open);
        let interrupts: Arc<dyn InterruptSource> = Arc::<Supply>::clone(&supply);
        let clique = (header[0] & 4 != 0).then_some(3);
        let (slots, places) = (Arc::new(memory.clone()), Arc::default());
        let route = PinRoute { slot: 2, turn: 1 };
        let host = Host { interrupts, slots, places, route, clique };
        let opened = Function::open(address, on_bus, host, Arc::new(resetter.expect("a thread")));
        let assigned = match opened {
            Ok(assigned) => assigned,
            // What is wrong is told in words.
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return None;
            }
        };
        let function = assigned.function;
        let (found, entries) = (Found::default(), Vec::new());
        let (pin, decoding, table) = (false, 0, None);
        let mut bench =
            Self { device, supply, memory, function, found, pin, decoding, table, entries };
        bench.look();
        Some(bench)
    }

    /// Takes note of what the guest finds.
    fn look(&mut self) {
        let mut config = vec![0; 256];
        for (at, four) in (0..).step_by(4).zip(config.chunks_exact_mut(4)) {
            self.function.read_config(at, four);
        }
        self.found = Found::of(&config);
        self.pin = (1..=4).contains(&config[0x3d]);
        for bar in self.function.bars() {
            self.decoding |= match bar.kind {
                _ if bar.index == rom::INDEX => 0,
                BarKind::Io => 1,
                BarKind::Memory32 | BarKind::Memory64 | BarKind::Memory64Prefetchable => 2,
            };
        }
        let Some(at) = self.found.msix.map(usize::from).filter(|_| self.found.plain) else {
            return;
        };
        let word = |at: usize| u16::from_le_bytes([config[at], config[at + 1]]);
        let vectors = u64::from(word(at + 2) & 0x7ff) + 1;
        let place = u64::from(word(at + 4)) | u64::from(word(at + 6)) << 16;
        let (bar, start) = (config[at + 4] & 7, place & !7);
        let table = start..start + ENTRY * vectors;
        let of = |one: &&Bar| one.index == bar;
        let size = self.function.bars().iter().find(of).expect("the table's BAR is there").size;
        assert!(table.end <= size, "the table is cut off");
        let stays = lock(&self.device.state).config[at + 4..at + 8] == config[at + 4..at + 8];
        let own = self.device.sizes[usize::from(bar)];
        assert!(stays || start >= own, "a moved table hides registers");
        self.table = Some((bar, table.clone()));
        lock(&self.device.state).table = self.table.clone();
        self.entries = vec![0; usize::try_from(table.end - table.start).expect("small")];
        self.forget_table();
    }

    /// All entries are masked, as after power-on.
    fn forget_table(&mut self) {
        self.entries.fill(0);
        self.entries.iter_mut().skip(12).step_by(16).for_each(|control| *control = 1);
    }

    /// Takes a step.
    ///
    /// | Byte 0 | Meaning                                                                    |
    /// |--------|----------------------------------------------------------------------------|
    /// | 0, 1   | read, write configuration space: length by byte 1, offset 2..4, data 4..8  |
    /// | 2      | write a capability: which by byte 1, where in it by byte 2, data 4..8      |
    /// | 3, 4   | read, write a BAR: which and length by byte 1, offset 2..6, data 4..8      |
    /// | 5, 6   | write, read the MSI-X table: length by byte 1, offset 2..4, data 4..8      |
    /// | 7      | MSI-X control: byte 1                                                      |
    /// | 8      | MSI: control byte 1, masks bytes 2..4, address and data from 4..8          |
    /// | 9      | place a BAR: which by byte 1, at 4..8 in units of 4096, and let it decode  |
    /// | 10     | command register: bytes 1 and 2                                            |
    /// | 11     | the device changes a byte of its own: offset 2..4, value byte 4            |
    /// | 12     | reset by the guest's register: which by byte 1                             |
    /// | 13     | power-on, with bit 0 of byte 1 a reset of the bus                          |
    /// | 14     | calls fail: as many as bits 2:0 of byte 1 say, after as many as bits 5:3   |
    /// | 15     | unmask a vector, bytes 2..4, with the message in 4..8                      |
    fn step(&mut self, step: &[u8]) {
        let length = 1usize << (step[1] % 4);
        let offset = u16::from_le_bytes([step[2], step[3]]);
        let data = [step[4], step[5], step[6], step[7], step[4], step[5], step[6], step[7]];
        let far = u64::from(u32::from_le_bytes([step[2], step[3], step[4], step[5]]));
        let bars = self.function.bars();
        let chosen = bars.get(usize::from(step[1] >> 2) % bars.len().max(1)).copied();
        match step[0] & 0xf {
            0 => self.read_config(offset, length.min(4)),
            1 => self.write_config(offset, &data[..length.min(4)]),
            2 => {
                let base = [0x40, 0x50, 0x68, 0x70, 0x80, 0xc0, 0x00, 0x10];
                let at = base[usize::from(step[1] >> 2) % 8] + u16::from(step[2] % 0x20);
                self.write_config(at, &data[..length.min(4)]);
            }
            3 | 4 => {
                let Some(bar) = chosen else { return };
                let length = if bar.kind == BarKind::Io { length.min(4) } else { length };
                let at = far % bar.size / length as u64 * length as u64;
                match step[0] & 0xf {
                    3 => self.read_bar(&bar, at, length),
                    _ => self.write_bar(bar.index, at, &data[..length]),
                }
            }
            5 | 6 | 15 if self.table.is_some() => self.reach_table(step, offset.into(), length),
            7 => self.write_config(self.found.msix.unwrap_or(0x40) + 2, &[0xff, step[1]]),
            8 => self.program_msi(step),
            9 => {
                let Some(bar) = chosen else { return };
                self.place(
                    &bar,
                    u64::from(u32::from_le_bytes([step[4], step[5], step[6], step[7]])),
                );
            }
            10 => self.write_config(0x04, &step[1..3]),
            11 => self.change(usize::from(offset), step[4]),
            12 => self.reset_function(usize::from(step[1])),
            13 if step[1] & 1 == 0 => {
                self.function.reset();
                self.was_reset();
            }
            13 => {
                self.function.bus_reset();
                if self.found.plain && !self.found.resets.is_empty() {
                    self.was_reset();
                } else {
                    self.read_back();
                }
            }
            14 => {
                let mut state = lock(&self.device.state);
                state.failures = u32::from(step[1] & 7);
                state.spared = u32::from(step[1] >> 3 & 7);
            }
            _ => {}
        }
    }

    /// Writes an entry's bytes, reads them, or unmasks it with a message.
    fn reach_table(&mut self, step: &[u8], offset: u64, length: usize) {
        let Some((bar, table)) = self.table.clone() else { return };
        let at = offset % (table.end - table.start);
        let (entry, aligned) = (at / ENTRY * ENTRY, at / length as u64 * length as u64);
        match step[0] & 0xf {
            5 => self.write_table(aligned, &[&step[4..], &step[4..]].concat()[..length]),
            6 => {
                let bars = self.function.bars();
                let bar = bars.iter().find(|one| one.index == bar).expect("the table's BAR");
                self.read_bar(bar, table.start + aligned, length);
            }
            _ => {
                self.write_table(entry, &[step[4], 0, 0xe0, 0xfe]);
                self.write_table(entry + 8, &step[4..]);
                self.write_table(entry + 12, &[0; 4]);
            }
        }
    }

    fn read_config(&mut self, offset: u16, length: usize) {
        let offset = usize::from(offset) % 4096 / length * length;
        let mut data = [0; 4];
        self.function.read_config(u16::try_from(offset).expect("small"), &mut data[..length]);
        let behind = offset >= lock(&self.device.state).config.len();
        assert!(!behind || data[..length].iter().all(|byte| *byte == 0xff), "there is nothing");
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        let length = u16::try_from(data.len()).expect("small");
        let offset = offset % 4096 / length * length;
        let resets = self.found.resets.iter().any(|(at, bit)| {
            let byte = at.checked_sub(offset).and_then(|at| data.get(usize::from(at)));
            byte.is_some_and(|byte| byte & bit != 0)
        });
        self.function.write_config(offset, data);
        match self.found.plain {
            true if resets => self.was_reset(),
            true => {}
            false => self.read_back(),
        }
    }

    /// A guest that programs MSI as drivers do: address, data and masks, then control.
    fn program_msi(&mut self, step: &[u8]) {
        let at = self.found.msi.unwrap_or(0x50);
        self.write_config(at + 4, &[0, step[4], 0xe0, 0xfe]);
        self.write_config(at + 8, &[step[5], 0, 0, 0]);
        self.write_config(at + 12, &[step[6], step[7]]);
        self.write_config(at + 16, &[step[2], step[3], 0, 0]);
        self.write_config(at + 2, &[step[1], 0]);
    }

    /// A guest that places a BAR while nothing decodes, and then lets everything decode.
    fn place(&mut self, bar: &Bar, page: u64) {
        let at = if bar.index == rom::INDEX { 0x30 } else { 0x10 + 4 * u16::from(bar.index) };
        let value = (page * PAGE).to_le_bytes();
        self.write_config(0x04, &[0, 0]);
        self.function.bars_changed();
        self.write_config(at, &value[..4]);
        if matches!(bar.kind, BarKind::Memory64 | BarKind::Memory64Prefetchable) {
            self.write_config(at + 4, &value[4..]);
        }
        self.write_config(0x04, &[0x07, 0]);
        let bars = self.function.bars();
        assert!(bars.iter().all(|bar| bar.index == rom::INDEX || bar.decoding));
        self.function.bars_changed();
    }

    /// The device is not what it was. It stays reachable: the kernel decides on its decoding.
    fn change(&mut self, offset: usize, value: u8) {
        let mut state = lock(&self.device.state);
        let at = offset % state.config.len();
        if at != COMMAND {
            state.config[at] = value;
        }
    }

    fn reset_function(&mut self, which: usize) {
        let resets = &self.found.resets;
        if resets.is_empty() || !self.found.plain {
            return;
        }
        let (at, bit) = resets[which % resets.len()];
        lock(&self.device.state).config[COMMAND] &= !DECODING;
        self.write_config(at, &[bit]);
    }

    /// What the function was told is forgotten.
    fn was_reset(&mut self) {
        self.forget_table();
        assert!(lock(&self.memory.0).is_empty(), "BARs are mapped after a reset");
        assert!(self.function.bars().iter().all(|bar| !bar.decoding), "BARs decode after a reset");
        let on = lock(&self.device.state).on;
        assert!(matches!(on, None | Some(IrqKind::Intx)), "{on:?} is on after a reset");
        let routes = self.supply.routes();
        assert!(routes.values().all(Option::is_none), "a vector fires after a reset");
    }

    /// Takes the table as it is: who can say what a hostile list of capabilities makes of a write?
    fn read_back(&mut self) {
        let Some((bar, table)) = self.table.clone() else { return };
        for (at, eight) in (table.start..).step_by(8).zip(self.entries.chunks_exact_mut(8)) {
            self.function.read_bar(bar, at, eight);
        }
    }

    fn read_bar(&mut self, bar: &Bar, offset: u64, length: usize) {
        let mut data = [0x5a; 8];
        self.function.read_bar(bar.index, offset, &mut data[..length]);
        let size = match bar.index {
            rom::INDEX => self.device.rom,
            index => self.device.sizes[usize::from(index)],
        };
        let table = self.table.as_ref().filter(|(of, _)| *of == bar.index);
        for (at, value) in (offset..).zip(&data[..length]) {
            let expected = match table {
                Some((_, table)) if table.contains(&at) => {
                    self.entries[usize::try_from(at - table.start).expect("small")]
                }
                _ if at < size => pattern(at),
                _ if bar.index == rom::INDEX => 0xff,
                _ => 0,
            };
            // Without knowing where the table is, what is there cannot be told apart.
            let known = self.found.plain || bar.index == rom::INDEX;
            assert!(!known || *value == expected, "{value:#x} at {at:#x} of {bar:?}");
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        match self.table.clone() {
            Some((of, table)) if of == bar && table.contains(&offset) => {
                self.write_table(offset - table.start, data);
            }
            _ => self.function.write_bar(bar, offset, data),
        }
    }

    /// Writes the table, whose bits are all kept but the reserved ones.
    fn write_table(&mut self, at: u64, data: &[u8]) {
        let Some((bar, table)) = self.table.clone() else { return };
        self.function.write_bar(bar, table.start + at, data);
        let start = usize::try_from(at).expect("small");
        for (at, value) in (start..).zip(data) {
            let kept = match at % 16 {
                0 => 0xfc,
                12 => 0x01,
                13..16 => 0,
                _ => 0xff,
            };
            self.entries[at] = value & kept;
        }
        let mut read = [0; 8];
        self.function.read_bar(bar, table.start + at, &mut read[..data.len()]);
        assert_eq!(read[..data.len()], self.entries[start..start + data.len()], "a table's entry");
    }

    fn check(&mut self) {
        self.check_slots();
        let (kept, failed) = {
            let state = lock(&self.device.state);
            (state.config[COMMAND] & self.decoding == self.decoding, state.failed)
        };
        assert!(kept || failed, "the device does not decode");
        self.check_armed();
        if self.found.plain && !failed && !self.supply.ran_out() {
            self.check_interrupts();
        }
    }

    /// The guest has no page of the table, nothing behind a BAR, and all where it expects it.
    fn check_slots(&self) {
        let bars = self.function.bars();
        for placed in lock(&self.memory.0).iter() {
            let bar = bars.iter().find(|bar| bar.index == placed.bar).expect("a BAR");
            let (start, end) = (placed.area.offset, placed.area.offset + placed.area.size);
            assert!(start.is_multiple_of(PAGE) && end.is_multiple_of(PAGE) && end <= bar.size);
            assert!(bar.kind != BarKind::Io && bar.index != rom::INDEX, "{placed:?}");
            let there = placed.guest == bar.address.wrapping_add(start);
            assert!(there || !bar.decoding, "{placed:?} is not where {bar:?} is");
            if let Some((_, table)) = self.table.as_ref().filter(|(of, _)| *of == bar.index) {
                let pages = table.start / PAGE * PAGE..table.end.next_multiple_of(PAGE);
                assert!(end <= pages.start || start >= pages.end, "{placed:?} has {table:?}");
            }
        }
    }

    /// Whatever fails, there are not more vectors than the table has, and those are live ones.
    fn check_armed(&self) {
        let state = lock(&self.device.state);
        let routes = self.supply.routes();
        if state.on == Some(IrqKind::Msix) && self.found.plain {
            assert!(state.armed.len() as u64 * ENTRY <= self.entries.len() as u64, "no such entry");
        }
        for fd in state.armed.iter().flatten() {
            let live = state.on == Some(IrqKind::Intx) || routes.contains_key(fd);
            assert!(live, "a vector that is gone is armed");
        }
    }

    /// The device interrupts the way the guest has chosen, and each vector goes where it says.
    fn check_interrupts(&mut self) {
        let mut word = |at: u16| {
            let mut data = [0; 4];
            self.function.read_config(at, &mut data);
            u32::from_le_bytes(data)
        };
        let msix = self.found.msix.map_or(0, |at| word(at) >> 16);
        if let (Some(at), Some((bar, table))) = (self.found.msix, &self.table) {
            let vectors = u64::from(msix & 0x7ff) + 1;
            assert_eq!(vectors * ENTRY, table.end - table.start, "the table's size has changed");
            let place = u64::from(word(at + 4));
            assert_eq!(place, table.start | u64::from(*bar), "the table's place has changed");
        }
        let msi = self.found.msi.map_or([0; 5], |at| [0, 4, 8, 12, 16].map(|more| word(at + more)));
        let control = msi[0] >> 16;
        let state = lock(&self.device.state);
        let expected = match (msix & 0x8000 != 0, control & 1 != 0, self.pin) {
            (true, ..) => Some(IrqKind::Msix),
            (false, true, _) => Some(IrqKind::Msi),
            (false, false, true) => Some(IrqKind::Intx),
            (false, false, false) => None,
        };
        assert_eq!(state.on, expected);
        let routes = self.supply.routes();
        let route = |index: usize| {
            let fd = state.armed.get(index).copied().flatten();
            fd.and_then(|fd| routes.get(&fd).copied().flatten())
        };
        if expected == Some(IrqKind::Msix) {
            let host = self.device.vectors[2] as usize;
            for (index, entry) in self.entries.chunks_exact(16).enumerate().take(host) {
                let address = u64::from_le_bytes(entry[..8].try_into().expect("eight bytes"));
                let data = u32::from_le_bytes(entry[8..12].try_into().expect("four bytes"));
                let open = msix & 0x4000 == 0 && entry[12] & 1 == 0;
                let message = open.then_some(MsiMessage { address, data });
                assert_eq!(route(index), message, "vector {index}");
            }
        } else if expected == Some(IrqKind::Msi) {
            let (wide, maskable) = (control & 0x80 != 0, control & 0x100 != 0);
            let [_, low, high, data, masks] =
                if wide { msi } else { [0, msi[1], 0, msi[2], msi[3]] };
            let programmed = 1 << (control >> 4 & 7).min(5);
            let vectors = self.device.vectors[1].min(programmed);
            assert_eq!(state.armed.len(), vectors as usize, "vectors of MSI");
            for index in 0..vectors {
                let address = u64::from(high) << 32 | u64::from(low);
                let masked = maskable && masks & 1 << index != 0;
                let data = data & 0xffff & !(programmed - 1) | index;
                let message = MsiMessage { address, data };
                assert_eq!(route(index as usize), (!masked).then_some(message), "vector {index}");
            }
        }
    }
}
