//! What fuzzing does to devices: bytes become register accesses, descriptors and rings that are
//! almost right, so that they get far.

#![allow(dead_code, reason = "each user needs a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress};
use vmm::{
    counters::Activity,
    devices::virtio::{
        Distress, DistressFlag, F_VERSION_1, Interrupts, MAX_RING_SIZE, QueueSignal, ReadyQueue,
        Ring, VirtioPci,
        blk::{
            Durability,
            engine::{Engine, EngineChoice},
            queue::{BlockQueue, Job, Live, Progress},
            request::{Access, Rules, Support},
        },
        control::{self, Card, ControlQueue, Pace, Refused},
        rng,
        transport::{Effect, NO_VECTOR, QueueLayout, RingMemory, Transport},
    },
    irq::InterruptSource,
    pci::function::PciFunction,
    sys::memory::GuestRam,
};
use vmm_sys_util::eventfd::EventFd;

use super::virtio::{
    ALL_RING_FEATURES, FakeInterrupts, HIGH_RAM, Machine, NullDevice, RAM_SIZE, ram,
};

/// Reads a script; past its end everything is zero.
pub struct Script<'a>(pub &'a [u8]);

impl Script<'_> {
    fn done(&self) -> bool {
        self.0.is_empty()
    }
    fn byte(&mut self) -> u8 {
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
    /// An address: mostly near memory that matters, or anything.
    fn address(&mut self) -> u64 {
        let kind = self.byte();
        let near = u64::from(self.word());
        match kind % 8 {
            0..=2 => 0x4000 + near,
            3 => near,
            4 => (RAM_SIZE - 0x8000).wrapping_add(near),
            5 => HIGH_RAM.wrapping_sub(0x100).wrapping_add(near),
            6 => u64::MAX - near,
            _ => self.number(),
        }
    }
    fn length(&mut self) -> u32 {
        match self.byte() % 8 {
            0 => 0,
            1 => 1,
            2 => 16,
            3 => 512,
            4 => u32::from(self.word()),
            5 => u32::MAX,
            _ => 512 * u32::from(self.byte()),
        }
    }
}

/// Register accesses to the transport alone: what was latched never changes until a reset.
pub fn transport(data: &[u8]) {
    let mut script = Script(data);
    let memory = ram();
    let mut transport = Transport::new(ALL_RING_FEATURES | 0xff, 3, 4);
    let mut live: Option<Vec<(u16, QueueLayout)>> = None;
    while !script.done() {
        let offset = u64::from(script.byte() % 0x44);
        let bytes = script.number().to_le_bytes();
        let length = [1, 2, 4, 8][usize::from(script.byte() % 4)];
        match transport.write(offset, &bytes[..length], &memory) {
            Effect::None => {}
            Effect::Activate(queues) => {
                assert!(live.is_none(), "a device is activated once");
                for (_, layout) in &queues {
                    assert_sound(layout, &memory);
                }
                live = Some(queues);
            }
            Effect::Reset => {
                live = None;
                transport.finish_reset();
            }
        }
        if let Some(queues) = &live {
            for (index, layout) in queues {
                assert_eq!(shown(&transport, *index, &memory), *layout, "latched");
                let vector = transport.queue_vector(*index);
                assert!(vector < 4 || vector == NO_VECTOR, "{vector}");
            }
        }
    }
}

/// Reads back what the registers say of a queue, through a copy.
fn shown(transport: &Transport, index: u16, memory: &GuestRam) -> QueueLayout {
    let mut copy = transport.clone();
    copy.write(0x16, &index.to_le_bytes(), memory);
    let mut image = [0; 0x3c];
    copy.read(0, &mut image);
    let word = |at: usize| u16::from_le_bytes([image[at], image[at + 1]]);
    let address = |at: usize| u64::from_le_bytes(image[at..at + 8].try_into().unwrap());
    QueueLayout {
        size: word(0x18),
        descriptors: address(0x20),
        available: address(0x28),
        used: address(0x30),
    }
}

fn assert_sound(layout: &QueueLayout, memory: &GuestRam) {
    let entries = u64::from(layout.size);
    assert!(layout.size.is_power_of_two() && layout.size <= MAX_RING_SIZE);
    assert!(memory.contains(layout.descriptors, 16 * entries));
    assert!(memory.contains(layout.available, 6 + 2 * entries));
    assert!(memory.contains(layout.used, 6 + 8 * entries));
}

/// Configuration space and BAR accesses to a whole function.
pub fn function(data: &[u8]) {
    let mut script = Script(data);
    let machine = Machine::new();
    let (device, _seen) = NullDevice::new(3);
    let mut function = VirtioPci::new(Box::new(device), 16, &machine.platform).unwrap();
    function.place_bar(0, 0xc000_0000);
    while !script.done() {
        let kind = script.byte();
        let length = [1, 2, 4, 8][usize::from(script.byte() % 4)];
        let near = script.word();
        let mut bytes = script.number().to_le_bytes();
        let bytes = &mut bytes[..length];
        let config = (near % 0x100) & !(u16::try_from(length.min(4)).unwrap() - 1);
        let offset = u64::from(near) % (0x8000 - 8);
        match kind % 6 {
            0 => function.read_config(config, &mut bytes[..length.min(4)]),
            1 => function.write_config(config, &bytes[..length.min(4)]),
            2 => function.read_bar(0, offset, bytes),
            3 => function.write_bar(0, offset, bytes),
            4 => function.write_bar(0, offset % 0x3c, bytes),
            _ => function.bars_changed(),
        }
    }
    function.reset();
}

/// Fills guest memory and one ring from a script; returns the ring.
pub fn build_ring(script: &mut Script<'_>, memory: &GuestRam) -> Ring {
    let size = [1, 2, 4, 8, 16, 64, 256][usize::from(script.byte() % 7)];
    let layout = QueueLayout { size, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
    let features = F_VERSION_1 | (u64::from(script.byte()) << 24);
    let mut offered = 0u16;
    while !script.done() {
        match script.byte() % 8 {
            0..=2 => {
                let index = script.word() % (size + 1);
                put_descriptor(script, memory, 0x1000 + 16 * u64::from(index));
            }
            3 => {
                // A table somewhere in the buffers.
                let at = 0x4000 + 16 * u64::from(script.byte());
                put_descriptor(script, memory, at);
            }
            4 => {
                let header =
                    [script.byte(), 0, 0, 0, 0, 0, 0, 0, script.byte(), 0, 0, 0, 0, 0, 0, 0];
                let at = 0x4000 + 16 * u64::from(script.byte());
                memory.write_slice(&header, GuestAddress(at)).unwrap();
            }
            5 | 6 => {
                let at = 0x2004 + 2 * u64::from(offered % size);
                memory.write_obj(script.word() % (size + 1), GuestAddress(at)).unwrap();
                offered = offered.wrapping_add(1);
            }
            _ => offered = offered.wrapping_add(script.word()),
        }
    }
    memory.write_obj(offered, GuestAddress(0x2002)).unwrap();
    Ring::new(layout, features, memory.clone()).unwrap()
}

fn put_descriptor(script: &mut Script<'_>, memory: &GuestRam, at: u64) {
    let descriptor =
        (script.address(), script.length(), u16::from(script.byte() % 8), script.word() % 300);
    super::virtio::write_descriptor(memory, at, descriptor);
}

pub fn signal() -> (QueueSignal, Arc<Interrupts>) {
    let source = FakeInterrupts::default();
    let vectors = vec![source.allocate_msi().unwrap(), source.allocate_msi().unwrap()];
    let line = source.line(0, 1).unwrap();
    let interrupts = Arc::new(Interrupts::new(&vectors, line).unwrap());
    (QueueSignal::new(Arc::clone(&interrupts), 0), interrupts)
}

/// Rounds after which a device must have nothing left to do with a ring that does not move.
pub const MAX_ROUNDS: u32 = 16;

/// Rubbish in a block queue: the thread's work ends, and the disk keeps its size.
pub fn block(data: &[u8]) {
    let (memory, file) = (ram(), disk(64 * 512));
    let Served { mut queue, mut live, .. } = block_queue(data, &memory, &file);
    let busy = (0..MAX_ROUNDS).all(|_| queue.turn(&mut live) == Progress::More);
    assert!(!busy, "a ring that does not move keeps the thread busy");
    queue.drain();
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, 64 * 512);
}

/// Sectors of a disk.
pub const SECTORS: usize = 64;

/// A block queue, its driver's doorbell, and what it says of itself.
pub struct Served {
    pub queue: BlockQueue,
    pub live: Live,
    /// Entries of its ring.
    pub size: u16,
    pub kick: Arc<EventFd>,
    pub activity: Arc<Activity>,
    pub distress: Arc<DistressFlag>,
}

pub fn block_queue(data: &[u8], memory: &GuestRam, file: &OwnedFd) -> Served {
    let mut script = Script(data);
    let choice = if script.byte() % 2 == 0 { EngineChoice::Plain } else { EngineChoice::Best };
    let ring = build_ring(&mut script, memory);
    let engine = Engine::new(choice, std::os::fd::AsFd::as_fd(file), memory.clone(), MAX_RING_SIZE);
    let queue = BlockQueue::new(engine.unwrap(), MAX_RING_SIZE, *b"serial number 123456");
    let size = ring.layout().size;
    let (job, distress) = block_job(ring);
    let (kick, activity) = (Arc::clone(&job.queue.kick), Arc::clone(&job.activity));
    Served { queue, live: Live::from(job), size, kick, activity, distress }
}

/// What a block queue's thread is given, and the flag by which it asks for a reset.
pub fn block_job(ring: Ring) -> (Job, Arc<DistressFlag>) {
    let Ready { queue, interrupts, .. } = ready(ring);
    let flag = Arc::new(DistressFlag::new("fuzzed", vmm::events::Events::default()));
    let job = Job {
        queue,
        rules: Rules {
            sectors: SECTORS as u64,
            access: Access::ReadWrite,
            discard: Support::Yes,
            zero: Support::Yes,
        },
        durability: Durability::Cached,
        distress: Distress::new(Arc::clone(&flag), interrupts),
        activity: Arc::default(),
        limits: Default::default(),
    };
    (job, flag)
}

/// A queue as a device is given it, its driver's doorbell, and the device's interrupts.
pub struct Ready {
    pub queue: ReadyQueue,
    pub kick: Arc<EventFd>,
    interrupts: Arc<Interrupts>,
}

pub fn ready(ring: Ring) -> Ready {
    let (signal, interrupts) = signal();
    let kick = Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
    let queue = ReadyQueue { index: 0, ring, kick: Arc::clone(&kick), signal };
    Ready { queue, kick, interrupts }
}

/// Rubbish in an entropy queue.
pub fn entropy(data: &[u8]) {
    let mut script = Script(data);
    let memory = ram();
    let mut ring = build_ring(&mut script, &memory);
    let (signal, _interrupts) = signal();
    let activity = Activity::default();
    let busy = (0..MAX_ROUNDS).all(|_| {
        matches!(rng::answer_batch(&mut ring, &signal, &activity), Ok(rng::Progress::More))
    });
    assert!(!busy, "a ring that does not move keeps the thread busy");
}

/// A card that only remembers; some refuse.
pub struct FakeCard {
    pub possible: u16,
    pub refuses: bool,
    pub changes: u64,
    used: u16,
}

impl FakeCard {
    pub fn new(script: &mut Script<'_>) -> Self {
        let possible = u16::from(script.byte() % 9);
        Self { possible, refuses: script.byte() % 8 == 7, changes: 0, used: 1 }
    }

    /// No more was asked of it in this time than 16 changes at once and ten each second.
    pub fn assert_paced(&self, time: Duration) {
        assert!(self.used == 1 || self.used <= self.possible);
        let most = 16 + u64::try_from(time.as_millis()).unwrap() / 100;
        assert!(self.changes <= most + 1, "{} changes", self.changes);
    }
}

impl Card for FakeCard {
    fn possible_pairs(&self) -> u16 {
        self.possible
    }
    fn set_pairs(&mut self, count: u16) -> Result<(), Refused> {
        assert!((1..=self.possible).contains(&count), "{count} of {}", self.possible);
        self.changes += 1;
        if self.refuses {
            return Err(Refused);
        }
        self.used = count;
        Ok(())
    }
    fn set_offloads(&mut self, _offloads: u64) -> Result<(), Refused> {
        self.changes += 1;
        if self.refuses { Err(Refused) } else { Ok(()) }
    }
}

/// Writes commands that are almost right into the first buffers, in one piece or in several.
pub fn put_commands(script: &mut Script<'_>, memory: &GuestRam) {
    for number in 0..u64::from(script.byte() % 16) {
        let (class, command) = (script.byte() % 8, script.byte() % 4);
        let [low, high] = (script.word() % 12).to_le_bytes();
        let at = 0x4000 + 64 * number;
        let bytes = [class, command, low, high, 0, 0, 0, 0, 0, 0];
        memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        // Offloads have 64 bits.
        let length: u32 = if class == 5 { 10 } else { 4 };
        let whole = script.byte().is_multiple_of(2);
        let pieces = if whole { vec![(0, length)] } else { vec![(0, 2), (2, length - 2)] };
        let mut next = u16::try_from(3 * number).unwrap();
        for (offset, length) in pieces {
            let to = 0x1000 + 16 * u64::from(next);
            super::virtio::write_descriptor(memory, to, (at + offset, length, 1, next + 1));
            next += 1;
        }
        let to = 0x1000 + 16 * u64::from(next);
        super::virtio::write_descriptor(memory, to, (at + 32, 1, 2, 0));
    }
}

/// Commands and rubbish in a control queue: only numbers of pairs that exist are ever set, at the pace
/// that is promised, and the thread's work ends.
pub fn control(data: &[u8]) {
    let mut script = Script(data);
    let memory = ram();
    let mut card = FakeCard::new(&mut script);
    put_commands(&mut script, &memory);
    let mut queue = ControlQueue::new(ready(build_ring(&mut script, &memory)).queue);
    let start = Instant::now();
    let (mut now, mut pace) = (start, Pace::new(start));
    // A ring holds 256 chains at most, and each look answers eight at least at first and one later.
    let busy = (0..1024).all(|_| match queue.turn(&mut card, &mut pace, now) {
        Ok(control::Progress::More) => true,
        Ok(control::Progress::At(time)) => {
            assert!(time > now, "a command waits for a time that has passed");
            now = time;
            true
        }
        Ok(control::Progress::Idle) | Err(_) => false,
    });
    assert!(!busy, "a ring that does not move keeps the thread busy");
    card.assert_paced(now.duration_since(start));
}

/// An empty disk.
pub fn disk(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}
