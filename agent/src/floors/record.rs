//! The floors as bytes, the same in the TPM and on the disk. Pure.
//!
//! | bytes | meaning |
//! |---|---|
//! | 4 | `HFfl` |
//! | 1 | 1: this form |
//! | 1 | 1 if a TPM held the floors when this was written, else 0; in a TPM 0 |
//! | 2 | zero |
//! | 8 | no time before this one is believed, in seconds since 1970 |
//! | 12 | major, minor and patch of the oldest release that may run; all zero for any |
//! | 8 | first bytes of the SHA-256 of all before |
//!
//! Numbers are big-endian.

use sha2::{Digest, Sha256};
use types::units::UnixSeconds;
use update::channel::Release;

/// Length of a record, in bytes.
pub const LENGTH: usize = 36;
const MAGIC: &[u8; 4] = b"HFfl";
const FORM: u8 = 1;
const BODY: usize = 28;

/// What never goes down on a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Floors {
    /// No time before this one is believed.
    pub time: UnixSeconds,
    /// No release older than this one is taken from a repository; `None` while none was asked for.
    pub release: Option<Release>,
}

/// Whether a TPM held the floors when a file with them was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Held {
    /// It did.
    InTpm,
    /// None did.
    #[default]
    OnDiskOnly,
}

impl Floors {
    /// Returns the higher of both, each for itself.
    #[must_use]
    pub fn highest(self, other: Self) -> Self {
        Self { time: self.time.max(other.time), release: self.release.max(other.release) }
    }

    /// Writes a record.
    pub fn to_bytes(self, held: Held) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[4] = FORM;
        bytes[5] = u8::from(held == Held::InTpm);
        bytes[8..16].copy_from_slice(&self.time.0.to_be_bytes());
        if let Some(Release { major, minor, patch }) = self.release {
            bytes[16..20].copy_from_slice(&major.to_be_bytes());
            bytes[20..24].copy_from_slice(&minor.to_be_bytes());
            bytes[24..28].copy_from_slice(&patch.to_be_bytes());
        }
        let digest = Sha256::digest(&bytes[..BODY]);
        bytes[BODY..].copy_from_slice(&digest[..LENGTH - BODY]);
        bytes
    }

    /// Reads a record; `None` when it is damaged or of another form.
    pub fn from_bytes(bytes: &[u8]) -> Option<(Self, Held)> {
        let (body, digest) = bytes.split_at_checked(BODY)?;
        if digest.len() != LENGTH - BODY || !Sha256::digest(body).starts_with(digest) {
            return None;
        }
        let held = match body.get(5)? {
            0 => Held::OnDiskOnly,
            1 => Held::InTpm,
            _ => return None,
        };
        if !body.starts_with(MAGIC) || body.get(4) != Some(&FORM) || body.get(6..8)? != [0; 2] {
            return None;
        }
        let number = |at: usize| Some(u32::from_be_bytes(body.get(at..at + 4)?.try_into().ok()?));
        let time = u64::from_be_bytes(body.get(8..16)?.try_into().ok()?);
        let release = Release { major: number(16)?, minor: number(20)?, patch: number(24)? };
        let any = Release { major: 0, minor: 0, patch: 0 };
        let release = Some(release).filter(|release| *release != any);
        Some((Self { time: UnixSeconds(time), release }, held))
    }
}
