//! The client's state machine: RFC 8415 §18.2.
//!
//! ```text
//! Soliciting -> Requesting -> Bound -> Renewing -> Rebinding -> Soliciting
//!      ^------------------------ NotOnLink, expiry ------------'
//! Confirming: the cable came back; Informing: no addresses are wanted.
//! ```
//!
//! It probes for no duplicate (the kernel does), and sends neither Decline nor Release.

use std::{
    net::Ipv6Addr,
    time::{Duration, Instant},
};

use super::message::{Association, Kind, Message, Options, Status, option};
use crate::net::HardwareAddress;

/// First and longest pause between messages of a kind, RFC 8415 §7.6.
const SOLICIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));
const REQUEST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
const RENEW: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));
const CONFIRM: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(4));
/// `REQ_MAX_RC`, and what fits into `CNF_MAX_RD`.
const MAX_REQUESTS: u32 = 10;
const MAX_CONFIRMS: u32 = 4;
/// `IRT_DEFAULT` and `IRT_MINIMUM`.
const REFRESH: Duration = Duration::from_secs(86_400);
const LEAST_REFRESH: Duration = Duration::from_secs(600);
/// Times of all ones do not end, RFC 8415 §7.7.
const INFINITE: u32 = u32::MAX;
/// Lists longer than this are cut.
const MAX_LIST: usize = 8;
/// Least time to the first renewal; shorter ones would flood a server.
const LEAST_RENEW: Duration = Duration::from_secs(2);

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// An address, and the configuration.
    Address,
    /// The configuration only.
    Configuration,
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

#[derive(Debug, Clone)]
struct Offer {
    preference: u8,
    server: Vec<u8>,
    addresses: Vec<Ipv6Addr>,
}

/// What a server granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The addresses; none when only configuration was asked for.
    pub addresses: Vec<LeasedAddress>,
    /// Name servers.
    pub dns: Vec<Ipv6Addr>,
    /// Time servers.
    pub ntp: Vec<Ipv6Addr>,
    /// Where the node's configuration is, as it came: a URL, in option 65224.
    pub document: Option<Vec<u8>>,
    /// DUID of the server.
    pub server: Vec<u8>,
    /// When to ask the server again; never for addresses without end, as the next two.
    pub renew: Option<Instant>,
    /// When to ask any server.
    pub rebind: Option<Instant>,
    /// When the last address may no longer be used.
    pub expires: Option<Instant>,
}

/// An address with its times; `None` is for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedAddress {
    /// The address.
    pub address: Ipv6Addr,
    /// No new connection uses it afterwards.
    pub preferred_until: Option<Instant>,
    /// It may not be used afterwards.
    pub valid_until: Option<Instant>,
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
                Wanted::Address => State::Soliciting(None),
                Wanted::Configuration => State::Informing,
            },
        );
    }

    fn lose(&mut self, now: Instant) {
        self.event = Some(Event::Lost);
        self.begin(now);
    }

    fn handle_advertise(&mut self, now: Instant, options: &Options) {
        let State::Soliciting(best) = &self.state else { return };
        let Some(association) = options.association(self.association) else { return };
        let usable = association.status == Status::Success && options.status() == Status::Success;
        if !usable || association.addresses.is_empty() {
            return;
        }
        let preference = options.get(option::PREFERENCE).and_then(|value| value.first().copied());
        let offer = Offer {
            preference: preference.unwrap_or(0),
            server: options.get(option::SERVER).unwrap_or_default().to_vec(),
            addresses: association.addresses.iter().map(|granted| granted.address).collect(),
        };
        if best.as_ref().is_some_and(|best| best.preference >= offer.preference) {
            return;
        }
        // The first answers are waited for, unless one is the best that can be or it is late.
        if offer.preference == u8::MAX || self.attempts > 1 {
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
                Status::NoBinding | Status::Failure => {}
            },
            State::Informing => {
                let refresh = options.u32(option::REFRESH).map(u64::from).map(Duration::from_secs);
                let refresh = refresh.unwrap_or(REFRESH).max(LEAST_REFRESH);
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
        let Some(association) = options.association(self.association) else { return };
        match (options.status(), association.status) {
            (Status::NotOnLink, _) | (_, Status::NotOnLink) => return self.lose(now),
            // The server forgot; it is asked as if it were new.
            (_, Status::NoBinding) => {
                let Some(lease) = before else { return self.begin(now) };
                let addresses = lease.addresses.iter().map(|leased| leased.address).collect();
                let server = options.get(option::SERVER).unwrap_or_default().to_vec();
                return self.go(now, State::Requesting(Offer { preference: 0, server, addresses }));
            }
            (Status::Failure, _) | (_, Status::Failure) => return,
            (Status::Success | Status::NoBinding, Status::Success) => {}
        }
        let Some(lease) = granted(now, options, &association) else {
            if before.is_some() {
                self.lose(now);
            }
            return;
        };
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
        let (server, addresses): (Option<&[u8]>, Vec<Ipv6Addr>) = match &self.state {
            State::Requesting(offer) => (Some(&offer.server), offer.addresses.clone()),
            State::Renewing(lease) => (Some(&lease.server), lease.plain()),
            State::Bound(lease) | State::Rebinding(lease) | State::Confirming(lease) => {
                (None, lease.plain())
            }
            State::Soliciting(_) | State::Informing | State::Informed => (None, Vec::new()),
        };
        if let Some(server) = server {
            options.push(option::SERVER, server);
        }
        if !matches!(self.state, State::Informing) {
            options.push(option::ASSOCIATION, Association::request(self.association, &addresses));
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

impl Lease {
    fn plain(&self) -> Vec<Ipv6Addr> {
        self.addresses.iter().map(|leased| leased.address).collect()
    }
}

fn configuration(options: &Options) -> Lease {
    let useful = |mut list: Vec<Ipv6Addr>| {
        // A link-local server would need its interface named.
        list.retain(|address| !address.is_unspecified() && !address.is_multicast());
        list.retain(|address| !address.is_unicast_link_local());
        list.truncate(MAX_LIST);
        list
    };
    let mut ntp = options.ntp_servers();
    ntp.extend(options.addresses(option::SNTP_SERVERS));
    Lease {
        addresses: Vec::new(),
        dns: useful(options.addresses(option::NAME_SERVERS)),
        ntp: useful(ntp),
        document: options.get(option::DOCUMENT).filter(|url| !url.is_empty()).map(<[u8]>::to_vec),
        server: options.get(option::SERVER).unwrap_or_default().to_vec(),
        renew: None,
        rebind: None,
        expires: None,
    }
}

/// What was granted; `None` when nothing that can be used was.
fn granted(now: Instant, options: &Options, association: &Association) -> Option<Lease> {
    let after = |seconds: u32| match seconds {
        INFINITE => None,
        seconds => Some(now + Duration::from_secs(u64::from(seconds))),
    };
    let usable = association.addresses.iter().filter(|granted| {
        let address = granted.address;
        let plain = !address.is_unspecified() && !address.is_multicast() && !address.is_loopback();
        granted.valid_s > 0 && plain
    });
    let usable: Vec<_> = usable.take(MAX_LIST).collect();
    let least_preferred = usable.iter().map(|granted| granted.preferred_s).min()?;
    let most_valid = usable.iter().map(|granted| granted.valid_s).max()?;
    // RFC 8415 §14.2: without times of the server's, half and four fifths of the preferred time.
    let part = |said: u32, of: u32, in_all: u32| match (said, least_preferred) {
        (0, INFINITE) => INFINITE,
        (0, preferred) => preferred / in_all * of,
        (said, _) => said,
    };
    let renew = after(part(association.renew_s, 1, 2)).map(|at| at.max(now + LEAST_RENEW));
    let rebind = after(part(association.rebind_s, 4, 5)).max(renew);
    let mut lease = configuration(options);
    lease.addresses = usable
        .iter()
        .map(|granted| LeasedAddress {
            address: granted.address,
            preferred_until: after(granted.preferred_s),
            valid_until: after(granted.valid_s),
        })
        .collect();
    lease.expires = after(most_valid);
    // A renewal that would come after the end comes before it.
    let halfway = lease.expires.map(|_| now + Duration::from_secs(u64::from(most_valid) / 2));
    lease.renew = match (renew, halfway) {
        (Some(renew), Some(halfway)) => Some(renew.min(halfway)),
        (renew, halfway) => renew.or(halfway),
    };
    lease.rebind = match (rebind, lease.expires) {
        (Some(rebind), Some(expires)) => Some(rebind.min(expires)),
        (rebind, expires) => rebind.or(expires),
    };
    Some(lease)
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
