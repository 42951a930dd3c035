//! The client's state machine: RFC 8415 §18.2.
//!
//! ```text
//! Soliciting -> Requesting -> Bound -> Renewing -> Rebinding -> Soliciting
//!      ^------------------------ NotOnLink, expiry ------------'
//! Confirming: the cable came back; Informing: no addresses are wanted.
//! ```
//!
//! A server that delegates no prefix may have configuration all the same: where only a prefix is wanted, that
//! is asked for then.
//!
//! It probes for no duplicate (the kernel does), and sends neither Decline nor Release.

use std::{
    net::Ipv6Addr,
    time::{Duration, Instant},
};

pub use super::lease::{DelegatedPrefix, Lease, LeasedAddress};
use super::{
    lease::{configuration, granted},
    message::{Association, Kind, Message, Options, Status, option},
};
use crate::net::HardwareAddress;

/// First and longest pause between messages of a kind, RFC 8415 §7.6.
const SOLICIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));
const REQUEST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
const RENEW: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));
const CONFIRM: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(4));
/// Pause before the search starts again when a server took its offer back, doubling (RFC 8415 §14.1).
const REFUSAL_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(64));
/// `REQ_MAX_RC`, and what fits into `CNF_MAX_RD`.
const MAX_REQUESTS: u32 = 10;
const MAX_CONFIRMS: u32 = 4;
/// `IRT_DEFAULT` and `IRT_MINIMUM`.
const REFRESH: Duration = Duration::from_secs(86_400);
const LEAST_REFRESH: Duration = Duration::from_secs(600);

/// Solicitations for a prefix alone, and questions for configuration, until the other is tried: 1 + 2 + 4 s.
const MAX_TRIES: u32 = 3;
/// `SOL_MAX_RT`: so often a prefix is asked for where there was none.
const ASK_AGAIN: Duration = Duration::from_secs(3600);

/// What is asked for, besides configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// An address (IA_NA).
    pub address: bool,
    /// A prefix for others' addresses (IA_PD, RFC 8415 §6.3).
    pub prefix: bool,
}

impl Wanted {
    /// An address.
    pub const ADDRESS: Self = Self { address: true, prefix: false };
    /// Nothing else.
    pub const CONFIGURATION: Self = Self { address: false, prefix: false };
    /// A prefix.
    pub const PREFIX: Self = Self { address: false, prefix: true };
}

/// A DHCPv6 client on one interface.
#[derive(Debug)]
pub struct Client {
    wanted: Wanted,
    /// DUID-LL (RFC 8415 §11.4): type 3, hardware type 1, address.
    duid: Vec<u8>,
    association: u32,
    random: u64,
    state: State,
    xid: [u8; 3],
    started: Instant,
    attempts: u32,
    pause: Duration,
    deadline: Option<Instant>,
    transmit: Option<Vec<u8>>,
    event: Option<Event>,
    /// Whether configuration is asked for before the next prefix.
    aside: Aside,
    /// Requests that were refused since the last lease, and who refused the last one.
    refusals: u32,
    refused: Option<Vec<u8>>,
}

/// Where a prefix alone is wanted: whether configuration is asked for instead for once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Aside {
    /// When nobody answers.
    Untried,
    /// A server has no prefix.
    Due,
    Done,
}

#[derive(Debug, Clone)]
enum State {
    /// Asks for offers; the best so far.
    Soliciting(Option<Offer>),
    /// Has accepted an offer.
    Requesting(Offer),
    Bound(Lease),
    Renewing(Lease),
    Rebinding(Lease),
    /// Asks whether the address fits the link.
    Confirming(Lease),
    /// Asks for configuration.
    Informing,
    /// Has it.
    Informed,
}

/// How good an offer is; what comes first counts most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// Its server did not take the last one back.
    is_trusted: bool,
    /// All that is wanted is in it.
    is_whole: bool,
    /// How much its server wants to be chosen.
    preference: u8,
}

impl Rank {
    const BEST: Self = Self { is_trusted: true, is_whole: true, preference: u8::MAX };
}

#[derive(Debug, Clone)]
struct Offer {
    rank: Rank,
    server: Vec<u8>,
    addresses: Vec<(Ipv6Addr, u8)>,
    prefixes: Vec<(Ipv6Addr, u8)>,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// There is a lease: new, renewed or changed.
    Leased(Lease),
    /// The addresses may no longer be used.
    Lost,
}

impl Client {
    /// Returns a client that begins at once. `seed` should differ between clients.
    pub fn new(hardware: HardwareAddress, wanted: Wanted, seed: u64, now: Instant) -> Self {
        let [_, _, a, b, c, d] = hardware.0;
        let mut client = Self {
            wanted,
            duid: [&[0, 3, 0, 1], &hardware.0[..]].concat(),
            association: u32::from_be_bytes([a, b, c, d]),
            random: seed | 1,
            state: State::Informing,
            xid: [0; 3],
            started: now,
            attempts: 0,
            pause: Duration::ZERO,
            deadline: None,
            transmit: None,
            event: None,
            aside: Aside::Untried,
            refusals: 0,
            refused: None,
        };
        client.begin(now);
        client
    }

    /// Returns what it asks for.
    pub fn wanted(&self) -> Wanted {
        self.wanted
    }

    /// The cable came back, perhaps to another network.
    pub fn handle_carrier(&mut self, now: Instant) {
        match self.state.clone() {
            // RFC 8415 §18.2.12: servers confirm addresses only.
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease)
                if !lease.prefixes.is_empty() =>
            {
                self.go(now, State::Rebinding(lease));
            }
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => {
                self.go(now, State::Confirming(lease));
            }
            State::Confirming(_) => {}
            State::Soliciting(_) | State::Requesting(_) | State::Informing | State::Informed => {
                self.begin(now);
            }
        }
    }

    /// Takes a message from the wire. What is no answer to this client is ignored.
    pub fn handle_message(&mut self, now: Instant, bytes: &[u8]) {
        let Some(message) = Message::parse(bytes) else { return };
        let ours = message.xid == self.xid
            && message.options.get(option::CLIENT) == Some(&self.duid)
            && message.options.get(option::SERVER).is_some_and(|server| !server.is_empty());
        if !ours {
            return;
        }
        match message.kind {
            Kind::Advertise => self.handle_advertise(now, &message.options),
            Kind::Reply => self.handle_reply(now, &message.options),
            Kind::Solicit
            | Kind::Request
            | Kind::Confirm
            | Kind::Renew
            | Kind::Rebind
            | Kind::InformationRequest => {}
        }
    }

    /// To be called when [`Client::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        let passed = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        match self.state.clone() {
            State::Soliciting(Some(offer)) => self.go(now, State::Requesting(offer)),
            State::Requesting(_) if self.attempts >= MAX_REQUESTS => self.begin(now),
            State::Bound(lease) => self.go(now, State::Renewing(lease)),
            State::Renewing(lease) if passed(lease.rebind) => self.go(now, State::Rebinding(lease)),
            State::Rebinding(lease) if passed(lease.expires) => self.lose(now),
            State::Confirming(lease) if passed(lease.expires) => self.lose(now),
            State::Confirming(lease) if self.attempts >= MAX_CONFIRMS => self.bind(now, lease),
            State::Informed => self.begin(now),
            State::Soliciting(None) if self.turns_aside() => {
                self.aside = Aside::Done;
                self.go(now, State::Informing);
            }
            State::Informing if self.wanted.prefix && self.attempts >= MAX_TRIES => {
                self.begin(now);
            }
            State::Soliciting(None)
            | State::Requesting(_)
            | State::Renewing(_)
            | State::Rebinding(_)
            | State::Confirming(_)
            | State::Informing => self.send(now),
        }
    }

    /// Returns the message to send to [`super::SERVERS`], if any.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.transmit.take()
    }

    /// Returns what happened, if anything.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.event.take()
    }

    /// Returns when to call [`Client::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    fn begin(&mut self, now: Instant) {
        self.go(
            now,
            match self.wanted {
                Wanted::CONFIGURATION => State::Informing,
                Wanted { .. } => State::Soliciting(None),
            },
        );
    }

    fn turns_aside(&self) -> bool {
        !self.wanted.address
            && match self.aside {
                Aside::Untried => self.attempts >= MAX_TRIES,
                Aside::Due => true,
                Aside::Done => false,
            }
    }

    /// A server does not grant what was asked for: others are tried, and the same one later.
    fn refuse(&mut self, now: Instant, server: Vec<u8>) {
        let (first, last) = REFUSAL_PAUSE;
        let pause = first.saturating_mul(1 << self.refusals.min(6)).min(last);
        self.refusals = self.refusals.saturating_add(1);
        self.refused = Some(server);
        self.lose(now);
        // Nothing is sent yet.
        self.transmit = None;
        (self.attempts, self.pause) = (0, Duration::ZERO);
        self.deadline = Some(now + pause);
    }

    fn lose(&mut self, now: Instant) {
        self.event = Some(Event::Lost);
        self.begin(now);
    }

    fn handle_advertise(&mut self, now: Instant, options: &Options) {
        let State::Soliciting(best) = &self.state else { return };
        let plain = |kind: u16, is_wanted: bool| {
            let found = options.association(kind, self.association).filter(|_| is_wanted);
            let usable = found.filter(|found| found.status == Status::Success);
            let granted = usable.map(|usable| usable.granted).unwrap_or_default();
            granted.iter().map(|one| (one.address, one.length)).collect::<Vec<_>>()
        };
        let Wanted { address, prefix } = self.wanted;
        let addresses = plain(option::ASSOCIATION, address);
        let prefixes = plain(option::DELEGATION, prefix);
        if options.status() != Status::Success || addresses.is_empty() && prefixes.is_empty() {
            self.aside = Aside::Due;
            return;
        }
        let is_whole = addresses.is_empty() != address && prefixes.is_empty() != prefix;
        let preference = options.get(option::PREFERENCE).and_then(|value| value.first().copied());
        let server = options.get(option::SERVER).unwrap_or_default().to_vec();
        let is_trusted = self.refused.as_ref() != Some(&server);
        let rank = Rank { is_trusted, is_whole, preference: preference.unwrap_or(0) };
        let offer = Offer { rank, server, addresses, prefixes };
        if best.as_ref().is_some_and(|best| best.rank >= offer.rank) {
            return;
        }
        // The first answers are waited for, unless one is the best that can be or it is late.
        if offer.rank == Rank::BEST || self.attempts > 1 {
            return self.go(now, State::Requesting(offer));
        }
        self.state = State::Soliciting(Some(offer));
    }

    fn handle_reply(&mut self, now: Instant, options: &Options) {
        let server = options.get(option::SERVER).unwrap_or_default();
        match self.state.clone() {
            State::Soliciting(_) if options.get(option::RAPID_COMMIT).is_some() => {
                self.handle_grant(now, options, None);
            }
            State::Requesting(offer) if offer.server == server => {
                self.handle_grant(now, options, None);
            }
            State::Renewing(lease) if lease.server == server => {
                self.handle_grant(now, options, Some(&lease));
            }
            State::Rebinding(lease) => self.handle_grant(now, options, Some(&lease)),
            State::Confirming(lease) => match options.status() {
                Status::Success => self.bind(now, lease),
                Status::NotOnLink => self.lose(now),
                Status::NoneLeft | Status::NoBinding | Status::Failure => {}
            },
            State::Informing => {
                let refresh = options.u32(option::REFRESH).map(u64::from).map(Duration::from_secs);
                let refresh = refresh.unwrap_or(REFRESH).max(LEAST_REFRESH);
                let refresh = if self.wanted.prefix { refresh.min(ASK_AGAIN) } else { refresh };
                let mut lease = configuration(options);
                lease.renew = Some(now + refresh);
                self.deadline = lease.renew;
                self.state = State::Informed;
                self.event = Some(Event::Leased(lease));
            }
            State::Soliciting(_)
            | State::Requesting(_)
            | State::Renewing(_)
            | State::Bound(_)
            | State::Informed => {}
        }
    }

    fn handle_grant(&mut self, now: Instant, options: &Options, before: Option<&Lease>) {
        let of = |kind: u16, is_wanted: bool| {
            options.association(kind, self.association).filter(|_| is_wanted)
        };
        let addresses = of(option::ASSOCIATION, self.wanted.address);
        let prefixes = of(option::DELEGATION, self.wanted.prefix);
        let (whole, server) = (options.status(), options.get(option::SERVER).unwrap_or_default());
        let statuses = [&addresses, &prefixes].map(|one| one.as_ref().map(|one| one.status));
        let is_said = |status: Status| whole == status || statuses.contains(&Some(status));
        let asks = matches!(self.state, State::Requesting(_));
        // Some servers refuse in the message itself, without an association.
        let is_refused = asks && whole != Status::Success;
        if whole == Status::Failure || statuses == [None, None] && !is_refused {
            return;
        }
        if is_said(Status::NotOnLink) {
            return self.refuse(now, server.to_vec());
        }
        // What there is not was not forgotten.
        let had = [
            before.is_none_or(|lease| !lease.addresses.is_empty()),
            before.is_none_or(|lease| !lease.prefixes.is_empty()),
        ];
        let forgot =
            statuses.iter().zip(had).any(|(status, had)| had && *status == Some(Status::NoBinding));
        // The server forgot; it is asked as if it were new.
        if whole == Status::NoBinding || forgot {
            let Some(lease) = before else { return self.refuse(now, server.to_vec()) };
            let server = server.to_vec();
            let (addresses, prefixes) = (lease.plain(), lease.plain_prefixes());
            let offer = Offer { rank: Rank::BEST, server, addresses, prefixes };
            return self.go(now, State::Requesting(offer));
        }
        let given: Vec<Association> = [addresses, prefixes]
            .into_iter()
            .flatten()
            .filter(|one| one.status == Status::Success)
            .collect();
        if given.is_empty() {
            // RFC 8415 §18.2.10.1: what is renewed stays until it ends.
            if asks && is_said(Status::NoneLeft) {
                self.aside = Aside::Due;
                self.refuse(now, server.to_vec());
            }
            return;
        }
        let Some(lease) = granted(now, options, &given) else {
            if before.is_some() {
                self.lose(now);
            }
            return;
        };
        (self.refusals, self.refused) = (0, None);
        self.event = Some(Event::Leased(lease.clone()));
        self.bind(now, lease);
    }

    fn bind(&mut self, now: Instant, lease: Lease) {
        self.deadline = lease.renew.map(|renew| renew.max(now));
        self.state = State::Bound(lease);
        self.transmit = None;
    }

    /// Begins an exchange.
    fn go(&mut self, now: Instant, state: State) {
        self.state = state;
        self.started = now;
        self.attempts = 0;
        self.pause = Duration::ZERO;
        let [a, b, c, ..] = self.random().to_be_bytes();
        self.xid = [a, b, c];
        self.send(now);
    }

    fn send(&mut self, now: Instant) {
        let (kind, (first, last), ends) = match &self.state {
            State::Soliciting(_) => (Kind::Solicit, SOLICIT, None),
            State::Requesting(_) => (Kind::Request, REQUEST, None),
            State::Renewing(lease) => (Kind::Renew, RENEW, lease.rebind),
            State::Rebinding(lease) => (Kind::Rebind, RENEW, lease.expires),
            State::Confirming(lease) => (Kind::Confirm, CONFIRM, lease.expires),
            State::Informing => (Kind::InformationRequest, SOLICIT, None),
            State::Bound(_) | State::Informed => return,
        };
        let message = Message { kind, xid: self.xid, options: self.options(now) };
        self.transmit = Some(message.to_bytes());
        self.attempts += 1;
        // RFC 8415 §15: twice the last pause, give or take a tenth.
        let pause = (self.pause * 2).clamp(first, last);
        let tenth = u64::try_from(pause.as_millis() / 10).unwrap_or(u64::MAX).max(1);
        let jitter = Duration::from_millis(self.random() % (2 * tenth));
        self.pause = pause;
        let next = now + pause + jitter - Duration::from_millis(tenth);
        let next = if kind == Kind::Solicit { next.max(now + pause) } else { next };
        self.deadline = Some(ends.map_or(next, |ends| next.min(ends)));
    }

    fn options(&self, now: Instant) -> Options {
        let mut options = Options::default();
        options.push(option::CLIENT, self.duid.clone());
        let elapsed = now.saturating_duration_since(self.started).as_millis() / 10;
        let elapsed = u16::try_from(elapsed).unwrap_or(u16::MAX);
        options.push(option::ELAPSED, elapsed.to_be_bytes());
        let (server, addresses, prefixes): (Option<&[u8]>, _, _) = match &self.state {
            State::Requesting(offer) => {
                (Some(&offer.server), offer.addresses.clone(), offer.prefixes.clone())
            }
            State::Renewing(lease) => (Some(&lease.server), lease.plain(), lease.plain_prefixes()),
            State::Bound(lease) | State::Rebinding(lease) | State::Confirming(lease) => {
                (None, lease.plain(), lease.plain_prefixes())
            }
            State::Soliciting(_) | State::Informing | State::Informed => {
                (None, Vec::new(), Vec::new())
            }
        };
        if let Some(server) = server {
            options.push(option::SERVER, server);
        }
        let asks = !matches!(self.state, State::Informing);
        if asks && self.wanted.address {
            options.push(option::ASSOCIATION, Association::request(self.association, &addresses));
        }
        // One that was not granted may be by now (RFC 8415 §18.2.4).
        if asks && self.wanted.prefix && !matches!(self.state, State::Confirming(_)) {
            options.push(option::DELEGATION, Association::request(self.association, &prefixes));
        }
        if matches!(self.state, State::Soliciting(_)) {
            options.push(option::RAPID_COMMIT, []);
        }
        let asked = [
            option::NAME_SERVERS,
            option::SNTP_SERVERS,
            option::NTP_SERVER,
            option::REFRESH,
            option::DOCUMENT,
        ];
        if !matches!(self.state, State::Confirming(_)) {
            let codes: Vec<u8> = asked.iter().flat_map(|code| code.to_be_bytes()).collect();
            options.push(option::REQUESTED, codes);
        }
        options
    }

    /// Xorshift; transaction numbers and jitter need no more.
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
