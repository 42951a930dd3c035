//! IPv6 networks of machines: a network of 64 bits each, out of one prefix. Pure.
//!
//! Guests give themselves addresses (SLAAC), as they like and as many: what is theirs is the network.
//! The prefix is the provider's, when it routes one to the node, and then guests are on the internet
//! under their own addresses; else it is private (RFC 4193) and what leaves has the node's address.
//! Proxying neighbours instead would need every guest's address in the provider's own network, of
//! which switches take a few, and would show the provider's link to tenants.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::net::Ipv4Prefix;

/// Shortest and longest prefix: room for 65,536 and for 256 guests.
const LENGTHS: std::ops::RangeInclusive<u8> = 48..=56;
/// Length of a guest's network: what SLAAC needs (RFC 4291 §2.5.1).
pub const GUEST_LENGTH: u8 = 64;

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
    /// Returns the network that the provider routes to the node; `None` unless it has 48 to 56 bits.
    pub fn routed(prefix: Ipv6Addr, length: u8) -> Option<Self> {
        let network = Ipv6Addr::from_bits(prefix.to_bits() & mask(length));
        let net = Self { prefix: network, length, exit: Exit::Routed };
        LENGTHS.contains(&length).then_some(net)
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

    /// Returns the length of the prefix, 48 to 56.
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
        let fits = number < 1 << (GUEST_LENGTH - self.length);
        let bits = self.prefix.to_bits() | u128::from(number) << 64;
        fits.then(|| Ipv6Addr::from_bits(bits))
    }
}

/// Returns the mask of a prefix's length.
pub(crate) fn mask(length: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(length.min(128))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!((Ipv6Net::routed(prefix, 57), Ipv6Net::routed(prefix, 47)), (None, None));
    }
}
