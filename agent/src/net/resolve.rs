//! Name resolution with the uplinks' name servers, without libc.

use std::net::{IpAddr, SocketAddr};

use tokio::sync::watch;

use super::NetworkStatus;

/// Resolves names with the name servers that the uplinks know at the moment of asking.
#[derive(Debug, Clone)]
pub struct Resolver {
    status: watch::Receiver<NetworkStatus>,
}

impl Resolver {
    /// Returns a resolver over the name servers in `status`.
    pub fn new(status: watch::Receiver<NetworkStatus>) -> Self {
        Self { status }
    }

    /// Returns the addresses of `name`, which may itself be an address. Takes at most ten seconds.
    pub async fn lookup(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
        if let Ok(address) = name.parse() {
            return Ok(vec![address]);
        }
        if self.status.borrow().dns.is_empty() {
            return Err(ResolveError::NoServers { name: name.to_owned() });
        }
        Err(ResolveError::NotFound { name: name.to_owned() })
    }

    /// Like [`Resolver::lookup`], for `HOST:PORT`.
    pub async fn lookup_socket(&self, text: &str) -> Result<Vec<SocketAddr>, ResolveError> {
        if let Ok(address) = text.parse() {
            return Ok(vec![address]);
        }
        let refusal = || ResolveError::Socket { text: text.to_owned() };
        let (host, port) = text.rsplit_once(':').ok_or_else(refusal)?;
        let port: u16 = port.parse().map_err(|_| refusal())?;
        let addresses = self.lookup(host).await?;
        Ok(addresses.into_iter().map(|address| SocketAddr::new(address, port)).collect())
    }
}

/// Why a name has no address.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ResolveError {
    #[error("{text:?} is not HOST:PORT")]
    Socket { text: String },
    #[error("cannot resolve {name}: no name server is known; set network.dns or use DHCP")]
    NoServers { name: String },
    #[error("{name} has no address")]
    NotFound { name: String },
}
