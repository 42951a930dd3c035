//! Whether another host has one of the node's own IPv4 addresses. Pure.
//!
//! ```text
//! asked 0 s -> asked again 1 s -> announced 2 s -> announced again 4 s -> watched
//!   ^----------- RECHECK ----------- another host has it ----------'
//! ```
//!
//! An address is in use from the beginning: nobody waits for the answers, which differs from RFC 5227 §2.1.
//! It is announced only when nobody answered, so that a mistake takes no address from the host whose it is.
//! One that was announced is defended (§2.4 b); where that does not help, an address of a lease is taken for
//! the other host's. One of the configuration is kept (§2.4 c), and it is told who else has it.
//! Source: RFC 5227, RFC 826.

use std::{
    collections::{BTreeMap, VecDeque},
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use super::{HardwareAddress, arp};

/// What is said of a new address, and the pause after it: `PROBE_MIN`, `ANNOUNCE_WAIT` cut to `PROBE_MIN`, as
/// the address is in use meanwhile, and `ANNOUNCE_INTERVAL` (RFC 5227 §1.1).
const STEPS: [(Say, Duration); 4] = [
    (Say::Question, Duration::from_secs(1)),
    (Say::Question, Duration::from_secs(1)),
    (Say::Announcement, Duration::from_secs(2)),
    (Say::Announcement, Duration::ZERO),
];
/// After a conflict it is asked again this soon: within [`DEFEND_INTERVAL`], so that a host that stays is
/// told from one that is gone.
const RECHECK: Duration = Duration::from_secs(5);
/// `DEFEND_INTERVAL`: an address is defended once in this time, and lost when that does not help.
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);
/// More addresses of one interface are not watched.
pub const MAX_ADDRESSES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Say {
    Question,
    Announcement,
}

/// Why an address is the node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// A server gave it, and gives another one when this is another host's.
    Given,
    /// It stays, whoever else has it.
    Kept,
}

/// What an interface claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// In whose name it speaks.
    pub hardware: HardwareAddress,
    /// The node's other interfaces. The kernel may ask through one for the address of another.
    pub own: Vec<HardwareAddress>,
    /// The addresses.
    pub addresses: BTreeMap<Ipv4Addr, Claim>,
}

/// What was found out about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// It belongs to this host. Only of addresses that were given.
    Lost(HardwareAddress),
    /// This host has it, too.
    Shared(HardwareAddress),
    /// Nobody else has it any longer.
    Alone,
}

/// The addresses of one interface.
#[derive(Debug)]
pub struct Guard {
    claims: Claims,
    held: BTreeMap<Ipv4Addr, Held>,
    frames: VecDeque<Vec<u8>>,
    findings: VecDeque<(Ipv4Addr, Finding)>,
}

#[derive(Debug)]
struct Held {
    /// The next of [`STEPS`], and when.
    step: usize,
    next: Option<Instant>,
    /// Whether it was announced: others know it as the node's.
    is_announced: bool,
    defended: Option<Instant>,
    /// Who has it, too.
    other: Option<HardwareAddress>,
}

impl Held {
    fn new(now: Instant) -> Self {
        Self { step: 0, next: Some(now), is_announced: false, defended: None, other: None }
    }
}

impl Guard {
    /// Returns a guard of these addresses.
    pub fn new(claims: Claims, now: Instant) -> Self {
        let nothing = Claims { addresses: BTreeMap::new(), ..claims.clone() };
        let (held, frames, findings) = (BTreeMap::new(), VecDeque::new(), VecDeque::new());
        let mut guard = Self { claims: nothing, held, frames, findings };
        guard.handle_claims(now, claims);
        guard
    }

    /// Takes what the interface claims now. Addresses that it had before are not asked for again, unless it
    /// speaks in another name.
    pub fn handle_claims(&mut self, now: Instant, claims: Claims) {
        if self.claims.hardware != claims.hardware {
            self.held.clear();
        }
        self.held.retain(|address, _| claims.addresses.contains_key(address));
        for address in claims.addresses.keys().take(MAX_ADDRESSES) {
            self.held.entry(*address).or_insert_with(|| Held::new(now));
        }
        self.claims = claims;
        self.handle_timeout(now);
    }

    /// The cable came back, perhaps to another network: everything is asked and announced again.
    pub fn handle_carrier(&mut self, now: Instant) {
        for held in self.held.values_mut() {
            *held = Held { other: held.other, ..Held::new(now) };
        }
        self.handle_timeout(now);
    }

    /// Takes an ARP packet, without its Ethernet header. Others' business is ignored.
    pub fn handle_packet(&mut self, now: Instant, packet: &[u8]) {
        let Some((hardware, address)) = arp::sender(packet) else { return };
        let is_own = hardware == self.claims.hardware || self.claims.own.contains(&hardware);
        let claim = self.claims.addresses.get(&address);
        let (Some(held), Some(claim), false) = (self.held.get_mut(&address), claim, is_own) else {
            return;
        };
        (held.step, held.next) = (0, Some(now + RECHECK));
        let is_rested = held.defended.is_none_or(|at| now >= at + DEFEND_INTERVAL);
        if held.is_announced && is_rested {
            held.defended = Some(now);
            self.frames.push_back(arp::announcement(self.claims.hardware, address));
        } else if *claim == Claim::Given {
            self.findings.push_back((address, Finding::Lost(hardware)));
        }
        if *claim == Claim::Kept && held.other.replace(hardware) != Some(hardware) {
            self.findings.push_back((address, Finding::Shared(hardware)));
        }
    }

    /// To be called when [`Guard::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        for (address, held) in &mut self.held {
            if held.next.is_none_or(|next| now < next) {
                continue;
            }
            let Some((say, pause)) = STEPS.get(held.step) else { continue };
            let frame = match say {
                Say::Question => arp::probe(self.claims.hardware, *address),
                Say::Announcement => arp::announcement(self.claims.hardware, *address),
            };
            self.frames.push_back(frame);
            if *say == Say::Announcement {
                held.is_announced = true;
                if held.other.take().is_some() {
                    self.findings.push_back((*address, Finding::Alone));
                }
            }
            held.step += 1;
            held.next = (held.step < STEPS.len()).then(|| now + *pause);
        }
    }

    /// Returns the frame to send, if any.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.frames.pop_front()
    }

    /// Returns what was found out, if anything.
    pub fn poll_finding(&mut self) -> Option<(Ipv4Addr, Finding)> {
        self.findings.pop_front()
    }

    /// Returns when to call [`Guard::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.held.values().filter_map(|held| held.next).min()
    }

    /// Returns the addresses that are watched.
    pub fn watched(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.held.keys().copied()
    }
}

#[cfg(test)]
#[path = "conflict_tests.rs"]
mod tests;
