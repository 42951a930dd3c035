//! Answers: what they consist of and how they go over the wire.
//! Source: RFC 9112 (HTTP/1.1); RFC 9457 (problem documents).

use std::{
    io::{self, Write},
    time::SystemTime,
};

use types::forward::Problem;

use super::http::HEAD;
use crate::{devices::cmos::Moment, dump::Dump};

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
            "HTTP/1.1 {} {}\r\ndate: {}\r\ncontent-type: {}\r\ncontent-length: {length}\r\n\
             connection: close\r\n",
            self.status,
            reason(self.status),
            date(SystemTime::now()),
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
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        505 => "HTTP Version Not Supported",
        _ => "Unknown",
    }
}

/// Writes a time as IMF-fixdate (RFC 9110 §5.6.7), for the date of an answer (§6.6.1).
fn date(now: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let at = Moment::of(i64::try_from(seconds).unwrap_or(i64::MAX));
    let name = |names: &[&'static str], number: i64| {
        usize::try_from(number - 1).ok().and_then(|at| names.get(at).copied()).unwrap_or_default()
    };
    format!(
        "{}, {:02} {} {:04} {:02}:{:02}:{:02} GMT",
        name(&DAYS, at.week_day),
        at.day,
        name(&MONTHS, at.month),
        at.year,
        at.hour,
        at.minute,
        at.second,
    )
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn after(seconds: u64) -> String {
        date(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
    }

    /// The first of these is the example of RFC 9110 §5.6.7.
    #[test]
    fn dates_are_written_as_http_has_them() {
        assert_eq!(after(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(after(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(after(1_709_164_800), "Thu, 29 Feb 2024 00:00:00 GMT");
        assert_eq!(after(1_735_689_599), "Tue, 31 Dec 2024 23:59:59 GMT");
    }

    #[test]
    fn answers_are_dated_and_heads_come_alone() {
        let said = |method| {
            let mut said = Vec::new();
            problem(431, "large", "too large").write_to(method, &mut said).expect("written");
            String::from_utf8(said).expect("text")
        };
        let (head, body) = (said(HEAD), said("GET"));
        let line = "HTTP/1.1 431 Request Header Fields Too Large\r\n";
        assert!(head.strip_prefix(line).is_some_and(|head| head.starts_with("date: ")), "{head}");
        assert!(head.contains(" GMT\r\ncontent-type: ") && head.ends_with("\r\n\r\n"), "{head}");
        let (_, problem) = body.split_once("\r\n\r\n").expect("a body");
        let problem: Problem = serde_json::from_str(problem).expect("a problem");
        assert_eq!((problem.status, problem.detail.as_str()), (431, "too large"));
    }
}
