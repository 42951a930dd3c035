//! The HTTP API of a running VMM, over its unix socket. One connection per request.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use types::{ids::MachineId, vm::VmState};

/// Where the sockets are.
const SOCKETS: &str = "/run/holdfast/machines";

/// The VMM answers from memory, except for long polls.
const LIMIT: Duration = Duration::from_secs(5);

/// Longest poll for console output that the VMM allows, in milliseconds.
pub const MAX_WAIT_MS: u32 = 30_000;

/// Largest answer: the VMM's whole console buffer, and room to spare.
const MAX_ANSWER: usize = 2 << 20;

/// Returns the path of a machine's socket.
pub fn socket_path(machine: MachineId) -> PathBuf {
    PathBuf::from(format!("{SOCKETS}/{machine}.sock"))
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
    #[error("the machine's process answered {status}: {body}")]
    Status { status: u16, body: String },
    #[error("the answer of the machine's process cannot be read")]
    Body { reason: String },
}

/// What a guest's power supply can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// Press the ACPI power button.
    Button,
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
    let answer = call(machine, Method::GET, "/v1/state", Bytes::new(), LIMIT).await?;
    serde_json::from_slice(answer.body())
        .map_err(|error| VmmError::Body { reason: error.to_string() })
}

/// Reads console output from `offset` on, waiting up to `wait_ms` for some.
pub async fn console(machine: MachineId, offset: u64, wait_ms: u32) -> Result<Console, VmmError> {
    let wait_ms = wait_ms.min(MAX_WAIT_MS);
    let target = format!("/v1/console?from={offset}&wait_ms={wait_ms}");
    let limit = LIMIT + Duration::from_millis(u64::from(wait_ms));
    let answer = call(machine, Method::GET, &target, Bytes::new(), limit).await?;
    let header = |name| {
        let value = answer.headers().get(name).and_then(|value| value.to_str().ok());
        value.and_then(|value| value.parse::<u64>().ok())
    };
    let from = header("holdfast-console-from").unwrap_or(offset);
    let bytes = answer.body().clone();
    let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    Ok(Console { from, end: from.saturating_add(length), bytes })
}

/// Types `input` into the guest's console.
pub async fn type_in(machine: MachineId, input: Bytes) -> Result<(), VmmError> {
    call(machine, Method::POST, "/v1/console", input, LIMIT).await.map(|_| ())
}

/// Uses the guest's power supply.
pub async fn power(machine: MachineId, action: Power) -> Result<(), VmmError> {
    let action = match action {
        Power::Button => "button",
        Power::Reset => "reset",
        Power::Stop => "stop",
    };
    let body = Bytes::from(format!("{{\"action\":\"{action}\"}}"));
    call(machine, Method::POST, "/v1/power", body, LIMIT).await.map(|_| ())
}

async fn call(
    machine: MachineId,
    method: Method,
    target: &str,
    body: Bytes,
    limit: Duration,
) -> Result<Response<Bytes>, VmmError> {
    let exchange = exchange(machine, method, target, body);
    let answer = tokio::time::timeout(limit, exchange).await.map_err(|_| VmmError::Late)??;
    if answer.status().is_success() {
        return Ok(answer);
    }
    let body = String::from_utf8_lossy(answer.body()).chars().take(500).collect();
    Err(VmmError::Status { status: answer.status().as_u16(), body })
}

async fn exchange(
    machine: MachineId,
    method: Method,
    target: &str,
    body: Bytes,
) -> Result<Response<Bytes>, VmmError> {
    let http = |source| VmmError::Http { source };
    let stream = UnixStream::connect(socket_path(machine))
        .await
        .map_err(|source| VmmError::Connect { source })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(http)?;
    // Its errors are those of the request, which are returned below.
    let connection = tokio::spawn(async move { drop(connection.await) });
    let request = Request::builder()
        .method(method)
        .uri(target)
        .header("host", "vmm")
        .header("content-type", "application/json")
        .body(Full::new(body))
        .map_err(|error| VmmError::Body { reason: error.to_string() })?;
    let answer = sender.send_request(request).await.map_err(http)?;
    let (head, body) = answer.into_parts();
    let body = Limited::new(body, MAX_ANSWER)
        .collect()
        .await
        .map_err(|error| VmmError::Body { reason: error.to_string() })?;
    connection.abort();
    Ok(Response::from_parts(head, body.to_bytes()))
}
