//! What changes the guest: console input, power, its deadline, pause. And the console's output.

use std::{sync::PoisonError, time::Duration};

use serde::{Deserialize, Serialize};
use types::{operations::VmEventKind, vm::Deadline};

use super::{
    Answer, Client, Request,
    answer::{done, json, problem},
    body,
};
use crate::{
    machine::{Board, Ending, HoldError, Holder, Kind},
    sys::clock::boot_ms,
};

/// Longest wait for something new: many clients give up after ten seconds.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(8);
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
        let detail = "from and wait_ms are whole numbers, each there once, as ?from=0&wait_ms=1000";
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
    let bytes = match body::bytes(request) {
        Ok(bytes) => bytes,
        Err(refusal) => return *refusal,
    };
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
    #[serde(deserialize_with = "types::json::name")]
    action: Action,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    Button,
    Nmi,
    Reset,
    Stop,
}

/// `POST /v1/power`
pub(super) fn power(request: &Request, board: &Board) -> Answer {
    let expected = "{\"action\": \"button\", \"nmi\", \"reset\" or \"stop\"}";
    let request: PowerRequest = match body::object(request, expected) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
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
    let expected = format!(
        "{{\"at_boot_ms\": …, \"grace_ms\": …}}, both in milliseconds, the first by CLOCK_BOOTTIME, \
         which is {} now",
        boot_ms()
    );
    let deadline: Deadline = match body::object(request, &expected) {
        Ok(deadline) => deadline,
        Err(refusal) => return *refusal,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::watch;

    fn request(target: &str, body: &str) -> Request {
        let (method, target) = ("GET".to_owned(), target.to_owned());
        Request { method, target, content_type: None, body: body.as_bytes().to_vec() }
    }

    #[test]
    fn nobody_waits_longer_than_clients_do() {
        let span = |query: &str| {
            let span = span(&request(&format!("/v1/events{query}"), ""));
            span.map_err(|refusal| refusal.status)
        };
        let wait = Duration::from_millis;
        assert_eq!(span(""), Ok((0, wait(0))));
        assert_eq!(span("?from=7&wait_ms=7999"), Ok((7, wait(7999))));
        assert_eq!(span("?wait_ms=30000"), Ok((0, MAX_WAIT)));
        assert_eq!(span("?wait_ms=1&wait_ms=1"), Err(400));
        assert_eq!(span("?from=+5"), Err(400));
        let told = format!("; {} at most", MAX_WAIT.as_millis());
        assert_eq!(watch::DOCUMENT.matches(&told).count(), 2);
    }

    #[test]
    fn what_to_do_is_a_name() {
        let read = |body: &str| {
            let read: Result<PowerRequest, _> = body::object(&request("/v1/power", body), "more");
            read.map(|request| request.action).map_err(|refusal| refusal.status)
        };
        assert_eq!(read(r#"{"action":"stop"}"#), Ok(Action::Stop));
        assert_eq!(read(r#"{"action":"nmi"}"#), Ok(Action::Nmi));
        for wrong in [r#"{"action":{"stop":null}}"#, r#"["stop"]"#, r#"{"action":"Stop"}"#, "{}"] {
            assert_eq!(read(wrong), Err(400), "{wrong}");
        }
    }
}
