//! The entropy device, with its real thread behind its real filter.

use vm_memory::{Bytes, GuestAddress};
use vmm::devices::virtio::{VirtioPci, rng};

use crate::driver::{
    ALL_RING_FEATURES, Machine, NEXT, Queue, Registers, WRITE, enable_msix, wait_for,
};

fn started() -> (VirtioPci, Machine, Queue) {
    let machine = Machine::new();
    let mut function = rng::open(16, &machine.platform).unwrap();
    function.start().unwrap();
    enable_msix(&mut function, 2);
    let queue = Queue::new(&machine.ram, 8, 0x1000);
    assert!(function.negotiate(ALL_RING_FEATURES));
    assert!(function.set_queue(0, &queue, 1));
    function.set_status(15);
    (function, machine, queue)
}

#[test]
fn buffers_are_filled() {
    let (mut function, machine, mut queue) = started();
    queue.add(&[(0x8000, 64, true), (0x9000, 64, true)]);
    function.kick(0);
    assert_eq!(queue.wait_used(), (0, 128));
    let mut bytes = [0; 64];
    machine.ram.read_slice(&mut bytes, GuestAddress(0x9000)).unwrap();
    assert_ne!(bytes, [0; 64]);
    wait_for(|| machine.fired(1) > 0);
}

#[test]
fn a_request_is_answered_in_part_rather_than_for_long() {
    let (mut function, _machine, mut queue) = started();
    queue.add(&[(0x8000, 0x10000, true)]);
    function.kick(0);
    assert_eq!(queue.wait_used(), (0, 4096));
}

#[test]
fn buffers_outside_memory_get_nothing() {
    let (mut function, _machine, mut queue) = started();
    queue.add(&[(0x8000, 16, true), (u64::MAX - 8, 16, true)]);
    queue.add(&[(0x4000_0000, 16, true)]);
    queue.add(&[(0x8000, 16, false)]);
    function.kick(0);
    assert_eq!(
        [queue.wait_used(), queue.wait_used(), queue.wait_used()],
        [(0, 16), (2, 0), (3, 0)]
    );
}

#[test]
fn a_ring_that_makes_no_sense_is_left_alone_until_reset() {
    let (mut function, machine, mut queue) = started();
    queue.write_descriptor(0, (0x8000, 16, NEXT | WRITE, 0));
    queue.offer(0);
    function.kick(0);
    wait_for(|| function.status() & 64 != 0);
    function.set_status(0);
    wait_for(|| function.status() == 0);
    machine.ram.write_slice(&[0; 0x3000], GuestAddress(0x1000)).unwrap();
    let mut queue = Queue::new(&machine.ram, 8, 0x1000);
    assert!(function.negotiate(ALL_RING_FEATURES));
    assert!(function.set_queue(0, &queue, 1));
    function.set_status(15);
    queue.add(&[(0x8000, 16, true)]);
    function.kick(0);
    assert_eq!(queue.wait_used(), (0, 16));
}
