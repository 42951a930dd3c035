//! What a release says of PCR 11: the key that signs its policies, and the policies, as systemd-stub
//! leaves them in the initramfs. Source: systemd-measure(1), systemd-stub(7), RFC 5280 §4.1
//! (SubjectPublicKeyInfo), RFC 7468 (PEM).

use std::path::Path;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::tpm::{RELEASE_PCR, SignedPolicy, Signer};

/// The key's file, as systemd-stub leaves it.
pub(crate) const KEY: &str = "tpm2-pcr-public-key.pem";
/// The signatures' file.
pub(crate) const SIGNATURES: &str = "tpm2-pcr-signature.json";
/// Longest of both, in bytes.
const LIMIT: usize = 256 << 10;
/// Most signatures that are looked at.
const MOST: usize = 64;

/// What a release says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// The key.
    pub signer: Signer,
    /// SHA-256 of the key as PKCS#1 has it (RSAPublicKey in DER), in hexadecimal digits: the key's
    /// name in documents.
    pub fingerprint: String,
    /// The policies that it signed.
    pub policies: Vec<SignedPolicy>,
}

/// Why a release's files cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum SignatureError {
    #[error(
        "{KEY} is no PEM of an RSA key of 2048, 3072 or 4096 bits with exponent 65537; sign the release with one of 2048"
    )]
    Key,
    #[error("{SIGNATURES} cannot be understood: {0}")]
    Signatures(String),
}

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    sha256: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    pcrs: Vec<u8>,
    pkfp: String,
    pol: String,
    sig: String,
}

/// Reads the files of the running release from a folder; `None` when it has none.
pub fn read(folder: &Path) -> Option<Result<Release, SignatureError>> {
    let file = |name: &str| std::fs::read(folder.join(name)).ok().filter(|b| b.len() <= LIMIT);
    let (key, signatures) = (file(KEY)?, file(SIGNATURES)?);
    Some(parse(&key, &signatures))
}

/// Reads a key and the signatures by it; those by other keys or of other registers are left out.
pub fn parse(key: &[u8], signatures: &[u8]) -> Result<Release, SignatureError> {
    let der = pem(key).ok_or(SignatureError::Key)?;
    let (plain, modulus) = rsa_key(&der).ok_or(SignatureError::Key)?;
    let signer = Signer { modulus: modulus.to_vec() };
    let fingerprint = types::hex::encode(&Sha256::digest(plain));
    let document: Document = serde_json::from_slice(signatures)
        .map_err(|error| SignatureError::Signatures(error.to_string()))?;
    let ours = |entry: &&Entry| {
        entry.pcrs == [RELEASE_PCR] && entry.pkfp.eq_ignore_ascii_case(&fingerprint)
    };
    let policies = document.sha256.iter().filter(ours).take(MOST).map(|entry| {
        let wrong = |what: &str| SignatureError::Signatures(format!("{what} of an entry"));
        Ok(SignedPolicy {
            policy: types::hex::decode(&entry.pol.to_lowercase()).map_err(|_| wrong("pol"))?,
            signature: STANDARD.decode(&entry.sig).map_err(|_| wrong("sig"))?,
        })
    });
    Ok(Release { signer, policies: policies.collect::<Result<_, _>>()?, fingerprint })
}

/// The bytes of a PEM's first public key.
fn pem(text: &[u8]) -> Option<Vec<u8>> {
    let text = str::from_utf8(text).ok()?;
    let body = text.split_once("-----BEGIN PUBLIC KEY-----")?.1;
    let body = body.split_once("-----END PUBLIC KEY-----")?.0;
    STANDARD.decode(body.split_whitespace().collect::<String>()).ok()
}

/// OBJECT IDENTIFIER 1.2.840.113549.1.1.1 and NULL: an RSA key.
const RSA: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1, 5, 0];

/// An RSA key with the usual exponent, 2048 to 4096 bits long: as PKCS#1 has it, and its modulus.
fn rsa_key(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (info, rest) = element(der, 0x30)?;
    let (algorithm, bits) = element(info, 0x30)?;
    let (bits, after) = element(bits, 0x03)?;
    let plain = bits.strip_prefix(&[0])?;
    let (key, behind) = element(plain, 0x30)?;
    let (modulus, exponent) = element(key, 0x02)?;
    let (exponent, end) = element(exponent, 0x02)?;
    let whole = [rest, after, behind, end].iter().all(|rest| rest.is_empty());
    let modulus = modulus.strip_prefix(&[0])?;
    let sound = [256, 384, 512].contains(&modulus.len());
    (whole && sound && algorithm == RSA && exponent == [1, 0, 1]).then_some((plain, modulus))
}

/// The content of a DER element with this tag, and what follows it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81 => (usize::from(*rest.first()?), rest.get(1..)?),
        0x82 => (usize::from(u16::from_be_bytes([*rest.first()?, *rest.get(1)?])), rest.get(2..)?),
        _ => return None,
    };
    if found == tag { rest.split_at_checked(length) } else { None }
}

/// Reads `bytes`, cut at the first zero, as a key and its signatures; for the fuzz target and corpus.
/// Returns how many policies there are.
pub fn everything(bytes: &[u8]) -> usize {
    let cut = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    let (key, rest) = bytes.split_at(cut);
    let _ = rsa_key(key);
    parse(key, rest.get(1..).unwrap_or_default()).map_or(0, |release| release.policies.len())
}
