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
    /// Those that are told once.
    told: Vec<VmEventKind>,
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
        self.put(self.ring(), kind, detail.into());
    }

    /// Notes an event of a kind that has not been noted by this before: for what a guest can say of itself without
    /// end, where others would lose their place.
    pub fn push_once(&self, kind: VmEventKind, detail: impl Into<String>) {
        let mut ring = self.ring();
        if !ring.told.contains(&kind) {
            ring.told.push(kind);
            self.put(ring, kind, detail.into());
        }
    }

    fn put(&self, mut ring: MutexGuard<'_, Ring>, kind: VmEventKind, detail: String) {
        let at_ms = u64::try_from(self.shared.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if ring.events.len() == CAPACITY {
            ring.events.pop_front();
        }
        let number = ring.next;
        ring.events.push_back(VmEvent { number, at_ms, kind, detail });
        ring.next += 1;
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
        self.ring().told.contains(&VmEventKind::GuestPanicked)
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
    fn what_a_guest_says_without_end_is_told_once() {
        let events = Events::default();
        assert!(!events.has_panicked());
        for _ in 0..CAPACITY {
            events.push_once(VmEventKind::GuestCrashKernel, "");
            events.push_once(VmEventKind::GuestPanicked, "");
        }
        assert!(events.has_panicked());
        let kinds: Vec<_> =
            events.read(0, Duration::ZERO).events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [VmEventKind::GuestCrashKernel, VmEventKind::GuestPanicked]);
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
