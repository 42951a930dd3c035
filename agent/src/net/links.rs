//! What the kernel says of its interfaces. Pure.

use std::net::Ipv4Addr;

use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, BondLacpRate, BondMode as KernelMode, BondXmitHashPolicy,
    Inet6IfaceFlags, InfoBond, InfoBondPort, InfoData, InfoKind, InfoPortData, InfoVlan,
    LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use types::{
    node::Bdf,
    uplinks::{BondHash, BondMode, LacpRate},
};

use super::{Carrier, HardwareAddress, ruleset::TAP_PREFIX};

/// What matters of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkFacts {
    /// Kernel index.
    pub index: u32,
    /// Kernel name.
    pub name: String,
    /// Alias, empty when there is none.
    pub alias: String,
    /// Ethernet address in use; `None` when it is no Ethernet interface.
    pub hardware: Option<HardwareAddress>,
    /// Ethernet address of its own, when it is told: members of a bond use the bond's.
    pub permanent: Option<HardwareAddress>,
    /// Largest frame payload, in bytes.
    pub mtu: u32,
    /// What the driver can do at most, when it tells.
    pub max_mtu: Option<u32>,
    /// Whether it is switched on.
    pub power: Power,
    /// Whether there is a carrier and the interface is up.
    pub carrier: Carrier,
    /// The bond or bridge that it is part of, and that has the addresses.
    pub controller: Option<u32>,
    /// What makes it.
    pub kind: Kind,
    /// Name of the driver; `None` for what is no device.
    pub driver: Option<String>,
    /// Where the card sits; `None` when it is no PCI device.
    pub path: Option<Bdf>,
    /// What router advertisements on it said.
    pub advertised: Advertised,
}

/// Whether an interface is switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// It is.
    On,
    /// It is not, and has no carrier therefore.
    Off,
}

/// What makes an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A network card, or a virtual pair that stands for one.
    Card,
    /// Several cards as one.
    Bond(BondFacts),
    /// Tagged frames of another interface.
    Vlan {
        /// Index of the other interface.
        parent: u32,
        /// The tag.
        id: u16,
    },
    /// Other software: taps, bridges, tunnels.
    Other,
}

/// How a bond is set. Modes that are never configured are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BondFacts {
    /// What its cards do together.
    pub mode: Option<BondMode>,
    /// How often partners are to speak.
    pub lacp_rate: LacpRate,
    /// What decides which card a packet leaves through; meaningful in 802.3ad.
    pub hash: Option<BondHash>,
    /// Milliseconds between looks at the carriers.
    pub mii_ms: u32,
    /// Milliseconds between ARP requests.
    pub arp_ms: u32,
    /// Who must answer them.
    pub arp_targets: Vec<Ipv4Addr>,
}

/// Whether router advertisements ask for DHCPv6 (RFC 4861 §4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub enum Advertised {
    /// They do not, or there were none.
    #[default]
    Nothing,
    /// For other configuration than addresses ("O").
    Other,
    /// For addresses ("M").
    Managed,
}

impl LinkFacts {
    /// Reads what the kernel says of an interface; `None` when it has no name.
    pub fn read(message: &LinkMessage) -> Option<Self> {
        let flags = message.header.flags;
        let mut facts = Self {
            index: message.header.index,
            name: String::new(),
            alias: String::new(),
            hardware: None,
            permanent: None,
            mtu: 1500,
            max_mtu: None,
            power: if flags.contains(LinkFlags::Up) { Power::On } else { Power::Off },
            carrier: carrier(flags),
            controller: None,
            kind: Kind::Card,
            driver: None,
            path: None,
            advertised: Advertised::Nothing,
        };
        let ethernet = message.header.link_layer_type == LinkLayerType::Ether;
        let mut parent = 0;
        for attribute in &message.attributes {
            #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
            match attribute {
                LinkAttribute::IfName(name) => facts.name.clone_from(name),
                LinkAttribute::IfAlias(alias) => facts.alias.clone_from(alias),
                LinkAttribute::Mtu(mtu) => facts.mtu = *mtu,
                LinkAttribute::MaxMtu(most) => facts.max_mtu = Some(*most).filter(|most| *most > 0),
                LinkAttribute::Controller(index) => facts.controller = Some(*index),
                LinkAttribute::Link(index) => parent = *index,
                LinkAttribute::Address(bytes) if ethernet => {
                    facts.hardware = HardwareAddress::from_slice(bytes);
                }
                LinkAttribute::PermAddress(bytes) => {
                    facts.permanent = facts.permanent.or(HardwareAddress::from_slice(bytes));
                }
                LinkAttribute::AfSpecUnspec(families) => facts.advertised = advertised(families),
                LinkAttribute::LinkInfo(infos) => facts.read_info(infos),
                _ => {}
            }
        }
        if let Kind::Vlan { parent: slot, .. } = &mut facts.kind {
            *slot = parent;
        }
        (!facts.name.is_empty()).then_some(facts)
    }

    /// Returns whether this is a machine's tap.
    pub fn is_tap(&self) -> bool {
        self.name.starts_with(TAP_PREFIX)
    }

    /// Returns whether this is an Ethernet card, part of a bond or not.
    pub fn is_card(&self) -> bool {
        self.kind == Kind::Card && self.hardware.is_some() && !self.is_tap()
    }

    fn read_info(&mut self, infos: &[LinkInfo]) {
        for info in infos {
            #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
            match info {
                LinkInfo::Kind(InfoKind::Veth) => {}
                // Their data follows.
                LinkInfo::Kind(InfoKind::Bond) => self.kind = Kind::Bond(BondFacts::default()),
                LinkInfo::Kind(_) => self.kind = Kind::Other,
                LinkInfo::Data(InfoData::Bond(bond)) => self.kind = Kind::Bond(read_bond(bond)),
                LinkInfo::Data(InfoData::Vlan(vlan)) => {
                    let id = vlan.iter().find_map(|info| match info {
                        InfoVlan::Id(id) => Some(*id),
                        _ => None,
                    });
                    self.kind = id.map_or(Kind::Other, |id| Kind::Vlan { parent: 0, id });
                }
                LinkInfo::PortData(InfoPortData::BondPort(port)) => {
                    let own = port.iter().find_map(|info| match info {
                        InfoBondPort::PermHwaddr(bytes) => HardwareAddress::from_slice(bytes),
                        _ => None,
                    });
                    self.permanent = own.or(self.permanent);
                }
                _ => {}
            }
        }
    }
}

fn read_bond(infos: &[InfoBond]) -> BondFacts {
    let mut facts = BondFacts::default();
    for info in infos {
        #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
        match info {
            InfoBond::Mode(KernelMode::Ieee8023Ad) => facts.mode = Some(BondMode::Lacp),
            InfoBond::Mode(KernelMode::ActiveBackup) => facts.mode = Some(BondMode::ActiveBackup),
            InfoBond::AdLacpRate(BondLacpRate::Slow) => facts.lacp_rate = LacpRate::Slow,
            InfoBond::AdLacpRate(_) => facts.lacp_rate = LacpRate::Fast,
            InfoBond::XmitHashPolicy(BondXmitHashPolicy::Layer2) => {
                facts.hash = Some(BondHash::Layer2);
            }
            InfoBond::XmitHashPolicy(BondXmitHashPolicy::Layer23) => {
                facts.hash = Some(BondHash::Layer23);
            }
            InfoBond::XmitHashPolicy(BondXmitHashPolicy::Layer34) => {
                facts.hash = Some(BondHash::Layer34);
            }
            InfoBond::MiiMon(ms) => facts.mii_ms = *ms,
            InfoBond::ArpInterval(ms) => facts.arp_ms = *ms,
            InfoBond::ArpIpTarget(targets) => facts.arp_targets.clone_from(targets),
            _ => {}
        }
    }
    facts
}

fn advertised(families: &[AfSpecUnspec]) -> Advertised {
    let attributes = families.iter().filter_map(|family| {
        if let AfSpecUnspec::Inet6(attributes) = family { Some(attributes) } else { None }
    });
    let flags = attributes.flatten().find_map(|attribute| {
        if let AfSpecInet6::Flags(flags) = attribute { Some(*flags) } else { None }
    });
    match flags {
        Some(flags) if flags.contains(Inet6IfaceFlags::RaManaged) => Advertised::Managed,
        Some(flags) if flags.contains(Inet6IfaceFlags::Otherconf) => Advertised::Other,
        Some(_) | None => Advertised::Nothing,
    }
}

fn carrier(flags: LinkFlags) -> Carrier {
    if flags.contains(LinkFlags::Up | LinkFlags::LowerUp) { Carrier::Up } else { Carrier::Down }
}
