//! Locks of the memory bus by a guest, and the pace at which it may take them.
//!
//! An atomic access that crosses a cache line ("split lock"), or goes to uncached memory, holds up
//! every CPU of the host until it is done: a thousand cycles and more. Where KVM can say that a guest
//! did that, the virtual CPU that did waits for its turn; one that seldom does it, as old drivers do, is
//! not held up at all, and nobody waits for another.
//! Source: Intel SDM vol. 3A, "Features to Disable Bus Locks"; Linux
//! Documentation/virt/kvm/api.rst, "`KVM_CAP_X86_BUS_LOCK_EXIT`".

use std::time::{Duration, Instant};

use kvm_bindings::KVM_RUN_X86_BUS_LOCK;
use types::vm::{Rate, RateLimit};

use crate::{
    counters::Exits,
    devices::throttle::{Admission, Throttle},
};

/// How often a virtual CPU may lock the bus, in locks a second. Each costs the host about a
/// microsecond, so that one CPU takes a thousandth of the bus; and none is ever held up for longer than
/// a guest's timer tick, 1 ms.
const LOCKS: Rate = Rate { per_second: 1000, burst: 100 };

/// Whether `flags`, of `kvm_run` after an exit, tell of a lock. They do at any exit: another reason may
/// take precedence.
pub(super) fn told(flags: u16) -> bool {
    u32::from(flags) & KVM_RUN_X86_BUS_LOCK != 0
}

/// The pace of one virtual CPU.
#[derive(Debug)]
pub(super) struct Pace(Option<Throttle>);

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self(Throttle::new(Some(RateLimit { bytes: None, operations: Some(LOCKS) }), now))
    }

    /// Counts a lock, and returns how long the virtual CPU has to wait before it goes on.
    pub(super) fn wait(&mut self, exits: &Exits, now: Instant) -> Duration {
        exits.bus_locks.add(1);
        match self.0.as_mut().map(|throttle| throttle.admit(now, 0)) {
            Some(Admission::At(at)) => at.saturating_duration_since(now),
            Some(Admission::Now) | None => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_locks_are_free_and_many_come_at_a_pace() {
        let start = Instant::now();
        let (mut pace, exits) = (Pace::new(start), Exits::default());
        let mut now = start;
        let waits: Vec<u128> = (0..103)
            .map(|_| {
                let wait = pace.wait(&exits, now);
                now += wait;
                wait.as_micros()
            })
            .collect();
        assert_eq!((waits[..100].iter().sum::<u128>(), &waits[100..]), (0, &[1000; 3][..]));
        assert_eq!(exits.read().bus_locks, 103);
        // One of its own waits for nobody else.
        assert_eq!(Pace::new(now).wait(&exits, now), Duration::ZERO);
    }

    #[test]
    fn a_lock_is_told_of_by_its_flag_beside_any_other() {
        // In system management mode; on behalf of a nested guest.
        assert!([0, 1, 4, !2].iter().all(|flags| !told(*flags)));
        assert!([2, 3, 6, u16::MAX].iter().all(|flags| told(*flags)));
    }
}
