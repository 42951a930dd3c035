//! Which of a machine's devices share a bus: the hot reset of one resets them all, so none is reset that
//! way while another is in use. Keeps the account only; `reset` acts by it.
//! Source: PCI Express Base Specification 6.0 §6.6.1.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use types::node::Bdf;

/// Segment and bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Bus(u16, u8);

impl From<Bdf> for Bus {
    fn from(device: Bdf) -> Self {
        Self(device.segment, device.bus)
    }
}

/// The devices of one machine.
#[derive(Debug, Clone, Default)]
pub struct Neighbours(Arc<Mutex<Account>>);

#[derive(Debug, Default)]
struct Account {
    in_use: Vec<Bdf>,
    /// Buses of devices that only a hot reset would have reset, and that went without.
    owed: BTreeSet<Bus>,
}

impl Neighbours {
    /// Notes that the guest has `device`, until the result is dropped.
    pub(super) fn admit(&self, device: Bdf) -> InUse {
        self.account().in_use.push(device);
        InUse { neighbours: self.clone(), device }
    }

    /// Returns whether a device on `bus` is in use that is none of `known`.
    pub(super) fn has_others(&self, bus: Bus, known: &[Bdf]) -> bool {
        let account = self.account();
        account.in_use.iter().any(|device| Bus::from(*device) == bus && !known.contains(device))
    }

    /// Leaves the hot reset of `bus` to the last of its devices.
    pub(super) fn owe(&self, bus: Bus) {
        self.account().owed.insert(bus);
    }

    /// Returns whether a hot reset of `bus` was left to the last.
    pub(super) fn is_owed(&self, bus: Bus) -> bool {
        self.account().owed.contains(&bus)
    }

    /// Notes a hot reset of `bus`.
    pub(super) fn settle(&self, bus: Bus) {
        self.account().owed.remove(&bus);
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device that the guest has.
#[derive(Debug)]
pub(super) struct InUse {
    neighbours: Neighbours,
    device: Bdf,
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.neighbours.account().in_use.retain(|device| *device != self.device);
    }
}
