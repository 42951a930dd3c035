use super::*;
use crate::devices::virtio::{F_RING_EVENT_IDX, F_RING_INDIRECT_DESC};

/// Memory from 0 to 1 MiB.
struct Low;

impl RingMemory for Low {
    fn contains(&self, address: u64, length: u64) -> bool {
        address.checked_add(length).is_some_and(|end| end <= 1 << 20)
    }
}

const OFFERED: u64 = F_RING_INDIRECT_DESC | F_RING_EVENT_IDX;
const STATUS: u64 = 0x14;

fn transport() -> Transport {
    Transport::new(OFFERED, 2, 3)
}

fn write(transport: &mut Transport, offset: u64, length: usize, value: u64) -> Effect {
    transport.write(offset, &value.to_le_bytes()[..length], &Low)
}

fn read(transport: &Transport, offset: u64, length: usize) -> u64 {
    let mut bytes = [0; 8];
    transport.read(offset, &mut bytes[..length]);
    u64::from_le_bytes(bytes)
}

/// ACKNOWLEDGE, DRIVER, these features, FEATURES_OK.
fn negotiated(features: u64) -> Transport {
    let mut transport = transport();
    write(&mut transport, STATUS, 1, 1);
    write(&mut transport, STATUS, 1, 3);
    write(&mut transport, 0x08, 4, 0);
    write(&mut transport, 0x0c, 4, features & 0xffff_ffff);
    write(&mut transport, 0x08, 4, 1);
    write(&mut transport, 0x0c, 4, features >> 32);
    write(&mut transport, STATUS, 1, 11);
    transport
}

/// Sets up queue `index` and enables it.
fn enable(transport: &mut Transport, index: u64, layout: [u64; 4]) -> bool {
    let [size, descriptors, available, used] = layout;
    write(transport, 0x16, 2, index);
    write(transport, 0x18, 2, size);
    write(transport, 0x1a, 2, 1 + index);
    write(transport, 0x20, 8, descriptors);
    write(transport, 0x28, 8, available);
    write(transport, 0x30, 8, used);
    write(transport, 0x1c, 2, 1);
    read(transport, 0x1c, 2) == 1
}

const GOOD: [u64; 4] = [64, 0x1000, 0x2000, 0x3000];

fn live() -> Transport {
    let mut transport = negotiated(F_VERSION_1);
    assert!(enable(&mut transport, 0, GOOD));
    let effect = write(&mut transport, STATUS, 1, 15);
    assert_eq!(effect, Effect::Activate(vec![(0, GOOD_LAYOUT)]));
    transport
}

const GOOD_LAYOUT: QueueLayout =
    QueueLayout { size: 64, descriptors: 0x1000, available: 0x2000, used: 0x3000 };

/// Every register after reset: offset, bytes, value.
#[test]
fn registers_after_reset() {
    let transport = transport();
    let table: [(u64, usize, u64); 17] = [
        (0x00, 4, 0),
        (0x04, 4, OFFERED),
        (0x08, 4, 0),
        (0x0c, 4, 0),
        (0x10, 2, 0xffff),
        (0x12, 2, 2),
        (0x14, 1, 0),
        (0x15, 1, 0),
        (0x16, 2, 0),
        (0x18, 2, 256),
        (0x1a, 2, 0xffff),
        (0x1c, 2, 0),
        (0x1e, 2, 0),
        (0x20, 8, 0),
        (0x28, 8, 0),
        (0x30, 8, 0),
        (0x38, 4, 0),
    ];
    let read = table.map(|(offset, length, _)| (offset, length, read(&transport, offset, length)));
    assert_eq!(read, table);
}

/// Every writable register before DRIVER_OK: offset, bytes, written, read back.
#[test]
fn registers_take_what_they_should() {
    let table: [(u64, usize, u64, u64); 18] = [
        (0x00, 4, 1, 1),
        (0x04, 4, 5, OFFERED),
        (0x08, 4, 7, 7),
        (0x0c, 4, 0x3000_0000, 0x3000_0000),
        (0x10, 2, 2, 2),
        (0x10, 2, 3, 0xffff),
        (0x12, 2, 9, 2),
        (0x15, 1, 9, 0),
        (0x16, 2, 1, 1),
        (0x18, 2, 128, 128),
        (0x18, 2, 100, 256),
        (0x18, 2, 512, 256),
        (0x18, 2, 0, 256),
        (0x1a, 2, 7, 0xffff),
        (0x1c, 2, 2, 0),
        (0x1e, 2, 9, 0),
        (0x20, 8, 0x1122_3344_5566_7788, 0x1122_3344_5566_7788),
        (0x34, 4, 0x1234, 0x1234),
    ];
    let done = table.map(|(offset, length, value, _)| {
        let mut transport = transport();
        write(&mut transport, offset, length, value);
        (offset, length, value, read(&transport, offset, length))
    });
    assert_eq!(done, table);
}

#[test]
fn accesses_of_the_wrong_width_change_nothing() {
    let mut transport = transport();
    let before = transport.clone();
    for (offset, length) in
        [(0x00, 2), (0x02, 4), (0x14, 2), (0x16, 4), (0x18, 1), (0x20, 2), (0x24, 8)]
    {
        write(&mut transport, offset, length, 0x0101_0101_0101_0101);
    }
    assert_eq!(format!("{before:?}"), format!("{transport:?}"));
}

#[test]
fn reads_behind_the_end_are_zero() {
    assert_eq!(read(&transport(), 0x3c, 4), 0);
    assert_eq!(read(&transport(), u64::MAX - 1, 8), 0);
}

#[test]
fn features_come_in_two_words() {
    let mut transport = transport();
    write(&mut transport, 0x00, 4, 1);
    assert_eq!(read(&transport, 0x04, 4), F_VERSION_1 >> 32);
    write(&mut transport, 0x00, 4, 2);
    assert_eq!(read(&transport, 0x04, 4), 0);
}

#[test]
fn features_are_agreed_on_only_if_offered_and_modern() {
    assert_eq!(negotiated(F_VERSION_1 | F_RING_EVENT_IDX).status(), 11);
    assert_eq!(negotiated(F_RING_EVENT_IDX).status(), 3);
    assert_eq!(negotiated(F_VERSION_1 | 1).status(), 3);
    assert_eq!(negotiated(F_VERSION_1 | 1 << 40).status(), 3);
}

#[test]
fn features_are_fixed_once_agreed_on() {
    let mut transport = negotiated(F_VERSION_1);
    write(&mut transport, 0x08, 4, 0);
    write(&mut transport, 0x0c, 4, F_RING_EVENT_IDX);
    assert_eq!(transport.features(), F_VERSION_1);
}

#[test]
fn status_bits_come_in_order_and_stay() {
    let mut transport = transport();
    for (written, expected) in
        [(2, 0), (4, 0), (8, 0), (1, 1), (64, 1), (2, 3), (12, 3), (0x80, 0x83)]
    {
        write(&mut transport, STATUS, 1, written);
        assert_eq!(u64::from(transport.status()), expected, "after {written}");
    }
}

#[test]
fn a_failed_driver_does_not_start() {
    let mut transport = negotiated(F_VERSION_1);
    assert_eq!(write(&mut transport, STATUS, 1, 0x80 | 15), Effect::None);
    assert!(!transport.is_live());
}

#[test]
fn a_device_starts_once() {
    let mut transport = live();
    assert_eq!(write(&mut transport, STATUS, 1, 15), Effect::None);
}

/// Rings that cannot be: size, descriptors, available, used.
#[test]
fn senseless_rings_are_not_enabled() {
    let table = [
        [64, 0x1008, 0x2000, 0x3000],
        [64, 0x1000, 0x2001, 0x3000],
        [64, 0x1000, 0x2000, 0x3002],
        [64, 0x1000, 0, 0x3000],
        [64, (1 << 20) - 1008, 0x2000, 0x3000],
        [64, 0x1000, (1 << 20) - 132, 0x3000],
        [64, 0x1000, 0x2000, (1 << 20) - 516],
        [64, u64::MAX - 15, 0x2000, 0x3000],
        [64, 0x1000, u64::MAX - 1, 0x3000],
        [64, 0x1000, 0x2000, u64::MAX - 3],
        [64, 1 << 40, 0x2000, 0x3000],
    ];
    let enabled = table.map(|layout| enable(&mut negotiated(F_VERSION_1), 0, layout));
    assert_eq!(enabled, [false; 11]);
}

#[test]
fn rings_may_end_where_memory_ends() {
    let end = 1 << 20;
    let layout = [64, end - 1024, end - 2048, end - 4096];
    assert!(enable(&mut negotiated(F_VERSION_1), 0, layout));
    assert!(enable(&mut negotiated(F_VERSION_1), 0, [64, 0, end - 134, end - 520]));
}

#[test]
fn queues_that_are_not_there_read_as_size_zero() {
    let mut transport = negotiated(F_VERSION_1);
    assert!(!enable(&mut transport, 2, GOOD));
    assert_eq!(read(&transport, 0x18, 2), 0);
    assert!(!enable(&mut transport, 0xffff, GOOD));
}

/// Everything a guest can write to a running device: nothing that the queue code got may change
/// (the class of CVE-2026-5747).
#[test]
fn no_write_after_driver_ok_changes_a_queue() {
    for offset in 0x18..COMMON_CONFIG_SIZE.into() {
        for length in [1, 2, 4, 8] {
            for value in [0, 1, 2, 0x80, 0x100, 0x8000, u64::MAX] {
                let mut transport = live();
                let before = transport.enabled_queues();
                let effect = write(&mut transport, offset, length, value);
                assert_eq!((effect, transport.enabled_queues()), (Effect::None, before));
            }
        }
    }
}

#[test]
fn no_queue_is_enabled_after_driver_ok() {
    let mut transport = live();
    assert!(!enable(&mut transport, 1, GOOD));
}

#[test]
fn an_enabled_queue_keeps_its_layout_before_driver_ok_too() {
    let mut transport = negotiated(F_VERSION_1);
    assert!(enable(&mut transport, 0, GOOD));
    enable(&mut transport, 0, [256, 0x10000, 0x20000, 0x30000]);
    write(&mut transport, 0x1c, 2, 0);
    assert_eq!(transport.enabled_queues(), vec![(0, GOOD_LAYOUT)]);
}

/// NetKVM and the BSDs enable a queue first, and then write its vector and read it back; illumos' driver does so
/// when the device is running.
#[test]
fn a_queue_takes_its_vector_at_any_time() {
    let mut transport = negotiated(F_VERSION_1);
    assert!(enable(&mut transport, 0, GOOD));
    write(&mut transport, 0x1a, 2, 2);
    assert_eq!(read(&transport, 0x1a, 2), 2);
    write(&mut transport, 0x1a, 2, 3);
    assert_eq!(read(&transport, 0x1a, 2), 0xffff, "there is no vector 3");
    write(&mut transport, 0x1a, 2, 2);
    let effect = write(&mut transport, STATUS, 1, 15);
    assert_eq!(effect, Effect::Activate(vec![(0, GOOD_LAYOUT)]));
    assert_eq!(transport.queue_vector(0), 2);
    write(&mut transport, 0x1a, 2, 1);
    assert_eq!((read(&transport, 0x1a, 2), transport.queue_vector(0)), (1, 1));
    write(&mut transport, 0x1a, 2, 0xffff);
    assert_eq!((read(&transport, 0x1a, 2), transport.queue_vector(0)), (0xffff, 0xffff));
}

#[test]
fn a_reset_holds_the_registers_until_the_device_lets_go() {
    let mut transport = live();
    assert_eq!(write(&mut transport, STATUS, 1, 0), Effect::Reset);
    assert_eq!(write(&mut transport, STATUS, 1, 1), Effect::None);
    assert_eq!(read(&transport, STATUS, 1), 15);
    transport.finish_reset();
    assert_eq!(read(&transport, STATUS, 1), 0);
    write(&mut transport, 0x16, 2, 0);
    assert_eq!((read(&transport, 0x18, 2), read(&transport, 0x20, 8)), (256, 0));
}

#[test]
fn distress_shows_in_the_status_until_reset() {
    let mut transport = live();
    transport.set_needs_reset();
    assert_eq!(read(&transport, STATUS, 1), 15 | 64);
    transport.finish_reset();
    assert_eq!(read(&transport, STATUS, 1), 0);
}
