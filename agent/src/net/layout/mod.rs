//! Which interfaces there should be, and what to do so that there are. Pure.
//!
//! [`plan`] compares what the configuration wants with what the kernel has and returns the next
//! steps. Some steps need others to be done first, so callers carry them out, look again, and plan
//! again until nothing is left. It gives no addresses.
//!
//! What is an uplink already counts in one case only: a card that is chosen by its carrier stays while
//! no other has one, because a cable that is out for a moment costs no address.

#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, fmt};

use types::uplinks::{Bond, BondMode, Card, Uplink};

use super::{
    Carrier, HardwareAddress,
    links::{BondFacts, Kind, LinkFacts, Power},
};

/// How the aliases of bonds and VLANs begin that the node made; others are never deleted.
const MARK: &str = "holdfast uplink";

/// What the configuration wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Desired {
    /// Every card is an uplink of its own.
    EveryCard,
    /// One interface, by kernel name or hardware address.
    One(String),
    /// These.
    Listed(Vec<Uplink>),
}

/// One step. Each may be repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Makes a bond without cards.
    AddBond {
        /// Its kernel name.
        name: String,
        /// How it is set.
        bond: Bond,
    },
    /// Makes an interface for tagged frames.
    AddVlan {
        /// Its kernel name.
        name: String,
        /// Index of the interface that carries them.
        parent: u32,
        /// The tag.
        id: u16,
    },
    /// Says whose an interface is.
    Mark {
        /// The interface.
        index: u32,
        /// What it is called.
        alias: String,
    },
    /// Makes a card part of a bond.
    Attach {
        /// The card.
        card: u32,
        /// The bond.
        bond: u32,
    },
    /// Makes a card stand alone.
    Detach {
        /// The card.
        card: u32,
    },
    /// Sets the largest frame payload.
    SetMtu {
        /// The interface.
        index: u32,
        /// Bytes.
        mtu: u32,
    },
    /// Switches an interface on.
    SwitchOn {
        /// The interface.
        index: u32,
    },
    /// Removes a bond or VLAN.
    Delete {
        /// The interface.
        index: u32,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddBond { name, .. } => write!(f, "make the bond {name}"),
            Self::AddVlan { name, id, .. } => write!(f, "make {name} for VLAN {id}"),
            Self::Mark { index, alias } => write!(f, "call interface {index} {alias:?}"),
            Self::Attach { card, bond } => write!(f, "attach interface {card} to the bond {bond}"),
            Self::Detach { card } => write!(f, "detach interface {card}"),
            Self::SetMtu { index, mtu } => write!(f, "set the MTU of interface {index} to {mtu}"),
            Self::SwitchOn { index } => write!(f, "take interface {index} up"),
            Self::Delete { index } => write!(f, "delete interface {index}"),
        }
    }
}

/// Why an uplink cannot be as configured, until the machine or the configuration changes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Problem {
    #[error("uplink {uplink}: no card fits {wanted}; this machine has {found}")]
    NoCard { uplink: String, wanted: String, found: String },
    #[error(
        "this machine has no network card that this release has a driver for; put in another one, or ask \
         for a driver with the list of PCI devices"
    )]
    NoCardAtAll,
    #[error(
        "network.interface: no interface has the name or hardware address {wanted:?}; this machine has \
         {found}; set it to one of them, or leave it out to use every card"
    )]
    NoInterface { wanted: String, found: String },
    #[error("uplink {uplink}: there is another interface of this name; choose another name")]
    Name { uplink: String },
    #[error(
        "uplink {uplink}: {link} takes an MTU of at most {most}, not {wanted}; set mtu = {most}"
    )]
    Mtu { uplink: String, link: String, most: u32, wanted: u32 },
}

/// Where the interfaces are on the way to what is wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// The next steps, in order; none when everything is as wanted.
    pub actions: Vec<Action>,
    /// The uplinks that exist: number of the uplink in the list, or rank of the card, and interface.
    pub uplinks: Vec<(usize, LinkFacts)>,
    /// What cannot be done.
    pub problems: Vec<Problem>,
}

/// Plans the next steps. `current` are the indexes of the interfaces that are uplinks now.
pub fn plan(desired: &Desired, observed: &[LinkFacts], current: &BTreeSet<u32>) -> Layout {
    let mut planner =
        Planner { observed, current, layout: Layout::default(), used: BTreeSet::new() };
    match desired {
        Desired::EveryCard => {
            planner.short(|link| link.is_card() && link.controller.is_none());
            planner.no_card_at_all();
        }
        Desired::One(wanted) => {
            planner.short(|link| is_meant(link, wanted));
            planner.no_interface(wanted);
        }
        Desired::Listed(uplinks) => {
            for place in 0..uplinks.len() {
                planner.uplink(uplinks, place);
            }
        }
    }
    planner.remove_leftovers();
    planner.layout
}

struct Planner<'a> {
    observed: &'a [LinkFacts],
    current: &'a BTreeSet<u32>,
    layout: Layout,
    /// Interfaces that have their place.
    used: BTreeSet<u32>,
}

impl Planner<'_> {
    /// Uplinks that are only switched on.
    fn short(&mut self, wanted: impl Fn(&LinkFacts) -> bool) {
        let found: Vec<LinkFacts> =
            self.observed.iter().filter(|link| wanted(link)).cloned().collect();
        for (rank, link) in found.into_iter().enumerate() {
            self.used.insert(link.index);
            self.switch_on(&link);
            self.layout.uplinks.push((rank, link));
        }
    }

    fn uplink(&mut self, uplinks: &[Uplink], place: usize) {
        let uplink = &uplinks[place];
        let link = match (&uplink.card, &uplink.bond, &uplink.over) {
            (Some(card), ..) => self.card(uplink, card),
            (_, Some(bond), _) => self.bond(uplink, bond),
            (_, _, Some(over)) => self.vlan(uplinks, uplink, over),
            (None, None, None) => None,
        };
        let Some(link) = link else { return };
        self.used.insert(link.index);
        // What VLANs need, the interface below needs too.
        let above = uplinks.iter().filter(|other| other.over.as_ref() == Some(&uplink.name));
        if let Some(mtu) = above.chain([uplink]).filter_map(|uplink| uplink.mtu).max() {
            self.mtu(uplink, &link, mtu);
        }
        self.switch_on(&link);
        self.layout.uplinks.push((place, link));
    }

    fn card(&mut self, uplink: &Uplink, card: &Card) -> Option<LinkFacts> {
        let candidates = self.candidates(card);
        if card.carrier {
            // Only what is switched on can tell whether there is a carrier.
            candidates.iter().for_each(|link| self.switch_on(link));
        }
        let fits = |link: &&LinkFacts| !card.carrier || link.carrier == Carrier::Up;
        let is_current = |link: &&LinkFacts| self.current.contains(&link.index);
        let found = candidates.iter().find(fits).or_else(|| candidates.iter().find(is_current));
        let Some(found) = found else {
            self.no_card(uplink, card);
            return None;
        };
        if found.controller.is_some() {
            self.layout.actions.push(Action::Detach { card: found.index });
        }
        Some(found.clone())
    }

    fn bond(&mut self, uplink: &Uplink, bond: &Bond) -> Option<LinkFacts> {
        let present = self.observed.iter().find(|link| link.name == uplink.name);
        let present = present.map(|link| link.index);
        let mut cards = Vec::new();
        for card in &bond.cards {
            let mut found = self.candidates(card);
            if card.carrier {
                // Only what is switched on can tell whether there is a carrier.
                let alone = found.iter().filter(|link| link.controller.is_none());
                alone.for_each(|link| self.switch_on(link));
                // A member that lost its carrier waits for its cable where it is.
                let is_member =
                    |link: &LinkFacts| link.controller.is_some_and(|c| present == Some(c));
                found.retain(|link| is_member(link) || link.carrier == Carrier::Up);
            }
            if found.is_empty() {
                self.no_card(uplink, card);
            }
            self.used.extend(found.iter().map(|link| link.index));
            cards.append(&mut found);
        }
        let is_right =
            |link: &LinkFacts| matches!(&link.kind, Kind::Bond(facts) if same(facts, bond));
        let Some(found) = self.existing(uplink, is_right) else {
            if self.is_free(uplink) {
                let (name, bond) = (uplink.name.clone(), bond.clone());
                self.layout.actions.push(Action::AddBond { name, bond });
            }
            return None;
        };
        for card in cards.iter().filter(|card| card.controller != Some(found.index)) {
            let (card, bond) = (card.index, found.index);
            self.layout.actions.push(Action::Attach { card, bond });
        }
        let is_member = |link: &&LinkFacts| link.controller == Some(found.index);
        for other in self.observed.iter().filter(is_member) {
            if cards.iter().all(|card| card.index != other.index) {
                self.layout.actions.push(Action::Detach { card: other.index });
            }
        }
        Some(found)
    }

    fn vlan(&mut self, uplinks: &[Uplink], uplink: &Uplink, over: &str) -> Option<LinkFacts> {
        let below = uplinks.iter().position(|other| other.name == over)?;
        let id = uplink.vlan?;
        // Without the interface below there is nothing yet to stand on.
        let known = self.layout.uplinks.iter().find(|(place, _)| *place == below)?;
        let parent = known.1.index;
        let wanted = Kind::Vlan { parent, id };
        let found = self.existing(uplink, |link| link.kind == wanted);
        if found.is_none() && self.is_free(uplink) {
            let name = uplink.name.clone();
            self.layout.actions.push(Action::AddVlan { name, parent, id });
        }
        found
    }

    /// The bond or VLAN when it is as wanted. A wrong one is removed.
    fn existing(
        &mut self,
        uplink: &Uplink,
        is_right: impl Fn(&LinkFacts) -> bool,
    ) -> Option<LinkFacts> {
        let found = self.observed.iter().find(|link| link.name == uplink.name)?.clone();
        if !is_right(&found) {
            let made = matches!(found.kind, Kind::Bond(_) | Kind::Vlan { .. });
            if made {
                self.used.insert(found.index);
                self.layout.actions.push(Action::Delete { index: found.index });
            } else {
                self.layout.problems.push(Problem::Name { uplink: uplink.name.clone() });
            }
            return None;
        }
        let alias = format!("{MARK} {}", uplink.name);
        if found.alias != alias {
            self.layout.actions.push(Action::Mark { index: found.index, alias });
        }
        Some(found)
    }

    fn is_free(&self, uplink: &Uplink) -> bool {
        self.observed.iter().all(|link| link.name != uplink.name)
    }

    /// The cards that fit and have no place yet, carriers not asked for.
    fn candidates(&self, card: &Card) -> Vec<LinkFacts> {
        let free = self.observed.iter().filter(|link| link.is_card());
        let free = free.filter(|link| !self.used.contains(&link.index) && fits(link, card));
        let mut found: Vec<LinkFacts> = free.cloned().collect();
        found.sort_by(|a, b| {
            let key = |link: &LinkFacts| (link.path.is_none(), link.path, link.name.clone());
            key(a).cmp(&key(b))
        });
        found
    }

    fn mtu(&mut self, uplink: &Uplink, link: &LinkFacts, wanted: u32) {
        let members = self.observed.iter().filter(|other| other.controller == Some(link.index));
        let least =
            members.chain([link]).filter_map(|link| Some((link.max_mtu?, &link.name))).min();
        if let Some((most, name)) = least.filter(|(most, _)| *most < wanted) {
            let (uplink, link) = (uplink.name.clone(), name.clone());
            self.layout.problems.push(Problem::Mtu { uplink, link, most, wanted });
        } else if link.mtu != wanted {
            self.layout.actions.push(Action::SetMtu { index: link.index, mtu: wanted });
        }
    }

    fn switch_on(&mut self, link: &LinkFacts) {
        let action = Action::SwitchOn { index: link.index };
        if link.power == Power::Off && !self.layout.actions.contains(&action) {
            self.layout.actions.push(action);
        }
    }

    fn no_card(&mut self, uplink: &Uplink, card: &Card) {
        let found = self.cards().unwrap_or_else(|| "no card".to_owned());
        let (uplink, wanted) = (uplink.name.clone(), describe_wanted(card));
        self.layout.problems.push(Problem::NoCard { uplink, wanted, found });
    }

    /// Complains when the one interface that is wanted is not there.
    fn no_interface(&mut self, wanted: &str) {
        if !self.layout.uplinks.is_empty() {
            return;
        }
        match self.cards() {
            Some(found) => {
                let wanted = wanted.to_owned();
                self.layout.problems.push(Problem::NoInterface { wanted, found });
            }
            None => self.no_card_at_all(),
        }
    }

    /// Complains when there is nothing that could be an uplink.
    fn no_card_at_all(&mut self) {
        if self.cards().is_none() && self.layout.uplinks.is_empty() {
            self.layout.problems.push(Problem::NoCardAtAll);
        }
    }

    /// The cards that there are; `None` when there are none.
    fn cards(&self) -> Option<String> {
        let cards = self.observed.iter().filter(|link| link.is_card());
        let cards: Vec<String> = cards.map(describe).collect();
        (!cards.is_empty()).then(|| cards.join(", "))
    }

    /// Removes what the node made and no longer wants, what stands on others first.
    fn remove_leftovers(&mut self) {
        let ours = self.observed.iter().filter(|link| link.alias.starts_with(MARK));
        let mut stale: Vec<&LinkFacts> =
            ours.filter(|link| !self.used.contains(&link.index)).collect();
        stale.retain(|link| matches!(link.kind, Kind::Bond(_) | Kind::Vlan { .. }));
        stale.sort_by_key(|link| (matches!(link.kind, Kind::Bond(_)), link.index));
        let deletions = stale.iter().map(|link| Action::Delete { index: link.index });
        // They may hold what is wanted elsewhere.
        self.layout.actions.splice(0..0, deletions);
    }
}

/// Whether the short form means this interface.
fn is_meant(link: &LinkFacts, wanted: &str) -> bool {
    if link.is_tap() || link.hardware.is_none() {
        return false;
    }
    match wanted.parse::<HardwareAddress>() {
        // A VLAN has its card's hardware address; the card is meant.
        Ok(address) => link.is_card() && link.controller.is_none() && has(link, address),
        Err(_) => link.name == wanted,
    }
}

fn has(link: &LinkFacts, address: HardwareAddress) -> bool {
    // A member of a bond has the bond's address, which is one of its cards'.
    let current = link.hardware == Some(address) && link.controller.is_none();
    current || link.permanent == Some(address)
}

fn fits(link: &LinkFacts, card: &Card) -> bool {
    let name = card.name.as_ref().is_none_or(|name| match name.strip_suffix('*') {
        Some(prefix) => link.name.starts_with(prefix),
        None => link.name == *name,
    });
    let mac = card.mac.as_ref().is_none_or(|mac| mac.parse().is_ok_and(|mac| has(link, mac)));
    let driver = card.driver.is_none() || card.driver == link.driver;
    let path = card.path.is_none() || card.path == link.path;
    name && mac && driver && path
}

fn same(facts: &BondFacts, bond: &Bond) -> bool {
    let lacp = bond.mode == BondMode::ActiveBackup
        || (facts.lacp_rate == bond.lacp_rate && facts.hash == Some(bond.hash));
    let watch = facts.arp_ms == bond.arp_ms
        && facts.arp_targets == bond.arp_targets
        && facts.mii_ms == bond.mii_ms;
    facts.mode == Some(bond.mode) && lacp && watch
}

fn describe(link: &LinkFacts) -> String {
    let mut text = link.name.clone();
    if let Some(address) = link.permanent.or(link.hardware) {
        text += &format!(" (mac {address}");
        if let Some(driver) = &link.driver {
            text += &format!(", driver {driver}");
        }
        if let Some(path) = link.path {
            text += &format!(", path {path}");
        }
        text += if link.carrier == Carrier::Up { ", carrier)" } else { ", no carrier)" };
    }
    text
}

fn describe_wanted(card: &Card) -> String {
    let path = card.path.map(|path| path.to_string());
    let keys =
        [("mac", &card.mac), ("driver", &card.driver), ("name", &card.name), ("path", &path)];
    let mut words: Vec<String> = keys
        .iter()
        .filter_map(|(key, value)| Some(format!("{key} {}", (*value).as_ref()?)))
        .collect();
    if card.carrier {
        words.push("a carrier".to_owned());
    }
    words.join(", ")
}
