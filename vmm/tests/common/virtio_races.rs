//! What fuzzing does to queues that are served while another thread writes guest memory: indexes,
//! descriptors and buffers that change between two looks at them.
//!
//! The first half of the bytes builds a queue as `virtio_scripts` does, the second half is the
//! changes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use std::time::Instant;

use vm_memory::{Bytes, GuestAddress};
use vmm::{
    counters::Activity,
    devices::virtio::{
        F_VERSION_1, Ring,
        blk::queue::{Live, Progress},
        control::{self, ControlQueue, Pace},
        rng,
        transport::QueueLayout,
    },
    sys::memory::GuestRam,
};

use super::{
    racing::{Change, Guarded, RACE_ROUNDS, Walled, halves, race, until},
    virtio::Queue,
    virtio_scripts::{
        FakeCard, MAX_ROUNDS, Ready, SECTORS, Script, Served, block_job, block_queue, build_ring,
        put_commands, ready, signal,
    },
};

/// Entries of the queue that is used after a reset.
const FRESH_SIZE: u16 = 8;

/// Changes descriptors, the ring of offers, the used ring, or the first buffers.
fn change_ring(memory: &GuestRam, change: Change) {
    let at = 0x1000 + u64::from(change.place % 0x4000);
    memory.write_obj(change.value, GuestAddress(at & !1)).unwrap();
}

/// Returns how many chains the driver says to have offered, ever.
fn offered(memory: &GuestRam) -> u16 {
    memory.read_obj(GuestAddress(0x2002)).unwrap()
}

/// Offers half a queue more, when all of it was taken.
fn offer_more(memory: &GuestRam, size: u16) {
    let next = offered(memory).wrapping_add(size.div_ceil(2));
    memory.write_obj(next, GuestAddress(0x2002)).unwrap();
}

/// As many chains were answered as the index of offers says, which wraps.
fn assert_all_answered(memory: &GuestRam, activity: &Activity) {
    let answered = activity.requests.get().to_le_bytes();
    assert_eq!(u16::from_le_bytes([answered[0], answered[1]]), offered(memory), "each chain once");
}

/// A driver's queue where the other one was, empty.
fn fresh_queue(memory: &GuestRam) -> Queue {
    memory.write_slice(&[0; 0x3000], GuestAddress(0x1000)).unwrap();
    Queue::new(memory, FRESH_SIZE, 0x1000)
}

fn fresh_ring(memory: &GuestRam) -> Ring {
    let layout =
        QueueLayout { size: FRESH_SIZE, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
    Ring::new(layout, F_VERSION_1, memory.clone()).unwrap()
}

/// A block queue: nothing is read or written outside guest memory and the disk, its work ends, and
/// a queue that gave up works again after a reset.
pub fn block_race(data: &[u8]) {
    let (built, changes) = halves(data);
    let (walled, disk) = (Walled::new(), Guarded::new(&[7; 512 * SECTORS]));
    let memory = walled.ram.clone();
    let Served { mut queue, mut live, size, kick, activity, distress } =
        block_queue(built, &memory, &disk.file);
    race(
        changes,
        |change| change_ring(&memory, change),
        || {
            for _ in 0..RACE_ROUNDS {
                kick.write(1).unwrap();
                if queue.turn(&mut live) == Progress::Idle {
                    offer_more(&memory, size);
                }
            }
        },
    );
    until(|| {
        kick.write(1).unwrap();
        let busy = (0..MAX_ROUNDS).all(|_| queue.turn(&mut live) == Progress::More);
        assert!(!busy, "a ring that does not move keeps the thread busy");
        let answered = activity.requests.get() % 0x1_0000 == u64::from(offered(&memory));
        distress.is_raised() || answered
    });
    queue.drain();
    disk.assert_guarded(&walled);

    let mut driver = fresh_queue(&memory);
    memory.write_slice(&[0; 16], GuestAddress(0x4000)).unwrap();
    driver.add(&[(0x4000, 16, false), (0x5000, 512, true), (0x6000, 1, true)]);
    let (job, _) = block_job(fresh_ring(&memory));
    let mut live = Live::from(job);
    until(|| {
        queue.turn(&mut live);
        driver.used_index() > 0
    });
    assert_eq!(driver.wait_used(), (0, 513), "it works after a reset");
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x6000)).unwrap(), 0);
}

/// An entropy queue: each chain that is offered is answered once, none gets more than it may, and
/// the work ends.
pub fn entropy_race(data: &[u8]) {
    let (built, changes) = halves(data);
    let (walled, disk) = (Walled::new(), Guarded::new(&[]));
    let memory = walled.ram.clone();
    let mut ring = build_ring(&mut Script(built), &memory);
    let size = ring.layout().size;
    let ((signal, _interrupts), activity) = (signal(), Activity::default());
    let batch = |ring: &mut Ring| {
        let before = activity.requests.get();
        let outcome = rng::answer_batch(ring, &signal, &activity).ok();
        let requests = activity.requests.get();
        assert!(requests - before <= rng::BATCH.into(), "more than a batch");
        assert!(activity.read_bytes.get() <= requests * rng::MAX_BYTES as u64);
        outcome
    };
    let sane = race(
        changes,
        |change| change_ring(&memory, change),
        || {
            (0..RACE_ROUNDS).all(|_| {
                let outcome = batch(&mut ring);
                if outcome == Some(rng::Progress::Idle) {
                    offer_more(&memory, size);
                }
                outcome.is_some()
            })
        },
    );
    let mut looks = (0..MAX_ROUNDS).map(|_| batch(&mut ring));
    let last = if sane { looks.find(|look| *look != Some(rng::Progress::More)) } else { None };
    match last {
        Some(Some(_)) => assert_all_answered(&memory, &activity),
        // It gave up, while everything changed or after.
        Some(None) => {}
        None => assert!(!sane, "a ring that does not move keeps the thread busy"),
    }

    let mut driver = fresh_queue(&memory);
    driver.add(&[(0x4000, 64, true)]);
    driver.add(&[(0x5000, 5000, true)]);
    assert_eq!(batch(&mut fresh_ring(&memory)), Some(rng::Progress::Idle));
    assert_eq!([driver.wait_used(), driver.wait_used()], [(0, 64), (1, 4096)]);
    assert_eq!(driver.used_index(), 2);
    disk.assert_guarded(&walled);
}

/// A network card's control queue: only numbers of pairs that exist are ever set, at the pace that
/// is promised, and the work ends.
pub fn control_race(data: &[u8]) {
    let (built, changes) = halves(data);
    let mut script = Script(built);
    let (walled, disk) = (Walled::new(), Guarded::new(&[]));
    let memory = walled.ram.clone();
    let mut card = FakeCard::new(&mut script);
    put_commands(&mut script, &memory);
    let Ready { queue, kick, .. } = ready(build_ring(&mut script, &memory));
    let size = queue.ring.layout().size;
    let mut queue = ControlQueue::new(queue);
    let start = Instant::now();
    let (mut now, mut pace) = (start, Pace::new(start));
    let mut turn = |queue: &mut ControlQueue, card: &mut FakeCard| {
        let before = card.changes;
        let outcome = queue.turn(card, &mut pace, now).ok();
        if let Some(control::Progress::At(time)) = outcome {
            assert!(time > now, "a command waits for a time that has passed");
            now = time;
        }
        assert!(card.changes - before <= 16, "more than a batch");
        card.assert_paced(now.duration_since(start));
        outcome
    };
    let sane = race(
        changes,
        |change| change_ring(&memory, change),
        || {
            (0..RACE_ROUNDS).all(|_| {
                kick.write(1).unwrap();
                let outcome = turn(&mut queue, &mut card);
                if outcome == Some(control::Progress::Idle) {
                    offer_more(&memory, size);
                }
                outcome.is_some()
            })
        },
    );
    // As many looks as `virtio_scripts::control` grants.
    let over = |look| matches!(look, Some(control::Progress::Idle) | None);
    let quiet = !sane || (0..1024).any(|_| over(turn(&mut queue, &mut card)));
    assert!(quiet, "a ring that does not move keeps the thread busy");

    let mut driver = fresh_queue(&memory);
    memory.write_slice(&[4, 0, 1, 0, 0xff], GuestAddress(0x4000)).unwrap();
    driver.add(&[(0x4000, 4, false), (0x4004, 1, true)]);
    let mut queue = ControlQueue::new(ready(fresh_ring(&memory)).queue);
    assert!((0..1024).any(|_| over(turn(&mut queue, &mut card))));
    assert_eq!((driver.wait_used(), driver.used_index()), ((0, 1), 1));
    let works = u8::from(card.refuses || card.possible == 0);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x4004)).unwrap(), works);
    disk.assert_guarded(&walled);
}
