//! The JSON bodies that renter, gateway and node exchange.
//!
//! | Request                                | Body             | Answer                  |
//! |----------------------------------------|------------------|-------------------------|
//! | `GET /v1/nodes`                        |                  | list of [`NodeView`]    |
//! | `GET /v1/nodes/{id}`                   |                  | [`NodeView`]            |
//! | `POST /v1/machines`                    | [`CreateMachine`]| 201 [`Machine`]         |
//! | `GET /v1/machines`                     |                  | list of [`Machine`]     |
//! | `GET /v1/machines/{id}`                |                  | [`Machine`]             |
//! | `POST /v1/machines/{id}/{power}`       |                  | 202 [`Machine`]         |
//! | `DELETE /v1/machines/{id}`             |                  | 202 [`Machine`]         |
//! | `PUT /v1/machines/{id}/lease`          | [`LeaseRenewal`] | [`Machine`]             |
//! | `POST /v1/nodes/{id}/restart-agent`    |                  | 202 [`Restarting`]      |
//! | `POST /v1/nodes/{id}/devices/{address}/release` |         | 202 [`Releasing`]       |
//! | `GET /v1/machines/{id}/receipts`      |                  | [`Receipts`]            |
//! | `POST /v1/machines/{id}/{nmi, pause, resume}` |          | [`Machine`]             |
//! | `GET /v1/machines/{id}/counters`       |                  | [`types::operations::VmCounters`] |
//! | `GET /v1/machines/{id}/events`         |                  | [`types::operations::VmEvents`] |
//! | `GET /v1/node` (to a node, unsigned)   |                  | [`types::node::Offer`]  |

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use types::{
    ids::{ContentId, MachineId, NodeId, PublicKey},
    node::{MachineShape, Offer, PciDevice},
    units::{Mebibytes, UnixSeconds},
};

use crate::{document::Envelope, metering::SignedReceipt};

/// Longest kernel command line that is passed on, in bytes (x86 `COMMAND_LINE_SIZE` less one).
pub const MAX_CMDLINE: usize = 2047;

/// Longest idempotency key, in bytes.
pub const MAX_IDEMPOTENCY_KEY: usize = 64;

/// Most receipts in one answer.
pub const MAX_RECEIPTS: usize = 500;

/// Asks for the machine of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateMachine {
    /// The signed lease.
    pub lease: Envelope,
    /// What to start.
    pub image: Image,
}

/// What a machine starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Kernel: a bzImage or a PVH vmlinux.
    pub kernel: ContentId,
    /// Initramfs.
    #[serde(default)]
    pub initrd: Option<ContentId>,
    /// What the machine's disk holds at first.
    #[serde(default)]
    pub disk: Option<ContentId>,
    /// Kernel command line, at most [`MAX_CMDLINE`] bytes.
    #[serde(default)]
    pub cmdline: String,
}

/// Brings a later lease of the same machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseRenewal {
    /// The signed lease, of the same id, node and renter, with a higher serial.
    pub lease: Envelope,
}

/// A machine as its node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name, which is its lease's.
    pub id: MachineId,
    /// Where it is.
    pub node: NodeId,
    /// Who may use it.
    pub renter: PublicKey,
    /// Serial of the lease in force.
    pub serial: u64,
    /// First second of the lease.
    pub start: UnixSeconds,
    /// First second after it.
    pub end: UnixSeconds,
    /// Its size.
    pub shape: MachineShape,
    /// What it starts from.
    pub image: Image,
    /// What it does.
    pub state: MachineState,
    /// The same in a sentence; empty when there is nothing to add.
    #[serde(default)]
    pub detail: String,
    /// Its addresses on the node's network.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// When it was made.
    pub created: UnixSeconds,
    /// What happened lately, oldest first.
    #[serde(default)]
    pub events: Vec<MachineEvent>,
}

/// What a machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// Its lease has not begun.
    Pending,
    /// Content is fetched, devices are prepared.
    Starting,
    /// The guest runs.
    Running,
    /// The guest runs and its lease ends soon.
    Warned,
    /// The guest was asked to stop.
    Stopping,
    /// It is off, its lease goes on.
    Stopped,
    /// It did not start; `detail` says why.
    Failed,
    /// Its lease ended; its disk is kept, a renewal brings it back.
    Retained,
    /// Its disk is gone.
    Destroyed,
}

impl std::fmt::Display for MachineState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pending => "pending",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Warned => "warned",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Retained => "retained",
            Self::Destroyed => "destroyed",
        })
    }
}

/// Something that happened to a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineEvent {
    /// When.
    pub at: UnixSeconds,
    /// What, in words.
    pub what: String,
}

/// What a node does when its service is to be restarted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarting {
    /// `agent`.
    pub restarting: String,
}

/// What a node does with a quarantined device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Releasing {
    /// The device's address.
    pub releasing: String,
}

/// What a machine used, oldest first. Receipts outlive their machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipts {
    /// At most [`MAX_RECEIPTS`].
    pub receipts: Vec<SignedReceipt>,
    /// What to ask for as `?after=` to get the next ones; absent when these are the last.
    #[serde(default)]
    pub next: Option<u64>,
}

/// A node as a gateway knows it: what it offers and how it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// Its key.
    pub node: NodeId,
    /// Name the provider gave it.
    pub name: String,
    /// Release it runs.
    pub release: String,
    /// When it last said what it offers.
    pub issued: UnixSeconds,
    /// Until when that counts.
    pub expires: UnixSeconds,
    /// Virtual CPUs free.
    pub vcpus: u32,
    /// Memory free for machines.
    pub memory_mib: Mebibytes,
    /// Disk space free for machines.
    pub disk_mib: Mebibytes,
    /// Its devices.
    pub devices: Vec<PciDevice>,
    /// Where it can be dialled, as far as known.
    pub addresses: Vec<SocketAddr>,
    /// Seconds since the overlay heard of it.
    pub last_heard_s: u64,
}

impl NodeView {
    /// Puts together what a node says and what the overlay knows of it.
    pub fn new(offer: Offer, addresses: Vec<SocketAddr>, last_heard_s: u64) -> Self {
        let Offer { node, name, release, issued, expires, vcpus, memory_mib, disk_mib, devices } =
            offer;
        Self {
            node,
            name,
            release,
            issued,
            expires,
            vcpus,
            memory_mib,
            disk_mib,
            devices,
            addresses,
            last_heard_s,
        }
    }
}
