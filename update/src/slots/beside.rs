//! What to do when the node was started from a medium and has an installed disk beside it: a newer
//! release on the medium becomes an update of the installed slots. Pure.
//!
//! STATE and DATA stay what they are, and the release is tried as any other one: in the idle slot,
//! once, judged, and left when it fails. A medium never takes a disk back to an older release.

use super::{
    Place, Program,
    firmware::Usable,
    journal::{Journal, Stage, Trial},
    plan::{Action, Facts, Offer, Offered, Rest, fell_back, given_up, go, idle},
};

/// Decides what to do next for a node that was started from `medium`.
pub(super) fn plan(facts: &Facts, medium: &Offered) -> Action {
    let journal = &facts.journal;
    // The medium is all that is offered: the repository is the installed release's to read.
    let facts = Facts { offer: Offer::Program(medium.clone()), ..facts.clone() };
    let facts = &facts;
    // Only what passed gets to the fallback path.
    if journal.good.is_none()
        && let Some(passed) = facts.contents.at(Place::Fallback)
    {
        return Action::Note(Box::new(journal.with_good(passed.sha256, passed.release())));
    }
    if let Some(trial) = &journal.trial
        && let Stage::Armed { boot } = &trial.stage
        && *boot != facts.boot
    {
        return fell_back(facts, trial);
    }
    if let Some(rest) = refusal(facts, medium) {
        return Action::Rest(rest);
    }
    let slot = idle(facts, medium.sha256);
    let place = Place::Slot(slot);
    match &journal.trial {
        Some(trial) if trial.sha256 == medium.sha256 && trial.slot == slot => go(facts, trial),
        Some(_) => Action::Note(Box::new(Journal { trial: None, ..journal.clone() })),
        None if facts.firmware.listed().contains(&place) => {
            let mut others = facts.firmware.listed();
            others.retain(|other| *other != place);
            Action::List(others)
        }
        None if !facts.contents.holds(place, medium.sha256) => Action::Fetch(slot),
        None => {
            let Offered { release, sha256, .. } = *medium;
            let expected = facts.present.clone();
            let trial = Trial { slot, sha256, release, stage: Stage::Written, expected };
            Action::Note(Box::new(Journal { trial: Some(trial), ..journal.clone() }))
        }
    }
}

/// Why the release of the medium does not go to the disk.
fn refusal(facts: &Facts, medium: &Offered) -> Option<Rest> {
    let journal = &facts.journal;
    if let Some(installed) = installed(facts).filter(|installed| *installed >= medium.release) {
        return Some(Rest::Medium { medium: medium.release, installed });
    }
    let failed = journal.failed.iter().find(|failed| failed.sha256 == medium.sha256);
    if let Some(failed) = failed {
        return Some(Rest::Failed(medium.release, failed.reason.clone()));
    }
    if given_up(journal, medium.sha256).is_some() {
        return Some(Rest::Unstarted(medium.release));
    }
    (facts.firmware.usable == Usable::No).then_some(Rest::NoFirmware)
}

/// The release that is installed: the good one, or the newest that is there when nobody knows.
fn installed(facts: &Facts) -> Option<crate::channel::Release> {
    let all = || Place::ALL.into_iter().filter_map(|place| facts.contents.at(place));
    let good = all().find(|program| Some(program.sha256) == facts.journal.good);
    good.and_then(Program::release).or_else(|| all().filter_map(Program::release).max())
}

#[cfg(test)]
mod tests {
    use crate::{
        channel::{Release, Sha256},
        slots::{
            Contents, Slot,
            firmware::Firmware,
            gate::Gate,
            plan::{Urgency, plan},
        },
    };

    use super::*;

    fn release(patch: u32) -> Release {
        Release { major: 1, minor: 0, patch }
    }

    fn program(patch: u8) -> Program {
        let os_release = format!("VERSION_ID={}\n", release(patch.into()));
        Program { sha256: Sha256([patch; 32]), os_release }
    }

    /// A disk with release 1 in slot A, beside a medium.
    fn facts(medium: u8) -> Facts {
        let mut contents = Contents::default();
        contents.set(Place::Slot(Slot::A), Some(program(1)));
        contents.set(Place::Fallback, Some(program(1)));
        Facts {
            journal: Journal::default().with_good(program(1).sha256, Some(release(1))),
            contents,
            firmware: Firmware {
                usable: Usable::Yes,
                a: Some(1),
                fallback: Some(3),
                order: vec![9, 1],
                ..Firmware::default()
            },
            from: None,
            medium: Some(Offered {
                release: release(medium.into()),
                sha256: program(medium).sha256,
                urgency: Urgency::Now,
            }),
            runs: None,
            started: None,
            crashed: false,
            boot: "medium".to_owned(),
            offer: Offer::Nothing,
            machines: Vec::new(),
            window_s: 900,
            gate: Gate::Pending(String::new()),
            present: vec!["nvme".to_owned()],
        }
    }

    /// Does what is planned until the node restarts or rests.
    fn settle(facts: &mut Facts) -> Action {
        for _ in 0..20 {
            match plan(facts) {
                Action::Note(journal) => facts.journal = *journal,
                Action::Fetch(slot) => {
                    assert_ne!(slot, Slot::A, "the good slot");
                    facts.contents.set(Place::Slot(slot), Some(program(2)));
                }
                Action::MakeEntry(Place::Slot(Slot::B)) => facts.firmware.b = Some(2),
                Action::Append(Slot::B) => facts.firmware.order.push(2),
                Action::Arm(Slot::B) => facts.firmware.next = Some(2),
                Action::Disarm => facts.firmware.next = None,
                Action::List(places) => {
                    assert_eq!(places, [Place::Fallback], "the slot that is written");
                    facts.firmware.order = vec![9, 3];
                }
                end @ (Action::Rest(_) | Action::Restart) => return end,
                other @ (Action::Mend { .. }
                | Action::Promote { .. }
                | Action::Release(_)
                | Action::MakeEntry(_)
                | Action::Append(_)
                | Action::Arm(_)) => panic!("{other:?}"),
            }
        }
        panic!("it never comes to rest: {facts:?}");
    }

    #[test]
    fn a_newer_medium_becomes_an_update_of_the_idle_slot() {
        let mut facts = facts(2);
        assert_eq!(settle(&mut facts), Action::Restart);
        assert_eq!(facts.firmware.armed(), Some(Slot::B));
        assert_eq!(facts.contents.at(Place::Slot(Slot::A)), Some(&program(1)));
        let trial = facts.journal.trial.clone();
        assert_eq!(trial.map(|trial| trial.expected), Some(vec!["nvme".to_owned()]));
        // From there on it is a trial as any other.
        let passed = Facts {
            from: Some(Place::Slot(Slot::B)),
            medium: None,
            runs: Some(program(2)),
            gate: Gate::Passed,
            boot: "next".to_owned(),
            ..facts
        };
        let order = vec![Place::Slot(Slot::B), Place::Fallback, Place::Slot(Slot::A)];
        assert_eq!(plan(&passed), Action::List(order));
    }

    /// After an update both slots may hold something that firmware is to start.
    #[test]
    fn a_slot_that_is_written_is_not_listed() {
        let mut facts = facts(2);
        facts.journal = Journal::default().with_good(program(0).sha256, Some(release(0)));
        facts.journal = facts.journal.with_good(program(1).sha256, Some(release(1)));
        facts.contents.set(Place::Slot(Slot::A), Some(program(0)));
        facts.contents.set(Place::Slot(Slot::B), Some(program(1)));
        (facts.firmware.b, facts.firmware.order) = (Some(2), vec![9, 3, 2]);
        assert_eq!(settle(&mut facts), Action::Restart);
        assert_eq!((facts.firmware.armed(), facts.firmware.order), (Some(Slot::B), vec![9, 3]));
    }

    #[test]
    fn a_medium_never_goes_back() {
        for patch in [0, 1_u8] {
            let (medium, installed) = (release(patch.into()), release(1));
            let rest = settle(&mut facts(patch));
            assert_eq!(rest, Action::Rest(Rest::Medium { medium, installed }));
        }
        // Nor when the journal is lost.
        let mut lost = facts(1);
        lost.journal = Journal::default();
        assert!(matches!(settle(&mut lost), Action::Rest(Rest::Medium { .. })));
        let mut lost = facts(2);
        lost.journal = Journal::default();
        assert_eq!(settle(&mut lost), Action::Restart);
    }

    #[test]
    fn machines_are_waited_for_and_windows_are_not() {
        let mut facts = facts(2);
        facts.machines = vec!["m".to_owned()];
        assert_eq!(settle(&mut facts), Action::Rest(Rest::Machines(vec!["m".to_owned()])));
        assert_eq!(facts.firmware.next, None);
    }

    #[test]
    fn what_came_back_to_the_medium_is_not_tried_again() {
        let mut facts = facts(2);
        settle(&mut facts);
        facts.boot = "medium again".to_owned();
        facts.firmware.next = None;
        let mut unstarted = facts.clone();
        let mut crashed = Facts { crashed: true, ..facts.clone() };
        assert!(matches!(settle(&mut crashed), Action::Rest(Rest::Failed(..))));
        facts.started = Some(program(2).mark());
        assert!(matches!(settle(&mut facts), Action::Rest(Rest::Failed(..))));
        // Without a sign of a start it is tried once more.
        assert_eq!(settle(&mut unstarted), Action::Restart);
        (unstarted.boot, unstarted.firmware.next) = ("and again".to_owned(), None);
        assert_eq!(settle(&mut unstarted), Action::Rest(Rest::Unstarted(release(2))));
        assert!(unstarted.journal.failed.is_empty());
        assert_eq!(facts.contents.at(Place::Slot(Slot::A)), Some(&program(1)));
    }

    #[test]
    fn firmware_without_variables_is_left_alone() {
        let mut facts = facts(2);
        facts.firmware = Firmware::default();
        assert_eq!(settle(&mut facts), Action::Rest(Rest::NoFirmware));
        facts.medium = None;
        assert_eq!(settle(&mut facts), Action::Rest(Rest::NotInstalled));
    }
}
