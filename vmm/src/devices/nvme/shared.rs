//! What the registers and the thread share: doorbells, state of the controller, interrupts.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence},
    },
};

use vmm_sys_util::eventfd::EventFd;

use super::{
    pin::Pin,
    registers::{Control, SHUTDOWN_BUSY, SHUTDOWN_DONE},
};
use crate::{
    counters::Activity,
    irq::{InterruptLine, Level, MsiVector},
    sys::io::duplicate_eventfd,
};

/// No value that a driver writes to a doorbell makes sense as this.
const NOTHING: u32 = u32::MAX;

/// How far a shutdown has come (CSTS.SHST).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// None was asked for.
    No,
    /// Asked for, and not finished.
    Busy,
    /// Everything is on the medium, unless the controller has failed (CSTS.CFS).
    Done,
}

/// A doorbell that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// The queue, 0 for the admin queues.
    pub queue: u16,
    /// Which of its two doorbells.
    pub side: Side,
    /// The last value written.
    pub value: u32,
}

/// Which doorbell of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Submission queue tail.
    Submission,
    /// Completion queue head.
    Completion,
}

/// Shared by the function and its thread.
pub struct Shared {
    /// The last value written to each doorbell that the thread has not seen: submission and
    /// completion of queue 0, of queue 1, ….
    doorbells: Vec<AtomicU32>,
    /// Wakes the thread.
    pub kick: EventFd,
    /// The thread waits for room in a completion queue: the next doorbell of one wakes it.
    room_wanted: AtomicBool,
    /// Eventfds of the vectors, once more. The vectors themselves are the function's alone: whoever drops one has
    /// KVM forget it, which the filter of the controller's thread does not allow.
    vectors: Vec<EventFd>,
    msix: AtomicBool,
    /// The line, when MSI-X is off.
    pub pin: Pin,
    control: AtomicU32,
    fatal: AtomicBool,
    shutdown: AtomicU8,
    /// What was done; commands of the I/O queues count.
    pub activity: Arc<Activity>,
}

impl Shared {
    /// Returns the state of a controller that is off, with `pairs` I/O queue pairs.
    pub fn new(
        pairs: u16,
        vectors: &[Arc<dyn MsiVector>],
        line: Arc<dyn InterruptLine>,
    ) -> io::Result<Self> {
        let vectors = vectors.iter().map(|vector| duplicate_eventfd(vector.eventfd()));
        Ok(Self {
            doorbells: (0..2 * (u32::from(pairs) + 1)).map(|_| AtomicU32::new(NOTHING)).collect(),
            kick: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            room_wanted: AtomicBool::new(false),
            vectors: vectors.collect::<io::Result<_>>()?,
            msix: AtomicBool::new(false),
            pin: Pin::new(line, usize::from(pairs) + 1),
            control: AtomicU32::new(0),
            fatal: AtomicBool::new(false),
            shutdown: AtomicU8::new(0),
            activity: Arc::default(),
        })
    }

    /// Returns the number of interrupt vectors.
    pub fn vector_count(&self) -> usize {
        self.vectors.len()
    }

    /// Takes a write to doorbell `index` in address order; one that does not exist is ignored.
    ///
    /// Most doorbells of completion queues wake nobody: the pin has heard of them, and the thread sees them with
    /// the next command. Those that it is woken for are the ones that are wrong, which are events, and those that
    /// it waits for, see [`Self::await_room`].
    pub fn ring(&self, index: u64, value: u32) {
        let slot = usize::try_from(index).ok().and_then(|index| self.doorbells.get(index));
        let Some(slot) = slot else { return };
        let is_news = match (index % 2, u16::try_from(index / 2)) {
            (1, Ok(queue)) => !self.pin.taken(queue, value),
            _ => true,
        };
        // The largest number is as impossible as the next smaller one.
        slot.store(value.min(NOTHING - 1), Ordering::Release);
        if is_news || self.take_wish_for_room() {
            self.wake();
        }
    }

    /// Has the next doorbell of a completion queue wake the thread, which found no room in one. Returns whether one
    /// was written already that the thread did not take: then it must not wait.
    ///
    /// No wake-up is lost. Here the wish is written and then the doorbells are read; in [`Self::ring`] the doorbell
    /// is written and then the wish is read; each has a fence in between. Of the two fences one comes second in
    /// their order, and what is read behind it is at least as new as what was written before the other: either the
    /// thread finds the doorbell, or `ring` finds the wish. Only if another `ring` has taken that does it not, and
    /// then the thread is being woken; if it finds no room then either, it wishes again, and the same holds.
    pub fn await_room(&self) -> bool {
        self.room_wanted.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut heads = self.doorbells.iter().skip(1).step_by(2);
        heads.any(|slot| slot.load(Ordering::Acquire) != NOTHING)
    }

    /// Returns whether the thread waits for room, to one caller.
    fn take_wish_for_room(&self) -> bool {
        fence(Ordering::SeqCst);
        self.room_wanted.load(Ordering::Relaxed) && self.room_wanted.swap(false, Ordering::Relaxed)
    }

    /// Takes what was written to doorbells since the last call.
    pub fn take_rings(&self) -> impl Iterator<Item = Ring> {
        self.doorbells.iter().zip(0u16..).filter_map(|(slot, index)| {
            // Most were not written, and looking leaves their cache line where it is.
            if slot.load(Ordering::Acquire) == NOTHING {
                return None;
            }
            let value = slot.swap(NOTHING, Ordering::AcqRel);
            let side = if index % 2 == 0 { Side::Submission } else { Side::Completion };
            (value != NOTHING).then_some(Ring { queue: index / 2, side, value })
        })
    }

    /// Wakes the thread.
    pub fn wake(&self) {
        // A full counter is a wake-up that is pending already.
        let _ = self.kick.write(1);
    }

    /// Everything before entry `tail` of completion queue `index` was posted; interrupts the driver if it wants
    /// that, by `vector` or by the pin.
    pub fn posted(&self, index: u16, tail: u32, vector: Option<u16>) {
        self.pin.posted(index, tail);
        let Some(vector) = vector else { return };
        let msix = self.msix.load(Ordering::Acquire);
        if msix || self.pin.status() == Level::High {
            self.activity.interrupts.add(1);
        }
        if let Some(vector) = self.vectors.get(usize::from(vector)).filter(|_| msix) {
            // The eventfd's counter can only be full when a signal is pending already.
            let _ = vector.write(1);
        }
    }

    /// Takes over what the MSI-X capability and the command register's Interrupt Disable say.
    pub fn set_mode(&self, msix: bool, pin_disabled: bool) {
        self.msix.store(msix, Ordering::Release);
        self.pin.set_mode(msix, pin_disabled);
    }

    /// Returns CC as written last.
    pub fn control(&self) -> Control {
        Control::from_bits(self.control.load(Ordering::Acquire))
    }

    /// Takes over CC.
    pub fn set_control(&self, control: Control) {
        self.control.store(control.bits(), Ordering::Release);
    }

    /// Returns whether the controller has failed (CSTS.CFS).
    pub fn is_fatal(&self) -> bool {
        self.fatal.load(Ordering::Acquire)
    }

    /// The controller cannot go on until it is reset.
    pub fn set_fatal(&self) {
        self.fatal.store(true, Ordering::Release);
    }

    /// Returns the shutdown bits of CSTS.
    pub fn shutdown_bits(&self) -> u32 {
        match self.shutdown() {
            Shutdown::No => 0,
            Shutdown::Busy => SHUTDOWN_BUSY,
            Shutdown::Done => SHUTDOWN_DONE,
        }
    }

    /// Returns how far a shutdown has come.
    pub fn shutdown(&self) -> Shutdown {
        match self.shutdown.load(Ordering::Acquire) {
            0 => Shutdown::No,
            1 => Shutdown::Busy,
            _ => Shutdown::Done,
        }
    }

    /// Takes over how far a shutdown has come.
    pub fn set_shutdown(&self, shutdown: Shutdown) {
        let value = match shutdown {
            Shutdown::No => 0,
            Shutdown::Busy => 1,
            Shutdown::Done => 2,
        };
        self.shutdown.store(value, Ordering::Release);
    }

    /// Asks the thread to shut down.
    pub fn ask_shutdown(&self) {
        self.set_shutdown(Shutdown::Busy);
        self.wake();
    }

    /// The controller is switched on: doorbells written before count for nothing.
    pub fn restart(&self, control: Control) {
        self.reset();
        self.set_control(control);
    }

    /// The controller was reset.
    pub fn reset(&self) {
        self.take_rings().for_each(drop);
        self.room_wanted.store(false, Ordering::Relaxed);
        self.pin.close();
        self.fatal.store(false, Ordering::Release);
        self.set_shutdown(Shutdown::No);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::irq::tests::Wire;

    #[test]
    fn doorbells_keep_the_last_value_until_taken() {
        let shared = Shared::new(1, &[], Wire::new()).expect("an eventfd");
        shared.ring(0, 1);
        shared.ring(0, 2);
        shared.ring(3, u32::MAX);
        shared.ring(4, 7);
        shared.ring(u64::MAX, 7);
        let first = Ring { queue: 0, side: Side::Submission, value: 2 };
        let second = Ring { queue: 1, side: Side::Completion, value: u32::MAX - 1 };
        assert_eq!(shared.take_rings().collect::<Vec<_>>(), [first, second]);
        assert_eq!(shared.take_rings().count(), 0);
    }

    #[test]
    fn heads_wake_a_thread_that_waits_for_room_and_those_that_are_wrong_always() {
        let shared = Shared::new(1, &[], Wire::new()).expect("an eventfd");
        let woken = |index, value| {
            shared.ring(index, value);
            shared.kick.read().is_ok()
        };
        shared.pin.open();
        shared.pin.made(1, 4, None);
        assert_eq!([woken(3, 1), woken(3, 4), woken(1, 0), woken(2, 1)], [false, true, true, true]);
        assert!(shared.await_room(), "there may be room already");
        shared.take_rings().for_each(drop);
        assert!(!shared.await_room());
        assert_eq!([woken(3, 2), woken(3, 3)], [true, false]);
        shared.take_rings().for_each(drop);
        shared.ring(0, 1);
        assert!(!shared.await_room(), "a tail makes no room");
    }

    #[test]
    fn a_reset_forgets_everything_but_interrupts() {
        let shared = Shared::new(1, &[], Wire::new()).expect("an eventfd");
        shared.set_fatal();
        shared.ask_shutdown();
        shared.ring(0, 1);
        shared.reset();
        assert!(!shared.is_fatal());
        assert_eq!((shared.shutdown(), shared.take_rings().count()), (Shutdown::No, 0));
    }
}
