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

/// RFC 8415 §21.13, as far as a client tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Success,
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

/// An address that was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) address: Ipv6Addr,
    pub(super) preferred_s: u32,
    pub(super) valid_s: u32,
}

/// An association of addresses (IA_NA).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Association {
    pub(super) id: u32,
    pub(super) renew_s: u32,
    pub(super) rebind_s: u32,
    pub(super) addresses: Vec<Granted>,
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

    /// The association with this number.
    pub(super) fn association(&self, id: u32) -> Option<Association> {
        let values = self.0.iter().filter(|(code, _)| *code == option::ASSOCIATION);
        values.filter_map(|(_, value)| Association::parse(value)).find(|found| found.id == id)
    }
}

impl Association {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<12>()?;
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let inner = Options::parse(rest)?;
        let granted = inner.0.iter().filter(|(code, _)| *code == option::ADDRESS);
        Some(Self {
            id: number(0),
            renew_s: number(4),
            rebind_s: number(8),
            addresses: granted.filter_map(|(_, value)| Granted::parse(value)).collect(),
            status: inner.status(),
        })
    }

    /// Returns the option that asks for these addresses, or for any.
    pub(super) fn request(id: u32, addresses: &[Ipv6Addr]) -> Vec<u8> {
        let mut inner = Options::default();
        for address in addresses {
            inner.push(option::ADDRESS, [&address.octets()[..], &[0; 8]].concat());
        }
        [&id.to_be_bytes()[..], &[0; 8], &inner.to_bytes()].concat()
    }
}

impl Granted {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (address, rest) = bytes.split_first_chunk::<16>()?;
        let (preferred, rest) = rest.split_first_chunk()?;
        let valid = rest.first_chunk()?;
        let granted = Self {
            address: (*address).into(),
            preferred_s: u32::from_be_bytes(*preferred),
            valid_s: u32::from_be_bytes(*valid),
        };
        // RFC 8415 §21.6: such an option is discarded.
        (granted.preferred_s <= granted.valid_s).then_some(granted)
    }
}
