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
    poll::{nanos, open},
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
    #[error("keys for {name} were not agreed on within {ESTABLISHMENT:?}")]
    Slow { name: String },
    #[error("cannot ask the time server {server}: {source}")]
    Socket { server: SocketAddr, source: io::Error },
    #[error("the time server {server} of {name} does not answer")]
    Silent { name: String, server: SocketAddr },
    #[error("the time server {server} of {name} is not believed: {forged}")]
    Forged { name: String, server: SocketAddr, forged: Forged },
    #[error("the time server {server} of {name} is of no use: {refusal}")]
    Refused { name: String, server: SocketAddr, refusal: Refusal },
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
    /// The session comes back unless the server does not know it.
    pub(super) async fn ask(
        self,
        name: String,
        session: Option<Session>,
    ) -> (String, Option<Session>, Result<Sample, SecureError>) {
        let session = match session.filter(Session::is_usable) {
            Some(session) => Ok(session),
            None => self.establish(&name).await,
        };
        let mut session = match session {
            Ok(session) => session,
            Err(error) => return (name, None, Err(error)),
        };
        let answer = self.exchange(&name, &mut session).await;
        let keep = !matches!(&answer, Err(SecureError::Forged { forged: Forged::Forgotten, .. }));
        (name, keep.then_some(session), answer)
    }

    async fn establish(&self, name: &str) -> Result<Session, SecureError> {
        let (host, port) = split(name);
        let address = self.resolve(host, port).await?;
        let (host, name, roots) = (host.to_owned(), name.to_owned(), self.roots.clone());
        let calendar = self.calendar;
        let work = tokio::task::spawn_blocking(move || establish(&host, address, &roots, calendar));
        let done = timeout(ESTABLISHMENT, work).await.map_err(|_| SecureError::Slow { name })?;
        let told = |error: EstablishError| SecureError::Establish {
            text: crate::init::boot::chain(&error),
        };
        match done {
            Ok(result) => result.map_err(told),
            Err(error) => Err(SecureError::Establish { text: error.to_string() }),
        }
    }

    async fn exchange(&self, name: &str, session: &mut Session) -> Result<Sample, SecureError> {
        let host = session.server.clone().unwrap_or_else(|| split(name).0.to_owned());
        let server = self.resolve(&host, session.port).await?;
        let failed = |source| SecureError::Socket { server, source };
        let random = randomness().map_err(failed)?;
        let silent = || SecureError::Silent { name: name.to_owned(), server };
        let request = extension::request(session, &random).ok_or_else(silent)?;
        let socket = open(server).await.map_err(failed)?;
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

    async fn resolve(&self, host: &str, port: u16) -> Result<SocketAddr, SecureError> {
        let found = self.resolver.lookup(host).await.map_err(SecureError::Resolve)?;
        let first: Option<&IpAddr> = found.first();
        let first = first.ok_or_else(|| SecureError::Absent { name: host.to_owned() })?;
        Ok(SocketAddr::new(*first, port))
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
