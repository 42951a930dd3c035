//! What a node remembers of its log: the answers of its local interface to `GET /v1/logs` and
//! `GET /v1/events`.
//!
//! Numbers are the kernel's: they grow with each record of its log, from 0 at every boot, also
//! across restarts of the agent. Readers skip what they do not know.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::MachineId;

/// How much a line matters; the most important is the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Something cannot do its work.
    Error,
    /// Somebody should look.
    Warning,
    /// Worth knowing.
    Notice,
    /// What happens.
    Info,
    /// For whoever looks for a fault.
    Debug,
}

impl Level {
    /// Every level, the most important first.
    pub const ALL: [Self; 5] = [Self::Error, Self::Warning, Self::Notice, Self::Info, Self::Debug];

    /// Returns the level's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Notice => "notice",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

/// Which part of a node wrote a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogSource {
    /// The node service.
    Agent,
    /// The screen's program.
    Dashboard,
    /// PID 1.
    Init,
    /// The kernel. No program can write in its name.
    Kernel,
    /// The process of a machine.
    Machine,
}

impl LogSource {
    /// Every source.
    pub const ALL: [Self; 5] =
        [Self::Agent, Self::Dashboard, Self::Init, Self::Kernel, Self::Machine];

    /// Returns the source's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Dashboard => "dashboard",
            Self::Init => "init",
            Self::Kernel => "kernel",
            Self::Machine => "machine",
        }
    }
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Its number.
    pub number: u64,
    /// Milliseconds since the kernel started.
    pub at_ms: u64,
    /// How much it matters.
    pub level: Level,
    /// Who wrote it.
    pub source: LogSource,
    /// The machine whose process wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineId>,
    /// What it says, without control characters, at most 1,000 bytes.
    pub text: String,
}

/// What happened: a line that is one of the node's events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEvent {
    /// Number of its line.
    pub number: u64,
    /// Milliseconds since the kernel started.
    pub at_ms: u64,
    /// How much it matters.
    pub level: Level,
    /// Who reported it.
    pub source: LogSource,
    /// What happened, as `machine-started`.
    pub name: String,
    /// Particulars by name, as the event's line has them; quotes and escapes are resolved.
    pub fields: BTreeMap<String, String>,
}

/// Lines from a number on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Logs {
    /// The lines, oldest first; numbers have gaps where lines were left out or did not match.
    pub lines: Vec<LogLine>,
    /// What to ask for as `from` next.
    pub next: u64,
    /// Number of the oldest line that is kept.
    pub oldest: u64,
}

/// Events from a number on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeEvents {
    /// The events, oldest first.
    pub events: Vec<NodeEvent>,
    /// What to ask for as `from` next.
    pub next: u64,
    /// Number of the oldest event that is kept.
    pub oldest: u64,
}
