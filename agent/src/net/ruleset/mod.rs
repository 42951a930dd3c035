//! The packet filter that keeps guests away from the node and from each other, as data.
//!
//! Two nf_tables tables. `netdev holdfast` has one chain per tap and sees frames before anything
//! else does: only IPv4 and ARP from the guest's own hardware and IPv4 address enter. `inet
//! holdfast` says where such packets may go: to the internet side, and nowhere on the node but its
//! DHCP server. What is enforced, each line a rule below:
//!
//! * A guest sends with its own hardware address and IPv4 address only, and from its own IPv6 network
//!   when it has one ([`ipv6`]); no other protocol.
//! * A guest opens nothing to any address of the node, except DHCP. It answers what the node opens.
//! * A guest reaches no other guest: guests share no link, and forwarding between taps is dropped.
//! * A guest reaches no special-purpose network ([`SPECIAL_NETWORKS`]: private, shared, link-local
//!   with its metadata services, multicast, …), except the name servers it is told, on port 53, and
//!   what the provider lists as reachable.
//! * A guest's ICMP errors go nowhere: a forged one would disturb flows of the node and of others. Nor
//!   does what fits no flow, which nothing would translate.
//! * A guest has at most [`FLOWS_PER_GUEST`] flows at a time, and begins them no faster than
//!   [`FLOW_RATE`], so that the node's table of them ([`crate::net::machines`]) has room for everybody's.
//! * A guest sends no faster than its limit, when it has one. What it receives is shaped elsewhere, by
//!   a queue on its tap.
//! * Nothing outside opens a connection to a guest, unless the provider opens those whose addresses are
//!   routed to the node ([`inward`]). The node forwards nothing else either.
//! * What leaves has the node's address, unless the guest's own is routed to the node.
//!
//! Guests with routed addresses are kept apart as all others are.
//!
//! [`encode`] turns the data into netlink messages. It sends nothing.

pub mod bridged;
pub mod encode;
mod inward;
pub mod ipv6;
mod statement;

use std::net::{Ipv4Addr, Ipv6Addr};

pub use self::statement::{
    Address, Chain, Family, Flow, FlowRate, GuestBytes, Hook, Interface, Policy, Rule, Statement,
    Test, Verdict,
};
use types::config::Inbound;

use super::{
    HardwareAddress, Ipv4Prefix, dhcp,
    machines::ipv6::{Exit, Ipv6Net},
};

/// Name of both tables.
pub const TABLE: &str = "holdfast";
/// How the names of all taps begin, and of nothing else.
pub const TAP_PREFIX: &str = "hf";
/// DHCP messages per second that a guest may send, and how many at once: clients send a few per
/// hour.
const DHCP_RATE: u64 = 5;
const DHCP_BURST: u32 = 20;
/// Flows that one guest may have at a time. A flow that begins is compared with all of its guest's, so
/// many more would cost the node's processors.
pub const FLOWS_PER_GUEST: u32 = 4096;
/// How fast a guest may begin flows, and how fast others may begin flows to one that is open: all that it
/// may have at once, and more than most services see. TCP flows that ended are in the table and not
/// counted any more (`already_closed` in `nf_conncount.c`); the rate bounds those.
pub const FLOW_RATE: FlowRate = FlowRate { per_second: 1000, burst: FLOWS_PER_GUEST };
/// Seconds for which a flow that ended is in the table: the kernel's for those that were reset, and what
/// `rootfs/sysctl.txt` says for all others (`nf_conntrack_tcp_timeout_time_wait`).
pub const ENDED_S: u64 = 10;
/// Most that one guest can have in the table, ended flows included: by what it begins, and as much again
/// by what others begin.
pub const IN_TABLE_PER_GUEST: u64 =
    FLOWS_PER_GUEST as u64 + 2 * (FLOW_RATE.burst as u64 + FLOW_RATE.per_second * ENDED_S);
/// Before connection tracking and every other hook.
const INGRESS_PRIORITY: i32 = -500;
/// `NF_IP_PRI_FILTER`.
const FILTER_PRIORITY: i32 = 0;
/// `NF_IP_PRI_NAT_SRC`.
const NAT_PRIORITY: i32 = 100;

/// Networks that are not the internet. Source: IANA IPv4 Special-Purpose Address Registry, those
/// that are not globally reachable; RFC 1112 and RFC 919 for the last two.
pub const SPECIAL_NETWORKS: [(Ipv4Addr, u8); 10] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// What the shared part of the filter depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shared {
    /// Where guests' addresses come from.
    pub subnet: Ipv4Prefix,
    /// Name servers that guests are told.
    pub dns: Vec<Ipv4Addr>,
    /// Special-purpose networks that guests may reach nevertheless.
    pub reachable: Vec<Ipv4Prefix>,
    /// How guests' IPv4 packets leave.
    pub exit: Exit,
    /// Who may open connections to guests whose addresses are routed.
    pub inbound: Inbound,
    /// Where guests' IPv6 networks come from, if they have any.
    pub ipv6: Option<Ipv6Net>,
    /// Name servers that guests are told in IPv6.
    pub dns6: Vec<Ipv6Addr>,
}

/// What a guest's part of the filter depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// Its tap.
    pub interface: String,
    /// Its hardware address.
    pub hardware: HardwareAddress,
    /// Its address.
    pub address: Ipv4Addr,
    /// Most that it may send, if that is bounded.
    pub limit: Option<ByteRate>,
    /// Its IPv6 network of 64 bits, if it has one.
    pub network6: Option<Ipv6Addr>,
}

/// A rate of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRate {
    /// Bytes per second, at least 1.
    pub per_second: u64,
}

impl ByteRate {
    /// Returns the rate of so many Mbit/s.
    pub fn from_mbit(mbit: u32) -> Self {
        Self { per_second: u64::from(mbit) * 125_000 }
    }

    /// Returns how many bytes may go at once: those of so many milliseconds, but a few packets, also
    /// of the largest that segmentation offload makes.
    pub fn burst(self, ms: u64) -> u32 {
        const LEAST: u64 = 128 << 10;
        u32::try_from((self.per_second / 1000 * ms).max(LEAST)).unwrap_or(u32::MAX)
    }
}

/// Returns the chains of `inet holdfast`.
pub fn shared(shared: &Shared) -> Vec<Chain> {
    let mut chains = vec![
        Chain {
            name: "input".to_owned(),
            hook: Some(Hook::Input { priority: FILTER_PRIORITY }),
            policy: Policy::Accept,
            rules: input(shared),
        },
        Chain {
            name: "forward".to_owned(),
            hook: Some(Hook::Forward { priority: FILTER_PRIORITY }),
            policy: Policy::Drop,
            rules: forward(shared),
        },
        Chain {
            name: OUTWARD.to_owned(),
            hook: None,
            policy: Policy::Accept,
            rules: outward(shared),
        },
        Chain {
            name: ipv6::OUTWARD6.to_owned(),
            hook: None,
            policy: Policy::Accept,
            rules: ipv6::outward(shared),
        },
        Chain {
            name: "postrouting".to_owned(),
            hook: Some(Hook::SourceNat { priority: NAT_PRIORITY }),
            policy: Policy::Accept,
            rules: leaving(shared),
        },
    ];
    chains.splice(2..2, inward::chain(shared));
    if shared.ipv6.is_none() {
        chains.retain(|chain| chain.name != ipv6::OUTWARD6);
    }
    chains
}

fn leaving(shared: &Shared) -> Vec<Rule> {
    let outside = || Statement::Interface(Interface::Out, Test::IsNot, taps());
    let mut rules = match shared.exit {
        Exit::Masquerade => {
            vec![rule([source_in(shared.subnet), outside(), Statement::Masquerade])]
        }
        Exit::Routed => Vec::new(),
    };
    rules.extend(ipv6::leaving(shared, outside()));
    rules
}

/// Returns the chain of `netdev holdfast` for one guest: what may enter from its tap.
pub fn guest(guest: &Guest) -> Chain {
    let own_hardware = Statement::Hardware(Test::Is, guest.hardware);
    let arp = |sender: Ipv4Addr| {
        rule([
            own_hardware.clone(),
            Statement::ArpSender(guest.hardware, sender),
            Statement::Verdict(Verdict::Accept),
        ])
    };
    let dhcp = Statement::Udp { from: dhcp::CLIENT_PORT, to: dhcp::SERVER_PORT };
    let limit = Statement::Limit { per_second: DHCP_RATE, burst: DHCP_BURST };
    let address = |address| Statement::Address(Address::Source, Ipv4Prefix::single(address));
    // What is too much is dropped before anything is done with it. A sender's window must fit into the
    // burst, or it would be stopped again and again: 40 ms are most paths' round trip.
    let excess = guest.limit.map(|rate| {
        let (per_second, burst) = (rate.per_second, rate.burst(40));
        rule([
            Statement::BytesOver { per_second, burst },
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ])
    });
    let mut chain = Chain {
        name: guest.interface.clone(),
        hook: Some(Hook::Ingress { priority: INGRESS_PRIORITY, device: guest.interface.clone() }),
        policy: Policy::Drop,
        rules: vec![
            arp(guest.address),
            // RFC 5227: a guest that checks whether its address is free has none yet.
            arp(Ipv4Addr::UNSPECIFIED),
            rule([
                own_hardware.clone(),
                Statement::EtherTypeIpv4,
                address(Ipv4Addr::UNSPECIFIED),
                Statement::Address(Address::Destination, Ipv4Prefix::single(Ipv4Addr::BROADCAST)),
                dhcp.clone(),
                limit.clone(),
                Statement::Verdict(Verdict::Accept),
            ]),
            rule([
                own_hardware.clone(),
                Statement::EtherTypeIpv4,
                address(guest.address),
                dhcp.clone(),
                limit,
                Statement::Verdict(Verdict::Accept),
            ]),
            rule([Statement::EtherTypeIpv4, dhcp, Statement::Verdict(Verdict::Drop)]),
            rule([
                own_hardware,
                Statement::EtherTypeIpv4,
                address(guest.address),
                Statement::Verdict(Verdict::Accept),
            ]),
            rule([Statement::Counter, Statement::Verdict(Verdict::Drop)]),
        ],
    };
    let last = chain.rules.len() - 1;
    let six = guest.network6.map(|network| ipv6::guest(guest, network));
    chain.rules.splice(last..last, six.unwrap_or_default());
    chain.rules.splice(0..0, excess);
    chain
}

const OUTWARD: &str = "outward";

fn input(shared: &Shared) -> Vec<Rule> {
    let from_guest = || Statement::Interface(Interface::In, Test::Is, taps());
    let mut rules = vec![
        rule([
            from_guest(),
            Statement::Flow(Flow::Established),
            Statement::Verdict(Verdict::Accept),
        ]),
        rule([
            from_guest(),
            Statement::Ipv4,
            Statement::Udp { from: dhcp::CLIENT_PORT, to: dhcp::SERVER_PORT },
            Statement::Verdict(Verdict::Accept),
        ]),
        rule([from_guest(), Statement::Counter, Statement::Verdict(Verdict::Drop)]),
    ];
    if shared.ipv6.is_some() {
        let last = rules.len() - 1;
        rules.splice(last..last, ipv6::input(&from_guest()));
    }
    rules
}

fn forward(shared: &Shared) -> Vec<Rule> {
    let from_guest = || Statement::Interface(Interface::In, Test::Is, taps());
    let to_guest = || Statement::Interface(Interface::Out, Test::Is, taps());
    let mut rules = vec![
        rule([from_guest(), to_guest(), Statement::Counter, Statement::Verdict(Verdict::Drop)]),
        rule([from_guest(), Statement::Verdict(Verdict::Jump(OUTWARD))]),
        rule([to_guest(), Statement::Flow(Flow::Established), Statement::Verdict(Verdict::Accept)]),
        // From outside they are wanted: path MTU discovery lives on them.
        rule([to_guest(), Statement::Flow(Flow::Related), Statement::Verdict(Verdict::Accept)]),
    ];
    if inward::chain(shared).is_some() {
        rules.push(rule([to_guest(), Statement::Verdict(Verdict::Jump(inward::INWARD))]));
    }
    rules
}

/// What may leave. The jump comes from the forward hook, so nothing here is for the node itself.
fn outward(shared: &Shared) -> Vec<Rule> {
    let destination = |network| Statement::Address(Address::Destination, network);
    let accept = || Statement::Verdict(Verdict::Accept);
    let mut rules = match shared.ipv6 {
        Some(_) => vec![
            rule([Statement::Ipv6, Statement::Verdict(Verdict::Jump(ipv6::OUTWARD6))]),
            rule([Statement::NotIpv4, Statement::Verdict(Verdict::Drop)]),
        ],
        None => vec![rule([Statement::NotIpv4, Statement::Verdict(Verdict::Drop)])],
    };
    rules.extend(flow_rules());
    for server in &shared.dns {
        let server = Ipv4Prefix::single(*server);
        rules.push(rule([Statement::Ipv4, destination(server), Statement::UdpTo(DNS), accept()]));
        rules.push(rule([Statement::Ipv4, destination(server), Statement::TcpTo(DNS), accept()]));
    }
    for network in &shared.reachable {
        rules.push(rule([Statement::Ipv4, destination(*network), accept()]));
    }
    for (network, length) in SPECIAL_NETWORKS {
        let network = Ipv4Prefix::new(network, length).expect("lengths in the table are short");
        rules.push(rule([
            Statement::Ipv4,
            destination(network),
            Statement::Counter,
            Statement::Reject,
        ]));
    }
    rules.push(rule([accept()]));
    rules
}

/// What is asked of a guest's flows, whatever the family.
fn flow_rules() -> Vec<Rule> {
    let drop =
        |flow| rule([Statement::Flow(flow), Statement::Counter, Statement::Verdict(Verdict::Drop)]);
    vec![
        drop(Flow::Invalid),
        drop(Flow::Related),
        // The mark finds a machine's flows when it is deleted.
        rule([Statement::MarkFlow(GuestBytes::Source)]),
        rule([Statement::Flow(Flow::Established), Statement::Verdict(Verdict::Accept)]),
        // Before they are counted, which costs more.
        rule([
            Statement::Flow(Flow::New),
            Statement::FlowsFaster(GuestBytes::Source, FLOW_RATE),
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ]),
        rule([
            Statement::Flow(Flow::New),
            Statement::FlowsOver(GuestBytes::Source, FLOWS_PER_GUEST),
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ]),
    ]
}

/// Port of name servers.
const DNS: u16 = 53;

fn source_in(subnet: Ipv4Prefix) -> Statement {
    Statement::Ipv4Source(subnet)
}

fn taps() -> String {
    format!("{TAP_PREFIX}*")
}

fn rule<const N: usize>(statements: [Statement; N]) -> Rule {
    Rule { statements: statements.into() }
}
