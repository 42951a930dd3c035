//! Parsing of requests.
//! Source: RFC 9112 (HTTP/1.1); `httparse` reads the head.

use types::query::{self, Query};

use super::{chunks, target};

/// Largest head of a request, in bytes.
pub const MAX_HEAD: usize = 8192;
/// The method that asks for a head without its body.
pub(super) const HEAD: &str = "HEAD";
/// Most header fields.
const MAX_HEADERS: usize = 32;
/// The form of a version, in which 0 stands for any digit (RFC 9112 §2.3).
const VERSION: &[u8; 8] = b"HTTP/0.0";

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Method, as sent.
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// What the body is said to be, if anything.
    pub content_type: Option<String>,
    /// Body.
    pub body: Vec<u8>,
}

/// Why bytes are no request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RequestError {
    #[error("the request ended before it was whole")]
    Incomplete,
    #[error("the request did not come whole in time")]
    Late,
    #[error("the head is not HTTP/1.1: {0}")]
    Head(httparse::Error),
    #[error("the target does not fit into a head of {MAX_HEAD} bytes")]
    LargeTarget,
    #[error("the head has more than {MAX_HEAD} bytes")]
    LargeFields,
    #[error("the body's length is not known: {reason}")]
    Length { reason: &'static str },
    #[error("the only transfer-encoding that is taken is chunked, alone")]
    Encoding,
    #[error("a request has one host field, which is empty or a host, perhaps with a port")]
    Host,
    #[error(
        "the target is neither a path nor an address that begins with http:// and a host, in the characters of URIs"
    )]
    Target,
    #[error("the body has {found} bytes; at most {most} are taken")]
    LargeBody { found: u64, most: usize },
}

impl RequestError {
    /// Returns the HTTP status that goes with it.
    pub fn status(&self) -> u16 {
        match self {
            Self::Late => 408,
            Self::LargeBody { .. } => 413,
            Self::LargeTarget => 414,
            Self::LargeFields | Self::Head(httparse::Error::TooManyHeaders) => 431,
            Self::Encoding => 501,
            Self::Head(httparse::Error::Version) => 505,
            Self::Incomplete | Self::Head(_) | Self::Length { .. } | Self::Host | Self::Target => {
                400
            }
        }
    }
}

/// A query whose parameter is no number, or is there twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadQuery;

impl Request {
    /// Returns the path without the query, as sent.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// Returns the path's segments, decoded, an empty one before the first `/`; `None` when one is no text.
    pub fn segments(&self) -> Option<Vec<String>> {
        self.path().split('/').map(query::decoded).collect()
    }

    /// Returns the path's last segment, decoded; empty when it is no text.
    pub fn last_segment(&self) -> String {
        self.segments().and_then(|mut all| all.pop()).unwrap_or_default()
    }

    /// Returns whether only the head of an answer is asked for.
    pub fn is_head(&self) -> bool {
        self.method == HEAD
    }

    /// Returns query parameter `name` as a number; `Ok(None)` when it is not there.
    pub fn number(&self, name: &str) -> Result<Option<u64>, BadQuery> {
        Query::of(&self.target).number(name).map_err(|_| BadQuery)
    }
}

/// Parses a request; `None` while more bytes are needed.
pub fn parse(bytes: &[u8], max_body: usize) -> Result<Option<Request>, RequestError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let length = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD => length,
        Ok(httparse::Status::Partial) if bytes.len() <= MAX_HEAD => return Ok(None),
        Ok(httparse::Status::Complete(_) | httparse::Status::Partial) => {
            return Err(too_large(&head));
        }
        Err(httparse::Error::Version) => return refuse_version(bytes),
        Err(error) => return Err(RequestError::Head(error)),
    };
    check_host(&head)?;
    let method = head.method.unwrap_or_default();
    let target = target::origin_form(method, head.path.unwrap_or_default());
    let target = target.ok_or(RequestError::Target)?;
    let rest = bytes.get(length..).unwrap_or_default();
    let body = match extent(&head, max_body)? {
        Extent::Counted(size) => rest.get(..size).map(<[u8]>::to_vec),
        Extent::Chunked => chunks::join(rest, max_body)?,
    };
    let types: Vec<_> = values(&head, "content-type").map(String::from_utf8_lossy).collect();
    let content_type = (!types.is_empty()).then(|| types.join(", "));
    Ok(body.map(|body| Request { method: method.to_owned(), target, content_type, body }))
}

/// Tells a version that is not read here (RFC 9110 §15.6.6) from what is none; `None` while it may become one. Minor
/// versions above 1, of which there are none, count among them.
fn refuse_version(bytes: &[u8]) -> Result<Option<Request>, RequestError> {
    let line = bytes.trim_ascii_start();
    let found = line.splitn(3, |byte| *byte == b' ').nth(2).unwrap_or_default();
    let fits = |(form, byte): (&u8, &u8)| match form {
        b'0' => byte.is_ascii_digit(),
        _ => form == byte,
    };
    let is_begun = VERSION.iter().zip(found).all(fits);
    let is_ended = matches!(found.get(VERSION.len()), None | Some(b'\r' | b'\n'));
    if !is_begun || !is_ended {
        return Err(RequestError::Head(httparse::Error::Token));
    }
    if found.len() < VERSION.len() {
        return Ok(None);
    }
    Err(RequestError::Head(httparse::Error::Version))
}

/// Says what of a head is too large.
fn too_large(head: &httparse::Request<'_, '_>) -> RequestError {
    match (head.method, head.path) {
        // No method is as long.
        (None, _) => RequestError::Head(httparse::Error::Token),
        (Some(_), Some(path)) if path.len() <= MAX_HEAD => RequestError::LargeFields,
        (Some(_), _) => RequestError::LargeTarget,
    }
}

/// Returns the values of the fields of a name.
fn values<'a>(
    head: &'a httparse::Request<'_, '_>,
    name: &'a str,
) -> impl Iterator<Item = &'a [u8]> {
    let named = head.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
    named.map(|field| field.value)
}

/// Source: RFC 9112 §3.2.
fn check_host(head: &httparse::Request<'_, '_>) -> Result<(), RequestError> {
    let fits = |value: &[u8]| {
        value.is_empty() || std::str::from_utf8(value).is_ok_and(target::is_authority)
    };
    let mut hosts = values(head, "host");
    match (hosts.next(), hosts.next()) {
        (Some(host), None) if fits(host) => Ok(()),
        // HTTP/1.0 knew no such field.
        (None, _) if head.version == Some(0) => Ok(()),
        _ => Err(RequestError::Host),
    }
}

/// Returns whether what came of a request that cannot be read asks for a head alone.
pub(super) fn asks_for_head(bytes: &[u8]) -> bool {
    let rest = bytes.trim_ascii_start().strip_prefix(HEAD.as_bytes());
    rest.is_some_and(|rest| rest.starts_with(b" "))
}

/// Returns whether the head is whole, and its client waits to be told before it sends the body, as HTTP/1.0
/// knows nothing of (RFC 9110 §10.1.1).
pub(super) fn awaits_continue(bytes: &[u8]) -> bool {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let is_whole = matches!(head.parse(bytes), Ok(httparse::Status::Complete(_)));
    let asks = |value: &[u8]| value.eq_ignore_ascii_case(b"100-continue");
    is_whole && head.version == Some(1) && values(&head, "expect").any(asks)
}

/// How far a body goes.
enum Extent {
    /// So many bytes.
    Counted(usize),
    /// Up to a last chunk.
    Chunked,
}

/// Source: RFC 9112 §6.1 and §6.3.
fn extent(head: &httparse::Request<'_, '_>, max_body: usize) -> Result<Extent, RequestError> {
    let wrong = |reason| Err(RequestError::Length { reason });
    let mut lengths = values(head, "content-length");
    match (lengths.next(), values(head, "transfer-encoding").next()) {
        (None, None) => Ok(Extent::Counted(0)),
        (Some(_), None) if lengths.next().is_some() => wrong("content-length is given twice"),
        (Some(length), None) => counted(length, max_body),
        (Some(_), Some(_)) => wrong("content-length and transfer-encoding are given both"),
        (None, Some(_)) if head.version != Some(1) => wrong("HTTP/1.0 has no transfer-encoding"),
        (None, Some(_)) => coded(head),
    }
}

/// All fields are one list, whose empty elements are none (RFC 9110 §5.3 and §5.6.1.2). Where a body ends is known by
/// chunks alone, which are the last coding, and once.
fn coded(head: &httparse::Request<'_, '_>) -> Result<Extent, RequestError> {
    let elements = values(head, "transfer-encoding")
        .flat_map(|value| value.split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii);
    let codings: Vec<&[u8]> = elements.filter(|element| !element.is_empty()).collect();
    let is_chunked = |coding: &&[u8]| coding.eq_ignore_ascii_case(b"chunked");
    match codings.split_last() {
        Some((last, [])) if is_chunked(last) => Ok(Extent::Chunked),
        Some((last, before)) if is_chunked(last) && !before.iter().any(is_chunked) => {
            Err(RequestError::Encoding)
        }
        _ => Err(RequestError::Length {
            reason: "chunked has to be the last transfer-encoding, and there once",
        }),
    }
}

fn counted(length: &[u8], max_body: usize) -> Result<Extent, RequestError> {
    let found = std::str::from_utf8(length).ok().and_then(digits);
    let found = found.ok_or(RequestError::Length { reason: "content-length is no number" })?;
    match usize::try_from(found) {
        Ok(size) if size <= max_body => Ok(Extent::Counted(size)),
        Ok(_) | Err(_) => Err(RequestError::LargeBody { found, most: max_body }),
    }
}

/// Reads a number of digits alone, without a sign (RFC 9110 §8.6).
fn digits(text: &str) -> Option<u64> {
    let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits.and_then(|text| text.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_in_pieces() {
        let whole =
            b"POST /v1/console?from=3&x HTTP/1.1\r\nhost: vmm\r\ncontent-length: 2\r\n\r\nhi";
        assert_eq!(parse(&whole[..40], 10), Ok(None));
        assert_eq!(parse(&whole[..whole.len() - 1], 10), Ok(None));
        let request = parse(whole, 10).expect("valid").expect("whole");
        assert_eq!((request.path(), request.body.as_slice()), ("/v1/console", &b"hi"[..]));
        assert_eq!(request.number("from"), Ok(Some(3)));
        assert_eq!(request.number("to"), Ok(None));
        assert_eq!(request.content_type, None);
    }

    /// Returns how a request with these further lines is refused.
    fn refused(lines: &str) -> RequestError {
        let text = format!("POST / HTTP/1.1\r\nhost: vmm\r\n{lines}\r\n\r\n");
        parse(text.as_bytes(), 4).expect_err("refused")
    }

    #[test]
    fn bad_requests_are_told_apart() {
        let refusal = |text: &str| parse(text.as_bytes(), 4).expect_err("refused");
        assert!(matches!(refusal("\0\0\0"), RequestError::Head(_)));
        let large = RequestError::LargeBody { found: 5, most: 4 };
        assert_eq!((large.status(), refused("content-length: 5")), (413, large));
        let wrong = ["-1", "+2", "", "99999999999999999999", "1\r\ncontent-length: 1"];
        assert_eq!(
            wrong.map(|length| refused(&format!("content-length: {length}")).status()),
            [400; 5]
        );
        let endless = |text: &str| format!("{text}{}", "x".repeat(MAX_HEAD));
        assert_eq!(refusal(&endless("GET /")), RequestError::LargeTarget);
        let ended = format!("{} HTTP/1.1\r\nhost: a\r\n\r\n", endless("GET /"));
        assert_eq!(refusal(&ended), RequestError::LargeTarget);
        assert_eq!(RequestError::LargeTarget.status(), 414);
        assert_eq!(refusal(&endless("GET / HTTP/1.1\r\na: ")), RequestError::LargeFields);
        assert_eq!(refused(&endless("a: ")), RequestError::LargeFields);
        assert_eq!(RequestError::LargeFields.status(), 431);
        assert_eq!(refused(&"a: b\r\n".repeat(MAX_HEADERS)).status(), 431);
        assert_eq!(refusal(&endless("x")).status(), 400);
        assert_eq!(RequestError::Late.status(), 408);
    }

    /// RFC 9112 §6.1, §6.3 and §7.1.
    #[test]
    fn bodies_may_come_in_chunks() {
        let chunked = |version: &str, lines: &str| {
            let head = format!("POST / HTTP/1.{version}\r\nhost: a\r\n{lines}\r\n\r\n");
            let parsed = parse(format!("{head}2\r\nhi\r\n0\r\n\r\n").as_bytes(), 4);
            parsed.map(|request| request.expect("whole").body).map_err(|error| error.status())
        };
        assert_eq!(chunked("1", "Transfer-Encoding: Chunked"), Ok(b"hi".to_vec()));
        assert_eq!(chunked("1", "transfer-encoding: , chunked ,"), Ok(b"hi".to_vec()));
        assert_eq!(chunked("1", "transfer-encoding: gzip, chunked"), Err(501));
        assert_eq!(chunked("1", "transfer-encoding: gzip\r\nTransfer-Encoding: CHUNKED"), Err(501));
        let endless = ["identity", "", "chunked, gzip", "chunked, chunked", "chunked, x, chunked"];
        for endless in endless {
            let line = format!("transfer-encoding: {endless}");
            assert_eq!(chunked("1", &line), Err(400), "{endless}");
        }
        let twice = "transfer-encoding: chunked\r\ntransfer-encoding: chunked";
        assert_eq!(chunked("1", twice), Err(400));
        let both = "transfer-encoding: chunked\r\ncontent-length: 2";
        assert_eq!(chunked("1", both), Err(400));
        assert_eq!(chunked("0", "transfer-encoding: chunked"), Err(400));
    }

    /// RFC 9110 §15.6.6: a version is what has its form.
    #[test]
    fn versions_that_are_not_read_are_told_from_what_is_none() {
        let refused = |version: &str| {
            let text = format!("\r\nGET / {version}\r\nhost: a\r\n\r\n");
            parse(text.as_bytes(), 4).expect_err("refused").status()
        };
        for version in ["HTTP/2.0", "HTTP/0.9", "HTTP/1.2", "HTTP/1.9"] {
            assert_eq!(refused(version), 505, "{version}");
        }
        let none = ["HTTP/1", "HTTP/2", "HTTP/10.0", "HTTP/2.0x", "http/2.0", "HTTPS/2.0"];
        let spaced = ["", " HTTP/2.0", "x HTTP/2.0", "HTTP/1.x", "HTTP/x.1", "HTTP/1.1 "];
        for none in none.iter().chain(&spaced) {
            assert_eq!(refused(none), 400, "{none}");
        }
        // What came in pieces may become one.
        assert_eq!(parse(b"GET / HTTP/2", 4), Ok(None));
        assert_eq!(parse(b"GET / HTTP/2.", 4), Ok(None));
        assert!(parse(b"GET / HTTP/x", 4).is_err_and(|error| error.status() == 400));
    }

    fn target(text: &str) -> Result<String, RequestError> {
        parse(text.as_bytes(), 4).map(|request| request.expect("whole").target)
    }

    /// RFC 9112 §3.2 and §3.2.2.
    #[test]
    fn a_request_has_one_host_and_may_name_it_twice_over() {
        assert_eq!(target("GET / HTTP/1.1\r\n\r\n"), Err(RequestError::Host));
        assert_eq!(target("GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n"), Err(RequestError::Host));
        assert_eq!(target("GET / HTTP/1.1\r\nhost: a/b\r\n\r\n"), Err(RequestError::Host));
        assert_eq!(target("GET / HTTP/1.0\r\nhost: a b\r\n\r\n"), Err(RequestError::Host));
        assert_eq!(target("GET / HTTP/1.0\r\n\r\n"), Ok("/".to_owned()));
        assert_eq!(target("GET / HTTP/1.1\r\nhost:\r\n\r\n"), Ok("/".to_owned()));
        assert_eq!(target("GET / HTTP/1.1\r\nhost: a:80 \r\n\r\n"), Ok("/".to_owned()));
        let absolute = |target: &str| format!("GET {target} HTTP/1.1\r\nhost: a\r\n\r\n");
        assert_eq!(target(&absolute("HTTP://a:1/v1/state?x=1")), Ok("/v1/state?x=1".to_owned()));
        assert_eq!(target(&absolute("http://a?x=/v1/state")), Ok("/?x=/v1/state".to_owned()));
        for wrong in ["http:///v1/state", "https://a/v1/state", "v1/state", "a:443", "*"] {
            assert_eq!(target(&absolute(wrong)), Err(RequestError::Target), "{wrong}");
        }
        assert_eq!(target("OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n"), Ok("*".to_owned()));
    }

    fn request(target: &str) -> Request {
        let (method, target) = ("DELETE".to_owned(), target.to_owned());
        Request { method, target, content_type: None, body: Vec::new() }
    }

    /// RFC 3986 §2.1.
    #[test]
    fn segments_are_decoded() {
        let request = |path: &str| request(&format!("{path}?pull=%31"));
        let state = request("/v1/%73tate%2Fx").segments();
        assert_eq!(state, Some(["", "v1", "state/x"].map(str::to_owned).to_vec()));
        assert_eq!(request("/v1/devices/0000%3A41%3a00.0").last_segment(), "0000:41:00.0");
        assert_eq!(request("/v1/%zz/state").segments(), None);
    }

    #[test]
    fn numbers_of_a_query_are_digits_and_there_once() {
        let from = |query: &str| request(&format!("/v1/console{query}")).number("from");
        for right in ["?from=5", "?fr%6Fm=%35", "?x&from=05&", "?frOm=+1&from=5&x=%zz"] {
            assert_eq!(from(right), Ok(Some(5)), "{right}");
        }
        for none in ["", "?", "?x=1", "?fromm=1", "?x?from=5"] {
            assert_eq!(from(none), Ok(None), "{none}");
        }
        let wrong = ["?from", "?from=", "?from=+5", "?from=%2B5", "?from=-1", "?from=5&from=5"];
        for wrong in wrong.iter().chain(&["?from=5&from", "?from=%zz", "?%zz&from=5", "?from= 5"]) {
            assert_eq!(from(wrong), Err(BadQuery), "{wrong}");
        }
        assert_eq!(from("?from=18446744073709551615"), Ok(Some(u64::MAX)));
        assert_eq!(from("?from=18446744073709551616"), Err(BadQuery));
    }

    /// What a request is refused for may be anything behind the method.
    #[test]
    fn who_asks_for_a_head_alone_is_known_by_the_method() {
        assert!(asks_for_head(b"\r\nHEAD nowhere"));
        assert!(!asks_for_head(b"GET / HTTP/1.1\r\n"));
        assert!(!asks_for_head(b"HEADS / HTTP/1.1\r\n"));
        assert!(!asks_for_head(b""));
    }

    #[test]
    fn what_a_body_is_said_to_be_is_kept() {
        let kept = |lines: &str| {
            let text = format!("GET / HTTP/1.1\r\nhost: a\r\n{lines}\r\n");
            parse(text.as_bytes(), 4).expect("valid").expect("whole").content_type
        };
        assert_eq!(kept("").as_deref(), None);
        assert_eq!(kept("Content-Type: text/plain\r\n").as_deref(), Some("text/plain"));
        let twice = kept("content-type: a/b\r\ncontent-type: c/d\r\n");
        assert_eq!(twice.as_deref(), Some("a/b, c/d"));
    }

    #[test]
    fn who_waits_to_go_on_is_known_by_a_whole_head() {
        let head =
            b"POST / HTTP/1.1\r\nhost: a\r\nExpect: 100-Continue\r\ncontent-length: 4\r\n\r\n";
        assert!(awaits_continue(head));
        assert!(!awaits_continue(&head[..head.len() - 1]));
        assert!(!awaits_continue(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\n"));
        let old = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\ncontent-length: 4\r\n\r\n";
        assert!(!awaits_continue(old));
    }
}
