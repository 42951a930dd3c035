//! Networks of machines: one routed tap each, so that no two machines share a link.
//!
//! A bridge would make all guests neighbours and then need rules to keep them apart at every layer
//! (ARP, neighbour discovery, multicast, spanning tree). A tap per machine has nothing to keep
//! apart: the node has the gateway's address on every tap, the route to a guest is its one address,
//! and the guest's hardware address is pinned. What a guest may send is [`super::ruleset`]'s.
//!
//! Where the provider wants machines on a network of its own, they are [`bridged`] instead.
//!
//! All that is known about a machine is in the kernel (taps are persistent, and the alias names the
//! machine), so a restarted agent finds what its predecessor made and running machines notice
//! nothing.

mod address;
mod advertise;
pub mod bridged;
pub mod ipv6;
mod renumber;
mod serve;
mod table;
mod task;

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
};

use tokio::sync::{mpsc, oneshot, watch};
use types::{config::Inbound, ids::MachineId};

pub use super::kernel::KernelError;
use super::{HardwareAddress, Ipv4Prefix, NetworkStatus, nft::NftError, ruleset::ByteRate};

/// Requests that may wait for the task; callers wait when there are more.
const QUEUE: usize = 16;

/// The taps, addresses, packet filter and DHCP servers of this node's machines.
///
/// Dropping it stops the DHCP servers and leaves everything else as it is.
#[derive(Debug)]
pub struct MachineNetworks {
    requests: mpsc::Sender<task::Request>,
    known: watch::Receiver<Vec<MachineAddress>>,
}

/// How machines are connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineNetworksConfig {
    /// Network from which machines get addresses, at most 30 bits of prefix.
    pub subnet: Ipv4Prefix,
    /// Special-purpose networks ([`super::ruleset::SPECIAL_NETWORKS`]) that machines may reach
    /// nevertheless.
    pub reachable: Vec<Ipv4Prefix>,
    /// How their IPv4 packets leave.
    pub exit: ipv6::Exit,
    /// Who may open connections to those whose addresses are routed to the node.
    pub inbound: Inbound,
    /// Most that each machine may send, and most that it may receive, if that is bounded.
    pub limit: Option<ByteRate>,
    /// Where their IPv6 networks come from; machines have none when `None`.
    pub ipv6: Option<ipv6::Supply>,
    /// How they are bridged; then of the rest only `limit` counts.
    pub bridged: Option<bridged::Bridged>,
}

/// Where a machine is on the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineAddress {
    /// Whose it is.
    pub machine: MachineId,
    /// Kernel name of the tap.
    pub interface: String,
    /// Hardware address that the guest must use; other senders are dropped.
    pub mac: HardwareAddress,
    /// Address that the guest must use; other senders are dropped. `0.0.0.0` while a bridged machine has
    /// none.
    pub ipv4: Ipv4Addr,
    /// Prefix length that the guest is told.
    pub prefix: u8,
    /// The guest's gateway, which is the node; `0.0.0.0` when it is bridged.
    pub gateway: Ipv4Addr,
    /// Network of 64 bits from which the guest may choose IPv6 addresses, if there is one.
    pub ipv6: Option<Ipv6Addr>,
    /// Largest frame payload, in bytes.
    pub mtu: u16,
}

impl MachineAddress {
    /// Returns the guest's IPv4 address; `None` while a bridged machine was given none.
    pub fn known_ipv4(&self) -> Option<Ipv4Addr> {
        Some(self.ipv4).filter(|address| !address.is_unspecified())
    }
}

/// A machine's network, ready to be handed to its VMM.
#[derive(Debug)]
pub struct MachineNet {
    /// The tap, or its first queue: `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, virtio-net headers of 12
    /// bytes, no offloads. Does not block.
    pub tap: OwnedFd,
    /// Its other queues, attached; then the tap has `IFF_MULTI_QUEUE`, too.
    pub more_queues: Vec<OwnedFd>,
    /// Where the machine is.
    pub address: MachineAddress,
}

impl MachineNetworks {
    /// Returns networks that nobody makes, for tests.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self { requests: mpsc::channel(1).0, known: watch::channel(Vec::new()).1 }
    }

    /// Sets the packet filter and forwarding, and takes over the taps that are already there.
    ///
    /// `uplinks` tells name servers and MTU. Must be called inside a tokio runtime.
    pub async fn start(
        config: MachineNetworksConfig,
        uplinks: watch::Receiver<NetworkStatus>,
    ) -> Result<Self, MachineNetError> {
        let (requests, inbox) = mpsc::channel(QUEUE);
        let (publish, known) = watch::channel(Vec::new());
        if let Some(bridged) = config.bridged.clone() {
            let how = (bridged, config.limit);
            let task = bridged::Task::start(how, uplinks, publish).await?;
            tokio::spawn(task.run(inbox));
        } else {
            let task = task::Task::start(config, uplinks, publish).await?;
            tokio::spawn(task.run(inbox));
        }
        Ok(Self { requests, known })
    }

    /// Makes the machine's network, or opens its tap again when there is one that no process uses
    /// (a machine that starts again keeps its address). The tap has as many queues as its machine has
    /// virtual CPUs that send and receive at a time, at least one, and always as many.
    pub async fn create(
        &self,
        machine: MachineId,
        queues: u32,
    ) -> Result<MachineNet, MachineNetError> {
        let (answer, done) = oneshot::channel();
        let request = task::Request::Create { machine, queues, answer };
        self.requests.send(request).await.map_err(|_| MachineNetError::Stopped)?;
        done.await.map_err(|_| MachineNetError::Stopped)?
    }

    /// Returns the network of a machine that is running already, after a restart of the agent.
    pub fn adopt(&self, machine: MachineId) -> Result<MachineAddress, MachineNetError> {
        let known = self.known.borrow();
        let found = known.iter().find(|known| known.machine == machine);
        found.cloned().ok_or(MachineNetError::Unknown { machine })
    }

    /// Returns every machine that has a network, adopted or not, in no particular order.
    pub fn machines(&self) -> Vec<MachineAddress> {
        self.known.borrow().clone()
    }

    /// Takes the machine's network away, and ends its flows. Nothing happens when it has none.
    pub async fn delete(&self, machine: MachineId) -> Result<(), MachineNetError> {
        let (answer, done) = oneshot::channel();
        let request = task::Request::Delete { machine, answer };
        self.requests.send(request).await.map_err(|_| MachineNetError::Stopped)?;
        done.await.map_err(|_| MachineNetError::Stopped)?
    }
}

/// Opens a tap by name, for programs that stand in for a guest or its VMM.
///
/// Fails with `EBUSY` when another process is attached.
pub fn open_tap(name: &str) -> io::Result<OwnedFd> {
    crate::sys::tap::open(name)
}

/// Opens a tap by name with that many queues, for the same programs: the first and the others.
///
/// Fails with `EINVAL` when there is such a tap with one queue and more are wanted, or the other way
/// round; and with one queue as [`open_tap`] does.
pub fn open_tap_queues(name: &str, queues: u32) -> io::Result<(OwnedFd, Vec<OwnedFd>)> {
    match queues.checked_sub(1) {
        None | Some(0) => crate::sys::tap::open(name).map(|tap| (tap, Vec::new())),
        Some(more) => crate::sys::tap::open_queues(name, more),
    }
}

/// Why a machine has no network.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum MachineNetError {
    #[error("machine {machine} has no network on this node")]
    Unknown { machine: MachineId },
    #[error("machines.subnet: {subnet} has no room for a gateway and a machine; use /30 or wider")]
    Subnet { subnet: Ipv4Prefix },
    #[error("machines.subnet: every address of {subnet} is in use")]
    Full { subnet: Ipv4Prefix },
    #[error("cannot open the tap {interface}")]
    Tap { interface: String, source: io::Error },
    #[error("the tap {interface} is in use")]
    Busy { interface: String },
    #[error("the tap {interface} belongs to machine {owner}, whose id begins alike")]
    NameTaken { interface: String, owner: MachineId },
    #[error("cannot set net.{setting}")]
    Setting { setting: String, source: io::Error },
    #[error("cannot answer DHCP, be a router, or watch addresses, on {interface}")]
    Dhcp { interface: String, source: io::Error },
    #[error("cannot connect machines")]
    Kernel(#[from] KernelError),
    #[error("cannot filter machines' packets")]
    Filter(#[from] NftError),
    #[error("the task that connects machines has ended")]
    Stopped,
}
