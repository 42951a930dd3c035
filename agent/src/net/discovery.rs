//! Sockets that speak of routers on one link, for who is one and for who looks for one.
//! Source: RFC 4861 §4.1, §4.2 and §6.1.

use std::{ffi::OsString, io, os::fd::OwnedFd};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, ipproto, socket_with,
    sockopt::{set_ipv6_multicast_hops, set_ipv6_unicast_hops},
};

/// ICMPv6 type of a router solicitation.
pub(super) const SOLICITATION: u8 = 133;
/// ICMPv6 type of a router advertisement.
pub(super) const ADVERTISEMENT: u8 = 134;
/// Receivers drop what was forwarded (RFC 4861 §6.1.1 and §6.1.2).
const HOPS: u8 = 255;

/// Opens a socket that sends and receives the ICMPv6 packets of an interface, each without its IPv6 header. The
/// kernel fills in checksums.
pub(super) fn open(interface: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET6, SocketType::RAW, flags, Some(ipproto::ICMPV6))?;
    setsockopt(&socket, sockopt::BindToDevice, &OsString::from(interface))?;
    set_ipv6_multicast_hops(&socket, u32::from(HOPS))?;
    set_ipv6_unicast_hops(&socket, Some(HOPS))?;
    Ok(socket)
}
