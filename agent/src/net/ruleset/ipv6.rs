//! The rules of guests' IPv6. Which are, beside those that are alike for both families:
//!
//! * A guest sends from its own network of 64 bits, or from a link-local address and then only what
//!   neighbour and router discovery need.
//! * It uses few addresses at a time ([`SOURCES_KEPT`]): each takes a place in the node's table of
//!   neighbours, which all guests and uplinks share.
//! * A guest is nobody's router and nobody's DHCP server: advertisements, redirects and DHCPv6
//!   answers of a guest are dropped.
//! * A guest reaches no special-purpose network ([`SPECIAL_NETWORKS6`]), except name servers.

use std::net::Ipv6Addr;

#[cfg(doc)]
use super::encode::SOURCES_KEPT;
use super::{Address, DNS, Guest, Rule, Shared, Statement, Verdict, flow_rules, rule};
use crate::net::{
    dhcp6,
    machines::ipv6::{Exit, GUEST_LENGTH},
};

/// Name of the chain that says what may leave.
pub(super) const OUTWARD6: &str = "outward6";

/// Neighbour and router discovery, RFC 4861; what listeners say, RFC 2710 §3.1 and, the last, RFC 3810.
pub(super) const LISTENER_REPORT_V1: u8 = 131;
pub(super) const LISTENER_DONE: u8 = 132;
pub(super) const ROUTER_SOLICITATION: u8 = 133;
pub(super) const ROUTER_ADVERTISEMENT: u8 = 134;
pub(super) const NEIGHBOUR_SOLICITATION: u8 = 135;
pub(super) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
pub(super) const REDIRECT: u8 = 137;
pub(super) const LISTENER_REPORT: u8 = 143;
/// What a guest asks and reports, also before it has an address. A listener reports in the version of its
/// link's querier, and a switch that listens forwards no multicast, as which neighbours are solicited, to
/// whom it has heard no report from.
pub(super) const ASKS: [u8; 5] = [
    ROUTER_SOLICITATION,
    NEIGHBOUR_SOLICITATION,
    LISTENER_REPORT_V1,
    LISTENER_DONE,
    LISTENER_REPORT,
];
/// Such messages per second that a guest may send, and how many at once.
pub(super) const DISCOVERY_RATE: u64 = 50;
pub(super) const DISCOVERY_BURST: u32 = 100;

pub(super) const LINK_LOCAL: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10);

/// Networks that are not the internet. Source: IANA IPv6 Special-Purpose Address Registry, those that
/// are not globally reachable; RFC 4291 for the first (mapped and compatible addresses included) and
/// the last, RFC 3879 for the one before.
pub const SPECIAL_NETWORKS6: [(Ipv6Addr, u8); 9] = [
    (Ipv6Addr::UNSPECIFIED, 8),
    (Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48),
    (Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0), 64),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x5f00, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7),
    LINK_LOCAL,
    (Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8),
];

/// What may enter from a tap, to be put before the rule that drops the rest.
pub(super) fn guest(guest: &Guest, network: Ipv6Addr) -> Vec<Rule> {
    let from = |network: Ipv6Addr, length: u8, more: &[Statement]| {
        let mut statements = vec![
            Statement::Hardware(super::Test::Is, guest.hardware),
            Statement::EtherTypeIpv6,
            Statement::Address6(Address::Source, network, length),
        ];
        statements.extend_from_slice(more);
        Rule { statements }
    };
    let limit = Statement::Limit { per_second: DISCOVERY_RATE, burst: DISCOVERY_BURST };
    let note = Statement::NoteSource6(guest.interface.clone());
    let accept = Statement::Verdict(Verdict::Accept);
    let discovery = |network: Ipv6Addr, length: u8, kinds: &[u8], more: &[Statement]| {
        let rules = kinds.iter().map(|kind| {
            let asks = [Statement::Icmp6(*kind), limit.clone()];
            from(network, length, &[&asks[..], more, std::slice::from_ref(&accept)].concat())
        });
        rules.collect::<Vec<Rule>>()
    };
    let drop = [Statement::Counter, Statement::Verdict(Verdict::Drop)];
    let own = |more: Statement| from(network, GUEST_LENGTH, &[&[more], &drop[..]].concat());
    let answers = [NEIGHBOUR_ADVERTISEMENT];
    let serves = Statement::Udp { from: dhcp6::SERVER_PORT, to: dhcp6::CLIENT_PORT };
    let (link, length) = LINK_LOCAL;
    [
        // An address that is being checked is not used yet.
        discovery(Ipv6Addr::UNSPECIFIED, 128, &ASKS, &[]),
        discovery(link, length, &[&ASKS[..], &answers].concat(), std::slice::from_ref(&note)),
        vec![
            own(Statement::Icmp6(ROUTER_ADVERTISEMENT)),
            own(Statement::Icmp6(REDIRECT)),
            own(serves),
            from(network, GUEST_LENGTH, &[note.clone(), accept.clone()]),
        ],
    ]
    .concat()
}

/// What a guest may say to the node.
pub(super) fn input(from_guest: &Statement) -> Vec<Rule> {
    let rules = ASKS.iter().chain([&NEIGHBOUR_ADVERTISEMENT]).map(|kind| {
        rule([
            from_guest.clone(),
            Statement::Ipv6,
            Statement::Icmp6(*kind),
            Statement::Verdict(Verdict::Accept),
        ])
    });
    rules.collect()
}

/// What may leave.
pub(super) fn outward(shared: &Shared) -> Vec<Rule> {
    let accept = || Statement::Verdict(Verdict::Accept);
    let to = |network, length| Statement::Address6(Address::Destination, network, length);
    let mut rules = flow_rules();
    for server in &shared.dns6 {
        rules.push(rule([to(*server, 128), Statement::UdpTo(DNS), accept()]));
        rules.push(rule([to(*server, 128), Statement::TcpTo(DNS), accept()]));
    }
    for (network, length) in SPECIAL_NETWORKS6 {
        rules.push(rule([to(network, length), Statement::Counter, Statement::Reject]));
    }
    // Neighbours of whom nothing is special but that they are neighbours.
    if let Some(net) = &shared.ipv6 {
        rules.push(rule([to(net.prefix(), net.length()), Statement::Counter, Statement::Reject]));
    }
    rules.push(rule([accept()]));
    rules
}

/// Whether what leaves gets the node's address.
pub(super) fn leaving(shared: &Shared, outside: Statement) -> Option<Rule> {
    let net = shared.ipv6.filter(|net| net.exit() == Exit::Masquerade)?;
    Some(rule([
        Statement::Ipv6,
        Statement::Address6(Address::Source, net.prefix(), net.length()),
        outside,
        Statement::Masquerade,
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::HardwareAddress;

    #[test]
    fn listeners_of_both_versions_are_heard() {
        let network = "2001:db8:0:7::".parse().expect("a network");
        let rules = guest(
            &Guest {
                interface: "hf0".to_owned(),
                hardware: HardwareAddress([2, 0, 0, 0, 0, 1]),
                address: [10, 77, 0, 2].into(),
                limit: None,
                network6: Some(network),
            },
            network,
        );
        let input = input(&Statement::Ipv6);
        for kind in [131, 132, 143] {
            let says = Statement::Icmp6(kind);
            let limit = Statement::Limit { per_second: DISCOVERY_RATE, burst: DISCOVERY_BURST };
            for (from, length) in [(Ipv6Addr::UNSPECIFIED, 128), LINK_LOCAL] {
                let from = Statement::Address6(Address::Source, from, length);
                let wanted = [&from, &says, &limit, &Statement::Verdict(Verdict::Accept)];
                let accepts =
                    |rule: &&Rule| wanted.iter().all(|part| rule.statements.contains(part));
                assert_eq!(rules.iter().filter(accepts).count(), 1, "{kind} from {from:?}");
            }
            assert!(input.iter().any(|rule| rule.statements.contains(&says)), "{kind}");
        }
    }
}
