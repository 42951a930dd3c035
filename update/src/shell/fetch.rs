//! Gets files of a repository by `https`, `http` and `file` URLs.
//!
//! Every wait has a bound: a mirror that stalls, drips or never ends costs time, never more than is
//! said here, and no memory.

use std::{fmt, io, path::PathBuf, sync::Arc, time::Duration};

use hyper::{StatusCode, Uri, body::Bytes};
use rustls::RootCertStore;
use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt as _, AsyncSeekExt as _},
    time::{Instant, timeout_at},
};

use super::{
    elsewhere::{self, Elsewhere, Span, Wanted},
    http::{Answer, Http, Resolve},
};

/// Longest wait for a connection, a response, or the next bytes.
pub(super) const STALL: Duration = Duration::from_secs(30);
/// Longest time for one metadata file.
pub(super) const METADATA_TIME: Duration = Duration::from_secs(120);
/// Most redirections of one request.
const MAX_REDIRECTS: u32 = 5;
/// Bytes of a local file that are read at once.
const PIECE: usize = 64 << 10;

/// Why a file could not be fetched.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum FetchError {
    #[error("{url:?} is not an https, http or file URL")]
    Url { url: String },
    #[error("cannot connect to {host}, port {port}")]
    Connect { host: String, port: u16, source: io::Error },
    #[error(
        "no answer, or too little of it, from {url} in the time that it has ({seconds} s without a byte)"
    )]
    Stalled { url: String, seconds: u64 },
    #[error("{url}: the exchange broke off")]
    Exchange { url: String, source: hyper::Error },
    #[error("{url} answers {status}")]
    Status { url: String, status: StatusCode },
    #[error("{url} redirects more than {MAX_REDIRECTS} times, or away from https, or to nowhere")]
    Redirect { url: String },
    #[error("{url} has more than {limit} bytes")]
    TooLong { url: String, limit: u64 },
    #[error("cannot read {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot read {url}")]
    Elsewhere { url: String, source: io::Error },
    #[error("cannot use {} as the list of certificate authorities: {reason}", path.display())]
    Authorities { path: PathBuf, reason: String },
}

/// Fetches files; keeps one connection open for the next request to the same server.
pub struct Fetcher {
    http: Http,
    elsewhere: Option<Arc<dyn Elsewhere>>,
}

impl fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetcher").field("http", &self.http).finish_non_exhaustive()
    }
}

/// A file that is being fetched.
pub(super) struct Download {
    url: String,
    source: Source,
    /// Where its bytes begin in the file.
    pub(super) from: u64,
}

enum Source {
    Http(Answer),
    Local(PathBuf, File),
    Elsewhere(elsewhere::Bytes),
}

impl Fetcher {
    /// Makes a fetcher. `authorities` is a PEM file of certificate authorities for `https`; without
    /// it the system's list is used once it is needed.
    pub fn new(authorities: Option<PathBuf>) -> Self {
        Self { http: Http::new(authorities), elsewhere: None }
    }

    /// Trusts these authorities for `https`, instead of those in a file.
    pub fn with_roots(self, roots: RootCertStore) -> Self {
        Self { http: self.http.with_roots(roots), ..self }
    }

    /// Asks `resolver` for the addresses of hosts, instead of the system.
    pub fn with_resolver(self, resolver: Arc<dyn Resolve>) -> Self {
        Self { http: self.http.with_resolver(resolver), ..self }
    }

    /// Asks `elsewhere` for files at URLs of other schemes.
    pub fn with_elsewhere(self, elsewhere: Arc<dyn Elsewhere>) -> Self {
        Self { elsewhere: Some(elsewhere), ..self }
    }

    /// Returns a whole file of at most `limit` bytes, or `None` if there is none.
    pub async fn metadata(&mut self, url: &str, limit: u64) -> Result<Option<Vec<u8>>, FetchError> {
        self.whole(url, limit, METADATA_TIME).await
    }

    /// The same, where the whole exchange may take so long.
    pub async fn whole(
        &mut self,
        url: &str,
        limit: u64,
        time: Duration,
    ) -> Result<Option<Vec<u8>>, FetchError> {
        let deadline = Instant::now() + time;
        let Some(mut download) = self.open(url, Span::default(), deadline).await? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        while let Some(piece) = download.next(deadline).await? {
            if (bytes.len() + piece.len()) as u64 > limit {
                return Err(FetchError::TooLong { url: url.to_owned(), limit });
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(Some(bytes))
    }

    /// Begins to fetch bytes of a file, or all of it where the server cannot do so. More than what was
    /// asked for may come. `None` if there is no such file.
    pub(super) async fn open(
        &mut self,
        url: &str,
        span: Span,
        deadline: Instant,
    ) -> Result<Option<Download>, FetchError> {
        let bad = || FetchError::Url { url: url.to_owned() };
        if let Some(path) = url.strip_prefix("file://") {
            let path = PathBuf::from(decode(path).ok_or_else(bad)?);
            return local(url, path, span.from).await;
        }
        let mut uri: Uri = url.parse().map_err(|_| bad())?;
        if let Some(elsewhere) = &self.elsewhere
            && !matches!(uri.scheme_str(), Some("http" | "https"))
        {
            return foreign(url, elsewhere.as_ref(), span, deadline).await;
        }
        let mut span = span;
        for _ in 0..=MAX_REDIRECTS {
            if uri.host().is_none() || !matches!(uri.scheme_str(), Some("http" | "https")) {
                return Err(bad());
            }
            let answer = self.http.get(&uri, span, deadline).await?;
            let status = answer.status();
            match status {
                StatusCode::OK => return Ok(Some(http_download(url, answer, 0))),
                StatusCode::PARTIAL_CONTENT if answer.begins() == Some(span.from) => {
                    return Ok(Some(http_download(url, answer, span.from)));
                }
                StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::GONE => {
                    return Ok(None);
                }
                StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE
                    if !span.is_whole() =>
                {
                    span = Span::default();
                }
                StatusCode::MOVED_PERMANENTLY
                | StatusCode::FOUND
                | StatusCode::SEE_OTHER
                | StatusCode::TEMPORARY_REDIRECT
                | StatusCode::PERMANENT_REDIRECT => {
                    let next = answer.redirection().and_then(|to| follow(&uri, &to));
                    uri = next.ok_or_else(|| FetchError::Redirect { url: url.to_owned() })?;
                }
                status => return Err(FetchError::Status { url: url.to_owned(), status }),
            }
        }
        Err(FetchError::Redirect { url: url.to_owned() })
    }
}

fn http_download(url: &str, answer: Answer, from: u64) -> Download {
    Download { url: url.to_owned(), source: Source::Http(answer), from }
}

/// Opens a file that somebody else knows how to read.
async fn foreign(
    url: &str,
    elsewhere: &dyn Elsewhere,
    span: Span,
    deadline: Instant,
) -> Result<Option<Download>, FetchError> {
    let until = deadline.min(Instant::now() + STALL);
    let opened = timeout_at(until, elsewhere.open(Wanted { url: url.to_owned(), span }).0).await;
    let stalled = |_| FetchError::Stalled { url: url.to_owned(), seconds: STALL.as_secs() };
    let failed = |source| FetchError::Elsewhere { url: url.to_owned(), source };
    let opened = opened.map_err(stalled)?.map_err(failed)?;
    Ok(opened.map(|bytes| Download {
        url: url.to_owned(),
        source: Source::Elsewhere(bytes),
        from: span.from,
    }))
}

/// Reads the next bytes; none at the end.
async fn piece(from: &mut (dyn AsyncRead + Send + Unpin)) -> io::Result<Option<Bytes>> {
    let mut piece = vec![0; PIECE];
    let read = from.read(&mut piece).await?;
    piece.truncate(read);
    Ok((read > 0).then(|| piece.into()))
}

async fn local(url: &str, path: PathBuf, from: u64) -> Result<Option<Download>, FetchError> {
    let opened = async {
        let mut file = File::open(&path).await?;
        if !file.metadata().await?.is_file() {
            return Err(io::ErrorKind::NotFound.into());
        }
        file.seek(io::SeekFrom::Start(from)).await?;
        Ok::<File, io::Error>(file)
    };
    match opened.await {
        Ok(file) => {
            Ok(Some(Download { url: url.to_owned(), source: Source::Local(path, file), from }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FetchError::File { path, source }),
    }
}

impl Download {
    /// Returns the next bytes, `None` at the end.
    pub(super) async fn next(&mut self, deadline: Instant) -> Result<Option<Bytes>, FetchError> {
        match &mut self.source {
            Source::Http(answer) => {
                let until = deadline.min(Instant::now() + STALL);
                let next = timeout_at(until, answer.next()).await;
                let url = self.url.clone();
                let next = next.map_err(|_| FetchError::Stalled {
                    url: url.clone(),
                    seconds: STALL.as_secs(),
                })?;
                next.transpose().map_err(|source| FetchError::Exchange { url, source })
            }
            Source::Local(path, file) => {
                let failed = |source| FetchError::File { path: path.clone(), source };
                piece(file).await.map_err(failed)
            }
            Source::Elsewhere(bytes) => {
                let until = deadline.min(Instant::now() + STALL);
                let url = self.url.clone();
                let next = timeout_at(until, piece(&mut *bytes.0)).await;
                let next = next.map_err(|_| FetchError::Stalled {
                    url: url.clone(),
                    seconds: STALL.as_secs(),
                })?;
                next.map_err(|source| FetchError::Elsewhere { url, source })
            }
        }
    }
}

/// Where a redirection leads, by a URL or a reference relative to where it was (RFC 3986 §5.2); never from
/// https to http, and to no other scheme.
fn follow(from: &Uri, to: &str) -> Option<Uri> {
    let to = to.split('#').next().unwrap_or(to);
    let scheme = from.scheme_str()?;
    let authority = from.authority()?;
    let whole = |path: &str| format!("{scheme}://{authority}{path}");
    let next = if to.split(['/', '?']).next().is_some_and(|first| first.contains(':')) {
        to.to_owned()
    } else if to.starts_with("//") {
        format!("{scheme}:{to}")
    } else if to.starts_with('/') {
        whole(to)
    } else if to.starts_with('?') {
        whole(&format!("{}{to}", from.path()))
    } else {
        let (path, query) = to.split_at(to.find('?').unwrap_or(to.len()));
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        whole(&format!("{}{query}", without_dots(&format!("{folder}/{path}"))))
    };
    let next: Uri = next.parse().ok()?;
    let kept = matches!((scheme, next.scheme_str()?), (_, "https") | ("http", "http"));
    kept.then_some(next)
}

/// Removes `.` and `..` from an absolute path (RFC 3986 §5.2.4); what would leave it stays at its top.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    for (at, part) in parts.iter().enumerate() {
        match *part {
            ".." => drop(kept.pop()),
            "." => {}
            part => kept.push(part),
        }
        if at + 1 == parts.len() && matches!(*part, "." | "..") {
            kept.push("");
        }
    }
    format!("/{}", kept.join("/"))
}

/// Undoes percent encoding; `None` if it is broken or no text comes out.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut parts = text.split('%');
    bytes.extend_from_slice(parts.next()?.as_bytes());
    for part in parts {
        let digits = part.get(..2).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_encoding_is_undone_once() {
        assert_eq!(decode("/a%20b%252F"), Some("/a b%2F".to_owned()));
        assert_eq!(["%", "%2", "%+1", "%ff"].map(decode), [None, None, None, None]);
    }

    #[test]
    fn redirections_stay_secure() {
        let from: Uri = "https://a.example/x".parse().expect("a URL");
        let to = |to| follow(&from, to).map(|uri| uri.to_string());
        assert_eq!(to("/y?z"), Some("https://a.example/y?z".to_owned()));
        assert_eq!(to("https://b.example/y"), Some("https://b.example/y".to_owned()));
        assert_eq!(to("//b.example/y#z"), Some("https://b.example/y".to_owned()));
        for elsewhere in
            ["http://b.example/y", "file:///y", "ftp://b.example/y", "data:,y", "https:y", ":"]
        {
            assert_eq!(to(elsewhere), None, "{elsewhere}");
        }
    }

    #[test]
    fn relative_redirections_begin_where_they_were_met() {
        let from: Uri = "http://a.example/b/c/d;p?q".parse().expect("a URL");
        // RFC 3986 §5.4, those that concern files.
        for (reference, wanted) in [
            ("g", "/b/c/g"),
            ("./g", "/b/c/g"),
            ("g/", "/b/c/g/"),
            ("/g", "/g"),
            ("?y", "/b/c/d;p?y"),
            ("g?y", "/b/c/g?y"),
            ("g?y/../x", "/b/c/g?y/../x"),
            ("g#s", "/b/c/g"),
            (".", "/b/c/"),
            ("..", "/b/"),
            ("../g", "/b/g"),
            ("../..", "/"),
            ("../../../g", "/g"),
            ("g..", "/b/c/g.."),
            ("./g/.", "/b/c/g/"),
            ("g;x=1/../y", "/b/c/y"),
        ] {
            let found = follow(&from, reference).map(|uri| uri.to_string());
            assert_eq!(found, Some(format!("http://a.example{wanted}")), "{reference}");
        }
    }
}
