//! IPv6 networks of machines: a network of 64 bits each, out of one prefix. Pure.
//!
//! Guests give themselves addresses (SLAAC), as they like and as many: what is theirs is the network.
//! The prefix is the provider's, when it routes one to the node, by configuration or by delegation (RFC 8415
//! §6.3), and then guests are on the internet under their own addresses; else it is private (RFC 4193) and what leaves has the node's address.
//! Proxying neighbours instead would need every guest's address in the provider's own network, of
//! which switches take a few, and would show the provider's link to tenants.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use crate::net::{Ipv4Prefix, dhcp6::client::DelegatedPrefix};

/// Shortest and longest prefix: room for 65,536 networks and for two.
const LENGTHS: std::ops::RangeInclusive<u8> = 48..=63;
/// Longest prefix with so many networks that two may stay unused: a guest's has the number of its IPv4
/// address, and the first two of those are no guest's. In longer ones only the first stays unused, which
/// some providers have on the node's own link.
const LONGEST_WIDE: u8 = 56;
/// The last number that has a network for sure while the prefix is not known: that of 60 bits, which providers
/// delegate at least.
pub(super) const LAST_OF_UNKNOWN: u32 = 16;
/// Length of a guest's network: what SLAAC needs (RFC 4291 §2.5.1).
pub const GUEST_LENGTH: u8 = 64;

/// Who says from where guests' IPv6 networks come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Supply {
    /// The configuration, or the node itself.
    Fixed(Ipv6Net),
    /// A DHCPv6 server on an uplink, which may change its mind. What it said last is in this file, for an agent
    /// that restarts while machines run; it must be lost when the host restarts.
    Delegated(PathBuf),
}

/// Where guests' IPv6 networks come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Net {
    prefix: Ipv6Addr,
    length: u8,
    exit: Exit,
}

/// How guests' packets leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// With the node's address.
    Masquerade,
    /// As they are: the provider routes the prefix to the node.
    Routed,
}

impl Ipv6Net {
    /// Returns the network that the provider routes to the node; `None` unless it has 48 to 63 bits.
    pub fn routed(prefix: Ipv6Addr, length: u8) -> Option<Self> {
        let network = Ipv6Addr::from_bits(prefix.to_bits() & mask(length));
        let net = Self { prefix: network, length, exit: Exit::Routed };
        LENGTHS.contains(&length).then_some(net)
    }

    /// Returns the network that a server delegated; `None` when it has no room for two guests. Of one with room
    /// for more than 65,536, the first part.
    pub fn delegated(delegated: &DelegatedPrefix) -> Option<Self> {
        Self::routed(delegated.prefix, delegated.length.max(*LENGTHS.start()))
    }

    /// Returns a private network. `random` should differ between nodes (RFC 4193 §3.2).
    pub fn private(random: [u8; 5]) -> Self {
        let [a, b, c, d, e] = random;
        let octets = [0xfd, a, b, c, d, e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        Self { prefix: octets.into(), length: 48, exit: Exit::Masquerade }
    }

    /// Returns the first address.
    pub fn prefix(&self) -> Ipv6Addr {
        self.prefix
    }

    /// Returns the length of the prefix, 48 to 63.
    pub fn length(&self) -> u8 {
        self.length
    }

    /// Returns how packets leave.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Returns the network of the guest with this IPv4 address, which numbers it; `None` when there
    /// are more numbers than networks.
    pub(super) fn of_guest(&self, subnet: Ipv4Prefix, guest: Ipv4Addr) -> Option<Ipv6Addr> {
        let number = guest.to_bits().checked_sub(subnet.network().to_bits())?;
        let network = number.checked_sub(self.unused())?;
        let bits = self.prefix.to_bits() | u128::from(network) << 64;
        (number <= self.last()).then(|| Ipv6Addr::from_bits(bits))
    }

    /// Returns the last number in the IPv4 subnet whose guest has a network. The first one is 2.
    pub(super) fn last(&self) -> u32 {
        (1 << (GUEST_LENGTH - self.length)) - 1 + self.unused()
    }

    /// Numbers that have no network of their own before those that have.
    fn unused(&self) -> u32 {
        u32::from(self.length > LONGEST_WIDE)
    }
}

/// Returns the mask of a prefix's length.
pub(crate) fn mask(length: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(length.min(128))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use types::ids::MachineId;

    use super::{super::address, *};

    #[test]
    fn each_guest_has_a_network_of_its_own_while_there_are_some() {
        let subnet: Ipv4Prefix = "10.77.0.0/16".parse().expect("a prefix");
        let prefix: Ipv6Addr = "2600:1:2:300::".parse().expect("an address");
        let net = Ipv6Net::routed(prefix, 56).expect("56 bits");
        let of = |last: &str| net.of_guest(subnet, last.parse().expect("an address"));
        assert_eq!(of("10.77.0.2"), "2600:1:2:302::".parse().ok());
        assert_eq!(of("10.77.0.255"), "2600:1:2:3ff::".parse().ok());
        assert_eq!(of("10.77.1.0"), None);
        let private = Ipv6Net::private([1, 2, 3, 4, 5]);
        let guest = private.of_guest(subnet, Ipv4Addr::new(10, 77, 255, 254));
        assert_eq!(guest, "fd01:203:405:fffe::".parse().ok());
        assert_eq!((Ipv6Net::routed(prefix, 64), Ipv6Net::routed(prefix, 47)), (None, None));
    }

    #[test]
    fn what_is_delegated_is_used_as_far_as_it_goes() {
        let prefix: Ipv6Addr = "2600:1:2:300::".parse().expect("an address");
        let of = |length| Ipv6Net::delegated(&DelegatedPrefix { prefix, length });
        let length_of = |length| of(length).map(|net| net.length());
        assert_eq!([40, 48, 60, 63].map(length_of), [48, 48, 60, 63].map(Some));
        assert_eq!(of(64), None, "one network is not enough for two");
        assert_eq!(of(60).map(|net| net.last()), Some(LAST_OF_UNKNOWN));
    }

    #[test]
    fn a_small_prefix_has_networks_for_the_guests_that_come_first() {
        let subnet: Ipv4Prefix = "10.77.0.0/16".parse().expect("a prefix");
        let net =
            Ipv6Net::routed("2600:1:2:30::".parse().expect("an address"), 60).expect("60 bits");
        let mut taken = Vec::new();
        for number in 0..16 {
            let machine = MachineId::from_bytes([number * 15; 16]);
            let free = address::allocate(subnet, Some(net.last()), machine, |a| taken.contains(&a));
            taken.push(free.expect("room"));
        }
        let networks: Vec<_> = taken.iter().map(|guest| net.of_guest(subnet, *guest)).collect();
        let known: BTreeSet<Ipv6Addr> = networks[..15].iter().flatten().copied().collect();
        let expected = (0x31..=0x3f).map(|last| Ipv6Addr::new(0x2600, 1, 2, last, 0, 0, 0, 0));
        assert_eq!(known, expected.collect());
        assert_eq!(networks[15], None, "the sixteenth");
        let smallest = Ipv6Net::routed("2600:1:2:30::".parse().expect("an address"), 63);
        let guest = smallest.expect("63 bits").of_guest(subnet, Ipv4Addr::new(10, 77, 0, 2));
        assert_eq!(guest, "2600:1:2:31::".parse().ok());
    }
}
