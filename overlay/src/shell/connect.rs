//! Connections, made here and accepted.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use quinn::{Connection, Incoming};
use tokio::{sync::Semaphore, time::timeout};
use types::ids::NodeId;

use super::{
    api::Reach,
    inbound,
    node::{CLOSE_FAULT, Node},
    tls,
};
use crate::session::{Bucket, STREAMS_AT_ONCE, STREAMS_PER_SECOND};

/// An address is given this long to answer.
pub(super) const DIAL: Duration = Duration::from_secs(3);
/// The same when there is a relay to fall back on.
pub(super) const DIAL_BEFORE_RELAY: Duration = Duration::from_secs(1);
/// Addresses of one node that are tried.
const TRIED: usize = 4;
/// Handshakes in progress above which diallers prove their address first (RFC 9000 §8.1).
const HANDSHAKES_UNPROVEN: usize = 64;
/// Handshakes in progress above which diallers are refused.
const HANDSHAKES: usize = 512;
/// A handshake that was begun here ends within this time.
const HANDSHAKE: Duration = Duration::from_secs(8);
/// Openings that are being received from one peer at once: 32 MiB at most.
const OPENINGS: usize = 16;
/// Connections at once.
const CONNECTIONS: usize = 2_048;

/// Returns a connection with a node: the one there is, or a new one. Errors are in words.
pub(super) async fn to(
    node: &Arc<Node>,
    peer: NodeId,
    addresses: &[SocketAddr],
    within: Duration,
) -> Result<Connection, String> {
    if let Some(connection) = node.connection(peer) {
        return Ok(connection);
    }
    let mut tried = Vec::new();
    for address in addresses.iter().take(TRIED) {
        match dial(node, peer, *address, within).await {
            Ok(connection) => {
                node.with_core(|core, _| core.routes.handle_dialled(peer));
                adopt(node, peer, connection.clone());
                return Ok(connection);
            }
            Err(reason) => tried.push(format!("{address}: {reason}")),
        }
    }
    node.with_core(|core, now| core.routes.handle_dial_failed(now, peer));
    Err(if tried.is_empty() { "no address is known".to_owned() } else { tried.join("; ") })
}

async fn dial(
    node: &Arc<Node>,
    peer: NodeId,
    address: SocketAddr,
    within: Duration,
) -> Result<Connection, String> {
    let config = node.tls.client(peer).map_err(|error| error.to_string())?;
    let connecting = node
        .endpoint
        .connect_with(config, address, "holdfast")
        .map_err(|error| error.to_string())?;
    match timeout(within, connecting).await {
        Err(_) => Err(format!("no answer within {} ms", within.as_millis())),
        Ok(Err(error)) => Err(error.to_string()),
        Ok(Ok(connection)) => Ok(connection),
    }
}

/// Accepts connections until the node stops.
pub(super) async fn accept_all(node: Arc<Node>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    while let Some(incoming) = node.endpoint.accept().await {
        if node.reach == Reach::OutgoingOnly {
            incoming.ignore();
            continue;
        }
        let busy = HANDSHAKES - handshakes.available_permits();
        if busy >= HANDSHAKES_UNPROVEN && !incoming.remote_address_validated() {
            if let Err(error) = incoming.retry() {
                error.into_incoming().refuse();
            }
            continue;
        }
        let Ok(permit) = handshakes.clone().try_acquire_owned() else {
            incoming.refuse();
            continue;
        };
        if node.endpoint.open_connections() > CONNECTIONS {
            incoming.refuse();
            continue;
        }
        let accepting = node.clone();
        node.tasks.spawn(async move {
            accept(accepting, incoming).await;
            drop(permit);
        });
    }
}

async fn accept(node: Arc<Node>, incoming: Incoming) {
    let from = incoming.remote_address();
    let Ok(connecting) = incoming.accept() else { return };
    match timeout(HANDSHAKE, connecting).await {
        Err(_) => tracing::debug!(%from, "handshake too slow"),
        Ok(Err(error)) => tracing::debug!(%from, %error, "handshake failed"),
        Ok(Ok(connection)) => match tls::peer_of(&connection) {
            Some(peer) if peer != node.identity.id() => adopt(&node, peer, connection),
            Some(_) | None => connection.close(CLOSE_FAULT, b"expected another node's key"),
        },
    }
}

/// Keeps a connection and serves what the peer opens on it.
fn adopt(node: &Arc<Node>, peer: NodeId, connection: Connection) {
    node.keep_connection(peer, connection.clone());
    node.tasks.spawn(serve(node.clone(), peer, connection));
}

async fn serve(node: Arc<Node>, peer: NodeId, connection: Connection) {
    let mut bucket = Bucket::new(node.now(), STREAMS_PER_SECOND, STREAMS_AT_ONCE);
    let openings = Arc::new(Semaphore::new(OPENINGS));
    while let Ok((send, receive)) = connection.accept_bi().await {
        if let Err(fault) = bucket.spend(node.now(), 1) {
            tracing::info!(peer = %peer.short(), %fault, "connection closed");
            connection.close(CLOSE_FAULT, fault.to_string().as_bytes());
            break;
        }
        let Ok(opening) = openings.clone().acquire_owned().await else { break };
        let (serving, connection) = (node.clone(), connection.clone());
        node.tasks.spawn(async move {
            let streams = (send, receive);
            let served = inbound::serve(serving, (peer, connection.clone()), streams, opening);
            if let Err(fault) = served.await {
                tracing::info!(peer = %peer.short(), fault, "connection closed");
                connection.close(CLOSE_FAULT, fault.as_bytes());
            }
        });
    }
    node.drop_connections(peer);
}
