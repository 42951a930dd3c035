//! When a machine ends by itself, and when its guest is asked to end before that. Pure: the time comes
//! in; `control` waits.
//!
//! Whoever owns the machine puts the deadline off as long as the machine may run. So a machine ends in
//! time also when its owner hangs, or is gone for good.

use std::time::Duration;

use types::vm::Deadline;

/// A deadline, and whether the guest was told of it.
#[derive(Debug, Default)]
pub(super) struct Timer {
    deadline: Option<Deadline>,
    /// When the power button was pressed last, by whomever.
    pressed_ms: Option<u64>,
}

impl Timer {
    /// Starts with a deadline, or with none.
    pub(super) fn new(deadline: Option<Deadline>) -> Self {
        Self { deadline, pressed_ms: None }
    }

    /// Replaces the deadline.
    pub(super) fn set(&mut self, deadline: Deadline) {
        self.deadline = Some(deadline);
    }

    /// Returns the deadline.
    pub(super) fn deadline(&self) -> Option<Deadline> {
        self.deadline
    }

    /// The guest's power button was pressed.
    pub(super) fn handle_pressed(&mut self, now_ms: u64) {
        self.pressed_ms = Some(now_ms);
    }

    /// Returns how long the machine may still run, zero when its deadline has passed; `None` when it has
    /// none.
    pub(super) fn until_end(&self, now_ms: u64) -> Option<Duration> {
        let at = self.deadline?.at_boot_ms;
        Some(Duration::from_millis(at.saturating_sub(now_ms)))
    }

    /// Returns how long it is until the power button is due, zero when it is; `None` when it was pressed,
    /// or never will be.
    pub(super) fn until_press(&self, now_ms: u64) -> Option<Duration> {
        let Deadline { at_boot_ms, grace_ms } = self.deadline?;
        let due = at_boot_ms.saturating_sub(grace_ms);
        // Who pressed it no more than a grace before it was due did so for this end.
        let pressed = self.pressed_ms.is_some_and(|at| at.saturating_add(grace_ms) >= due);
        (!pressed).then(|| Duration::from_millis(due.saturating_sub(now_ms)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn deadline(at_boot_ms: u64, grace_ms: u64) -> Deadline {
        Deadline { at_boot_ms, grace_ms }
    }

    fn left(ms: u64) -> Option<Duration> {
        Some(Duration::from_millis(ms))
    }

    #[test]
    fn without_a_deadline_nothing_is_ever_due() {
        let timer = Timer::new(None);
        assert_eq!((timer.until_press(u64::MAX), timer.until_end(u64::MAX)), (None, None));
    }

    #[test]
    fn the_guest_is_asked_a_grace_before_its_end_and_once() {
        let mut timer = Timer::new(Some(deadline(5000, 1000)));
        assert_eq!((timer.until_press(0), timer.until_end(0)), (left(4000), left(5000)));
        assert_eq!((timer.until_press(4000), timer.until_end(4000)), (left(0), left(1000)));
        timer.handle_pressed(4000);
        assert_eq!((timer.until_press(4999), timer.until_end(4999)), (None, left(1)));
        assert_eq!((timer.until_press(9999), timer.until_end(9999)), (None, left(0)));
    }

    #[test]
    fn a_press_by_others_counts_when_it_was_for_the_same_end() {
        let mut timer = Timer::new(Some(deadline(5000, 1000)));
        timer.handle_pressed(2999);
        assert_eq!(timer.until_press(4000), left(0), "an earlier press, which the guest ignored");
        timer.handle_pressed(3000);
        assert_eq!(timer.until_press(4000), None);
    }

    #[test]
    fn a_deadline_moves_either_way_and_the_guest_is_asked_again() {
        let mut timer = Timer::new(Some(deadline(5000, 1000)));
        timer.handle_pressed(4000);
        timer.set(deadline(60_000, 1000));
        assert_eq!((timer.until_press(4500), timer.until_end(4500)), (left(54_500), left(55_500)));
        timer.set(deadline(4500, 1000));
        assert_eq!(timer.until_end(4500), left(0));
        assert_eq!(timer.deadline(), Some(deadline(4500, 1000)));
    }

    #[test]
    fn no_numbers_are_too_large_or_too_small() {
        let mut timer = Timer::new(Some(deadline(u64::MAX, 0)));
        assert_eq!(timer.until_end(0), left(u64::MAX));
        timer.handle_pressed(u64::MAX);
        timer.set(deadline(1, u64::MAX));
        assert_eq!((timer.until_press(7), timer.until_end(7)), (None, left(0)));
    }
}
