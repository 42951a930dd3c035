//! The rules of bridged machines, which are stations of the provider's network.
//!
//! One `netdev` chain per tap sees a guest's frames before the bridge does; nothing that it drops
//! reaches the uplink or another guest. What is enforced:
//!
//! * A guest sends with its own hardware address, and untagged: no frames for other VLANs.
//! * It uses the addresses that are bound to it, and no others: the IPv4 address that the network's
//!   DHCP server gave it, and the IPv6 addresses that it checked and found free
//!   ([`crate::net::machines::bridged`]). That goes for ARP and neighbour discovery too, so no guest
//!   answers for a router or a neighbour.
//! * From link-local IPv6 addresses it sends what discovery and DHCPv6 need, and nothing else: whoever
//!   would play the router has to send from there, in fragments or not.
//! * It is nobody's DHCP server and nobody's router.
//! * It asks for leases with its own hardware address, and not often.
//! * It sends no faster than its limit.
//! * The node itself hears nothing of the bridge: a chain without rules at the bridge drops all of it.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::{
    Address, ByteRate, Chain, FILTER_PRIORITY, Hook, INGRESS_PRIORITY, Interface, Policy, Rule,
    Statement, Test, Verdict,
    ipv6::{
        ASKS, DISCOVERY_BURST, DISCOVERY_RATE, LINK_LOCAL, NEIGHBOUR_ADVERTISEMENT,
        NEIGHBOUR_SOLICITATION, REDIRECT, ROUTER_ADVERTISEMENT, ROUTER_SOLICITATION,
    },
    rule,
};
use crate::net::{HardwareAddress, Ipv4Prefix, dhcp, dhcp6};

/// DHCP messages per second that a guest may send, and how many at once: it shares the server, and
/// its pool of addresses, with the provider's other stations.
const DHCP_RATE: u64 = 1;
const DHCP_BURST: u32 = 10;

/// What a guest's chain depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its tap.
    pub interface: String,
    /// Its hardware address.
    pub hardware: HardwareAddress,
    /// The IPv4 address that is bound to it.
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 addresses that are bound to it.
    pub ipv6: Vec<Ipv6Addr>,
    /// Most that it may send, if that is bounded.
    pub limit: Option<ByteRate>,
}

/// Returns the chain of `netdev holdfast` for one guest: what may enter from its tap.
pub fn guest(port: &Port) -> Chain {
    let drop = || rule([Statement::Counter, Statement::Verdict(Verdict::Drop)]);
    let excess = port.limit.map(|rate| {
        let (per_second, burst) = (rate.per_second, rate.burst(40));
        rule([
            Statement::BytesOver { per_second, burst },
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ])
    });
    let foreign = rule([
        Statement::Hardware(Test::IsNot, port.hardware),
        Statement::Counter,
        Statement::Verdict(Verdict::Drop),
    ]);
    let mut rules: Vec<Rule> = excess.into_iter().collect();
    rules.push(foreign);
    rules.extend(arp(port));
    rules.extend(ipv4(port));
    rules.extend(ipv6(port));
    rules.push(drop());
    Chain {
        name: port.interface.clone(),
        hook: Some(Hook::Ingress { priority: INGRESS_PRIORITY, device: port.interface.clone() }),
        policy: Policy::Drop,
        rules,
    }
}

/// Returns the chain of `netdev holdfast` for the bridge itself: the node takes nothing from it.
pub fn deaf(bridge: &str) -> Chain {
    Chain {
        name: bridge.to_owned(),
        hook: Some(Hook::Ingress { priority: INGRESS_PRIORITY, device: bridge.to_owned() }),
        policy: Policy::Drop,
        rules: Vec::new(),
    }
}

/// Returns the chains of `inet holdfast`: nothing is forwarded, and nothing comes in from the bridge.
pub fn shared(bridge: &str) -> Vec<Chain> {
    let from = Statement::Interface(Interface::In, Test::Is, bridge.to_owned());
    let input = rule([from, Statement::Counter, Statement::Verdict(Verdict::Drop)]);
    let chain = |name: &str, hook, policy, rules| Chain {
        name: name.to_owned(),
        hook: Some(hook),
        policy,
        rules,
    };
    let priority = FILTER_PRIORITY;
    vec![
        chain("input", Hook::Input { priority }, Policy::Accept, vec![input]),
        chain("forward", Hook::Forward { priority }, Policy::Drop, Vec::new()),
    ]
}

fn accept() -> Statement {
    Statement::Verdict(Verdict::Accept)
}

fn discovery_limit() -> Statement {
    Statement::Limit { per_second: DISCOVERY_RATE, burst: DISCOVERY_BURST }
}

fn arp(port: &Port) -> Vec<Rule> {
    // RFC 5227: a guest that checks whether its address is free has none yet.
    let senders = [Some(Ipv4Addr::UNSPECIFIED), port.ipv4];
    let rules = senders.into_iter().flatten().map(|sender| {
        rule([Statement::ArpSender(port.hardware, sender), discovery_limit(), accept()])
    });
    rules.collect()
}

fn ipv4(port: &Port) -> Vec<Rule> {
    let from = |address| Statement::Address(Address::Source, Ipv4Prefix::single(address));
    let client = Statement::Udp { from: dhcp::CLIENT_PORT, to: dhcp::SERVER_PORT };
    let limit = Statement::Limit { per_second: DHCP_RATE, burst: DHCP_BURST };
    let broadcast =
        Statement::Address(Address::Destination, Ipv4Prefix::single(Ipv4Addr::BROADCAST));
    let asks = |more: &[Statement]| {
        let own = [Statement::DhcpClient(port.hardware), limit.clone(), accept()];
        let statements =
            [&[Statement::EtherTypeIpv4], more, std::slice::from_ref(&client), &own[..]].concat();
        Rule { statements }
    };
    let drop = |what: Statement| {
        rule([
            Statement::EtherTypeIpv4,
            what,
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ])
    };
    let mut rules = vec![asks(&[from(Ipv4Addr::UNSPECIFIED), broadcast])];
    rules.extend(port.ipv4.map(|own| asks(&[from(own)])));
    rules.push(drop(client));
    rules.push(drop(Statement::UdpTo(dhcp::CLIENT_PORT)));
    rules.extend(port.ipv4.map(|own| rule([Statement::EtherTypeIpv4, from(own), accept()])));
    rules
}

/// A guest may have many addresses, so what most packets are is decided before its messages of ICMPv6.
fn ipv6(port: &Port) -> Vec<Rule> {
    let drop = |what: Statement| {
        rule([
            Statement::EtherTypeIpv6,
            what,
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ])
    };
    let is_local = |address: &&Ipv6Addr| address.is_unicast_link_local();
    let global = || port.ipv6.iter().rev().filter(|address| !is_local(address));
    let client = Statement::Udp { from: dhcp6::CLIENT_PORT, to: dhcp6::SERVER_PORT };
    let limit = Statement::Limit { per_second: DHCP_RATE, burst: DHCP_BURST };
    let mut rules = vec![drop(Statement::UdpTo(dhcp6::CLIENT_PORT))];
    for own in port.ipv6.iter().filter(is_local) {
        let v6 = Statement::EtherTypeIpv6;
        rules.push(rule([v6, from6(*own), client.clone(), limit.clone(), accept()]));
    }
    rules.push(drop(client));
    rules.extend(global().map(|own| {
        rule([Statement::EtherTypeIpv6, from6(*own), Statement::OtherThanIcmp6, accept()])
    }));
    rules.extend(discovery(port));
    let (link, length) = LINK_LOCAL;
    rules.push(drop(Statement::Address6(Address::Source, link, length)));
    rules.extend(global().map(|own| rule([Statement::EtherTypeIpv6, from6(*own), accept()])));
    rules
}

/// What a guest may say to neighbours, routers and switches, and what it may not.
fn discovery(port: &Port) -> Vec<Rule> {
    let says = |source: Ipv6Addr, kind: u8| {
        let (v6, kind) = (Statement::EtherTypeIpv6, Statement::Icmp6(kind));
        rule([v6, from6(source), kind, discovery_limit(), accept()])
    };
    // An address that is being checked is not used yet.
    let sources = port.ipv6.iter().copied().chain([Ipv6Addr::UNSPECIFIED]);
    let mut rules: Vec<Rule> =
        sources.flat_map(|source| ASKS.map(|kind| says(source, kind))).collect();
    for target in &port.ipv6 {
        let (v6, target) = (Statement::EtherTypeIpv6, Statement::Icmp6Target(*target));
        let answer = Statement::Icmp6(NEIGHBOUR_ADVERTISEMENT);
        rules.push(rule([v6, answer, target, discovery_limit(), accept()]));
    }
    let never = [
        ROUTER_SOLICITATION,
        NEIGHBOUR_SOLICITATION,
        NEIGHBOUR_ADVERTISEMENT,
        ROUTER_ADVERTISEMENT,
        REDIRECT,
    ];
    rules.extend(never.map(|kind| {
        rule([
            Statement::EtherTypeIpv6,
            Statement::Icmp6(kind),
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ])
    }));
    rules
}

fn from6(address: Ipv6Addr) -> Statement {
    Statement::Address6(Address::Source, address, 128)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port() -> Port {
        Port {
            interface: "hf0".to_owned(),
            hardware: HardwareAddress([2, 0, 0, 0, 0, 1]),
            ipv4: None,
            ipv6: Vec::new(),
            limit: None,
        }
    }

    fn accepts(chain: &Chain, statement: &Statement) -> usize {
        let accepting = chain.rules.iter().filter(|rule| {
            rule.statements.contains(statement) && rule.statements.last() == Some(&accept())
        });
        accepting.count()
    }

    #[test]
    fn without_a_bound_address_only_questions_leave() {
        let chain = guest(&port());
        assert_eq!(chain.policy, Policy::Drop);
        assert_eq!(accepts(&chain, &Statement::EtherTypeIpv4), 1, "a DHCP client's broadcast");
        assert_eq!(accepts(&chain, &Statement::EtherTypeIpv6), 5, "asks from no address");
    }

    #[test]
    fn listeners_of_both_versions_are_heard() {
        let link: Ipv6Addr = "fe80::7".parse().expect("an address");
        let chain = guest(&Port { ipv6: vec![link], ..port() });
        for kind in [131, 132, 143] {
            assert_eq!(accepts(&chain, &Statement::Icmp6(kind)), 2, "{kind}, from :: and {link}");
        }
    }

    #[test]
    fn what_is_bound_may_be_used_and_answered_for() {
        let address: Ipv6Addr = "2001:db8::7".parse().expect("an address");
        let chain =
            guest(&Port { ipv4: Some(Ipv4Addr::new(192, 0, 2, 7)), ipv6: vec![address], ..port() });
        assert_eq!(accepts(&chain, &Statement::EtherTypeIpv4), 3);
        assert_eq!(accepts(&chain, &Statement::Icmp6Target(address)), 1);
        assert_eq!(accepts(&chain, &Statement::Icmp6(ROUTER_ADVERTISEMENT)), 0);
    }

    #[test]
    fn what_a_guest_with_many_addresses_sends_most_meets_few_rules() {
        let ipv6: Vec<Ipv6Addr> =
            (1..=32).map(|n| Ipv6Addr::from_bits(n | 0x2001 << 112)).collect();
        let chain = guest(&Port { ipv6: ipv6.clone(), ..port() });
        let place = |address: Ipv6Addr| {
            let wanted = [from6(address), Statement::OtherThanIcmp6, accept()];
            chain.rules.iter().position(|rule| rule.statements.ends_with(&wanted))
        };
        let first = place(ipv6[31]).expect("the one that was used last comes first");
        assert!(first < 12, "{first}");
        assert_eq!(place(ipv6[0]), Some(first + 31));
    }
}
