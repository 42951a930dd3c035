//! Each signed request counts once.
//!
//! A request is remembered until it would be too old to be accepted anyway. Memory is bounded
//! for all keys together and for each key alone, so that one signer can neither fill it nor push
//! another's requests out; when it is full, new requests are refused, none is forgotten.

use std::collections::{BTreeMap, BTreeSet};

use types::{ids::PublicKey, units::UnixSeconds};

use super::{MAX_AHEAD_S, VerifiedRequest};

/// Requests of one key that are remembered at a time.
const PER_KEY: usize = 4096;

/// Why a request does not count although it is signed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ReplayError {
    #[error("nonce {nonce:?} was used before by this key; every request needs a new one")]
    Replayed { nonce: String },
    #[error("key {key} has {PER_KEY} requests in the last minutes; wait before the next")]
    TooMany { key: PublicKey },
    #[error("too many requests of all keys in the last minutes; try again later")]
    Full,
}

/// The requests of the last while.
#[derive(Debug)]
pub struct ReplayGuard {
    capacity: usize,
    max_age_s: u64,
    seen: BTreeMap<PublicKey, BTreeSet<String>>,
    expiries: BTreeSet<(UnixSeconds, PublicKey, String)>,
}

impl ReplayGuard {
    /// Makes a guard for requests that [`super::verify`] accepts with the same `max_age_s`.
    pub fn new(capacity: usize, max_age_s: u64) -> Self {
        Self { capacity, max_age_s, seen: BTreeMap::new(), expiries: BTreeSet::new() }
    }

    /// Remembers a request, or says that it was there before. Returns until when it is remembered:
    /// whoever must remember across a restart keeps that, key and nonce, for [`Self::restore`].
    pub fn admit(
        &mut self,
        now: UnixSeconds,
        request: &VerifiedRequest,
    ) -> Result<UnixSeconds, ReplayError> {
        self.forget(now);
        let key = request.key;
        let of_key = self.seen.get(&key);
        if of_key.is_some_and(|nonces| nonces.contains(&request.nonce)) {
            return Err(ReplayError::Replayed { nonce: request.nonce.clone() });
        }
        if of_key.is_some_and(|nonces| nonces.len() >= PER_KEY) {
            return Err(ReplayError::TooMany { key });
        }
        if self.expiries.len() >= self.capacity {
            return Err(ReplayError::Full);
        }
        // One more second than verification accepts: both ends count.
        let expires = request.created.plus(self.max_age_s).plus(1).max(now.plus(MAX_AHEAD_S));
        self.restore(expires, key, request.nonce.clone());
        Ok(expires)
    }

    /// Remembers a request that was admitted before a restart.
    pub fn restore(&mut self, until: UnixSeconds, key: PublicKey, nonce: String) {
        self.seen.entry(key).or_default().insert(nonce.clone());
        self.expiries.insert((until, key, nonce));
    }

    /// Returns how many requests are remembered.
    pub fn len(&self) -> usize {
        self.expiries.len()
    }

    /// Says whether none is remembered.
    pub fn is_empty(&self) -> bool {
        self.expiries.is_empty()
    }

    fn forget(&mut self, now: UnixSeconds) {
        while let Some((expires, _, _)) = self.expiries.first()
            && *expires <= now
        {
            let Some((_, key, nonce)) = self.expiries.pop_first() else { return };
            if let Some(nonces) = self.seen.get_mut(&key) {
                nonces.remove(&nonce);
                if nonces.is_empty() {
                    self.seen.remove(&key);
                }
            }
        }
    }
}
