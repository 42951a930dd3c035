//! Opens what a machine's VMM needs of its devices, by the interface that the kernel has for what
//! they are to do.
//!
//! | kernel offers        | devices reach each other | interface                          |
//! |----------------------|--------------------------|------------------------------------|
//! | iommufd              | no                       | iommufd, a character device each   |
//! | containers           | yes                      | a container and the groups: it maps |
//! |                      |                          | BARs with every kernel             |
//! | containers alone     | no                       | a container and the groups         |
//!
//! Source: Linux Documentation/driver-api/vfio.rst.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::Path,
};

use types::{node::Bdf, vm::VfioInterface};

use super::{AssignError, class_of, device_path, erase, lent, open};

/// Where iommufd is, in the root.
const IOMMUFD: &str = "dev/iommu";
/// Where containers are, in the root; groups are beside it.
const CONTAINER: &str = "dev/vfio/vfio";

/// Base classes of devices that reach each other's memory: displays, which GPUs are, and processing
/// accelerators. Network controllers reach theirs, as GPUDirect RDMA has them do, and so do NVMe controllers,
/// which are a subclass: GPUDirect Storage has them write into a GPU's memory, in guests too (NVIDIA AI Enterprise,
/// "GPUDirect RDMA and GPUDirect Storage"). Source of the numbers: PCI Code and ID Assignment.
const MEMORIES: [u32; 2] = [0x03, 0x12];
const NETWORK: u32 = 0x02;
const NVME: u32 = 0x01_08;

/// Whether a machine's devices reach each other's BARs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peers {
    /// They do not.
    Apart,
    /// They do.
    Reach,
}

/// Open descriptors of a machine's devices.
#[derive(Debug)]
pub struct Handover {
    /// By which interface they are handed over.
    pub interface: VfioInterface,
    /// Whether they reach each other.
    pub peers: Peers,
    /// The IOMMU: iommufd, or a container.
    pub iommu: OwnedFd,
    /// Each device, or with groups its group, in the order asked for.
    pub devices: Vec<(Bdf, OwnedFd)>,
}

/// Opens bound devices, those that a machine starts with; they are whole ([`super::make_whole`]). Only they reach
/// each other's BARs: one that
/// is attached later reaches guest memory alone, by whichever interface is there. Drives are noted as a
/// renter's before.
pub fn hand_over(root: &Path, devices: &[Bdf]) -> Result<Handover, AssignError> {
    let (interface, peers) = ways(root, devices);
    note_drives(root, devices)?;
    let open_shared = |path: &str| open_file(root, devices, path);
    let (iommu, devices) = match interface {
        VfioInterface::Cdev => {
            let each = devices.iter().map(|device| Ok((*device, open(root, *device)?)));
            (open_shared(IOMMUFD)?, each.collect::<Result<_, AssignError>>()?)
        }
        VfioInterface::Group => (open_shared(CONTAINER)?, open_groups(root, devices)?),
    };
    Ok(Handover { interface, peers, iommu, devices })
}

/// Returns by which interface a machine that starts with these devices gets them, and those that come later.
pub fn interface(root: &Path, devices: &[Bdf]) -> VfioInterface {
    ways(root, devices).0
}

fn ways(root: &Path, devices: &[Bdf]) -> (VfioInterface, Peers) {
    let classes: Vec<u32> = devices.iter().filter_map(|device| class_of(root, *device)).collect();
    let containers = root.join(CONTAINER).exists();
    let peers = if containers { peers(&classes) } else { Peers::Apart };
    (choose(peers, root.join(IOMMUFD).exists()), peers)
}

/// Opens one bound device, which is whole, for a machine that runs, by the interface that it was started with. A
/// drive is noted as a renter's before.
pub fn open_one(
    root: &Path,
    device: Bdf,
    interface: VfioInterface,
) -> Result<OwnedFd, AssignError> {
    note_drives(root, &[device])?;
    match interface {
        VfioInterface::Cdev => open(root, device),
        VfioInterface::Group => {
            let opened = open_groups(root, &[device])?.into_iter().next();
            opened.map(|(_, group)| group).ok_or(AssignError::NoCharacterDevice { device })
        }
    }
}

/// Notes those of a machine's devices that are drives.
pub(super) fn note_drives(root: &Path, devices: &[Bdf]) -> Result<(), AssignError> {
    let mut drives = devices.iter().filter(|device| erase::is_drive(root, **device));
    drives.try_for_each(|device| lent::remember(root, *device))
}

/// Returns whether devices of these classes can use each other's memory: two that have some, or one
/// and a controller that reaches it.
fn peers(classes: &[u32]) -> Peers {
    let memories = classes.iter().filter(|class| MEMORIES.contains(&(*class >> 16))).count();
    let reaches = |class: &&u32| *class >> 16 == NETWORK || *class >> 8 == NVME;
    let others = classes.iter().filter(reaches).count();
    if memories > 0 && memories + others > 1 { Peers::Reach } else { Peers::Apart }
}

fn choose(peers: Peers, iommufd: bool) -> VfioInterface {
    match (peers, iommufd) {
        (Peers::Apart, true) => VfioInterface::Cdev,
        (Peers::Reach, _) | (Peers::Apart, false) => VfioInterface::Group,
    }
}

/// Opens the group of each device; a group opens once only, so devices of one share it.
fn open_groups(root: &Path, devices: &[Bdf]) -> Result<Vec<(Bdf, OwnedFd)>, AssignError> {
    let mut groups: BTreeMap<String, OwnedFd> = BTreeMap::new();
    let mut opened = Vec::new();
    for device in devices.iter().copied() {
        let link = fs::read_link(device_path(root, device).join("iommu_group"));
        let name =
            link.ok().and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
        let name = name.ok_or(AssignError::NoCharacterDevice { device })?;
        let path = format!("dev/vfio/{name}");
        let group = match groups.entry(name) {
            std::collections::btree_map::Entry::Occupied(group) => group.into_mut(),
            std::collections::btree_map::Entry::Vacant(group) => {
                group.insert(open_file(root, &[device], &path)?)
            }
        };
        let own = group.try_clone().map_err(|source| AssignError::Open { device, path, source })?;
        opened.push((device, own));
    }
    Ok(opened)
}

fn open_file(root: &Path, devices: &[Bdf], path: &str) -> Result<OwnedFd, AssignError> {
    let file: io::Result<File> = File::options().read(true).write(true).open(root.join(path));
    let device = devices.first().copied();
    let none = Bdf { segment: 0, bus: 0, device: 0, function: 0 };
    file.map(OwnedFd::from).map_err(|source| AssignError::Open {
        device: device.unwrap_or(none),
        path: format!("/{path}"),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const GPU: u32 = 0x03_02_00;
    const NIC: u32 = 0x02_07_00;
    const DRIVE: u32 = 0x01_08_02;
    const SATA: u32 = 0x01_06_01;

    #[test]
    fn only_devices_with_memory_have_peers() {
        assert_eq!(peers(&[GPU, GPU]), Peers::Reach);
        assert_eq!(peers(&[GPU, NIC]), Peers::Reach);
        assert_eq!(peers(&[GPU, DRIVE]), Peers::Reach);
        assert_eq!(peers(&[GPU, SATA]), Peers::Apart);
        assert_eq!(peers(&[DRIVE, DRIVE, NIC]), Peers::Apart);
        assert_eq!(peers(&[NIC, NIC]), Peers::Apart);
        assert_eq!(peers(&[GPU]), Peers::Apart);
    }

    /// A host with containers, and two devices of one class in one group.
    fn host(class: &str, iommufd: bool) -> (tempfile::TempDir, [Bdf; 2]) {
        let root = tempfile::tempdir().expect("a folder");
        let devices = [0, 1].map(|function| Bdf { segment: 0, bus: 1, device: 0, function });
        fs::create_dir_all(root.path().join("dev/vfio/devices")).expect("made");
        for name in [CONTAINER, "dev/vfio/7", "dev/vfio/devices/vfio0"] {
            fs::write(root.path().join(name), "").expect("written");
        }
        if iommufd {
            fs::write(root.path().join(IOMMUFD), "").expect("written");
        }
        for device in devices {
            let path = device_path(root.path(), device);
            fs::create_dir_all(path.join("vfio-dev/vfio0")).expect("made");
            fs::write(path.join("class"), class).expect("written");
            symlink("../../../kernel/iommu_groups/7", path.join("iommu_group")).expect("linked");
        }
        (root, devices)
    }

    #[test]
    fn the_interface_is_the_kernels_and_the_devices() {
        let chosen = |class, iommufd| {
            let (root, devices) = host(class, iommufd);
            let handover = hand_over(root.path(), &devices).expect("opened");
            assert_eq!(handover.devices.len(), 2);
            assert_eq!(interface(root.path(), &devices), handover.interface);
            let drives = class.starts_with("0x0108");
            assert!(devices.iter().all(|device| lent::is_lent(root.path(), *device) == drives));
            (handover.interface, handover.peers)
        };
        assert_eq!(chosen("0x010802\n", true), (VfioInterface::Cdev, Peers::Apart));
        assert_eq!(chosen("0x030200\n", true), (VfioInterface::Group, Peers::Reach));
        assert_eq!(chosen("0x010802\n", false), (VfioInterface::Group, Peers::Apart));
    }

    /// What is attached later reaches nobody, so a machine that begins without devices needs no
    /// container for them.
    #[test]
    fn devices_that_come_later_do_not_choose() {
        let (root, _) = host("0x030200\n", true);
        let handover = hand_over(root.path(), &[]).expect("opened");
        assert_eq!((handover.interface, handover.peers), (VfioInterface::Cdev, Peers::Apart));
    }
}
