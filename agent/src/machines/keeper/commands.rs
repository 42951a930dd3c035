//! What renters ask of the keeper, and why it refuses.

use std::io;

use lease::{
    document::Lease,
    lifecycle::{self, RenewalError},
    metering::Meter,
    threshold::VerifiedLease,
};
use types::{
    ids::MachineId,
    node::{Bdf, DeviceState},
    units::{Mebibytes, UnixSeconds},
    vm::{MemoryBacking, VfioInterface},
};

use super::{Command, Entry, Keeper, Order, Switch, View};
use crate::{
    assign,
    events::Event,
    inventory::{
        Capacity,
        rules::{self, DeviceError},
    },
    machines::{
        disk, memory,
        plan::{Failed, Power, Process, Record, Released},
        recovery,
        store::StoreError,
        vmm,
    },
    spawn::UIDS,
};

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RefusedError {
    #[error("there is no machine {machine} on this node")]
    Unknown { machine: MachineId },
    #[error("machine {machine} exists already")]
    Exists { machine: MachineId },
    #[error(
        "lease {machine} has serial {found}; serial {known} was accepted before, and a later one is needed"
    )]
    Serial { machine: MachineId, found: u64, known: u64 },
    #[error(
        "the lease ended {} s ago: it covers {start} to {end} (Unix seconds) and the node's clock says {now}; \
         bring a lease that has not ended",
        now.saturating_sub(*end)
    )]
    Ended { start: u64, end: u64, now: u64 },
    #[error("the machine wants {wanted} {what}; {free} are free on this node")]
    Room { what: &'static str, wanted: u64, free: u64 },
    #[error(
        "the machine's own disk is to have {} MiB, and the largest that a node makes has {} MiB (16 TiB); give \
         it a smaller one in hardware.disk_mib and attach the rest of the lease's space as more disks",
        wanted.0, disk::LARGEST.0
    )]
    LargeDisk { wanted: Mebibytes },
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Renewal(#[from] RenewalError),
    #[error("the node goes down")]
    Draining,
    #[error("the node cannot remember it: {0}")]
    Store(#[from] StoreError),
    #[error("the node cannot forget it: {0}")]
    Note(#[source] io::Error),
    #[error("the machine's process did not do it: {0}")]
    Vmm(#[from] vmm::VmmError),
}

impl Keeper {
    pub(super) async fn handle_command(&mut self, command: Command) {
        // Whoever asked may have gone; the command counts nevertheless.
        match command {
            Command::Create(order, answer) => drop(answer.send(self.create(*order))),
            Command::Renew(lease, answer) => drop(answer.send(self.renew(*lease))),
            Command::Power(machine, switch, answer) => {
                drop(answer.send(self.switch(machine, switch).await));
            }
            Command::Delete(machine, answer) => drop(answer.send(self.delete(machine))),
            Command::Attach(machine, wanted, answer) => {
                drop(answer.send(self.attach(machine, wanted)));
            }
            Command::Detach(machine, id, how, answer) => {
                drop(answer.send(self.detach(machine, &id, how)));
            }
            Command::Recover(device, answer) => drop(answer.send(self.recover(device))),
        }
    }

    fn recover(&mut self, address: Bdf) -> Result<(), RefusedError> {
        if self.routed.is_left(address, self.devices.list()) {
            return self.routed.forget(address).map_err(RefusedError::Note);
        }
        let device = self.devices.get(address).ok_or(DeviceError::Absent { device: address })?;
        if !matches!(device.state, DeviceState::Quarantined { .. }) {
            let state = rules::describe(&device.state);
            return Err(DeviceError::NotQuarantined { device: address, state }.into());
        }
        self.take_back(address);
        Ok(())
    }

    /// Sets off the reset of a device that no machine has. One that is held for another's is asked for again.
    pub(super) fn take_back(&mut self, address: Bdf) {
        let Some(device) = self.devices.get(address) else { return };
        if device.state == DeviceState::Resetting {
            return;
        }
        let vendor = device.vendor;
        self.waiting.remove(&address);
        let beside = assign::beside(&self.config.tools.root, address);
        let set = self.devices.hold(address, &beside);
        let (tools, progress) = (self.config.tools.clone(), self.progress.clone());
        tokio::spawn(recovery::recover(tools, (address, vendor), set, progress));
    }

    fn create(&mut self, order: Order) -> Result<View, RefusedError> {
        let now = self.config.clock.now();
        let machine = order.lease.id;
        if self.draining {
            return Err(RefusedError::Draining);
        }
        if self.machines.contains_key(&machine) {
            return Err(RefusedError::Exists { machine });
        }
        if let Some(known) = self.config.store.serial(machine)?
            && order.lease.serial <= known
        {
            return Err(RefusedError::Serial { machine, found: order.lease.serial, known });
        }
        check_time(now, &order.lease)?;
        check_own_disk(order.hardware.own_disk(&order.lease.shape))?;
        self.check_room(&order.lease)?;
        self.check_later(&order)?;
        let memory = self.choose_memory(machine, order.lease.shape.memory_mib);
        let promise = self.promise(machine, &order.lease.shape);
        let mut record = Record {
            lease: order.lease,
            deleted: None,
            meter: Meter::new(now),
            image: order.image,
            gateway: order.gateway,
            power: Power::On,
            uid: self.free_uid(),
            created: now,
            last_stop: String::new(),
            failed: Failed::No,
            events: Vec::new(),
            released: Released::No,
            memory,
            hardware: order.hardware,
            promise,
            placement: None,
            attachments: Vec::new(),
            clock_ahead_s: 0,
        };
        record.note(now, "accepted");
        self.config.store.put_machine(&record)?;
        self.lend(&record.lease.shape.devices, machine);
        let (serial, end) = (record.lease.serial, record.lease.end.0);
        eprintln!("{}", Event::MachineAccepted { machine, serial, end });
        self.machines.insert(machine, Entry::new(record));
        self.view(machine)
    }

    fn renew(&mut self, next: VerifiedLease) -> Result<View, RefusedError> {
        let (machine, now) = (next.lease().id, self.config.clock.now());
        let known = self.machines.get(&machine).filter(|known| known.record.deleted.is_none());
        let known = known.ok_or(RefusedError::Unknown { machine })?;
        let next = lifecycle::renew(&known.record.lease, next)?;
        check_time(now, &next)?;
        if known.record.released == Released::Yes {
            self.check_room(&next)?;
        }
        if known.record.meter.running_s(now) > 0 {
            // What was used until now was used under the earlier lease.
            self.close_account(now, machine);
        }
        let known = self.machines.get(&machine).ok_or(RefusedError::Unknown { machine })?;
        let mut record = known.record.clone();
        if record.released == Released::Yes {
            record.promise = self.promise(machine, &next.shape);
            record.memory = self.choose_memory(machine, next.shape.memory_mib);
            record.released = Released::No;
            record.power = Power::On;
        }
        record.lease = next;
        record.note(now, "lease renewed");
        self.config.store.put_machine(&record)?;
        self.lend(&record.lease.shape.devices, machine);
        let (serial, end) = (record.lease.serial, record.lease.end.0);
        eprintln!("{}", Event::MachineRenewed { machine, serial, end });
        if let Some(entry) = self.machines.get_mut(&machine) {
            entry.record = record;
        }
        // Before its earlier end comes.
        self.give_sign();
        self.view(machine)
    }

    async fn switch(&mut self, machine: MachineId, to: Switch) -> Result<View, RefusedError> {
        let now = self.config.clock.now();
        let entry = self.machines.get_mut(&machine).ok_or(RefusedError::Unknown { machine })?;
        check_time(now, &entry.record.lease)?;
        if entry.record.deleted.is_some() {
            return Err(RefusedError::Unknown { machine });
        }
        let running = matches!(entry.seen.process, Process::Running { .. });
        if to == Switch::Restart && running && entry.voice.is_silent() {
            return Err(vmm::VmmError::Silent.into());
        }
        match to {
            Switch::Start | Switch::Restart => entry.record.power = Power::On,
            Switch::Stop => entry.record.power = Power::Off,
        }
        entry.seen.failures = 0;
        entry.record.failed = Failed::No;
        self.config.store.put_machine(&entry.record)?;
        if to == Switch::Restart && running && entry.seen.busy.is_none() {
            vmm::power(machine, vmm::Power::Reset).await?;
        }
        self.view(machine)
    }

    fn delete(&mut self, machine: MachineId) -> Result<View, RefusedError> {
        let view = self.view(machine)?;
        let now = self.config.clock.now();
        let entry = self.machines.get_mut(&machine).ok_or(RefusedError::Unknown { machine })?;
        let mut record = entry.record.clone();
        record.power = Power::Off;
        // It ends now; everything else follows from that, also after a power cut.
        record.deleted.get_or_insert(now);
        self.config.store.put_machine(&record)?;
        entry.record = record;
        Ok(view)
    }

    pub(super) fn check_room(&self, lease: &Lease) -> Result<(), RefusedError> {
        let shape = &lease.shape;
        rules::check_free(&self.devices_for(lease), &shape.devices)?;
        rules::check_routes(self.devices.list(), self.routed.list(), &shape.devices)?;
        let free = self.free();
        let checks = [
            ("virtual CPUs", u64::from(shape.vcpus), u64::from(free.vcpus)),
            ("MiB of memory", shape.memory_mib.0, self.room_mib(lease.id, shape.memory_mib)),
            ("MiB of disk", shape.disk_mib.0, self.free_disk_mib()),
        ];
        for (what, wanted, free) in checks {
            if wanted > free {
                return Err(RefusedError::Room { what, wanted, free });
            }
        }
        Ok(())
    }

    /// Refuses devices that could never be attached later, as the machine's are given.
    fn check_later(&self, order: &Order) -> Result<(), DeviceError> {
        let cold = order.hardware.cold_devices(&order.lease.shape);
        match assign::interface(&self.config.tools.root, &cold) {
            VfioInterface::Cdev => Ok(()),
            VfioInterface::Group => {
                rules::check_later(self.devices.list(), &order.hardware.plugged_later)
            }
        }
    }

    pub(super) fn free(&self) -> Capacity {
        let held = self.machines.values().filter(|entry| entry.record.released == Released::No);
        let vcpus: u32 = held.map(|entry| entry.record.lease.shape.vcpus).sum();
        let all = self.config.capacity;
        let offered = self.config.spec.machines.vcpus.unwrap_or(all.vcpus);
        // A machine's memory is of one kind.
        let memory_mib = self.free_huge_mib(None).max(self.free_ordinary_mib(None));
        Capacity { vcpus: offered.saturating_sub(vcpus), memory_mib }
    }

    /// Returns how much memory a machine that wants `wanted` could have.
    fn room_mib(&self, machine: MachineId, wanted: Mebibytes) -> u64 {
        match self.choose_memory(machine, wanted) {
            MemoryBacking::Memfd => self.free_ordinary_mib(Some(machine)),
            MemoryBacking::Hugetlb1G | MemoryBacking::Hugetlb2M => {
                self.free_huge_mib(Some(machine))
            }
        }
    }

    /// Returns what a machine's memory is made of: huge pages as long as it fits in them.
    pub(super) fn choose_memory(&self, machine: MachineId, wanted: Mebibytes) -> MemoryBacking {
        let page = self.config.spec.machines.huge_page;
        if memory::fits(wanted, page, self.free_huge_mib(Some(machine))) {
            memory::backing(page)
        } else {
            MemoryBacking::Memfd
        }
    }

    /// Chooses anew what the memory of a machine that starts is made of, where the node's huge pages are
    /// others than when it was promised them.
    pub(super) fn keep_memory(&mut self, machine: MachineId) {
        let Some(entry) = self.machines.get(&machine) else { return };
        let (wanted, promised) = (entry.record.lease.shape.memory_mib, entry.record.memory);
        let page = self.config.spec.machines.huge_page;
        let kept = memory::backing(page) == promised
            && memory::fits(wanted, page, self.free_huge_mib(Some(machine)));
        if kept || promised == MemoryBacking::Memfd {
            return;
        }
        let memory = self.choose_memory(machine, wanted);
        if let Some(entry) = self.machines.get_mut(&machine) {
            entry.record.memory = memory;
        }
        self.keep(machine);
    }

    fn free_huge_mib(&self, but: Option<MachineId>) -> u64 {
        let huge = |backing| backing != MemoryBacking::Memfd;
        self.config.huge_mib.saturating_sub(self.promised_mib(but, huge))
    }

    fn free_ordinary_mib(&self, but: Option<MachineId>) -> u64 {
        let ordinary = |backing| backing == MemoryBacking::Memfd;
        let reserve = self.config.spec.machines.reserve_mib.0;
        let kept = reserve.saturating_add(self.config.huge_mib);
        let promised = self.promised_mib(but, ordinary);
        self.config.capacity.memory_mib.saturating_sub(kept).saturating_sub(promised)
    }

    /// Returns the memory of machines, `but` of one, whose backing is `counted`.
    fn promised_mib(&self, but: Option<MachineId>, counted: impl Fn(MemoryBacking) -> bool) -> u64 {
        let held = self.machines.iter().filter(|(id, _)| Some(**id) != but);
        held.map(|(_, entry)| &entry.record)
            .filter(|record| record.released == Released::No && counted(record.memory))
            .map(|record| record.lease.shape.memory_mib.0)
            .sum()
    }

    fn free_uid(&self) -> u32 {
        let used: Vec<_> = self.machines.values().map(|entry| entry.record.uid).collect();
        UIDS.into_iter().find(|uid| !used.contains(uid)).unwrap_or(*UIDS.end())
    }
}

fn check_time(now: UnixSeconds, lease: &Lease) -> Result<(), RefusedError> {
    if now >= lease.end {
        let (start, end, now) = (lease.start.0, lease.end.0, now.0);
        return Err(RefusedError::Ended { start, end, now });
    }
    Ok(())
}

/// Refuses a machine's own disk that no node can make, before anybody pays for it.
fn check_own_disk(wanted: Mebibytes) -> Result<(), RefusedError> {
    if wanted > disk::LARGEST { Err(RefusedError::LargeDisk { wanted }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_no_file_can_hold_is_refused_with_what_to_do() {
        assert!(check_own_disk(Mebibytes((16 << 20) - 1)).is_ok());
        let refusal = check_own_disk(Mebibytes(16 << 20)).expect_err("16 TiB").to_string();
        assert!(refusal.contains("16777216 MiB") && refusal.contains("more disks"), "{refusal}");
    }
}
