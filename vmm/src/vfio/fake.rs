//! A VFIO device for unit tests: configuration space and BARs in memory, and a record of what it
//! was told.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    alarms::Alarm,
    device::{Area, Device, IrqInfo, IrqKind, Region, RegionInfo, Rung},
};
use crate::{
    pci::port::AtomicOps,
    sys::memory::{Access, Alignment, Mapping},
};

/// What a device was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Told {
    Config(u64, Vec<u8>),
    Bar(u8, u64, Vec<u8>),
    /// Kind, first vector, which of the vectors have a descriptor.
    Triggers(IrqKind, u32, Vec<bool>),
    Unmask,
    Disable(IrqKind),
    Reset,
}

pub(crate) struct FakeDevice {
    pub(crate) config: Mutex<Vec<u8>>,
    pub(crate) bars: [RegionInfo; 6],
    pub(crate) vectors: [u32; 3],
    pub(crate) growable: bool,
    pub(crate) unmaskable: bool,
    pub(crate) atomics: AtomicOps,
    pub(crate) reset: Outcome,
    rom: Vec<u8>,
    set: FakeSet,
    told: Mutex<Vec<Told>>,
    alarms: Mutex<Vec<(Alarm, OwnedFd)>>,
    memory: File,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Fails,
    Hangs,
    /// The function alone fails, the set never ends.
    HangsInSet,
    /// The first reset ends half a second after the deadline of unit tests, the second never.
    LateThenHangs,
    /// The function alone fails, the set is reset.
    NeedsSet,
    /// The function alone does not come back, the set does.
    SilentUntilSet,
    /// The function takes a moment, in which the set cannot be reset.
    Slow,
}

/// What the devices of one bus share: which rungs they were told, and how often more the kernel says
/// that they are in use.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeSet(Arc<(Mutex<Vec<Rung>>, AtomicU32)>);

impl FakeSet {
    /// Returns the rungs so far.
    pub(crate) fn rungs(&self) -> Vec<Rung> {
        lock(&self.0.0).clone()
    }

    /// Makes the set's rung meet devices in use `times` more times.
    pub(crate) fn be_busy(&self, times: u32) {
        self.0.1.fetch_add(times, Ordering::SeqCst);
    }

    fn note(&self, rung: Rung) -> io::Result<()> {
        lock(&self.0.0).push(rung);
        let less = |times: u32| times.checked_sub(1);
        let busy = || self.0.1.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok();
        if rung == Rung::Set && busy() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        Ok(())
    }
}

impl FakeDevice {
    fn of_config(config: Vec<u8>) -> Self {
        let memory = rustix::fs::memfd_create("fake", rustix::fs::MemfdFlags::CLOEXEC);
        let memory = File::from(memory.expect("a memfd"));
        memory.set_len(1 << 20).expect("room");
        Self {
            config: Mutex::new(config),
            bars: Default::default(),
            vectors: [1, 0, 0],
            growable: true,
            unmaskable: true,
            atomics: AtomicOps::NONE,
            reset: Outcome::Done,
            rom: Vec::new(),
            set: FakeSet::default(),
            told: Mutex::default(),
            alarms: Mutex::default(),
            memory,
        }
    }

    /// An NVMe controller as QEMU has it: a 64-bit BAR of 16 KiB, MSI-X table at 0x2000 of BAR 0
    /// with 65 vectors, power management, PCI Express with function-level reset; extended: AER,
    /// ARI, SR-IOV, serial number.
    pub(crate) fn nvme() -> Self {
        let mut config = vec![0; 4096];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &[0x36, 0x1b, 0x10, 0x00, 0x00, 0x00, 0x10, 0x00, 0x02, 0x02, 0x08, 0x01]);
        put(0x0e, &[0x80]);
        put(0x10, &[0x04]);
        put(0x30, &[0x01, 0x00, 0xe0, 0xfe]);
        put(0x34, &[0x40]);
        put(0x3c, &[0x0b, 0x01]);
        put(0x40, &[0x11, 0x80, 0x40, 0x80, 0x00, 0x20, 0, 0, 0x00, 0x30, 0, 0]);
        put(0x60, &[0x01, 0x00, 0x03, 0x00, 0x08, 0x00, 0, 0]);
        put(0x80, &[0x10, 0x60, 0x02, 0x00, 0x00, 0x80, 0x00, 0x10]);
        put(0x92, &[0x14, 0x10]);
        put(0x100, &0x1501_0001_u32.to_le_bytes());
        put(0x150, &0x1601_000e_u32.to_le_bytes());
        put(0x154, &[0xaa; 4]);
        put(0x160, &0x2001_0010_u32.to_le_bytes());
        put(0x164, &[0xbb; 60]);
        put(0x200, &0x0001_0003_u32.to_le_bytes());
        let mut device = Self::of_config(config);
        device.bars[0] =
            RegionInfo { size: 0x4000, mappable: vec![Area { offset: 0, size: 0x4000 }] };
        device.vectors = [1, 0, 65];
        device
    }

    /// A device with a 32-bit BAR of 1 MiB, I/O ports and MSI with 8 maskable vectors.
    pub(crate) fn conventional() -> Self {
        let mut config = vec![0; 256];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &[0x34, 0x12, 0xe8, 0x11, 0x00, 0x00, 0x10, 0x00]);
        put(0x14, &[0x01]);
        put(0x34, &[0x40]);
        put(0x3d, &[0x02]);
        put(0x40, &[0x05, 0x00, 0x86, 0x01]);
        let mut device = Self::of_config(config);
        device.bars[0] =
            RegionInfo { size: 0x10_0000, mappable: vec![Area { offset: 0, size: 0x10_0000 }] };
        device.bars[1] = RegionInfo { size: 0x20, mappable: Vec::new() };
        device.vectors = [1, 8, 0];
        device
    }

    /// A device that is no longer there.
    pub(crate) fn gone() -> Self {
        Self::of_config(vec![0xff; 4096])
    }

    pub(crate) fn with_rom(mut self, rom: &[u8]) -> Self {
        self.rom = rom.to_vec();
        self
    }

    pub(crate) fn hanging(mut self) -> Self {
        self.reset = Outcome::Hangs;
        self
    }

    pub(crate) fn late_then_hanging(mut self) -> Self {
        self.reset = Outcome::LateThenHangs;
        self
    }

    pub(crate) fn reset_by_set(mut self) -> Self {
        self.reset = Outcome::NeedsSet;
        self
    }

    pub(crate) fn hanging_in_set(mut self) -> Self {
        self.reset = Outcome::HangsInSet;
        self
    }

    pub(crate) fn slow(mut self) -> Self {
        self.reset = Outcome::Slow;
        self
    }

    pub(crate) fn within(mut self, set: &FakeSet) -> Self {
        self.set = set.clone();
        self
    }

    pub(crate) fn silent_until_set(mut self) -> Self {
        self.reset = Outcome::SilentUntilSet;
        self
    }

    pub(crate) fn unresettable(mut self) -> Self {
        self.reset = Outcome::Fails;
        self
    }

    /// Returns and forgets what the device was told.
    pub(crate) fn told(&self) -> Vec<Told> {
        std::mem::take(&mut *lock(&self.told))
    }

    /// Says what the kernel would.
    pub(crate) fn ring(&self, alarm: Alarm) {
        for (_, fd) in lock(&self.alarms).iter().filter(|(set, _)| *set == alarm) {
            rustix::io::write(fd, &1u64.to_ne_bytes()).expect("an eventfd");
        }
    }

    fn tell(&self, told: Told) -> io::Result<()> {
        lock(&self.told).push(told);
        Ok(())
    }
}

impl Device for FakeDevice {
    fn region(&self, region: Region) -> io::Result<RegionInfo> {
        Ok(match region {
            Region::Bar(bar) => self.bars[usize::from(bar)].clone(),
            Region::Config => {
                RegionInfo { size: lock(&self.config).len() as u64, mappable: Vec::new() }
            }
            Region::Rom => RegionInfo { size: self.rom.len() as u64, mappable: Vec::new() },
        })
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match region {
            Region::Bar(_) => self.memory.read_exact_at(data, offset),
            Region::Config => copy(&lock(&self.config), offset, data),
            Region::Rom => copy(&self.rom, offset, data),
        }
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> io::Result<()> {
        match region {
            Region::Bar(bar) => {
                self.memory.write_all_at(data, offset)?;
                self.tell(Told::Bar(bar, offset, data.to_vec()))
            }
            Region::Config => self.tell(Told::Config(offset, data.to_vec())),
            Region::Rom => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn set_alarm(&self, alarm: Alarm, fd: BorrowedFd<'_>) -> io::Result<()> {
        lock(&self.alarms).push((alarm, fd.try_clone_to_owned()?));
        Ok(())
    }

    fn irq(&self, kind: IrqKind) -> io::Result<IrqInfo> {
        let count = match kind {
            IrqKind::Intx => self.vectors[0],
            IrqKind::Msi => self.vectors[1],
            IrqKind::Msix => self.vectors[2],
        };
        Ok(IrqInfo { count, growable: self.growable })
    }

    fn set_triggers(
        &self,
        kind: IrqKind,
        first: u32,
        fds: &[Option<BorrowedFd<'_>>],
    ) -> io::Result<()> {
        self.tell(Told::Triggers(kind, first, fds.iter().map(Option::is_some).collect()))
    }

    fn set_unmask(&self, _fd: BorrowedFd<'_>) -> io::Result<()> {
        if !self.unmaskable {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.tell(Told::Unmask)
    }

    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        self.tell(Told::Disable(kind))
    }

    fn atomic_ops(&self) -> AtomicOps {
        self.atomics
    }

    fn was_reset(&self) -> bool {
        matches!(self.reset, Outcome::Done | Outcome::Slow)
    }

    fn reset(&self, rung: Rung) -> io::Result<()> {
        self.set.note(rung)?;
        match (self.reset, rung) {
            (Outcome::Done, _) | (Outcome::NeedsSet | Outcome::Slow, Rung::Set) => {
                self.tell(Told::Reset)
            }
            (Outcome::Slow, Rung::Function) => {
                // As many tries as there is time for.
                self.set.be_busy(1 << 16);
                thread::sleep(Duration::from_millis(50));
                self.set.0.1.store(0, Ordering::SeqCst);
                self.tell(Told::Reset)
            }
            (Outcome::SilentUntilSet, Rung::Function) => {
                lock(&self.config)[8..12].fill(0xff);
                Ok(())
            }
            (Outcome::SilentUntilSet, Rung::Set) => {
                lock(&self.config)[8..12].copy_from_slice(&[0x02, 0x02, 0x08, 0x01]);
                Ok(())
            }
            (Outcome::Fails, _) | (Outcome::NeedsSet | Outcome::HangsInSet, Rung::Function) => {
                Err(io::Error::from_raw_os_error(libc::ENOTTY))
            }
            (Outcome::LateThenHangs, _) if self.set.rungs().len() == 1 => {
                thread::sleep(Duration::from_millis(1500));
                self.tell(Told::Reset)
            }
            (Outcome::Hangs | Outcome::LateThenHangs, _) | (Outcome::HangsInSet, Rung::Set) => {
                loop {
                    thread::sleep(Duration::from_secs(60));
                }
            }
        }
    }

    fn exports(&self) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOTTY))
    }

    fn export(&self, _bar: u8, _area: Area) -> io::Result<OwnedFd> {
        Err(io::Error::from_raw_os_error(libc::ENOTTY))
    }

    fn map(&self, _bar: u8, area: Area, modulus: u64) -> io::Result<Arc<Mapping>> {
        let size = usize::try_from(area.size).expect("small");
        let modulus = usize::try_from(modulus).expect("small");
        let residue = usize::try_from(area.offset).expect("small") % modulus;
        let alignment = Alignment { modulus, residue };
        Mapping::of_file(self.memory.as_fd(), area.offset, size, Access::ReadWrite, alignment)
            .map(Arc::new)
    }
}

fn copy(bytes: &[u8], offset: u64, data: &mut [u8]) -> io::Result<()> {
    let start = usize::try_from(offset).expect("small");
    let source = bytes.get(start..start + data.len());
    data.copy_from_slice(source.ok_or(io::ErrorKind::InvalidInput)?);
    Ok(())
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test thread panicked")
}
