//! What the node's network looks like now: plain data that the uplinks publish and others read.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{HardwareAddress, Ipv4Prefix, dhcp6::client::DelegatedPrefix};

/// A snapshot of the uplinks. Empty until the first interface was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetworkStatus {
    /// The interfaces that are used as uplinks, by kernel name.
    pub interfaces: Vec<InterfaceStatus>,
    /// Default gateways, best first. IPv6 gateways are usually link-local.
    pub gateways: Vec<IpAddr>,
    /// Name servers: the configured ones, else those of DHCP and router advertisements.
    pub dns: Vec<IpAddr>,
    /// Time servers that DHCP named (option 42).
    pub ntp: Vec<IpAddr>,
    /// Where DHCP servers say that the node's configuration is (option 224, in DHCPv6 65224), best uplink
    /// first.
    pub documents: Vec<NamedDocument>,
    /// Prefixes for machines that DHCPv6 servers delegated, best uplink first.
    pub delegated: Vec<DelegatedPrefix>,
    /// What went wrong last, cleared when an address is obtained.
    pub last_error: Option<String>,
    /// What of the configuration cannot be done on this machine.
    pub problems: Vec<String>,
}

impl NetworkStatus {
    /// Returns whether an interface has an address of more than link scope.
    pub fn is_online(&self) -> bool {
        self.addresses().next().is_some()
    }

    /// Returns the addresses of more than link scope, of all interfaces.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.interfaces
            .iter()
            .flat_map(|interface| &interface.addresses)
            .map(|assigned| assigned.address)
            .filter(|address| !is_link_local(*address))
    }
}

/// One uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceStatus {
    /// Kernel name.
    pub name: String,
    /// What the configuration calls it.
    pub label: String,
    /// Kernel index.
    pub index: u32,
    /// Hardware address.
    pub hardware: HardwareAddress,
    /// Whether there is a carrier.
    pub carrier: Carrier,
    /// Largest frame payload, in bytes.
    pub mtu: u32,
    /// Addresses on it, link-local ones too.
    pub addresses: Vec<AssignedAddress>,
    /// The DHCPv4 lease, if there is one.
    pub lease: Option<LeaseStatus>,
    /// Whether its gateway answers.
    pub reach: Reach,
    /// Where each of its values comes from.
    pub values: Vec<Value>,
}

/// Which server names a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DocumentServer {
    /// A DHCPv4 server.
    Ipv4(Ipv4Addr),
    /// A DHCPv6 server on this interface. Its address is of the link only, and its identifier says
    /// nothing to people.
    Ipv6(String),
}

impl fmt::Display for DocumentServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipv4(server) => write!(f, "DHCP option 224 from {server}"),
            Self::Ipv6(interface) => write!(f, "DHCPv6 option 65224 on {interface}"),
        }
    }
}

/// What a DHCP server says of the node's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedDocument {
    /// Who says it: by IPv4 its address, by DHCPv6 the interface.
    pub server: DocumentServer,
    /// The URL, as it came: nobody looked at it yet.
    pub url: Vec<u8>,
}

/// A value of an uplink and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// What and how much, for people to read.
    pub text: String,
    /// Who said so.
    pub source: ValueSource,
}

/// Who said so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueSource {
    /// A router's advertisements.
    Advertisement,
    /// The node itself, or the card.
    Card,
    /// The configuration document.
    Document,
    /// This DHCP server.
    Dhcp(Ipv4Addr),
    /// A DHCPv6 server.
    Dhcp6,
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { text, source } = self;
        match source {
            ValueSource::Advertisement => write!(f, "{text} (advertised)"),
            ValueSource::Card => write!(f, "{text} (the card's)"),
            ValueSource::Document => write!(f, "{text} (configured)"),
            ValueSource::Dhcp(server) => write!(f, "{text} (DHCP from {server})"),
            ValueSource::Dhcp6 => write!(f, "{text} (DHCPv6)"),
        }
    }
}

impl InterfaceStatus {
    /// Returns the uplink in one line, each value with its source.
    pub fn describe(&self) -> String {
        let state = match (self.carrier, self.reach) {
            (Carrier::Down, _) => "no carrier",
            (Carrier::Up, Reach::Silent) => "gateway silent",
            (Carrier::Up, Reach::Unknown | Reach::Answers) => "up",
        };
        let name =
            if self.label == self.name { String::new() } else { format!(" = {}", self.name) };
        let values: Vec<String> = self.values.iter().map(Value::to_string).collect();
        format!("{}{name}: {state}; {}", self.label, values.join(", "))
    }
}

/// Whether an uplink leads anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reach {
    /// It was not asked yet, or there is no gateway or no other uplink.
    #[default]
    Unknown,
    /// Its gateway answers.
    Answers,
    /// Its gateway does not answer; other uplinks are preferred.
    Silent,
}

/// Whether a cable carries a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// No signal.
    Down,
    /// Signal.
    Up,
}

/// An address on an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AssignedAddress {
    /// The address.
    pub address: IpAddr,
    /// Length of its network's prefix.
    pub prefix: u8,
}

/// A DHCPv4 lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseStatus {
    /// The address and its network.
    pub address: Ipv4Prefix,
    /// Who gave it.
    pub server: Ipv4Addr,
    /// When it ends unless renewed; never when `None`.
    pub expires: Option<Instant>,
}

impl LeaseStatus {
    /// Returns the time left at `now`; `None` when the lease does not end.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        self.expires.map(|expires| expires.saturating_duration_since(now))
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
