use types::{
    units::Mebibytes,
    vm::{Passthrough, PassthroughDevice, VfioInterface},
};

use super::*;
use crate::spec;

pub(in crate::machine) fn device(index: u32) -> Port {
    Port { registers: None, below: Below::Device { index } }
}

pub(in crate::machine) fn switch(ports: Vec<Port>) -> Port {
    Port { registers: None, below: Below::Switch { upstream: None, ports } }
}

pub(in crate::machine) fn root(node: Option<u32>, ports: Vec<Port>) -> RootComplex {
    RootComplex { node, ports }
}

pub(in crate::machine) fn machine(devices: u8, roots: Vec<RootComplex>) -> VmSpec {
    let device = |number: u8| PassthroughDevice {
        address: types::node::Bdf { segment: 0, bus: number, device: 0, function: 0 },
        cdev_fd: 20 + i32::from(number),
        p2p_clique: None,
    };
    let devices = (0..devices).map(device).collect();
    VmSpec {
        passthrough: Some(Passthrough {
            interface: VfioInterface::Cdev,
            iommu_fd: 10,
            peer_to_peer: false,
            devices,
        }),
        topology: Some(Topology { roots }),
        ..spec::tests::minimal(1, 64)
    }
}

pub(in crate::machine) fn spare(root: u32) -> SparePort {
    SparePort { root, memory_mib: Mebibytes(2), prefetchable_mib: Mebibytes(1024) }
}

#[test]
fn without_a_topology_each_device_has_a_root_port() {
    let spec = VmSpec { topology: None, ..machine(3, Vec::new()) };
    let tree = Tree::new(&spec).expect("possible");
    let seen: Vec<_> = tree.ports.iter().map(|p| (p.address.device, p.buses, p.slot)).collect();
    assert_eq!(seen, [(2, (1, 1), Some(1)), (3, (2, 2), Some(2)), (4, (3, 3), Some(3))]);
    assert_eq!(tree.roots, [Root { first: 0, last: 255, node: None }]);
}

#[test]
fn more_devices_than_slots_share_a_switch() {
    // Eight GPUs, eight network controllers and four switches between the GPUs; and as many as can be.
    for count in [20, 32] {
        let spec = VmSpec { topology: None, ..machine(count, Vec::new()) };
        let tree = Tree::new(&spec).expect("possible");
        assert_eq!(tree.device_ports().len(), usize::from(count));
        let on_root = tree.ports.iter().filter(|port| port.above == Above::Root(0));
        assert_eq!(on_root.map(|port| port.address.device).max(), Some(FIRST_VIRTIO - 1));
        let (last, switch) = (tree.device_ports()[13], 14);
        assert_eq!(tree.ports[last].above, Above::Bridge(switch));
        assert_eq!(tree.ports[switch].kind, Kind::Upstream);
    }
    let spare_ports = vec![spare(0), spare(0)];
    let spec = VmSpec { topology: None, spare_ports, ..machine(13, Vec::new()) };
    let tree = Tree::new(&spec).expect("possible");
    assert_eq!(tree.ports.iter().filter(|port| port.above == Above::Root(0)).count(), 14);
}

#[test]
fn buses_are_numbered_depth_first() {
    let roots = vec![
        root(Some(0), vec![switch(vec![device(0), device(2)]), device(1)]),
        root(Some(1), vec![switch(vec![device(3)])]),
    ];
    let spec = VmSpec { spare_ports: vec![spare(1)], ..machine(4, roots) };
    let tree = Tree::new(&spec).expect("possible");
    let buses: Vec<_> = tree.ports.iter().map(|p| (p.address.bus, p.buses)).collect();
    assert_eq!(tree.roots[1].first, 128);
    let first = [(0, (1, 4)), (1, (2, 4)), (2, (3, 3)), (2, (4, 4)), (0, (5, 5))];
    let second = [(128, (129, 131)), (129, (130, 131)), (130, (131, 131)), (128, (132, 132))];
    assert_eq!(buses, [&first[..], &second].concat());
    assert_eq!(tree.device_ports(), [2, 4, 3, 7]);
    assert_eq!(tree.ports[8].holds, Holds::Spare(0));
    assert_eq!((tree.root_of(7), tree.root_of(3)), (1, 0));
    let slots: Vec<_> = tree.ports.iter().filter_map(|port| port.slot).collect();
    assert_eq!(slots, [1, 2, 3, 4, 5]);
}

#[test]
fn pins_turn_on_the_way_up() {
    let ports = vec![device(0), switch(vec![device(1), device(2), device(3)])];
    let tree = Tree::new(&machine(4, vec![root(None, ports)])).expect("possible");
    let routes: Vec<_> = tree.device_ports().into_iter().map(|n| tree.pin_route(n)).collect();
    let route = |slot, turn| PinRoute { slot, turn };
    assert_eq!(routes, [route(2, 0), route(3, 0), route(3, 1), route(3, 2)]);
    assert_eq!((route(3, 2).pin(1), route(3, 2).pin(3), route(3, 1).pin(4)), (3, 1, 1));
}

#[test]
fn trees_that_cannot_be_are_refused() {
    let refusal = |spec: &VmSpec| Tree::new(spec).expect_err("refused");
    assert_eq!(refusal(&machine(0, Vec::new())), TreeError::Roots { found: 0 });
    let twice = machine(2, vec![root(None, vec![device(0), device(0)])]);
    assert_eq!(refusal(&twice), TreeError::Misplaced { index: 0 });
    let missing = machine(2, vec![root(None, vec![device(0)])]);
    assert_eq!(refusal(&missing), TreeError::Misplaced { index: 1 });
    let unknown = machine(1, vec![root(None, vec![device(0), device(7)])]);
    assert_eq!(refusal(&unknown), TreeError::NoDevice { index: 7, devices: 1 });
    let empty = machine(0, vec![root(None, vec![switch(Vec::new())])]);
    assert_eq!(refusal(&empty), TreeError::SwitchPorts { found: 0 });
    let deep = (0..=MAX_DEPTH).fold(device(0), |port, _| switch(vec![port]));
    assert_eq!(refusal(&machine(1, vec![root(None, vec![deep])])), TreeError::Depth);
    let many = (0..15).map(device).collect();
    let found = TreeError::RootPorts { root: 0, found: 15, most: 14 };
    assert_eq!(refusal(&machine(15, vec![root(None, many)])), found);
    let roots = vec![root(None, Vec::new()), root(None, (0..17).map(device).collect())];
    let found = TreeError::RootPorts { root: 1, found: 17, most: 16 };
    assert_eq!(refusal(&machine(17, roots)), found);
    let wide = |first| switch((first..first + 32).map(device).collect());
    let ports = (0..8).map(|number| wide(32 * number)).collect();
    assert_eq!(refusal(&machine(0, vec![root(None, ports)])), TreeError::Buses { found: 273 });
    let nowhere = VmSpec { spare_ports: vec![spare(1)], ..machine(0, vec![root(None, vec![])]) };
    assert_eq!(refusal(&nowhere), TreeError::NoRoot { root: 1, roots: 1 });
}

#[test]
fn firmware_that_is_told_nothing_has_all_ports_below_one_root() {
    let boot = Boot::Uefi { firmware_fd: 7, variables_fd: 8, pci_windows: PciWindows::Found };
    let roots = vec![root(Some(0), vec![device(0)]), root(Some(1), vec![device(1)])];
    let spec = VmSpec { boot, spare_ports: vec![spare(1)], ..machine(2, roots) };
    let tree = Tree::new(&spec).expect("possible");
    assert_eq!(tree.roots, [Root { first: 0, last: 255, node: None }]);
    let places: Vec<_> = tree.ports.iter().map(|port| (port.above, port.address.device)).collect();
    assert_eq!(places, [2, 3, 4].map(|slot| (Above::Root(0), slot)));
    assert!(tree.note(&spec).expect("a note").contains("all 2 root complexes"));

    let many = |first: u32| root(None, (first..first + 10).map(device).collect());
    let spec = VmSpec { boot: spec.boot, ..machine(20, vec![many(0), many(10)]) };
    assert_eq!(Tree::new(&spec).expect("possible").device_ports().len(), 20);

    let near = vec![root(Some(1), vec![device(0)]), root(Some(1), vec![device(1)])];
    let spec = VmSpec { boot: spec.boot, ..machine(2, near) };
    assert_eq!(Tree::new(&spec).expect("possible").roots[0].node, Some(1));
}

#[test]
fn firmware_that_is_told_has_the_root_complexes_of_the_specification() {
    let boot = Boot::Uefi { firmware_fd: 7, variables_fd: 8, pci_windows: PciWindows::Told };
    let roots = vec![root(Some(0), vec![device(0)]), root(Some(1), vec![device(1)])];
    let linux = machine(2, roots);
    let spec = VmSpec { boot, ..linux.clone() };
    let tree = Tree::new(&spec).expect("possible");
    assert_eq!(tree, Tree::new(&linux).expect("possible"));
    assert_eq!((tree.roots.len(), tree.note(&spec)), (2, None));
}
