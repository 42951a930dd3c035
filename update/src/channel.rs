//! What a release consists of, and which release a node should run: the two documents that
//! Holdfast keeps as targets of a repository. Both are trusted because TUF delivered them; what
//! they say is still parsed with limits, and every decision is made here, without a clock.
//!
//! # Manifest, target `CHANNEL/RELEASE/manifest.json`
//!
//! | field | meaning |
//! |---|---|
//! | `format` | 1 |
//! | `release` | the release, three numbers such as `1.4.0` |
//! | `files` | by kind (`uki`, `sbom`, or others that older nodes ignore): `target`, `length`, `sha256` |
//!
//! # Channel, target `CHANNEL/channel.json`
//!
//! | field | meaning |
//! |---|---|
//! | `format` | 1 |
//! | `channel` | its name |
//! | `release` | the release to run; absent while there is none |
//! | `minimum` | nodes run nothing older than this, whatever offers it |
//! | `withdrawn` | releases that nobody may run any longer |
//! | `waves` | `start`, and steps of `after_s` and `permille`: which share of nodes may update when |
//!
//! Fields that a document has besides are ignored, so that one of a newer tool still counts; a
//! document of another `format` is refused.

use std::{collections::BTreeMap, fmt, str::FromStr};

use aws_lc_rs::digest;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Longest document, in bytes.
pub const MAX_BYTES: usize = 64 << 10;
/// Most entries of a list in either document.
const MAX_ENTRIES: usize = 256;
/// The only format so far.
const FORMAT: u32 = 1;

/// Why a document is refused.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum DocumentError {
    #[error("it has {found} bytes; {MAX_BYTES} are the most")]
    TooLong { found: usize },
    #[error("it is not the JSON that is expected")]
    Json(#[from] serde_json::Error),
    #[error("its format is {found}; this program knows {FORMAT}")]
    Format { found: u32 },
    #[error("{field} has more than {MAX_ENTRIES} entries")]
    TooMany { field: &'static str },
    #[error("waves must rise, in time and in share, up to 1000 permille")]
    Waves,
}

/// A release: three numbers, ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Release {
    /// Changes when nodes have to be prepared by hand.
    pub major: u32,
    /// Changes when there is something new.
    pub minor: u32,
    /// Changes when something was mended.
    pub patch: u32,
}

/// Why a text names no release.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not three numbers such as 1.4.0")]
pub struct ReleaseError {
    found: String,
}

impl FromStr for Release {
    type Err = ReleaseError;

    fn from_str(text: &str) -> Result<Self, ReleaseError> {
        let number = |part: &str| {
            let canonical = part == "0" || !part.starts_with('0');
            let digits = part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse().ok().filter(|_| canonical && digits)
        };
        let numbers: Option<Vec<u32>> = text.split('.').map(number).collect();
        match numbers.as_deref() {
            Some(&[major, minor, patch]) => Ok(Self { major, minor, patch }),
            _ => Err(ReleaseError { found: text.chars().take(64).collect() }),
        }
    }
}

impl TryFrom<String> for Release {
    type Error = ReleaseError;

    fn try_from(text: String) -> Result<Self, ReleaseError> {
        text.parse()
    }
}

impl From<Release> for String {
    fn from(release: Release) -> Self {
        release.to_string()
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The manifest of a release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// The release.
    pub release: Release,
    /// Its files, by kind.
    pub files: BTreeMap<String, File>,
}

/// One file of a release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// The target that it is.
    pub target: String,
    /// Length in bytes.
    pub length: u64,
    /// SHA-256.
    pub sha256: Sha256,
}

/// A SHA-256 digest, in hexadecimal where it is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Sha256(pub [u8; 32]);

impl TryFrom<String> for Sha256 {
    type Error = types::hex::HexError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        types::hex::decode(&text).map(Self)
    }
}

impl From<Sha256> for String {
    fn from(digest: Sha256) -> Self {
        types::hex::encode(&digest.0)
    }
}

impl Manifest {
    /// Makes a manifest.
    pub fn new(release: Release, files: BTreeMap<String, File>) -> Self {
        Self { format: FORMAT, release, files }
    }

    /// Parses a manifest.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        let manifest: Self = document(bytes)?;
        few("files", manifest.files.len())?;
        Ok(manifest)
    }

    /// Names the target that holds the manifest of a release.
    pub fn target(channel: &str, release: Release) -> String {
        format!("{channel}/{release}/manifest.json")
    }
}

/// The state of a channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    format: u32,
    /// Its name.
    pub channel: String,
    /// The release to run.
    #[serde(default)]
    pub release: Option<Release>,
    /// The oldest release that may run.
    #[serde(default)]
    pub minimum: Option<Release>,
    /// Releases that may not run.
    #[serde(default)]
    pub withdrawn: Vec<Release>,
    /// Who may update when; everybody at once without it.
    #[serde(default)]
    pub waves: Option<Waves>,
}

/// Which share of the nodes may update when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waves {
    /// Time from which steps count.
    pub start: Timestamp,
    /// Rising in both numbers.
    pub steps: Vec<Wave>,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wave {
    /// Seconds after the start.
    pub after_s: u32,
    /// Share of the nodes that may update from then on, up to 1000.
    pub permille: u16,
}

/// What a node should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// What runs is right.
    Stay,
    /// Update to this release.
    Update(Release),
    /// What runs was withdrawn or is too old: go to this release now, not in a wave.
    Replace(Release),
    /// What runs was withdrawn or is too old, and the channel has nothing to go to.
    Stranded,
    /// The node's wave for this release begins then.
    Wait(Release, Timestamp),
}

impl Channel {
    /// Makes a channel without a release.
    pub fn new(name: &str) -> Self {
        Self {
            format: FORMAT,
            channel: name.to_owned(),
            release: None,
            minimum: None,
            withdrawn: Vec::new(),
            waves: None,
        }
    }

    /// Parses a channel.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        let channel: Self = document(bytes)?;
        few("withdrawn", channel.withdrawn.len())?;
        if let Some(waves) = &channel.waves {
            few("waves", waves.steps.len())?;
            let rising = |pair: &[Wave]| {
                pair[0].after_s < pair[1].after_s && pair[0].permille <= pair[1].permille
            };
            let whole = waves.steps.iter().all(|step| step.permille <= 1000);
            if !whole || !waves.steps.windows(2).all(rising) {
                return Err(DocumentError::Waves);
            }
        }
        Ok(channel)
    }

    /// Names the target that holds a channel's state.
    pub fn target(channel: &str) -> String {
        format!("{channel}/channel.json")
    }

    /// Whether a release may run.
    pub fn permits(&self, release: Release) -> bool {
        !self.withdrawn.contains(&release) && self.minimum.is_none_or(|least| release >= least)
    }

    /// Decides what the node of this id, which runs `running`, should do at the time `now`. A
    /// release older than the running one is gone to only when the running one may not run.
    pub fn decide(&self, node: &[u8], running: Release, now: Timestamp) -> Decision {
        let offered = self.release.filter(|release| self.permits(*release));
        match offered {
            _ if !self.permits(running) => offered.map_or(Decision::Stranded, Decision::Replace),
            Some(release) if release > running => match self.turn(node, release) {
                Some(turn) if turn <= now => Decision::Update(release),
                Some(turn) => Decision::Wait(release, turn),
                None => Decision::Stay,
            },
            Some(_) | None => Decision::Stay,
        }
    }

    /// Returns when a node may update to a release; `None` if no step includes it yet.
    fn turn(&self, node: &[u8], release: Release) -> Option<Timestamp> {
        let Some(waves) = &self.waves else {
            return Some(Timestamp::MIN);
        };
        let place = place(node, release);
        let step = waves.steps.iter().find(|step| place < step.permille)?;
        waves.start.checked_add(jiff::SignedDuration::from_secs(step.after_s.into())).ok()
    }
}

/// Returns a node's place in the waves of a release, from 0 to 999: even over all nodes, and another
/// one with each release, so that nobody is always first.
pub fn place(node: &[u8], release: Release) -> u16 {
    let mut text = node.to_vec();
    text.push(0);
    text.extend_from_slice(release.to_string().as_bytes());
    let digest = digest::digest(&digest::SHA256, &text);
    let number = digest.as_ref().iter().take(6).fold(0u64, |n, byte| n << 8 | u64::from(*byte));
    u16::try_from((number * 1000) >> 48).unwrap_or(999)
}

fn document<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, DocumentError> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    if bytes.len() > MAX_BYTES {
        return Err(DocumentError::TooLong { found: bytes.len() });
    }
    let Format { format } = serde_json::from_slice(bytes)?;
    if format != FORMAT {
        return Err(DocumentError::Format { found: format });
    }
    Ok(serde_json::from_slice(bytes)?)
}

fn few(field: &'static str, found: usize) -> Result<(), DocumentError> {
    if found > MAX_ENTRIES { Err(DocumentError::TooMany { field }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(text: &str) -> Release {
        text.parse().expect(text)
    }

    fn channel(rest: &str) -> Channel {
        let text = format!(r#"{{"format":1,"channel":"stable","new":true,{rest}}}"#);
        Channel::parse(text.as_bytes()).expect("a channel")
    }

    fn decide(rest: &str, running: &str) -> Decision {
        channel(rest).decide(b"node", release(running), Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn newer_releases_are_taken_and_older_ones_are_not() {
        let newest = release("1.10.0");
        assert_eq!(decide(r#""release":"1.10.0""#, "1.9.9"), Decision::Update(newest));
        assert_eq!(decide(r#""release":"1.10.0""#, "1.10.0"), Decision::Stay);
        assert_eq!(decide(r#""release":"1.10.0""#, "1.11.0"), Decision::Stay);
        assert_eq!(decide(r#""minimum":"1.0.0""#, "1.0.0"), Decision::Stay);
    }

    #[test]
    fn withdrawn_and_too_old_releases_are_left_without_waiting() {
        let waves = r#""waves":{"start":"2100-01-01T00:00:00Z","steps":[]}"#;
        let gone = format!(r#""release":"1.0.0","withdrawn":["1.1.0"],{waves}"#);
        assert_eq!(decide(&gone, "1.1.0"), Decision::Replace(release("1.0.0")));
        let old = format!(r#""release":"1.2.0","minimum":"1.2.0",{waves}"#);
        assert_eq!(decide(&old, "1.1.9"), Decision::Replace(release("1.2.0")));
        let nothing = r#""release":"1.1.0","withdrawn":["1.1.0"]"#;
        assert_eq!(decide(nothing, "1.1.0"), Decision::Stranded);
        assert_eq!(decide(nothing, "1.0.0"), Decision::Stay);
    }

    #[test]
    fn waves_reach_everybody_in_turn() {
        let channel = channel(
            r#""release":"2.0.0","waves":{"start":"1970-01-01T00:00:00Z",
               "steps":[{"after_s":0,"permille":100},{"after_s":3600,"permille":1000}]}"#,
        );
        let (now, later) = (Timestamp::UNIX_EPOCH, Timestamp::from_second(3600).expect("a time"));
        let all: Vec<Decision> =
            (0..2000u32).map(|n| channel.decide(&n.to_be_bytes(), release("1.0.0"), now)).collect();
        let first = all.iter().filter(|d| **d == Decision::Update(release("2.0.0"))).count();
        assert!((140..260).contains(&first), "{first} of 2000 nodes at 10 %");
        assert!(all.contains(&Decision::Wait(release("2.0.0"), later)));
        assert!(all.iter().all(|d| *d != Decision::Stay));
    }

    #[test]
    fn unreadable_documents_are_refused() {
        let refused = [
            r#"{"format":2,"channel":"a"}"#,
            r#"{"format":1}"#,
            r#"{"format":1,"channel":"a","release":"1.02.0"}"#,
            r#"{"format":1,"channel":"a","release":"+1.2.0"}"#,
            r#"{"format":1,"channel":"a","waves":{"start":"1970-01-01T00:00:00Z",
               "steps":[{"after_s":5,"permille":10},{"after_s":5,"permille":20}]}}"#,
        ];
        assert_eq!(refused.map(|text| Channel::parse(text.as_bytes()).is_ok()), [false; 5]);
        let long = " ".repeat(MAX_BYTES + 1);
        assert!(matches!(Manifest::parse(long.as_bytes()), Err(DocumentError::TooLong { .. })));
    }
}
