//! What the registers and the thread share: doorbells, state of the controller, interrupts.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
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
    /// Everything is on the medium.
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
    pub fn ring(&self, index: u64, value: u32) {
        let slot = usize::try_from(index).ok().and_then(|index| self.doorbells.get(index));
        if let Some(slot) = slot {
            if let (1, Ok(queue)) = (index % 2, u16::try_from(index / 2)) {
                self.pin.taken(queue, value);
            }
            // The largest number is as impossible as the next smaller one.
            slot.store(value.min(NOTHING - 1), Ordering::Release);
            self.wake();
        }
    }

    /// Takes what was written to doorbells since the last call.
    pub fn take_rings(&self) -> impl Iterator<Item = Ring> {
        self.doorbells.iter().zip(0u16..).filter_map(|(slot, index)| {
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
