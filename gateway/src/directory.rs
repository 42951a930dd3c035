//! The nodes that offer machines, as they said themselves. Pure: time is an argument.

use std::collections::{BTreeMap, BTreeSet};

use lease::api::Attestation;
use types::{ids::NodeId, node::Offer, units::UnixSeconds};

/// Nodes that are remembered. A further one is refused until one expires.
const MAX_NODES: usize = 16_384;

/// Longest time an offer counts, whatever it says itself, in seconds.
const MAX_OFFER_S: u64 = 600;

/// How far the clock of a node may be ahead of ours, in seconds.
const MAX_AHEAD_S: u64 = 300;

/// Why an offer does not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum OfferError {
    #[error("node {sender} sent an offer in the name of {named}")]
    PeerName { sender: NodeId, named: NodeId },
    #[error("the offer of {node} expired or is dated in the future")]
    PeerTime { node: NodeId },
    #[error("the offer of {node} is older than the one that is known")]
    Older { node: NodeId },
    #[error("{MAX_NODES} nodes are known; {node} is one too many")]
    Full { node: NodeId },
}

/// The offers that count, one for each node.
#[derive(Debug, Default)]
pub struct Directory {
    offers: BTreeMap<NodeId, (Offer, UnixSeconds)>,
    attestations: BTreeMap<NodeId, Attestation>,
    seen: BTreeSet<NodeId>,
}

impl Directory {
    /// Takes an offer that `sender` signed.
    pub fn handle_offer(
        &mut self,
        now: UnixSeconds,
        sender: NodeId,
        offer: Offer,
    ) -> Result<(), OfferError> {
        let node = offer.node;
        if node != sender {
            return Err(OfferError::PeerName { sender, named: node });
        }
        // How long it counts is taken from the node, when it began from our own clock: a node
        // whose clock is off by minutes is still listed.
        let validity = offer.expires.since(offer.issued).min(MAX_OFFER_S);
        if validity == 0 || offer.issued > now.plus(MAX_AHEAD_S) {
            return Err(OfferError::PeerTime { node });
        }
        self.forget(now);
        if self.offers.get(&node).is_some_and(|(known, _)| known.issued > offer.issued) {
            return Err(OfferError::Older { node });
        }
        if !self.offers.contains_key(&node) && self.offers.len() >= MAX_NODES {
            return Err(OfferError::Full { node });
        }
        self.offers.insert(node, (offer, now.plus(validity)));
        Ok(())
    }

    /// Remembers that a node was a member of the overlay.
    pub fn handle_seen(&mut self, node: NodeId) {
        if self.seen.len() < MAX_NODES {
            self.seen.insert(node);
        }
    }

    /// Whether a node was a member of the overlay since the gateway's start, as far as that is remembered.
    pub fn saw(&self, node: NodeId) -> bool {
        self.seen.contains(&node)
    }

    /// Forgets a node that left or died.
    pub fn handle_gone(&mut self, node: NodeId) {
        self.offers.remove(&node);
        // Who comes back may be another release.
        self.attestations.remove(&node);
    }

    /// Takes what came of asking a node to prove itself; only of one whose offer counts.
    pub fn handle_attestation(&mut self, node: NodeId, found: Attestation) {
        if self.offers.contains_key(&node) {
            self.attestations.insert(node, found);
        }
    }

    /// Returns what a node proved.
    pub fn attestation(&self, node: NodeId) -> Option<&Attestation> {
        self.attestations.get(&node)
    }

    /// Returns the offers that count now, by node.
    pub fn offers(&mut self, now: UnixSeconds) -> Vec<Offer> {
        self.forget(now);
        self.offers.values().map(|(offer, _)| offer.clone()).collect()
    }

    /// Returns the offer of one node.
    pub fn offer(&mut self, now: UnixSeconds, node: NodeId) -> Option<Offer> {
        self.forget(now);
        self.offers.get(&node).map(|(offer, _)| offer.clone())
    }

    fn forget(&mut self, now: UnixSeconds) {
        self.offers.retain(|_, (_, until)| *until > now);
        let offers = &self.offers;
        self.attestations.retain(|node, _| offers.contains_key(node));
    }
}

#[cfg(test)]
mod tests {
    use types::units::Mebibytes;

    use super::*;

    const NODE: NodeId = NodeId::from_bytes([1; 32]);
    const OTHER: NodeId = NodeId::from_bytes([2; 32]);

    fn offer(issued: u64, expires: u64) -> Offer {
        Offer {
            node: NODE,
            name: "n".into(),
            release: "1".into(),
            issued: UnixSeconds(issued),
            expires: UnixSeconds(expires),
            vcpus: 1,
            memory_mib: Mebibytes(1),
            disk_mib: Mebibytes(0),
            devices: Vec::new(),
        }
    }

    #[test]
    fn offers_count_until_they_expire() {
        let mut directory = Directory::default();
        directory.handle_offer(UnixSeconds(100), NODE, offer(100, 160)).expect("taken");
        assert_eq!(directory.offers(UnixSeconds(159)).len(), 1);
        assert_eq!(directory.offers(UnixSeconds(160)).len(), 0);
    }

    #[test]
    fn false_names_old_and_dead_offers_are_refused() {
        let mut directory = Directory::default();
        let mut take = |sender, offer| directory.handle_offer(UnixSeconds(100), sender, offer);
        assert!(matches!(take(OTHER, offer(100, 160)), Err(OfferError::PeerName { .. })));
        assert!(matches!(take(NODE, offer(160, 100)), Err(OfferError::PeerTime { .. })));
        assert!(matches!(take(NODE, offer(9999, 10_100)), Err(OfferError::PeerTime { .. })));
        assert_eq!(take(NODE, offer(100, 160)), Ok(()));
        assert!(matches!(take(NODE, offer(99, 160)), Err(OfferError::Older { .. })));
    }

    #[test]
    fn a_node_that_left_is_gone() {
        let mut directory = Directory::default();
        directory.handle_offer(UnixSeconds(100), NODE, offer(100, 160)).expect("taken");
        directory.handle_gone(NODE);
        assert_eq!(directory.offer(UnixSeconds(100), NODE), None);
    }

    #[test]
    fn what_a_node_proved_goes_with_it() {
        let mut directory = Directory::default();
        let at = UnixSeconds(100);
        let release = Some("1".into());
        let found = Attestation { at, release, tpm: None, certificate: None, refused: None };
        directory.handle_attestation(OTHER, found.clone());
        assert_eq!(directory.attestation(OTHER), None, "it offers nothing");
        directory.handle_offer(at, NODE, offer(100, 160)).expect("taken");
        directory.handle_attestation(NODE, found.clone());
        assert_eq!(directory.attestation(NODE), Some(&found));
        assert!(directory.offers(UnixSeconds(160)).is_empty());
        assert_eq!(directory.attestation(NODE), None);
    }
}
