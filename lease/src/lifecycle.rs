//! What is to happen to a machine at a time: design §6 as pure functions.
//!
//! ```text
//! Pending ─start→ Running ─end - warn→ Warned ─end→ Stopping ─off→ Retained ─end + retain, proved→ Destroyed
//!                    ↑___________________ renewal: same id, higher serial ___________________|
//! ```
//!
//! Time is trusted as far as its use allows: one clock that never runs backwards is enough to
//! stop a machine, several independent sources are needed to destroy a disk.

use types::units::UnixSeconds;

use crate::{document::Lease, threshold::VerifiedLease};

/// Independent sources of time that must agree before anything of a tenant is destroyed.
pub const SOURCES_TO_DESTROY: u32 = 2;

/// Where a machine stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The lease has not begun.
    Pending,
    /// The lease is in force.
    Running,
    /// The lease is in force and ends soon.
    Warned,
    /// The lease ended, the machine still runs.
    Stopping,
    /// The lease ended, the disk is kept.
    Retained,
    /// The disk is gone.
    Destroyed,
}

/// Settings of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Seconds before the end at which the guest is warned.
    pub warn_s: u64,
    /// Seconds between the ACPI power button and force.
    pub grace_s: u64,
    /// Seconds the disk is kept after the end.
    pub retain_s: u64,
}

/// What is seen of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Its process.
    pub process: Process,
    /// Whether its end was announced to the guest.
    pub warned: Done,
    /// Whether its devices were reset and taken back since it ran last.
    pub taken_back: Done,
    /// Whether its disk was destroyed.
    pub destroyed: Done,
    /// When its power button was pressed because of the lease's end.
    pub pressed: Option<UnixSeconds>,
}

/// Whether a machine has a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// It has none.
    Absent,
    /// It runs.
    Running,
}

/// Whether something was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// Not yet.
    No,
    /// It was.
    Yes,
}

/// How well the time is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time {
    /// What a [`TimeFloor`] returned.
    pub now: UnixSeconds,
    /// Independent sources that agree with it now.
    pub sources: u32,
}

/// What to do, and when to ask again at the latest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Where the machine stands.
    pub phase: Phase,
    /// What to do now.
    pub step: Step,
    /// When the next thing is due, when nothing else happens.
    pub next: Option<UnixSeconds>,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Destroy the disk's key and forget the machine.
    Destroy,
    /// Kill the process.
    Force,
    /// Nothing.
    Nothing,
    /// Press the ACPI power button.
    Press,
    /// Start it, when its renter wants it on.
    Start,
    /// Reset its devices and take them back.
    TakeBack,
    /// Announce the end to the guest.
    Warn,
}

/// Decides what is due.
pub fn decide(time: Time, lease: &Lease, policy: Policy, facts: Facts) -> Decision {
    let now = time.now;
    let decision = |phase, step, next| Decision { phase, step, next };
    if facts.destroyed == Done::Yes {
        return decision(Phase::Destroyed, Step::Nothing, None);
    }
    if now < lease.start {
        return before_start(lease, facts);
    }
    if now >= lease.end {
        return after_end(time, lease, policy, facts);
    }
    let warning = UnixSeconds(lease.end.0.saturating_sub(policy.warn_s)).max(lease.start);
    let running = facts.process == Process::Running;
    if now >= warning {
        let warn = running && facts.warned == Done::No;
        let step = match (running, warn) {
            (true, true) => Step::Warn,
            (true, false) => Step::Nothing,
            (false, _) => Step::Start,
        };
        return decision(Phase::Warned, step, Some(lease.end));
    }
    let step = if running { Step::Nothing } else { Step::Start };
    decision(Phase::Running, step, Some(warning))
}

/// A process before the start is one too many, however it came to be.
fn before_start(lease: &Lease, facts: Facts) -> Decision {
    let step = match facts.process {
        Process::Running => Step::Force,
        Process::Absent => Step::Nothing,
    };
    Decision { phase: Phase::Pending, step, next: Some(lease.start) }
}

fn after_end(time: Time, lease: &Lease, policy: Policy, facts: Facts) -> Decision {
    if facts.process == Process::Running {
        let (step, next) = match facts.pressed {
            None => (Step::Press, Some(time.now.plus(policy.grace_s))),
            Some(at) if time.now < at.plus(policy.grace_s) => {
                (Step::Nothing, Some(at.plus(policy.grace_s)))
            }
            Some(_) => (Step::Force, None),
        };
        return Decision { phase: Phase::Stopping, step, next };
    }
    if facts.taken_back == Done::No {
        return Decision { phase: Phase::Retained, step: Step::TakeBack, next: None };
    }
    let due = lease.end.plus(policy.retain_s);
    let step = if time.now >= due && time.sources >= SOURCES_TO_DESTROY {
        Step::Destroy
    } else {
        Step::Nothing
    };
    Decision { phase: Phase::Retained, step, next: (time.now < due).then_some(due) }
}

/// A clock that never runs backwards past what was seen. Its user keeps [`TimeFloor::seen`] on
/// disk and makes it anew from there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TimeFloor(UnixSeconds);

impl TimeFloor {
    /// Continues from what was kept.
    pub fn new(seen: UnixSeconds) -> Self {
        Self(seen)
    }

    /// Takes a reading and returns the time: the reading, or the latest one before it.
    pub fn observe(&mut self, reading: UnixSeconds) -> UnixSeconds {
        self.0 = self.0.max(reading);
        self.0
    }

    /// Returns the latest time that was seen.
    pub fn seen(self) -> UnixSeconds {
        self.0
    }
}

/// Why a lease does not renew another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RenewalError {
    #[error("the renewal is of lease {found}; expected {expected}")]
    Id { found: types::ids::MachineId, expected: types::ids::MachineId },
    #[error(
        "the renewal's {field} differs from the lease's; only serial, end and price may change"
    )]
    Changed { field: &'static str },
    #[error("the renewal has serial {found}; expected more than {current}")]
    Serial { found: u64, current: u64 },
    #[error("the renewal ends at {found}, before the {current} that was granted")]
    Shorter { found: u64, current: u64 },
}

/// Checks that `next` may take the place of `current`, and returns it.
pub fn renew(current: &Lease, next: VerifiedLease) -> Result<Lease, RenewalError> {
    let next = next.into_lease();
    if next.id != current.id {
        return Err(RenewalError::Id { found: next.id, expected: current.id });
    }
    if next.serial <= current.serial {
        return Err(RenewalError::Serial { found: next.serial, current: current.serial });
    }
    for (field, same) in [
        ("node", next.node == current.node),
        ("renter", next.renter == current.renter),
        ("shape", next.shape == current.shape),
        ("start", next.start == current.start),
    ] {
        if !same {
            return Err(RenewalError::Changed { field });
        }
    }
    if next.end < current.end {
        return Err(RenewalError::Shorter { found: next.end.0, current: current.end.0 });
    }
    Ok(next)
}
