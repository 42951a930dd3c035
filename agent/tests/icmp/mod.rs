//! Forged packets, for tests.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::OwnedFd,
};

use rustix::net::{
    AddressFamily, Protocol, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with,
};

/// Tells `node` that its datagrams from port 5555 to `server` are too big for the path.
/// RFC 792 "Destination Unreachable", RFC 1191 §4.
pub(crate) fn send_too_big(node: &str, server: &str, mtu: u16) {
    let node: Ipv4Addr = node.parse().unwrap();
    let server: SocketAddrV4 = server.parse().unwrap();
    let mut quoted = vec![0x45, 0, 0x05, 0xdc, 0, 0, 0x40, 0, 64, 17, 0, 0];
    quoted.extend(node.octets());
    quoted.extend(server.ip().octets());
    let header = checksum(&quoted);
    quoted[10..12].copy_from_slice(&header.to_be_bytes());
    quoted.extend(5555_u16.to_be_bytes());
    quoted.extend(server.port().to_be_bytes());
    quoted.extend([0x05, 0xc8, 0, 0]);
    let mut error = vec![3, 4, 0, 0, 0, 0];
    error.extend(mtu.to_be_bytes());
    error.extend(quoted);
    let whole = checksum(&error);
    error[2..4].copy_from_slice(&whole.to_be_bytes());
    let socket = raw(ipproto::ICMP);
    sendto(&socket, &error, SendFlags::empty(), &SocketAddrV4::new(node, 0)).unwrap();
}

/// Ends a connection of port 5555 to `server` that there is not. RFC 9293 §3.1.
pub(crate) fn send_reset(from: &str, server: &str) {
    let from: Ipv4Addr = from.parse().unwrap();
    let server: SocketAddrV4 = server.parse().unwrap();
    let mut segment = 5555_u16.to_be_bytes().to_vec();
    segment.extend(server.port().to_be_bytes());
    segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x04, 0, 0, 0, 0, 0, 0]);
    let pseudo = [&from.octets()[..], &server.ip().octets(), &[0, 6, 0, 20], &segment].concat();
    let whole = checksum(&pseudo);
    segment[16..18].copy_from_slice(&whole.to_be_bytes());
    let socket = raw(ipproto::TCP);
    sendto(&socket, &segment, SendFlags::empty(), &SocketAddrV4::new(*server.ip(), 0)).unwrap();
}

/// A socket that sends and hears packets of a protocol.
pub(crate) fn raw(protocol: Protocol) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    socket_with(AddressFamily::INET, SocketType::RAW, flags, Some(protocol)).unwrap()
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let (words, _) = bytes.as_chunks::<2>();
    let sum: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum >> 16) + (sum & 0xffff);
    !u16::try_from((folded >> 16) + (folded & 0xffff)).unwrap()
}
