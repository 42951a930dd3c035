//! Gathers how the node is.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::PoisonError,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use rustix::time::{ClockId, clock_gettime};
use types::{
    node::{Bdf, DeviceState, PciDevice},
    status::{
        ClockView, DeviceFacts, DeviceView, FreeView, GuestGpus, HostView, InterfaceView,
        MAX_ERRORS_LISTED, MAX_MEMBERS_LISTED, MachineView, MemberView, NetworkView, NodeStatus,
        OverlayView, RefusedReadings, STATUS_VERSION, Slot, VolumeView, WatchdogView,
    },
    units::UnixSeconds,
    updates::UpdatesView,
};

use super::{Local, Serving, Vital, host, metrics::Counted};
use crate::{
    gpu::guests::Refused,
    inventory::{self, facts},
    machines::{
        keeper::{Snapshot, State, View},
        vmm,
    },
    net::{Carrier, NetworkStatus},
    seal::unlock,
};

/// How old facts of devices may be: reading them asks the devices.
const FACTS_AGE: Duration = Duration::from_secs(10);

/// A machine's process that does not answer in this time has no counters this time.
const COUNTERS_LIMIT: Duration = Duration::from_secs(2);

impl Local {
    /// Gathers how the node is.
    pub async fn status(&self) -> NodeStatus {
        let local = self.clone();
        // The kernel may have to wait for a device that sleeps.
        let gathered = tokio::task::spawn_blocking(move || local.gather()).await;
        gathered.expect("nothing in it panics, and nothing cancels it")
    }

    /// Gathers what is counted beside a status.
    pub async fn counted(&self, status: &NodeStatus) -> Counted {
        let running = self.shared.serving.get().map(running).unwrap_or_default();
        let machines = join_all(running.into_iter().map(|machine| async move {
            let counters = tokio::time::timeout(COUNTERS_LIMIT, vmm::counters(machine)).await;
            Some((machine, counters.ok()?.ok()?))
        }));
        let machines = machines.await.into_iter().flatten().collect();
        let mut series = self.shared.series.lock().unwrap_or_else(PoisonError::into_inner);
        let guests = series.settle(status);
        drop(series);
        let book = self.shared.config.logs.book();
        let named = |(name, count): (&str, u64)| (name.to_owned(), count);
        Counted {
            lines: book.counts().collect(),
            gaps: book.gaps(),
            troubles: book.troubles().map(named).collect(),
            events: book.happened().map(named).collect(),
            machines,
            guests,
        }
    }

    fn gather(&self) -> NodeStatus {
        let config = &self.shared.config;
        let root = config.root.as_path();
        let page = config.pages.borrow().clone();
        let serving = self.shared.serving.get();
        let snapshot = serving.map(|serving| serving.machines.snapshot().borrow().clone());
        let snapshot = snapshot.unwrap_or_default();
        let network = self.shared.network.get().map(|network| network.borrow().clone());
        let (boot, errors, agent_starts, armed) = {
            let book = config.logs.book();
            (book.phases(), book.errors(MAX_ERRORS_LISTED), book.agent_starts(), book.watchdogs())
        };
        let volumes = host::volumes(root);
        let devices = if serving.is_some() { &snapshot.devices } else { &page.devices };
        NodeStatus {
            version: STATUS_VERSION,
            node: config.node,
            slot: slot(&volumes, &page.updates),
            updates: page.updates,
            release: config.release.clone(),
            serving: serving.is_some(),
            time: serving.map_or_else(system_time, |serving| serving.clock.now()),
            uptime_ms: uptime_ms(),
            boot,
            trust: host::trust(root),
            clock: serving.map(clock).unwrap_or_default(),
            network: network
                .map(|network| uplinks(root, network, &page.network))
                .unwrap_or_default(),
            overlay: serving.map(members).unwrap_or_default(),
            host: resources(root, &snapshot, volumes, (agent_starts, armed)),
            devices: self.devices(devices),
            missing_devices: serving.map(|serving| missing(serving, devices)).unwrap_or_default(),
            guests: serving.map(|serving| said(serving, &snapshot)).unwrap_or_default(),
            refused_readings: serving.map(|it| refused(it, &snapshot)).unwrap_or_default(),
            machines: snapshot.machines.iter().map(machine).collect(),
            errors,
            name: page.name.clone(),
            config: page.config.clone(),
            settings: page.settings,
            install: page.install,
            claim: page.claim,
            volumes: unlock::report(root),
            trouble: page.error,
            last_boot: page.last_boot,
        }
    }

    fn devices(&self, devices: &[PciDevice]) -> Vec<DeviceView> {
        let root = self.shared.config.root.as_path();
        let mut known = self.shared.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if known.read.is_none_or(|read| read.elapsed() >= FACTS_AGE) {
            known
                .vital
                .retain(|address, _| devices.iter().any(|device| device.address == *address));
            let fresh = |device: &PciDevice| {
                let (product, serial) = vital(root, device, &mut known.vital);
                let facts = facts::read(root, device.address);
                (device.address, DeviceFacts { product, serial, ..facts })
            };
            known.facts = devices.iter().map(fresh).collect();
            known.read = Some(Instant::now());
        }
        let facts = |address: &Bdf| known.facts.get(address).cloned().unwrap_or_default();
        let view = |device: &PciDevice| DeviceView {
            device: device.clone(),
            facts: facts(&device.address),
        };
        devices.iter().map(view).collect()
    }
}

/// Returns a device's vital product data, product and serial number: what was read of it before, or now, once,
/// when it is nobody's for the first time.
fn vital(
    root: &Path,
    device: &PciDevice,
    read: &mut BTreeMap<Bdf, Vital>,
) -> (Option<String>, Option<String>) {
    let id = (device.vendor, device.device);
    match read.get(&device.address) {
        Some(vital) if vital.id == id => vital.words.clone(),
        Some(_) | None if device.state == DeviceState::Free => {
            let words = facts::vital(root, device.address);
            read.insert(device.address, Vital { id, words: words.clone() });
            words
        }
        Some(_) | None => (None, None),
    }
}

fn running(serving: &Serving) -> Vec<types::ids::MachineId> {
    let snapshot = serving.machines.snapshot();
    let snapshot = snapshot.borrow();
    let running = snapshot
        .machines
        .iter()
        .filter(|view| matches!(view.state, State::Running | State::Stopping));
    running.map(|view| view.record.lease.id).collect()
}

fn uptime_ms() -> u64 {
    let uptime = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX)
}

fn system_time() -> UnixSeconds {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    UnixSeconds(now.unwrap_or_default().as_secs())
}

/// A node whose records outlive it is on a disk; slots come with updates.
fn slot(volumes: &[VolumeView], updates: &UpdatesView) -> Slot {
    let kept = volumes.iter().any(|volume| volume.path == "/state" && volume.kind != "tmpfs");
    if !updates.slot.is_empty() {
        return Slot::Installed;
    }
    if kept { Slot::DiskWithoutSlots } else { Slot::NotInstalled }
}

fn clock(serving: &Serving) -> ClockView {
    let status = serving.clock.status();
    let status = status.borrow();
    ClockView {
        sources: status.sources,
        offset_ms: status.offset_ms,
        error: status.last_error.clone().unwrap_or_default(),
    }
}

/// `notices` are what the page says of the network.
fn uplinks(root: &Path, network: NetworkStatus, notices: &[String]) -> NetworkView {
    let mut wrong: Vec<String> = network.last_error.into_iter().collect();
    for text in notices.iter().chain(&network.problems) {
        if !wrong.contains(text) {
            wrong.push(text.clone());
        }
    }
    let interface = |interface: &crate::net::InterfaceStatus| InterfaceView {
        name: interface.name.clone(),
        hardware: interface.hardware.to_string(),
        carrier: interface.carrier == Carrier::Up,
        mtu: interface.mtu,
        addresses: interface
            .addresses
            .iter()
            .map(|assigned| format!("{}/{}", assigned.address, assigned.prefix))
            .collect(),
        traffic: host::traffic(root, &interface.name),
    };
    NetworkView {
        interfaces: network.interfaces.iter().map(interface).collect(),
        gateways: network.gateways,
        dns: network.dns,
        error: wrong.join("; "),
    }
}

fn members(serving: &Serving) -> OverlayView {
    let members = serving.overlay.members();
    let connected = serving.overlay.connected();
    let mut listed: Vec<_> = members
        .iter()
        .map(|member| MemberView {
            node: member.id,
            role: match member.role {
                overlay::Role::Gateway => "gateway",
                overlay::Role::Provider => "provider",
                overlay::Role::Seed => "seed",
            }
            .to_owned(),
            addresses: member.addresses.clone(),
            last_heard_ms: u64::try_from(member.last_heard.as_millis()).unwrap_or(u64::MAX),
            neighbour: connected.neighbours.contains(&member.id),
            round_trip_us: connected
                .round_trips
                .get(&member.id)
                .and_then(|time| u64::try_from(time.as_micros()).ok()),
        })
        .collect();
    listed.sort_by_key(|member| (!member.neighbour, member.node));
    listed.truncate(MAX_MEMBERS_LISTED);
    OverlayView {
        port: serving.overlay.local_addr().port(),
        members: members.len(),
        sent_bytes: connected.traffic.sent_bytes,
        received_bytes: connected.traffic.received_bytes,
        lost_packets: connected.traffic.lost_packets,
        listed,
    }
}

fn resources(
    root: &Path,
    snapshot: &Snapshot,
    volumes: Vec<VolumeView>,
    (agent_starts, armed): (Option<u64>, Vec<WatchdogView>),
) -> HostView {
    let memory = host::memory(root);
    let watchdogs = host::watchdogs(root);
    HostView {
        cpus: inventory::capacity(root).vcpus,
        load_milli: host::load_milli(root),
        memory_bytes: memory.total,
        memory_available_bytes: memory.available,
        huge_bytes: memory.huge,
        huge_free_bytes: memory.huge_free,
        agent_bytes: host::own_memory(root),
        free: FreeView {
            vcpus: snapshot.free.vcpus,
            memory_mib: snapshot.free.memory_mib,
            disk_mib: snapshot.disk_mib,
        },
        volumes,
        // Where the kernel does not show them, what init said counts.
        watchdogs: if watchdogs.is_empty() { armed } else { watchdogs },
        agent_starts,
    }
}

/// Returns devices that the configuration names and the server does not have.
fn missing(serving: &Serving, devices: &[PciDevice]) -> Vec<Bdf> {
    let machines = &serving.spec.machines;
    let listed =
        machines.devices.iter().flatten().chain(machines.linked.iter().flatten().flatten());
    let absent = |address: &&Bdf| devices.iter().all(|device| device.address != **address);
    listed.filter(absent).copied().collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns what guests said of GPUs. A context id is a machine's user id, which another machine may
/// have had before: what was said before this one was made is not its word.
fn said(serving: &Serving, snapshot: &Snapshot) -> Vec<GuestGpus> {
    let now = serving.clock.now();
    let newest = |view: &View| {
        let (age, reading) = serving.readings.newest(view.record.uid)?;
        (age.as_secs() < now.since(view.record.created)).then(|| GuestGpus {
            machine: view.record.lease.id,
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            reading,
        })
    };
    snapshot.machines.iter().filter_map(newest).collect()
}

/// Returns which readings of guests were not taken; those of an earlier machine of the same user id do not
/// count.
fn refused(serving: &Serving, snapshot: &Snapshot) -> Vec<RefusedReadings> {
    let now = serving.clock.now();
    let last = |view: &View| {
        let life = Duration::from_secs(now.since(view.record.created));
        let Refused { at, reason, count } = serving.readings.refused(view.record.uid, life)?;
        let age_ms = u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX);
        Some(RefusedReadings { machine: view.record.lease.id, count, age_ms, reason })
    };
    snapshot.machines.iter().filter_map(last).collect()
}

fn machine(view: &View) -> MachineView {
    let lease = &view.record.lease;
    MachineView {
        id: lease.id,
        renter: lease.renter,
        state: view.state.name().to_owned(),
        address: view.address,
        shape: lease.shape.clone(),
        start: lease.start,
        end: view.record.end(),
        last_stop: view.record.last_stop.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{local::sample, testing};

    #[test]
    fn vital_data_is_read_once_when_a_device_is_free_first() {
        let folder = "sys/bus/pci/devices/0000:02:00.0";
        let vpd = |name: &[u8; 4]| [&[0x82, 4, 0][..], name, &[0x78]].concat();
        let root = testing::root(&[(&format!("{folder}/vpd"), &vpd(b"H200"))]);
        let mut device = sample::status().devices[0].device.clone();
        let mut known = BTreeMap::new();
        let mut product = |device: &PciDevice| vital(root.path(), device, &mut known).0;
        // The agent starts again while a machine has it.
        assert_eq!(product(&device), None);
        device.state = DeviceState::Free;
        assert_eq!(product(&device).as_deref(), Some("H200"));
        // It is not asked again: somebody may have it.
        std::fs::write(root.path().join(folder).join("vpd"), vpd(b"B300")).expect("written");
        assert_eq!(product(&device).as_deref(), Some("H200"));
        device.state = DeviceState::Resetting;
        assert_eq!(product(&device).as_deref(), Some("H200"));
        // Another one sits there now.
        device.device = 0x3182;
        assert_eq!(product(&device), None);
        device.state = DeviceState::Free;
        assert_eq!(product(&device).as_deref(), Some("B300"));
    }

    #[test]
    fn all_that_is_wrong_with_the_network_is_told_once() {
        let problem = "uplink b: no card fits".to_owned();
        let network = NetworkStatus {
            last_error: Some("the lease ended".to_owned()),
            problems: vec![problem.clone()],
            ..NetworkStatus::default()
        };
        let notices = ["the last good one is in use".to_owned(), problem];
        let view = uplinks(Path::new("/nowhere"), network, &notices);
        let told = "the lease ended; the last good one is in use; uplink b: no card fits";
        assert_eq!(view.error, told);
        let fine = uplinks(Path::new("/nowhere"), NetworkStatus::default(), &[]);
        assert_eq!(fine.error, "");
    }
}
