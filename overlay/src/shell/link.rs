//! Links: the stream between two neighbours.

use std::{sync::Arc, time::Duration};

use quinn::{Connection, RecvStream, SendStream};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;
use types::ids::NodeId;

use super::{
    connect,
    frames::{self, OPENING},
    node::{CLOSE_FAULT, Node, ToLink},
};
use crate::{
    membership::{LinkEnd, LinkId, Side},
    session::{PeerFault, Session},
    wire::{Contact, Frame, Hello, Opening},
};

/// Both sides greet within this time.
const GREETING: Duration = Duration::from_secs(5);
/// What was said before a link is closed is sent within this time.
const PARTING: Duration = Duration::from_secs(2);
/// Bytes taken from the stream at a time.
const READ: usize = 64 * 1024;

/// Opens a link with a node, dialling it if there is no connection.
pub(super) async fn dial(node: Arc<Node>, contact: Contact) {
    let peer = contact.node;
    let opened = async {
        let connection = connect::to(&node, peer, &contact.addresses, connect::DIAL).await?;
        let (mut send, receive) = connection.open_bi().await.map_err(|error| error.to_string())?;
        let opening = frames::write(&mut send, &Opening::Link, OPENING).await;
        opening.map_err(|error| error.to_string())?;
        Ok::<_, String>((connection, send, receive))
    };
    match opened.await {
        Ok((connection, send, receive)) => {
            run(node, (peer, connection), (send, receive), Side::Dialled).await;
        }
        Err(reason) => {
            tracing::debug!(peer = %peer.short(), reason, "cannot link");
            node.with_core(|core, now| core.membership.handle_dial_failed(now, peer));
        }
    }
}

/// Keeps a link until it ends.
pub(super) async fn run(
    node: Arc<Node>,
    (peer, connection): (NodeId, Connection),
    (mut send, mut receive): (SendStream, RecvStream),
    side: Side,
) {
    let mut observed = connection.remote_address();
    // A socket for both families shows IPv4 as mapped; others could not dial that.
    observed.set_ip(observed.ip().to_canonical());
    let hello = node.with_core(|core, _| core.membership.hello(observed));
    let mut session = Session::new(node.now());
    let greeted = async {
        let greeting = frames::write(&mut send, &Frame::Hello(hello), GREETING).await;
        greeting.map_err(|error| error.to_string())?;
        read_hello(&node, &mut session, &mut receive).await
    };
    let hello = match timeout(GREETING, greeted).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(reason)) => return refuse(&node, peer, side, &reason),
        Err(_) => return refuse(&node, peer, side, "no greeting in time"),
    };
    let (id, queue) = node.open_link();
    let done = CancellationToken::new();
    node.writers.spawn(write_all(send, queue, done.clone()));
    node.with_core(|core, now| core.membership.handle_link_up(now, id, peer, (side, hello)));
    let end = tokio::select! {
        end = read_all(&node, id, &mut session, &mut receive) => end,
        () = done.cancelled() => Ok(LinkEnd::Closed),
        () = node.stop.cancelled() => Ok(LinkEnd::Closed),
    };
    let end = end.unwrap_or_else(|fault| {
        tracing::info!(peer = %peer.short(), fault, "peer broke the rules; connection closed");
        connection.close(CLOSE_FAULT, fault.as_bytes());
        LinkEnd::Closed
    });
    node.close_link(id, end);
}

fn refuse(node: &Arc<Node>, peer: NodeId, side: Side, reason: &str) {
    tracing::debug!(peer = %peer.short(), reason, "no link");
    if side == Side::Dialled {
        node.with_core(|core, now| core.membership.handle_dial_failed(now, peer));
    }
}

async fn read_hello(
    node: &Arc<Node>,
    session: &mut Session,
    receive: &mut RecvStream,
) -> Result<Hello, String> {
    loop {
        if let Some(hello) = session.poll_hello() {
            return Ok(hello);
        }
        let chunk = receive.read_chunk(READ, true).await.map_err(|error| error.to_string())?;
        let chunk = chunk.ok_or("the stream ended")?;
        session.handle_bytes(node.now(), &chunk.bytes).map_err(|fault| fault.to_string())?;
    }
}

/// Reads until the link ends; an error is the peer's fault, in words.
async fn read_all(
    node: &Arc<Node>,
    id: LinkId,
    session: &mut Session,
    receive: &mut RecvStream,
) -> Result<LinkEnd, String> {
    loop {
        while let Some(frame) = session.poll_frame() {
            node.with_core(|core, now| core.membership.handle_frame(now, id, frame))
                .map_err(|fault| fault.to_string())?;
        }
        match receive.read_chunk(READ, true).await {
            Ok(Some(chunk)) => session
                .handle_bytes(node.now(), &chunk.bytes)
                .map_err(|fault: PeerFault| fault.to_string())?,
            Ok(None) | Err(quinn::ReadError::Reset(_)) => return Ok(LinkEnd::Closed),
            Err(_) => return Ok(LinkEnd::Lost),
        }
    }
}

async fn write_all(
    mut send: SendStream,
    mut queue: mpsc::Receiver<ToLink>,
    done: CancellationToken,
) {
    while let Some(ToLink::Write(bytes)) = queue.recv().await {
        if send.write_all(&bytes).await.is_err() {
            break;
        }
    }
    // The peer acknowledges the end, or has PARTING to do so.
    if send.finish().is_ok() {
        let _ = timeout(PARTING, send.stopped()).await;
    }
    done.cancel();
}
