//! Bytes that travel in JSON as base64 (RFC 4648 §4, with padding): for `#[serde(with = …)]`.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Deserializer, Serializer, de};

/// Writes `bytes` as a string.
pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(bytes))
}

/// Reads a string that is exactly one encoding.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
    STANDARD.decode(text.as_bytes()).map_err(de::Error::custom)
}
