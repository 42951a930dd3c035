//! What the server has to offer: its CPUs, its memory, and the devices that are made ready.

use std::{path::Path, sync::Arc, time::Instant};

use types::{
    config::{Machines, NodeSpec},
    node::{Bdf, DeviceState, PciDevice},
};

use crate::{
    assign::{self, lent},
    events::Event,
    init::{
        boot::chain,
        supervise::{LIVENESS, START_LIMIT},
    },
    inventory::{self, rules},
    machines::{
        cpus::{self, HostCpu},
        devices::Devices,
        init::Init,
        memory, quarantine,
    },
};

/// Reads the host's CPUs.
pub(super) fn host_cpus(spec: &NodeSpec) -> Arc<[HostCpu]> {
    let root = Path::new("/");
    cpus::read(root, &memory::nodes(root, spec.machines.huge_page)).into()
}

/// Sets huge pages aside, and returns how much memory they are, in MiB. Init hears of it when that takes long.
pub(super) fn reserve_memory(wanted: &Machines, init: &Init) -> u64 {
    let trouble = |reason| eprintln!("{}", Event::Trouble { place: "huge pages", reason });
    let (root, asked) = (Path::new("/"), wanted.huge_pages_mib.0);
    let memory = inventory::capacity(root).memory_mib;
    let most = memory::most(wanted, memory);
    if asked > most {
        let kept = wanted.reserve_mib.0;
        trouble(format!(
            "machines.huge_pages_mib = {asked}, but the server has {memory} MiB and machines.reserve_mib keeps \
             {kept}; at most {most} are set aside"
        ));
    }
    let begun = Instant::now();
    let memory::Reserved { mib, failed } = memory::reserve(root, wanted, most, || {
        // Who says nothing for a while is ended; who says something early has less time than a start may take. An init
        // that is gone takes the node down anyway.
        if begun.elapsed() >= START_LIMIT - LIVENESS {
            let _ = init.alive(Vec::new());
        }
    });
    for (node, error) in failed {
        trouble(format!("none more of NUMA node {node}: {}", chain(&error)));
    }
    let asked = asked.min(most);
    if mib < asked {
        trouble(format!("{mib} MiB could be set aside of the {asked} MiB asked for"));
    }
    mib
}

/// Reads the inventory and binds whole groups of rentable devices to vfio-pci.
pub(super) fn prepare_devices(spec: &NodeSpec) -> Vec<PciDevice> {
    let root = Path::new("/");
    if let Err(error) = assign::with_drivers(root) {
        let reason = format!("drivers of devices that are plugged in: {}", chain(&error));
        eprintln!("{}", Event::Trouble { place: "devices", reason });
    }
    if let Err(error) = assign::find_taken_out(root) {
        let reason = format!("devices that were taken out to be found anew: {}", chain(&error));
        eprintln!("{}", Event::Trouble { place: "devices", reason });
    }
    let mut devices = rules::devices(&inventory::read(root), Some(spec));
    if let Err(error) = lent::lose_absent(root) {
        let reason = format!("serial numbers of drives that are gone: {}", chain(&error));
        eprintln!("{}", Event::Trouble { place: "devices", reason });
    }
    for device in &devices {
        if let Err(error) = lent::keep_serial(root, device.address) {
            let reason = format!("serial number of {}: {}", device.address, chain(&error));
            eprintln!("{}", Event::Trouble { place: "devices", reason });
        }
    }
    for group in keeper_groups(&devices) {
        let bound = assign::bind_group(root, &group).and_then(|()| {
            group.iter().try_for_each(|address| {
                let device = devices.iter().find(|device| device.address == *address);
                device.map_or(Ok(()), |device| assign::check_answers(root, *address, device.vendor))
            })
        });
        let Err(error) = bound else { continue };
        let reason = chain(&error);
        for device in devices.iter_mut().filter(|device| group.contains(&device.address)) {
            device.state = DeviceState::Quarantined { reason: reason.clone(), since: None };
        }
    }
    for device in devices.iter_mut().filter(|device| device.state == DeviceState::Free) {
        if let Some(state) = quarantine::recall(root, device.address) {
            device.state = state;
        }
    }
    for device in &devices {
        let group = device.iommu_group.map_or("none".to_owned(), |group| group.to_string());
        eprintln!(
            "{}",
            Event::Device {
                address: device.address,
                id: format!("{:04x}:{:04x}", device.vendor, device.device),
                group,
                state: rules::describe(&device.state),
            }
        );
    }
    devices
}

fn keeper_groups(devices: &[PciDevice]) -> Vec<Vec<Bdf>> {
    Devices::new(devices.to_vec()).free_groups()
}
