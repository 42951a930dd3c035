//! JSON as signed metadata needs it: read strictly, written canonically.
//!
//! Reading refuses what two readers could understand differently: an object with the same key
//! twice, numbers that are not whole, text after the document. Writing is the canonical form that
//! signatures cover, as every TUF repository makes it: object keys in order of their code points,
//! no white space, and in strings only `"` and `\` escaped.
//! Source: OLPC "Canonical JSON" (wiki.laptop.org/go/Canonical_JSON), and what securesystemslib's
//! `encode_canonical` makes of it. This module knows no schema.

use std::{collections::BTreeMap, fmt};

use serde::{
    Serialize, Serializer,
    de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor},
};

/// One JSON value without fractions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Json {
    /// `true` or `false`.
    Bool(bool),
    /// An array.
    List(Vec<Json>),
    /// An object; iteration is in canonical order.
    Map(BTreeMap<String, Json>),
    /// `null`.
    Null,
    /// A whole number from -2^63 to 2^64 - 1.
    Number(i128),
    /// A string.
    Text(String),
}

/// Why bytes are not JSON that signatures may cover.
#[derive(Debug, thiserror::Error)]
#[error("not JSON without duplicate keys and fractions")]
pub struct JsonError {
    #[from]
    source: serde_json::Error,
}

impl Json {
    /// Parses one document. Nesting is limited to 127 levels.
    pub fn parse(bytes: &[u8]) -> Result<Self, JsonError> {
        Ok(serde_json::from_slice(bytes)?)
    }

    /// Returns the canonical form.
    pub fn canonical(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }

    /// Makes an object.
    pub fn object<const N: usize>(fields: [(&str, Self); N]) -> Self {
        Self::Map(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// Makes a string.
    pub fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    /// Returns a field of an object.
    pub fn get(&self, name: &str) -> Option<&Self> {
        if let Self::Map(fields) = self { fields.get(name) } else { None }
    }

    /// Returns a field of an object to change it; one that is missing becomes an empty object.
    /// `None` if this is no object.
    pub fn at(&mut self, name: &str) -> Option<&mut Self> {
        let Self::Map(fields) = self else {
            return None;
        };
        Some(fields.entry(name.to_owned()).or_insert_with(|| Self::Map(BTreeMap::new())))
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bool(true) => out.extend_from_slice(b"true"),
            Self::Bool(false) => out.extend_from_slice(b"false"),
            Self::Null => out.extend_from_slice(b"null"),
            Self::Number(number) => out.extend_from_slice(number.to_string().as_bytes()),
            Self::Text(text) => write_text(text, out),
            Self::List(items) => {
                out.push(b'[');
                for (at, item) in items.iter().enumerate() {
                    separate(at, out);
                    item.write(out);
                }
                out.push(b']');
            }
            Self::Map(entries) => {
                out.push(b'{');
                for (at, (key, value)) in entries.iter().enumerate() {
                    separate(at, out);
                    write_text(key, out);
                    out.push(b':');
                    value.write(out);
                }
                out.push(b'}');
            }
        }
    }
}

fn separate(at: usize, out: &mut Vec<u8>) {
    if at > 0 {
        out.push(b',');
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in text.bytes() {
        if matches!(byte, b'"' | b'\\') {
            out.push(b'\\');
        }
        out.push(byte);
    }
    out.push(b'"');
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::List(items) => serializer.collect_seq(items),
            Self::Map(fields) => serializer.collect_map(fields),
            Self::Null => serializer.serialize_unit(),
            Self::Number(number) => serializer.serialize_i128(*number),
            Self::Text(text) => serializer.serialize_str(text),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value whose numbers are whole")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((key, value)) = entries.next_entry::<String, Json>()? {
            if map.contains_key(&key) {
                return Err(de::Error::custom(format!("key {key:?} appears twice")));
            }
            map.insert(key, value);
        }
        Ok(Json::Map(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> String {
        let json = Json::parse(text.as_bytes()).expect(text);
        String::from_utf8(json.canonical()).expect("canonical JSON is UTF-8")
    }

    #[test]
    fn canonical_form_orders_keys_and_drops_space() {
        assert_eq!(
            canonical(r#"{ "b": [1, -2, true], "a": {"é": null, "z": "x"} }"#),
            r#"{"a":{"z":"x","é":null},"b":[1,-2,true]}"#
        );
    }

    #[test]
    fn only_quotes_and_backslashes_are_escaped() {
        assert_eq!(canonical("\"a\\u000a\\\"\\\\\\u00e9\""), "\"a\n\\\"\\\\é\"");
    }

    #[test]
    fn ambiguous_documents_are_refused() {
        let refused =
            ["{\"a\":1,\"a\":2}", "1.5", "1e3", "1 2", "{\"a\":1,}", "18446744073709551616", ""];
        assert_eq!(refused.map(|text| Json::parse(text.as_bytes()).is_ok()), [false; 7]);
    }

    #[test]
    fn deep_nesting_is_refused_without_overflowing_the_stack() {
        assert!(Json::parse("[".repeat(100_000).as_bytes()).is_err());
    }
}
