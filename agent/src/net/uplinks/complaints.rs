//! What of the configuration's problems the log is told, and when. Pure.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// A problem that stands so long is told: drivers take seconds to find cards, and links to come up.
const STANDS: Duration = Duration::from_secs(15);

/// The problems there are, each with the time when it is to be told; `None` once it was.
#[derive(Debug, Default)]
pub(super) struct Complaints(BTreeMap<String, Option<Instant>>);

impl Complaints {
    /// Takes what a look found. Returns what is to be told now: each problem once, until it is gone.
    pub(super) fn handle_look(&mut self, now: Instant, problems: &[String]) -> Vec<String> {
        self.0.retain(|known, _| problems.contains(known));
        for problem in problems {
            self.0.entry(problem.clone()).or_insert(Some(now + STANDS));
        }
        let due = self.0.iter_mut().filter(|(_, at)| at.is_some_and(|at| at <= now));
        due.map(|(problem, at)| {
            *at = None;
            problem.clone()
        })
        .collect()
    }

    /// Returns when to look again, if something is to be told then.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.0.values().flatten().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_told_once_when_it_stands_and_again_when_it_comes_back() {
        let (mut complaints, start) = (Complaints::default(), Instant::now());
        let (there, gone) = (["no card".to_owned()], []);
        assert_eq!(complaints.handle_look(start, &there), [""; 0]);
        assert_eq!(complaints.poll_timeout(), Some(start + STANDS));
        assert_eq!(complaints.handle_look(start + STANDS, &there), there);
        assert_eq!(complaints.handle_look(start + STANDS * 2, &there), [""; 0]);
        assert_eq!(complaints.poll_timeout(), None);
        assert_eq!(complaints.handle_look(start + STANDS * 3, &gone), [""; 0]);
        assert_eq!(complaints.handle_look(start + STANDS * 4, &there), [""; 0]);
        assert_eq!(complaints.handle_look(start + STANDS * 5, &there), there);
    }
}
