//! The header of an encrypted volume, in LUKS2's on-disk format: `cryptsetup` opens it on any Linux.
//! Source: LUKS2 On-Disk Format Specification 1.1.1, §2 (binary header), §3 (JSON area).
//!
//! | Bytes            | Content                                                      |
//! |------------------|--------------------------------------------------------------|
//! | 0                | binary header, 4096 bytes, and the JSON area                 |
//! | 16 KiB           | the same again, under another magic and its own checksum     |
//! | 32 KiB           | areas of the key slots, ours 252 KiB each                    |
//! | 16 MiB           | what is encrypted                                            |
//!
//! Secrets that open slots are random and 256 bits long, so that PBKDF2 with few rounds is enough.

use std::{collections::BTreeMap, io};

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use types::disk_key::{DiskKey, KEY_BYTES, SectorCipher};
use zeroize::Zeroizing;

use super::stripes::{SPLIT, STRIPES, merge, split};

/// Bytes of one copy of the header: binary part and JSON.
pub const COPY: usize = 16 << 10;
/// Bytes in front of what is encrypted.
pub const DATA_OFFSET: u64 = update::disk::layout::HEADER_BYTES;
/// Bytes of a sector of the encrypted volume.
pub const DATA_SECTOR: u32 = 4096;

const BINARY: usize = 4096;
const JSON: usize = COPY - BINARY;
const MAGIC: [[u8; 6]; 2] = [*b"LUKS\xba\xbe", *b"SKUL\xba\xbe"];
const SLOTS_START: u64 = 2 * COPY as u64;
const SLOT_BYTES: u64 = 258_048;
/// Most slots of a header.
pub const SLOTS: u32 = 8;
/// Rounds of PBKDF2: the least that cryptsetup takes.
const ROUNDS: u32 = 1000;
/// Most rounds that a foreign header may ask for.
const MOST_ROUNDS: u32 = 10_000_000;
const CIPHER: &str = "aes-xts-plain64";

/// Why a header cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum HeaderError {
    #[error("neither copy of the volume's header is whole: {0}")]
    Damaged(String),
    #[error("the volume's header says {what} where this release expects {wanted}")]
    Foreign { what: String, wanted: &'static str },
    #[error("the header has no slot {0}")]
    NoSlot(u32),
    #[error("all {SLOTS} key slots are taken")]
    Full,
    #[error("the header's documents do not fit into {JSON} bytes")]
    Long,
    #[error("the secret does not open the volume")]
    Wrong,
    #[error("the recovery key cannot be sealed to {operator}; is that an operator's public key?")]
    Escrow { operator: types::ids::PublicKey },
    #[error("no randomness")]
    Random { source: getrandom::Error },
}

/// A header: which secrets open the volume, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// The volume's identity, as text.
    pub uuid: String,
    /// Counts up with each change; of two whole copies the higher counts.
    pub sequence: u64,
    /// Label and subsystem of the binary header, which mean nothing here and stay.
    names: [[u8; 48]; 2],
    document: Document,
}

/// The JSON area. What others wrote into it stays as it is; the forms below are read of what is ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Document {
    keyslots: BTreeMap<String, Value>,
    #[serde(default)]
    tokens: BTreeMap<String, Value>,
    segments: BTreeMap<String, Value>,
    digests: BTreeMap<String, DigestOf>,
    config: Value,
    #[serde(flatten)]
    more: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
struct Slot {
    #[serde(rename = "type")]
    kind: String,
    key_size: usize,
    af: Splitter,
    area: Area,
    kdf: Kdf,
}

#[derive(Debug, Deserialize)]
struct Splitter {
    #[serde(rename = "type")]
    kind: String,
    stripes: usize,
    hash: String,
}

#[derive(Debug, Deserialize)]
struct Area {
    #[serde(rename = "type")]
    kind: String,
    encryption: String,
    key_size: usize,
}

#[derive(Debug, Deserialize)]
struct Kdf {
    #[serde(rename = "type")]
    kind: String,
    hash: String,
    iterations: u32,
    salt: String,
}

#[derive(Debug, Deserialize)]
struct Segment {
    #[serde(rename = "type")]
    kind: String,
    offset: String,
    iv_tweak: String,
    size: String,
    encryption: String,
    sector_size: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct DigestOf {
    #[serde(rename = "type")]
    kind: String,
    keyslots: Vec<String>,
    segments: Vec<String>,
    hash: String,
    iterations: u32,
    salt: String,
    digest: String,
    #[serde(flatten)]
    more: BTreeMap<String, Value>,
}

/// A slot's area, ready to be written.
#[derive(Debug)]
pub struct SlotBytes {
    /// Number of the slot.
    pub slot: u32,
    /// Where it begins, in bytes from the volume's start.
    pub offset: u64,
    /// The encrypted, split key.
    pub bytes: Vec<u8>,
}

impl Header {
    /// Makes the header of a new volume with this key; no secret opens it yet.
    pub fn new(uuid: String, key: &DiskKey) -> Result<Self, HeaderError> {
        let salt: [u8; 32] = random()?;
        let digest = derive(key.as_bytes(), &salt, ROUNDS);
        let segment = json!({
            "type": "crypt",
            "offset": DATA_OFFSET.to_string(),
            "iv_tweak": "0",
            "size": "dynamic",
            "encryption": CIPHER,
            "sector_size": DATA_SECTOR,
        });
        let digest = DigestOf {
            kind: "pbkdf2".to_owned(),
            keyslots: Vec::new(),
            segments: vec!["0".to_owned()],
            hash: "sha256".to_owned(),
            iterations: ROUNDS,
            salt: STANDARD.encode(salt),
            digest: STANDARD.encode(&digest[..32]),
            more: BTreeMap::new(),
        };
        let config = json!({
            "json_size": JSON.to_string(),
            "keyslots_size": (DATA_OFFSET - SLOTS_START).to_string(),
        });
        let document = Document {
            keyslots: BTreeMap::new(),
            tokens: BTreeMap::new(),
            segments: [("0".to_owned(), segment)].into(),
            digests: [("0".to_owned(), digest)].into(),
            config,
            more: BTreeMap::new(),
        };
        Ok(Self { uuid, sequence: 1, names: [[0; 48]; 2], document })
    }

    /// Whether a volume begins with a header of this format, whole or not.
    pub fn is_at(start: &[u8]) -> bool {
        start.starts_with(&MAGIC[0])
            || start.get(COPY..).is_some_and(|second| second.starts_with(&MAGIC[1]))
    }

    /// Reads a header from the first [`Self::bytes`] of a volume.
    pub fn read(start: &[u8]) -> Result<Self, HeaderError> {
        let copy = |index: usize| read_copy(start.get(index * COPY..).unwrap_or_default(), index);
        match (copy(0), copy(1)) {
            (Ok(first), Ok(second)) if second.sequence > first.sequence => Ok(second),
            (Ok(first), _) => Ok(first),
            (Err(_), Ok(second)) => Ok(second),
            (Err(HeaderError::Foreign { what, wanted }), Err(_)) => {
                Err(HeaderError::Foreign { what, wanted })
            }
            (Err(first), Err(_)) => Err(HeaderError::Damaged(first.to_string())),
        }
    }

    /// Returns which of the two copies at the start of a volume is to be written anew, and what is wrong with
    /// it; `None` when they say the same. [`Self::read`] reads the other one.
    pub fn damage(start: &[u8]) -> Option<(usize, String)> {
        let copy = |index: usize| read_copy(start.get(index * COPY..).unwrap_or_default(), index);
        let older = |index: usize| Some((index, format!("copy {}: it is older", index + 1)));
        let damaged = |index, error| match error {
            HeaderError::Damaged(what) => Some((index, what)),
            HeaderError::Foreign { .. }
            | HeaderError::NoSlot(_)
            | HeaderError::Full
            | HeaderError::Long
            | HeaderError::Wrong
            | HeaderError::Escrow { .. }
            | HeaderError::Random { .. } => Some((index, error.to_string())),
        };
        match (copy(0), copy(1)) {
            (Ok(first), Ok(second)) if first == second => None,
            (Ok(first), Ok(second)) if second.sequence > first.sequence => older(0),
            (Ok(_), Ok(_)) => older(1),
            (Ok(_), Err(error)) => damaged(1, error),
            (Err(error), _) => damaged(0, error),
        }
    }

    /// How many bytes both copies have.
    pub const fn bytes() -> usize {
        2 * COPY
    }

    /// Returns both copies. Write and sync the second one first: one of them is whole at any time.
    pub fn copies(&self) -> Result<[Vec<u8>; 2], HeaderError> {
        Ok([self.copy(0)?, self.copy(1)?])
    }

    /// Adds a slot that `secret` opens. Write its bytes before the header.
    pub fn add_slot(&mut self, key: &DiskKey, secret: &[u8]) -> Result<SlotBytes, HeaderError> {
        let free = |slot: &u32| !self.document.keyslots.contains_key(&slot.to_string());
        let slot = (0..SLOTS).find(free).ok_or(HeaderError::Full)?;
        let (salt, offset) = (random::<32>()?, self.gap()?);
        let mut bytes = split(key)?;
        let derived = derive(secret, &salt, ROUNDS);
        SectorCipher::new(&DiskKey::from_bytes(*derived)).encrypt(0, &mut bytes);
        let description = json!({
            "type": "luks2",
            "key_size": KEY_BYTES,
            "af": {"type": "luks1", "stripes": STRIPES, "hash": "sha256"},
            "area": {
                "type": "raw",
                "offset": offset.to_string(),
                "size": SLOT_BYTES.to_string(),
                "encryption": CIPHER,
                "key_size": KEY_BYTES,
            },
            "kdf": {
                "type": "pbkdf2",
                "hash": "sha256",
                "iterations": ROUNDS,
                "salt": STANDARD.encode(salt),
            },
        });
        let name = slot.to_string();
        // The digest of the key that slots hold; another would be of another key.
        if let Some(digest) = self.document.digests.get_mut("0") {
            digest.keyslots.push(name.clone());
        }
        self.document.keyslots.insert(name, description);
        self.sequence += 1;
        Ok(SlotBytes { slot, offset, bytes })
    }

    /// Removes a slot and the tokens that belong to it. Returns where its area is, to be overwritten
    /// once the header is written.
    pub fn remove_slot(&mut self, slot: u32) -> Result<(u64, u64), HeaderError> {
        let name = slot.to_string();
        let area = self.area_of(slot)?;
        self.document.keyslots.remove(&name);
        self.document
            .digests
            .values_mut()
            .for_each(|digest| digest.keyslots.retain(|n| *n != name));
        self.document.tokens.retain(|_, token| slot_of(token) != Some(slot));
        self.sequence += 1;
        Ok(area)
    }

    /// Returns the offset and the length of a slot's area.
    pub fn area_of(&self, slot: u32) -> Result<(u64, u64), HeaderError> {
        let found =
            self.document.keyslots.get(&slot.to_string()).ok_or(HeaderError::NoSlot(slot))?;
        let (offset, _) = area(found)?;
        if offset < SLOTS_START
            || offset.checked_add(SPLIT as u64).is_none_or(|end| end > DATA_OFFSET)
        {
            return Err(foreign(format!("offset {offset}"), "a slot before the data"));
        }
        Ok((offset, SPLIT as u64))
    }

    /// Returns where an area that no slot has begins.
    fn gap(&self) -> Result<u64, HeaderError> {
        let taken = self.document.keyslots.values().map(area);
        let mut taken = taken.collect::<Result<Vec<_>, HeaderError>>()?;
        taken.sort_unstable();
        let mut begin = SLOTS_START;
        for (offset, length) in taken {
            if offset.checked_sub(begin).is_some_and(|room| room >= SLOT_BYTES) {
                break;
            }
            let end = offset.saturating_add(length).checked_next_multiple_of(BINARY as u64);
            begin = begin.max(end.unwrap_or(u64::MAX));
        }
        let fits = begin.checked_add(SLOT_BYTES).is_some_and(|end| end <= DATA_OFFSET);
        if fits { Ok(begin) } else { Err(HeaderError::Full) }
    }

    /// Returns the numbers of all slots.
    pub fn slots(&self) -> Vec<u32> {
        self.document.keyslots.keys().filter_map(|name| name.parse().ok()).collect()
    }

    /// Opens a slot whose area, as [`Self::area_of`] tells it, holds `area`.
    pub fn open(&self, slot: u32, area: &[u8], secret: &[u8]) -> Result<DiskKey, HeaderError> {
        let found =
            self.document.keyslots.get(&slot.to_string()).ok_or(HeaderError::NoSlot(slot))?;
        let found = check_slot(found)?;
        let mut area = area.get(..SPLIT).ok_or(HeaderError::Wrong)?.to_vec();
        let derived = derive(secret, &base64(&found.kdf.salt)?, found.kdf.iterations);
        SectorCipher::new(&DiskKey::from_bytes(*derived)).decrypt(0, &mut area);
        let key = merge(&Zeroizing::new(area));
        let digest = self.document.digests.get("0").ok_or_else(|| foreign("no digest", "one"))?;
        let found = derive(key.as_bytes(), &base64(&digest.salt)?, digest.iterations);
        // Public: whoever has the header can compare.
        if base64(&digest.digest)? == found[..32] { Ok(key) } else { Err(HeaderError::Wrong) }
    }

    /// Attaches a document to a slot, in which the keys `type` and `keyslots` are LUKS2's.
    pub fn add_token(&mut self, token: Value) {
        let free = |name: &String| !self.document.tokens.contains_key(name);
        let name = (0..32_u32).map(|n| n.to_string()).find(free);
        self.document.tokens.insert(name.unwrap_or_else(|| "0".to_owned()), token);
        self.sequence += 1;
    }

    /// Returns the documents of a type, each with the slot that it belongs to.
    pub fn tokens(&self, kind: &str) -> Vec<(u32, &Value)> {
        let tokens = self.document.tokens.values();
        let wanted =
            tokens.filter(|token| token.get("type").and_then(|t| t.as_str()) == Some(kind));
        wanted.filter_map(|token| Some((slot_of(token)?, token))).collect()
    }

    fn copy(&self, index: usize) -> Result<Vec<u8>, HeaderError> {
        let json = serde_json::to_vec(&self.document).map_err(|_| HeaderError::Long)?;
        let mut bytes = vec![0; COPY];
        // The document ends with a zero.
        if json.len() >= JSON {
            return Err(HeaderError::Long);
        }
        let salt: [u8; 64] = random()?;
        let offset = (index * COPY) as u64;
        let fields: [(usize, &[u8]); 11] = [
            (0, &MAGIC[index]),
            (6, &2_u16.to_be_bytes()),
            (8, &(COPY as u64).to_be_bytes()),
            (16, &self.sequence.to_be_bytes()),
            (24, &self.names[0]),
            (72, b"sha256"),
            (104, &salt),
            (168, &self.uuid.as_bytes()[..self.uuid.len().min(39)]),
            (208, &self.names[1]),
            (256, &offset.to_be_bytes()),
            (BINARY, &json),
        ];
        for (at, field) in fields {
            bytes[at..at + field.len()].copy_from_slice(field);
        }
        let sum = Sha256::digest(&bytes);
        bytes[448..480].copy_from_slice(&sum);
        Ok(bytes)
    }
}

fn read_copy(bytes: &[u8], index: usize) -> Result<Header, HeaderError> {
    let damaged = |what: &str| HeaderError::Damaged(format!("copy {}: {what}", index + 1));
    let bytes = bytes.get(..COPY).ok_or_else(|| damaged("the volume is too short"))?;
    if !bytes.starts_with(&MAGIC[index]) {
        return Err(damaged("no magic"));
    }
    let version = u16::from_be_bytes([bytes[6], bytes[7]]);
    if version != 2 {
        return Err(foreign(format!("version {version}"), "2"));
    }
    let size = u64_at(bytes, 8);
    if size != COPY as u64 {
        return Err(foreign(format!("a header of {size} bytes"), "16384"));
    }
    if u64_at(bytes, 256) != (index * COPY) as u64 {
        return Err(damaged("it belongs elsewhere"));
    }
    let mut blank = bytes.to_vec();
    blank[448..512].fill(0);
    if Sha256::digest(&blank)[..] != bytes[448..480] {
        return Err(damaged("its checksum does not match"));
    }
    let json = &bytes[BINARY..];
    let end = json.iter().position(|&byte| byte == 0).unwrap_or(json.len());
    let document: Document = serde_json::from_slice(&json[..end])
        .map_err(|error| foreign(error.to_string(), "a document of LUKS2"))?;
    check(&document)?;
    let uuid = &bytes[168..208];
    let end = uuid.iter().position(|&byte| byte == 0).unwrap_or(uuid.len());
    let uuid = String::from_utf8_lossy(&uuid[..end]).into_owned();
    let name = |at: usize| bytes[at..at + 48].first_chunk().copied().unwrap_or([0; 48]);
    Ok(Header { uuid, sequence: u64_at(bytes, 16), names: [name(24), name(208)], document })
}

/// Refuses what this release would misunderstand.
fn check(document: &Document) -> Result<(), HeaderError> {
    let wanted = document.config.pointer("/requirements/mandatory");
    if wanted.is_some_and(|wanted| wanted.as_array().is_none_or(|wanted| !wanted.is_empty())) {
        let wanted = wanted.unwrap_or_default();
        return Err(foreign(format!("the requirements {wanted}"), "none"));
    }
    let segment = document.segments.get("0").ok_or_else(|| foreign("no segment", "one"))?;
    let segment: Segment = typed(segment, "a segment")?;
    if document.segments.len() != 1
        || segment.kind != "crypt"
        || segment.offset != DATA_OFFSET.to_string()
        || segment.iv_tweak != "0"
        || segment.size != "dynamic"
        || segment.encryption != CIPHER
        || segment.sector_size != DATA_SECTOR
    {
        return Err(foreign(
            format!("{segment:?}"),
            "one segment of aes-xts-plain64 from 16 MiB on",
        ));
    }
    let digest = document.digests.get("0").ok_or_else(|| foreign("no digest", "one"))?;
    let sound = digest.kind == "pbkdf2" && digest.hash == "sha256" && rounds(digest.iterations);
    if sound { Ok(()) } else { Err(foreign(format!("{digest:?}"), "a digest by PBKDF2")) }
}

/// Reads a slot of this release's kind: those of others are opened by what made them.
fn check_slot(slot: &Value) -> Result<Slot, HeaderError> {
    let kind = slot.pointer("/kdf/type").and_then(Value::as_str).unwrap_or_default();
    if kind != "pbkdf2" {
        return Err(foreign(format!("a slot by {kind:?}"), "one by pbkdf2"));
    }
    let slot: Slot = typed(slot, "a slot of this release's kind")?;
    let sound = slot.kind == "luks2"
        && (slot.af.kind.as_str(), slot.area.kind.as_str()) == ("luks1", "raw")
        && slot.key_size == KEY_BYTES
        && (slot.af.stripes, slot.af.hash.as_str()) == (STRIPES, "sha256")
        && (slot.area.encryption.as_str(), slot.area.key_size) == (CIPHER, KEY_BYTES)
        && (slot.kdf.kind.as_str(), slot.kdf.hash.as_str()) == ("pbkdf2", "sha256")
        && rounds(slot.kdf.iterations);
    if sound {
        Ok(slot)
    } else {
        Err(foreign(format!("{slot:?}"), "a slot of this release's kind"))
    }
}

/// Where a slot's area begins, whoever made the slot, and how long it is.
fn area(slot: &Value) -> Result<(u64, u64), HeaderError> {
    let field = |name: &str| {
        let found = slot.get("area").and_then(|area| area.get(name)?.as_str());
        number(found.ok_or_else(|| foreign(format!("a slot without {name}"), "an area"))?)
    };
    Ok((field("offset")?, field("size")?))
}

fn typed<T: DeserializeOwned>(value: &Value, wanted: &'static str) -> Result<T, HeaderError> {
    T::deserialize(value).map_err(|error| foreign(error.to_string(), wanted))
}

fn rounds(count: u32) -> bool {
    (1..=MOST_ROUNDS).contains(&count)
}

fn slot_of(token: &Value) -> Option<u32> {
    token.get("keyslots")?.as_array()?.first()?.as_str()?.parse().ok()
}

fn foreign(what: impl Into<String>, wanted: &'static str) -> HeaderError {
    HeaderError::Foreign { what: what.into().chars().take(300).collect(), wanted }
}

fn number(text: &str) -> Result<u64, HeaderError> {
    text.parse().map_err(|_| foreign(text, "a number"))
}

fn base64(text: &str) -> Result<Vec<u8>, HeaderError> {
    STANDARD.decode(text).map_err(|_| foreign(text, "base64"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(field)
}

/// Returns `N` random bytes.
pub fn random<const N: usize>() -> Result<[u8; N], HeaderError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|source| HeaderError::Random { source })?;
    Ok(bytes)
}

/// PBKDF2 with HMAC-SHA-256, 64 bytes.
fn derive(secret: &[u8], salt: &[u8], rounds: u32) -> Zeroizing<[u8; KEY_BYTES]> {
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    pbkdf2::pbkdf2_hmac::<Sha256>(secret, salt, rounds, key.as_mut());
    key
}

/// Returns the secret that opens another volume, for whoever has opened this one.
pub fn descend(key: &DiskKey, volume: &str) -> Zeroizing<[u8; 32]> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("any length is right");
    mac.update(b"holdfast volume ");
    mac.update(volume.as_bytes());
    let mut secret = Zeroizing::new([0; 32]);
    secret.copy_from_slice(&mac.finalize().into_bytes());
    secret
}

/// Reads `bytes` as a header, and as the document in one whose checksum is right; for the fuzz target
/// and its corpus. Returns whether either is a header.
pub fn everything(bytes: &[u8]) -> bool {
    let _ = Header::is_at(bytes);
    let mut framed = vec![0; COPY];
    framed[..6].copy_from_slice(&MAGIC[0]);
    framed[7] = 2;
    framed[8..16].copy_from_slice(&(COPY as u64).to_be_bytes());
    framed[BINARY..].iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    let sum = Sha256::digest(&framed);
    framed[448..480].copy_from_slice(&sum);
    [Header::read(bytes), Header::read(&framed)].into_iter().flatten().map(visit).count() > 0
}

fn visit(mut header: Header) {
    for slot in header.slots() {
        let _ = header.area_of(slot);
    }
    let _ = header.copies();
    let _ = header.gap();
    let _ = header.tokens("holdfast-tpm2");
    for slot in header.slots() {
        let _ = header.remove_slot(slot);
    }
}

/// Turns a header's error into one of the disk that it is on.
impl From<HeaderError> for io::Error {
    fn from(error: HeaderError) -> Self {
        Self::other(error)
    }
}
