//! Submission and completion queues in guest memory.
//! Source: NVMe 1.4 §4.1 "Submission Queue & Completion Queue Definition"; §4.6 on the phase tag.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::command::{COMPLETION_SIZE, Command, Completion, SUBMISSION_SIZE};
use crate::sys::memory::GuestRam;

/// Where a queue lies: its first byte, on a page, and its entries, at least two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Guest-physical address.
    pub base: u64,
    /// Entries, 2..=65536.
    pub entries: u32,
}

impl Place {
    /// Returns whether all entries of `size` bytes are memory.
    pub fn is_memory(&self, ram: &GuestRam, size: u32) -> bool {
        let bytes = usize::try_from(u64::from(self.entries) * u64::from(size));
        bytes.is_ok_and(|bytes| {
            GuestMemory::check_range(ram, GuestAddress(self.base), bytes, Permissions::Write)
        })
    }

    fn entry(&self, index: u32, size: u32) -> GuestAddress {
        // Both factors are below 2^17, and `is_memory` saw that the last entry has an address.
        GuestAddress(self.base.wrapping_add(u64::from(index) * u64::from(size)))
    }

    fn after(&self, index: u32) -> u32 {
        if index + 1 >= self.entries { 0 } else { index + 1 }
    }
}

/// A queue of commands.
#[derive(Debug)]
pub struct SubmissionQueue {
    place: Place,
    head: u32,
    tail: u32,
    /// The queue its completions go to.
    pub completions: u16,
    /// Commands taken whose completion was not posted.
    pub outstanding: u32,
}

impl SubmissionQueue {
    /// Returns an empty queue.
    pub fn new(place: Place, completions: u16) -> Self {
        Self { place, head: 0, tail: 0, completions, outstanding: 0 }
    }

    /// Takes over the driver's tail; returns whether the queue has such an entry.
    pub fn ring(&mut self, tail: u32) -> bool {
        let inside = tail < self.place.entries;
        if inside {
            self.tail = tail;
        }
        inside
    }

    /// Returns whether no command waits.
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Returns the index of the next command, as completions report it.
    pub fn head(&self) -> u16 {
        u16::try_from(self.head).unwrap_or(0)
    }

    /// Takes the next command. `None` when there is none.
    pub fn pop(&mut self, ram: &GuestRam) -> Option<Command> {
        if self.is_empty() {
            return None;
        }
        let mut bytes = [0; SUBMISSION_SIZE as usize];
        let at = self.place.entry(self.head, SUBMISSION_SIZE);
        // The queue was seen to be memory when it was made, and memory does not go away.
        ram.read_slice(&mut bytes, at).ok()?;
        self.head = self.place.after(self.head);
        self.outstanding += 1;
        Some(Command::from_bytes(&bytes))
    }
}

/// A queue of completions.
#[derive(Debug)]
pub struct CompletionQueue {
    place: Place,
    head: u32,
    tail: u32,
    phase: u16,
    /// The interrupt vector, if the driver wants interrupts.
    pub vector: Option<u16>,
    /// Submission queues that use it.
    pub users: u32,
    /// Completions that commands in flight will need.
    pub owed: u32,
    /// Whether something was posted since the last interrupt.
    pub news: bool,
}

impl CompletionQueue {
    /// Returns an empty queue, whose first entries have phase 1.
    pub fn new(place: Place, vector: Option<u16>) -> Self {
        Self { place, head: 0, tail: 0, phase: 1, vector, users: 0, owed: 0, news: false }
    }

    /// Takes over the driver's head; returns whether the queue has such an entry.
    pub fn ring(&mut self, head: u32) -> bool {
        let inside = head < self.place.entries;
        if inside {
            self.head = head;
        }
        inside
    }

    /// Returns the index of the entry that is posted next.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// Returns whether one more completion than those owed fits: a queue is full with one entry
    /// left (§4.1.2).
    pub fn has_room(&self) -> bool {
        let entries = self.place.entries;
        let used = (self.tail + entries - self.head) % entries;
        used + self.owed + 1 < entries
    }

    /// Writes a completion, its valid part last. There must be room.
    pub fn post(&mut self, ram: &GuestRam, completion: &Completion) {
        let (front, last) = completion.encode(self.phase);
        let at = self.place.entry(self.tail, COMPLETION_SIZE);
        // As for reading: this was seen to be memory.
        let _ = ram.write_slice(&front, at);
        let valid = GuestAddress(at.0.wrapping_add(12));
        let _ = ram.store(last, valid, Ordering::Release);
        self.tail = self.place.after(self.tail);
        if self.tail == 0 {
            self.phase ^= 1;
        }
        self.news = true;
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::{super::command::Status, *};

    fn ram() -> GuestRam {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).expect("memory")
    }

    #[test]
    fn commands_are_taken_in_order_and_around_the_end() {
        let ram = ram();
        let mut queue = SubmissionQueue::new(Place { base: 0x1000, entries: 2 }, 0);
        for (opcode, at) in [(7u8, 0x1000), (8, 0x1040)] {
            ram.write_obj(opcode, GuestAddress(at)).expect("inside");
        }
        assert!(queue.pop(&ram).is_none());
        assert!(queue.ring(1));
        assert_eq!(queue.pop(&ram).map(|command| command.opcode), Some(7));
        assert!(queue.ring(0));
        assert_eq!(queue.pop(&ram).map(|command| command.opcode), Some(8));
        assert_eq!((queue.head(), queue.outstanding, queue.is_empty()), (0, 2, true));
    }

    #[test]
    fn doorbells_outside_the_queue_change_nothing() {
        let place = Place { base: 0x1000, entries: 4 };
        let mut submissions = SubmissionQueue::new(place, 0);
        assert!(!submissions.ring(4));
        assert!(submissions.is_empty());
        let mut completions = CompletionQueue::new(place, None);
        assert!(!completions.ring(u32::MAX));
        assert!(completions.has_room());
    }

    #[test]
    fn the_phase_changes_with_each_round() {
        let ram = ram();
        let mut queue = CompletionQueue::new(Place { base: 0x2000, entries: 2 }, None);
        let completion =
            Completion { result: 1, head: 2, queue: 3, command: 4, status: Status::SUCCESS };
        let phases: Vec<u32> = (0..4u64)
            .map(|round| {
                queue.post(&ram, &completion);
                let at = GuestAddress(0x200c + 16 * (round % 2));
                ram.read_obj::<u32>(at).expect("inside") >> 16
            })
            .collect();
        assert_eq!(phases, [1, 1, 0, 0]);
    }

    #[test]
    fn one_entry_stays_free_and_those_owed_count() {
        let ram = ram();
        let mut queue = CompletionQueue::new(Place { base: 0x2000, entries: 4 }, None);
        let completion =
            Completion { result: 0, head: 0, queue: 0, command: 0, status: Status::SUCCESS };
        queue.owed = 2;
        assert!(queue.has_room());
        queue.post(&ram, &completion);
        assert!(!queue.has_room());
        assert!(queue.ring(1));
        assert!(queue.has_room());
    }

    #[test]
    fn queues_outside_memory_are_seen() {
        let ram = ram();
        assert!(Place { base: 0xf000, entries: 64 }.is_memory(&ram, 64));
        assert!(!Place { base: 0xf000, entries: 65 }.is_memory(&ram, 64));
        assert!(!Place { base: u64::MAX - 4095, entries: 65536 }.is_memory(&ram, 64));
    }
}
