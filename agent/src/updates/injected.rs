//! System calls that fail. What the node must not forget is written by a process of its own under
//! strace(1), which lets the nth call of one kind fail that touches the scenario's folder: for every n,
//! until the work gets through. After each failure a new process must find what was acknowledged, make a
//! good state of what is there with the node's own code, and the failed one must have said what failed.
//!
//! A run takes every [`STEP`]th n; `HOLDFAST_INJECT_STEP=1` takes them all.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    collections::BTreeSet,
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use types::units::UnixSeconds;
use update::{
    channel::Sha256,
    disk::{esp, gpt::BlockSize, layout},
    slots::{Place, Program, Slot, firmware, journal::Journal},
};

use super::{journal, partition::Partition};
use crate::{
    evidence::{self, Lasting},
    init::boot::chain,
    install::failing::INSTALL,
    machines::{
        plan::fixture,
        store::{Answered, Store, StoreError},
    },
};

/// Variables by which a process knows that it is to work, and where.
const SCENARIO: &str = "HOLDFAST_INJECT_SCENARIO";
const FOLDER: &str = "HOLDFAST_INJECT_FOLDER";
/// How many calls lie between two that fail, unless the environment says so.
const STEP: usize = 3;
/// More calls of one kind than any scenario makes.
const MAX_CALLS: usize = 5000;
/// What begins a line about something that is durable.
const DONE: &str = "durable: ";
/// What begins a line about what failed.
const FAILED: &str = "failed: ";

/// Calls and what they fail with.
const CALLS: [(&str, &str, &str); 11] = [
    ("openat", "EMFILE", "Too many open files"),
    ("read", "EIO", "Input/output error"),
    ("pread64", "EIO", "Input/output error"),
    ("write", "ENOSPC", "No space left on device"),
    ("pwrite64", "EIO", "Input/output error"),
    ("fsync", "EIO", "Input/output error"),
    ("fdatasync", "EIO", "Input/output error"),
    ("ftruncate", "ENOSPC", "No space left on device"),
    ("rename", "EIO", "Input/output error"),
    ("unlink", "EIO", "Input/output error"),
    ("ioctl", "EIO", "Input/output error"),
];

/// Why work was not done.
#[derive(Debug)]
pub(crate) struct Failure(Box<dyn Error>);

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(Box::new(error))
    }
}

/// Where steps are acknowledged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Teller(pub(crate) fn(&str));

impl Teller {
    pub(crate) fn tell(self, fact: &str) {
        self.0(fact);
    }
}

/// Something whose steps are acknowledged one by one.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// How many of the calls that would fail are left out between two that do.
    pub(crate) stride: usize,
    /// Puts the first state there.
    pub(crate) prepare: fn(&Path),
    /// Does the work, and tells each step that is durable.
    pub(crate) work: fn(&Path, Teller) -> Result<(), Failure>,
    /// Checks what is there against what was told, with nothing failing any more.
    pub(crate) verify: fn(&Path, &BTreeSet<String>),
}

const SCENARIOS: [Scenario; 6] = [
    INSTALL,
    Scenario { name: "leases", stride: 1, prepare: |_| (), work: leases, verify: leases_are_there },
    Scenario { name: "slot", stride: 1, prepare: disk, work: slot, verify: slot_is_whole },
    Scenario { name: "promote", stride: 1, prepare: tried, work: promote, verify: good_is_whole },
    Scenario {
        name: "journal",
        stride: 1,
        prepare: |_| (),
        work: journals,
        verify: journal_is_there,
    },
    Scenario {
        name: "evidence",
        stride: 1,
        prepare: crash,
        work: keep,
        verify: crash_is_somewhere,
    },
];

/// Does something again that failed, as renters and the clock do: a store that failed once goes on.
fn again<T>(mut act: impl FnMut() -> Result<T, StoreError>) -> Result<T, StoreError> {
    act().or_else(|error| {
        println!("{FAILED}{}", chain(&error));
        act()
    })
}

fn leases(folder: &Path, told: Teller) -> Result<(), Failure> {
    let store =
        again(|| Store::open(&folder.join("agent.redb"))).expect("one call failed, not two");
    again(|| store.put_machine(&fixture::record())).expect("one call failed, not two");
    told.tell("machine");
    for number in 0..3_u16 {
        let answer = Answered {
            digest: number.to_string(),
            status: 200,
            body: "x".repeat(5000),
            at: UnixSeconds(number.into()),
        };
        again(|| store.put_answer(&format!("answer {number}"), &answer))?;
        told.tell(&format!("answer {number}"));
    }
    again(|| store.raise_floor(UnixSeconds(77))).expect("one call failed, not two");
    told.tell("floor");
    Ok(())
}

fn leases_are_there(folder: &Path, told: &BTreeSet<String>) {
    let store = Store::open(&folder.join("agent.redb")).unwrap();
    for fact in told {
        let there = match fact.as_str() {
            "machine" => store.machines().unwrap() == [fixture::record()],
            "floor" => store.floor().unwrap() == UnixSeconds(77),
            answer => store.answer(answer).unwrap().is_some(),
        };
        assert!(there, "{fact} was acknowledged and is gone");
    }
    store.put_machine(&fixture::record()).unwrap();
}

fn program(byte: u8) -> Vec<u8> {
    vec![byte; 200_000]
}

fn partition(folder: &Path) -> Partition {
    let id = "00112233-4455-6677-8899-aabbccddeeff".parse().unwrap();
    let place = firmware::Partition { number: 1, first: 0, blocks: 1, id };
    Partition { device: folder.join("esp"), place, from: None }
}

fn disk(folder: &Path) {
    let mut options = fs::File::options();
    let file = options.create_new(true).read(true).write(true).open(folder.join("esp")).unwrap();
    file.set_len(layout::ESP_BYTES).unwrap();
    let paths = [esp::SLOT_A, esp::SLOT_B, esp::FALLBACK];
    esp::write(&file, BlockSize::B512, &program(1), &paths).unwrap();
}

fn slot(folder: &Path, told: Teller) -> Result<(), Failure> {
    let new = program(2);
    let place = Place::Slot(Slot::B);
    partition(folder).write(place, &new, Program::of(&new).sha256)?;
    told.tell("slot");
    Ok(())
}

fn slot_is_whole(folder: &Path, told: &BTreeSet<String>) {
    let partition = partition(folder);
    let held = |slot| partition.bytes(Place::Slot(slot)).unwrap().unwrap();
    assert!(held(Slot::A) == program(1), "the slot that runs was touched");
    let other = held(Slot::B);
    let wanted = if told.is_empty() { 1..=2 } else { 2..=2 };
    assert!(wanted.clone().any(|byte| other == program(byte)), "{wanted:?}");
    slot(folder, Teller(|_| ())).unwrap();
    assert!(held(Slot::B) == program(2));
}

/// A disk on which what is tried in the second slot has passed.
fn tried(folder: &Path) {
    disk(folder);
    let partition = partition(folder);
    for (place, byte) in [(Place::Fallback, 2), (Place::Slot(Slot::B), 3)] {
        let bytes = program(byte);
        partition.write(place, &bytes, Program::of(&bytes).sha256).unwrap();
    }
}

fn promote(folder: &Path, told: Teller) -> Result<(), Failure> {
    partition(folder).promote(Slot::B, Program::of(&program(3)).sha256)?;
    told.tell("promoted");
    Ok(())
}

fn good_is_whole(folder: &Path, told: &BTreeSet<String>) {
    let partition = partition(folder);
    let held = |place| partition.bytes(place).unwrap();
    let is = |place, byte| held(place) == Some(program(byte));
    assert!(is(Place::Fallback, 2) || is(Place::Fallback, 3));
    assert!(is(Place::Fallback, 2) || is(Place::Slot(Slot::A), 2), "what was good is lost");
    assert!(is(Place::Slot(Slot::B), 3) || is(Place::Fallback, 3), "what passed is lost");
    assert!(told.is_empty() || held(Place::Slot(Slot::B)).is_none());
    // What a node does that finds it so.
    if let Some(slot) = partition.shared().unwrap() {
        partition.remove(slot).unwrap();
    }
    if is(Place::Fallback, 2) {
        partition.promote(Slot::B, Program::of(&program(3)).sha256).unwrap();
    }
    assert!(is(Place::Fallback, 3) && is(Place::Slot(Slot::A), 2));
    assert_eq!((held(Place::Slot(Slot::B)), partition.shared().unwrap()), (None, None));
}

fn journal_of(number: u8) -> Journal {
    Journal { good: Some(Sha256([number; 32])), ..Journal::default() }
}

fn journals(folder: &Path, told: Teller) -> Result<(), Failure> {
    for number in 1..=3 {
        journal::store(folder, &journal_of(number))?;
        told.tell(&number.to_string());
    }
    Ok(())
}

fn journal_is_there(folder: &Path, told: &BTreeSet<String>) {
    let newest = told.iter().filter_map(|number| number.parse::<u8>().ok()).max();
    let found = journal::load(folder);
    let allowed = newest.unwrap_or(1)..=newest.unwrap_or(0) + 1;
    let right = allowed.clone().any(|number| found == Some(journal_of(number)));
    assert!(right || (newest.is_none() && found.is_none()), "{found:?}, not {allowed:?}");
    journals(folder, Teller(|_| ())).unwrap();
}

fn crash(folder: &Path) {
    fs::create_dir(folder.join("pstore")).unwrap();
    fs::create_dir(folder.join("state")).unwrap();
    let name = "pstore/dmesg-efi_pstore-170000000001001";
    fs::write(folder.join(name), "Panic#1 Part1\nKernel panic - not syncing: x\n").unwrap();
}

fn collected(folder: &Path) -> usize {
    let state = folder.join("state");
    evidence::collect(&folder.join("pstore"), (&state, Lasting::Disk), "boot").crashes.len()
}

fn keep(folder: &Path, told: Teller) -> Result<(), Failure> {
    // What fails it tells by itself.
    if collected(folder) == 1 {
        told.tell("crash");
    }
    Ok(())
}

fn crash_is_somewhere(folder: &Path, _: &BTreeSet<String>) {
    // Told twice at the most: when it was kept and could not be taken out of firmware.
    assert!((1..=2).contains(&collected(folder)));
    assert_eq!(fs::read_dir(folder.join("pstore")).unwrap().count(), 0);
}

/// The process that works. In a usual run of the tests there is nothing for it to do.
#[test]
fn work() {
    let (Some(name), Some(folder)) = (env::var_os(SCENARIO), env::var_os(FOLDER)) else { return };
    let scenario = SCENARIOS.iter().find(|scenario| name == scenario.name).unwrap();
    let done = (scenario.work)(&PathBuf::from(folder), Teller(|fact| println!("{DONE}{fact}")));
    if let Err(Failure(error)) = done {
        println!("{FAILED}{}", chain(error.as_ref()));
    }
}

/// What came of one run.
enum Outcome {
    /// The call failed; this is what was said.
    Failed,
    /// There are not so many calls.
    Through,
}

/// Lets the nth call fail, and checks what is left.
fn inject(scenario: &Scenario, (call, errno, text): (&str, &str, &str), nth: usize) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("work");
    fs::create_dir(&below).unwrap();
    (scenario.prepare)(&below);
    let trace = folder.path().join("trace");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-e", &format!("trace={call}"), "-o"]).arg(&trace);
    strace.args(["-e", &format!("inject={call}:error={errno}:when={nth}")]);
    for path in paths(&below) {
        strace.arg("-P").arg(path);
    }
    strace.arg(env::current_exe().unwrap());
    strace.args(["--exact", "updates::injected::work", "--nocapture", "--test-threads", "1"]);
    let ended = strace.env(SCENARIO, scenario.name).env(FOLDER, &below).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout).into_owned()
        + &String::from_utf8_lossy(&ended.stderr);
    let context = format!("{} with {call} {nth}: {said}", scenario.name);
    assert!(ended.status.success(), "it panicked: {context}");
    let injected = fs::read_to_string(&trace).unwrap().contains("(INJECTED)");
    let told: BTreeSet<String> =
        said.lines().filter_map(|line| Some(line.split_once(DONE)?.1.to_owned())).collect();
    // Some failures do no harm; those that do are told with the system's own words.
    let through = !told.is_empty() && !said.contains(FAILED);
    assert!(through || said.contains(text), "nobody said what failed: {context}");
    assert!(injected || through, "{context}");
    (scenario.verify)(&below, &told);
    if injected { Outcome::Failed } else { Outcome::Through }
}

/// Every path that a scenario uses: strace(1) knows calls by their paths, not by their folders.
fn paths(below: &Path) -> Vec<PathBuf> {
    let names = [
        "",
        "agent.redb",
        "esp",
        "disk",
        "slots.journal",
        "slots.journal.new",
        "pstore",
        "state",
        "state/crashes",
        "state/crashes/.unfinished",
        "state/crashes/000000.txt",
        "pstore/dmesg-efi_pstore-170000000001001",
    ];
    names.iter().map(|name| below.join(name)).collect()
}

#[test]
fn every_call_may_fail() {
    let probe = Command::new("strace").args(["-qq", "-e", "trace=none", "true"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        println!("skipped: system calls that fail: strace cannot trace here");
        return;
    }
    let step = env::var("HOLDFAST_INJECT_STEP").ok().and_then(|step| step.parse().ok());
    let step = step.unwrap_or(STEP).max(1);
    let mut all = 0;
    for scenario in &SCENARIOS {
        let mut failed = 0;
        for call in CALLS {
            // The first of each kind always fails; the others by the step.
            for nth in (1..MAX_CALLS).step_by(step * scenario.stride) {
                match inject(scenario, call, nth) {
                    Outcome::Failed => failed += 1,
                    Outcome::Through => break,
                }
            }
        }
        println!("injected: {}: {failed} calls failed", scenario.name);
        assert!(failed >= 3, "{}: {failed}", scenario.name);
        all += failed;
    }
    println!("injected: {all} failed calls, every {step}th of each kind, fewer of an installation");
}
