//! Interrupts as devices see them: a vector is an eventfd that the kernel turns into an MSI
//! message, and a line is a level that goes to an I/O APIC pin.
//!
//! The shell over KVM (GSI routing, irqfd, resample) lives in `sys::kvm`; unit tests use their own.

use std::{io, os::fd::BorrowedFd, sync::Arc};

/// An MSI message (PCI 3.0 §6.8.1): what the function writes where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsiMessage {
    /// Message address, 64 bits.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// One message-signalled interrupt of one function.
pub trait MsiVector: Send + Sync {
    /// Routes the vector to `message` and lets it fire; `None` masks it. A signal that arrives
    /// while masked is kept and delivered when unmasked.
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()>;

    /// Returns the eventfd that fires the vector, for VFIO, vhost and worker threads. It stays the
    /// same for the life of the vector.
    fn eventfd(&self) -> BorrowedFd<'_>;

    /// Fires the vector.
    fn trigger(&self) -> io::Result<()>;
}

/// One level-triggered line (INTx).
pub trait InterruptLine: Send + Sync {
    /// Asserts or deasserts the line.
    fn set_level(&self, asserted: Level) -> io::Result<()>;

    /// Returns the eventfd that asserts the line, for VFIO.
    fn trigger_fd(&self) -> BorrowedFd<'_>;

    /// Returns the eventfd that the kernel signals when the guest acknowledges the interrupt
    /// (KVM_IRQFD_FLAG_RESAMPLE). The line is low again by then.
    fn resample_fd(&self) -> BorrowedFd<'_>;

    /// Nobody uses the two eventfds until they are asked for again. While somebody does, KVM takes what others
    /// assert on the same pin for old when the guest unmasks it (Linux arch/x86/kvm/ioapic.c,
    /// `ioapic_write_indirect`), and does not deliver it.
    fn release(&self) {}
}

/// Level of an interrupt line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Not asserted.
    Low,
    /// Asserted.
    High,
}

/// The slot on a root complex's bus through which an interrupt pin goes, and by how many pins the
/// bridges on the way turn it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinRoute {
    /// Slot of the root port.
    pub slot: u8,
    /// Pins to add (PCI-to-PCI Bridge Architecture 1.2 §9.1: the device number of each bridge).
    pub turn: u8,
}

impl PinRoute {
    /// Returns the pin at the root port for `pin` (1 = INTA) of the device.
    pub fn pin(self, pin: u8) -> u8 {
        (pin.clamp(1, 4) - 1 + self.turn % 4) % 4 + 1
    }
}

/// Hands out interrupts. Shared by all devices of a machine.
pub trait InterruptSource: Send + Sync {
    /// Allocates a vector, masked.
    fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>>;

    /// Returns the line of INTx pin `pin` (1 = INTA … 4 = INTD) of the device at `slot` on its
    /// bus, after the swizzle of the bridges above it.
    fn line(&self, slot: u8, pin: u8) -> io::Result<Arc<dyn InterruptLine>>;
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        os::fd::{AsFd, OwnedFd},
        sync::Mutex,
    };

    use super::*;

    /// A line that only keeps its level.
    pub(crate) struct Wire {
        level: Mutex<Level>,
        file: OwnedFd,
    }

    impl Wire {
        /// Returns a low one.
        pub(crate) fn new() -> Arc<Self> {
            let file = OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
            Arc::new(Self { level: Mutex::new(Level::Low), file })
        }

        pub(crate) fn level(&self) -> Level {
            *self.level.lock().expect("one thread")
        }
    }

    impl InterruptLine for Wire {
        fn set_level(&self, level: Level) -> io::Result<()> {
            *self.level.lock().expect("one thread") = level;
            Ok(())
        }
        fn trigger_fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
        fn resample_fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
    }
}
