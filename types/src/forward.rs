//! What travels between a gateway and a node through the overlay.
//!
//! A renter signs an HTTP request (RFC 9421). The gateway does not translate it: it forwards the
//! signed request as it came, and the node checks the renter's signature again, so a gateway can
//! neither invent nor alter an operation.

use serde::{Deserialize, Serialize};

use crate::ids::ContentId;

/// Largest body of a forwarded request or response, in bytes. Content goes as blobs.
pub const MAX_BODY: usize = 1 << 20;

/// An HTTP request as the gateway received it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForwardedRequest {
    /// Method, upper case.
    pub method: String,
    /// Path and query, as `/v1/machines?after=…`.
    pub target: String,
    /// The header fields that the signature covers or carries, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body, at most [`MAX_BODY`].
    #[serde(with = "crate::base64_bytes")]
    pub body: Vec<u8>,
}

impl ForwardedRequest {
    /// Returns the only value of header `name` (lower case); `None` when absent or repeated.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(key, _)| key == name);
        match (values.next(), values.next()) {
            (Some((_, value)), None) => Some(value),
            _ => None,
        }
    }

    /// Returns the target's path, without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }
}

/// Writes out what is percent-encoded in a path without need (RFC 3986 §6.2.2.2): what can stand in a segment as it
/// is (§3.3, "pchar"). `None` where a percent sign has no two hexadecimal digits behind it.
pub fn plain(path: &str) -> Option<String> {
    let mut pieces = path.split('%');
    let mut plain = pieces.next()?.to_owned();
    for piece in pieces {
        let (digits, rest) = piece.split_at_checked(2)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let byte = u8::from_str_radix(digits, 16).ok()?;
        if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@".contains(&byte) {
            plain.push(char::from(byte));
        } else {
            plain.extend(["%", digits]);
        }
        plain.push_str(rest);
    }
    Some(plain)
}

/// A node's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForwardedResponse {
    /// HTTP status.
    pub status: u16,
    /// Media type of the body.
    pub content_type: String,
    /// Further header fields, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body, at most [`MAX_BODY`].
    #[serde(with = "crate::base64_bytes")]
    pub body: Vec<u8>,
}

/// First message on a tunnel stream: what the opener wants of the other end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "want", deny_unknown_fields)]
pub enum StreamHeader {
    /// Gateway to node: a long-lived request. `GET …/console?follow=1` is answered by console
    /// bytes, `GET …/terminal` too, and what the opener sends is typed at it; `GET …/tunnel/PORT` by a byte stream to that TCP port of the guest.
    Request(ForwardedRequest),
    /// Node to gateway: the content with this digest, as raw bytes after the answer.
    Content {
        /// What is wanted.
        content: ContentId,
    },
    /// Node to node: a file of the repository of releases, as raw bytes after the answer. Whoever asks
    /// verifies it as if a mirror had sent it.
    Release {
        /// Its path in the repository, as `metadata/timestamp.json`.
        path: String,
        /// The first byte that is wanted.
        from: u64,
        /// The one after the last; to the end without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<u64>,
    },
}

/// First message back on a tunnel stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer", deny_unknown_fields)]
pub enum StreamAnswer {
    /// The stream's bytes follow; `length` says how many when that is known.
    Open {
        /// Bytes to come.
        length: Option<u64>,
    },
    /// Nothing follows.
    Refused(Problem),
}

/// An error as RFC 9457 ("Problem Details for HTTP APIs") writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// A URI reference that names the kind of problem, as `/problems/lease-expired`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What went wrong, the same sentence for all problems of this kind.
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// What was wrong here, where, and what would be right.
    pub detail: String,
}

impl Problem {
    /// Media type of a problem document.
    pub const MEDIA_TYPE: &str = "application/problem+json";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_need_not_be_percent_encoded_is_written_out() {
        // What parts the path, or ends it, stays what it is: a slash, a question mark, a percent sign.
        assert_eq!(plain("/%2Fa%3f%2561").as_deref(), Some("/%2Fa%3f%2561"));
        assert_eq!(plain("/%41%7e%c3%BC/0000%3A").as_deref(), Some("/A~%c3%BC/0000:"));
        for wrong in ["%", "/%6", "%+f", "%ü", "%g0"] {
            assert_eq!(plain(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn requests_survive_json() {
        let request = ForwardedRequest {
            method: "POST".into(),
            target: "/v1/machines?x=1".into(),
            headers: vec![
                ("a".into(), "1".into()),
                ("b".into(), "2".into()),
                ("b".into(), "3".into()),
            ],
            body: vec![0, 255, 7],
        };
        let json = serde_json::to_string(&request).expect("plain data");
        assert_eq!(serde_json::from_str::<ForwardedRequest>(&json).expect("round trip"), request);
        assert_eq!((request.header("a"), request.header("b")), (Some("1"), None));
        assert_eq!(request.path(), "/v1/machines");
    }
}
