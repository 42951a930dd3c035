//! The JSON answers that only gateways give; the others are `lease::api`'s.

use serde::{Deserialize, Serialize};
use types::{
    ids::{ContentId, MachineId, NodeId},
    units::UnixSeconds,
};

/// That the gateway runs, and what it sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// `ok`.
    pub status: String,
    /// The gateway's key.
    pub gateway: NodeId,
    /// Members of the overlay that it knows.
    pub members: usize,
    /// Nodes that offer machines.
    pub nodes: usize,
}

/// A lease that the gateway was shown, and what follows for its renter's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandingLease {
    /// The lease.
    pub id: MachineId,
    /// The highest serial that was shown.
    pub serial: u64,
    /// Its end.
    pub end: UnixSeconds,
    /// Until when the renter's content is kept, by the last of the leases.
    pub content_until: UnixSeconds,
    /// Bytes that the renter may have here.
    pub content_limit: u64,
    /// Bytes that one upload may have.
    pub content_max_bytes: u64,
    /// Bytes that the renter has here.
    pub content_used: u64,
}

/// Content that is kept now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredContent {
    /// Its digest.
    pub content: ContentId,
    /// Its length.
    pub bytes: u64,
}
