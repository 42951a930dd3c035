//! Name resolution with the uplinks' name servers, without libc.
//!
//! Servers are asked in their order; the next one is asked as soon as one has failed, and beside one that takes
//! its time. What ends a search is an answer: addresses, or that there are none. A refusal, or a server's own
//! failure, is none: of two networks' servers one may answer only its own.
//! Source: RFC 1035 §4.1.1 (response codes), RFC 2308 §2 (names without records), RFC 6891 §7 (servers without
//! extensions).

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use hickory_resolver::{
    config::{NameServerConfig, ResolveHosts, ResolverConfig},
    net::{DnsError, NetError, NoRecords, runtime::TokioRuntimeProvider},
    proto::{op::ResponseCode, rr::RecordType},
};
use tokio::{sync::watch, task::JoinSet};
use update::shell::{Resolve, Resolving};

use super::NetworkStatus;

/// No name takes longer, however many servers stay silent.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one server may stay silent before it is asked again.
const SERVER_PATIENCE: Duration = Duration::from_secs(2);
/// How long one may stay silent before the next one is asked, too: eight of them within half of [`PATIENCE`].
const HEAD_START: Duration = Duration::from_millis(600);
/// How often a server is asked, and how: one that does not know extensions refuses or drops what has them.
const ATTEMPTS: [Extensions; 3] = [Extensions::Offered, Extensions::None, Extensions::None];
/// UDP and TCP port of servers.
const PORT: u16 = 53;

/// Whether a question says that long answers are welcome (EDNS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extensions {
    Offered,
    None,
}

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
        let servers: Vec<SocketAddr> =
            servers.into_iter().map(|server| SocketAddr::new(server, PORT)).collect();
        lookup(&servers, name).await
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

/// Asks servers until one answers.
async fn lookup(servers: &[SocketAddr], name: &str) -> Result<Vec<IpAddr>, ResolveError> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let mut failures = Vec::new();
    let mut waiting = servers.iter().copied();
    let mut asked = JoinSet::new();
    loop {
        if let Some(server) = waiting.next() {
            let name = name.to_owned();
            asked.spawn(async move { (server, ask(server, &name).await) });
        }
        // Nothing new comes while all were asked and some have not answered.
        let pause = if waiting.len() > 0 { HEAD_START } else { PATIENCE };
        tokio::select! {
            answer = asked.join_next() => match answer {
                Some(Ok((_, Ok(addresses)))) if addresses.is_empty() => {
                    return Err(ResolveError::NotFound { name: name.to_owned() });
                }
                Some(Ok((_, Ok(addresses)))) => return Ok(addresses),
                Some(Ok((server, Err(error)))) => failures.push((server, error)),
                // Nobody cancels them and nothing in them panics.
                Some(Err(_)) => {}
                None => return Err(failed(name, servers, &failures)),
            },
            () = tokio::time::sleep(pause) => {}
            () = tokio::time::sleep_until(deadline) => return Err(failed(name, servers, &failures)),
        }
    }
}

fn failed(name: &str, servers: &[SocketAddr], failures: &[(SocketAddr, NetError)]) -> ResolveError {
    let name = name.to_owned();
    if failures.iter().all(|(_, error)| matches!(error, NetError::Timeout)) {
        let servers = servers.iter().map(SocketAddr::ip).collect();
        return ResolveError::Silent { name, servers };
    }
    let told = |server: &SocketAddr| {
        let failure = failures.iter().find(|(failed, _)| failed == server);
        let reason = failure.map_or("it stays silent".to_owned(), |(_, error)| error.to_string());
        format!("{}: {reason}", server.ip())
    };
    let reasons = servers.iter().map(told).collect::<Vec<_>>().join("; ");
    ResolveError::Failed { name, reasons }
}

/// Returns the addresses that a server knows of a name, none when it says that there are none.
async fn ask(server: SocketAddr, name: &str) -> Result<Vec<IpAddr>, NetError> {
    let mut failure = NetError::Timeout;
    for extensions in ATTEMPTS {
        match ask_once(server, name, extensions).await {
            Ok(addresses) => return Ok(addresses),
            Err(error) if is_worth_another(&error, extensions) => failure = error,
            Err(error) => return Err(error),
        }
    }
    Err(failure)
}

/// Whether the same server may say something else when it is asked again.
fn is_worth_another(error: &NetError, extensions: Extensions) -> bool {
    use ResponseCode::{FormErr, NotImp};
    let is_puzzled = matches!(error, NetError::Dns(DnsError::ResponseCode(FormErr | NotImp)));
    matches!(error, NetError::Timeout) || (is_puzzled && extensions == Extensions::Offered)
}

async fn ask_once(
    server: SocketAddr,
    name: &str,
    extensions: Extensions,
) -> Result<Vec<IpAddr>, NetError> {
    let resolver = build(server, extensions)?;
    // The dot at the end keeps search domains out, of which there are none.
    let absolute = format!("{}.", name.trim_end_matches('.'));
    let ipv4 = resolver.lookup(absolute.clone(), RecordType::A);
    let ipv6 = resolver.lookup(absolute, RecordType::AAAA);
    let (ipv4, ipv6) = tokio::join!(ipv4, ipv6);
    let mut found = Vec::new();
    let mut failure = None;
    for answer in [ipv4, ipv6] {
        match answer {
            Ok(answer) => found.extend(answer.answers().iter().filter_map(|r| r.data.ip_addr())),
            Err(error) if says_none(&error) => {}
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    match failure {
        // One family's addresses are better than none.
        Some(error) if found.is_empty() => Err(error),
        Some(_) | None => Ok(found),
    }
}

/// Whether a server said that there are no such records, and did not only name others to ask (RFC 2308 §2.2).
fn says_none(error: &NetError) -> bool {
    let NetError::Dns(DnsError::NoRecordsFound(none)) = error else { return false };
    let NoRecords { response_code, soa, ns, .. } = none;
    *response_code == ResponseCode::NXDomain || soa.is_some() || ns.is_none()
}

fn build(
    server: SocketAddr,
    extensions: Extensions,
) -> Result<hickory_resolver::Resolver<TokioRuntimeProvider>, NetError> {
    let mut config = NameServerConfig::udp_and_tcp(server.ip());
    config.connections.iter_mut().for_each(|connection| connection.port = server.port());
    let config = ResolverConfig::from_parts(None, Vec::new(), vec![config]);
    let provider = TokioRuntimeProvider::default();
    let mut builder = hickory_resolver::Resolver::builder_with_config(config, provider);
    let options = builder.options_mut();
    options.use_hosts_file = ResolveHosts::Never;
    options.timeout = SERVER_PATIENCE;
    options.attempts = 0;
    options.edns0 = extensions == Extensions::Offered;
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
    #[error("cannot resolve {name}; of the name servers {reasons}")]
    Failed { name: String, reasons: String },
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Instant};

    use tokio::net::UdpSocket;

    use super::*;

    const HEADER: usize = 12;
    const NO_ERROR: u8 = 0;
    const FORMAT_ERROR: u8 = 1;
    const SERVER_FAILURE: u8 = 2;
    const NO_SUCH_NAME: u8 = 3;
    const REFUSED: u8 = 5;
    /// What every name's address is where there is one.
    const FOUND: [u8; 4] = [192, 0, 2, 7];

    /// A name server that answers each question with what `code` says to its additional records and type,
    /// after `pause`; not at all when that is nothing.
    async fn server(pause: u64, code: fn(u8, u8) -> Option<u8>) -> SocketAddr {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a socket");
        let address = socket.local_addr().expect("bound");
        tokio::spawn(async move {
            let mut bytes = [0; 512];
            while let Ok((length, peer)) = socket.recv_from(&mut bytes).await {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                let Some(answer) = answer(&bytes[..length], code) else { continue };
                socket.send_to(&answer, peer).await.expect("sent");
            }
        });
        address
    }

    fn answer(question: &[u8], code: fn(u8, u8) -> Option<u8>) -> Option<Vec<u8>> {
        let name = question[HEADER..].iter().position(|byte| *byte == 0).expect("a root");
        let end = HEADER + name + 5;
        let kind = question[end - 3];
        let code = code(question[11], kind)?;
        let has_address = code == NO_ERROR && kind == 1;
        let mut answer = question[..end].to_vec();
        // An answer to a recursive question, with one record or none.
        answer[2..HEADER].copy_from_slice(&[
            0x81,
            0x80 | code,
            0,
            1,
            0,
            has_address.into(),
            0,
            0,
            0,
            0,
        ]);
        if has_address {
            // The name above, A, IN, 60 s.
            answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
            answer.extend(FOUND);
        }
        Some(answer)
    }

    async fn found(servers: &[SocketAddr]) -> Result<Vec<IpAddr>, ResolveError> {
        lookup(servers, "time.example").await
    }

    #[tokio::test]
    async fn a_server_that_refuses_or_fails_at_once_ends_no_search() {
        let good = server(50, |_, _| Some(NO_ERROR)).await;
        for code in
            [(|_, _| Some(REFUSED)) as fn(u8, u8) -> Option<u8>, |_, _| Some(SERVER_FAILURE)]
        {
            let bad = server(0, code).await;
            assert_eq!(found(&[bad, good]).await.expect("found"), [IpAddr::from(FOUND)]);
        }
    }

    #[tokio::test]
    async fn a_server_without_extensions_is_asked_without_them() {
        let old =
            server(0, |additional, _| Some(if additional > 0 { FORMAT_ERROR } else { NO_ERROR }));
        assert_eq!(found(&[old.await]).await.expect("found"), [IpAddr::from(FOUND)]);
        let older = server(0, |additional, _| (additional == 0).then_some(NO_ERROR));
        assert_eq!(found(&[older.await]).await.expect("found"), [IpAddr::from(FOUND)]);
    }

    #[tokio::test]
    async fn a_silent_server_does_not_use_up_the_patience_for_others() {
        let silent = server(0, |_, _| None).await;
        let good = server(0, |_, _| Some(NO_ERROR)).await;
        let begin = Instant::now();
        assert_eq!(found(&[silent, silent, good]).await.expect("found"), [IpAddr::from(FOUND)]);
        assert!(begin.elapsed() < SERVER_PATIENCE, "{:?}", begin.elapsed());
    }

    #[tokio::test]
    async fn a_name_that_there_is_not_is_no_failure_and_the_next_server_is_not_asked() {
        let none = server(0, |_, _| Some(NO_SUCH_NAME)).await;
        let good = server(0, |_, _| Some(NO_ERROR)).await;
        let error = found(&[none, good]).await.expect_err("there is none");
        assert!(matches!(error, ResolveError::NotFound { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_server_that_fails_for_one_family_has_not_said_that_there_is_no_address() {
        let half =
            server(0, |_, kind| Some(if kind == 1 { SERVER_FAILURE } else { NO_ERROR })).await;
        let good = server(0, |_, _| Some(NO_ERROR)).await;
        assert_eq!(found(&[half, good]).await.expect("found"), [IpAddr::from(FOUND)]);
    }

    #[tokio::test]
    async fn each_servers_failure_is_told() {
        let refuses = server(0, |_, _| Some(REFUSED)).await;
        let fails = server(0, |_, _| Some(SERVER_FAILURE)).await;
        let error = found(&[refuses, fails]).await.expect_err("nobody knows");
        let ResolveError::Failed { reasons, .. } = error else { panic!("{error}") };
        let (first, second) = reasons.split_once("; ").expect("two reasons");
        assert_ne!(first, second);
    }
}
