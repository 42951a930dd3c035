//! A driver for virtio devices in memory, and the scripts that fuzzing feeds to devices. Shared by
//! the tests and by the fuzz targets.

#![allow(dead_code, reason = "each user needs a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm::{
    devices::virtio::{
        Activation, DeviceIdentity, Doorbells, F_RING_EVENT_IDX, F_RING_INDIRECT_DESC, F_VERSION_1,
        Platform, VirtioDevice, VirtioError, VirtioPci,
    },
    irq::{InterruptLine, InterruptSource, Level, MsiMessage, MsiVector},
    pci::function::PciFunction,
    sys::memory::GuestRam,
};
use vmm_sys_util::eventfd::EventFd;

pub const RAM_SIZE: u64 = 1 << 20;
/// A second region, behind a gap.
pub const HIGH_RAM: u64 = 1 << 32;

pub const COMMON: u64 = 0x0000;
pub const ISR: u64 = 0x1000;
pub const DEVICE: u64 = 0x2000;
pub const NOTIFY: u64 = 0x3000;
pub const TABLE: u64 = 0x4000;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub fn ram() -> GuestRam {
    let size = usize::try_from(RAM_SIZE).unwrap();
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size), (GuestAddress(HIGH_RAM), size)])
        .unwrap()
}

/// A vector that remembers what it was told.
pub struct FakeVector {
    event: OwnedFd,
    pub route: Mutex<Option<MsiMessage>>,
}

impl FakeVector {
    /// Returns how often the vector fired since the last call.
    pub fn fired(&self) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(&self.event, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }
}

impl MsiVector for FakeVector {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        *self.route.lock().unwrap() = message;
        Ok(())
    }
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
    fn trigger(&self) -> io::Result<()> {
        rustix::io::write(&self.event, &1u64.to_ne_bytes())?;
        Ok(())
    }
}

pub struct FakeLine {
    event: OwnedFd,
    pub high: AtomicBool,
    pub raised: AtomicU64,
}

impl InterruptLine for FakeLine {
    fn set_level(&self, asserted: Level) -> io::Result<()> {
        self.high.store(asserted == Level::High, Ordering::SeqCst);
        if asserted == Level::High {
            self.raised.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    }
    fn trigger_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
    fn resample_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

fn eventfd() -> OwnedFd {
    let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
    rustix::event::eventfd(0, flags).unwrap()
}

pub struct FakeInterrupts {
    pub vectors: Mutex<Vec<Arc<FakeVector>>>,
    pub line: Arc<FakeLine>,
}

impl Default for FakeInterrupts {
    fn default() -> Self {
        let line =
            FakeLine { event: eventfd(), high: AtomicBool::new(false), raised: AtomicU64::new(0) };
        Self { vectors: Mutex::default(), line: Arc::new(line) }
    }
}

impl InterruptSource for FakeInterrupts {
    fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>> {
        let vector = Arc::new(FakeVector { event: eventfd(), route: Mutex::new(None) });
        self.vectors.lock().unwrap().push(Arc::clone(&vector));
        Ok(vector)
    }
    fn line(&self, _slot: u8, _pin: u8) -> io::Result<Arc<dyn InterruptLine>> {
        Ok(Arc::<FakeLine>::clone(&self.line))
    }
}

/// Doorbells that only remember where they are.
#[derive(Default)]
pub struct FakeDoorbells(pub Mutex<Vec<u64>>);

impl Doorbells for FakeDoorbells {
    fn register(&self, address: u64, _event: &EventFd) -> io::Result<()> {
        self.0.lock().unwrap().push(address);
        Ok(())
    }
    fn unregister(&self, address: u64, _event: &EventFd) -> io::Result<()> {
        self.0.lock().unwrap().retain(|registered| *registered != address);
        Ok(())
    }
}

/// The machine around a device.
pub struct Machine {
    pub ram: GuestRam,
    pub interrupts: Arc<FakeInterrupts>,
    pub doorbells: Arc<FakeDoorbells>,
    pub platform: Platform,
}

impl Machine {
    pub fn new() -> Self {
        let (ram, interrupts, doorbells) =
            (ram(), Arc::<FakeInterrupts>::default(), Arc::<FakeDoorbells>::default());
        let platform = Platform {
            ram: ram.clone(),
            doorbells: Arc::<FakeDoorbells>::clone(&doorbells),
            interrupts: Arc::<FakeInterrupts>::clone(&interrupts),
            activity: vmm::counters::Registry::default(),
            events: vmm::events::Events::default(),
            limits: Default::default(),
        };
        Self { ram, interrupts, doorbells, platform }
    }

    pub fn fired(&self, vector: usize) -> u64 {
        self.interrupts.vectors.lock().unwrap()[vector].fired()
    }
}

/// A device that does nothing but remember.
pub struct NullDevice {
    pub seen: Arc<Mutex<Seen>>,
    pub queues: u16,
}

#[derive(Default)]
pub struct Seen {
    pub activations: Vec<Activation>,
    pub stops: u32,
    /// Whether `stopped` keeps answering no.
    pub lingers: bool,
}

impl NullDevice {
    pub fn new(queues: u16) -> (Self, Arc<Mutex<Seen>>) {
        let seen = Arc::<Mutex<Seen>>::default();
        (Self { seen: Arc::clone(&seen), queues }, seen)
    }
}

impl VirtioDevice for NullDevice {
    fn identity(&self) -> DeviceIdentity {
        DeviceIdentity { name: "null", virtio_id: 42, class: [0xff, 0, 0] }
    }
    fn features(&self) -> u64 {
        F_RING_INDIRECT_DESC | F_RING_EVENT_IDX | 1
    }
    fn queue_count(&self) -> u16 {
        self.queues
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(u8::try_from(offset & 0x7f).unwrap());
    }
    fn start(&mut self) -> Result<(), VirtioError> {
        Ok(())
    }
    fn activate(&mut self, activation: Activation) -> Result<(), VirtioError> {
        self.seen.lock().unwrap().activations.push(activation);
        Ok(())
    }
    fn stop(&mut self) {
        let mut seen = self.seen.lock().unwrap();
        seen.stops += 1;
        seen.activations.clear();
    }
    fn stopped(&mut self) -> bool {
        !self.seen.lock().unwrap().lingers
    }
}

/// Register accesses as a driver makes them.
pub trait Registers {
    fn read(&mut self, offset: u64, length: usize) -> u64;
    fn write(&mut self, offset: u64, length: usize, value: u64);

    fn status(&mut self) -> u64 {
        self.read(COMMON + 0x14, 1)
    }
    fn set_status(&mut self, status: u64) {
        self.write(COMMON + 0x14, 1, status);
    }
    /// ACKNOWLEDGE, DRIVER, the features, FEATURES_OK. Returns whether the device agreed.
    fn negotiate(&mut self, features: u64) -> bool {
        self.set_status(1);
        self.set_status(3);
        for word in 0..2 {
            self.write(COMMON + 0x08, 4, word);
            self.write(COMMON + 0x0c, 4, (features >> (32 * word)) & 0xffff_ffff);
        }
        self.set_status(11);
        self.status() & 8 != 0
    }
    /// Sets up a queue; returns whether the device enabled it.
    fn set_queue(&mut self, index: u16, queue: &Queue, vector: u64) -> bool {
        self.write(COMMON + 0x16, 2, index.into());
        self.write(COMMON + 0x18, 2, queue.size.into());
        self.write(COMMON + 0x1a, 2, vector);
        for (register, address) in [(0x20, queue.table), (0x28, queue.avail), (0x30, queue.used)] {
            self.write(COMMON + register, 4, address & 0xffff_ffff);
            self.write(COMMON + register + 4, 4, address >> 32);
        }
        self.write(COMMON + 0x1c, 2, 1);
        self.read(COMMON + 0x1c, 2) == 1
    }
    fn kick(&mut self, index: u16) {
        self.write(NOTIFY + 4 * u64::from(index), 2, index.into());
    }
}

impl Registers for VirtioPci {
    fn read(&mut self, offset: u64, length: usize) -> u64 {
        let mut bytes = [0; 8];
        self.read_bar(0, offset, &mut bytes[..length]);
        u64::from_le_bytes(bytes)
    }
    fn write(&mut self, offset: u64, length: usize, value: u64) {
        self.write_bar(0, offset, &value.to_le_bytes()[..length]);
    }
}

/// Switches MSI-X on, with every vector open.
pub fn enable_msix(function: &mut VirtioPci, vectors: u64) {
    for vector in 0..vectors {
        let entry = TABLE + 16 * vector;
        function.write(entry, 4, 0xfee0_0000);
        function.write(entry + 8, 4, 0x40 + vector);
        function.write(entry + 12, 4, 0);
    }
    let at = capability(function, 0x11, None);
    function.write_config(at + 2, &0x8000u16.to_le_bytes());
}

/// Returns where the capability `id` is, of virtio type `kind` if given.
pub fn capability(function: &mut VirtioPci, id: u8, kind: Option<u8>) -> u16 {
    let mut byte = [0];
    function.read_config(0x34, &mut byte);
    while byte[0] != 0 {
        let at = u16::from(byte[0]);
        let mut header = [0; 4];
        function.read_config(at, &mut header);
        if header[0] == id && kind.is_none_or(|kind| header[3] == kind) {
            return at;
        }
        byte[0] = header[1];
    }
    panic!("no capability {id:#x} {kind:?}");
}

/// The driver's side of a ring.
pub struct Queue {
    pub ram: GuestRam,
    pub size: u16,
    pub table: u64,
    pub avail: u64,
    pub used: u64,
    pub next_descriptor: u16,
    pub next_avail: u16,
    pub seen_used: u16,
}

impl Queue {
    pub fn new(ram: &GuestRam, size: u16, base: u64) -> Self {
        Self {
            ram: ram.clone(),
            size,
            table: base,
            avail: base + 0x1000,
            used: base + 0x2000,
            next_descriptor: 0,
            next_avail: 0,
            seen_used: 0,
        }
    }

    pub fn write_descriptor(
        &self,
        index: u16,
        (address, length, flags, next): (u64, u32, u16, u16),
    ) {
        write_descriptor(
            &self.ram,
            self.table + 16 * u64::from(index),
            (address, length, flags, next),
        );
    }

    /// Writes a chain of (address, length, writable) and offers it. Returns its head.
    pub fn add(&mut self, buffers: &[(u64, u32, bool)]) -> u16 {
        let head = self.next_descriptor;
        for (at, (address, length, writable)) in buffers.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % self.size;
            let mut flags = if *writable { WRITE } else { 0 };
            if at + 1 < buffers.len() {
                flags |= NEXT;
            }
            self.write_descriptor(index, (*address, *length, flags, self.next_descriptor));
        }
        self.offer(head);
        head
    }

    pub fn offer(&mut self, head: u16) {
        let slot = self.avail + 4 + 2 * u64::from(self.next_avail % self.size);
        self.ram.write_obj(head, GuestAddress(slot)).unwrap();
        self.next_avail = self.next_avail.wrapping_add(1);
        self.set_avail_index(self.next_avail);
    }

    pub fn set_avail_index(&self, index: u16) {
        self.ram.store(index, GuestAddress(self.avail + 2), Ordering::Release).unwrap();
    }

    pub fn used_index(&self) -> u16 {
        self.ram.load(GuestAddress(self.used + 2), Ordering::Acquire).unwrap()
    }

    /// Returns the next used chain and its length, waiting up to ten seconds for it.
    pub fn wait_used(&mut self) -> (u16, u32) {
        wait_for(|| self.used_index() != self.seen_used);
        let slot = self.used + 4 + 8 * u64::from(self.seen_used % self.size);
        self.seen_used = self.seen_used.wrapping_add(1);
        let head: u32 = self.ram.read_obj(GuestAddress(slot)).unwrap();
        (u16::try_from(head).unwrap(), self.ram.read_obj(GuestAddress(slot + 4)).unwrap())
    }
}

pub fn write_descriptor(
    ram: &GuestRam,
    at: u64,
    (address, length, flags, next): (u64, u32, u16, u16),
) {
    ram.write_obj(address, GuestAddress(at)).unwrap();
    ram.write_obj(length, GuestAddress(at + 8)).unwrap();
    ram.write_obj(flags, GuestAddress(at + 12)).unwrap();
    ram.write_obj(next, GuestAddress(at + 14)).unwrap();
}

/// Waits until `done`, and panics after ten seconds.
pub fn wait_for(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < deadline, "nothing happened for ten seconds");
        thread::sleep(Duration::from_millis(1));
    }
}

pub const ALL_RING_FEATURES: u64 = F_VERSION_1 | F_RING_INDIRECT_DESC | F_RING_EVENT_IDX;
