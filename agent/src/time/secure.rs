//! One question to a server of authenticated time: sockets and threads round [`super::nts`].

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::time::timeout;

use super::{
    SystemClock,
    nts::{
        self, Session,
        establish::{Calendar, EstablishError, Roots, establish},
        extension::{self, Forged, MAX_ANSWER, Randomness},
    },
    poll::{in_turn, nanos, open},
    sntp::{self, Exchange, Refusal, Sample, UnixNanos},
};
use crate::net::{ResolveError, Resolver};

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Key establishment bounds itself; this is for what blocks all the same.
const ESTABLISHMENT: Duration = Duration::from_secs(20);

/// Servers of authenticated time, and who vouches for them.
#[derive(Debug, Clone)]
pub struct NtsConfig {
    /// `HOST` or `HOST:PORT` of their key establishment.
    pub servers: Vec<String>,
    /// Who vouches for them.
    pub roots: Roots,
}

/// Why a server told nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum SecureError {
    #[error("{0}")]
    Resolve(ResolveError),
    #[error("{name} has no address")]
    Absent { name: String },
    #[error("{text}")]
    Establish { text: String },
    #[error("keys for {name} were not agreed on with {address} within {ESTABLISHMENT:?}")]
    Slow { name: String, address: SocketAddr },
    #[error("cannot ask the time server {server}: {source}")]
    Socket { server: SocketAddr, source: io::Error },
    #[error("the time server {server} of {name} does not answer")]
    Silent { name: String, server: SocketAddr },
    #[error("the time server {server} of {name} is not believed: {forged}")]
    Forged { name: String, server: SocketAddr, forged: Forged },
    #[error("the time server {server} of {name} is of no use: {refusal}")]
    Refused { name: String, server: SocketAddr, refusal: Refusal },
}

impl SecureError {
    /// Returns the kiss code, when the server sent one.
    pub(super) fn kiss(&self) -> Option<[u8; 4]> {
        match self {
            Self::Refused { refusal: Refusal::KissOfDeath { code }, .. } => Some(code.0),
            Self::Resolve(_)
            | Self::Absent { .. }
            | Self::Establish { .. }
            | Self::Slow { .. }
            | Self::Socket { .. }
            | Self::Silent { .. }
            | Self::Forged { .. }
            | Self::Refused { .. } => None,
        }
    }

    /// Returns whether other keys may bring an answer.
    fn is_doubt(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Forged { forged: Forged::Forgotten, .. } => true,
            Self::Resolve(_)
            | Self::Absent { .. }
            | Self::Establish { .. }
            | Self::Slow { .. }
            | Self::Socket { .. }
            | Self::Forged { .. }
            | Self::Refused { .. } => false,
        }
    }
}

/// What a question needs.
#[derive(Debug, Clone)]
pub(super) struct Asker {
    pub(super) system: Arc<dyn SystemClock>,
    pub(super) resolver: Resolver,
    pub(super) roots: Roots,
    pub(super) calendar: Calendar,
}

impl Asker {
    /// Asks the server called `name`, with the session of an earlier question when there is one.
    ///
    /// A server that lost its keys says so or, as NTPsec's does, nothing at all. Keys are then agreed on
    /// anew with the next question, and the old ones kept for as long as that fails (RFC 8915 §5.7).
    ///
    /// # Errors
    ///
    /// One for each address of the server that was tried.
    pub(super) async fn ask(
        self,
        name: String,
        session: Option<Session>,
    ) -> (String, Option<Session>, Result<Sample, Vec<SecureError>>) {
        let (mut session, mut failed) = match session.filter(Session::is_usable) {
            Some(session) if !session.is_doubted => (session, Vec::new()),
            earlier => match (self.establish(&name).await, earlier) {
                (Ok(session), _) => (session, Vec::new()),
                (Err(errors), Some(earlier)) => (earlier, errors),
                (Err(errors), None) => return (name, None, Err(errors)),
            },
        };
        let answer = self.exchange(&name, &mut session).await;
        session.is_doubted =
            answer.as_ref().is_err_and(|errors| errors.iter().any(SecureError::is_doubt));
        let answer = answer.map_err(|errors| {
            failed.extend(errors);
            failed
        });
        (name, Some(session), answer)
    }

    /// Agrees on keys with the first address that does, each within [`ESTABLISHMENT`].
    async fn establish(&self, name: &str) -> Result<Session, Vec<SecureError>> {
        let (host, port) = split(name);
        let mut errors = Vec::new();
        for address in self.resolve(host, port).await.map_err(|error| vec![error])? {
            match self.establish_with(name, address).await {
                Ok(session) => return Ok(session),
                Err(error) => errors.push(error),
            }
        }
        Err(errors)
    }

    async fn establish_with(
        &self,
        name: &str,
        address: SocketAddr,
    ) -> Result<Session, SecureError> {
        let (host, roots, calendar) = (split(name).0.to_owned(), self.roots.clone(), self.calendar);
        let work = tokio::task::spawn_blocking(move || establish(&host, address, &roots, calendar));
        let slow = |_| SecureError::Slow { name: name.to_owned(), address };
        let told = |error: EstablishError| SecureError::Establish {
            text: crate::init::boot::chain(&error),
        };
        match timeout(ESTABLISHMENT, work).await.map_err(slow)? {
            Ok(result) => result.map_err(told),
            Err(error) => Err(SecureError::Establish { text: error.to_string() }),
        }
    }

    /// Asks the first address that answers. What an answer says counts, good or bad.
    async fn exchange(
        &self,
        name: &str,
        session: &mut Session,
    ) -> Result<Sample, Vec<SecureError>> {
        let host = session.server.clone().unwrap_or_else(|| split(name).0.to_owned());
        let servers = self.resolve(&host, session.port).await.map_err(|error| vec![error])?;
        let mut errors = Vec::new();
        for server in servers {
            match self.exchange_with(name, session, server).await {
                Ok(sample) => return Ok(sample),
                Err(error @ (SecureError::Socket { .. } | SecureError::Silent { .. })) => {
                    errors.push(error);
                }
                Err(error) => {
                    errors.push(error);
                    break;
                }
            }
        }
        Err(errors)
    }

    async fn exchange_with(
        &self,
        name: &str,
        session: &mut Session,
        server: SocketAddr,
    ) -> Result<Sample, SecureError> {
        let failed = |source| SecureError::Socket { server, source };
        let random = randomness().map_err(failed)?;
        let silent = || SecureError::Silent { name: name.to_owned(), server };
        // First, so that an address that cannot be reached costs no cookie.
        let socket = open(server).await.map_err(failed)?;
        let request = extension::request(session, &random).ok_or_else(silent)?;
        let sent = UnixNanos(nanos(self.system.now()));
        socket.send(&request).await.map_err(failed)?;
        let mut answer = vec![0; MAX_ANSWER];
        let waited = timeout(PATIENCE, socket.recv(&mut answer)).await;
        let length = waited.map_err(|_| silent())?.map_err(failed)?;
        let received = UnixNanos(nanos(self.system.now()));
        let answer = &answer[..length];
        extension::open(session, &random, answer).map_err(|forged| SecureError::Forged {
            name: name.to_owned(),
            server,
            forged,
        })?;
        sntp::parse(answer, &Exchange { nonce: random.nonce, sent, received })
            .map_err(|refusal| SecureError::Refused { name: name.to_owned(), server, refusal })
    }

    async fn resolve(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, SecureError> {
        let found = self.resolver.lookup(host).await.map_err(SecureError::Resolve)?;
        let addresses = in_turn(&found, port);
        if addresses.is_empty() {
            return Err(SecureError::Absent { name: host.to_owned() });
        }
        Ok(addresses)
    }
}

/// `HOST`, `HOST:PORT`, `[ADDRESS]:PORT` or an address.
fn split(name: &str) -> (&str, u16) {
    if name.parse::<IpAddr>().is_ok() {
        return (name, nts::PORT);
    }
    match name.rsplit_once(':') {
        Some((host, port)) => {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            (host, port.parse().unwrap_or(nts::PORT))
        }
        None => (name, nts::PORT),
    }
}

fn randomness() -> io::Result<Randomness> {
    let mut random = Randomness { nonce: 0, unique: [0; 32], cipher: [0; 16] };
    random.nonce = getrandom::u64().map_err(io::Error::other)?;
    getrandom::fill(&mut random.unique).map_err(io::Error::other)?;
    getrandom::fill(&mut random.cipher).map_err(io::Error::other)?;
    Ok(random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_have_ports() {
        assert_eq!(split("time.example"), ("time.example", nts::PORT));
        assert_eq!(split("time.example:14460"), ("time.example", 14_460));
        assert_eq!(split("2001:db8::1"), ("2001:db8::1", nts::PORT));
        assert_eq!(split("[2001:db8::1]:5"), ("2001:db8::1", 5));
    }
}
