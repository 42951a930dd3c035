//! Key establishment over TLS 1.3. It blocks: callers give it a thread.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::{
    CertificateError, ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    time_provider::TimeProvider,
};

use super::{
    Session,
    records::{self, ALGORITHM, Keys, MAX_ANSWER, Refusal},
};

/// How long a server may take to say anything, and to say everything.
const PATIENCE: Duration = Duration::from_secs(3);
const PATIENCE_IN_ALL: Duration = Duration::from_secs(8);
/// RFC 8915 §4.
const PROTOCOL: &[u8] = b"ntske/1";
/// RFC 8915 §5.1.
const LABEL: &[u8] = b"EXPORTER-network-time-security";

/// Whom to believe that a server is who it says.
#[derive(Debug, Clone)]
pub struct Roots(Arc<RootCertStore>);

/// By which time certificates are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calendar {
    /// It is this late, in seconds since 1970.
    Known(u64),
    /// It is at least this late; a certificate may be younger.
    AtLeast(u64),
}

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum EstablishError {
    #[error("{name:?} cannot be the name in a certificate")]
    Name { name: String },
    #[error("cannot talk to {name} at {address}")]
    Connection { name: String, address: SocketAddr, source: io::Error },
    #[error("{name} at {address} is not trusted; time.nts_roots says whom to trust")]
    Tls { name: String, address: SocketAddr, source: rustls::Error },
    #[error("{name} at {address} gives no keys: {refusal}")]
    Refused { name: String, address: SocketAddr, refusal: Refusal },
    #[error("time.nts_roots holds no certificate that can be used")]
    Roots,
}

impl Roots {
    /// Trusts what browsers trust.
    pub fn public() -> Self {
        Self(Arc::new(webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect()))
    }

    /// Trusts the certificates in a PEM text alone.
    pub fn from_pem(text: &str) -> Result<Self, EstablishError> {
        let mut store = RootCertStore::empty();
        let found = CertificateDer::pem_slice_iter(text.as_bytes());
        let (added, _) = store.add_parsable_certificates(found.filter_map(Result::ok));
        if added == 0 { Err(EstablishError::Roots) } else { Ok(Self(Arc::new(store))) }
    }

    /// Returns the certificates.
    pub(crate) fn store(&self) -> &RootCertStore {
        &self.0
    }
}

/// Agrees with a server on keys.
pub fn establish(
    name: &str,
    address: SocketAddr,
    roots: &Roots,
    calendar: Calendar,
) -> Result<Session, EstablishError> {
    let now = match calendar {
        Calendar::Known(now) | Calendar::AtLeast(now) => now,
    };
    match attempt(name, address, roots, now) {
        // Whoever has no clock learns from the certificate that it is later.
        Err(EstablishError::Tls { source, .. })
            if let (Calendar::AtLeast(_), Some(begin)) = (calendar, too_young(&source)) =>
        {
            attempt(name, address, roots, begin.max(now) + 1)
        }
        result => result,
    }
}

/// When a certificate begins that has not yet begun.
fn too_young(error: &rustls::Error) -> Option<u64> {
    if let rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext {
        not_before,
        ..
    }) = error
    {
        return Some(not_before.as_secs());
    }
    None
}

fn attempt(
    name: &str,
    address: SocketAddr,
    roots: &Roots,
    now: u64,
) -> Result<Session, EstablishError> {
    let server = ServerName::try_from(name.to_owned())
        .map_err(|_| EstablishError::Name { name: name.to_owned() })?;
    let tls = |source| EstablishError::Tls { name: name.to_owned(), address, source };
    let failed = |source: io::Error| match source.downcast::<rustls::Error>() {
        Ok(source) => tls(source),
        Err(source) => EstablishError::Connection { name: name.to_owned(), address, source },
    };
    let connection =
        ClientConnection::new(Arc::new(config(roots, now).map_err(tls)?), server).map_err(tls)?;
    let socket = TcpStream::connect_timeout(&address, PATIENCE).map_err(failed)?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
    let mut stream = StreamOwned::new(connection, socket);
    stream.write_all(&records::request()).map_err(failed)?;
    let answer = read(&mut stream).map_err(failed)?;
    let export = |direction: u8| {
        let context = [0, 0, ALGORITHM[0], ALGORITHM[1], direction];
        stream.conn.export_keying_material([0; 32], LABEL, Some(&context)).map_err(tls)
    };
    let keys = Keys { to_server: export(0)?, to_client: export(1)? };
    let refused = |refusal| EstablishError::Refused { name: name.to_owned(), address, refusal };
    if stream.conn.alpn_protocol() != Some(PROTOCOL) {
        return Err(refused(Refusal::Protocol));
    }
    records::parse(&answer, keys).map_err(refused)
}

fn config(roots: &Roots, now: u64) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_details(provider, Arc::new(Stopped(now)))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(Arc::clone(&roots.0))
        .with_no_client_auth();
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(config)
}

/// Reads until the answer is whole, the server ends, or it takes too long.
fn read(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let begin = Instant::now();
    let mut answer = Vec::new();
    let mut buffer = [0; 2048];
    while !records::is_whole(&answer) && answer.len() < MAX_ANSWER {
        if begin.elapsed() > PATIENCE_IN_ALL {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&buffer[..length]),
            // A server that hangs up without the word for it has said all it will.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
    }
    Ok(answer)
}

/// A clock that stands: a handshake takes no time that matters.
#[derive(Debug)]
struct Stopped(u64);

impl TimeProvider for Stopped {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0)))
    }
}
