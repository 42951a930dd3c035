//! The IPv4 and UDP headers round a DHCP message.
//! Source: RFC 791 §3.1, RFC 768, RFC 1071.
//!
//! | Offset | Size | Field                                   |
//! |--------|------|-----------------------------------------|
//! | 0      | 1    | version 4, header length in 4-byte words |
//! | 2      | 2    | total length                            |
//! | 6      | 2    | flags, fragment offset in 8-byte words  |
//! | 8      | 1    | time to live                            |
//! | 9      | 1    | protocol, 17 for UDP                    |
//! | 10     | 2    | header checksum                         |
//! | 12     | 4    | source                                  |
//! | 16     | 4    | destination                             |
//! | 20     | 2    | UDP source port (after any IPv4 options) |
//! | 22     | 2    | UDP destination port                    |
//! | 24     | 2    | UDP length                              |
//! | 26     | 2    | UDP checksum                            |

use std::net::Ipv4Addr;

use super::{CLIENT_PORT, SERVER_PORT};

const IPV4_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
const UDP: u8 = 17;

/// Wraps `message` as a broadcast from a client without an address; `None` when it is too long.
pub fn wrap(message: &[u8]) -> Option<Vec<u8>> {
    let udp_length = u16::try_from(UDP_HEADER + message.len()).ok()?;
    let total = u16::try_from(IPV4_HEADER + UDP_HEADER + message.len()).ok()?;
    let mut header = [0; IPV4_HEADER];
    header[0] = 0x45;
    header[2..4].copy_from_slice(&total.to_be_bytes());
    header[8] = 64;
    header[9] = UDP;
    header[16..20].copy_from_slice(&Ipv4Addr::BROADCAST.octets());
    let checksum = !sum(0, &header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());

    let mut udp = Vec::with_capacity(usize::from(udp_length));
    udp.extend(CLIENT_PORT.to_be_bytes());
    udp.extend(SERVER_PORT.to_be_bytes());
    udp.extend(udp_length.to_be_bytes());
    udp.extend([0, 0]);
    udp.extend_from_slice(message);
    let pseudo = sum(u32::from(UDP) + u32::from(udp_length), &header[12..20]);
    let checksum = match !sum(u32::from(pseudo), &udp) {
        0 => u16::MAX,
        checksum => checksum,
    };
    udp[6..8].copy_from_slice(&checksum.to_be_bytes());
    Some([&header[..], &udp].concat())
}

/// Returns the source and the DHCP message of an IPv4 packet from a server.
///
/// `None` when it is anything else. The UDP checksum is not looked at: on virtual links the sender
/// leaves it to hardware that is not there, and packet sockets show it unfinished.
pub fn unwrap(packet: &[u8]) -> Option<(Ipv4Addr, &[u8])> {
    between(packet, (SERVER_PORT, CLIENT_PORT))
}

/// Like [`unwrap`], of a packet from a client.
pub fn unwrap_request(packet: &[u8]) -> Option<(Ipv4Addr, &[u8])> {
    between(packet, (CLIENT_PORT, SERVER_PORT))
}

fn between(packet: &[u8], (from, to): (u16, u16)) -> Option<(Ipv4Addr, &[u8])> {
    let first = *packet.first()?;
    let header_len = usize::from(first & 0x0f) * 4;
    if first >> 4 != 4 || header_len < IPV4_HEADER {
        return None;
    }
    let header = packet.get(..header_len)?;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
    if sum(0, header) != u16::MAX || fragment != 0 || header[9] != UDP {
        return None;
    }
    let udp = packet.get(header_len..total)?;
    let [s0, s1, d0, d1, l0, l1, _, _, ..] = *udp else { return None };
    if u16::from_be_bytes([s0, s1]) != from || u16::from_be_bytes([d0, d1]) != to {
        return None;
    }
    let message = udp.get(UDP_HEADER..usize::from(u16::from_be_bytes([l0, l1])))?;
    let source: [u8; 4] = header[12..16].try_into().ok()?;
    Some((source.into(), message))
}

/// The ones' complement sum of 16-bit words, RFC 1071, of `bytes` added to `start`.
pub(in crate::net) fn sum(start: u32, bytes: &[u8]) -> u16 {
    let mut sum = u64::from(start);
    for pair in bytes.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u64::from(u16::from_be_bytes([pair[0], low]));
    }
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    u16::try_from(sum).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply as a server would frame it, with IPv4 options of four bytes.
    fn reply(message: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x46, 0, 0, 0, 0, 0, 0, 0, 64, UDP, 0, 0, 192, 0, 2, 1, 192, 0, 2, 9];
        packet.extend([1, 1, 1, 1]);
        let total = u16::try_from(24 + 8 + message.len()).expect("short");
        packet[2..4].copy_from_slice(&total.to_be_bytes());
        let checksum = !sum(0, &packet);
        packet[10..12].copy_from_slice(&checksum.to_be_bytes());
        packet.extend([0, 67, 0, 68]);
        packet.extend((total - 24).to_be_bytes());
        packet.extend([0, 0]);
        packet.extend_from_slice(message);
        packet
    }

    #[test]
    fn a_request_has_correct_checksums() {
        let packet = wrap(b"odd").expect("short");
        assert_eq!(sum(0, &packet[..20]), u16::MAX);
        let pseudo = sum(17 + 11, &packet[12..20]);
        assert_eq!(sum(u32::from(pseudo), &packet[20..]), u16::MAX);
    }

    #[test]
    fn a_reply_is_found_behind_options_and_before_padding() {
        let mut packet = reply(b"hello");
        packet.extend([0; 20]);
        assert_eq!(unwrap(&packet), Some((Ipv4Addr::new(192, 0, 2, 1), &b"hello"[..])));
    }

    #[test]
    fn cut_packets_are_refused() {
        let packet = reply(b"hello");
        let accepted = (0..packet.len()).find(|&length| unwrap(&packet[..length]).is_some());
        assert_eq!(accepted, None);
    }

    #[test]
    fn a_wrong_header_checksum_is_refused() {
        let mut packet = reply(b"hello");
        packet[8] = 63;
        assert_eq!(unwrap(&packet), None);
    }

    #[test]
    fn requests_of_other_clients_are_no_replies() {
        assert_eq!(unwrap(&wrap(b"x").expect("short")), None);
    }
}
