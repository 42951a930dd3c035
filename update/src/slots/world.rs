//! A node in small: partition, variables, journal, firmware. Every sequence of actions is cut at every
//! place, and the node must come up by itself.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use proptest::prelude::*;

use super::{
    Contents, Place, Program, Slot,
    firmware::{Firmware, Usable},
    gate::Gate,
    journal::{Journal, rebuilt},
    plan::{Action, Facts, Offer, Offered, Rest, Urgency, plan},
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

/// One sector's write about names.
#[derive(Debug, Clone, Copy)]
enum Name {
    /// The place becomes the file that another one is.
    Point(Place, Place),
    /// The place is gone.
    Erase(Place),
}

const A: Place = Place::Slot(Slot::A);
const B: Place = Place::Slot(Slot::B);

#[derive(Debug, Clone)]
struct World {
    contents: Contents,
    /// What files the places are, in the order of [`Place::ALL`]: equal numbers are one file.
    files: [u32; 3],
    /// Names that are still to change for the action that was begun.
    names: Vec<Name>,
    /// Whether the entries of the places exist, in the order of [`Place::ALL`].
    entries: [bool; 3],
    /// The order of ours.
    order: Vec<Place>,
    next: Option<Slot>,
    journal: Option<Journal>,
    health: Vec<Health>,
    machines: Vec<String>,
    /// What runs, from where.
    runs: (Place, u32),
    /// Its bytes.
    started: Program,
    /// Whether firmware starts no program that was altered.
    secure: bool,
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

fn index(place: Place) -> usize {
    Place::ALL.into_iter().position(|found| found == place).unwrap()
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
            files: [1, 0, 2],
            names: Vec::new(),
            entries: [false, false, entry],
            order: if entry { vec![Place::Fallback] } else { Vec::new() },
            next: None,
            journal: None,
            health: health.to_vec(),
            machines: Vec::new(),
            runs: (Place::Fallback, 0),
            started: program(0),
            secure: false,
            boots: 0,
            offer: None,
            starts: vec![0; health.len()],
        };
        world.boot();
        world
    }

    fn firmware(&self) -> Firmware {
        let number = |place: Place| 10 + u16::try_from(index(place)).unwrap();
        let entry = |place: Place| self.entries[index(place)].then(|| number(place));
        Firmware {
            usable: Usable::Yes,
            a: entry(A),
            b: entry(B),
            fallback: entry(Place::Fallback),
            order: self.order.iter().map(|place| number(*place)).chain([3]).collect(),
            next: self.next.map(|slot| number(Place::Slot(slot))),
        }
    }

    /// What firmware does, watchdog included: at most two starts until something is up.
    fn boot(&mut self) {
        self.names.clear();
        for _ in 0..3 {
            self.boots += 1;
            let next = self.next.take().map(Place::Slot).into_iter();
            let listed = next.chain(self.order.iter().copied());
            let listed = listed.filter(|place| self.entries[index(*place)]);
            let starts = |found: &&Program| !self.secure || **found == program(patch(found));
            let mut all = listed.chain([Place::Fallback]);
            let found = all.find_map(|at| Some((at, self.contents.at(at).filter(starts)?)));
            let (place, found) = found.expect("nothing on the disk can be started");
            let found = found.clone();
            let patch = patch(&found);
            let index = usize::try_from(patch).unwrap();
            self.starts[index] += 1;
            if self.health[index] != Health::Dead {
                (self.runs, self.started) = ((place, patch), found);
                return;
            }
        }
        panic!("the node does not come up: {self:?}");
    }

    fn facts(&self) -> Facts {
        let (from, runs) = self.runs;
        let firmware = self.firmware();
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
            runs: Some(self.started.clone()),
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
        if !self.names.is_empty() {
            let name = self.names.remove(0);
            self.rename(name);
            self.check();
            return None;
        }
        match plan(&self.facts()) {
            Action::Note(journal) => self.journal = Some(*journal),
            Action::Mend { from, sha256 } => {
                assert!(self.contents.holds(Place::Slot(from), sha256));
                self.write(Place::Fallback, program(sha256.0[0].into()));
            }
            Action::Promote { slot, sha256 } => {
                assert!(self.contents.holds(Place::Slot(slot), sha256));
                self.names = vec![
                    Name::Point(Place::Slot(slot.other()), Place::Fallback),
                    Name::Point(Place::Fallback, Place::Slot(slot)),
                    Name::Erase(Place::Slot(slot)),
                ];
            }
            Action::Release(slot) => self.rename(Name::Erase(Place::Slot(slot))),
            Action::Fetch(slot) => self.write(Place::Slot(slot), program(self.offer.unwrap())),
            Action::MakeEntry(place) => self.entries[index(place)] = true,
            Action::List(places) => {
                assert!(places.iter().all(|place| self.entries[index(*place)]));
                self.order = places;
            }
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

    fn rename(&mut self, name: Name) {
        let (to, file, program) = match name {
            Name::Point(to, from) => (to, self.files[index(from)], self.contents.at(from).cloned()),
            Name::Erase(place) => (place, 0, None),
        };
        self.files[index(to)] = file;
        self.contents.set(to, program);
        self.share();
    }

    fn write(&mut self, place: Place, program: Program) {
        let held = self.contents.at(place).map(|held| held.sha256);
        let runs = place == self.runs.0 && held == Some(self.started.sha256);
        assert!(!runs || place == Place::Fallback, "{self:?}");
        self.files[index(place)] = self.files.iter().max().unwrap() + 1;
        self.contents.set(place, Some(program));
        self.share();
    }

    fn share(&mut self) {
        let fallback = self.files[index(Place::Fallback)];
        let is_shared = |slot: &Slot| self.files[index(Place::Slot(*slot))] == fallback;
        self.contents.shared = Slot::ALL.into_iter().find(is_shared);
    }

    /// What must hold after every action: without any variable, the node comes up with a release that
    /// passed.
    fn check(&self) {
        // What a test takes away firmware's order makes up for.
        let listed = || self.order.iter().find_map(|place| self.contents.at(*place));
        let first = self.contents.fallback.as_ref().or_else(listed).expect("nothing starts");
        let health = self.health[usize::try_from(patch(first)).unwrap()];
        assert_eq!(health, Health::Well, "{self:?}");
        for found in self.order.iter().filter_map(|place| self.contents.at(*place)) {
            let health = self.health[usize::try_from(patch(found)).unwrap()];
            assert_eq!(health, Health::Well, "{self:?}");
        }
    }

    fn cut(&mut self, blow: Blow) {
        match blow {
            Blow::None => {}
            Blow::Variables => {
                (self.entries, self.order, self.next) = ([false; 3], Vec::new(), None);
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

/// A node after its first update, which runs what is on the fallback path.
fn updated() -> World {
    let mut world = World::installed(true, &WELL);
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Current);
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs, &world.order[..]), ((Place::Fallback, 1), &[Place::Fallback, A][..]));
    world
}

#[test]
fn an_installed_node_updates_and_commits() {
    let mut world = World::installed(true, &WELL);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.order, [Place::Fallback, A]);
    for (number, boots) in [(1, 2), (2, 3)] {
        world.offer = Some(number);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!((world.runs, world.boots), ((B, number), boots));
        assert_eq!(world.order, [Place::Fallback, A]);
        let Contents { a, b, fallback, shared } = &world.contents;
        assert_eq!((a, b), (&Some(program(number - 1)), &None));
        assert_eq!((fallback, shared), (&Some(program(number)), &None));
    }
}

#[test]
fn each_release_is_written_once() {
    let mut world = World::installed(true, &WELL);
    world.settle();
    world.offer = Some(2);
    let mut fetched = 0;
    while world.runs.1 != 2 || plan(&world.facts()) != Action::Rest(Rest::Current) {
        let action = plan(&world.facts());
        assert!(!matches!(action, Action::Mend { .. }), "it is written again");
        fetched += u32::from(matches!(action, Action::Fetch(_)));
        assert_eq!(world.step(), None);
    }
    assert_eq!(fetched, 1);
}

#[test]
fn a_node_without_entries_makes_them() {
    let mut world = World::installed(false, &WELL);
    assert_eq!(world.runs.0, Place::Fallback);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.entries, &world.order[..]), ([true, false, true], &[Place::Fallback, A][..]));
}

#[test]
fn a_release_that_does_not_come_up_is_tried_once() {
    for health in [Health::Dead, Health::Sick] {
        let mut world = World::installed(true, &[Health::Well, health, Health::Well]);
        world.offer = Some(1);
        assert!(matches!(world.settle(), Rest::Failed(..)));
        assert_eq!((world.runs, world.starts[1]), ((Place::Fallback, 0), 1));
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
    assert_eq!(plan(&facts), Action::MakeEntry(B));
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
fn a_fallback_path_that_is_lost_is_mended_from_the_copy() {
    let mut world = World::installed(true, &WELL);
    world.settle();
    for lost in [None, Some(program(2))] {
        world.contents.set(Place::Fallback, lost);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!(world.contents.fallback, Some(program(0)));
        assert_eq!(world.contents.a, Some(program(0)));
    }
    world.cut(Blow::Variables);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.runs.1, 0);
}

fn altered(number: u32) -> Program {
    let mut altered = program(number);
    altered.sha256.0[31] ^= 1;
    altered
}

/// Bytes that a disk altered may be of no use to what runs, which then passes every gate.
#[test]
fn an_altered_copy_of_what_is_good_is_mended_and_never_becomes_good() {
    for (secure, blow) in [(false, Blow::None), (false, Blow::Variables), (true, Blow::None)] {
        let mut world = World::installed(true, &WELL);
        world.settle();
        world.secure = secure;
        world.contents.set(Place::Fallback, Some(altered(0)));
        world.cut(blow);
        assert_eq!(world.settle(), Rest::Current);
        let held = [A, Place::Fallback].map(|place| world.contents.at(place));
        assert_eq!(held, [Some(&program(0)); 2], "{secure} {blow:?}");
        assert_eq!(world.journal.as_ref().unwrap().good, Some(program(0).sha256));
        // It follows its repository as before.
        world.offer = Some(1);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!((world.runs.1, world.starts[1]), (1, 1));
    }
}

/// There is one copy of what is good then, and the release before it.
#[test]
fn after_an_update_the_release_before_starts_where_the_good_one_cannot() {
    let mut world = updated();
    world.secure = true;
    world.contents.set(Place::Fallback, Some(altered(1)));
    world.cut(Blow::None);
    assert_eq!(world.runs, (A, 0));
    // What was good is what the repository has, and comes again.
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, world.starts[1]), (1, 3));
    assert_eq!(world.contents.fallback, Some(program(1)));

    // Firmware that starts everything: the next start is one of the release before.
    let mut world = updated();
    world.contents.set(Place::Fallback, Some(altered(1)));
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::OnlySpare);
    assert_eq!((world.runs, &world.order[..]), ((Place::Fallback, 1), &[A][..]));
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, &world.contents.fallback), (1, &Some(program(1))));

    // An altered spare is not led to, and is no help.
    let mut world = updated();
    world.contents.set(A, Some(altered(0)));
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.order, [Place::Fallback]);
    world.contents.set(Place::Fallback, Some(altered(1)));
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::NothingGood);
}

#[test]
fn without_variables_nothing_is_tried() {
    let mut facts = World::installed(true, &WELL).facts();
    facts.firmware = Firmware::default();
    facts.journal = Journal::default().with_good(program(0).sha256, Some(release(0)));
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
