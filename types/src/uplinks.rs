//! Uplinks as a provider describes them: cards, bonds, VLANs, and where their addresses come from.
//!
//! Nothing here looks at the machine; which card is meant is decided by whoever sees them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

use serde::{Deserialize, Serialize};

use crate::{config::parse_prefix, node::Bdf, written};

/// Least and largest MTU: IPv6's (RFC 8200 §5), and what switches with jumbo frames carry.
pub const MTU: std::ops::RangeInclusive<u32> = 1280..=9216;
/// Most uplinks, and most cards of a bond.
pub const MAX_UPLINKS: usize = 32;
/// `IFNAMSIZ` without its end.
const MAX_NAME: usize = 15;
/// How the names of machines' taps begin.
const TAP_PREFIX: &str = "hf";

/// One uplink. Exactly one of `card`, `bond` and `over` says what it is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uplink {
    /// What it is called; a bond's and a VLAN's name in the kernel, too.
    pub name: String,
    /// The card it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<Card>,
    /// Several cards as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bond: Option<Bond>,
    /// Another uplink, whose frames with the tag `vlan` are this one's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<String>,
    /// VLAN number, 1 to 4094, of what is named in `over`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Largest frame payload in bytes, 1280 to 9216; the card's when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Where IPv4 addresses come from: static when `addresses` holds one, else DHCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Source>,
    /// Where IPv6 addresses come from: static when `addresses` holds one, else as routers say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Source>,
    /// Static addresses with prefix length, as `192.0.2.5/24`.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Default gateways, the preferred one first.
    #[serde(default, deserialize_with = "written::list")]
    pub gateways: Vec<IpAddr>,
    /// Further routes.
    #[serde(default)]
    pub routes: Vec<StaticRoute>,
    /// Name servers reached through this uplink.
    #[serde(default, deserialize_with = "written::list")]
    pub dns: Vec<IpAddr>,
    /// Uplinks with lower numbers are preferred while their gateway answers; the document's order
    /// decides between equal ones.
    #[serde(default)]
    pub priority: u32,
}

/// Which card. Every key that is given must fit; the first card that fits, by PCI address and then
/// by name, is the one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// Hardware address, the one burned in or the current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Driver, as `mlx5_core`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Kernel name; a `*` at the end stands for anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<Bdf>,
    /// Any card whose cable carries a signal.
    #[serde(default, skip_serializing_if = "is_unset")]
    pub carrier: bool,
}

fn is_unset(flag: &bool) -> bool {
    !flag
}

/// Several cards as one. Every card that fits a member of `cards` is part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bond {
    /// Its cards.
    pub cards: Vec<Card>,
    /// What they do together.
    pub mode: BondMode,
    /// How often link partners are to speak (802.3ad).
    #[serde(default)]
    pub lacp_rate: LacpRate,
    /// What decides which card a packet leaves through (802.3ad).
    #[serde(default)]
    pub hash: BondHash,
    /// Milliseconds between looks at the carriers, 10 to 10000; 0 only with `arp_ms`.
    #[serde(default = "Bond::default_mii_ms")]
    pub mii_ms: u32,
    /// Milliseconds between ARP requests to `arp_targets` (active-backup); 0 for none.
    #[serde(default)]
    pub arp_ms: u32,
    /// Who must answer them for a card to be good, at most 16.
    #[serde(default, deserialize_with = "written::list")]
    pub arp_targets: Vec<Ipv4Addr>,
}

impl Bond {
    fn default_mii_ms() -> u32 {
        100
    }
}

/// What the cards of a bond do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BondMode {
    /// All carry traffic, agreed with the switch by LACP (IEEE 802.1AX).
    #[serde(rename = "802.3ad")]
    Lacp,
    /// One carries traffic; another takes over when it fails.
    #[serde(rename = "active-backup")]
    ActiveBackup,
}

/// How often link partners speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LacpRate {
    /// Every 30 s; a silent partner is noticed after 90 s.
    Slow,
    /// Every second; a silent partner is noticed after 3 s.
    #[default]
    Fast,
}

/// What decides which card a packet leaves through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum BondHash {
    /// Hardware addresses.
    #[serde(rename = "layer2")]
    Layer2,
    /// Hardware and IP addresses.
    #[serde(rename = "layer2+3")]
    Layer23,
    /// IP addresses and ports.
    #[default]
    #[serde(rename = "layer3+4")]
    Layer34,
}

/// Where IPv4 addresses come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ipv4Source {
    /// A DHCP server.
    Dhcp,
    /// `addresses`.
    Static,
    /// There are none.
    Off,
}

/// Where IPv6 addresses come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ipv6Source {
    /// As router advertisements say: SLAAC, and DHCPv6 when they ask for it.
    Auto,
    /// SLAAC only (RFC 4862), with addresses that no other network can recognise (RFC 7217).
    Slaac,
    /// DHCPv6 whatever routers say, and SLAAC.
    Dhcp,
    /// `addresses`; advertisements are not listened to.
    Static,
    /// There are none.
    Off,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticRoute {
    /// Destination with prefix length.
    pub to: String,
    /// Next hop; the link itself when left out.
    #[serde(default, deserialize_with = "written::given", skip_serializing_if = "Option::is_none")]
    pub via: Option<IpAddr>,
}

/// Why an uplink makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum UplinkFault {
    #[error("{found} uplinks; at most {MAX_UPLINKS} are possible")]
    Many { found: usize },
    #[error(
        "the name must be 1 to {MAX_NAME} letters, digits, dots or hyphens, not begin with {TAP_PREFIX:?}, and belong to one uplink only"
    )]
    Name,
    #[error("give exactly one of card, bond and over")]
    Made,
    #[error(
        "a card is named by at least one of mac, driver, name, path and carrier = true, and mac is written as 02:00:00:00:00:01"
    )]
    Card,
    #[error(
        "over and vlan belong together: over names an earlier uplink that is a card or a bond, vlan is 1 to 4094 and used once there"
    )]
    Vlan,
    #[error("it must be 1280 to 9216 and no more than that of the uplink below")]
    Mtu,
    #[error(
        "a bond has 1 to {MAX_UPLINKS} cards and mii_ms of 10 to 10000; active-backup may have arp_ms of 10 to 10000 with 1 to 16 arp_targets and mii_ms = 0 instead"
    )]
    Bond,
    #[error("it must be an address with a prefix length, as \"192.0.2.5/24\"")]
    Prefix,
    #[error(
        "ipv4 or ipv6 is \"static\" without such an address, or something else with one in addresses"
    )]
    Source,
    #[error("the gateway or next hop {hop} needs a static address of its family on this uplink")]
    Hop { hop: IpAddr },
    #[error("the route to {to} goes by {via}; both must be IPv4, or both IPv6")]
    Route { to: String, via: IpAddr },
}

/// A fault, and the key whose value is wrong, from the list on: `[1].mtu`.
type Found = (String, UplinkFault);

fn at(key: impl Into<String>) -> impl FnOnce(UplinkFault) -> Found {
    let key = key.into();
    move |fault| (key, fault)
}

impl Uplink {
    /// Returns an uplink that is a card, with addresses by DHCP and as routers say.
    pub fn of_card(name: &str, card: Card) -> Self {
        Self {
            name: name.to_owned(),
            card: Some(card),
            bond: None,
            over: None,
            vlan: None,
            mtu: None,
            ipv4: None,
            ipv6: None,
            addresses: Vec::new(),
            gateways: Vec::new(),
            routes: Vec::new(),
            dns: Vec::new(),
            priority: 0,
        }
    }

    /// Returns where IPv4 addresses come from.
    pub fn ipv4(&self) -> Ipv4Source {
        let default = if self.has(IpAddr::is_ipv4) { Ipv4Source::Static } else { Ipv4Source::Dhcp };
        self.ipv4.unwrap_or(default)
    }

    /// Returns where IPv6 addresses come from.
    pub fn ipv6(&self) -> Ipv6Source {
        let default = if self.has(IpAddr::is_ipv6) { Ipv6Source::Static } else { Ipv6Source::Auto };
        self.ipv6.unwrap_or(default)
    }

    /// Returns the static addresses with their prefix lengths.
    pub fn assigned(&self) -> impl Iterator<Item = (IpAddr, u8)> {
        self.addresses.iter().filter_map(|text| parse_prefix(text))
    }

    fn has(&self, family: fn(&IpAddr) -> bool) -> bool {
        self.assigned().any(|(address, _)| family(&address))
    }

    fn check(&self, earlier: &[Self]) -> Result<(), Found> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
        let length = (1..=MAX_NAME).contains(&self.name.len());
        let reserved =
            self.name.starts_with(TAP_PREFIX) || ["lo", ".", ".."].contains(&&*self.name);
        let taken = earlier.iter().any(|other| other.name == self.name);
        if !length || !self.name.chars().all(plain) || reserved || taken {
            return Err(at(".name")(UplinkFault::Name));
        }
        let made = [self.card.is_some(), self.bond.is_some(), self.over.is_some()];
        if made.iter().filter(|given| **given).count() != 1 {
            return Err(at("")(UplinkFault::Made));
        }
        self.card.iter().try_for_each(|card| card.check(".card"))?;
        self.bond.iter().try_for_each(Bond::check)?;
        self.check_vlan(earlier)?;
        if self.mtu.is_some_and(|mtu| !MTU.contains(&mtu)) {
            return Err(at(".mtu")(UplinkFault::Mtu));
        }
        self.check_addresses()?;
        self.check_hops()
    }

    fn check_vlan(&self, earlier: &[Self]) -> Result<(), Found> {
        let (over, vlan) = match (&self.over, self.vlan) {
            (None, None) => return Ok(()),
            (Some(over), Some(vlan)) if (1..=4094).contains(&vlan) => (over, vlan),
            (Some(_), _) => return Err(at(".vlan")(UplinkFault::Vlan)),
            (None, Some(_)) => return Err(at(".over")(UplinkFault::Vlan)),
        };
        let below = earlier.iter().find(|other| other.name == *over && other.over.is_none());
        let below = below.ok_or(UplinkFault::Vlan).map_err(at(".over"))?;
        let same = |other: &&Self| other.over.as_ref() == Some(over) && other.vlan == Some(vlan);
        if earlier.iter().any(|other| same(&other)) {
            return Err(at(".vlan")(UplinkFault::Vlan));
        }
        match (self.mtu, below.mtu) {
            (Some(found), Some(most)) if found > most => Err(at(".mtu")(UplinkFault::Mtu)),
            _ => Ok(()),
        }
    }

    fn check_addresses(&self) -> Result<(), Found> {
        let prefix = |key: String, text: &str| match parse_prefix(text) {
            Some(_) => Ok(()),
            None => Err(at(key)(UplinkFault::Prefix)),
        };
        for (place, text) in self.addresses.iter().enumerate() {
            prefix(format!(".addresses[{place}]"), text)?;
        }
        for (place, route) in self.routes.iter().enumerate() {
            prefix(format!(".routes[{place}].to"), &route.to)?;
        }
        if self.has(IpAddr::is_ipv4) != (self.ipv4() == Ipv4Source::Static) {
            return Err(at(".ipv4")(UplinkFault::Source));
        }
        if self.has(IpAddr::is_ipv6) != (self.ipv6() == Ipv6Source::Static) {
            return Err(at(".ipv6")(UplinkFault::Source));
        }
        Ok(())
    }

    fn check_hops(&self) -> Result<(), Found> {
        let gateways = self.gateways.iter().enumerate();
        let gateways = gateways.map(|(place, hop)| (format!(".gateways[{place}]"), hop));
        let routes = self.routes.iter().enumerate();
        let routes = routes.filter_map(|(place, route)| {
            Some((format!(".routes[{place}].via"), route.via.as_ref()?))
        });
        for (key, hop) in gateways.chain(routes) {
            let family = if hop.is_ipv4() { IpAddr::is_ipv4 } else { IpAddr::is_ipv6 };
            if !self.has(family) {
                return Err(at(key)(UplinkFault::Hop { hop: *hop }));
            }
        }
        let mut routes = self.routes.iter().enumerate();
        routes.try_for_each(|(place, route)| route.check().map_err(at(format!(".routes[{place}]"))))
    }
}

impl StaticRoute {
    fn check(&self) -> Result<(), UplinkFault> {
        let to = parse_prefix(&self.to).map(|(to, _)| to.is_ipv4());
        match self.via {
            Some(via) if to != Some(via.is_ipv4()) => {
                Err(UplinkFault::Route { to: self.to.clone(), via })
            }
            Some(_) | None => Ok(()),
        }
    }
}

impl Card {
    /// Checks a card, which stands at this key.
    fn check(&self, key: &str) -> Result<(), Found> {
        if self.mac.as_deref().is_some_and(|mac| !is_hardware_address(mac)) {
            return Err(at(format!("{key}.mac"))(UplinkFault::Card));
        }
        let named = self.driver.is_some() || self.name.is_some() || self.path.is_some();
        let given = named || self.mac.is_some() || self.carrier;
        if given { Ok(()) } else { Err(at(key)(UplinkFault::Card)) }
    }
}

impl Bond {
    fn check(&self) -> Result<(), Found> {
        for (place, card) in self.cards.iter().enumerate() {
            card.check(&format!(".bond.cards[{place}]"))?;
        }
        if !(1..=MAX_UPLINKS).contains(&self.cards.len()) {
            return Err(at(".bond.cards")(UplinkFault::Bond));
        }
        let pace = 10..=10_000;
        let carriers =
            pace.contains(&self.mii_ms) && self.arp_ms == 0 && self.arp_targets.is_empty();
        let answers = self.mode == BondMode::ActiveBackup
            && self.mii_ms == 0
            && pace.contains(&self.arp_ms)
            && (1..=16).contains(&self.arp_targets.len());
        if carriers || answers { Ok(()) } else { Err(at(".bond")(UplinkFault::Bond)) }
    }
}

/// Checks all uplinks. A fault comes with its key, from the list on, as `[1].mtu`.
pub fn check(uplinks: &[Uplink]) -> Result<(), (String, UplinkFault)> {
    if uplinks.len() > MAX_UPLINKS {
        return Err(at("")(UplinkFault::Many { found: uplinks.len() }));
    }
    for (place, uplink) in uplinks.iter().enumerate() {
        let found = uplink.check(&uplinks[..place]);
        found.map_err(|(key, fault)| (format!("[{place}]{key}"), fault))?;
    }
    Ok(())
}

/// Returns the uplinks' numbers, the preferred one first.
pub fn by_priority(uplinks: &[Uplink]) -> Vec<usize> {
    let order: BTreeSet<(u32, usize)> =
        uplinks.iter().enumerate().map(|(place, uplink)| (uplink.priority, place)).collect();
    order.into_iter().map(|(_, place)| place).collect()
}

fn is_hardware_address(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    let hex = |part: &&str| part.len() == 2 && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.len() == 6 && parts.iter().all(hex)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigError, Explained, NodeSpec};

    fn parse(uplinks: &str) -> Result<NodeSpec, ConfigError> {
        let key = "01".repeat(32);
        let authority = format!("[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n");
        NodeSpec::parse(format!("version = 1\n{authority}{uplinks}").as_bytes())
    }

    /// The document as it was read, before it was checked.
    #[derive(Deserialize)]
    struct Unchecked {
        network: crate::config::Network,
    }

    fn fault(uplinks: &str) -> UplinkFault {
        let read: Unchecked = toml::from_str(uplinks).expect("readable");
        let (_, fault) = check(&read.network.uplinks).expect_err("a fault");
        assert!(matches!(parse(uplinks), Err(ConfigError::Value { .. })));
        fault
    }

    const ALL: &str = r#"
        [[network.uplinks]]
        name = "bond0"
        mtu = 9000
        ipv4 = "off"
        ipv6 = "off"
        bond = { mode = "802.3ad", hash = "layer2+3", lacp_rate = "slow", cards = [
            { mac = "02:00:00:00:00:01" }, { path = "0000:01:00.1" } ] }
        [[network.uplinks]]
        name = "bond0.7"
        over = "bond0"
        vlan = 7
        addresses = ["192.0.2.5/24", "2001:db8::5/64"]
        gateways = ["192.0.2.1", "2001:db8::1"]
        routes = [{ to = "10.0.0.0/8", via = "192.0.2.9" }]
        [[network.uplinks]]
        name = "spare"
        card = { driver = "igb", carrier = true }
        priority = 5
    "#;

    #[test]
    fn bonds_vlans_and_cards_are_read() {
        let spec = parse(ALL).expect("valid");
        let [bond, vlan, spare] = &spec.network.uplinks[..] else { panic!("three") };
        assert_eq!(bond.bond.as_ref().map(|bond| bond.hash), Some(BondHash::Layer23));
        assert_eq!((vlan.ipv4(), vlan.ipv6()), (Ipv4Source::Static, Ipv6Source::Static));
        assert_eq!((spare.ipv4(), spare.ipv6()), (Ipv4Source::Dhcp, Ipv6Source::Auto));
        assert_eq!(by_priority(&spec.network.uplinks), [0, 1, 2]);
        let written = toml::to_string(&spec.network).expect("written");
        assert_eq!(toml::from_str::<crate::config::Network>(&written), Ok(spec.network));
    }

    #[test]
    fn the_example_is_valid() {
        let spec = NodeSpec::parse(include_bytes!("../examples/network.toml")).expect("valid");
        assert_eq!(spec.network.uplinks.len(), 3);
    }

    #[test]
    fn unknown_keys_are_named_with_their_line() {
        let text = "[[network.uplinks]]\nname = \"a\"\ncard = { name = \"eth0\" }\nmut = 1500\n";
        let Err(ConfigError::Document(Explained { line, message, .. })) = parse(text) else {
            panic!("typo")
        };
        assert_eq!(line, 8);
        assert!(message.contains("mut"), "{message}");
    }

    #[test]
    fn each_fault_is_told() {
        let one = |rest: &str| format!("[[network.uplinks]]\n{rest}\n");
        let card = "card = { name = \"eth0\" }";
        let two = one(&format!("name = \"a\"\n{card}")).repeat(2);
        assert_eq!(fault(&two), UplinkFault::Name);
        assert_eq!(fault(&one(&format!("name = \"hf0\"\n{card}"))), UplinkFault::Name);
        assert_eq!(fault(&one("name = \"a\"")), UplinkFault::Made);
        assert_eq!(fault(&one("name = \"a\"\ncard = {}")), UplinkFault::Card);
        assert_eq!(fault(&one("name = \"a\"\ncard = { mac = \"2:0:0\" }")), UplinkFault::Card);
        assert_eq!(fault(&one(&format!("name = \"a\"\nvlan = 5\n{card}"))), UplinkFault::Vlan);
        assert_eq!(fault(&one("name = \"a\"\nvlan = 5\nover = \"b\"")), UplinkFault::Vlan);
        let mtu = fault(&one(&format!("name = \"a\"\nmtu = 9217\n{card}")));
        assert_eq!(mtu, UplinkFault::Mtu);
        let empty = "name = \"a\"\nbond = { mode = \"active-backup\", cards = [] }";
        assert_eq!(fault(&one(empty)), UplinkFault::Bond);
        let blind = "name = \"a\"\nbond = { mode = \"802.3ad\", cards = [{ name = \"e\" }], mii_ms = 0, arp_ms = 100, arp_targets = [\"192.0.2.1\"] }";
        assert_eq!(fault(&one(blind)), UplinkFault::Bond);
        let bare = format!("name = \"a\"\naddresses = [\"192.0.2.5\"]\n{card}");
        assert_eq!(fault(&one(&bare)), UplinkFault::Prefix);
        let none = format!("name = \"a\"\nipv4 = \"static\"\n{card}");
        assert_eq!(fault(&one(&none)), UplinkFault::Source);
        let hop: IpAddr = "192.0.2.1".parse().expect("an address");
        let lost = format!("name = \"a\"\ngateways = [\"{hop}\"]\n{card}");
        assert_eq!(fault(&one(&lost)), UplinkFault::Hop { hop });
        let to = "2001:db8:1::/48".to_owned();
        let mixed = format!(
            "name = \"a\"\naddresses = [\"192.0.2.5/24\"]\nroutes = [{{ to = \"{to}\", via = \"{hop}\" }}]\n{card}"
        );
        assert_eq!(fault(&one(&mixed)), UplinkFault::Route { to, via: hop });
    }

    #[test]
    fn a_fault_is_told_with_line_key_and_value() {
        let text = "[[network.uplinks]]\nname = \"a\"\ncard = { name = \"eth0\" }\nmtu = 9217\n";
        let Err(ConfigError::Value { line, said, .. }) = parse(text) else { panic!("too large") };
        assert_eq!((line, said.as_str()), (8, "network.uplinks[0].mtu = 9217"));
        let text = "[[network.uplinks]]\nname = \"a\"\n";
        let Err(ConfigError::Value { line, said, .. }) = parse(text) else { panic!("of nothing") };
        assert_eq!((line, said.as_str()), (5, "network.uplinks[0]"));
    }

    #[test]
    fn uplinks_and_the_short_form_exclude_each_other() {
        let text = format!("[network]\ninterface = \"eth0\"\n{ALL}");
        let Err(ConfigError::Value { line, said, .. }) = parse(&text) else { panic!("both") };
        assert_eq!((line, said.as_str()), (6, "network.interface = \"eth0\""));
    }
}
