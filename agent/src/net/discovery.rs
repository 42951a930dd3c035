//! Sockets that speak of routers on one link, for who is one and for who looks for one.
//! Source: RFC 4861 §4.1, §4.2 and §6.1.

use std::{
    ffi::OsString,
    io,
    net::{Ipv6Addr, SocketAddrV6},
    os::fd::OwnedFd,
};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with,
    sockopt::{set_ipv6_multicast_hops, set_ipv6_unicast_hops},
};

/// All routers on a link.
const ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
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

/// Asks the routers on the link with this index to advertise themselves.
///
/// | Offset | Size | Field                   |
/// |--------|------|-------------------------|
/// | 0      | 2    | 133, 0                  |
/// | 2      | 2    | checksum, by the kernel |
/// | 4      | 4    | 0                       |
///
/// The option with the sender's hardware address is left out: it must not be there while the kernel still checks
/// its link-local address and sends from none, and routers do without it.
pub(super) fn solicit(socket: &OwnedFd, index: u32) -> io::Result<()> {
    let to = SocketAddrV6::new(ROUTERS, 0, 0, index);
    sendto(socket, &[SOLICITATION, 0, 0, 0, 0, 0, 0, 0], SendFlags::empty(), &to)?;
    Ok(())
}
