//! DHCP messages between Ethernet stations.
//! Source: RFC 2131 §2 and §4.1, RFC 2132, RFC 3396 (long options), RFC 3442 (routes).
//!
//! | Offset | Size | Field                                        |
//! |--------|------|----------------------------------------------|
//! | 0      | 1    | 1 request, 2 reply                           |
//! | 1      | 1    | hardware type, 1 for Ethernet                |
//! | 2      | 1    | length of a hardware address, 6              |
//! | 3      | 1    | hops                                         |
//! | 4      | 4    | transaction number                           |
//! | 8      | 2    | seconds since the client began               |
//! | 10     | 2    | flags; the first bit asks for broadcasts     |
//! | 12     | 4    | the client's address, when it uses it        |
//! | 16     | 4    | the client's address, as the server gives it |
//! | 20     | 4    | next server                                  |
//! | 24     | 4    | relay                                        |
//! | 28     | 16   | the client's hardware address                |
//! | 44     | 64   | server name, or options                      |
//! | 108    | 128  | boot file, or options                        |
//! | 236    | 4    | 99, 130, 83, 99                              |
//! | 240    |      | options: code, length, value; 0 pads, 255 ends |
//!
//! `dhcproto` 0.15 is not used: its decoder panics on options of a wrong length and on hardware
//! addresses longer than the field, and these bytes come from guests.

use std::{collections::BTreeMap, net::Ipv4Addr};

use super::MAX_MESSAGE;
use crate::net::{HardwareAddress, Ipv4Prefix};

const HEADER: usize = 240;
/// BOOTP's least length, which some relays insist on.
const MIN_MESSAGE: usize = 300;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
const ETHERNET: u8 = 1;
const ETHERNET_LENGTH: u8 = 6;
const BROADCAST: u16 = 0x8000;
/// Longest value of one option; longer ones are split, RFC 3396.
const MAX_VALUE: usize = 255;

/// Numbers of options.
pub(super) mod option {
    pub(in crate::net::dhcp) const SUBNET_MASK: u8 = 1;
    pub(in crate::net::dhcp) const ROUTER: u8 = 3;
    pub(in crate::net::dhcp) const NAME_SERVER: u8 = 6;
    pub(in crate::net::dhcp) const MTU: u8 = 26;
    pub(in crate::net::dhcp) const STATIC_ROUTES: u8 = 33;
    pub(in crate::net::dhcp) const TIME_SERVER: u8 = 42;
    pub(in crate::net::dhcp) const REQUESTED_ADDRESS: u8 = 50;
    pub(in crate::net::dhcp) const LEASE_TIME: u8 = 51;
    pub(in crate::net::dhcp) const OVERLOAD: u8 = 52;
    pub(in crate::net::dhcp) const KIND: u8 = 53;
    pub(in crate::net::dhcp) const SERVER: u8 = 54;
    pub(in crate::net::dhcp) const PARAMETERS: u8 = 55;
    pub(in crate::net::dhcp) const MAX_SIZE: u8 = 57;
    pub(in crate::net::dhcp) const RENEWAL_TIME: u8 = 58;
    pub(in crate::net::dhcp) const REBINDING_TIME: u8 = 59;
    pub(in crate::net::dhcp) const VENDOR_CLASS: u8 = 60;
    pub(in crate::net::dhcp) const CLIENT: u8 = 61;
    pub(in crate::net::dhcp) const CLASSLESS_ROUTES: u8 = 121;
    /// Where the node's configuration is: a URL. One of the numbers that sites may use as they like
    /// (RFC 3942).
    pub(in crate::net::dhcp) const DOCUMENT: u8 = 224;
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) direction: Direction,
    pub(super) xid: u32,
    pub(super) secs: u16,
    pub(super) delivery: Delivery,
    pub(super) ciaddr: Ipv4Addr,
    pub(super) yiaddr: Ipv4Addr,
    pub(super) siaddr: Ipv4Addr,
    pub(super) giaddr: Ipv4Addr,
    pub(super) hardware: HardwareAddress,
    options: BTreeMap<u8, Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Request,
    Reply,
}

/// What the client can receive before it has an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivery {
    Unicast,
    Broadcast,
}

/// Option 53.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Discover = 1,
    Offer = 2,
    Request = 3,
    Decline = 4,
    Ack = 5,
    Nak = 6,
    Release = 7,
    Inform = 8,
}

impl Message {
    /// Returns a message of a kind, with everything else zero.
    pub(super) fn new(direction: Direction, kind: Kind, hardware: HardwareAddress) -> Self {
        let mut message = Self {
            direction,
            xid: 0,
            secs: 0,
            delivery: Delivery::Unicast,
            ciaddr: Ipv4Addr::UNSPECIFIED,
            yiaddr: Ipv4Addr::UNSPECIFIED,
            siaddr: Ipv4Addr::UNSPECIFIED,
            giaddr: Ipv4Addr::UNSPECIFIED,
            hardware,
            options: BTreeMap::new(),
        };
        message.set(option::KIND, [kind as u8]);
        message
    }

    /// Parses a message; `None` when it is none, or not between Ethernet stations.
    ///
    /// Options after one that is cut off are not seen, as RFC 2131 has no rule for them.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER] = bytes.first_chunk()?;
        let is_ours = header[1] == ETHERNET && header[2] == ETHERNET_LENGTH;
        if bytes.len() > MAX_MESSAGE || header[236..] != COOKIE || !is_ours {
            return None;
        }
        let direction = match header[0] {
            1 => Direction::Request,
            2 => Direction::Reply,
            _ => return None,
        };
        let address =
            |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
        let flags = u16::from_be_bytes([header[10], header[11]]);
        let mut options = BTreeMap::new();
        read_options(&bytes[HEADER..], &mut options);
        // RFC 2131 §4.1: the file field is read before the name field.
        let overload = match options.get(&option::OVERLOAD).map(Vec::as_slice) {
            Some([overload]) => *overload,
            _ => 0,
        };
        if overload & 1 != 0 {
            read_options(&header[108..236], &mut options);
        }
        if overload & 2 != 0 {
            read_options(&header[44..108], &mut options);
        }
        Some(Self {
            direction,
            xid: address(4).to_bits(),
            secs: u16::from_be_bytes([header[8], header[9]]),
            delivery: if flags & BROADCAST == 0 { Delivery::Unicast } else { Delivery::Broadcast },
            ciaddr: address(12),
            yiaddr: address(16),
            siaddr: address(20),
            giaddr: address(24),
            hardware: HardwareAddress::from_slice(&header[28..34])?,
            options,
        })
    }

    /// Returns the message's bytes.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[0] = match self.direction {
            Direction::Request => 1,
            Direction::Reply => 2,
        };
        bytes[1] = ETHERNET;
        bytes[2] = ETHERNET_LENGTH;
        bytes[4..8].copy_from_slice(&self.xid.to_be_bytes());
        bytes[8..10].copy_from_slice(&self.secs.to_be_bytes());
        if self.delivery == Delivery::Broadcast {
            bytes[10..12].copy_from_slice(&BROADCAST.to_be_bytes());
        }
        for (at, address) in
            [(12, self.ciaddr), (16, self.yiaddr), (20, self.siaddr), (24, self.giaddr)]
        {
            bytes[at..at + 4].copy_from_slice(&address.octets());
        }
        bytes[28..34].copy_from_slice(&self.hardware.0);
        bytes[236..].copy_from_slice(&COOKIE);
        // Some clients want to see the kind first; the map would put it later.
        let kind = self.options.get_key_value(&option::KIND);
        let others = self.options.iter().filter(|(code, _)| **code != option::KIND);
        for (code, value) in kind.into_iter().chain(others) {
            for part in value.chunks(MAX_VALUE) {
                // A part has at most 255 bytes.
                let length = u8::try_from(part.len()).unwrap_or(u8::MAX);
                bytes.extend([*code, length]);
                bytes.extend_from_slice(part);
            }
        }
        bytes.push(255);
        if bytes.len() < MIN_MESSAGE {
            bytes.resize(MIN_MESSAGE, 0);
        }
        bytes
    }

    /// Sets an option.
    pub(super) fn set(&mut self, code: u8, value: impl Into<Vec<u8>>) {
        self.options.insert(code, value.into());
    }

    /// Sets an option to a list of addresses.
    pub(super) fn set_addresses(&mut self, code: u8, addresses: &[Ipv4Addr]) {
        self.set(code, addresses.iter().flat_map(|address| address.octets()).collect::<Vec<_>>());
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        let kinds = [
            Kind::Discover,
            Kind::Offer,
            Kind::Request,
            Kind::Decline,
            Kind::Ack,
            Kind::Nak,
            Kind::Release,
            Kind::Inform,
        ];
        let [code] = *self.value(option::KIND)? else { return None };
        kinds.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns an option that is one address.
    pub(super) fn address(&self, code: u8) -> Option<Ipv4Addr> {
        let octets: [u8; 4] = self.value(code)?.try_into().ok()?;
        Some(octets.into())
    }

    /// Returns an option that is a list of addresses, empty when it is absent or malformed.
    pub(super) fn addresses(&self, code: u8) -> Vec<Ipv4Addr> {
        let value = self.value(code).unwrap_or(&[]);
        let (addresses, rest) = value.as_chunks::<4>();
        if rest.is_empty() {
            addresses.iter().map(|octets| (*octets).into()).collect()
        } else {
            Vec::new()
        }
    }

    /// Returns an option that is a number of four bytes.
    pub(super) fn number(&self, code: u8) -> Option<u32> {
        Some(u32::from_be_bytes(self.value(code)?.try_into().ok()?))
    }

    /// Returns an option that is a number of two bytes.
    pub(super) fn short(&self, code: u8) -> Option<u16> {
        Some(u16::from_be_bytes(self.value(code)?.try_into().ok()?))
    }

    /// Returns option 121, RFC 3442: prefix length, as many octets as it needs, gateway. `None`
    /// when it is absent, empty or malformed.
    pub(super) fn classless_routes(&self) -> Option<Vec<(Ipv4Prefix, Ipv4Addr)>> {
        let mut rest = self.bytes(option::CLASSLESS_ROUTES)?;
        let mut routes = Vec::new();
        while let [length, tail @ ..] = rest {
            let significant = usize::from(length.div_ceil(8));
            let mut network = [0; 4];
            network.get_mut(..significant)?.copy_from_slice(tail.get(..significant)?);
            let gateway: [u8; 4] = *tail.get(significant..)?.first_chunk()?;
            routes.push((Ipv4Prefix::new(network.into(), *length)?, gateway.into()));
            rest = &tail[significant + 4..];
        }
        Some(routes)
    }

    /// Returns an option's bytes, if it is there and not empty.
    pub(super) fn bytes(&self, code: u8) -> Option<&[u8]> {
        self.value(code).filter(|value| !value.is_empty())
    }

    fn value(&self, code: u8) -> Option<&[u8]> {
        self.options.get(&code).map(Vec::as_slice)
    }
}

/// Adds the options in `bytes`. Parts of one option are joined, RFC 3396.
fn read_options(mut bytes: &[u8], options: &mut BTreeMap<u8, Vec<u8>>) {
    while let [code, tail @ ..] = bytes {
        match (code, tail) {
            (0, _) => bytes = tail,
            (255, _) => return,
            (_, [length, tail @ ..]) => {
                let Some((value, rest)) = tail.split_at_checked(usize::from(*length)) else {
                    return;
                };
                options.entry(*code).or_default().extend_from_slice(value);
                bytes = rest;
            }
            (_, []) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);

    fn routes(value: &[u8]) -> Option<Vec<String>> {
        let mut message = Message::new(Direction::Reply, Kind::Ack, MAC);
        message.set(option::CLASSLESS_ROUTES, value);
        let routes = message.classless_routes()?;
        Some(routes.iter().map(|(network, gateway)| format!("{network} {gateway}")).collect())
    }

    #[test]
    fn a_message_survives_its_bytes() {
        let mut message = Message::new(Direction::Request, Kind::Inform, MAC);
        message.xid = 0x0102_0304;
        message.secs = 5;
        message.delivery = Delivery::Broadcast;
        message.ciaddr = Ipv4Addr::new(1, 2, 3, 4);
        message.yiaddr = Ipv4Addr::new(1, 2, 3, 5);
        message.siaddr = Ipv4Addr::new(1, 2, 3, 6);
        message.giaddr = Ipv4Addr::new(1, 2, 3, 7);
        message.set(200, vec![9; 600]);
        let bytes = message.to_bytes();
        assert_eq!(Message::parse(&bytes), Some(message));
        assert_eq!(bytes[240..243], [53, 1, 8]);
    }

    #[test]
    fn options_in_the_name_and_file_fields_are_seen() {
        let mut message = Message::new(Direction::Reply, Kind::Ack, MAC);
        message.set(option::OVERLOAD, [3]);
        let mut bytes = message.to_bytes();
        bytes[44..51].copy_from_slice(&[54, 4, 1, 2, 3, 4, 255]);
        bytes[108..115].copy_from_slice(&[0, 51, 4, 0, 0, 0, 9]);
        let message = Message::parse(&bytes).expect("a message");
        assert_eq!(message.address(option::SERVER), Some(Ipv4Addr::new(1, 2, 3, 4)));
        assert_eq!(message.number(option::LEASE_TIME), Some(9));
    }

    #[test]
    fn options_of_a_wrong_length_are_absent() {
        let mut message = Message::new(Direction::Reply, Kind::Ack, MAC);
        message.set(option::SERVER, [1, 2, 3]);
        message.set(option::LEASE_TIME, [0, 0, 0, 0, 9]);
        message.set(option::MTU, [5]);
        message.set(option::NAME_SERVER, [1, 2, 3, 4, 5]);
        message.set(option::KIND, []);
        assert_eq!((message.address(option::SERVER), message.short(option::MTU)), (None, None));
        assert_eq!((message.number(option::LEASE_TIME), message.kind()), (None, None));
        assert_eq!(message.addresses(option::NAME_SERVER), [] as [Ipv4Addr; 0]);
    }

    #[test]
    fn classless_routes_are_read_as_in_rfc_3442() {
        let value = [24, 198, 51, 100, 1, 2, 3, 4, 0, 5, 6, 7, 8, 17, 129, 210, 177, 9, 9, 9, 9];
        let expected = ["198.51.100.0/24 1.2.3.4", "0.0.0.0/0 5.6.7.8", "129.210.177.0/17 9.9.9.9"];
        assert_eq!(routes(&value), Some(expected.map(str::to_owned).to_vec()));
        assert_eq!(routes(&[33, 1, 2, 3, 4, 5, 1, 2, 3, 4]), None);
        assert_eq!(routes(&[24, 198, 51, 100, 1, 2, 3]), None);
        assert_eq!(routes(&[255]), None);
        assert_eq!(routes(&[]), None);
    }
}
