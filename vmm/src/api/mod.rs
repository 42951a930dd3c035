//! The control socket: HTTP/1.1 with JSON over a unix stream socket, one request per connection.
//!
//! | Request                              | Answer                                          |
//! |--------------------------------------|-------------------------------------------------|
//! | `GET /v1/state`                      | `types::vm::VmState`                            |
//! | `GET /v1/console?from=N&wait_ms=M`   | output from byte N; waits up to M ms for some   |
//! | `POST /v1/console`                   | input for the guest, at most 4096 bytes         |
//! | `GET /v1/devices`                    | attached devices: `types::devices`              |
//! | `POST /v1/devices`                   | attaches one; its descriptor comes along        |
//! | `DELETE /v1/devices/{id}[?pull=1]`   | asks the guest for it, or pulls it              |
//! | `POST /v1/power`                     | `{"action": "button" \| "reset" \| "stop"}`     |
//!
//! Who may connect is decided by the permissions of the socket's path, which the agent holds.

mod devices;
mod http;

use std::{
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::Arc,
    time::{Duration, Instant},
};

pub use http::{MAX_HEAD, Request, RequestError, parse};
use serde::Deserialize;
use types::{
    forward::Problem,
    vm::{VmPhase, VmState},
};

use crate::{
    machine::{Board, Ending, Kind, RunError, spawn},
    sandbox::ThreadKind,
};

/// Connections answered at the same time. Others wait in the socket's backlog.
const THREADS: usize = 16;
/// How long a client may take to send its request, and to take its answer.
const CLIENT_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for console output.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Largest piece of console output in one answer.
const MAX_PIECE: usize = 256 << 10;
/// Largest body of a request.
const MAX_BODY: usize = 4096;

/// Starts answering.
pub fn start(listener: UnixListener, board: &Arc<Board>) -> Result<(), RunError> {
    listener.set_nonblocking(false).map_err(|source| RunError::Api { source })?;
    let listener = Arc::new(listener);
    for number in 0..THREADS {
        let (listener, served) = (Arc::clone(&listener), Arc::clone(board));
        let work = move || serve(&listener, &served);
        spawn(format!("api{number}"), ThreadKind::Api, Arc::clone(board), work)?;
    }
    Ok(())
}

fn serve(listener: &UnixListener, board: &Board) {
    while !board.control.is_ended() {
        // A failed connection is the client's loss; a closed listener ends with the process.
        if let Ok((stream, _)) = listener.accept() {
            let _ = converse(stream, board);
        }
    }
}

fn converse(mut stream: UnixStream, board: &Board) -> io::Result<()> {
    stream.set_read_timeout(Some(CLIENT_LIMIT))?;
    stream.set_write_timeout(Some(CLIENT_LIMIT))?;
    let answer = match receive(&mut stream) {
        Ok((request, files)) => answer(&request, files, board),
        Err(error) => problem(error.status(), "request not understood", &error.to_string()),
    };
    stream.write_all(&answer.bytes())
}

fn receive(stream: &mut UnixStream) -> Result<(Request, Vec<OwnedFd>), RequestError> {
    let deadline = Instant::now() + CLIENT_LIMIT;
    let (mut bytes, mut files) = (Vec::new(), Vec::new());
    let mut buffer = [0; 4096];
    loop {
        if let Some(request) = parse(&bytes, MAX_BODY)? {
            return Ok((request, files));
        }
        let count =
            devices::read(stream, &mut buffer, &mut files).map_err(|_| RequestError::Incomplete)?;
        if count == 0 || Instant::now() > deadline {
            return Err(RequestError::Incomplete);
        }
        bytes.extend_from_slice(&buffer[..count]);
    }
}

/// An answer.
struct Answer {
    status: u16,
    content_type: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn bytes(&self) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            202 => "Accepted",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            409 => "Conflict",
            413 => "Content Too Large",
            429 => "Too Many Requests",
            _ => "Unknown",
        };
        let mut head = format!(
            "HTTP/1.1 {} {reason}\r\ncontent-type: {}\r\ncontent-length: {}\r\nconnection: close\r\n",
            self.status,
            self.content_type,
            self.body.len()
        );
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

fn json(status: u16, content_type: &'static str, value: &impl serde::Serialize) -> Answer {
    let body = serde_json::to_vec(value).unwrap_or_default();
    Answer { status, content_type, headers: Vec::new(), body }
}

fn problem(status: u16, title: &str, detail: &str) -> Answer {
    let problem = Problem {
        kind: "about:blank".to_owned(),
        title: title.to_owned(),
        status,
        detail: detail.to_owned(),
    };
    json(status, Problem::MEDIA_TYPE, &problem)
}

fn answer(request: &Request, files: Vec<OwnedFd>, board: &Board) -> Answer {
    match (request.method.as_str(), request.path()) {
        ("GET", "/v1/state") => json(200, "application/json", &state(board)),
        ("GET", "/v1/console") => console(request, board),
        ("POST", "/v1/console") => input(&request.body, board),
        ("POST", "/v1/power") => act(&request.body, board),
        ("GET", "/v1/devices") => devices::list(board),
        ("POST", "/v1/devices") => devices::attach(request, files, board),
        ("DELETE", path) if path.starts_with("/v1/devices/") => devices::detach(request, board),
        (_, "/v1/state" | "/v1/console" | "/v1/power" | "/v1/devices") => {
            let detail = format!("{} is not possible on {}", request.method, request.path());
            problem(405, "method not allowed", &detail)
        }
        (_, path) => {
            let detail =
                format!("{path} is none of /v1/state, /v1/console, /v1/power, /v1/devices");
            problem(404, "not found", &detail)
        }
    }
}

fn state(board: &Board) -> VmState {
    let phase = if board.control.is_ended() {
        VmPhase::Stopped
    } else if board.control.is_started() {
        VmPhase::Running
    } else {
        VmPhase::Starting
    };
    let (console_start, console_end) = board.console.range();
    VmState { machine: board.machine, phase, console_end, console_start }
}

fn console(request: &Request, board: &Board) -> Answer {
    let (Ok(from), Ok(wait)) = (request.number("from"), request.number("wait_ms")) else {
        return problem(
            400,
            "bad query",
            "from and wait_ms are whole numbers, as ?from=0&wait_ms=1000",
        );
    };
    let wait = Duration::from_millis(wait.unwrap_or(0)).min(MAX_WAIT);
    let piece = board.console.read(from.unwrap_or(0), MAX_PIECE, wait);
    Answer {
        status: 200,
        content_type: "application/octet-stream",
        headers: vec![
            ("holdfast-console-from", piece.from.to_string()),
            ("holdfast-console-end", piece.end.to_string()),
        ],
        body: piece.bytes,
    }
}

fn input(bytes: &[u8], board: &Board) -> Answer {
    /// How much the guest's serial port took.
    #[derive(serde::Serialize)]
    struct Taken {
        taken: usize,
    }
    let taken = board.serial.lock().unwrap_or_else(std::sync::PoisonError::into_inner).input(bytes);
    if taken < bytes.len() {
        let detail = format!(
            "the guest has not read earlier input: {taken} of {} bytes were taken; send the rest later",
            bytes.len()
        );
        return problem(429, "console input is full", &detail);
    }
    json(200, "application/json", &Taken { taken })
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
    Reset,
    Stop,
}

fn act(body: &[u8], board: &Board) -> Answer {
    let request: PowerRequest = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => {
            let detail =
                format!("{error}; expected {{\"action\": \"button\", \"reset\" or \"stop\"}}");
            return problem(400, "bad body", &detail);
        }
    };
    let end = |kind, reason: &str| board.control.end(Ending { kind, reason: reason.to_owned() });
    match request.action {
        Action::Button => {
            board.power.lock().unwrap_or_else(std::sync::PoisonError::into_inner).press_button();
        }
        Action::Reset => end(Kind::Reset, "the API asked for a reset"),
        Action::Stop => end(Kind::PoweredOff, "the API asked to stop"),
    }
    json(202, "application/json", &serde_json::json!({}))
}
