//! What names a document on another server: an `http` or `https` URL, and perhaps the digest that the
//! document must have. Pure.
//!
//! `https://boot.example/rack7.toml#sha256=<64 hex digits>`. In the URL, `{mac}` stands for the hardware
//! address of the first uplink (`02-00-00-00-00-01`) and `{serial}` for the server's serial number, so that
//! one line serves a rack. The bytes come from DHCP servers and kernel command lines: nobody vouches for
//! them.

use std::fmt;

use sha2::{Digest, Sha256};

/// Longest reference, in bytes.
const MAX_LENGTH: usize = 1024;
/// What begins the fragment.
const SHA256: &str = "sha256=";
/// What stands for the hardware address, and for the serial number.
const MAC: &str = "{mac}";
const SERIAL: &str = "{serial}";

/// Where a document is, and what it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    url: String,
    sha256: Option<[u8; 32]>,
}

/// Why bytes name no document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ReferenceFault {
    #[error("it has {0} bytes; at most {MAX_LENGTH} are read")]
    Length(usize),
    #[error("it is not printable ASCII without blanks")]
    Characters,
    #[error("{0:?} does not begin with https:// or http:// and a host")]
    Scheme(String),
    #[error("it holds a user's name or password, which are not sent")]
    User,
    #[error("{0:?}: only #sha256= and 64 hexadecimal digits may follow the URL")]
    Fragment(String),
}

/// What stands in for the marks in a URL.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Hardware address of the first uplink, as `02-00-00-00-00-01`.
    pub mac: String,
    /// The server's serial number; empty when its firmware has none.
    pub serial: String,
}

impl Reference {
    /// Parses what a server or a command line said. Zero bytes at the end are skipped: some servers end
    /// texts with them.
    pub fn parse(bytes: &[u8]) -> Result<Self, ReferenceFault> {
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let bytes = &bytes[..end];
        if bytes.len() > MAX_LENGTH {
            return Err(ReferenceFault::Length(bytes.len()));
        }
        if !bytes.iter().all(u8::is_ascii_graphic) {
            return Err(ReferenceFault::Characters);
        }
        let text = String::from_utf8_lossy(bytes);
        let (url, fragment) = match text.split_once('#') {
            Some((url, fragment)) => (url, Some(fragment)),
            None => (&*text, None),
        };
        let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
        if rest.is_none_or(|rest| rest.is_empty() || rest.starts_with(['/', ':', '?'])) {
            return Err(ReferenceFault::Scheme(text.into_owned()));
        }
        if url.contains('@') {
            return Err(ReferenceFault::User);
        }
        let sha256 = fragment.map(|fragment| {
            let digits = fragment.strip_prefix(SHA256);
            digits.and_then(digest).ok_or_else(|| ReferenceFault::Fragment(text.to_string()))
        });
        Ok(Self { url: url.to_owned(), sha256: sha256.transpose()? })
    }

    /// Whether this text is meant as a reference, right or wrong.
    pub fn is_meant(text: &str) -> bool {
        text.contains("://")
    }

    /// Returns the URL to ask. What stands in for a mark keeps letters, digits, `-`, `_` and `.` only.
    pub fn url(&self, facts: &Facts) -> String {
        let plain = |text: &str| -> String {
            let kept = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
            text.chars().filter(kept).collect()
        };
        self.url.replace(MAC, &plain(&facts.mac)).replace(SERIAL, &plain(&facts.serial))
    }

    /// Whether these bytes are what was named. Anything is when no digest was.
    pub fn is_named(&self, content: &[u8]) -> bool {
        self.sha256.is_none_or(|wanted| <[u8; 32]>::from(Sha256::digest(content)) == wanted)
    }

    /// Whether the reference itself says which bytes are meant.
    pub fn is_pinned(&self) -> bool {
        self.sha256.is_some()
    }

    /// How much the content can be trusted to be what whoever wrote the reference meant.
    pub fn trust(&self) -> &'static str {
        match (self.sha256, self.url.starts_with("https://")) {
            (Some(_), _) => "pinned by its digest",
            (None, true) => "by https",
            (None, false) => "NOT authenticated",
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, .. } = self;
        write!(f, "{url}, {}", self.trust())
    }
}

fn digest(digits: &str) -> Option<[u8; 32]> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let value = |digit: u8| char::from(digit).to_digit(16).and_then(|v| u8::try_from(v).ok());
    let bytes: Option<Vec<u8>> =
        pairs.iter().map(|[high, low]| Some(value(*high)? << 4 | value(*low)?)).collect();
    bytes.filter(|_| rest.is_empty())?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_pins_the_content() {
        let digits: String =
            Sha256::digest(b"x").iter().map(|byte| format!("{byte:02x}")).collect();
        let text = format!("http://192.0.2.1/n.toml#sha256={digits}");
        let named = Reference::parse(text.as_bytes()).expect("valid");
        assert!(named.is_named(b"x") && !named.is_named(b"y") && named.is_pinned());
        assert_eq!(named.to_string(), "http://192.0.2.1/n.toml, pinned by its digest");
        let free = Reference::parse(b"http://192.0.2.1/n.toml\0\0").expect("valid");
        assert!(free.is_named(b"y"));
        assert_eq!(free.trust(), "NOT authenticated");
        assert_eq!(Reference::parse(b"https://a").expect("valid").trust(), "by https");
    }

    #[test]
    fn marks_are_replaced_and_cannot_change_the_path() {
        let named = Reference::parse(b"https://a/{mac}/{serial}.toml").expect("valid");
        let facts = Facts { mac: "02-00-00-00-00-01".into(), serial: "A/../ 7#?".into() };
        assert_eq!(named.url(&facts), "https://a/02-00-00-00-00-01/A..7.toml");
    }

    #[test]
    fn everything_else_is_refused() {
        let long = format!("http://a/{}", "x".repeat(MAX_LENGTH));
        let short_digest = format!("http://a#sha256={}", "0".repeat(63));
        for text in [
            "",
            "http://",
            "http:///x",
            "https://:80",
            "ftp://a/x",
            "file:///etc/x",
            "a.example/x",
            "http://a b",
            "http://a/\n",
            "http://ä",
            "http://a#",
            "http://a#sha256=",
            "http://a#x",
            "https://me:secret@a/x",
            &short_digest,
            &long,
        ] {
            assert!(Reference::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(Reference::is_meant("ftp://a") && !Reference::is_meant("aGVsbG8="));
    }
}
