//! By which ways to reach a node: a connection that exists, a dial, a relay.
//!
//! The main way is a connection that the other node made itself, because most nodes sit behind
//! NAT. A relay hands on only to nodes that it holds a connection to, so a way has at most one.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use types::ids::NodeId;

use crate::{
    session::{Bucket, OPENED_AT_ONCE, OPENED_PER_SECOND, PeerFault},
    wire::Announcement,
};

/// A node that could not be dialled is not dialled again for this long when a relay will do.
pub const UNDIALABLE: Duration = Duration::from_secs(60);
/// Nodes remembered as undialable, and to which streams were opened in the last minute.
const REMEMBERED: usize = 1_024;
/// Relays tried for one message.
const RELAYS: usize = 3;

/// One way to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Over the connection that there is.
    Connected,
    /// By dialling one of its addresses.
    Dial(Vec<SocketAddr>),
    /// Through this neighbour of it.
    Relay(NodeId),
}

/// What is known of ways that failed.
#[derive(Debug, Default)]
pub struct Routes {
    undialable: BTreeMap<NodeId, Duration>,
    opened: BTreeMap<NodeId, (Duration, Bucket)>,
}

impl Routes {
    /// Returns the ways to `target` in the order to try them. `connected` says to which nodes
    /// there are connections.
    pub fn ways(
        &self,
        now: Duration,
        (own, target): (NodeId, NodeId),
        announcement: &Announcement,
        connected: impl Fn(NodeId) -> bool,
    ) -> Vec<Way> {
        if connected(target) {
            return vec![Way::Connected];
        }
        let mut relays: Vec<NodeId> = announcement
            .neighbours
            .iter()
            .copied()
            .filter(|node| *node != own && *node != target)
            .collect();
        relays.sort_by_key(|node| !connected(*node));
        relays.truncate(RELAYS);
        let relays = relays.into_iter().map(Way::Relay);
        if announcement.addresses.is_empty() {
            return relays.collect();
        }
        let dial = Way::Dial(announcement.addresses.clone());
        if self.undialable.get(&target).is_some_and(|until| now < *until) {
            relays.chain([dial]).collect()
        } else {
            [dial].into_iter().chain(relays).collect()
        }
    }

    /// Takes note that a node could not be dialled.
    pub fn handle_dial_failed(&mut self, now: Duration, node: NodeId) {
        if self.undialable.len() >= REMEMBERED {
            self.undialable.retain(|_, until| now < *until);
        }
        if self.undialable.len() < REMEMBERED {
            self.undialable.insert(node, now + UNDIALABLE);
        }
    }

    /// Admits a stream to be opened to `peer`, or says that it would be taken for a flood there.
    pub fn handle_open(&mut self, now: Duration, peer: NodeId) -> Result<(), PeerFault> {
        if !self.opened.contains_key(&peer) && self.opened.len() >= REMEMBERED {
            self.opened.retain(|_, (last, _)| now.saturating_sub(*last) < UNDIALABLE);
            if self.opened.len() >= REMEMBERED {
                return Err(PeerFault::Flood);
            }
        }
        let fresh = || (now, Bucket::new(now, OPENED_PER_SECOND, OPENED_AT_ONCE));
        let (last, bucket) = self.opened.entry(peer).or_insert_with(fresh);
        *last = now;
        bucket.spend(now, 1)
    }

    /// Takes note that a node was dialled.
    pub fn handle_dialled(&mut self, node: NodeId) {
        self.undialable.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Role;

    fn node(n: u8) -> NodeId {
        NodeId::from_bytes([n; 32])
    }

    fn announcement() -> Announcement {
        Announcement {
            role: Role::Provider,
            addresses: vec!["192.0.2.1:1".parse().expect("an address")],
            neighbours: vec![node(3), node(1), node(4)],
            lifetime_ms: 1,
            uptime_ms: 1,
        }
    }

    #[test]
    fn no_more_streams_are_opened_than_a_peer_bears() {
        let mut routes = Routes::default();
        let opened = |routes: &mut Routes, n: u8| {
            (0..2_000).filter(|_| routes.handle_open(Duration::ZERO, node(n)).is_ok()).count()
        };
        assert_eq!(opened(&mut routes, 1) as u64, OPENED_AT_ONCE);
        assert_eq!(opened(&mut routes, 2) as u64, OPENED_AT_ONCE);
    }

    #[test]
    fn a_connection_comes_first_then_a_dial_then_known_relays() {
        let mut routes = Routes::default();
        let pair = (node(1), node(2));
        let ways = |routes: &Routes, connected: u8| {
            let (now, announcement) = (Duration::ZERO, announcement());
            routes.ways(now, pair, &announcement, |other| other == node(connected))
        };
        let dial = Way::Dial(announcement().addresses);
        assert_eq!(ways(&routes, 2), [Way::Connected]);
        let (third, fourth) = (Way::Relay(node(3)), Way::Relay(node(4)));
        assert_eq!(ways(&routes, 4), [dial.clone(), fourth.clone(), third.clone()]);
        routes.handle_dial_failed(Duration::ZERO, node(2));
        assert_eq!(ways(&routes, 3), [third, fourth, dial.clone()]);
        routes.handle_dialled(node(2));
        assert_eq!(ways(&routes, 3)[0], dial);
    }
}
