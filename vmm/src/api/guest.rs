//! What changes the guest: console input, power, its deadline, pause. And the console's output.

use std::{sync::PoisonError, time::Duration};

use serde::{Deserialize, Serialize};
use types::{operations::VmEventKind, vm::Deadline};

use super::{
    Answer, Client, Request,
    answer::{done, json, problem},
};
use crate::{
    machine::{Board, Ending, HoldError, Holder, Kind},
    sys::clock::boot_ms,
};

/// Longest wait for console output.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(30);
/// Largest piece of console output in one answer.
const MAX_PIECE: usize = 256 << 10;

/// `GET /v1/console?from=N&wait_ms=M`
pub(super) fn console(request: &Request, client: &Client<'_>, board: &Board) -> Answer {
    let (from, wait) = match span(request) {
        Ok(span) => span,
        Err(refusal) => return *refusal,
    };
    let read = |slice| board.console.read(from, MAX_PIECE, slice);
    let piece = client.wait(wait, read, |piece| !piece.bytes.is_empty());
    let headers = vec![
        ("holdfast-console-from", piece.from.to_string()),
        ("holdfast-console-end", piece.end.to_string()),
    ];
    Answer { headers, ..Answer::bytes("application/octet-stream", piece.bytes) }
}

/// Reads `from` and `wait_ms`, which are 0 unless given.
pub(super) fn span(request: &Request) -> Result<(u64, Duration), Box<Answer>> {
    let (Ok(from), Ok(wait)) = (request.number("from"), request.number("wait_ms")) else {
        let detail = "from and wait_ms are whole numbers, as ?from=0&wait_ms=1000";
        return Err(Box::new(problem(400, "bad query", detail)));
    };
    let wait = Duration::from_millis(wait.unwrap_or(0)).min(MAX_WAIT);
    Ok((from.unwrap_or(0), wait))
}

/// How much of console input the guest's serial port took.
#[derive(Serialize)]
struct Taken {
    taken: usize,
}

/// `POST /v1/console`
pub(super) fn input(request: &Request, board: &Board) -> Answer {
    let bytes = &request.body;
    let taken = board.serial.lock().unwrap_or_else(PoisonError::into_inner).input(bytes);
    if taken < bytes.len() {
        let detail = format!(
            "the guest has not read earlier input: none of these {} bytes were taken; send all of \
             them again later",
            bytes.len()
        );
        return problem(429, "console input is full", &detail);
    }
    json(200, &Taken { taken })
}

/// What `POST /v1/power` takes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PowerRequest {
    action: Action,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    Button,
    Nmi,
    Reset,
    Stop,
}

/// `POST /v1/power`
pub(super) fn power(request: &Request, board: &Board) -> Answer {
    let request: PowerRequest = match serde_json::from_slice(&request.body) {
        Ok(request) => request,
        Err(error) => {
            let detail = format!(
                "{error}; expected {{\"action\": \"button\", \"nmi\", \"reset\" or \"stop\"}}"
            );
            return problem(400, "bad body", &detail);
        }
    };
    let end = |kind, reason: &str| board.control.end(Ending { kind, reason: reason.to_owned() });
    match request.action {
        Action::Button => {
            board.power.lock().unwrap_or_else(PoisonError::into_inner).press_button();
            board.control.note_press();
            board.cut_dump("the power button was pressed");
        }
        Action::Nmi => {
            if let Err(error) = board.interrupt() {
                return problem(500, "no interrupt", &format!("KVM refuses: {error}"));
            }
            board.events.push(VmEventKind::Interrupted, "");
        }
        Action::Reset => end(Kind::Reset, "the API asked for a reset"),
        Action::Stop => end(Kind::PoweredOff, "the API asked to stop"),
    }
    done()
}

/// `PUT /v1/deadline`
pub(super) fn put_deadline(request: &Request, board: &Board) -> Answer {
    let deadline: Deadline = match serde_json::from_slice(&request.body) {
        Ok(deadline) => deadline,
        Err(error) => {
            let detail = format!(
                "{error}; expected {{\"at_boot_ms\": …, \"grace_ms\": …}}, both in milliseconds, the \
                 first by CLOCK_BOOTTIME, which is {} now",
                boot_ms()
            );
            return problem(400, "bad body", &detail);
        }
    };
    match board.control.set_deadline(deadline) {
        Ok(()) => done(),
        Err(error) => problem(409, "not possible now", &error.to_string()),
    }
}

/// `POST /v1/pause`
pub(super) fn pause(_: &Request, board: &Board) -> Answer {
    match board.hold(Holder::Request) {
        Ok(()) => board.events.push(VmEventKind::Paused, ""),
        // Paused is what was asked for.
        Err(HoldError::Held) => {}
        Err(error) => return not_held(&error),
    }
    done()
}

/// Says why the guest does not wait.
pub(super) fn not_held(error: &HoldError) -> Answer {
    let (status, title) = match error {
        HoldError::Held | HoldError::Cut | HoldError::Ended => (409, "not possible now"),
        HoldError::Late { .. } | HoldError::Devices { .. } => (500, "the guest does not wait"),
    };
    problem(status, title, &format!("{error}; the guest goes on"))
}

/// `POST /v1/resume`
pub(super) fn resume(_: &Request, board: &Board) -> Answer {
    if board.release(Holder::Request) {
        board.events.push(VmEventKind::Resumed, "");
    }
    done()
}
