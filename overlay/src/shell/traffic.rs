//! What passed between this node and others, as QUIC counts it. Connections that are gone count on.

use std::{collections::BTreeMap, time::Duration};

use quinn::Connection;
use types::ids::NodeId;

use super::Overlay;

/// What passed since this node started. The numbers only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes in datagrams sent.
    pub sent_bytes: u64,
    /// Bytes in datagrams received.
    pub received_bytes: u64,
    /// Packets that never arrived, or late enough to count as lost.
    pub lost_packets: u64,
}

impl Traffic {
    /// Adds what passed on one connection.
    pub(super) fn add(&mut self, connection: &Connection) {
        let stats = connection.stats();
        self.sent_bytes = self.sent_bytes.saturating_add(stats.udp_tx.bytes);
        self.received_bytes = self.received_bytes.saturating_add(stats.udp_rx.bytes);
        self.lost_packets = self.lost_packets.saturating_add(stats.path.lost_packets);
    }
}

/// The connections of a node and what passed on them.
#[derive(Debug, Clone, Default)]
pub struct Connected {
    /// What passed on all connections there were.
    pub traffic: Traffic,
    /// Nodes with which this one keeps a link.
    pub neighbours: Vec<NodeId>,
    /// Round trips to nodes with an open connection.
    pub round_trips: BTreeMap<NodeId, Duration>,
}

impl Overlay {
    /// Returns what passed, and with whom there are connections now.
    pub fn connected(&self) -> Connected {
        let node = &self.running.node;
        let neighbours = node.with_core(|core, _| core.membership.neighbours().collect());
        let (traffic, round_trips) = node.traffic();
        Connected { traffic, neighbours, round_trips }
    }
}
