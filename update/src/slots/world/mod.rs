//! A node in small: partition, variables, journal, firmware. Every sequence of actions is cut at every
//! place, and the node must come up by itself.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod ways;

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
    /// It starts, and then panics or hangs.
    Dead,
    /// Its kernel panics or hangs before its first program.
    Stillborn,
}

/// What firmware makes of variables when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quirk {
    None,
    /// It deletes the entries that its order does not name.
    DeletesUnlisted,
    /// It deletes the entries that its order names, and names its own.
    DeletesListed,
    /// It starts by its order whatever was to be started once.
    ClearsNext,
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
    quirk: Quirk,
    /// What was started from a slot last.
    mark: Option<Sha256>,
    journal: Option<Journal>,
    health: Vec<Health>,
    machines: Vec<String>,
    /// When leases end, each with a machine, and what time it is, in seconds.
    leases: Vec<u32>,
    now: u32,
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
            quirk: Quirk::None,
            mark: None,
            journal: None,
            health: health.to_vec(),
            machines: Vec::new(),
            leases: Vec::new(),
            now: 0,
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
            match self.quirk {
                Quirk::None => {}
                Quirk::DeletesUnlisted => {
                    let order = &self.order;
                    self.entries = Place::ALL
                        .map(|place| self.entries[index(place)] && order.contains(&place));
                }
                Quirk::DeletesListed => {
                    let order = std::mem::take(&mut self.order);
                    order.iter().for_each(|place| self.entries[index(*place)] = false);
                }
                Quirk::ClearsNext => self.next = None,
            }
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
            if matches!(place, Place::Slot(_)) && self.health[index] != Health::Stillborn {
                self.mark = Some(found.mark());
            }
            if !matches!(self.health[index], Health::Dead | Health::Stillborn) {
                (self.runs, self.started) = ((place, patch), found);
                return;
            }
        }
        panic!("the node does not come up: {self:?}");
    }

    /// Machines that run: those that stay, and those whose leases have not ended. A power cut ends none of them.
    fn rented(&self) -> Vec<String> {
        let leases = self.leases.iter().filter(|end| **end > self.now);
        self.machines.iter().cloned().chain(leases.map(|end| format!("until {end}"))).collect()
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
            started: self.mark,
            crashed: false,
            boot: self.boots.to_string(),
            offer: match self.offer {
                Some(number) if number > runs => Offer::Program(offered(number)),
                Some(_) | None => Offer::Nothing,
            },
            machines: self.rented(),
            window_s: 0,
            gate: match self.health[usize::try_from(runs).unwrap()] {
                Health::Well => Gate::Passed,
                Health::Sick => Gate::Failed("no network".to_owned()),
                Health::Dead | Health::Stillborn => unreachable!("what is dead does not run"),
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
            Action::Append(slot) => {
                assert!(self.entries[index(Place::Slot(slot))]);
                self.order.retain(|place| *place != Place::Slot(slot));
                self.order.push(Place::Slot(slot));
            }
            Action::Arm(slot) => (self.next, self.mark) = (Some(slot), None),
            Action::Disarm => self.next = None,
            Action::Restart => {
                assert!(self.rented().is_empty(), "a restart under a machine");
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
        // What is tried may be the last one.
        let last = self.order.len().saturating_sub(1).max(1);
        let listed = self.order.iter().take(last);
        for found in listed.filter_map(|place| self.contents.at(*place)) {
            let health = self.health[usize::try_from(patch(found)).unwrap()];
            assert_eq!(health, Health::Well, "{self:?}");
        }
    }

    fn cut(&mut self, blow: Blow) {
        match blow {
            Blow::None => {}
            Blow::Variables => {
                (self.entries, self.order, self.next) = ([false; 3], Vec::new(), None);
                self.mark = None;
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
