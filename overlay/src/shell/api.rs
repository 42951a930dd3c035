//! What the agent and the gateway see of the overlay: configuration, handles, errors.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use ed25519_dalek::SigningKey;
use tokio::sync::{mpsc, oneshot};
use types::ids::NodeId;

use super::{places::Place, stream::OverlayStream};
use crate::wire::Role;

/// What a node needs to take part.
#[derive(Debug, Clone)]
pub struct OverlayConfig {
    /// The node's identity. Its public half is the node's address.
    pub key: SigningKey,
    /// UDP address to bind; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Nodes to join through, tried for ever. Empty for the first node of a network.
    pub seeds: Vec<(NodeId, SocketAddr)>,
    /// What the node is for.
    pub role: Role,
}

/// Whether others can dial a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Connections come in, as far as the node knows.
    Dialable,
    /// None do, and attempts are ignored, as behind a NAT: others use the node's own
    /// connections.
    OutgoingOnly,
}

/// One node that is reachable as far as this node knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its key.
    pub id: NodeId,
    /// What it is for.
    pub role: Role,
    /// Where it says, or its neighbours saw, that it can be dialled.
    pub addresses: Vec<SocketAddr>,
    /// Time since its last announcement or link activity was heard.
    pub last_heard: Duration,
}

/// A change of the members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberEvent {
    /// The node can be reached from now on.
    Joined(NodeId),
    /// The node said that it leaves.
    Left(NodeId),
    /// The node fell silent.
    Died(NodeId),
}

/// A payload that another node sent to everybody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broadcast {
    /// The node whose key signed it.
    pub origin: NodeId,
    /// What it sent.
    pub payload: Bytes,
}

/// A request that another node sealed to this one.
#[derive(Debug)]
pub struct InboundRequest {
    /// The node whose key sealed it.
    pub from: NodeId,
    /// What it asks.
    pub body: Bytes,
    pub(super) answer: oneshot::Sender<Bytes>,
}

impl InboundRequest {
    /// Answers. Dropping the request instead tells the sender that it was not answered.
    pub fn reply(self, answer: Bytes) {
        // The sender may be gone; then nobody waits for this answer.
        let _ = self.answer.send(answer);
    }
}

/// A byte stream that another node opened to this one.
#[derive(Debug)]
pub struct InboundStream {
    /// The node at the other end.
    pub from: NodeId,
    /// The bytes.
    pub stream: OverlayStream,
    /// Its place among the streams of which it is not known yet what they are for; a node has few of
    /// them (`UNREAD` in `node.rs`). To be dropped once that was read, at the latest a few seconds from
    /// now.
    pub place: Place<NodeId>,
}

/// What arrives from the overlay. Each queue is bounded: a full request queue refuses with
/// [`RequestError::PeerBusy`] at the sender, and so does a sender's full share of unread streams;
/// broadcasts and events then drop the newest.
#[derive(Debug)]
pub struct Inbox {
    /// Requests to this node.
    pub requests: mpsc::Receiver<InboundRequest>,
    /// Streams to this node.
    pub streams: mpsc::Receiver<InboundStream>,
    /// Broadcasts of other nodes, each once.
    pub broadcasts: mpsc::Receiver<Broadcast>,
    /// Changes of the members.
    pub events: mpsc::Receiver<MemberEvent>,
}

/// Why the overlay cannot start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum OverlayError {
    #[error("cannot bind UDP {address}; is another node running there?")]
    HostBind { address: SocketAddr, source: std::io::Error },
    #[error("cannot set up TLS with the node's key")]
    HostTls { source: rustls::Error },
    #[error("the cipher suites of this build do not fit QUIC")]
    HostQuic { source: quinn::crypto::rustls::NoInitialCipherSuite },
    #[error("the system's random source failed: {reason}")]
    HostRandom { reason: String },
    #[error("{node} in the list of seeds is no Ed25519 key that can be spoken to")]
    SeedKey { node: NodeId },
}

/// Why a request or stream did not come about.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RequestError {
    #[error("{node} is not a known member of the overlay: it never joined, left, or died")]
    UnknownNode { node: NodeId },
    #[error("{node} cannot be reached: {tried}")]
    Unreachable { node: NodeId, tried: String },
    #[error("no answer from {node} within {deadline_ms} ms; it may or may not have acted")]
    Deadline { node: NodeId, deadline_ms: u64 },
    #[error("the connection to {node} broke before its answer came; it may or may not have acted")]
    Broken { node: NodeId },
    #[error("{node} is busy and took nothing; ask again later")]
    PeerBusy { node: NodeId },
    #[error("{node} refused: {reason}")]
    PeerRefused { node: NodeId, reason: String },
    #[error("the answer of {node} cannot be opened with our key; it was altered on the way")]
    PeerAnswer { node: NodeId },
    #[error("{length} bytes are too long for one message; at most {limit}")]
    TooLong { length: usize, limit: usize },
    #[error("this node has left the overlay")]
    Stopped,
}

/// Why a broadcast was not sent.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum BroadcastError {
    #[error("{length} bytes are too long for a broadcast; at most {limit}")]
    TooLong { length: usize, limit: usize },
    #[error("too many broadcasts wait to be sent; try again in a second")]
    Busy,
    #[error("this node has left the overlay")]
    Stopped,
}
