//! Words of the packet filter: what our rules need of nf_tables, no more.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::net::{HardwareAddress, Ipv4Prefix};

/// Which packets a table sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet,
    /// Frames of one device.
    Netdev,
}

/// A list of rules, called by the kernel or by another chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: String,
    /// When the kernel calls it; never when `None`.
    pub hook: Option<Hook>,
    /// What happens at its end. Chains without a hook return to their caller.
    pub policy: Policy,
    /// Tried in this order.
    pub rules: Vec<Rule>,
}

/// When the kernel calls a chain. Lower priorities come first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Packets for the node.
    Input {
        /// Order among chains of this hook.
        priority: i32,
    },
    /// Packets through the node.
    Forward {
        /// Order among chains of this hook.
        priority: i32,
    },
    /// First packets of flows that leave, to change their source.
    SourceNat {
        /// Order among chains of this hook.
        priority: i32,
    },
    /// Frames that come in from one device.
    Ingress {
        /// Order among chains of this hook.
        priority: i32,
        /// Kernel name.
        device: String,
    },
}

/// What happens at the end of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The packet goes on.
    Accept,
    /// The packet is gone.
    Drop,
}

/// Statements that are tried in order; the first that does not match ends the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The statements.
    pub statements: Vec<Statement>,
}

/// Whether a match is wanted or unwanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// Must be equal.
    Is,
    /// Must differ.
    IsNot,
}

/// Which interface of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interface {
    /// Where it came from.
    In,
    /// Where it goes.
    Out,
}

/// Which address of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Address {
    /// Where it came from.
    Source,
    /// Where it goes.
    Destination,
}

/// A condition, or something that is done with the packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Statement {
    /// Name of an interface; a `*` at the end stands for anything.
    Interface(Interface, Test, String),
    /// The packet is IPv4 (`inet` only).
    Ipv4,
    /// The packet is not IPv4 (`inet` only).
    NotIpv4,
    /// The packet is IPv6 (`inet` only).
    Ipv6,
    /// The packet is IPv4 and its source belongs to the network (`inet` only).
    Ipv4Source(Ipv4Prefix),
    /// The frame's type is IPv4 (`netdev` only).
    EtherTypeIpv4,
    /// The frame's type is IPv6 (`netdev` only).
    EtherTypeIpv6,
    /// An IPv6 address belongs to the network with this prefix length. A condition before must have
    /// asked for IPv6.
    Address6(Address, Ipv6Addr, u8),
    /// ICMPv6 of this type.
    Icmp6(u8),
    /// Another protocol than ICMPv6.
    OtherThanIcmp6,
    /// The ICMPv6 message is about this address: the target of neighbour discovery (RFC 4861 §4.3). A
    /// condition before must have asked for such a message.
    Icmp6Target(Ipv6Addr),
    /// The DHCP message is of this client (RFC 2131 §2, `chaddr`). A condition before must have asked for
    /// UDP.
    DhcpClient(HardwareAddress),
    /// An IPv4 address belongs to the network. A condition before must have asked for IPv4.
    Address(Address, Ipv4Prefix),
    /// The frame's source (`netdev` only).
    Hardware(Test, HardwareAddress),
    /// The frame is ARP for IPv4 over Ethernet with this sender (`netdev` only).
    ArpSender(HardwareAddress, Ipv4Addr),
    /// UDP between these ports.
    Udp {
        /// Source port.
        from: u16,
        /// Destination port.
        to: u16,
    },
    /// UDP to a port.
    UdpTo(u16),
    /// TCP to a port.
    TcpTo(u16),
    /// What connection tracking makes of the packet.
    Flow(Flow),
    /// The packet begins one flow too many: its guest has more than so many, this one included. Guests
    /// are told apart by four bytes of their address. Needs the set [`super::encode::FLOWS`], which a
    /// table with such a rule has.
    FlowsOver(GuestBytes, u32),
    /// The packet begins a flow, and its guest begins them faster than this. What a guest begins and what
    /// is begun towards it are measured apart. Needs the sets [`super::encode::BEGUN`], of which a table
    /// with such a rule has what it needs.
    FlowsFaster(GuestBytes, FlowRate),
    /// Notes the IPv6 source in the set of the guest with this tap, and does not match when there are too
    /// many ([`super::encode::SOURCES_KEPT`]). A condition before must have asked for IPv6 (`netdev`
    /// only).
    NoteSource6(String),
    /// Marks the flow with the guest's four bytes.
    MarkFlow(GuestBytes),
    /// At most so many packets; more do not match.
    Limit {
        /// Packets per second in the long run.
        per_second: u64,
        /// Packets at once.
        burst: u32,
    },
    /// More bytes than this go by. Matches what is too much, which is to be dropped.
    BytesOver {
        /// Bytes per second in the long run.
        per_second: u64,
        /// Bytes at once.
        burst: u32,
    },
    /// Counts packets and bytes.
    Counter,
    /// Replaces the source by the address of the interface where the packet leaves.
    Masquerade,
    /// Answers with ICMP "administratively prohibited", and drops.
    Reject,
    /// Ends the rule.
    Verdict(Verdict),
}

/// Where a packet holds the four bytes that tell guests apart: an IPv4 address, or the part of an IPv6
/// address that numbers a guest's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestBytes {
    /// In the source, which is at the same place in both families.
    Source,
    /// In an IPv4 destination. A condition before must have asked for IPv4.
    Destination4,
    /// In an IPv6 destination. A condition before must have asked for IPv6.
    Destination6,
}

/// A rate of flows that begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowRate {
    /// Flows per second in the long run.
    pub per_second: u64,
    /// Flows at once.
    pub burst: u32,
}

/// What connection tracking makes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// It belongs to a flow that was let through.
    Established,
    /// It fits no flow and begins none: a stray reset, an error about a flow that nobody has, a wrong
    /// checksum. Its addresses are not translated.
    Invalid,
    /// It begins a flow.
    New,
    /// It is an ICMP error that quotes a packet of such a flow, by whomever it was sent.
    Related,
}

/// How a rule ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The packet goes on.
    Accept,
    /// The packet is gone.
    Drop,
    /// Another chain decides first.
    Jump(&'static str),
}
