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
    /// Where it is since its latest start, or was to be when that failed. Whether it runs, init says.
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
#[path = "plan_tests.rs"]
mod tests;
