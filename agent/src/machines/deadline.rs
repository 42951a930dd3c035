//! When a machine's own process is to end it, should nobody else: what its VMM is told (`types::vm::Deadline`)
//! and when. Pure.
//!
//! The agent ends machines with their leases; a VMM's deadline does it when there is no agent, because it
//! hangs, or cannot start for want of its disk. It follows the node's time just as the plan does: whatever
//! moves the end, or what the node takes for the time, moves the deadline.

use types::{units::UnixSeconds, vm::Deadline};

/// So much later than the agent does a process end its machine, in milliseconds: ten looks of the agent at
/// its clock. In the ordinary case the agent was there first, and says why.
pub const MARGIN_MS: u64 = 2000;

/// A deadline stays where it is as long as it is wrong by no more, in milliseconds: the calendar is not as
/// even as what deadlines are counted by.
const TOLERANCE_MS: u64 = 500;

/// Time between two tries to tell a process that does not listen, in milliseconds.
const AGAIN_MS: u64 = 5000;

/// Returns the deadline of a machine whose lease ends at `end`. The time is given by two clocks:
/// milliseconds since 1970, and since the node's start. `grace_s` is how long a guest has between its power
/// button and its end.
pub fn of(end: UnixSeconds, now_ms: u64, boot_ms: u64, grace_s: u64) -> Deadline {
    let left_ms = end.0.saturating_mul(1000).saturating_sub(now_ms);
    Deadline {
        at_boot_ms: boot_ms.saturating_add(left_ms).saturating_add(MARGIN_MS),
        grace_ms: grace_s.saturating_mul(1000),
    }
}

/// What a machine's process was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Told {
    /// Nothing by this agent.
    #[default]
    Nothing,
    /// It is being told.
    Telling(Deadline),
    /// It knows.
    Knows(Deadline),
    /// It did not listen, at this time since the node's start.
    Deaf {
        /// In milliseconds.
        boot_ms: u64,
    },
}

impl Told {
    /// Returns what the process is to be told now, so that its deadline becomes `wanted`; nothing while it
    /// knows that, or is being told.
    pub fn poll(self, wanted: Deadline, boot_ms: u64) -> Option<Deadline> {
        let due = match self {
            Self::Nothing => true,
            Self::Telling(_) => false,
            Self::Knows(known) => {
                known.grace_ms != wanted.grace_ms
                    || known.at_boot_ms.abs_diff(wanted.at_boot_ms) > TOLERANCE_MS
            }
            Self::Deaf { boot_ms: tried } => boot_ms.saturating_sub(tried) >= AGAIN_MS,
        };
        due.then_some(wanted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: UnixSeconds = UnixSeconds(2000);

    fn at(now_ms: u64, boot_ms: u64) -> Deadline {
        of(END, now_ms, boot_ms, 10)
    }

    #[test]
    fn it_is_the_leases_end_and_a_little_more() {
        let deadline = Deadline { at_boot_ms: 70_000 + 500_000 + MARGIN_MS, grace_ms: 10_000 };
        assert_eq!(at(1_500_000, 70_000), deadline);
        // As time goes by it stays the same.
        assert_eq!(at(1_500_750, 70_750), deadline);
        assert_eq!(at(2_000_001, 70_000).at_boot_ms, 70_000 + MARGIN_MS, "the end is over");
        assert_eq!(of(UnixSeconds(u64::MAX), 0, 5, u64::MAX).at_boot_ms, u64::MAX);
    }

    #[test]
    fn a_process_is_told_once_and_again_when_the_end_or_the_time_moves() {
        let first = at(1_500_000, 70_000);
        assert_eq!(Told::Nothing.poll(first, 70_000), Some(first));
        assert_eq!(Told::Telling(first).poll(at(1_900_000, 71_000), 71_000), None);
        let told = Told::Knows(first);
        assert_eq!(told.poll(at(1_500_200, 70_200), 70_200), None);
        let slewed = at(1_500_700, 70_200);
        assert_eq!(told.poll(slewed, 70_200), None);
        let renewed = of(UnixSeconds(3000), 1_500_200, 70_200, 10);
        assert_eq!(told.poll(renewed, 70_200), Some(renewed));
        let shortened = of(UnixSeconds(1600), 1_500_200, 70_200, 10);
        assert_eq!(told.poll(shortened, 70_200), Some(shortened));
        let set_back = at(1_000_200, 70_200);
        assert_eq!(told.poll(set_back, 70_200), Some(set_back));
        let other_grace = of(END, 1_500_200, 70_200, 20);
        assert_eq!(told.poll(other_grace, 70_200), Some(other_grace));
    }

    #[test]
    fn one_that_does_not_listen_is_told_again_after_a_while() {
        let (told, wanted) = (Told::Deaf { boot_ms: 70_000 }, at(1_500_000, 70_000));
        assert_eq!(told.poll(wanted, 70_000 + AGAIN_MS - 1), None);
        assert_eq!(told.poll(wanted, 70_000 + AGAIN_MS), Some(wanted));
    }

    proptest! {
        /// What a process knows ends its machine with the lease by the time that the agent last knew, give
        /// or take the tolerance: should the agent die now, nobody has to tell it anything more.
        #[test]
        fn who_was_told_needs_nobody(
            now_ms in 0u64..2_000_000,
            boot_ms in 0u64..1_000_000,
            off_ms in -2000i64..2000,
        ) {
            let wanted = at(now_ms, boot_ms);
            let at_boot_ms = wanted.at_boot_ms.saturating_add_signed(off_ms);
            let known = Deadline { at_boot_ms, ..wanted };
            let holds = Told::Knows(known).poll(wanted, boot_ms).unwrap_or(known);
            let ends_ms = now_ms + holds.at_boot_ms - boot_ms;
            let off_ms = ends_ms.abs_diff(2_000_000 + MARGIN_MS);
            prop_assert!(off_ms <= TOLERANCE_MS, "{off_ms} ms");
        }
    }
}
