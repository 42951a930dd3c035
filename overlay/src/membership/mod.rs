//! Who is there: neighbours, candidates for neighbours, and the directory of all members.
//!
//! Each node keeps a bounded number of links (the active view) and of contacts it could link to
//! (the passive view), and exchanges samples of the latter with its neighbours, as HyParView does
//! (Leitão, Pereira, Rodrigues, DSN 2007). Links carry signed rumours, each forwarded once.
//!
//! * A node announces itself every [`announce_period`], which grows with the directory so that
//!   the rumours per second stay bounded at any size, and counts as a member until its
//!   announcement's lifetime is over.
//! * A node that leaves says so and is gone when the rumour arrives.
//! * A node that falls silent is reported by each neighbour after [`LINK_TIMEOUT`] and is gone
//!   [`SUSPICION`] later unless it announces itself meanwhile: within [`DEATH_BOUND`], or, when no
//!   neighbour of it survives either, when its announcement's lifetime ends.
//! * A node that restarts with its clock set back is shown its own last announcement and starts
//!   above it.
//!
//! This core opens no connection: the shell dials and reports. Times are uptimes: durations since
//! this node started.

mod directory;
mod gossip;
mod views;

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    time::Duration,
};

use bytes::Bytes;
use types::ids::NodeId;

pub use directory::{Entry, MEMBERS};

use crate::{
    broadcast::Windows,
    identity::{Identity, IdentityError},
    random::Random,
    session::{Bucket, SENT_AT_ONCE, SENT_PER_SECOND},
    wire::{self, Contact, Frame, Hello, Role, Rumour},
};
use directory::Directory;
use views::Passive;

/// A neighbour hears something this often.
pub const PING: Duration = Duration::from_secs(2);
/// A neighbour that says nothing for this long is reported: three pings lost.
pub const LINK_TIMEOUT: Duration = Duration::from_secs(6);
/// A reported node has this long to object.
pub const SUSPICION: Duration = Duration::from_secs(4);
/// A node that died is gone from every view this much later, as long as one of its neighbours
/// lives and the report crosses the network in three seconds.
pub const DEATH_BOUND: Duration = Duration::from_secs(15);
const _: () =
    assert!(LINK_TIMEOUT.as_secs() + SUSPICION.as_secs() + 2 * TICK.as_secs() < 15 - 3 + 1);

/// Announcements are made this often in a small network.
pub const ANNOUNCE: Duration = Duration::from_secs(4);
/// Each member adds this much to the period: at most 20 announcements arrive per second.
pub const ANNOUNCE_PER_MEMBER: Duration = Duration::from_millis(50);
/// Announcements count for this many periods: two may be lost.
pub const LIFETIME_PERIODS: u32 = 3;
/// Announcements that something caused keep this distance.
const ANNOUNCE_GAP: Duration = Duration::from_secs(1);
/// Samples of contacts are exchanged this often.
const SHUFFLE: Duration = Duration::from_secs(10);
/// Contacts that seem gone, and seeds, are tried this often to heal a partition.
const HEAL: Duration = Duration::from_secs(5);
/// Period of all checks that need no better precision.
const TICK: Duration = Duration::from_millis(500);
/// New rumours, or KiB of them, taken from one neighbour per second. The largest network makes 20
/// announcements per second, and offers.
const RUMOURS_PER_SECOND: u64 = 300;
/// The same at once: twice the directory.
const RUMOURS_AT_ONCE: u64 = 2 * MEMBERS as u64;
/// Output that waits for the shell at most. The shell drains after each input, and one input
/// causes at most one frame per link and rumour.
const PENDING: usize = 65_536;

/// Bounds of one node's views.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Links to look for.
    pub wanted: usize,
    /// Links to hold at most.
    pub links: usize,
    /// Contacts to remember at most.
    pub passive: usize,
}

impl Limits {
    /// Returns the bounds for a role. Seeds and gateways take in many nodes that only they can
    /// be reached by, because those sit behind NAT.
    pub const fn for_role(role: Role) -> Self {
        match role {
            Role::Gateway | Role::Seed => Self { wanted: 4, links: 256, passive: 128 },
            Role::Provider => Self { wanted: 4, links: 8, passive: 64 },
        }
    }
}

/// How signatures are checked. The simulator remembers results, because there each rumour would
/// be checked once per node on one machine.
pub trait Verify: Send {
    /// Checks a rumour's signature.
    fn verify(&mut self, rumour: &Rumour) -> Result<(), IdentityError>;
}

/// Checks each signature.
#[derive(Debug, Clone, Copy)]
pub struct Strict;

impl Verify for Strict {
    fn verify(&mut self, rumour: &Rumour) -> Result<(), IdentityError> {
        rumour.verify()
    }
}

/// What a node starts with.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What it is for.
    pub role: Role,
    /// Bounds of its views.
    pub limits: Limits,
    /// Where it may be dialled, as far as it knows itself.
    pub addresses: Vec<SocketAddr>,
    /// Nodes to join through.
    pub seeds: Vec<(NodeId, SocketAddr)>,
    /// Its incarnation: Unix milliseconds at its start.
    pub epoch: u64,
    /// For choices that need no secrecy.
    pub seed: u64,
}

/// Names one link of this node; the shell never uses a number twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// Who dialled a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The neighbour.
    Accepted,
    /// This node.
    Dialled,
}

/// How a link ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkEnd {
    /// The neighbour closed it, or broke the rules; it lives.
    Closed,
    /// The connection broke or timed out.
    Lost,
}

/// What the shell has to do or tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Send these bytes, a whole frame.
    Transmit(LinkId, Bytes),
    /// Dial and open a link; report `handle_link_up` or `handle_dial_failed`.
    Dial(Contact),
    /// End the link after what was sent before.
    Close(LinkId, &'static str),
    /// A node can be reached from now on.
    Joined(NodeId),
    /// A node said that it leaves.
    Left(NodeId),
    /// A node fell silent.
    Died(NodeId),
    /// A payload for the users of the overlay.
    Payload(NodeId, Bytes),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Left,
    Running,
}

#[derive(Debug)]
struct Link {
    id: LinkId,
    side: Side,
    sent: Duration,
    heard: Duration,
    observed: SocketAddr,
    /// Bounds what goes out, so that the neighbour does not take it for a flood.
    outgoing: Bucket,
    /// Bounds the new rumours that are taken from this neighbour, so that none fills all links.
    incoming: Bucket,
}

/// The core.
pub struct Membership {
    identity: Identity,
    verifier: Box<dyn Verify>,
    random: Random,
    phase: Phase,
    settings: Settings,
    epoch: u64,
    nonce: u64,
    links: BTreeMap<NodeId, Link>,
    dialling: BTreeMap<NodeId, Duration>,
    passive: Passive,
    directory: Directory,
    windows: Windows,
    events: VecDeque<Event>,
    /// This node's last announcement, and when it was made.
    announced: Option<(Duration, Rumour)>,
    announce_at: Duration,
    shuffle_at: Duration,
    heal_at: Duration,
    tick_at: Duration,
}

impl Membership {
    /// Starts a node at uptime zero.
    pub fn new(identity: Identity, settings: Settings, verifier: Box<dyn Verify>) -> Self {
        Self {
            random: Random::new(settings.seed),
            phase: Phase::Running,
            epoch: settings.epoch,
            nonce: 0,
            links: BTreeMap::new(),
            dialling: BTreeMap::new(),
            passive: Passive::new(settings.limits.passive),
            directory: Directory::default(),
            windows: Windows::default(),
            events: VecDeque::new(),
            announced: None,
            announce_at: Duration::ZERO,
            shuffle_at: SHUFFLE,
            heal_at: HEAL,
            tick_at: Duration::ZERO,
            identity,
            verifier,
            settings,
        }
    }

    /// Returns this node's incarnation.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the other members, by key.
    pub fn members(&self) -> impl Iterator<Item = (NodeId, &Entry)> {
        self.directory.iter()
    }

    /// Returns a member.
    pub fn member(&self, node: NodeId) -> Option<&Entry> {
        self.directory.get(node)
    }

    /// Returns the neighbours.
    pub fn neighbours(&self) -> impl Iterator<Item = NodeId> {
        self.links.keys().copied()
    }

    /// Returns what to greet a neighbour with that is seen at `observed`.
    pub fn hello(&self, observed: SocketAddr) -> Hello {
        let neighbours = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        Hello { role: self.settings.role, neighbours, observed }
    }

    /// Takes in a neighbour with whom greetings were exchanged.
    pub fn handle_link_up(
        &mut self,
        now: Duration,
        id: LinkId,
        peer: NodeId,
        (side, hello): (Side, Hello),
    ) {
        if self.phase == Phase::Left {
            self.events.push_back(Event::Close(id, "this node has left"));
            return;
        }
        self.dialling.remove(&peer);
        self.passive.handle_success(peer);
        if let Some(existing) = self.links.get(&peer) {
            if !self.replaces(peer, existing.side, side) {
                self.events.push_back(Event::Close(id, "there is a link already"));
                return;
            }
            self.events.push_back(Event::Close(existing.id, "a newer link replaces this one"));
            self.links.remove(&peer);
        }
        if self.links.len() >= self.settings.limits.links && !self.make_room(now, &hello) {
            let contacts = self.sample(wire::CONTACTS, peer);
            self.transmit(now, id, &Frame::Goodbye(contacts));
            self.events.push_back(Event::Close(id, "no room for another neighbour"));
            return;
        }
        let link = Link {
            id,
            side,
            sent: now,
            heard: now,
            observed: hello.observed,
            outgoing: Bucket::new(now, SENT_PER_SECOND, SENT_AT_ONCE),
            incoming: Bucket::new(now, RUMOURS_PER_SECOND, RUMOURS_AT_ONCE),
        };
        self.links.insert(peer, link);
        self.directory.handle_alive(now, peer);
        self.announce_soon(now);
        // To its new neighbour this node is a member once it says so: not only at the next check.
        if now >= self.announce_at {
            self.announce(now);
        }
        self.synchronise(now, id);
    }

    /// Takes note that a link ended. Links that this node closed need no report.
    pub fn handle_link_down(&mut self, now: Duration, id: LinkId, end: LinkEnd) {
        let Some(peer) = self.links.iter().find(|(_, link)| link.id == id).map(|(peer, _)| *peer)
        else {
            return;
        };
        self.links.remove(&peer);
        self.announce_soon(now);
        if end == LinkEnd::Lost {
            self.report_silence(now, peer);
        }
    }

    /// Takes note that a node could not be dialled, or would not link.
    pub fn handle_dial_failed(&mut self, now: Duration, peer: NodeId) {
        self.dialling.remove(&peer);
        self.passive.handle_failure(now, peer, &mut self.random);
    }

    /// Takes note that there may be a way to nodes that could not be dialled before.
    pub fn handle_network_changed(&mut self, now: Duration) {
        self.passive.forget_failures();
        self.heal_at = now;
        if self.phase != Phase::Left {
            self.seek(now);
        }
    }

    /// Takes a frame from a neighbour. Errors end the link.
    pub fn handle_frame(
        &mut self,
        now: Duration,
        id: LinkId,
        frame: Frame,
    ) -> Result<(), IdentityError> {
        let Some((peer, link)) = self.links.iter_mut().find(|(_, link)| link.id == id) else {
            // A link that was refused: only its parting words are of use.
            if let Frame::Goodbye(contacts) = frame {
                self.learn(contacts);
            }
            return Ok(());
        };
        let peer = *peer;
        link.heard = now;
        self.directory.handle_alive(now, peer);
        match frame {
            Frame::Hello(_) | Frame::Ping => {}
            Frame::Rumours(rumours) => {
                for heard in rumours {
                    self.handle_rumour(now, id, peer, heard)?;
                }
            }
            Frame::Shuffle(contacts) => {
                let reply = self.sample(wire::CONTACTS / 2, peer);
                self.transmit(now, id, &Frame::ShuffleReply(reply));
                self.learn(contacts);
            }
            Frame::ShuffleReply(contacts) => self.learn(contacts),
            Frame::Goodbye(contacts) => {
                self.learn(contacts);
                self.links.remove(&peer);
                self.passive.handle_failure(now, peer, &mut self.random);
                self.events.push_back(Event::Close(id, "goodbye"));
                self.announce_soon(now);
            }
        }
        Ok(())
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        if now < self.tick_at {
            return;
        }
        self.tick_at = now + TICK;
        if self.phase == Phase::Left {
            return;
        }
        self.check_links(now);
        for node in self.directory.handle_timeout(now) {
            self.events.push_back(Event::Died(node));
        }
        if now >= self.announce_at {
            self.announce(now);
        }
        if now >= self.shuffle_at {
            self.shuffle_at = now + self.random.jitter(SHUFFLE);
            self.shuffle(now);
        }
        self.seek(now);
    }

    /// Sends a payload to everybody.
    pub fn handle_broadcast(&mut self, now: Duration, payload: Vec<u8>) {
        self.say(now, &wire::Statement::Payload(payload));
    }

    /// Says that this node leaves. Drain the events, then close everything.
    pub fn handle_leave(&mut self, now: Duration) {
        self.say(now, &wire::Statement::Leave);
        self.phase = Phase::Left;
        let links: Vec<LinkId> = self.links.values().map(|link| link.id).collect();
        self.links.clear();
        self.events.extend(links.into_iter().map(|id| Event::Close(id, "leaving")));
    }

    /// Returns what to do next.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns when to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Duration {
        self.tick_at
    }

    /// Of two links with one neighbour both sides keep the one that the smaller key dialled, and
    /// of two from the same dialler the newer.
    fn replaces(&self, peer: NodeId, existing: Side, newer: Side) -> bool {
        let smaller_dialled = |side| match side {
            Side::Dialled => self.identity.id() < peer,
            Side::Accepted => peer < self.identity.id(),
        };
        existing == newer || smaller_dialled(newer)
    }

    fn transmit(&mut self, now: Duration, id: LinkId, frame: &Frame) {
        let rumours = if let Frame::Rumours(rumours) = frame { rumours.len() } else { 0 };
        self.transmit_bytes(now, id, (rumours, wire::to_frame(frame).into()));
    }

    /// Sends a frame that holds so many rumours, unless the neighbour would take it for a flood.
    fn transmit_bytes(&mut self, now: Duration, id: LinkId, (rumours, bytes): (usize, Bytes)) {
        if self.events.len() >= PENDING {
            return;
        }
        if let Some(link) = self.links.values_mut().find(|link| link.id == id) {
            let units = 2 + rumours as u64 + bytes.len() as u64 / 1024;
            if link.outgoing.spend(now, units).is_err() {
                return;
            }
            link.sent = now;
        }
        self.events.push_back(Event::Transmit(id, bytes));
    }

    fn check_links(&mut self, now: Duration) {
        let silent: Vec<(NodeId, LinkId)> = self
            .links
            .iter()
            .filter(|(_, link)| now.saturating_sub(link.heard) >= LINK_TIMEOUT)
            .map(|(peer, link)| (*peer, link.id))
            .collect();
        for (peer, id) in silent {
            self.events.push_back(Event::Close(id, "silent for too long"));
            self.links.remove(&peer);
            self.report_silence(now, peer);
        }
        let idle: Vec<LinkId> = self
            .links
            .values()
            .filter(|link| now.saturating_sub(link.sent) + TICK > PING)
            .map(|link| link.id)
            .collect();
        for id in idle {
            self.transmit(now, id, &Frame::Ping);
        }
    }
}

/// Returns how often a node announces itself among so many members.
pub fn announce_period(members: usize) -> Duration {
    let members = u32::try_from(members).unwrap_or(u32::MAX);
    ANNOUNCE.max(ANNOUNCE_PER_MEMBER.saturating_mul(members))
}
