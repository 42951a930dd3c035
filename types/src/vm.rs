//! The document that starts `holdfast-vmm`, and what the VMM says over its socket.
//!
//! Everything the VMM uses arrives as an open file descriptor; the document names them by number.
//! Descriptor 3 is the document itself (a sealed memfd holding JSON), the others follow.

use serde::{Deserialize, Serialize};

use crate::{
    disk_key::DiskKey,
    ids::MachineId,
    node::Bdf,
    topology::{CpuPlace, NumaNode, SparePort, Topology},
    units::Mebibytes,
};

/// Descriptor on which `holdfast-vmm` finds its [`VmSpec`].
pub const SPEC_FD: i32 = 3;

/// Version of [`VmSpec`] that this build reads and writes.
pub const SPEC_VERSION: u32 = 1;

/// Most that a configuration for Ignition may have, in bytes. Guests read it a byte at a time, and the next
/// page from the start again: a mebibyte takes them minutes.
pub const MAX_IGNITION: u64 = 1 << 20;

/// Most queues of one disk, each with a thread: more than four threads gain nothing on one file.
pub const MAX_DISK_QUEUES: u16 = 4;

/// Most kernel threads that work for a queue's thread at once: one writes, which file systems let one do at a time,
/// while another makes durable what was written.
pub const MAX_DISK_WORKERS: u32 = 2;

/// Everything one VMM process is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// [`SPEC_VERSION`].
    pub version: u32,
    /// The machine's name.
    pub machine: MachineId,
    /// User and group id the process takes on, at least 1000, its own among all machines.
    pub uid: u32,
    /// Virtual CPUs, 1..=1024, and no more than the host's KVM runs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_mib: Mebibytes,
    /// Where guest memory comes from.
    pub memory_backing: MemoryBacking,
    /// Where on the host guest memory lies, in the order of its addresses, together as much as
    /// `memory_mib`; empty for wherever there is room.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_memory: Vec<HostMemory>,
    /// What the guest starts from.
    pub boot: Boot,
    /// A configuration for Ignition, which the guest finds where Fedora CoreOS, RHEL CoreOS and Flatcar look
    /// for it: a regular file or memfd of at most [`MAX_IGNITION`] bytes, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignition_fd: Option<i32>,
    /// Disks, in order: the guest's vda, vdb, … (or nvme0n1, …), and what firmware tries first.
    pub disks: Vec<Disk>,
    /// Most that all disks together move, those too that come while the guest runs, if that is bounded.
    #[serde(default)]
    pub disk_limit: Option<RateLimit>,
    /// virtio-net devices, in order.
    pub nets: Vec<Net>,
    /// virtio-vsock, if any.
    pub vsock: Option<Vsock>,
    /// Devices passed through, if any.
    pub passthrough: Option<Passthrough>,
    /// The tree of ports above the devices; a root port for each device when absent.
    #[serde(default)]
    pub topology: Option<Topology>,
    /// Empty ports for devices that are plugged while the guest runs.
    #[serde(default)]
    pub spare_ports: Vec<SparePort>,
    /// NUMA nodes; one for everything when empty.
    #[serde(default)]
    pub numa: Vec<NumaNode>,
    /// Where each virtual CPU is, by its number. Empty: all are cores of one package, each with one
    /// thread, and share a last-level cache with those of their NUMA node.
    #[serde(default)]
    pub cpu_places: Vec<CpuPlace>,
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm_fd: i32,
    /// Listening unix stream socket for the HTTP API.
    pub api_fd: i32,
    /// A file that keeps the newest console output when the process is gone, in the form of
    /// [`crate::console`]; it is made as large as that needs.
    #[serde(default)]
    pub console_fd: Option<i32>,
    /// Host CPUs that virtual CPUs may run on, in order; a virtual CPU without an entry, or with
    /// an empty one, runs anywhere.
    #[serde(default)]
    pub cpu_affinity: Vec<Vec<u32>>,
    /// Who may share a physical core with the machine.
    #[serde(default)]
    pub core_scheduling: CoreScheduling,
    /// Interfaces of another hypervisor that the guest finds instead of KVM's.
    #[serde(default)]
    pub hyperv: HyperV,
    /// When the machine ends by itself, unless that is put off in time; never when absent.
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// How far the guest's clock with CMOS memory is ahead of the host's at the start, in seconds: as it
    /// was set when the machine ran last.
    #[serde(default)]
    pub clock_ahead_s: i64,
}

/// When a machine ends by itself: a lease ends also when nobody is left to end it.
///
/// Both parties count by `CLOCK_BOOTTIME`, which no change of the calendar moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deadline {
    /// The guest runs no longer from then on, in milliseconds of the host since its start.
    #[serde(deserialize_with = "crate::json::whole")]
    pub at_boot_ms: u64,
    /// So long before that its power button is pressed, in milliseconds.
    #[serde(deserialize_with = "crate::json::whole")]
    pub grace_ms: u64,
}

/// Who may run on the threads of a physical core at the same time as a machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CoreScheduling {
    /// Anybody.
    #[default]
    Shared,
    /// Only the machine's own threads.
    Own,
}

/// Whether a guest finds the interfaces that Windows knows from Hyper-V.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HyperV {
    /// KVM's own only.
    #[default]
    Off,
    /// Reference TSC, synthetic timers and interrupts, hypercalls.
    On,
}

/// Where guest memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryBacking {
    /// Anonymous pages of a memfd.
    #[default]
    Memfd,
    /// 2 MiB pages of hugetlbfs.
    #[serde(rename = "hugetlb-2m")]
    Hugetlb2M,
    /// 1 GiB pages of hugetlbfs.
    #[serde(rename = "hugetlb-1g")]
    Hugetlb1G,
}

/// Guest memory that lies on one NUMA node of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostMemory {
    /// The host's node, below 1024; none for wherever there is room.
    pub node: Option<u32>,
    /// How much of guest memory.
    pub memory_mib: Mebibytes,
    /// CPUs of the host that fetch it from the kernel, one thread on each; best the node's own. None
    /// for as many threads as pay, wherever they run.
    pub cpus: Vec<u32>,
}

/// What the guest starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum Boot {
    /// A Linux bzImage or a PVH vmlinux, told apart by their magic numbers.
    Linux {
        /// The kernel, a regular file or memfd.
        kernel_fd: i32,
        /// The initramfs, if any.
        initrd_fd: Option<i32>,
        /// Kernel command line.
        cmdline: String,
    },
    /// UEFI firmware, which starts from `disks` in their order.
    Uefi {
        /// The firmware's code (Debian's OVMF_CODE_4M.fd), a regular file, read only.
        firmware_fd: i32,
        /// This machine's own variables (a copy of OVMF_VARS_4M.fd), a regular file opened for
        /// reading and writing. What the firmware writes is in it when the machine starts anew.
        variables_fd: i32,
        /// Where the firmware has its PCI windows from.
        #[serde(default)]
        pci_windows: PciWindows,
    },
}

/// Where firmware has the windows from in which it places BARs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PciWindows {
    /// It makes its own, as every release does. It then knows of one root complex, and all ports are
    /// below that.
    #[default]
    Found,
    /// It is told in `etc/hardware-info` of each root complex and what that decodes. Right with edk2
    /// 2024.11 and later; earlier releases misread the file and find no disk.
    Told,
}

/// One disk over a raw file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The file or block device.
    pub fd: i32,
    /// The same, opened again, at most [`MAX_DISK_QUEUES`] less one times: each opening of a file hears once of
    /// what the kernel lost of it, and with these, each queue has its own.
    #[serde(default)]
    pub more_fds: Vec<i32>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Serial number the guest reads, at most 20 bytes.
    pub serial: String,
    /// What the guest sees the disk as.
    #[serde(default)]
    pub model: DiskModel,
    /// Most that the guest gets of it alone, if that is bounded.
    #[serde(default)]
    pub limit: Option<RateLimit>,
    /// What the file is encrypted with; it is plain without one.
    #[serde(
        default,
        deserialize_with = "crate::json::present",
        skip_serializing_if = "Option::is_none"
    )]
    pub key: Option<DiskKey>,
}

/// What a disk looks like to the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskModel {
    /// virtio-blk: the fastest, for guests that have its driver.
    #[default]
    VirtioBlk,
    /// An NVMe controller with one namespace, for all others.
    Nvme,
}

/// Most that a guest may move. Reads and writes count together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// Bytes, if they are bounded.
    pub bytes: Option<Rate>,
    /// Requests of any size, if they are bounded.
    pub operations: Option<Rate>,
}

/// A steady rate, and what may be saved up for a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Units each second, at least 1.
    #[serde(deserialize_with = "crate::json::positive")]
    pub per_second: u64,
    /// Units that an idle disk saves up, beyond which nothing accrues.
    #[serde(deserialize_with = "crate::json::whole")]
    pub burst: u64,
}

/// Most pairs of queues of one network device: each costs the host a thread of its own, and eight
/// move more than a tap's other side takes.
pub const MAX_QUEUE_PAIRS: u32 = 8;

/// One virtio-net device over a tap and vhost-net.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Net {
    /// The tap (IFF_TAP | IFF_NO_PI | IFF_VNET_HDR), or the first queue of one with IFF_MULTI_QUEUE.
    pub tap_fd: i32,
    /// `/dev/vhost-net`.
    pub vhost_fd: i32,
    /// Further pairs of queues, for taps with IFF_MULTI_QUEUE; without them the guest sees one pair. At most
    /// [`MAX_QUEUE_PAIRS`] less one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_pairs: Vec<QueuePair>,
    /// Hardware address, as 02:00:00:00:00:01.
    pub mac: String,
    /// Largest frame payload, in bytes.
    pub mtu: u16,
}

/// What one more pair of queues of a network device is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueuePair {
    /// Another queue of the same tap, attached.
    pub tap_fd: i32,
    /// `/dev/vhost-net`, opened once more.
    pub vhost_fd: i32,
}

/// virtio-vsock over vhost-vsock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vsock {
    /// Guest context id, at least 3.
    pub cid: u32,
    /// `/dev/vhost-vsock`.
    pub vhost_fd: i32,
}

/// Devices passed through by VFIO.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passthrough {
    /// By which of the kernel's interfaces.
    #[serde(default)]
    pub interface: VfioInterface,
    /// `/dev/iommu`; with groups, `/dev/vfio/vfio`.
    pub iommu_fd: i32,
    /// Whether the devices, when there are two at least, reach each other's BARs.
    #[serde(default)]
    pub peer_to_peer: bool,
    /// One entry per device; where each sits says `VmSpec.topology`.
    pub devices: Vec<PassthroughDevice>,
}

/// Which of the kernel's interfaces hands devices over (Documentation/driver-api/vfio.rst).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VfioInterface {
    /// iommufd and a character device for each device: Linux 6.6 and later.
    #[default]
    Cdev,
    /// A container and groups: every kernel.
    Group,
}

/// One device passed through.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassthroughDevice {
    /// Its address on the host, for messages and the API.
    pub address: Bdf,
    /// `/dev/vfio/devices/vfioN`; with groups, a descriptor of its own of `/dev/vfio/N`, its group.
    pub cdev_fd: i32,
    /// NVIDIA GPUs only, and with `peer_to_peer` only: the GPUDirect clique that the guest's driver
    /// is told, 0..=15. GPUs of one clique reach each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p2p_clique: Option<u8>,
}

/// What a VMM answers to `GET /v1/state`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmState {
    /// The machine's name.
    pub machine: MachineId,
    /// What the guest is doing.
    pub phase: VmPhase,
    /// Bytes of console output since the start.
    pub console_end: u64,
    /// Offset of the oldest console byte still kept.
    pub console_start: u64,
    /// When the machine ends by itself, if it does.
    pub deadline: Option<Deadline>,
    /// What time it is by the clock of deadlines, in milliseconds.
    pub boot_ms: u64,
    /// How far the guest's clock with CMOS memory is ahead of the host's, in seconds.
    pub clock_ahead_s: i64,
    /// What keeps the guest from starting, in words; nothing that is known of, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// What a guest is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmPhase {
    /// vCPUs run.
    Running,
    /// vCPUs wait until somebody lets them go on.
    Paused,
    /// vCPUs run, but the guest said that its system has failed.
    Panicked,
    /// vCPUs run, but the guest said that it sleeps: it waits for its power button, or for another
    /// interrupt that it wakes by.
    Sleeping,
    /// The guest powered itself off, or was told to stop. The process is about to exit.
    Stopped,
}

/// Exit statuses of `holdfast-vmm`.
pub mod exit {
    /// The guest powered off, or the API stopped it.
    pub const POWERED_OFF: i32 = 0;
    /// The specification cannot be run; the reason is on standard error.
    pub const REFUSED: i32 = 2;
    /// The guest asked for a reset that a fresh process should carry out.
    pub const RESET: i32 = 3;
    /// The guest did something that has no meaning, as a triple fault.
    pub const GUEST_FAULT: i32 = 4;
    /// The host failed under the guest, as an I/O error of KVM.
    pub const HOST_FAULT: i32 = 5;
    /// Its [`Deadline`](super::Deadline) passed.
    pub const DEADLINE: i32 = 6;
}
