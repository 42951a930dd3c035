use types::{
    topology::{Below, Port},
    vm::VmSpec,
};

use super::{
    super::tree::tests::{device, machine, root, spare, switch},
    *,
};

const LINK: LinkState = Link { speed: 5, width: 16 }.fixed();
/// Device capabilities 2: AtomicOps routed; completed with 32 and 64 bits; with 128 bits.
const ROUTED: u32 = 1 << 6;
const COMPLETED: u32 = 3 << 7;
const SWAPPED: u32 = 1 << 9;

fn behind(sizes: u32) -> Behind {
    Behind { link: LINK, atomics: AtomicOps::of_sizes(sizes) }
}

/// Device capabilities 2 of all ports.
fn told(tree: &Tree, devices: &[Behind]) -> Vec<u32> {
    let ports = 0..tree.ports.len();
    ports.map(|port| registers(tree, port, devices).device_capabilities2).collect()
}

fn host(device_capabilities2: u32) -> Option<PortRegisters> {
    Some(PortRegisters { device_capabilities2, ..LINK.registers() })
}

#[test]
fn a_made_up_root_port_completes_what_the_host_does_for_its_device() {
    let spec = VmSpec { topology: None, spare_ports: vec![spare(0)], ..machine(3, Vec::new()) };
    let tree = Tree::new(&spec).expect("possible");
    let devices = [0b011, 0, 0b111].map(behind);
    assert_eq!(told(&tree, &devices), [COMPLETED, 0, COMPLETED | SWAPPED, 0]);
}

#[test]
fn a_made_up_switch_routes_what_its_root_port_completes() {
    let ports = vec![switch(vec![device(0), device(1), device(2)])];
    let tree = Tree::new(&machine(3, vec![root(None, ports)])).expect("possible");
    // One of three has none: it is stopped at its own port, and takes nothing from the others.
    let devices = [0b111, 0, 0b011].map(behind);
    assert_eq!(told(&tree, &devices), [COMPLETED, ROUTED, ROUTED, 0, ROUTED]);
    assert_eq!(told(&tree, &[0; 3].map(behind)), [0; 5]);
    assert_eq!(registers(&tree, 1, &devices).link_status, LINK.registers().link_status);
}

#[test]
fn what_the_first_root_complex_has_no_slots_for_has_its_atomic_operations() {
    let spec = VmSpec { topology: None, ..machine(20, Vec::new()) };
    let tree = Tree::new(&spec).expect("possible");
    let told = told(&tree, &[0b011; 20].map(behind));
    let expected = |kind| if kind == Kind::Root { COMPLETED } else { ROUTED };
    assert_eq!(told, tree.ports.iter().map(|port| expected(port.kind)).collect::<Vec<_>>());
    assert_eq!(told.iter().filter(|bits| **bits == ROUTED).count(), 8);
}

#[test]
fn the_hosts_ports_say_what_they_say_where_they_are() {
    // A root port of the host with other capabilities, below a switch that it does not have.
    let moved = Port { registers: host(1 << 4 | COMPLETED), ..device(0) };
    let below = Below::Switch {
        upstream: host(ROUTED),
        ports: vec![Port { registers: host(0), ..device(1) }],
    };
    let kept = Port { registers: host(COMPLETED), below };
    let ports = vec![switch(vec![moved]), kept];
    let tree = Tree::new(&machine(2, vec![root(None, ports)])).expect("possible");
    let devices = [behind(0b011), behind(0)];
    let made_up = [COMPLETED, ROUTED, 1 << 4 | ROUTED];
    assert_eq!(told(&tree, &devices), [&made_up[..], &[COMPLETED, ROUTED, 0]].concat());
}
