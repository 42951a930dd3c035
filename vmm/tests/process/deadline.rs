//! Machines that end by themselves. The guest takes no notice of its power button.

use types::{
    console,
    operations::VmEventKind::{DeadlineNear, Paused, Resumed, Started},
    vm::{Deadline, exit},
};
use vmm::sys::clock::boot_ms;

use super::{
    kinds,
    launch::{Machine, launch, start},
    phase,
};

/// Asks for an end so many milliseconds from now; returns when that is.
fn end_within(machine: &Machine, ms: u64, grace_ms: u64) -> u64 {
    let deadline = Deadline { at_boot_ms: boot_ms() + ms, grace_ms };
    let body = serde_json::to_vec(&deadline).unwrap();
    assert_eq!(machine.put("/v1/deadline", &body).status, 202);
    deadline.at_boot_ms
}

#[test]
fn a_guest_is_asked_to_end_and_ended() {
    let Some(mut machine) = start(2, |_| {}) else { return };
    let at = end_within(&machine, 3000, 2500);
    let near = machine.events(1);
    assert_eq!(near["events"][0]["kind"], "deadline-near");
    assert!((at - 2500..at).contains(&boot_ms()), "asked for the end {at} at {}", boot_ms());
    assert_eq!(machine.wait().code(), Some(exit::DEADLINE));
    assert!(boot_ms() >= at);
}

#[test]
fn an_end_that_is_put_off_in_time_does_not_come() {
    let at = boot_ms() + 3_600_000;
    let first = Deadline { at_boot_ms: at, grace_ms: 10_000 };
    let Some(machine) = start(1, |spec| spec.deadline = Some(first)) else { return };
    assert_eq!(machine.get("/v1/state").json()["deadline"]["at_boot_ms"], at);
    end_within(&machine, 1500, 0);
    let later = end_within(&machine, 7_200_000, 0);
    // Nothing happens until long after the end that was put off.
    let events = machine.get("/v1/events?from=1&wait_ms=3000").json();
    assert_eq!(events["events"], serde_json::json!([]));
    assert_eq!(phase(&machine), "running");
    let state = machine.get("/v1/state").json();
    assert_eq!(state["deadline"], serde_json::json!({ "at_boot_ms": later, "grace_ms": 0 }));
    assert!(boot_ms() - state["boot_ms"].as_u64().unwrap() < 10_000);
}

#[test]
fn a_guest_that_waits_goes_on_so_that_it_can_end() {
    let Some(mut machine) = start(1, |_| {}) else { return };
    assert_eq!(machine.post("/v1/pause", b"").status, 202);
    end_within(&machine, 2000, 2000);
    machine.events(3);
    assert_eq!(kinds(&machine), [Started, Paused, Resumed, DeadlineNear]);
    assert_eq!(machine.wait().code(), Some(exit::DEADLINE));
}

#[test]
fn a_guest_whose_button_was_pressed_for_its_end_is_not_asked_twice() {
    let Some(mut machine) = start(1, |_| {}) else { return };
    assert_eq!(machine.post("/v1/power", br#"{"action":"button"}"#).status, 202);
    end_within(&machine, 2000, 1500);
    let events = machine.get("/v1/events?from=1&wait_ms=1500").json();
    assert_eq!(events["events"], serde_json::json!([]));
    assert_eq!(machine.wait().code(), Some(exit::DEADLINE));
}

#[test]
fn a_guest_that_runs_on_is_asked_again_and_told_of_once() {
    let Some(mut machine) = start(1, |_| {}) else { return };
    end_within(&machine, 8000, 7500);
    assert_eq!(machine.events(1)["next"], 2);
    assert_eq!(machine.post("/v1/console", b"b").status, 200);
    assert_eq!(machine.output(2), b"A\x01");
    // Nothing is told until long after the second press, which the guest sees.
    assert_eq!(machine.get("/v1/events?from=2&wait_ms=4500").json()["next"], 2);
    assert_eq!(machine.post("/v1/console", b"bb").status, 200);
    assert_eq!(machine.output(4), b"A\x01\x01\0");
    assert_eq!(machine.wait().code(), Some(exit::DEADLINE));
}

#[test]
fn a_guest_never_runs_whose_end_came_before_its_start() {
    let over = Deadline { at_boot_ms: 1, grace_ms: 0 };
    let Some(mut machine) = launch(1, |spec| spec.deadline = Some(over)) else { return };
    assert_eq!(machine.wait().code(), Some(exit::DEADLINE));
    let tail = console::parse(&std::fs::read(machine.console_file()).unwrap()).unwrap();
    assert_eq!(tail.bytes, b"");
}

#[test]
fn what_is_no_deadline_is_refused_and_changes_nothing() {
    let Some(machine) = start(1, |_| {}) else { return };
    for body in ["", "{}", "null", "[0,0]", r#"{"at_boot_ms":-1,"grace_ms":0}"#] {
        let answer = machine.put("/v1/deadline", body.as_bytes());
        assert_eq!(answer.status, 400, "{body}");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("CLOCK_BOOTTIME"), "{detail}");
    }
    assert_eq!(machine.get("/v1/deadline").status, 405);
    assert_eq!(machine.get("/v1/state").json()["deadline"], serde_json::Value::Null);
}
