//! The only part of the overlay that names tokio and quinn: sockets, clocks and tasks around the
//! cores.
//!
//! The cores sit behind one lock that is held for one input at a time and never across an
//! `await`, because requests, links and `members` all need them at once.

mod api;
#[cfg(test)]
mod attacks;
mod connect;
mod frames;
mod inbound;
mod link;
mod node;
mod outbound;
mod places;
mod pump;
mod stream;
mod tls;
mod traffic;

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use tokio::time::timeout;
use types::ids::NodeId;

use crate::{
    identity::{self, Identity},
    membership::{Limits, Membership, Settings, Strict},
    wire::PAYLOAD,
};
pub use api::{
    Broadcast, BroadcastError, InboundRequest, InboundStream, Inbox, Member, MemberEvent,
    OverlayConfig, OverlayError, Reach, RequestError,
};
use node::Node;
pub use places::{Place, Places, PlacesError};
pub use stream::OverlayStream;
pub use traffic::{Connected, Traffic};

/// Neighbours are told of this node's leaving within this time.
const LEAVING: Duration = Duration::from_secs(2);

/// A handle to the running overlay. Clones share it; it stops when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Overlay {
    running: Arc<Running>,
}

struct Running {
    node: Arc<Node>,
    local: SocketAddr,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.node.identity.id().short(), self.local)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.node.stop(b"stopped");
    }
}

impl Overlay {
    /// Binds the socket and starts to join; needs a tokio runtime. Joining goes on for ever in
    /// the background.
    pub async fn start(config: OverlayConfig) -> Result<(Self, Inbox), OverlayError> {
        Self::start_with_reach(config, Reach::Dialable).await
    }

    /// The same for a node that knows whether it can be dialled.
    pub async fn start_with_reach(
        config: OverlayConfig,
        reach: Reach,
    ) -> Result<(Self, Inbox), OverlayError> {
        let OverlayConfig { key, listen, seeds, role } = config;
        for (node, _) in &seeds {
            identity::agreement_key(*node).map_err(|_| OverlayError::SeedKey { node: *node })?;
        }
        let identity = Identity::new(key);
        let tls = tls::Tls::new(&identity)?;
        let endpoint = node::bind(&tls, listen)?;
        let local = endpoint
            .local_addr()
            .map_err(|source| OverlayError::HostBind { address: listen, source })?;
        // A node that listens everywhere learns from its neighbours where it is seen.
        let known = !local.ip().is_unspecified() && reach == Reach::Dialable;
        let settings = Settings {
            role,
            limits: Limits::for_role(role),
            addresses: known.then_some(local).into_iter().collect(),
            seeds,
            epoch: unix_ms(),
            seed: random_seed()?,
        };
        let membership = Membership::new(identity.clone(), settings, Box::new(Strict));
        let (node, inbox) = Node::new(identity, (endpoint, tls), membership, reach);
        node.tasks.spawn(connect::accept_all(node.clone()));
        node.tasks.spawn(node.clone().run_clock());
        Ok((Self { running: Arc::new(Running { node, local }) }, inbox))
    }

    /// Returns this node's name.
    pub fn node_id(&self) -> NodeId {
        self.running.node.identity.id()
    }

    /// Returns the UDP address that was bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.running.local
    }

    /// Asks `to` and waits for its answer, sealed end to end both ways; relayed when `to` cannot
    /// be dialled. It is acted on at most once. At most [`crate::wire::MESSAGE`] bytes each way.
    pub async fn request(
        &self,
        to: NodeId,
        body: Bytes,
        deadline: Duration,
    ) -> Result<Bytes, RequestError> {
        let node = &self.running.node;
        tokio::select! {
            biased;
            () = node.stop.cancelled() => Err(RequestError::Stopped),
            answer = outbound::request(node, to, &body, deadline) => answer,
        }
    }

    /// Opens a byte stream to `to`, relayed (and then sealed end to end) when it cannot be
    /// dialled.
    pub async fn open_stream(&self, to: NodeId) -> Result<OverlayStream, RequestError> {
        let node = &self.running.node;
        tokio::select! {
            biased;
            () = node.stop.cancelled() => Err(RequestError::Stopped),
            stream = outbound::open_stream(node, to) => stream,
        }
    }

    /// Sends `payload` to every member, signed by this node. Nodes that join later do not get it:
    /// repeat what must stay known.
    pub fn broadcast(&self, payload: Bytes) -> Result<(), BroadcastError> {
        if payload.len() > PAYLOAD {
            return Err(BroadcastError::TooLong { length: payload.len(), limit: PAYLOAD });
        }
        if self.running.node.stop.is_cancelled() {
            return Err(BroadcastError::Stopped);
        }
        self.running.node.with_core(|core, now| {
            let units = 1 + payload.len() as u64 / 1024;
            core.own_broadcasts.spend(now, units).map_err(|_| BroadcastError::Busy)?;
            core.membership.handle_broadcast(now, payload.to_vec());
            Ok(())
        })
    }

    /// Tells that this node can reach others in a way that it could not before, by a new address or a
    /// cable that is back: what waits for its next try is tried now, and what was begun begins anew.
    pub fn network_changed(&self) {
        let node = &self.running.node;
        node.network.send_replace(());
        node.with_core(|core, now| core.membership.handle_network_changed(now));
    }

    /// Lists the other members that are reachable as far as this node knows, at most
    /// [`crate::membership::MEMBERS`].
    pub fn members(&self) -> Vec<Member> {
        let member = |now: Duration, (id, entry): (NodeId, &crate::membership::Entry)| Member {
            id,
            role: entry.announcement.role,
            addresses: entry.announcement.addresses.clone(),
            last_heard: now.saturating_sub(entry.heard),
        };
        self.running.node.with_core(|core, now| {
            core.membership.members().map(|entry| member(now, entry)).collect()
        })
    }

    /// Tells the neighbours, then closes every connection. Later calls fail with `Stopped`.
    pub async fn leave(&self) {
        let node = &self.running.node;
        node.with_core(|core, now| core.membership.handle_leave(now));
        node.writers.close();
        // A neighbour that does not take the news in time finds out by itself.
        let _ = timeout(LEAVING, node.writers.wait()).await;
        node.stop(b"this node leaves");
        node.tasks.close();
        let _ = timeout(LEAVING, node.endpoint.wait_idle()).await;
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn random_seed() -> Result<u64, OverlayError> {
    getrandom::u64().map_err(|error| OverlayError::HostRandom { reason: error.to_string() })
}
