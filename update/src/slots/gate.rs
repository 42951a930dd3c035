//! Judges a release that runs for the first time: what must be there within a stated time.

use std::time::Duration;

/// What must hold, in the words that people read when it does not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checks {
    /// What is missing; empty when everything is there.
    pub missing: Vec<String>,
}

/// The verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gate {
    /// There is still time for what is missing.
    Pending(String),
    /// Everything was there, for long enough.
    Passed,
    /// It did not come in time.
    Failed(String),
}

/// Judges after `up` since the start, when everything has been there for `held`, or not (`None`).
/// `limit` is how long a release has for it, `hold` how long it must last.
pub fn judge(checks: &Checks, up: Duration, held: Option<Duration>, times: Times) -> Gate {
    match held {
        Some(held) if held >= times.hold => Gate::Passed,
        _ if up < times.limit => match &checks.missing[..] {
            [] => Gate::Pending("everything is there; it has to last".to_owned()),
            missing => Gate::Pending(missing.join("; ")),
        },
        _ if checks.missing.is_empty() => Gate::Failed("it comes and goes".to_owned()),
        _ => {
            let (missing, limit) = (checks.missing.join("; "), times.limit.as_secs());
            Gate::Failed(format!("after {limit} s: {missing}"))
        }
    }
}

/// The times that a gate knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Longest wait for everything.
    pub limit: Duration,
    /// How long everything must last.
    pub hold: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_must_come_in_time_and_last() {
        let times = Times { limit: Duration::from_secs(600), hold: Duration::from_secs(10) };
        let seconds = Duration::from_secs;
        let whole = Checks::default();
        let lame = Checks { missing: vec!["no network".to_owned()] };
        let pending = Gate::Pending("no network".to_owned());
        assert_eq!(judge(&lame, seconds(5), None, times), pending);
        assert_eq!(judge(&whole, seconds(20), Some(seconds(10)), times), Gate::Passed);
        assert!(matches!(judge(&whole, seconds(20), Some(seconds(9)), times), Gate::Pending(_)));
        let failed = Gate::Failed("after 600 s: no network".to_owned());
        assert_eq!(judge(&lame, seconds(600), None, times), failed);
        assert!(matches!(judge(&whole, seconds(600), Some(seconds(1)), times), Gate::Failed(_)));
    }
}
