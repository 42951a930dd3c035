//! Firmware's variables about the slots: what they say, and which of them an action changes.
//!
//! Pure: a map of variables in, writes out. Sources: UEFI Specification 2.10 §3.1 (`BootOrder`,
//! `BootNext`, `BootCurrent`), [`crate::efi`].

use std::collections::BTreeMap;

use super::{Place, Slot};
use crate::efi;

/// The variables of [`efi::GLOBAL`] that matter, by name, without their attributes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Variables(pub BTreeMap<String, Vec<u8>>);

/// What they say about the slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Firmware {
    /// Whether there are variables that can be set.
    pub usable: Usable,
    /// Number of the first slot's entry.
    pub a: Option<u16>,
    /// Number of the second slot's entry.
    pub b: Option<u16>,
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

/// What a slot's entry is called.
pub fn description(slot: Slot) -> String {
    format!("Holdfast {}", slot.name())
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
    fn option(&self, slot: Slot) -> Vec<u8> {
        let Self { number, first, blocks, id } = *self;
        let path = Place::Slot(slot).path();
        let place = efi::Place { number, first, blocks, partition: id, path };
        efi::load_option(&description(slot), &place)
    }
}

impl Firmware {
    /// Reads the variables of a node whose partition is `partition`. Only an entry that starts the
    /// slot's file on this very partition is a slot's.
    pub fn read(variables: &Variables, partition: &Partition, usable: Usable) -> Self {
        let entry = |slot| {
            let wanted = partition.option(slot);
            let mut all = variables.0.iter();
            all.find_map(|(name, bytes)| efi::option_number(name).filter(|_| *bytes == wanted))
        };
        let bytes = |name: &str| variables.0.get(name).map(Vec::as_slice);
        Self {
            usable,
            a: entry(Slot::A),
            b: entry(Slot::B),
            order: bytes("BootOrder").map(efi::order).unwrap_or_default(),
            next: bytes("BootNext").and_then(|bytes| efi::order(bytes).first().copied()),
        }
    }

    /// Returns the number of a slot's entry.
    pub fn entry(&self, slot: Slot) -> Option<u16> {
        match slot {
            Slot::A => self.a,
            Slot::B => self.b,
        }
    }

    /// Returns the slot that firmware starts when nothing else is said.
    pub fn leading(&self) -> Option<Slot> {
        let slot = |number: &u16| Slot::ALL.into_iter().find(|s| self.entry(*s) == Some(*number));
        self.order.iter().find_map(slot)
    }

    /// Returns the slot that firmware starts once.
    pub fn armed(&self) -> Option<Slot> {
        Slot::ALL.into_iter().find(|slot| self.next.is_some() && self.entry(*slot) == self.next)
    }
}

/// Makes the entry of a slot, and removes those of its name that start something else.
pub fn make_entry(variables: &Variables, partition: &Partition, slot: Slot) -> Vec<Change> {
    let name = description(slot);
    let mut changes = Vec::new();
    let order = variables.0.get("BootOrder").map(|bytes| efi::order(bytes)).unwrap_or_default();
    // A number that only the order still names may come back with a medium.
    let mut taken = order;
    for (variable, bytes) in &variables.0 {
        let Some(number) = efi::option_number(variable) else { continue };
        taken.push(number);
        if efi::description(bytes).as_deref() == Some(&name) {
            changes.push(Change::Delete(variable.clone()));
        }
    }
    if let Some(number) = efi::free_number(&taken) {
        changes.push(Change::Set(format!("Boot{number:04X}"), partition.option(slot)));
    }
    changes
}

/// Makes a slot what firmware starts: it takes the place of the first of both, and the other one is in
/// the order no longer. Entries of others stay where they are.
pub fn lead(firmware: &Firmware, slot: Slot) -> Vec<Change> {
    let Some(number) = firmware.entry(slot) else { return Vec::new() };
    let ours = |found: &u16| [firmware.a, firmware.b].contains(&Some(*found));
    let at = firmware.order.iter().position(ours).unwrap_or(0);
    let mut order: Vec<u16> = firmware.order.clone();
    order.insert(at.min(order.len()), number);
    let mut kept: Vec<u16> = Vec::new();
    for found in order {
        if !kept.contains(&found) && (found == number || !ours(&found)) {
            kept.push(found);
        }
    }
    let bytes = kept.into_iter().flat_map(u16::to_le_bytes).collect();
    vec![Change::Set("BootOrder".to_owned(), bytes)]
}

/// Lets firmware start a slot once.
pub fn arm(firmware: &Firmware, slot: Slot) -> Vec<Change> {
    let number = firmware.entry(slot).map(|number| number.to_le_bytes().to_vec());
    number.map(|bytes| Change::Set("BootNext".to_owned(), bytes)).into_iter().collect()
}

/// Takes that back.
pub fn disarm() -> Vec<Change> {
    vec![Change::Delete("BootNext".to_owned())]
}

/// Whether the boot is one that firmware makes once: what runs is a slot that its order does not lead
/// to. For whoever has to end a trial that nobody ends.
pub fn is_trial(variables: &Variables) -> bool {
    let first = |name: &str| variables.0.get(name).map(|bytes| efi::order(bytes));
    let Some(current) = first("BootCurrent").and_then(|found| found.first().copied()) else {
        return false;
    };
    let ours = |number: &u16| {
        let bytes = variables.0.get(&format!("Boot{number:04X}"));
        let found = bytes.and_then(|bytes| efi::description(bytes));
        found.is_some_and(|found| Slot::ALL.into_iter().any(|slot| description(slot) == found))
    };
    let order = first("BootOrder").unwrap_or_default();
    ours(&current) && order.iter().find(|number| ours(number)).is_some_and(|lead| *lead != current)
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_slot_is_entered_armed_and_led_to() {
        let order = BTreeMap::from([("BootOrder".to_owned(), vec![4, 0, 0, 0])]);
        let mut variables = Variables(order);
        for slot in Slot::ALL {
            variables = applied(&variables, make_entry(&variables, &partition(), slot));
        }
        assert_eq!((read(&variables).a, read(&variables).b), (Some(1), Some(2)));
        variables = applied(&variables, lead(&read(&variables), Slot::A));
        assert_eq!(read(&variables).order, [1, 4, 0]);
        variables = applied(&variables, arm(&read(&variables), Slot::B));
        assert_eq!(read(&variables).armed(), Some(Slot::B));
        variables = applied(&variables, lead(&read(&variables), Slot::B));
        assert_eq!(
            (read(&variables).order, read(&variables).leading()),
            (vec![2, 4, 0], Some(Slot::B))
        );
        assert_eq!(read(&applied(&variables, disarm())).next, None);
    }

    #[test]
    fn what_comes_before_ours_stays_there() {
        let firmware =
            Firmware { a: Some(1), b: Some(2), order: vec![9, 1, 3], ..Firmware::default() };
        let wanted = vec![Change::Set("BootOrder".to_owned(), vec![9, 0, 2, 0, 3, 0])];
        assert_eq!(lead(&firmware, Slot::B), wanted);
        assert_eq!(lead(&Firmware::default(), Slot::B), []);
    }

    #[test]
    fn entries_of_another_disk_are_not_ours() {
        let other = Partition { id: uuid::Uuid::from_u128(6), ..partition() };
        let made = make_entry(&Variables::default(), &other, Slot::A);
        let variables = applied(&Variables::default(), made);
        assert_eq!(read(&variables).a, None);
        // The stale one goes when ours comes.
        let variables = applied(&variables, make_entry(&variables, &partition(), Slot::A));
        assert_eq!((variables.0.len(), read(&variables).a), (1, Some(1)));
    }

    #[test]
    fn a_boot_from_the_slot_that_is_not_in_the_order_is_a_trial() {
        let mut variables = Variables::default();
        for slot in Slot::ALL {
            variables = applied(&variables, make_entry(&variables, &partition(), slot));
        }
        variables = applied(&variables, lead(&read(&variables), Slot::A));
        let with = |current: u8| {
            let mut variables = variables.clone();
            variables.0.insert("BootCurrent".to_owned(), vec![current, 0]);
            is_trial(&variables)
        };
        assert_eq!((with(0), with(1), with(7)), (false, true, false));
        assert!(!is_trial(&variables));
    }
}
