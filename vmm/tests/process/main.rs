//! The program itself, behind its walls, with a guest of a few instructions: what its API does to
//! the guest. Needs root and a KVM that runs guests; where there is none, each test says so.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod deadline;
mod guest;
mod http;
#[path = "../common/kvm.rs"]
mod kvm;
mod launch;
#[path = "../common/pvh.rs"]
mod pvh;

use std::time::{Duration, Instant};

use guest::COUNTER;
use launch::{Machine, start};
use types::{
    console,
    operations::VmEventKind,
    operations::VmEvents,
    vm::{HyperV, exit},
};

/// Reads the guest's counter out of a dump.
fn counter(machine: &Machine) -> u32 {
    let dump = machine.post("/v1/dump", b"");
    assert_eq!(dump.status, 200);
    assert_eq!(&dump.body[..4], b"\x7fELF");
    // What the guest never touched is not sent.
    assert!(dump.body.len() < 16 << 20, "{}", dump.body.len());
    // A guest that has not counted yet has not touched it either.
    let Some(at) = place(&dump.body, COUNTER) else { return 0 };
    u32::from_le_bytes(dump.body[at..at + 4].try_into().unwrap())
}

/// Returns where a core file has what is at guest-physical `address`, if it has it. Source: elf.h, `Elf64_Ehdr` and
/// `Elf64_Phdr`.
fn place(core: &[u8], address: u64) -> Option<usize> {
    let word = |at: usize| u64::from_le_bytes(core[at..at + 8].try_into().unwrap());
    let count = u16::from_le_bytes(core[56..58].try_into().unwrap());
    let headers = (0..usize::from(count)).map(|number| 64 + number * 56);
    // Offset, address, bytes in the file.
    let segments = headers.map(|at| (word(at + 8), word(at + 24), word(at + 32)));
    let holds = |(_, start, stored): &(u64, u64, u64)| (*start..start + stored).contains(&address);
    // The first is of notes.
    let (offset, start, _) = segments.skip(1).find(holds)?;
    Some(usize::try_from(offset + address - start).unwrap())
}

fn phase(machine: &Machine) -> String {
    machine.get("/v1/state").json()["phase"].as_str().unwrap().to_owned()
}

/// Waits until the guest has looked for input, before which it counts, and returns what was
/// counted of it by then: none of it where ten seconds were not enough.
fn looked(machine: &Machine) -> serde_json::Value {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let counters = machine.get("/v1/counters").json();
        if counters["vcpus"][0]["port_reads"].as_u64().unwrap() > 0 || Instant::now() > deadline {
            return counters;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn kinds(machine: &Machine) -> Vec<VmEventKind> {
    let events: VmEvents = serde_json::from_slice(&machine.get("/v1/events").body).unwrap();
    events.events.iter().map(|event| event.kind).collect()
}

/// Returns how long a question takes that cannot wait.
fn asked(machine: &Machine) -> Duration {
    let begin = Instant::now();
    assert_eq!(phase(machine), "running");
    begin.elapsed()
}

#[test]
fn readers_that_wait_or_are_gone_leave_threads_for_the_rest() {
    let Some(machine) = start(1, |_| {}) else { return };
    looked(&machine);
    // Nothing new comes: the guest is silent from here on.
    let end = machine.get("/v1/state").json()["console_end"].as_u64().unwrap();
    let console = format!("/v1/console?from={end}&wait_ms=8000");
    let events = "/v1/events?from=1000&wait_ms=8000";
    let wait = || (machine.begin("GET", &console, b""), machine.begin("GET", events, b""));
    (0..20).for_each(|_| drop(wait()));
    let took = asked(&machine);
    assert!(took < Duration::from_secs(3), "after 40 that hung up: {took:?}");
    let open: Vec<_> = (0..20).map(|_| wait()).collect();
    let took = asked(&machine);
    assert!(took < Duration::from_secs(3), "beside 40 that wait: {took:?}");
    drop(open);
}

#[test]
fn a_paused_guest_stands_still_and_goes_on() {
    let Some(machine) = start(1, |_| {}) else { return };
    looked(&machine);
    assert_eq!(machine.post("/v1/pause", b"").status, 202);
    assert_eq!(machine.post("/v1/pause", b"").status, 202);
    assert_eq!(phase(&machine), "paused");
    let before = counter(&machine);
    assert!(before > 0);
    assert_eq!((counter(&machine), phase(&machine).as_str()), (before, "paused"));
    assert_eq!(machine.post("/v1/resume", b"").status, 202);
    assert_eq!(phase(&machine), "running");
    let expected = {
        use VmEventKind::{Dumped, Paused, Resumed, Started};
        vec![Started, Paused, Dumped, Dumped, Resumed]
    };
    assert_eq!(kinds(&machine), expected);
    // It reads what it is told only while it runs.
    assert_eq!(machine.post("/v1/console", b"p").status, 200);
    let events = machine.events(5);
    assert_eq!(events["events"][0]["kind"], "guest-panicked");
    let deadline = Instant::now() + Duration::from_secs(10);
    while counter(&machine) == before {
        assert!(Instant::now() < deadline, "it does not go on");
    }
}

#[test]
fn virtual_cpus_that_wait_for_their_start_are_paused_too() {
    let Some(machine) = start(3, |_| {}) else { return };
    assert_eq!(machine.post("/v1/pause", b"").status, 202);
    let before = counter(&machine);
    assert_eq!(counter(&machine), before);
    let dump = machine.post("/v1/dump", b"").body;
    let notes = dump[..4096].windows(5).filter(|window| window == b"CORE\0").count();
    assert_eq!(notes, 3);
}

#[test]
fn a_guest_that_panics_is_told_and_runs_on() {
    let Some(machine) = start(1, |_| {}) else { return };
    assert_eq!(machine.post("/v1/console", b"pp").status, 200);
    let later = machine.events(1);
    assert_eq!(later["events"][0]["kind"], "guest-panicked");
    assert_eq!(phase(&machine), "panicked");
    assert_eq!(machine.post("/v1/console", b"q").status, 200);
}

#[test]
fn a_guest_starts_with_its_clock_as_far_ahead_as_it_was_left() {
    let Some(machine) = start(1, |spec| spec.clock_ahead_s = -7200) else { return };
    assert_eq!(machine.get("/v1/state").json()["clock_ahead_s"], -7200);
}

#[test]
fn a_guest_that_sleeps_is_told_until_it_wakes() {
    let Some(machine) = start(1, |_| {}) else { return };
    let becomes = |expected: &str| {
        assert_eq!(machine.post("/v1/console", b"s").status, 200);
        let deadline = Instant::now() + Duration::from_secs(20);
        while phase(&machine) != expected {
            assert!(Instant::now() < deadline, "{} instead of {expected}", phase(&machine));
        }
    };
    assert_eq!(phase(&machine), "running");
    becomes("sleeping");
    // A pause says more, and its end leaves the guest asleep.
    assert_eq!(machine.post("/v1/pause", b"").status, 202);
    assert_eq!(phase(&machine), "paused");
    assert_eq!(machine.post("/v1/resume", b"").status, 202);
    assert_eq!(phase(&machine), "sleeping");
    becomes("running");
}

#[test]
fn an_interrupt_that_cannot_be_masked_arrives() {
    let Some(mut machine) = start(1, |_| {}) else { return };
    assert_eq!(machine.post("/v1/power", br#"{"action":"nmi"}"#).status, 202);
    assert_eq!(machine.wait().code(), Some(exit::GUEST_FAULT));
}

#[test]
fn a_paused_guest_can_be_stopped() {
    let Some(mut machine) = start(2, |_| {}) else { return };
    assert_eq!(machine.post("/v1/pause", b"").status, 202);
    assert_eq!(machine.post("/v1/power", br#"{"action":"stop"}"#).status, 202);
    assert_eq!(machine.wait().code(), Some(exit::POWERED_OFF));
}

#[test]
fn exits_and_memory_are_counted() {
    let Some(machine) = start(1, |_| {}) else { return };
    let counters = looked(&machine);
    assert_eq!(counters["vcpus"][0]["port_writes"], 1);
    assert!(counters["vcpus"][0]["port_reads"].as_u64().unwrap() > 0);
    assert_eq!(counters["devices"][0]["name"], "rng0");
    assert_eq!(counters["memory"]["guest_bytes"], 16 << 20);
    assert!(counters["memory"]["resident_bytes"].as_u64().unwrap() < 8 << 20);
}

#[test]
fn the_console_outlives_a_process_that_was_killed() {
    let Some(mut machine) = start(1, |_| {}) else { return };
    machine.kill();
    let tail = console::parse(&std::fs::read(machine.console_file()).unwrap()).unwrap();
    assert_eq!((tail.from, tail.bytes.as_slice()), (0, &b"A"[..]));
}

#[test]
fn virtual_cpus_run_where_they_are_put_and_others_anywhere() {
    let Some(machine) = start(2, |spec| spec.cpu_affinity = vec![vec![1], vec![]]) else { return };
    // A thread names itself, a moment after it began.
    let deadline = Instant::now() + Duration::from_secs(10);
    let cpus = |name: &str| loop {
        if let Some(thread) = machine.threads().iter().find(|thread| thread.0 == name) {
            break thread.1.clone();
        }
        assert!(Instant::now() < deadline, "there is no thread {name}");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(cpus("vcpu0"), "1");
    assert_eq!(cpus("vcpu1"), cpus("api0"));
    assert_ne!(cpus("vcpu1"), "1");
}

#[test]
fn a_guest_finds_hyper_v_where_that_is_asked_for() {
    let kvm = kvm_ioctls::Kvm::new();
    if !kvm.is_ok_and(|kvm| kvm.check_extension(kvm_ioctls::Cap::HypervSynic2)) {
        println!("skipped: a guest that finds Hyper-V: this host's KVM does not emulate it");
        return;
    }
    let with = start(2, |spec| spec.hyperv = HyperV::On);
    let (Some(with), Some(without)) = (with, start(1, |_| {})) else { return };
    assert_eq!(with.post("/v1/console", b"h").status, 200);
    assert_eq!(without.post("/v1/console", b"h").status, 200);
    assert_eq!(with.output(13), b"AMicrosoft Hv");
    assert_eq!(without.output(13), b"AKVMKVMKVM\0\0\0");
}

#[test]
fn what_is_not_there_is_told_and_the_document_is() {
    let Some(machine) = start(1, |_| {}) else { return };
    assert_eq!(machine.get("/v1/dump").status, 405);
    assert_eq!(machine.get("/v1/other").status, 404);
    assert_eq!(machine.get("/v1/events?from=-1").status, 400);
    assert_eq!(machine.post("/v1/power", b"{}").status, 400);
    let document = machine.get("/v1/openapi.json").json();
    assert!(document["paths"]["/v1/dump"]["post"].is_object());
}
