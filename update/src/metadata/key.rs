//! Public keys and their signatures.
//!
//! | `keytype` | `scheme` | `keyval.public` | signature |
//! |---|---|---|---|
//! | `ed25519` | `ed25519` | 64 hexadecimal digits | RFC 8032, 64 bytes |
//! | `ecdsa`, or the scheme's name | `ecdsa-sha2-nistp256`, `ecdsa-sha2-nistp384` | PEM | DER |
//! | `rsa` | `rsassa-pss-sha256`, `rsa-pkcs1v15-sha256` | PEM, 2,048 to 8,192 bits | RFC 8017 |
//!
//! The first two rows and `rsassa-pss-sha256` are the specification's; the rest is what python-tuf
//! makes besides. A key of another kind, or one that cannot be read, verifies nothing, so that a
//! repository may add kinds which only newer clients know.
//! Source: TUF specification 1.0.34, section 4.2.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA384_ASN1, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA256, UnparsedPublicKey, VerificationAlgorithm,
};
use rustls_pki_types::{SubjectPublicKeyInfoDer, pem::PemObject};

use super::{MetadataError, reader::Reader};

/// Length of a P-256 key as SubjectPublicKeyInfo with an uncompressed point, in bytes.
const P256_LENGTH: usize = 91;
/// Length of a P-384 key as SubjectPublicKeyInfo with an uncompressed point, in bytes.
const P384_LENGTH: usize = 120;

/// A public key as metadata names it.
#[derive(Debug, Clone)]
pub struct Key {
    algorithm: Option<Algorithm>,
    public: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    EcdsaP256,
    EcdsaP384,
    Ed25519,
    RsaPkcs1,
    RsaPss,
}

impl Key {
    pub(crate) fn read(key: &Reader<'_>) -> Result<Self, MetadataError> {
        let kind = key.field("keytype")?.text()?;
        let scheme = key.field("scheme")?.text()?;
        let values = key.field("keyval")?;
        // Kinds of other clients may keep their value elsewhere.
        let public = match values.optional("public")? {
            Some(value) => value.text().unwrap_or_default(),
            None => "",
        };
        Ok(Self::new(kind, scheme, public))
    }

    /// Makes a key of its three texts; one that cannot be read verifies nothing.
    pub fn new(kind: &str, scheme: &str, public: &str) -> Self {
        let read = match (kind, scheme) {
            ("ed25519", "ed25519") => {
                unhex(public).filter(|key| key.len() == 32).map(|key| (Algorithm::Ed25519, key))
            }
            ("ecdsa" | "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp256") => pem(public)
                .filter(|key| key.len() == P256_LENGTH)
                .map(|key| (Algorithm::EcdsaP256, key)),
            ("ecdsa" | "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384") => pem(public)
                .filter(|key| key.len() == P384_LENGTH)
                .map(|key| (Algorithm::EcdsaP384, key)),
            ("rsa", "rsassa-pss-sha256") => pem(public).map(|key| (Algorithm::RsaPss, key)),
            ("rsa", "rsa-pkcs1v15-sha256") => pem(public).map(|key| (Algorithm::RsaPkcs1, key)),
            _ => None,
        };
        match read {
            Some((algorithm, public)) => Self { algorithm: Some(algorithm), public },
            None => Self { algorithm: None, public: Vec::new() },
        }
    }

    /// The key itself, whatever it is called: two ids of one key count once.
    pub fn identity(&self) -> &[u8] {
        &self.public
    }

    /// Whether `signature` over `message` was made with this key.
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let algorithm: &dyn VerificationAlgorithm = match self.algorithm {
            Some(Algorithm::EcdsaP256) => &ECDSA_P256_SHA256_ASN1,
            Some(Algorithm::EcdsaP384) => &ECDSA_P384_SHA384_ASN1,
            Some(Algorithm::Ed25519) => &ED25519,
            Some(Algorithm::RsaPkcs1) => &RSA_PKCS1_2048_8192_SHA256,
            Some(Algorithm::RsaPss) => &RSA_PSS_2048_8192_SHA256,
            None => return false,
        };
        UnparsedPublicKey::new(algorithm, &self.public).verify(message, signature).is_ok()
    }
}

fn pem(text: &str) -> Option<Vec<u8>> {
    SubjectPublicKeyInfoDer::from_pem_slice(text.as_bytes()).ok().map(|key| key.as_ref().to_vec())
}

/// Decodes hexadecimal digits of either case; `None` if they are none.
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: &u8| char::from(*c).to_digit(16).and_then(|value| u8::try_from(value).ok());
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(pair.first()?)? << 4 | digit(pair.get(1)?)?)).collect()
}
