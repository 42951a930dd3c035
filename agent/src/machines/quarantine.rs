//! Remembers which devices are quarantined, and which may have left routes in the switches between GPUs, as long as
//! the node is on: the agent may be restarted meanwhile, and must not offer them again. A power cycle resets them for
//! good and forgets it all, but for drives that were not erased, which `assign::lent` knows: their erasing is tried
//! once more.
//!
//! One file per device, named by its address: the time in Unix seconds, a line feed, the reason. Those for routes, in
//! a folder of their own, are empty.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use types::{
    node::{Bdf, DeviceState, PciDevice},
    units::UnixSeconds,
};

use crate::inventory::rules;

/// Where the files are, in the root.
const FOLDER: &str = "run/holdfast/quarantine";
/// Where those are that tell of routes.
const ROUTED: &str = "run/holdfast/routed";

/// What is told beside why a device stays with the host.
const ROUTES_LEFT: &str = "; a renter had it, and the routes that it left may be in the switches between GPUs: no GPU \
                           is rented until the server's power was switched off and on, or this is listed again";

/// Remembers a device.
pub fn remember(root: &Path, device: Bdf, since: UnixSeconds, reason: &str) -> io::Result<()> {
    let folder = root.join(FOLDER);
    fs::create_dir_all(&folder)?;
    // Renamed into place, so that a reader never sees half of it.
    let new = folder.join(".new");
    fs::write(&new, format!("{}\n{reason}", since.0))?;
    fs::rename(new, folder.join(device.to_string()))
}

/// Forgets a device, which answers again.
pub fn forget(root: &Path, device: Bdf) -> io::Result<()> {
    remove(&root.join(FOLDER).join(device.to_string()))
}

fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns the state of a device that is remembered.
pub fn recall(root: &Path, device: Bdf) -> Option<DeviceState> {
    let text = fs::read_to_string(root.join(FOLDER).join(device.to_string())).ok()?;
    let (since, reason) = text.split_once('\n').unwrap_or(("", &text));
    let since = since.parse().ok().map(UnixSeconds);
    Some(DeviceState::Quarantined { reason: reason.to_owned(), since })
}

/// Devices whose renters may have left routes in the switches between GPUs since the node was turned on, whatever became
/// of the devices: what is not listed any more has no other state to tell it. See [`rules::check_routes`].
#[derive(Debug)]
pub struct Routed {
    root: PathBuf,
    noted: BTreeSet<Bdf>,
}

impl Routed {
    /// Returns those that earlier agents noted.
    pub fn recall(root: &Path) -> Self {
        let files = fs::read_dir(root.join(ROUTED)).into_iter().flatten().flatten();
        let noted = files.filter_map(|file| file.file_name().to_str()?.parse().ok()).collect();
        Self { root: root.to_owned(), noted }
    }

    /// Returns all of them.
    pub fn list(&self) -> &BTreeSet<Bdf> {
        &self.noted
    }

    /// Notes those of `lent`, which a machine gets, that set routes. `devices` are all of the node.
    pub fn note(&mut self, devices: &[PciDevice], lent: &[Bdf]) -> io::Result<()> {
        let sets = |device: &&PciDevice| device.fabric && lent.contains(&device.address);
        let new: Vec<Bdf> = devices.iter().filter(sets).map(|device| device.address).collect();
        self.noted.extend(&new);
        let folder = self.root.join(ROUTED);
        new.iter().try_for_each(|device| {
            fs::create_dir_all(&folder)?;
            fs::write(folder.join(device.to_string()), "")
        })
    }

    /// Forgets a device that was reset, unless that leaves the routes where they are.
    pub fn handle_reset(&mut self, device: &PciDevice) -> io::Result<()> {
        if rules::loses_routes(device) && self.noted.remove(&device.address) {
            return remove(&self.root.join(ROUTED).join(device.address.to_string()));
        }
        Ok(())
    }

    /// Says it of those that stay with the host. A machine may still have a switch, which is reset after it.
    pub fn tell(&self, devices: &mut [PciDevice]) {
        for device in devices.iter_mut().filter(|device| self.noted.contains(&device.address)) {
            let stay = !rules::loses_routes(device) || recall(&self.root, device.address).is_some();
            if let (true, DeviceState::Refused { reason }) = (stay, &mut device.state) {
                reason.push_str(ROUTES_LEFT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: (u16, u32) = (0x10de, 0x03_0200);
    const SWITCH: (u16, u32) = (0x10de, 0x06_8000);
    const WAY: (u16, u32) = (0x15b3, 0x02_0700);

    fn device(bus: u8, (vendor, class): (u16, u32)) -> PciDevice {
        PciDevice {
            address: Bdf { segment: 0, bus, device: 0, function: 0 },
            vendor,
            device: 0x2901,
            class,
            iommu_group: Some(bus.into()),
            numa_node: None,
            linked: Vec::new(),
            fabric: class != GPU.1,
            state: DeviceState::Free,
        }
    }

    fn is_refused(devices: &[PciDevice], gpu: Bdf, root: &Path) -> bool {
        rules::check_routes(devices, Routed::recall(root).list(), &[gpu]).is_err()
    }

    #[test]
    fn what_a_way_s_renter_left_outlives_the_agent_and_the_list() {
        let root = tempfile::tempdir().expect("a folder");
        let mut devices = [device(1, GPU), device(2, WAY)];
        let [gpu, way] = [0, 1].map(|at| devices[at].address);
        Routed::recall(root.path()).note(&devices, &[gpu, way]).expect("noted");
        // The provider takes it off the list, which starts the agent again, and the lease ends.
        let reason = "not listed in machines.devices".to_owned();
        devices[1].state = DeviceState::Refused { reason };
        assert!(is_refused(&devices, gpu, root.path()));
        Routed::recall(root.path()).handle_reset(&devices[1]).expect("nothing to write");
        assert!(is_refused(&devices, gpu, root.path()), "a reset of it leaves them");
        Routed::recall(root.path()).tell(&mut devices);
        assert_eq!(devices[0].state, DeviceState::Free);
        let DeviceState::Refused { reason } = &devices[1].state else { panic!("{devices:?}") };
        assert!(reason.starts_with("not listed in machines.devices; a renter had it"), "{reason}");
        // The node was off.
        fs::remove_dir_all(root.path().join("run")).expect("removed");
        assert!(!is_refused(&devices, gpu, root.path()));
    }

    #[test]
    fn a_switch_counts_until_its_reset_succeeds() {
        let root = tempfile::tempdir().expect("a folder");
        let mut devices = [device(1, GPU), device(2, SWITCH)];
        let [gpu, switch] = [0, 1].map(|at| devices[at].address);
        let mut routed = Routed::recall(root.path());
        routed.note(&devices, &[gpu, switch]).expect("noted");
        assert_eq!(*routed.list(), BTreeSet::from([switch]));
        // The provider takes it off the list, and its reset fails.
        devices[1].state = DeviceState::Refused { reason: "not listed".to_owned() };
        let told = |routed: &Routed| {
            let mut devices = devices.clone();
            routed.tell(&mut devices);
            rules::describe(&devices[1].state)
        };
        assert_eq!(told(&routed), "refused: not listed");
        remember(root.path(), switch, UnixSeconds(1), "it is gone").expect("written");
        assert!(told(&routed).contains("a renter had it"));
        assert!(is_refused(&devices, gpu, root.path()));
        routed.handle_reset(&devices[1]).expect("forgotten");
        assert!(routed.list().is_empty() && !is_refused(&devices, gpu, root.path()));
    }

    #[test]
    fn a_device_is_remembered_until_it_is_forgotten() {
        let root = tempfile::tempdir().expect("a folder");
        let device: Bdf = "0000:41:00.0".parse().expect("an address");
        assert_eq!(recall(root.path(), device), None);
        remember(root.path(), device, UnixSeconds(1_700_000_000), "no\nanswer").expect("written");
        let reason = "no\nanswer".to_owned();
        let since = Some(UnixSeconds(1_700_000_000));
        let expected = DeviceState::Quarantined { reason, since };
        assert_eq!(recall(root.path(), device), Some(expected));
        forget(root.path(), device).expect("removed");
        forget(root.path(), device).expect("nothing to remove");
        assert_eq!(recall(root.path(), device), None);
    }
}
