//! Requests signed by keys: RFC 9421 (HTTP Message Signatures) with RFC 9530 (Digest Fields) over
//! a [`ForwardedRequest`].
//!
//! Every party accepts exactly one form, so there is nothing to negotiate and nothing to leave
//! out: the components `"@method" "@path" "@query"`, then `"content-digest"` when there is a
//! body, then `"idempotency-key"` when that field is present, in this order; the parameters
//! `created`, `nonce`, `keyid` and `alg`, each once, in any order; `expires` may be there and then counts, too.
//! `keyid` is the public key in hexadecimal and `alg` is `"ed25519"`. The digest is `sha-256`.
//!
//! Freshness is `replay`'s: verification says when a request was signed and with which nonce.

mod parse;
mod replay;

use base64::{Engine, engine::general_purpose::STANDARD};
use ed25519_dalek::{Signer, SigningKey};
use sha2::{Digest, Sha256};
use types::{
    forward::{ForwardedRequest, MAX_BODY},
    ids::PublicKey,
    units::UnixSeconds,
};

pub use parse::{Signed, parse};
pub use replay::{ReplayError, ReplayGuard};

use crate::{api::MAX_IDEMPOTENCY_KEY, authority::public_key};

/// Longest age of a request, in seconds: a slow upload of a small body and two skewed clocks.
pub const MAX_AGE_S: u64 = 300;

/// How far in the future a request may be signed, in seconds: the skew of a renter's clock.
pub const MAX_AHEAD_S: u64 = 60;

/// Shortest and longest nonce, in characters.
pub const NONCE_LENGTH: std::ops::RangeInclusive<usize> = 16..=64;

/// Longest target that is read, in bytes.
pub const MAX_TARGET: usize = 2048;

/// Fields that travel with a request: what signatures cover and carry, and the media type.
pub const CARRIED_FIELDS: [&str; 5] =
    ["content-digest", "content-type", "idempotency-key", "signature", "signature-input"];

/// Label of our signatures (RFC 9421 §4).
const LABEL: &str = "holdfast";

/// A request whose signature verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedRequest {
    /// Who signed.
    pub key: PublicKey,
    /// What makes this request different from every other.
    pub nonce: String,
    /// When it was signed, by the signer's clock.
    pub created: UnixSeconds,
    /// Under which name it is done at most once.
    pub idempotency_key: Option<String>,
    /// Whether it only asks for something: its method is safe (RFC 9110 §9.2.1).
    pub is_safe: bool,
}

/// Why a request does not count as signed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RequestError {
    #[error("field {field}: {expected}")]
    Field { field: &'static str, expected: &'static str },
    #[error("signature-input, byte {position}: expected {expected}")]
    Syntax { position: usize, expected: &'static str },
    #[error("the signature covers {found}; it must cover {expected}")]
    Components { found: String, expected: String },
    #[error("the body's SHA-256 is not the one in content-digest")]
    Digest,
    #[error("key {key} is not a usable Ed25519 key")]
    Key { key: PublicKey },
    #[error(
        "the signature by {key} does not verify over method, path, query and fields as received"
    )]
    Signature { key: PublicKey },
    #[error(
        "signed at {created}, {age_s} s ago; at most {max_age_s} s are accepted; check the clock"
    )]
    Old { created: u64, age_s: u64, max_age_s: u64 },
    #[error("the signature expired at {expires} by its own word, {late_s} s ago; check the clock")]
    Expired { expires: u64, late_s: u64 },
    #[error("signed at {created}, {ahead_s} s in the future; check the clock")]
    Future { created: u64, ahead_s: u64 },
}

/// Signs `request`: adds `content-digest` when there is a body, `signature-input` and
/// `signature`. `nonce` must be random, of [`NONCE_LENGTH`] letters, digits or `-_+/=.~`.
pub fn sign(
    key: &SigningKey,
    request: &mut ForwardedRequest,
    created: UnixSeconds,
    nonce: &str,
) -> Result<(), RequestError> {
    request.headers.retain(|(name, _)| {
        !matches!(name.as_str(), "content-digest" | "signature" | "signature-input")
    });
    if !request.body.is_empty() {
        request.headers.push(("content-digest".into(), content_digest(&request.body)));
    }
    check_fields(request)?;
    if !is_nonce(nonce) {
        return Err(NONCE);
    }
    let list = component_list(&components(request));
    let keyid = public_key(key);
    let parameters =
        format!("{list};created={};nonce=\"{nonce}\";keyid=\"{keyid}\";alg=\"ed25519\"", created.0);
    let signature = key.sign(signature_base(request, &parameters).as_bytes());
    request.headers.push(("signature-input".into(), format!("{LABEL}={parameters}")));
    let encoded = STANDARD.encode(signature.to_bytes());
    request.headers.push(("signature".into(), format!("{LABEL}=:{encoded}:")));
    Ok(())
}

/// Verifies signature, digest and age. A replay guard must still see the result.
pub fn verify(
    request: &ForwardedRequest,
    now: UnixSeconds,
    max_age_s: u64,
) -> Result<VerifiedRequest, RequestError> {
    check_fields(request)?;
    let input = request.header("signature-input").ok_or(RequestError::Field {
        field: "signature-input",
        expected: "exactly one is needed; requests are signed as RFC 9421 says",
    })?;
    let signature = request.header("signature").ok_or(RequestError::Field {
        field: "signature",
        expected: "exactly one is needed; requests are signed as RFC 9421 says",
    })?;
    let signed = parse(input, signature)?;
    let expected = components(request);
    if signed.components != expected {
        return Err(RequestError::Components {
            found: component_list(&signed.components),
            expected: component_list(&expected),
        });
    }
    let key = signed.key.verifier().ok_or(RequestError::Key { key: signed.key })?;
    let base = signature_base(request, &signed.parameters);
    let parsed = ed25519_dalek::Signature::from_bytes(&signed.signature);
    key.verify_strict(base.as_bytes(), &parsed)
        .map_err(|_| RequestError::Signature { key: signed.key })?;
    check_age(signed.created, now, max_age_s)?;
    if let Some(expires) = signed.expires
        && expires < now
    {
        return Err(RequestError::Expired { expires: expires.0, late_s: now.since(expires) });
    }
    Ok(VerifiedRequest {
        key: signed.key,
        nonce: signed.nonce,
        created: signed.created,
        idempotency_key: request.header("idempotency-key").map(str::to_owned),
        is_safe: matches!(request.method.as_str(), "GET" | "HEAD"),
    })
}

/// Returns the value of `content-digest` (RFC 9530 §2) for `body`.
pub fn content_digest(body: &[u8]) -> String {
    format!("sha-256=:{}:", STANDARD.encode(Sha256::digest(body)))
}

const NONCE: RequestError = RequestError::Field {
    field: "nonce",
    expected: "16 to 64 letters, digits or -_+/=.~ are needed",
};

fn check_age(created: UnixSeconds, now: UnixSeconds, max_age_s: u64) -> Result<(), RequestError> {
    let (age_s, ahead_s) = (now.since(created), created.since(now));
    if age_s > max_age_s {
        return Err(RequestError::Old { created: created.0, age_s, max_age_s });
    }
    if ahead_s > MAX_AHEAD_S {
        return Err(RequestError::Future { created: created.0, ahead_s });
    }
    Ok(())
}

/// Checks what must hold of a request before its signature base can be built: no part of it can
/// be taken for another line of the base.
fn check_fields(request: &ForwardedRequest) -> Result<(), RequestError> {
    let field = |field, expected| Err(RequestError::Field { field, expected });
    if request.method.is_empty() || !request.method.bytes().all(|b| b.is_ascii_uppercase()) {
        return field("@method", "upper-case letters are needed");
    }
    let plain = request.target.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
    if !plain || !request.target.starts_with('/') || request.target.len() > MAX_TARGET {
        return field("@path", "a path of at most 2048 visible characters is needed");
    }
    if request.body.len() > MAX_BODY {
        return field("body", "at most 1 MiB is read");
    }
    let count = |name: &str| request.headers.iter().filter(|(key, _)| key == name).count();
    if CARRIED_FIELDS.iter().any(|name| count(name) > 1) {
        return field("signature", "each signed or signing field may appear once");
    }
    if let Some(key) = request.header("idempotency-key")
        && !is_token(key, 1..=MAX_IDEMPOTENCY_KEY)
    {
        return field("idempotency-key", "1 to 64 letters, digits, - or _ are needed");
    }
    match request.header("content-digest") {
        None if request.body.is_empty() => Ok(()),
        None => field("content-digest", "a request with a body needs it"),
        Some(digest) if digest == content_digest(&request.body) => Ok(()),
        Some(_) => Err(RequestError::Digest),
    }
}

fn components(request: &ForwardedRequest) -> Vec<&'static str> {
    let mut names = vec!["@method", "@path", "@query"];
    names.extend(
        ["content-digest", "idempotency-key"]
            .into_iter()
            .filter(|name| request.header(name).is_some()),
    );
    names
}

fn component_list(names: &[&str]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
    format!("({})", quoted.join(" "))
}

/// RFC 9421 §2.5.
fn signature_base(request: &ForwardedRequest, parameters: &str) -> String {
    let mut base = String::new();
    for name in components(request) {
        // §2.2.7: an absent query is `?`.
        let query = || request.target.split_once('?').map_or("?".into(), |(_, q)| format!("?{q}"));
        let value = match name {
            "@method" => request.method.clone(),
            "@path" => request.path().to_owned(),
            "@query" => query(),
            field => request.header(field).unwrap_or_default().to_owned(),
        };
        base.push_str(&format!("\"{name}\": {value}\n"));
    }
    base.push_str(&format!("\"@signature-params\": {parameters}"));
    base
}

/// Whether a text can be a nonce: random bytes in whichever base.
fn is_nonce(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_+/=.~".contains(&byte);
    NONCE_LENGTH.contains(&text.len()) && text.bytes().all(allowed)
}

pub(crate) fn is_token(text: &str, length: std::ops::RangeInclusive<usize>) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    length.contains(&text.len()) && text.bytes().all(allowed)
}
