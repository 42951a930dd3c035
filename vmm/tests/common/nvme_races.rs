//! What fuzzing does to the NVMe controller while another thread writes guest memory and doorbells:
//! commands, lists of pages, data and tails that change between two looks at them.
//!
//! The first half of the bytes is what a driver does, the second half is the changes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use std::{os::fd::AsFd, sync::Arc, time::Instant};

use vm_memory::{Bytes, GuestAddress};
use vmm::{
    devices::{
        nvme::{
            controller::{Controller, DEPTH},
            shared::Shared,
        },
        virtio::blk::{
            engine::{Engine, EngineChoice},
            request::Access,
        },
    },
    pci::function::PciFunction,
    sys::memory::GuestRam,
};

use super::{
    nvme::{
        ACQ, ASQ, DATA, Done, Driver, ENTRIES, Pair, QUEUES, Script, access, controller_over,
        creation, numbered, settle, spec, start, step, transfer,
    },
    racing::{Change, Guarded, RACE_ROUNDS, Walled, halves, race, until},
};

/// Rounds from one reset to the next.
const RESET_ROUNDS: u32 = 16;
/// Most commands that a queue holds.
const FULL: u32 = ENTRIES - 1;
/// Where the data of a list's pages begins.
const PAGES: u64 = 0x30000;
/// The block that is read to see whether a controller works.
const SAMPLE: u8 = 5;

/// A controller without a thread, its disk and its driver.
struct Rig {
    walled: Walled,
    memory: GuestRam,
    disk: Guarded,
    access: Access,
    controller: Controller,
    shared: Arc<Shared>,
    pairs: [Pair; 3],
}

impl Rig {
    fn new(script: &mut Script<'_>) -> Self {
        let (walled, disk) = (Walled::new(), Guarded::new(&numbered()));
        let memory = walled.ram.clone();
        let kind = script.byte();
        let choice = if kind & 1 == 0 { EngineChoice::Plain } else { EngineChoice::Best };
        let access = if kind & 2 == 0 { Access::ReadWrite } else { Access::ReadOnly };
        let engine = Engine::new(choice, disk.file.as_fd(), memory.clone(), DEPTH).unwrap();
        let (controller, shared) = controller_over(engine, &memory, access);
        let mut rig = Self { walled, memory, disk, access, controller, shared, pairs: pairs() };
        put_lists(&rig.memory);
        rig.restart();
        settle(&mut rig.controller);
        rig
    }

    /// Resets the controller, switches it on, and asks for its queues.
    fn restart(&mut self) {
        self.controller.stop();
        self.shared.reset();
        self.pairs = pairs();
        start(&mut self.controller, &self.shared, ENTRIES);
        for pair in [1, 2] {
            let base = self.pairs[pair].submissions;
            let name = u32::from(self.pairs[pair].index);
            for request in creation(name, base, name) {
                let (_, tail) = self.pairs[0].put(&self.memory, request);
                self.shared.ring(0, tail);
            }
        }
    }

    /// Offers `count` commands in each of the queues from `first` on, and takes all completions.
    fn offer(&mut self, first: usize, count: u32) {
        for pair in &mut self.pairs[first..] {
            let (doorbell, taken) = (2 * u64::from(pair.index), pair.offer(0));
            self.shared.ring(doorbell + 1, taken);
            self.shared.ring(doorbell, pair.offer(count));
        }
    }

    /// What must hold whatever was done, and that the controller works after a reset.
    fn finish(mut self) {
        settle(&mut self.controller);
        assert!(!self.shared.is_fatal(), "nothing that a driver does later is fatal");
        self.controller.stop();
        self.disk.assert_guarded(&self.walled);
        if self.access == Access::ReadOnly {
            assert!(self.disk.contents() == numbered(), "a read-only disk was written");
        }
        for page in [ASQ, ACQ, QUEUES, QUEUES + 0x1000, QUEUES + 0x2000, QUEUES + 0x3000] {
            self.memory.write_slice(&[0; 0x1000], GuestAddress(page)).unwrap();
        }
        self.restart();
        settle(&mut self.controller);
        let contents = self.disk.contents();
        let expected = &contents[512 * usize::from(SAMPLE)..][..512];
        for pair in &mut self.pairs[1..] {
            self.memory.write_slice(&[0xee; 512], GuestAddress(DATA)).unwrap();
            let (id, tail) = pair.put(&self.memory, transfer(2, SAMPLE.into(), 1));
            self.shared.ring(2 * u64::from(pair.index), tail);
            let mut done = None;
            until(|| {
                settle(&mut self.controller);
                done = pair.poll(&self.memory);
                done.is_some()
            });
            assert_eq!(done, Some(Done { result: 0, id, status: 0 }));
            assert_eq!(pair.poll(&self.memory), None, "one completion");
            let mut data = vec![0; 512];
            self.memory.read_slice(&mut data, GuestAddress(DATA)).unwrap();
            assert!(data == expected, "it works after a reset");
        }
        self.controller.stop();
    }
}

fn pairs() -> [Pair; 3] {
    [
        Pair::new(0, ASQ, ACQ, ENTRIES),
        Pair::new(1, QUEUES, QUEUES + 0x1000, ENTRIES),
        Pair::new(2, QUEUES + 0x2000, QUEUES + 0x3000, ENTRIES),
    ]
}

/// Fills the page at [`DATA`] with a list of pages, so that long transfers find one.
fn put_lists(memory: &GuestRam) {
    for entry in 0..16 {
        memory.write_obj(PAGES + 0x1000 * entry, GuestAddress(DATA + 8 * entry)).unwrap();
    }
}

/// Changes a command of an I/O queue, or a list of pages or the first data.
fn change_commands(memory: &GuestRam, Change { place, value }: Change) {
    let inside = u64::from(place & 0x3fe);
    let at = match place >> 14 {
        0 => QUEUES + inside,
        1 => QUEUES + 0x2000 + inside,
        _ => DATA + inside + u64::from(place & 0x3000),
    };
    memory.write_obj(value, GuestAddress(at)).unwrap();
}

/// Changes any of the queues, a list of pages or the first data, or writes a doorbell.
fn change_all(memory: &GuestRam, change: Change, ring: impl Fn(u64, u32)) {
    let Change { place, value } = change;
    let inside = u64::from(place & 0x3fe);
    match place >> 12 {
        0 => memory.write_obj(value, GuestAddress(ASQ + inside)).unwrap(),
        1 => memory.write_obj(value, GuestAddress(ACQ + inside)).unwrap(),
        2 => memory.write_obj(value, GuestAddress(QUEUES + 0x1000 + inside)).unwrap(),
        3 => memory.write_obj(value, GuestAddress(QUEUES + 0x3000 + inside)).unwrap(),
        // Half of them inside the queue.
        4..=7 => ring(u64::from(place % 7), u32::from(value[0]) % (2 * ENTRIES)),
        8 | 9 => change_commands(memory, Change { place: place & 0xfff, value }),
        10 | 11 => change_commands(memory, Change { place: 0x4000 | place & 0xfff, value }),
        _ => change_commands(memory, change),
    }
}

/// A controller without a thread. By its first byte, either everything may change, and resets come
/// in between; or the driver keeps to the rules but for commands, lists and data, and each command
/// that it offers ends exactly once.
pub fn controller_race(data: &[u8]) {
    let (built, changes) = halves(data);
    let mut script = Script(built);
    let everything = script.byte() % 2 == 1;
    let mut rig = Rig::new(&mut script);
    if everything {
        change_everything(&mut rig, &mut script, changes);
    } else {
        keep_to_the_rules(&mut rig, &mut script, changes);
    }
    rig.finish();
}

fn change_everything(rig: &mut Rig, script: &mut Script<'_>, changes: &[u8]) {
    let (memory, shared) = (rig.memory.clone(), Arc::clone(&rig.shared));
    race(
        changes,
        |change| change_all(&memory, change, |index, value| shared.ring(index, value)),
        || {
            for round in 1..=RACE_ROUNDS {
                if !script.done() {
                    step(script, &rig.memory, &rig.shared, &mut rig.pairs);
                }
                rig.offer(0, 1 + round % FULL);
                rig.controller.turn(Instant::now());
                if round % RESET_ROUNDS == 0 {
                    rig.restart();
                }
            }
        },
    );
}

fn keep_to_the_rules(rig: &mut Rig, script: &mut Script<'_>, changes: &[u8]) {
    while !script.done() {
        let pair = &mut rig.pairs[1 + usize::from(script.byte() % 2)];
        pair.put(&rig.memory, script.command());
    }
    // What was put is offered below, from the first entry on.
    rig.pairs = pairs();
    let memory = rig.memory.clone();
    race(
        changes,
        |change| change_commands(&memory, change),
        || {
            let mut offered = 0;
            for _ in 0..RACE_ROUNDS {
                rig.offer(1, FULL);
                offered += 2 * u64::from(FULL);
                until(|| {
                    rig.controller.turn(Instant::now());
                    let ended = rig.shared.activity.requests.get();
                    assert!(ended <= offered, "{ended} of {offered} commands ended");
                    ended == offered
                });
            }
        },
    );
}

/// The whole function with its thread: registers are written while commands are fetched. It keeps
/// the disk's size, ends each reset, and works after it.
pub fn function_race(data: &[u8]) {
    let (built, changes) = halves(data);
    let mut script = Script(built);
    let mut driver = Driver::off(EngineChoice::Plain, &spec(None), 1);
    driver.enable();
    let memory = driver.machine.ram.clone();
    put_lists(&memory);
    let mut pairs = pairs();
    for index in [1, 2] {
        for request in creation(index, pairs[index as usize].submissions, index) {
            let (_, tail) = pairs[0].put(&memory, request);
            driver.write(0x1000, 4, tail.into());
        }
    }
    race(
        changes,
        |change| change_all(&memory, change, |_, _| ()),
        || {
            for _ in 0..RACE_ROUNDS {
                if script.byte() % 4 == 3 {
                    access(&mut script, &mut driver);
                } else {
                    let pair = &mut pairs[usize::from(script.byte() % 3)];
                    let (_, tail) = pair.put(&memory, script.command());
                    driver.ring(pair, tail);
                    driver.write(0x1004 + 8 * u64::from(pair.index), 4, tail.into());
                }
            }
        },
    );
    driver.function.reset();
    let size = u64::try_from(rustix::fs::fstat(&driver.file).unwrap().st_size).unwrap();
    assert_eq!(size, numbered().len() as u64, "the disk keeps its size");
    assert_eq!(driver.read(0x1c, 4), 0, "CSTS after a reset");
    driver.enable();
    let mut pair = driver.pair(1);
    let expected = driver.block(SAMPLE.into());
    let done = driver.command(&mut pair, transfer(2, SAMPLE.into(), 1));
    assert_eq!(done.status, 0, "it works after a reset");
    assert_eq!(driver.memory(DATA, 512), expected);
}
