//! Disks and devices that come and go, and the CPUs that a machine is promised.

use std::collections::BTreeSet;

use lease::hardware::Attach;
use tokio_util::sync::CancellationToken;
use types::{ids::MachineId, node::MachineShape};

use super::{Entry, Keeper, Record, RefusedError, State, View, trouble};
use crate::{
    assign,
    events::Event,
    init::boot::chain,
    machines::{
        attach::{self, AttachFailure, Kept, Made, Plugged, Refusal, Seat},
        cpus::{self, Promise},
        plan::{Process, Released},
        vmm,
    },
};

/// How something leaves a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// Its guest is asked to let go of it.
    Asked,
    /// It is pulled, whatever the guest does with it.
    Pulled,
    /// It is out already, and what is kept of it is destroyed.
    Erased,
}

impl Keeper {
    /// Promises a machine CPUs that no other has.
    pub(super) fn promise(&self, machine: MachineId, shape: &MachineShape) -> Promise {
        let tools = &self.config.tools;
        let near: Vec<u32> = shape
            .devices
            .iter()
            .filter_map(|device| assign::node_of(&tools.root, *device))
            .collect();
        let held = self
            .machines
            .iter()
            .filter(|(id, entry)| **id != machine && entry.record.released == Released::No);
        let taken: BTreeSet<u32> =
            held.flat_map(|(_, entry)| entry.record.promise.cpus.iter().copied()).collect();
        cpus::promise(shape.vcpus, &tools.cpus, &taken, &near)
    }

    /// Renews promises of CPUs that the host does not have any more, and makes those of machines
    /// from before there were any. What runs stays where it is.
    pub(super) fn keep_promises(&mut self) {
        let there: BTreeSet<u32> = self.config.tools.cpus.iter().map(|cpu| cpu.id).collect();
        let broken = |entry: &Entry| {
            let promise = &entry.record.promise;
            let unmade = promise.cpus.is_empty() && promise.notes.is_empty();
            let idle = !matches!(entry.seen.process, Process::Running { .. });
            let gone = promise.cpus.iter().any(|cpu| !there.contains(cpu));
            entry.record.released == Released::No && idle && (unmade || gone)
        };
        let all: Vec<MachineId> =
            self.machines.iter().filter(|(_, entry)| broken(entry)).map(|(id, _)| *id).collect();
        for machine in all {
            let Some(entry) = self.machines.get(&machine) else { continue };
            let promise = self.promise(machine, &entry.record.lease.shape);
            if let Some(entry) = self.machines.get_mut(&machine) {
                entry.record.promise = promise;
            }
            self.keep(machine);
        }
    }

    /// Takes note of something that is to be attached, and plugs it when the machine runs.
    pub(super) fn attach(
        &mut self,
        machine: MachineId,
        wanted: Attach,
    ) -> Result<Result<View, Refusal>, RefusedError> {
        let state = self.living(machine)?;
        let entry = self.machines.get_mut(&machine).ok_or(RefusedError::Unknown { machine })?;
        if entry.plugging.contains_key(&wanted.id()) {
            return Ok(Err(Refusal::Busy { id: wanted.id() }));
        }
        let made = Made::of(&self.config.tools.disks, machine, &wanted);
        let kept = match attach::admit(&entry.record, wanted, made) {
            Ok(kept) => kept,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let mut record = entry.record.clone();
        let same = |device: &Attach| device.id() == kept.device.id();
        match record.attachments.iter_mut().find(|known| same(&known.device)) {
            Some(known) => *known = kept.clone(),
            None => record.attachments.push(kept.clone()),
        }
        self.config.store.put_machine(&record)?;
        entry.record = record;
        if state == State::Running {
            self.make_room();
            self.plug(machine, kept.device);
        }
        self.view(machine).map(Ok)
    }

    /// Takes note that something was taken out of a machine, or is to be destroyed. Its process was
    /// told before: the keeper waits for none.
    pub(super) fn detach(
        &mut self,
        machine: MachineId,
        id: &str,
        how: Leaving,
    ) -> Result<Result<View, Refusal>, RefusedError> {
        self.living(machine)?;
        let entry = self.machines.get(&machine).ok_or(RefusedError::Unknown { machine })?;
        let mut record = entry.record.clone();
        let found = record.attachments.iter().position(|kept| kept.device.id() == id);
        let Some(at) = found else { return Ok(Err(Refusal::Unknown { id: id.to_owned() })) };
        let kept = record.attachments.remove(at);
        let disk = matches!(kept.device, Attach::Disk(_));
        let what = match how {
            Leaving::Asked | Leaving::Pulled => {
                entry.plugging.get(id).inspect(|abandoned| abandoned.cancel());
                // Nothing of a device is kept.
                if disk {
                    let kept = Kept { seat: Seat::Out, fault: String::new(), ..kept };
                    record.attachments.insert(at, kept);
                }
                "detached"
            }
            Leaving::Erased => {
                // It would be there again once it is made.
                if entry.plugging.contains_key(id) {
                    return Ok(Err(Refusal::Busy { id: id.to_owned() }));
                }
                if kept.seat == Seat::In && kept.fault.is_empty() {
                    return Ok(Err(Refusal::In { id: id.to_owned() }));
                }
                if let Err(error) = attach::erase(&self.config.tools, machine, &kept.device) {
                    trouble("disk", &error);
                    return Ok(Err(Refusal::In { id: id.to_owned() }));
                }
                "erased"
            }
        };
        record.note(self.config.clock.now(), format!("{id} is {what}"));
        self.replace(machine, record)
    }

    fn replace(
        &mut self,
        machine: MachineId,
        record: Record,
    ) -> Result<Result<View, Refusal>, RefusedError> {
        self.config.store.put_machine(&record)?;
        if let Some(entry) = self.machines.get_mut(&machine) {
            entry.record = record;
        }
        self.view(machine).map(Ok)
    }

    /// Returns what a machine does whose lease is in force.
    fn living(&self, machine: MachineId) -> Result<State, RefusedError> {
        let view = self.view(machine)?;
        if view.record.deleted.is_some() || view.state == State::Ended {
            return Err(RefusedError::Unknown { machine });
        }
        Ok(view.state)
    }

    /// Plugs, after a start of the machine or of the agent, whatever is to be in the machine.
    pub(super) fn plug_all(&mut self, machine: MachineId) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        let back = entry.record.attachments.iter_mut().filter(|kept| attach::comes_back(kept));
        let devices: Vec<Attach> = back
            .map(|kept| {
                kept.fault.clear();
                kept.device.clone()
            })
            .collect();
        if !devices.is_empty() {
            self.make_room();
        }
        for device in devices {
            self.plug(machine, device);
        }
    }

    /// One at a time of each name: two would make the same disk.
    fn plug(&mut self, machine: MachineId, device: Attach) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        if entry.plugging.contains_key(&device.id()) {
            return;
        }
        let abandoned = CancellationToken::new();
        entry.plugging.insert(device.id(), abandoned.clone());
        let (tools, record) = (self.config.tools.clone(), entry.record.clone());
        let progress = self.progress.clone();
        tokio::spawn(attach::carry_out(tools, record, (device, abandoned), progress));
    }

    pub(super) fn handle_attached(
        &mut self,
        machine: MachineId,
        id: &str,
        result: Result<Plugged, AttachFailure>,
    ) {
        let now = self.config.clock.now();
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.plugging.remove(id);
        let what = match &result {
            Ok(Plugged::Before) => return,
            Ok(Plugged::Now) => format!("{id} is attached"),
            Err(error) => {
                let reason = format!("{id} is not attached: {}", chain(error));
                eprintln!("{}", Event::MachineFailed { machine, reason: reason.clone() });
                reason
            }
        };
        let kept = entry.record.attachments.iter_mut().find(|kept| kept.device.id() == id);
        if result.is_ok() && kept.as_ref().is_none_or(|kept| kept.seat == Seat::Out) {
            // It was taken back while it was being attached.
            let id = id.to_owned();
            tokio::spawn(async move { vmm::detach(machine, &id, vmm::Removal::Asked).await });
        }
        if let Some(kept) = kept {
            kept.fault = if result.is_ok() { String::new() } else { what.clone() };
        }
        entry.record.note(now, what);
        self.keep(machine);
    }
}
