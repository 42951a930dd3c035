//! Where the mapped parts of all devices' BARs are in the guest.
//!
//! A BAR stays where it is while the guest lets it not decode: firmware and systems switch decoding off and on
//! again around each look at a size, and placing a BAR of a GPU takes long. It makes room for one that decodes
//! there. One that finds its place taken by another that decodes is trapped, and has it when it gets free.
//! Source: PCI Express Base Specification 6.0 §7.5.1.1.3, §7.5.1.2.1.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::bars::{Part, Slots};

/// The BARs of a machine's devices.
#[derive(Default)]
pub struct Places(Mutex<Placed>);

#[derive(Default)]
struct Placed {
    bars: BTreeMap<u64, Bar>,
    next: u64,
}

struct Bar {
    size: u64,
    parts: Vec<Part>,
    slots: Arc<dyn Slots>,
    /// Where it decodes, if it does.
    decodes: Option<u64>,
    /// Where its parts are, with what keeps them there.
    held: Option<(u64, Vec<Box<dyn Send>>)>,
}

/// A BAR's part in [`Places`], until it is dropped.
pub struct Place {
    places: Arc<Places>,
    id: u64,
}

impl Places {
    /// Takes up a BAR of `size` bytes that decodes nowhere yet. `slots` place its parts.
    pub fn add(self: &Arc<Self>, size: u64, parts: Vec<Part>, slots: Arc<dyn Slots>) -> Place {
        let mut placed = self.lock();
        let id = placed.next;
        placed.next += 1;
        placed.bars.insert(id, Bar { size, parts, slots, decodes: None, held: None });
        Place { places: Arc::clone(self), id }
    }

    /// Notes where a device's BARs decode: each is told with its place. Those that decode elsewhere than they
    /// are move there, and what waited for a place that gets free has it.
    ///
    /// # Errors
    /// When one of them cannot be placed, which takes nothing from the others.
    pub fn follow(&self, changes: &[(&Place, Option<u64>)]) -> io::Result<()> {
        let mut placed = self.lock();
        let mut freed = Vec::new();
        for (place, decodes) in changes {
            let Some(bar) = placed.bars.get_mut(&place.id) else { continue };
            bar.decodes = *decodes;
            if decodes.is_some() && bar.held.as_ref().map(|(at, _)| *at) != *decodes {
                freed.extend(bar.held.take().map(|_| place.id));
            }
        }
        let mut outcome = Ok(());
        for (place, _) in changes {
            // One that fails keeps none of the others out.
            outcome = outcome.and(placed.arrive(place.id));
        }
        if !freed.is_empty() {
            placed.arrive_all();
        }
        outcome
    }

    fn lock(&self) -> MutexGuard<'_, Placed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Placed {
    /// Places a BAR where it decodes, unless it is there or decodes nowhere.
    fn arrive(&mut self, id: u64) -> io::Result<()> {
        let wanted = self.bars.get(&id).filter(|bar| bar.held.is_none());
        let Some((at, size)) = wanted.and_then(|bar| Some((bar.decodes?, bar.size))) else {
            return Ok(());
        };
        for other in self.bars.values_mut().filter(|bar| bar.decodes.is_none()) {
            if other
                .held
                .as_ref()
                .is_some_and(|(there, _)| overlap((at, size), (*there, other.size)))
            {
                other.held = None;
            }
        }
        let Some(bar) = self.bars.get_mut(&id) else { return Ok(()) };
        let place = |part: &Part| {
            let guest = at.checked_add(part.area.offset).ok_or(io::ErrorKind::InvalidInput)?;
            bar.slots.map(guest, part)
        };
        bar.held = Some((at, bar.parts.iter().map(place).collect::<io::Result<_>>()?));
        Ok(())
    }

    /// Places what can be now. What cannot was told of when it first could not.
    fn arrive_all(&mut self) {
        let ids: Vec<u64> = self.bars.keys().copied().collect();
        for id in ids {
            let _ = self.arrive(id);
        }
    }
}

impl Place {
    /// Takes the parts away, wherever they are: the device's reset has undone what other devices had of them.
    /// They arrive again when the guest has placed the BAR again.
    pub fn forget(&self) {
        let mut placed = self.places.lock();
        let Some(bar) = placed.bars.get_mut(&self.id) else { return };
        bar.decodes = None;
        if bar.held.take().is_some() {
            placed.arrive_all();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut placed = self.places.lock();
        if placed.bars.remove(&self.id).is_some_and(|bar| bar.held.is_some()) {
            placed.arrive_all();
        }
    }
}

/// Whether two ranges, each of an address and a size, have something in common.
fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    let behind = |(start, size): (u64, u64)| u128::from(start) + u128::from(size);
    u128::from(one.0) < behind(other) && u128::from(other.0) < behind(one)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

    use super::*;
    use crate::vfio::{
        device::{Area, Device},
        fake::FakeDevice,
    };

    const SIZE: u64 = 0x4000;
    const X: u64 = 0xc000_0000;
    const Y: u64 = 0xc100_0000;

    /// A guest that has as the kernel does: no two slots overlap.
    #[derive(Default, Clone)]
    struct Guest(Arc<Mutex<Vec<u64>>>);

    struct Slot(Guest, u64);

    impl Slots for Guest {
        fn map(&self, guest: u64, _part: &Part) -> io::Result<Box<dyn Send>> {
            let mut all = self.0.lock().unwrap();
            if all.iter().any(|other| overlap((guest, SIZE), (*other, SIZE))) {
                return Err(io::Error::from_raw_os_error(libc::EEXIST));
            }
            all.push(guest);
            Ok(Box::new(Slot(self.clone(), guest)))
        }
    }

    impl Drop for Slot {
        fn drop(&mut self) {
            self.0.0.lock().unwrap().retain(|guest| *guest != self.1);
        }
    }

    /// Two devices' BARs at X and Y.
    fn two() -> (Guest, Arc<Places>, [Place; 2]) {
        let (guest, places) = (Guest::default(), Arc::new(Places::default()));
        let bar = || {
            let area = Area { offset: 0, size: SIZE };
            let mapping = FakeDevice::nvme().map(0, area, SIZE).unwrap();
            places.add(SIZE, vec![Part { bar: 0, area, mapping }], Arc::new(guest.clone()))
        };
        let two = [bar(), bar()];
        places.follow(&[(&two[0], Some(X))]).unwrap();
        places.follow(&[(&two[1], Some(Y))]).unwrap();
        assert_eq!(guest.has(), [X, Y]);
        (guest, places, two)
    }

    impl Guest {
        fn has(&self) -> Vec<u64> {
            self.0.lock().unwrap().clone()
        }
    }

    #[test]
    fn a_bar_that_does_not_decode_stays_until_its_place_is_wanted() {
        let (guest, places, [a, b]) = two();
        places.follow(&[(&b, None)]).unwrap();
        assert_eq!(guest.has(), [X, Y]);
        places.follow(&[(&a, Some(Y))]).unwrap();
        assert_eq!(guest.has(), [Y]);
        places.follow(&[(&b, Some(X))]).unwrap();
        assert_eq!(guest.has(), [Y, X]);
    }

    #[test]
    fn a_bar_whose_place_is_taken_has_it_when_it_gets_free() {
        let (guest, places, [a, b]) = two();
        let refusal = places.follow(&[(&a, Some(Y))]).unwrap_err();
        assert_eq!(refusal.raw_os_error(), Some(libc::EEXIST));
        assert_eq!(guest.has(), [Y]);
        places.follow(&[(&b, Some(X))]).unwrap();
        assert_eq!(guest.has(), [X, Y]);

        places.follow(&[(&a, Some(X))]).unwrap_err();
        b.forget();
        assert_eq!(guest.has(), [X]);
        places.follow(&[(&b, Some(X))]).unwrap_err();
        drop(a);
        assert_eq!(guest.has(), [X]);
        drop(b);
        assert_eq!(guest.has(), Vec::<u64>::new());
    }

    #[test]
    fn a_bar_without_a_place_keeps_none_of_the_others_out() {
        let (guest, places, [a, b]) = two();
        let area = Area { offset: 0, size: SIZE };
        let mapping = FakeDevice::nvme().map(0, area, SIZE).unwrap();
        let slots = Arc::new(guest.clone());
        let c = places.add(SIZE, vec![Part { bar: 0, area, mapping }], slots);
        let z = 0xc200_0000;
        places.follow(&[(&a, Some(Y)), (&c, Some(z))]).unwrap_err();
        assert_eq!(guest.has(), [Y, z]);
        drop(b);
        assert_eq!(guest.has(), [z, Y]);
    }

    #[test]
    fn bars_of_one_device_change_places_at_once() {
        let (guest, places, [a, b]) = two();
        places.follow(&[(&a, Some(Y)), (&b, Some(X))]).unwrap();
        assert_eq!(guest.has(), [Y, X]);
    }
}
