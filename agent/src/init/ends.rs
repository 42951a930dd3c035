//! Until when machines may run, as the agent said last. Pure.
//!
//! The agent ends machines itself, on the second, and where there is none their own processes do, soon after.
//! What is here is for an agent and a process that both hang: init needs no disk, no network and no clock
//! but its own to end what runs past the time that it was told.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use types::ids::MachineId;

use crate::spawn::{Due, MAX_MACHINES};

/// How long a machine may be late before init ends it: the agent comes first, and tells a renewal of the
/// last moment within a second; then its own process, which gives devices back in order.
pub const GRACE: Duration = Duration::from_secs(15);

/// Until when each machine may run. A machine whose end came stays as `None` until its process is gone, so
/// that it is not ended again and again.
#[derive(Debug, Default)]
pub struct Ends {
    due: BTreeMap<MachineId, Option<Instant>>,
}

impl Ends {
    /// Notes when machines have to end. What was said of a machine that is not named goes on to count: an
    /// agent that starts does not know its machines yet.
    pub fn handle_told(&mut self, now: Instant, ends: &[Due]) {
        for Due { machine, left_s } in ends.iter().take(MAX_MACHINES) {
            // What has so much time that clocks do not count it is not ended by init.
            let due = now.checked_add(Duration::from_secs(*left_s));
            let due = due.and_then(|end| end.checked_add(GRACE));
            let is_ended = self.due.get(machine) == Some(&None);
            if due.is_none() && !is_ended {
                self.due.remove(machine);
            } else if !is_ended {
                self.due.insert(*machine, due);
            }
        }
    }

    /// A machine's process is gone; its next one has another end.
    pub fn handle_gone(&mut self, machine: MachineId) {
        self.due.remove(&machine);
    }

    /// Returns a machine that is to be ended now, each once.
    pub fn poll_overdue(&mut self, now: Instant) -> Option<MachineId> {
        let late = |due: &Option<Instant>| due.is_some_and(|due| due <= now);
        let (machine, due) = self.due.iter_mut().find(|(_, due)| late(due))?;
        *due = None;
        Some(*machine)
    }

    /// Returns when something is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due.values().flatten().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: MachineId = MachineId::from_bytes([1; 16]);
    const TWO: MachineId = MachineId::from_bytes([2; 16]);

    fn told(now: Instant, ends: &mut Ends, machine: MachineId, left_s: u64) {
        ends.handle_told(now, &[Due { machine, left_s }]);
    }

    #[test]
    fn what_runs_past_the_time_that_was_told_last_is_ended_once() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds) + GRACE;
        let mut ends = Ends::default();
        told(now, &mut ends, ONE, 10);
        told(now, &mut ends, TWO, 20);
        assert_eq!(ends.poll_timeout(), Some(after(10)));
        // The first was renewed; nothing is said of the second any more.
        told(now + Duration::from_secs(5), &mut ends, ONE, 30);
        assert_eq!((ends.poll_overdue(after(19)), ends.poll_overdue(after(20))), (None, Some(TWO)));
        told(after(20), &mut ends, TWO, 0);
        assert_eq!(ends.poll_overdue(after(34)), None);
        assert_eq!(ends.poll_overdue(after(35)), Some(ONE));
        assert_eq!((ends.poll_overdue(after(99)), ends.poll_timeout()), (None, None));
        // Its process is gone, and another one has time again.
        ends.handle_gone(TWO);
        told(after(35), &mut ends, TWO, 1);
        assert_eq!(ends.poll_overdue(after(36)), None);
        assert_eq!(ends.poll_overdue(after(36) + GRACE), Some(TWO));
    }

    #[test]
    fn an_end_beyond_all_clocks_is_none() {
        let now = Instant::now();
        let mut ends = Ends::default();
        told(now, &mut ends, ONE, 5);
        told(now, &mut ends, ONE, u64::MAX);
        assert_eq!(ends.poll_timeout(), None);
        let many: Vec<Due> = (0..1000_u32)
            .map(|number| {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&number.to_le_bytes());
                Due { machine: MachineId::from_bytes(bytes), left_s: 1 }
            })
            .collect();
        ends.handle_told(now, &many);
        assert_eq!(ends.due.len(), MAX_MACHINES);
    }
}
