//! Keys that never leave a PKCS#11 token.
//!
//! A key is named as in RFC 7512, of which these attributes count:
//! `pkcs11:token=LABEL;object=LABEL?module-path=FILE&pin-source=FILE`. It is an ECDSA key on P-256,
//! which every token of today has; signing is `CKM_ECDSA` over a SHA-256 digest (PKCS#11 v3.0,
//! section 2.3.6).

use std::{fs, path::PathBuf};

use aws_lc_rs::digest;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cryptoki::{
    context::{CInitializeArgs, CInitializeFlags, Pkcs11},
    mechanism::Mechanism,
    object::{Attribute, AttributeType, ObjectClass, ObjectHandle},
    session::{Session, UserType},
    types::AuthPin,
};

use super::keys::{KeyError, PublicKey, Signer};

/// SubjectPublicKeyInfo of a P-256 key up to its point (RFC 5480): id-ecPublicKey, prime256v1.
const P256_HEAD: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// Why a token does not sign.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum TokenError {
    #[error("{uri:?} lacks {what}")]
    Uri { uri: String, what: &'static str },
    #[error("cannot read the PIN in {}", path.display())]
    Pin { path: PathBuf, source: std::io::Error },
    #[error("there is no token {label:?}")]
    NoToken { label: String },
    #[error("the token has no {what} {label:?}")]
    NoObject { what: &'static str, label: String },
    #[error("the key is not an ECDSA key on P-256")]
    Curve,
    #[error("the PKCS#11 module refuses")]
    Module(#[from] cryptoki::error::Error),
}

/// A key in a token, with an open session.
#[derive(Debug)]
pub struct TokenKey {
    public: PublicKey,
    session: Session,
    private: ObjectHandle,
    _module: Pkcs11,
}

impl TokenKey {
    /// Opens the key that a URI names.
    pub fn open(uri: &str) -> Result<Self, TokenError> {
        let value = |name: &'static str| attribute(uri, name);
        let module = Pkcs11::new(value("module-path")?)?;
        module.initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK))?;
        let label = value("token")?;
        let mut found = None;
        for slot in module.get_slots_with_token()? {
            if module.get_token_info(slot)?.label() == label {
                found = Some(slot);
            }
        }
        let session = module.open_ro_session(found.ok_or(TokenError::NoToken { label })?)?;
        let path = PathBuf::from(value("pin-source")?);
        let read = fs::read_to_string(&path);
        let pin = read.map_err(|source| TokenError::Pin { path: path.clone(), source })?;
        session.login(UserType::User, Some(&AuthPin::new(pin.trim_end().into())))?;
        let object = value("object")?;
        let private = find(&session, ObjectClass::PRIVATE_KEY, "private key", &object)?;
        let point = find(&session, ObjectClass::PUBLIC_KEY, "public key", &object)?;
        let public = PublicKey::p256(pem(&point_of(&session, point)?));
        Ok(Self { public, session, private, _module: module })
    }
}

impl Signer for TokenKey {
    fn public(&self) -> &PublicKey {
        &self.public
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        let digest = digest::digest(&digest::SHA256, message);
        let signed = self.session.sign(&Mechanism::Ecdsa, self.private, digest.as_ref());
        let numbers = signed.map_err(TokenError::from)?;
        if numbers.len() != 64 {
            return Err(TokenError::Curve.into());
        }
        let (r, s) = numbers.split_at(32);
        let body = [integer(r), integer(s)].concat();
        Ok(tagged(0x30, &body))
    }
}

/// Reads one attribute of a URI; percent encoding is not undone.
fn attribute(uri: &str, name: &'static str) -> Result<String, TokenError> {
    let lacks = || TokenError::Uri { uri: uri.to_owned(), what: name };
    let rest = uri.strip_prefix("pkcs11:").ok_or_else(lacks)?;
    let pairs = rest.split([';', '?', '&']).filter_map(|pair| pair.split_once('='));
    let mut values = pairs.filter(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
    values.next().ok_or_else(lacks)
}

fn find(
    session: &Session,
    class: ObjectClass,
    what: &'static str,
    label: &str,
) -> Result<ObjectHandle, TokenError> {
    let wanted = [Attribute::Class(class), Attribute::Label(label.as_bytes().to_vec())];
    let found = session.find_objects(&wanted)?;
    let missing = || TokenError::NoObject { what, label: label.to_owned() };
    found.first().copied().ok_or_else(missing)
}

/// Returns the uncompressed point of a public key: the content of the OCTET STRING that the token
/// gives.
fn point_of(session: &Session, key: ObjectHandle) -> Result<Vec<u8>, TokenError> {
    for attribute in session.get_attributes(key, &[AttributeType::EcPoint])? {
        if let Attribute::EcPoint(bytes) = attribute
            && let [0x04, 65, point @ ..] = bytes.as_slice()
            && point.len() == 65
            && point[0] == 4
        {
            return Ok(point.to_vec());
        }
    }
    Err(TokenError::Curve)
}

fn pem(point: &[u8]) -> String {
    let text = STANDARD.encode([&P256_HEAD[..], point].concat());
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(64)
        .map(|line| std::str::from_utf8(line).expect("base64 is ASCII"))
        .collect();
    format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", lines.join("\n"))
}

/// A DER INTEGER of a big-endian number: no leading zeros, but one where the first bit is set.
fn integer(number: &[u8]) -> Vec<u8> {
    let zeros = number.iter().take_while(|byte| **byte == 0).count().min(number.len() - 1);
    let mut content = number[zeros..].to_vec();
    if content[0] & 0x80 != 0 {
        content.insert(0, 0);
    }
    tagged(0x02, &content)
}

fn tagged(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = u8::try_from(content.len()).expect("two numbers of 32 bytes are short");
    [&[tag, length], content].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_in_both_parts() {
        let uri = "pkcs11:token=t;object=o?module-path=/m.so&pin-source=/p";
        assert_eq!(attribute(uri, "object").ok(), Some("o".to_owned()));
        assert_eq!(attribute(uri, "pin-source").ok(), Some("/p".to_owned()));
        assert!(attribute(uri, "id").is_err());
    }

    #[test]
    fn integers_are_minimal_and_positive() {
        assert_eq!(integer(&[0, 0, 1]), [2, 1, 1]);
        assert_eq!(integer(&[0, 0x80]), [2, 2, 0, 0x80]);
        assert_eq!(integer(&[0, 0]), [2, 1, 0]);
    }
}
