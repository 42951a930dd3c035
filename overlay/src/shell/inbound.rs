//! Streams that peers open: links, requests, byte streams, and those to hand on.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, oneshot},
    time::timeout,
};
use types::ids::NodeId;

use super::{
    api::{InboundRequest, InboundStream},
    frames::{self, FrameError, OPENING},
    link,
    node::Node,
    places::{Place, PlacesError},
    pump,
    stream::OverlayStream,
};
use crate::{
    membership::Side,
    sealed::{self, Freshness, Opener, Purpose, SealedError, Sealer},
    tunnel::{TunnelReceiver, TunnelSender},
    wire::{Answer, Letter, MESSAGE_FRAME, Opening, Parcel, Refusal},
};

/// A request that is not answered within this time is given up, whatever its sender's deadline.
pub(super) const ANSWER: Duration = Duration::from_secs(300);
/// A request that is handed on ends within this time: by then its target has given it up.
const RELAYED_REQUEST: Duration = ANSWER.saturating_add(OPENING);
/// A stream that is handed on and in which nothing moved for this long ends. Sessions and consoles are
/// quiet for hours; a gateway ends tunnels after one, and consoles never. Whoever holds places with
/// silent streams holds its own share only.
const RELAYED_STREAM: Duration = Duration::from_secs(24 * 3600);
/// Bytes of the encapsulated key in front of the first sealed chunk (RFC 9180 §4.1).
pub(super) const ENCAPSULATED: usize = 32;

type Streams = (SendStream, RecvStream);

/// Serves one stream. An error is the peer's fault, in words, and ends the connection.
pub(super) async fn serve(
    node: Arc<Node>,
    (peer, connection): (NodeId, Connection),
    (send, mut receive): Streams,
    reading: OwnedSemaphorePermit,
) -> Result<(), String> {
    let opening = match frames::read(&mut receive, MESSAGE_FRAME, OPENING).await {
        Ok(value) => Opening::decode(&value).map_err(|error| error.to_string())?,
        Err(FrameError::Wire(error)) => return Err(error.to_string()),
        // Whoever opens a stream and says nothing loses the stream only.
        Err(FrameError::Ended | FrameError::Late) => return Ok(()),
    };
    drop(reading);
    let own = node.identity.id();
    match opening {
        Opening::Link => {
            link::run(node, (peer, connection), (send, receive), Side::Accepted).await;
        }
        Opening::Stream => accept_stream(&node, peer, (send, receive)).await,
        Opening::Request(parcel) if parcel.to == own => {
            answer_request(&node, &parcel, send).await;
        }
        Opening::SealedStream(parcel) if parcel.to == own => {
            accept_sealed_stream(&node, &parcel, (send, receive)).await;
        }
        Opening::Request(parcel) | Opening::SealedStream(parcel) if parcel.from != peer => {
            return Err(format!("{parcel:?} came from {}: relays hand on once", peer.short()));
        }
        Opening::Request(parcel) => {
            let ends = (peer, parcel.to);
            let opening = (&Opening::Request(parcel), RELAYED_REQUEST);
            hand_on(&node, ends, opening, (send, receive)).await;
        }
        Opening::SealedStream(parcel) => {
            let ends = (peer, parcel.to);
            let opening = (&Opening::SealedStream(parcel), RELAYED_STREAM);
            hand_on(&node, ends, opening, (send, receive)).await;
        }
    }
    Ok(())
}

async fn accept_stream(node: &Arc<Node>, from: NodeId, (mut send, receive): Streams) {
    let (place, taker) = match room(node, from) {
        Ok(room) => room,
        Err(reason) => return refuse(send, Refusal::Busy, &reason).await,
    };
    if frames::write(&mut send, &Answer::Accepted, OPENING).await.is_ok() {
        let stream = OverlayStream::direct(send, receive);
        taker.send(InboundStream { from, stream, place });
    }
}

/// Finds room for a stream that a node opens to this one. A refusal is in words.
fn room(
    node: &Node,
    from: NodeId,
) -> Result<(Place<NodeId>, mpsc::Permit<'_, InboundStream>), String> {
    let taken = |error: PlacesError| format!("streams of which nothing was said yet: {error}");
    let place = node.unread.take(from).map_err(taken)?;
    let taker = node.streams.try_reserve().map_err(|_| "nobody takes streams here".to_owned())?;
    Ok((place, taker))
}

async fn answer_request(node: &Arc<Node>, parcel: &Parcel, mut send: SendStream) {
    let letter = sealed::open(&node.identity, parcel.from, Purpose::Request, &parcel.sealed)
        .map_err(|error| error.to_string())
        .and_then(|plain| Letter::decode(&plain).map_err(|error| error.to_string()));
    let letter = match letter.and_then(|letter| admit(node, parcel.from, letter)) {
        Ok(letter) => letter,
        Err(reason) => return refuse(send, Refusal::Unacceptable, &reason).await,
    };
    let (answer, answered) = oneshot::channel();
    let request = InboundRequest { from: parcel.from, body: letter.body.into(), answer };
    if node.requests.try_send(request).is_err() {
        return refuse(send, Refusal::Busy, "").await;
    }
    let Some(answered) = unless_stopped(&send, timeout(ANSWER, answered)).await else { return };
    let Ok(Ok(answer)) = answered else {
        return refuse(send, Refusal::Unanswered, "the request was dropped").await;
    };
    let sealed = seal_answer(node, parcel, &answer);
    match sealed {
        Ok(sealed) => {
            if frames::write(&mut send, &Answer::Sealed(sealed), OPENING).await.is_ok() {
                pump::finish(send).await;
            }
        }
        Err(error) => refuse(send, Refusal::Unanswered, &error.to_string()).await,
    }
}

fn seal_answer(node: &Node, parcel: &Parcel, answer: &Bytes) -> Result<Vec<u8>, SealedError> {
    let purpose = Purpose::Response(sealed::digest(&parcel.sealed));
    sealed::seal(&node.identity, parcel.from, purpose, answer)
}

async fn accept_sealed_stream(node: &Arc<Node>, parcel: &Parcel, (mut send, receive): Streams) {
    let opened = open_tunnel(node, parcel);
    let (answer, tunnel) = match opened {
        Ok(opened) => opened,
        Err(reason) => return refuse(send, Refusal::Unacceptable, &reason).await,
    };
    let (place, taker) = match room(node, parcel.from) {
        Ok(room) => room,
        Err(reason) => return refuse(send, Refusal::Busy, &reason).await,
    };
    if frames::write(&mut send, &Answer::Sealed(answer), OPENING).await.is_ok() {
        let stream = pump::sealed_stream(node, tunnel, (send, receive));
        taker.send(InboundStream { from: parcel.from, stream, place });
    }
}

/// Opens the start of a sealed stream and seals the answer that proves this node's key.
fn open_tunnel(
    node: &Arc<Node>,
    parcel: &Parcel,
) -> Result<(Vec<u8>, (TunnelSender, TunnelReceiver)), String> {
    let short = || SealedError::PeerShort { length: parcel.sealed.len() }.to_string();
    let (key, first) = parcel.sealed.split_at_checked(ENCAPSULATED).ok_or_else(short)?;
    let words = |error: SealedError| error.to_string();
    let mut opener =
        Opener::new(&node.identity, parcel.from, Purpose::StreamForward, key).map_err(words)?;
    let plain = opener.open(first, b"").map_err(words)?;
    let letter = Letter::decode(&plain).map_err(|error| error.to_string())?;
    admit(node, parcel.from, letter)?;
    let purpose = Purpose::StreamBackward(sealed::digest(&parcel.sealed));
    let (mut answer, mut sealer) =
        Sealer::new(&node.identity, parcel.from, purpose).map_err(words)?;
    answer.extend(sealer.seal(b"accepted", b"").map_err(words)?);
    Ok((answer, (TunnelSender::new(sealer), TunnelReceiver::new(opener))))
}

/// Admits a letter once.
fn admit(node: &Arc<Node>, from: NodeId, letter: Letter) -> Result<Letter, String> {
    let fresh = Freshness { epoch: letter.epoch, uptime_ms: letter.uptime_ms, nonce: letter.nonce };
    node.with_core(|core, now| {
        let uptime_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        core.replays.handle_request(core.membership.epoch(), uptime_ms, from, fresh)
    })
    .map(|()| letter)
    .map_err(|error| error.to_string())
}

/// Hands a stream of a peer on to a node that holds a connection with this one, until nothing moves in
/// it for as long as is said.
async fn hand_on(
    node: &Arc<Node>,
    (from, to): (NodeId, NodeId),
    (opening, idle): (&Opening, Duration),
    (send, receive): Streams,
) {
    let place = match node.relayed.take(from) {
        Ok(place) => place,
        Err(error) => {
            let reason = format!("the relay has too much to hand on: {error}");
            return refuse(send, Refusal::Busy, &reason).await;
        }
    };
    let Some(connection) = node.connection(to) else {
        return refuse(send, Refusal::NoRoute, "the relay has no connection with it").await;
    };
    if node.with_core(|core, now| core.routes.handle_open(now, to)).is_err() {
        return refuse(send, Refusal::Busy, "too much is relayed to it").await;
    }
    let opened = async {
        let (mut onward, back) = connection.open_bi().await.map_err(|_| FrameError::Ended)?;
        frames::write(&mut onward, opening, OPENING).await?;
        Ok::<_, FrameError>((onward, back))
    };
    match timeout(OPENING, opened).await {
        Ok(Ok(onward)) => pump::relay((send, receive), onward, idle).await,
        Ok(Err(_)) | Err(_) => {
            refuse(send, Refusal::Unanswered, "the connection of the relay broke").await;
        }
    }
    drop(place);
}

async fn refuse(mut send: SendStream, refusal: Refusal, reason: &str) {
    let end = reason.floor_char_boundary(crate::wire::REASON);
    let reason = reason[..end].to_owned();
    if frames::write(&mut send, &Answer::Refused(refusal, reason), OPENING).await.is_ok() {
        pump::finish(send).await;
    }
}

/// Waits for `work` unless the peer no longer wants the answer.
async fn unless_stopped<T>(send: &SendStream, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        result = work => Some(result),
        _ = send.stopped() => None,
    }
}
