//! How a virtio device interrupts its driver: one MSI-X vector per queue and one for
//! configuration changes, or the INTx line with the ISR status register.
//! Source: virtio §4.1.4.5 "ISR status capability"; §4.1.5.1.2 "MSI-X Vector Configuration";
//! §4.1.5.3 "Used Buffer Notifications".

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use vmm_sys_util::eventfd::EventFd;

use super::transport::NO_VECTOR;
use crate::{
    irq::{InterruptLine, Level, MsiVector},
    sys::io::duplicate_eventfd,
};

/// ISR bit 0: a queue has used buffers.
const ISR_QUEUE: u8 = 1;
/// ISR bit 1: the configuration changed.
const ISR_CONFIG: u8 = 2;

/// The interrupts of one function, shared by its registers and its threads.
pub struct Interrupts {
    /// Eventfds of the MSI-X vectors, once more: vhost takes this type, and threads must not duplicate descriptors
    /// behind their filter. The vectors themselves are the function's alone: whoever drops one has KVM forget it,
    /// which the filter of a device's thread does not allow.
    vectors: Vec<EventFd>,
    msix_enabled: AtomicBool,
    config_vector: AtomicU16,
    intx: Mutex<Intx>,
}

/// The line, when MSI-X is off.
struct Intx {
    line: Arc<dyn InterruptLine>,
    /// The ISR status register.
    isr: u8,
    /// Interrupt Disable of the command register (PCI 3.0 §6.2.2).
    disabled: bool,
    /// MSI-X is on: the line is not used at all (PCI 3.0 §6.8.3.3).
    replaced: bool,
    /// What the line was told last.
    asserted: bool,
}

impl Intx {
    /// Whether an interrupt is pending that the line is for.
    fn is_pending(&self) -> bool {
        self.isr != 0 && !self.replaced
    }

    /// Brings the line to the level that the registers call for.
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
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interrupts")
            .field("vectors", &self.vectors.len())
            .field("msix_enabled", &self.msix_enabled)
            .finish_non_exhaustive()
    }
}

impl Interrupts {
    /// Returns the interrupts of a function with these MSI-X vectors, which it keeps, and this line.
    pub fn new(vectors: &[Arc<dyn MsiVector>], line: Arc<dyn InterruptLine>) -> io::Result<Self> {
        let vectors = vectors.iter().map(|vector| duplicate_eventfd(vector.eventfd()));
        let vectors = vectors.collect::<io::Result<_>>()?;
        Ok(Self {
            vectors,
            msix_enabled: AtomicBool::new(false),
            config_vector: AtomicU16::new(NO_VECTOR),
            intx: Mutex::new(Intx {
                line,
                isr: 0,
                disabled: false,
                replaced: false,
                asserted: false,
            }),
        })
    }

    /// Takes over what the MSI-X capability and the command register say. Returns whether MSI-X was switched on
    /// or off.
    pub fn set_mode(&self, msix_enabled: bool, intx_disabled: bool) -> bool {
        let before = self.msix_enabled.swap(msix_enabled, Ordering::AcqRel);
        let mut intx = self.intx();
        (intx.disabled, intx.replaced) = (intx_disabled, msix_enabled);
        intx.settle();
        before != msix_enabled
    }

    /// Takes over the vector of configuration changes.
    pub fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(vector, Ordering::Release);
    }

    /// Reads the ISR status register, which clears it and the line.
    pub fn take_isr(&self) -> u8 {
        let mut intx = self.intx();
        let isr = std::mem::take(&mut intx.isr);
        intx.settle();
        isr
    }

    /// Returns what the status register says of the line: whether an interrupt is pending, also
    /// while Interrupt Disable keeps it from the line (PCI 3.0 §6.2.3).
    pub fn status(&self) -> Level {
        if self.intx().is_pending() { Level::High } else { Level::Low }
    }

    /// Forgets what is pending on the line.
    pub fn reset(&self) {
        self.set_config_vector(NO_VECTOR);
        self.take_isr();
    }

    /// Tells the driver that the configuration, or DEVICE_NEEDS_RESET, changed.
    pub fn signal_config(&self) {
        self.signal(self.config_vector.load(Ordering::Acquire), ISR_CONFIG);
    }

    /// Returns the eventfd of `vector` when MSI-X is on and the vector exists.
    fn eventfd(&self, vector: u16) -> Option<&EventFd> {
        if !self.msix_enabled.load(Ordering::Acquire) {
            return None;
        }
        self.vectors.get(usize::from(vector))
    }

    fn signal(&self, vector: u16, isr: u8) {
        let msix = self.msix_enabled.load(Ordering::Acquire);
        // That the configuration changed is told there with MSI-X, too (§4.1.4.5.1); the line is not used.
        if !msix || isr == ISR_CONFIG {
            let mut intx = self.intx();
            intx.isr |= isr;
            intx.settle();
        }
        if let Some(vector) = self.vectors.get(usize::from(vector)).filter(|_| msix) {
            // The eventfd's counter can only be full when a signal is pending already.
            let _ = vector.write(1);
        }
    }

    fn intx(&self) -> MutexGuard<'_, Intx> {
        self.intx.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Interrupts the driver for one queue. Its clones follow the same vector, which the driver may choose anew at
/// any time (virtio §4.1.5.1.2.1); illumos chooses the first one when the device is running.
#[derive(Debug, Clone)]
pub struct QueueSignal {
    interrupts: Arc<Interrupts>,
    vector: Arc<AtomicU16>,
}

impl QueueSignal {
    /// Returns the signal of a queue with `vector`.
    pub fn new(interrupts: Arc<Interrupts>, vector: u16) -> Self {
        Self { interrupts, vector: Arc::new(AtomicU16::new(vector)) }
    }

    /// Takes over the vector that the driver chose; returns whether it is another one.
    pub fn set_vector(&self, vector: u16) -> bool {
        self.vector.swap(vector, Ordering::AcqRel) != vector
    }

    /// Tells the driver that buffers were used.
    pub fn trigger(&self) {
        self.interrupts.signal(self.vector.load(Ordering::Acquire), ISR_QUEUE);
    }

    /// Returns the vector and the eventfd that interrupts the driver by itself, when MSI-X is on and the queue
    /// has a vector. Otherwise only [`Self::trigger`] will do.
    pub fn direct(&self) -> Option<(u16, &EventFd)> {
        let vector = self.vector.load(Ordering::Acquire);
        Some((vector, self.interrupts.eventfd(vector)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::irq::tests::Wire;

    /// PCI 3.0 §6.2.3: Interrupt Disable has no effect on Interrupt Status.
    #[test]
    fn a_disabled_line_stays_low_while_the_status_tells_what_is_pending() {
        let wire = Wire::new();
        let level = || wire.level();
        let line = Arc::<Wire>::clone(&wire);
        let interrupts = Arc::new(Interrupts::new(&[], line).expect("a function"));
        interrupts.set_mode(false, true);
        QueueSignal::new(Arc::clone(&interrupts), NO_VECTOR).trigger();
        assert_eq!((level(), interrupts.status()), (Level::Low, Level::High));
        interrupts.set_mode(false, false);
        assert_eq!((level(), interrupts.status()), (Level::High, Level::High));
        interrupts.set_mode(true, false);
        assert_eq!((level(), interrupts.status()), (Level::Low, Level::Low));
        interrupts.set_mode(false, false);
        assert_eq!(interrupts.take_isr(), ISR_QUEUE);
        assert_eq!((level(), interrupts.status()), (Level::Low, Level::Low));
    }

    /// Virtio §4.1.4.5.1: the bit is set with MSI-X, too, which is when the line is not used.
    #[test]
    fn a_changed_configuration_is_in_the_isr_whatever_interrupts() {
        let wire = Wire::new();
        let line = Arc::<Wire>::clone(&wire);
        let interrupts = Arc::new(Interrupts::new(&[], line).expect("a function"));
        interrupts.set_mode(true, false);
        QueueSignal::new(Arc::clone(&interrupts), NO_VECTOR).trigger();
        assert_eq!(interrupts.take_isr(), 0);
        interrupts.signal_config();
        assert_eq!((wire.level(), interrupts.status()), (Level::Low, Level::Low));
        assert_eq!(interrupts.take_isr(), ISR_CONFIG);
    }
}
