//! Signing keys, and the encrypted files that keep them.
//!
//! A key file is JSON with the public key in the clear and the Ed25519 seed sealed with
//! XChaCha20-Poly1305 (draft-irtf-cfrg-xchacha-03) under a key that Argon2id (RFC 9106) derives from
//! a passphrase: 64 MiB, three passes. The public key is authenticated along with the seed.

use argon2::{Algorithm, Argon2, Params, Version};
use aws_lc_rs::{
    digest, rand,
    signature::{Ed25519KeyPair, KeyPair as _},
};
use chacha20poly1305::{
    KeyInit as _, XChaCha20Poly1305,
    aead::{Aead as _, Payload},
};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::pkcs11::TokenError;
use crate::json::Json;

/// Memory of the derivation, in KiB: the second choice of RFC 9106, section 4.
const MEMORY_KIB: u32 = 64 << 10;
/// Most memory that a key file may ask for, in KiB.
const MAX_MEMORY_KIB: u32 = 1 << 20;
/// Passes of the derivation.
const PASSES: u32 = 3;
/// Most passes that a key file may ask for.
const MAX_PASSES: u32 = 64;
/// Names the format.
const FORMAT: &str = "holdfast-key-1";

/// Why a key cannot be made or used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum KeyError {
    #[error("it is not a key file")]
    File(#[from] serde_json::Error),
    #[error("it is no key file of format {FORMAT}, or its numbers are out of range")]
    Format,
    #[error("the passphrase is wrong, or the file is damaged")]
    Passphrase,
    #[error("the system gives no random numbers")]
    Random,
    #[error("the token does not do what is asked")]
    Token(#[from] TokenError),
}

/// A public key as metadata names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey {
    kind: &'static str,
    scheme: &'static str,
    public: String,
}

impl PublicKey {
    /// Makes an Ed25519 key of its 32 bytes.
    pub fn ed25519(public: &[u8]) -> Self {
        Self { kind: "ed25519", scheme: "ed25519", public: types::hex::encode(public) }
    }

    /// Makes an ECDSA key on P-256 of its PEM text.
    pub fn p256(pem: String) -> Self {
        Self { kind: "ecdsa", scheme: "ecdsa-sha2-nistp256", public: pem }
    }

    /// The key as an object of a metadata file.
    pub fn json(&self) -> Json {
        let value = Json::object([("public", Json::text(&self.public))]);
        Json::object([
            ("keytype", Json::text(self.kind)),
            ("keyval", value),
            ("scheme", Json::text(self.scheme)),
        ])
    }

    /// SHA-256 of the key's canonical form, in hexadecimal (TUF specification 4.2).
    pub fn id(&self) -> String {
        types::hex::encode(digest::digest(&digest::SHA256, &self.json().canonical()).as_ref())
    }
}

/// Something that signs.
pub trait Signer {
    /// Its public key.
    fn public(&self) -> &PublicKey;
    /// Signs a message.
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, KeyError>;
}

/// An encrypted key as it is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyFile {
    format: String,
    public: String,
    memory_kib: u32,
    passes: u32,
    salt: String,
    nonce: String,
    sealed: String,
}

struct FileKey {
    public: PublicKey,
    pair: Ed25519KeyPair,
}

impl KeyFile {
    /// Makes a new key.
    pub fn generate(passphrase: &[u8]) -> Result<Self, KeyError> {
        let seed = Zeroizing::new(random::<32>()?);
        let (salt, nonce) = (random::<16>()?, random::<24>()?);
        let pair = Ed25519KeyPair::from_seed_unchecked(&*seed).map_err(|_| KeyError::Random)?;
        let public = pair.public_key().as_ref().to_vec();
        let key = derive(passphrase, &salt, MEMORY_KIB, PASSES)?;
        let payload = Payload { msg: &*seed, aad: &public };
        let cipher = XChaCha20Poly1305::new(&(*key).into());
        let sealed = cipher.encrypt(&nonce.into(), payload).map_err(|_| KeyError::Format)?;
        Ok(Self {
            format: FORMAT.to_owned(),
            public: types::hex::encode(&public),
            memory_kib: MEMORY_KIB,
            passes: PASSES,
            salt: types::hex::encode(&salt),
            nonce: types::hex::encode(&nonce),
            sealed: types::hex::encode(&sealed),
        })
    }

    /// Reads a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, KeyError> {
        let file: Self = serde_json::from_slice(bytes)?;
        let memory = (8..=MAX_MEMORY_KIB).contains(&file.memory_kib);
        if file.format != FORMAT || !memory || !(1..=MAX_PASSES).contains(&file.passes) {
            return Err(KeyError::Format);
        }
        file.public()?;
        Ok(file)
    }

    /// The file's text.
    pub fn text(&self) -> Result<String, KeyError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// The public key, which needs no passphrase.
    pub fn public(&self) -> Result<PublicKey, KeyError> {
        let bytes: [u8; 32] = types::hex::decode(&self.public).map_err(|_| KeyError::Format)?;
        Ok(PublicKey::ed25519(&bytes))
    }

    /// Opens the key.
    pub fn open(&self, passphrase: &[u8]) -> Result<Box<dyn Signer>, KeyError> {
        let salt: [u8; 16] = types::hex::decode(&self.salt).map_err(|_| KeyError::Format)?;
        let nonce: [u8; 24] = types::hex::decode(&self.nonce).map_err(|_| KeyError::Format)?;
        let sealed: [u8; 48] = types::hex::decode(&self.sealed).map_err(|_| KeyError::Format)?;
        let public: [u8; 32] = types::hex::decode(&self.public).map_err(|_| KeyError::Format)?;
        let key = derive(passphrase, &salt, self.memory_kib, self.passes)?;
        let payload = Payload { msg: &sealed, aad: &public };
        let cipher = XChaCha20Poly1305::new(&(*key).into());
        let seed = cipher.decrypt(&nonce.into(), payload).map_err(|_| KeyError::Passphrase)?;
        let seed = Zeroizing::new(seed);
        let pair = Ed25519KeyPair::from_seed_and_public_key(&seed, &public);
        let pair = pair.map_err(|_| KeyError::Format)?;
        Ok(Box::new(FileKey { public: PublicKey::ed25519(&public), pair }))
    }
}

impl Signer for FileKey {
    fn public(&self) -> &PublicKey {
        &self.public
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        Ok(self.pair.sign(message).as_ref().to_vec())
    }
}

fn random<const N: usize>() -> Result<[u8; N], KeyError> {
    let mut bytes = [0; N];
    rand::fill(&mut bytes).map_err(|_| KeyError::Random)?;
    Ok(bytes)
}

fn derive(
    passphrase: &[u8],
    salt: &[u8],
    memory_kib: u32,
    passes: u32,
) -> Result<Zeroizing<[u8; 32]>, KeyError> {
    let parameters = Params::new(memory_kib, passes, 1, Some(32)).map_err(|_| KeyError::Format)?;
    let mut key = Zeroizing::new([0; 32]);
    let argon = Argon2::new(Algorithm::Argon2id, Version::V0x13, parameters);
    argon.hash_password_into(passphrase, salt, &mut *key).map_err(|_| KeyError::Format)?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Key;

    #[test]
    fn key_files_open_with_their_passphrase_only() {
        let file = KeyFile::generate(b"correct").expect("a key");
        let file = KeyFile::parse(file.text().expect("text").as_bytes()).expect("a key file");
        assert!(matches!(file.open(b"wrong").err(), Some(KeyError::Passphrase)));
        let signer = file.open(b"correct").expect("the key");
        let signature = signer.sign(b"message").expect("a signature");
        let key = Key::new("ed25519", "ed25519", &signer.public().public);
        assert!(key.verifies(b"message", &signature));
        assert!(!key.verifies(b"massage", &signature));
    }

    #[test]
    fn altered_key_files_are_refused() {
        let file = KeyFile::generate(b"correct").expect("a key");
        let other = KeyFile::generate(b"correct").expect("a key");
        let mixed = KeyFile { public: other.public, ..file.clone() };
        assert!(matches!(mixed.open(b"correct").err(), Some(KeyError::Passphrase)));
        let greedy = KeyFile { memory_kib: u32::MAX, ..file };
        assert!(KeyFile::parse(greedy.text().expect("text").as_bytes()).is_err());
    }
}
