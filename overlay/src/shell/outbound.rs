//! Requests and streams to other nodes, by the first way that works.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream};
use tokio::time::timeout;
use types::ids::NodeId;

use super::{
    api::RequestError,
    connect,
    frames::{self, OPENING},
    inbound::{ANSWER, ENCAPSULATED},
    node::Node,
    pump,
    stream::OverlayStream,
};
use crate::{
    routes::Way,
    sealed::{self, Opener, Purpose, SealedError, Sealer},
    tunnel::{TunnelReceiver, TunnelSender},
    wire::{self, Answer, Letter, MESSAGE, MESSAGE_FRAME, Opening, Parcel, Refusal},
};

/// All ways together are given this long to open a stream.
const OPEN_STREAM: Duration = Duration::from_secs(15);

/// Sends a request and waits for the answer.
pub(super) async fn request(
    node: &Arc<Node>,
    to: NodeId,
    body: &[u8],
    deadline: Duration,
) -> Result<Bytes, RequestError> {
    if body.len() > MESSAGE {
        return Err(RequestError::TooLong { length: body.len(), limit: MESSAGE });
    }
    timeout(deadline, request_now(node, to, body)).await.unwrap_or_else(|_| {
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        Err(RequestError::Deadline { node: to, deadline_ms })
    })
}

async fn request_now(node: &Arc<Node>, to: NodeId, body: &[u8]) -> Result<Bytes, RequestError> {
    let plain = letter(node, to, body)?;
    let sealed = sealed::seal(&node.identity, to, Purpose::Request, &plain)
        .map_err(|error| unreachable(to, &error))?;
    let digest = sealed::digest(&sealed);
    let opening = Opening::Request(Parcel { from: node.identity.id(), to, sealed });
    let (answer, _) = exchange(node, to, |_| opening.clone()).await?;
    let Answer::Sealed(sealed) = answer else {
        return Err(RequestError::PeerAnswer { node: to });
    };
    sealed::open(&node.identity, to, Purpose::Response(digest), &sealed)
        .map(Bytes::from)
        .map_err(|_| RequestError::PeerAnswer { node: to })
}

/// Opens a byte stream.
pub(super) async fn open_stream(
    node: &Arc<Node>,
    to: NodeId,
) -> Result<OverlayStream, RequestError> {
    timeout(OPEN_STREAM, open_stream_now(node, to)).await.unwrap_or_else(|_| {
        let deadline_ms = u64::try_from(OPEN_STREAM.as_millis()).unwrap_or(u64::MAX);
        Err(RequestError::Deadline { node: to, deadline_ms })
    })
}

async fn open_stream_now(node: &Arc<Node>, to: NodeId) -> Result<OverlayStream, RequestError> {
    let failed = |error: SealedError| unreachable(to, &error);
    let plain = letter(node, to, b"")?;
    let (mut sealed, mut sealer) =
        Sealer::new(&node.identity, to, Purpose::StreamForward).map_err(failed)?;
    sealed.extend(sealer.seal(&plain, b"").map_err(failed)?);
    let digest = sealed::digest(&sealed);
    let parcel = Parcel { from: node.identity.id(), to, sealed };
    let (answer, streams) = exchange(node, to, |end| match end {
        End::Target => Opening::Stream,
        End::Relay => Opening::SealedStream(parcel.clone()),
    })
    .await?;
    match answer {
        Answer::Accepted => Ok(OverlayStream::direct(streams.0, streams.1)),
        Answer::Sealed(answer) => {
            let altered = |_| RequestError::PeerAnswer { node: to };
            let (key, first) = answer
                .split_at_checked(ENCAPSULATED)
                .ok_or(RequestError::PeerAnswer { node: to })?;
            let purpose = Purpose::StreamBackward(digest);
            let mut opener = Opener::new(&node.identity, to, purpose, key).map_err(altered)?;
            opener.open(first, b"").map_err(altered)?;
            let tunnel = (TunnelSender::new(sealer), TunnelReceiver::new(opener));
            Ok(pump::sealed_stream(node, tunnel, streams))
        }
        Answer::Refused(..) => Err(RequestError::PeerAnswer { node: to }),
    }
}

/// Whom a connection leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Relay,
    Target,
}

/// Writes an opening on the first way that takes it, and reads the answer. A way that is tried
/// after another carries the same sealed bytes, which the target acts on once.
async fn exchange(
    node: &Arc<Node>,
    to: NodeId,
    opening: impl Fn(End) -> Opening,
) -> Result<(Answer, (SendStream, RecvStream)), RequestError> {
    let own = node.identity.id();
    let ways = node.with_core(|core, now| {
        let entry = core.membership.member(to)?;
        let connected = |other| node.connection(other).is_some();
        Some(core.routes.ways(now, (own, to), &entry.announcement, connected))
    });
    let ways = ways.ok_or(RequestError::UnknownNode { node: to })?;
    let mut tried = Vec::new();
    for (index, way) in ways.iter().enumerate() {
        let within =
            if index + 1 < ways.len() { connect::DIAL_BEFORE_RELAY } else { connect::DIAL };
        let (end, name) = match way {
            Way::Connected | Way::Dial(_) => (End::Target, "directly".to_owned()),
            Way::Relay(relay) => (End::Relay, format!("through {}", relay.short())),
        };
        let streams = match start(node, to, (way, within), &opening(end)).await {
            Ok(streams) => streams,
            Err(reason) => {
                tried.push(format!("{name}: {reason}"));
                continue;
            }
        };
        match finish(to, end, streams).await {
            Ok(Outcome::Answered(answer, streams)) => return Ok((answer, streams)),
            Ok(Outcome::NotTaken(reason)) => tried.push(format!("{name}: {reason}")),
            Err(error) => return Err(error),
        }
    }
    let tried = if tried.is_empty() {
        "it announces neither an address nor a neighbour that could relay".to_owned()
    } else {
        tried.join("; ")
    };
    Err(RequestError::Unreachable { node: to, tried })
}

/// Opens a stream on one way and writes the opening. When this fails, nothing was taken.
async fn start(
    node: &Arc<Node>,
    to: NodeId,
    (way, within): (&Way, Duration),
    opening: &Opening,
) -> Result<(SendStream, RecvStream), String> {
    let connection: Connection = match way {
        Way::Connected => node.connection(to).ok_or("the connection closed")?,
        Way::Dial(addresses) => connect::to(node, to, addresses, within).await?,
        Way::Relay(relay) => {
            let addresses = node.with_core(|core, _| {
                let entry = core.membership.member(*relay)?;
                Some(entry.announcement.addresses.clone())
            });
            connect::to(node, *relay, &addresses.unwrap_or_default(), within).await?
        }
    };
    let peer = if let Way::Relay(relay) = way { *relay } else { to };
    node.with_core(|core, now| core.routes.handle_open(now, peer))
        .map_err(|_| "too many streams to it in a short time".to_owned())?;
    let (mut send, receive) = timeout(OPENING, connection.open_bi())
        .await
        .map_err(|_| "it lets no stream be opened".to_owned())?
        .map_err(|error| error.to_string())?;
    frames::write(&mut send, opening, OPENING).await.map_err(|error| error.to_string())?;
    Ok((send, receive))
}

enum Outcome {
    Answered(Answer, (SendStream, RecvStream)),
    NotTaken(String),
}

async fn finish(
    to: NodeId,
    end: End,
    (send, mut receive): (SendStream, RecvStream),
) -> Result<Outcome, RequestError> {
    let value = frames::read(&mut receive, MESSAGE_FRAME, ANSWER)
        .await
        .map_err(|_| RequestError::Broken { node: to })?;
    match (Answer::decode(&value), end) {
        (Err(_), _) => Err(RequestError::PeerAnswer { node: to }),
        (Ok(Answer::Refused(Refusal::NoRoute, reason)), End::Relay) => {
            Ok(Outcome::NotTaken(reason))
        }
        (Ok(Answer::Refused(Refusal::Busy, _)), _) => Err(RequestError::PeerBusy { node: to }),
        (Ok(Answer::Refused(Refusal::Unanswered, _)), _) => Err(RequestError::Broken { node: to }),
        (Ok(Answer::Refused(Refusal::Unacceptable | Refusal::NoRoute, reason)), _) => {
            Err(RequestError::PeerRefused { node: to, reason })
        }
        (Ok(answer @ (Answer::Accepted | Answer::Sealed(_))), _) => {
            Ok(Outcome::Answered(answer, (send, receive)))
        }
    }
}

/// Writes what makes a message acceptable to `to` once, from what it announced.
pub(super) fn letter(node: &Arc<Node>, to: NodeId, body: &[u8]) -> Result<Vec<u8>, RequestError> {
    let target = node.with_core(|core, now| {
        core.membership.member(to).map(|entry| (entry.epoch, entry.uptime_ms(now)))
    });
    let (epoch, uptime_ms) = target.ok_or(RequestError::UnknownNode { node: to })?;
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|error| unreachable(to, &error))?;
    Ok(wire::to_bytes(&Letter { epoch, uptime_ms, nonce, body: body.to_vec() }))
}

fn unreachable(node: NodeId, reason: &dyn std::fmt::Display) -> RequestError {
    RequestError::Unreachable { node, tried: reason.to_string() }
}
