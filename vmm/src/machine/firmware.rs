//! A machine that starts from UEFI firmware: its two flash chips end at 4 GiB, and fw_cfg tells
//! the firmware what we decided.
//! Source: edk2 OvmfPkg/README ("OVMF Flash Layout"); OvmfPkg/Library/PlatformInitLib.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

use super::{
    chipset::{Firmware, Variables, map},
    ports::Behind,
};
use crate::{
    acpi::{self, AcpiError},
    devices::{
        flash,
        fw_cfg::{self, AcpiLoaderError, Disk, FwCfg, Items},
    },
    pci::chipset::Ecam,
    smbios,
    sys::{
        kvm::{KvmError, Place, Vm},
        memory::{Access, GuestRam},
    },
};

/// Where the chips end.
const FLASH_END: u64 = 1 << 32;
/// Most that both may have together: below is where KVM on Intel keeps pages of its own.
const FLASH_MAX: u64 = 16 << 20;

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
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    #[error(transparent)]
    Loader(#[from] AcpiLoaderError),
}

/// What the firmware is told.
pub(super) struct Told<'a> {
    pub(super) platform: acpi::Platform,
    pub(super) machine: smbios::Machine,
    pub(super) reserved: &'a [(u64, u64)],
    /// Bytes that the 64-bit BARs need.
    pub(super) window: u64,
    pub(super) disks: &'a [Disk],
    pub(super) ecam: Ecam,
    pub(super) behind: Behind,
}

/// Maps the code and the variables, and makes what the firmware is told.
pub(super) fn open(
    files: (OwnedFd, OwnedFd),
    told: &Told<'_>,
    vm: &Arc<Vm>,
    ram: &GuestRam,
) -> Result<Firmware, FirmwareError> {
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
    let fw_cfg = FwCfg::new(items(told)?);
    let code_place = Place { guest: FLASH_END - code_size, size: code_size };
    let mapping = Arc::new(map(&code, code_size)?);
    let code = vm.map(code_place, &mapping, 0, Access::ReadOnly)?;
    let place = Place { guest: code_place.guest - variables_size, size: variables_size };
    let variables = Variables::new(variables, place, vm)?.ok_or_else(wrong)?;
    Ok(Firmware {
        fw_cfg: Mutex::new(fw_cfg),
        ram: ram.clone(),
        variables: Mutex::new(variables),
        code,
    })
}

/// Sleep states that the machine has, by number: bit 7 says so, the others are the sleep type.
const SYSTEM_STATES: [u8; 6] = [0x80, 1, 2, 3, 4, 0x80 | 5];

/// Most bytes by which a root port that firmware opens makes the tables longer: three windows, at each
/// of which the first root complex has a range more, too (ACPI 6.5 §6.4.3.5.1: 46 bytes each).
const PORT_ROOM: usize = 6 * 46;

fn items(told: &Told<'_>) -> Result<Items, FirmwareError> {
    let machine = &told.machine;
    let cpus = u16::try_from(machine.vcpus).unwrap_or(u16::MAX);
    let mut items = Items::new(cpus, *machine.id.as_bytes());
    items.add("bootorder", fw_cfg::bootorder(told.disks));
    items.add("etc/e820", fw_cfg::e820(&machine.ram, told.reserved));
    items.add("opt/ovmf/X-PciMmio64Mb", fw_cfg::window_mib(told.window));
    items.add("etc/system-states", SYSTEM_STATES.to_vec());
    let structures = smbios::structures(machine);
    // The firmware puts them where it likes, and the address right.
    items.add("etc/smbios/smbios-anchor", smbios::entry_point(0, structures.len()).to_vec());
    items.add("etc/smbios/smbios-tables", structures);
    let files = fw_cfg::acpi_files(&acpi::tables(&told.platform)?)?;
    items.add("etc/table-loader", files.script);
    items.add(fw_cfg::ROOT_FILE, files.root);
    let (platform, ecam, behind) = (told.platform.clone(), told.ecam.clone(), told.behind.clone());
    if behind.roots() > 0 {
        items.add("etc/extra-pci-roots", (behind.roots() as u64).to_le_bytes().to_vec());
    }
    let room = files.tables.len() + behind.ports() * PORT_ROOM;
    // The firmware moves configuration space, and opens windows, before it asks for the tables that
    // say where they are.
    items.add_made(fw_cfg::TABLES_FILE, room, move || {
        let mut platform = acpi::Platform { ecam: ecam.base(), ..platform.clone() };
        if let Some(windows) = &mut platform.firmware {
            windows.opened = behind.opened();
        }
        let tables = acpi::tables(&platform).unwrap_or_default();
        fw_cfg::acpi_files(&tables).map(|files| files.tables).unwrap_or_default()
    });
    Ok(items)
}
