//! From a specification to a machine: memory, devices on the bus, firmware tables, kernel, virtual
//! CPUs. One step per kind of device.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    sync::{Arc, Mutex, RwLock},
    time::Instant,
};

use types::vm::{Disk, DiskModel, VmSpec};

use super::{
    Board, Chipset, Control, Machine, Pauses,
    hotplug::{Hotplug, Manager, Supplies},
    map::{AddressMap, MapError},
    numa,
    ports::{PortError, Ports, Seat},
    start::{self, Built, Start, StartError},
    tree::{FIRST_VIRTIO, Tree},
};
use crate::{
    acpi,
    console::Console,
    counters::{Exits, Registry},
    devices::{
        DeviceError, cmos,
        nvme::Nvme,
        power::{self, Power},
        serial::{self, Serial},
        throttle::Limits,
        virtio::{self, VirtioError, blk::engine::EngineChoice, net::PairFiles, pci::VirtioPci},
    },
    events::Events,
    irq::{InterruptLine, PinRoute},
    pci::{
        allocate::Above,
        bus::Address,
        chipset::{LPC_SLOT, LpcBridge},
        function::PciFunction,
        port::{Behind, SlotWatch},
    },
    sys::{
        kvm::{KvmError, Vm},
        memory::{Fetch, MemoryError, Ram},
        vfio::adopt,
    },
    vcpu::{self, Cpus, VcpuError},
    vfio::{
        assign::{AssignError, Claim, Closer, Passthrough},
        plug::Plug,
    },
};

/// Where the VMM's own functions are.
const ROOT: Above = Above::Root(0);
/// Most virtio functions: disks, network cards, entropy, sockets. Slot 31 is the LPC bridge.
pub const MAX_VIRTIO: usize = 31 - FIRST_VIRTIO as usize;

/// Why a machine cannot be built.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum BuildError {
    #[error("descriptor {fd}, given as {what}, is not open or not what it should be")]
    Descriptor { what: &'static str, fd: i32, source: io::Error },
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Devices(#[from] DeviceError),
    #[error(transparent)]
    Assign(#[from] AssignError),
    #[error(transparent)]
    Ports(#[from] PortError),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
}

impl From<VirtioError> for BuildError {
    fn from(error: VirtioError) -> Self {
        Self::Devices(error.into())
    }
}

/// Builds the machine of `spec`. Threads of devices are started; those of virtual CPUs, the API and the helpers
/// are not.
pub fn build(spec: &VmSpec) -> Result<Machine, BuildError> {
    let cpus = Cpus::of(spec);
    let vm = Vm::new(take("kvm_fd", spec.kvm_fd)?, cpus.count(), cpus.id_limit())?;
    let settling = vm.settle_timer()?;
    let listener = UnixListener::from(take("api_fd", spec.api_fd)?);
    let bytes = spec.memory_mib.to_bytes().unwrap_or(u64::MAX);
    let claim = spec.passthrough.as_ref().map(Claim::new).transpose()?;
    let map = AddressMap::new(bytes, spec, claim.as_ref(), &vm)?;
    let fetch = if claim.is_some() { Fetch::All } else { Fetch::WhenHuge };
    let ram = Ram::placed(&map.ram, spec.memory_backing, &spec.host_memory, fetch)?;
    let ram_slots = vm.map_ram(&ram)?;
    let console = open_console(spec)?;
    let (serial_line, sci) = (line(&vm, serial::GSI)?, line(&vm, power::SCI)?);

    let (watch, platform) = virtio_platform(&vm, &ram, spec);
    let chipset = Chipset::new(&map.ram, spec.clock_ahead_s).wired(line(&vm, cmos::GSI)?);
    let mut chipset = chipset.watching(&spec.boot, &watch.events);
    let tree = number_ports(spec)?;
    let mut seats = vec![plain(0, chipset.host_bridge()), plain(LPC_SLOT, LpcBridge::default())];
    seats.extend(virtio_functions(spec, &platform)?);
    let passed = passthrough(claim, &tree, &vm, &ram)?;
    seats.extend(passed.seats);
    let (hotplug, orders) = Hotplug::new();
    let slots: Arc<dyn SlotWatch> = Arc::<Hotplug>::clone(&hotplug);
    let ports = Ports::new(tree, &passed.behind, &*vm, &slots)?;
    let plan = ports.place(&seats, &map)?;
    let alarms = passed.plug.as_ref().map(Plug::alarms);
    let pit = vm.has_pins().then(Mutex::default);
    let supplies = Supplies { plug: passed.plug, platform, vcpus: spec.vcpus };
    let plugger = Manager::new(orders, ports.spares(&plan), supplies);
    let platform = acpi::Platform {
        cpus,
        roots: ports.roots(&plan),
        nodes: numa::nodes(spec, &map.ram).unwrap_or_default(),
        ecam: chipset.ecam.base(),
    };
    let shares = &ports.shares(&seats, &plan)[..];
    let (slots, told, map) = (ports.slots(), &chipset, &map);
    let built =
        Built { vm: &vm, ram: &ram, map, platform: &platform, shares, slots, chipset: told };
    let Start { entry, fw_cfg, firmware } = start::prepare(spec, &built)?;
    (chipset.fw_cfg, chipset.firmware) = (Some(fw_cfg), firmware);
    let board = Arc::new(Board {
        machine: spec.machine,
        vm,
        control: Control::new(spec.deadline),
        console: console.clone(),
        bus: RwLock::new(ports.seat(seats)),
        serial: Mutex::new(Serial::new(serial_line, console)),
        power: Mutex::new(Power::new(sci)),
        chipset,
        built: Instant::now(),
        ram_slots,
        hotplug,
        ram: ram.clone(),
        events: watch.events,
        exits: (0..spec.vcpus).map(|_| Exits::default()).collect(),
        apic_ids: platform.cpus.ids().to_vec(),
        activity: watch.activity,
        hyperv: spec.hyperv,
        pauses: Pauses::default(),
        turn: Mutex::default(),
        dump: Mutex::default(),
        alarms,
        pit,
    });
    let vcpus = vcpu::create(&board, &platform.cpus, entry, &ram)?;
    let (closer, affinity) = (passed.closer, spec.cpu_affinity.clone());
    Ok(Machine { board, vcpus, settling, listener, closer, plugger, affinity })
}

/// Numbers the tree of ports, and tells what is not as it was asked for.
fn number_ports(spec: &VmSpec) -> Result<Tree, PortError> {
    let tree = Tree::new(spec)?;
    if let Some(note) = tree.note(spec) {
        eprintln!("holdfast-vmm: {note}");
    }
    Ok(tree)
}

/// Makes the interrupt line of a device of the chipset.
fn line(vm: &Vm, gsi: u32) -> Result<Arc<dyn InterruptLine>, KvmError> {
    let failed = |source| KvmError::Call { what: "make an interrupt line", source };
    vm.isa_line(gsi).map_err(failed)
}

fn take(what: &'static str, fd: i32) -> Result<OwnedFd, BuildError> {
    adopt(fd).map_err(|source| BuildError::Descriptor { what, fd, source })
}

/// A function of the chipset.
fn plain(device: u8, function: impl PciFunction + 'static) -> Seat {
    let address = Address { bus: 0, device, function: 0 };
    Seat { address, function: Arc::new(Mutex::new(function)), above: ROOT }
}

/// Opens the console, with the file that outlives the process if there is one.
fn open_console(spec: &VmSpec) -> Result<Console, BuildError> {
    let Some(fd) = spec.console_fd else { return Ok(Console::default()) };
    let file = File::from(take("console_fd", fd)?);
    Console::kept_in(file).map_err(|source| BuildError::Descriptor {
        what: "console_fd",
        fd,
        source,
    })
}

/// Where devices say what they do.
#[derive(Default)]
struct Watch {
    activity: Registry,
    events: Events,
}

/// Returns what virtio functions use, and what their owner watches of it.
fn virtio_platform(vm: &Arc<Vm>, ram: &Ram, spec: &VmSpec) -> (Watch, virtio::Platform) {
    let watch = Watch::default();
    let platform = virtio::Platform {
        ram: ram.memory.clone(),
        doorbells: Arc::<Vm>::clone(vm),
        interrupts: Arc::<Vm>::clone(vm),
        activity: watch.activity.clone(),
        events: watch.events.clone(),
        limits: Limits::new(spec.disk_limit, Instant::now()),
    };
    (watch, platform)
}

fn virtio_functions(spec: &VmSpec, platform: &virtio::Platform) -> Result<Vec<Seat>, BuildError> {
    let mut slots = FIRST_VIRTIO..;
    let mut next = || slots.next().unwrap_or(31);
    let mut functions: Vec<(u8, VirtioPci)> = Vec::new();
    let mut seats = Vec::new();
    for disk in &spec.disks {
        let slot = next();
        let file = take("a disk", disk.fd)?;
        let more = disk.more_fds.iter().map(|fd| take("a disk", *fd));
        let more = more.collect::<Result<Vec<_>, _>>()?;
        if disk.model == DiskModel::Nvme {
            seats.push(nvme(disk, file, slot, (spec.vcpus, platform))?);
            continue;
        }
        let files = (file, more);
        functions.push((slot, virtio::blk::open(disk, files, spec.vcpus, slot, platform)?));
    }
    for net in &spec.nets {
        let slot = next();
        let pair = |tap, vhost| {
            let (tap, vhost) = (take("a tap", tap)?, take("/dev/vhost-net", vhost)?);
            Ok::<_, BuildError>(PairFiles { tap, vhost })
        };
        let first = pair(net.tap_fd, net.vhost_fd)?;
        let more = net.more_pairs.iter().map(|more| pair(more.tap_fd, more.vhost_fd));
        let more = more.collect::<Result<Vec<_>, _>>()?;
        functions.push((slot, virtio::net::open(net, first, more, slot, platform)?));
    }
    if let Some(vsock) = &spec.vsock {
        let slot = next();
        let vhost = take("/dev/vhost-vsock", vsock.vhost_fd)?;
        functions.push((slot, virtio::vsock::open(vsock, vhost, slot, platform)?));
    }
    let slot = next();
    functions.push((slot, virtio::rng::open(slot, platform)?));
    for (device, mut function) in functions {
        function.start()?;
        let address = Address { bus: 0, device, function: 0 };
        seats.push(Seat { address, function: Arc::new(Mutex::new(function)), above: ROOT });
    }
    Ok(seats)
}

fn nvme(
    disk: &Disk,
    file: OwnedFd,
    device: u8,
    (vcpus, platform): (u32, &virtio::Platform),
) -> Result<Seat, BuildError> {
    let open = || {
        let mut function = Nvme::open(disk, file, (device, vcpus), EngineChoice::Best, platform)?;
        function.start().map(|()| function)
    };
    let function = open().map_err(DeviceError::from)?;
    let address = Address { bus: 0, device, function: 0 };
    Ok(Seat { address, function: Arc::new(Mutex::new(function)), above: ROOT })
}

/// What passed-through devices leave behind.
#[derive(Default)]
struct Passed {
    seats: Vec<Seat>,
    behind: Vec<Behind>,
    closer: Option<Closer>,
    plug: Option<Plug>,
}

fn passthrough(
    claim: Option<Claim>,
    tree: &Tree,
    vm: &Arc<Vm>,
    ram: &Ram,
) -> Result<Passed, BuildError> {
    let Some(claim) = claim else { return Ok(Passed::default()) };
    let ports = tree.device_ports();
    let routes: Vec<PinRoute> = ports.iter().map(|port| tree.pin_route(*port)).collect();
    let Passthrough { devices, closer, plug } = claim.give(ram, vm, &routes)?;
    let mut passed = Passed { closer: Some(closer), plug: Some(plug), ..Passed::default() };
    for (port, assigned) in ports.into_iter().zip(devices) {
        passed.behind.push(assigned.behind);
        passed.seats.push(Seat {
            address: Address { bus: tree.ports[port].buses.0, device: 0, function: 0 },
            above: Above::Bridge(port),
            function: Arc::new(Mutex::new(assigned.function)),
        });
    }
    Ok(passed)
}
