//! Parsing of requests.
//! Source: RFC 9112 (HTTP/1.1); `httparse` reads the head.

/// Largest head of a request, in bytes.
pub const MAX_HEAD: usize = 8192;
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
    #[error("the body has {found} bytes; at most {most} are taken")]
    LargeBody { found: u64, most: usize },
}

impl RequestError {
    /// Returns the HTTP status that goes with it.
    pub fn status(&self) -> u16 {
        match self {
            Self::LargeBody { .. } | Self::LargeHead => 413,
            Self::Incomplete | Self::Head(_) | Self::Length | Self::Encoding => 400,
        }
    }
}

impl Request {
    /// Returns the path without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
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
    let size = body_size(head.headers)?;
    let size = match usize::try_from(size) {
        Ok(size) if size <= max_body => size,
        Ok(_) | Err(_) => return Err(RequestError::LargeBody { found: size, most: max_body }),
    };
    let Some(body) = bytes.get(length..length + size) else { return Ok(None) };
    Ok(Some(Request {
        method: head.method.unwrap_or_default().to_owned(),
        target: head.path.unwrap_or_default().to_owned(),
        body: body.to_vec(),
    }))
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
        let whole = b"POST /v1/console?from=3&x HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi";
        assert_eq!(parse(&whole[..40], 10), Ok(None));
        assert_eq!(parse(&whole[..whole.len() - 1], 10), Ok(None));
        let request = parse(whole, 10).expect("valid").expect("whole");
        assert_eq!((request.path(), request.body.as_slice()), ("/v1/console", &b"hi"[..]));
        assert_eq!(request.number("from"), Ok(Some(3)));
        assert_eq!(request.number("to"), Ok(None));
    }

    #[test]
    fn bad_requests_are_told_apart() {
        let parse = |text: &str| parse(text.as_bytes(), 4).expect_err("refused");
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
}
