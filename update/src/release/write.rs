//! Documents in the making: what is signed, and the signatures so far.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::keys::{KeyError, PublicKey, Signer};
use crate::{json::Json, target::Hashes};

/// The version of the specification that documents follow.
const SPECIFICATION: &str = "1.0.34";
/// Seconds of a day.
const DAY_S: i64 = 24 * 3600;

/// A document with its signatures, by key id.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) signed: Json,
    signatures: BTreeMap<String, String>,
}

impl Draft {
    /// Begins a document of a type at version 0, to be counted up.
    pub(super) fn new(kind: &str) -> Self {
        let signed = Json::object([
            ("_type", Json::text(kind)),
            ("spec_version", Json::text(SPECIFICATION)),
            ("version", Json::Number(0)),
        ]);
        Self { signed, signatures: BTreeMap::new() }
    }

    /// Reads a file; signatures that are not text are dropped.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let json = Json::parse(bytes).ok()?;
        let mut signatures = BTreeMap::new();
        if let Some(Json::List(list)) = json.get("signatures") {
            for item in list {
                if let (Some(Json::Text(id)), Some(Json::Text(sig))) =
                    (item.get("keyid"), item.get("sig"))
                {
                    signatures.insert(id.clone(), sig.clone());
                }
            }
        }
        Some(Self { signed: json.get("signed")?.clone(), signatures })
    }

    /// The next version of it, without signatures, good for so many days.
    pub(super) fn renew(mut self, version: u64, now: Timestamp, days: i64) -> Self {
        self.signatures.clear();
        self.set("version", Json::Number(version.into()));
        self.set("expires", Json::Text(expiry(now, days)));
        self
    }

    /// Sets a field.
    pub(super) fn set(&mut self, name: &str, value: Json) {
        if let Some(field) = self.signed.at(name) {
            *field = value;
        }
    }

    /// Returns an object within it to change it; every part of the way is made if it is missing.
    pub(super) fn within(&mut self, way: &[&str]) -> Option<&mut BTreeMap<String, Json>> {
        let mut place = &mut self.signed;
        for name in way {
            place = place.at(name)?;
        }
        if let Json::Map(fields) = place { Some(fields) } else { None }
    }

    /// Adds a signature.
    pub(super) fn sign(&mut self, signer: &dyn Signer) -> Result<(), KeyError> {
        let signature = signer.sign(&self.signed.canonical())?;
        self.signatures.insert(signer.public().id(), types::hex::encode(&signature));
        Ok(())
    }

    /// The file.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let signature = |(id, sig): (&String, &String)| {
            Json::object([("keyid", Json::text(id)), ("sig", Json::text(sig))])
        };
        let signatures = Json::List(self.signatures.iter().map(signature).collect());
        let file = Json::object([("signatures", signatures), ("signed", self.signed.clone())]);
        serde_json::to_vec(&file).expect("JSON can be written as JSON")
    }
}

/// A time some days from now, without fractions of a second.
fn expiry(now: Timestamp, days: i64) -> String {
    let whole = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let then = whole.checked_add(SignedDuration::from_secs(days * DAY_S)).unwrap_or(Timestamp::MAX);
    then.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Keys, key ids and threshold of a role, as a delegator writes them.
pub(super) fn role(keys: &[PublicKey], threshold: u64) -> Json {
    let ids = Json::List(keys.iter().map(|key| Json::Text(key.id())).collect());
    Json::object([("keyids", ids), ("threshold", Json::Number(threshold.into()))])
}

/// What snapshot and timestamp say of a file.
pub(super) fn listed(version: u64, bytes: &[u8]) -> Json {
    let mut entry = described(bytes);
    if let Some(field) = entry.at("version") {
        *field = Json::Number(version.into());
    }
    entry
}

/// Length and digest of a file.
pub(super) fn described(bytes: &[u8]) -> Json {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
    file(bytes.len() as u64, &types::hex::encode(digest.as_ref()))
}

/// Length and digest of a file that is not in memory.
pub(super) fn file(length: u64, sha256: &str) -> Json {
    let hashes = Json::object([("sha256", Json::text(sha256))]);
    Json::object([("hashes", hashes), ("length", Json::Number(length.into()))])
}

/// The SHA-256 that metadata has of a target.
pub(super) fn sha256(hashes: &Hashes) -> Option<String> {
    hashes.sha256.map(|digest| types::hex::encode(&digest))
}
