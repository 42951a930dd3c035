//! Remembers which devices may have left routes in the switches between GPUs, which are a renter's until they are set
//! anew: that a device is not listed any more, and has no state to tell it, takes no route away.
//!
//! One empty file per device, named by its address. What leads to switches leaves the routes where they are when it is
//! reset, and nobody knows of a restart of the server whether that clears them: it is noted on STATE, until an operator
//! says that the power was off. A switch that is a PCI function loses them with any reset, so also as the node starts:
//! it is noted in `/run`.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use types::node::{Bdf, DeviceState, PciDevice};

use super::quarantine;
use crate::inventory::rules;

/// Where switches are noted, in the root, and where ways to them.
const SWITCHES: &str = "run/holdfast/routed";
const WAYS: &str = "state/routed";

/// What is told beside why a device stays with the host.
const ROUTES_LEFT: &str = "; a renter had it, and the routes that it left may be in the switches between GPUs: no GPU \
                           is rented until it is listed again, or the server's power was switched off and on and \
                           `holdfast node release-device NODE DEVICE` says so";

/// Devices whose renters may have left routes in the switches between GPUs. See [`rules::check_routes`].
#[derive(Debug)]
pub struct Routed {
    root: PathBuf,
    noted: BTreeSet<Bdf>,
}

impl Routed {
    /// Returns those that were noted before, but for those of `devices`, which are all of the node, that turned out to
    /// set no routes: a network card that did not tell, and does now.
    pub fn recall(root: &Path, devices: &[PciDevice]) -> Self {
        let files = [SWITCHES, WAYS].map(|folder| fs::read_dir(root.join(folder)));
        let files = files.into_iter().flatten().flatten().flatten();
        let mut noted: BTreeSet<Bdf> =
            files.filter_map(|file| file.file_name().to_str()?.parse().ok()).collect();
        for other in devices.iter().filter(|device| !device.fabric) {
            noted.remove(&other.address);
        }
        Self { root: root.to_owned(), noted }
    }

    /// Returns all of them.
    pub fn list(&self) -> &BTreeSet<Bdf> {
        &self.noted
    }

    /// Notes those of `lent`, which a machine gets, that set routes. `devices` are all of the node.
    pub fn note(&mut self, devices: &[PciDevice], lent: &[Bdf]) -> io::Result<()> {
        let sets = |device: &&PciDevice| device.fabric && lent.contains(&device.address);
        for device in devices.iter().filter(sets) {
            self.noted.insert(device.address);
            let folder = self.root.join(if rules::loses_routes(device) { SWITCHES } else { WAYS });
            fs::create_dir_all(&folder)?;
            fs::File::create(folder.join(device.address.to_string()))?.sync_all()?;
        }
        Ok(())
    }

    /// Forgets a device that was reset, unless that leaves the routes where they are.
    pub fn handle_reset(&mut self, device: &PciDevice) -> io::Result<()> {
        if rules::loses_routes(device) { self.forget(device.address) } else { Ok(()) }
    }

    /// Forgets a device, on the word of an operator or as it was reset.
    pub fn forget(&mut self, device: Bdf) -> io::Result<()> {
        if self.noted.remove(&device) {
            for folder in [SWITCHES, WAYS] {
                quarantine::remove(&self.root.join(folder).join(device.to_string()))?;
            }
        }
        Ok(())
    }

    /// Whether an operator may say of a device that its routes are gone: it is noted, and nobody gets it. That of
    /// others is not needed.
    pub fn is_left(&self, address: Bdf, devices: &[PciDevice]) -> bool {
        let given =
            |device: &PciDevice| device.address == address && rules::is_given(&device.state);
        self.noted.contains(&address) && !devices.iter().any(given)
    }

    /// Returns the devices as others are told of them: why what is noted stays, and that no GPU is to be had where no
    /// lease can name a switch or the way to those.
    pub fn shown(&self, devices: &[PciDevice]) -> Vec<PciDevice> {
        let mut shown = devices.to_vec();
        for device in shown.iter_mut().filter(|device| self.noted.contains(&device.address)) {
            // A machine may still have a switch, which is reset after it.
            let stay = !rules::loses_routes(device)
                || quarantine::recall(&self.root, device.address).is_some();
            if let (true, DeviceState::Refused { reason }) = (stay, &mut device.state) {
                reason.push_str(ROUTES_LEFT);
            }
        }
        let can_be_named = |device: &PciDevice| device.fabric && rules::is_given(&device.state);
        let Some(switch) = self.noted.first().filter(|_| !devices.iter().any(can_be_named)) else {
            return shown;
        };
        let is_free = |device: &&mut PciDevice| device.state == DeviceState::Free;
        for gpu in shown.iter_mut().filter(is_free).filter(|device| rules::is_gpu(device)) {
            let reason = format!(
                "what routes a renter of {switch} left may be in the switches between GPUs"
            );
            gpu.state = DeviceState::Refused { reason };
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use types::units::UnixSeconds;

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

    fn refused() -> DeviceState {
        DeviceState::Refused { reason: "not listed in machines.devices".to_owned() }
    }

    fn is_refused(routed: &Routed, devices: &[PciDevice]) -> bool {
        rules::check_routes(devices, routed.list(), &[devices[0].address]).is_err()
    }

    fn states(devices: &[PciDevice]) -> Vec<String> {
        devices.iter().map(|device| rules::describe(&device.state)).collect()
    }

    #[test]
    fn what_a_way_s_renter_left_outlives_the_node_s_restarts_and_the_list() {
        let root = tempfile::tempdir().expect("a folder");
        let mut devices = [device(1, GPU), device(2, WAY)];
        let [gpu, way] = [0, 1].map(|at| devices[at].address);
        let mut routed = Routed::recall(root.path(), &devices);
        routed.note(&devices, &[gpu, way]).expect("noted");
        assert_eq!(routed.shown(&devices), devices, "a lease can name both");
        assert!(!routed.is_left(way, &devices), "it is listed");
        // The provider takes it off the list, the lease ends, and the node restarts.
        devices[1].state = refused();
        fs::create_dir_all(root.path().join("run")).expect("made");
        fs::remove_dir_all(root.path().join("run")).expect("removed");
        let mut routed = Routed::recall(root.path(), &devices);
        assert!(is_refused(&routed, &devices));
        routed.handle_reset(&devices[1]).expect("nothing to write");
        assert!(is_refused(&routed, &devices), "a reset of it leaves them");
        let told = states(&routed.shown(&devices));
        assert!(
            told[0].starts_with("refused: what routes a renter of 0000:02:00.0 left"),
            "{told:?}"
        );
        assert!(
            told[1].starts_with("refused: not listed in machines.devices; a renter"),
            "{told:?}"
        );
        // An operator says that the power was off.
        assert!(routed.is_left(way, &devices) && !routed.is_left(gpu, &devices));
        routed.forget(way).expect("forgotten");
        for routed in [routed, Routed::recall(root.path(), &devices)] {
            assert!(!is_refused(&routed, &devices));
            assert_eq!(routed.shown(&devices), devices);
        }
    }

    #[test]
    fn a_card_that_tells_at_last_that_it_is_no_way_binds_nobody() {
        let root = tempfile::tempdir().expect("a folder");
        let mut devices = [device(1, GPU), device(2, WAY)];
        let card = devices[1].address;
        Routed::recall(root.path(), &devices).note(&devices, &[card]).expect("noted");
        assert!(is_refused(&Routed::recall(root.path(), &devices), &devices));
        devices[1].fabric = false;
        assert!(!is_refused(&Routed::recall(root.path(), &devices), &devices));
        // One that is out of sight has told nothing.
        assert!(is_refused(&Routed::recall(root.path(), &devices[..1]), &devices[..1]));
    }

    #[test]
    fn a_switch_counts_until_its_reset_succeeds() {
        let root = tempfile::tempdir().expect("a folder");
        let mut devices = [device(1, GPU), device(2, SWITCH)];
        let [gpu, switch] = [0, 1].map(|at| devices[at].address);
        let mut routed = Routed::recall(root.path(), &devices);
        routed.note(&devices, &[gpu, switch]).expect("noted");
        assert_eq!(*routed.list(), BTreeSet::from([switch]));
        // The provider takes it off the list, and its reset fails.
        devices[1].state = refused();
        let told = |routed: &Routed| states(&routed.shown(&devices)).remove(1);
        assert_eq!(told(&routed), "refused: not listed in machines.devices");
        quarantine::remember(root.path(), switch, UnixSeconds(1), "it is gone").expect("written");
        assert!(told(&routed).contains("a renter had it"));
        assert!(is_refused(&routed, &devices));
        routed.handle_reset(&devices[1]).expect("forgotten");
        assert!(routed.list().is_empty() && !is_refused(&routed, &devices));
        routed.note(&devices, &[switch]).expect("noted");
        // The node restarts, which resets it.
        fs::remove_dir_all(root.path().join("run")).expect("removed");
        assert!(!is_refused(&Routed::recall(root.path(), &devices), &devices));
    }
}
