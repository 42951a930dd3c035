//! Which interfaces the kernel has, and which of them are uplinks. Pure.

use netlink_packet_route::link::{
    InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
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
    /// Ethernet address; `None` when it is no Ethernet interface.
    pub hardware: Option<HardwareAddress>,
    /// Largest frame payload, in bytes.
    pub mtu: u32,
    /// Whether there is a carrier and the interface is up.
    pub carrier: Carrier,
    /// What makes it.
    pub origin: Origin,
}

/// What makes an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A network card, or a virtual pair that stands for one.
    Card,
    /// Part of a bridge or bond, which has the addresses.
    Member,
    /// Software: taps, bridges, bonds, VLANs, tunnels.
    Software,
}

impl LinkFacts {
    /// Reads what the kernel says of an interface; `None` when it has no name.
    pub fn read(message: &LinkMessage) -> Option<Self> {
        let mut facts = Self {
            index: message.header.index,
            name: String::new(),
            alias: String::new(),
            hardware: None,
            mtu: 1500,
            carrier: carrier(message.header.flags),
            origin: Origin::Card,
        };
        let ethernet = message.header.link_layer_type == LinkLayerType::Ether;
        for attribute in &message.attributes {
            #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
            match attribute {
                LinkAttribute::IfName(name) => facts.name.clone_from(name),
                LinkAttribute::IfAlias(alias) => facts.alias.clone_from(alias),
                LinkAttribute::Mtu(mtu) => facts.mtu = *mtu,
                LinkAttribute::Controller(_) => facts.origin = Origin::Member,
                LinkAttribute::Address(bytes) if ethernet => {
                    facts.hardware = HardwareAddress::from_slice(bytes);
                }
                LinkAttribute::LinkInfo(infos) if facts.origin == Origin::Card => {
                    facts.origin = origin(infos);
                }
                _ => {}
            }
        }
        (!facts.name.is_empty()).then_some(facts)
    }

    /// Returns whether this is a machine's tap.
    pub fn is_tap(&self) -> bool {
        self.name.starts_with(TAP_PREFIX)
    }
}

/// Returns the interfaces to use as uplinks: the one that `wanted` names (kernel name or hardware
/// address), every network card when it is `None`.
pub fn uplinks<'a>(
    links: &'a [LinkFacts],
    wanted: Option<&'a str>,
) -> impl Iterator<Item = &'a LinkFacts> {
    let address = wanted.and_then(|wanted| wanted.parse::<HardwareAddress>().ok());
    links.iter().filter(move |link| match wanted {
        _ if link.is_tap() || link.hardware.is_none() => false,
        None => link.origin == Origin::Card,
        // A VLAN has its card's hardware address; the card is meant.
        Some(_) if address.is_some() => link.hardware == address && link.origin == Origin::Card,
        Some(name) => link.name == name,
    })
}

fn carrier(flags: LinkFlags) -> Carrier {
    if flags.contains(LinkFlags::Up | LinkFlags::LowerUp) { Carrier::Up } else { Carrier::Down }
}

fn origin(infos: &[LinkInfo]) -> Origin {
    let software =
        infos.iter().any(|info| matches!(info, LinkInfo::Kind(kind) if *kind != InfoKind::Veth));
    if software { Origin::Software } else { Origin::Card }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, last: u8, origin: Origin) -> LinkFacts {
        LinkFacts {
            index: u32::from(last),
            name: name.to_owned(),
            alias: String::new(),
            hardware: (last > 0).then_some(HardwareAddress([2, 0, 0, 0, 0, last])),
            mtu: 1500,
            carrier: Carrier::Up,
            origin,
        }
    }

    fn names(wanted: Option<&str>) -> Vec<String> {
        let links = [
            link("lo", 0, Origin::Card),
            link("eth0", 1, Origin::Card),
            link("eth1", 2, Origin::Card),
            link("eth2", 3, Origin::Member),
            link("bond0", 3, Origin::Software),
            link("hf0123", 4, Origin::Software),
        ];
        uplinks(&links, wanted).map(|link| link.name.clone()).collect()
    }

    #[test]
    fn every_card_is_an_uplink_unless_one_is_named() {
        assert_eq!(names(None), ["eth0", "eth1"]);
        assert_eq!(names(Some("eth1")), ["eth1"]);
        assert_eq!(names(Some("bond0")), ["bond0"]);
        assert_eq!(names(Some("02:00:00:00:00:01")), ["eth0"]);
    }

    #[test]
    fn loopback_and_taps_are_never_uplinks() {
        assert_eq!(names(Some("lo")), Vec::<String>::new());
        assert_eq!(names(Some("hf0123")), Vec::<String>::new());
    }
}
