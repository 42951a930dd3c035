//! What a server said to somebody else: the address that a bridged guest was given.

use std::net::Ipv4Addr;

use super::message::{Direction, Kind, Message, option};
use crate::net::HardwareAddress;

/// A lease time that never ends, RFC 2131 §3.3.
const EVER: u32 = u32::MAX;

/// An address that a server gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Given {
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
    Some(Given { address, seconds })
}
