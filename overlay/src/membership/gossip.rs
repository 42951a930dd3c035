//! Rumours: what this node says, what it hands on, what it makes of others'.

use std::{net::SocketAddr, time::Duration};

use types::ids::NodeId;

use super::{Event, LIFETIME_PERIODS, LinkId, Membership, announce_period, directory::Change};
use crate::{
    broadcast::Verdict,
    identity::IdentityError,
    wire::{self, Announcement, Contact, Frame, Heard, Rumour, Statement},
};

/// Rumours in one frame when a new neighbour is told the directory: about 300 bytes each.
const BATCH: usize = 128;
/// Addresses that are announced because neighbours see this node there.
const OBSERVED: usize = 3;

impl Membership {
    /// Signs a statement, hands it to every neighbour and returns it.
    pub(super) fn say(&mut self, now: Duration, statement: &Statement) -> Rumour {
        self.nonce += 1;
        let rumour = Rumour::new(&self.identity, self.epoch, self.nonce, statement);
        self.windows.record(now, self.identity.id(), self.epoch, self.nonce);
        let heard = Heard { rumour, age_ms: 0 };
        self.forward(now, None, &heard);
        heard.rumour
    }

    pub(super) fn announce(&mut self, now: Duration) {
        let period = announce_period(self.directory.len());
        let lifetime = period * LIFETIME_PERIODS;
        let neighbours = self.links.keys().take(wire::NEIGHBOURS).copied().collect();
        let announcement = Announcement {
            role: self.settings.role,
            addresses: self.own_addresses(),
            neighbours,
            lifetime_ms: whole_ms(lifetime),
            uptime_ms: whole_ms(now),
        };
        self.announce_at = now + self.random.jitter(period);
        let rumour = self.say(now, &Statement::Announce(announcement));
        // What nobody heard does not delay what the first neighbour is told: where it is reached now.
        self.announced = (!self.links.is_empty()).then_some((now, rumour));
    }

    /// Announces as soon as the distance to the last announcement allows.
    pub(super) fn announce_soon(&mut self, now: Duration) {
        let earliest = self.announced.as_ref().map_or(now, |(at, _)| *at + super::ANNOUNCE_GAP);
        self.announce_at = self.announce_at.min(earliest.max(now));
    }

    /// Returns where this node may be dialled: its own view, then what neighbours see.
    pub(super) fn own_addresses(&self) -> Vec<SocketAddr> {
        let mut addresses = self.settings.addresses.clone();
        addresses.truncate(wire::ADDRESSES - OBSERVED);
        let mut observed: Vec<SocketAddr> = self.links.values().map(|link| link.observed).collect();
        observed.sort_unstable();
        observed.dedup();
        observed.retain(|address| !addresses.contains(address));
        addresses.extend(observed.into_iter().take(OBSERVED));
        addresses
    }

    /// Tells a new neighbour this node's last announcement, which the directory does not hold, and
    /// the directory.
    pub(super) fn synchronise(&mut self, now: Duration, id: LinkId) {
        // One of this moment went to all neighbours.
        let own = self.announced.iter().filter(|(at, _)| *at < now).map(|(at, rumour)| Heard {
            rumour: rumour.clone(),
            age_ms: whole_ms(now.saturating_sub(*at)),
        });
        let known: Vec<Heard> = own.chain(self.directory.all(now)).collect();
        for batch in known.chunks(BATCH) {
            self.transmit(now, id, &Frame::Rumours(batch.to_vec()));
        }
    }

    pub(super) fn report_silence(&mut self, now: Duration, peer: NodeId) {
        if let Some(epoch) = self.directory.get(peer).map(|entry| entry.epoch) {
            self.directory.handle_suspicion(now, peer, epoch);
            self.say(now, &Statement::Silent(peer, epoch));
        }
    }

    pub(super) fn handle_rumour(
        &mut self,
        now: Duration,
        id: LinkId,
        peer: NodeId,
        heard: Heard,
    ) -> Result<(), IdentityError> {
        let Heard { rumour, .. } = &heard;
        let (origin, epoch, nonce) = (rumour.origin, rumour.epoch, rumour.nonce);
        if origin == self.identity.id() {
            return self.handle_own(now, rumour);
        }
        match self.windows.verdict(origin, epoch, nonce) {
            Verdict::Old => return Ok(()),
            Verdict::OldEpoch => {
                self.show_newest(now, id, origin, peer);
                return Ok(());
            }
            Verdict::New => {}
        }
        let units = 1 + rumour.body.len() as u64 / 1024;
        let link = self.links.get_mut(&peer);
        if link.is_none_or(|link| link.incoming.spend(now, units).is_err()) {
            // Not remembered: it can still come from another neighbour.
            return Ok(());
        }
        self.verifier.verify(rumour)?;
        self.windows.record(now, origin, epoch, nonce);
        // Signed by its origin, but nothing that this version understands: handed on, not read.
        let statement = rumour.statement().ok();
        if matches!(statement, Some(Statement::Announce(_) | Statement::Leave)) {
            self.windows.keep_proof(rumour);
        }
        self.forward(now, Some(peer), &heard);
        match statement {
            Some(Statement::Announce(announcement)) => {
                self.handle_announcement(now, &heard, announcement);
            }
            Some(Statement::Leave) => {
                self.passive.remove(origin);
                if self.directory.handle_leave(origin).is_some() {
                    self.events.push_back(Event::Left(origin));
                }
                if let Some(link) = self.links.remove(&origin) {
                    self.events.push_back(Event::Close(link.id, "it left"));
                }
            }
            Some(Statement::Silent(node, epoch)) => self.handle_silent(now, node, epoch),
            Some(Statement::Payload(payload)) => {
                self.events.push_back(Event::Payload(origin, payload.into()));
            }
            None => {}
        }
        Ok(())
    }

    fn handle_announcement(&mut self, now: Duration, heard: &Heard, announcement: Announcement) {
        let node = heard.rumour.origin;
        let addresses = announcement.addresses.clone();
        if self.directory.handle_announcement(now, heard, announcement) == Change::Joined {
            self.passive.insert(Contact { node, addresses }, &mut self.random);
            self.events.push_back(Event::Joined(node));
        }
    }

    /// Suspects a node that a neighbour of it reports, unless this node hears it itself.
    fn handle_silent(&mut self, now: Duration, node: NodeId, epoch: u64) {
        if node == self.identity.id() {
            self.announce_soon(now);
        } else if !self.links.contains_key(&node) {
            self.directory.handle_suspicion(now, node, epoch);
        }
    }

    /// Takes back a statement of this node. One that it did not make in this start comes from an
    /// earlier start with a later clock: start above it.
    fn handle_own(&mut self, now: Duration, rumour: &Rumour) -> Result<(), IdentityError> {
        if (rumour.epoch, rumour.nonce) > (self.epoch, self.nonce) {
            self.verifier.verify(rumour)?;
            self.epoch = rumour.epoch.saturating_add(1);
            self.announce_soon(now);
        }
        Ok(())
    }

    /// Shows a neighbour that speaks with an old incarnation what is known of it.
    fn show_newest(&mut self, now: Duration, id: LinkId, origin: NodeId, peer: NodeId) {
        if origin == peer
            && let Some(rumour) = self.windows.proof(origin).cloned()
        {
            self.transmit(now, id, &Frame::Rumours(vec![Heard { rumour, age_ms: 0 }]));
        }
    }

    fn forward(&mut self, now: Duration, not: Option<NodeId>, heard: &Heard) {
        let bytes: bytes::Bytes = wire::to_frame(&Frame::Rumours(vec![heard.clone()])).into();
        let links: Vec<LinkId> = self
            .links
            .iter()
            .filter(|(peer, _)| Some(**peer) != not && **peer != heard.rumour.origin)
            .map(|(_, link)| link.id)
            .collect();
        for id in links {
            self.transmit_bytes(now, id, (1, bytes.clone()));
        }
    }
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;

    use super::*;
    use crate::{
        identity::Identity,
        membership::{Limits, Settings, Side, Strict},
        wire::{Hello, Role},
    };

    fn node(key: u8) -> Membership {
        let settings = Settings {
            role: Role::Provider,
            limits: Limits::for_role(Role::Provider),
            addresses: Vec::new(),
            seeds: Vec::new(),
            epoch: 1,
            seed: u64::from(key),
        };
        Membership::new(
            Identity::new(SigningKey::from_bytes(&[key; 32])),
            settings,
            Box::new(Strict),
        )
    }

    fn link_up(node: &mut Membership, now: Duration, peer: &Membership, side: Side) {
        let observed = "192.0.2.1:4600".parse().expect("an address");
        let hello = Hello { role: Role::Provider, neighbours: 0, observed };
        let id = LinkId(node.links.len() as u64);
        node.handle_link_up(now, id, peer.identity.id(), (side, hello));
    }

    /// What is sent, frame by frame.
    fn sent(node: &mut Membership) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(event) = node.poll_event() {
            if let Event::Transmit(_, bytes) = event {
                frames.push(Frame::decode(&bytes[4..]).expect("a frame"));
            }
        }
        frames
    }

    /// A new neighbour joins at once, also when this node must not announce itself again yet.
    #[test]
    fn a_new_neighbour_hears_what_was_announced_a_moment_ago() {
        let (mut old, mut new) = (node(1), node(2));
        let start = Duration::from_secs(10);
        link_up(&mut old, start, &node(3), Side::Accepted);
        sent(&mut old);
        let now = start + super::super::ANNOUNCE_GAP / 10;
        link_up(&mut old, now, &new, Side::Accepted);
        link_up(&mut new, now, &old, Side::Dialled);
        for frame in sent(&mut old) {
            new.handle_frame(now, LinkId(0), frame).expect("signed by its origin");
        }
        let joined = std::iter::from_fn(|| new.poll_event());
        assert_eq!(joined.filter(|event| *event == Event::Joined(old.identity.id())).count(), 1);
        assert_eq!(new.directory.get(old.identity.id()).map(|entry| entry.announced), Some(start));
    }

    /// The first neighbour hears at once that it is one, and hears it once: an announcement that was
    /// made to nobody neither counts nor delays.
    #[test]
    fn a_first_neighbour_hears_of_itself_at_once() {
        let (mut old, new) = (node(1), node(2));
        let start = Duration::from_secs(10);
        old.handle_timeout(start);
        assert_eq!(sent(&mut old), []);
        link_up(&mut old, start + super::super::ANNOUNCE_GAP / 10, &new, Side::Accepted);
        let frames = sent(&mut old);
        let [Frame::Rumours(rumours)] = &frames[..] else { panic!("{frames:?}") };
        let [Heard { rumour, age_ms: 0 }] = &rumours[..] else { panic!("{rumours:?}") };
        let Ok(Statement::Announce(announcement)) = rumour.statement() else {
            panic!("{rumour:?}")
        };
        assert_eq!(announcement.neighbours, [new.identity.id()]);
    }
}
