//! Which addresses of the provider's network are a guest's. Pure.
//!
//! What the network says is believed, what the guest says is not:
//!
//! * IPv4: the address that a DHCP server of the network acknowledged to the guest's hardware address,
//!   until its lease ends. Guests cannot send such messages.
//! * IPv6: an address that the guest asked about, as it must before it uses one (RFC 4862 §5.4), and
//!   that nobody defended for [`TENTATIVE`]; first come, first served (RFC 6620). And the link-local
//!   address that its hardware address makes.
//!
//! It reads the packets that pass a guest's tap, and is told the time.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::{Duration, Instant},
};

use crate::net::{
    HardwareAddress,
    dhcp::{acknowledged, frame},
};

/// How long somebody has to defend an address: RFC 6620 §3.2.4, `TENT_LT`.
pub const TENTATIVE: Duration = Duration::from_millis(500);
/// IPv6 addresses that a guest may have at a time, beside the one of its hardware address. What it
/// asked for first goes when it asks for more.
pub const MAX_ADDRESSES: usize = 7;
/// Addresses that a guest may ask about at a time.
const MAX_TENTATIVE: usize = 8;

/// IPv6 header, RFC 8200 §3, and neighbour discovery, RFC 4861 §4.3 and §4.4.
const IPV6_HEADER: usize = 40;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Nobody beyond a router can have sent what came with this hop limit.
const NEVER_FORWARDED: u8 = 255;

/// Which way a packet passed the tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The guest sent it.
    FromGuest,
    /// It came for the guest.
    ToGuest,
}

/// An IPv4 address and when its lease ends; never when `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leased {
    /// The address.
    pub address: Ipv4Addr,
    /// The end.
    pub until: Option<Instant>,
}

/// A guest's addresses.
#[derive(Debug, Clone)]
pub struct Bindings {
    hardware: HardwareAddress,
    leased: Option<Leased>,
    bound: Vec<Ipv6Addr>,
    tentative: Vec<(Ipv6Addr, Instant)>,
}

impl Bindings {
    /// Returns those of a guest: what is known of it from before, or nothing.
    pub fn new(
        hardware: HardwareAddress,
        leased: Option<Leased>,
        mut bound: Vec<Ipv6Addr>,
    ) -> Self {
        bound.truncate(MAX_ADDRESSES);
        Self { hardware, leased, bound, tentative: Vec::new() }
    }

    /// Takes a packet, from its network header on, that passed the tap. Anything is accepted.
    pub fn handle_packet(&mut self, now: Instant, way: Way, packet: &[u8]) {
        match packet.first().map(|first| first >> 4) {
            Some(4) if way == Way::ToGuest => self.handle_dhcp(now, packet),
            Some(6) => self.handle_discovery(now, way, packet),
            Some(_) | None => {}
        }
    }

    /// Binds what nobody defended, unless `taken` says that another guest of the node has it, and drops
    /// what ended.
    pub fn handle_timeout(&mut self, now: Instant, taken: impl Fn(Ipv6Addr) -> bool) {
        if self.leased.and_then(|leased| leased.until).is_some_and(|until| until <= now) {
            self.leased = None;
        }
        let (due, waiting) = self.tentative.iter().partition::<Vec<_>, _>(|(_, at)| *at <= now);
        self.tentative = waiting;
        for (address, _) in due {
            if !taken(address) {
                if self.bound.len() == MAX_ADDRESSES {
                    self.bound.remove(0);
                }
                self.bound.push(address);
            }
        }
    }

    /// Returns when [`Self::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let lease = self.leased.and_then(|leased| leased.until);
        self.tentative.iter().map(|(_, at)| *at).chain(lease).min()
    }

    /// Returns the IPv4 address, if a server gave one.
    pub fn leased(&self) -> Option<Leased> {
        self.leased
    }

    /// Returns the IPv6 addresses that were asked for, the oldest first.
    pub fn asked_for(&self) -> &[Ipv6Addr] {
        &self.bound
    }

    /// Returns all IPv6 addresses.
    pub fn ipv6(&self) -> Vec<Ipv6Addr> {
        [&[link_local(self.hardware)], &self.bound[..]].concat()
    }

    /// Takes the IPv4 address away, which the network gave to somebody else.
    pub fn forget_lease(&mut self) {
        self.leased = None;
    }

    fn handle_dhcp(&mut self, now: Instant, packet: &[u8]) {
        let Some((_, message)) = frame::unwrap(packet) else { return };
        let Some(given) = acknowledged(message, self.hardware) else { return };
        let until = given.seconds.map(|seconds| now + Duration::from_secs(seconds.into()));
        self.leased = Some(Leased { address: given.address, until });
    }

    fn handle_discovery(&mut self, now: Instant, way: Way, packet: &[u8]) {
        let Some(message) = discovery(packet) else { return };
        match (way, message.kind) {
            (Way::FromGuest, SOLICITATION) if message.source.is_unspecified() => {
                let known = self.bound.contains(&message.target)
                    || self.tentative.iter().any(|(address, _)| *address == message.target);
                let own = message.target == link_local(self.hardware);
                let usable = !message.target.is_multicast() && !message.target.is_unspecified();
                if usable && !known && !own && self.tentative.len() < MAX_TENTATIVE {
                    self.tentative.push((message.target, now + TENTATIVE));
                }
            }
            // Somebody has it, or asks about it at the same time.
            (Way::ToGuest, SOLICITATION | ADVERTISEMENT) => {
                self.tentative.retain(|(address, _)| *address != message.target);
            }
            (Way::FromGuest | Way::ToGuest, _) => {}
        }
    }
}

struct Discovery {
    source: Ipv6Addr,
    kind: u8,
    target: Ipv6Addr,
}

/// Reads a solicitation or an advertisement of a neighbour; `None` when it is anything else.
fn discovery(packet: &[u8]) -> Option<Discovery> {
    let (header, body) = packet.split_first_chunk::<IPV6_HEADER>()?;
    if header[6] != ICMPV6 || header[7] != NEVER_FORWARDED {
        return None;
    }
    let [kind @ (SOLICITATION | ADVERTISEMENT), 0, _, _, _, _, _, _, rest @ ..] = body else {
        return None;
    };
    let source: [u8; 16] = header[8..24].try_into().ok()?;
    Some(Discovery {
        source: source.into(),
        kind: *kind,
        target: (*rest.first_chunk::<16>()?).into(),
    })
}

/// RFC 4291 appendix A: the address that a hardware address makes.
pub(super) fn link_local(hardware: HardwareAddress) -> Ipv6Addr {
    let HardwareAddress([a, b, c, d, e, f]) = hardware;
    let words = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]].map(u16::from_be_bytes);
    Ipv6Addr::new(0xfe80, 0, 0, 0, words[0], words[1], words[2], words[3])
}

#[cfg(test)]
#[path = "bindings_tests.rs"]
mod tests;
