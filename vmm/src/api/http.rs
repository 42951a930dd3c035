//! Parsing of requests.
//! Source: RFC 9112 (HTTP/1.1); `httparse` reads the head.

/// Largest head of a request, in bytes.
pub const MAX_HEAD: usize = 8192;
/// The method that asks for a head without its body.
pub(super) const HEAD: &str = "HEAD";
/// Most header fields.
const MAX_HEADERS: usize = 32;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Method, as sent.
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// Body.
    pub body: Vec<u8>,
}

/// Why bytes are no request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RequestError {
    #[error("the request did not come whole and in time")]
    Incomplete,
    #[error("the head is not HTTP/1.1: {0}")]
    Head(httparse::Error),
    #[error("the head has more than {MAX_HEAD} bytes")]
    LargeHead,
    #[error("content-length is missing its number or given twice")]
    Length,
    #[error("transfer-encoding is not taken; send content-length")]
    Encoding,
    #[error("a request has one host field, of any content")]
    Host,
    #[error("the target is neither a path nor an address that begins with http://")]
    Target,
    #[error("the body has {found} bytes; at most {most} are taken")]
    LargeBody { found: u64, most: usize },
}

impl RequestError {
    /// Returns the HTTP status that goes with it.
    pub fn status(&self) -> u16 {
        match self {
            Self::LargeBody { .. } | Self::LargeHead => 413,
            Self::Encoding => 411,
            Self::Head(httparse::Error::Version) => 505,
            Self::Incomplete | Self::Head(_) | Self::Length | Self::Host | Self::Target => 400,
        }
    }
}

impl Request {
    /// Returns the path without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// Returns the path's last segment, decoded (RFC 3986 §2.1); `None` when it is no text.
    pub fn last_segment(&self) -> Option<String> {
        let segment = self.path().rsplit('/').next().unwrap_or_default();
        let mut pieces = segment.split('%');
        let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
        for piece in pieces {
            let (digits, rest) = piece.split_at_checked(2)?;
            let digits = Some(digits).filter(|two| two.bytes().all(|b| b.is_ascii_hexdigit()))?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            bytes.extend(rest.bytes());
        }
        String::from_utf8(bytes).ok()
    }

    /// Returns whether only the head of an answer is asked for.
    pub fn is_head(&self) -> bool {
        self.method == HEAD
    }

    /// Returns query parameter `name` as a number; `Ok(None)` when it is not there.
    pub fn number(&self, name: &str) -> Result<Option<u64>, std::num::ParseIntError> {
        let query = self.target.split_once('?').map_or("", |(_, query)| query);
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value.parse()).transpose()
    }
}

/// Parses a request; `None` while more bytes are needed.
pub fn parse(bytes: &[u8], max_body: usize) -> Result<Option<Request>, RequestError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let length = match head.parse(bytes).map_err(RequestError::Head)? {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial if bytes.len() > MAX_HEAD => return Err(RequestError::LargeHead),
        httparse::Status::Partial => return Ok(None),
    };
    if length > MAX_HEAD {
        return Err(RequestError::LargeHead);
    }
    let hosts =
        head.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host")).count();
    // RFC 9112 §3.2; HTTP/1.0 knew no such field.
    if hosts > 1 || hosts == 0 && head.version == Some(1) {
        return Err(RequestError::Host);
    }
    let target = origin_form(head.path.unwrap_or_default()).ok_or(RequestError::Target)?;
    let size = body_size(head.headers)?;
    let size = match usize::try_from(size) {
        Ok(size) if size <= max_body => size,
        Ok(_) | Err(_) => return Err(RequestError::LargeBody { found: size, most: max_body }),
    };
    let Some(body) = bytes.get(length..length + size) else { return Ok(None) };
    Ok(Some(Request {
        method: head.method.unwrap_or_default().to_owned(),
        target: target.to_owned(),
        body: body.to_vec(),
    }))
}

/// Returns path and query of a target, which proxies are sent with an authority before it (RFC 9112 §3.2.2).
fn origin_form(target: &str) -> Option<&str> {
    if target.starts_with('/') || target == "*" {
        return Some(target);
    }
    let scheme = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"))?;
    let rest = &target[scheme.len()..];
    rest.find('/').map(|at| &rest[at..])
}

/// Returns whether the head is whole, and its client waits to be told before it sends the body, as HTTP/1.0
/// knows nothing of (RFC 9110 §10.1.1).
pub(super) fn awaits_continue(bytes: &[u8]) -> bool {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    if !matches!(head.parse(bytes), Ok(httparse::Status::Complete(_))) {
        return false;
    }
    let mut headers = head.headers.iter();
    head.version == Some(1)
        && headers.any(|header| {
            header.name.eq_ignore_ascii_case("expect")
                && header.value.eq_ignore_ascii_case(b"100-continue")
        })
}

fn body_size(headers: &[httparse::Header<'_>]) -> Result<u64, RequestError> {
    let mut size = None;
    for header in headers {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(RequestError::Encoding);
        }
        if header.name.eq_ignore_ascii_case("content-length") {
            let text = std::str::from_utf8(header.value).map_err(|_| RequestError::Length)?;
            // RFC 9110 §8.6: digits alone, no sign.
            let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
            let number = digits.and_then(|text| text.parse().ok()).ok_or(RequestError::Length)?;
            if size.replace(number).is_some() {
                return Err(RequestError::Length);
            }
        }
    }
    Ok(size.unwrap_or(0))
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
    }

    #[test]
    fn bad_requests_are_told_apart() {
        let parse = |text: &str| {
            let text = text.replacen("\r\ncontent", "\r\nhost: vmm\r\ncontent", 1);
            let text = text.replacen("\r\ntransfer", "\r\nhost: vmm\r\ntransfer", 1);
            parse(text.as_bytes(), 4).expect_err("refused")
        };
        assert!(matches!(parse("\0\0\0"), RequestError::Head(_)));
        let large = "POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\n";
        assert_eq!(parse(large), RequestError::LargeBody { found: 5, most: 4 });
        assert_eq!(parse("POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"), RequestError::Length);
        assert_eq!(parse("POST / HTTP/1.1\r\ncontent-length: +2\r\n\r\n"), RequestError::Length);
        let chunked = "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n";
        assert_eq!(parse(chunked), RequestError::Encoding);
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(MAX_HEAD));
        assert_eq!(parse(&long), RequestError::LargeHead);
    }

    fn target(text: &str) -> Result<String, RequestError> {
        parse(text.as_bytes(), 4).map(|request| request.expect("whole").target)
    }

    /// RFC 9112 §3.2 and §3.2.2.
    #[test]
    fn a_request_has_one_host_and_may_name_it_twice_over() {
        assert_eq!(target("GET / HTTP/1.1\r\n\r\n"), Err(RequestError::Host));
        assert_eq!(target("GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n"), Err(RequestError::Host));
        assert_eq!(target("GET / HTTP/1.0\r\n\r\n"), Ok("/".to_owned()));
        assert_eq!(target("GET / HTTP/1.1\r\nhost:\r\n\r\n"), Ok("/".to_owned()));
        let absolute = |target: &str| format!("GET {target} HTTP/1.1\r\nhost: a\r\n\r\n");
        assert_eq!(target(&absolute("HTTP://a:1/v1/state?x=1")), Ok("/v1/state?x=1".to_owned()));
        for wrong in ["http://a", "https://a/v1/state", "v1/state", "a:443"] {
            assert_eq!(target(&absolute(wrong)), Err(RequestError::Target), "{wrong}");
        }
    }

    /// RFC 3986 §2.1.
    #[test]
    fn the_last_segment_is_decoded() {
        let last = |path: &str| {
            let target = format!("{path}?pull=%31");
            Request { method: "DELETE".to_owned(), target, body: Vec::new() }.last_segment()
        };
        assert_eq!(last("/v1/devices/0000:41:00.0"), Some("0000:41:00.0".to_owned()));
        assert_eq!(last("/v1/devices/0000%3A41%3a00.0"), Some("0000:41:00.0".to_owned()));
        assert_eq!(last("/v1/devices/a%20b%C3%A4"), Some("a bä".to_owned()));
        for wrong in ["%", "a%4", "%+1", "%zz", "%ff", "%ä1"] {
            assert_eq!(last(&format!("/v1/devices/{wrong}")), None, "{wrong}");
        }
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
