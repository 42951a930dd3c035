//! Canonical JSON: one value, one text, so that a signature over the text is one over the value.
//!
//! The subset of RFC 8785 (JSON Canonicalization Scheme) without fractions: no white space,
//! members sorted by name (§3.2.3; all our names are ASCII, where UTF-16 and byte order agree),
//! strings escaped as in §3.2.2.2, integers up to 2^53 - 1 (RFC 7493 §2.2).

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Largest integer that every JSON reader keeps exactly (RFC 7493 §2.2).
pub const MAX_INTEGER: u64 = (1 << 53) - 1;

/// Deepest nesting that is written.
const MAX_DEPTH: usize = 32;

/// Why a value has no canonical text, or a text is not canonical.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum CanonicalError {
    #[error("not JSON of the expected form")]
    Form { source: serde_json::Error },
    #[error("the number {number} is not an integer of at most {MAX_INTEGER}")]
    Number { number: String },
    #[error("nested deeper than {MAX_DEPTH} levels")]
    Depth,
    #[error(
        "not canonical JSON: byte {position} differs; expected members sorted by name, no white space and none twice"
    )]
    NotCanonical { position: usize },
}

/// Returns the canonical text of `value`.
pub fn to_bytes<T: Serialize>(value: &T) -> Result<Vec<u8>, CanonicalError> {
    let value = serde_json::to_value(value).map_err(|source| CanonicalError::Form { source })?;
    let mut text = Vec::new();
    write(&value, 0, &mut text)?;
    Ok(text)
}

/// Parses `bytes`, which must be the canonical text of what they say.
pub fn from_bytes<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Result<T, CanonicalError> {
    let value: T =
        serde_json::from_slice(bytes).map_err(|source| CanonicalError::Form { source })?;
    let canonical = to_bytes(&value)?;
    if canonical == bytes {
        return Ok(value);
    }
    let same = canonical.iter().zip(bytes).take_while(|(left, right)| left == right).count();
    Err(CanonicalError::NotCanonical { position: same })
}

fn write(value: &Value, depth: usize, text: &mut Vec<u8>) -> Result<(), CanonicalError> {
    if depth > MAX_DEPTH {
        return Err(CanonicalError::Depth);
    }
    match value {
        Value::Null => text.extend_from_slice(b"null"),
        Value::Bool(true) => text.extend_from_slice(b"true"),
        Value::Bool(false) => text.extend_from_slice(b"false"),
        Value::Number(number) => match number.as_u64() {
            Some(integer) if integer <= MAX_INTEGER => {
                text.extend_from_slice(integer.to_string().as_bytes());
            }
            _ => return Err(CanonicalError::Number { number: number.to_string() }),
        },
        Value::String(string) => write_string(string, text)?,
        Value::Array(items) => {
            text.push(b'[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    text.push(b',');
                }
                write(item, depth + 1, text)?;
            }
            text.push(b']');
        }
        Value::Object(members) => {
            let mut sorted: Vec<_> = members.iter().collect();
            sorted.sort_by_key(|(name, _)| name.as_str());
            text.push(b'{');
            for (index, (name, member)) in sorted.into_iter().enumerate() {
                if index > 0 {
                    text.push(b',');
                }
                write_string(name, text)?;
                text.push(b':');
                write(member, depth + 1, text)?;
            }
            text.push(b'}');
        }
    }
    Ok(())
}

fn write_string(string: &str, text: &mut Vec<u8>) -> Result<(), CanonicalError> {
    // serde_json escapes exactly what RFC 8785 §3.2.2.2 asks for, with lower-case digits.
    serde_json::to_writer(text, string).map_err(|source| CanonicalError::Form { source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(json: &str) -> String {
        let value: Value = serde_json::from_str(json).expect("a test's JSON");
        String::from_utf8(to_bytes(&value).expect("canonical")).expect("UTF-8")
    }

    #[test]
    fn members_are_sorted_and_space_is_gone() {
        assert_eq!(
            text(r#"{ "b": [1, null], "a": {"d": true, "c": "x"} }"#),
            r#"{"a":{"c":"x","d":true},"b":[1,null]}"#
        );
    }

    #[test]
    fn strings_are_escaped_as_rfc_8785_says() {
        assert_eq!(text(r#""\u000f\u000a\"\\\/\u20ac""#), "\"\\u000f\\n\\\"\\\\/\u{20ac}\"");
    }

    #[test]
    fn fractions_negatives_and_large_numbers_are_refused() {
        let refused = |json: &str| {
            let value: Value = serde_json::from_str(json).expect("a test's JSON");
            matches!(to_bytes(&value), Err(CanonicalError::Number { .. }))
        };
        assert!(refused("1.5") && refused("-1") && refused("9007199254740992"));
        assert!(!refused("9007199254740991"));
    }
}
