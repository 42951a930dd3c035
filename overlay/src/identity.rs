//! Node keys: signing, checking, and the X25519 keys that belong to them.
//!
//! A node is its Ed25519 key (RFC 8032). For sealed messages the same key is used in its
//! Montgomery form (RFC 7748 §4.1, the birational map), so that whoever knows a node's name can
//! seal to it without asking anybody. Signatures are checked with the strict rule (canonical
//! points, no small order) and carry a domain tag, so that none can stand in for another kind.

use std::fmt;

use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use types::ids::{NodeId, PublicKey};
use zeroize::Zeroizing;

/// Bytes of a signature.
pub const SIGNATURE_LEN: usize = 64;

/// Why a name or a signature does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum IdentityError {
    #[error("{node} is no point of Ed25519, or one of small order")]
    PeerKey { node: NodeId },
    #[error("the signature in the name of {node} is not by its key")]
    PeerSignature { node: NodeId },
}

/// This node's key.
#[derive(Clone)]
pub struct Identity {
    key: SigningKey,
    id: NodeId,
}

impl Identity {
    /// Wraps a key.
    pub fn new(key: SigningKey) -> Self {
        let id = NodeId::from_bytes(key.verifying_key().to_bytes());
        Self { key, id }
    }

    /// Returns the node's name.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Signs `message` for one purpose.
    pub fn sign(&self, purpose: &str, message: &[u8]) -> [u8; SIGNATURE_LEN] {
        self.key.sign(&tagged(purpose, message)).to_bytes()
    }

    /// Returns the X25519 private key of this node.
    pub fn agreement_secret(&self) -> Zeroizing<[u8; 32]> {
        Zeroizing::new(self.key.to_scalar_bytes())
    }

    /// Returns the key in PKCS #8 form (RFC 8410 §7), which the TLS library wants.
    pub fn pkcs8(&self) -> Zeroizing<Vec<u8>> {
        let mut der = Zeroizing::new(PKCS8_PREFIX.to_vec());
        der.extend_from_slice(self.key.as_bytes());
        der
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Identity").field(&self.id).finish()
    }
}

/// Checks a signature made by [`Identity::sign`].
pub fn verify(
    node: NodeId,
    purpose: &str,
    message: &[u8],
    signature: &[u8; SIGNATURE_LEN],
) -> Result<(), IdentityError> {
    public_key(node)?
        .verify_strict(&tagged(purpose, message), &Signature::from_bytes(signature))
        .map_err(|_| IdentityError::PeerSignature { node })
}

/// Returns the X25519 public key of a node.
pub fn agreement_key(node: NodeId) -> Result<[u8; 32], IdentityError> {
    Ok(public_key(node)?.to_montgomery().to_bytes())
}

/// Returns a node's key as a SubjectPublicKeyInfo (RFC 8410 §4), the form in which TLS carries
/// raw public keys (RFC 7250 §3).
pub fn public_key_info(node: NodeId) -> Vec<u8> {
    [SPKI_PREFIX.as_slice(), node.as_bytes()].concat()
}

/// Reads a name back from a SubjectPublicKeyInfo. `None` when it is no Ed25519 key that could
/// be a node's.
pub fn node_of_public_key_info(info: &[u8]) -> Option<NodeId> {
    let key: [u8; 32] = info.strip_prefix(&SPKI_PREFIX)?.try_into().ok()?;
    let node = NodeId::from_bytes(key);
    public_key(node).ok().map(|_| node)
}

/// SEQUENCE { SEQUENCE { OID 1.3.101.112 }, BIT STRING of 32 bytes follows.
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];
/// SEQUENCE { INTEGER 0, SEQUENCE { OID 1.3.101.112 }, OCTET STRING { OCTET STRING of 32 bytes.
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

fn public_key(node: NodeId) -> Result<VerifyingKey, IdentityError> {
    PublicKey::from(node).verifier().ok_or(IdentityError::PeerKey { node })
}

fn tagged(purpose: &str, message: &[u8]) -> Vec<u8> {
    [b"holdfast/1 ", purpose.as_bytes(), b"\0", message].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_count_for_their_purpose_only() {
        let identity = Identity::new(SigningKey::from_bytes(&[7; 32]));
        let signature = identity.sign("a", b"message");
        assert_eq!(verify(identity.id(), "a", b"message", &signature), Ok(()));
        assert!(verify(identity.id(), "b", b"message", &signature).is_err());
        assert!(verify(identity.id(), "a", b"massage", &signature).is_err());
    }

    #[test]
    fn both_forms_of_a_key_agree() {
        let identity = Identity::new(SigningKey::from_bytes(&[9; 32]));
        let secret = x25519_dalek::StaticSecret::from(*identity.agreement_secret());
        let public = x25519_dalek::PublicKey::from(&secret);
        assert_eq!(agreement_key(identity.id()), Ok(public.to_bytes()));
    }

    #[test]
    fn points_of_small_order_name_nobody() {
        let neutral = {
            let mut bytes = [0; 32];
            bytes[0] = 1;
            NodeId::from_bytes(bytes)
        };
        assert_eq!(agreement_key(neutral), Err(IdentityError::PeerKey { node: neutral }));
        assert_eq!(node_of_public_key_info(&public_key_info(neutral)), None);
    }

    #[test]
    fn public_key_info_round_trips() {
        let id = Identity::new(SigningKey::from_bytes(&[3; 32])).id();
        assert_eq!(node_of_public_key_info(&public_key_info(id)), Some(id));
        assert_eq!(node_of_public_key_info(&[0; 44]), None);
    }
}
