//! Limits of disks: what each takes, and when.

use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use vmm::{
    devices::{
        throttle::{Admission, Limits},
        virtio::{
            Distress, DistressFlag, F_VERSION_1, Interrupts, QueueSignal, ReadyQueue, Ring,
            VirtioPci,
            blk::{
                self, Block, Durability,
                engine::{Engine, EngineChoice},
                queue::{BlockQueue, Job, Live},
                request::{Access, Rules, Support},
            },
            transport::{NO_VECTOR, QueueLayout},
        },
    },
    events::Events,
    irq::InterruptSource,
};
use vmm_sys_util::eventfd::EventFd;

use super::{DATA, Disk, F_FLUSH, HEADER, SECTORS, STATUS, device, file, spec, start_driver};
use crate::driver::{Machine, Queue, enable_msix, wait_for};

#[test]
fn a_limit_spreads_requests_evenly() {
    let operations = Some(types::vm::Rate { per_second: 100, burst: 1 });
    let limit = Some(types::vm::RateLimit { bytes: None, operations });
    let machine = Machine::new();
    let file = file();
    let shared = file.as_fd().try_clone_to_owned().unwrap();
    let spec = types::vm::Disk { limit, ..spec(false) };
    let block = Block::new(&spec, shared, 1, EngineChoice::Best, machine.ram.clone()).unwrap();
    let mut function = VirtioPci::new(Box::new(block), 16, &machine.platform).unwrap();
    function.start().unwrap();
    enable_msix(&mut function, 2);
    let queue = start_driver(&mut function, &machine, F_FLUSH);
    let mut disk = Disk { function, machine, file, queue };
    let start = std::time::Instant::now();
    let times: Vec<u128> = (0..11)
        .map(|_| {
            assert_eq!(disk.request(0, 5, &[(DATA, 512, true)]), (0, 513));
            start.elapsed().as_millis()
        })
        .collect();
    assert!(times[10] >= 99, "eleven requests at 100 a second took {times:?} ms");
    // Flushes are free.
    assert_eq!(disk.request(4, 0, &[]), (0, 1));
}

/// What a machine's other disks took leaves less for this one, which has no limit of its own.
#[test]
fn disks_keep_to_the_limit_of_their_machine() {
    let mut machine = Machine::new();
    let operations = Some(types::vm::Rate { per_second: 20, burst: 1 });
    let limit = types::vm::RateLimit { bytes: None, operations };
    let start = Instant::now();
    machine.platform.limits = Limits::new(Some(limit), start);
    let file = file();
    let shared = file.as_fd().try_clone_to_owned().unwrap();
    let mut function =
        blk::open(&spec(false), (shared, Vec::new()), 1, 16, &machine.platform).unwrap();
    function.start().unwrap();
    enable_msix(&mut function, 2);
    let queue = start_driver(&mut function, &machine, F_FLUSH);
    let others = [0; 4].map(|bytes| machine.platform.limits.admit(start, bytes));
    assert_eq!(others[3], Admission::At(start + Duration::from_millis(150)));
    let mut disk = Disk { function, machine, file, queue };
    assert_eq!(disk.request(0, 5, &[(DATA, 512, true)]), (0, 513));
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    let next = disk.machine.platform.limits.admit(start, 0);
    assert_eq!(next, Admission::At(start + Duration::from_millis(250)));
}

/// A queue that is served by hand, with `limits`.
fn limited_queue(disk: &Disk, limits: &Limits) -> (BlockQueue, Live) {
    let layout = QueueLayout {
        size: disk.queue.size,
        descriptors: disk.queue.table,
        available: disk.queue.avail,
        used: disk.queue.used,
    };
    let ram = &disk.machine.ram;
    let line = disk.machine.interrupts.line(0, 1).unwrap();
    let interrupts = Arc::new(Interrupts::new(&[], line).unwrap());
    let flag = Arc::new(DistressFlag::new("blk", Events::default()));
    let live = Live::from(Job {
        queue: ReadyQueue {
            index: 0,
            ring: Ring::new(layout, F_VERSION_1, ram.clone()).unwrap(),
            kick: Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap()),
            signal: QueueSignal::new(Arc::clone(&interrupts), NO_VECTOR),
        },
        rules: Rules {
            sectors: SECTORS,
            access: Access::ReadWrite,
            discard: Support::No,
            zero: Support::No,
        },
        durability: Durability::Cached,
        distress: Distress::new(flag, interrupts),
        activity: Arc::default(),
        limits: limits.clone(),
    });
    let engine = Engine::new(EngineChoice::Plain, disk.file.as_fd(), ram.clone(), 16).unwrap();
    (BlockQueue::new(engine, 16, [0; 20]), live)
}

#[test]
fn a_request_that_waited_for_its_turn_takes_it_once() {
    // No driver has started the device: its own thread leaves the ring alone.
    let (function, machine, file) = device(EngineChoice::Plain, 1, false);
    let queue = Queue::new(&machine.ram, 16, 0x1000);
    let mut disk = Disk { function, machine, file, queue };
    let operations = Some(types::vm::Rate { per_second: 10, burst: 1 });
    let limit = types::vm::RateLimit { bytes: None, operations };
    let limits = Limits::new(Some(limit), Instant::now());
    let (mut queue, mut live) = limited_queue(&disk, &limits);
    disk.header(HEADER, 0, 5);
    for _ in 0..2 {
        disk.queue.add(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    }
    queue.turn(&mut live);
    let first = Instant::now();
    assert_eq!(disk.queue.used_index(), 1);
    wait_for(|| {
        queue.turn(&mut live);
        disk.queue.used_index() == 2
    });
    // The first two of ten a second are paid for 200 ms after the first.
    let next = limits.admit(first, 0);
    let Admission::At(time) = next else { panic!("a third at once") };
    assert!(time <= first + Duration::from_millis(200), "{:?}", time - first);
}
