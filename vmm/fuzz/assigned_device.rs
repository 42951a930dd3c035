//! The fake device of the case of a whole passed-through device, and the host that it is on. Both
//! hold their callers to what the kernel and the other rules of `vfio` ask of them.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use vmm::{
    irq::{InterruptLine, InterruptSource, Level, MsiMessage, MsiVector},
    pci::port::AtomicOps,
    sys::memory::{Access, Alignment, Mapping},
    vfio::{
        alarms::Alarm,
        bars::{Part, Slots},
        device::{Area, Device, IrqInfo, IrqKind, Region, RegionInfo, Rung},
    },
};

/// Offset of the command register, and the bits of it by which BARs are decoded.
pub(crate) const COMMAND: usize = 0x04;
pub(crate) const DECODING: u8 = 3;
/// Sizes of a case's header, and of a byte of configuration space in it.
pub(crate) const HEADER: usize = 12;
pub(crate) const PATCH: usize = 3;
/// Bytes of an entry of the MSI-X table.
pub(crate) const ENTRY: u64 = 16;
/// Ids of capabilities.
pub(crate) const POWER: u8 = 0x01;
pub(crate) const MSI: u8 = 0x05;
pub(crate) const VENDOR: u8 = 0x09;
pub(crate) const EXPRESS: u8 = 0x10;
pub(crate) const MSIX: u8 = 0x11;
pub(crate) const ADVANCED_FEATURES: u8 = 0x13;
/// Granularity of mappings.
pub(crate) const PAGE: u64 = 4096;
/// Largest BAR, in bytes.
const MAX_BAR: u64 = 1 << 21;

/// Bytes that the device of most cases has: identity, BARs, capabilities.
const REGISTERS: [(usize, &[u8]); 17] = [
    (0x00, &[0x02, 0x10, 0xa0, 0x74, 0x00, 0x00, 0x10, 0x00, 0, 0, 0x00, 0x12]),
    (0x10, &[0x0c]),
    (0x1c, &[0x01]),
    (0x20, &[0x04]),
    (0x34, &[0x40]),
    (0x3c, &[0xff, 0x01]),
    (0x40, &[MSIX, 0x50]),
    (0x50, &[MSI, 0x68, 0x8a, 0x01]),
    (0x68, &[POWER, 0x70, 0x03, 0x00, 0x08, 0x00]),
    (0x70, &[0x03, 0x80]),
    (0x80, &[EXPRESS, 0xc0, 0x02, 0x00, 0x00, 0x80, 0x00, 0x10]),
    (0x92, &[0x14, 0x10]),
    (0xc0, &[ADVANCED_FEATURES, 0x00, 0x06, 0x03]),
    (0x100, &[0x01, 0x00, 0x01, 0x15]),
    (0x150, &[0x0e, 0x00, 0x01, 0x16]),
    (0x160, &[0x10, 0x00, 0x01, 0x20]),
    (0x200, &[0x03, 0x00, 0x01, 0x00]),
];

/// What changes of the device.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) config: Vec<u8>,
    /// How it interrupts, and the descriptor of each vector that has one.
    pub(crate) on: Option<IrqKind>,
    pub(crate) armed: Vec<Option<RawFd>>,
    /// How many calls succeed before some fail, how many then do, and whether any has.
    pub(crate) spared: u32,
    pub(crate) failures: u32,
    pub(crate) failed: bool,
    /// Where the guest finds the MSI-X table.
    pub(crate) table: Option<(u8, Range<u64>)>,
}

/// A device.
pub(crate) struct Hostile {
    pub(crate) state: Mutex<State>,
    pub(crate) sizes: [u64; 6],
    mappable: [u8; 6],
    pub(crate) rom: u64,
    pub(crate) vectors: [u32; 3],
    growable: bool,
    resettable: bool,
    memory: File,
}

/// What the device reads as at an offset of a BAR or the ROM.
pub(crate) fn pattern(offset: u64) -> u8 {
    offset.to_le_bytes()[0] ^ offset.to_le_bytes()[1] ^ 0xa5
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panicked")
}

impl Hostile {
    /// Makes a device of the case's header and of its bytes of configuration space.
    pub(crate) fn new(header: &[u8; HEADER], patches: &[u8]) -> Self {
        let exponent = |byte: u8, least: u8, choices: u8| 1u64 << (least + byte % choices);
        let optional = |byte, least, choices| match byte {
            0 => 0,
            some => exponent(some, least, choices),
        };
        let mut sizes = [0; 6];
        sizes[0] = exponent(header[1], 12, 10);
        sizes[2] = optional(header[2], 4, 18);
        sizes[3] = optional(header[3], 2, 7);
        sizes[4] = optional(header[4], 4, 18);
        let mappable = [header[5] & 3, 0, header[5] >> 2 & 3, 0, header[5] >> 4 & 3, 0];
        let mut config = vec![0; if header[0] & 1 == 0 { 256 } else { 4096 }];
        for (at, bytes) in REGISTERS {
            if let Some(place) = config.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        }
        if header[0] & 4 != 0 {
            config[..2].copy_from_slice(&[0xde, 0x10]);
            config[0x0a..0x0c].copy_from_slice(&[0x02, 0x03]);
        }
        config[0x42] = header[6] & 0x7f;
        let length = ENTRY * (u64::from(header[6] & 0x7f) + 1);
        let wanted = [0, 0, 2, 4][usize::from(header[0] >> 5 & 3)];
        let holder = if sizes[wanted] >= length { wanted } else { 0 };
        let unit = if header[0] & 16 == 0 { ENTRY } else { PAGE };
        let offset = u64::from(header[10]) % ((sizes[holder] - length) / unit + 1) * unit;
        let register =
            u32::try_from(offset).expect("small") | u32::try_from(holder).expect("small");
        config[0x44..0x48].copy_from_slice(&register.to_le_bytes());
        config[0x52] = 0x80 | (header[8] & 7).min(5) << 1;
        for patch in patches.chunks_exact(PATCH) {
            let at = usize::from(u16::from_le_bytes([patch[0], patch[1]]));
            let at = at % config.len();
            config[at] = patch[2];
        }
        let msi = if header[8] & 8 == 0 { 1 << (header[8] & 7).min(5) } else { 0 };
        let vectors = [u32::from(header[8] & 16 == 0), msi, header[7].into()];
        let state = Mutex::new(State { config, ..State::default() });
        let rom = if header[0] & 4 == 0 { 0x1000 } else { 0 };
        let (growable, resettable) = (header[0] & 2 == 0, header[0] & 8 == 0);
        let memory = memory();
        Self { state, sizes, mappable, rom, vectors, growable, resettable, memory }
    }

    /// Fails as many calls as the guest's steps have ordered.
    fn may_fail(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        if let Some(left) = state.spared.checked_sub(1) {
            state.spared = left;
            return Ok(());
        }
        let Some(left) = state.failures.checked_sub(1) else { return Ok(()) };
        (state.failures, state.failed) = (left, true);
        Err(io::ErrorKind::Other.into())
    }

    fn count(&self, kind: IrqKind) -> u32 {
        match kind {
            IrqKind::Intx => self.vectors[0],
            IrqKind::Msi => self.vectors[1],
            IrqKind::Msix => self.vectors[2],
        }
    }

    fn in_bar(&self, bar: u8, offset: u64, length: usize) {
        let (end, size) = (offset + length as u64, self.sizes[usize::from(bar)]);
        assert!(end <= size, "{length} bytes at {offset:#x} of BAR {bar}, which has {size:#x}");
        if let Some((_, table)) = lock(&self.state).table.as_ref().filter(|(of, _)| *of == bar) {
            assert!(end <= table.start || offset >= table.end, "the table's place was reached");
        }
    }
}

fn memory() -> File {
    let fd = rustix::fs::memfd_create("BARs", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(fd);
    file.set_len(MAX_BAR).expect("room");
    file
}

impl Device for Hostile {
    fn region(&self, region: Region) -> io::Result<RegionInfo> {
        let whole = |size| RegionInfo { size, mappable: Vec::new() };
        Ok(match region {
            Region::Config => whole(lock(&self.state).config.len() as u64),
            Region::Rom => whole(self.rom),
            Region::Bar(bar) => {
                let (size, bar) = (self.sizes[usize::from(bar)], usize::from(bar));
                let mappable = match self.mappable[bar] {
                    0 => Vec::new(),
                    1 if size >= 4 * PAGE => vec![
                        Area { offset: 0, size: size / 4 },
                        Area { offset: size / 2, size: size / 2 },
                    ],
                    _ => vec![Area { offset: 0, size }],
                };
                RegionInfo { size, mappable }
            }
        })
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match region {
            Region::Config => {
                let start = usize::try_from(offset).expect("small");
                data.copy_from_slice(&lock(&self.state).config[start..start + data.len()]);
                return Ok(());
            }
            Region::Bar(bar) => self.in_bar(bar, offset, data.len()),
            Region::Rom => assert!(offset + data.len() as u64 <= self.rom, "behind the ROM"),
        }
        data.iter_mut().zip(offset..).for_each(|(byte, at)| *byte = pattern(at));
        Ok(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> io::Result<()> {
        match region {
            Region::Config => {
                self.may_fail()?;
                let start = usize::try_from(offset).expect("small");
                let mut state = lock(&self.state);
                state.config[start..start + data.len()].copy_from_slice(data);
                Ok(())
            }
            Region::Bar(bar) => {
                self.in_bar(bar, offset, data.len());
                self.may_fail()
            }
            Region::Rom => panic!("a ROM was written"),
        }
    }

    fn irq(&self, kind: IrqKind) -> io::Result<IrqInfo> {
        Ok(IrqInfo { count: self.count(kind), growable: self.growable })
    }

    fn set_triggers(
        &self,
        kind: IrqKind,
        first: u32,
        fds: &[Option<BorrowedFd<'_>>],
    ) -> io::Result<()> {
        let (first, end) = (first as usize, first as usize + fds.len());
        assert!(!fds.is_empty(), "no vector");
        assert!(end <= self.count(kind) as usize, "{end} vectors of {kind:?}");
        {
            let state = lock(&self.state);
            assert!(state.on.is_none_or(|on| on == kind), "{kind:?} while {:?} is on", state.on);
            let more = end > state.armed.len();
            let grows = state.on.is_some() && more;
            assert!(!grows || kind == IrqKind::Msix && self.growable, "{kind:?} cannot grow");
        }
        self.may_fail()?;
        let mut state = lock(&self.state);
        state.on = Some(kind);
        let length = state.armed.len().max(end);
        state.armed.resize(length, None);
        for (armed, fd) in state.armed[first..end].iter_mut().zip(fds) {
            *armed = fd.map(|fd| fd.as_raw_fd());
        }
        Ok(())
    }

    fn set_unmask(&self, _fd: BorrowedFd<'_>) -> io::Result<()> {
        assert_eq!(lock(&self.state).on, Some(IrqKind::Intx), "unmasking what is not on");
        self.may_fail()
    }

    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        let mut state = lock(&self.state);
        if state.on == Some(kind) {
            (state.on, state.armed) = (None, Vec::new());
        }
        Ok(())
    }

    fn set_alarm(&self, _alarm: Alarm, _fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn atomic_ops(&self) -> AtomicOps {
        AtomicOps::NONE
    }

    fn was_reset(&self) -> bool {
        true
    }

    fn reset(&self, _rung: Rung) -> io::Result<()> {
        if !self.resettable {
            return Err(io::ErrorKind::Unsupported.into());
        }
        lock(&self.state).config[COMMAND] &= !DECODING;
        Ok(())
    }

    fn exports(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn export(&self, _bar: u8, _area: Area) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn map(&self, bar: u8, area: Area, modulus: u64) -> io::Result<Arc<Mapping>> {
        let size = self.sizes[usize::from(bar)].next_multiple_of(PAGE);
        assert!(area.offset + area.size <= size, "{area:?} of a BAR of {size:#x} bytes");
        let [length, modulus, offset] =
            [area.size, modulus, area.offset].map(|value| usize::try_from(value).expect("small"));
        let alignment = Alignment { modulus, residue: offset % modulus };
        let (memory, access) = (self.memory.as_fd(), Access::ReadWrite);
        Mapping::of_file(memory, area.offset, length, access, alignment).map(Arc::new)
    }
}

/// A vector or a line.
pub(crate) struct Wire {
    file: OwnedFd,
    routed: Mutex<Option<MsiMessage>>,
}

impl MsiVector for Wire {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        *lock(&self.routed) = message;
        Ok(())
    }

    fn eventfd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn trigger(&self) -> io::Result<()> {
        Ok(())
    }
}

impl InterruptLine for Wire {
    fn set_level(&self, _asserted: Level) -> io::Result<()> {
        panic!("the kernel drives the line")
    }

    fn trigger_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn resample_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The interrupts that the host has for the device.
pub(crate) struct Supply {
    most: usize,
    wires: Mutex<Vec<Weak<Wire>>>,
    refused: Mutex<bool>,
}

impl Supply {
    /// Has `most` vectors, all in all.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, wires: Mutex::default(), refused: Mutex::default() }
    }

    /// Returns whether there were too few.
    pub(crate) fn ran_out(&self) -> bool {
        *lock(&self.refused)
    }

    /// Returns the vectors that there are, by descriptor, and how each is routed.
    pub(crate) fn routes(&self) -> BTreeMap<RawFd, Option<MsiMessage>> {
        let wires = lock(&self.wires);
        let there = wires.iter().filter_map(Weak::upgrade);
        there.map(|wire| (wire.file.as_raw_fd(), *lock(&wire.routed))).collect()
    }

    fn wire() -> io::Result<Arc<Wire>> {
        let file = io::stdin().as_fd().try_clone_to_owned()?;
        Ok(Arc::new(Wire { file, routed: Mutex::default() }))
    }
}

impl InterruptSource for Supply {
    fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>> {
        let mut wires = lock(&self.wires);
        wires.retain(|wire| wire.strong_count() != 0);
        if wires.len() >= self.most {
            *lock(&self.refused) = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        let wire = Self::wire()?;
        wires.push(Arc::downgrade(&wire));
        Ok(wire)
    }

    fn line(&self, slot: u8, pin: u8) -> io::Result<Arc<dyn InterruptLine>> {
        assert!(slot == 2 && (1..=4).contains(&pin), "pin {pin} of slot {slot}");
        Ok(Self::wire()?)
    }
}

/// What of a BAR the guest has where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) guest: u64,
    pub(crate) bar: u8,
    pub(crate) area: Area,
}

/// The guest's memory slots, none of which overlap.
#[derive(Default, Clone)]
pub(crate) struct Memory(pub(crate) Arc<Mutex<Vec<Placed>>>);

struct Slot(Memory, Placed);

impl Slots for Memory {
    fn map(&self, guest: u64, part: &Part) -> io::Result<Box<dyn Send>> {
        let placed = Placed { guest, bar: part.bar, area: part.area };
        let last = |placed: &Placed| placed.guest + (placed.area.size - 1);
        assert_eq!(part.mapping.size() as u64, part.area.size);
        let mut all = lock(&self.0);
        if all.iter().any(|other| other.guest <= last(&placed) && guest <= last(other)) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        all.push(placed);
        Ok(Box::new(Slot(self.clone(), placed)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.0.0).retain(|placed| *placed != self.1);
    }
}
