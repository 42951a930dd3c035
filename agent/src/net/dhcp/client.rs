//! The client's state machine: RFC 2131 §4.4, figure 5.
//!
//! ```text
//! Init -> Selecting -> Requesting -> Bound -> Renewing -> Rebinding -> Init
//!             ^------------ NAK, expiry ------------^
//! Rebooting: an address known from before is asked for again.
//! ```
//!
//! Where nobody confirms a lease that still runs, it stays in use while the client searches, and until
//! another takes its place: servers that do not know it may say nothing (RFC 2131 §4.3.2).
//!
//! An address that another host turns out to have is declined ([`Client::handle_conflict`]); who looks for
//! such hosts is [`crate::net::conflict`].

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

pub use super::lease::{LEAST_MTU, Lease};
use super::{
    MAX_MESSAGE,
    lease::{granted, is_usable},
    message::{Direction, Kind, Message, option},
};
use crate::net::HardwareAddress;

/// Pause before the first and after the last retransmission, RFC 2131 §4.1: 4 s doubling to 64 s.
const FIRST_RETRY: Duration = Duration::from_secs(4);
const LAST_RETRY: Duration = Duration::from_secs(64);
/// Requests for one offer before the search starts again: 4 + 8 + 16 s.
const MAX_REQUESTS: u32 = 3;
/// Requests for an address known from before until the search starts, unconfirmed: 4 + 8 s.
const MAX_REBOOTS: u32 = 2;
/// Searches beside a lease that nobody confirmed, until it is used unconfirmed: 4 + 8 + 16 s.
const MAX_SEARCHES: u32 = 3;
/// Pause before the search starts again after a refusal, doubling to [`LAST_RETRY`].
const REFUSAL_PAUSE: Duration = Duration::from_secs(1);
/// Pause after an address was declined, RFC 2131 §3.1.5: at least ten seconds.
const DECLINE_PAUSE: Duration = Duration::from_secs(10);
/// Least pause between two renewals. RFC 2131 §4.4.5 says 60 s; leases of test networks are shorter.
const LEAST_RENEW_PAUSE: Duration = Duration::from_secs(5);
/// Option 57, the largest message that is read.
const MAX_MESSAGE_OPTION: u16 = 1472;
const _: () = assert!(MAX_MESSAGE_OPTION as usize == MAX_MESSAGE);
/// Most pause between two renewals, so that a lost message does not cost half of a long lease.
const MOST_RENEW_PAUSE: Duration = Duration::from_secs(600);

/// What the client asks for.
const PARAMETERS: [u8; 11] = [
    option::SUBNET_MASK,
    option::ROUTER,
    option::NAME_SERVER,
    option::MTU,
    option::TIME_SERVER,
    option::LEASE_TIME,
    option::RENEWAL_TIME,
    option::REBINDING_TIME,
    option::CLASSLESS_ROUTES,
    option::STATIC_ROUTES,
    option::DOCUMENT,
];
/// What the client calls itself, so that servers can tell nodes from their neighbours.
const VENDOR_CLASS: &[u8] = b"holdfast";
/// Hardware type in front of the client identifier.
const ETHERNET: u8 = 1;

/// A DHCPv4 client on one interface.
#[derive(Debug)]
pub struct Client {
    hardware: HardwareAddress,
    random: u64,
    state: State,
    xid: u32,
    started: Instant,
    attempts: u32,
    refusals: u32,
    deadline: Option<Instant>,
    transmit: Option<Transmit>,
    event: Option<Event>,
}

#[derive(Debug)]
enum State {
    /// Waits before it searches.
    Init,
    /// Asks for offers.
    Selecting {
        kept: Option<Lease>,
    },
    /// Has accepted an offer and waits for its confirmation.
    Requesting {
        server: Ipv4Addr,
        address: Ipv4Addr,
        kept: Option<Lease>,
    },
    /// Asks for an address from before.
    Rebooting {
        address: Ipv4Addr,
        lease: Option<Lease>,
    },
    Bound(Lease),
    /// Asks the server that gave the lease.
    Renewing(Lease),
    /// Asks any server.
    Rebinding(Lease),
}

/// A message to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transmit {
    /// Where to.
    pub to: Destination,
    /// The DHCP message.
    pub message: Vec<u8>,
}

/// Where a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// From 0.0.0.0 to every station on the link.
    Broadcast,
    /// From the leased address to a server, over the ordinary stack.
    Server {
        /// The leased address.
        from: Ipv4Addr,
        /// The server.
        server: Ipv4Addr,
    },
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// There is a lease: new, renewed, or changed.
    Leased(Lease),
    /// The address may no longer be used.
    Lost(Loss),
}

/// Why a lease was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// It ended and no server renewed it.
    Expired,
    /// A server refused it (DHCPNAK).
    Refused,
    /// Another host has it, and the server was told (DHCPDECLINE).
    Taken,
}

impl Client {
    /// Returns a client that asks for `previous`, or searches when there is no such address.
    ///
    /// `seed` should differ between clients: transaction numbers and jitter come from it.
    pub fn new(
        hardware: HardwareAddress,
        previous: Option<Ipv4Addr>,
        seed: u64,
        now: Instant,
    ) -> Self {
        let mut client = Self {
            hardware,
            random: seed,
            state: State::Init,
            xid: 0,
            started: now,
            attempts: 0,
            refusals: 0,
            deadline: None,
            transmit: None,
            event: None,
        };
        match previous {
            Some(address) => client.reboot(now, address, None),
            None => client.search(now, None),
        }
        client
    }

    /// The cable came back, perhaps to another network: confirms the lease, or searches at once.
    pub fn handle_carrier(&mut self, now: Instant) {
        let lease = match std::mem::replace(&mut self.state, State::Init) {
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => Some(lease),
            State::Rebooting { lease: kept, .. }
            | State::Selecting { kept }
            | State::Requesting { kept, .. } => kept,
            State::Init => None,
        };
        match lease {
            Some(lease) => self.reboot(now, lease.address.address(), Some(lease)),
            None => self.search(now, None),
        }
    }

    /// Another host has this address. When it is that of the lease, it is declined, and another one asked for
    /// after a pause (RFC 2131 §3.1.5 and §4.4.4).
    pub fn handle_conflict(&mut self, now: Instant, address: Ipv4Addr) {
        let lease = match &self.state {
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => Some(lease),
            State::Rebooting { lease: kept, .. }
            | State::Selecting { kept }
            | State::Requesting { kept, .. } => kept.as_ref(),
            State::Init => None,
        };
        let Some(lease) = lease.filter(|lease| lease.address.address() == address) else { return };
        let server = lease.server;
        self.new_exchange(now);
        let message = self.decline(address, server);
        self.transmit = Some(Transmit { to: Destination::Broadcast, message: message.to_bytes() });
        self.event = Some(Event::Lost(Loss::Taken));
        self.state = State::Init;
        self.deadline = Some(now + DECLINE_PAUSE);
    }

    /// Takes a DHCP message from the wire. What is no answer to this client is ignored.
    pub fn handle_message(&mut self, now: Instant, bytes: &[u8]) {
        let Some(reply) = Message::parse(bytes) else { return };
        let ours = reply.direction == Direction::Reply
            && reply.xid == self.xid
            && reply.hardware == self.hardware;
        if !ours {
            return;
        }
        match reply.kind() {
            Some(Kind::Offer) => self.handle_offer(now, &reply),
            Some(Kind::Ack) => self.handle_ack(now, &reply),
            Some(Kind::Nak) => self.handle_nak(now, &reply),
            Some(Kind::Discover | Kind::Request | Kind::Decline | Kind::Release | Kind::Inform)
            | None => {}
        }
    }

    /// To be called when [`Client::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        match std::mem::replace(&mut self.state, State::Init) {
            State::Init => self.search(now, None),
            State::Selecting { kept: Some(lease) }
            | State::Requesting { kept: Some(lease), .. }
                if has_passed(now, lease.expires) =>
            {
                self.lose(now, Loss::Expired);
            }
            State::Selecting { kept: Some(lease) } if self.attempts >= MAX_SEARCHES => {
                self.bind(lease);
            }
            State::Selecting { kept } => {
                self.state = State::Selecting { kept };
                self.send_search(now);
            }
            State::Requesting { kept, .. } if self.attempts >= MAX_REQUESTS => match kept {
                Some(lease) => self.bind(lease),
                None => self.search(now, None),
            },
            State::Requesting { server, address, kept } => {
                self.state = State::Requesting { server, address, kept };
                self.send_request(now);
            }
            State::Rebooting { address, lease } => self.reboot_timeout(now, address, lease),
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => {
                self.lease_timeout(now, lease);
            }
        }
    }

    /// Returns the message to send, if any.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmit.take()
    }

    /// Returns what happened, if anything.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.event.take()
    }

    /// Returns when to call [`Client::handle_timeout`]; `None` while a lease without end is held.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    fn handle_offer(&mut self, now: Instant, offer: &Message) {
        let State::Selecting { kept } = &mut self.state else { return };
        let Some(server) = offer.address(option::SERVER) else { return };
        if !is_usable(offer.yiaddr) {
            return;
        }
        let kept = kept.take();
        self.state = State::Requesting { server, address: offer.yiaddr, kept };
        self.attempts = 0;
        self.send_request(now);
    }

    fn handle_ack(&mut self, now: Instant, ack: &Message) {
        let expected = match &self.state {
            State::Requesting { server, .. } => ack.address(option::SERVER) == Some(*server),
            State::Rebooting { .. } | State::Renewing(_) | State::Rebinding(_) => true,
            State::Init | State::Selecting { .. } | State::Bound(_) => false,
        };
        let Some(lease) = expected.then(|| granted(now, ack)).flatten() else { return };
        self.refusals = 0;
        self.bind(lease.clone());
        self.event = Some(Event::Leased(lease));
    }

    fn handle_nak(&mut self, now: Instant, nak: &Message) {
        let had_address = match &mut self.state {
            State::Requesting { server, kept, .. }
                if nak.address(option::SERVER) == Some(*server) =>
            {
                // It refuses its own offer, which says nothing of the lease.
                if let Some(lease) = kept.take() {
                    return self.bind(lease);
                }
                false
            }
            State::Rebooting { .. } | State::Renewing(_) | State::Rebinding(_) => true,
            State::Requesting { .. } | State::Init | State::Selecting { .. } | State::Bound(_) => {
                return;
            }
        };
        if had_address {
            self.event = Some(Event::Lost(Loss::Refused));
        }
        let pause = REFUSAL_PAUSE.saturating_mul(1 << self.refusals.min(6)).min(LAST_RETRY);
        self.refusals += 1;
        self.state = State::Init;
        self.deadline = Some(now + pause);
    }

    /// Searches; `kept` is the lease that is in use meanwhile.
    fn search(&mut self, now: Instant, kept: Option<Lease>) {
        self.state = State::Selecting { kept };
        self.new_exchange(now);
        self.send_search(now);
    }

    fn reboot(&mut self, now: Instant, address: Ipv4Addr, lease: Option<Lease>) {
        self.state = State::Rebooting { address, lease };
        self.new_exchange(now);
        self.send_request(now);
    }

    fn reboot_timeout(&mut self, now: Instant, address: Ipv4Addr, lease: Option<Lease>) {
        if has_passed(now, lease.as_ref().and_then(|lease| lease.expires)) {
            return self.lose(now, Loss::Expired);
        }
        if self.attempts < MAX_REBOOTS {
            self.state = State::Rebooting { address, lease };
            return self.send_request(now);
        }
        // Nobody answers. RFC 2131 §3.2: a lease that still runs may be used.
        self.search(now, lease);
    }

    fn lease_timeout(&mut self, now: Instant, lease: Lease) {
        if has_passed(now, lease.expires) {
            return self.lose(now, Loss::Expired);
        }
        let (state, next): (fn(Lease) -> State, _) = if has_passed(now, lease.rebind) {
            (State::Rebinding, lease.expires)
        } else {
            (State::Renewing, lease.rebind)
        };
        self.state = state(lease);
        self.new_exchange(now);
        self.send_request(now);
        // RFC 2131 §4.4.5: half of what remains until the next step.
        let remaining = next.map_or(LAST_RETRY, |next| next.saturating_duration_since(now));
        let pause = (remaining / 2).clamp(LEAST_RENEW_PAUSE, MOST_RENEW_PAUSE).min(remaining);
        self.deadline = Some(now + pause);
    }

    fn lose(&mut self, now: Instant, loss: Loss) {
        self.event = Some(Event::Lost(loss));
        self.search(now, None);
    }

    fn bind(&mut self, lease: Lease) {
        self.deadline = lease.renew;
        self.state = State::Bound(lease);
    }

    fn new_exchange(&mut self, now: Instant) {
        self.xid = self.next_random();
        self.started = now;
        self.attempts = 0;
    }

    fn send_search(&mut self, now: Instant) {
        let message = self.compose(now, Kind::Discover);
        self.send(now, Destination::Broadcast, &message);
    }

    fn send_request(&mut self, now: Instant) {
        let mut request = self.compose(now, Kind::Request);
        let mut to = Destination::Broadcast;
        match &self.state {
            State::Requesting { server, address, .. } => {
                request.set(option::SERVER, server.octets());
                request.set(option::REQUESTED_ADDRESS, address.octets());
            }
            State::Rebooting { address, .. } => {
                request.set(option::REQUESTED_ADDRESS, address.octets());
            }
            State::Renewing(lease) => {
                request.ciaddr = lease.address.address();
                to = Destination::Server { from: lease.address.address(), server: lease.server };
            }
            State::Rebinding(lease) => {
                request.ciaddr = lease.address.address();
            }
            State::Init | State::Selecting { .. } | State::Bound(_) => return,
        }
        self.send(now, to, &request);
    }

    fn send(&mut self, now: Instant, to: Destination, message: &Message) {
        self.transmit = Some(Transmit { to, message: message.to_bytes() });
        let pause = FIRST_RETRY.saturating_mul(1 << self.attempts.min(4)).min(LAST_RETRY);
        self.attempts += 1;
        // RFC 2131 §4.1: plus or minus a second.
        let jitter = Duration::from_millis(u64::from(self.next_random() % 2000));
        let retry = now + pause + jitter - Duration::from_secs(1);
        let expires = match &self.state {
            State::Rebooting { lease: kept, .. }
            | State::Selecting { kept }
            | State::Requesting { kept, .. } => kept.as_ref().and_then(|lease| lease.expires),
            State::Init | State::Bound(_) | State::Renewing(_) | State::Rebinding(_) => None,
        };
        self.deadline = Some(expires.map_or(retry, |expires| retry.min(expires)));
    }

    fn compose(&self, now: Instant, kind: Kind) -> Message {
        let mut message = Message::new(Direction::Request, kind, self.hardware);
        let secs = now.saturating_duration_since(self.started).as_secs();
        message.xid = self.xid;
        message.secs = u16::try_from(secs).unwrap_or(u16::MAX);
        message.set(option::CLIENT, [&[ETHERNET], &self.hardware.0[..]].concat());
        message.set(option::VENDOR_CLASS, VENDOR_CLASS);
        message.set(option::PARAMETERS, PARAMETERS);
        message.set(option::MAX_SIZE, MAX_MESSAGE_OPTION.to_be_bytes());
        message
    }

    /// RFC 2131 §4.4.1, table 5: it has no other options, as the client keeps nothing.
    fn decline(&self, address: Ipv4Addr, server: Ipv4Addr) -> Message {
        let mut message = Message::new(Direction::Request, Kind::Decline, self.hardware);
        message.xid = self.xid;
        message.set(option::CLIENT, [&[ETHERNET], &self.hardware.0[..]].concat());
        message.set(option::REQUESTED_ADDRESS, address.octets());
        message.set(option::SERVER, server.octets());
        message
    }

    /// SplitMix64: numbers only need to differ between clients and exchanges.
    fn next_random(&mut self) -> u32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let [a, b, c, d, ..] = (mixed ^ (mixed >> 31)).to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

fn has_passed(now: Instant, at: Option<Instant>) -> bool {
    at.is_some_and(|at| at <= now)
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
