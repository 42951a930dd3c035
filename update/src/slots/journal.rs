//! What a node must not forget about its releases: one small file.
//!
//! | line | content |
//! |---|---|
//! | 1 | `holdfast-slots 1 `, and the SHA-256 of all that follows the line's end, in hexadecimal |
//! | rest | JSON, [`Journal`] |
//!
//! It is replaced as a whole. One that is damaged is set aside by whoever reads it, and [`rebuilt`]
//! makes another one from what partition and firmware say.

use aws_lc_rs::digest;
use serde::{Deserialize, Serialize};

use super::{Contents, Place, Program, Slot, firmware::Firmware};
use crate::channel::{Release, Sha256};

/// Longest journal that is read, in bytes.
pub const MAX_BYTES: usize = 64 << 10;
/// Most releases that are remembered as failed; the oldest is forgotten first.
pub const MAX_FAILED: usize = 32;
/// Longest reason that is kept, in characters.
const MAX_REASON: usize = 300;
/// How often a program that leaves no sign of having been started is given to firmware.
pub const MAX_UNSTARTED: u8 = 2;
/// What a journal begins with.
const HEAD: &str = "holdfast-slots 1 ";

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum JournalError {
    #[error("it has {found} bytes; {MAX_BYTES} are the most")]
    TooLong { found: usize },
    #[error("it does not begin with {HEAD:?} and a digest")]
    Head,
    #[error("its digest is not the one that its first line says")]
    Digest,
    #[error("it is not the JSON that is expected")]
    Json(#[from] serde_json::Error),
}

/// What is remembered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    /// The program that passed its gate last.
    #[serde(default)]
    pub good: Option<Sha256>,
    /// Its release.
    #[serde(default)]
    pub release: Option<Release>,
    /// The program that was good before it.
    #[serde(default)]
    pub before: Option<Sha256>,
    /// Its release.
    #[serde(default)]
    pub release_before: Option<Release>,
    /// The program that is about to be tried, or is.
    #[serde(default)]
    pub trial: Option<Trial>,
    /// Programs that failed. They are not tried again until an operator says so.
    #[serde(default)]
    pub failed: Vec<Failed>,
    /// The program that firmware was to start, and that left no sign that it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unstarted: Option<Unstarted>,
    /// The release that an operator wants at once, whatever runs on the node.
    #[serde(default)]
    pub insisted: Option<Release>,
    /// Whether an operator wants the node to stay on what it runs.
    #[serde(default)]
    pub held: bool,
    /// What came of the last trial, for people; empty before the first.
    #[serde(default)]
    pub last: String,
}

/// A program that is about to be tried, or is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// Where it lies.
    pub slot: Slot,
    /// What it is.
    pub sha256: Sha256,
    /// Its release.
    pub release: Release,
    /// How far it got.
    pub stage: Stage,
    /// What the node had before it, which it must have again.
    #[serde(default)]
    pub expected: Vec<String>,
}

/// How far a trial got.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Stage {
    /// The slot holds it.
    Written,
    /// Firmware starts it next.
    Armed {
        /// The boot in which that was decided, by the kernel's name for it.
        boot: String,
    },
}

/// A program that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// What it is.
    pub sha256: Sha256,
    /// Its release.
    pub release: Release,
    /// What was seen.
    pub reason: String,
}

/// A program that firmware was to start, and that left no sign that it did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unstarted {
    /// Where it lies.
    pub slot: Slot,
    /// What it is.
    pub sha256: Sha256,
    /// Its release.
    pub release: Release,
    /// How often.
    pub times: u8,
}

impl Unstarted {
    /// Whether firmware is not asked any more.
    pub fn is_given_up(&self) -> bool {
        self.times >= MAX_UNSTARTED
    }
}

impl Journal {
    /// Parses a journal.
    pub fn parse(bytes: &[u8]) -> Result<Self, JournalError> {
        if bytes.len() > MAX_BYTES {
            return Err(JournalError::TooLong { found: bytes.len() });
        }
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or(JournalError::Head)?;
        let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
        let said = line.strip_prefix(HEAD.as_bytes()).ok_or(JournalError::Head)?;
        if said != checksum(rest).as_bytes() {
            return Err(JournalError::Digest);
        }
        let mut journal: Self = serde_json::from_slice(rest)?;
        let spare = journal.failed.len().saturating_sub(MAX_FAILED);
        journal.failed.drain(..spare);
        Ok(journal)
    }

    /// Writes a journal.
    pub fn bytes(&self) -> Vec<u8> {
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        format!("{HEAD}{}\n{text}", checksum(text.as_bytes())).into_bytes()
    }

    /// Whether a program failed before.
    pub fn has_failed(&self, sha256: Sha256) -> bool {
        self.failed.iter().any(|failed| failed.sha256 == sha256)
    }

    /// Ends the trial: it failed.
    pub fn with_failure(&self, reason: &str) -> Self {
        let mut journal = Self { trial: None, insisted: None, unstarted: None, ..self.clone() };
        let Some(Trial { sha256, release, .. }) = self.trial.clone() else { return journal };
        let reason: String = reason.chars().take(MAX_REASON).collect();
        journal.last = format!("release {release} failed: {reason}");
        journal.failed.retain(|failed| failed.sha256 != sha256);
        journal.failed.push(Failed { sha256, release, reason });
        let spare = journal.failed.len().saturating_sub(MAX_FAILED);
        journal.failed.drain(..spare);
        journal
    }

    /// The trial did not take place: nothing says that the program was started. It is tried again, until it
    /// is given up; it has not failed.
    pub fn with_unstarted(&self) -> Self {
        let Some(trial) = self.trial.clone() else { return self.clone() };
        let Trial { slot, sha256, release, .. } = trial;
        let before = self.unstarted.as_ref().filter(|before| before.sha256 == sha256);
        let times = before.map_or(0, |before| before.times).saturating_add(1);
        let unstarted = Unstarted { slot, sha256, release, times };
        let is_over = unstarted.is_given_up();
        let then = if is_over { "it is left" } else { "it is tried once more" };
        Self {
            trial: (!is_over).then_some(Trial { stage: Stage::Written, ..trial }),
            insisted: self.insisted.filter(|_| !is_over),
            last: format!(
                "release {release} left no sign of a start: firmware did not start its boot entry (is the \
                 boot order locked in its setup?), or the kernel ended before its first program; {then}"
            ),
            unstarted: Some(unstarted),
            ..self.clone()
        }
    }

    /// Ends the trial, or takes what runs: it is good.
    pub fn with_good(&self, sha256: Sha256, release: Option<Release>) -> Self {
        let last = match &self.trial {
            Some(trial) => format!("release {} passed and stays", trial.release),
            None => self.last.clone(),
        };
        let (before, release_before) = match self.good {
            Some(good) if good != sha256 => (Some(good), self.release),
            Some(_) | None => (self.before, self.release_before),
        };
        Self {
            good: Some(sha256),
            release,
            before,
            release_before,
            trial: None,
            unstarted: None,
            insisted: None,
            last,
            ..self.clone()
        }
    }

    /// Whether a program is worth starting: it is good, or was.
    pub fn trusts(&self, sha256: Sha256) -> bool {
        [self.good, self.before].contains(&Some(sha256))
    }

    /// Whether a program was the good one once, or the one before: it is the same release, and its bytes
    /// are others. It is never good again by itself, whatever it does when it is started.
    pub fn is_altered(&self, program: &Program) -> bool {
        let release = program.release();
        let known = [self.release, self.release_before].contains(&release);
        release.is_some() && known && !self.trusts(program.sha256)
    }
}

fn checksum(bytes: &[u8]) -> String {
    let mut sum = [0; 32];
    sum.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    types::hex::encode(&sum)
}

/// Makes a journal when there is none, or none that can be read. Firmware's order says what was good;
/// a node that runs from another slot than that is trying what is in it.
pub fn rebuilt(contents: &Contents, firmware: &Firmware, from: Option<Place>) -> Journal {
    let leading = firmware.leading().filter(|place| contents.at(*place).is_some());
    let good = leading.or(from).and_then(|place| contents.at(place));
    let trial = match (leading, from) {
        (Some(leading), Some(Place::Slot(slot))) if leading != Place::Slot(slot) => {
            let program = contents.at(Place::Slot(slot));
            program.filter(|program| Some(*program) != good).and_then(|program| {
                Some(Trial {
                    slot,
                    sha256: program.sha256,
                    release: program.release()?,
                    stage: Stage::Armed { boot: String::new() },
                    expected: Vec::new(),
                })
            })
        }
        _ => None,
    };
    let release = good.and_then(Program::release);
    Journal { good: good.map(|good| good.sha256), release, trial, ..Journal::default() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn journal() -> Journal {
        let release = Release { major: 1, minor: 2, patch: 3 };
        let trial = Trial {
            slot: Slot::B,
            sha256: Sha256([2; 32]),
            release,
            stage: Stage::Armed { boot: "x".to_owned() },
            expected: vec!["nvme".to_owned()],
        };
        Journal { good: Some(Sha256([1; 32])), trial: Some(trial), ..Journal::default() }
    }

    #[test]
    fn what_is_written_is_read() {
        let journal = journal().with_failure("no network");
        assert_eq!(Journal::parse(&journal.bytes()).ok(), Some(journal.clone()));
        assert!(journal.has_failed(Sha256([2; 32])));
        assert_eq!(journal.last, "release 1.2.3 failed: no network");
    }

    #[test]
    fn few_failures_are_remembered_and_each_once() {
        let mut all = journal();
        for number in 0..40 {
            all.trial =
                journal().trial.map(|trial| Trial { sha256: Sha256([number; 32]), ..trial });
            all = all.with_failure("again");
        }
        assert_eq!(all.failed.len(), MAX_FAILED);
        all.trial = journal().trial.map(|trial| Trial { sha256: Sha256([39; 32]), ..trial });
        assert_eq!(all.with_failure("again").failed.len(), MAX_FAILED);
    }

    proptest! {
        #[test]
        fn a_damaged_journal_is_refused(at in 0_usize..400, bit in 0_u8..8, cut in 0_usize..400) {
            let whole = journal().bytes();
            let mut flipped = whole.clone();
            let at = at % flipped.len();
            flipped[at] ^= 1 << bit;
            prop_assert!(Journal::parse(&flipped).is_err());
            prop_assert!(Journal::parse(&whole[..cut.min(whole.len() - 1)]).is_err());
        }
    }
}
