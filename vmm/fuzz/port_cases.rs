//! Runs fuzz cases of PCI Express ports: what a guest writes to a slot while devices come and go,
//! and trees of ports as a specification might have them.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use types::{
    topology::{Below, Port as TreePort, PortRegisters, RootComplex, SparePort, Topology},
    units::Mebibytes,
    vm::{Passthrough, PassthroughDevice, VfioInterface, VmSpec},
};
use vmm::{
    irq::{InterruptLine, Level, MsiMessage, MsiVector},
    layout,
    machine::Tree,
    pci::{
        allocate::{self, Above, Demand, Request},
        function::{Bar, BarKind, PciFunction},
        port::{Alarm, AtomicOps, Behind, Kind, Link, Port, Power, SlotSpec, SlotWatch, Windows},
    },
    spec,
};

/// Registers of the PCI Express capability, which every port has at 0x40.
const LINK_CAPABILITIES: u16 = 0x4c;
const LINK_CONTROL: u16 = 0x50;
const LINK_STATUS: u16 = 0x52;
const SLOT_CONTROL: u16 = 0x58;
const SLOT_STATUS: u16 = 0x5a;
const DEVICE_CAPABILITIES2: u16 = 0x64;
const LINK_DISABLE: u16 = 1 << 4;
const LINK_ACTIVE: u16 = 1 << 13;
const PRESENT: u16 = 1 << 6;
const POWER_OFF: u16 = 1 << 10;
/// Identifier of power management; the state in its control register.
const POWER_MANAGEMENT: u32 = 0x01;
const POWER_STATE: u16 = 3;
/// Greatest speed and width in link capabilities.
const MOST: u32 = 0x3ff;
/// AtomicOps of all sizes, in device capabilities 2: those of the device that is plugged.
const ATOMICS: u32 = 7 << 7;
/// Its speed and width.
const PLUGGED: Link = Link { speed: 4, width: 8 };

struct Recorder {
    fired: AtomicU32,
    switched: AtomicU32,
    level: Mutex<Level>,
    file: OwnedFd,
}

impl MsiVector for Recorder {
    fn route(&self, _message: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }

    fn eventfd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn trigger(&self) -> io::Result<()> {
        self.fired.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl InterruptLine for Recorder {
    fn set_level(&self, level: Level) -> io::Result<()> {
        *self.level.lock().expect("one thread") = level;
        Ok(())
    }

    fn trigger_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn resample_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl SlotWatch for Recorder {
    fn power_switched(&self, slot: u16) {
        assert_eq!(slot, 77, "another slot");
        self.switched.fetch_add(1, Ordering::Relaxed);
    }
}

/// A slot's life, in steps of 4 bytes.
///
/// | Byte 0 | Meaning                                                                        |
/// |--------|--------------------------------------------------------------------------------|
/// | 0..=3  | insert, connect, disconnect, remove (each only where it makes sense)           |
/// | 4      | press the button                                                               |
/// | 5      | write byte 1 modulo 4, plus 1, bytes of 2 and 3 repeated to the slot registers |
/// | others | write bytes 2 and 3 anywhere: the offset is byte 0 times 16 plus byte 1        |
pub(crate) fn slot(bytes: &[u8]) {
    let recorder = Arc::new(Recorder {
        fired: AtomicU32::new(0),
        switched: AtomicU32::new(0),
        level: Mutex::new(Level::Low),
        file: OwnedFd::from(File::open("/dev/null").expect("there")),
    });
    let alarm = Alarm {
        vector: Arc::<Recorder>::clone(&recorder),
        line: Arc::<Recorder>::clone(&recorder),
        watch: Arc::<Recorder>::clone(&recorder),
    };
    let spec = SlotSpec { number: 77, alarm: Some(alarm), kept: None };
    let registers = Link { speed: 1, width: 1 }.fixed().registers();
    let mut port = Port::new(Kind::Root, &registers, Some(spec)).expect("a port");
    let fixed = fixed_part(&mut port);
    let power = capability(&mut port, POWER_MANAGEMENT) + 4;
    let (mut present, mut connected, mut link) = (false, false, Link { speed: 1, width: 1 });
    for step in bytes.chunks_exact(4) {
        let (before, fired) =
            (half(&mut port, SLOT_CONTROL), recorder.fired.load(Ordering::Relaxed));
        let switched = recorder.switched.load(Ordering::Relaxed);
        match step[0] {
            0 if !present => {
                (present, link) = (true, PLUGGED);
                let atomics = AtomicOps::of_sizes(7);
                port.insert(Behind { link: PLUGGED.fixed(), atomics }).expect("recorded");
            }
            1 if present => {
                connected |= before & POWER_OFF == 0;
                port.connect().expect("recorded");
            }
            2 => {
                connected = false;
                port.disconnect().expect("recorded");
            }
            3 => {
                (present, connected) = (false, false);
                port.remove().expect("recorded");
            }
            4 => port.press_button().expect("recorded"),
            5 => {
                let data = [step[2], step[3], step[2], step[3]];
                port.write_config(SLOT_CONTROL, &data[..usize::from(step[1] % 4) + 1]);
            }
            high => port.write_config(u16::from(high) << 4 | u16::from(step[1] & 15), &step[2..]),
        }
        let control = half(&mut port, SLOT_CONTROL);
        let off = |control| control & POWER_OFF != 0;
        connected &= !off(control);
        let turned = recorder.switched.load(Ordering::Relaxed) - switched;
        assert_eq!(turned == 1, off(before) != off(control), "power switches are told once");
        assert_eq!(off(control), port.power() == Power::Off);
        assert!(recorder.fired.load(Ordering::Relaxed) - fired <= 1, "one message a step");
        assert_eq!(half(&mut port, SLOT_STATUS) & PRESENT != 0, present, "presence is ours");
        let disabled = half(&mut port, LINK_CONTROL) & LINK_DISABLE != 0;
        let active = half(&mut port, LINK_STATUS) & LINK_ACTIVE != 0;
        assert_eq!(active, connected && !disabled, "the link is ours");
        let state = half(&mut port, power) & POWER_STATE;
        assert!([0, 3].contains(&state), "there are D0 and D3hot");
        assert_eq!(port.buses().is_some(), active && state == 0);
        let most = word(&mut port, LINK_CAPABILITIES) & MOST;
        assert_eq!(most, u32::from(link.speed) | u32::from(link.width) << 4, "the slot's link");
        let atomics = word(&mut port, DEVICE_CAPABILITIES2);
        assert_eq!(atomics, if present { ATOMICS } else { 0 }, "the device's AtomicOps");
    }
    assert_eq!(fixed_part(&mut port), fixed, "what is fixed was written");
}

/// Identity, capability headers, link capabilities but for the link itself, slot capabilities: nothing
/// of this changes.
fn fixed_part(port: &mut Port) -> Vec<u32> {
    let link = word(port, LINK_CAPABILITIES) & !MOST;
    let mut all = [0x00, 0x08, 0x34, 0x40, 0x44, 0x54].map(|at| word(port, at)).to_vec();
    all.push(link);
    all
}

/// Where the capability with an identifier is.
fn capability(port: &mut Port, identifier: u32) -> u16 {
    let mut at = word(port, 0x34) & 0xfc;
    while at != 0 {
        let header = word(port, u16::try_from(at).expect("a byte"));
        if header & 0xff == identifier {
            break;
        }
        at = header >> 8 & 0xfc;
    }
    u16::try_from(at).expect("a byte")
}

fn word(port: &mut Port, offset: u16) -> u32 {
    let mut data = [0; 4];
    port.read_config(offset, &mut data);
    u32::from_le_bytes(data)
}

fn half(port: &mut Port, offset: u16) -> u16 {
    let mut data = [0; 2];
    port.read_config(offset, &mut data);
    u16::from_le_bytes(data)
}

/// A tree: a byte for each port, read as a description of what is below; the rest are BARs.
pub(crate) fn tree(bytes: &[u8]) {
    let mut reader = Reader { bytes, devices: 0 };
    let roots = usize::from(reader.next() % 18);
    let roots = (0..roots).map(|_| RootComplex { node: None, ports: reader.ports(0) }).collect();
    let spare_ports = (0..reader.next() % 4).map(|_| reader.spare()).collect();
    // One time in sixteen a device is missing, or there is one too many.
    let devices = match reader.next() {
        0..8 => reader.devices.wrapping_sub(1).min(64),
        8..16 => reader.devices + 1,
        _ => reader.devices,
    };
    let spec = machine(Topology { roots }, spare_ports, devices);
    match Tree::new(&spec) {
        Ok(tree) => check(&tree, &mut reader),
        // What is wrong is told in words.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    devices: u32,
}

impl Reader<'_> {
    fn next(&mut self) -> u8 {
        let Some((first, rest)) = self.bytes.split_first() else { return u8::MAX };
        self.bytes = rest;
        *first
    }

    fn ports(&mut self, depth: u8) -> Vec<TreePort> {
        let count = if self.bytes.is_empty() { 1 } else { self.next() % 36 };
        (0..count).map(|_| self.port(depth)).collect()
    }

    fn port(&mut self, depth: u8) -> TreePort {
        let kind = self.next();
        let registers = (kind & 1 == 1).then(|| PortRegisters {
            link_status: u16::from(kind) << 8 | u16::from(kind),
            ..PortRegisters::default()
        });
        // Deeper than any real tree, yet not deeper than this recursion can bear.
        let below = if kind < 64 && depth < 8 {
            Below::Switch { upstream: registers, ports: self.ports(depth + 1) }
        } else {
            let index = if kind == 254 { 9 } else { self.devices };
            self.devices += 1;
            Below::Device { index }
        };
        TreePort { registers, below }
    }

    fn spare(&mut self) -> SparePort {
        let memory_mib = Mebibytes(self.next().into());
        let prefetchable_mib = Mebibytes(1 << (self.next() % 24));
        SparePort { root: u32::from(self.next() % 4), memory_mib, prefetchable_mib }
    }
}

fn machine(topology: Topology, spare_ports: Vec<SparePort>, devices: u32) -> VmSpec {
    let text = format!(
        "{{\"version\":1,\"machine\":\"{}\",\"uid\":1000,\"vcpus\":1,\"memory_mib\":64,\
         \"memory_backing\":\"memfd\",\"boot\":{{\"kind\":\"linux\",\"kernel_fd\":4,\
         \"initrd_fd\":null,\"cmdline\":\"\"}},\"disks\":[],\"nets\":[],\"vsock\":null,\
         \"passthrough\":null,\"kvm_fd\":5,\"api_fd\":6}}",
        "00".repeat(16)
    );
    let device = |number: u32| PassthroughDevice {
        address: "0000:01:00.0".parse().expect("an address"),
        cdev_fd: 20 + i32::try_from(number).unwrap_or(0),
        p2p_clique: None,
    };
    let passthrough = Passthrough {
        interface: VfioInterface::Cdev,
        iommu_fd: 10,
        peer_to_peer: false,
        devices: (0..devices).map(device).collect(),
    };
    VmSpec {
        passthrough: Some(passthrough),
        topology: Some(topology),
        spare_ports,
        ..spec::parse(text.as_bytes()).expect("a specification")
    }
}

/// Buses nest, slots are unique, and windows of bridges hold those below them.
fn check(tree: &Tree, reader: &mut Reader<'_>) {
    let bridges = tree.bridges();
    let mut slots: Vec<u16> = tree.ports.iter().filter_map(|port| port.slot).collect();
    let count = slots.len();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), count, "a slot number twice");
    for (number, port) in tree.ports.iter().enumerate() {
        let (first, last) = port.buses;
        let root = &tree.roots[tree.root_of(number)];
        assert!(port.address.bus < first && first <= last && last <= root.last);
        assert!(root.first <= port.address.bus && port.address.device < 32);
        if let Above::Bridge(above) = port.above {
            assert!(above < number, "a port before the one above it");
            let (bus, end) = tree.ports[above].buses;
            assert!(bus == port.address.bus && last <= end, "buses do not nest");
        }
        assert!((1..=4).contains(&tree.pin_route(number).pin(1)));
    }
    let request = |(function, port): (usize, usize)| {
        let size = 16u64 << (reader.next() % 40);
        let kind = if size > 1 << 24 { BarKind::Memory64Prefetchable } else { BarKind::Memory32 };
        let bar = Bar { index: 0, kind, size, address: 0, decoding: false };
        Request { function, above: Above::Bridge(port), bar }
    };
    let requests: Vec<Request> = tree.device_ports().into_iter().enumerate().map(request).collect();
    let roots = tree.roots.len();
    let demand = Demand {
        requests: &requests,
        bridges: &bridges,
        roots,
        low: layout::MMIO32,
        ram_end: 5 << 30,
        bits: 52,
    };
    let Ok(plan) = allocate::place(&demand) else { return };
    for (port, windows) in tree.ports.iter().zip(&plan.bridges) {
        let around = match port.above {
            Above::Root(root) => plan.roots[root],
            Above::Bridge(above) => plan.bridges[above],
        };
        assert!(holds(&around, windows), "{around:?} does not hold {windows:?}");
    }
    for (placed, request) in plan.placed.iter().zip(&requests) {
        assert!(placed.address.is_multiple_of(placed.size), "{placed:?} is not aligned");
        let Above::Bridge(port) = request.above else { continue };
        let windows = &plan.bridges[port];
        let inside = |base: u64, last: u64| {
            base <= placed.address && placed.address + (placed.size - 1) <= last
        };
        assert!(
            windows.prefetchable.is_some_and(|(base, last)| inside(base, last))
                || windows.memory.is_some_and(|(base, last)| inside(base.into(), last.into())),
            "{placed:?} is outside {windows:?}"
        );
    }
}

fn holds(outer: &Windows, inner: &Windows) -> bool {
    let memory = inner.memory.is_none_or(|(base, last)| {
        outer.memory.is_some_and(|(from, to)| from <= base && last <= to)
    });
    let wide = inner.prefetchable.is_none_or(|(base, last)| {
        outer.prefetchable.is_some_and(|(from, to)| from <= base && last <= to)
    });
    memory && wide
}
