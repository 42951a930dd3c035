//! What a server granted, read from its acknowledgement. Pure.
//! Source: RFC 2131 §4.4.5, RFC 2132, RFC 3442.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use super::message::{Message, option};
use crate::net::Ipv4Prefix;

/// Lists longer than this are cut: no resolver asks that many servers.
const MAX_LIST: usize = 8;
/// Most routes of a lease. A message has room for twice as many of the shortest.
const MAX_ROUTES: usize = 128;
/// Lease times of all ones do not end, RFC 2131 §3.3.
const INFINITE: u32 = u32::MAX;
/// Longest URL of a configuration that is kept, in bytes.
const MAX_URL: usize = 1024;

/// Least MTU that is taken from a server: IPv6's (RFC 8200 §5), which the overlay's packets need too
/// (RFC 9000 §14). Some servers say 576 to everybody, which was IPv4's least once.
pub const LEAST_MTU: u16 = 1280;

/// What a server granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The address and its network.
    pub address: Ipv4Prefix,
    /// Option 54.
    pub server: Ipv4Addr,
    /// Routes, default route included: option 121, else options 33 and 3. A gateway of 0.0.0.0 is the link.
    pub routes: Vec<(Ipv4Prefix, Ipv4Addr)>,
    /// Option 6.
    pub dns: Vec<Ipv4Addr>,
    /// Option 42.
    pub ntp: Vec<Ipv4Addr>,
    /// Option 26, at least [`LEAST_MTU`] and at most 9216. Smaller ones are not used.
    pub mtu: Option<u16>,
    /// Option 224: where the node's configuration is. The server's bytes, not looked at.
    pub document: Option<Vec<u8>>,
    /// When to ask the server again; never for a lease without end, as the next two.
    pub renew: Option<Instant>,
    /// When to ask any server.
    pub rebind: Option<Instant>,
    /// When the address may no longer be used.
    pub expires: Option<Instant>,
}

/// Returns the lease in an acknowledgement; `None` when it lacks what a lease needs.
pub(super) fn granted(now: Instant, ack: &Message) -> Option<Lease> {
    let server = ack.address(option::SERVER)?;
    let seconds = ack.number(option::LEASE_TIME).filter(|seconds| *seconds > 0)?;
    let address = match ack.address(option::SUBNET_MASK) {
        Some(mask) => Ipv4Prefix::from_mask(ack.yiaddr, mask),
        None => Ipv4Prefix::new(ack.yiaddr, classful(ack.yiaddr)),
    };
    let address = address.filter(|address| is_usable(address.address()))?;
    let (renew, rebind) = times(seconds, ack);
    let after = |seconds: u32| {
        let end = now.checked_add(Duration::from_secs(u64::from(seconds)));
        end.filter(|_| seconds != INFINITE)
    };
    Some(Lease {
        address,
        server,
        routes: routes(ack),
        dns: list(&ack.addresses(option::NAME_SERVER)),
        ntp: list(&ack.addresses(option::TIME_SERVER)),
        mtu: ack.short(option::MTU).filter(|mtu| (LEAST_MTU..=9216).contains(mtu)),
        document: ack
            .bytes(option::DOCUMENT)
            .filter(|url| url.len() <= MAX_URL)
            .map(<[u8]>::to_vec),
        renew: after(renew),
        rebind: after(rebind),
        expires: after(seconds),
    })
}

/// Returns T1 and T2 in seconds: the server's when they are in order, else those of RFC 2131
/// §4.4.5.
fn times(seconds: u32, ack: &Message) -> (u32, u32) {
    if seconds == INFINITE {
        return (INFINITE, INFINITE);
    }
    let renew = ack.number(option::RENEWAL_TIME).unwrap_or(seconds / 2);
    let rebind = ack.number(option::REBINDING_TIME).unwrap_or(seconds - seconds / 8);
    if 0 < renew && renew <= rebind && rebind <= seconds {
        (renew, rebind)
    } else {
        ((seconds / 2).max(1), (seconds - seconds / 8).max(1))
    }
}

/// RFC 3442: classless routes, when given, replace routers. They stay in their order, because one may
/// say how to reach the gateway of the next.
fn routes(ack: &Message) -> Vec<(Ipv4Prefix, Ipv4Addr)> {
    if let Some(mut routes) = ack.classless_routes() {
        let default = routes.iter().position(|(to, _)| to.length() == 0);
        if let Some(late) = default.filter(|at| *at >= MAX_ROUTES) {
            routes.swap(late, MAX_ROUTES - 1);
        }
        routes.truncate(MAX_ROUTES);
        return routes;
    }
    let routers = ack.addresses(option::ROUTER);
    let gateway = routers.iter().copied().find(|router| is_usable(*router));
    let default = Ipv4Prefix::new(Ipv4Addr::UNSPECIFIED, 0);
    classful_routes(ack).into_iter().chain(default.zip(gateway)).collect()
}

/// RFC 2132 §5.8: destinations with their routers. The class says which network a destination is, and it is
/// a host where it has further bits. None may be the default route.
fn classful_routes(ack: &Message) -> Vec<(Ipv4Prefix, Ipv4Addr)> {
    let (pairs, _) = ack.bytes(option::STATIC_ROUTES).unwrap_or_default().as_chunks::<8>();
    let routes = pairs.iter().filter_map(|[a, b, c, d, router @ ..]| {
        let (to, router) = (Ipv4Addr::new(*a, *b, *c, *d), Ipv4Addr::from(*router));
        let network = Ipv4Prefix::new(to, classful(to))?;
        let host = Ipv4Prefix::single(to);
        let to_network = if network.network() == to { network } else { host };
        (is_usable(to) && is_usable(router)).then_some((to_network, router))
    });
    routes.take(MAX_ROUTES).collect()
}

fn list(addresses: &[Ipv4Addr]) -> Vec<Ipv4Addr> {
    addresses.iter().copied().filter(|address| !address.is_unspecified()).take(MAX_LIST).collect()
}

pub(super) fn is_usable(address: Ipv4Addr) -> bool {
    let special = address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || address.octets()[0] >= 240;
    !special
}

/// RFC 791 §2.3, for servers that name no mask.
fn classful(address: Ipv4Addr) -> u8 {
    match address.octets()[0] {
        0..=127 => 8,
        128..=191 => 16,
        _ => 24,
    }
}
