//! Keys of the one who publishes an image: RSA keys in PEM files, with or without a certificate, and
//! PKCS#7 signatures by them.
//!
//! Firmware knows RSA with SHA-256 everywhere and little else. Deterministic: a signature says no time.
//! Sources: RFC 2315 (PKCS#7) §9, RFC 5280 §4.1 (certificates), RFC 8017 §8.2 (RSASSA-PKCS1-v1_5).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    KeyPair, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_SHA256, RsaKeyPair, UnparsedPublicKey,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::der::{self, CONTEXT_0, INTEGER, OBJECT, OCTET_STRING, Reader, SEQUENCE, SET};

/// sha-256: 2.16.840.1.101.3.4.2.1.
pub(crate) const SHA256: &[u8] = &[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x01];
/// rsaEncryption: 1.2.840.113549.1.1.1.
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];

/// Why a key cannot sign.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum SignerError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} holds no private key in PEM: it must begin with -----BEGIN PRIVATE KEY-----")]
    NotKey { path: PathBuf },
    #[error(
        "{path} holds no RSA key of 2048 to 8192 bits; make one with: openssl genrsa -out KEY 2048"
    )]
    NotRsa { path: PathBuf },
    #[error(
        "the key in {path} has {bits} bits; a TPM need take RSA keys of 2048 bits only, and one that does not take \
         this one would open no disk. Make one with: openssl genrsa -out KEY 2048"
    )]
    NotForTpm { path: PathBuf, bits: usize },
    #[error("{path} holds no certificate in PEM: it must begin with -----BEGIN CERTIFICATE-----")]
    NotCertificate { path: PathBuf },
    #[error(
        "{path} holds no certificate in DER or PEM; one of several must be in a file of its own"
    )]
    NotDbCertificate { path: PathBuf },
    #[error("the certificate {certificate} is for another key than {key}")]
    Mismatch { key: PathBuf, certificate: PathBuf },
    #[error("the key refused to sign")]
    Sign,
}

/// A private key.
#[derive(Debug)]
pub struct Key(RsaKeyPair);

impl Key {
    /// Reads a key from a PEM file, in either form that OpenSSL writes.
    pub fn read(path: &Path) -> Result<Self, SignerError> {
        let text = read(path)?;
        let not_key = || SignerError::NotKey { path: path.to_owned() };
        let pair = match PrivateKeyDer::from_pem_slice(&text).map_err(|_| not_key())? {
            PrivateKeyDer::Pkcs1(der) => RsaKeyPair::from_der(der.secret_pkcs1_der()),
            PrivateKeyDer::Pkcs8(der) => RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()),
            PrivateKeyDer::Sec1(_) | _ => {
                return Err(SignerError::NotRsa { path: path.to_owned() });
            }
        };
        pair.map(Self).map_err(|_| SignerError::NotRsa { path: path.to_owned() })
    }

    /// Reads a key whose signatures every TPM checks.
    /// Errors: also when it has other than 2048 bits, the length that the TCG's PC Client Platform TPM Profile
    /// asks for.
    pub fn read_for_tpm(path: &Path) -> Result<Self, SignerError> {
        let key = Self::read(path)?;
        let bits = key.0.public_modulus_len() * 8;
        if bits == 2048 {
            Ok(key)
        } else {
            Err(SignerError::NotForTpm { path: path.to_owned(), bits })
        }
    }

    /// Signs the SHA-256 digest of `message` by RSASSA-PKCS1-v1_5.
    pub(crate) fn sign(&self, message: &[u8]) -> Result<Vec<u8>, SignerError> {
        let mut signature = vec![0; self.0.public_modulus_len()];
        self.0
            .sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature)
            .map_err(|_| SignerError::Sign)?;
        Ok(signature)
    }

    /// Returns the public key as RFC 8017 A.1.1 lays it out.
    pub(crate) fn public_pkcs1(&self) -> &[u8] {
        self.0.public_key().as_ref()
    }

    /// Returns the public key in PEM, as `openssl rsa -pubout` writes it.
    pub fn public_pem(&self) -> Result<String, SignerError> {
        let der: PublicKeyX509Der<'_> =
            self.0.public_key().as_der().map_err(|_| SignerError::Sign)?;
        Ok(pem("PUBLIC KEY", der.as_ref()))
    }
}

/// Writes PEM (RFC 7468): lines of 64 characters.
fn pem(label: &str, der: &[u8]) -> String {
    let encoded = STANDARD.encode(der);
    let lines: Vec<&str> =
        (0..encoded.len()).step_by(64).map(|at| &encoded[at..encoded.len().min(at + 64)]).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// A private key with the certificate that firmware knows it by.
#[derive(Debug)]
pub struct Signer {
    key: Key,
    certificate: Vec<u8>,
    issuer: Vec<u8>,
    serial: Vec<u8>,
}

/// What a PKCS#7 signature is about.
pub(crate) struct Signed<'a> {
    /// The whole `contentInfo`: the type, and the content where it is not detached.
    pub(crate) content_info: &'a [u8],
    /// The authenticated attributes, in the order of a SET; none when the message is signed itself.
    pub(crate) attributes: Option<&'a [u8]>,
    /// What the key signs.
    pub(crate) message: &'a [u8],
}

impl Signer {
    /// Reads key and certificate, and checks that they belong together.
    pub fn read(key: &Path, certificate: &Path) -> Result<Self, SignerError> {
        let text = read(certificate)?;
        let no_certificate = || SignerError::NotCertificate { path: certificate.to_owned() };
        let der = CertificateDer::from_pem_slice(&text).map_err(|_| no_certificate())?.to_vec();
        let (serial, issuer) = serial_and_issuer(&der).ok_or_else(no_certificate)?;
        let (serial, issuer) = (serial.to_vec(), issuer.to_vec());
        let signer = Self { key: Key::read(key)?, certificate: der, issuer, serial };
        let public = signer.key.public_pkcs1();
        if !signer.certificate.windows(public.len()).any(|window| window == public) {
            let (key, certificate) = (key.to_owned(), certificate.to_owned());
            return Err(SignerError::Mismatch { key, certificate });
        }
        Ok(signer)
    }

    /// The certificate in DER.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// Makes a PKCS#7 `SignedData`.
    pub(crate) fn signed_data(&self, signed: &Signed<'_>) -> Result<Vec<u8>, SignerError> {
        let one = der::value(INTEGER, &[1]);
        let sha256 = der::algorithm(SHA256);
        let name = der::nested(SEQUENCE, &[&self.issuer, &self.serial]);
        let attributes = signed.attributes.map(|set| der::value(CONTEXT_0, set));
        let signature = der::value(OCTET_STRING, &self.key.sign(signed.message)?);
        let info = der::nested(
            SEQUENCE,
            &[
                &one,
                &name,
                &sha256,
                attributes.as_deref().unwrap_or_default(),
                &der::algorithm(RSA),
                &signature,
            ],
        );
        Ok(der::nested(
            SEQUENCE,
            &[
                &one,
                &der::value(SET, &sha256),
                signed.content_info,
                &der::value(CONTEXT_0, &self.certificate),
                &der::value(SET, &info),
            ],
        ))
    }
}

/// The content of one attribute: its type and its only value.
pub(crate) fn attribute(object: &[u8], value: &[u8]) -> Vec<u8> {
    der::nested(SEQUENCE, &[&der::value(OBJECT, object), &der::value(SET, value)])
}

/// Reads a certificate of somebody else's, in DER or PEM, which firmware is to trust as well.
pub(crate) fn certificate(path: &Path) -> Result<Vec<u8>, SignerError> {
    let bytes = read(path)?;
    let der = match CertificateDer::from_pem_slice(&bytes) {
        Ok(der) => der.to_vec(),
        Err(_) => bytes,
    };
    let whole = Reader(&der).take(SEQUENCE).is_some_and(|(all, _)| all.len() == der.len());
    if !whole || serial_and_issuer(&der).is_none() {
        return Err(SignerError::NotDbCertificate { path: path.to_owned() });
    }
    Ok(der)
}

fn read(path: &Path) -> Result<Vec<u8>, SignerError> {
    fs::read(path).map_err(|source| SignerError::Read { path: path.to_owned(), source })
}

/// Whether one of these certificates, the one of this issuer and serial number, verifies a signature
/// (RSASSA-PKCS1-v1_5 with SHA-256) of `message`.
pub(crate) fn verifies(
    certificates: &[u8],
    signer: &[u8],
    message: &[u8],
    signature: &[u8],
) -> bool {
    let mut all = Reader(certificates);
    std::iter::from_fn(|| all.take(SEQUENCE)).any(|(certificate, _)| {
        let Some((serial, issuer)) = serial_and_issuer(certificate) else { return false };
        let Some(key) = public_key(certificate) else { return false };
        let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, key);
        [issuer, serial].concat() == signer && key.verify(message, signature).is_ok()
    })
}

/// Returns the public key of a certificate, with its algorithm: what follows validity and subject.
fn public_key(certificate: &[u8]) -> Option<&[u8]> {
    let mut after = after_serial(certificate)?.1;
    // Algorithm, issuer, validity, subject.
    for _ in 0..4 {
        after.take(SEQUENCE)?;
    }
    Some(after.take(SEQUENCE)?.0)
}

/// Returns a certificate's serial number and what follows it.
///
/// Certificate: { tbs { [0] version, serial, algorithm, issuer, validity, subject, key, … }, … }.
fn after_serial(certificate: &[u8]) -> Option<(&[u8], Reader<'_>)> {
    let (_, content) = Reader(certificate).take(SEQUENCE)?;
    let (_, tbs) = Reader(content).take(SEQUENCE)?;
    let mut reader = Reader(tbs);
    let _ = reader.take(CONTEXT_0);
    let (serial, _) = reader.take(INTEGER)?;
    Some((serial, reader))
}

fn serial_and_issuer(certificate: &[u8]) -> Option<(&[u8], &[u8])> {
    let (serial, mut reader) = after_serial(certificate)?;
    reader.take(SEQUENCE)?;
    let (issuer, _) = reader.take(SEQUENCE)?;
    Some((serial, issuer))
}
