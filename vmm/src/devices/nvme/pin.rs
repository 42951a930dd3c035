//! The interrupt pin: a level, for drivers that do not use MSI-X. Linux before 3.19 switches the controller on
//! with it, and takes MSI-X only when it knows how many queues there are.
//! Source: NVMe 1.4 §7.5.1 "Pin Based, Single MSI, and Multiple MSI Behavior", §3.1.3 and §3.1.4 on the mask;
//! PCI 3.0 §6.2.2 and §6.2.3 on Interrupt Disable and Interrupt Status.
//!
//! The line is high as long as a completion queue that interrupts has entries which the driver did not take.
//! Doorbells are compared here, by the virtual CPU that writes them: were it left to the controller's thread, the
//! line would still be high when the driver has ended the interrupt, and interrupt again for nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::irq::{InterruptLine, Level};

/// The pin, shared by registers and thread.
pub struct Pin(Mutex<State>);

struct State {
    line: Arc<dyn InterruptLine>,
    /// By number of a completion queue.
    queues: Vec<Option<Queue>>,
    /// The controller is on: queues can be made.
    open: bool,
    /// INTMS and INTMC.
    mask: u32,
    /// Interrupt Disable of the command register.
    disabled: bool,
    /// MSI-X is on.
    replaced: bool,
    /// What the line was told last.
    asserted: bool,
}

#[derive(Clone, Copy)]
struct Queue {
    entries: u32,
    /// Bit of the mask; `None` when the driver wants no interrupts.
    vector: Option<u16>,
    head: u32,
    tail: u32,
    /// Entries that were posted and not taken. Below 0 while a driver that polls has taken some before they were
    /// told here.
    pending: i64,
}

impl Queue {
    /// Returns how many entries lie from index `from` to `to`.
    fn distance(&self, from: u32, to: u32) -> i64 {
        let entries = i64::from(self.entries);
        (i64::from(to) - i64::from(from)).rem_euclid(entries)
    }
}

impl State {
    /// Whether an interrupt is pending that the line is for.
    fn is_pending(&self) -> bool {
        let masked = |vector: u16| self.mask >> (vector % 32) & 1 != 0;
        let calls =
            |queue: &Queue| queue.pending > 0 && queue.vector.is_some_and(|vector| !masked(vector));
        !self.replaced && self.queues.iter().flatten().any(calls)
    }

    /// Brings the line to the level that queues and registers call for.
    fn settle(&mut self) {
        let wanted = self.is_pending() && !self.disabled;
        if wanted == self.asserted {
            return;
        }
        let level = if wanted { Level::High } else { Level::Low };
        // A line that cannot be driven is a host that is going away; the driver sees a timeout.
        if self.line.set_level(level).is_ok() {
            self.asserted = wanted;
        }
    }

    fn queue(&mut self, index: u16) -> Option<&mut Queue> {
        self.queues.get_mut(usize::from(index))?.as_mut()
    }
}

impl Pin {
    /// Returns the low pin of a controller that is off, with this many completion queues.
    pub fn new(line: Arc<dyn InterruptLine>, queues: usize) -> Self {
        Self(Mutex::new(State {
            line,
            queues: vec![None; queues],
            open: false,
            mask: 0,
            disabled: false,
            replaced: false,
            asserted: false,
        }))
    }

    /// Takes over what the MSI-X capability and the command register say.
    pub fn set_mode(&self, msix: bool, disabled: bool) {
        let mut state = self.state();
        (state.replaced, state.disabled) = (msix, disabled);
        state.settle();
    }

    /// Takes over which vectors are masked.
    pub fn set_mask(&self, mask: u32) {
        let mut state = self.state();
        state.mask = mask;
        state.settle();
    }

    /// The controller is on; there are no queues yet.
    pub fn open(&self) {
        self.state().open = true;
    }

    /// There is an empty completion queue `index` of `entries`, which interrupts by `vector`.
    pub fn made(&self, index: u16, entries: u32, vector: Option<u16>) {
        let mut state = self.state();
        let empty = Queue { entries, vector, head: 0, tail: 0, pending: 0 };
        let queue = state.open.then_some(empty);
        if let Some(slot) = state.queues.get_mut(usize::from(index)) {
            *slot = queue;
        }
        state.settle();
    }

    /// Completion queue `index` is gone.
    pub fn gone(&self, index: u16) {
        let mut state = self.state();
        if let Some(slot) = state.queues.get_mut(usize::from(index)) {
            *slot = None;
        }
        state.settle();
    }

    /// Everything before entry `tail` of completion queue `index` is there for the driver.
    pub fn posted(&self, index: u16, tail: u32) {
        let mut state = self.state();
        if let Some(queue) = state.queue(index) {
            queue.pending += queue.distance(queue.tail, tail);
            queue.tail = tail;
        }
        state.settle();
    }

    /// The driver has taken everything before entry `head` of completion queue `index`. Returns whether there is
    /// such a queue, and it has such an entry; otherwise nothing was taken.
    pub fn taken(&self, index: u16, head: u32) -> bool {
        let mut state = self.state();
        let queue = state.queue(index).filter(|queue| head < queue.entries);
        let Some(queue) = queue else { return false };
        queue.pending -= queue.distance(queue.head, head);
        queue.head = head;
        state.settle();
        true
    }

    /// The controller is reset: the line is low, whatever its thread still posts.
    pub fn close(&self) {
        let mut state = self.state();
        state.open = false;
        state.queues.fill(None);
        state.settle();
    }

    /// Returns what the status register says: whether an interrupt is pending, also while Interrupt Disable keeps
    /// it from the line.
    pub fn status(&self) -> Level {
        if self.state().is_pending() { Level::High } else { Level::Low }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::irq::tests::Wire;

    fn pin() -> (Pin, Arc<Wire>) {
        let wire = Wire::new();
        (Pin::new(Arc::<Wire>::clone(&wire), 3), wire)
    }

    fn is_high(wire: &Wire) -> bool {
        wire.level() == Level::High
    }

    #[test]
    fn the_line_is_high_until_everything_was_taken() {
        let (pin, wire) = pin();
        pin.open();
        pin.made(0, 4, Some(0));
        pin.made(1, 8, Some(0));
        pin.made(2, 8, None);
        pin.posted(2, 1);
        assert!(!is_high(&wire), "that queue does not interrupt");
        pin.posted(0, 3);
        pin.posted(1, 1);
        assert!(is_high(&wire));
        assert_eq!([pin.taken(0, 4), pin.taken(3, 0), pin.taken(1, 1)], [false, false, true]);
        assert!(is_high(&wire), "there is no entry 4, and queue 0 has three");
        pin.taken(0, 3);
        assert!(!is_high(&wire));
        // What was taken before it was told is no news.
        pin.taken(0, 0);
        assert!(!is_high(&wire));
        pin.posted(0, 0);
        assert!(!is_high(&wire));
        pin.posted(0, 1);
        assert!(is_high(&wire));
        pin.taken(0, 1);
        assert!(!is_high(&wire));
    }

    #[test]
    fn the_mask_and_the_command_register_keep_it_low() {
        let (pin, wire) = pin();
        pin.open();
        pin.made(1, 8, Some(0));
        pin.set_mask(1);
        pin.posted(1, 2);
        assert!(!is_high(&wire) && pin.status() == Level::Low);
        pin.set_mask(!1);
        assert!(is_high(&wire));
        pin.set_mode(false, true);
        assert!(!is_high(&wire) && pin.status() == Level::High);
        pin.set_mode(true, false);
        assert!(!is_high(&wire) && pin.status() == Level::Low);
        pin.set_mode(false, false);
        assert!(is_high(&wire));
        pin.gone(1);
        assert!(!is_high(&wire));
    }

    #[test]
    fn nothing_that_is_posted_during_a_reset_is_told() {
        let (pin, wire) = pin();
        pin.open();
        pin.made(0, 4, Some(0));
        pin.posted(0, 1);
        pin.close();
        assert!(!is_high(&wire));
        pin.posted(0, 2);
        pin.made(1, 4, Some(0));
        pin.posted(1, 1);
        assert!(!is_high(&wire));
        pin.open();
        pin.posted(1, 2);
        assert!(!is_high(&wire), "the queue was made before");
    }
}
