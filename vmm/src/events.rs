//! What happened to the guest, kept so that a late reader gets it: a ring of the newest events,
//! addressed by number. What an event means for others is theirs to decide.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use types::operations::{VmEvent, VmEventKind, VmEvents};

/// Events that are kept.
pub const CAPACITY: usize = 256;

/// The events. Clones share them.
#[derive(Clone, Debug)]
pub struct Events {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    began: Instant,
    ring: Mutex<Ring>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Ring {
    events: VecDeque<VmEvent>,
    next: u64,
    panicked: bool,
}

impl Default for Events {
    fn default() -> Self {
        let shared =
            Shared { began: Instant::now(), ring: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared) }
    }
}

impl Events {
    /// Notes an event; the oldest goes when the ring is full.
    pub fn push(&self, kind: VmEventKind, detail: impl Into<String>) {
        let at_ms = u64::try_from(self.shared.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut ring = self.ring();
        if ring.events.len() == CAPACITY {
            ring.events.pop_front();
        }
        let number = ring.next;
        ring.events.push_back(VmEvent { number, at_ms, kind, detail: detail.into() });
        ring.next += 1;
        ring.panicked |= kind == VmEventKind::GuestPanicked;
        drop(ring);
        self.shared.changed.notify_all();
    }

    /// Returns the events from number `from` on, as far as they are kept. Waits up to `wait` for
    /// one to be there.
    pub fn read(&self, from: u64, wait: Duration) -> VmEvents {
        let ring = self.ring();
        let (ring, _) = self
            .shared
            .changed
            .wait_timeout_while(ring, wait, |ring| ring.next <= from)
            .unwrap_or_else(PoisonError::into_inner);
        let events = ring.events.iter().filter(|event| event.number >= from).cloned().collect();
        let oldest = ring.events.front().map_or(ring.next, |event| event.number);
        VmEvents { events, next: ring.next, oldest }
    }

    /// Returns whether the guest's system has failed since the start.
    pub fn has_panicked(&self) -> bool {
        self.ring().panicked
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.shared.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_numbered_and_read_from_a_number_on() {
        let events = Events::default();
        events.push(VmEventKind::Started, "");
        events.push(VmEventKind::Paused, "by the API");
        let read = events.read(1, Duration::ZERO);
        assert_eq!((read.oldest, read.next), (0, 2));
        let kinds: Vec<_> = read.events.iter().map(|event| (event.number, event.kind)).collect();
        assert_eq!(kinds, [(1, VmEventKind::Paused)]);
        assert!(events.read(2, Duration::ZERO).events.is_empty());
    }

    #[test]
    fn the_oldest_events_go_and_the_numbers_stay() {
        let events = Events::default();
        (0..=CAPACITY).for_each(|_| events.push(VmEventKind::Interrupted, ""));
        let read = events.read(0, Duration::ZERO);
        assert_eq!((read.oldest, read.next), (1, CAPACITY as u64 + 1));
        assert_eq!(read.events.len(), CAPACITY);
    }

    #[test]
    fn a_reader_waits_for_the_next_event() {
        let events = Events::default();
        let writer = events.clone();
        let thread = std::thread::spawn(move || writer.push(VmEventKind::Reset, ""));
        let read = events.read(0, Duration::from_secs(30));
        assert_eq!(read.events.len(), 1);
        thread.join().expect("it only pushes");
    }
}
