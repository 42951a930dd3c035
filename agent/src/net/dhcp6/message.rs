//! DHCPv6 messages between clients and servers.
//! Source: RFC 8415 §8 and §21.
//!
//! | Offset | Size | Field                                     |
//! |--------|------|-------------------------------------------|
//! | 0      | 1    | kind                                      |
//! | 1      | 3    | transaction number                        |
//! | 4      |      | options: code (2), length (2), value      |

use std::net::Ipv6Addr;

use super::MAX_MESSAGE;

const HEADER: usize = 4;
/// More options than this are no message.
const MAX_OPTIONS: usize = 64;

/// Numbers of options.
pub(super) mod option {
    pub(in crate::net::dhcp6) const CLIENT: u16 = 1;
    pub(in crate::net::dhcp6) const SERVER: u16 = 2;
    pub(in crate::net::dhcp6) const ASSOCIATION: u16 = 3;
    pub(in crate::net::dhcp6) const ADDRESS: u16 = 5;
    pub(in crate::net::dhcp6) const REQUESTED: u16 = 6;
    pub(in crate::net::dhcp6) const PREFERENCE: u16 = 7;
    pub(in crate::net::dhcp6) const ELAPSED: u16 = 8;
    pub(in crate::net::dhcp6) const STATUS: u16 = 13;
    pub(in crate::net::dhcp6) const RAPID_COMMIT: u16 = 14;
    pub(in crate::net::dhcp6) const NAME_SERVERS: u16 = 23;
    pub(in crate::net::dhcp6) const DELEGATION: u16 = 25;
    pub(in crate::net::dhcp6) const PREFIX: u16 = 26;
    pub(in crate::net::dhcp6) const SNTP_SERVERS: u16 = 31;
    pub(in crate::net::dhcp6) const REFRESH: u16 = 32;
    pub(in crate::net::dhcp6) const NTP_SERVER: u16 = 56;
    /// Where the node's configuration is: a URL. DHCPv6 has no numbers for sites; this one is far from
    /// those that are assigned (IANA, "Option Codes").
    pub(in crate::net::dhcp6) const DOCUMENT: u16 = 65_224;
}

/// RFC 8415 §7.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Solicit = 1,
    Advertise = 2,
    Request = 3,
    Confirm = 4,
    Renew = 5,
    Rebind = 6,
    Reply = 7,
    InformationRequest = 11,
}

/// RFC 8415 §21.13, as far as a client tells them apart. `UseMulticast` is a failure like others: this client
/// sends everything to all servers, and the message is sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Success,
    /// The server has no address, or no prefix, for the client.
    NoneLeft,
    NoBinding,
    NotOnLink,
    Failure,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) xid: [u8; 3],
    pub(super) options: Options,
}

/// Options in the order they came.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Options(Vec<(u16, Vec<u8>)>);

/// An address that was granted, or a prefix that was delegated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Granted {
    /// Or the prefix's first one.
    pub(super) address: Ipv6Addr,
    /// Length of the prefix in bits; 128 for an address.
    pub(super) length: u8,
    pub(super) preferred_s: u32,
    pub(super) valid_s: u32,
}

/// An association of addresses (IA_NA) or of prefixes (IA_PD).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Association {
    pub(super) id: u32,
    pub(super) renew_s: u32,
    pub(super) rebind_s: u32,
    pub(super) granted: Vec<Granted>,
    pub(super) status: Status,
}

impl Message {
    /// Parses a message from a server; `None` when it is none.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > MAX_MESSAGE {
            return None;
        }
        let [kind, a, b, c] = *bytes.first_chunk::<HEADER>()?;
        let kind = match kind {
            2 => Kind::Advertise,
            7 => Kind::Reply,
            _ => return None,
        };
        Some(Self { kind, xid: [a, b, c], options: Options::parse(&bytes[HEADER..])? })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let [a, b, c] = self.xid;
        let mut bytes = vec![self.kind as u8, a, b, c];
        bytes.extend(self.options.to_bytes());
        bytes
    }
}

impl Options {
    fn parse(mut bytes: &[u8]) -> Option<Self> {
        let mut options = Vec::new();
        while !bytes.is_empty() {
            let [a, b, c, d] = *bytes.first_chunk::<4>()?;
            let length = usize::from(u16::from_be_bytes([c, d]));
            let value = bytes.get(4..4 + length)?;
            if options.len() == MAX_OPTIONS {
                return None;
            }
            options.push((u16::from_be_bytes([a, b]), value.to_vec()));
            bytes = &bytes[4 + length..];
        }
        Some(Self(options))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (code, value) in &self.0 {
            // What this client writes is short.
            let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
            bytes.extend(code.to_be_bytes());
            bytes.extend(length.to_be_bytes());
            bytes.extend(value);
        }
        bytes
    }

    pub(super) fn push(&mut self, code: u16, value: impl Into<Vec<u8>>) {
        self.0.push((code, value.into()));
    }

    pub(super) fn get(&self, code: u16) -> Option<&[u8]> {
        let found = self.0.iter().find(|(known, _)| *known == code);
        found.map(|(_, value)| value.as_slice())
    }

    /// Success when there is none, as the standard says.
    pub(super) fn status(&self) -> Status {
        match self.get(option::STATUS) {
            None | Some([0, 0, ..]) => Status::Success,
            Some([0, 2 | 6, ..]) => Status::NoneLeft,
            Some([0, 3, ..]) => Status::NoBinding,
            Some([0, 4, ..]) => Status::NotOnLink,
            Some(_) => Status::Failure,
        }
    }

    pub(super) fn u32(&self, code: u16) -> Option<u32> {
        Some(u32::from_be_bytes(self.get(code)?.try_into().ok()?))
    }

    /// Addresses of an option that is a list of them; none when its length is wrong.
    pub(super) fn addresses(&self, code: u16) -> Vec<Ipv6Addr> {
        match self.get(code).map(<[u8]>::as_chunks::<16>) {
            Some((addresses, [])) => addresses.iter().map(|octets| (*octets).into()).collect(),
            Some(_) | None => Vec::new(),
        }
    }

    /// Unicast servers of the NTP option (RFC 5908 §4.1).
    pub(super) fn ntp_servers(&self) -> Vec<Ipv6Addr> {
        let Some(inner) = self.get(option::NTP_SERVER).and_then(Self::parse) else {
            return Vec::new();
        };
        let unicast = inner.0.iter().filter(|(code, _)| *code == 1);
        unicast
            .filter_map(|(_, value)| Some(<[u8; 16]>::try_from(&value[..]).ok()?.into()))
            .collect()
    }

    /// The association of this kind with this number.
    pub(super) fn association(&self, kind: u16, id: u32) -> Option<Association> {
        let values = self.0.iter().filter(|(code, _)| *code == kind);
        values.filter_map(|(_, value)| Association::parse(value)).find(|found| found.id == id)
    }
}

impl Association {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<12>()?;
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let inner = Options::parse(rest)?;
        let granted = inner.0.iter().filter_map(|(code, value)| match *code {
            option::ADDRESS => Granted::address(value),
            option::PREFIX => Granted::prefix(value),
            _ => None,
        });
        Some(Self {
            id: number(0),
            renew_s: number(4),
            rebind_s: number(8),
            granted: granted.collect(),
            status: inner.status(),
        })
    }

    /// Returns the option that asks for these addresses or prefixes, or for any.
    pub(super) fn request(id: u32, wanted: &[(Ipv6Addr, u8)]) -> Vec<u8> {
        let mut inner = Options::default();
        for (address, length) in wanted {
            match length {
                128 => inner.push(option::ADDRESS, [&address.octets()[..], &[0; 8]].concat()),
                _ => inner
                    .push(option::PREFIX, [&[0; 8], &[*length][..], &address.octets()].concat()),
            }
        }
        [&id.to_be_bytes()[..], &[0; 8], &inner.to_bytes()].concat()
    }
}

impl Granted {
    /// RFC 8415 §21.6.
    fn address(bytes: &[u8]) -> Option<Self> {
        let (address, times) = bytes.split_first_chunk::<16>()?;
        let plain = Ipv6Addr::from(*address);
        let usable = !plain.is_unspecified() && !plain.is_multicast() && !plain.is_loopback();
        Self::new((plain, 128), times).filter(|_| usable)
    }

    /// RFC 8415 §21.22. A prefix that has further bits counts without them.
    fn prefix(bytes: &[u8]) -> Option<Self> {
        let (times, rest) = bytes.split_at_checked(8)?;
        let (length, rest) = rest.split_first()?;
        let bits = u128::from_be_bytes(*rest.first_chunk()?);
        let kept = u128::MAX.checked_shl(128 - u32::from(*length).min(128)).unwrap_or(0);
        let first = Ipv6Addr::from_bits(bits & kept);
        let usable = (1..128).contains(length) && !first.is_unspecified() && !first.is_multicast();
        Self::new((first, *length), times).filter(|_| usable)
    }

    fn new((address, length): (Ipv6Addr, u8), times: &[u8]) -> Option<Self> {
        let (preferred, rest) = times.split_first_chunk()?;
        let preferred_s = u32::from_be_bytes(*preferred);
        let valid_s = u32::from_be_bytes(*rest.first_chunk()?);
        // Such an option is discarded.
        (preferred_s <= valid_s).then_some(Self { address, length, preferred_s, valid_s })
    }
}
