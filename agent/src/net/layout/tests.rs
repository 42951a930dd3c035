use proptest::prelude::*;
use types::uplinks::{BondHash, LacpRate};

use super::*;
use crate::net::links::Advertised;

fn link(index: u32, name: &str, kind: Kind) -> LinkFacts {
    LinkFacts {
        index,
        name: name.to_owned(),
        alias: String::new(),
        hardware: Some(HardwareAddress([2, 0, 0, 0, 0, u8::try_from(index).expect("few")])),
        permanent: None,
        mtu: 1500,
        max_mtu: None,
        power: Power::Off,
        carrier: Carrier::Down,
        controller: None,
        kind,
        driver: None,
        path: None,
        advertised: Advertised::Nothing,
    }
}

fn cards(count: u32) -> Vec<LinkFacts> {
    (0..count).map(|number| link(number + 1, &format!("eth{number}"), Kind::Card)).collect()
}

fn named(name: &str) -> Card {
    Card { name: Some(name.to_owned()), ..Card::default() }
}

fn bond(cards: &[&str]) -> Bond {
    Bond {
        cards: cards.iter().map(|name| named(name)).collect(),
        mode: BondMode::Lacp,
        lacp_rate: LacpRate::Fast,
        hash: BondHash::Layer34,
        mii_ms: 100,
        arp_ms: 0,
        arp_targets: Vec::new(),
    }
}

fn bonded(name: &str, cards: &[&str]) -> Uplink {
    let bond = Some(bond(cards));
    Uplink { card: None, bond, ..Uplink::of_card(name, Card::default()) }
}

fn tagged(name: &str, over: &str, id: u16) -> Uplink {
    let over = Some(over.to_owned());
    Uplink { card: None, over, vlan: Some(id), ..Uplink::of_card(name, Card::default()) }
}

/// A kernel that does as it is told.
#[derive(Debug, Clone)]
struct Model(Vec<LinkFacts>);

impl Model {
    fn at(&mut self, index: u32) -> &mut LinkFacts {
        self.0.iter_mut().find(|link| link.index == index).expect("it exists")
    }

    fn add(&mut self, name: &str, kind: Kind) {
        let index = self.0.iter().map(|link| link.index).max().unwrap_or(0) + 1;
        assert!(self.0.iter().all(|link| link.name != name), "{name} exists");
        self.0.push(link(index, name, kind));
    }

    fn delete(&mut self, index: u32) {
        let above =
            |link: &LinkFacts| matches!(link.kind, Kind::Vlan { parent, .. } if parent == index);
        self.0.retain(|link| link.index != index && !above(link));
        let members = self.0.iter_mut().filter(|link| link.controller == Some(index));
        members.for_each(|link| link.controller = None);
    }

    fn carry_out(&mut self, action: &Action) {
        match action {
            Action::AddBond { name, bond } => {
                let facts = BondFacts {
                    mode: Some(bond.mode),
                    lacp_rate: bond.lacp_rate,
                    hash: Some(bond.hash),
                    mii_ms: bond.mii_ms,
                    arp_ms: bond.arp_ms,
                    arp_targets: bond.arp_targets.clone(),
                };
                self.add(name, Kind::Bond(facts));
            }
            Action::AddVlan { name, parent, id } => {
                let (parent, id) = (self.at(*parent).index, *id);
                self.add(name, Kind::Vlan { parent, id });
            }
            Action::Mark { index, alias } => self.at(*index).alias.clone_from(alias),
            Action::Attach { card, bond } => {
                assert!(matches!(self.at(*bond).kind, Kind::Bond(_)));
                self.at(*card).controller = Some(*bond);
                // Its address is the bond's from now on.
                self.at(*card).permanent = self.at(*card).hardware;
                self.at(*card).power = Power::On;
            }
            Action::Detach { card } => self.at(*card).controller = None,
            Action::SetMtu { index, mtu } => self.at(*index).mtu = *mtu,
            Action::SwitchOn { index } => {
                self.at(*index).power = Power::On;
                self.at(*index).carrier = Carrier::Up;
            }
            Action::Delete { index } => self.delete(*index),
        }
    }

    /// Does what the plan says until it says no more; returns the last one.
    fn settle(&mut self, desired: &Desired) -> Layout {
        for _ in 0..8 {
            let layout = plan(desired, &self.0, &BTreeSet::new());
            if layout.actions.is_empty() {
                return layout;
            }
            // A link that an earlier step of the plan took away needs no further ones.
            layout.actions.iter().for_each(|action| self.carry_out(action));
        }
        panic!("it never ends: {:?}", plan(desired, &self.0, &BTreeSet::new()).actions);
    }

    fn names(layout: &Layout) -> Vec<&str> {
        layout.uplinks.iter().map(|(_, link)| &link.name[..]).collect()
    }
}

#[test]
fn every_card_is_an_uplink_but_neither_members_nor_taps() {
    let mut model = Model(cards(3));
    model.0[2].controller = Some(9);
    model.0.push(link(4, "hf0123", Kind::Other));
    model.0.push(LinkFacts { hardware: None, ..link(5, "lo", Kind::Card) });
    assert_eq!(Model::names(&model.settle(&Desired::EveryCard)), ["eth0", "eth1"]);
    let one = |wanted: &str| Desired::One(wanted.to_owned());
    assert_eq!(Model::names(&model.settle(&one("eth1"))), ["eth1"]);
    assert_eq!(Model::names(&model.settle(&one("02:00:00:00:00:01"))), ["eth0"]);
    assert_eq!(Model::names(&model.settle(&one("hf0123"))), [""; 0]);
    assert_eq!(Model::names(&model.settle(&one("lo"))), [""; 0]);
}

#[test]
fn a_bond_and_a_vlan_on_it_are_built_bottom_up_with_room_for_the_vlan() {
    let mut model = Model(cards(3));
    let uplinks = vec![
        bonded("bond0", &["eth0", "eth1"]),
        Uplink { mtu: Some(9000), ..tagged("data", "bond0", 7) },
    ];
    let layout = model.settle(&Desired::Listed(uplinks));
    assert_eq!(Model::names(&layout), ["bond0", "data"]);
    assert_eq!(layout.problems, []);
    let bond = layout.uplinks[0].1.clone();
    assert_eq!(
        (model.at(1).controller, model.at(2).controller),
        (Some(bond.index), Some(bond.index))
    );
    assert_eq!((model.at(3).controller, model.at(3).power), (None, Power::Off));
    assert_eq!((bond.mtu, layout.uplinks[1].1.mtu), (9000, 9000));
    assert_eq!(layout.uplinks[1].1.kind, Kind::Vlan { parent: bond.index, id: 7 });
}

#[test]
fn a_bond_that_is_set_otherwise_is_made_again_and_one_that_is_not_wanted_goes() {
    let mut model = Model(cards(2));
    model.settle(&Desired::Listed(vec![bonded("bond0", &["eth*"]), tagged("v", "bond0", 5)]));
    let mut slow = bonded("bond0", &["eth0"]);
    slow.bond.as_mut().expect("a bond").lacp_rate = LacpRate::Slow;
    let layout = model.settle(&Desired::Listed(vec![slow]));
    assert!(
        matches!(&layout.uplinks[0].1.kind, Kind::Bond(facts) if facts.lacp_rate == LacpRate::Slow)
    );
    assert_eq!((model.0.len(), model.at(2).controller), (3, None));
    assert_eq!(Model::names(&model.settle(&Desired::EveryCard)), ["eth0", "eth1"]);
    assert_eq!(model.0.len(), 2);
}

#[test]
fn a_card_keeps_its_own_address_inside_a_bond() {
    let mut model = Model(cards(2));
    let mut uplink = bonded("bond0", &["eth0"]);
    let mac = Card { mac: Some("02:00:00:00:00:02".to_owned()), ..Card::default() };
    uplink.bond.as_mut().expect("a bond").cards.push(mac);
    let desired = Desired::Listed(vec![uplink]);
    model.settle(&desired);
    model.at(2).hardware = model.at(1).hardware;
    assert_eq!(plan(&desired, &model.0, &BTreeSet::new()).actions, []);
}

#[test]
fn what_cannot_be_is_told_with_what_there_is() {
    let mut links = cards(2);
    links[0].max_mtu = Some(1500);
    links.push(link(3, "br0", Kind::Other));
    let uplinks = vec![
        Uplink { mtu: Some(9000), ..Uplink::of_card("a", named("eth0")) },
        Uplink::of_card("b", Card { driver: Some("mlx5_core".to_owned()), ..Card::default() }),
        bonded("br0", &["eth1"]),
    ];
    let layout = plan(&Desired::Listed(uplinks), &links, &BTreeSet::new());
    let [mtu, card, name] = &layout.problems[..] else { panic!("{:?}", layout.problems) };
    let (uplink, link) = ("a".to_owned(), "eth0".to_owned());
    assert_eq!(*mtu, Problem::Mtu { uplink, link, most: 1500, wanted: 9000 });
    assert!(card.to_string().contains("driver mlx5_core"), "{card}");
    assert!(card.to_string().contains("eth1 (mac 02:00:00:00:00:02"), "{card}");
    assert_eq!(*name, Problem::Name { uplink: "br0".to_owned() });
    assert!(layout.actions.iter().all(|action| !matches!(action, Action::SetMtu { .. })));
}

#[test]
fn any_card_with_a_carrier_is_found_after_all_were_switched_on() {
    let mut model = Model(cards(3));
    let any = Card { carrier: true, ..Card::default() };
    let desired = Desired::Listed(vec![Uplink::of_card("a", any)]);
    let first = plan(&desired, &model.0, &BTreeSet::new());
    assert_eq!(first.actions.len(), 3);
    for action in &first.actions {
        model.carry_out(action);
    }
    model.at(1).carrier = Carrier::Down;
    assert_eq!(Model::names(&model.settle(&desired)), ["eth1"]);
}

#[test]
fn an_uplink_without_a_carrier_stays_until_another_card_has_one() {
    let mut model = Model(cards(3));
    let any = Card { carrier: true, ..Card::default() };
    let desired = Desired::Listed(vec![Uplink::of_card("a", any)]);
    model.settle(&desired);
    model.0.iter_mut().for_each(|link| link.carrier = Carrier::Down);
    let chosen = |model: &Model, current| {
        let layout = plan(&desired, &model.0, &BTreeSet::from([current]));
        (layout.uplinks.first().map(|(_, link)| link.index), layout.problems.len())
    };
    assert_eq!(chosen(&model, 2), (Some(2), 0));
    assert_eq!(chosen(&model, 9), (None, 1), "none of these is an uplink");
    model.at(3).carrier = Carrier::Up;
    assert_eq!(chosen(&model, 2), (Some(3), 0));
}

#[test]
fn an_interface_that_is_not_there_is_told_with_the_cards_that_are() {
    let mut links = cards(2);
    links[0].driver = Some("mlx5_core".to_owned());
    links[1].carrier = Carrier::Up;
    links.push(link(3, "hf01", Kind::Other));
    let told = |desired: &Desired, links: &[LinkFacts]| {
        let layout = plan(desired, links, &BTreeSet::new());
        layout.problems.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let typo = Desired::One("02:00:00:00:00:09".to_owned());
    let [problem] = &told(&typo, &links)[..] else { panic!("not one problem") };
    let wanted = [
        "02:00:00:00:00:09",
        "eth0 (mac 02:00:00:00:00:01, driver mlx5_core, no carrier)",
        "eth1 (mac 02:00:00:00:00:02, carrier)",
    ];
    assert!(wanted.iter().all(|text| problem.contains(text)), "{problem}");
    assert_eq!(told(&Desired::One("eth1".to_owned()), &links), [""; 0]);
    assert_eq!(told(&Desired::EveryCard, &links), [""; 0]);
    for desired in [typo, Desired::EveryCard] {
        let [problem] = &told(&desired, &links[2..])[..] else { panic!("not one problem") };
        assert!(problem.contains("no network card"), "{problem}");
    }
}

/// A bond of those of all cards that have a carrier.
fn bond_of_plugged() -> Desired {
    let mut uplink = bonded("bond0", &[]);
    let any = Card { carrier: true, ..Card::default() };
    uplink.bond.as_mut().expect("a bond").cards.push(any);
    Desired::Listed(vec![uplink])
}

#[test]
fn a_bond_of_cards_with_a_carrier_begins_by_switching_all_on() {
    let mut model = Model(cards(3));
    model.0[2].controller = Some(9);
    let desired = bond_of_plugged();
    let first = plan(&desired, &model.0, &BTreeSet::new());
    assert!(first.actions.contains(&Action::SwitchOn { index: 1 }), "{:?}", first.actions);
    assert!(first.actions.contains(&Action::SwitchOn { index: 2 }), "{:?}", first.actions);
    assert!(!first.actions.contains(&Action::SwitchOn { index: 3 }), "somebody else's");
    for action in &first.actions {
        model.carry_out(action);
    }
    model.at(2).carrier = Carrier::Down;
    let layout = model.settle(&desired);
    let bond = Some(layout.uplinks[0].1.index);
    assert_eq!((model.at(1).controller, model.at(2).controller), (bond, None));
    assert_eq!(layout.problems, []);
}

#[test]
fn a_card_stays_in_its_bond_when_its_carrier_is_lost() {
    let mut model = Model(cards(2));
    let desired = bond_of_plugged();
    model.settle(&desired);
    assert!(model.at(1).controller.is_some() && model.at(2).controller.is_some());
    model.at(1).carrier = Carrier::Down;
    let layout = plan(&desired, &model.0, &BTreeSet::new());
    assert_eq!((layout.actions, layout.problems), (vec![], vec![]));
    model.at(2).carrier = Carrier::Down;
    let layout = plan(&desired, &model.0, &BTreeSet::new());
    assert_eq!((layout.actions, layout.problems), (vec![], vec![]));
}

fn any_uplinks() -> impl Strategy<Value = Vec<Uplink>> {
    let made = (0_u8..3, 0_usize..6, 0_usize..6, 1_u16..4, prop::option::of(1280_u32..9216));
    prop::collection::vec(made, 0..6).prop_map(|made| {
        let mut uplinks: Vec<Uplink> = Vec::new();
        for (number, (form, a, b, id, mtu)) in made.into_iter().enumerate() {
            let name = format!("u{number}");
            let (a, b) = (format!("eth{a}"), format!("eth{b}"));
            let below = uplinks.iter().find(|uplink| uplink.over.is_none());
            let uplink = match (form, below) {
                (0, _) => Uplink::of_card(&name, named(&a)),
                (1, Some(below)) => tagged(&name, &below.name.clone(), id),
                _ => bonded(&name, &[&a, &b]),
            };
            uplinks.push(Uplink { mtu, ..uplink });
        }
        let valid: Vec<Uplink> = uplinks.iter().fold(Vec::new(), |mut valid, uplink| {
            valid.push(uplink.clone());
            if types::uplinks::check(&valid).is_err() {
                valid.pop();
            }
            valid
        });
        valid
    })
}

proptest! {
    /// From any layout to any other: it ends, what is wanted exists, and strangers are untouched.
    #[test]
    fn every_layout_is_reached_and_strangers_are_left_alone(
        before in any_uplinks(), after in any_uplinks()
    ) {
        let mut model = Model(cards(4));
        let strangers = [link(50, "hf01", Kind::Other), link(51, "bond9", Kind::Bond(BondFacts::default()))];
        model.0.extend(strangers.clone());
        model.settle(&Desired::Listed(before));
        let layout = model.settle(&Desired::Listed(after.clone()));
        for stranger in &strangers {
            prop_assert!(model.0.contains(stranger));
        }
        let made = model.0.iter().filter(|link| link.alias.starts_with(MARK)).count();
        let wanted = layout.uplinks.iter().filter(|(place, _)| after[*place].card.is_none()).count();
        prop_assert_eq!(made, wanted);
        let complained = |uplink: &Uplink| layout.problems.iter().any(|p| p.to_string().contains(&uplink.name));
        for (place, uplink) in after.iter().enumerate() {
            let below = after.iter().find(|other| Some(&other.name) == uplink.over.as_ref());
            let exists = layout.uplinks.iter().any(|(known, _)| *known == place);
            prop_assert!(exists || complained(uplink) || below.is_some_and(complained), "{:?}", uplink);
        }
    }
}
