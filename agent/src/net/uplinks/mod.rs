//! Uplinks: the node's own interfaces, by DHCP and SLAAC or as configured.
//!
//! Router advertisements are the kernel's business; what it made of them is read back, and taken away where
//! a router is silent and another is not ([`routers`]). Routers are asked for one when the name servers in them
//! are not known. An address
//! from DHCP is given to the kernel with the lease's end, so that it goes even when the agent does
//! not live to see it. Nothing is taken down when the agent stops: a restarted agent asks for the
//! address that it finds.

mod addressing;
mod apply;
mod client;
mod client6;
mod complaints;
mod conflicts;
mod failover;
mod guard;
mod report;
mod routers;
mod solicit;
mod task;
mod watch;

use std::{io, net::IpAddr};

use tokio::{sync::watch as channel, task::JoinHandle};
use types::config::{Network, NetworkMode, parse_prefix};

use super::{AssignedAddress, Carrier, NetworkStatus, Resolver, layout::Desired, links::LinkFacts};

/// The node's uplinks; dropping it ends their tasks and leaves addresses and routes in place.
#[derive(Debug)]
pub struct Uplinks {
    status: channel::Receiver<NetworkStatus>,
    plan: channel::Sender<Plan>,
    task: JoinHandle<()>,
}

/// From which a node's interface identifiers come (RFC 7217 §5, "secret_key"). Not to be told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StableSecret(pub [u8; 16]);

impl std::fmt::Debug for StableSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StableSecret")
    }
}

impl Uplinks {
    /// Starts configuring the interfaces that `spec` names, every wired one by default.
    ///
    /// Returns at once; addresses come later and are seen in [`Uplinks::status`]. Interfaces that
    /// appear later are used too. Must be called inside a tokio runtime.
    pub fn start(spec: &Network) -> Result<Self, UplinkError> {
        Self::start_with(spec, None)
    }

    /// Like [`Uplinks::start`], with IPv6 addresses that stay the same on a network and differ
    /// between networks. Without a secret they hold the hardware address.
    pub fn start_with(spec: &Network, secret: Option<StableSecret>) -> Result<Self, UplinkError> {
        let (plan, plans) = channel::channel(Plan::new(spec)?);
        let (publish, status) = channel::channel(NetworkStatus::default());
        let task = task::Task::start(plans, secret, publish)
            .map_err(|source| UplinkError::Netlink { source })?;
        Ok(Self { status, plan, task: tokio::spawn(task.run()) })
    }

    /// Goes over to another configuration: what only the old one had is taken away.
    pub fn reconfigure(&self, spec: &Network) -> Result<(), UplinkError> {
        let plan = Plan::new(spec)?;
        self.plan.send_modify(|known| *known = Plan { delegation: known.delegation, ..plan });
        Ok(())
    }

    /// Says whether DHCPv6 servers are asked for a prefix, too, on each uplink whose addresses are automatic or
    /// DHCP's. They are not, unless this says so.
    pub fn ask_for_prefix(&self, delegation: Delegation) {
        self.plan.send_modify(|plan| plan.delegation = delegation);
    }

    /// Returns the status, now and whenever it changes.
    pub fn status(&self) -> channel::Receiver<NetworkStatus> {
        self.status.clone()
    }

    /// Returns a resolver that always asks the current name servers.
    pub fn resolver(&self) -> Resolver {
        Resolver::new(self.status.clone())
    }
}

impl Drop for Uplinks {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Whether a prefix for machines is asked for (RFC 8415 §6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delegation {
    /// It is.
    Wanted,
    /// It is not.
    Unwanted,
}

/// What the configuration wants.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    desired: Desired,
    /// Addresses of the short form; by DHCP and SLAAC when there are none.
    addresses: Vec<AssignedAddress>,
    gateways: Vec<IpAddr>,
    /// Overrides what DHCP says, unless empty.
    dns: Vec<IpAddr>,
    delegation: Delegation,
}

impl Plan {
    fn new(spec: &Network) -> Result<Self, UplinkError> {
        let mut addresses = Vec::new();
        if spec.mode == NetworkMode::Static {
            for text in &spec.addresses {
                let (address, prefix) =
                    parse_prefix(text).ok_or_else(|| UplinkError::Static { text: text.clone() })?;
                addresses.push(AssignedAddress { address, prefix });
            }
        }
        let desired = match &spec.interface {
            _ if !spec.uplinks.is_empty() => Desired::Listed(spec.uplinks.clone()),
            Some(wanted) => Desired::One(wanted.clone()),
            None => Desired::EveryCard,
        };
        let (gateways, dns) = (spec.gateways.clone(), spec.dns.clone());
        Ok(Self { desired, addresses, gateways, dns, delegation: Delegation::Unwanted })
    }

    /// Returns what is wrong when addresses that name no interface are on a card without a carrier,
    /// and another card has one.
    fn misplaced(&self, uplinks: &[(usize, LinkFacts)]) -> Option<String> {
        let chosen = self.desired == Desired::EveryCard && !self.addresses.is_empty();
        let [(_, first), others @ ..] = uplinks else { return None };
        let plugged = others.iter().find(|(_, link)| link.carrier == Carrier::Up);
        let (_, plugged) = plugged.filter(|_| chosen && first.carrier == Carrier::Down)?;
        Some(format!(
            "network.addresses are on {}, the first card, which has no carrier, and {} has one; name the \
             card that is meant in network.interface",
            first.name, plugged.name
        ))
    }
}

/// Why the uplinks cannot be configured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum UplinkError {
    #[error("cannot open a routing netlink socket")]
    Netlink { source: io::Error },
    #[error("network.addresses: {text:?} is not an address with a prefix length, as 192.0.2.5/24")]
    Static { text: String },
}
