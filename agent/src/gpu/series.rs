//! What of guests' readings is counted. A guest says what it likes, and Prometheus keeps every series of
//! which it was told once: so a machine has as many GPUs as its lease, and is taken at its first word about
//! what they are. Pure.

use std::collections::BTreeMap;

use types::{
    gpu::{Gpu, GpuReading},
    ids::MachineId,
    status::{GuestGpus, MachineView, NodeStatus},
};

/// How often what a guest calls a driver or a GPU may change during a lease: a driver is replaced, a
/// GPU that was silent answers.
pub const MAX_CHANGES: u32 = 4;

/// Classes of devices that are GPUs (PCI Code and ID Assignment Specification §1): display controllers and
/// processing accelerators.
const GPUS: [u32; 2] = [0x03, 0x12];

/// What guests said first.
#[derive(Debug, Default)]
pub struct Series {
    machines: BTreeMap<MachineId, Lease>,
}

/// What the guest of one machine said.
#[derive(Debug, Default)]
struct Lease {
    driver: Option<Said<String>>,
    /// By number: UUID, model and address.
    gpus: BTreeMap<u32, Said<[String; 3]>>,
}

/// What was said, and how often something else may be.
#[derive(Debug)]
struct Said<T> {
    value: T,
    left: u32,
}

impl<T: Clone + PartialEq> Said<T> {
    fn new(value: T) -> Self {
        Self { value, left: MAX_CHANGES }
    }

    fn settle(&mut self, new: T) -> T {
        if self.left > 0 && self.value != new {
            self.left -= 1;
            self.value = new;
        }
        self.value.clone()
    }
}

impl Series {
    /// Returns what is counted of the readings in a status. Forgets machines that are gone.
    pub fn settle(&mut self, status: &NodeStatus) -> Vec<GuestGpus> {
        let machine = |id: MachineId| status.machines.iter().find(|machine| machine.id == id);
        self.machines.retain(|id, _| machine(*id).is_some());
        let settled = |guest: &GuestGpus| {
            let most = gpus(status, machine(guest.machine)?);
            let lease = self.machines.entry(guest.machine).or_default();
            Some(GuestGpus { reading: lease.settle(&guest.reading, most), ..guest.clone() })
        };
        status.guests.iter().filter_map(settled).collect()
    }
}

/// Returns how many GPUs a machine's lease has.
fn gpus(status: &NodeStatus, machine: &MachineView) -> usize {
    let leased = status.devices.iter().map(|view| &view.device);
    let leased = leased.filter(|device| machine.shape.devices.contains(&device.address));
    leased.filter(|device| GPUS.contains(&(device.class >> 16))).count()
}

impl Lease {
    fn settle(&mut self, reading: &GpuReading, most: usize) -> GpuReading {
        let driver = self.driver.get_or_insert_with(|| Said::new(reading.driver.clone()));
        let mut settled = GpuReading {
            driver: driver.settle(reading.driver.clone()),
            gpus: Vec::new(),
            xids: Vec::new(),
            ..reading.clone()
        };
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let mut called = BTreeMap::new();
        for gpu in reading.gpus.iter().filter(|gpu| gpu.index < most) {
            let gpu_now = self.gpu(gpu);
            called.insert(gpu.uuid.as_str(), gpu_now.uuid.clone());
            settled.gpus.push(gpu_now);
        }
        if most > 0 {
            let xids = reading.xids.iter().cloned().map(|mut xid| {
                xid.gpu = called.get(xid.gpu.as_str()).cloned().unwrap_or_default();
                xid
            });
            settled.xids.extend(xids);
        }
        settled
    }

    /// Returns a GPU as it is called.
    fn gpu(&mut self, gpu: &Gpu) -> Gpu {
        let new = [gpu.uuid.clone(), gpu.name.clone(), gpu.address.clone()];
        let said = self.gpus.entry(gpu.index).or_insert_with(|| Said::new(new.clone()));
        // One that never answered has no name.
        let known = if gpu.uuid.is_empty() { said.value.clone() } else { said.settle(new) };
        let [uuid, name, address] = known;
        Gpu { uuid, name, address, ..gpu.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use types::{gpu::Xid, units::UnixSeconds};

    use super::*;
    use crate::{
        gpu::show::{self, Told},
        local::{exposition::Exposition, sample},
    };

    /// Series of the settled readings of a status.
    fn series(series: &mut Series, status: &NodeStatus) -> Vec<String> {
        let mut out = Exposition::default();
        for guest in series.settle(status) {
            show::metrics(&mut out, &[Told { machine: "m", reading: &guest.reading }]);
        }
        let text = out.finish();
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.filter_map(|line| line.rsplit_once(' ')).map(|(name, _)| name.to_owned()).collect()
    }

    /// Has a guest make up what it can.
    fn lie(status: &mut NodeStatus, round: u32) {
        let reading = &mut status.guests[0].reading;
        reading.driver = format!("driver {round}");
        let template = reading.gpus[0].clone();
        let gpu = |index: u32| Gpu {
            index: index * (round % 3 + 1),
            uuid: format!("GPU-{round}-{index}"),
            name: format!("model {round}"),
            address: format!("{round}"),
            ..template.clone()
        };
        reading.gpus = (0..64).map(gpu).collect();
        let xid = |number: u64| Xid {
            at: UnixSeconds(1),
            gpu: format!("GPU-{round}-{number}"),
            code: 999 + number * u64::from(round),
        };
        reading.xids = (0..64).map(xid).collect();
    }

    #[test]
    fn what_a_guest_makes_up_begins_no_series_without_end() {
        let mut status = sample::status();
        let mut kept = Series::default();
        let mut seen: BTreeSet<String> = series(&mut kept, &status).into_iter().collect();
        let honest = seen.len();
        for round in 0..500 {
            lie(&mut status, round);
            let now = series(&mut kept, &status);
            assert_eq!(now.iter().collect::<BTreeSet<_>>().len(), now.len(), "one series twice");
            seen.extend(now);
        }
        // Names that change, and failures: 999 and others, of its GPU and of none.
        let changes = usize::try_from(MAX_CHANGES).expect("few") * 2;
        assert!(seen.len() <= honest + changes + 4, "{seen:#?}");
        assert!(!seen.iter().any(|name| name.contains("GPU-400")), "{seen:#?}");
    }

    #[test]
    fn a_machine_has_the_gpus_of_its_lease() {
        let mut status = sample::status();
        lie(&mut status, 3);
        let counted = |status: &NodeStatus| {
            let settled = Series::default().settle(status);
            settled.iter().map(|guest| guest.reading.gpus.len()).sum::<usize>()
        };
        assert_eq!(counted(&status), 1);
        status.devices[0].device.class = 0x01_0802;
        assert_eq!(counted(&status), 0);
        status.devices[0].device.class = 0x12_0000;
        assert_eq!(counted(&status), 1);
        status.machines[0].shape.devices.clear();
        let settled = Series::default().settle(&status);
        assert_eq!((counted(&status), settled[0].reading.xids.len()), (0, 0));
        status.machines.clear();
        assert_eq!(Series::default().settle(&status), []);
    }

    #[test]
    fn a_driver_is_replaced_and_a_lease_begins_anew() {
        let mut status = sample::status();
        let mut kept = Series::default();
        let honest = status.guests.clone();
        assert_eq!(kept.settle(&status), honest);
        status.guests[0].reading.driver = "590.1".to_owned();
        assert_eq!(kept.settle(&status)[0].reading.driver, "590.1");
        // A GPU that does not answer stays what it was.
        status.guests[0].reading.gpus[0] = Gpu { index: 0, ..Gpu::default() };
        let silent = kept.settle(&status)[0].reading.gpus[0].clone();
        assert_eq!(silent.uuid, honest[0].reading.gpus[0].uuid);
        assert_eq!(silent.name, honest[0].reading.gpus[0].name);
        for round in 0..99 {
            lie(&mut status, round);
            kept.settle(&status);
        }
        let machines = std::mem::take(&mut status.machines);
        kept.settle(&status);
        status = NodeStatus { machines, ..sample::status() };
        assert_eq!(kept.settle(&status), honest);
    }
}
