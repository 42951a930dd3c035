//! The DSDT: processors are in the MADT, so it holds the PCI root, the serial port and `\_S5`.
//! Source: ACPI 6.5 §6.2 (device configuration), §7.4.2.6 (\_S5), §19 (AML); PCI Firmware 3.3
//! §4.5.1 (_OSC).

use acpi_tables::{
    Aml,
    aml::{
        AddressSpace, AddressSpaceCacheable, And, Arg, CreateDWordField, Device, EISAName, Else,
        Equal, IO, If, Interrupt, Local, Memory32Fixed, Method, Name, ONE, Or, Package,
        PackageBuilder, Path, ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
    },
    sdt::Sdt,
};

use super::{OEM, OEM_REVISION, OEM_TABLE, Platform, bytes};
use crate::{
    devices::{power, pvpanic, serial},
    layout,
    sys::kvm,
};

/// Bits of the _OSC control field that the OS may take: native hotplug, PME, advanced error
/// reporting, the capability structure. Power and link management by the OS stay with us.
const OSC_GRANTED: u32 = 0b1_1101;

pub(super) fn build(platform: &Platform) -> Vec<u8> {
    let mut table = Sdt::new(*b"DSDT", 36, 2, OEM, OEM_TABLE, OEM_REVISION);
    let off = Package::new(vec![&power::SLEEP_OFF, &power::SLEEP_OFF, &ZERO, &ZERO]);
    table.append_slice(&bytes(&Name::new(Path::new("_S5_"), &off)));
    let root = pci_root(platform);
    let port = serial_port();
    let ecam = ecam_reservation(platform.ecam);
    let mut scope = root;
    scope.extend(port);
    scope.extend(ecam);
    scope.extend(panic_port());
    table.append_slice(&Scope::raw(Path::new("_SB_"), scope));
    table.as_slice().to_vec()
}

fn pci_root(platform: &Platform) -> Vec<u8> {
    let (flat, cached) = (AddressSpaceCacheable::NotCacheable, AddressSpaceCacheable::Cacheable);
    let mut windows = vec![
        bytes(&AddressSpace::new_bus_number(0u16, 255u16)),
        bytes(&IO::new(0xcf8, 0xcf8, 1, 8)),
        bytes(&AddressSpace::new_io(layout::PIO, layout::PIO_LAST, None)),
    ];
    let small = |address| u32::try_from(address).unwrap_or(u32::MAX);
    for (first, last) in platform.low_memory() {
        let window = AddressSpace::new_memory(flat, true, small(first), small(last), None);
        windows.push(bytes(&window));
    }
    for (first, last) in platform.high_memory() {
        windows.push(bytes(&AddressSpace::new_memory(cached, true, first, last, None)));
    }
    let resources = resources(windows);
    let routing = interrupt_routing();
    let control = control_method();
    let express = EISAName::new("PNP0A08");
    let plain = EISAName::new("PNP0A03");
    let parts: Vec<Vec<u8>> = vec![
        bytes(&Name::new(Path::new("_HID"), &express)),
        bytes(&Name::new(Path::new("_CID"), &plain)),
        bytes(&Name::new(Path::new("_SEG"), &ZERO)),
        bytes(&Name::new(Path::new("_BBN"), &ZERO)),
        bytes(&Name::new(Path::new("_UID"), &ZERO)),
        bytes(&Name::new(Path::new("_CCA"), &ONE)),
        resources,
        routing,
        control,
    ];
    device("PCI0", parts)
}

/// `_CRS` with these descriptors.
fn resources(descriptors: Vec<Vec<u8>>) -> Vec<u8> {
    let descriptors: Vec<Raw> = descriptors.into_iter().map(Raw).collect();
    let children = descriptors.iter().map(|descriptor| descriptor as &dyn Aml).collect();
    bytes(&Name::new(Path::new("_CRS"), &ResourceTemplate::new(children)))
}

/// `_PRT`: the same formula as `kvm::pci_gsi`.
fn interrupt_routing() -> Vec<u8> {
    let mut table = PackageBuilder::new();
    for slot in 0..32u8 {
        for pin in 0..4u8 {
            let address = u32::from(slot) << 16 | 0xffff;
            let gsi = kvm::pci_gsi(slot, pin + 1);
            table.add_element(&Package::new(vec![&address, &pin, &ZERO, &gsi]));
        }
    }
    bytes(&Name::new(Path::new("_PRT"), &table))
}

/// `_OSC`: grants [`OSC_GRANTED`] of what the OS asks for, and says so when it asked for more.
fn control_method() -> Vec<u8> {
    let uuid = Uuid::new("33DB4D5B-1FF7-401C-9657-7441C03DD766");
    let zero = ZERO;
    let eight = 8u8;
    let (word1, word3) = (Path::new("CDW1"), Path::new("CDW3"));
    let status = CreateDWordField::new(&word1, &Arg(3), &zero);
    let control = CreateDWordField::new(&word3, &Arg(3), &eight);
    let local = Local(0);
    let (granted, masked, unrecognised) = (OSC_GRANTED, 0x10u32, 0x04u32);
    let keep = Store::new(&local, &word3);
    let grant = And::new(&word3, &local, &granted);
    let differs_same = Equal::new(&word3, &local);
    let mark = Or::new(&word1, &word1, &masked);
    let nothing = Store::new(&local, &word3);
    let same = If::new(&differs_same, vec![&nothing]);
    let other = Else::new(vec![&mark]);
    let for_us = Equal::new(&Arg(0), &uuid);
    let known = If::new(&for_us, vec![&control, &keep, &grant, &same, &other]);
    let mark_unknown = Or::new(&word1, &word1, &unrecognised);
    let unknown = Else::new(vec![&mark_unknown]);
    let answer = Return::new(&Arg(3));
    bytes(&Method::new(Path::new("_OSC"), 4, false, vec![&status, &known, &unknown, &answer]))
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

/// ECAM must be reserved by a motherboard device for Linux to use it (PCI Firmware 3.3 §4.1.2).
fn ecam_reservation(ecam: u64) -> Vec<u8> {
    let base = u32::try_from(ecam).unwrap_or(u32::MAX);
    let size = u32::try_from(layout::ECAM_SIZE).unwrap_or(u32::MAX);
    let pm = u8::try_from(power::PM_LENGTH).unwrap_or(12);
    let resources = resources(vec![
        bytes(&Memory32Fixed::new(true, base, size)),
        bytes(&IO::new(power::PM_BASE, power::PM_BASE, 0, pm)),
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
fn device(name: &str, parts: Vec<Vec<u8>>) -> Vec<u8> {
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
