//! HTTP/1.1 over TCP or TLS, one request at a time.
//!
//! What a response means is `fetch`'s to say.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
};

use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Request, Response, StatusCode, Uri,
    body::{Bytes, Incoming},
    client::conn::http1::{self, SendRequest},
    header,
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    time::{Duration, Instant, timeout, timeout_at},
};
use tokio_rustls::TlsConnector;

use super::{
    elsewhere::Span,
    fetch::{FetchError, STALL},
};

/// Where Linux distributions keep the list of certificate authorities.
const AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Most addresses of a host that are tried, and how long for each but the last, which has what is left:
/// a handful of packets that are sent again, and time for every address.
const MAX_ADDRESSES: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(5);
const _: () = assert!(PATIENCE.as_secs() * (MAX_ADDRESSES as u64) < STALL.as_secs());
/// Largest head of a response, in bytes.
const MAX_HEAD: usize = 64 << 10;

/// Finds the addresses of hosts.
pub trait Resolve: Send + Sync {
    /// Returns the addresses of `host`, which may itself be one.
    fn resolve(&self, host: String) -> Resolving;
}

/// What [`Resolve`] answers with.
pub struct Resolving(pub Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>);

/// A client with at most one open connection.
pub(super) struct Http {
    authorities: Option<PathBuf>,
    /// Instead of a file of authorities.
    roots: Option<RootCertStore>,
    /// Instead of the system's resolver.
    resolver: Option<Arc<dyn Resolve>>,
    tls: Option<TlsConnector>,
    open: Option<(String, SendRequest<Empty<Bytes>>)>,
}

/// A response whose body was not read yet.
pub(super) struct Answer(Response<Incoming>);

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = self.open.as_ref().map(|(server, _)| server);
        f.debug_struct("Http").field("server", &server).finish_non_exhaustive()
    }
}

impl Http {
    pub(super) fn new(authorities: Option<PathBuf>) -> Self {
        Self { authorities, roots: None, resolver: None, tls: None, open: None }
    }

    pub(super) fn with_roots(self, roots: RootCertStore) -> Self {
        Self { roots: Some(roots), ..self }
    }

    pub(super) fn with_resolver(self, resolver: Arc<dyn Resolve>) -> Self {
        Self { resolver: Some(resolver), ..self }
    }

    /// Asks for bytes of `uri`. A kept connection that the server closed meanwhile is
    /// replaced once.
    pub(super) async fn get(
        &mut self,
        uri: &Uri,
        span: Span,
        deadline: Instant,
    ) -> Result<Answer, FetchError> {
        let server = format!("{}://{}", uri.scheme_str().unwrap_or(""), authority(uri));
        let kept = self.open.take().filter(|(name, _)| *name == server);
        if let Some((_, mut sender)) = kept
            && within(uri, deadline, sender.ready()).await?.is_ok()
            && let Ok(answer) =
                within(uri, deadline, sender.send_request(request(uri, span)?)).await?
        {
            self.open = Some((server, sender));
            return Ok(Answer(answer));
        }
        let mut sender = self.connect(uri, deadline).await?;
        let sent = within(uri, deadline, sender.send_request(request(uri, span)?)).await?;
        let exchange = |source| FetchError::Exchange { url: uri.to_string(), source };
        let answer = sent.map_err(exchange)?;
        self.open = Some((server, sender));
        Ok(Answer(answer))
    }

    async fn connect(
        &mut self,
        uri: &Uri,
        deadline: Instant,
    ) -> Result<SendRequest<Empty<Bytes>>, FetchError> {
        let host = uri.host().unwrap_or_default();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let secure = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let failed = |source| FetchError::Connect { host: host.to_owned(), port, source };
        let tcp = within(uri, deadline, self.tcp(bare, port)).await?.map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        if !secure {
            return self.start(uri, deadline, tcp).await;
        }
        let wrong = || FetchError::Url { url: uri.to_string() };
        let name = ServerName::try_from(bare.to_owned()).map_err(|_| wrong())?;
        let tls = self.tls()?;
        let stream = within(uri, deadline, tls.connect(name, tcp)).await?.map_err(failed)?;
        self.start(uri, deadline, stream).await
    }

    async fn tcp(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let found: Vec<SocketAddr> = match &self.resolver {
            Some(resolver) => {
                let found = resolver.resolve(host.to_owned()).0.await?;
                found.into_iter().map(|address| SocketAddr::new(address, port)).collect()
            }
            None => lookup_host((host, port)).await?.collect(),
        };
        reach(&in_turn(&found), PATIENCE).await
    }

    async fn start<S>(
        &mut self,
        uri: &Uri,
        deadline: Instant,
        stream: S,
    ) -> Result<SendRequest<Empty<Bytes>>, FetchError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD);
        let shaken = within(uri, deadline, builder.handshake(TokioIo::new(stream))).await?;
        let (sender, connection) =
            shaken.map_err(|source| FetchError::Exchange { url: uri.to_string(), source })?;
        // It ends with the sender, or with the server; what it ends with, the request reports.
        tokio::spawn(connection);
        Ok(sender)
    }

    fn tls(&mut self) -> Result<TlsConnector, FetchError> {
        if let Some(tls) = &self.tls {
            return Ok(tls.clone());
        }
        if let Some(roots) = &self.roots {
            return Ok(self.connector(roots.clone()));
        }
        let known = || AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
        let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
        let chosen = self.authorities.clone().or(named).or_else(known);
        let path = chosen.unwrap_or_else(|| PathBuf::from(AUTHORITIES[0]));
        let roots = authorities(&path)?;
        Ok(self.connector(roots))
    }

    fn connector(&mut self, roots: RootCertStore) -> TlsConnector {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has suites of the default versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let tls = TlsConnector::from(Arc::new(config));
        self.tls = Some(tls.clone());
        tls
    }
}

/// Returns a host's addresses in the order to try them. The families take turns: on a network that has
/// one of them only, every address of the other is silent.
fn in_turn(found: &[SocketAddr]) -> Vec<SocketAddr> {
    let first = found.first().is_none_or(SocketAddr::is_ipv4);
    let (ones, others): (Vec<SocketAddr>, Vec<SocketAddr>) =
        found.iter().partition(|address| address.is_ipv4() == first);
    let turns = 0..ones.len().max(others.len());
    let ordered = turns.flat_map(|turn| [ones.get(turn), others.get(turn)]).flatten();
    ordered.take(MAX_ADDRESSES as usize).copied().collect()
}

/// Connects to the first of the addresses that takes the connection. A silent one has `patience`, if
/// there is another.
async fn reach(addresses: &[SocketAddr], patience: Duration) -> io::Result<TcpStream> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "it has no address");
    let (last, others) = addresses.split_last().ok_or_else(none)?;
    for address in others {
        if let Ok(Ok(stream)) = timeout(patience, TcpStream::connect(address)).await {
            return Ok(stream);
        }
    }
    TcpStream::connect(last).await
}

fn authorities(path: &Path) -> Result<RootCertStore, FetchError> {
    let wrong = |reason: String| FetchError::Authorities { path: path.to_owned(), reason };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|e| wrong(e.to_string()))? {
        let certificate = certificate.map_err(|e| wrong(e.to_string()))?;
        // Lists hold an old certificate, now and then, that no modern library reads.
        roots.add_parsable_certificates([certificate]);
    }
    if roots.is_empty() {
        return Err(wrong("it holds no certificate".to_owned()));
    }
    Ok(roots)
}

async fn within<T>(
    uri: &Uri,
    deadline: Instant,
    work: impl Future<Output = T>,
) -> Result<T, FetchError> {
    let until = deadline.min(Instant::now() + STALL);
    let stalled = |_| FetchError::Stalled { url: uri.to_string(), seconds: STALL.as_secs() };
    timeout_at(until, work).await.map_err(stalled)
}

/// Host and port, without a user's name.
fn authority(uri: &Uri) -> String {
    let all = uri.authority().map_or("", |authority| authority.as_str());
    all.rsplit('@').next().unwrap_or(all).to_owned()
}

fn request(uri: &Uri, span: Span) -> Result<Request<Empty<Bytes>>, FetchError> {
    let target = uri.path_and_query().map_or("/", |target| target.as_str());
    let mut request = Request::get(target)
        .header(header::HOST, authority(uri))
        .header(header::USER_AGENT, concat!("holdfast-update/", env!("CARGO_PKG_VERSION")))
        .header(header::ACCEPT_ENCODING, "identity");
    if !span.is_whole() {
        let last = span.to.map(|to| to.saturating_sub(1).to_string()).unwrap_or_default();
        request = request.header(header::RANGE, format!("bytes={}-{last}", span.from));
    }
    request.body(Empty::new()).map_err(|_| FetchError::Url { url: uri.to_string() })
}

impl Answer {
    pub(super) fn status(&self) -> StatusCode {
        self.0.status()
    }

    /// First byte of a partial answer, by its `Content-Range`.
    pub(super) fn begins(&self) -> Option<u64> {
        let range = self.0.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
        range.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
    }

    pub(super) fn redirection(&self) -> Option<String> {
        Some(self.0.headers().get(header::LOCATION)?.to_str().ok()?.to_owned())
    }

    /// The next bytes of the body.
    pub(super) async fn next(&mut self) -> Option<Result<Bytes, hyper::Error>> {
        loop {
            match self.0.body_mut().frame().await? {
                Ok(frame) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Some(Ok(bytes));
                    }
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn families_take_turns_and_the_first_is_the_resolvers() {
        let found = ["[2001:db8::1]:80", "[2001:db8::2]:80", "192.0.2.1:80"].map(address);
        assert_eq!(in_turn(&found), [found[0], found[2], found[1]]);
        assert_eq!(in_turn(&[found[2]; 9]).len(), 4);
        assert_eq!(in_turn(&[]), []);
    }

    #[tokio::test]
    async fn a_silent_address_leaves_time_for_the_next() {
        let good = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let good = good.local_addr().expect("an address");
        // A full queue of connections that nobody takes: the kernel drops what comes more.
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(address("127.0.0.1:0")).expect("bound");
        let silent = socket.listen(0).expect("a listener");
        let address = silent.local_addr().expect("an address");
        let _first = TcpStream::connect(address).await.expect("room for one");
        let found = reach(&[address, good], Duration::from_millis(200)).await.expect("the other");
        assert_eq!(found.peer_addr().expect("an address"), good);
        let refused = reach(&[], Duration::from_millis(200)).await.expect_err("no address");
        assert_eq!(refused.kind(), io::ErrorKind::NotFound);
    }
}
