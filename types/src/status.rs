//! How a node is: the answer of its local interface to `GET /v1/status`. Readers skip what they do
//! not know, so that fields can be added.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::{
    evidence::LastBoot,
    gpu::GpuReading,
    ids::{MachineId, NodeId, PublicKey},
    logs::LogLine,
    node::{Bdf, MachineShape, PciDevice},
    units::UnixSeconds,
    updates::UpdatesView,
    volumes::{Starts, VolumeReport},
};

/// Version of the document.
pub const STATUS_VERSION: u32 = 1;

/// Most other members of the overlay that are listed.
pub const MAX_MEMBERS_LISTED: usize = 64;

/// Most errors that are listed.
pub const MAX_ERRORS_LISTED: usize = 16;

/// How a node is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// [`STATUS_VERSION`].
    pub version: u32,
    /// The node.
    pub node: NodeId,
    /// Name that its provider gave it; empty if none.
    pub name: String,
    /// Release that runs.
    pub release: String,
    /// Where the configuration came from; why there is none when `serving` is not set.
    pub config: String,
    /// The configuration's values, each with its source.
    #[serde(default)]
    pub settings: Vec<Setting>,
    /// Whether the node serves machines: it has a configuration that it can use, and started.
    pub serving: bool,
    /// The node's time.
    pub time: UnixSeconds,
    /// Milliseconds since the kernel started.
    pub uptime_ms: u64,
    /// When parts of the node were up first, in this order.
    pub boot: Vec<BootPhase>,
    /// The code with which the node can be claimed over the network; empty when it cannot.
    #[serde(default)]
    pub claim: String,
    /// What the installer does or did; empty when none was asked for.
    #[serde(default)]
    pub install: String,
    /// How the volumes of its disk are protected; empty when it runs from memory.
    #[serde(default)]
    pub volumes: Vec<VolumeReport>,
    /// What is wrong now, if it is known; empty otherwise.
    pub trouble: String,
    /// How far the machine can be trusted to run what its provider installed.
    pub trust: Trust,
    /// Where it is installed.
    pub slot: Slot,
    /// How its updates are.
    #[serde(default)]
    pub updates: UpdatesView,
    /// What is known of the time.
    pub clock: ClockView,
    /// Uplinks.
    pub network: NetworkView,
    /// Other members.
    pub overlay: OverlayView,
    /// The node's own resources.
    pub host: HostView,
    /// Devices that are rented or explained.
    pub devices: Vec<DeviceView>,
    /// Devices that the configuration names and the server does not have.
    pub missing_devices: Vec<Bdf>,
    /// Machines.
    pub machines: Vec<MachineView>,
    /// What guests say of GPUs: their own word.
    #[serde(default)]
    pub guests: Vec<GuestGpus>,
    /// What of it was not taken, by machine; none of a machine of whose guest all was.
    #[serde(default)]
    pub refused_readings: Vec<RefusedReadings>,
    /// The last errors, newest first, at most [`MAX_ERRORS_LISTED`].
    pub errors: Vec<LogLine>,
    /// How the boot before this one ended, and what crashes left behind.
    #[serde(default)]
    pub last_boot: LastBoot,
}

/// A value of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its key, as `machines.subnet`.
    pub key: String,
    /// What it is, as the configuration would say it, cut when it is long; never a secret.
    pub value: String,
    /// Where the document comes from that says so, or `default`.
    pub source: String,
}

/// A step of the boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootPhase {
    /// Name of the event that ended it.
    pub name: String,
    /// When, in milliseconds since the kernel started.
    pub at_ms: u64,
}

/// How far the machine can be trusted. `None`: the kernel does not tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// Whether the firmware checked the signature of what it started.
    pub secure_boot: Option<bool>,
    /// Whether anybody at the firmware's setup can still enrol keys.
    pub setup_mode: Option<bool>,
    /// The kernel's lockdown: `none`, `integrity` or `confidentiality`.
    pub lockdown: Option<String>,
    /// Major version of the TPM's specification; `None` without a TPM.
    pub tpm: Option<String>,
    /// What the boot program measured of itself into the TPM: register 11 in hexadecimal (SHA-256).
    /// It is what the release's `measurements.json` says. `None` without a TPM.
    #[serde(default)]
    pub measured: Option<String>,
    /// Whether STATE and DATA are sealed to this machine's TPM and to signed releases. Without Secure Boot that
    /// keeps out whoever has the disk, and not whoever starts another program on this machine.
    pub sealed: bool,
    /// What a person should know of how they are protected; empty when nothing is missing.
    #[serde(default)]
    pub notice: String,
}

impl Trust {
    /// Returns what the firmware starts.
    pub fn starts(&self) -> Starts {
        if self.secure_boot == Some(true) { Starts::Signed } else { Starts::Anything }
    }
}

/// Where the node is installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Slot {
    /// On a disk: STATE and DATA survive, and the release was started from outside of any slot.
    DiskWithoutSlots,
    /// On a disk, started from one of its slots, or from the fallback path beside them.
    Installed,
    /// Nowhere: everything is in memory, and gone at power off.
    NotInstalled,
}

/// What is known of the time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockView {
    /// Independent sources that agreed at the last poll.
    pub sources: usize,
    /// True time minus system time before it was corrected, in milliseconds.
    pub offset_ms: i64,
    /// What went wrong at the last poll; empty if nothing did.
    pub error: String,
}

/// How the node is connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkView {
    /// Uplinks.
    pub interfaces: Vec<InterfaceView>,
    /// Default gateways, best first.
    pub gateways: Vec<IpAddr>,
    /// Name servers.
    pub dns: Vec<IpAddr>,
    /// What went wrong last, and what cannot be as configured; empty if nothing.
    pub error: String,
}

/// One uplink.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceView {
    /// Kernel name.
    pub name: String,
    /// Hardware address.
    pub hardware: String,
    /// Whether the cable carries a signal.
    pub carrier: bool,
    /// Largest frame payload, in bytes.
    pub mtu: u32,
    /// Addresses with prefix length, as `192.0.2.5/24`.
    pub addresses: Vec<String>,
    /// What passed since the interface appeared.
    pub traffic: Traffic,
}

/// What passed an interface, as the kernel counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes received.
    pub received_bytes: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Frames that were received damaged.
    pub receive_errors: u64,
    /// Frames that could not be sent.
    pub send_errors: u64,
    /// Frames that were received and thrown away.
    pub receive_drops: u64,
}

/// The node's place in the overlay.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayView {
    /// UDP port it listens on; 0 when it does not.
    pub port: u16,
    /// Other members that are known.
    pub members: usize,
    /// Bytes of datagrams sent to other members since the agent started.
    pub sent_bytes: u64,
    /// Bytes of datagrams received from them.
    pub received_bytes: u64,
    /// Packets that were lost on the way to them.
    pub lost_packets: u64,
    /// Members, neighbours first, at most [`MAX_MEMBERS_LISTED`].
    pub listed: Vec<MemberView>,
}

/// Another member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberView {
    /// Its key.
    pub node: NodeId,
    /// What it is for: `gateway`, `provider` or `seed`.
    pub role: String,
    /// Where it can be dialled.
    pub addresses: Vec<SocketAddr>,
    /// Milliseconds since it was heard of.
    pub last_heard_ms: u64,
    /// Whether this node keeps a link with it.
    pub neighbour: bool,
    /// Time of a round trip to it, in microseconds, where there is a connection.
    pub round_trip_us: Option<u64>,
}

/// The node's own resources.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostView {
    /// Processors.
    pub cpus: u32,
    /// Load average over a minute, in thousandths.
    pub load_milli: u64,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Memory that could be had without swapping, in bytes.
    pub memory_available_bytes: u64,
    /// Memory set aside as huge pages, in bytes.
    pub huge_bytes: u64,
    /// What of it is free, in bytes.
    pub huge_free_bytes: u64,
    /// Memory of the agent's process, in bytes.
    pub agent_bytes: u64,
    /// Processors, memory and disk space that can still be rented.
    pub free: FreeView,
    /// File systems that keep something.
    pub volumes: Vec<VolumeView>,
    /// Watchdogs.
    pub watchdogs: Vec<WatchdogView>,
    /// How often init started the agent since the boot; `None` when the log no longer tells.
    pub agent_starts: Option<u64>,
}

/// What can still be rented.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreeView {
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory, in MiB.
    pub memory_mib: u64,
    /// Disk space, in MiB.
    pub disk_mib: u64,
}

/// A file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeView {
    /// Where it is mounted.
    pub path: String,
    /// Its kind; `tmpfs` is memory, which is lost at power off.
    pub kind: String,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// What of it is free, in bytes.
    pub free_bytes: u64,
}

/// A watchdog.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchdogView {
    /// What it is.
    pub name: String,
    /// Whether it counts.
    pub armed: bool,
    /// Seconds without init until it resets the server.
    pub timeout_s: u64,
}

/// A device, and what the host can tell of it without a driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceView {
    /// What it is and does.
    pub device: PciDevice,
    /// What PCI and sysfs tell.
    pub facts: DeviceFacts,
}

/// What configuration space and sysfs tell of a device. `None`: not readable, or not there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Driver that holds it.
    pub driver: Option<String>,
    /// Link speed now, in MT/s (2,500 for the first generation).
    pub link_mts: Option<u32>,
    /// The fastest that it is capable of, in MT/s.
    pub link_mts_max: Option<u32>,
    /// Lanes in use.
    pub link_width: Option<u32>,
    /// Lanes it has.
    pub link_width_max: Option<u32>,
    /// Sizes of BARs 0 to 5, in bytes; 0 for none.
    pub bars: Vec<u64>,
    /// Power state, as `D0`.
    pub power_state: Option<String>,
    /// How the kernel would reset it, best first, as `flr`.
    pub reset_methods: Vec<String>,
    /// Errors of its link since the boot, as the kernel counts them (AER).
    pub link_errors: Option<LinkErrors>,
    /// Serial number of its vital product data, printable characters only.
    pub serial: Option<String>,
    /// Model of its vital product data, printable characters only.
    pub product: Option<String>,
}

/// Totals of advanced error reporting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkErrors {
    /// Errors that hardware repaired.
    pub correctable: u64,
    /// Errors that lost a transaction.
    pub nonfatal: u64,
    /// Errors that made the link unreliable.
    pub fatal: u64,
}

/// What a machine's guest says of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestGpus {
    /// The machine.
    pub machine: MachineId,
    /// Milliseconds since it said so.
    pub age_ms: u64,
    /// What it said.
    pub reading: GpuReading,
}

/// Readings of a machine's guest that the node did not take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedReadings {
    /// The machine.
    pub machine: MachineId,
    /// How many there were since the node service started.
    pub count: u64,
    /// Milliseconds since the last one.
    pub age_ms: u64,
    /// What was wrong with it.
    pub reason: String,
}

/// A machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineView {
    /// Which.
    pub id: MachineId,
    /// Who rents it.
    pub renter: PublicKey,
    /// What it does, as `running`.
    pub state: String,
    /// Its address.
    pub address: Option<Ipv4Addr>,
    /// What it is made of.
    pub shape: MachineShape,
    /// First second of the lease.
    pub start: UnixSeconds,
    /// First second after it.
    pub end: UnixSeconds,
    /// Why it stopped last; empty when it never did.
    pub last_stop: String,
}
