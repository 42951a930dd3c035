//! Starts a machine's process. That is a task of its own with a deadline, and the keeper does not wait for
//! it; taking back what a machine held, which is another one, is `recovery`'s.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use lease::{api::Seed, hardware::Placement};
use overlay::Overlay;
use rustix::fs::{MemfdFlags, SealFlags};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use types::{
    config::HugePage,
    ids::{ContentId, MachineId},
    node::Bdf,
    topology::{NumaNode, Topology},
    vm::{
        Boot, CoreScheduling, Deadline, Disk, HostMemory, MAX_QUEUE_PAIRS, MemoryBacking, Net,
        Passthrough, PassthroughDevice, QueuePair, SPEC_FD, SPEC_VERSION, VmSpec, Vsock,
    },
};

use super::{
    attach::{AttachFailure, Plugged},
    bounds,
    content::{Cache, ContentError, Fetched, Terms},
    cpus::HostCpu,
    disk::{self, DiskError, Opened, Places},
    disk_copy::Image,
    firmware,
    init::{Init, InitError},
    last_console, memory,
    pages::HeldPages,
    placement,
    plan::Record,
    recovery, seed, vmm,
};
use crate::{
    assign::{
        self, AssignError, Handover, Peers, Recovered,
        cliques::{self, Candidate},
    },
    inventory::ports,
    net::{MachineNetError, MachineNetworks},
};

/// A process that does not run its guest within this time does not start: pinning and clearing
/// a terabyte takes about five minutes on one thread.
const START_LIMIT: Duration = Duration::from_secs(600);

/// Pause between questions to a starting process.
const POLL: Duration = Duration::from_millis(50);

/// Bytes of a kernel that tell its kind.
const KERNEL_HEAD: usize = 0x206;

/// What the actions need.
#[derive(Debug, Clone)]
pub struct Tools {
    /// init.
    pub init: Init,
    /// Taps.
    pub networks: Arc<MachineNetworks>,
    /// Content comes over it.
    pub overlay: Overlay,
    /// Content that is here.
    pub cache: Cache,
    /// Where machines' disks are.
    pub disks: Places,
    /// `/`.
    pub root: PathBuf,
    /// The host's CPUs.
    pub cpus: Arc<[HostCpu]>,
    /// The host's huge pages that machines have.
    pub pages: HeldPages,
}

/// How an action went on.
#[derive(Debug)]
pub enum Progress {
    /// Its process is about to be started, there, once that is kept. Nobody starts it when that is not wanted.
    Placed(MachineId, Box<Placement>, oneshot::Sender<()>),
    /// The process was started.
    Spawned(MachineId, i32),
    /// The guest runs.
    Running(MachineId, i32, Duration),
    /// A running process answered a question.
    Answered(MachineId, i32, Heard),
    /// It did not.
    Unanswered(MachineId, i32),
    /// Something was attached, or was not.
    Attached(MachineId, String, Result<Plugged, AttachFailure>),
    /// It was not started.
    Failed(MachineId, StartError),
    /// Its process was told of its deadline, or did not listen.
    Told(MachineId, Deadline, Result<(), vmm::VmmError>),
    /// Everything it held was taken back; per device, how its reset went.
    /// Drives that are erased are told of later.
    /// Drives that are reset, and not erased yet, come last.
    Released(MachineId, Vec<TakenBack>, Vec<Bdf>),
    /// A device that no machine has was reset, or was not: what is beside it will not lose its state any more.
    Climbed(Bdf),
    /// Drives were erased, or quarantined devices reset once more; per device, how it went.
    Recovered(Vec<TakenBack>),
}

/// What a running process says of its machine, as far as it does.
#[derive(Debug, Clone, Copy, Default)]
pub struct Heard {
    /// Requests of its disks that failed by now.
    pub failed: Option<u64>,
    /// How far its guest has set its clock ahead of the host's, in seconds.
    pub clock_ahead_s: Option<i64>,
}

/// A device that was taken back from a machine, or should have been.
#[derive(Debug)]
pub struct TakenBack {
    /// Which.
    pub device: Bdf,
    /// How it went.
    pub result: Result<Recovered, AssignError>,
}

/// Why a machine was not started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum StartError {
    #[error(transparent)]
    Content(#[from] ContentError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Network(#[from] MachineNetError),
    #[error(transparent)]
    Device(#[from] AssignError),
    #[error(transparent)]
    Init(#[from] InitError),
    #[error("content {content} is no kernel: neither a bzImage nor an ELF vmlinux")]
    NoKernel { content: ContentId },
    #[error("cannot open {path}")]
    Open { path: String, source: io::Error },
    #[error("cannot prepare the machine's {what}")]
    Prepare { what: &'static str, source: io::Error },
    #[error("the machine's process did not run its guest within {} s", START_LIMIT.as_secs())]
    Late,
    #[error("it was not wanted any more before its process was started")]
    Abandoned,
}

impl StartError {
    /// Returns whether another attempt would end the same way.
    pub fn is_final(&self) -> bool {
        match self {
            Self::NoKernel { .. } | Self::Disk(DiskError::Small { .. } | DiskError::Key { .. }) => {
                true
            }
            Self::Content(error) => match error {
                ContentError::Digest { .. }
                | ContentError::Refused { .. }
                | ContentError::TooLarge { .. } => true,
                ContentError::Ask { .. }
                | ContentError::Busy { .. }
                | ContentError::NoRoom { .. }
                | ContentError::Stalled { .. }
                | ContentError::Host { .. } => false,
            },
            Self::Disk(
                DiskError::Host { .. } | DiskError::Lost { .. } | DiskError::Image { .. },
            )
            | Self::Network(_)
            | Self::Device(_)
            | Self::Init(_)
            | Self::Open { .. }
            | Self::Prepare { .. }
            | Self::Late
            | Self::Abandoned => false,
        }
    }
}

/// Starts a machine, whose process ends it at `deadline` unless it is told otherwise, and reports. Waits for
/// no content once `abandoned` is cancelled.
pub async fn start(
    tools: Tools,
    record: Record,
    (deadline, abandoned): (Deadline, CancellationToken),
    progress: mpsc::Sender<Progress>,
) {
    let machine = record.lease.id;
    let begin = Instant::now();
    let result = async {
        let unchecked = abandoned
            .run_until_cancelled(fetch(&tools, &record))
            .await
            .ok_or(StartError::Abandoned)??;
        let (spec, files, placement) = prepare(&tools, &record, (deadline, unchecked)).await?;
        place(machine, placement, &progress).await?;
        let pid = spawn(&tools, &spec, files).await?;
        // The keeper outlives its tasks; when it is gone, so is the agent.
        let _ = progress.send(Progress::Spawned(machine, pid)).await;
        wait_until_running(machine).await?;
        Ok(pid)
    };
    let report = match result.await {
        Ok(pid) => Progress::Running(machine, pid, begin.elapsed()),
        Err(error) => Progress::Failed(machine, error),
    };
    let _ = progress.send(report).await;
}

async fn wait_until_running(machine: MachineId) -> Result<(), StartError> {
    let wait = async {
        loop {
            // The VMM answers from the guest's start on.
            if vmm::state(machine).await.is_ok() {
                return;
            }
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(START_LIMIT, wait).await.map_err(|_| StartError::Late)
}

/// Sees to it that everything is here which the machine starts from. Returns what was not checked: the image of its
/// disk, if it was here already.
async fn fetch(tools: &Tools, record: &Record) -> Result<Option<ContentId>, ContentError> {
    let (image, shape) = (&record.image, &record.lease.shape);
    // They are read as long as the machine is there, and go to its memory.
    let mut left = shape.memory_mib.to_bytes().unwrap_or(u64::MAX);
    for content in [image.kernel, image.initrd].into_iter().flatten() {
        let terms = Terms::within(left, "the lease's memory, where kernel and initramfs go, has");
        tools.cache.fetch(&tools.overlay, record.gateway, content, terms).await?;
        left = left.saturating_sub(tools.cache.length(content).unwrap_or(0));
    }
    let made = disk::is_made(&tools.disks, record.lease.id);
    let Some(content) = image.disk.filter(|_| !made) else { return Ok(None) };
    // It is copied, and can be looked at meanwhile.
    let terms = Terms::image(record.hardware.own_disk(shape).to_bytes().unwrap_or(u64::MAX));
    let fetched =
        tools.cache.fetch_unchecked(&tools.overlay, record.gateway, content, terms).await?;
    Ok((fetched == Fetched::Before).then_some(content))
}

/// Opens what the machine's process gets, and says what it is.
async fn prepare(
    tools: &Tools,
    record: &Record,
    (deadline, unchecked): (Deadline, Option<ContentId>),
) -> Result<(VmSpec, Files, Placement), StartError> {
    let image = &record.image;
    let mut files = Files::default();
    let boot = match image.kernel {
        Some(kernel) => Boot::Linux {
            kernel_fd: files.add(open_kernel(&tools.cache, kernel)?.into()),
            initrd_fd: match image.initrd {
                Some(content) => Some(files.add(open(&tools.cache.path(content), Access::Read)?)),
                None => None,
            },
            cmdline: image.cmdline.clone(),
        },
        None => open_firmware(tools, record, &mut files)?,
    };
    let mut disks = open_disks(tools, (record, unchecked), &mut files).await?;
    disks.extend(open_seed(record, &mut files)?);
    let nets = vec![open_network(tools, record, &mut files).await?];
    let vsock = match open(&tools.root.join("dev/vhost-vsock"), Access::Write) {
        Ok(file) => Some(Vsock { cid: record.uid, vhost_fd: files.add(file) }),
        Err(_) => None,
    };
    let console = last_console::begin(record.lease.id)
        .map_err(|source| StartError::Prepare { what: "console's file", source })?;
    let cold = record.hardware.cold_devices(&record.lease.shape);
    recovery::make_whole(&tools.root, &cold, &record.lease.shape.devices).await?;
    let mut located = locate((&tools.root, &tools.cpus), &tools.pages, record);
    let passthrough = open_devices(tools, record, &mut files, &mut located.placement)?;
    let spec = VmSpec {
        version: SPEC_VERSION,
        machine: record.lease.id,
        uid: record.uid,
        vcpus: record.lease.shape.vcpus,
        memory_mib: record.lease.shape.memory_mib,
        memory_backing: record.memory,
        host_memory: located.memory,
        boot,
        ignition_fd: open_ignition(image.seed.as_ref(), &mut files)?,
        disks,
        disk_limit: record.lease.shape.disk_limit,
        nets,
        vsock,
        passthrough,
        topology: located.topology,
        spare_ports: placement::spare_ports(&tools.root, &record.hardware),
        numa: located.numa,
        cpu_places: placement::cpu_places(&record.promise.cpus, &tools.cpus),
        kvm_fd: files.add(open(&tools.root.join("dev/kvm"), Access::Write)?),
        api_fd: files.add(listen(record.lease.id)?),
        console_fd: Some(files.add(console)),
        cpu_affinity: record.promise.cpus.iter().map(|cpu| vec![*cpu]).collect(),
        core_scheduling: CoreScheduling::Own,
        hyperv: record.hardware.hyperv,
        deadline: Some(deadline),
        clock_ahead_s: record.clock_ahead_s,
    };
    Ok((spec, files, located.placement))
}

/// Has the keeper keep where the machine is going to be: an agent that finds it running goes by that, also when this
/// one ends with init's answer still on its way.
async fn place(
    machine: MachineId,
    placement: Placement,
    progress: &mpsc::Sender<Progress>,
) -> Result<(), StartError> {
    let (kept, wait) = oneshot::channel();
    let _ = progress.send(Progress::Placed(machine, Box::new(placement), kept)).await;
    wait.await.map_err(|_| StartError::Abandoned)
}

async fn spawn(tools: &Tools, spec: &VmSpec, files: Files) -> Result<i32, StartError> {
    let mut all = vec![seal(spec)?];
    all.extend(files.0);
    Ok(tools.init.spawn(bounds::order(spec), &all).await?)
}

/// Descriptors in the order in which the VMM finds them after its specification.
#[derive(Debug, Default)]
struct Files(Vec<OwnedFd>);

impl Files {
    /// Takes a descriptor. Returns its number in the VMM.
    fn add(&mut self, file: OwnedFd) -> i32 {
        self.0.push(file);
        SPEC_FD + i32::try_from(self.0.len()).unwrap_or(i32::MAX - SPEC_FD)
    }
}

/// Where a machine is going to be.
struct Located {
    memory: Vec<HostMemory>,
    topology: Option<Topology>,
    numa: Vec<NumaNode>,
    placement: Placement,
}

/// Decides where the machine's memory comes from and what the guest sees of the host's nodes, with
/// the host, its root and its CPUs, as it is now. Huge pages that it gets are `held` from here on.
fn locate((root, host): (&Path, &[HostCpu]), held: &HeldPages, record: &Record) -> Located {
    let shape = &record.lease.shape;
    let page = match record.memory {
        MemoryBacking::Memfd | MemoryBacking::Hugetlb2M => HugePage::Size2M,
        MemoryBacking::Hugetlb1G => HugePage::Size1G,
    };
    let mut near: Vec<u32> =
        shape.devices.iter().filter_map(|device| assign::node_of(root, *device)).collect();
    if near.is_empty() {
        let promised = host.iter().filter(|cpu| record.promise.cpus.contains(&cpu.id));
        near = promised.filter_map(|cpu| cpu.node).collect();
    }
    near.sort_unstable();
    near.dedup();
    let (nodes, mut parts) = held.place(record.lease.id, (root, page), |nodes| {
        memory::place(shape.memory_mib, record.memory, nodes, &near)
    });
    let threads =
        usize::try_from(shape.vcpus.saturating_add(bounds::FETCHING)).unwrap_or(usize::MAX);
    placement::keep_to(&mut parts, &record.promise.cpus, threads);
    let ids: Vec<u32> = nodes.iter().map(|node| node.id).collect();
    let distance = |from, to| placement::distance(root, &ids, from, to);
    let cpus = &record.promise.cpus;
    let guest = placement::guest_nodes(cpus, &parts, shape.memory_mib, host, distance);
    let cold = record.hardware.cold_devices(shape);
    let topology = ports::topology(&ports::read(root, &cold), &cold, &guest.host)
        .filter(|_| !cold.is_empty())
        .map(|topology| placement::renumber(topology, &guest.host));
    let mut placement = Placement {
        cpus: cpus.clone(),
        memory: placement::memory_places(&parts, shape, record.memory),
        numa_nodes: u32::try_from(guest.nodes.len()).unwrap_or(0),
        notes: record.promise.notes.iter().cloned().chain(guest.note).collect(),
        ..Placement::default()
    };
    placement::note_memory(&mut placement, &near);
    Located { memory: parts, topology, numa: guest.nodes, placement }
}

/// Opens the machine's tap, with a queue for each virtual CPU as far as a device can have them.
async fn open_network(
    tools: &Tools,
    record: &Record,
    files: &mut Files,
) -> Result<Net, StartError> {
    let queues = record.lease.shape.vcpus.min(MAX_QUEUE_PAIRS);
    let net = tools.networks.create(record.lease.id, queues).await?;
    let vhost = || open(&tools.root.join("dev/vhost-net"), Access::Write);
    let (tap_fd, vhost_fd) = (files.add(net.tap), files.add(vhost()?));
    let mut more_pairs = Vec::new();
    for queue in net.more_queues {
        more_pairs.push(QueuePair { tap_fd: files.add(queue), vhost_fd: files.add(vhost()?) });
    }
    let (mac, mtu) = (net.address.mac.to_string(), net.address.mtu);
    Ok(Net { tap_fd, vhost_fd, more_pairs, mac, mtu })
}

async fn open_disks(
    tools: &Tools,
    (record, unchecked): (&Record, Option<ContentId>),
    files: &mut Files,
) -> Result<Vec<Disk>, StartError> {
    let size = record.hardware.own_disk(&record.lease.shape);
    if size.0 == 0 {
        return Ok(Vec::new());
    }
    let (places, machine) = (tools.disks.clone(), record.lease.id);
    let image = record.image.disk.map(|content| tools.cache.path(content));
    let cpus = record.promise.cpus.clone();
    let copy = move || {
        let image = image.as_deref().map(|path| Image { path, cpus: &cpus, unchecked });
        disk::open(&places, machine, size, image)
    };
    let opened = tokio::task::spawn_blocking(copy)
        .await
        .map_err(|error| StartError::Prepare { what: "disk", source: io::Error::other(error) })?;
    if let (Err(DiskError::Image { reason }), Some(content)) = (&opened, record.image.disk) {
        // The next attempt fetches it.
        let prepare = |source| StartError::Prepare { what: "image", source };
        tools.cache.give_up(content, reason).map_err(prepare)?;
    }
    let Opened { file, again, key } = opened?;
    let serial = machine.to_string().chars().take(20).collect();
    Ok(vec![Disk {
        fd: files.add(file.into()),
        more_fds: again.into_iter().map(|file| files.add(file.into())).collect(),
        read_only: false,
        serial,
        model: record.hardware.disk_model,
        limit: None,
        key,
    }])
}

/// Opens the firmware and the machine's own variables for it.
fn open_firmware(tools: &Tools, record: &Record, files: &mut Files) -> Result<Boot, StartError> {
    let firmware = tools.root.join(firmware::CODE);
    let prepare = |source| StartError::Prepare { what: "firmware variables", source };
    let variables = firmware::variables(&tools.root, &tools.disks.data, record.lease.id);
    Ok(Boot::Uefi {
        firmware_fd: files.add(open(&firmware, Access::Read)?),
        variables_fd: files.add(variables.map_err(prepare)?.into()),
        pci_windows: firmware::PCI_WINDOWS,
    })
}

/// Serial number of the disk that cloud-init looks for. No disk of a renter's is called so: their names have small
/// letters, and of two NVMe controllers with one serial number Linux takes the first only.
const SEED_SERIAL: &str = "CIDATA";

/// Makes the disk that cloud-init looks for, if its renter gave anything for it.
fn open_seed(record: &Record, files: &mut Files) -> Result<Option<Disk>, StartError> {
    let Some(seed) = &record.image.seed else { return Ok(None) };
    let prepare = |source| StartError::Prepare { what: "cloud-init seed", source };
    let volume = seed::volume(record.lease.id, seed).map_err(prepare)?;
    // It is written to: FreeBSD's nuageinit mounts it only so, and whatever comes of it is gone at the next start.
    let memory = fixed("holdfast-seed", &volume, SealFlags::empty()).map_err(prepare)?;
    let (model, serial) = (record.hardware.disk_model, SEED_SERIAL.to_owned());
    // Nothing is behind it that a write could be lost on.
    let (fd, more_fds) = (files.add(memory), Vec::new());
    Ok(Some(Disk { fd, more_fds, read_only: false, serial, model, limit: None, key: None }))
}

/// Makes the configuration that Ignition looks for, if its renter gave one, or with keys and host name alone.
fn open_ignition(seed: Option<&Seed>, files: &mut Files) -> Result<Option<i32>, StartError> {
    let Some(config) = seed.and_then(seed::ignition) else { return Ok(None) };
    let prepare = |source| StartError::Prepare { what: "configuration for Ignition", source };
    let memory = seal_bytes("holdfast-ignition", config.as_bytes()).map_err(prepare)?;
    Ok(Some(files.add(memory)))
}

fn open_devices(
    tools: &Tools,
    record: &Record,
    files: &mut Files,
    placement: &mut Placement,
) -> Result<Option<Passthrough>, StartError> {
    if record.lease.shape.devices.is_empty() {
        return Ok(None);
    }
    let cold = record.hardware.cold_devices(&record.lease.shape);
    let Handover { interface, peers, iommu, devices } = assign::hand_over(&tools.root, &cold)?;
    let peer_to_peer = peers == Peers::Reach;
    let cliques = if peer_to_peer { cliques(&tools.root, &cold) } else { Vec::new() };
    let iommu_fd = files.add(iommu);
    let device = |(address, fd)| PassthroughDevice {
        address,
        cdev_fd: files.add(fd),
        p2p_clique: cliques::number(&cliques, address),
    };
    let devices = devices.into_iter().map(device).collect();
    placement.interface = Some(interface);
    placement.peer_to_peer = peer_to_peer;
    placement.cliques = cliques;
    Ok(Some(Passthrough { interface, iommu_fd, peer_to_peer, devices }))
}

/// Finds the GPUs that may be told that they reach each other directly.
fn cliques(root: &Path, devices: &[Bdf]) -> Vec<Vec<Bdf>> {
    let above = ports::read(root, devices);
    let candidate = |address: &Bdf| {
        let (identity, class) = assign::identity(root, *address)?;
        Some(Candidate { address: *address, identity, class, above: above.get(address)? })
    };
    cliques::cliques(&devices.iter().filter_map(candidate).collect::<Vec<_>>())
}

/// Which way a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

fn open(path: &Path, access: Access) -> Result<OwnedFd, StartError> {
    let file = File::options().read(true).write(access == Access::Write).open(path);
    file.map(OwnedFd::from)
        .map_err(|source| StartError::Open { path: path.display().to_string(), source })
}

fn open_kernel(cache: &Cache, content: ContentId) -> Result<File, StartError> {
    let mut kernel = File::from(open(&cache.path(content), Access::Read)?);
    let mut head = Vec::new();
    let limit = u64::try_from(KERNEL_HEAD).unwrap_or(u64::MAX);
    (&mut kernel)
        .take(limit)
        .read_to_end(&mut head)
        .and_then(|_| io::Seek::rewind(&mut kernel))
        .map_err(|source| StartError::Prepare { what: "kernel", source })?;
    if is_kernel(&head) { Ok(kernel) } else { Err(StartError::NoKernel { content }) }
}

/// Returns whether a file that starts so may be a kernel: an ELF file, or a bzImage
/// (Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header").
fn is_kernel(head: &[u8]) -> bool {
    head.starts_with(b"\x7fELF") || head.get(0x202..0x206) == Some(b"HdrS")
}

fn listen(machine: MachineId) -> Result<OwnedFd, StartError> {
    let path = vmm::socket_path(machine);
    let prepare = |source| StartError::Prepare { what: "control socket", source };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(prepare)?;
    }
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(prepare(error)),
        Err(_) | Ok(()) => {}
    }
    Ok(UnixListener::bind(&path).map_err(prepare)?.into())
}

fn seal(spec: &VmSpec) -> Result<OwnedFd, StartError> {
    let prepare = |source| StartError::Prepare { what: "specification", source };
    let bytes = serde_json::to_vec(spec).map_err(|error| prepare(error.into()))?;
    seal_bytes("holdfast-spec", &bytes).map_err(prepare)
}

/// Returns a file in memory that nobody can change.
fn seal_bytes(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    fixed(name, bytes, SealFlags::WRITE)
}

/// Returns a file in memory whose length nobody can change, with these seals besides.
fn fixed(name: &str, bytes: &[u8], seals: SealFlags) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create(name, flags)?);
    file.write_all(bytes)?;
    io::Seek::rewind(&mut file)?;
    let length = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals | length)?;
    Ok(file.into())
}

#[cfg(test)]
#[path = "execute_tests.rs"]
mod tests;
