//! Uplinks: the node's own interfaces, by DHCPv4 and SLAAC or as configured.
//!
//! Router advertisements are the kernel's business; what it made of them is read back. An address
//! from DHCP is given to the kernel with the lease's end, so that it goes even when the agent does
//! not live to see it. Nothing is taken down when the agent stops: a restarted agent asks for the
//! address that it finds.

mod client;
mod task;

use std::{io, net::IpAddr};

use tokio::{sync::watch, task::JoinHandle};
use types::config::{Network, NetworkMode, parse_prefix};

use super::{AssignedAddress, NetworkStatus, Resolver};

/// The node's uplinks; dropping it ends their tasks and leaves addresses and routes in place.
#[derive(Debug)]
pub struct Uplinks {
    status: watch::Receiver<NetworkStatus>,
    task: JoinHandle<()>,
}

impl Uplinks {
    /// Starts configuring the interfaces that `spec` names, every wired one by default.
    ///
    /// Returns at once; addresses come later and are seen in [`Uplinks::status`]. Interfaces that
    /// appear later are used too. Must be called inside a tokio runtime.
    pub fn start(spec: &Network) -> Result<Self, UplinkError> {
        let plan = Plan::new(spec)?;
        let (publish, status) = watch::channel(NetworkStatus::default());
        let task =
            task::Task::start(plan, publish).map_err(|source| UplinkError::Netlink { source })?;
        Ok(Self { status, task: tokio::spawn(task.run()) })
    }

    /// Returns the status, now and whenever it changes.
    pub fn status(&self) -> watch::Receiver<NetworkStatus> {
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

/// What the configuration wants.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    /// Kernel name or hardware address; every card when `None`.
    interface: Option<String>,
    source: Source,
    /// Overrides what DHCP says, unless empty.
    dns: Vec<IpAddr>,
}

/// Where addresses come from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    Auto,
    Static { addresses: Vec<AssignedAddress>, gateways: Vec<IpAddr> },
}

impl Plan {
    fn new(spec: &Network) -> Result<Self, UplinkError> {
        let source = match spec.mode {
            NetworkMode::Auto => Source::Auto,
            NetworkMode::Static => {
                let parsed = spec.addresses.iter().map(|text| {
                    let (address, prefix) = parse_prefix(text)
                        .ok_or_else(|| UplinkError::Static { text: text.clone() })?;
                    Ok(AssignedAddress { address, prefix })
                });
                let addresses = parsed.collect::<Result<_, UplinkError>>()?;
                Source::Static { addresses, gateways: spec.gateways.clone() }
            }
        };
        Ok(Self { interface: spec.interface.clone(), source, dns: spec.dns.clone() })
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
