//! A node in small: partition, variables, journal, firmware. Every sequence of actions is cut at every
//! place, and the node must come up by itself.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use proptest::prelude::*;

use super::{
    Contents, Place, Program, Slot,
    firmware::{Firmware, Usable},
    gate::Gate,
    journal::{Journal, rebuilt},
    plan::{Action, Facts, Offer, Offered, Rest, Same, Urgency, plan},
};
use crate::channel::{Release, Sha256};

/// What becomes of a release when it is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    /// It passes its gate.
    Well,
    /// It comes up and lacks something.
    Sick,
    /// It panics, hangs, or is no program.
    Dead,
}

/// What happens at a cut besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    None,
    /// Firmware forgets everything.
    Variables,
    /// The journal is damaged, set aside, and made anew.
    Journal,
}

#[derive(Debug, Clone)]
struct World {
    contents: Contents,
    /// Whether the entries of A and B exist.
    entries: [bool; 2],
    /// The leading slot.
    order: Option<Slot>,
    next: Option<Slot>,
    journal: Option<Journal>,
    health: Vec<Health>,
    machines: Vec<String>,
    /// What runs, from where.
    runs: (Place, u32),
    boots: u32,
    offer: Option<u32>,
    /// How often each release was started.
    starts: Vec<u32>,
}

fn release(patch: u32) -> Release {
    Release { major: 1, minor: 0, patch }
}

fn program(patch: u32) -> Program {
    let byte = u8::try_from(patch).unwrap();
    Program { sha256: Sha256([byte; 32]), os_release: format!("VERSION_ID={}\n", release(patch)) }
}

fn patch(program: &Program) -> u32 {
    program.sha256.0[0].into()
}

impl World {
    /// As the installer leaves a disk, with release 0; firmware may know its entry.
    fn installed(entry: bool, health: &[Health]) -> Self {
        let mut contents = Contents::default();
        contents.set(Place::Slot(Slot::A), Some(program(0)));
        contents.set(Place::Fallback, Some(program(0)));
        let mut world = Self {
            contents,
            entries: [entry, false],
            order: entry.then_some(Slot::A),
            next: None,
            journal: None,
            health: health.to_vec(),
            machines: Vec::new(),
            runs: (Place::Fallback, 0),
            boots: 0,
            offer: None,
            starts: vec![0; health.len()],
        };
        world.boot();
        world
    }

    fn firmware(&self) -> Firmware {
        let number = |slot| match slot {
            Slot::A => 10,
            Slot::B => 11,
        };
        Firmware {
            usable: Usable::Yes,
            a: self.entries[0].then_some(10),
            b: self.entries[1].then_some(11),
            order: self.order.map(number).into_iter().chain([3]).collect(),
            next: self.next.map(number),
        }
    }

    /// What firmware does, watchdog included: at most two starts until something is up.
    fn boot(&mut self) {
        for _ in 0..3 {
            self.boots += 1;
            let has = |slot: &Slot| self.entries[usize::from(*slot == Slot::B)];
            let next = self.next.take().filter(has).map(Place::Slot);
            let order = self.order.filter(has).map(Place::Slot);
            let all = [next, order, Some(Place::Fallback)];
            let mut found = all.into_iter().flatten();
            let place = found.find(|place| self.contents.at(*place).is_some());
            let place = place.expect("nothing on the disk can be started");
            let patch = patch(self.contents.at(place).unwrap());
            let index = usize::try_from(patch).unwrap();
            self.starts[index] += 1;
            if self.health[index] != Health::Dead {
                self.runs = (place, patch);
                return;
            }
        }
        panic!("the node does not come up: {self:?}");
    }

    fn facts(&self) -> Facts {
        let (from, runs) = self.runs;
        let firmware = self.firmware();
        let same = self.contents.at(from).is_some_and(|found| patch(found) == runs);
        let journal = self.journal.clone();
        let offered = |number| Offered {
            release: release(number),
            sha256: program(number).sha256,
            urgency: Urgency::Usual,
        };
        Facts {
            journal: journal.unwrap_or_else(|| rebuilt(&self.contents, &firmware, Some(from))),
            contents: self.contents.clone(),
            firmware,
            from: Some(from),
            medium: None,
            same: if same { Same::Yes } else { Same::No },
            boot: self.boots.to_string(),
            offer: match self.offer {
                Some(number) if number > runs => Offer::Program(offered(number)),
                Some(_) | None => Offer::Nothing,
            },
            machines: self.machines.clone(),
            window_s: 0,
            gate: match self.health[usize::try_from(runs).unwrap()] {
                Health::Well => Gate::Passed,
                Health::Sick => Gate::Failed("no network".to_owned()),
                Health::Dead => unreachable!("what is dead does not run"),
            },
            present: Vec::new(),
        }
    }

    /// Does one thing; `Some` when there is nothing to do.
    fn step(&mut self) -> Option<Rest> {
        if self.journal.is_none() {
            // What a shell does before it plans.
            self.journal = Some(self.facts().journal);
            return None;
        }
        match plan(&self.facts()) {
            Action::Note(journal) => self.journal = Some(*journal),
            Action::Copy { from, to, sha256 } => {
                assert!(self.contents.holds(from, sha256));
                assert_ne!(self.health[usize::from(sha256.0[0])], Health::Dead);
                self.write(to, program(sha256.0[0].into()));
            }
            Action::Fetch(slot) => self.write(Place::Slot(slot), program(self.offer.unwrap())),
            Action::MakeEntry(slot) => self.entries[usize::from(slot == Slot::B)] = true,
            Action::Lead(slot) => self.order = Some(slot),
            Action::Arm(slot) => self.next = Some(slot),
            Action::Disarm => self.next = None,
            Action::Restart => {
                assert!(self.machines.is_empty(), "a restart under a machine");
                self.boot();
            }
            Action::Rest(rest) => return Some(rest),
        }
        self.check();
        None
    }

    fn write(&mut self, place: Place, program: Program) {
        let runs = u32::from(program.sha256.0[0]);
        assert!(place != self.runs.0 || self.runs.1 == runs || place == Place::Fallback);
        self.contents.set(place, Some(program));
    }

    /// What must hold after every action: without any variable, the node comes up with a release that
    /// passed.
    fn check(&self) {
        let fallback = self.contents.fallback.as_ref().expect("the fallback path holds a program");
        let health = self.health[usize::try_from(patch(fallback)).unwrap()];
        assert_eq!(health, Health::Well, "{self:?}");
        if let Some(slot) = self.order {
            let leads = self.contents.at(Place::Slot(slot)).map(patch);
            let health = leads.map(|patch| self.health[usize::try_from(patch).unwrap()]);
            assert_eq!(health, Some(Health::Well), "{self:?}");
        }
    }

    fn cut(&mut self, blow: Blow) {
        match blow {
            Blow::None => {}
            Blow::Variables => {
                (self.entries, self.order, self.next) = ([false; 2], None, None);
            }
            Blow::Journal => self.journal = None,
        }
        self.boot();
        self.check();
    }

    /// Goes on until there is nothing to do.
    fn settle(&mut self) -> Rest {
        for _ in 0..60 {
            if let Some(rest) = self.step() {
                return rest;
            }
        }
        panic!("it never comes to rest: {self:?}");
    }

    fn steps_until_rest(&self) -> u32 {
        let mut copy = self.clone();
        (0..60).find(|_| copy.step().is_some()).expect("it comes to rest")
    }
}

const WELL: [Health; 3] = [Health::Well; 3];

#[test]
fn an_installed_node_updates_and_commits() {
    let mut world = World::installed(true, &WELL);
    assert_eq!(world.settle(), Rest::Current);
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.runs, (Place::Slot(Slot::B), 1));
    assert_eq!(world.order, Some(Slot::B));
    assert_eq!(world.contents.fallback, Some(program(1)));
    world.offer = Some(2);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs, world.boots), ((Place::Slot(Slot::A), 2), 3));
}

#[test]
fn a_node_without_entries_makes_them() {
    let mut world = World::installed(false, &WELL);
    assert_eq!(world.runs.0, Place::Fallback);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.entries, world.order), ([true, false], Some(Slot::A)));
}

#[test]
fn a_release_that_does_not_come_up_is_tried_once() {
    for health in [Health::Dead, Health::Sick] {
        let mut world = World::installed(true, &[Health::Well, health, Health::Well]);
        world.offer = Some(1);
        assert!(matches!(world.settle(), Rest::Failed(..)));
        assert_eq!((world.runs, world.starts[1]), ((Place::Slot(Slot::A), 0), 1));
        world.cut(Blow::None);
        assert!(matches!(world.settle(), Rest::Failed(..)));
        assert_eq!(world.starts[1], 1);
        // A newer one is another matter, and so is an operator's word.
        world.journal.as_mut().unwrap().failed.clear();
        world.settle();
        assert_eq!(world.starts[1], 2);
        world.offer = Some(2);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!(world.runs.1, 2);
    }
}

#[test]
fn machines_are_waited_for_and_named() {
    let mut world = World::installed(true, &WELL);
    (world.offer, world.machines) = (Some(1), vec!["m1".to_owned()]);
    assert_eq!(world.settle(), Rest::Machines(vec!["m1".to_owned()]));
    assert_eq!((world.next, world.runs.1), (None, 0));
    let mut facts = world.facts();
    facts.journal.insisted = Some(release(1));
    assert_eq!(plan(&facts), Action::MakeEntry(Slot::B));
    facts.journal.insisted = Some(release(2));
    assert!(matches!(plan(&facts), Action::Rest(Rest::Machines(_))));
    world.machines.clear();
    let mut facts = world.facts();
    facts.window_s = 90;
    assert_eq!(plan(&facts), Action::Rest(Rest::Window(90)));
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.runs.1, 1);
}

#[test]
fn a_held_node_stays_on_what_it_runs_until_told_otherwise() {
    let mut world = World::installed(true, &WELL);
    world.settle();
    let hold = |world: &mut World, held| world.journal.as_mut().unwrap().held = held;
    hold(&mut world, true);
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Held(release(1)));
    assert_eq!(world.contents.b, None, "nothing is fetched for later");
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::Held(release(1)));
    // What is written already, and waits for a machine, waits for the word then.
    hold(&mut world, false);
    world.machines = vec!["m1".to_owned()];
    assert!(matches!(world.settle(), Rest::Machines(_)));
    hold(&mut world, true);
    world.machines.clear();
    assert_eq!(world.settle(), Rest::Held(release(1)));
    assert_eq!((world.next, world.starts[1]), (None, 0));
    // What runs may not run any longer, or an operator insists.
    let mut facts = world.facts();
    let sha256 = program(1).sha256;
    let (release, urgency) = (release(1), Urgency::Now);
    facts.offer = Offer::Program(Offered { release, sha256, urgency });
    assert!(matches!(plan(&facts), Action::Note(noted) if noted.trial.is_some()));
    let mut insisted = world.clone();
    insisted.journal.as_mut().unwrap().insisted = Some(release);
    assert_eq!(insisted.settle(), Rest::Current);
    assert_eq!(insisted.runs.1, 1);
    hold(&mut world, false);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, world.starts[1]), (1, 1));
}

#[test]
fn what_was_withdrawn_before_it_ran_is_not_tried() {
    let mut world = World::installed(true, &WELL);
    (world.offer, world.machines) = (Some(1), vec!["m1".to_owned()]);
    world.settle();
    (world.offer, world.machines) = (None, Vec::new());
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, world.starts[1]), (0, 0));
}

#[test]
fn a_damaged_slot_is_repaired_from_the_fallback() {
    let mut world = World::installed(true, &WELL);
    world.settle();
    world.contents.a = None;
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.contents.a, Some(program(0)));
    world.contents.a = Some(program(2));
    world.cut(Blow::Variables);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.runs.1, 0);
}

/// Bytes that a disk altered may be of no use to what runs, which then passes every gate.
#[test]
fn an_altered_copy_of_what_is_good_is_mended_and_never_becomes_good() {
    let mut altered = program(0);
    altered.sha256.0[31] ^= 1;
    for (place, blow) in [
        (Place::Slot(Slot::A), Blow::None),
        (Place::Fallback, Blow::None),
        (Place::Fallback, Blow::Variables),
    ] {
        let mut world = World::installed(true, &WELL);
        world.settle();
        world.contents.set(place, Some(altered.clone()));
        world.cut(blow);
        assert_eq!(world.settle(), Rest::Current);
        let held = [Place::Slot(Slot::A), Place::Fallback].map(|place| world.contents.at(place));
        assert_eq!(held, [Some(&program(0)); 2], "{place:?} {blow:?}");
        assert_eq!(world.journal.as_ref().unwrap().good, Some(program(0).sha256));
        // It follows its repository as before.
        world.offer = Some(1);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!((world.runs.1, world.starts[1]), (1, 1));
    }
}

#[test]
fn without_variables_nothing_is_tried() {
    let mut facts = World::installed(true, &WELL).facts();
    facts.firmware = Firmware::default();
    facts.journal.good = Some(program(0).sha256);
    let sha256 = program(1).sha256;
    let offered = Offered { release: release(1), sha256, urgency: Urgency::Now };
    facts.offer = Offer::Program(offered);
    assert_eq!(plan(&facts), Action::Rest(Rest::NoFirmware));
    facts.from = None;
    assert_eq!(plan(&facts), Action::Rest(Rest::NotInstalled));
}

/// Cuts the way of an update after each action, twice, with each blow. Whatever happens, the node comes
/// up (`boot` and `check` say so), and in the end it runs the newest release that is well.
#[test]
fn cuts_at_every_place_do_no_harm() {
    let mut tried = 0;
    for second in [Health::Well, Health::Sick, Health::Dead] {
        let health = [Health::Well, second, Health::Well];
        for entry in [true, false] {
            let mut start = World::installed(entry, &health);
            start.offer = Some(1);
            for first in 0..=start.steps_until_rest() {
                for blow in [Blow::None, Blow::Variables, Blow::Journal] {
                    let mut once = start.clone();
                    (0..first).for_each(|_| drop(once.step()));
                    once.cut(blow);
                    for next in 0..=once.steps_until_rest() {
                        for blow in [Blow::None, Blow::Variables, Blow::Journal] {
                            let mut twice = once.clone();
                            (0..next).for_each(|_| drop(twice.step()));
                            twice.cut(blow);
                            twice.settle();
                            twice.check();
                            let wanted = u32::from(second == Health::Well);
                            let failed = twice.journal.as_ref().unwrap().failed.len();
                            // A cut of the trial's boot counts as a failure.
                            assert!(twice.runs.1 == wanted || failed > 0, "{twice:?}");
                            assert!(twice.starts[1] <= 5, "{twice:?}");
                            tried += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(tried > 1000, "{tried}");
}

proptest! {
    /// Updates, failures, cuts and blows in any order.
    #[test]
    fn any_sequence_ends_well(
        health in proptest::collection::vec(0_u8..3, 12),
        acts in proptest::collection::vec((0_u8..11, 1_u32..12, 0_u8..3), 1..60),
    ) {
        let kinds = [Health::Well, Health::Sick, Health::Dead];
        let mut health: Vec<_> = health.iter().map(|kind| kinds[usize::from(*kind)]).collect();
        (health[0], health[11]) = (Health::Well, Health::Well);
        let mut world = World::installed(true, &health);
        for (act, number, blow) in acts {
            match act {
                0 => world.offer = world.offer.max(Some(number)),
                1 => world.cut([Blow::None, Blow::Variables, Blow::Journal][usize::from(blow)]),
                2 => world.machines = vec!["m".to_owned()],
                3 => world.machines.clear(),
                4 => {
                    if let Some(journal) = &mut world.journal {
                        journal.held = number % 2 == 0;
                    }
                }
                _ => drop(world.step()),
            }
        }
        world.machines.clear();
        world.offer = Some(11);
        if let Some(journal) = &mut world.journal {
            journal.failed.clear();
            journal.held = false;
        }
        world.settle();
        if let Some(journal) = &mut world.journal {
            journal.failed.clear();
        }
        world.settle();
        prop_assert_eq!(world.runs.1, 11);
    }
}
