//! A driver for the NVMe controller in memory, and the scripts that fuzzing feeds to it. Shared by
//! the tests and by the fuzz target.

#![allow(dead_code, reason = "each user needs a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use types::vm::{Disk, DiskModel, RateLimit};
use vm_memory::{Bytes, GuestAddress};
use vmm::{
    devices::{
        nvme::{
            Nvme,
            controller::{Controller, DEPTH, Progress, Start},
            identify::Profile,
            queue::Place,
            registers::Control,
            shared::Shared,
        },
        throttle::Limits,
        virtio::blk::{
            engine::{Engine, EngineChoice},
            request::{Access, Support},
        },
    },
    irq::InterruptSource,
    pci::function::PciFunction,
    sys::memory::GuestRam,
};

use super::virtio::{FakeInterrupts, HIGH_RAM, Machine, RAM_SIZE, ram, wait_for};

pub const BLOCKS: u64 = 128;
pub const ASQ: u64 = 0x1000;
pub const ACQ: u64 = 0x2000;
/// I/O queues 1, 2, …: submissions, and completions a page behind.
pub const QUEUES: u64 = 0x4000;
pub const DATA: u64 = 0x20000;
pub const ENTRIES: u32 = 16;

/// A file whose blocks hold their number.
pub fn numbered_file() -> OwnedFd {
    let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&file, &numbered(), 0).unwrap();
    file
}

/// Blocks that hold their number.
pub fn numbered() -> Vec<u8> {
    (0..BLOCKS).flat_map(|block| [u8::try_from(block).unwrap(); 512]).collect()
}

pub fn spec(limit: Option<RateLimit>) -> Disk {
    let (serial, model) = ("holdfast".to_owned(), DiskModel::Nvme);
    Disk { fd: -1, more_fds: Vec::new(), read_only: false, serial, model, limit, key: None }
}

/// The driver's side of a queue pair.
#[derive(Debug, Clone)]
pub struct Pair {
    pub index: u16,
    pub submissions: u64,
    pub completions: u64,
    pub entries: u32,
    tail: u32,
    head: u32,
    phase: u32,
    next_id: u16,
}

/// A completion as the driver sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub result: u32,
    pub id: u16,
    pub status: u16,
}

impl Pair {
    pub fn new(index: u16, submissions: u64, completions: u64, entries: u32) -> Self {
        Self { index, submissions, completions, entries, tail: 0, head: 0, phase: 1, next_id: 1 }
    }

    /// Writes a command; returns its identifier and the new tail.
    pub fn put(&mut self, ram: &GuestRam, command: Request) -> (u16, u32) {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let at = self.submissions + 64 * u64::from(self.tail);
        ram.write_slice(&command.encode(id), GuestAddress(at)).unwrap();
        self.tail = (self.tail + 1) % self.entries;
        (id, self.tail)
    }

    /// Takes the next completion, if there is one.
    pub fn poll(&mut self, ram: &GuestRam) -> Option<Done> {
        let at = self.completions + 16 * u64::from(self.head);
        let last: u32 = ram.load(GuestAddress(at + 12), Ordering::Acquire).unwrap();
        if last >> 16 & 1 != self.phase {
            return None;
        }
        self.head = (self.head + 1) % self.entries;
        if self.head == 0 {
            self.phase ^= 1;
        }
        let result = ram.read_obj(GuestAddress(at)).unwrap();
        let id = u16::try_from(last & 0xffff).unwrap();
        Some(Done { result, id, status: u16::try_from(last >> 17).unwrap() })
    }

    pub fn head(&self) -> u32 {
        self.head
    }

    /// Offers the next `count` entries, whatever they hold; returns the new tail.
    pub fn offer(&mut self, count: u32) -> u32 {
        self.tail = (self.tail + count) % self.entries;
        self.tail
    }
}

/// A command as the driver writes it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Request {
    pub opcode: u8,
    pub flags: u8,
    pub namespace: u32,
    pub prps: (u64, u64),
    pub dwords: [u32; 6],
}

impl Request {
    pub fn encode(&self, id: u16) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[0] = self.opcode;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&id.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.namespace.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.prps.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.prps.1.to_le_bytes());
        for (index, dword) in self.dwords.iter().enumerate() {
            bytes[40 + 4 * index..44 + 4 * index].copy_from_slice(&dword.to_le_bytes());
        }
        bytes
    }
}

/// A controller with its driver.
pub struct Driver {
    pub function: Nvme,
    pub machine: Machine,
    pub file: OwnedFd,
    pub admin: Pair,
}

impl Driver {
    /// A started controller that nobody has switched on, with MSI-X open.
    pub fn off(engine: EngineChoice, disk: &Disk, vcpus: u32) -> Self {
        Self::within(Machine::new(), engine, disk, vcpus)
    }

    /// The same in `machine`.
    pub fn within(machine: Machine, engine: EngineChoice, disk: &Disk, vcpus: u32) -> Self {
        let file = numbered_file();
        let shared = file.as_fd().try_clone_to_owned().unwrap();
        let mut function = Nvme::open(disk, shared, (3, vcpus), engine, &machine.platform).unwrap();
        function.start().unwrap();
        let admin = Pair::new(0, ASQ, ACQ, ENTRIES);
        let mut driver = Self { function, machine, file, admin };
        for vector in 0..=u64::from(vcpus) {
            let entry = 0x2000 + 16 * vector;
            driver.write(entry, 4, 0xfee0_0000);
            driver.write(entry + 8, 4, 0x40 + vector);
            driver.write(entry + 12, 4, 0);
        }
        driver.function.write_config(0x42, &0x8000u16.to_le_bytes());
        driver
    }

    /// A controller that is switched on.
    pub fn on(engine: EngineChoice, limit: Option<RateLimit>) -> Self {
        let mut driver = Self::off(engine, &spec(limit), 2);
        driver.enable();
        driver
    }

    pub fn enable(&mut self) {
        for page in [ASQ, ACQ] {
            self.machine.ram.write_slice(&[0; 0x1000], GuestAddress(page)).unwrap();
        }
        self.admin = Pair::new(0, ASQ, ACQ, ENTRIES);
        let sizes = u64::from(ENTRIES - 1);
        self.write(0x24, 4, sizes << 16 | sizes);
        self.write(0x28, 8, ASQ);
        self.write(0x30, 8, ACQ);
        self.write(0x14, 4, 0x0046_0001);
        assert_eq!(self.read(0x1c, 4) & 3, 1, "ready");
    }

    pub fn read(&mut self, offset: u64, length: usize) -> u64 {
        let mut bytes = [0; 8];
        self.function.read_bar(0, offset, &mut bytes[..length]);
        u64::from_le_bytes(bytes)
    }

    pub fn write(&mut self, offset: u64, length: usize, value: u64) {
        self.function.write_bar(0, offset, &value.to_le_bytes()[..length]);
    }

    pub fn ring(&mut self, pair: &Pair, tail: u32) {
        self.write(0x1000 + 8 * u64::from(pair.index), 4, tail.into());
    }

    /// Waits for one completion, and gives its entry back.
    pub fn wait(&mut self, pair: &mut Pair) -> Done {
        let mut done = None;
        wait_for(|| {
            done = pair.poll(&self.machine.ram);
            done.is_some()
        });
        self.write(0x1004 + 8 * u64::from(pair.index), 4, pair.head().into());
        done.unwrap()
    }

    /// Does one command.
    pub fn command(&mut self, pair: &mut Pair, request: Request) -> Done {
        let (id, tail) = pair.put(&self.machine.ram, request);
        self.ring(pair, tail);
        let done = self.wait(pair);
        assert_eq!(done.id, id);
        done
    }

    /// Does one admin command; returns status and dword 0.
    pub fn admin(&mut self, opcode: u8, namespace: u32, dwords: &[u32]) -> (u16, u32) {
        let mut request =
            Request { opcode, namespace, prps: (DATA, DATA + 0x1000), ..Request::default() };
        request.dwords[..dwords.len()].copy_from_slice(dwords);
        let mut pair = self.admin.clone();
        let done = self.command(&mut pair, request);
        self.admin = pair;
        (done.status, done.result)
    }

    /// Makes I/O queue pair `index`.
    pub fn pair(&mut self, index: u16) -> Pair {
        let submissions = QUEUES + 0x2000 * u64::from(index - 1);
        let completions = submissions + 0x1000;
        for page in [submissions, completions] {
            self.machine.ram.write_slice(&[0; 0x1000], GuestAddress(page)).unwrap();
        }
        let name = u32::from(index) | (ENTRIES - 1) << 16;
        let create = |opcode, base, dword11| Request {
            opcode,
            prps: (base, 0),
            dwords: [name, dword11, 0, 0, 0, 0],
            ..Request::default()
        };
        let vector = u32::from(index) << 16;
        let mut admin = self.admin.clone();
        let made = self.command(&mut admin, create(5, completions, vector | 3));
        assert_eq!(made.status, 0);
        assert_eq!(self.command(&mut admin, create(1, submissions, vector | 1)).status, 0);
        self.admin = admin;
        Pair::new(index, submissions, completions, ENTRIES)
    }

    pub fn memory(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.machine.ram.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    pub fn block(&self, block: u64) -> [u8; 512] {
        let mut bytes = [0; 512];
        rustix::io::pread(&self.file, &mut bytes, block * 512).unwrap();
        bytes
    }
}

/// A transfer of `blocks` at `first` with the data at [`DATA`].
pub fn transfer(opcode: u8, first: u32, blocks: u32) -> Request {
    Request {
        opcode,
        namespace: 1,
        prps: (DATA, DATA + 0x1000),
        dwords: [first, 0, blocks - 1, 0, 0, 0],
        ..Request::default()
    }
}

/// Reads a script; past its end everything is zero.
pub struct Script<'a>(pub &'a [u8]);

impl Script<'_> {
    pub fn done(&self) -> bool {
        self.0.is_empty()
    }
    pub fn byte(&mut self) -> u8 {
        let (first, rest) =
            self.0.split_first().map_or((0, &[][..]), |(first, rest)| (*first, rest));
        self.0 = rest;
        first
    }
    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }
    fn number(&mut self) -> u64 {
        u64::from_le_bytes([0; 8].map(|_: u8| self.byte()))
    }
    fn dword(&mut self) -> u32 {
        match self.byte() % 4 {
            0 => u32::from(self.byte() % 8),
            1 => u32::from(self.word()),
            2 => u32::from(self.byte()) << 16 | u32::from(self.byte() % 8),
            _ => u32::from(self.word()) << 16 | u32::from(self.word()),
        }
    }
    /// An address: mostly a page, or close to one that matters, or anything.
    pub fn address(&mut self) -> u64 {
        let kind = self.byte();
        match kind % 8 {
            0..=2 => 0x1000 * u64::from(self.byte()),
            3 => 0x1000 * u64::from(self.byte()) + 8 * u64::from(self.byte()),
            4 => RAM_SIZE - 0x1000 * u64::from(self.byte() % 4),
            5 => HIGH_RAM.wrapping_sub(0x1000).wrapping_add(0x1000 * u64::from(self.byte())),
            6 => u64::MAX - u64::from(self.word()),
            _ => self.number(),
        }
    }
    /// A command: mostly one that exists, with fields that are nearly right.
    pub fn command(&mut self) -> Request {
        let known = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12];
        let kind = self.byte();
        let opcode = if kind < 0xe0 { known[usize::from(kind) % known.len()] } else { self.byte() };
        let flags = if self.byte() < 0xf0 { 0 } else { self.byte() };
        let namespace = match self.byte() % 8 {
            0 => 0,
            1 => u32::MAX,
            2 => self.dword(),
            _ => 1,
        };
        let prps = (self.address(), self.address());
        let dwords = [0; 6].map(|_: u8| self.dword());
        Request { opcode, flags, namespace, prps, dwords }
    }
}

/// Turns after which a controller must have nothing left to do with queues that do not move.
const MAX_TURNS: u32 = 4096;

/// Rubbish in queues, lists and doorbells: the thread's work ends, and the disk keeps its size.
pub fn controller(data: &[u8]) {
    let mut script = Script(data);
    let memory = ram();
    let file = numbered_file();
    let choice = if script.byte() % 2 == 0 { EngineChoice::Plain } else { EngineChoice::Best };
    let access = if script.byte() % 8 == 0 { Access::ReadOnly } else { Access::ReadWrite };
    let engine = Engine::new(choice, file.as_fd(), memory.clone(), DEPTH).unwrap();
    let (mut controller, shared) = controller_over(engine, &memory, access);
    let entries = [2, 4, 16, 64][usize::from(script.byte() % 4)];
    start(&mut controller, &shared, entries);
    let mut pairs = [
        Pair::new(0, ASQ, ACQ, entries),
        Pair::new(1, QUEUES, QUEUES + 0x1000, ENTRIES),
        Pair::new(2, QUEUES + 0x2000, QUEUES + 0x3000, ENTRIES),
    ];
    while !script.done() {
        step(&mut script, &memory, &shared, &mut pairs);
        if script.byte() % 4 == 0 {
            settle(&mut controller);
        }
        if script.byte() == 0xff {
            controller.stop();
            shared.reset();
            start(&mut controller, &shared, entries);
        }
    }
    settle(&mut controller);
    controller.stop();
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, i64::try_from(BLOCKS * 512).unwrap());
}

/// A controller that is off, and what virtual CPUs share with it.
pub fn controller_over(
    engine: Engine,
    memory: &GuestRam,
    access: Access,
) -> (Controller, Arc<Shared>) {
    let source = FakeInterrupts::default();
    // Queues without a vector are not made.
    let vectors = [0; 3].map(|_: u8| source.allocate_msi().unwrap()).to_vec();
    let shared = Arc::new(Shared::new(2, &vectors, source.line(3, 1).unwrap()).unwrap());
    let (profile, limits) = (profile(access), Limits::default());
    (Controller::new(engine, memory.clone(), profile, limits, Arc::clone(&shared)), shared)
}

/// Two pairs of queues over [`numbered_file`].
pub fn profile(access: Access) -> Profile {
    Profile {
        serial: *b"12345678901234567890",
        pairs: 2,
        blocks: BLOCKS,
        block_log2: 9,
        blocks_at_once: 8,
        access,
        deallocate: Support::Yes,
        zero: Support::Yes,
    }
}

pub fn start(controller: &mut Controller, shared: &Shared, entries: u32) {
    shared.restart(Control::from_bits(0x0046_0001));
    let place = |base| Place { base, entries };
    controller.start(&Start { submissions: place(ASQ), completions: place(ACQ) });
}

/// Lets the controller work until it waits. Nobody moves a queue meanwhile.
pub fn settle(controller: &mut Controller) {
    let now = Instant::now() + Duration::from_secs(1);
    let busy = (0..MAX_TURNS).all(|_| controller.turn(now) == Progress::More);
    assert!(!busy, "queues that do not move keep the thread busy");
}

/// One thing that a driver might do.
pub fn step(script: &mut Script<'_>, memory: &GuestRam, shared: &Shared, pairs: &mut [Pair; 3]) {
    let pair = &mut pairs[usize::from(script.byte() % 3)];
    let index = u64::from(pair.index);
    match script.byte() % 8 {
        0..=2 => {
            let (_, tail) = pair.put(memory, script.command());
            shared.ring(2 * index, tail);
        }
        3 => {
            let base = QUEUES + 0x2000 * u64::from(script.byte() % 2);
            let name = 1 + u32::from(script.byte() % 2);
            for request in creation(name, base, 1) {
                let (_, tail) = pairs[0].put(memory, request);
                shared.ring(0, tail);
            }
        }
        4 => {
            // A list of pages.
            let at = GuestAddress(0x1000 * u64::from(script.byte()) + 8 * u64::from(script.byte()));
            let _ = memory.write_obj(script.address(), at);
        }
        5 => {
            while pair.poll(memory).is_some() {}
            shared.ring(2 * index + 1, pair.head());
        }
        6 => shared.ring(u64::from(script.byte() % 7), u32::from(script.word())),
        _ => shared.ask_shutdown(),
    }
}

/// The commands that make a pair of queues at `base`, whose completions go to queue `to`.
pub fn creation(index: u32, base: u64, to: u32) -> [Request; 2] {
    let name = index | (ENTRIES - 1) << 16;
    [(5, base + 0x1000, 3), (1, base, to << 16 | 1)].map(|(opcode, base, dword11)| {
        let dwords = [name, dword11, 0, 0, 0, 0];
        Request { opcode, prps: (base, 0), dwords, ..Request::default() }
    })
}

/// Register, configuration and table accesses to the function, whose thread runs.
pub fn function(data: &[u8]) {
    let mut script = Script(data);
    let mut driver = Driver::off(EngineChoice::Plain, &spec(None), 1);
    while !script.done() {
        access(&mut script, &mut driver);
    }
    driver.function.reset();
}

/// One access.
pub fn access(script: &mut Script<'_>, driver: &mut Driver) {
    let bytes = script.number().to_le_bytes();
    let mut answer = bytes;
    let length = [1, 2, 4, 8][usize::from(script.byte() % 4)];
    let near = u64::from(script.word());
    let registers = [0x0c, 0x10, 0x14, 0x1c, 0x24, 0x28, 0x2c, 0x30, 0x34];
    let register = registers[usize::from(script.byte()) % registers.len()];
    let config = script.word() % (4096 - 3);
    match script.byte() % 8 {
        0 => driver.function.read_config(config, &mut answer[..length.min(4)]),
        1 => driver.function.write_config(config, &bytes[..length.min(4)]),
        2 => driver.function.read_bar(0, near % 0x3ff8, &mut answer[..length]),
        3 => driver.function.write_bar(0, near % 0x3ff8, &bytes[..length]),
        4 => driver.function.write_bar(0, register, &bytes[..length.max(4)]),
        5 => driver.write(0x14, 4, 0x0046_0000 | u64::from(bytes[0] & 1)),
        6 => driver.write(0x1000 + 4 * (near % 6), 4, u64::from(bytes[0])),
        _ => driver.function.bars_changed(),
    }
}
