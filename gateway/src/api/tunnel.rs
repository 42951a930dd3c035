//! Long-lived answers: a console that goes on, a guest's memory, and over a WebSocket (RFC 6455) a console that is
//! typed at (`terminal`) or a TCP port of the guest (binary frames).
//!
//! Nothing is queued here: a chunk is read only after the last one was taken.

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    extract::{
        FromRequestParts,
        ws::{Message, WebSocket, WebSocketUpgrade},
    },
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::Response,
};
use futures_util::{SinkExt, StreamExt};
use lease::{problem::Kind, request::VerifiedRequest};
use overlay::OverlayStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::io::ReaderStream;
use types::{
    forward::{ForwardedRequest, Problem, StreamHeader},
    ids::MachineId,
};

use super::{forwarding, leases, response, terminal};
use crate::{
    service::Gateway,
    streams::{self, Opened, StreamError},
};

/// Bytes moved at a time.
const CHUNK: usize = 32 << 10;

/// Largest frame of a client.
const MAX_FRAME: usize = 1 << 20;

/// A tunnel without a byte in either direction ends after this long.
const IDLE: Duration = Duration::from_secs(3600);

pub(super) async fn follow(
    gateway: &Gateway,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let Opened { stream, .. } = connect(gateway, machine, request, who).await?;
    let body = Body::from_stream(ReaderStream::with_capacity(stream, CHUNK));
    Ok(response(StatusCode::OK, "application/octet-stream", body))
}

/// Passes on a guest's memory. Its length is told first, so that a dump that breaks off is seen.
pub(super) async fn dump(
    gateway: &Gateway,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let Opened { stream, length } = connect(gateway, machine, request, who).await?;
    let length = length.ok_or_else(|| {
        Kind::NodeUnreachable.because("the node did not say how long the dump is")
    })?;
    let body = Body::from_stream(ReaderStream::with_capacity(stream.take(length), CHUNK));
    let mut response = response(StatusCode::OK, "application/x-elf", body);
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

/// Opens a TCP port of the guest.
pub(super) async fn open(
    gateway: &Gateway,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
    parts: &mut Parts,
) -> Result<Response, Problem> {
    let upgrade = upgrade(parts, "a tunnel").await?;
    let Opened { stream, .. } = connect(gateway, machine, request, who).await?;
    Ok(upgrade.on_upgrade(move |socket| carry(socket, stream)))
}

/// Opens a console that is typed at.
pub(super) async fn open_terminal(
    gateway: &Gateway,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
    parts: &mut Parts,
) -> Result<Response, Problem> {
    let upgrade = upgrade(parts, "a terminal").await?;
    let Opened { stream, .. } = connect(gateway, machine, request, who).await?;
    Ok(upgrade.on_upgrade(move |socket| terminal::carry(socket, stream)))
}

/// Reads that a request begins a WebSocket; `what` is one.
async fn upgrade(parts: &mut Parts, what: &str) -> Result<WebSocketUpgrade, Problem> {
    let upgrade = WebSocketUpgrade::from_request_parts(parts, &()).await.map_err(|error| {
        Kind::Malformed.because(format!("{what} is a WebSocket (RFC 6455): {error}"))
    })?;
    Ok(upgrade.max_frame_size(MAX_FRAME).max_message_size(MAX_FRAME))
}

async fn connect(
    gateway: &Gateway,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Opened, Problem> {
    let node = leases::node(gateway, machine, who)?;
    let header = StreamHeader::Request(request.clone());
    streams::open(&gateway.overlay, node, &header, gateway.node_deadline())
        .await
        .map_err(|error| refuse(&error))?
}

fn refuse(error: &StreamError) -> Problem {
    match error {
        StreamError::Overlay { source } => forwarding::refuse(source),
        StreamError::PeerSilent { .. } => Kind::NodeTimeout.caused_by(error),
        StreamError::PeerBroke { .. }
        | StreamError::PeerForm { .. }
        | StreamError::PeerHead { .. } => Kind::NodeUnreachable.caused_by(error),
    }
}

/// Carries bytes until both directions ended, one broke, or nothing moved for long.
async fn carry(socket: WebSocket, stream: OverlayStream) {
    let (mut to_client, mut from_client) = socket.split();
    let (mut from_node, mut to_node) = tokio::io::split(stream);
    let up = async {
        let ended = loop {
            match tokio::time::timeout(IDLE, from_client.next()).await {
                Ok(Some(Ok(Message::Binary(bytes)))) if bytes.is_empty() => break Ended::Half,
                Ok(Some(Ok(Message::Binary(bytes)))) => {
                    if to_node.write_all(&bytes).await.is_err() {
                        break Ended::Half;
                    }
                }
                Ok(Some(Ok(Message::Ping(_) | Message::Pong(_)))) => {}
                Ok(Some(Ok(Message::Text(_) | Message::Close(_)) | Err(_)) | None) | Err(_) => {
                    break Ended::Whole;
                }
            }
        };
        // The guest may still have something to say after the client's last byte.
        let _ = to_node.shutdown().await;
        ended
    };
    let down = async {
        let mut chunk = vec![0; CHUNK];
        while let Ok(Ok(length @ 1..)) =
            tokio::time::timeout(IDLE, from_node.read(&mut chunk)).await
        {
            let bytes = Bytes::copy_from_slice(&chunk[..length]);
            if to_client.send(Message::Binary(bytes)).await.is_err() {
                break;
            }
        }
        // The client may be gone already.
        let _ = to_client.close().await;
    };
    tokio::pin!(up, down);
    tokio::select! {
        () = &mut down => {}
        ended = &mut up => if let Ended::Half = ended { down.await },
    }
}

/// How much of a tunnel the client ended.
enum Ended {
    /// Its own direction: an empty frame, which a TCP connection's half-close becomes.
    Half,
    /// Both.
    Whole,
}
