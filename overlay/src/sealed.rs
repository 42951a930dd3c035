//! Messages and streams sealed from one node's key to another's, so that no relay reads or
//! alters them.
//!
//! HPKE (RFC 9180) in authenticated mode: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256,
//! ChaCha20-Poly1305. Both names, the purpose and, for an answer, the question's digest go into
//! `info`, so nothing can be turned round or attached to something else. The crate behind it has
//! not been audited. The ephemeral key comes from the system's random source: the one piece of
//! randomness that is not an argument, because a repeated seed would repeat a nonce.
//!
//! Replay: a request names the incarnation (`epoch`) of its receiver and the time on the
//! receiver's own uptime clock, both learnt from the receiver's signed announcement, and carries
//! 16 random bytes. [`ReplayGuard`] remembers those for as long as the time would be accepted. No
//! two clocks have to agree, and a restart of the receiver invalidates whatever was sealed before.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use hpke::{
    Deserializable, OpModeR, OpModeS, Serializable,
    aead::{AeadCtxR, AeadCtxS, ChaCha20Poly1305},
    kdf::HkdfSha256,
    kem::{Kem, X25519HkdfSha256},
};
use sha2::{Digest, Sha256};
use types::ids::NodeId;

use crate::identity::{self, Identity, IdentityError};

/// Bytes by which sealing lengthens a message: the encapsulated key and the tag.
pub const OVERHEAD: usize = ENCAPSULATED + TAG;
/// A request counts when it was sealed at most this long before or after it arrives: covers a
/// slow path and the age of the announcement that the sender took the time from.
pub const WINDOW: Duration = Duration::from_secs(120);
/// Requests of one sender that are remembered at once. More inside two windows are refused.
pub const SEEN_PER_SENDER: usize = 8_192;
/// Requests of all senders that are remembered at once: 16 bytes of nonce and as much of index
/// each, 16 MiB in all.
pub const SEEN: usize = 262_144;

const ENCAPSULATED: usize = 32;
const TAG: usize = 16;

/// Why a sealed message is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum SealedError {
    #[error(transparent)]
    Key(#[from] IdentityError),
    #[error("{length} bytes are too few for a sealed message of at least {}", OVERHEAD)]
    PeerShort { length: usize },
    #[error("sealed by another key, for another key or purpose, or altered on the way")]
    PeerAltered,
    #[error("this message was already received once")]
    PeerReplayed,
    #[error("sealed for an earlier start of this node; ask for its current announcement")]
    PeerStale,
    #[error("sealed {off_ms} ms away from now on this node's clock; at most {} ms", WINDOW.as_millis())]
    PeerTime { off_ms: u128 },
    #[error("too many messages of this sender within two windows")]
    PeerFlood,
}

/// What a message is sealed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A question to a node.
    Request,
    /// The answer to the question with this digest.
    Response([u8; 32]),
    /// The bytes from the opener of a stream.
    StreamForward,
    /// The bytes back to the opener, whose sealed opening has this digest.
    StreamBackward([u8; 32]),
}

impl Purpose {
    fn info(self, from: NodeId, to: NodeId) -> Vec<u8> {
        let (tag, bound): (&[u8], _) = match self {
            Self::Request => (b"request", [0; 32]),
            Self::Response(digest) => (b"response", digest),
            Self::StreamForward => (b"forward", [0; 32]),
            Self::StreamBackward(digest) => (b"backward", digest),
        };
        [b"holdfast/1 sealed ", tag, b"\0", from.as_bytes(), to.as_bytes(), &bound].concat()
    }
}

/// Returns the digest by which an answer names its question.
pub fn digest(sealed: &[u8]) -> [u8; 32] {
    Sha256::digest(sealed).into()
}

/// Seals one message.
pub fn seal(
    from: &Identity,
    to: NodeId,
    purpose: Purpose,
    message: &[u8],
) -> Result<Vec<u8>, SealedError> {
    let (mut sealed, mut sealer) = Sealer::new(from, to, purpose)?;
    sealed.extend(sealer.seal(message, b"")?);
    Ok(sealed)
}

/// Opens what [`seal`] made.
pub fn open(
    to: &Identity,
    from: NodeId,
    purpose: Purpose,
    sealed: &[u8],
) -> Result<Vec<u8>, SealedError> {
    let (encapsulated, rest) = sealed
        .split_at_checked(ENCAPSULATED)
        .filter(|(_, rest)| rest.len() >= TAG)
        .ok_or(SealedError::PeerShort { length: sealed.len() })?;
    Opener::new(to, from, purpose, encapsulated)?.open(rest, b"")
}

/// One direction of a sealed stream, sending. Chunks open only in the order in which they were
/// sealed.
pub struct Sealer(AeadCtxS<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>);

impl Sealer {
    /// Starts a direction; the bytes go to the other end, in front of everything else.
    pub fn new(
        from: &Identity,
        to: NodeId,
        purpose: Purpose,
    ) -> Result<(Vec<u8>, Self), SealedError> {
        let secret = <X25519HkdfSha256 as Kem>::PrivateKey::from_bytes(&*from.agreement_secret())
            .map_err(|_| SealedError::PeerAltered)?;
        let own = public(identity::agreement_key(from.id())?)?;
        let (key, context) = hpke::setup_sender::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
            &OpModeS::Auth((secret, own)),
            &public(identity::agreement_key(to)?)?,
            &purpose.info(from.id(), to),
        )
        .map_err(|_| IdentityError::PeerKey { node: to })?;
        Ok((key.to_bytes().to_vec(), Self(context)))
    }

    /// Seals the next chunk.
    pub fn seal(&mut self, chunk: &[u8], mark: &[u8]) -> Result<Vec<u8>, SealedError> {
        self.0.seal(chunk, mark).map_err(|_| SealedError::PeerAltered)
    }
}

/// One direction of a sealed stream, receiving.
pub struct Opener(AeadCtxR<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>);

impl Opener {
    /// Takes up a direction that [`Sealer::new`] started.
    pub fn new(
        to: &Identity,
        from: NodeId,
        purpose: Purpose,
        encapsulated: &[u8],
    ) -> Result<Self, SealedError> {
        let secret = <X25519HkdfSha256 as Kem>::PrivateKey::from_bytes(&*to.agreement_secret())
            .map_err(|_| SealedError::PeerAltered)?;
        let key = <X25519HkdfSha256 as Kem>::EncappedKey::from_bytes(encapsulated)
            .map_err(|_| SealedError::PeerShort { length: encapsulated.len() })?;
        hpke::setup_receiver::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
            &OpModeR::Auth(public(identity::agreement_key(from)?)?),
            &secret,
            &key,
            &purpose.info(from, to.id()),
        )
        .map(Self)
        .map_err(|_| SealedError::PeerAltered)
    }

    /// Opens the next chunk.
    pub fn open(&mut self, sealed: &[u8], mark: &[u8]) -> Result<Vec<u8>, SealedError> {
        self.0.open(sealed, mark).map_err(|_| SealedError::PeerAltered)
    }
}

fn public(key: [u8; 32]) -> Result<<X25519HkdfSha256 as Kem>::PublicKey, SealedError> {
    Deserializable::from_bytes(&key).map_err(|_| SealedError::PeerAltered)
}

/// The part of a sealed request that makes it acceptable once only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Freshness {
    /// The receiver's incarnation.
    pub epoch: u64,
    /// The receiver's uptime when the request was sealed, as far as the sender knows.
    pub uptime_ms: u64,
    /// Random.
    pub nonce: [u8; 16],
}

/// Remembers what was received, for as long as it could be sent again.
#[derive(Debug, Default)]
pub struct ReplayGuard {
    seen: BTreeSet<(NodeId, [u8; 16])>,
    /// When each can be forgotten, in order.
    forget: BTreeMap<(u64, NodeId, [u8; 16]), ()>,
    per_sender: BTreeMap<NodeId, usize>,
}

impl ReplayGuard {
    /// Admits a request at most once. `epoch` and `uptime_ms` are this node's own.
    pub fn handle_request(
        &mut self,
        epoch: u64,
        uptime_ms: u64,
        from: NodeId,
        fresh: Freshness,
    ) -> Result<(), SealedError> {
        self.forget_until(uptime_ms);
        if fresh.epoch != epoch {
            return Err(SealedError::PeerStale);
        }
        let off_ms = u128::from(uptime_ms.abs_diff(fresh.uptime_ms));
        if off_ms > WINDOW.as_millis() {
            return Err(SealedError::PeerTime { off_ms });
        }
        if self.seen.contains(&(from, fresh.nonce)) {
            return Err(SealedError::PeerReplayed);
        }
        let count = self.per_sender.entry(from).or_default();
        if *count >= SEEN_PER_SENDER || self.seen.len() >= SEEN {
            return Err(SealedError::PeerFlood);
        }
        *count += 1;
        self.seen.insert((from, fresh.nonce));
        let keep_ms = u64::try_from(WINDOW.as_millis()).unwrap_or(u64::MAX);
        // Acceptable until its own time plus the window.
        let until = fresh.uptime_ms.saturating_add(keep_ms);
        self.forget.insert((until, from, fresh.nonce), ());
        Ok(())
    }

    fn forget_until(&mut self, uptime_ms: u64) {
        while let Some(entry) = self.forget.first_entry() {
            let (until, from, nonce) = *entry.key();
            if until >= uptime_ms {
                return;
            }
            entry.remove();
            self.seen.remove(&(from, nonce));
            if let Some(count) = self.per_sender.get_mut(&from) {
                *count -= 1;
                if *count == 0 {
                    self.per_sender.remove(&from);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;

    use super::*;

    fn node(seed: u8) -> Identity {
        Identity::new(SigningKey::from_bytes(&[seed; 32]))
    }

    #[test]
    fn opens_for_its_target_and_from_its_sender_only() {
        let (a, b, c) = (node(1), node(2), node(3));
        let sealed = seal(&a, b.id(), Purpose::Request, b"hello").expect("sealed");
        assert_eq!(open(&b, a.id(), Purpose::Request, &sealed).as_deref(), Ok(b"hello".as_slice()));
        let altered = Err(SealedError::PeerAltered);
        assert_eq!(open(&c, a.id(), Purpose::Request, &sealed), altered);
        assert_eq!(open(&b, c.id(), Purpose::Request, &sealed), altered);
        assert_eq!(open(&b, a.id(), Purpose::StreamForward, &sealed), altered);
        assert_eq!(open(&b, a.id(), Purpose::Response([0; 32]), &sealed), altered);
    }

    #[test]
    fn any_flipped_bit_is_refused() {
        let (a, b) = (node(1), node(2));
        let sealed = seal(&a, b.id(), Purpose::Request, b"x").expect("sealed");
        for bit in 0..sealed.len() * 8 {
            // X25519 ignores the top bit of the encapsulated key, but HPKE hashes it.
            let mut flipped = sealed.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&b, a.id(), Purpose::Request, &flipped).is_err(), "bit {bit}");
        }
        assert!(open(&b, a.id(), Purpose::Request, &sealed[..OVERHEAD - 1]).is_err());
    }

    #[test]
    fn an_answer_fits_its_question_only() {
        let (a, b) = (node(1), node(2));
        let answer = seal(&b, a.id(), Purpose::Response(digest(b"q1")), b"yes").expect("sealed");
        assert!(open(&a, b.id(), Purpose::Response(digest(b"q1")), &answer).is_ok());
        assert!(open(&a, b.id(), Purpose::Response(digest(b"q2")), &answer).is_err());
    }

    #[test]
    fn a_request_counts_once_and_in_its_time() {
        let mut guard = ReplayGuard::default();
        let from = node(1).id();
        let fresh = Freshness { epoch: 5, uptime_ms: 1_000_000, nonce: [1; 16] };
        assert_eq!(guard.handle_request(5, 1_000_100, from, fresh), Ok(()));
        let replayed = Err(SealedError::PeerReplayed);
        assert_eq!(guard.handle_request(5, 1_000_200, from, fresh), replayed);
        assert_eq!(guard.handle_request(5, 1_120_000, from, fresh), replayed);
        let late = guard.handle_request(5, 1_120_001, from, fresh);
        assert_eq!(late, Err(SealedError::PeerTime { off_ms: 120_001 }));
        assert_eq!(guard.handle_request(6, 1_000, from, fresh), Err(SealedError::PeerStale));
        assert!(guard.seen.is_empty() && guard.per_sender.is_empty());
    }

    #[test]
    fn memory_is_bounded_per_sender() {
        let mut guard = ReplayGuard::default();
        let (loud, quiet) = (node(1).id(), node(2).id());
        for n in 0..SEEN_PER_SENDER {
            let mut nonce = [0; 16];
            nonce[..8].copy_from_slice(&n.to_le_bytes());
            let fresh = Freshness { epoch: 0, uptime_ms: 0, nonce };
            assert_eq!(guard.handle_request(0, 0, loud, fresh), Ok(()));
        }
        let fresh = Freshness { epoch: 0, uptime_ms: 0, nonce: [0xff; 16] };
        assert_eq!(guard.handle_request(0, 0, loud, fresh), Err(SealedError::PeerFlood));
        assert_eq!(guard.handle_request(0, 0, quiet, fresh), Ok(()));
    }
}
