//! Answers: what they consist of and how they go over the wire.
//! Source: RFC 9112 (HTTP/1.1); RFC 9457 (problem documents).

use std::io::{self, Write};

use types::forward::Problem;

use super::http::HEAD;
use crate::dump::Dump;

/// An answer.
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Media type of the body.
    pub content_type: &'static str,
    /// Further header fields.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Body,
}

/// The body of an answer.
pub enum Body {
    /// Bytes that are there.
    Bytes(Vec<u8>),
    /// Guest memory, read while it is sent.
    Dump(Box<Dump>),
}

impl Answer {
    /// An answer of 200 with bytes.
    pub fn bytes(content_type: &'static str, bytes: Vec<u8>) -> Self {
        Self { status: 200, content_type, headers: Vec::new(), body: Body::Bytes(bytes) }
    }

    /// Writes the answer to a request with `method`.
    pub fn write_to(&self, method: &str, out: &mut impl Write) -> io::Result<()> {
        let length = match &self.body {
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::Dump(dump) => dump.length(),
        };
        let mut head = format!(
            "HTTP/1.1 {} {}\r\ncontent-type: {}\r\ncontent-length: {length}\r\nconnection: close\r\n",
            self.status,
            reason(self.status),
            self.content_type,
        );
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        out.write_all(head.as_bytes())?;
        match &self.body {
            _ if method == HEAD => Ok(()),
            Body::Bytes(bytes) => out.write_all(bytes),
            Body::Dump(dump) => dump.write_to(out),
        }
    }
}

/// The words of a status (RFC 9110 §15).
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        202 => "Accepted",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        505 => "HTTP Version Not Supported",
        _ => "Unknown",
    }
}

/// Answers with a document.
pub(super) fn json(status: u16, value: &impl serde::Serialize) -> Answer {
    let body = serde_json::to_vec(value).unwrap_or_default();
    Answer { status, ..Answer::bytes("application/json", body) }
}

/// Answers that there is nothing to say.
pub(super) fn done() -> Answer {
    json(202, &serde_json::json!({}))
}

/// Answers with a refusal: `title` is the same for all of its kind, `detail` says what was wrong
/// and what would be right.
pub(super) fn problem(status: u16, title: &str, detail: &str) -> Answer {
    let problem = Problem {
        kind: "about:blank".to_owned(),
        title: title.to_owned(),
        status,
        detail: detail.to_owned(),
    };
    Answer { content_type: Problem::MEDIA_TYPE, ..json(status, &problem) }
}
