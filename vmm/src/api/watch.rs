//! What is told of the guest and changes nothing, but for the pause that a dump needs.

use std::sync::PoisonError;

use types::{
    operations::{MemoryCounters, VmCounters},
    vm::{VmPhase, VmState},
};

use super::{
    Answer, Client, Request,
    answer::{Body, json},
    guest,
};
use crate::{
    dump::{Cut, Dump},
    machine::Board,
    sys::clock::boot_ms,
};

/// The description of the API.
pub(super) const DOCUMENT: &str = include_str!("../../openapi.json");

/// `GET /v1/openapi.json`
pub(super) fn document(_: &Request, _: &Board) -> Answer {
    Answer::bytes("application/json", DOCUMENT.as_bytes().to_vec())
}

/// `GET /v1/state`
pub(super) fn state(_: &Request, board: &Board) -> Answer {
    let phase = if board.control.is_ended() {
        VmPhase::Stopped
    } else if board.pauses.is_wanted() {
        VmPhase::Paused
    } else if board.events.has_panicked() {
        VmPhase::Panicked
    } else if board.power.lock().unwrap_or_else(PoisonError::into_inner).is_asleep() {
        VmPhase::Sleeping
    } else {
        VmPhase::Running
    };
    let (console_start, console_end) = board.console.range();
    let state = VmState {
        machine: board.machine,
        phase,
        console_end,
        console_start,
        deadline: board.control.deadline(),
        boot_ms: boot_ms(),
        clock_ahead_s: board.chipset.clock.lock().unwrap_or_else(PoisonError::into_inner).ahead_s(),
        problem: board.chipset.smm.as_ref().and_then(|smm| smm.problem()).map(str::to_owned),
    };
    json(200, &state)
}

/// `GET /v1/events?from=N&wait_ms=M`
pub(super) fn events(request: &Request, client: &Client<'_>, board: &Board) -> Answer {
    match guest::span(request) {
        Ok((from, wait)) => {
            let read = |slice| board.events.read(from, slice);
            json(200, &client.wait(wait, read, |read| !read.events.is_empty()))
        }
        Err(refusal) => *refusal,
    }
}

/// `GET /v1/counters`
pub(super) fn counters(_: &Request, board: &Board) -> Answer {
    let uptime_ms = u64::try_from(board.built.elapsed().as_millis()).unwrap_or(u64::MAX);
    let guest_bytes = board.ram.size();
    json(
        200,
        &VmCounters {
            uptime_ms,
            vcpus: board.exits.iter().map(crate::counters::Exits::read).collect(),
            devices: board.activity.read(),
            memory: MemoryCounters {
                guest_bytes,
                resident_bytes: board.ram.resident().unwrap_or(guest_bytes).min(guest_bytes),
            },
        },
    )
}

/// `POST /v1/dump`: the guest waits from here until the answer is sent or the reader is gone, which
/// is when [`finish_dump`] is called.
pub(super) fn dump(_: &Request, board: &Board) -> Answer {
    let cut = Cut::default();
    if let Err(error) = board.dump_begins(&cut) {
        return guest::not_held(&error);
    }
    let note = board.chipset.guest_note();
    let dump = Dump::new(&board.ram, &board.pauses.registers(), note, cut);
    let bytes = Answer::bytes("application/x-elf", Vec::new());
    Answer { body: Body::Dump(Box::new(dump)), ..bytes }
}

/// A dump was read, or its reader is gone.
pub(super) fn finish_dump(dump: &Dump, board: &Board) {
    board.dump_ends(dump.cut());
}
