//! The metadata files of a TUF repository, parsed strictly.
//!
//! Sizes and counts are limited; fields that the specification does not name stay covered by the
//! signatures and are otherwise ignored. Parsing believes nothing: whether a file counts is decided
//! in `client` by the keys that its delegator names.
//! Source: TUF specification 1.0.34, section 4.

mod delegations;
mod key;
mod reader;

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;

pub use delegations::{Bins, Delegation, Delegations, Ending, Scope, Visit};
pub use key::Key;
use reader::Reader;

use crate::{json::Json, target::Hashes};

/// Most signatures of one file.
const MAX_SIGNATURES: usize = 256;
/// Most keys of one file.
const MAX_KEYS: usize = 4096;
/// Most key ids of one role.
const MAX_ROLE_KEYS: usize = 256;
/// Most files that a snapshot lists.
const MAX_LISTED: usize = 65_536;
/// Most targets of one role.
const MAX_TARGETS: usize = 131_072;
/// Longest target path, in bytes: what Linux allows for a path.
const MAX_TARGET_PATH: usize = 4095;
/// Longest percent-encoded role name, in bytes: its file and a temporary one beside it have names
/// of at most 255 bytes.
const MAX_ROLE_NAME: usize = 240;

/// Names of the roles that root delegates to.
pub const TOP_LEVEL: [&str; 4] = ["root", "timestamp", "snapshot", "targets"];

/// Why a metadata file cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum MetadataError {
    #[error("it is not JSON")]
    Json(#[from] crate::json::JsonError),
    #[error("{at}: expected {expected}")]
    Shape { at: String, expected: &'static str },
    #[error("{at}: more than {limit} entries")]
    TooMany { at: String, limit: usize },
    #[error("{at}: {name:?} appears twice")]
    Twice { at: String, name: String },
    #[error("specification version {found:?} is none of 1.x")]
    Specification { found: String },
}

/// A signed document: what was signed, and by whom it says it was.
#[derive(Debug, Clone)]
pub struct Envelope {
    signed: Json,
    signatures: Vec<Signature>,
}

/// One signature; who may sign is its reader's matter.
#[derive(Debug, Clone)]
pub struct Signature {
    /// Names the key in the delegator's list.
    pub keyid: String,
    /// The signature's bytes; empty when the file's are not lower-case hexadecimal.
    pub bytes: Vec<u8>,
}

impl Envelope {
    /// Parses a file. Each key id signs once at most.
    pub fn parse(bytes: &[u8]) -> Result<Self, MetadataError> {
        let json = Json::parse(bytes)?;
        let document = Reader::new(&json);
        let mut signatures: Vec<Signature> = Vec::new();
        for item in document.field("signatures")?.list(MAX_SIGNATURES)? {
            let keyid = item.field("keyid")?.text()?.to_owned();
            // One signature has one text: an altered bit of a digit's case would count otherwise.
            let text = item.field("sig")?.text()?;
            let digits = Some(text).filter(|text| !text.bytes().any(|c| c.is_ascii_uppercase()));
            let bytes = digits.and_then(key::unhex).unwrap_or_default();
            if signatures.iter().any(|other| other.keyid == keyid) {
                return Err(MetadataError::Twice { at: "signatures".to_owned(), name: keyid });
            }
            signatures.push(Signature { keyid, bytes });
        }
        let signed = document.field("signed")?.json().clone();
        Ok(Self { signed, signatures })
    }

    /// What the signatures cover.
    pub fn message(&self) -> Vec<u8> {
        self.signed.canonical()
    }

    /// The signatures, in the file's order.
    pub fn signatures(&self) -> &[Signature] {
        &self.signatures
    }

    fn reader(&self) -> Reader<'_> {
        Reader::new(&self.signed)
    }
}

/// What every role's document carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Counts up by each publication; at least 1.
    pub version: u64,
    /// From this time on the document is not to be used.
    pub expires: Timestamp,
}

impl Header {
    fn read(signed: &Reader<'_>, kind: &'static str) -> Result<Self, MetadataError> {
        let found = signed.field("_type")?;
        if found.text()? != kind {
            return Err(found.expected(kind));
        }
        let specification = signed.field("spec_version")?.text()?;
        let parts: Vec<&str> = specification.split('.').collect();
        if !matches!(parts.as_slice(), ["1", _] | ["1", _, _]) {
            return Err(MetadataError::Specification { found: specification.to_owned() });
        }
        Ok(Self {
            version: signed.field("version")?.positive()?,
            expires: signed.field("expires")?.time()?,
        })
    }
}

/// Who may sign for a role, and how many must.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleKeys {
    /// Ids in the delegator's list of keys, each once.
    pub keyids: Vec<String>,
    /// Distinct keys that must have signed; at least 1.
    pub threshold: u64,
}

impl RoleKeys {
    fn read(role: &Reader<'_>) -> Result<Self, MetadataError> {
        let list = role.field("keyids")?;
        let mut keyids: Vec<String> = Vec::new();
        for item in list.list(MAX_ROLE_KEYS)? {
            let keyid = item.text()?.to_owned();
            if keyids.contains(&keyid) {
                return Err(MetadataError::Twice { at: list.at(), name: keyid });
            }
            keyids.push(keyid);
        }
        Ok(Self { keyids, threshold: role.field("threshold")?.positive()? })
    }
}

/// The keys that a delegator names, by key id.
#[derive(Debug, Clone, Default)]
pub struct Keys(Arc<BTreeMap<String, Key>>);

impl Keys {
    fn read(map: &Reader<'_>) -> Result<Self, MetadataError> {
        let entries = map.map(MAX_KEYS)?;
        let keys: Result<BTreeMap<String, Key>, MetadataError> =
            entries.into_iter().map(|(id, key)| Ok((id.to_owned(), Key::read(&key)?))).collect();
        Ok(Self(Arc::new(keys?)))
    }

    /// Returns the key of an id.
    pub fn get(&self, keyid: &str) -> Option<&Key> {
        self.0.get(keyid)
    }
}

/// `root.json`: the keys of the top-level roles.
#[derive(Debug, Clone)]
pub struct Root {
    /// Version and expiry.
    pub header: Header,
    /// Whether file names carry versions and hashes.
    pub consistent_snapshot: bool,
    /// All keys that the roles name.
    pub keys: Keys,
    roles: BTreeMap<&'static str, RoleKeys>,
}

impl Root {
    /// Reads the document; all four roles must be there.
    pub fn read(envelope: &Envelope) -> Result<Self, MetadataError> {
        let signed = envelope.reader();
        let header = Header::read(&signed, "root")?;
        let consistent_snapshot = match signed.optional("consistent_snapshot")? {
            Some(value) => value.boolean()?,
            None => false,
        };
        let keys = Keys::read(&signed.field("keys")?)?;
        let listed = signed.field("roles")?;
        let mut roles = BTreeMap::new();
        for name in TOP_LEVEL {
            roles.insert(name, RoleKeys::read(&listed.field(name)?)?);
        }
        Ok(Self { header, consistent_snapshot, keys, roles })
    }

    /// Returns who signs for one of [`TOP_LEVEL`].
    pub fn role(&self, name: &str) -> Option<&RoleKeys> {
        self.roles.get(name)
    }

    /// Whether a key of `name` is gone in `next`.
    pub fn rotates(&self, next: &Self, name: &str) -> bool {
        let kept = |keyid: &String| next.role(name).is_some_and(|role| role.keyids.contains(keyid));
        self.role(name).is_some_and(|role| !role.keyids.iter().all(kept))
    }
}

/// What a delegator says of one metadata file.
#[derive(Debug, Clone)]
pub struct Listed {
    /// The file's version.
    pub version: u64,
    /// The file's length in bytes, if it is said.
    pub length: Option<u64>,
    /// The file's digests, if they are said.
    pub hashes: Option<Hashes>,
}

impl Listed {
    fn read(entry: &Reader<'_>) -> Result<Self, MetadataError> {
        let length = entry.optional("length")?.map(|value| value.count()).transpose()?;
        let hashes = entry.optional("hashes")?.map(|value| hashes(&value)).transpose()?;
        Ok(Self { version: entry.field("version")?.positive()?, length, hashes })
    }
}

/// `timestamp.json`: the newest snapshot.
#[derive(Debug, Clone)]
pub struct Newest {
    /// Version and expiry.
    pub header: Header,
    /// What it says of `snapshot.json`.
    pub snapshot: Listed,
}

impl Newest {
    /// Reads the document.
    pub fn read(envelope: &Envelope) -> Result<Self, MetadataError> {
        let signed = envelope.reader();
        Ok(Self {
            header: Header::read(&signed, "timestamp")?,
            snapshot: Listed::read(&signed.field("meta")?.field("snapshot.json")?)?,
        })
    }
}

/// `snapshot.json`: the versions of all targets roles.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Version and expiry.
    pub header: Header,
    /// By role name, without `.json`.
    pub roles: BTreeMap<String, Listed>,
}

impl Snapshot {
    /// Reads the document.
    pub fn read(envelope: &Envelope) -> Result<Self, MetadataError> {
        let signed = envelope.reader();
        let header = Header::read(&signed, "snapshot")?;
        let meta = signed.field("meta")?;
        let mut roles = BTreeMap::new();
        for (name, entry) in meta.map(MAX_LISTED)? {
            let Some(role) = name.strip_suffix(".json") else {
                return Err(meta.expected("file names that end in .json"));
            };
            roles.insert(role.to_owned(), Listed::read(&entry)?);
        }
        Ok(Self { header, roles })
    }
}

/// `targets.json` or the file of a delegated role.
#[derive(Debug, Clone)]
pub struct Targets {
    /// Version and expiry.
    pub header: Header,
    /// By target path.
    pub targets: BTreeMap<String, TargetFile>,
    /// To whom this role delegates, if to anyone.
    pub delegations: Option<Delegations>,
    /// Fields of the document that the specification does not name, such as a minimum version.
    pub extra: BTreeMap<String, Json>,
}

/// One target, as a role describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetFile {
    /// Length in bytes.
    pub length: u64,
    /// Digests that it must have.
    pub hashes: Hashes,
    /// What the repository adds for its own clients; `null` if nothing.
    pub custom: Json,
}

impl Targets {
    /// Reads the document.
    pub fn read(envelope: &Envelope) -> Result<Self, MetadataError> {
        let signed = envelope.reader();
        let header = Header::read(&signed, "targets")?;
        let mut targets = BTreeMap::new();
        let listed = signed.field("targets")?;
        for (path, entry) in listed.map(MAX_TARGETS)? {
            if path.is_empty() || path.len() > MAX_TARGET_PATH {
                return Err(listed.expected("target paths of 1 to 4095 bytes"));
            }
            let custom =
                entry.optional("custom")?.map_or(Json::Null, |custom| custom.json().clone());
            let length = entry.field("length")?.count()?;
            let file = TargetFile { length, hashes: hashes(&entry.field("hashes")?)?, custom };
            targets.insert(path.to_owned(), file);
        }
        let delegations = signed.optional("delegations")?;
        let delegations = delegations.map(|value| Delegations::read(&value)).transpose()?;
        const NAMED: [&str; 6] =
            ["_type", "delegations", "expires", "spec_version", "targets", "version"];
        let all = signed.map(usize::MAX)?;
        let extra = all.into_iter().filter(|(name, _)| !NAMED.contains(name));
        let extra = extra.map(|(name, value)| (name.to_owned(), value.json().clone())).collect();
        Ok(Self { header, targets, delegations, extra })
    }
}

/// Reads digests. Algorithms that are unknown here are ignored; a file that has no other verifies
/// as nothing.
fn hashes(map: &Reader<'_>) -> Result<Hashes, MetadataError> {
    let mut found = Hashes { sha256: None, sha512: None };
    let listed = map.map(16)?;
    if listed.is_empty() {
        return Err(map.expected("a digest"));
    }
    for (algorithm, value) in listed {
        let digest = value.text()?;
        let wrong = || value.expected("a digest in lower-case hexadecimal");
        if algorithm == "sha256" {
            found.sha256 = Some(types::hex::decode(digest).map_err(|_| wrong())?);
        } else if algorithm == "sha512" {
            found.sha512 = Some(types::hex::decode(digest).map_err(|_| wrong())?);
        }
    }
    Ok(found)
}
