//! The task that asks time sources.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{net::UdpSocket, sync::watch, time::timeout};
use types::units::UnixSeconds;

use super::{
    ClockConfig, ClockStatus, SystemClock, build_time,
    manners::Manners,
    nts::{Session, establish::Calendar},
    secure::{Asker, SecureError},
    select::{Agreement, Decision, Trust, agree, decide},
    sntp::{self, Exchange, Refusal, Sample, UnixNanos},
};

/// Pause between polls once sources agree: an oscillator that is off by 100 ppm loses 0.1 s.
const POLL: Duration = Duration::from_secs(1024);
/// Pause before the next poll while they do not, doubling to [`POLL`]. RFC 4330 §10: at least
/// 15 s.
const RETRY: Duration = Duration::from_secs(16);
/// How long one server may take to answer, and how often it is asked.
const PATIENCE: Duration = Duration::from_secs(2);
const ATTEMPTS: u32 = 2;
/// No more servers are asked.
const MAX_SERVERS: usize = 8;
/// No more addresses of one server are tried: two of each family, so that all stay silent within
/// sixteen seconds, which is [`RETRY`].
const MAX_ADDRESSES: usize = 4;
/// So many sources that agree are believed whatever was seen before.
pub(super) const SURE: usize = 2;
const NANOS: i128 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct Poller {
    config: ClockConfig,
    system: Arc<dyn SystemClock>,
    publish: watch::Sender<ClockStatus>,
    trust: Trust,
    /// What one source does not go below.
    confirmed: UnixSeconds,
    /// What no number of sources goes below.
    agreed: UnixSeconds,
    /// Of the servers of authenticated time, by name.
    sessions: BTreeMap<String, Session>,
    /// Of those by name, of others by address.
    manners: Manners,
}

/// Why a source told nothing.
#[derive(Debug, thiserror::Error)]
enum SourceError {
    #[error("cannot ask the time server {server}: {source}")]
    Socket { server: SocketAddr, source: io::Error },
    #[error("the time server {server} does not answer; time.ntp names others")]
    Silent { server: SocketAddr },
    #[error("the time server {server} is of no use: {refusal}")]
    Refused { server: SocketAddr, refusal: Refusal },
}

impl Poller {
    pub(super) fn new(
        config: ClockConfig,
        system: Arc<dyn SystemClock>,
        publish: watch::Sender<ClockStatus>,
    ) -> Self {
        let agreed = config.agreed.max(build_time());
        Self {
            confirmed: config.confirmed,
            config,
            system,
            publish,
            trust: Trust::Unset,
            agreed,
            sessions: BTreeMap::new(),
            manners: Manners::default(),
        }
    }

    pub(super) async fn run(mut self) {
        let mut network = self.config.network.clone();
        let mut retry = RETRY;
        loop {
            let is_right = self.poll().await;
            let pause = if is_right { POLL } else { retry };
            retry = if is_right { RETRY } else { (retry * 2).min(POLL) };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // A network that appears is asked at once, but only while there is need.
                Ok(()) = network.changed(), if !is_right => retry = RETRY,
            }
        }
    }

    /// Asks every source; returns whether the clock is right now.
    async fn poll(&mut self) -> bool {
        let secure = self.config.nts.as_ref().is_some_and(|nts| !nts.servers.is_empty());
        let servers = match self.servers().await {
            Ok(servers) => servers,
            Err(_) if secure => Vec::new(),
            Err(reason) => return self.fail(reason),
        };
        let mut asked = tokio::task::JoinSet::new();
        let mut left_alone = Vec::new();
        for mut server in servers {
            server.retain(|address| {
                let may = self.manners.check(Instant::now(), &address.to_string());
                may.map_err(|reason| left_alone.push(reason.to_string())).is_ok()
            });
            if !server.is_empty() {
                asked.spawn(ask(server, Arc::clone(&self.system)));
            }
        }
        let (mut samples, mut failures) = self.ask_secure().await;
        failures.extend(left_alone);
        let mut answered = BTreeSet::new();
        for Asked { sample, failed } in asked.join_all().await {
            for (address, error) in &failed {
                if let SourceError::Refused { refusal: Refusal::KissOfDeath { code }, .. } = error {
                    self.manners.handle_kiss(Instant::now(), &address.to_string(), code.0);
                }
            }
            match sample {
                // Two answers of one machine are one source.
                Some((address, sample)) => {
                    self.manners.handle_answer(Instant::now(), &address.to_string());
                    samples.extend(answered.insert(address).then_some(sample));
                }
                None => failures.extend(failed.values().map(ToString::to_string)),
            }
        }
        let Some(agreement) = agree(&samples) else {
            return self.fail(if samples.is_empty() {
                failures.join("; ")
            } else {
                format!("{} time sources contradict each other", samples.len())
            });
        };
        self.apply(agreement)
    }

    /// Asks the servers of authenticated time.
    async fn ask_secure(&mut self) -> (Vec<Sample>, Vec<String>) {
        let (mut samples, mut failures) = (Vec::new(), Vec::new());
        let Some(nts) = self.config.nts.clone() else { return (samples, failures) };
        let asker = Asker {
            system: Arc::clone(&self.system),
            resolver: self.config.resolver.clone(),
            roots: nts.roots,
            calendar: match self.trust {
                Trust::Set => Calendar::Known(self.system.now().as_secs()),
                Trust::Unset => Calendar::AtLeast(self.agreed.0),
            },
        };
        let mut asked = tokio::task::JoinSet::new();
        for name in nts.servers.into_iter().take(MAX_SERVERS) {
            if let Err(reason) = self.manners.check(Instant::now(), &name) {
                failures.push(reason.to_string());
                continue;
            }
            let session = self.sessions.remove(&name);
            asked.spawn(asker.clone().ask(name, session));
        }
        for (name, session, answer) in asked.join_all().await {
            match answer {
                Ok(sample) => {
                    self.manners.handle_answer(Instant::now(), &name);
                    samples.push(sample);
                }
                Err(errors) => {
                    if let Some(code) = errors.iter().find_map(SecureError::kiss) {
                        self.manners.handle_kiss(Instant::now(), &name, code);
                    }
                    failures.extend(errors.iter().map(ToString::to_string));
                }
            }
            if let Some(session) = session {
                self.sessions.insert(name, session);
            }
        }
        (samples, failures)
    }

    fn apply(&mut self, agreement: Agreement) -> bool {
        let now = self.system.now();
        let now_ns = nanos(now);
        // One source may lie, and what two agree on is forever. A hardware clock may be anything.
        let sure = agreement.sources >= SURE;
        let floor = if sure { self.agreed } else { self.agreed.max(self.confirmed) };
        let floor_ns = i128::from(floor.0) * NANOS;
        let offset_ns = match decide(agreement, self.trust, now_ns, floor_ns) {
            Decision::Keep => 0,
            Decision::Slew { offset_ns } => {
                let offset_us = i64::try_from(offset_ns / 1000).unwrap_or_default();
                if let Err(error) = self.system.slew(offset_us) {
                    return self.fail(format!("cannot slew the system clock: {error}"));
                }
                0
            }
            Decision::Step { offset_ns } => offset_ns,
            Decision::BeforeFloor => {
                let reason = "time sources say it is earlier than a source said before; two that agree are \
                     believed, but not before what two agreed on, or this release was built";
                return self.fail(reason.to_owned());
            }
            Decision::TooFar => {
                let reason = "a lone time source moved by more than fifteen minutes";
                return self.fail(reason.to_owned());
            }
        };
        let time = u64::try_from(now_ns + offset_ns).map(Duration::from_nanos).unwrap_or(now);
        if offset_ns != 0 {
            if let Err(error) = self.system.set(time) {
                return self.fail(format!("cannot set the system clock: {error}"));
            }
            tracing::info!(sources = agreement.sources, "system clock set");
        }
        self.trust = Trust::Set;
        if sure {
            self.agreed = self.agreed.max(UnixSeconds(time.as_secs()));
        }
        let last_error = self.confirm(agreement, offset_ns).err();
        self.publish.send_replace(ClockStatus {
            floor: if sure { self.agreed } else { floor },
            sources: agreement.sources,
            offset_ms: i64::try_from(agreement.offset_ns / 1_000_000).unwrap_or(i64::MAX),
            trust: self.trust,
            last_error,
        });
        true
    }

    /// Says how right the clock is, which was set by `set_ns`: what of the offset is left is still its error.
    fn confirm(&self, agreement: Agreement, set_ns: i128) -> Result<(), String> {
        let left_ns = agreement.error_ns + (agreement.offset_ns - set_ns).abs();
        let error = u64::try_from(left_ns).map_or(Duration::MAX, Duration::from_nanos);
        let failed = |error| {
            format!(
                "cannot tell the kernel that its clock is right, for the hardware clock's sake: {error}"
            )
        };
        self.system.confirm(error).map_err(failed)
    }

    fn fail(&self, reason: String) -> bool {
        tracing::debug!(reason, "time sources");
        self.publish.send_modify(|status| {
            status.sources = 0;
            status.last_error = Some(reason);
        });
        false
    }

    /// The servers to ask, each once, by their addresses in the order to try them.
    async fn servers(&self) -> Result<Vec<Vec<SocketAddr>>, String> {
        let mut addresses = Vec::new();
        let mut refusal = match self.config.network.borrow().is_online() {
            true => "no time server is known; set time.ntp".to_owned(),
            false => "this node has no address yet, so it can ask no time server".to_owned(),
        };
        for server in &self.config.servers {
            match self.resolve(server).await {
                Ok(found) => addresses.push(found),
                Err(reason) => refusal = reason,
            }
        }
        // Who asks for authenticated time does not want it from whoever answers.
        if self.config.servers.is_empty() && self.config.nts.is_none() {
            let network = self.config.network.borrow();
            let known = if network.ntp.is_empty() { &network.gateways } else { &network.ntp };
            // A link-local gateway cannot be named without its interface.
            let usable = known.iter().filter(|address| match address {
                IpAddr::V4(_) => true,
                IpAddr::V6(address) => !address.is_unicast_link_local(),
            });
            addresses.extend(usable.map(|address| vec![SocketAddr::new(*address, sntp::PORT)]));
        }
        addresses.sort();
        addresses.dedup();
        addresses.truncate(MAX_SERVERS);
        if addresses.is_empty() { Err(refusal) } else { Ok(addresses) }
    }

    /// `NAME`, `ADDRESS` or `ADDRESS:PORT`.
    async fn resolve(&self, server: &str) -> Result<Vec<SocketAddr>, String> {
        if let Ok(address) = server.parse() {
            return Ok(vec![address]);
        }
        let found = self.config.resolver.lookup(server).await.map_err(|error| error.to_string())?;
        let addresses = in_turn(&found, sntp::PORT);
        if addresses.is_empty() { Err(format!("{server} has no address")) } else { Ok(addresses) }
    }
}

/// Returns a server's addresses in the order to try them, at most [`MAX_ADDRESSES`]. The families take
/// turns: on a network that has one of them only, every address of the other fails.
pub(super) fn in_turn(found: &[IpAddr], port: u16) -> Vec<SocketAddr> {
    let (ipv4, ipv6): (Vec<IpAddr>, Vec<IpAddr>) = found.iter().partition(|a| a.is_ipv4());
    let turns = 0..ipv4.len().max(ipv6.len());
    let ordered = turns.flat_map(|turn| [ipv4.get(turn), ipv6.get(turn)]).flatten();
    ordered.take(MAX_ADDRESSES).map(|address| SocketAddr::new(*address, port)).collect()
}

/// What a server said, at the address that told the time, and why others did not.
struct Asked {
    sample: Option<(SocketAddr, Sample)>,
    failed: BTreeMap<SocketAddr, SourceError>,
}

/// Asks a server at one address after the other until one tells the time, and once more those that stayed
/// silent: what was refused is not given when it is asked for again at once.
async fn ask(addresses: Vec<SocketAddr>, system: Arc<dyn SystemClock>) -> Asked {
    let mut failed = BTreeMap::new();
    for _ in 0..ATTEMPTS {
        for address in &addresses {
            if matches!(failed.get(address), Some(SourceError::Refused { .. })) {
                continue;
            }
            match ask_once(*address, &*system).await {
                Ok(sample) => return Asked { sample: Some((*address, sample)), failed },
                Err(error) => failed.insert(*address, error),
            };
        }
    }
    Asked { sample: None, failed }
}

async fn ask_once(server: SocketAddr, system: &dyn SystemClock) -> Result<Sample, SourceError> {
    let failed = |source| SourceError::Socket { server, source };
    let socket = open(server).await.map_err(failed)?;
    let nonce = getrandom::u64().map_err(|error| failed(io::Error::other(error)))?;
    let sent = UnixNanos(nanos(system.now()));
    socket.send(&sntp::request(nonce)).await.map_err(failed)?;
    let mut answer = [0; sntp::PACKET];
    let waited = timeout(PATIENCE, socket.recv(&mut answer)).await;
    let length = waited.map_err(|_| SourceError::Silent { server })?.map_err(failed)?;
    let received = UnixNanos(nanos(system.now()));
    sntp::parse(&answer[..length], &Exchange { nonce, sent, received })
        .map_err(|refusal| SourceError::Refused { server, refusal })
}

/// Opens a socket that receives from this server only.
pub(super) async fn open(server: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    Ok(socket)
}

pub(super) fn nanos(time: Duration) -> i128 {
    i128::from(time.as_secs()) * NANOS + i128::from(time.subsec_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_are_among_the_addresses_that_are_tried() {
        let found: Vec<IpAddr> =
            ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "2001:db8::1"]
                .iter()
                .map(|address| address.parse().expect("an address"))
                .collect();
        let tried: Vec<String> = in_turn(&found, 123).iter().map(ToString::to_string).collect();
        assert_eq!(tried, ["192.0.2.1:123", "[2001:db8::1]:123", "192.0.2.2:123", "192.0.2.3:123"]);
        assert_eq!(in_turn(&found[4..], 123).len(), 1);
    }
}
