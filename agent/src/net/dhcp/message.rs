//! DHCP messages for Ethernet, on top of `dhcproto`.

use std::net::Ipv4Addr;

use dhcproto::{
    Decodable, Encodable,
    v4::{DhcpOption, Message, MessageType, OptionCode},
};

use super::MAX_MESSAGE;
use crate::net::HardwareAddress;

/// Where the magic cookie lies; options follow it.
const COOKIE: std::ops::Range<usize> = 236..240;
/// RFC 2132 §2.
const COOKIE_VALUE: [u8; 4] = [99, 130, 83, 99];
/// Hardware type of Ethernet, RFC 1700.
const ETHERNET: u8 = 1;

/// Parses a message between Ethernet stations; `None` when it is anything else.
///
/// Hardware type and length are looked at before `dhcproto` sees the bytes, because its
/// `Message::chaddr` panics when the length that the sender claims is more than sixteen.
pub(super) fn parse(bytes: &[u8]) -> Option<Message> {
    if bytes.len() > MAX_MESSAGE || bytes.get(COOKIE)? != COOKIE_VALUE {
        return None;
    }
    if bytes[1] != ETHERNET || bytes[2] != 6 {
        return None;
    }
    Message::from_bytes(bytes).ok()
}

/// Encodes a message that this crate composed.
pub(super) fn encode(message: &Message) -> Vec<u8> {
    message
        .to_vec()
        .expect("our own messages are short and hold no variable part but lists of addresses")
}

/// Returns the sender's hardware address.
pub(super) fn hardware(message: &Message) -> Option<HardwareAddress> {
    HardwareAddress::from_slice(message.chaddr())
}

/// Returns the kind of message, when it names one.
pub(super) fn kind(message: &Message) -> Option<MessageType> {
    match message.opts().get(OptionCode::MessageType) {
        Some(DhcpOption::MessageType(kind)) => Some(*kind),
        _ => None,
    }
}

/// Returns option 54.
pub(super) fn server(message: &Message) -> Option<Ipv4Addr> {
    match message.opts().get(OptionCode::ServerIdentifier) {
        Some(DhcpOption::ServerIdentifier(server)) => Some(*server),
        _ => None,
    }
}

/// Returns option 50.
pub(super) fn requested(message: &Message) -> Option<Ipv4Addr> {
    match message.opts().get(OptionCode::RequestedIpAddress) {
        Some(DhcpOption::RequestedIpAddress(address)) => Some(*address),
        _ => None,
    }
}
