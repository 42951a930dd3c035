//! The way to a gateway: its URL, the proxy that the environment names, and TLS. Requests and WebSockets go the
//! same way.
//!
//! | Variable                                   | Meaning, as curl has it                             |
//! |--------------------------------------------|-----------------------------------------------------|
//! | `https_proxy`, `HTTPS_PROXY`, `http_proxy` | `http://[USER:PASSWORD@]HOST:PORT` of a proxy, for gateways at URLs of this kind; asked to CONNECT (RFC 9110 §9.3.6). No gateway on this computer is reached through one |
//! | `all_proxy`, `ALL_PROXY`                   | the same for both kinds                             |
//! | `no_proxy`, `NO_PROXY`                     | names, with what is below them, addresses and prefixes that are reached without it; `*` for all |
//! | `SSL_CERT_FILE`                            | PEM file of the authorities that are believed       |

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::http::{Request, StatusCode, Uri, header};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use rustix::net::sockopt;
use rustls::{CertificateError, ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::prefix::Prefix;

/// Where Linux distributions keep the list of certificate authorities.
const AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// How long one of a host's addresses may be silent while there is another.
const PATIENCE: Duration = Duration::from_secs(3);

/// A connection on which nothing moves is tried after this time, which also keeps routers from forgetting it.
const QUIET: Duration = Duration::from_secs(30);

/// How often it is tried before the other end counts as gone, and how long it may leave something
/// unacknowledged (RFC 5482), in milliseconds.
const TRIES: u32 = 4;
const UNACKNOWLEDGED_MS: u32 = 60_000;

/// What carries HTTP.
pub(crate) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// Host and port, and whether TLS is spoken there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    secure: bool,
    /// An IPv6 address is in brackets.
    host: String,
    port: u16,
}

impl Place {
    /// Reads a URL that ends behind its host or port.
    pub(crate) fn parse(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let secure = match uri.scheme_str()? {
            "http" => false,
            "https" => true,
            _ => return None,
        };
        let authority = uri.authority()?;
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() || authority.host().is_empty() {
            return None;
        }
        let usual = if secure { 443 } else { 80 };
        // With a user's name before it, the host is no prefix.
        let port = match authority.as_str().strip_prefix(authority.host())? {
            "" => usual,
            rest => rest.strip_prefix(':')?.parse().ok().filter(|port| *port != 0)?,
        };
        Some(Self { secure, host: authority.host().to_owned(), port })
    }

    /// Returns the field `host`, as the URL has it: without the port that is the usual one.
    pub(crate) fn authority(&self) -> String {
        let usual = if self.secure { 443 } else { 80 };
        if self.port == usual { self.host.clone() } else { self.host_port() }
    }

    /// Returns the URL.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", if self.secure { "https" } else { "http" }, self.authority())
    }

    fn host_port(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    fn bare(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unconnected {
    /// What this computer was told about the way is wrong; trying again changes nothing.
    Told(String),
    /// What happened on the way.
    Happened(String),
}

/// Connects with a gateway. `authorities` is a PEM file of those that may vouch for it; without one the system's
/// may. The error says what failed.
pub(super) async fn open(
    place: &Place,
    authorities: Option<&Path>,
) -> Result<Box<dyn Wire>, Unconnected> {
    // Before anybody is called.
    let tls =
        place.secure.then(|| connector(authorities)).transpose().map_err(Unconnected::Told)?;
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let proxy = proxy(place, variable).map_err(Unconnected::Told)?;
    let wire = async || -> Result<Box<dyn Wire>, String> {
        let wire: Box<dyn Wire> = match &proxy {
            None => Box::new(tcp(place.bare(), place.port).await?),
            Some(proxy) => Box::new(through(proxy, place).await?),
        };
        Ok(wire)
    };
    let Some((tls, file)) = tls else { return wire().await.map_err(Unconnected::Happened) };
    let name = ServerName::try_from(place.bare().to_owned())
        .map_err(|_| Unconnected::Told(format!("{:?} is no name of a host", place.host)))?;
    let wire = wire().await.map_err(Unconnected::Happened)?;
    let stream = tls.connect(name, wire).await;
    let stream = stream.map_err(|error| Unconnected::Happened(explain(&error, &file)))?;
    Ok(Box::new(stream))
}

async fn tcp(host: &str, port: u16) -> Result<TcpStream, String> {
    let found = lookup_host((host, port)).await.map_err(|error| error.to_string())?;
    let found: Vec<SocketAddr> = found.collect();
    let Some((last, others)) = found.split_last() else {
        return Err(format!("{host} has no address"));
    };
    let mut stream = None;
    for address in others {
        if let Ok(Ok(connected)) = timeout(PATIENCE, TcpStream::connect(address)).await {
            stream = Some(connected);
            break;
        }
    }
    let stream = match stream {
        Some(stream) => stream,
        None => TcpStream::connect(last).await.map_err(|error| error.to_string())?,
    };
    prepare(&stream).map_err(|error| error.to_string())?;
    Ok(stream)
}

/// Keys are short, and each is to arrive at once; and a gateway that is gone is to be noticed.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, QUIET)?;
    sockopt::set_tcp_keepintvl(stream, QUIET / TRIES)?;
    sockopt::set_tcp_keepcnt(stream, TRIES)?;
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MS)?;
    Ok(())
}

/// A proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Proxy {
    place: Place,
    /// Value of `proxy-authorization` (RFC 7617 §2).
    credentials: Option<String>,
}

/// Returns the proxy on the way to a gateway, if the environment names one.
fn proxy(
    place: &Place,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<Proxy>, String> {
    let address = place.bare().parse::<IpAddr>();
    if place.bare() == "localhost" || address.is_ok_and(|address| address.is_loopback()) {
        return Ok(None);
    }
    // Upper-case HTTP_PROXY is left out, as by curl: where a web server starts programs, a client sets it.
    let names: &[&str] = if place.secure {
        &["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]
    } else {
        &["http_proxy", "all_proxy", "ALL_PROXY"]
    };
    let first = |names: &[&'static str]| {
        names.iter().find_map(|name| variable(name).map(|value| (*name, value)))
    };
    let Some((name, url)) = first(names) else { return Ok(None) };
    let without = first(&["no_proxy", "NO_PROXY"]).map(|(_, list)| list).unwrap_or_default();
    if without.split([',', ' ']).any(|entry| covers(entry, place)) {
        return Ok(None);
    }
    let wrong = || format!("{name} names no proxy that can be used; expected http://HOST:PORT");
    let full = if url.contains("://") { url } else { format!("http://{url}") };
    let (scheme, rest) = full.split_once("://").ok_or_else(wrong)?;
    let (user, host) =
        rest.rsplit_once('@').map_or((None, rest), |(user, host)| (Some(user), host));
    let place = Place::parse(&format!("{scheme}://{host}")).filter(|place| !place.secure);
    let credentials = user.map(|user| {
        let user = unescape(if user.contains(':') { user.to_owned() } else { format!("{user}:") });
        format!("Basic {}", STANDARD.encode(user))
    });
    Ok(Some(Proxy { place: place.ok_or_else(wrong)?, credentials }))
}

/// Whether an entry of `no_proxy` is a gateway's name, one above it, its address or a prefix of that.
fn covers(entry: &str, place: &Place) -> bool {
    let entry = entry.trim().trim_start_matches("*.").trim_start_matches('.');
    let entry = entry.strip_suffix(&format!(":{}", place.port)).unwrap_or(entry);
    let entry = entry.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let host = place.bare().to_ascii_lowercase();
    if let Ok(address) = host.parse::<IpAddr>() {
        let within = entry.parse::<Prefix>().is_ok_and(|prefix| prefix.contains(address));
        return entry == "*" || within;
    }
    let below = || host.strip_suffix(&entry).is_some_and(|rest| rest.ends_with('.'));
    entry == "*" || (!entry.is_empty() && (host == entry || below()))
}

/// Resolves what is percent-encoded (RFC 3986 §2.1).
fn unescape(text: String) -> Vec<u8> {
    let (bytes, mut out, mut index) = (text.as_bytes(), Vec::new(), 0);
    while let Some(byte) = bytes.get(index) {
        let digits = bytes.get(index + 1..index + 3).filter(|_| *byte == b'%');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        out.push(escaped.unwrap_or(*byte));
        index += if escaped.is_some() { 3 } else { 1 };
    }
    out
}

/// Has a proxy connect with the gateway.
async fn through(proxy: &Proxy, place: &Place) -> Result<impl Wire + 'static, String> {
    let name = proxy.place.host_port();
    let failed = |error: &dyn std::error::Error| {
        format!("the proxy {name}: {}", lease::problem::chain(error))
    };
    let stream = tcp(proxy.place.bare(), proxy.place.port)
        .await
        .map_err(|error| format!("the proxy {name}: {error}"))?;
    let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.map_err(|error| failed(&error))?;
    tokio::spawn(connection.with_upgrades());
    let target = place.host_port();
    let mut request = Request::connect(&target).header(header::HOST, &target);
    if let Some(credentials) = &proxy.credentials {
        request = request.header(header::PROXY_AUTHORIZATION, credentials);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(|error| failed(&error))?;
    let answer = sender.send_request(request).await.map_err(|error| failed(&error))?;
    match answer.status() {
        status if status.is_success() => {}
        StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            return Err(format!("the proxy {name} wants another USER:PASSWORD@ before its name"));
        }
        status => return Err(format!("the proxy {name} does not connect: it answers {status}")),
    }
    let upgraded = hyper::upgrade::on(answer).await.map_err(|error| failed(&error))?;
    Ok(TokioIo::new(upgraded))
}

/// Returns what makes TLS of a connection, and the file of the authorities.
fn connector(authorities: Option<&Path>) -> Result<(TlsConnector, PathBuf), String> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let known = || AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
    let file = authorities.map(Path::to_owned).or(named).or_else(known).ok_or_else(|| {
        "this system has no list of certificate authorities; name one with --ca-file".to_owned()
    })?;
    let wrong = |reason: &dyn std::fmt::Display| {
        format!("the authorities in {} cannot be used: {reason}", file.display())
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(&file).map_err(|error| wrong(&error))? {
        // Lists hold an old certificate, now and then, that no modern library reads.
        roots.add_parsable_certificates([certificate.map_err(|error| wrong(&error))?]);
    }
    if roots.is_empty() {
        return Err(wrong(&"it holds no certificate in PEM"));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&error))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((TlsConnector::from(Arc::new(config)), file))
}

/// Says what is to be done about the failures of TLS that people meet.
fn explain(error: &io::Error, authorities: &Path) -> String {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let reason = lease::problem::chain(error);
    match tls {
        Some(rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )) => format!(
            "no authority in {} vouches for its certificate; name its authority's with --ca-file",
            authorities.display()
        ),
        // webpki's word; `openssl req -x509` makes such certificates unless told otherwise.
        Some(rustls::Error::InvalidCertificate(_)) if reason.contains("CaUsedAsEndEntity") => {
            "its certificate is an authority's own; have it made with basicConstraints=CA:FALSE"
                .to_owned()
        }
        Some(rustls::Error::InvalidMessage(_)) => {
            "it does not speak TLS there; is its URL one with http://?".to_owned()
        }
        Some(_) | None => reason,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn place(url: &str) -> Place {
        Place::parse(url).unwrap_or_else(|| panic!("{url} is a gateway's"))
    }

    #[test]
    fn a_gateways_url_ends_behind_its_port() {
        assert_eq!(place("http://gw.example:8080").authority(), "gw.example:8080");
        assert_eq!(place("https://gw.example/").host_port(), "gw.example:443");
        assert_eq!(place("HTTPS://gw.example").url(), "https://gw.example");
        assert_eq!(place("https://gw.example:80").url(), "https://gw.example:80");
        let six = place("http://[2001:db8::7]:8460");
        assert_eq!(
            (six.bare(), six.port, six.url().as_str()),
            ("2001:db8::7", 8460, "http://[2001:db8::7]:8460")
        );
        let wrong = [
            "",
            "gw.example:8080",
            "http://",
            "http://:80",
            "http://gw.example:99999",
            "http://gw.example:0",
            "http://gw.example/v1",
            "http://gw.example?x",
            "http://me@gw.example",
            "ftp://gw.example",
        ];
        assert_eq!(wrong.map(Place::parse), [const { None }; 10]);
    }

    fn found(url: &str, set: &[(&str, &str)]) -> Result<Option<Proxy>, String> {
        let set: BTreeMap<_, _> = set.iter().copied().collect();
        proxy(&place(url), |name| set.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn proxies_are_those_of_the_environment() {
        let gateway = "https://gw.example";
        assert_eq!(found(gateway, &[]), Ok(None));
        assert_eq!(found(gateway, &[("http_proxy", "http://p.example:3128")]), Ok(None));
        let named =
            found(gateway, &[("HTTPS_PROXY", "p.example:3128")]).expect("one").expect("one");
        assert_eq!((named.place.host_port().as_str(), named.credentials), ("p.example:3128", None));
        let asked = found(gateway, &[("all_proxy", "http://me:p%40ss@p.example:3128/")]);
        // `printf %s me:p@ss | base64`
        let credentials = asked.expect("one").expect("one").credentials;
        assert_eq!(credentials.as_deref(), Some("Basic bWU6cEBzcw=="));
        let socks = found(gateway, &[("https_proxy", "socks5://p.example")]).expect_err("refused");
        assert!(socks.contains("https_proxy") && !socks.contains("p.example"), "{socks}");
        let here = [("http_proxy", "p.example:1"), ("HTTP_PROXY", "p.example:2")];
        assert_eq!(found("http://127.0.0.1:8460", &here), Ok(None));
        assert_eq!(found("http://[::1]:8460", &here), Ok(None));
        assert_eq!(found("http://gw.example", &here[1..]), Ok(None));
        assert!(found("http://gw.example", &here).is_ok_and(|proxy| proxy.is_some()));
    }

    #[test]
    fn no_proxy_names_what_is_reached_without_one() {
        let direct = |url, list| {
            let set = [("https_proxy", "p.example:3128"), ("no_proxy", list)];
            found(url, &set).expect("a proxy or none").is_none()
        };
        let lists = ["*", "gw.example", "example", ".example", "a.b, *.example", "GW.example:443"];
        assert_eq!(lists.map(|list| direct("https://gw.example", list)), [true; 6]);
        let others = ["", "w.example", "gw.example:444", "x.gw.example", "192.0.2.0/24"];
        assert_eq!(others.map(|list| direct("https://gw.example", list)), [false; 5]);
        assert!(direct("https://192.0.2.7", "192.0.2.0/24"));
        assert!(direct("https://192.0.2.7", "192.0.2.7"));
        assert!(!direct("https://192.0.3.7", "192.0.2.0/24"));
        assert!(direct("https://[2001:db8::7]", "2001:db8::/32"));
    }
}
