//! How many threads answer: one at first, then as many as there are connections at the same time.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Connections answered at the same time. Others wait in the socket's backlog.
pub(super) const MOST: usize = 32;

/// The threads that answer.
#[derive(Debug)]
pub(super) struct Crew(Mutex<Counts>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    /// Threads that there are.
    all: usize,
    /// Those of them that wait for a connection, or will at once.
    free: usize,
}

impl Default for Crew {
    /// One thread, which waits.
    fn default() -> Self {
        Self(Mutex::new(Counts { all: 1, free: 1 }))
    }
}

impl Crew {
    /// A free thread turns to a connection. Returns the number of the thread that it has to start, so that
    /// one is free again.
    pub(super) fn take_work(&self) -> Option<usize> {
        let mut counts = self.counts();
        counts.free = counts.free.saturating_sub(1);
        let next = counts.all;
        if counts.free > 0 || next >= MOST {
            return None;
        }
        *counts = Counts { all: next + 1, free: 1 };
        Some(next)
    }

    /// A thread is free again.
    pub(super) fn end_work(&self) {
        self.counts().free += 1;
    }

    /// The thread that was to start did not. Whoever is alone at the next connection tries again.
    pub(super) fn lose(&self) {
        let mut counts = self.counts();
        *counts = Counts { all: counts.all - 1, free: counts.free.saturating_sub(1) };
    }

    /// Returns what a thread is called.
    pub(super) fn name(number: usize) -> String {
        format!("api{number}")
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn somebody_is_free_as_long_as_there_may_be_more() {
        let crew = Crew::default();
        let started: Vec<_> = (0..MOST + 4).map_while(|_| crew.take_work()).collect();
        assert_eq!(started, (1..MOST).collect::<Vec<_>>());
        assert_eq!(*crew.counts(), Counts { all: MOST, free: 0 });
        (0..MOST).for_each(|_| crew.end_work());
        assert_eq!(*crew.counts(), Counts { all: MOST, free: MOST });
        assert_eq!(crew.take_work(), None);
    }

    #[test]
    fn connections_one_after_the_other_need_two() {
        let crew = Crew::default();
        assert_eq!(crew.take_work(), Some(1));
        for _ in 0..100 {
            crew.end_work();
            assert_eq!(crew.take_work(), None);
        }
    }

    #[test]
    fn a_thread_that_could_not_start_is_tried_again() {
        let crew = Crew::default();
        assert_eq!(crew.take_work(), Some(1));
        crew.lose();
        crew.end_work();
        assert_eq!(*crew.counts(), Counts { all: 1, free: 1 });
        assert_eq!(crew.take_work(), Some(1));
    }
}
