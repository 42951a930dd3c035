use std::collections::BTreeSet;

use types::{
    topology::{Below, RootComplex, Topology},
    vm::{Passthrough, PassthroughDevice, VfioInterface, VmSpec},
};

use super::*;
use crate::{
    irq::{InterruptLine, MsiVector},
    machine::hotplug::Hotplug,
    spec,
};

/// Machines without spare ports need no interrupt of a port.
struct Nothing;

impl InterruptSource for Nothing {
    fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn line(&self, _slot: u8, _pin: u8) -> io::Result<Arc<dyn InterruptLine>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Ports of two root complexes, each with a device, on a machine that starts by `boot`.
fn two_roots(boot: Boot) -> Ports {
    let device = |number: u8| PassthroughDevice {
        address: types::node::Bdf { segment: 0, bus: number, device: 0, function: 0 },
        cdev_fd: 20 + i32::from(number),
        p2p_clique: None,
    };
    let below = |index| types::topology::Port { registers: None, below: Below::Device { index } };
    let root = |index| RootComplex { node: None, ports: vec![below(index)] };
    let spec = VmSpec {
        boot,
        passthrough: Some(Passthrough {
            interface: VfioInterface::Cdev,
            iommu_fd: 10,
            peer_to_peer: false,
            devices: vec![device(0), device(1)],
        }),
        topology: Some(Topology { roots: vec![root(0), root(1)] }),
        ..spec::tests::minimal(1, 128)
    };
    let tree = Tree::new(&spec).expect("possible");
    let numbered = Numbered::of(&spec.boot, &tree);
    let (hotplug, _orders) = Hotplug::new();
    let watch: Arc<dyn SlotWatch> = hotplug;
    Ports::new((tree, numbered), &[], &Nothing, &watch).expect("no interrupt is asked for")
}

/// Returns the buses on which something answers, as firmware looks for root complexes.
fn buses(bus: &Bus) -> BTreeSet<u64> {
    let answers = |device: &u64| {
        let mut vendor = [0; 2];
        bus.read_ecam(device << 15, &mut vendor);
        vendor != [0xff; 2]
    };
    (0..256 * 32).filter(answers).map(|device| device / 32).collect()
}

/// What is behind both ports: more ports will do.
fn seated(ports: &Ports) -> Bus {
    let behind = (0..2).map(|number| {
        let registers = SLOWEST.registers();
        let function = Port::new(crate::pci::port::Kind::Upstream, &registers, None).expect("room");
        let address =
            Address { bus: 200 + u8::try_from(number).expect("two"), device: 0, function: 0 };
        Seat { address, above: Above::Bridge(number), function: Arc::new(Mutex::new(function)) }
    });
    ports.seat(behind.collect())
}

#[test]
fn firmware_finds_root_complexes_and_nothing_else() {
    let uefi = Boot::Uefi { firmware_fd: 7, variables_fd: 8 };
    let ports = two_roots(uefi);
    assert_eq!(buses(&seated(&ports)), BTreeSet::from([0, 128]));
    let linux = Boot::Linux { kernel_fd: 7, initrd_fd: None, cmdline: String::new() };
    assert_eq!(buses(&seated(&two_roots(linux))), BTreeSet::from([0, 1, 128, 129]));
}

#[test]
fn what_is_opened_behind_other_roots_is_told_by_root() {
    let ports = two_roots(Boot::Uefi { firmware_fd: 7, variables_fd: 8 });
    let behind = ports.behind();
    assert_eq!((behind.roots(), behind.ports()), (1, 1));
    assert_eq!(behind.opened(), [[Windows::default()]]);
    let memory = Some((0x9000_0000, 0x900f_ffff));
    let windows = Windows { memory, ..Windows::default() };
    for port in &ports.ports {
        locked(port).set_windows(windows);
    }
    assert_eq!(behind.opened(), [[windows]]);
}
