//! Claiming a node that has no configuration: whoever reads the code on its console gives it one over
//! the network. Pure; what travels is brought by others, in three messages over one connection.
//!
//! | # | From     | Message                                                                        |
//! |---|----------|--------------------------------------------------------------------------------|
//! | 1 | node     | [`Hello`] as JSON: its name and a key made for this connection                  |
//! | 2 | claimant | encapsulated key, then sealed: a key for the answer, and the configuration      |
//! | 3 | node     | encapsulated key, then sealed: [`Verdict`] as JSON; nothing when 2 did not open |
//!
//! Messages 2 and 3 are sealed by HPKE (RFC 9180) in the mode with a pre-shared key, which is made of
//! the code: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305. So whoever does not know the
//! code learns nothing, also later, when the code is known and the keys of the connection are gone; and
//! whoever stands in between can neither read nor alter. Who records a connection could try codes at
//! leisure: that is why a code has [`CODE_BITS`] random bits, and is no number of six digits. Each start
//! of a node makes another one, and it ends with the first claim.

use std::fmt;

use hpke::{
    Deserializable, OpModeR, OpModeS, PskBundle, Serializable,
    aead::ChaCha20Poly1305,
    kdf::HkdfSha256,
    kem::{Kem, X25519HkdfSha256},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use types::ids::NodeId;
use zeroize::Zeroizing;

/// Letters of a code: digits and letters that nobody takes for another (Crockford's base 32).
const LETTERS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Letters in a code, and in a group of it.
const LENGTH: usize = 20;
const GROUP: usize = 5;
/// Random bits of a code.
pub const CODE_BITS: usize = LENGTH * 5;
/// Longest of the messages, in bytes: a configuration, keys, and some room.
pub const MAX_MESSAGE: usize = types::config::MAX_CONFIG + 1024;

const KEY: usize = 32;
const VERSION: u32 = 1;
const CLAIM: &[u8] = b"holdfast/1 claim\0";
const ANSWER: &[u8] = b"holdfast/1 claimed\0";

/// Why a claim comes to nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ClaimError {
    #[error("a claim code has {LENGTH} letters and digits, not {found}")]
    CodeLength { found: usize },
    #[error("character {position} of the claim code, {found:?}, is in none")]
    CodeLetter { position: usize, found: char },
    #[error("what answers is no node of this release that waits to be claimed: {reason}")]
    PeerHello { reason: String },
    #[error("the message was sealed with another code, or altered on its way")]
    PeerAltered,
    #[error(
        "the node did not take the code; its console shows the one that counts, and another one \
         after each start"
    )]
    PeerRefused,
    #[error("the node's answer cannot be understood: {reason}")]
    PeerAnswer { reason: String },
}

/// What a console shows and a person types.
#[derive(Clone, PartialEq, Eq)]
pub struct Code(Zeroizing<String>);

impl Code {
    /// Makes a code of random bytes.
    pub fn from_random(random: &[u8; LENGTH]) -> Self {
        let letters = random.iter().map(|byte| char::from(LETTERS[usize::from(byte & 31)]));
        Self(Zeroizing::new(letters.collect()))
    }

    /// Reads what somebody typed: case, blanks and hyphens do not matter, nor do letters that look like
    /// digits.
    pub fn parse(text: &str) -> Result<Self, ClaimError> {
        let typed = text.chars().filter(|c| !c.is_whitespace() && *c != '-');
        let read = typed.enumerate().map(|(at, found)| {
            let plain = match found.to_ascii_lowercase() {
                'o' => '0',
                'i' | 'l' => '1',
                plain => plain,
            };
            let known = u8::try_from(plain).is_ok_and(|byte| LETTERS.contains(&byte));
            known.then_some(plain).ok_or(ClaimError::CodeLetter { position: at + 1, found })
        });
        let code: Zeroizing<String> = Zeroizing::new(read.collect::<Result<_, _>>()?);
        if code.len() != LENGTH {
            return Err(ClaimError::CodeLength { found: code.len() });
        }
        Ok(Self(code))
    }

    /// Returns the code as it is shown: in groups.
    pub fn shown(&self) -> String {
        let groups: Vec<_> = (0..LENGTH).step_by(GROUP).map(|at| &self.0[at..at + GROUP]).collect();
        groups.join("-")
    }

    fn secret(&self) -> Zeroizing<[u8; 32]> {
        let digest = Sha256::new().chain_update(CLAIM).chain_update(self.0.as_bytes());
        Zeroizing::new(digest.finalize().into())
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Code(…)")
    }
}

/// What a node says first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of what follows.
    pub version: u32,
    /// The node.
    pub node: NodeId,
    /// Its key for this connection, as hexadecimal digits.
    pub key: String,
}

/// What a node says of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Why it does not take it; what happens now otherwise.
    pub detail: String,
    /// Whether it takes it.
    pub accepted: bool,
}

/// The node's end of one connection.
pub struct Claimable {
    secret: <X25519HkdfSha256 as Kem>::PrivateKey,
    hello: Vec<u8>,
}

/// What a claimant gets sealed back.
pub struct Reply {
    key: <X25519HkdfSha256 as Kem>::PublicKey,
    code: Code,
    info: Vec<u8>,
}

/// The claimant's end, after its message.
pub struct Waiting {
    secret: <X25519HkdfSha256 as Kem>::PrivateKey,
    code: Code,
    info: Vec<u8>,
    /// The node, as it named itself.
    pub node: NodeId,
}

impl Claimable {
    /// Starts a connection; `random` makes its key.
    pub fn new(node: NodeId, random: &[u8; 32]) -> Self {
        let (secret, public) = X25519HkdfSha256::derive_keypair(random);
        let key = types::hex::encode(&public.to_bytes());
        let hello = serde_json::to_vec(&Hello { version: VERSION, node, key });
        Self { secret, hello: hello.expect("numbers and digits are JSON") }
    }

    /// Returns the first message.
    pub fn hello(&self) -> &[u8] {
        &self.hello
    }

    /// Opens what a claimant sent: the configuration, and how to answer.
    pub fn open(&self, code: &Code, message: &[u8]) -> Result<(Vec<u8>, Reply), ClaimError> {
        let inside = open(&self.secret, code, &bound(CLAIM, &self.hello), message)?;
        let (key, document) = inside.split_at_checked(KEY).ok_or(ClaimError::PeerAltered)?;
        let key = <X25519HkdfSha256 as Kem>::PublicKey::from_bytes(key)
            .map_err(|_| ClaimError::PeerAltered)?;
        let reply = Reply { key, code: code.clone(), info: bound(ANSWER, message) };
        Ok((document.to_vec(), reply))
    }
}

impl Reply {
    /// Seals the verdict.
    pub fn seal(&self, verdict: &Verdict) -> Result<Vec<u8>, ClaimError> {
        let json = serde_json::to_vec(verdict)
            .map_err(|error| ClaimError::PeerAnswer { reason: error.to_string() })?;
        seal(&self.key, &self.code, &self.info, &json)
    }
}

/// Answers a node's first message with a configuration. `random` makes the key for the answer.
pub fn claim(
    hello: &[u8],
    code: &Code,
    document: &[u8],
    random: &[u8; 32],
) -> Result<(Vec<u8>, Waiting), ClaimError> {
    let strange = |reason: String| ClaimError::PeerHello { reason };
    let read: Hello = serde_json::from_slice(hello).map_err(|error| strange(error.to_string()))?;
    if read.version != VERSION {
        return Err(strange(format!("it speaks version {}, not {VERSION}", read.version)));
    }
    let key = types::hex::decode::<KEY>(&read.key).map_err(|error| strange(error.to_string()))?;
    let key = <X25519HkdfSha256 as Kem>::PublicKey::from_bytes(&key)
        .map_err(|error| strange(error.to_string()))?;
    let (secret, own) = X25519HkdfSha256::derive_keypair(random);
    let inside = Zeroizing::new([&own.to_bytes()[..], document].concat());
    let message = seal(&key, code, &bound(CLAIM, hello), &inside)?;
    let info = bound(ANSWER, &message);
    Ok((message, Waiting { secret, code: code.clone(), info, node: read.node }))
}

impl Waiting {
    /// Opens the node's answer. An empty one says that the code was wrong.
    pub fn open(&self, message: &[u8]) -> Result<Verdict, ClaimError> {
        if message.is_empty() {
            return Err(ClaimError::PeerRefused);
        }
        let json = open(&self.secret, &self.code, &self.info, message)?;
        serde_json::from_slice(&json)
            .map_err(|error| ClaimError::PeerAnswer { reason: error.to_string() })
    }
}

/// Binds a message to the one before it.
fn bound(purpose: &[u8], before: &[u8]) -> Vec<u8> {
    [purpose, &Sha256::digest(before)].concat()
}

fn seal(
    to: &<X25519HkdfSha256 as Kem>::PublicKey,
    code: &Code,
    info: &[u8],
    message: &[u8],
) -> Result<Vec<u8>, ClaimError> {
    let secret = code.secret();
    let broken = |_| ClaimError::PeerAltered;
    let shared = PskBundle::new(&*secret, CLAIM).map_err(broken)?;
    let (key, mut context) = hpke::setup_sender::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
        &OpModeS::Psk(shared),
        to,
        info,
    )
    .map_err(broken)?;
    let sealed = context.seal(message, b"").map_err(broken)?;
    Ok([&key.to_bytes()[..], &sealed].concat())
}

fn open(
    own: &<X25519HkdfSha256 as Kem>::PrivateKey,
    code: &Code,
    info: &[u8],
    message: &[u8],
) -> Result<Vec<u8>, ClaimError> {
    let secret = code.secret();
    let altered = |_| ClaimError::PeerAltered;
    let (key, sealed) = message.split_at_checked(KEY).ok_or(ClaimError::PeerAltered)?;
    let key = <X25519HkdfSha256 as Kem>::EncappedKey::from_bytes(key).map_err(altered)?;
    let shared = PskBundle::new(&*secret, CLAIM).map_err(altered)?;
    let mut context = hpke::setup_receiver::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
        &OpModeR::Psk(shared),
        own,
        &key,
        info,
    )
    .map_err(altered)?;
    context.open(sealed, b"").map_err(altered)
}

/// Reads `bytes` as every message, by either end; for the fuzz target and its corpus. Returns whether a
/// claimant would answer it.
pub fn everything(bytes: &[u8]) -> bool {
    let code = Code::from_random(&[7; LENGTH]);
    let node = Claimable::new(NodeId::from_bytes([1; 32]), &[2; 32]);
    let opened = node.open(&code, bytes);
    assert!(opened.is_err(), "nobody seals without the code");
    let _ = str::from_utf8(bytes).map(Code::parse);
    let Ok((_, waiting)) = claim(bytes, &code, b"x", &[3; 32]) else { return false };
    let _ = waiting.open(bytes);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId::from_bytes([1; 32]);

    fn code(seed: u8) -> Code {
        Code::from_random(&[seed; LENGTH])
    }

    #[test]
    fn a_code_is_read_as_it_is_shown_and_as_people_type() {
        let mut random = [0; LENGTH];
        random.iter_mut().zip(3..).for_each(|(byte, value)| *byte = value);
        let code = Code::from_random(&random);
        assert_eq!(code.shown(), "34567-89abc-defgh-jkmnp");
        assert_eq!(Code::parse(&code.shown()), Ok(code.clone()));
        assert_eq!(Code::parse(" 34567 89ABC DEFGH jkmnp\n"), Ok(code));
        assert_eq!(Code::parse(&"oIl01".repeat(4)), Code::parse(&"01101".repeat(4)));
        assert_eq!(Code::parse("3456"), Err(ClaimError::CodeLength { found: 4 }));
        let wrong = Err(ClaimError::CodeLetter { position: 2, found: 'u' });
        assert_eq!(Code::parse("3u567-89abc-defgh-jkmnp"), wrong);
    }

    #[test]
    fn who_knows_the_code_gives_a_configuration_and_hears_what_came_of_it() {
        let node = Claimable::new(NODE, &[2; 32]);
        let (message, waiting) =
            claim(node.hello(), &code(5), b"version = 1", &[3; 32]).expect("a node");
        assert_eq!(waiting.node, NODE);
        assert!(!message.windows(7).any(|part| part == b"version"), "it can be read on its way");
        let (document, reply) = node.open(&code(5), &message).expect("the code is right");
        assert_eq!(document, b"version = 1");
        let verdict = Verdict { accepted: true, detail: "it restarts".into() };
        let answer = reply.seal(&verdict).expect("sealed");
        assert_eq!(waiting.open(&answer), Ok(verdict));
        assert_eq!(waiting.open(&[]), Err(ClaimError::PeerRefused));
        // What a node said once counts for one claim only.
        let (_, again) = claim(node.hello(), &code(5), b"version = 1", &[4; 32]).expect("a node");
        assert_eq!(again.open(&answer), Err(ClaimError::PeerAltered));
    }

    #[test]
    fn another_code_another_connection_and_altered_bytes_open_nothing() {
        let node = Claimable::new(NODE, &[2; 32]);
        let (message, _) = claim(node.hello(), &code(5), b"x", &[3; 32]).expect("a node");
        assert!(matches!(node.open(&code(6), &message), Err(ClaimError::PeerAltered)));
        let later = Claimable::new(NODE, &[9; 32]);
        assert!(matches!(later.open(&code(5), &message), Err(ClaimError::PeerAltered)));
        let altered = (0..message.len()).all(|at| {
            let mut altered = message.clone();
            altered[at] ^= 1;
            node.open(&code(5), &altered).is_err() && node.open(&code(5), &message[..at]).is_err()
        });
        assert!(altered);
        // Somebody in between names a key of its own: it cannot open what comes then.
        let between = Claimable::new(NODE, &[8; 32]);
        let (message, _) = claim(between.hello(), &code(5), b"x", &[3; 32]).expect("a node");
        assert!(between.open(&code(6), &message).is_err());
    }

    #[test]
    fn what_is_no_node_is_told() {
        let hello = |text: &str| claim(text.as_bytes(), &code(5), b"x", &[3; 32]).map(drop);
        assert!(matches!(hello("HTTP/1.1 400"), Err(ClaimError::PeerHello { .. })));
        let newer = format!(r#"{{"version":2,"node":"{NODE}","key":"{}"}}"#, "09".repeat(32));
        let refused = hello(&newer).map_err(|error| error.to_string());
        assert!(refused.is_err_and(|reason| reason.contains("version 2")));
    }
}
