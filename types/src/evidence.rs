//! How a node's last boot ended, and what a crash left behind.

use serde::{Deserialize, Serialize};

/// Most crashes that are kept on the node.
pub const MAX_CRASHES: usize = 8;
/// Most lines of a crash, and of the log before it, that a status has.
pub const MAX_LINES: usize = 40;

/// How the boot before this one ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastBoot {
    /// Whether it ended as it should: `None` when there was none, or nobody knows.
    #[serde(default)]
    pub ended: Option<Ended>,
    /// The last lines of its log that reached the disk, at most [`MAX_LINES`], the oldest first. Empty
    /// when it ended as it should.
    #[serde(default)]
    pub lines: Vec<String>,
    /// What crashes left behind, the newest first, at most [`MAX_CRASHES`]: those of earlier boots too.
    #[serde(default)]
    pub crashes: Vec<Crash>,
}

/// How a boot ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// The node was shut down or restarted.
    Properly,
    /// It was not: power was cut, a watchdog bit, or the kernel panicked.
    Abruptly,
}

/// What a crash of the kernel left behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crash {
    /// Name of its file in the folder `crashes` of STATE.
    pub name: String,
    /// The line that says why, as `Kernel panic - not syncing: Fatal exception`.
    pub reason: String,
    /// Bytes that were kept of it.
    pub bytes: u64,
    /// Its last lines, at most [`MAX_LINES`]; of the newest crash only.
    #[serde(default)]
    pub lines: Vec<String>,
}
