//! What a renter may choose of a machine's hardware within its lease, what the node made of it, and
//! what comes and goes while the machine runs.
//!
//! Everything is bounded by the lease's shape: disks together by its disk space, devices by its
//! devices. Where a machine is placed is the node's decision and no part of a request.

use serde::{Deserialize, Serialize};
use types::{
    ids::ContentId,
    node::{Bdf, MachineShape},
    units::Mebibytes,
    vm::{DiskModel, HyperV, MemoryBacking, VfioInterface},
};

/// Most spare ports of a machine.
pub const MAX_SPARE_PORTS: u8 = 8;

/// Ports of a machine's first root complex: those of devices and spare ones together. More devices share
/// one, behind a switch.
pub const MAX_PORTS: usize = 14;

/// Most attachments that a node remembers of a machine.
pub const MAX_ATTACHMENTS: usize = 16;

/// Longest name of a disk; it is the disk's serial number too.
pub const MAX_DISK_NAME: usize = 20;

/// What a renter chooses of the hardware.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// What the guest sees the machine's own disk as, and the one with cloud-init's seed.
    #[serde(default)]
    pub disk_model: DiskModel,
    /// Whether the guest finds the interfaces that Windows knows from Hyper-V.
    #[serde(default)]
    pub hyperv: HyperV,
    /// Size of the machine's own disk; all of the lease's disk space unless given. What is left is
    /// for disks that are attached later.
    #[serde(default)]
    pub disk_mib: Option<Mebibytes>,
    /// Empty ports for disks that are attached while the machine runs, at most [`MAX_SPARE_PORTS`].
    #[serde(default)]
    pub spare_ports: u8,
    /// Devices of the lease that are not there when the machine starts, each with a port into which
    /// it can be attached.
    #[serde(default)]
    pub plugged_later: Vec<Bdf>,
}

/// Why a machine cannot have the hardware that is asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum HardwareError {
    #[error(
        "hardware.disk_mib is {wanted}; the lease grants {granted} MiB of disk, and 1 is least"
    )]
    Disk { wanted: u64, granted: u64 },
    #[error("hardware.spare_ports is {found}; 0 to {MAX_SPARE_PORTS} are possible")]
    SparePorts { found: u8 },
    #[error(
        "{devices} devices and {spare} spare ports are more than the {MAX_PORTS} ports of a machine; with more \
         devices than that, there are no spare ports, and all devices are there from the start"
    )]
    Ports { devices: usize, spare: u8 },
    #[error(
        "hardware.plugged_later names {device}, which is not one of the lease's devices, or twice"
    )]
    PluggedLater { device: Bdf },
}

impl Hardware {
    /// Checks what is asked for against what the lease grants.
    pub fn check(&self, shape: &MachineShape) -> Result<(), HardwareError> {
        let granted = shape.disk_mib.0;
        let wanted = self.own_disk(shape).0;
        if wanted > granted || (wanted == 0 && granted > 0) {
            return Err(HardwareError::Disk { wanted, granted });
        }
        if self.spare_ports > MAX_SPARE_PORTS {
            return Err(HardwareError::SparePorts { found: self.spare_ports });
        }
        let (devices, spare) = (shape.devices.len(), self.spare_ports);
        // More devices than ports share one, which nothing can come to later.
        let ports = spare > 0 || !self.plugged_later.is_empty();
        if ports && devices + usize::from(spare) > MAX_PORTS {
            return Err(HardwareError::Ports { devices, spare });
        }
        for (number, device) in self.plugged_later.iter().enumerate() {
            let twice = self.plugged_later[..number].contains(device);
            if twice || !shape.devices.contains(device) {
                return Err(HardwareError::PluggedLater { device: *device });
            }
        }
        Ok(())
    }

    /// Returns the size of the machine's own disk; 0 for none.
    pub fn own_disk(&self, shape: &MachineShape) -> Mebibytes {
        self.disk_mib.unwrap_or(shape.disk_mib)
    }

    /// Returns the devices that are there when the machine starts.
    pub fn cold_devices(&self, shape: &MachineShape) -> Vec<Bdf> {
        let cold = shape.devices.iter().filter(|device| !self.plugged_later.contains(device));
        cold.copied().collect()
    }
}

/// Where on its node a machine is, since its latest start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Host CPU of each virtual one, in order, which no other machine was promised; empty when they
    /// run anywhere.
    pub cpus: Vec<u32>,
    /// Where memory comes from, in the order of its addresses; empty for wherever there is room.
    pub memory: Vec<MemoryPlace>,
    /// NUMA nodes that the guest sees; 0 when it is told of none.
    pub numa_nodes: u32,
    /// By which of the kernel's interfaces devices are handed over, when there are any.
    pub interface: Option<VfioInterface>,
    /// Whether devices reach each other's memory.
    pub peer_to_peer: bool,
    /// GPUs whose driver is told that they reach each other directly, one list per clique.
    pub cliques: Vec<Vec<Bdf>>,
    /// What is not as it would be best, one sentence each, with the reason.
    pub notes: Vec<String>,
}

/// Memory of one kind and place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlace {
    /// NUMA node of the host; none for wherever there is room.
    pub node: Option<u32>,
    /// How much.
    pub memory_mib: Mebibytes,
    /// What it is made of.
    pub backing: MemoryBacking,
}

/// Asks for something to be attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum Attach {
    /// A disk.
    Disk(DiskWanted),
    /// A device of the lease that is not in the machine.
    Pci {
        /// Its address on the node.
        address: Bdf,
    },
}

/// A disk that is attached while the machine runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskWanted {
    /// Its name: 1 to [`MAX_DISK_NAME`] lower-case letters, digits and hyphens. A disk that was
    /// detached comes back under its name with what was on it.
    pub name: String,
    /// Size of a new disk, out of the lease's disk space; not given for one that is there already or
    /// that is read from `content`.
    #[serde(default)]
    pub size_mib: Option<Mebibytes>,
    /// What the guest sees it as.
    #[serde(default)]
    pub model: DiskModel,
    /// What a new disk holds at first. Without a size the guest reads the content itself and cannot
    /// change it, as an installer's medium; all such media of a machine have together at most as many
    /// bytes as its lease grants of memory and disk space.
    #[serde(default)]
    pub content: Option<ContentId>,
}

/// Why something is not attached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AttachError {
    #[error(
        "{name:?} is no name of a disk; 1 to {MAX_DISK_NAME} lower-case letters, digits and hyphens are"
    )]
    Name { name: String },
    #[error("size_mib of disk {name} is 0; at least 1 is needed")]
    Size { name: String },
}

impl Attach {
    /// Returns the name by which it is detached.
    pub fn id(&self) -> String {
        match self {
            Self::Disk(disk) => disk.name.clone(),
            Self::Pci { address } => address.to_string(),
        }
    }

    /// Checks what can be checked without the machine.
    pub fn check(&self) -> Result<(), AttachError> {
        let Self::Disk(disk) = self else { return Ok(()) };
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let length = (1..=MAX_DISK_NAME).contains(&disk.name.len());
        if !length || !disk.name.bytes().all(fits) {
            return Err(AttachError::Name {
                name: disk.name.chars().take(MAX_DISK_NAME).collect(),
            });
        }
        if disk.size_mib == Some(Mebibytes(0)) {
            return Err(AttachError::Size { name: disk.name.clone() });
        }
        Ok(())
    }
}

/// Something that is attached, or was and is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Name by which it is detached and attached again.
    pub id: String,
    /// What it is.
    pub device: Attach,
    /// How far it is.
    pub state: AttachmentState,
    /// The same in a sentence; empty when there is nothing to add.
    #[serde(default)]
    pub detail: String,
}

/// How far an attachment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachmentState {
    /// It is being prepared, or the machine is off; it comes with the next start.
    Pending,
    /// It is in its slot; the guest gives it no power yet.
    Waiting,
    /// The guest reaches it.
    Attached,
    /// The guest was asked to let go of it.
    Leaving,
    /// It is out of the machine; what is on the disk is kept.
    Detached,
    /// It could not be attached; `detail` says why.
    Failed,
}

/// Everything that is attached to a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachments {
    /// In the order of their first attaching.
    pub devices: Vec<Attachment>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
    const SECOND: Bdf = Bdf { segment: 0, bus: 2, device: 0, function: 0 };

    fn shape(disk: u64, devices: &[Bdf]) -> MachineShape {
        MachineShape {
            vcpus: 1,
            memory_mib: Mebibytes(64),
            disk_mib: Mebibytes(disk),
            devices: devices.to_vec(),
            disk_limit: None,
        }
    }

    #[test]
    fn the_lease_bounds_what_is_chosen() {
        let all = shape(100, &[FIRST, SECOND]);
        let check = |hardware: Hardware| hardware.check(&all);
        assert_eq!(check(Hardware::default()), Ok(()));
        let disk = |mib| Hardware { disk_mib: Some(Mebibytes(mib)), ..Hardware::default() };
        assert_eq!(check(disk(100)), Ok(()));
        assert_eq!(check(disk(101)), Err(HardwareError::Disk { wanted: 101, granted: 100 }));
        assert_eq!(check(disk(0)), Err(HardwareError::Disk { wanted: 0, granted: 100 }));
        let later =
            |devices: &[Bdf]| Hardware { plugged_later: devices.to_vec(), ..Hardware::default() };
        assert_eq!(check(later(&[SECOND])), Ok(()));
        assert_eq!(later(&[SECOND]).cold_devices(&all), [FIRST]);
        let device = SECOND;
        assert_eq!(check(later(&[SECOND, SECOND])), Err(HardwareError::PluggedLater { device }));
        let foreign = later(&[SECOND]).check(&shape(0, &[FIRST]));
        assert_eq!(foreign, Err(HardwareError::PluggedLater { device }));
        assert_eq!(Hardware::default().check(&shape(0, &[])), Ok(()));
    }

    #[test]
    fn ports_are_bounded() {
        let spare = |spare_ports| Hardware { spare_ports, ..Hardware::default() };
        let many: Vec<Bdf> = (0..10).map(|bus| Bdf { bus, ..FIRST }).collect();
        assert_eq!(spare(4).check(&shape(0, &many)), Ok(()));
        let refusal = HardwareError::Ports { devices: 10, spare: 5 };
        assert_eq!(spare(5).check(&shape(0, &many)), Err(refusal));
        assert_eq!(spare(9).check(&shape(0, &[])), Err(HardwareError::SparePorts { found: 9 }));
        let board: Vec<Bdf> = (0..20).map(|bus| Bdf { bus, ..FIRST }).collect();
        assert_eq!(spare(0).check(&shape(0, &board)), Ok(()));
        let refusal = |spare| Err(HardwareError::Ports { devices: 20, spare });
        assert_eq!(spare(1).check(&shape(0, &board)), refusal(1));
        let later = Hardware { plugged_later: vec![FIRST], ..Hardware::default() };
        assert_eq!(later.check(&shape(0, &board)), refusal(0));
    }

    #[test]
    fn names_of_disks_are_names_of_files_too() {
        let named = |name: &str| {
            let disk = DiskWanted {
                name: name.to_owned(),
                size_mib: Some(Mebibytes(1)),
                model: DiskModel::default(),
                content: None,
            };
            Attach::Disk(disk).check()
        };
        assert_eq!(["data", "a-1", "x"].map(named), [const { Ok(()) }; 3]);
        let long = "a".repeat(21);
        let wrong = ["", "..", "a/b", "A", "a b", &long].map(named);
        assert!(wrong.iter().all(|result| matches!(result, Err(AttachError::Name { .. }))));
        let empty = r#"{"kind":"disk","name":"data","size_mib":0}"#;
        let empty: Attach = serde_json::from_str(empty).expect("a request");
        assert_eq!(empty.check(), Err(AttachError::Size { name: "data".to_owned() }));
    }
}
