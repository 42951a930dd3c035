//! The running node: the cores behind one short lock, and where their output goes.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use quinn::{Connection, VarInt};
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use types::ids::NodeId;

use super::{
    api::{Broadcast, InboundRequest, InboundStream, Inbox, MemberEvent, OverlayError, Reach},
    link,
    places::{self, Places},
    tls::{STREAMS, Tls},
    traffic::Traffic,
};
use crate::{
    identity::Identity,
    membership::{Event, LinkEnd, LinkId, Membership},
    routes::Routes,
    sealed::ReplayGuard,
    session::{Bucket, UNITS_AT_ONCE, UNITS_PER_SECOND},
};

/// Requests that wait for their taker.
const INBOX: usize = 128;
/// Streams to this node whose opener has not said yet what they are for: a sixteenth of them, 16, may
/// be one peer's. That is as many as one peer's openings that are received at once, and so many heads
/// of 2 MiB are 32 MiB; a gateway, which opens the streams of many renters, says at once what each is
/// for, and so opens some fifty in a second over 300 ms.
pub(super) const UNREAD: usize = 256;
/// Broadcasts and member events that wait for their taker: a whole directory.
const INBOX_NEWS: usize = 4_096;
/// Frames that wait for one neighbour. A neighbour that takes less is too slow to be one.
const LINK_QUEUE: usize = 2_048;
/// Connections with one node: two when both dial at once, and their successors.
const PER_PEER: usize = 4;
/// Messages and streams of others that this node relays at once. A sixteenth of them, 256, may be one
/// peer's: what its newest connection carries ([`STREAMS`]), so a gateway that relays for many renters
/// loses nothing. A place that is taken is a task of some KiB, 16 MiB in all; what waits in its streams
/// is bounded by their connections.
pub(super) const RELAYED: usize = places::SHARE * STREAMS as usize;

/// Codes with which connections are closed (RFC 9000 §20.2); the reason is in words.
pub(super) const CLOSE_LEAVING: VarInt = VarInt::from_u32(1);
pub(super) const CLOSE_FAULT: VarInt = VarInt::from_u32(2);
pub(super) const CLOSE_SURPLUS: VarInt = VarInt::from_u32(3);

/// What a link's writing task is told.
#[derive(Debug)]
pub(super) enum ToLink {
    Write(Bytes),
    Close,
}

/// The cores.
pub(super) struct Core {
    pub(super) membership: Membership,
    pub(super) routes: Routes,
    pub(super) replays: ReplayGuard,
    pub(super) own_broadcasts: Bucket,
    links: HashMap<LinkId, mpsc::Sender<ToLink>>,
}

/// Connections by node, and what passed on those that are gone.
#[derive(Default)]
struct Connections {
    open: BTreeMap<NodeId, Vec<Connection>>,
    past: Traffic,
}

impl Connections {
    /// Forgets closed connections with a node, but not what passed on them.
    fn forget_closed(&mut self, node: NodeId) {
        let Some(with_peer) = self.open.get_mut(&node) else { return };
        let closed = with_peer.extract_if(.., |one| one.close_reason().is_some());
        closed.for_each(|one| self.past.add(&one));
        if with_peer.is_empty() {
            self.open.remove(&node);
        }
    }
}

/// Everything that the tasks of one node share.
pub(super) struct Node {
    pub(super) identity: Identity,
    pub(super) endpoint: quinn::Endpoint,
    pub(super) tls: Tls,
    pub(super) reach: Reach,
    pub(super) requests: mpsc::Sender<InboundRequest>,
    pub(super) streams: mpsc::Sender<InboundStream>,
    /// By the node that opened them.
    pub(super) unread: Places<NodeId>,
    /// By the node whose messages and streams are handed on.
    pub(super) relayed: Places<NodeId>,
    pub(super) stop: CancellationToken,
    /// Changes whenever the network did.
    pub(super) network: watch::Sender<()>,
    pub(super) tasks: TaskTracker,
    /// The writing tasks of links, which leaving waits for.
    pub(super) writers: TaskTracker,
    broadcasts: mpsc::Sender<Broadcast>,
    events: mpsc::Sender<MemberEvent>,
    core: Mutex<Core>,
    connections: Mutex<Connections>,
    next_link: AtomicU64,
    started: Instant,
}

impl Node {
    pub(super) fn new(
        identity: Identity,
        (endpoint, tls): (quinn::Endpoint, Tls),
        membership: Membership,
        reach: Reach,
    ) -> (Arc<Self>, Inbox) {
        let (requests, inbox_requests) = mpsc::channel(INBOX);
        // Each stream in it has a place among the unread.
        let (streams, inbox_streams) = mpsc::channel(UNREAD);
        let (broadcasts, inbox_broadcasts) = mpsc::channel(INBOX_NEWS);
        let (events, inbox_events) = mpsc::channel(INBOX_NEWS);
        let core = Core {
            membership,
            routes: Routes::default(),
            replays: ReplayGuard::default(),
            own_broadcasts: Bucket::new(Duration::ZERO, UNITS_PER_SECOND / 2, UNITS_AT_ONCE / 4),
            links: HashMap::new(),
        };
        let node = Self {
            identity,
            endpoint,
            tls,
            reach,
            requests,
            streams,
            unread: Places::new(UNREAD),
            relayed: Places::new(RELAYED),
            stop: CancellationToken::new(),
            network: watch::Sender::new(()),
            tasks: TaskTracker::new(),
            writers: TaskTracker::new(),
            broadcasts,
            events,
            core: Mutex::new(core),
            connections: Mutex::new(Connections::default()),
            next_link: AtomicU64::new(1),
            started: Instant::now(),
        };
        let inbox = Inbox {
            requests: inbox_requests,
            streams: inbox_streams,
            broadcasts: inbox_broadcasts,
            events: inbox_events,
        };
        (Arc::new(node), inbox)
    }

    /// Returns this node's uptime, the time of all cores.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Gives the cores an input and carries out what they answer.
    pub(super) fn with_core<T>(
        self: &Arc<Self>,
        input: impl FnOnce(&mut Core, Duration) -> T,
    ) -> T {
        let now = self.now();
        let mut core = lock(&self.core);
        let result = input(&mut core, now);
        while let Some(event) = core.membership.poll_event() {
            self.carry_out(&mut core, now, event);
        }
        result
    }

    /// Registers a link and returns what its writing task receives.
    pub(super) fn open_link(&self) -> (LinkId, mpsc::Receiver<ToLink>) {
        let id = LinkId(self.next_link.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = mpsc::channel(LINK_QUEUE);
        lock(&self.core).links.insert(id, sender);
        (id, receiver)
    }

    /// Forgets a link whose tasks end.
    pub(super) fn close_link(self: &Arc<Self>, id: LinkId, end: LinkEnd) {
        self.with_core(|core, now| {
            core.links.remove(&id);
            core.membership.handle_link_down(now, id, end);
        });
    }

    /// Ticks the cores until the node stops.
    pub(super) async fn run_clock(self: Arc<Self>) {
        loop {
            let due = self.with_core(|core, now| {
                core.membership.handle_timeout(now);
                core.membership.poll_timeout()
            });
            let wait = due.saturating_sub(self.now()).max(Duration::from_millis(1));
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Returns an open connection with a node: the newest.
    pub(super) fn connection(&self, node: NodeId) -> Option<Connection> {
        let connections = lock(&self.connections);
        connections.open.get(&node)?.iter().rev().find(|one| one.close_reason().is_none()).cloned()
    }

    /// Remembers a connection; too old ones with the same node are closed.
    pub(super) fn keep_connection(&self, node: NodeId, connection: Connection) {
        let mut connections = lock(&self.connections);
        connections.forget_closed(node);
        let Connections { open, past } = &mut *connections;
        let with_peer = open.entry(node).or_default();
        with_peer.push(connection);
        if with_peer.len() > PER_PEER {
            let surplus = with_peer.remove(0);
            surplus.close(CLOSE_SURPLUS, b"too many connections with one node");
            past.add(&surplus);
        }
    }

    /// Forgets closed connections with a node.
    pub(super) fn drop_connections(&self, node: NodeId) {
        lock(&self.connections).forget_closed(node);
    }

    /// Returns what passed on all connections, and the round trips of those that are open.
    pub(super) fn traffic(&self) -> (Traffic, BTreeMap<NodeId, Duration>) {
        let connections = lock(&self.connections);
        let mut traffic = connections.past;
        let mut round_trips = BTreeMap::new();
        for (node, with_peer) in &connections.open {
            with_peer.iter().for_each(|one| traffic.add(one));
            let newest = with_peer.iter().rev().find(|one| one.close_reason().is_none());
            round_trips.extend(newest.map(|one| (*node, one.rtt())));
        }
        (traffic, round_trips)
    }

    /// Stops everything.
    pub(super) fn stop(&self, reason: &[u8]) {
        self.stop.cancel();
        self.endpoint.close(CLOSE_LEAVING, reason);
    }

    fn carry_out(self: &Arc<Self>, core: &mut Core, now: Duration, event: Event) {
        match event {
            Event::Transmit(id, bytes) => {
                let Some(sender) = core.links.get(&id) else { return };
                if sender.try_send(ToLink::Write(bytes)).is_err() {
                    tracing::debug!(link = id.0, "neighbour is too slow; link closed");
                    core.links.remove(&id);
                    core.membership.handle_link_down(now, id, LinkEnd::Lost);
                }
            }
            Event::Dial(contact) => {
                let node = self.clone();
                self.tasks.spawn(async move { link::dial(node, contact).await });
            }
            Event::Close(id, reason) => {
                tracing::debug!(link = id.0, reason, "link closed");
                if let Some(sender) = core.links.remove(&id) {
                    // A full queue closes as well: the sender is dropped.
                    let _ = sender.try_send(ToLink::Close);
                }
            }
            Event::Joined(node) => self.tell(MemberEvent::Joined(node)),
            Event::Left(node) => self.tell(MemberEvent::Left(node)),
            Event::Died(node) => self.tell(MemberEvent::Died(node)),
            Event::Payload(origin, payload) => {
                if self.broadcasts.try_send(Broadcast { origin, payload }).is_err() {
                    tracing::debug!(origin = %origin.short(), "broadcast dropped: nobody takes them");
                }
            }
        }
    }

    fn tell(&self, event: MemberEvent) {
        tracing::debug!(?event, "member");
        if self.events.try_send(event).is_err() {
            tracing::debug!(?event, "member event dropped: nobody takes them");
        }
    }
}

/// Takes a lock. The data behind it stays sound when a holder panics: inputs are applied whole or
/// refused.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Binds the socket.
pub(super) fn bind(tls: &Tls, address: SocketAddr) -> Result<quinn::Endpoint, OverlayError> {
    let bind = |source| OverlayError::HostBind { address, source };
    let socket = std::net::UdpSocket::bind(address).map_err(bind)?;
    quinn::Endpoint::new(
        quinn::EndpointConfig::default(),
        Some(tls.server()?),
        socket,
        Arc::new(quinn::TokioRuntime),
    )
    .map_err(bind)
}
