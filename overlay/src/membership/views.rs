//! The passive view: whom to try next, and the search for neighbours.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use types::ids::NodeId;

use super::{Event, HEAL, LinkId, Membership};
use crate::{
    random::Random,
    wire::{ADDRESSES, Contact, Frame, Hello},
};

/// First and longest time between two attempts to dial a contact; it doubles in between.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Attempts after which a contact that is no seed is forgotten, if there are others.
const ATTEMPTS: u32 = 6;
/// A dial that the shell did not report on for this long is over.
const DIALLING: Duration = Duration::from_secs(15);
/// A neighbour can be let go when it has at least this many others.
const SPARE: usize = 3;

#[derive(Debug, Default)]
pub(super) struct Passive {
    limit: usize,
    contacts: BTreeMap<NodeId, Vec<SocketAddr>>,
    backoff: BTreeMap<NodeId, Backoff>,
}

#[derive(Debug)]
struct Backoff {
    attempts: u32,
    until: Duration,
}

impl Passive {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Remembers a contact, in the place of a random one when there is no room.
    pub(super) fn insert(&mut self, contact: Contact, random: &mut Random) {
        let Contact { node, mut addresses } = contact;
        if addresses.is_empty() {
            return;
        }
        addresses.truncate(ADDRESSES);
        if !self.contacts.contains_key(&node) && self.contacts.len() >= self.limit {
            let nodes: Vec<NodeId> = self.contacts.keys().copied().collect();
            if let Some(victim) = random.pick(&nodes) {
                self.contacts.remove(victim);
                self.backoff.remove(victim);
            }
        }
        self.contacts.insert(node, addresses);
    }

    pub(super) fn remove(&mut self, node: NodeId) {
        self.contacts.remove(&node);
        self.backoff.remove(&node);
    }

    pub(super) fn handle_success(&mut self, node: NodeId) {
        self.backoff.remove(&node);
    }

    pub(super) fn handle_failure(&mut self, now: Duration, node: NodeId, random: &mut Random) {
        let (first, longest) = BACKOFF;
        if self.backoff.len() > 2 * self.limit + 64 {
            self.backoff.retain(|_, backoff| backoff.until > now);
        }
        let backoff = self.backoff.entry(node).or_insert(Backoff { attempts: 0, until: now });
        let wait = (first * 2u32.pow(backoff.attempts.min(5))).min(longest);
        backoff.until = now + random.jitter(wait);
        backoff.attempts = backoff.attempts.saturating_add(1);
        if backoff.attempts > ATTEMPTS && self.contacts.len() > self.limit / 4 {
            self.contacts.remove(&node);
        }
    }

    /// Lets every contact be tried again at once.
    pub(super) fn forget_failures(&mut self) {
        self.backoff.clear();
    }

    pub(super) fn is_ready(&self, now: Duration, node: NodeId) -> bool {
        self.backoff.get(&node).is_none_or(|backoff| now >= backoff.until)
    }

    pub(super) fn contacts(&self) -> impl Iterator<Item = Contact> {
        self.contacts
            .iter()
            .map(|(node, addresses)| Contact { node: *node, addresses: addresses.clone() })
    }
}

impl Membership {
    /// Dials when there are too few links, and now and then to find those who seem gone.
    pub(super) fn seek(&mut self, now: Duration) {
        self.dialling.retain(|_, since| now.saturating_sub(*since) < DIALLING);
        if now >= self.heal_at {
            self.heal_at = now + self.random.jitter(HEAL);
            self.heal(now);
        }
        if self.links.is_empty() {
            let seeds = self.seeds();
            self.dial_one_of(now, seeds);
        }
        if self.links.len() + self.dialling.len() < self.settings.limits.wanted {
            let contacts = self.passive.contacts().collect();
            self.dial_one_of(now, contacts);
        }
    }

    /// Remembers contacts that a neighbour told.
    pub(super) fn learn(&mut self, contacts: Vec<Contact>) {
        for contact in contacts {
            if contact.node != self.identity.id() {
                self.passive.insert(contact, &mut self.random);
            }
        }
    }

    /// Returns contacts for a neighbour: members and candidates, not itself.
    pub(super) fn sample(&mut self, count: usize, not: NodeId) -> Vec<Contact> {
        let mut all: Vec<Contact> =
            self.passive.contacts().filter(|contact| contact.node != not).collect();
        for node in self.links.keys().filter(|node| **node != not) {
            if let Some(entry) = self.directory.get(*node)
                && !entry.announcement.addresses.is_empty()
                && all.iter().all(|contact| contact.node != *node)
            {
                let addresses = entry.announcement.addresses.clone();
                all.push(Contact { node: *node, addresses });
            }
        }
        self.random.sample(all, count)
    }

    pub(super) fn shuffle(&mut self, now: Duration) {
        let links: Vec<(NodeId, LinkId)> =
            self.links.iter().map(|(peer, link)| (*peer, link.id)).collect();
        if let Some((peer, id)) = self.random.pick(&links).copied() {
            let mut contacts = self.sample(crate::wire::CONTACTS / 2 - 1, peer);
            let addresses = self.own_addresses();
            if !addresses.is_empty() {
                contacts.push(Contact { node: self.identity.id(), addresses });
            }
            self.transmit(now, id, &Frame::Shuffle(contacts));
        }
    }

    /// Lets a neighbour go that has others, if the newcomer has none.
    pub(super) fn make_room(&mut self, now: Duration, newcomer: &Hello) -> bool {
        if newcomer.neighbours > 0 {
            return false;
        }
        let spare: Vec<(NodeId, LinkId)> = self
            .links
            .iter()
            .filter(|(peer, _)| {
                self.directory
                    .get(**peer)
                    .is_some_and(|entry| entry.announcement.neighbours.len() >= SPARE)
            })
            .map(|(peer, link)| (*peer, link.id))
            .collect();
        let Some((peer, id)) = self.random.pick(&spare).copied() else { return false };
        let contacts = self.sample(crate::wire::CONTACTS, peer);
        self.transmit(now, id, &Frame::Goodbye(contacts));
        self.events.push_back(Event::Close(id, "made room for a node without neighbours"));
        self.links.remove(&peer);
        true
    }

    fn seeds(&self) -> Vec<Contact> {
        let contact = |(node, address): &(NodeId, SocketAddr)| Contact {
            node: *node,
            addresses: vec![*address],
        };
        self.settings.seeds.iter().map(contact).collect()
    }

    /// Tries a seed or a contact that is no member: after a partition both sides have such.
    fn heal(&mut self, now: Duration) {
        let gone = self
            .seeds()
            .into_iter()
            .chain(self.passive.contacts())
            .filter(|contact| self.directory.get(contact.node).is_none())
            .collect();
        self.dial_one_of(now, gone);
    }

    fn dial_one_of(&mut self, now: Duration, contacts: Vec<Contact>) {
        let own = self.identity.id();
        let ready: Vec<Contact> = contacts
            .into_iter()
            .filter(|Contact { node, .. }| {
                *node != own
                    && !self.links.contains_key(node)
                    && !self.dialling.contains_key(node)
                    && self.passive.is_ready(now, *node)
            })
            .collect();
        if let Some(contact) = self.random.pick(&ready).cloned() {
            self.dialling.insert(contact.node, now);
            self.events.push_back(Event::Dial(contact));
        }
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;

    use super::*;
    use crate::{
        identity::Identity,
        membership::{Limits, Settings, Strict},
        wire::Role,
    };

    fn dials(node: &mut Membership) -> usize {
        std::iter::from_fn(|| node.poll_event())
            .filter(|event| matches!(event, Event::Dial(_)))
            .count()
    }

    #[test]
    fn a_changed_network_ends_the_wait_for_the_next_try() {
        let identity = |key| Identity::new(SigningKey::from_bytes(&[key; 32]));
        let seed = identity(2).id();
        let settings = Settings {
            role: Role::Provider,
            limits: Limits::for_role(Role::Provider),
            addresses: Vec::new(),
            seeds: vec![(seed, "192.0.2.1:4600".parse().expect("an address"))],
            epoch: 1,
            seed: 1,
        };
        let mut node = Membership::new(identity(1), settings, Box::new(Strict));
        let mut now = Duration::ZERO;
        for _ in 0..8 {
            now += Duration::from_secs(60);
            node.handle_timeout(now);
            assert_eq!(dials(&mut node), 1);
            node.handle_dial_failed(now, seed);
        }
        now += Duration::from_secs(1);
        node.handle_timeout(now);
        assert_eq!(dials(&mut node), 0);
        node.handle_network_changed(now);
        assert_eq!(dials(&mut node), 1);
        // One that is being dialled is the shell's to begin anew.
        node.handle_network_changed(now);
        assert_eq!(dials(&mut node), 0);
    }
}
