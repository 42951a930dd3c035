//! The signing side of leases: one key signs, envelopes are put together, nobody needs to hold
//! two keys.

use ed25519_dalek::{Signer, SigningKey};
use types::ids::PublicKey;

use crate::document::{DocumentError, Envelope, Lease, Signature};

/// Why envelopes cannot be put together.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AuthorityError {
    #[error("this is no lease")]
    Document { source: DocumentError },
    #[error(
        "envelope {index} holds another lease than the first; only signatures of one can be combined"
    )]
    Different { index: usize },
    #[error("there is no envelope to combine")]
    Nothing,
}

/// Returns the public half of a key.
pub fn public_key(key: &SigningKey) -> PublicKey {
    PublicKey::from_bytes(key.verifying_key().to_bytes())
}

/// Puts a lease into an envelope that `key` signed.
pub fn sign(lease: &Lease, key: &SigningKey) -> Result<Envelope, AuthorityError> {
    let envelope = Envelope::new(lease).map_err(|source| AuthorityError::Document { source })?;
    add_signature(&envelope, key)
}

/// Adds `key`'s signature, replacing an earlier one by the same key. The lease is parsed first:
/// an authority signs nothing that it cannot read.
pub fn add_signature(envelope: &Envelope, key: &SigningKey) -> Result<Envelope, AuthorityError> {
    envelope.unverified_lease().map_err(|source| AuthorityError::Document { source })?;
    let keyid = public_key(key);
    let sig = key.sign(&envelope.signed_bytes()).to_bytes().to_vec();
    let mut signed = envelope.clone();
    signed.signatures.retain(|signature| signature.keyid != keyid);
    signed.signatures.push(Signature { keyid, sig });
    signed.check().map_err(|source| AuthorityError::Document { source })?;
    Ok(signed)
}

/// Puts the signatures of several envelopes over one lease into one envelope.
pub fn combine(envelopes: &[Envelope]) -> Result<Envelope, AuthorityError> {
    let mut combined = envelopes.first().ok_or(AuthorityError::Nothing)?.clone();
    for (index, envelope) in envelopes.iter().enumerate().skip(1) {
        let same = (&envelope.payload, &envelope.payload_type)
            == (&combined.payload, &combined.payload_type);
        if !same {
            return Err(AuthorityError::Different { index });
        }
        for signature in &envelope.signatures {
            if !combined.signatures.contains(signature) {
                combined.signatures.push(signature.clone());
            }
        }
    }
    combined.unverified_lease().map_err(|source| AuthorityError::Document { source })?;
    Ok(combined)
}
