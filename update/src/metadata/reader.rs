//! Takes values out of parsed JSON; an error says where it looked and what would be right.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::MetadataError;
use crate::json::Json;

/// A place in a document.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    json: &'a Json,
    at: String,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(json: &'a Json) -> Self {
        Self { json, at: String::new() }
    }

    pub(crate) fn json(&self) -> &'a Json {
        self.json
    }

    pub(crate) fn at(&self) -> String {
        if self.at.is_empty() { "the document".to_owned() } else { self.at.clone() }
    }

    pub(crate) fn expected(&self, expected: &'static str) -> MetadataError {
        MetadataError::Shape { at: self.at(), expected }
    }

    pub(crate) fn field(&self, name: &str) -> Result<Self, MetadataError> {
        let missing = || self.below(name, &Json::Null).expected("this field");
        self.optional(name)?.ok_or_else(missing)
    }

    pub(crate) fn optional(&self, name: &str) -> Result<Option<Self>, MetadataError> {
        Ok(self.entries()?.get(name).map(|value| self.below(name, value)))
    }

    pub(crate) fn map(&self, limit: usize) -> Result<Vec<(&'a str, Self)>, MetadataError> {
        let entries = self.entries()?;
        self.limit(entries.len(), limit)?;
        Ok(entries.iter().map(|(name, value)| (name.as_str(), self.below(name, value))).collect())
    }

    pub(crate) fn list(&self, limit: usize) -> Result<Vec<Self>, MetadataError> {
        let Json::List(items) = self.json else {
            return Err(self.expected("a list"));
        };
        self.limit(items.len(), limit)?;
        let place = |(at, item)| self.below(&format!("{at}"), item);
        Ok(items.iter().enumerate().map(place).collect())
    }

    pub(crate) fn text(&self) -> Result<&'a str, MetadataError> {
        match self.json {
            Json::Text(text) => Ok(text),
            Json::Bool(_) | Json::List(_) | Json::Map(_) | Json::Null | Json::Number(_) => {
                Err(self.expected("a string"))
            }
        }
    }

    pub(crate) fn boolean(&self) -> Result<bool, MetadataError> {
        if let Json::Bool(value) = self.json {
            return Ok(*value);
        }
        Err(self.expected("true or false"))
    }

    pub(crate) fn count(&self) -> Result<u64, MetadataError> {
        let wrong = || self.expected("a whole number from 0 to 2^64 - 1");
        let Json::Number(number) = self.json else {
            return Err(wrong());
        };
        u64::try_from(*number).map_err(|_| wrong())
    }

    pub(crate) fn positive(&self) -> Result<u64, MetadataError> {
        match self.count() {
            Ok(0) | Err(_) => Err(self.expected("a whole number from 1 to 2^64 - 1")),
            Ok(number) => Ok(number),
        }
    }

    /// Reads `YYYY-MM-DDTHH:MM:SSZ`, the only form of time in metadata.
    pub(crate) fn time(&self) -> Result<Timestamp, MetadataError> {
        let wrong = || self.expected("a time such as 2026-11-21T09:00:00Z");
        let text = self.text()?;
        const FORM: &[u8; 20] = b"0000-00-00T00:00:00Z";
        let fits = |(found, form): (u8, &u8)| match form {
            b'0' => found.is_ascii_digit(),
            _ => found == *form,
        };
        if text.len() != FORM.len() || !text.bytes().zip(FORM).all(fits) {
            return Err(wrong());
        }
        text.parse().map_err(|_| wrong())
    }

    fn entries(&self) -> Result<&'a BTreeMap<String, Json>, MetadataError> {
        if let Json::Map(entries) = self.json {
            return Ok(entries);
        }
        Err(self.expected("an object"))
    }

    fn limit(&self, found: usize, limit: usize) -> Result<(), MetadataError> {
        if found > limit {
            return Err(MetadataError::TooMany { at: self.at(), limit });
        }
        Ok(())
    }

    fn below(&self, name: &str, json: &'a Json) -> Self {
        let at = if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) };
        Self { json, at }
    }
}
