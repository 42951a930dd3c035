//! The control queue of a network device, as drivers use it and as none should.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress};
use vmm::{
    devices::virtio::{
        Interrupts, QueueSignal, ReadyQueue, Ring,
        control::{Card, ControlQueue, Pace, Progress, Refused},
        transport::{NO_VECTOR, QueueLayout},
    },
    irq::InterruptSource,
    sys::memory::GuestRam,
};
use vmm_sys_util::eventfd::EventFd;

use crate::driver::{ALL_RING_FEATURES, FakeInterrupts, Queue, ram};

/// Where commands lie, and where their answers are wanted.
const COMMAND: u64 = 0x8000;
const ACK: u64 = 0x9000;
const OK: u8 = 0;
const ERR: u8 = 1;
/// What an answer is before there is one.
const UNTOUCHED: u8 = 0xee;

/// A card with three pairs, of which the third cannot be had, and with the offloads of the lowest four bits.
#[derive(Default)]
struct FakeCard {
    pairs: Vec<u16>,
    offloads: Vec<u64>,
}

impl Card for FakeCard {
    fn possible_pairs(&self) -> u16 {
        3
    }
    fn set_pairs(&mut self, count: u16) -> Result<(), Refused> {
        if count == 3 {
            return Err(Refused);
        }
        self.pairs.push(count);
        Ok(())
    }
    fn set_offloads(&mut self, offloads: u64) -> Result<(), Refused> {
        if offloads > 15 {
            return Err(Refused);
        }
        self.offloads.push(offloads);
        Ok(())
    }
}

struct Desk {
    ram: GuestRam,
    driver: Queue,
    device: ControlQueue,
    pace: Pace,
    card: FakeCard,
    now: Instant,
}

impl Desk {
    fn new() -> Self {
        let ram = ram();
        let driver = Queue::new(&ram, 64, 0x1000);
        let layout = QueueLayout {
            size: 64,
            descriptors: driver.table,
            available: driver.avail,
            used: driver.used,
        };
        let ring = Ring::new(layout, ALL_RING_FEATURES, ram.clone()).unwrap();
        let line = FakeInterrupts::default().line(0, 1).unwrap();
        let interrupts = Arc::new(Interrupts::new(&[], line).unwrap());
        let signal = QueueSignal::new(interrupts, NO_VECTOR);
        let kick = Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
        let device = ControlQueue::new(ReadyQueue { index: 6, ring, kick, signal });
        let now = Instant::now();
        Self { ram, driver, device, pace: Pace::new(now), card: FakeCard::default(), now }
    }

    /// Lets the device look, with its doorbell rung.
    fn turn(&mut self) -> Progress {
        self.device.queue().kick.write(1).unwrap();
        self.device.turn(&mut self.card, &mut self.pace, self.now).unwrap()
    }

    /// Sends a command with a place for the answer; returns the answer and the length of what was used.
    fn ask(&mut self, command: &[u8]) -> (u8, u32) {
        self.ram.write_slice(command, GuestAddress(COMMAND)).unwrap();
        let length = u32::try_from(command.len()).unwrap();
        self.ask_in(&[(COMMAND, length, false), (ACK, 1, true)])
    }

    fn ask_in(&mut self, buffers: &[(u64, u32, bool)]) -> (u8, u32) {
        self.now += Duration::from_secs(10);
        self.ram.write_obj(UNTOUCHED, GuestAddress(ACK)).unwrap();
        let head = self.driver.add(buffers);
        assert_eq!(self.turn(), Progress::Idle);
        let (used, length) = self.driver.wait_used();
        assert_eq!(used, head);
        (self.ram.read_obj(GuestAddress(ACK)).unwrap(), length)
    }
}

#[test]
fn pairs_are_turned_on_and_off() {
    let mut desk = Desk::new();
    assert_eq!(desk.ask(&[4, 0, 2, 0]), (OK, 1));
    assert_eq!(desk.ask(&[4, 0, 1, 0]), (OK, 1));
    // One byte to a descriptor, and more room than the answer needs.
    let bytes = [0, 1, 2, 3].map(|at| (COMMAND + at, 1, false));
    desk.ram.write_slice(&[4, 0, 2, 0], GuestAddress(COMMAND)).unwrap();
    let [a, b, c, d] = bytes;
    assert_eq!(desk.ask_in(&[a, b, c, d, (ACK, 64, true)]), (OK, 1));
    assert_eq!(desk.card.pairs, [2, 1, 2]);
}

#[test]
fn offloads_are_switched_off_and_on() {
    let mut desk = Desk::new();
    assert_eq!(desk.ask(&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0]), (OK, 1));
    assert_eq!(desk.ask(&[5, 0, 15, 0, 0, 0, 0, 0, 0, 0]), (OK, 1));
    // The header in one descriptor and the bits in another, as Linux has it; and in the middle of the bits.
    desk.ram.write_slice(&[5, 0, 7, 0, 0, 0, 0, 0, 0, 0], GuestAddress(COMMAND)).unwrap();
    let halves = |at: u32| [(COMMAND, at, false), (COMMAND + u64::from(at), 10 - at, false)];
    let ack = (ACK, 1, true);
    assert_eq!(desk.ask_in(&[&halves(2)[..], &[ack]].concat()), (OK, 1));
    assert_eq!(desk.ask_in(&[&halves(5)[..], &[ack]].concat()), (OK, 1));
    assert_eq!(desk.card.offloads, [0, 15, 7, 7]);
    assert!(desk.card.pairs.is_empty());
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let mut desk = Desk::new();
    let bad: [&[u8]; 15] = [
        &[4, 0, 0, 0],       // no pair at all
        &[4, 0, 3, 0],       // the host cannot
        &[4, 0, 4, 0],       // more than there are
        &[4, 0, 0xff, 0xff], // many more
        &[4, 1, 2, 0],       // steering by a hash, which is not offered
        &[0, 0, 1, 0],       // receive filters, which are not offered
        &[4, 0, 2],          // too short
        &[4, 0, 2, 0, 0],    // too long
        &[4],
        &[5, 0, 16, 0, 0, 0, 0, 0, 0, 0], // offloads that were not agreed on
        &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0x80], // likewise
        &[5, 1, 0, 0, 0, 0, 0, 0, 0, 0],  // no command of its class
        &[5, 0, 0, 0, 0, 0, 0, 0, 0],     // too short
        &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], // too long
        &[5, 0, 0, 0],                    // as long as the other command
    ];
    for command in bad {
        assert_eq!(desk.ask(command), (ERR, 1), "{command:?}");
    }
    // Without a command, from beyond memory, and larger than memory.
    assert_eq!(desk.ask_in(&[(ACK, 1, true)]), (ERR, 1));
    assert_eq!(desk.ask_in(&[(u64::MAX - 1, 4, false), (ACK, 1, true)]), (ERR, 1));
    assert_eq!(desk.ask_in(&[(COMMAND, u32::MAX - 1, false), (ACK, 1, true)]), (ERR, 1));
    assert!(desk.card.pairs.is_empty() && desk.card.offloads.is_empty());
}

#[test]
fn whoever_leaves_no_room_for_the_answer_hears_nothing() {
    let mut desk = Desk::new();
    desk.ram.write_slice(&[4, 0, 2, 0], GuestAddress(COMMAND)).unwrap();
    assert_eq!(desk.ask_in(&[(COMMAND, 4, false)]), (UNTOUCHED, 0));
    assert!(desk.card.pairs.is_empty());
    let beyond = [(COMMAND, 4, false), (u64::MAX - 64, 1, true)];
    assert_eq!(desk.ask_in(&beyond), (UNTOUCHED, 0));
}

#[test]
fn a_driver_that_goes_on_asking_waits() {
    let mut desk = Desk::new();
    desk.ram.write_slice(&[4, 0, 2, 0], GuestAddress(COMMAND)).unwrap();
    for _ in 0..40 {
        desk.driver.add(&[(COMMAND, 4, false), (ACK, 1, true)]);
    }
    let start = desk.now;
    assert_eq!(desk.turn(), Progress::More, "a batch");
    let Progress::At(time) = desk.turn() else { panic!("all at once") };
    assert_eq!((desk.card.pairs.len(), time), (16, start + Duration::from_millis(100)));
    // Ringing again changes nothing; time does.
    assert_eq!(desk.turn(), Progress::At(time));
    assert_eq!(desk.driver.used_index(), 16);
    desk.now = start + Duration::from_secs(1);
    assert!(matches!(desk.turn(), Progress::At(_)));
    assert_eq!((desk.card.pairs.len(), desk.driver.used_index()), (26, 26));
    desk.now = start + Duration::from_secs(60);
    assert_eq!(desk.turn(), Progress::Idle);
    assert_eq!(desk.driver.used_index(), 40);
}
