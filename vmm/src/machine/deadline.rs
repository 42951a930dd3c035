//! When a machine ends by itself, and when its guest is asked to end before that. Pure: the time comes
//! in; `control` waits.
//!
//! Whoever owns the machine puts the deadline off as long as the machine may run. So a machine ends in
//! time also when its owner hangs, or is gone for good.

use std::time::Duration;

use types::vm::Deadline;

/// Milliseconds between two presses of the power button before one end. The first only wakes a guest that
/// sleeps, which takes it a second or two; one that stops already does not mind another.
const PRESS_AGAIN_MS: u64 = 3000;

/// Which press of the power button for one end it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Press {
    /// The first.
    First,
    /// A later one.
    Again,
}

/// A deadline, and whether the guest was told of it.
#[derive(Debug, Default)]
pub(super) struct Timer {
    deadline: Option<Deadline>,
    /// When the power button was pressed last, by whomever.
    pressed_ms: Option<u64>,
    /// Whether it was pressed for this deadline by whoever asks [`Self::until_press`].
    told: bool,
}

impl Timer {
    /// Starts with a deadline, or with none.
    pub(super) fn new(deadline: Option<Deadline>) -> Self {
        Self { deadline, ..Self::default() }
    }

    /// Replaces the deadline.
    pub(super) fn set(&mut self, deadline: Deadline) {
        self.deadline = Some(deadline);
        self.told = false;
    }

    /// Returns the deadline.
    pub(super) fn deadline(&self) -> Option<Deadline> {
        self.deadline
    }

    /// The guest's power button was pressed.
    pub(super) fn handle_pressed(&mut self, now_ms: u64) {
        self.pressed_ms = Some(now_ms);
    }

    /// The guest's power button is pressed because it was due.
    pub(super) fn handle_due(&mut self, now_ms: u64) -> Press {
        self.handle_pressed(now_ms);
        if std::mem::replace(&mut self.told, true) { Press::Again } else { Press::First }
    }

    /// Returns how long the machine may still run, zero when its deadline has passed; `None` when it has
    /// none.
    pub(super) fn until_end(&self, now_ms: u64) -> Option<Duration> {
        let at = self.deadline?.at_boot_ms;
        Some(Duration::from_millis(at.saturating_sub(now_ms)))
    }

    /// Returns how long it is until the power button is due, zero when it is; `None` when it never will
    /// be. It is due again and again until the end.
    pub(super) fn until_press(&self, now_ms: u64) -> Option<Duration> {
        let Deadline { at_boot_ms, grace_ms } = self.deadline?;
        let due = at_boot_ms.saturating_sub(grace_ms);
        // Who pressed it a moment before did so for this end, too.
        let again = self.pressed_ms.map_or(0, |at| at.saturating_add(PRESS_AGAIN_MS));
        Some(Duration::from_millis(due.max(again).saturating_sub(now_ms)))
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
    fn the_guest_is_asked_a_grace_before_its_end_and_again_and_again() {
        let mut timer = Timer::new(Some(deadline(15_000, 10_000)));
        assert_eq!((timer.until_press(0), timer.until_end(0)), (left(5000), left(15_000)));
        assert_eq!((timer.until_press(5000), timer.until_end(5000)), (left(0), left(10_000)));
        assert_eq!(timer.handle_due(5000), Press::First);
        assert_eq!((timer.until_press(5001), timer.until_end(5001)), (left(2999), left(9999)));
        assert_eq!(timer.until_press(8000), left(0), "it may have done no more than wake");
        assert_eq!(timer.handle_due(8000), Press::Again);
        assert_eq!((timer.until_press(8000), timer.until_end(15_000)), (left(3000), left(0)));
    }

    #[test]
    fn a_press_by_others_counts_as_one_of_ours() {
        let mut timer = Timer::new(Some(deadline(10_000, 5000)));
        timer.handle_pressed(2000);
        assert_eq!(
            timer.until_press(2000),
            left(3000),
            "an earlier press, which the guest ignored"
        );
        timer.handle_pressed(3000);
        assert_eq!(timer.until_press(5000), left(1000));
        assert_eq!(timer.handle_due(6000), Press::First);
    }

    #[test]
    fn a_deadline_moves_either_way_and_the_guest_is_asked_again() {
        let mut timer = Timer::new(Some(deadline(5000, 1000)));
        assert_eq!(timer.handle_due(4000), Press::First);
        timer.set(deadline(60_000, 1000));
        assert_eq!((timer.until_press(4500), timer.until_end(4500)), (left(54_500), left(55_500)));
        assert_eq!(timer.handle_due(59_000), Press::First);
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
        assert_eq!((timer.until_press(7), timer.until_end(7)), (left(u64::MAX - 7), left(0)));
    }
}
