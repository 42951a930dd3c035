//! Name servers in router advertisements, which the kernel passes on without using them. Pure.
//! Source: RFC 8106 §5.1; Linux `include/uapi/linux/rtnetlink.h`, `struct nduseroptmsg`.
//!
//! | Offset | Size | Field of the netlink message                       |
//! |--------|------|----------------------------------------------------|
//! | 0      | 4    | length of the message, this header included        |
//! | 4      | 2    | type, `RTM_NEWNDUSEROPT`                           |
//! | 6      | 10   | flags, sequence number, port                       |
//! | 16     | 1    | address family                                     |
//! | 18     | 2    | length of the options                              |
//! | 20     | 4    | interface                                          |
//! | 24     | 2    | ICMPv6 type and code, 134 and 0 for advertisements |
//! | 32     |      | options                                            |
//!
//! | Offset | Size | Field of the option                 |
//! |--------|------|-------------------------------------|
//! | 0      | 1    | 25                                  |
//! | 1      | 1    | length in units of eight bytes      |
//! | 4      | 4    | lifetime in seconds; all ones: ever |
//! | 8      | 16 n | addresses                           |

use std::{
    net::Ipv6Addr,
    time::{Duration, Instant},
};

const NETLINK_HEADER: usize = 16;
const HEADER: usize = 32;
/// `RTM_NEWNDUSEROPT`.
const NEW_OPTION: u16 = 68;
const ADVERTISEMENT: [u8; 2] = [134, 0];
const NAME_SERVERS: u8 = 25;
/// RFC 8106 §5.3.1 says that three are enough.
const MAX_SERVERS: usize = 8;

/// The name servers that advertisements have named.
#[derive(Debug, Default)]
pub struct NameServers {
    known: Vec<Known>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    interface: u32,
    server: Ipv6Addr,
    /// Never when `None`.
    expires: Option<Instant>,
}

impl NameServers {
    /// Takes what the kernel sent: netlink messages, of which others than advertised name servers
    /// are passed over.
    ///
    /// Link-local servers are left out: an address alone does not say on which link.
    pub fn handle_messages(&mut self, now: Instant, mut bytes: &[u8]) {
        while let Some((message, rest)) = split(bytes) {
            self.handle_message(now, message);
            bytes = rest;
        }
    }

    /// Forgets what has ended.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.known.retain(|known| known.expires.is_none_or(|end| now < end));
    }

    /// Returns when the next one ends.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.known.iter().filter_map(|known| known.expires).min()
    }

    /// Returns the servers named on an interface, in the order they were named.
    pub fn on(&self, interface: u32) -> impl Iterator<Item = Ipv6Addr> {
        let here = self.known.iter().filter(move |known| known.interface == interface);
        here.map(|known| known.server)
    }

    fn handle_message(&mut self, now: Instant, message: &[u8]) -> Option<()> {
        let header: &[u8; HEADER] = message.first_chunk()?;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        if kind != NEW_OPTION || header[24..26] != ADVERTISEMENT {
            return None;
        }
        let interface = u32::from_ne_bytes([header[20], header[21], header[22], header[23]]);
        let length = usize::from(u16::from_ne_bytes([header[18], header[19]]));
        let mut options = message.get(HEADER..HEADER + length)?;
        while let [kind, units, ..] = *options {
            let (option, rest) = options.split_at_checked(usize::from(units) * 8)?;
            if units == 0 {
                return None;
            }
            if kind == NAME_SERVERS {
                self.handle_option(now, interface, option);
            }
            options = rest;
        }
        Some(())
    }

    fn handle_option(&mut self, now: Instant, interface: u32, option: &[u8]) -> Option<()> {
        let lifetime = u32::from_be_bytes(option.get(4..8)?.try_into().ok()?);
        let (addresses, _) = option.get(8..)?.as_chunks::<16>();
        for server in addresses.iter().map(|octets| Ipv6Addr::from(*octets)) {
            if server.is_unicast_link_local() || server.is_unspecified() || server.is_multicast() {
                continue;
            }
            let expires = match lifetime {
                u32::MAX => None,
                seconds => Some(now + Duration::from_secs(u64::from(seconds))),
            };
            // Named again, a server keeps its place.
            let is_same =
                |known: &&mut Known| known.server == server && known.interface == interface;
            if let Some(known) = self.known.iter_mut().find(is_same) {
                known.expires = expires;
            } else if self.known.len() < MAX_SERVERS {
                self.known.push(Known { interface, server, expires });
            }
        }
        // A lifetime of zero takes a server back.
        self.handle_timeout(now);
        Some(())
    }
}

/// Returns the first netlink message and what follows it.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?);
    let length = usize::try_from(length).ok().filter(|length| *length >= NETLINK_HEADER)?;
    let message = bytes.get(..length)?;
    Some((message, bytes.get(length.next_multiple_of(4)..).unwrap_or(&[])))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x53);
    const OTHER: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x54);

    fn message(lifetime: u32, servers: &[Ipv6Addr]) -> Vec<u8> {
        let units = u8::try_from(1 + 2 * servers.len()).expect("few");
        let mut option = vec![NAME_SERVERS, units, 0, 0];
        option.extend(lifetime.to_be_bytes());
        option.extend(servers.iter().flat_map(Ipv6Addr::octets));
        let mut bytes = vec![0; HEADER];
        let length = u16::try_from(option.len()).expect("short");
        bytes[..4].copy_from_slice(&(u32::from(length) + 32).to_ne_bytes());
        bytes[4..6].copy_from_slice(&NEW_OPTION.to_ne_bytes());
        bytes[18..20].copy_from_slice(&length.to_ne_bytes());
        bytes[20..24].copy_from_slice(&2_u32.to_ne_bytes());
        bytes[24] = 134;
        bytes.extend(option);
        bytes
    }

    fn on(servers: &NameServers, interface: u32) -> Vec<Ipv6Addr> {
        servers.on(interface).collect()
    }

    #[test]
    fn servers_are_known_for_their_lifetime() {
        let now = Instant::now();
        let mut servers = NameServers::default();
        servers.handle_messages(now, &message(60, &[SERVER, OTHER]));
        assert_eq!(on(&servers, 2), [SERVER, OTHER]);
        assert_eq!(on(&servers, 3), [] as [Ipv6Addr; 0]);
        servers.handle_messages(now, &message(u32::MAX, &[OTHER]));
        let end = servers.poll_timeout().expect("one ends");
        assert_eq!(end, now + Duration::from_secs(60));
        servers.handle_timeout(end);
        assert_eq!((on(&servers, 2), servers.poll_timeout()), (vec![OTHER], None));
        servers.handle_messages(now, &message(0, &[OTHER]));
        assert_eq!(on(&servers, 2), [] as [Ipv6Addr; 0]);
    }

    #[test]
    fn several_messages_in_one_piece_are_read() {
        let mut servers = NameServers::default();
        let bytes = [message(60, &[SERVER]), message(60, &[OTHER])].concat();
        servers.handle_messages(Instant::now(), &bytes);
        assert_eq!(on(&servers, 2), [SERVER, OTHER]);
    }

    #[test]
    fn cut_and_senseless_messages_are_passed_over() {
        let whole = message(60, &[SERVER]);
        let mut servers = NameServers::default();
        for length in 0..whole.len() {
            servers.handle_messages(Instant::now(), &whole[..length]);
        }
        let mut empty_option = whole.clone();
        empty_option[33] = 0;
        servers.handle_messages(Instant::now(), &empty_option);
        let mut endless = whole;
        endless[..4].fill(0);
        servers.handle_messages(Instant::now(), &endless);
        servers.handle_messages(Instant::now(), &message(60, &["fe80::1".parse().expect("one")]));
        assert_eq!(on(&servers, 2), [] as [Ipv6Addr; 0]);
    }

    #[test]
    fn a_router_that_names_very_many_is_cut_short() {
        let many: Vec<_> = (1..=20).map(|n| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n)).collect();
        let mut servers = NameServers::default();
        servers.handle_messages(Instant::now(), &message(60, &many));
        assert_eq!(on(&servers, 2), many[..MAX_SERVERS]);
    }
}
