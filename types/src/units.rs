//! Integers with meaning.

use serde::{Deserialize, Serialize};

/// A count of mebibytes (2^20 bytes).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct Mebibytes(pub u64);

impl Mebibytes {
    /// Returns the size in bytes, or `None` past 2^64.
    pub const fn to_bytes(self) -> Option<u64> {
        self.0.checked_mul(1 << 20)
    }
}

impl std::fmt::Display for Mebibytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} MiB", self.0)
    }
}

/// Seconds since 1970-01-01T00:00:00Z, leap seconds not counted (POSIX time).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct UnixSeconds(pub u64);

impl UnixSeconds {
    /// Returns this time and `seconds` more, stopping at the largest time there is.
    pub const fn plus(self, seconds: u64) -> Self {
        Self(self.0.saturating_add(seconds))
    }

    /// Returns the seconds from `earlier` to `self`, zero when `earlier` is later.
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
