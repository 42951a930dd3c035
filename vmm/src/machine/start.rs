//! What the first virtual CPU starts: a kernel that we load, with tables beside it, or firmware
//! that finds its way itself.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

use types::vm::{Boot, DiskModel, MAX_IGNITION, VmSpec};
use vm_memory::{Bytes, GuestAddress};

use super::{
    build::MAX_VIRTIO,
    chipset::{Chipset, Firmware, FwCfgPorts},
    firmware::{self, Bridges, FirmwareError, Told},
    map::AddressMap,
    tree::FIRST_VIRTIO,
};
use crate::{
    acpi::{self, AcpiError},
    boot::{self, BootError, Entry, Linux},
    devices::fw_cfg::{self, Disk, DiskKind, FwCfg, Items},
    holes, layout,
    pci::apertures::{Free, Share},
    smbios,
    sys::{kvm::Vm, memory::Ram, vfio::adopt},
    vcpu,
    vfio::dma::IovaRange,
};

/// Why a machine has nothing to start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum StartError {
    #[error("descriptor {fd}, given as {what}, is not open")]
    Descriptor { what: &'static str, fd: i32, source: io::Error },
    #[error(transparent)]
    Kernel(#[from] BootError),
    #[error(transparent)]
    Firmware(#[from] FirmwareError),
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    #[error("the SMBIOS structures need {needed} bytes; there is room for {available}")]
    Smbios { needed: u64, available: u64 },
    #[error("the tables do not fit guest memory: {0}")]
    Tables(String),
    #[error("cannot read the configuration for Ignition")]
    Ignition { source: io::Error },
    #[error(
        "the configuration for Ignition has {bytes} bytes; at most {MAX_IGNITION} are passed on"
    )]
    IgnitionSize { bytes: u64 },
}

/// Returns where there may be no RAM besides.
pub(super) fn hole(boot: &Boot) -> Option<IovaRange> {
    match boot {
        Boot::Linux { .. } => None,
        Boot::Uefi { .. } => {
            Some(IovaRange { start: layout::FIRMWARE_RAM_GAP, last: layout::RAM_GAP - 1 })
        }
    }
}

/// Returns where 32-bit PCI memory begins, right behind the RAM below 4 GiB.
pub(super) fn low(boot: &Boot) -> u64 {
    hole(boot).map_or(layout::MMIO32, |hole| hole.start)
}

/// The machine as far as it is built.
pub(super) struct Built<'a> {
    pub(super) vm: &'a Arc<Vm>,
    pub(super) ram: &'a Ram,
    pub(super) map: &'a AddressMap,
    pub(super) platform: &'a acpi::Platform,
    /// What the root complexes need, in order.
    pub(super) shares: &'a [Share],
    pub(super) slots: Vec<smbios::Slot>,
    pub(super) chipset: &'a Chipset,
}

/// What a machine starts from.
pub(super) struct Start {
    /// Where the first virtual CPU begins.
    pub(super) entry: Entry,
    /// What the machine tells of itself.
    pub(super) fw_cfg: FwCfgPorts,
    /// The firmware, if it starts from one.
    pub(super) firmware: Option<Firmware>,
}

/// Prepares guest memory or firmware.
pub(super) fn prepare(spec: &VmSpec, built: &Built<'_>) -> Result<Start, StartError> {
    let pieces = built.ram.regions.iter().map(|region| (region.address, region.size));
    let mut machine = smbios::Machine {
        id: spec.machine,
        processors: vcpu::processors(built.vm, &built.platform.cpus),
        ram: pieces.collect(),
        firmware: smbios::Firmware::None,
        slots: built.slots.clone(),
    };
    let mut items = items(spec)?;
    let (entry, firmware) = match &spec.boot {
        Boot::Linux { kernel_fd, initrd_fd, cmdline } => {
            write_tables(&machine, built)?;
            let mut kernel = File::from(take("kernel_fd", *kernel_fd)?);
            let initrd = initrd_fd.map(|fd| take("initrd_fd", fd)).transpose()?;
            let mut initrd = initrd.map(File::from);
            let initrd = initrd.as_mut();
            let acpi = layout::ACPI;
            let entry =
                boot::load(Linux { kernel: &mut kernel, initrd, cmdline, acpi }, built.ram)?;
            (entry, None)
        }
        Boot::Uefi { firmware_fd, variables_fd, pci_windows } => {
            let files = (take("firmware_fd", *firmware_fd)?, take("variables_fd", *variables_fd)?);
            machine.firmware = smbios::Firmware::Uefi;
            let told = Told {
                bridges: Bridges {
                    platform: built.platform.clone(),
                    free: free(built.map),
                    shares: built.shares.to_vec(),
                },
                windows: *pci_windows,
                machine,
                reserved: &reserved(built.map),
                disks: &disks(spec),
                ecam: built.chipset.ecam.clone(),
                smm: built.chipset.smm.as_ref(),
            };
            firmware::tell(&mut items, &told)?;
            (Entry::Reset, Some(firmware::open(files, built.vm)?))
        }
    };
    let device = Mutex::new(FwCfg::new(items));
    let fw_cfg = FwCfgPorts { device, ram: built.ram.memory.clone() };
    Ok(Start { entry, fw_cfg, firmware })
}

/// What every machine tells of itself, and where its guest tells of its own.
fn items(spec: &VmSpec) -> Result<Items, StartError> {
    let cpus = u16::try_from(spec.vcpus).unwrap_or(u16::MAX);
    let mut items = Items::new(cpus, *spec.machine.as_bytes());
    items.add_written(fw_cfg::VMCOREINFO_FILE, fw_cfg::vmcoreinfo_item());
    if let Some(fd) = spec.ignition_fd {
        let config = read_ignition(File::from(take("ignition_fd", fd)?))?;
        IGNITION_FILES.iter().for_each(|name| items.add(name, config.clone()));
    }
    Ok(items)
}

/// Files in which Ignition looks for its configuration. Source: Ignition internal/providers/qemu/qemu_fwcfg.go;
/// Flatcar's documentation, "Migrating from CoreOS Container Linux".
const IGNITION_FILES: [&str; 2] = ["opt/com.coreos/config", "opt/org.flatcar-linux/config"];

fn read_ignition(mut file: File) -> Result<Vec<u8>, StartError> {
    let failed = |source| StartError::Ignition { source };
    let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
    if bytes > MAX_IGNITION {
        return Err(StartError::IgnitionSize { bytes });
    }
    file.rewind().map_err(failed)?;
    let mut config = Vec::new();
    file.take(MAX_IGNITION).read_to_end(&mut config).map_err(failed)?;
    Ok(config)
}

fn take(what: &'static str, fd: i32) -> Result<OwnedFd, StartError> {
    adopt(fd).map_err(|source| StartError::Descriptor { what, fd, source })
}

/// Puts the ACPI tables and SMBIOS where a kernel without firmware finds them.
fn write_tables(machine: &smbios::Machine, built: &Built<'_>) -> Result<(), StartError> {
    let put = |address, bytes: &[u8]| {
        let written = built.ram.memory.write_slice(bytes, GuestAddress(address));
        written.map_err(|error| StartError::Tables(error.to_string()))
    };
    let tables = acpi::tables(built.platform);
    acpi::check_room(&tables)?;
    for table in tables {
        put(table.address, &table.bytes)?;
    }
    let structures = smbios::structures(machine);
    // The entry point is searched on multiples of 16 bytes; the structures follow.
    let address = layout::SMBIOS + 32;
    let (needed, available) = (32 + structures.len() as u64, layout::SMBIOS_END - layout::SMBIOS);
    if needed > available {
        return Err(StartError::Smbios { needed, available });
    }
    put(layout::SMBIOS, &smbios::entry_point(address, structures.len()))?;
    put(address, &structures)
}

/// Where firmware may place BARs: above 4 GiB all that the CPUs address and that is neither RAM nor
/// kept from devices. The last 64 KiB stay out: some systems mishandle an end of addresses that is
/// no multiple of it.
fn free(map: &AddressMap) -> Free {
    let end = 1u64.checked_shl(u32::from(map.bits)).unwrap_or(u64::MAX) - 0x1_0000;
    let mut start = holes::end_of(&map.ram);
    let mut high = Vec::new();
    // Holes are ascending and do not touch each other.
    let first = start;
    for hole in map.holes.list().iter().filter(|hole| hole.last >= first && hole.start < end) {
        if hole.start > start {
            high.push((start, hole.start - 1));
        }
        start = hole.last.saturating_add(1);
    }
    if start < end {
        high.push((start, end - 1));
    }
    Free { low: layout::FIRMWARE_RAM_GAP, high }
}

/// Ranges above 4 GiB that nothing may lie in: (address, length).
fn reserved(map: &AddressMap) -> Vec<(u64, u64)> {
    let end = 1u64.checked_shl(u32::from(map.bits)).unwrap_or(u64::MAX);
    let high = map.holes.list().iter().filter(|hole| hole.start >= layout::RAM_ABOVE);
    let inside = high.filter(|hole| hole.start < end);
    inside.map(|hole| (hole.start, hole.last.min(end - 1) - hole.start + 1)).collect()
}

/// The disks in the order in which they are tried, where [`super::build`] puts them.
fn disks(spec: &VmSpec) -> Vec<Disk> {
    let slots = (FIRST_VIRTIO..).take(MAX_VIRTIO);
    let kind = |model| match model {
        DiskModel::VirtioBlk => DiskKind::VirtioBlk,
        DiskModel::Nvme => DiskKind::Nvme,
    };
    let disks = slots.zip(&spec.disks);
    disks.map(|(device, disk)| Disk { device, kind: kind(disk.model) }).collect()
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::fd::IntoRawFd};

    use super::*;
    use crate::{devices::fw_cfg::tests::file, spec::tests::minimal};

    /// What a machine is told with `config` for Ignition.
    fn told(config: &[u8]) -> Result<FwCfg, StartError> {
        let mut handed = tempfile::tempfile().expect("a file");
        handed.write_all(config).expect("written");
        let spec = VmSpec { ignition_fd: Some(handed.into_raw_fd()), ..minimal(3, 64) };
        items(&spec).map(FwCfg::new)
    }

    #[test]
    fn a_configuration_for_ignition_is_where_it_is_looked_for() {
        let config = br#"{"ignition":{"version":"3.4.0"}}"#;
        let mut told = told(config).expect("small");
        assert_eq!(file(&mut told, "opt/com.coreos/config"), config);
        assert_eq!(file(&mut told, "opt/org.flatcar-linux/config"), config);
        let most = usize::try_from(MAX_IGNITION).expect("small");
        assert!(super::tests::told(&vec![b' '; most]).is_ok());
        let refusal = super::tests::told(&vec![b' '; most + 1]).err().expect("too large");
        assert!(matches!(refusal, StartError::IgnitionSize { bytes: 1_048_577 }), "{refusal}");
    }

    #[test]
    fn every_machine_is_told_of_its_processors_and_asked_for_its_note() {
        let told = FwCfg::new(items(&minimal(3, 64)).expect("nothing to read"));
        let asked = told.written(fw_cfg::VMCOREINFO_FILE).map(<[u8]>::to_vec);
        assert_eq!(asked, Some(fw_cfg::vmcoreinfo_item()));
        let closed = VmSpec { ignition_fd: Some(1 << 20), ..minimal(3, 64) };
        let refusal = items(&closed).err().expect("no descriptor");
        let named = matches!(refusal, StartError::Descriptor { what: "ignition_fd", .. });
        assert!(named, "{refusal}");
    }
}
