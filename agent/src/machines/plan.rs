//! What to do about the machines now. Pure: records, what was observed and the time in, actions
//! out. Leases are enforced here, and nothing here needs a network.

use lease::{
    api::Image,
    document::Lease,
    hardware::{Hardware, Placement},
    metering::Meter,
};
use serde::{Deserialize, Serialize};
use types::{
    ids::NodeId,
    units::UnixSeconds,
    vm::{MemoryBacking, exit},
};

use super::{attach::Kept, cpus::Promise, deadline::Told};
use crate::spawn::Ending;

/// Seconds before a lease's end at which its end is announced in the log.
pub const WARN_S: u64 = 60;

/// Seconds between two presses of a power button while the machine runs on. The first only wakes a
/// guest that sleeps, which takes it a second or two; one that stops already does not mind another.
const PRESS_AGAIN_S: u64 = 3;

/// Why a button is pressed when the node goes down.
pub const SHUTDOWN: &str = "shutdown";

/// Seconds between attempts to start a machine that did not start: the reason may pass (memory
/// that another machine gives back), but must not fill the log.
pub const RETRY_S: u64 = 15;

/// Attempts to start before a machine is left stopped until its renter asks again.
pub const MAX_ATTEMPTS: u32 = 3;

/// Independent sources of time that must agree before anything of a tenant is destroyed.
pub const SOURCES_TO_DESTROY: usize = 2;

/// Most events that are kept of a machine.
pub const MAX_EVENTS: usize = 32;

/// What is kept of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Its lease, verified when it came.
    pub lease: Lease,
    /// When its renter deleted it, which ends it before its lease does.
    pub deleted: Option<UnixSeconds>,
    /// What no receipt counts yet.
    pub meter: Meter,
    /// What it starts from.
    pub image: Image,
    /// Gateway that asked for it, which has its content.
    pub gateway: NodeId,
    /// What its renter wants.
    pub power: Power,
    /// User id of its process.
    pub uid: u32,
    /// When it was made.
    pub created: UnixSeconds,
    /// Why it stopped last, in words; empty when it never did.
    pub last_stop: String,
    /// Whether it stopped because it could not be started or failed.
    pub failed: Failed,
    /// What happened lately, oldest first, at most [`MAX_EVENTS`].
    pub events: Vec<Happened>,
    /// Whether its devices and network were taken back after the lease's end.
    pub released: Released,
    /// What its memory is made of.
    #[serde(default)]
    pub memory: MemoryBacking,
    /// What its renter chose of the hardware.
    #[serde(default)]
    pub hardware: Hardware,
    /// The host's CPUs that it was promised.
    #[serde(default)]
    pub promise: Promise,
    /// Where it is since its latest start.
    #[serde(default)]
    pub placement: Option<Placement>,
    /// What was attached to it, oldest first.
    #[serde(default)]
    pub attachments: Vec<Kept>,
    /// How far its guest has set its clock ahead of the host's, in seconds: systems that keep local time
    /// there find it so at the next start.
    #[serde(default)]
    pub clock_ahead_s: i64,
}

impl Record {
    /// Returns the first second in which the machine may not run any more.
    pub fn end(&self) -> UnixSeconds {
        self.deleted.map_or(self.lease.end, |at| at.min(self.lease.end))
    }

    /// Whether it may not run any more at `now`. What its renter deleted is gone whatever a clock says that
    /// was set back since.
    pub fn is_over(&self, now: UnixSeconds) -> bool {
        self.deleted.is_some() || now >= self.end()
    }

    /// Notes that something happened.
    pub fn note(&mut self, at: UnixSeconds, what: impl Into<String>) {
        if self.events.len() >= MAX_EVENTS {
            self.events.remove(0);
        }
        self.events.push(Happened { at, what: what.into() });
    }
}

/// Something that happened to a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Happened {
    /// When.
    pub at: UnixSeconds,
    /// What, in words.
    pub what: String,
}

/// Whether a machine stopped because of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Failed {
    /// It did not.
    No,
    /// It did, and its renter has not asked again.
    Yes,
}

/// What a renter wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Power {
    /// Running.
    On,
    /// Stopped.
    Off,
}

/// Whether devices and network were taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Released {
    /// Not since they were given.
    No,
    /// They were.
    Yes,
}

/// What was seen of a machine since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    /// Its process.
    pub process: Process,
    /// An action that is being carried out.
    pub busy: Option<Work>,
    /// When its power button was pressed first.
    pub pressed: Option<UnixSeconds>,
    /// When it was pressed last.
    pub pressed_last: Option<UnixSeconds>,
    /// When it was killed.
    pub killed: Option<UnixSeconds>,
    /// When its start was given up, and counted as a failure, while its process was still there.
    pub given_up: Option<UnixSeconds>,
    /// Whether its end was announced, for the end that it was announced for.
    pub warned: Option<UnixSeconds>,
    /// Attempts to start that failed in a row, and when the last one did.
    pub failures: u32,
    /// When the last one did.
    pub failed: UnixSeconds,
    /// When a receipt that was due could not be made.
    pub unbilled: UnixSeconds,
    /// Last line its process wrote, as init told when it ended.
    pub said: String,
    /// What its process was told of its deadline.
    pub deadline: Told,
    /// How often in a row it did not listen to that.
    pub deaf: u32,
}

/// A machine's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Process {
    /// There is none.
    #[default]
    Absent,
    /// It runs.
    Running {
        /// Its process id.
        pid: i32,
    },
    /// It ended, and nothing was done about that yet.
    Ended {
        /// How.
        status: Ending,
    },
}

/// An action that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Content is fetched and the process started.
    Start,
    /// Devices are reset and the network is taken away.
    Release,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Start it.
    Start,
    /// Give up a start that waits for content: whoever sends it sets the pace, and may be the renter.
    Abandon,
    /// Give it again what was taken back at an end that a wrong clock told.
    Reclaim,
    /// Note that its process did not take it, which counts as an attempt to start: what it lacked (memory,
    /// a device) another may give back.
    Fail {
        /// How it ended.
        status: Ending,
    },
    /// Note how it ended: on again after a reset, off otherwise.
    Settle {
        /// How it ended.
        status: Ending,
        /// What becomes of it.
        power: Power,
    },
    /// Announce the end.
    Warn {
        /// Seconds left.
        left_s: u64,
    },
    /// Press the ACPI power button.
    Press {
        /// Why.
        because: &'static str,
    },
    /// Kill the process.
    Kill {
        /// Why.
        because: &'static str,
    },
    /// Reset its devices, take its network away, and offer them again.
    Release,
    /// Destroy its disk and forget it.
    Destroy {
        /// Why.
        because: &'static str,
    },
}

/// Settings of the node, and what it is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Seconds between power button and force.
    pub grace_s: u64,
    /// Seconds a disk is kept after the lease's end.
    pub retain_s: u64,
    /// Whether the time is sure enough to destroy something by it.
    pub time: TimeTrust,
    /// Whether the node stays.
    pub node: Node,
}

/// Whether the node stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    /// It does.
    Stays,
    /// It goes down. init ends machines that do not end themselves.
    GoesDown,
}

/// How sure the time is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeTrust {
    /// Only this machine's clock says so: enough to stop, not to destroy.
    Alone,
    /// Other sources agree.
    Confirmed,
}

/// Returns what to do about one machine now; `None` when nothing is due.
pub fn plan(now: UnixSeconds, record: &Record, seen: &Seen, policy: Policy) -> Option<Action> {
    match seen.process {
        // Killing is the one thing that does not wait for a start that hangs.
        Process::Running { .. } if seen.busy.is_some() => {
            let due = record.is_over(now) && seen.killed.is_none();
            due.then_some(Action::Kill { because: end_of(record) })
        }
        Process::Absent if seen.busy == Some(Work::Start) => {
            let unwanted = record.is_over(now) || record.power == Power::Off;
            unwanted.then_some(Action::Abandon)
        }
        Process::Absent if seen.busy.is_some() => None,
        Process::Ended { .. } if seen.busy == Some(Work::Release) => None,
        Process::Ended { status } => Some(settle(record, seen, status)),
        Process::Running { .. } => plan_running(now, record, seen, policy),
        Process::Absent => plan_absent(now, record, seen, policy),
    }
}

/// Returns why the machine's end came.
fn end_of(record: &Record) -> &'static str {
    if record.deleted.is_some() { "deleted" } else { "lease-end" }
}

fn settle(record: &Record, seen: &Seen, status: Ending) -> Action {
    let refused = matches!(status, Ending::Exit { code: exit::REFUSED });
    if refused && seen.busy == Some(Work::Start) {
        return Action::Fail { status };
    }
    if seen.given_up.is_some() {
        // What becomes of it was decided when the failure was counted.
        return Action::Settle { status, power: record.power };
    }
    // One that ended itself did so for its lease's end as it knew it. Whether that is the end, its record
    // says: a lease may have been renewed meanwhile.
    let again = matches!(status, Ending::Exit { code: exit::RESET | exit::DEADLINE })
        && record.power == Power::On;
    Action::Settle { status, power: if again { Power::On } else { Power::Off } }
}

fn plan_running(now: UnixSeconds, record: &Record, seen: &Seen, policy: Policy) -> Option<Action> {
    let end = record.end();
    // Killing comes last: a process that the kernel cannot end is not killed twice a second.
    let kill = |because| (seen.killed.is_none()).then_some(Action::Kill { because });
    if record.is_over(now) {
        return kill(end_of(record));
    }
    let stop = if now.plus(policy.grace_s) >= end {
        Some("lease-end")
    } else if record.power == Power::Off {
        Some("renter")
    } else {
        None
    };
    let left_s = end.since(now);
    let again = seen.pressed_last.is_some_and(|last| now.since(last) >= PRESS_AGAIN_S);
    match (stop, seen.pressed) {
        (Some(because), None) => Some(Action::Press { because }),
        (Some(because), Some(pressed)) if now.since(pressed) >= policy.grace_s => kill(because),
        (Some(because), Some(_)) => again.then_some(Action::Press { because }),
        (None, Some(_)) if policy.node == Node::GoesDown => {
            again.then_some(Action::Press { because: SHUTDOWN })
        }
        (None, _) if left_s <= WARN_S && seen.warned != Some(end) => Some(Action::Warn { left_s }),
        (None, _) => None,
    }
}

fn plan_absent(now: UnixSeconds, record: &Record, seen: &Seen, policy: Policy) -> Option<Action> {
    let end = record.end();
    if record.is_over(now) {
        if record.released == Released::No {
            return Some(Action::Release);
        }
        // A renter's own word needs no proof of time.
        if record.deleted.is_some() {
            return Some(Action::Destroy { because: "renter" });
        }
        let over = now >= end.plus(policy.retain_s);
        return (over && policy.time == TimeTrust::Confirmed)
            .then_some(Action::Destroy { because: "retention-over" });
    }
    let runs = record.power == Power::On && now >= record.lease.start && now.plus(1) < end;
    let rested = seen.failures == 0 || now.since(seen.failed) >= RETRY_S;
    let start = match record.released {
        Released::No => Action::Start,
        Released::Yes => Action::Reclaim,
    };
    (runs && rested).then_some(start)
}

#[cfg(test)]
pub(crate) mod fixture {
    use types::ids::ContentId;

    use super::*;

    /// Returns a machine that is on, whose lease runs from 1000 to 2000.
    pub(crate) fn record() -> Record {
        let shape = types::node::MachineShape {
            vcpus: 1,
            memory_mib: types::units::Mebibytes(64),
            disk_mib: types::units::Mebibytes(0),
            devices: Vec::new(),
            disk_limit: None,
        };
        let kernel = ContentId::from_bytes([2; 32]);
        Record {
            lease: Lease {
                version: lease::document::LEASE_VERSION,
                id: types::ids::MachineId::from_bytes([1; 16]),
                serial: 1,
                node: NodeId::from_bytes([5; 32]),
                renter: types::ids::PublicKey::from_bytes([3; 32]),
                shape,
                start: UnixSeconds(1000),
                end: UnixSeconds(2000),
                price: lease::document::Price::default(),
            },
            deleted: None,
            meter: Meter::new(UnixSeconds(1000)),
            image: Image {
                kernel: Some(kernel),
                initrd: None,
                disk: None,
                cmdline: String::new(),
                seed: None,
            },
            gateway: NodeId::from_bytes([4; 32]),
            power: Power::On,
            uid: 100_000,
            created: UnixSeconds(1000),
            last_stop: String::new(),
            failed: Failed::No,
            events: Vec::new(),
            released: Released::No,
            memory: MemoryBacking::Memfd,
            hardware: Hardware::default(),
            promise: Promise::default(),
            placement: None,
            attachments: Vec::new(),
            clock_ahead_s: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: Policy =
        Policy { grace_s: 10, retain_s: 100, time: TimeTrust::Confirmed, node: Node::Stays };

    fn record(power: Power) -> Record {
        Record { power, ..fixture::record() }
    }

    fn check(now: u64, power: Power, seen: &Seen, expected: Option<Action>) {
        assert_eq!(plan(UnixSeconds(now), &record(power), seen, POLICY), expected, "at {now}");
    }

    fn running() -> Seen {
        Seen { process: Process::Running { pid: 7 }, ..Seen::default() }
    }

    #[test]
    fn a_lease_begins_and_ends_by_itself() {
        check(999, Power::On, &Seen::default(), None);
        check(1000, Power::On, &Seen::default(), Some(Action::Start));
        check(1500, Power::On, &running(), None);
        check(1940, Power::On, &running(), Some(Action::Warn { left_s: 60 }));
        let warned = Seen { warned: Some(UnixSeconds(2000)), ..running() };
        check(1941, Power::On, &warned, None);
        check(1990, Power::On, &warned, Some(Action::Press { because: "lease-end" }));
        let pressed = Seen { pressed: Some(UnixSeconds(1990)), ..warned };
        check(1999, Power::On, &pressed, None);
        check(2000, Power::On, &pressed, Some(Action::Kill { because: "lease-end" }));
        check(2000, Power::On, &Seen::default(), Some(Action::Release));
    }

    #[test]
    fn a_stopped_machine_is_asked_before_it_is_forced() {
        check(1500, Power::Off, &running(), Some(Action::Press { because: "renter" }));
        let at = |first, last| Seen {
            pressed: Some(UnixSeconds(first)),
            pressed_last: Some(UnixSeconds(last)),
            ..running()
        };
        let pressed = at(1500, 1500);
        check(1502, Power::Off, &pressed, None);
        // The first may have woken a guest that slept.
        check(1503, Power::Off, &pressed, Some(Action::Press { because: "renter" }));
        check(1505, Power::Off, &at(1500, 1503), None);
        check(1509, Power::Off, &at(1500, 1506), Some(Action::Press { because: "renter" }));
        check(1510, Power::Off, &pressed, Some(Action::Kill { because: "renter" }));
        let killed = Seen { killed: Some(UnixSeconds(1510)), ..pressed };
        check(1520, Power::Off, &killed, None);
    }

    #[test]
    fn a_node_that_goes_down_presses_again_and_leaves_force_to_init() {
        let pressed = Seen {
            pressed: Some(UnixSeconds(1500)),
            pressed_last: Some(UnixSeconds(1500)),
            ..running()
        };
        let leaving = Policy { node: Node::GoesDown, ..POLICY };
        let at = |now| plan(UnixSeconds(now), &record(Power::On), &pressed, leaving);
        let again = Some(Action::Press { because: SHUTDOWN });
        assert_eq!([1502, 1503, 1530].map(at), [None, again, again]);
        check(1530, Power::On, &pressed, None);
    }

    #[test]
    fn only_a_reset_starts_again() {
        let ended = |status| Seen { process: Process::Ended { status }, ..Seen::default() };
        let settle = |status, power| Some(Action::Settle { status, power });
        let reset = Ending::Exit { code: exit::RESET };
        check(1500, Power::On, &ended(reset), settle(reset, Power::On));
        check(1500, Power::Off, &ended(reset), settle(reset, Power::Off));
        let off = Ending::Exit { code: exit::POWERED_OFF };
        check(1500, Power::On, &ended(off), settle(off, Power::Off));
        let crashed = Ending::Signal { number: 31 };
        check(1500, Power::On, &ended(crashed), settle(crashed, Power::Off));
    }

    #[test]
    fn what_is_refused_at_a_start_is_tried_again_and_what_ran_is_not() {
        let status = Ending::Exit { code: exit::REFUSED };
        let ended = Seen { process: Process::Ended { status }, ..Seen::default() };
        let starting = Seen { busy: Some(Work::Start), ..ended.clone() };
        check(1500, Power::On, &starting, Some(Action::Fail { status }));
        check(1500, Power::On, &ended, Some(Action::Settle { status, power: Power::Off }));
        // Another end of a start is what it is otherwise.
        let killed = Ending::Signal { number: 9 };
        let starting = Seen { process: Process::Ended { status: killed }, ..starting };
        let off = Some(Action::Settle { status: killed, power: Power::Off });
        check(1500, Power::On, &starting, off);
    }

    #[test]
    fn what_was_killed_because_its_start_failed_is_tried_again() {
        let status = Ending::Signal { number: 9 };
        let given_up = Some(UnixSeconds(1500));
        let process = Process::Ended { status };
        let ended = Seen { process, given_up, failures: 1, ..Seen::default() };
        check(1500, Power::On, &ended, Some(Action::Settle { status, power: Power::On }));
        check(1500, Power::Off, &ended, Some(Action::Settle { status, power: Power::Off }));
        let failed = UnixSeconds(1500);
        let rests = Seen { process: Process::Absent, given_up: None, failed, ..ended };
        check(1500 + RETRY_S - 1, Power::On, &rests, None);
        check(1500 + RETRY_S, Power::On, &rests, Some(Action::Start));
    }

    #[test]
    fn what_ended_by_its_own_deadline_is_over_if_its_lease_is_and_goes_on_if_not() {
        let status = Ending::Exit { code: exit::DEADLINE };
        let ended = Seen { process: Process::Ended { status }, ..Seen::default() };
        let settled = Some(Action::Settle { status, power: Power::On });
        check(2003, Power::On, &ended, settled);
        check(2003, Power::On, &Seen::default(), Some(Action::Release));
        // It was renewed when nobody could tell its process.
        check(1500, Power::On, &ended, settled);
        check(1500, Power::On, &Seen::default(), Some(Action::Start));
        check(1500, Power::Off, &ended, Some(Action::Settle { status, power: Power::Off }));
    }

    #[test]
    fn data_is_destroyed_late_and_never_on_one_clock() {
        let mut gone = record(Power::Off);
        gone.released = Released::Yes;
        let at = |now, policy| plan(UnixSeconds(now), &gone, &Seen::default(), policy);
        assert_eq!(at(2099, POLICY), None);
        let over = Some(Action::Destroy { because: "retention-over" });
        assert_eq!(at(2100, POLICY), over);
        assert_eq!(at(9999, Policy { time: TimeTrust::Alone, ..POLICY }), None);
    }

    #[test]
    fn a_deleted_machine_ends_at_once_and_for_good() {
        let mut deleted = record(Power::Off);
        deleted.deleted = Some(UnixSeconds(1500));
        let alone = Policy { time: TimeTrust::Alone, ..POLICY };
        let at = |record: &Record, seen| plan(UnixSeconds(1500), record, &seen, alone);
        assert_eq!(at(&deleted, running()), Some(Action::Kill { because: "deleted" }));
        assert_eq!(at(&deleted, Seen::default()), Some(Action::Release));
        deleted.released = Released::Yes;
        assert_eq!(at(&deleted, Seen::default()), Some(Action::Destroy { because: "renter" }));
    }

    #[test]
    fn a_start_that_waits_for_content_is_given_up_when_it_is_not_wanted() {
        let starting = Seen { busy: Some(Work::Start), ..Seen::default() };
        check(1999, Power::On, &starting, None);
        check(2000, Power::On, &starting, Some(Action::Abandon));
        check(1500, Power::Off, &starting, Some(Action::Abandon));
        let mut deleted = record(Power::Off);
        deleted.deleted = Some(UnixSeconds(1500));
        let action = plan(UnixSeconds(1500), &deleted, &starting, POLICY);
        assert_eq!(action, Some(Action::Abandon));
        // What is taken back is not held up, and a process that was started is ended as such.
        let releasing = Seen { busy: Some(Work::Release), ..Seen::default() };
        check(2000, Power::On, &releasing, None);
        let started = Seen { busy: Some(Work::Start), ..running() };
        check(2000, Power::On, &started, Some(Action::Kill { because: "lease-end" }));
    }

    #[test]
    fn what_a_wrong_clock_ended_goes_on_and_what_its_renter_deleted_does_not() {
        let mut back = record(Power::On);
        back.released = Released::Yes;
        let at = |record: &Record| plan(UnixSeconds(1500), record, &Seen::default(), POLICY);
        assert_eq!(at(&back), Some(Action::Reclaim));
        back.power = Power::Off;
        assert_eq!(at(&back), None);
        // It was deleted when the clock was ahead.
        back.deleted = Some(UnixSeconds(1900));
        assert_eq!(at(&back), Some(Action::Destroy { because: "renter" }));
    }

    proptest! {
        #[test]
        fn nothing_runs_outside_its_lease(now in 0u64..4000, pressed in proptest::option::of(0u64..4000)) {
            let seen = Seen { pressed: pressed.map(UnixSeconds), ..running() };
            let action = plan(UnixSeconds(now), &record(Power::On), &seen, POLICY);
            if now >= 2000 {
                prop_assert_eq!(action, Some(Action::Kill { because: "lease-end" }));
            }
            let start = plan(UnixSeconds(now), &record(Power::On), &Seen::default(), POLICY);
            if !(1000..2000).contains(&now) {
                prop_assert_ne!(start, Some(Action::Start));
            }
        }
    }
}
