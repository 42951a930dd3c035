//! What to do next about releases. Pure; one action at a time, each of which a power cut may prevent
//! or follow.

use super::{
    Contents, Place, Program, Slot, beside,
    firmware::{Firmware, Usable},
    gate::Gate,
    journal::{Journal, Stage, Trial, Unstarted},
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
    /// The program that runs, altered or not; `None` when no file of this partition is it.
    pub runs: Option<Program>,
    /// The kernel's name for this boot.
    pub boot: String,
    /// Which program a slot started last, by [`Program::mark`]; forgotten when a slot is armed.
    pub started: Option<Sha256>,
    /// Whether the boot before this one ended in a crash that the kernel kept: something had started.
    pub crashed: bool,
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
    /// Copy a slot's program to the fallback path, verified, and switch that to it at once.
    Mend {
        /// From here.
        from: Slot,
        /// What is copied.
        sha256: Sha256,
    },
    /// Let the fallback path be the file that a slot is, and the other slot what that was, by their names
    /// alone; the slot is free then.
    Promote {
        /// This slot.
        slot: Slot,
        /// What is in it.
        sha256: Sha256,
    },
    /// Take a slot's name from a file that has another one.
    Release(Slot),
    /// Fetch the offered program into a slot, verified, and switch the slot to it at once.
    Fetch(Slot),
    /// Make firmware's entry for a place.
    MakeEntry(Place),
    /// Make these what firmware tries from now on, one after the other.
    List(Vec<Place>),
    /// Let a slot be the very last that firmware tries. Some firmware deletes the entries that its order does
    /// not name.
    Append(Slot),
    /// Make a slot what firmware starts once, and forget which program a slot started last.
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
    /// The offered release left no sign of a start, as often as it was given to firmware.
    Unstarted(Release),
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
    /// No file on the partition is the good program any more, and nothing can repair that.
    NothingGood,
    /// The same, and firmware starts the release before it at the next start.
    OnlySpare,
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
        let runs = from == Place::Slot(trial.slot) && running(facts) == Some(trial.sha256);
        return match &trial.stage {
            // Armed a moment before it could be written down.
            _ if runs => judge(facts, trial),
            Stage::Armed { boot } if *boot != facts.boot => fell_back(facts, trial),
            Stage::Armed { .. } | Stage::Written => settled(facts),
        };
    }
    settled(facts)
}

fn running(facts: &Facts) -> Option<Sha256> {
    facts.runs.as_ref().map(|program| program.sha256)
}

/// The new release runs: it passes, or goes.
fn judge(facts: &Facts, trial: &Trial) -> Action {
    match &facts.gate {
        Gate::Pending(missing) => Action::Rest(Rest::Gate(missing.clone())),
        Gate::Passed => lead(facts, Place::Slot(trial.slot)).unwrap_or_else(|| {
            Action::Note(Box::new(facts.journal.with_good(trial.sha256, Some(trial.release))))
        }),
        Gate::Failed(reason) => Action::Note(Box::new(facts.journal.with_failure(reason))),
    }
}

/// The node came back without the new release.
pub(super) fn fell_back(facts: &Facts, trial: &Trial) -> Action {
    if facts.firmware.armed() == Some(trial.slot) {
        return Action::Disarm;
    }
    let tried = facts.contents.at(Place::Slot(trial.slot));
    let marked = facts.started.is_some() && facts.started == tried.map(Program::mark);
    if !marked && !facts.crashed {
        return Action::Note(Box::new(facts.journal.with_unstarted()));
    }
    let reason = "it did not come up, and the node started what it had before";
    Action::Note(Box::new(facts.journal.with_failure(reason)))
}

/// Nothing is being tried in this boot.
fn settled(facts: &Facts) -> Action {
    let journal = &facts.journal;
    let Some(good) = journal.good else {
        let note =
            |runs: &Program| Action::Note(Box::new(journal.with_good(runs.sha256, runs.release())));
        return facts.runs.as_ref().map_or(Action::Rest(Rest::NothingGood), note);
    };
    if let Some(runs) = &facts.runs
        && runs.sha256 != good
        && !journal.is_altered(runs)
    {
        return astray(facts, good, runs);
    }
    repair(facts, good).unwrap_or_else(|| advance(facts))
}

/// What runs is not what is good: a release that failed goes, any other is judged.
fn astray(facts: &Facts, good: Sha256, runs: &Program) -> Action {
    let journal = &facts.journal;
    let home = home(facts, good);
    if let Some(home) = home.filter(|_| journal.has_failed(runs.sha256)) {
        return lead(facts, home).unwrap_or_else(|| restart(facts, Urgency::Now));
    }
    match &facts.gate {
        Gate::Passed => Action::Note(Box::new(journal.with_good(runs.sha256, runs.release()))),
        Gate::Pending(missing) => Action::Rest(Rest::Gate(missing.clone())),
        Gate::Failed(reason) if home.is_some() => {
            let release = runs.release().unwrap_or(Release { major: 0, minor: 0, patch: 0 });
            let (slot, stage, expected) = (Slot::A, Stage::Written, Vec::new());
            let trial = Trial { slot, sha256: runs.sha256, release, stage, expected };
            let tried = Journal { trial: Some(trial), ..journal.clone() };
            Action::Note(Box::new(tried.with_failure(reason)))
        }
        Gate::Failed(reason) => Action::Rest(Rest::Gate(reason.clone())),
    }
}

/// What is missing around the good program.
fn repair(facts: &Facts, good: Sha256) -> Option<Action> {
    let (journal, contents) = (&facts.journal, &facts.contents);
    if let Some(slot) = contents.shared {
        return Some(Action::Release(slot));
    }
    let Some(home) = home(facts, good) else { return Some(only_spare(facts)) };
    if let Some(action) = lead(facts, home) {
        return Some(action);
    }
    let Place::Slot(slot) = home else { return None };
    // The other slot may hold what is to be tried.
    let is_next = journal.trial.is_none()
        && journal.before.is_some_and(|before| contents.holds(Place::Fallback, before));
    Some(match is_next {
        true => Action::Promote { slot, sha256: good },
        false => Action::Mend { from: slot, sha256: good },
    })
}

/// Where the good program is: on the fallback path, in the slot that the node was started from, in any.
fn home(facts: &Facts, good: Sha256) -> Option<Place> {
    let slot = || facts.contents.slot_with(good).map(Place::Slot);
    let all = [Some(Place::Fallback), facts.from];
    all.into_iter().flatten().find(|place| facts.contents.holds(*place, good)).or_else(slot)
}

/// The good program is nowhere: the next start is one of the release before it, if that is there.
fn only_spare(facts: &Facts) -> Action {
    let before = facts.journal.before.and_then(|before| facts.contents.slot_with(before));
    let Some(slot) = before.filter(|_| facts.firmware.usable == Usable::Yes) else {
        return Action::Rest(Rest::NothingGood);
    };
    lead(facts, Place::Slot(slot)).unwrap_or(Action::Rest(Rest::OnlySpare))
}

/// Makes firmware start `first`, if it does not, and when that cannot be started another place with what
/// is good, or was. The slot that is to be written is none of them.
fn lead(facts: &Facts, first: Place) -> Option<Action> {
    let (firmware, journal) = (&facts.firmware, &facts.journal);
    if firmware.usable == Usable::No {
        return None;
    }
    let tried = match (&journal.trial, wanted(facts)) {
        (Some(trial), _) => Some(Place::Slot(trial.slot)),
        (None, Ok(offered)) => Some(Place::Slot(idle(facts, offered.sha256))),
        (None, Err(_)) => None,
    };
    let trusted = |place: &Place| {
        let found = facts.contents.at(*place);
        found.is_some_and(|program| journal.trusts(program.sha256))
    };
    let others = [Place::Fallback, Place::Slot(Slot::A), Place::Slot(Slot::B)].into_iter();
    let others = others.filter(|place| *place != first && Some(*place) != tried && trusted(place));
    let wanted: Vec<Place> = std::iter::once(first).chain(others).collect();
    if let Some(place) = wanted.iter().find(|place| firmware.entry(**place).is_none()) {
        return Some(Action::MakeEntry(*place));
    }
    let mut listed = firmware.listed();
    // It stays there until it is known what becomes of it.
    if listed.last().is_some_and(|last| *last != first && Some(*last) == last_of(facts)) {
        listed.pop();
    }
    (listed != wanted).then_some(Action::List(wanted))
}

/// The slot that may be the last one in firmware's order: what is tried, and what an operator may still choose
/// in the firmware's boot menu.
fn last_of(facts: &Facts) -> Option<Place> {
    let journal = &facts.journal;
    let slot = match (&journal.trial, &journal.unstarted) {
        (Some(trial), _) => Some(trial.slot),
        (None, Some(left)) if matches!(wanted(facts), Err(Rest::Unstarted(_))) => {
            Some(left.slot).filter(|slot| facts.contents.holds(Place::Slot(*slot), left.sha256))
        }
        (None, _) => None,
    };
    slot.map(Place::Slot)
}

/// The slot for what is to be tried: one that has it, one that holds nothing of worth, the spare.
pub(super) fn idle(facts: &Facts, wanted: Sha256) -> Slot {
    let journal = &facts.journal;
    let home = journal.good.and_then(|good| home(facts, good));
    let worth = |slot: &Slot| match facts.contents.at(Place::Slot(*slot)) {
        Some(_) if home == Some(Place::Slot(*slot)) => 4,
        Some(found) if found.sha256 == wanted => 0,
        Some(found) if Some(found.sha256) == journal.before => 3,
        Some(found) if Some(found.sha256) == journal.good => 2,
        Some(_) | None => 1,
    };
    Slot::ALL.into_iter().min_by_key(worth).unwrap_or(Slot::B)
}

/// Towards what the repository says.
fn advance(facts: &Facts) -> Action {
    let journal = &facts.journal;
    if let Some(trial) = &journal.trial {
        return go(facts, trial);
    }
    let offered = match wanted(facts) {
        Ok(offered) => offered,
        Err(rest) => return Action::Rest(rest),
    };
    let slot = idle(facts, offered.sha256);
    if !facts.contents.holds(Place::Slot(slot), offered.sha256) {
        return Action::Fetch(slot);
    }
    let Offered { release, sha256, .. } = *offered;
    let expected = facts.present.clone();
    let trial = Trial { slot, sha256, release, stage: Stage::Written, expected };
    Action::Note(Box::new(Journal { trial: Some(trial), ..journal.clone() }))
}

/// The release that is to be tried, or why there is none.
fn wanted(facts: &Facts) -> Result<&Offered, Rest> {
    let journal = &facts.journal;
    let offered = match &facts.offer {
        Offer::Unknown => return Err(Rest::Unknown),
        Offer::Nothing => return Err(Rest::Current),
        Offer::Program(offered) if Some(offered.sha256) == journal.good => {
            return Err(Rest::Current);
        }
        Offer::Program(offered) => offered,
    };
    if let Some(failed) = journal.failed.iter().find(|failed| failed.sha256 == offered.sha256) {
        return Err(Rest::Failed(offered.release, failed.reason.clone()));
    }
    if let Some(left) = given_up(journal, offered.sha256) {
        return Err(Rest::Unstarted(left.release));
    }
    if is_held(journal, offered.release, offered.urgency) {
        return Err(Rest::Held(offered.release));
    }
    if facts.firmware.usable == Usable::No { Err(Rest::NoFirmware) } else { Ok(offered) }
}

/// Whether firmware is not asked any more for this program. An operator who insists has it asked again.
pub(super) fn given_up(journal: &Journal, sha256: Sha256) -> Option<&Unstarted> {
    let left = journal.unstarted.as_ref().filter(|left| left.sha256 == sha256)?;
    (left.is_given_up() && journal.insisted != Some(left.release)).then_some(left)
}

/// Whether firmware has not started this trial once. It is given to it in another way then: outside of its order
/// at first, since QEMU's deletes what is in there and is none of its own, and as the last one in it the next
/// time, since others delete what is not.
fn is_missed(journal: &Journal, trial: &Trial) -> bool {
    journal.unstarted.as_ref().is_some_and(|missed| missed.sha256 == trial.sha256)
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
    if facts.firmware.entry(Place::Slot(trial.slot)).is_none() {
        return Action::MakeEntry(Place::Slot(trial.slot));
    }
    if is_missed(&facts.journal, trial)
        && !facts.firmware.listed().contains(&Place::Slot(trial.slot))
    {
        return Action::Append(trial.slot);
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
            Self::Unstarted(release) => write!(
                f,
                "release {release} left no sign of a start, twice: unlock the boot order in the firmware's setup \
                 and say `forget`, or choose the release's entry in the firmware's boot menu once"
            ),
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
            Self::OnlySpare => f.write_str(
                "the running program is damaged on the disk and there is no other copy: restart the server \
                 when no machine runs, and it starts the release before, or install again",
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
