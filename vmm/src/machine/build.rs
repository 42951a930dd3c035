//! From a specification to a machine: memory, devices on the bus, firmware tables, kernel, virtual
//! CPUs. One step per kind of device.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::net::UnixListener},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Instant,
};

use types::vm::{Disk, DiskModel, VmSpec};

use super::{
    Board, Chipset, Control, Machine, Pauses,
    map::{AddressMap, MapError},
    start::{self, Built, StartError},
};
use crate::{
    acpi,
    console::Console,
    counters::{Exits, Registry},
    devices::{
        DeviceError,
        nvme::Nvme,
        power::{self, Power},
        serial::{self, Serial},
        virtio::{self, VirtioError, blk::engine::EngineChoice, pci::VirtioPci},
    },
    events::Events,
    pci::{
        allocate::{self, Placed, Request},
        bus::{Address, Bus},
        chipset::{HostBridge, LpcBridge},
        config::ConfigError,
        function::{BarKind, PciFunction},
        root_port::{RootPort, Windows},
    },
    sys::{
        kvm::{KvmError, Vm},
        memory::{Fetch, MemoryError, Ram},
        vfio::adopt,
    },
    vcpu::{self, VcpuError},
    vfio::assign::{AssignError, Claim, Passthrough},
};

/// Slot of the LPC bridge, where Intel's chipsets have it.
const LPC_BRIDGE: u8 = 31;
/// Slot of the first root port on bus 0; passed-through devices take one each.
const FIRST_PORT: u8 = 2;
/// Slot of the first virtio function on bus 0.
pub(super) const FIRST_VIRTIO: u8 = 0x10;
/// Most root ports.
pub const MAX_PASSTHROUGH: usize = (FIRST_VIRTIO - FIRST_PORT) as usize;
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
    Pci(#[from] ConfigError),
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

/// A function, where it goes, and the bridge above it.
struct Seat {
    address: Address,
    function: Arc<Mutex<dyn PciFunction>>,
    port: Option<(Address, Arc<Mutex<RootPort>>)>,
}

/// Builds the machine of `spec`. Its threads, other than those of block devices, are not started.
pub fn build(spec: &VmSpec) -> Result<Machine, BuildError> {
    let vm = Vm::new(take("kvm_fd", spec.kvm_fd)?)?;
    let listener = UnixListener::from(take("api_fd", spec.api_fd)?);
    let bytes = spec.memory_mib.to_bytes().unwrap_or(u64::MAX);
    let claim = spec.passthrough.as_ref().map(Claim::new).transpose()?;
    let map = AddressMap::new(bytes, spec, claim.as_ref(), &vm)?;
    let fetch = if claim.is_some() { Fetch::All } else { Fetch::WhenHuge };
    let ram = Ram::placed(&map.ram, spec.memory_backing, &spec.host_memory, fetch)?;
    let ram_slots = vm.map_ram(&ram)?;
    let console = open_console(spec)?;
    let interrupt = |source| KvmError::Call { what: "make an interrupt line", source };
    let serial_line = vm.isa_line(serial::GSI).map_err(interrupt)?;
    let sci = vm.isa_line(power::SCI).map_err(interrupt)?;

    let mut chipset = Chipset::new(&map.ram);
    let mut seats = vec![
        plain(0, HostBridge::new(chipset.ecam.clone())),
        plain(LPC_BRIDGE, LpcBridge::default()),
    ];
    let watch = Watch::default();
    seats.extend(virtio_functions(spec, &vm, &ram, &watch)?);
    let (passed, closer) = passthrough(claim, &vm, &ram)?;
    seats.extend(passed);
    let plan = place(&seats, &map)?;
    let platform = acpi::Platform {
        vcpus: u8::try_from(spec.vcpus).unwrap_or(u8::MAX),
        mmio64: plan.mmio64,
        mmio64_size: plan.mmio64_size,
        ecam: chipset.ecam.base(),
        firmware: None,
    };
    let built =
        Built { vm: &vm, ram: &ram, map: &map, platform: &platform, ecam: chipset.ecam.clone() };
    let (entry, firmware) = start::prepare(spec, &built)?;
    chipset.firmware = firmware;
    let board = Arc::new(Board {
        machine: spec.machine,
        vm,
        control: Control::default(),
        console: console.clone(),
        bus: RwLock::new(seat(seats)),
        serial: Mutex::new(Serial::new(serial_line, console)),
        power: Mutex::new(Power::new(sci)),
        chipset,
        built: Instant::now(),
        ram_slots,
        ram: ram.clone(),
        events: watch.events,
        exits: (0..spec.vcpus).map(|_| Exits::default()).collect(),
        activity: watch.activity,
        hyperv: spec.hyperv,
        pauses: Pauses::default(),
        turn: Mutex::default(),
    });
    let vcpus = vcpu::create(&board, platform.vcpus, entry, &ram)?;
    Ok(Machine { board, vcpus, listener, closer, affinity: spec.cpu_affinity.clone() })
}

fn take(what: &'static str, fd: i32) -> Result<OwnedFd, BuildError> {
    adopt(fd).map_err(|source| BuildError::Descriptor { what, fd, source })
}

/// A function of the chipset.
fn plain(device: u8, function: impl PciFunction + 'static) -> Seat {
    let address = Address { bus: 0, device, function: 0 };
    Seat { address, function: Arc::new(Mutex::new(function)), port: None }
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

fn virtio_functions(
    spec: &VmSpec,
    vm: &Arc<Vm>,
    ram: &Ram,
    watch: &Watch,
) -> Result<Vec<Seat>, BuildError> {
    let platform = virtio::Platform {
        ram: ram.memory.clone(),
        doorbells: Arc::<Vm>::clone(vm),
        interrupts: Arc::<Vm>::clone(vm),
        activity: watch.activity.clone(),
        events: watch.events.clone(),
    };
    let mut slots = FIRST_VIRTIO..;
    let mut next = || slots.next().unwrap_or(31);
    let mut functions: Vec<(u8, VirtioPci)> = Vec::new();
    let mut seats = Vec::new();
    for disk in &spec.disks {
        let slot = next();
        let file = take("a disk", disk.fd)?;
        if disk.model == DiskModel::Nvme {
            seats.push(nvme(disk, file, slot, (spec.vcpus, &platform))?);
            continue;
        }
        functions.push((slot, virtio::blk::open(disk, file, spec.vcpus, slot, &platform)?));
    }
    for net in &spec.nets {
        let slot = next();
        let (tap, vhost) = (take("a tap", net.tap_fd)?, take("/dev/vhost-net", net.vhost_fd)?);
        functions.push((slot, virtio::net::open(net, tap, vhost, slot, &platform)?));
    }
    if let Some(vsock) = &spec.vsock {
        let slot = next();
        let vhost = take("/dev/vhost-vsock", vsock.vhost_fd)?;
        functions.push((slot, virtio::vsock::open(vsock, vhost, slot, &platform)?));
    }
    let slot = next();
    functions.push((slot, virtio::rng::open(slot, &platform)?));
    for (device, mut function) in functions {
        function.start()?;
        let address = Address { bus: 0, device, function: 0 };
        seats.push(Seat { address, function: Arc::new(Mutex::new(function)), port: None });
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
        let mut function = Nvme::open(disk, file, vcpus, EngineChoice::Best, platform)?;
        function.start().map(|()| function)
    };
    let function = open().map_err(DeviceError::from)?;
    let address = Address { bus: 0, device, function: 0 };
    Ok(Seat { address, function: Arc::new(Mutex::new(function)), port: None })
}

type Passed = (Vec<Seat>, Option<crate::vfio::assign::Closer>);

fn passthrough(claim: Option<Claim>, vm: &Arc<Vm>, ram: &Ram) -> Result<Passed, BuildError> {
    let Some(claim) = claim else { return Ok((Vec::new(), None)) };
    let Passthrough { devices, closer } = claim.give(ram, vm, FIRST_PORT)?;
    let mut seats = Vec::new();
    for (number, assigned) in (0u8..).zip(devices) {
        let slot = FIRST_PORT + number;
        let bus = number + 1;
        let mut port = RootPort::new(slot, assigned.link)?;
        port.set_buses(0, bus, bus);
        let above = Address { bus: 0, device: slot, function: 0 };
        seats.push(Seat {
            address: Address { bus, device: 0, function: 0 },
            function: Arc::new(Mutex::new(assigned.function)),
            port: Some((above, Arc::new(Mutex::new(port)))),
        });
    }
    Ok((seats, Some(closer)))
}

/// Places all BARs and opens the bridges' windows for them.
fn place(seats: &[Seat], map: &AddressMap) -> Result<allocate::Plan, BuildError> {
    let mut requests = Vec::new();
    for (function, seat) in seats.iter().enumerate() {
        let bars = lock(&seat.function).bars();
        requests.extend(bars.into_iter().map(|bar| Request { function, bar }));
    }
    let plan = map.place(|start| allocate::place(&requests, start, map.bits))?;
    for (number, seat) in seats.iter().enumerate() {
        let mine: Vec<&Placed> = plan.placed.iter().filter(|bar| bar.function == number).collect();
        for bar in &mine {
            lock(&seat.function).place_bar(bar.index, bar.address);
        }
        if let Some((_, port)) = &seat.port {
            port.lock().unwrap_or_else(PoisonError::into_inner).set_windows(windows(&mine));
        }
    }
    Ok(plan)
}

fn windows(bars: &[&Placed]) -> Windows {
    let span = |wanted: &[BarKind]| {
        let mine = || bars.iter().filter(|bar| wanted.contains(&bar.kind));
        let base = mine().map(|bar| bar.address).min()?;
        let last = mine().map(|bar| bar.address + (bar.size - 1)).max()?;
        Some((base, last))
    };
    let low =
        |(base, last): (u64, u64)| Some((u32::try_from(base).ok()?, u32::try_from(last).ok()?));
    let ports =
        |(base, last): (u64, u64)| Some((u16::try_from(base).ok()?, u16::try_from(last).ok()?));
    Windows {
        io: span(&[BarKind::Io]).and_then(ports),
        memory: span(&[BarKind::Memory32, BarKind::Memory64]).and_then(low),
        prefetchable: span(&[BarKind::Memory64Prefetchable]),
    }
}

fn seat(seats: Vec<Seat>) -> Bus {
    let mut bus = Bus::default();
    for Seat { address, function, port } in seats {
        match port {
            None => bus.add(address, function),
            Some((above, port)) => {
                bus.add(above, port);
                bus.add_behind(above, address, function);
            }
        }
    }
    bus
}

fn lock<T: ?Sized>(device: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}
