//! The HTTP API of a running VMM, over its unix socket. One connection per request.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Response, body::Incoming};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::{net::UnixStream, task::JoinHandle};
use types::{
    devices::AttachedDevice,
    forward::Problem,
    ids::MachineId,
    operations::{VmCounters, VmEvents},
    vm::{Deadline, VmState},
};

/// Where the sockets are.
const SOCKETS: &str = "/run/holdfast/machines";

/// Longest refusal of a VMM that is read, in bytes.
const MAX_REFUSAL: usize = 64 << 10;

/// Longest detail of a refusal that is passed on, in characters.
const MAX_DETAIL: usize = 500;

/// The VMM answers from memory, except for long polls.
const LIMIT: Duration = Duration::from_secs(5);

/// A guest that is to wait first finishes what it does, as requests to its disk.
const HOLD_LIMIT: Duration = Duration::from_secs(15);

/// Longest poll for console output that the VMM allows, in milliseconds.
pub const MAX_WAIT_MS: u32 = 8_000;

/// Least time that a poll for console output takes which brings none. A VMM that has as many polls as may
/// wait answers another at once, and whoever follows a console asks again at once.
const CONSOLE_PAUSE: Duration = Duration::from_millis(500);

/// Largest answer: the VMM's whole console buffer, and room to spare.
const MAX_ANSWER: usize = 2 << 20;

/// Returns the path of a machine's socket.
pub fn socket_path(machine: MachineId) -> PathBuf {
    sockets().join(format!("{machine}.sock"))
}

#[cfg(not(test))]
fn sockets() -> PathBuf {
    SOCKETS.into()
}

/// A folder of the test's process, where tests put sockets of their own.
#[cfg(test)]
pub(crate) fn sockets() -> PathBuf {
    let folder = format!("holdfast-test-{}/{SOCKETS}", std::process::id());
    std::env::temp_dir().join(folder)
}

/// Why a VMM did not answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum VmmError {
    #[error("cannot connect to the machine's process")]
    Connect { source: std::io::Error },
    #[error("the machine's process did not speak HTTP")]
    Http { source: hyper::Error },
    #[error("the machine's process did not answer in time")]
    Late,
    #[error(
        "it answers nothing; stop the machine, which ends it by force after a moment, and start it again"
    )]
    Silent,
    #[error("the machine's process refuses: {detail}")]
    Status { status: u16, detail: String },
    #[error("the answer of the machine's process cannot be read")]
    Body { reason: String },
}

/// What a guest's power supply can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// Press the ACPI power button.
    Button,
    /// Send an interrupt that cannot be masked.
    Nmi,
    /// Reset.
    Reset,
    /// End the process.
    Stop,
}

/// A piece of console output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Console {
    /// Offset of its first byte.
    pub from: u64,
    /// Offset after its last byte.
    pub end: u64,
    /// The bytes.
    pub bytes: Bytes,
}

/// Asks what the guest is doing.
pub async fn state(machine: MachineId) -> Result<VmState, VmmError> {
    let answer = call(machine, Method::GET, "/v1/state", Content::Nothing, LIMIT).await?;
    serde_json::from_slice(answer.body())
        .map_err(|error| VmmError::Body { reason: error.to_string() })
}

/// Reads console output from `offset` on, waiting up to `wait_ms` for some.
pub async fn console(machine: MachineId, offset: u64, wait_ms: u32) -> Result<Console, VmmError> {
    let wait_ms = wait_ms.min(MAX_WAIT_MS);
    let target = format!("/v1/console?from={offset}&wait_ms={wait_ms}");
    let limit = LIMIT + Duration::from_millis(u64::from(wait_ms));
    let begin = Instant::now();
    let answer = call(machine, Method::GET, &target, Content::Nothing, limit).await?;
    if answer.body().is_empty() {
        let wait = Duration::from_millis(u64::from(wait_ms));
        tokio::time::sleep(rest(wait, begin.elapsed())).await;
    }
    let header = |name| {
        let value = answer.headers().get(name).and_then(|value| value.to_str().ok());
        value.and_then(|value| value.parse::<u64>().ok())
    };
    let from = header("holdfast-console-from").unwrap_or(offset);
    let bytes = answer.body().clone();
    let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    Ok(Console { from, end: from.saturating_add(length), bytes })
}

/// Returns how long to wait after a poll of `wait` that took so long and brought nothing.
fn rest(wait: Duration, took: Duration) -> Duration {
    wait.min(CONSOLE_PAUSE).saturating_sub(took)
}

/// Types `input` into the guest's console.
pub async fn type_in(machine: MachineId, input: Bytes) -> Result<(), VmmError> {
    call(machine, Method::POST, "/v1/console", Content::Typed(input), LIMIT).await.map(|_| ())
}

/// Uses the guest's power supply.
pub async fn power(machine: MachineId, action: Power) -> Result<(), VmmError> {
    let action = match action {
        Power::Button => "button",
        Power::Nmi => "nmi",
        Power::Reset => "reset",
        Power::Stop => "stop",
    };
    let content = Content::Json(format!("{{\"action\":\"{action}\"}}").into());
    call(machine, Method::POST, "/v1/power", content, LIMIT).await.map(|_| ())
}

/// Says when the process ends its machine by itself.
pub async fn put_deadline(machine: MachineId, deadline: Deadline) -> Result<(), VmmError> {
    let content = serde_json::to_vec(&deadline)
        .map_err(|error| VmmError::Body { reason: error.to_string() })?;
    let content = Content::Json(content.into());
    call(machine, Method::PUT, "/v1/deadline", content, LIMIT).await.map(|_| ())
}

/// Makes the guest wait until [`resume`].
pub async fn pause(machine: MachineId) -> Result<(), VmmError> {
    call(machine, Method::POST, "/v1/pause", Content::Nothing, HOLD_LIMIT).await.map(|_| ())
}

/// Lets the guest go on.
pub async fn resume(machine: MachineId) -> Result<(), VmmError> {
    call(machine, Method::POST, "/v1/resume", Content::Nothing, HOLD_LIMIT).await.map(|_| ())
}

/// Returns events from number `from` on.
pub async fn events(machine: MachineId, from: u64) -> Result<VmEvents, VmmError> {
    document(machine, &format!("/v1/events?from={from}")).await
}

/// Returns what was counted.
pub async fn counters(machine: MachineId) -> Result<VmCounters, VmmError> {
    document(machine, "/v1/counters").await
}

/// Returns what is attached.
pub async fn devices(machine: MachineId) -> Result<Vec<AttachedDevice>, VmmError> {
    document(machine, "/v1/devices").await
}

/// How a device leaves a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The guest is asked.
    Asked,
    /// It is pulled, whatever the guest does with it.
    Pulled,
}

/// Takes an attached device out of a guest, or begins to.
pub async fn detach(machine: MachineId, id: &str, how: Removal) -> Result<(), VmmError> {
    let query = match how {
        Removal::Asked => "",
        Removal::Pulled => "?pull=1",
    };
    let target = format!("/v1/devices/{id}{query}");
    call(machine, Method::DELETE, &target, Content::Nothing, HOLD_LIMIT).await.map(|_| ())
}

async fn document<T: DeserializeOwned>(machine: MachineId, target: &str) -> Result<T, VmmError> {
    let answer = call(machine, Method::GET, target, Content::Nothing, LIMIT).await?;
    serde_json::from_slice(answer.body())
        .map_err(|error| VmmError::Body { reason: error.to_string() })
}

/// A dump of a guest, which waits while it is read and goes on when this is dropped.
pub struct Dump {
    /// Bytes of it.
    pub length: u64,
    body: Incoming,
    _connection: Connection,
}

impl Dump {
    /// Returns the next piece; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<Bytes>, VmmError> {
        loop {
            let frame = tokio::time::timeout(HOLD_LIMIT, self.body.frame());
            match frame.await.map_err(|_| VmmError::Late)? {
                None => return Ok(None),
                Some(Err(source)) => return Err(VmmError::Http { source }),
                // A frame of trailers has no data.
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Ok(Some(bytes));
                    }
                }
            }
        }
    }
}

/// Begins to read registers and memory of the guest.
pub async fn dump(machine: MachineId) -> Result<Dump, VmmError> {
    let exchange = async {
        let begun = begin(machine, Method::POST, "/v1/dump", Content::Nothing);
        let (answer, connection) = begun.await?;
        let (head, body) = answer.into_parts();
        if head.status.is_success() {
            let length = hyper::body::Body::size_hint(&body).exact().unwrap_or(0);
            return Ok(Dump { length, body, _connection: connection });
        }
        let said = read(body, MAX_REFUSAL).await?;
        Err(refusal(head.status.as_u16(), &said))
    };
    tokio::time::timeout(HOLD_LIMIT, exchange).await.map_err(|_| VmmError::Late)?
}

/// What goes with a request.
enum Content {
    Nothing,
    /// A document.
    Json(Bytes),
    /// What is typed.
    Typed(Bytes),
}

async fn call(
    machine: MachineId,
    method: Method,
    target: &str,
    content: Content,
    limit: Duration,
) -> Result<Response<Bytes>, VmmError> {
    let exchange = exchange(machine, method, target, content);
    let answer = tokio::time::timeout(limit, exchange).await.map_err(|_| VmmError::Late)??;
    if answer.status().is_success() {
        return Ok(answer);
    }
    Err(refusal(answer.status().as_u16(), answer.body()))
}

/// Reads why a request was refused: a problem document (RFC 9457).
fn refusal(status: u16, body: &[u8]) -> VmmError {
    let detail = match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => problem.detail,
        Err(_) => format!("status {status}, {}", String::from_utf8_lossy(body)),
    };
    VmmError::Status { status, detail: detail.chars().take(MAX_DETAIL).collect() }
}

async fn exchange(
    machine: MachineId,
    method: Method,
    target: &str,
    content: Content,
) -> Result<Response<Bytes>, VmmError> {
    let (answer, _connection) = begin(machine, method, target, content).await?;
    let (head, body) = answer.into_parts();
    Ok(Response::from_parts(head, read(body, MAX_ANSWER).await?))
}

async fn read(body: Incoming, most: usize) -> Result<Bytes, VmmError> {
    let read = Limited::new(body, most).collect().await;
    read.map(|body| body.to_bytes()).map_err(|error| VmmError::Body { reason: error.to_string() })
}

/// Drives a connection, and closes it when nobody waits for its answer any more: a VMM that sees it closed stops
/// waiting too.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Sends a request. The answer's body comes as long as the second thing runs.
async fn begin(
    machine: MachineId,
    method: Method,
    target: &str,
    content: Content,
) -> Result<(Response<Incoming>, Connection), VmmError> {
    let http = |source| VmmError::Http { source };
    let stream = UnixStream::connect(socket_path(machine))
        .await
        .map_err(|source| VmmError::Connect { source })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(http)?;
    // Its errors are those of the request, which are returned below.
    let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
    let request = Request::builder().method(method).uri(target).header("host", "vmm");
    let request = match content {
        Content::Nothing => request.body(Full::default()),
        Content::Json(body) => {
            request.header("content-type", "application/json").body(Full::new(body))
        }
        Content::Typed(body) => {
            request.header("content-type", "application/octet-stream").body(Full::new(body))
        }
    };
    let request = request.map_err(|error| VmmError::Body { reason: error.to_string() })?;
    let answer = sender.send_request(request).await.map_err(http)?;
    Ok((answer, connection))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poll_that_did_not_wait_is_not_repeated_at_once() {
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(20_000), ms(3)), CONSOLE_PAUSE - ms(3));
        assert_eq!(rest(ms(20_000), ms(20_001)), Duration::ZERO);
        assert_eq!(rest(ms(100), ms(40)), ms(60));
        assert_eq!(rest(Duration::ZERO, ms(1)), Duration::ZERO, "nobody meant to wait");
    }
}
