//! What a server and its client said to each other: the address that a bridged guest was given, and
//! under whose name it asked.
//! Source: RFC 2131 §4, RFC 2132 §9.14, RFC 4361 §6.1, RFC 6842.

use std::net::Ipv4Addr;

use super::message::{Direction, Kind, Message, option};
use crate::net::HardwareAddress;

/// A lease time that never ends, RFC 2131 §3.3.
const EVER: u32 = u32::MAX;

/// First byte of option 61 in front of an Ethernet address.
const ETHERNET: u8 = 1;

/// An address that a server gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Given {
    /// Transaction number of the request.
    pub xid: u32,
    /// The address.
    pub address: Ipv4Addr,
    /// Seconds that it is the client's from now on; for ever when `None`.
    pub seconds: Option<u32>,
}

/// Returns what a server's message gives to the client with this hardware address; `None` when it is
/// any other message. Servers that tell no lease time (BOOTP, RFC 1497) give addresses for ever.
pub fn acknowledged(message: &[u8], client: HardwareAddress) -> Option<Given> {
    let message = Message::parse(message)?;
    let ours = message.direction == Direction::Reply && message.hardware == client;
    // The answer to an inquiry (DHCPINFORM) gives no address.
    let address = message.yiaddr;
    let usable = !(address.is_unspecified()
        || address.is_broadcast()
        || address.is_multicast()
        || address.is_loopback());
    if !ours || !usable || message.kind()? != Kind::Ack {
        return None;
    }
    let seconds = message.number(option::LEASE_TIME).filter(|seconds| *seconds != EVER);
    Some(Given { xid: message.xid, address, seconds })
}

/// Who a client says it is. Servers that are told an identifier go by it and by nothing else, so a
/// client with another's gets the other's lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// Its hardware address, by option 61 or without it.
    Hardware,
    /// A name: all of option 61. It may be a DUID (type 255, RFC 4361), a string (type 0, RFC 2132), or
    /// whatever else its owner chose: servers compare the bytes.
    Named(Vec<u8>),
    /// Another's hardware address.
    Foreign,
}

/// What a client asks of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// An address, or what there is to know.
    Lease {
        /// Transaction number, which the answer repeats.
        xid: u32,
        /// Who asks.
        identity: Identity,
    },
    /// It gives its address up: it no longer needs it, or somebody else uses it.
    GivesUp,
}

/// Returns what a message from this client asks; `None` when it is none of its requests.
pub fn asked(message: &[u8], client: HardwareAddress) -> Option<Asked> {
    let message = Message::parse(message)?;
    if message.direction != Direction::Request || message.hardware != client {
        return None;
    }
    match message.kind()? {
        Kind::Discover | Kind::Request | Kind::Inform => {
            let identity = match message.bytes(option::CLIENT) {
                None => Identity::Hardware,
                Some([ETHERNET, address @ ..]) if *address == client.0 => Identity::Hardware,
                Some([ETHERNET, _, _, _, _, _, _]) => Identity::Foreign,
                Some(name) => Identity::Named(name.to_vec()),
            };
            Some(Asked::Lease { xid: message.xid, identity })
        }
        Kind::Decline | Kind::Release => Some(Asked::GivesUp),
        Kind::Offer | Kind::Ack | Kind::Nak => None,
    }
}
