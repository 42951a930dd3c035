//! DHCPv6 as a state machine: a client for uplinks, which owns neither socket nor clock.
//! Source: RFC 8415 (protocol), RFC 3646 (name servers), RFC 5908 and RFC 4075 (time servers).

pub mod client;
mod lease;
mod message;

use std::net::Ipv6Addr;

/// UDP port of clients.
pub const CLIENT_PORT: u16 = 546;
/// UDP port of servers and relays.
pub const SERVER_PORT: u16 = 547;
/// All servers and relays on a link.
pub const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// Largest message that is read, in bytes: what fits into an Ethernet frame.
pub const MAX_MESSAGE: usize = 1452;
