//! What a server granted, read from its answer. Pure.
//! Source: RFC 8415 §7.7, §14.2 and §21.

use std::{
    net::Ipv6Addr,
    time::{Duration, Instant},
};

use super::message::{Association, Options, option};

/// Times of all ones do not end, RFC 8415 §7.7.
const INFINITE: u32 = u32::MAX;
/// Lists longer than this are cut.
const MAX_LIST: usize = 8;
/// Least time to the first renewal; shorter ones would flood a server.
const LEAST_RENEW: Duration = Duration::from_secs(2);

/// What a server granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The addresses; none when only configuration was asked for.
    pub addresses: Vec<LeasedAddress>,
    /// The prefixes, which are routed to the node; none unless they were asked for.
    pub prefixes: Vec<DelegatedPrefix>,
    /// Name servers.
    pub dns: Vec<Ipv6Addr>,
    /// Time servers.
    pub ntp: Vec<Ipv6Addr>,
    /// Where the node's configuration is, as it came: a URL, in option 65224.
    pub document: Option<Vec<u8>>,
    /// DUID of the server.
    pub server: Vec<u8>,
    /// When to ask the server again; never for addresses without end, as the next two.
    pub renew: Option<Instant>,
    /// When to ask any server.
    pub rebind: Option<Instant>,
    /// When the last address may no longer be used.
    pub expires: Option<Instant>,
}

/// An address with its times; `None` is for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedAddress {
    /// The address.
    pub address: Ipv6Addr,
    /// No new connection uses it afterwards.
    pub preferred_until: Option<Instant>,
    /// It may not be used afterwards.
    pub valid_until: Option<Instant>,
}

/// A prefix that is the node's as long as the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelegatedPrefix {
    /// The first address.
    pub prefix: Ipv6Addr,
    /// Length in bits, 1 to 127.
    pub length: u8,
}

impl Lease {
    pub(super) fn plain(&self) -> Vec<(Ipv6Addr, u8)> {
        self.addresses.iter().map(|leased| (leased.address, 128)).collect()
    }

    pub(super) fn plain_prefixes(&self) -> Vec<(Ipv6Addr, u8)> {
        self.prefixes.iter().map(|delegated| (delegated.prefix, delegated.length)).collect()
    }
}

pub(super) fn configuration(options: &Options) -> Lease {
    let useful = |mut list: Vec<Ipv6Addr>| {
        // A link-local server would need its interface named.
        list.retain(|address| !address.is_unspecified() && !address.is_multicast());
        list.retain(|address| !address.is_unicast_link_local());
        list.truncate(MAX_LIST);
        list
    };
    let mut ntp = options.ntp_servers();
    ntp.extend(options.addresses(option::SNTP_SERVERS));
    Lease {
        addresses: Vec::new(),
        prefixes: Vec::new(),
        dns: useful(options.addresses(option::NAME_SERVERS)),
        ntp: useful(ntp),
        document: options.get(option::DOCUMENT).filter(|url| !url.is_empty()).map(<[u8]>::to_vec),
        server: options.get(option::SERVER).unwrap_or_default().to_vec(),
        renew: None,
        rebind: None,
        expires: None,
    }
}

/// What was granted; `None` when nothing that can be used was.
pub(super) fn granted(
    now: Instant,
    options: &Options,
    associations: &[Association],
) -> Option<Lease> {
    let after = |seconds: u32| match seconds {
        INFINITE => None,
        seconds => Some(now + Duration::from_secs(u64::from(seconds))),
    };
    let usable = associations.iter().flat_map(|one| one.granted.iter().take(MAX_LIST));
    let usable: Vec<_> = usable.filter(|granted| granted.valid_s > 0).collect();
    let least_preferred = usable.iter().map(|granted| granted.preferred_s).min()?;
    let most_valid = usable.iter().map(|granted| granted.valid_s).max()?;
    // RFC 8415 §14.2: without times of the server's, half and four fifths of the preferred time.
    let part = |said: u32, of: u32, in_all: u32| match (said, least_preferred) {
        (0, INFINITE) => INFINITE,
        (0, preferred) => preferred / in_all * of,
        (said, _) => said,
    };
    // RFC 8415 §18.2.4: all are renewed together, when the first one is due.
    let first = |times: fn(&Association) -> u32| {
        associations.iter().map(times).filter(|seconds| *seconds > 0).min().unwrap_or(0)
    };
    let renew = after(part(first(|one| one.renew_s), 1, 2)).map(|at| at.max(now + LEAST_RENEW));
    let rebind = after(part(first(|one| one.rebind_s), 4, 5)).max(renew);
    let mut lease = configuration(options);
    for granted in usable {
        let address = granted.address;
        match granted.length {
            128 => lease.addresses.push(LeasedAddress {
                address,
                preferred_until: after(granted.preferred_s),
                valid_until: after(granted.valid_s),
            }),
            length => lease.prefixes.push(DelegatedPrefix { prefix: address, length }),
        }
    }
    lease.expires = after(most_valid);
    // A renewal that would come after the end comes before it.
    let halfway = lease.expires.map(|_| now + Duration::from_secs(u64::from(most_valid) / 2));
    lease.renew = match (renew, halfway) {
        (Some(renew), Some(halfway)) => Some(renew.min(halfway)),
        (renew, halfway) => renew.or(halfway),
    };
    lease.rebind = match (rebind, lease.expires) {
        (Some(rebind), Some(expires)) => Some(rebind.min(expires)),
        (rebind, expires) => rebind.or(expires),
    };
    Some(lease)
}
