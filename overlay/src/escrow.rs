//! A secret that only the holder of one Ed25519 key reads, later and elsewhere: a disk's recovery key,
//! sealed to an operator. HPKE (RFC 9180) in its base mode: whoever seals has no name. DHKEM(X25519,
//! HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305; the ephemeral key is the library's own randomness.

use ed25519_dalek::SigningKey;
use hpke::{
    Deserializable, OpModeR, OpModeS, Serializable,
    aead::ChaCha20Poly1305,
    kdf::HkdfSha256,
    kem::{Kem, X25519HkdfSha256},
};
use types::ids::{NodeId, PublicKey};
use zeroize::Zeroizing;

use crate::identity::{self, Identity};

const KEY: usize = 32;
const INFO: &[u8] = b"holdfast/1 escrow\0";

/// Why a secret is not sealed or opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum EscrowError {
    #[error("{key} is no public key that anything can be sealed to")]
    Recipient { key: PublicKey },
    #[error("it was sealed to another key, or altered since")]
    Sealed,
}

/// Seals a secret to a key.
pub fn seal(to: PublicKey, secret: &[u8]) -> Result<Vec<u8>, EscrowError> {
    let refused = || EscrowError::Recipient { key: to };
    let key = identity::agreement_key(NodeId::from(to)).map_err(|_| refused())?;
    let key = <X25519HkdfSha256 as Kem>::PublicKey::from_bytes(&key).map_err(|_| refused())?;
    let (encapsulated, mut context) = hpke::setup_sender::<
        ChaCha20Poly1305,
        HkdfSha256,
        X25519HkdfSha256,
    >(&OpModeS::Base, &key, &info(to))
    .map_err(|_| refused())?;
    let sealed = context.seal(secret, b"").map_err(|_| refused())?;
    Ok([&encapsulated.to_bytes()[..], &sealed].concat())
}

/// Opens what was sealed to this key.
pub fn open(key: &SigningKey, sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, EscrowError> {
    let own = Identity::new(key.clone());
    let altered = |_| EscrowError::Sealed;
    let secret = <X25519HkdfSha256 as Kem>::PrivateKey::from_bytes(&*own.agreement_secret());
    let (encapsulated, sealed) = sealed.split_at_checked(KEY).ok_or(EscrowError::Sealed)?;
    let encapsulated = <X25519HkdfSha256 as Kem>::EncappedKey::from_bytes(encapsulated);
    let mut context = hpke::setup_receiver::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
        &OpModeR::Base,
        &secret.map_err(altered)?,
        &encapsulated.map_err(altered)?,
        &info(PublicKey::from(own.id())),
    )
    .map_err(altered)?;
    context.open(sealed, b"").map(Zeroizing::new).map_err(altered)
}

fn info(to: PublicKey) -> Vec<u8> {
    [INFO, to.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_bytes(&[seed; 32])
    }

    #[test]
    fn only_the_keys_holder_reads_it() {
        let to = PublicKey::from_bytes(key(1).verifying_key().to_bytes());
        let sealed = seal(to, b"secret").expect("sealed");
        assert_ne!(seal(to, b"secret").expect("sealed"), sealed);
        assert_eq!(open(&key(1), &sealed).expect("opened").as_slice(), b"secret");
        assert_eq!(open(&key(2), &sealed).map(drop), Err(EscrowError::Sealed));
        let refused = (0..sealed.len()).all(|at| {
            let mut altered = sealed.clone();
            altered[at] ^= 1;
            open(&key(1), &altered).is_err() && open(&key(1), &sealed[..at]).is_err()
        });
        assert!(refused);
    }

    #[test]
    fn a_text_that_is_no_key_is_refused() {
        let small = PublicKey::from_bytes([2; 32]);
        assert_eq!(seal(small, b"x"), Err(EscrowError::Recipient { key: small }));
    }
}
