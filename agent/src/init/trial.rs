//! The end of a trial that nobody ends. Firmware starts a new release once; the agent makes that
//! last when the release is good, and tells init so, and goes back when it is not. When the agent never
//! gets so far, init restarts the node, and firmware starts what it had before.
//!
//! Pure but for [`read`], which reads firmware's variables, and [`limit`], which reads the command line.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use update::slots::firmware;

use crate::updates::variables;

/// How long a trial may go on: longer than the longest gate that can be configured, which is
/// fifteen minutes.
pub const LIMIT: Duration = Duration::from_secs(20 * 60);

/// By this word of its command line a release says that it needs less: seconds, [`LEAST_S`] to [`LIMIT`].
const WORD: &str = "holdfast.trial_s=";

/// As long as the shortest gate that can be configured, twice.
const LEAST_S: u64 = 60;

/// Time between two looks once the limit is over, and machines run.
const AGAIN: Duration = Duration::from_secs(60);

/// A trial that may have to be ended.
#[derive(Debug)]
pub struct Trial {
    deadline: Option<Instant>,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Wait,
    /// The node is to restart.
    Restart,
}

/// Whether a boot is a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boot {
    /// It is.
    Trial,
    /// It is not.
    Usual,
}

impl Trial {
    /// Begins to count at `now`.
    pub fn new(now: Instant, boot: Boot, limit: Duration) -> Self {
        Self { deadline: (boot == Boot::Trial).then(|| now + limit) }
    }

    /// The trial is over, if this is one.
    pub fn settle(&mut self) {
        self.deadline = None;
    }

    /// Judges at `now`, with `machines` running.
    pub fn judge(&mut self, now: Instant, machines: usize) -> Verdict {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return Verdict::Wait;
        }
        self.deadline = Some(now + AGAIN);
        if machines == 0 { Verdict::Restart } else { Verdict::Wait }
    }
}

/// Returns how long a trial of this release may go on.
pub fn limit() -> Duration {
    limit_of(&fs::read_to_string("/proc/cmdline").unwrap_or_default())
}

fn limit_of(words: &str) -> Duration {
    let said = words.split_whitespace().find_map(|word| word.strip_prefix(WORD)?.parse().ok());
    said.map_or(LIMIT, |seconds: u64| Duration::from_secs(seconds.max(LEAST_S)).min(LIMIT))
}

/// Reads whether this boot is a trial.
pub fn read() -> Boot {
    let found = variables::read(Path::new(crate::efivars::FOLDER));
    if found.is_ok_and(|found| firmware::is_trial(&found)) { Boot::Trial } else { Boot::Usual }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_goes_on_for_too_long_ends() {
        let now = Instant::now();
        let mut trial = Trial::new(now, Boot::Trial, LIMIT);
        assert_eq!(trial.judge(now + LIMIT - AGAIN, 0), Verdict::Wait);
        assert_eq!(trial.judge(now + LIMIT, 1), Verdict::Wait);
        assert_eq!(trial.judge(now + LIMIT + AGAIN, 0), Verdict::Restart);
    }

    #[test]
    fn a_release_may_ask_for_less_time_and_for_no_more() {
        let limit = |words: &str| limit_of(words).as_secs();
        assert_eq!(limit("console=ttyS0 holdfast.trial_s=90\n"), 90);
        assert_eq!(limit("holdfast.trial_s=5"), LEAST_S);
        assert_eq!(limit("holdfast.trial_s=99999"), LIMIT.as_secs());
        for none in ["", "holdfast.trial_s=", "holdfast.trial_s=1m", "xholdfast.trial_s=90"] {
            assert_eq!(limit(none), LIMIT.as_secs(), "{none}");
        }
    }

    #[test]
    fn one_that_ended_well_does_not() {
        let now = Instant::now();
        for boot in [Boot::Trial, Boot::Usual] {
            let mut trial = Trial::new(now, boot, LIMIT);
            trial.settle();
            assert_eq!(trial.judge(now + 3 * LIMIT, 0), Verdict::Wait);
        }
        let mut usual = Trial::new(now, Boot::Usual, LIMIT);
        assert_eq!(usual.judge(now + LIMIT, 0), Verdict::Wait);
    }
}
