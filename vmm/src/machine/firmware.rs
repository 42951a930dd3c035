//! A machine that starts from UEFI firmware: its two flash chips end at 4 GiB, and fw_cfg tells
//! the firmware what we decided.
//! Source: edk2 OvmfPkg/README ("OVMF Flash Layout"); OvmfPkg/Library/PlatformInitLib; UEFI PI 1.8 vol. 3 §3.2.1
//! (firmware volumes).

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::{Arc, Mutex},
};

use types::vm::PciWindows;

use super::{
    chipset::{Firmware, Variables, map},
    smm::SmmWatch,
};
use crate::{
    acpi,
    devices::{
        flash,
        fw_cfg::{self, AcpiFiles, AcpiLoaderError, Disk, Items},
        power,
    },
    pci::{
        apertures::{self, Free, Share},
        chipset::Ecam,
    },
    smbios,
    sys::{
        kvm::{KvmError, Place, Vm},
        memory::Access,
    },
};

/// Where the chips end.
const FLASH_END: u64 = 1 << 32;
/// Most that both may have together: below is where KVM on Intel keeps pages of its own.
const FLASH_MAX: u64 = 16 << 20;

/// What a firmware volume's header has at byte 40. Volumes of a file begin at whole blocks.
const VOLUME: [u8; 4] = *b"_FVH";
const VOLUME_AT: u64 = 40;

/// Why firmware cannot be started from.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum FirmwareError {
    #[error("cannot read the size of the firmware's {file}")]
    Size { file: &'static str, source: io::Error },
    #[error(
        "the firmware's code has {code} bytes and its variables {variables}; each has to be whole \
         blocks of 4096, both together at most 16 MiB"
    )]
    Sizes { code: u64, variables: u64 },
    #[error("cannot read the firmware's code")]
    Read { source: io::Error },
    #[error(
        "the firmware's code holds no UEFI firmware volume; a PC BIOS or another boot loader finds no \
         console here and would wait without a word: give a build of OVMF (of Debian's, OVMF_CODE_4M.fd)"
    )]
    NotUefi,
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Loader(#[from] AcpiLoaderError),
}

/// The root complexes of a machine whose firmware places BARs.
#[derive(Clone)]
pub(super) struct Bridges {
    /// The platform, with the root complexes as the VMM would have them.
    pub(super) platform: acpi::Platform,
    /// What they share.
    pub(super) free: Free,
    /// What each needs.
    pub(super) shares: Vec<Share>,
}

impl Bridges {
    /// Returns the platform when configuration space is at `ecam`.
    fn at(&self, ecam: u64) -> acpi::Platform {
        let mut platform = acpi::Platform { ecam, ..self.platform.clone() };
        let all = apertures::share(&self.free, ecam, &self.shares);
        for (root, apertures) in platform.roots.iter_mut().zip(all) {
            root.apertures = apertures;
        }
        platform
    }

    /// Returns how many bytes the VMM took for 64-bit BARs of the first root complex.
    fn window(&self) -> u64 {
        let placed = self.shares.first().and_then(|share| share.placed.prefetchable);
        placed.map_or(0, |(base, last)| last - base + 1)
    }
}

/// What the firmware is told.
pub(super) struct Told<'a> {
    pub(super) bridges: Bridges,
    pub(super) windows: PciWindows,
    pub(super) machine: smbios::Machine,
    pub(super) reserved: &'a [(u64, u64)],
    pub(super) disks: &'a [Disk],
    pub(super) ecam: Ecam,
    pub(super) smm: Option<&'a Arc<SmmWatch>>,
}

/// Maps the code and the variables.
pub(super) fn open(files: (OwnedFd, OwnedFd), vm: &Arc<Vm>) -> Result<Firmware, FirmwareError> {
    let (mut code, mut variables) = (File::from(files.0), File::from(files.1));
    let size = |file: &mut File, name| {
        file.seek(SeekFrom::End(0)).map_err(|source| FirmwareError::Size { file: name, source })
    };
    let code_size = size(&mut code, "code")?;
    let variables_size = size(&mut variables, "variables")?;
    let wrong = || FirmwareError::Sizes { code: code_size, variables: variables_size };
    let whole = |size: u64| size > 0 && size.is_multiple_of(flash::BLOCK) && size <= FLASH_MAX;
    if !whole(code_size) || !whole(variables_size) || code_size + variables_size > FLASH_MAX {
        return Err(wrong());
    }
    if !has_volume(&code, code_size)? {
        return Err(FirmwareError::NotUefi);
    }
    let code_place = Place { guest: FLASH_END - code_size, size: code_size };
    let mapping = Arc::new(map(&code, code_size)?);
    let code = vm.map(code_place, &mapping, 0, Access::ReadOnly)?;
    let place = Place { guest: code_place.guest - variables_size, size: variables_size };
    let variables = Variables::new(variables, place, vm)?.ok_or_else(wrong)?;
    Ok(Firmware { variables: Mutex::new(variables), code })
}

/// Returns whether a file of `size` bytes holds a firmware volume.
fn has_volume(code: &File, size: u64) -> Result<bool, FirmwareError> {
    let mut found = [0; VOLUME.len()];
    for block in (0..size).step_by(usize::try_from(flash::BLOCK).unwrap_or(usize::MAX)) {
        code.read_exact_at(&mut found, block + VOLUME_AT)
            .map_err(|source| FirmwareError::Read { source })?;
        if found == VOLUME {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sleep states that the machine has, by number: bit 7 says so, the others are the sleep type.
const SYSTEM_STATES: [u8; 6] = [0x80, 1, 2, 3, 4, 0x80 | power::SLEEP_OFF];

/// Adds what firmware is told.
pub(super) fn tell(items: &mut Items, told: &Told<'_>) -> Result<(), FirmwareError> {
    let machine = &told.machine;
    items.add("bootorder", fw_cfg::bootorder(told.disks));
    items.add("etc/e820", fw_cfg::e820(&machine.ram, told.reserved));
    items.add("etc/system-states", SYSTEM_STATES.to_vec());
    let structures = smbios::structures(machine);
    // The firmware puts them where it likes, and the address right.
    items.add("etc/smbios/smbios-anchor", smbios::entry_point(0, structures.len()).to_vec());
    items.add("etc/smbios/smbios-tables", structures);
    let now = told.bridges.at(told.ecam.base());
    let (bridges, ecam) = (told.bridges.clone(), told.ecam.clone());
    match told.windows {
        PciWindows::Found => {
            let window = told.bridges.window();
            items.add("opt/ovmf/X-PciMmio64Mb", fw_cfg::window_mib(window));
        }
        PciWindows::Told => {
            let size = fw_cfg::hardware_info(&now.roots).len();
            items.add_made("etc/hardware-info", size, move || {
                fw_cfg::hardware_info(&bridges.at(ecam.base()).roots)
            });
        }
    }
    add_tables(items, &told.bridges, &told.ecam, told.smm)
}

/// How much longer the ACPI tables may get, in bytes: with configuration space elsewhere, root complexes
/// have other windows below 4 GiB, of 26 bytes each.
const TABLES_SPARE: usize = 4096;

/// Adds the ACPI tables. The firmware moves configuration space before it asks for them, and what they
/// say of it and around it, and how long each is, follows.
/// Whoever asks for the first of them is told to `smm`.
fn add_tables(
    items: &mut Items,
    bridges: &Bridges,
    ecam: &Ecam,
    smm: Option<&Arc<SmmWatch>>,
) -> Result<(), FirmwareError> {
    let files = fw_cfg::acpi_files(&acpi::tables(&bridges.at(ecam.base())))?;
    let mut add = |name, size, part: fn(AcpiFiles) -> Vec<u8>| {
        let (bridges, ecam, smm) = (bridges.clone(), ecam.clone(), smm.cloned());
        items.add_made(name, size, move || {
            smm.iter().for_each(|watch| watch.tables_asked_for());
            let tables = acpi::tables(&bridges.at(ecam.base()));
            fw_cfg::acpi_files(&tables).map(part).unwrap_or_default()
        });
    };
    add(fw_cfg::SCRIPT_FILE, files.script.len(), |files| files.script);
    add(fw_cfg::ROOT_FILE, files.root.len(), |files| files.root);
    add(fw_cfg::TABLES_FILE, files.tables.len() + TABLES_SPARE, |files| files.tables);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::{
        devices::fw_cfg::tests::{file, follow},
        events::Events,
        layout,
        pci::{
            apertures::Room,
            chipset::{HostBridge, SmramWatch},
            function::PciFunction,
        },
    };

    /// The first root complex, and another that has a window of its own.
    fn bridges(ecam: &Ecam) -> Bridges {
        let root = |first, last| acpi::Root {
            buses: (first, last),
            apertures: apertures::Apertures::default(),
            node: None,
        };
        let roots = vec![root(0, 127), root(128, 255)];
        let platform = acpi::Platform {
            cpus: crate::vcpu::Cpus::in_one_package(2),
            roots,
            nodes: Vec::new(),
            ecam: ecam.base(),
        };
        let mut low = Room::default();
        low.add(64 << 20);
        let free = Free { low: layout::FIRMWARE_RAM_GAP, high: vec![(8 << 30, (1 << 40) - 1)] };
        Bridges { platform, free, shares: vec![Share { low, ..Share::default() }; 2] }
    }

    /// Returns the tables as firmware has them that puts configuration space at `base`.
    fn tables(base: u64) -> Vec<(String, Vec<u8>)> {
        let ecam = Ecam::default();
        let mut items = Items::new(2, [0; 16]);
        add_tables(&mut items, &bridges(&ecam), &ecam, None).expect("room");
        let mut told = fw_cfg::FwCfg::new(items);
        HostBridge::new(ecam).write_config(0x60, &(base | 1).to_le_bytes());
        let [script, root, tables] = [fw_cfg::SCRIPT_FILE, fw_cfg::ROOT_FILE, fw_cfg::TABLES_FILE]
            .map(|name| file(&mut told, name));
        follow(AcpiFiles { script, root, tables })
    }

    fn table(base: u64, name: &str) -> Vec<u8> {
        let mut all = tables(base).into_iter();
        all.find(|(signature, _)| signature == name).expect("there").1
    }

    #[test]
    fn tables_are_whole_wherever_configuration_space_is() {
        let places = [layout::ECAM, 0x8000_0000, 0xf000_0000, 0x8_0000_0000];
        let lengths = places.map(|base| table(base, "DSDT").len());
        assert!(lengths.iter().any(|length| *length != lengths[0]), "{lengths:?}");
        for base in places {
            assert_eq!(table(base, "MCFG")[44..52], base.to_le_bytes());
            let names: Vec<String> = tables(base).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, ["FACP", "APIC", "MCFG", "PPTT", "SPCR", "WAET", "FACS", "DSDT"]);
        }
    }

    #[test]
    fn a_file_is_firmware_if_a_volume_begins_at_one_of_its_blocks() {
        let mut code = tempfile::tempfile().expect("a file");
        let mut bytes = vec![0; 3 * 4096];
        bytes[4096 + 41..][..4].copy_from_slice(b"_FVH");
        code.write_all(&bytes).expect("written");
        assert!(!has_volume(&code, 3 * 4096).expect("read"), "not where a header has it");
        code.write_at(b"_FVH", 2 * 4096 + 40).expect("written");
        assert!(has_volume(&code, 3 * 4096).expect("read"));
    }

    #[test]
    fn firmware_that_has_asked_for_tables_may_ask_for_anything() {
        let (ecam, events) = (Ecam::default(), Events::default());
        let watch = Arc::new(SmmWatch::new(events.clone()));
        let mut items = Items::new(2, [0; 16]);
        add_tables(&mut items, &bridges(&ecam), &ecam, Some(&watch)).expect("room");
        let mut told = fw_cfg::FwCfg::new(items);
        file(&mut told, fw_cfg::SCRIPT_FILE);
        watch.asked();
        assert_eq!(watch.problem(), None);
    }

    #[test]
    fn configuration_space_is_reserved_wherever_it_is() {
        let reserved = |base: u64| {
            let (last, length) = (base + layout::ECAM_SIZE - 1, layout::ECAM_SIZE);
            let numbers = [base, last, 0, length].map(u64::to_le_bytes);
            let dsdt = table(base, "DSDT");
            dsdt.windows(32).filter(|bytes| *bytes == numbers.as_flattened()).count()
        };
        assert_eq!([layout::ECAM, 0x8000_0000, 0x8_0000_0000].map(reserved), [1; 3]);
    }
}
