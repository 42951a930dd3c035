//! Records of NTS key establishment. Pure.
//! Source: RFC 8915 §4.
//!
//! | Offset | Size | Field                                  |
//! |--------|------|----------------------------------------|
//! | 0      | 2    | critical (1 bit), type (15 bits)       |
//! | 2      | 2    | length of the body                     |
//! | 4      |      | body                                   |
//!
//! | Type | Body                             |
//! |------|----------------------------------|
//! | 0    | end of message                   |
//! | 1    | next protocols, 2 bytes each     |
//! | 2    | error, 2 bytes                   |
//! | 3    | warning, 2 bytes                 |
//! | 4    | algorithms, 2 bytes each         |
//! | 5    | cookie                           |
//! | 6    | time server, ASCII               |
//! | 7    | its port, 2 bytes                |

use std::collections::VecDeque;

use super::Session;
use crate::time::sntp;

/// Longest answer that is read, in bytes: eight cookies and some words.
pub const MAX_ANSWER: usize = 16 << 10;
/// NTPv4.
const PROTOCOL: [u8; 2] = [0, 0];
/// AEAD_AES_SIV_CMAC_256.
pub(super) const ALGORITHM: [u8; 2] = [0, 15];
const CRITICAL: u16 = 0x8000;
/// Longest name of a host.
const MAX_NAME: usize = 253;

/// Keys of both directions, which TLS exports (RFC 8915 §5.1).
#[derive(Clone, Copy)]
pub struct Keys {
    /// For questions.
    pub to_server: [u8; 32],
    /// For answers.
    pub to_client: [u8; 32],
}

/// Why an answer is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Refusal {
    #[error("the answer is cut off")]
    Short,
    #[error("the server reports error {code}")]
    Error { code: u16 },
    #[error("the server gives a warning, {code}, which none is known of")]
    Warning { code: u16 },
    #[error("the server insists on a record of type {kind}, which is not known")]
    Critical { kind: u16 },
    #[error("the server does not speak NTPv4 with AES-SIV-CMAC-256")]
    Protocol,
    #[error("the server gives no cookie")]
    NoCookie,
}

/// Returns the request.
pub fn request() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, body) in [(1, &PROTOCOL[..]), (4, &ALGORITHM), (0, &[])] {
        let length = u16::try_from(body.len()).unwrap_or(0);
        bytes.extend((CRITICAL | kind).to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(body);
    }
    bytes
}

/// Returns whether the answer is there in full, so that reading can stop.
pub fn is_whole(mut bytes: &[u8]) -> bool {
    while let Some((kind, _, rest)) = split(bytes) {
        if kind & !CRITICAL == 0 {
            return true;
        }
        bytes = rest;
    }
    false
}

/// Reads the answer.
pub fn parse(mut bytes: &[u8], keys: Keys) -> Result<Session, Refusal> {
    let mut session = Session {
        to_server: keys.to_server,
        to_client: keys.to_client,
        cookies: VecDeque::new(),
        server: None,
        port: sntp::PORT,
        is_doubted: false,
    };
    let (mut protocol, mut algorithm) = (false, false);
    loop {
        let (kind, body, rest) = split(bytes).ok_or(Refusal::Short)?;
        bytes = rest;
        let code = body.first_chunk().map_or(0, |code| u16::from_be_bytes(*code));
        match kind & !CRITICAL {
            0 => break,
            1 => protocol = body == PROTOCOL,
            2 => return Err(Refusal::Error { code }),
            3 => return Err(Refusal::Warning { code }),
            4 => algorithm = body == ALGORITHM,
            5 => session.keep(body),
            6 => session.server = name(body),
            7 => session.port = code,
            kind_alone if kind & CRITICAL != 0 => {
                return Err(Refusal::Critical { kind: kind_alone });
            }
            _ => {}
        }
    }
    match (protocol && algorithm, session.is_usable()) {
        (false, _) => Err(Refusal::Protocol),
        (true, false) => Err(Refusal::NoCookie),
        (true, true) => Ok(session),
    }
}

/// The name of a host or an address; nothing else may come to a resolver.
fn name(body: &[u8]) -> Option<String> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b".-:".contains(byte);
    let fits = (1..=MAX_NAME).contains(&body.len()) && body.iter().all(plain);
    fits.then(|| String::from_utf8_lossy(body).into_owned())
}

fn split(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let ([a, b, c, d], rest) = bytes.split_first_chunk()?;
    let (body, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes([*c, *d])))?;
    Some((u16::from_be_bytes([*a, *b]), body, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: Keys = Keys { to_server: [1; 32], to_client: [2; 32] };

    fn record(kind: u16, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(body.len()).expect("short");
        [&kind.to_be_bytes()[..], &length.to_be_bytes(), body].concat()
    }

    fn answer(more: &[Vec<u8>]) -> Vec<u8> {
        let begin = [record(0x8001, &PROTOCOL), record(4, &ALGORITHM), record(5, &[7; 100])];
        [begin.concat(), more.concat(), record(0x8000, &[])].concat()
    }

    #[test]
    fn a_request_offers_one_protocol_and_one_algorithm() {
        assert_eq!(request(), [0x80, 1, 0, 2, 0, 0, 0x80, 4, 0, 2, 0, 15, 0x80, 0, 0, 0]);
    }

    #[test]
    fn cookies_server_and_port_are_taken() {
        let more = [record(5, &[8; 100]), record(6, b"time.example"), record(7, &[1, 2])];
        let session = parse(&answer(&more), KEYS).expect("an answer");
        assert_eq!(session.cookies, [vec![7; 100], vec![8; 100]]);
        assert_eq!((session.server.as_deref(), session.port), (Some("time.example"), 0x102));
        assert!(is_whole(&answer(&more)));
    }

    #[test]
    fn cookies_without_end_are_not_kept() {
        let many: Vec<_> = (0..20).map(|_| record(5, &[9; 64])).collect();
        assert_eq!(parse(&answer(&many), KEYS).expect("an answer").cookies.len(), MAX_COOKIES_KEPT);
        let name = parse(&answer(&[record(6, b"a b")]), KEYS).expect("an answer").server;
        assert_eq!(name, None);
    }

    const MAX_COOKIES_KEPT: usize = super::super::MAX_COOKIES;

    #[test]
    fn each_flaw_is_refused() {
        let check = |bytes: &[u8], refusal| assert_eq!(parse(bytes, KEYS), Err(refusal));
        let whole = answer(&[]);
        for length in 0..whole.len() {
            check(&whole[..length], Refusal::Short);
            assert!(!is_whole(&whole[..length]));
        }
        check(&answer(&[record(0x8002, &[0, 1])]), Refusal::Error { code: 1 });
        check(&answer(&[record(0x8003, &[0, 2])]), Refusal::Warning { code: 2 });
        check(&answer(&[record(0x8009, &[])]), Refusal::Critical { kind: 9 });
        check(&answer(&[record(4, &[0, 16])]), Refusal::Protocol);
        check(&record(0x8000, &[]), Refusal::Protocol);
        let none = [record(1, &PROTOCOL), record(4, &ALGORITHM), record(0, &[])].concat();
        check(&none, Refusal::NoCookie);
        assert!(parse(&answer(&[record(9, &[])]), KEYS).is_ok(), "it need not be known");
    }
}
