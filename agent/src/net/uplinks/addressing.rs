//! Which addresses an uplink gets, from where, and how much its routes count. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use types::{
    config::parse_prefix,
    uplinks::{Ipv4Source, Ipv6Source, Uplink, by_priority},
};

use super::{Delegation, Plan};
use crate::net::{
    AssignedAddress,
    dhcp::client::Lease,
    dhcp6::client as dhcp6,
    kernel::Route,
    layout::Desired,
    links::{Advertised, LinkFacts},
};

/// Metric of the routes of an interface that has no rank; the interface's index is added, so that
/// the order is stable and no two interfaces have the same.
const METRIC: u32 = 1024;
/// Distance between two ranks: room for several gateways of one uplink.
const RANK: u32 = 256;
/// Distance between the gateways of one uplink.
const GATEWAY: u32 = 16;
/// What is added while an uplink's gateway is silent: more than any rank and index.
const SILENT: u32 = 1 << 24;

/// What one interface gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Addressing {
    /// What the configuration calls it.
    pub(super) label: String,
    pub(super) ipv4: Ipv4Source,
    pub(super) ipv6: Ipv6Source,
    pub(super) addresses: Vec<AssignedAddress>,
    /// Destination, length and next hop.
    pub(super) routes: Vec<(IpAddr, u8, Option<IpAddr>)>,
    pub(super) gateways: Vec<IpAddr>,
    pub(super) dns: Vec<IpAddr>,
    /// Metric of its default routes while its gateway answers.
    pub(super) metric: u32,
    /// Whether the configuration says the MTU, so that DHCP does not.
    pub(super) mtu: Option<u32>,
    /// Whether a prefix for machines is asked for.
    pub(super) delegation: Delegation,
}

/// Whether an uplink is preferred as configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Good,
    Silent,
}

impl Plan {
    /// Returns what the uplink with this number in the list gets, which is this interface.
    pub(super) fn addressing(&self, place: usize, link: &LinkFacts) -> Addressing {
        if let Desired::Listed(uplinks) = &self.desired
            && let Some(uplink) = uplinks.get(place)
        {
            let rank = by_priority(uplinks).iter().position(|other| *other == place);
            let rank = u32::try_from(rank.unwrap_or(place)).unwrap_or(0);
            return Addressing { delegation: self.delegation, ..listed(uplink, rank) };
        }
        let fixed = !self.addresses.is_empty() && place == 0;
        let (ipv4, ipv6) = match fixed {
            true => (Ipv4Source::Static, Ipv6Source::Static),
            false if self.addresses.is_empty() => (Ipv4Source::Dhcp, Ipv6Source::Auto),
            // Configured addresses belong to one interface.
            false => (Ipv4Source::Off, Ipv6Source::Off),
        };
        Addressing {
            label: link.name.clone(),
            ipv4,
            ipv6,
            addresses: if fixed { self.addresses.clone() } else { Vec::new() },
            routes: Vec::new(),
            gateways: if fixed { self.gateways.clone() } else { Vec::new() },
            dns: Vec::new(),
            metric: METRIC + link.index,
            mtu: None,
            delegation: self.delegation,
        }
    }
}

fn listed(uplink: &Uplink, rank: u32) -> Addressing {
    let routes = uplink.routes.iter().filter_map(|route| {
        let (to, length) = parse_prefix(&route.to)?;
        Some((network(to, length), length, route.via))
    });
    let assigned = uplink.assigned();
    Addressing {
        label: uplink.name.clone(),
        ipv4: uplink.ipv4(),
        ipv6: uplink.ipv6(),
        addresses: assigned.map(|(address, prefix)| AssignedAddress { address, prefix }).collect(),
        routes: routes.collect(),
        gateways: uplink.gateways.clone(),
        dns: uplink.dns.clone(),
        metric: METRIC + rank * RANK,
        mtu: uplink.mtu,
        delegation: Delegation::Unwanted,
    }
}

impl Addressing {
    /// Returns whether DHCPv6 is to be spoken, and for what, after what the last router advertised (M
    /// and O, RFC 4861 §4.2). Routers of one link may disagree: a lease that runs is kept, and renewed,
    /// whatever the next one says. Prefixes are asked for whatever routers say (RFC 7084 §4.2, WPD-4).
    pub(super) fn dhcp6(
        &self,
        advertised: Advertised,
        lease: Option<&dhcp6::Lease>,
    ) -> Option<dhcp6::Wanted> {
        let runs = lease.is_some_and(|lease| !lease.addresses.is_empty());
        let prefix = self.delegation == Delegation::Wanted;
        match (self.ipv6, advertised) {
            (Ipv6Source::Dhcp, _) | (Ipv6Source::Auto, Advertised::Managed) => {
                Some(dhcp6::Wanted { prefix, ..dhcp6::Wanted::ADDRESS })
            }
            (Ipv6Source::Auto, _) if runs => {
                Some(dhcp6::Wanted { prefix, ..dhcp6::Wanted::ADDRESS })
            }
            (Ipv6Source::Auto, _) if prefix => Some(dhcp6::Wanted::PREFIX),
            (Ipv6Source::Auto, Advertised::Other) => Some(dhcp6::Wanted::CONFIGURATION),
            (Ipv6Source::Auto, Advertised::Nothing)
            | (Ipv6Source::Slaac | Ipv6Source::Static | Ipv6Source::Off, _) => None,
        }
    }

    /// Returns whether router advertisements are listened to.
    pub(super) fn listens(&self) -> bool {
        matches!(self.ipv6, Ipv6Source::Auto | Ipv6Source::Slaac | Ipv6Source::Dhcp)
    }

    /// Returns the routes to have, with the lease's when there is one.
    pub(super) fn wanted_routes(
        &self,
        index: u32,
        lease: Option<&Lease>,
        standing: Standing,
    ) -> Vec<Route> {
        let metric = match standing {
            Standing::Good => self.metric,
            Standing::Silent => self.metric + SILENT,
        };
        let route = |to, prefix, gateway, later: u32| Route {
            to,
            prefix,
            gateway,
            source: None,
            index,
            metric: metric + later,
        };
        let mut routes: Vec<Route> = Vec::new();
        for (number, gateway) in self.gateways.iter().enumerate() {
            let any: IpAddr = match gateway {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let later = u32::try_from(number).unwrap_or(0) * GATEWAY;
            routes.push(route(any, 0, Some(*gateway), later));
        }
        routes.extend(self.routes.iter().map(|(to, length, via)| route(*to, *length, *via, 0)));
        let leased = lease.into_iter().flat_map(|lease| {
            let source = Some(lease.address.address());
            lease.routes.iter().map(move |(to, gateway)| Route {
                source,
                ..route(
                    to.network().into(),
                    to.length(),
                    (!gateway.is_unspecified()).then_some((*gateway).into()),
                    0,
                )
            })
        });
        routes.extend(leased);
        routes
    }

    /// Returns the gateway that shows whether the uplink leads anywhere.
    pub(super) fn gateway(&self, lease: Option<&Lease>) -> Option<IpAddr> {
        let leased = lease.and_then(|lease| {
            let default = lease.routes.iter().find(|(to, _)| to.length() == 0);
            default.map(|(_, gateway)| IpAddr::V4(*gateway))
        });
        self.gateways.first().copied().or(leased).filter(|gateway| !gateway.is_unspecified())
    }
}

fn network(address: IpAddr, length: u8) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let kept = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
            Ipv4Addr::from_bits(address.to_bits() & kept).into()
        }
        IpAddr::V6(address) => {
            let kept = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
            Ipv6Addr::from_bits(address.to_bits() & kept).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::{LinkAttribute, LinkMessage};
    use types::{
        config::{Network, NetworkMode},
        uplinks::{Card, StaticRoute},
    };

    use super::*;
    use crate::net::Carrier;

    fn uplink(name: &str, priority: u32) -> Uplink {
        let via = Some("192.0.2.9".parse().expect("an address"));
        Uplink {
            priority,
            addresses: vec!["192.0.2.5/24".to_owned()],
            gateways: vec!["192.0.2.1".parse().expect("an address")],
            routes: vec![StaticRoute { to: "10.1.2.3/8".to_owned(), via }],
            ..Uplink::of_card(name, Card::default())
        }
    }

    #[test]
    fn addresses_on_a_card_without_a_cable_are_told_when_another_has_one() {
        let spec = |interface: Option<&str>| Network {
            mode: NetworkMode::Static,
            addresses: vec!["192.0.2.5/24".to_owned()],
            interface: interface.map(str::to_owned),
            ..Network::default()
        };
        let card = |index, carrier| {
            let mut message = LinkMessage::default();
            message.header.index = index;
            message.attributes.push(LinkAttribute::IfName(format!("eth{index}")));
            let facts = LinkFacts::read(&message).expect("it has a name");
            (0, LinkFacts { carrier, ..facts })
        };
        let told = |interface, carriers: [Carrier; 2]| {
            let plan = Plan::new(&spec(interface)).expect("a plan");
            plan.misplaced(&[card(0, carriers[0]), card(1, carriers[1])])
        };
        let problem = told(None, [Carrier::Down, Carrier::Up]).expect("it is told");
        assert!(problem.contains("eth0") && problem.contains("eth1"), "{problem}");
        assert_eq!(told(None, [Carrier::Up, Carrier::Up]), None);
        assert_eq!(told(None, [Carrier::Down, Carrier::Down]), None);
        assert_eq!(told(Some("eth0"), [Carrier::Down, Carrier::Up]), None);
    }

    #[test]
    fn a_silent_uplink_counts_less_than_any_other() {
        let uplinks: Vec<Uplink> = (0..32).map(|n| uplink(&format!("u{n}"), 31 - n)).collect();
        let metrics: Vec<u32> = by_priority(&uplinks)
            .iter()
            .zip(0..)
            .map(|(place, rank)| listed(&uplinks[*place], rank).metric)
            .collect();
        assert!(metrics.is_sorted(), "{metrics:?}");
        let first = listed(&uplinks[31], 0).wanted_routes(2, None, Standing::Silent);
        assert!(first.iter().all(|route| route.metric > metrics[31]), "{first:?}");
    }

    #[test]
    fn a_router_that_says_less_than_another_takes_no_lease_away() {
        let card = Uplink { ipv6: Some(Ipv6Source::Auto), ..uplink("a", 0) };
        let auto = listed(&card, 0);
        let mut lease = dhcp6::Lease {
            addresses: Vec::new(),
            prefixes: Vec::new(),
            dns: Vec::new(),
            ntp: Vec::new(),
            document: None,
            server: vec![1],
            renew: None,
            rebind: None,
            expires: None,
        };
        let (address, configuration) =
            (Some(dhcp6::Wanted::ADDRESS), Some(dhcp6::Wanted::CONFIGURATION));
        assert_eq!(auto.dhcp6(Advertised::Managed, None), address);
        assert_eq!(auto.dhcp6(Advertised::Other, None), configuration);
        assert_eq!(auto.dhcp6(Advertised::Other, Some(&lease)), configuration, "no address in it");
        lease.addresses.push(dhcp6::LeasedAddress {
            address: "2001:db8::5".parse().expect("an address"),
            preferred_until: None,
            valid_until: None,
        });
        assert_eq!(auto.dhcp6(Advertised::Other, Some(&lease)), address);
        assert_eq!(auto.dhcp6(Advertised::Nothing, Some(&lease)), address);
        let delegation = Delegation::Wanted;
        let auto = Addressing { delegation, ..auto };
        assert_eq!(auto.dhcp6(Advertised::Nothing, None), Some(dhcp6::Wanted::PREFIX));
        let both = dhcp6::Wanted { address: true, prefix: true };
        assert_eq!(auto.dhcp6(Advertised::Nothing, Some(&lease)), Some(both));
        let slaac = Addressing { ipv6: Ipv6Source::Slaac, ..auto };
        assert_eq!(slaac.dhcp6(Advertised::Managed, None), None);
    }

    #[test]
    fn a_route_goes_to_the_network_whatever_the_host_part() {
        let routes = listed(&uplink("a", 0), 0).wanted_routes(2, None, Standing::Good);
        let plain: Vec<String> =
            routes.iter().map(|route| format!("{}/{}", route.to, route.prefix)).collect();
        assert_eq!(plain, ["0.0.0.0/0", "10.0.0.0/8"]);
        assert_eq!(network("2001:db8::1".parse().expect("one"), 0), Ipv6Addr::UNSPECIFIED);
    }
}
