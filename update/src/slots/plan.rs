//! What to do next about releases. Pure; one action at a time, each of which a power cut may prevent
//! or follow.

use super::{
    Contents, Place, Slot, beside,
    firmware::{Firmware, Usable},
    gate::Gate,
    journal::{Journal, Stage, Trial},
};
use crate::channel::{Release, Sha256};

/// What is known.
#[derive(Debug, Clone)]
pub struct Facts {
    /// What was written down.
    pub journal: Journal,
    /// What the partition holds.
    pub contents: Contents,
    /// What firmware's variables say.
    pub firmware: Firmware,
    /// Where the running program was started from; `None` when that is not this partition.
    pub from: Option<Place>,
    /// What the medium has that the node was started from, when that is beside an installed disk.
    pub medium: Option<Offered>,
    /// Whether the file there is what runs.
    pub same: Same,
    /// The kernel's name for this boot.
    pub boot: String,
    /// What the repository says.
    pub offer: Offer,
    /// Machines that run.
    pub machines: Vec<String>,
    /// Seconds until the node may restart for an update; 0 when it may.
    pub window_s: u64,
    /// The verdict about what runs.
    pub gate: Gate,
    /// What the node has now, which another release must have too.
    pub present: Vec<String>,
}

/// Whether the file that the node was started from is still what runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Same {
    /// It is.
    Yes,
    /// It was damaged or replaced.
    No,
}

/// What the repository says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Offer {
    /// Nothing yet.
    Unknown,
    /// What runs is right.
    Nothing,
    /// This is to run.
    Program(Offered),
}

/// A release that is to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offered {
    /// Its release.
    pub release: Release,
    /// The program.
    pub sha256: Sha256,
    /// How much it matters.
    pub urgency: Urgency,
}

/// How much a release matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// It waits for its window.
    Usual,
    /// What runs may not run any longer: it waits for machines only.
    Now,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Write this down, durably.
    Note(Box<Journal>),
    /// Copy a program to a place, verified, and switch the place to it at once.
    Copy {
        /// From here.
        from: Place,
        /// To here.
        to: Place,
        /// What is copied.
        sha256: Sha256,
    },
    /// Fetch the offered program into a slot, verified, and switch the slot to it at once.
    Fetch(Slot),
    /// Make firmware's entry for a slot.
    MakeEntry(Slot),
    /// Make a slot what firmware starts from now on.
    Lead(Slot),
    /// Make a slot what firmware starts once.
    Arm(Slot),
    /// Take that back.
    Disarm,
    /// Restart the node.
    Restart,
    /// Nothing now.
    Rest(Rest),
}

/// Why there is nothing to do now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rest {
    /// The node was not started from an installed disk.
    NotInstalled,
    /// What runs is what should run.
    Current,
    /// The repository was not read yet.
    Unknown,
    /// The offered release failed on this node before, for this reason.
    Failed(Release, String),
    /// An operator wants the node to stay on what it runs, so this release is not tried.
    Held(Release),
    /// The medium that the node was started from has nothing newer than what is installed.
    Medium {
        /// Its release.
        medium: Release,
        /// That of the disk.
        installed: Release,
    },
    /// Firmware's variables cannot be set, so nothing can be tried without risk.
    NoFirmware,
    /// No file on the partition is the running program, and nothing can repair that.
    NothingGood,
    /// The new release is being judged; this is still missing.
    Gate(String),
    /// A restart waits for these machines to end.
    Machines(Vec<String>),
    /// A restart waits for its window, for so many seconds.
    Window(u64),
}

/// Decides what to do next.
pub fn plan(facts: &Facts) -> Action {
    let Some(from) = facts.from else {
        let medium = facts.medium.as_ref();
        return medium.map_or(Action::Rest(Rest::NotInstalled), |it| beside::plan(facts, it));
    };
    if let Some(trial) = &facts.journal.trial {
        let runs = from == Place::Slot(trial.slot) && running(facts, from) == Some(trial.sha256);
        return match &trial.stage {
            // Armed a moment before it could be written down.
            _ if runs => judge(facts, trial),
            Stage::Armed { boot } if *boot != facts.boot => fell_back(facts, trial),
            Stage::Armed { .. } | Stage::Written => settled(facts, from),
        };
    }
    settled(facts, from)
}

/// The program that runs, if its file is still the same.
fn running(facts: &Facts, from: Place) -> Option<Sha256> {
    let program = facts.contents.at(from).filter(|_| facts.same == Same::Yes);
    program.map(|program| program.sha256)
}

/// The new release runs: it passes, or goes.
fn judge(facts: &Facts, trial: &Trial) -> Action {
    match &facts.gate {
        Gate::Pending(missing) => Action::Rest(Rest::Gate(missing.clone())),
        Gate::Passed => match lead(facts, trial.slot) {
            Some(action) => action,
            None => Action::Note(Box::new(facts.journal.with_good(trial.sha256))),
        },
        Gate::Failed(reason) => Action::Note(Box::new(facts.journal.with_failure(reason))),
    }
}

/// The node came back without the new release.
pub(super) fn fell_back(facts: &Facts, trial: &Trial) -> Action {
    if facts.firmware.armed() == Some(trial.slot) {
        return Action::Disarm;
    }
    let reason = "it did not come up, and the node started what it had before";
    Action::Note(Box::new(facts.journal.with_failure(reason)))
}

/// Nothing is being tried in this boot.
fn settled(facts: &Facts, from: Place) -> Action {
    let journal = &facts.journal;
    let Some(good) = journal.good else {
        let found = running(facts, from);
        let note = |sha256| Action::Note(Box::new(journal.with_good(sha256)));
        return found.map_or(Action::Rest(Rest::NothingGood), note);
    };
    if let Some(running) = running(facts, from)
        && running != good
        && !facts.contents.is_damaged(from, good)
    {
        return astray(facts, good, running);
    }
    repair(facts, from, good).unwrap_or_else(|| advance(facts, good))
}

/// What runs is not what is good: a release that failed goes, any other is judged.
fn astray(facts: &Facts, good: Sha256, running: Sha256) -> Action {
    let journal = &facts.journal;
    let home = facts.contents.slot_with(good);
    if let Some(home) = home.filter(|_| journal.has_failed(running)) {
        return lead(facts, home).unwrap_or_else(|| restart(facts, Urgency::Now));
    }
    match &facts.gate {
        Gate::Passed => Action::Note(Box::new(journal.with_good(running))),
        Gate::Pending(missing) => Action::Rest(Rest::Gate(missing.clone())),
        Gate::Failed(reason) if home.is_some() => {
            let release = facts.contents.at(facts.from.unwrap_or(Place::Fallback));
            let release = release.and_then(|program| super::release_of(&program.os_release));
            let release = release.unwrap_or(Release { major: 0, minor: 0, patch: 0 });
            let (slot, stage, expected) = (Slot::A, Stage::Written, Vec::new());
            let trial = Trial { slot, sha256: running, release, stage, expected };
            let tried = Journal { trial: Some(trial), ..journal.clone() };
            Action::Note(Box::new(tried.with_failure(reason)))
        }
        Gate::Failed(reason) => Action::Rest(Rest::Gate(reason.clone())),
    }
}

/// What is missing around the good program.
fn repair(facts: &Facts, from: Place, good: Sha256) -> Option<Action> {
    let Some(home) = home(facts, from, good) else {
        // The other slot may hold what is to be tried.
        let to = match (from, &facts.journal.trial) {
            (Place::Slot(slot), _) => slot,
            (Place::Fallback, Some(trial)) => trial.slot.other(),
            (Place::Fallback, None) => facts.firmware.leading().unwrap_or(Slot::A),
        };
        let source = Place::Fallback;
        return Some(if facts.contents.holds(source, good) {
            Action::Copy { from: source, to: Place::Slot(to), sha256: good }
        } else {
            Action::Rest(Rest::NothingGood)
        });
    };
    if let Some(action) = lead(facts, home) {
        return Some(action);
    }
    let stale = !facts.contents.holds(Place::Fallback, good);
    let (from, to) = (Place::Slot(home), Place::Fallback);
    stale.then_some(Action::Copy { from, to, sha256: good })
}

/// The slot of the good program: that which the node was started from, if both hold it.
fn home(facts: &Facts, from: Place, good: Sha256) -> Option<Slot> {
    match from {
        Place::Slot(slot) if facts.contents.holds(from, good) => Some(slot),
        Place::Slot(_) | Place::Fallback => facts.contents.slot_with(good),
    }
}

/// Makes firmware start `slot`, if it does not.
fn lead(facts: &Facts, slot: Slot) -> Option<Action> {
    let firmware = &facts.firmware;
    if firmware.usable == Usable::No || firmware.leading() == Some(slot) {
        return None;
    }
    Some(match firmware.entry(slot) {
        None => Action::MakeEntry(slot),
        Some(_) => Action::Lead(slot),
    })
}

/// Towards what the repository says.
fn advance(facts: &Facts, good: Sha256) -> Action {
    let journal = &facts.journal;
    if let Some(trial) = &journal.trial {
        return go(facts, trial);
    }
    let offered = match &facts.offer {
        Offer::Unknown => return Action::Rest(Rest::Unknown),
        Offer::Nothing => return Action::Rest(Rest::Current),
        Offer::Program(offered) if offered.sha256 == good => return Action::Rest(Rest::Current),
        Offer::Program(offered) => offered,
    };
    if let Some(failed) = journal.failed.iter().find(|failed| failed.sha256 == offered.sha256) {
        return Action::Rest(Rest::Failed(offered.release, failed.reason.clone()));
    }
    if is_held(journal, offered.release, offered.urgency) {
        return Action::Rest(Rest::Held(offered.release));
    }
    if facts.firmware.usable == Usable::No {
        return Action::Rest(Rest::NoFirmware);
    }
    let from = facts.from.unwrap_or(Place::Fallback);
    let Some(home) = home(facts, from, good) else { return Action::Rest(Rest::NothingGood) };
    let slot = home.other();
    if !facts.contents.holds(Place::Slot(slot), offered.sha256) {
        return Action::Fetch(slot);
    }
    let Offered { release, sha256, .. } = *offered;
    let expected = facts.present.clone();
    let trial = Trial { slot, sha256, release, stage: Stage::Written, expected };
    Action::Note(Box::new(Journal { trial: Some(trial), ..journal.clone() }))
}

/// Whether an operator's word keeps the node from a release. What runs and may not run any longer is left
/// all the same, and so it is for a release that an operator insists on.
fn is_held(journal: &Journal, release: Release, urgency: Urgency) -> bool {
    journal.held && urgency == Urgency::Usual && journal.insisted != Some(release)
}

/// Towards the boot that tries what was written.
pub(super) fn go(facts: &Facts, trial: &Trial) -> Action {
    let urgency = match &facts.offer {
        Offer::Program(offered) if offered.sha256 == trial.sha256 => Some(offered.urgency),
        Offer::Unknown => Some(Urgency::Usual),
        Offer::Nothing | Offer::Program(_) => None,
    };
    let whole = facts.contents.holds(Place::Slot(trial.slot), trial.sha256);
    let wanted = |urgency: &Urgency| whole && !is_held(&facts.journal, trial.release, *urgency);
    let Some(urgency) = urgency.filter(wanted) else {
        // Withdrawn, replaced by a newer one, held back, or damaged meanwhile.
        return match facts.firmware.armed() {
            Some(_) => Action::Disarm,
            None => Action::Note(Box::new(Journal { trial: None, ..facts.journal.clone() })),
        };
    };
    if let Action::Rest(rest) = restart(facts, urgency) {
        return Action::Rest(rest);
    }
    if facts.firmware.entry(trial.slot).is_none() {
        return Action::MakeEntry(trial.slot);
    }
    if facts.firmware.armed() != Some(trial.slot) {
        return Action::Arm(trial.slot);
    }
    match &trial.stage {
        Stage::Armed { .. } => Action::Restart,
        Stage::Written => {
            let stage = Stage::Armed { boot: facts.boot.clone() };
            let trial = Trial { stage, ..trial.clone() };
            Action::Note(Box::new(Journal { trial: Some(trial), ..facts.journal.clone() }))
        }
    }
}

/// Restarts, or says what that waits for.
fn restart(facts: &Facts, urgency: Urgency) -> Action {
    let trial = facts.journal.trial.as_ref().map(|trial| trial.release);
    let insisted = facts.journal.insisted.is_some() && facts.journal.insisted == trial;
    if insisted {
        return Action::Restart;
    }
    if !facts.machines.is_empty() {
        return Action::Rest(Rest::Machines(facts.machines.clone()));
    }
    match facts.window_s {
        wait if wait > 0 && urgency == Urgency::Usual => Action::Rest(Rest::Window(wait)),
        _ => Action::Restart,
    }
}

impl std::fmt::Display for Rest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotInstalled => {
                f.write_str("not started from an installed disk: nothing to update")
            }
            Self::Current => f.write_str("up to date"),
            Self::Unknown => f.write_str("the repository was not read yet"),
            Self::Failed(release, reason) => {
                write!(f, "release {release} failed here and is not tried again: {reason}")
            }
            Self::Held(release) => {
                write!(f, "held by an operator; release {release} waits for the word `resume`")
            }
            Self::Medium { medium, installed } => write!(
                f,
                "started from a medium with release {medium}; the disk has {installed}, which stays: \
                 remove the medium and restart"
            ),
            Self::NoFirmware => f.write_str(
                "firmware's boot entries cannot be set, so no other release can be tried safely",
            ),
            Self::NothingGood => f.write_str(
                "the running program is damaged on the disk and there is no other copy: install again",
            ),
            Self::Gate(missing) => write!(f, "on trial: {missing}"),
            Self::Machines(machines) => {
                write!(f, "ready; waits for machines to end: {}", machines.join(", "))
            }
            Self::Window(seconds) => {
                write!(f, "ready; waits {} minutes for its window", seconds.div_ceil(60))
            }
        }
    }
}
