//! NTS in NTP packets. Pure.
//! Source: RFC 8915 §5, RFC 7822 (extension fields).
//!
//! | Offset | Size | Field of an extension                       |
//! |--------|------|---------------------------------------------|
//! | 0      | 2    | type                                        |
//! | 2      | 2    | length, these four bytes included, whole in fours |
//! | 4      |      | body                                        |
//!
//! | Type   | Body                                                         |
//! |--------|--------------------------------------------------------------|
//! | 0x0104 | unique identifier                                            |
//! | 0x0204 | cookie                                                       |
//! | 0x0304 | room for a cookie in the answer                              |
//! | 0x0404 | lengths of nonce and ciphertext (2 each), nonce, ciphertext  |

use aes_siv::{KeyInit, siv::Aes128Siv};

use super::{MAX_COOKIES, Session};
use crate::time::sntp::{self, PACKET};

const UNIQUE: u16 = 0x0104;
const COOKIE: u16 = 0x0204;
const PLACEHOLDER: u16 = 0x0304;
const AUTHENTICATOR: u16 = 0x0404;
/// Length of a unique identifier and of a nonce.
const UNIQUE_LENGTH: usize = 32;
const NONCE_LENGTH: usize = 16;
/// Longest answer that is read, in bytes.
pub const MAX_ANSWER: usize = 4096;
/// "NTSN", the code of a server that cannot open a cookie.
const NO_COOKIE: &[u8] = b"NTSN";

/// What must be random in a question.
#[derive(Debug, Clone, Copy)]
pub struct Randomness {
    /// Ties question and answer together; also the transmit timestamp.
    pub nonce: u64,
    /// Likewise, authenticated.
    pub unique: [u8; UNIQUE_LENGTH],
    /// For the cipher.
    pub cipher: [u8; NONCE_LENGTH],
}

/// Why an answer is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Forged {
    #[error("the answer's extensions are malformed")]
    Malformed,
    #[error("the answer is to another question")]
    Other,
    #[error("the answer is not signed with the agreed key")]
    Unsigned,
    #[error("the server no longer knows its cookies")]
    Forgotten,
}

/// Returns the next question; `None` when there is no cookie left.
pub fn request(session: &mut Session, random: &Randomness) -> Option<Vec<u8>> {
    let cookie = session.cookies.pop_front()?;
    let mut packet = sntp::request(random.nonce).to_vec();
    push(&mut packet, UNIQUE, &random.unique);
    push(&mut packet, COOKIE, &cookie);
    // One cookie comes in any case; one more for each that was lost.
    for _ in session.cookies.len() + 1..MAX_COOKIES {
        push(&mut packet, PLACEHOLDER, &vec![0; cookie.len()]);
    }
    let mut cipher = Aes128Siv::new(&session.to_server.into());
    let sealed = cipher.encrypt([&packet[..], &random.cipher[..]], &[]).ok()?;
    let lengths = [0, 16, 0, 16];
    push(&mut packet, AUTHENTICATOR, &[&lengths[..], &random.cipher, &sealed].concat());
    Some(packet)
}

/// Checks that an answer comes from the server and belongs to the question, and keeps its cookies.
/// What the packet's first 48 bytes say is [`sntp::parse`]'s.
pub fn open(session: &mut Session, random: &Randomness, answer: &[u8]) -> Result<(), Forged> {
    let mut at = PACKET;
    let (mut is_ours, mut cookies) = (false, None);
    while cookies.is_none() && at < answer.len() {
        let (kind, body, next) = field(answer, at).ok_or(Forged::Malformed)?;
        match kind {
            UNIQUE => is_ours = body == random.unique,
            AUTHENTICATOR => cookies = Some(unseal(session, &answer[..at], body)?),
            // What comes before the seal is sealed, but means nothing here; what comes after is
            // nobody's word.
            _ => {}
        }
        at = next;
    }
    let is_kiss = answer.get(1) == Some(&0) && answer.get(12..16) == Some(NO_COOKIE);
    if !is_ours {
        return Err(Forged::Other);
    }
    match cookies {
        None if is_kiss => Err(Forged::Forgotten),
        None => Err(Forged::Unsigned),
        Some(plain) => {
            let mut at = 0;
            while let Some((kind, body, next)) = field(&plain, at) {
                if kind == COOKIE {
                    session.keep(body);
                }
                at = next;
            }
            Ok(())
        }
    }
}

fn unseal(session: &Session, sealed: &[u8], body: &[u8]) -> Result<Vec<u8>, Forged> {
    let ([a, b, c, d], rest) = body.split_first_chunk().ok_or(Forged::Malformed)?;
    let nonce = usize::from(u16::from_be_bytes([*a, *b]));
    let length = usize::from(u16::from_be_bytes([*c, *d]));
    let begin = nonce.next_multiple_of(4);
    let (Some(nonce), Some(text)) = (rest.get(..nonce), rest.get(begin..begin + length)) else {
        return Err(Forged::Malformed);
    };
    let mut cipher = Aes128Siv::new(&session.to_client.into());
    cipher.decrypt([sealed, nonce], text).map_err(|_| Forged::Unsigned)
}

/// Returns type and body of the extension at an offset, and where the next one begins.
fn field(bytes: &[u8], at: usize) -> Option<(u16, &[u8], usize)> {
    let [a, b, c, d] = *bytes.get(at..)?.first_chunk()?;
    let length = usize::from(u16::from_be_bytes([c, d]));
    if length < 4 || !length.is_multiple_of(4) {
        return None;
    }
    Some((u16::from_be_bytes([a, b]), bytes.get(at + 4..at + length)?, at + length))
}

fn push(packet: &mut Vec<u8>, kind: u16, body: &[u8]) {
    let padded = body.len().next_multiple_of(4);
    // Cookies are short, and everything else shorter.
    let length = u16::try_from(padded + 4).unwrap_or(u16::MAX);
    packet.extend(kind.to_be_bytes());
    packet.extend(length.to_be_bytes());
    packet.extend(body);
    packet.resize(packet.len() + padded - body.len(), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANDOM: Randomness = Randomness { nonce: 7, unique: [5; 32], cipher: [6; 16] };

    fn session(cookies: usize) -> Session {
        Session {
            to_server: [1; 32],
            to_client: [2; 32],
            cookies: (0..cookies).map(|_| vec![3; 100]).collect(),
            server: None,
            port: 123,
            is_doubted: false,
        }
    }

    /// What a server answers: cookies sealed with the key of the other direction.
    fn answer(key: [u8; 32], unique: [u8; 32]) -> Vec<u8> {
        let mut packet = vec![0x24, 2];
        packet.resize(PACKET, 0);
        push(&mut packet, UNIQUE, &unique);
        let mut plain = Vec::new();
        push(&mut plain, COOKIE, &[4; 100]);
        push(&mut plain, COOKIE, &[5; 100]);
        let sealed = Aes128Siv::new(&key.into()).encrypt([&packet[..], &[9; 16]], &plain);
        let sealed = sealed.expect("sealed");
        let length = u16::try_from(sealed.len()).expect("short").to_be_bytes();
        push(&mut packet, AUTHENTICATOR, &[&[0, 16], &length[..], &[9; 16], &sealed].concat());
        packet
    }

    #[test]
    fn a_question_spends_a_cookie_and_asks_for_those_that_are_missing() {
        let mut session = session(8);
        let full = request(&mut session, &RANDOM).expect("a question").len();
        let more = request(&mut session, &RANDOM).expect("a question").len();
        assert_eq!((session.cookies.len(), more - full), (6, 104));
        session.cookies.clear();
        assert_eq!(request(&mut session, &RANDOM), None);
    }

    #[test]
    fn an_answer_brings_cookies() {
        let mut session = session(1);
        assert_eq!(open(&mut session, &RANDOM, &answer([2; 32], RANDOM.unique)), Ok(()));
        assert_eq!(session.cookies.len(), 3);
    }

    #[test]
    fn no_altered_byte_is_believed() {
        let whole = answer([2; 32], RANDOM.unique);
        for position in 0..whole.len() {
            let mut altered = whole.clone();
            altered[position] ^= 1;
            let mut session = session(1);
            assert!(open(&mut session, &RANDOM, &altered).is_err(), "byte {position}");
            assert_eq!(session.cookies.len(), 1);
        }
    }

    #[test]
    fn other_keys_other_questions_and_cut_answers_are_refused() {
        let check = |bytes: &[u8], forged| {
            assert_eq!(open(&mut session(1), &RANDOM, bytes), Err(forged));
        };
        check(&answer([1; 32], RANDOM.unique), Forged::Unsigned);
        check(&answer([2; 32], [0; 32]), Forged::Other);
        let whole = answer([2; 32], RANDOM.unique);
        check(&whole[..PACKET], Forged::Other);
        check(&whole[..PACKET + 36], Forged::Unsigned);
        check(&whole[..whole.len() - 4], Forged::Malformed);
        let mut kiss = whole[..PACKET + 36].to_vec();
        kiss[1] = 0;
        kiss[12..16].copy_from_slice(NO_COOKIE);
        check(&kiss, Forged::Forgotten);
    }
}
