//! Many nodes on one virtual clock: joining, leaving, dying, partitions, broadcasts.
//!
//! Links deliver in order, as streams do; each message takes a random time, now and then long (a
//! retransmission), so that messages on different links overtake each other. A partition or a
//! crash breaks links silently. Everything follows from one seed, which a failure prints;
//! `OVERLAY_SEED` sets it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use overlay::{
    Role, SigningKey,
    identity::{Identity, IdentityError},
    membership::{DEATH_BOUND, Event, Limits, LinkEnd, LinkId, Membership, Settings, Side, Verify},
    random::Random,
    wire::{Contact, Frame, Rumour},
};
use types::ids::NodeId;

const LIMITS: Limits = Limits { wanted: 4, links: 7, passive: 24 };
const SECOND: Duration = Duration::from_secs(1);

/// Remembers which signatures are good: every node would check each again.
#[derive(Clone, Default)]
struct Remembering(Arc<Mutex<Good>>);

/// Signatures that were checked, with their signers.
#[derive(Default)]
struct Good(BTreeSet<(NodeId, [u8; 64])>);

impl Verify for Remembering {
    fn verify(&mut self, rumour: &Rumour) -> Result<(), IdentityError> {
        let mut good = self.0.lock().expect("one thread");
        if good.0.insert((rumour.origin, rumour.signature)) {
            rumour.verify()?;
        }
        Ok(())
    }
}

enum Action {
    Tick(usize, u64),
    Connect(usize, u64, Contact),
    Deliver(usize, LinkId, Bytes),
    End(usize, LinkId),
}

struct Node {
    core: Membership,
    id: NodeId,
    started: Duration,
    /// Tells a restarted node's events from those of its earlier life.
    life: u64,
    side: u8,
    payloads: BTreeMap<(NodeId, Bytes), u32>,
}

struct Far {
    node: usize,
    link: LinkId,
    /// When the last message arrives: later ones arrive after it.
    busy_until: Duration,
}

struct Simulation {
    seed: u64,
    random: Random,
    now: Duration,
    nodes: BTreeMap<usize, Node>,
    index: BTreeMap<NodeId, usize>,
    links: BTreeMap<(usize, LinkId), Far>,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    actions: BTreeMap<u64, Action>,
    counter: u64,
    verifier: Remembering,
}

impl Drop for Simulation {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation failed at {:?}; OVERLAY_SEED={} repeats it", self.now, self.seed);
        }
    }
}

fn address(index: usize) -> SocketAddr {
    let [low, high, ..] = index.to_le_bytes();
    SocketAddr::from(([10, 0, high, low], 4000))
}

impl Simulation {
    fn new(default: u64) -> Self {
        let seed = std::env::var("OVERLAY_SEED").ok().and_then(|text| text.parse().ok());
        let seed = seed.unwrap_or(default);
        Self {
            seed,
            random: Random::new(seed),
            now: Duration::from_secs(1_000),
            nodes: BTreeMap::new(),
            index: BTreeMap::new(),
            links: BTreeMap::new(),
            queue: BinaryHeap::new(),
            actions: BTreeMap::new(),
            counter: 0,
            verifier: Remembering::default(),
        }
    }

    fn start(&mut self, index: usize, seeds: &[usize], epoch: u64) {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&index.to_le_bytes());
        let identity = Identity::new(SigningKey::from_bytes(&key));
        let id = identity.id();
        let seeds = seeds.iter().map(|seed| (self.nodes[seed].id, address(*seed))).collect();
        let settings = Settings {
            role: Role::Provider,
            limits: LIMITS,
            addresses: vec![address(index)],
            seeds,
            epoch,
            seed: self.random.draw(),
        };
        let core = Membership::new(identity, settings, Box::new(self.verifier.clone()));
        self.counter += 1;
        let life = self.counter;
        let (started, payloads) = (self.now, BTreeMap::new());
        self.index.insert(id, index);
        self.nodes.insert(index, Node { core, id, started, life, side: 0, payloads });
        self.schedule(Duration::ZERO, Action::Tick(index, life));
    }

    fn schedule(&mut self, after: Duration, action: Action) {
        self.counter += 1;
        self.queue.push(Reverse((self.now + after, self.counter)));
        self.actions.insert(self.counter, action);
    }

    fn latency(&mut self) -> Duration {
        let ordinary = Duration::from_millis(5 + self.random.below(75) as u64);
        if self.random.below(50) == 0 { ordinary + Duration::from_millis(600) } else { ordinary }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(Reverse((at, key))) = self.queue.peek().copied() {
            if at > end {
                break;
            }
            self.queue.pop();
            self.now = at;
            if let Some(action) = self.actions.remove(&key) {
                self.act(action);
            }
        }
        self.now = end;
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Tick(index, life) => {
                let due = self.with(index, |core, now| {
                    core.handle_timeout(now);
                    core.poll_timeout()
                });
                if let Some(due) = due
                    && let Some(node) = self.nodes.get(&index).filter(|node| node.life == life)
                {
                    let after = (node.started + due).saturating_sub(self.now);
                    self.schedule(after, Action::Tick(index, life));
                }
            }
            Action::Connect(from, life, contact) => self.connect(from, life, &contact),
            Action::Deliver(index, link, bytes) => {
                let frame = Frame::decode(&bytes[4..]).expect("our own bytes");
                let taken = self.with(index, |core, now| core.handle_frame(now, link, frame));
                assert!(taken.is_none_or(|taken| taken.is_ok()), "an honest frame was refused");
            }
            Action::End(index, link) => {
                self.links.remove(&(index, link));
                self.with(index, |core, now| core.handle_link_down(now, link, LinkEnd::Closed));
            }
        }
    }

    /// Gives a node an input and carries out its output. `None` when it is dead.
    fn with<T>(
        &mut self,
        index: usize,
        input: impl FnOnce(&mut Membership, Duration) -> T,
    ) -> Option<T> {
        let node = self.nodes.get_mut(&index)?;
        let result = input(&mut node.core, self.now - node.started);
        let mut events = Vec::new();
        while let Some(event) = node.core.poll_event() {
            events.push(event);
        }
        let life = node.life;
        for event in events {
            self.carry_out(index, life, event);
        }
        Some(result)
    }

    fn carry_out(&mut self, index: usize, life: u64, event: Event) {
        match event {
            Event::Transmit(link, bytes) => {
                let (latency, now) = (self.latency(), self.now);
                if !self.connected(index, link) {
                    return;
                }
                let Some(far) = self.links.get_mut(&(index, link)) else { return };
                far.busy_until = far.busy_until.max(now + latency);
                let (node, link, after) = (far.node, far.link, far.busy_until - now);
                self.schedule(after, Action::Deliver(node, link, bytes));
            }
            Event::Dial(contact) => {
                let latency = self.latency();
                self.schedule(latency, Action::Connect(index, life, contact));
            }
            Event::Close(link, _) => {
                if let Some(far) = self.links.remove(&(index, link)) {
                    let after = far.busy_until.saturating_sub(self.now) + self.latency();
                    self.schedule(after, Action::End(far.node, far.link));
                }
            }
            Event::Payload(origin, payload) => {
                if let Some(node) = self.nodes.get_mut(&index) {
                    *node.payloads.entry((origin, payload)).or_default() += 1;
                }
            }
            Event::Joined(_) | Event::Left(_) | Event::Died(_) => {}
        }
    }

    /// Says whether a link still leads somewhere; one that lost a message never does again.
    fn connected(&mut self, index: usize, link: LinkId) -> bool {
        let Some(far) = self.links.get(&(index, link)) else { return false };
        let (node, other) = (far.node, far.link);
        let side = |index: &usize| self.nodes.get(index).map(|node| node.side);
        let whole = side(&index) == side(&node) && self.links.contains_key(&(node, other));
        if !whole {
            self.links.remove(&(index, link));
        }
        whole
    }

    fn connect(&mut self, from: usize, life: u64, contact: &Contact) {
        let alive = self.nodes.get(&from).is_some_and(|node| node.life == life);
        if !alive {
            return;
        }
        let to = self.index.get(&contact.node).copied();
        let reachable = to.filter(|to| {
            contact.addresses.contains(&address(*to))
                && self.nodes.get(to).is_some_and(|node| node.side == self.nodes[&from].side)
        });
        let Some(to) = reachable else {
            let peer = contact.node;
            self.with(from, |core, now| core.handle_dial_failed(now, peer));
            return;
        };
        self.counter += 2;
        let (near, far) = (LinkId(self.counter - 1), LinkId(self.counter));
        let busy_until = self.now;
        self.links.insert((from, near), Far { node: to, link: far, busy_until });
        self.links.insert((to, far), Far { node: from, link: near, busy_until });
        let hello_to = self.nodes[&from].core.hello(address(to));
        let hello_from = self.nodes[&to].core.hello(address(from));
        let (from_id, to_id) = (self.nodes[&from].id, self.nodes[&to].id);
        self.with(to, |core, now| {
            core.handle_link_up(now, far, from_id, (Side::Accepted, hello_to));
        });
        self.with(from, |core, now| {
            core.handle_link_up(now, near, to_id, (Side::Dialled, hello_from));
        });
    }

    fn stop(&mut self, index: usize) {
        self.nodes.remove(&index);
        self.links.retain(|(node, _), _| *node != index);
    }

    /// Asserts that each node lists exactly the others that live on its side.
    fn assert_views(&self, when: &str) {
        for node in self.nodes.values() {
            let expected: BTreeSet<NodeId> = self
                .nodes
                .values()
                .filter(|other| other.side == node.side && other.id != node.id)
                .map(|other| other.id)
                .collect();
            let listed: BTreeSet<NodeId> = node.core.members().map(|(id, _)| id).collect();
            let missing = expected.difference(&listed).count();
            let surplus = listed.difference(&expected).count();
            assert!(missing + surplus == 0, "{when}: {missing} missing, {surplus} surplus");
            assert!(node.core.neighbours().count() <= LIMITS.links, "{when}: too many links");
        }
    }

    fn broadcast_from(&mut self, index: usize, payload: &'static [u8]) {
        self.with(index, |core, now| core.handle_broadcast(now, payload.to_vec()));
    }

    fn assert_delivered_once(&self, from: usize, payload: &'static [u8]) {
        let key = (self.nodes[&from].id, Bytes::from_static(payload));
        for (index, node) in &self.nodes {
            let count = node.payloads.get(&key).copied().unwrap_or(0);
            assert_eq!(count, u32::from(*index != from), "node {index}, from node {from}");
        }
    }
}

#[test]
fn two_hundred_nodes_join_and_each_broadcast_arrives_once() {
    let mut simulation = Simulation::new(20_261_121);
    simulation.start(0, &[], 1);
    for index in 1..200 {
        simulation.start(index, &[0], 1);
        simulation.run(Duration::from_millis(50));
    }
    simulation.run(12 * SECOND);
    simulation.assert_views("after joining");
    simulation.broadcast_from(17, b"one");
    simulation.broadcast_from(150, b"two");
    simulation.run(4 * SECOND);
    simulation.assert_delivered_once(17, b"one");
    simulation.assert_delivered_once(150, b"two");
}

#[test]
fn leavers_the_dead_and_the_other_side_vanish_and_come_back() {
    let mut simulation = Simulation::new(7);
    simulation.start(0, &[], 1);
    for index in 1..40 {
        simulation.start(index, &[0], 1);
    }
    simulation.run(25 * SECOND);
    simulation.assert_views("after joining");
    for index in 10..15 {
        simulation.with(index, |core, now| core.handle_leave(now));
        simulation.stop(index);
    }
    simulation.run(3 * SECOND);
    simulation.assert_views("after leaving");
    for index in 15..20 {
        simulation.stop(index);
    }
    simulation.run(DEATH_BOUND);
    simulation.assert_views("after dying");
    // A clock set back: the new start has a smaller epoch than the old one.
    simulation.start(15, &[0], 0);
    simulation.run(15 * SECOND);
    simulation.assert_views("after a restart");
    for index in 25..40 {
        simulation.nodes.get_mut(&index).expect("alive").side = 1;
    }
    simulation.run(25 * SECOND);
    simulation.assert_views("while parted");
    for node in simulation.nodes.values_mut() {
        node.side = 0;
    }
    simulation.run(40 * SECOND);
    simulation.assert_views("after healing");
    simulation.broadcast_from(3, b"all");
    simulation.run(4 * SECOND);
    simulation.assert_delivered_once(3, b"all");
}
