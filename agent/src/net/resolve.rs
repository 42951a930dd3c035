//! Name resolution with the uplinks' name servers, without libc.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use hickory_resolver::{
    config::{LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig},
    net::{NetError, runtime::TokioRuntimeProvider},
};
use tokio::sync::watch;
use update::shell::{Resolve, Resolving};

use super::NetworkStatus;

/// No name takes longer, however many servers stay silent.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one server may stay silent before it is asked again, or the next one is.
const SERVER_PATIENCE: Duration = Duration::from_secs(2);

/// Resolves names with the name servers that the uplinks know at the moment of asking.
///
/// It remembers nothing between questions: names are asked for rarely, and servers change.
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
        let servers = self.status.borrow().dns.clone();
        if servers.is_empty() {
            return Err(ResolveError::NoServers { name: name.to_owned() });
        }
        let failed = |source| ResolveError::Failed {
            name: name.to_owned(),
            servers: servers.clone(),
            source: Box::new(source),
        };
        let resolver = build(&servers).map_err(failed)?;
        // The dot at the end keeps search domains out, of which there are none.
        let absolute = format!("{}.", name.trim_end_matches('.'));
        let answer = tokio::time::timeout(PATIENCE, resolver.lookup_ip(absolute)).await;
        let answer = answer.map_err(|_| ResolveError::Silent {
            name: name.to_owned(),
            servers: servers.clone(),
        })?;
        let addresses: Vec<IpAddr> = answer.map_err(failed)?.iter().collect();
        if addresses.is_empty() {
            return Err(ResolveError::NotFound { name: name.to_owned() });
        }
        Ok(addresses)
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

/// Names of hosts for fetchers, by the uplinks' name servers.
pub struct Names(pub Resolver);

impl Resolve for Names {
    fn resolve(&self, host: String) -> Resolving {
        let resolver = self.0.clone();
        Resolving(Box::pin(async move { resolver.lookup(&host).await.map_err(io::Error::other) }))
    }
}

fn build(servers: &[IpAddr]) -> Result<hickory_resolver::Resolver<TokioRuntimeProvider>, NetError> {
    let servers = servers.iter().map(|server| NameServerConfig::udp_and_tcp(*server)).collect();
    let config = ResolverConfig::from_parts(None, Vec::new(), servers);
    let provider = TokioRuntimeProvider::default();
    let mut builder = hickory_resolver::Resolver::builder_with_config(config, provider);
    let options = builder.options_mut();
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.use_hosts_file = ResolveHosts::Never;
    options.timeout = SERVER_PATIENCE;
    builder.build()
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
    #[error("cannot resolve {name}: the name servers {servers:?} stay silent")]
    Silent { name: String, servers: Vec<IpAddr> },
    #[error("cannot resolve {name} with the name servers {servers:?}")]
    Failed { name: String, servers: Vec<IpAddr>, source: Box<NetError> },
}
