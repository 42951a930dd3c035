//! The strict parser of `Signature-Input` and `Signature`.
//!
//! Both are dictionaries of structured fields (RFC 8941 §3.2) of which one member is accepted.
//! Nothing optional is read but `expires`: no white space but the single spaces between components, no
//! parameter that is not ours, none twice.

use base64::{Engine, engine::general_purpose::STANDARD};
use types::{ids::PublicKey, units::UnixSeconds};

use super::{NONCE, RequestError, is_nonce};

/// Longest field that is read, in bytes.
const MAX_FIELD: usize = 1024;

/// The components that a signature of ours can cover.
const KNOWN: [&str; 5] = ["@method", "@path", "@query", "content-digest", "idempotency-key"];

/// What both fields say, nothing of it verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signed {
    /// What is covered, in order.
    pub components: Vec<&'static str>,
    /// The member's value as it was received, the last line of the signature base.
    pub parameters: String,
    /// When it was signed.
    pub created: UnixSeconds,
    /// Until when it may be used, by its own word.
    pub expires: Option<UnixSeconds>,
    /// What makes it unique.
    pub nonce: String,
    /// Who is said to have signed.
    pub key: PublicKey,
    /// Ed25519 signature.
    pub signature: [u8; 64],
}

/// Parses the values of `Signature-Input` and `Signature`.
pub fn parse(input: &str, signature: &str) -> Result<Signed, RequestError> {
    if input.len() > MAX_FIELD || signature.len() > MAX_FIELD {
        let expected = "at most 1024 bytes are read";
        return Err(RequestError::Field { field: "signature-input", expected });
    }
    let mut cursor = Cursor { text: input, position: 0 };
    let label = cursor.take_while(is_key);
    if !label.starts_with(|first: char| first == '*' || first.is_ascii_lowercase()) {
        return cursor
            .fail("a label of lower-case letters, digits and _-.* that begins with a letter");
    }
    cursor.expect("=", "= after the label")?;
    let start = cursor.position;
    let components = cursor.components()?;
    let parameters = cursor.parameters()?;
    let key = parameters.key.ok_or(RequestError::Field { field: "keyid", expected: MISSING })?;
    Ok(Signed {
        components,
        parameters: input[start..].to_owned(),
        created: parameters
            .created
            .ok_or(RequestError::Field { field: "created", expected: MISSING })?,
        expires: parameters.expires,
        nonce: parameters.nonce.ok_or(NONCE)?,
        key,
        signature: signature_bytes(label, signature)?,
    })
}

/// Whether a label may have this byte (RFC 8941 §3.1.2).
fn is_key(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte)
}

const MISSING: &str = "the signature needs created, nonce, keyid and alg=\"ed25519\"";

fn signature_bytes(label: &str, text: &str) -> Result<[u8; 64], RequestError> {
    let decode = || {
        let encoded = text.strip_prefix(label)?.strip_prefix("=:")?.strip_suffix(':')?;
        <[u8; 64]>::try_from(STANDARD.decode(encoded).ok()?).ok()
    };
    decode().ok_or(RequestError::Field {
        field: "signature",
        expected: "the label of signature-input, then =: and 64 bytes in base64 and : are needed",
    })
}

#[derive(Default)]
struct Parameters {
    created: Option<UnixSeconds>,
    expires: Option<UnixSeconds>,
    nonce: Option<String>,
    key: Option<PublicKey>,
}

struct Cursor<'a> {
    text: &'a str,
    position: usize,
}

impl<'a> Cursor<'a> {
    fn fail<T>(&self, expected: &'static str) -> Result<T, RequestError> {
        Err(RequestError::Syntax { position: self.position, expected })
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.position..).unwrap_or_default()
    }

    fn accept(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        if found {
            self.position += token.len();
        }
        found
    }

    fn expect(&mut self, token: &str, expected: &'static str) -> Result<(), RequestError> {
        if self.accept(token) { Ok(()) } else { self.fail(expected) }
    }

    fn take_while(&mut self, accept: impl Fn(u8) -> bool) -> &'a str {
        let rest = self.rest();
        let length = rest.bytes().take_while(|byte| accept(*byte)).count();
        self.position += length;
        rest.get(..length).unwrap_or_default()
    }

    fn string(&mut self) -> Result<&'a str, RequestError> {
        self.expect("\"", "a quoted string")?;
        // No backslash: none of our strings needs an escape.
        let value =
            self.take_while(|byte| (0x20..0x7f).contains(&byte) && byte != b'"' && byte != b'\\');
        self.expect("\"", "a closing quote")?;
        Ok(value)
    }

    fn components(&mut self) -> Result<Vec<&'static str>, RequestError> {
        self.expect("(", "( and the covered components")?;
        let mut components = Vec::new();
        loop {
            let name = self.string()?;
            let Some(known) = KNOWN.iter().find(|known| **known == name) else {
                return self.fail("@method, @path, @query, content-digest or idempotency-key");
            };
            if components.contains(known) {
                return self.fail("each component once");
            }
            components.push(*known);
            if self.accept(")") {
                return Ok(components);
            }
            self.expect(" ", "one space or ) after a component")?;
        }
    }

    fn parameters(&mut self) -> Result<Parameters, RequestError> {
        let mut found = Parameters::default();
        let mut algorithm = false;
        while !self.rest().is_empty() {
            self.expect(";", "; and a parameter")?;
            if self.accept("created=") && found.created.is_none() {
                found.created = Some(self.integer()?);
            } else if self.accept("expires=") && found.expires.is_none() {
                found.expires = Some(self.integer()?);
            } else if self.accept("nonce=") && found.nonce.is_none() {
                let nonce = self.string()?;
                found.nonce = Some(is_nonce(nonce).then(|| nonce.to_owned()).ok_or(NONCE)?);
            } else if self.accept("keyid=") && found.key.is_none() {
                let Ok(key) = self.string()?.parse() else {
                    return self.fail("keyid: 64 lower-case hexadecimal digits");
                };
                found.key = Some(key);
            } else if self.accept("alg=\"ed25519\"") && !algorithm {
                algorithm = true;
            } else {
                return self.fail("created, expires, nonce, keyid and alg=\"ed25519\", each once");
            }
        }
        if algorithm { Ok(found) } else { self.fail("alg=\"ed25519\"") }
    }

    fn integer(&mut self) -> Result<UnixSeconds, RequestError> {
        let digits = self.take_while(|byte| byte.is_ascii_digit());
        let canonical = !digits.starts_with('0') && digits.len() <= 15;
        match digits.parse() {
            Ok(seconds) if canonical => Ok(UnixSeconds(seconds)),
            _ => self.fail("whole seconds since 1970 without leading zero"),
        }
    }
}
