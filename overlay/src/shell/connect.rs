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
    let mut changes = node.network.subscribe();
    loop {
        let config = node.tls.client(peer).map_err(|error| error.to_string())?;
        let connecting = node
            .endpoint
            .connect_with(config, address, "holdfast")
            .map_err(|error| error.to_string())?;
        tokio::select! {
            outcome = timeout(within, connecting) => return match outcome {
                Err(_) => Err(format!("no answer within {} ms", within.as_millis())),
                Ok(Err(error)) => Err(error.to_string()),
                Ok(Ok(connection)) => Ok(connection),
            },
            // What was sent before went nowhere, and would be sent again a second later only.
            Ok(()) = changes.changed() => {}
        }
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

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use tokio::net::UdpSocket;

    use super::*;
    use crate::{Overlay, OverlayConfig, Role};

    /// Returns the destination connection id of the next long-header packet (RFC 9000 §17.2), which is
    /// the same in all that one attempt sends first.
    async fn attempt(socket: &UdpSocket) -> Vec<u8> {
        let mut packet = [0; 2048];
        let (length, _) = socket.recv_from(&mut packet).await.expect("a packet");
        assert!(length > 26 && packet[0] & 0x80 != 0, "no long header");
        packet[6..6 + usize::from(packet[5])].to_vec()
    }

    #[tokio::test]
    async fn a_changed_network_begins_the_attempt_anew() {
        let silent = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        let key = |byte| SigningKey::from_bytes(&[byte; 32]);
        let peer = NodeId::from_bytes(key(2).verifying_key().to_bytes());
        let config = OverlayConfig {
            key: key(1),
            listen: "127.0.0.1:0".parse().expect("an address"),
            seeds: Vec::new(),
            role: Role::Provider,
        };
        let (overlay, _inbox) = Overlay::start(config).await.expect("started");
        let (node, address) = (overlay.running.node.clone(), silent.local_addr().expect("bound"));
        // This attempt gives up long after the test.
        let dialling = tokio::spawn(async move {
            dial(&node, peer, address, Duration::from_secs(24 * 3600)).await
        });
        let first = attempt(&silent).await;
        overlay.network_changed();
        // What the first attempt sent meanwhile may come before.
        while attempt(&silent).await == first {}
        dialling.abort();
    }
}
