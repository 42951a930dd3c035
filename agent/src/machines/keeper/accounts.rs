//! Usage: seconds are counted while a guest runs, and become receipts that this node signs.

use lease::metering::{self, MeterError};
use types::{ids::MachineId, units::UnixSeconds};

use super::{Keeper, trouble};
use crate::{
    events::Event,
    machines::plan::{Process, RETRY_S, Record, Released},
    sys::clock::boot_ms,
};

/// Seconds that one receipt of a running machine covers.
const INTERVAL_S: u64 = 3600;

/// Least seconds between two receipts of a machine that is turned on and off, so that its renter
/// cannot fill the store.
const LEAST_S: u64 = 60;

/// Milliseconds by which a clock is set, not slewed or read a little late.
const STEP_MS: u64 = 2000;

/// Tells when somebody set the clock: seconds in which a machine ran are counted by the calendar, and one
/// that was wrong would count an outage, or nothing.
#[derive(Debug)]
pub(super) struct Calendar {
    /// Calendar minus time since boot when it was looked at last, in milliseconds.
    ahead_ms: i128,
}

impl Calendar {
    /// Begins with the calendar as it is now, both in milliseconds.
    pub(super) fn new(now_ms: u64, boot_ms: u64) -> Self {
        Self { ahead_ms: i128::from(now_ms) - i128::from(boot_ms) }
    }

    /// Returns by how many seconds the calendar was set since the last question; `None` when it was not.
    fn step_s(&mut self, now_ms: u64, boot_ms: u64) -> Option<i64> {
        let before = std::mem::replace(self, Self::new(now_ms, boot_ms));
        let step = self.ahead_ms - before.ahead_ms;
        let set = step.unsigned_abs() >= STEP_MS.into();
        set.then(|| i64::try_from(step / 1000).unwrap_or(0))
    }
}

/// Returns whether a receipt is to be made now.
fn is_due(now: UnixSeconds, record: &Record, process: Process) -> bool {
    let used = record.meter.running_s(now) > 0;
    let age_s = now.since(record.meter.from());
    match process {
        Process::Running { .. } => used && age_s >= INTERVAL_S,
        Process::Ended { .. } => false,
        Process::Absent => used && (age_s >= LEAST_S || record.released == Released::Yes),
    }
}

/// Brings a meter in line with what runs after an agent's start. A machine that ended unseen ran
/// until the time that an earlier agent recorded last, as far as anybody knows; no more is counted.
pub(super) fn resume(
    record: &mut Record,
    process: Process,
    now: UnixSeconds,
    last_seen: UnixSeconds,
) {
    match process {
        Process::Running { .. } => record.meter.handle_started(now),
        Process::Absent | Process::Ended { .. } => {
            record.meter.handle_stopped(last_seen.min(record.end()));
        }
    }
    // An earlier agent may have counted by a clock that was ahead.
    record.meter.handle_step(now, 0);
}

impl Keeper {
    /// Has every meter follow a calendar that was set.
    pub(super) fn follow_calendar(&mut self, now: UnixSeconds) {
        let (now_ms, boot_ms) = (self.config.clock.now_ms(), boot_ms());
        let Some(step) = self.calendar.step_s(now_ms, boot_ms) else { return };
        let all: Vec<MachineId> = self.machines.keys().copied().collect();
        for machine in all {
            if let Some(entry) = self.machines.get_mut(&machine) {
                entry.record.meter.handle_step(now, step);
            }
            self.keep(machine);
        }
    }

    /// Makes every receipt that is due.
    pub(super) fn close_accounts(&mut self, now: UnixSeconds) {
        let due = self
            .machines
            .iter()
            .filter(|(_, entry)| now.since(entry.seen.unbilled) >= RETRY_S)
            .filter(|(_, entry)| is_due(now, &entry.record, entry.seen.process))
            .map(|(id, _)| *id)
            .collect::<Vec<_>>();
        for machine in due {
            self.close_account(now, machine);
        }
    }

    /// Makes a receipt of what was used up to `now`.
    pub(super) fn close_account(&mut self, now: UnixSeconds, machine: MachineId) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        let mut record = entry.record.clone();
        let signed = match close(now, &mut record, &self.config.key) {
            Ok(signed) => signed,
            Err(error) => {
                entry.seen.unbilled = now;
                return trouble("receipt", &error);
            }
        };
        // What is not kept is not counted off: the next attempt makes the same receipt.
        match self.config.store.put_receipt(&record, &signed) {
            Ok(()) => {
                let (running_s, micro) = (signed.receipt.running_s, signed.receipt.micro);
                eprintln!("{}", Event::Receipt { machine, running_s, micro });
                entry.record = record;
            }
            Err(error) => {
                entry.seen.unbilled = now;
                trouble("store", &error);
            }
        }
    }
}

/// Closes a record's meter, at the machine's end at the latest.
fn close(
    now: UnixSeconds,
    record: &mut Record,
    key: &lease::SigningKey,
) -> Result<metering::SignedReceipt, MeterError> {
    let to = now.min(record.end()).max(record.meter.from());
    let receipt = record.meter.close(to, &record.lease)?;
    metering::sign(receipt, key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::plan::fixture;

    const RUNNING: Process = Process::Running { pid: 7 };

    #[test]
    fn receipts_are_due_hourly_at_a_stop_and_at_the_end() {
        let mut record = fixture::record();
        let due = |now, record: &Record, process| is_due(UnixSeconds(now), record, process);
        assert!(!due(1900, &record, Process::Absent), "nothing was used");
        record.lease.end = UnixSeconds(9000);
        record.meter.handle_started(UnixSeconds(1000));
        assert!(!due(4599, &record, RUNNING));
        assert!(due(4600, &record, RUNNING));
        record.meter.handle_stopped(UnixSeconds(1010));
        assert!(!due(1059, &record, Process::Absent), "too soon after the last");
        assert!(due(1060, &record, Process::Absent));
        record.released = Released::Yes;
        assert!(due(1011, &record, Process::Absent), "the last one");
    }

    #[test]
    fn what_ended_unseen_is_counted_until_it_was_seen_last() {
        let mut record = fixture::record();
        record.meter.handle_started(UnixSeconds(1100));
        let mut lost = record.clone();
        resume(&mut lost, Process::Absent, UnixSeconds(1900), UnixSeconds(1150));
        assert_eq!(lost.meter.running_s(UnixSeconds(1900)), 50);
        resume(&mut record, RUNNING, UnixSeconds(1900), UnixSeconds(1150));
        assert_eq!(record.meter.running_s(UnixSeconds(1900)), 800, "it ran on without the agent");
    }

    #[test]
    fn a_clock_that_is_set_is_told_from_one_that_is_slewed() {
        let mut calendar = Calendar::new(1_000_000, 5_000);
        assert_eq!(calendar.step_s(1_000_200, 5_200), None);
        for late in 1..10 {
            let (now, boot) = (1_000_200 + late * 1_900, 5_200 + late * 1_000);
            assert_eq!(calendar.step_s(now, boot), None, "less than a step at a time");
        }
        assert_eq!(calendar.step_s(300_000_000, 14_300), Some(298_982));
        assert_eq!(calendar.step_s(1_017_400, 14_400), Some(-298_982));
        assert_eq!(calendar.step_s(1_017_600, 14_600), None, "told once");
    }

    #[test]
    fn a_calendar_that_was_set_bills_no_more_and_no_less_than_what_ran() {
        let key = lease::SigningKey::from_bytes(&[7; 32]);
        let mut record = fixture::record();
        record.lease.node = types::ids::NodeId::from_bytes(key.verifying_key().to_bytes());
        record.lease.end = UnixSeconds(900_000);
        let check = |now, record: &mut Record, running_s| {
            let signed = close(UnixSeconds(now), record, &key).expect("signed");
            metering::check(&signed.receipt, &record.lease).expect("possible");
            assert_eq!(signed.receipt.running_s, running_s);
        };
        // Three days behind for fifty seconds, then right.
        record.meter.handle_started(UnixSeconds(1100));
        record.meter.handle_step(UnixSeconds(260_350), 259_200);
        check(260_360, &mut record, 60);
        // Two days ahead, over a receipt, and right again.
        record.meter.handle_step(UnixSeconds(433_170), 172_800);
        check(433_180, &mut record, 20);
        record.meter.handle_step(UnixSeconds(260_390), -172_800);
        check(260_400, &mut record, 20);
        // Counted and stopped ahead, seen by the next agent.
        record.meter.handle_stopped(UnixSeconds(433_300));
        resume(&mut record, Process::Absent, UnixSeconds(260_500), UnixSeconds(260_450));
        let used = record.meter.running_s(UnixSeconds(260_500));
        check(260_500, &mut record, used);
    }

    #[test]
    fn a_receipt_ends_with_the_lease_and_its_renter_can_check_it() {
        let key = lease::SigningKey::from_bytes(&[7; 32]);
        let mut record = fixture::record();
        record.lease.node = types::ids::NodeId::from_bytes(key.verifying_key().to_bytes());
        record.lease.price.micro_per_second = 3;
        record.meter.handle_started(UnixSeconds(1100));
        let signed = close(UnixSeconds(2003), &mut record, &key).expect("signed");
        let receipt = metering::verify(&signed).expect("the node's");
        metering::check(receipt, &record.lease).expect("within the lease");
        assert_eq!((receipt.running_s, receipt.micro, receipt.to.0), (900, 2700, 2000));
        let again = close(UnixSeconds(2003), &mut record, &key).expect("signed");
        assert_eq!(again.receipt.running_s, 0, "each second counts once");
    }
}
