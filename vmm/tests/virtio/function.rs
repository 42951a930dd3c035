//! The PCI function: capabilities, registers, interrupts, doorbells, reset.

use std::sync::{Arc, Mutex, atomic::Ordering};

use vmm::{
    devices::virtio::{F_VERSION_1, VirtioPci},
    pci::function::PciFunction,
};

use crate::driver::{
    ALL_RING_FEATURES, COMMON, DEVICE, ISR, Machine, NOTIFY, NullDevice, Queue, Registers, Seen,
    capability, enable_msix,
};

fn function() -> (VirtioPci, Machine, Arc<Mutex<Seen>>) {
    let machine = Machine::new();
    let (device, seen) = NullDevice::new(2);
    let mut function = VirtioPci::new(Box::new(device), 16, &machine.platform).unwrap();
    function.place_bar(0, 0xc000_0000);
    function.write_config(4, &[6, 0]);
    function.bars_changed();
    (function, machine, seen)
}

/// A function whose queue 0 runs.
fn live() -> (VirtioPci, Machine, Arc<Mutex<Seen>>) {
    let (mut function, machine, seen) = function();
    enable_msix(&mut function, 3);
    assert!(function.negotiate(ALL_RING_FEATURES));
    assert!(function.set_queue(0, &Queue::new(&machine.ram, 64, 0x1000), 1));
    function.write(COMMON + 0x10, 2, 0);
    function.set_status(15);
    (function, machine, seen)
}

fn config_u32(function: &mut VirtioPci, offset: u16) -> u32 {
    let mut bytes = [0; 4];
    function.read_config(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

#[test]
fn configuration_space_says_modern_virtio() {
    let (mut function, _machine, _seen) = function();
    assert_eq!(config_u32(&mut function, 0), 0x106a_1af4);
    assert_eq!(config_u32(&mut function, 8), 0xff00_0001);
    assert_eq!(config_u32(&mut function, 0x2c), 0x1100_1af4);
}

/// Capability type, BAR, offset, length.
#[test]
fn capabilities_say_where_the_structures_are() {
    let (mut function, _machine, _seen) = function();
    let table = [(1, 0, 0x3c), (2, 0x3000, 8), (3, 0x1000, 1), (4, 0x2000, 0x1000), (5, 0, 0)];
    let found = table.map(|(kind, _, _)| {
        let at = capability(&mut function, 9, Some(kind));
        (kind, config_u32(&mut function, at + 8), config_u32(&mut function, at + 12))
    });
    assert_eq!(found, table);
    let notify = capability(&mut function, 9, Some(2));
    assert_eq!(config_u32(&mut function, notify + 16), 4);
}

fn capability_ids(function: &mut VirtioPci) -> Vec<u8> {
    let mut ids = Vec::new();
    let mut at = config_u32(function, 0x34) & 0xff;
    while at != 0 {
        let [id, next, ..] = config_u32(function, u16::try_from(at).unwrap()).to_le_bytes();
        ids.push(id);
        at = next.into();
    }
    ids
}

/// PCIe 6.0 §7.5.2 and §7.5.3 ask both of every function below a port.
#[test]
fn below_a_port_it_is_an_endpoint_that_manages_its_power() {
    let (mut function, machine, _seen) = function();
    assert_eq!(capability_ids(&mut function), [9, 9, 9, 9, 9, 0x11]);
    let (device, _seen) = NullDevice::new(2);
    let mut function = VirtioPci::new(Box::new(device), 16, &machine.platform).unwrap();
    function.set_below_port().unwrap();
    let check = |function: &mut VirtioPci| {
        assert_eq!(capability_ids(function), [9, 9, 9, 9, 9, 0x11, 0x10, 1]);
        let express = capability(function, 0x10, None);
        assert_eq!(config_u32(function, express) >> 16, 2, "version 2, an endpoint");
        assert_eq!(config_u32(function, express + 4), 1 << 15, "no function-level reset");
        assert_eq!(config_u32(function, express + 0x10) >> 16, 0x11);
        let power = capability(function, 1, None);
        assert_eq!(config_u32(function, power + 4), 8, "D0, and nothing is lost below");
    };
    check(&mut function);
    function.write_config(4, &[2, 0]);
    function.place_bar(0, 0xc000_0000);
    let power = capability(&mut function, 1, None);
    function.write_config(power + 4, &[3]);
    assert_eq!(function.bars().first().map(|bar| bar.decoding), Some(false));
    function.reset();
    check(&mut function);
    function.bus_reset();
    check(&mut function);
}

#[test]
fn driver_ok_hands_the_enabled_queues_over() {
    let (_function, _machine, seen) = live();
    let seen = seen.lock().unwrap();
    let activation = &seen.activations[0];
    assert_eq!(activation.features, ALL_RING_FEATURES);
    assert_eq!(activation.queues.len(), 1);
    assert_eq!(activation.queues[0].ring.layout().size, 64);
}

#[test]
fn registers_written_to_a_running_device_reach_no_ring() {
    let (mut function, machine, seen) = live();
    function.set_queue(0, &Queue::new(&machine.ram, 256, 0x8000), 2);
    function.negotiate(F_VERSION_1);
    let seen = seen.lock().unwrap();
    let layout = *seen.activations[0].queues[0].ring.layout();
    assert_eq!((layout.size, layout.descriptors), (64, 0x1000));
    assert_eq!((seen.activations.len(), seen.stops), (1, 0));
    drop(seen);
    // The vector is the driver's to choose.
    assert_eq!(function.read(COMMON + 0x1a, 2), 2);
}

#[test]
fn a_queue_fires_its_own_vector() {
    let (_function, machine, seen) = live();
    seen.lock().unwrap().activations[0].queues[0].signal.trigger();
    assert_eq!([0, 1, 2].map(|vector| machine.fired(vector)), [0, 1, 0]);
    assert_eq!(machine.interrupts.line.raised.load(Ordering::SeqCst), 0);
}

/// Virtio §4.1.5.1.2.1; illumos' driver does so.
#[test]
fn a_vector_chosen_while_the_device_runs_fires_and_so_does_none() {
    let (mut function, machine, seen) = live();
    let signal = seen.lock().unwrap().activations[0].queues[0].signal.clone();
    function.write(COMMON + 0x16, 2, 0);
    for (vector, fired) in [(2, [0, 0, 1]), (0xffff, [0; 3]), (0, [1, 0, 0])] {
        function.write(COMMON + 0x1a, 2, vector);
        signal.trigger();
        assert_eq!([0, 1, 2].map(|vector| machine.fired(vector)), fired, "{vector}");
    }
}

#[test]
fn a_vector_chosen_after_the_queue_was_enabled_fires() {
    let (mut function, machine, seen) = function();
    enable_msix(&mut function, 3);
    assert!(function.negotiate(F_VERSION_1));
    assert!(function.set_queue(0, &Queue::new(&machine.ram, 64, 0x1000), 0xffff));
    function.write(COMMON + 0x1a, 2, 2);
    assert_eq!(function.read(COMMON + 0x1a, 2), 2);
    function.set_status(15);
    seen.lock().unwrap().activations[0].queues[0].signal.trigger();
    assert_eq!([0, 1, 2].map(|vector| machine.fired(vector)), [0, 0, 1]);
}

#[test]
fn a_masked_vector_is_routed_nowhere() {
    let (mut function, machine, _seen) = live();
    let vector = Arc::clone(&machine.interrupts.vectors.lock().unwrap()[1]);
    assert!(vector.route.lock().unwrap().is_some());
    function.write(0x4000 + 16 + 12, 4, 1);
    assert!(vector.route.lock().unwrap().is_none());
}

#[test]
fn without_msix_the_line_rises_until_the_isr_is_read() {
    let (mut function, machine, seen) = function();
    assert!(function.negotiate(F_VERSION_1));
    assert!(function.set_queue(0, &Queue::new(&machine.ram, 64, 0x1000), 0xffff));
    function.set_status(15);
    seen.lock().unwrap().activations[0].queues[0].signal.trigger();
    let line = Arc::clone(&machine.interrupts.line);
    assert!(line.high.load(Ordering::SeqCst));
    assert_eq!(config_u32(&mut function, 4) >> 16 & 8, 8);
    assert_eq!([function.read(ISR, 1), function.read(ISR, 1)], [1, 0]);
    assert!(!line.high.load(Ordering::SeqCst));
}

#[test]
fn interrupt_disable_keeps_the_line_low_and_the_isr() {
    let (mut function, machine, seen) = function();
    assert!(function.negotiate(F_VERSION_1));
    assert!(function.set_queue(0, &Queue::new(&machine.ram, 64, 0x1000), 0xffff));
    function.set_status(15);
    function.write_config(4, &[6, 4]);
    seen.lock().unwrap().activations[0].queues[0].signal.trigger();
    let line = Arc::clone(&machine.interrupts.line);
    assert!(!line.high.load(Ordering::SeqCst));
    function.write_config(4, &[6, 0]);
    assert!(line.high.load(Ordering::SeqCst));
}

#[test]
fn distress_sets_the_status_and_fires_the_configuration_vector() {
    let (mut function, machine, seen) = live();
    seen.lock().unwrap().activations[0].distress.raise(&"the ring is nonsense");
    assert_eq!(function.status(), 15 | 64);
    assert_eq!(machine.fired(0), 1);
    function.set_status(0);
    assert_eq!(function.status(), 0);
}

#[test]
fn a_kick_rings_the_queues_own_doorbell() {
    let (mut function, _machine, seen) = live();
    function.kick(0);
    function.kick(1);
    function.write(NOTIFY + 8, 2, 2);
    function.write(NOTIFY + 0xffc, 4, 0);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.activations[0].queues[0].kick.read().unwrap(), 1);
}

#[test]
fn doorbells_follow_the_bar_but_not_its_sizing() {
    let (mut function, machine, _seen) = function();
    let bells = || machine.doorbells.0.lock().unwrap().clone();
    assert_eq!(bells(), [0xc000_3000, 0xc000_3004]);
    function.write_config(4, &[4, 0]);
    function.write_config(0x10, &[0xff; 4]);
    function.bars_changed();
    assert_eq!(bells(), [0xc000_3000, 0xc000_3004]);
    function.write_config(0x10, &0xd000_0000u32.to_le_bytes());
    function.write_config(4, &[6, 0]);
    function.bars_changed();
    assert_eq!(bells(), [0xd000_3000, 0xd000_3004]);
    drop(function);
    assert!(bells().is_empty());
}

#[test]
fn a_reset_ends_when_the_device_has_let_go() {
    let (mut function, _machine, seen) = live();
    seen.lock().unwrap().lingers = true;
    function.set_status(0);
    assert_eq!(function.status(), 15);
    function.set_status(1);
    seen.lock().unwrap().lingers = false;
    assert_eq!(function.status(), 0);
    function.set_status(1);
    assert_eq!(function.status(), 1);
}

#[test]
fn a_reset_device_starts_again() {
    let (mut function, machine, seen) = live();
    function.set_status(0);
    assert!(function.negotiate(F_VERSION_1));
    assert!(function.set_queue(1, &Queue::new(&machine.ram, 32, 0x9000), 2));
    function.set_status(15);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.activations[0].queues[0].index, 1);
}

#[test]
fn power_on_reset_forgets_everything() {
    let (mut function, machine, seen) = live();
    function.reset();
    assert_eq!(function.status(), 0);
    assert_eq!(seen.lock().unwrap().stops, 1);
    assert!(machine.doorbells.0.lock().unwrap().is_empty());
    assert_eq!(config_u32(&mut function, 0x10), 0);
}

#[test]
fn a_reset_of_the_bus_forgets_everything_and_waits_for_nothing() {
    let (mut function, machine, seen) = live();
    function.place_bar(0, 0xc000_0000);
    seen.lock().unwrap().lingers = true;
    function.bus_reset();
    assert_eq!(seen.lock().unwrap().stops, 1);
    assert!(machine.doorbells.0.lock().unwrap().is_empty());
    assert_eq!((config_u32(&mut function, 0x10), config_u32(&mut function, 4) & 0xffff), (0, 0));
    assert_eq!(function.status(), 15);
    seen.lock().unwrap().lingers = false;
    assert_eq!(function.status(), 0);
}

/// The way of firmware that cannot map the BAR yet (virtio §4.1.4.9).
#[test]
fn the_window_in_configuration_space_reaches_the_registers() {
    let (mut function, _machine, _seen) = function();
    let at = capability(&mut function, 9, Some(5));
    function.write_config(at + 8, &0x12u32.to_le_bytes());
    function.write_config(at + 12, &2u32.to_le_bytes());
    assert_eq!(config_u32(&mut function, at + 16) & 0xffff, 2);
    function.write_config(at + 8, &0x14u32.to_le_bytes());
    function.write_config(at + 12, &1u32.to_le_bytes());
    function.write_config(at + 16, &[1]);
    assert_eq!(function.status(), 1);
}

#[test]
fn a_senseless_window_does_nothing() {
    let (mut function, _machine, _seen) = function();
    let at = capability(&mut function, 9, Some(5));
    for (bar, offset, length) in
        [(1, 0x14, 1u32), (0, 0x8000, 1), (0, 0x14, 3), (0, 0x13, 2), (0, u32::MAX, 1)]
    {
        function.write_config(at + 4, &[bar]);
        function.write_config(at + 8, &offset.to_le_bytes());
        function.write_config(at + 12, &length.to_le_bytes());
        function.write_config(at + 16, &[1]);
        assert_eq!(function.status(), 0, "{bar} {offset:#x} {length}");
    }
}

#[test]
fn accesses_outside_every_structure_read_zero() {
    let (mut function, _machine, _seen) = function();
    assert_eq!([0x1001, 0x3000, 0x5000, 0x7000, 0x7ff8].map(|at| function.read(at, 8)), [0; 5]);
    let mut byte = [7];
    function.read_bar(3, 0, &mut byte);
    assert_eq!(byte, [0]);
    assert_eq!(function.read(DEVICE + 5, 1), 5);
}
