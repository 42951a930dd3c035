//! Drives that hold what a renter wrote: when they are erased. Nothing of a tenant is destroyed on the word of
//! one clock, so after a lease's end a drive waits until sources of time agree that it is over, and goes back
//! to its machine should the lease go on.

use lease::document::Lease;
use types::{
    ids::MachineId,
    node::{Bdf, DeviceState, PciDevice},
    units::UnixSeconds,
};

use super::Keeper;
use crate::{
    assign::lent,
    events::Event,
    machines::plan::{Record, Released, SOURCES_TO_DESTROY},
};

/// Why a drive that waits is offered to nobody.
const WAITS: &str = "it holds what its last renter wrote, and that the lease is over says this server's clock \
                     alone; it is erased and offered again once two sources of time agree (see time.ntp), or by \
                     `holdfast node release-device NODE DEVICE`";

/// When the drives of a machine that gives its devices back are erased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Erasing {
    /// At once.
    Now,
    /// When it is sure that its lease is over.
    Later,
}

/// Returns when drives are erased of a machine that had them last, if it is known still. What its renter deleted
/// needs no proof of time.
fn erasing(holder: Option<&Record>, now: UnixSeconds, sources: usize) -> Erasing {
    let may = |record: &Record| {
        record.deleted.is_some() || sources >= SOURCES_TO_DESTROY && record.is_over(now)
    };
    if holder.is_none_or(may) { Erasing::Now } else { Erasing::Later }
}

/// Returns whose a device was last, of those that gave their devices back.
fn holder<'a>(records: impl Iterator<Item = &'a Record>, device: Bdf) -> Option<&'a Record> {
    let had = |record: &&Record| {
        record.released == Released::Yes && record.lease.shape.devices.contains(&device)
    };
    records.filter(had).max_by_key(|record| record.end())
}

impl Keeper {
    fn sources(&self) -> usize {
        self.config.clock.status().borrow().sources
    }

    fn holder(&self, device: Bdf) -> Option<&Record> {
        holder(self.machines.values().map(|entry| &entry.record), device)
    }

    /// Returns when the drives of a machine that is over are erased.
    pub(super) fn erasing(&self, machine: MachineId) -> Erasing {
        let record = self.machines.get(&machine).map(|entry| &entry.record);
        erasing(record, self.config.clock.now(), self.sources())
    }

    /// Sees to drives that no machine has and that hold what a renter wrote: the node or its agent ended before
    /// they were erased.
    pub(super) fn keep_drives(&mut self) {
        let root = &self.config.tools.root;
        let left = |device: &&PciDevice| {
            device.state == DeviceState::Free && lent::is_lent(root, device.address)
        };
        let left: Vec<Bdf> =
            self.devices.list().iter().filter(left).map(|device| device.address).collect();
        self.hold_drives(&left);
        self.erase_drives();
    }

    /// Has drives wait until it is sure that the lease is over under which they were written to.
    pub(super) fn hold_drives(&mut self, drives: &[Bdf]) {
        for address in drives.iter().copied() {
            let since = Some(self.config.clock.now());
            let reason = WAITS.to_owned();
            self.devices.set(address, DeviceState::Quarantined { reason, since });
            self.waiting.insert(address);
        }
    }

    /// Has drives erased that need not wait any more.
    pub(super) fn erase_drives(&mut self) {
        let (now, sources) = (self.config.clock.now(), self.sources());
        let due: Vec<Bdf> = self
            .waiting
            .iter()
            .copied()
            .filter(|address| erasing(self.holder(*address), now, sources) == Erasing::Now)
            .collect();
        due.into_iter().for_each(|address| self.take_back(address));
    }

    /// Says which drives of a machine that ended wait.
    pub(super) fn tell_waiting(&self, drives: &[Bdf]) {
        for address in drives.iter().copied() {
            eprintln!("{}", Event::DeviceQuarantined { address, reason: WAITS.to_owned() });
        }
    }

    /// Gives devices to a machine.
    pub(super) fn lend(&mut self, devices: &[Bdf], machine: MachineId) {
        self.waiting.retain(|address| !devices.contains(address));
        self.devices.lease(devices, machine);
    }

    /// Returns the devices as they are to a lease: drives that wait for its machine are free.
    pub(super) fn devices_for(&self, lease: &Lease) -> Vec<PciDevice> {
        let mut devices = self.devices.list().to_vec();
        let its = |address: &Bdf| self.holder(*address).is_some_and(|r| r.lease.id == lease.id);
        for device in &mut devices {
            let waits = matches!(device.state, DeviceState::Quarantined { .. })
                && self.waiting.contains(&device.address);
            if waits && its(&device.address) {
                device.state = DeviceState::Free;
            }
        }
        devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::plan::fixture;

    const DRIVE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };

    fn ended() -> Record {
        let mut record = fixture::record();
        record.lease.shape.devices = vec![DRIVE];
        record.released = Released::Yes;
        record
    }

    #[test]
    fn one_clock_erases_no_drive_and_its_renters_word_does() {
        let mut record = ended();
        let at = |record: &Record, now, sources| erasing(Some(record), UnixSeconds(now), sources);
        assert_eq!(at(&record, 9000, 1), Erasing::Later);
        assert_eq!(at(&record, 9000, SOURCES_TO_DESTROY), Erasing::Now);
        // The clock was ahead, and its lease goes on.
        assert_eq!(at(&record, 1500, SOURCES_TO_DESTROY), Erasing::Later);
        record.deleted = Some(UnixSeconds(1500));
        assert_eq!(at(&record, 1500, 0), Erasing::Now);
        assert_eq!(erasing(None, UnixSeconds(1500), 0), Erasing::Now);
    }

    #[test]
    fn a_drive_is_its_last_renters() {
        let (earlier, mut later, mut running) = (ended(), ended(), ended());
        later.lease.id = MachineId::from_bytes([7; 16]);
        later.lease.end = UnixSeconds(3000);
        running.released = Released::No;
        running.lease.end = UnixSeconds(4000);
        let records = [earlier, later.clone(), running];
        assert_eq!(holder(records.iter(), DRIVE), Some(&later));
        assert_eq!(holder(records.iter(), Bdf { bus: 2, ..DRIVE }), None);
    }
}
