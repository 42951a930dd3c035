//! Whether enough keys of the authority signed a lease.
//!
//! A signature counts when it is by a key of the set, verifies strictly (RFC 8032 §5.1.7 with
//! canonical encodings and no key of small order) and no other signature by that key counted.

use std::{collections::BTreeSet, fmt};

use ed25519_dalek::VerifyingKey;
use types::{config::Authority, ids::PublicKey};

use crate::document::{DocumentError, Envelope, Lease};

/// The keys that may sign leases, and how many of them must.
#[derive(Debug, Clone)]
pub struct AuthoritySet {
    threshold: usize,
    keys: Vec<(PublicKey, VerifyingKey)>,
}

/// A lease that enough keys signed. Only [`AuthoritySet::verify`] makes one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedLease {
    lease: Lease,
    signers: BTreeSet<PublicKey>,
}

impl VerifiedLease {
    /// Returns what was signed.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Returns the authority keys whose signatures counted.
    pub fn signers(&self) -> &BTreeSet<PublicKey> {
        &self.signers
    }

    /// Returns what was signed.
    pub fn into_lease(self) -> Lease {
        self.lease
    }
}

/// Why a signature did not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It does not verify.
    Invalid,
    /// Another signature by the same key counted already.
    Repeated,
    /// The key is none of the authority's.
    Stranger,
}

/// The signatures of an envelope that did not count, by key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<(PublicKey, Fault)>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, fault) in &self.0 {
            let said = match fault {
                Fault::Invalid => "does not verify",
                Fault::Repeated => "signed more than once and counts once",
                Fault::Stranger => "is not a key of the authority",
            };
            write!(f, "; {key} {said}")?;
        }
        Ok(())
    }
}

/// Why a lease does not count.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ThresholdError {
    #[error(
        "the authority's threshold is {threshold} of {keys} different keys; it must be 1 to {keys}"
    )]
    Threshold { threshold: u32, keys: usize },
    #[error("the authority key {key} is not a point of the curve, or of small order")]
    Key { key: PublicKey },
    #[error("this is no lease")]
    Document { source: DocumentError },
    #[error("the lease has {valid} of {needed} valid signatures{faults}")]
    TooFew { valid: usize, needed: usize, faults: Faults },
}

impl AuthoritySet {
    /// Takes the authority from a node's configuration.
    pub fn new(authority: &Authority) -> Result<Self, ThresholdError> {
        let different: BTreeSet<_> = authority.keys.iter().copied().collect();
        let keys = different
            .into_iter()
            .map(|key| {
                key.verifier().map(|usable| (key, usable)).ok_or(ThresholdError::Key { key })
            })
            .collect::<Result<Vec<_>, _>>()?;
        match usize::try_from(authority.threshold) {
            Ok(threshold) if (1..=keys.len()).contains(&threshold) => Ok(Self { threshold, keys }),
            _ => {
                let threshold = authority.threshold;
                Err(ThresholdError::Threshold { threshold, keys: keys.len() })
            }
        }
    }

    /// Returns how many keys must have signed.
    pub fn threshold(&self) -> usize {
        self.threshold
    }

    /// Checks that enough keys signed, and returns what they signed.
    pub fn verify(&self, envelope: &Envelope) -> Result<VerifiedLease, ThresholdError> {
        envelope.check().map_err(|source| ThresholdError::Document { source })?;
        let message = envelope.signed_bytes();
        let mut signers = BTreeSet::new();
        let mut faults = Vec::new();
        for signature in &envelope.signatures {
            match self.judge(&signers, signature, &message) {
                Ok(key) => drop(signers.insert(key)),
                Err(fault) => faults.push((signature.keyid, fault)),
            }
        }
        if signers.len() < self.threshold {
            let (valid, needed) = (signers.len(), self.threshold);
            return Err(ThresholdError::TooFew { valid, needed, faults: Faults(faults) });
        }
        let lease = Lease::from_bytes(&envelope.payload)
            .map_err(|source| ThresholdError::Document { source })?;
        Ok(VerifiedLease { lease, signers })
    }

    fn judge(
        &self,
        counted: &BTreeSet<PublicKey>,
        signature: &crate::document::Signature,
        message: &[u8],
    ) -> Result<PublicKey, Fault> {
        let (name, key) =
            self.keys.iter().find(|(name, _)| *name == signature.keyid).ok_or(Fault::Stranger)?;
        if counted.contains(name) {
            return Err(Fault::Repeated);
        }
        let bytes = <&[u8; 64]>::try_from(signature.sig.as_slice()).map_err(|_| Fault::Invalid)?;
        let parsed = ed25519_dalek::Signature::from_bytes(bytes);
        key.verify_strict(message, &parsed).map_err(|_| Fault::Invalid)?;
        Ok(*name)
    }
}
