//! Long-lived answers: a console that goes on, a guest's memory, and over a WebSocket (RFC 6455) a console that is
//! typed at (`terminal`) or a TCP port of the guest (binary frames).
//!
//! Nothing is queued here: a chunk is read only after the last one was taken.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::{
        FromRequestParts,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code},
    },
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::Response,
};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use lease::{problem::Kind, request::VerifiedRequest};
use overlay::OverlayStream;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    time::Instant,
};
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

/// How long a tunnel may be quiet.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// One without a byte in either direction ends after this time.
    idle: Duration,
    /// How often something moves between client and gateway at least.
    ping: Duration,
}

pub(super) async fn follow(
    gateway: &Gateway,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let Opened { stream, .. } = connect(gateway, machine, request, who).await?;
    let body = Body::from_stream(ReaderStream::with_capacity(stream, CHUNK));
    let mut response = response(StatusCode::OK, "application/octet-stream", body);
    // A proxy that gathers an answer first (nginx does) would show a console by the page.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
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
    let milliseconds = Duration::from_millis;
    let limits = &gateway.http;
    let pace = Pace { idle: milliseconds(limits.idle_ms), ping: milliseconds(limits.ping_ms) };
    Ok(upgrade.on_upgrade(move |socket| carry(socket, stream, pace)))
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
        Kind::Malformed.because(format!(
            "{what} is a WebSocket (RFC 6455), and a proxy has to pass on what makes it one: {error}"
        ))
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

/// Carries bytes until both directions ended, one broke, or nothing moved for long; the client is told which.
async fn carry(socket: WebSocket, stream: OverlayStream, pace: Pace) {
    let (mut to_client, from_client) = socket.split();
    let (from_node, to_node) = tokio::io::split(stream);
    let moved = Moved(Mutex::new(Instant::now()));
    let end = {
        let up = up(from_client, to_node, &moved);
        let down = down(from_node, (&mut to_client, pace.ping), &moved);
        tokio::pin!(up, down);
        let both = async {
            tokio::select! {
                end = &mut down => end,
                ended = &mut up => match ended {
                    Ended::Half => down.await,
                    Ended::Whole => End::Left,
                },
            }
        };
        tokio::select! {
            end = both => end,
            () = moved.long_ago(pace.idle) => End::Idle(pace.idle),
        }
    };
    if let Some(frame) = end.frame() {
        // A client that does not take what came before, or is gone, is not told.
        let told = to_client.send(Message::Close(Some(frame)));
        let _ = tokio::time::timeout(pace.idle, told).await;
    }
}

async fn up(
    mut client: SplitStream<WebSocket>,
    mut node: WriteHalf<OverlayStream>,
    moved: &Moved,
) -> Ended {
    let ended = loop {
        match client.next().await {
            Some(Ok(Message::Binary(bytes))) if bytes.is_empty() => break Ended::Half,
            Some(Ok(Message::Binary(bytes))) => {
                if node.write_all(&bytes).await.is_err() {
                    break Ended::Half;
                }
                moved.now();
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Text(_) | Message::Close(_)) | Err(_)) | None => break Ended::Whole,
        }
    };
    // The guest may still have something to say after the client's last byte.
    let _ = node.shutdown().await;
    ended
}

async fn down(
    mut node: ReadHalf<OverlayStream>,
    (client, every): (&mut SplitSink<WebSocket, Message>, Duration),
    moved: &Moved,
) -> End {
    let mut chunk = vec![0; CHUNK];
    let mut ping = tokio::time::interval_at(Instant::now() + every, every);
    loop {
        let message = tokio::select! {
            read = node.read(&mut chunk) => match read {
                Ok(0) => return End::Over,
                Ok(length) => Message::Binary(Bytes::copy_from_slice(&chunk[..length])),
                Err(error) => return End::Lost(error),
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        let is_ping = matches!(message, Message::Ping(_));
        if client.send(message).await.is_err() {
            return End::Left;
        }
        if !is_ping {
            moved.now();
        }
    }
}

/// When the last byte moved, in whichever direction.
struct Moved(Mutex<Instant>);

impl Moved {
    fn last(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) {
        *self.last() = Instant::now();
    }

    /// Returns when nothing moved for so long.
    async fn long_ago(&self, idle: Duration) {
        loop {
            let until = *self.last() + idle;
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// How a tunnel came to its end.
enum End {
    /// Nothing moved for so long.
    Idle(Duration),
    /// The client is gone.
    Left,
    /// The node is gone, and what it still had to send.
    Lost(std::io::Error),
    /// The guest says that there is no more.
    Over,
}

impl End {
    /// Says so to a client that is there, by a code of RFC 6455 §7.4.1.
    fn frame(&self) -> Option<CloseFrame> {
        match self {
            Self::Idle(idle) => {
                let reason = format!("nothing moved in either direction for {idle:?}");
                Some(terminal::farewell(close_code::AWAY, reason))
            }
            Self::Left => None,
            Self::Lost(error) => Some(terminal::lost(error)),
            Self::Over => {
                Some(terminal::farewell(close_code::NORMAL, "the guest ended it".to_owned()))
            }
        }
    }
}

/// How much of a tunnel the client ended.
enum Ended {
    /// Its own direction: an empty frame, which a TCP connection's half-close becomes.
    Half,
    /// Both.
    Whole,
}
