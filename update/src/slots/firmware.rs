//! Firmware's variables about the places for programs: what they say, and which of them an action changes.
//!
//! Pure: a map of variables in, writes out. Sources: UEFI Specification 2.10 §3.1 (`BootOrder`,
//! `BootNext`, `BootCurrent`), [`crate::efi`].

use std::collections::BTreeMap;

use super::{Place, Slot};
use crate::efi;

/// The variables of [`efi::GLOBAL`] that matter, by name, without their attributes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Variables(pub BTreeMap<String, Vec<u8>>);

/// What they say about the places.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Firmware {
    /// Whether there are variables that can be set.
    pub usable: Usable,
    /// Number of the first slot's entry.
    pub a: Option<u16>,
    /// Number of the second slot's entry.
    pub b: Option<u16>,
    /// Number of the entry for the fallback path.
    pub fallback: Option<u16>,
    /// `BootOrder`.
    pub order: Vec<u16>,
    /// `BootNext`.
    pub next: Option<u16>,
}

/// Whether variables can be set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Usable {
    /// They can.
    Yes,
    /// They cannot, or there are none.
    #[default]
    No,
}

/// A change of one variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Set it.
    Set(String, Vec<u8>),
    /// Delete it.
    Delete(String),
}

/// What the entry of a place is called.
pub const fn description(place: Place) -> &'static str {
    match place {
        Place::Slot(Slot::A) => "Holdfast A",
        Place::Slot(Slot::B) => "Holdfast B",
        Place::Fallback => "Holdfast",
    }
}

/// Where the EFI system partition is, for firmware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Its number, from 1.
    pub number: u32,
    /// Its first block.
    pub first: u64,
    /// Its length in blocks.
    pub blocks: u64,
    /// Its identity.
    pub id: uuid::Uuid,
}

impl Partition {
    fn option(&self, place: Place) -> Vec<u8> {
        let Self { number, first, blocks, id } = *self;
        let at = efi::Place { number, first, blocks, partition: id, path: place.path() };
        efi::load_option(description(place), &at)
    }

    /// Whether an option starts the place's file on this partition and has the name of ours, whatever else
    /// firmware wrote into it. Firmware's own entry of the same file is not counted: firmware may take it away.
    fn is_entry(&self, place: Place, option: &[u8]) -> bool {
        let target = efi::target(option).filter(|target| target.partition == self.id);
        let path = target.and_then(|target| Place::of_path(&target.path));
        path == Some(place) && is_ours(option)
    }
}

/// Whether an option has a name of ours; some firmware adds the disk's to it.
fn is_ours(option: &[u8]) -> bool {
    efi::description(option).is_some_and(|found| found.starts_with(description(Place::Fallback)))
}

fn is_active(option: &[u8]) -> bool {
    efi::target(option).is_some_and(|target| target.active)
}

impl Firmware {
    /// Reads the variables of a node whose partition is `partition`. Only an entry that starts the
    /// place's file on this very partition, and that firmware may try, is the place's.
    pub fn read(variables: &Variables, partition: &Partition, usable: Usable) -> Self {
        let bytes = |name: &str| variables.0.get(name).map(Vec::as_slice);
        let order = bytes("BootOrder").map(efi::order).unwrap_or_default();
        let entry = |place| {
            let all = variables.0.iter().filter_map(|(name, bytes)| {
                let is_it = |_: &u16| is_active(bytes) && partition.is_entry(place, bytes);
                efi::option_number(name).filter(is_it)
            });
            // Of two that start the same, the one that is listed.
            all.min_by_key(|number| {
                order.iter().position(|listed| listed == number).unwrap_or(usize::MAX)
            })
        };
        Self {
            usable,
            a: entry(Place::Slot(Slot::A)),
            b: entry(Place::Slot(Slot::B)),
            fallback: entry(Place::Fallback),
            order: order.clone(),
            next: bytes("BootNext").and_then(|bytes| efi::order(bytes).first().copied()),
        }
    }

    /// Returns the number of a place's entry.
    pub fn entry(&self, place: Place) -> Option<u16> {
        match place {
            Place::Slot(Slot::A) => self.a,
            Place::Slot(Slot::B) => self.b,
            Place::Fallback => self.fallback,
        }
    }

    /// Returns the places in the order in which firmware tries them.
    pub fn listed(&self) -> Vec<Place> {
        let place = |number| Place::ALL.into_iter().find(|at| self.entry(*at) == Some(number));
        self.order.iter().copied().filter_map(place).collect()
    }

    /// Returns the place that firmware starts when nothing else is said.
    pub fn leading(&self) -> Option<Place> {
        self.listed().first().copied()
    }

    /// Returns the slot that firmware starts once.
    pub fn armed(&self) -> Option<Slot> {
        let next = |slot: &Slot| self.entry(Place::Slot(*slot)) == self.next;
        Slot::ALL.into_iter().find(|slot| self.next.is_some() && next(slot))
    }
}

/// Makes the entry of a place under the number of one that is of its name or starts its file, and removes the
/// others of these. The order loses numbers that no variable has.
pub fn make_entry(variables: &Variables, partition: &Partition, place: Place) -> Vec<Change> {
    let order = variables.0.get("BootOrder").map(|bytes| efi::order(bytes)).unwrap_or_default();
    let known = variables.0.iter();
    let known = known.filter_map(|(name, bytes)| Some((efi::option_number(name)?, name, bytes)));
    let known: Vec<(u16, &String, &Vec<u8>)> = known.collect();
    let (stale, others): (Vec<_>, Vec<_>) = known.into_iter().partition(|(_, _, bytes)| {
        let named = efi::description(bytes).as_deref() == Some(description(place));
        named || partition.is_entry(place, bytes)
    });
    let numbers = |of: &[(u16, &String, &Vec<u8>)]| of.iter().map(|(number, ..)| *number).collect();
    let (old, others): (Vec<u16>, Vec<u16>) = (numbers(&stale), numbers(&others));
    // One that nobody has is new to firmware, which puts it where it likes.
    let listed = order.iter().copied().find(|number| old.contains(number));
    let free = || efi::free_number(&[&others[..], &order[..]].concat());
    let Some(number) = listed.or_else(|| old.first().copied()).or_else(free) else {
        return Vec::new();
    };
    let rest = stale.iter().filter(|(other, ..)| *other != number);
    let mut changes: Vec<Change> =
        rest.map(|(_, name, _)| Change::Delete((*name).clone())).collect();
    let own = stale.iter().find(|(other, ..)| *other == number);
    let name = own.map_or_else(|| format!("Boot{number:04X}"), |(_, name, _)| (*name).clone());
    changes.push(Change::Set(name, partition.option(place)));
    let alive: Vec<u16> =
        order.iter().copied().filter(|it| *it == number || others.contains(it)).collect();
    if alive != order {
        let bytes = alive.into_iter().flat_map(u16::to_le_bytes).collect();
        changes.push(Change::Set("BootOrder".to_owned(), bytes));
    }
    changes
}

/// Makes `places` what firmware tries, one after the other: they take the place of the first of ours, and
/// no other one of ours is in the order any longer. Entries of others stay where they are.
pub fn list(firmware: &Firmware, places: &[Place]) -> Vec<Change> {
    let numbers: Option<Vec<u16>> = places.iter().map(|place| firmware.entry(*place)).collect();
    let Some(numbers) = numbers.filter(|numbers| !numbers.is_empty()) else { return Vec::new() };
    let ours =
        |found: &u16| Place::ALL.into_iter().any(|place| firmware.entry(place) == Some(*found));
    let at = firmware.order.iter().position(ours).unwrap_or(0);
    let (first, rest) = firmware.order.split_at(at);
    let mut order: Vec<u16> = first.to_vec();
    order.extend(numbers);
    order.extend(rest.iter().filter(|number| !ours(number)));
    let bytes = order.into_iter().flat_map(u16::to_le_bytes).collect();
    vec![Change::Set("BootOrder".to_owned(), bytes)]
}

/// Makes a slot the very last that firmware tries, behind everybody's entries.
pub fn append(firmware: &Firmware, slot: Slot) -> Vec<Change> {
    let Some(number) = firmware.entry(Place::Slot(slot)) else { return Vec::new() };
    let others = firmware.order.iter().copied().filter(|other| *other != number);
    let bytes = others.chain([number]).flat_map(u16::to_le_bytes).collect();
    vec![Change::Set("BootOrder".to_owned(), bytes)]
}

/// Lets firmware start a slot once.
pub fn arm(firmware: &Firmware, slot: Slot) -> Vec<Change> {
    let number = firmware.entry(Place::Slot(slot)).map(|number| number.to_le_bytes().to_vec());
    number.map(|bytes| Change::Set("BootNext".to_owned(), bytes)).into_iter().collect()
}

/// Takes that back.
pub fn disarm() -> Vec<Change> {
    vec![Change::Delete("BootNext".to_owned())]
}

/// Whether the boot is one that firmware makes once, or its second choice: what runs is a place of ours
/// that its order does not lead to. For whoever has to end a trial that nobody ends.
pub fn is_trial(variables: &Variables) -> bool {
    let first = |name: &str| variables.0.get(name).map(|bytes| efi::order(bytes));
    let Some(current) = first("BootCurrent").and_then(|found| found.first().copied()) else {
        return false;
    };
    let ours = |number: &u16| {
        let mut all = variables.0.iter();
        let option = all.find(|(name, _)| efi::option_number(name) == Some(*number));
        let path = |option: &[u8]| Place::of_path(&efi::target(option)?.path);
        option.is_some_and(|(_, option)| is_ours(option) && path(option).is_some())
    };
    let order = first("BootOrder").unwrap_or_default();
    ours(&current) && order.iter().find(|number| ours(number)).is_some_and(|lead| *lead != current)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn partition() -> Partition {
        Partition { number: 1, first: 2048, blocks: 4096, id: uuid::Uuid::from_u128(5) }
    }

    fn applied(variables: &Variables, changes: Vec<Change>) -> Variables {
        let mut map = variables.0.clone();
        for change in changes {
            match change {
                Change::Set(name, bytes) => drop(map.insert(name, bytes)),
                Change::Delete(name) => drop(map.remove(&name)),
            }
        }
        Variables(map)
    }

    fn read(variables: &Variables) -> Firmware {
        Firmware::read(variables, &partition(), Usable::Yes)
    }

    const A: Place = Place::Slot(Slot::A);
    const B: Place = Place::Slot(Slot::B);

    #[test]
    fn places_are_entered_armed_and_listed() {
        let order = ("BootOrder".to_owned(), vec![4, 0, 0, 0]);
        let others = ["Boot0000", "Boot0004"].map(|name| (name.to_owned(), b"another's".to_vec()));
        let mut variables = Variables([order].into_iter().chain(others).collect());
        for place in Place::ALL {
            variables = applied(&variables, make_entry(&variables, &partition(), place));
        }
        let Firmware { a, b, fallback, .. } = read(&variables);
        assert_eq!((a, b, fallback), (Some(1), Some(2), Some(3)));
        variables = applied(&variables, list(&read(&variables), &[Place::Fallback, A]));
        assert_eq!(read(&variables).order, [3, 1, 4, 0]);
        assert_eq!(read(&variables).listed(), [Place::Fallback, A]);
        variables = applied(&variables, arm(&read(&variables), Slot::B));
        assert_eq!(read(&variables).armed(), Some(Slot::B));
        variables = applied(&variables, append(&read(&variables), Slot::B));
        assert_eq!(read(&variables).order, [3, 1, 4, 0, 2]);
        assert_eq!(read(&variables).listed(), [Place::Fallback, A, B]);
        variables = applied(&variables, list(&read(&variables), &[B]));
        assert_eq!((read(&variables).order, read(&variables).leading()), (vec![2, 4, 0], Some(B)));
        assert_eq!(read(&applied(&variables, disarm())).next, None);
    }

    #[test]
    fn what_comes_before_ours_stays_there() {
        let firmware =
            Firmware { a: Some(1), b: Some(2), order: vec![9, 1, 3, 2, 4], ..Firmware::default() };
        let bytes = vec![9, 0, 2, 0, 3, 0, 4, 0];
        assert_eq!(list(&firmware, &[B]), [Change::Set("BootOrder".to_owned(), bytes)]);
        assert_eq!((list(&firmware, &[Place::Fallback]), list(&firmware, &[])), (vec![], vec![]));
    }

    #[test]
    fn entries_of_another_disk_are_not_ours() {
        let other = Partition { id: uuid::Uuid::from_u128(6), ..partition() };
        let made = make_entry(&Variables::default(), &other, A);
        let variables = applied(&Variables::default(), made);
        assert_eq!(read(&variables).a, None);
        // The stale one becomes ours.
        let variables = applied(&variables, make_entry(&variables, &partition(), A));
        assert_eq!((variables.0.len(), read(&variables).a), (1, Some(0)));
    }

    /// Firmware may write the way to the disk, data of its own, other attributes, the disk's name, and small
    /// letters into an entry, at every start.
    #[test]
    fn an_entry_that_firmware_alters_stays_what_it_is() {
        let mut variables = Variables::default();
        for number in [7, 8] {
            variables.0.insert(format!("Boot{number:04X}"), b"another's".to_vec());
        }
        variables.0.insert("BootOrder".to_owned(), vec![7, 0, 8, 0]);
        let wanted = [Place::Fallback, A];
        let repair = |variables: &Variables| {
            let mut variables = variables.clone();
            for place in wanted {
                if read(&variables).entry(place).is_none() {
                    let made = make_entry(&variables, &partition(), place);
                    variables = applied(&variables, made);
                }
            }
            if read(&variables).listed() != wanted {
                variables = applied(&variables, list(&read(&variables), &wanted));
            }
            variables
        };
        let mut variables = repair(&variables);
        assert_eq!(read(&variables).order, [0, 1, 7, 8]);
        // An operator has put another one first.
        variables.0.insert("BootOrder".to_owned(), vec![7, 0, 0, 0, 1, 0, 8, 0]);
        for round in 0..10_u8 {
            let name = if round % 2 == 0 { "Holdfast (DISK)" } else { "Holdfast" };
            let mut altered = efi::load_option(
                name,
                &efi::Place {
                    number: 1,
                    first: 2048,
                    blocks: 4096,
                    partition: partition().id,
                    path: "efi/boot/bootx64.efi",
                },
            );
            altered[1] = round;
            altered.extend(vec![round; usize::from(round) * 2]);
            variables.0.insert("Boot0000".to_owned(), altered);
            assert_eq!(repair(&variables), variables, "round {round}");
        }
        // What firmware does not try is made anew, under its number.
        for _ in 0..10 {
            variables.0.get_mut("Boot0000").unwrap()[0] &= !1;
            variables.0.remove("Boot0001");
            variables = repair(&variables);
            assert_eq!(read(&variables).order, [7, 0, 1, 8]);
            assert_eq!(variables.0.len(), 5);
        }
    }

    #[test]
    fn firmwares_own_entry_of_the_same_file_is_not_ours() {
        let at = efi::Place {
            number: 1,
            first: 2048,
            blocks: 4096,
            partition: partition().id,
            path: Place::Fallback.path(),
        };
        let own = BTreeMap::from([("Boot0003".to_owned(), efi::load_option("UEFI OS", &at))]);
        let variables = Variables(own);
        assert_eq!(read(&variables).fallback, None);
        let variables = applied(&variables, make_entry(&variables, &partition(), Place::Fallback));
        assert_eq!((variables.0.len(), read(&variables).fallback), (2, Some(0)));
    }

    #[test]
    fn numbers_that_no_variable_has_leave_the_order() {
        let order = BTreeMap::from([("BootOrder".to_owned(), vec![4, 0, 6, 0])]);
        let mut variables = Variables(order);
        variables.0.insert("Boot0006".to_owned(), b"another's".to_vec());
        let variables = applied(&variables, make_entry(&variables, &partition(), A));
        assert_eq!((read(&variables).order, read(&variables).a), (vec![6], Some(0)));
    }

    #[test]
    fn a_boot_from_a_place_that_the_order_does_not_lead_to_is_a_trial() {
        let mut variables = Variables::default();
        for place in Place::ALL {
            variables = applied(&variables, make_entry(&variables, &partition(), place));
        }
        variables = applied(&variables, list(&read(&variables), &[Place::Fallback, A]));
        let with = |current: u8| {
            let mut variables = variables.clone();
            variables.0.insert("BootCurrent".to_owned(), vec![current, 0]);
            is_trial(&variables)
        };
        assert_eq!([2, 1, 0, 7].map(with), [false, true, true, false]);
        assert!(!is_trial(&variables));
    }
}
