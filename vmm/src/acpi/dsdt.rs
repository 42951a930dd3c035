//! The DSDT: processors are in the MADT, so it holds the PCI roots (see `roots`), the serial port
//! and `\_S5`.
//! Source: ACPI 6.5 §6.2 (device configuration), §7.4.2.6 (\_S5), §19 (AML).

use acpi_tables::{
    Aml,
    aml::{
        Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, Path, ResourceTemplate,
        Scope, ZERO,
    },
    sdt::Sdt,
};

use super::{OEM, OEM_REVISION, OEM_TABLE, Platform, bytes, roots};
use crate::{
    devices::{power, pvpanic, serial},
    layout,
};

pub(super) fn build(platform: &Platform) -> Vec<u8> {
    let mut table = Sdt::new(*b"DSDT", 36, 2, OEM, OEM_TABLE, OEM_REVISION);
    let off = Package::new(vec![&power::SLEEP_OFF, &power::SLEEP_OFF, &ZERO, &ZERO]);
    table.append_slice(&bytes(&Name::new(Path::new("_S5_"), &off)));
    let mut scope = Vec::new();
    for (number, root) in (0u8..).zip(&platform.roots) {
        scope.extend(roots::build(number, root));
    }
    scope.extend(serial_port());
    scope.extend(ecam_reservation(platform.ecam));
    scope.extend(panic_port());
    table.append_slice(&Scope::raw(Path::new("_SB_"), scope));
    table.as_slice().to_vec()
}

/// `_CRS` with these descriptors.
pub(super) fn resources(descriptors: Vec<Vec<u8>>) -> Vec<u8> {
    let descriptors: Vec<Raw> = descriptors.into_iter().map(Raw).collect();
    let children = descriptors.iter().map(|descriptor| descriptor as &dyn Aml).collect();
    bytes(&Name::new(Path::new("_CRS"), &ResourceTemplate::new(children)))
}

fn serial_port() -> Vec<u8> {
    let uid = 0u8;
    let ports = u8::try_from(serial::LENGTH).unwrap_or(8);
    let resources = resources(vec![
        bytes(&Interrupt::new(true, true, false, false, serial::GSI)),
        bytes(&IO::new(serial::BASE, serial::BASE, 0, ports)),
    ]);
    let id = EISAName::new("PNP0501");
    let parts = vec![
        bytes(&Name::new(Path::new("_HID"), &id)),
        bytes(&Name::new(Path::new("_UID"), &uid)),
        resources,
    ];
    device("COM1", parts)
}

/// Source: QEMU docs/specs/pvpanic.rst, "ACPI Interface".
fn panic_port() -> Vec<u8> {
    let resources = resources(vec![bytes(&IO::new(pvpanic::PORT, pvpanic::PORT, 1, 1))]);
    // Present, decoding, not shown to users, working (ACPI 6.5 §6.3.7).
    let status = 0x0bu8;
    let parts = vec![
        bytes(&Name::new(Path::new("_HID"), &pvpanic::HARDWARE_ID)),
        bytes(&Name::new(Path::new("_STA"), &status)),
        resources,
    ];
    device("PEVT", parts)
}

/// Ports that Linux claims for the LPC bridge's power management, whole (its `ICH_PMBASE` quirk).
const PM_CLAIM: u8 = 0x80;

/// ECAM must be reserved by a motherboard device for Linux to use it (PCI Firmware 3.3 §4.1.2).
fn ecam_reservation(ecam: u64) -> Vec<u8> {
    let base = u32::try_from(ecam).unwrap_or(u32::MAX);
    let size = u32::try_from(layout::ECAM_SIZE).unwrap_or(u32::MAX);
    let resources = resources(vec![
        bytes(&Memory32Fixed::new(true, base, size)),
        bytes(&IO::new(power::PM_BASE, power::PM_BASE, 0, PM_CLAIM)),
    ]);
    let id = EISAName::new("PNP0C02");
    let uid = 0u8;
    let parts = vec![
        bytes(&Name::new(Path::new("_HID"), &id)),
        bytes(&Name::new(Path::new("_UID"), &uid)),
        resources,
    ];
    device("MBRD", parts)
}

/// A device whose parts are AML already.
pub(super) fn device(name: &str, parts: Vec<Vec<u8>>) -> Vec<u8> {
    let parts: Vec<Raw> = parts.into_iter().map(Raw).collect();
    let children: Vec<&dyn Aml> = parts.iter().map(|part| part as &dyn Aml).collect();
    bytes(&Device::new(Path::new(name), children))
}

/// AML that is bytes already.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}
