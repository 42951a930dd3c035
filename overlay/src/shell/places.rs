//! Places that peers hold, counted for each of them, so that nobody holds them all.
//!
//! Keys are free, so with a fixed share for each key as many keys as there are shares would take
//! everything. The share therefore shrinks with what is free ("dynamic thresholds", A. K. Choudhury
//! and E. L. Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): where places are held for
//! seconds, as by a stream that has not said what it wants, it takes about as many keys as places to
//! fill them. Where they are held for hours, about 80 keys fill 4,096 places, instead of sixteen; what is
//! held is never taken away, because that would let newcomers end others' streams.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Who holds a place gets at most one in so many of all: sixteen holders, far more than share a
/// resource at most times, then do not notice each other.
pub(super) const SHARE: usize = 16;

/// Who holds a place gets at most one for so many that are free. This bounds more than [`SHARE`] does
/// when less than `FREE / SHARE`, a half, is free.
const FREE: usize = 8;

/// Why there is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum PlacesError {
    #[error("all {all} places are taken; ask again when one is given back")]
    Full { all: usize },
    #[error(
        "it holds {held} of {all} places, and {free} are free for all others; ask again when it has \
         given one back"
    )]
    PeerShare { held: usize, free: usize, all: usize },
}

/// A bounded number of places for holders that are told apart by `K`. Clones share them.
#[derive(Debug)]
pub struct Places<K: Ord> {
    counts: Arc<Mutex<Counts<K>>>,
}

/// A place, until it is dropped.
#[derive(Debug)]
#[must_use = "a place is given back when it is dropped"]
pub struct Place<K: Ord> {
    holder: K,
    counts: Arc<Mutex<Counts<K>>>,
}

/// Who holds how many: an entry for each that holds any, so at most as many as there are places.
#[derive(Debug)]
struct Counts<K> {
    all: usize,
    free: usize,
    held: BTreeMap<K, usize>,
}

impl<K: Ord> Clone for Places<K> {
    fn clone(&self) -> Self {
        Self { counts: Arc::clone(&self.counts) }
    }
}

impl<K: Ord + Clone> Places<K> {
    /// Makes `all` places, which are free.
    pub fn new(all: usize) -> Self {
        let counts = Counts { all, free: all, held: BTreeMap::new() };
        Self { counts: Arc::new(Mutex::new(counts)) }
    }

    /// Takes a place for `holder`, at once or not at all.
    pub fn take(&self, holder: K) -> Result<Place<K>, PlacesError> {
        lock(&self.counts).take(&holder)?;
        Ok(Place { holder, counts: Arc::clone(&self.counts) })
    }

    /// Returns how many places are free.
    pub fn free(&self) -> usize {
        lock(&self.counts).free
    }
}

impl<K: Ord> Drop for Place<K> {
    fn drop(&mut self) {
        lock(&self.counts).give_back(&self.holder);
    }
}

impl<K: Ord + Clone> Counts<K> {
    fn take(&mut self, holder: &K) -> Result<(), PlacesError> {
        let (all, free) = (self.all, self.free);
        let left = free.checked_sub(1).ok_or(PlacesError::Full { all })?;
        let held = self.held.get(holder).copied().unwrap_or(0);
        // Whoever holds none gets one while there is any.
        if held > 0 && held >= (all / SHARE).min(free / FREE) {
            return Err(PlacesError::PeerShare { held, free, all });
        }
        self.free = left;
        *self.held.entry(holder.clone()).or_default() += 1;
        Ok(())
    }
}

impl<K: Ord> Counts<K> {
    fn give_back(&mut self, holder: &K) {
        let Some(held) = self.held.get_mut(holder) else { return };
        self.free += 1;
        *held -= 1;
        if *held == 0 {
            self.held.remove(holder);
        }
    }
}

/// Takes the lock. Counts are changed whole or not at all, so they stay sound when a holder panics.
fn lock<K>(counts: &Mutex<Counts<K>>) -> MutexGuard<'_, Counts<K>> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Takes as many places as `holder` gets.
    fn grab(places: &Places<u32>, holder: u32) -> Vec<Place<u32>> {
        std::iter::from_fn(|| places.take(holder).ok()).collect()
    }

    #[test]
    fn one_holder_gets_a_sixteenth_and_sixteen_do_not_take_all() {
        let places = Places::new(256);
        let first = grab(&places, 1);
        assert_eq!(first.len(), 256 / SHARE);
        let refusal = places.take(1).expect_err("it has its share");
        assert_eq!(refusal, PlacesError::PeerShare { held: 16, free: 240, all: 256 });
        let others: Vec<_> = (2..=16).map(|holder| grab(&places, holder)).collect();
        assert!(others.iter().all(|held| held.len() >= 5), "{others:?}");
        assert!(grab(&places, 17).len() >= 4, "{places:?}");
    }

    #[test]
    fn places_that_are_given_back_in_time_are_not_all_taken() {
        let places = Places::new(256);
        let mut held: Vec<_> = (0..60).map(|holder| grab(&places, holder)).collect();
        assert_eq!(places.free(), 0);
        // Each loses what it holds in turn, as streams that say nothing do, and wants all again.
        for _ in 0..3 {
            for (holder, own) in (0..).zip(&mut held) {
                own.clear();
                *own = grab(&places, holder);
            }
        }
        assert!(places.free() >= FREE, "{places:?}");
    }

    #[test]
    fn a_place_comes_back_when_it_is_dropped_and_nobody_is_remembered() {
        let places = Places::new(16);
        let held = places.take(1).expect("the first");
        assert!(places.take(1).is_err());
        assert_eq!(places.free(), 15);
        drop(held);
        drop(places.take(1).expect("it came back"));
        assert_eq!(places.free(), 16);
        assert!(lock(&places.counts).held.is_empty());
    }

    #[test]
    fn the_last_place_is_anybodys_and_then_there_is_none() {
        let places = Places::new(2);
        let _held = [places.take(1).expect("one"), places.take(2).expect("two")];
        assert_eq!(places.take(3).expect_err("none"), PlacesError::Full { all: 2 });
    }

    proptest! {
        /// Against a plain list of who holds what.
        #[test]
        fn counts_are_those_of_a_list(steps in prop::collection::vec((0u32..6, any::<bool>()), 0..400)) {
            let places = Places::new(64);
            let mut list: Vec<Place<u32>> = Vec::new();
            for (holder, takes) in steps {
                let held = list.iter().filter(|place| place.holder == holder).count();
                let free = 64 - list.len();
                if takes {
                    let taken = places.take(holder);
                    let may = free > 0 && (held == 0 || held < 4.min(free / 8));
                    prop_assert_eq!(taken.is_ok(), may);
                    list.extend(taken);
                } else if let Some(at) = list.iter().position(|place| place.holder == holder) {
                    drop(list.remove(at));
                }
                prop_assert_eq!(places.free(), 64 - list.len());
            }
        }
    }
}
