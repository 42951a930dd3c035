//! Host bridges: one PCI Express root for each root complex, with its buses, its windows and the
//! NUMA node that is near.
//! Source: ACPI 6.5 §6.2 (device configuration), §6.2.15 (_PXM), §9.1.1 (_DSM); PCI Firmware 3.3
//! §4.5.1 (_OSC), §4.6.5 (ignoring the firmware's PCI configuration).

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, BufferData, CreateDWordField, EISAName, Else,
    Equal, IO, If, Local, Method, Name, NotEqual, ONE, Or, Package, PackageBuilder, Path, Return,
    Store, Uuid, ZERO,
};

use super::{
    bytes,
    dsdt::{device, resources},
};
use crate::{pci::apertures::Apertures, sys::kvm};

/// Bits of the _OSC control field that the OS may take: native hotplug, PME, advanced error
/// reporting, the capability structure. Power and link management by the OS stay with us.
const OSC_GRANTED: u32 = 0b1_1101;
/// `_DSM` of PCI: the revision since which function 5 is there.
const DSM_REVISION: u8 = 1;
/// `_DSM` of PCI, function 5: whether the OS may ignore what the firmware has configured.
const DSM_KEEP_CONFIGURATION: u8 = 5;

/// One root complex.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Its bus, and the last that is its own.
    pub buses: (u8, u8),
    /// What it decodes.
    pub apertures: Apertures,
    /// Proximity domain that is near.
    pub node: Option<u32>,
}

/// Returns the device of root complex `number` with the devices `inside` it. Its `_UID` is its bus, as in firmware's
/// device paths.
pub(super) fn build(number: u8, root: &Root, inside: Vec<Vec<u8>>) -> Vec<u8> {
    let (express, plain) = (EISAName::new("PNP0A08"), EISAName::new("PNP0A03"));
    let mut parts: Vec<Vec<u8>> = vec![
        bytes(&Name::new(Path::new("_HID"), &express)),
        bytes(&Name::new(Path::new("_CID"), &plain)),
        bytes(&Name::new(Path::new("_SEG"), &ZERO)),
        bytes(&Name::new(Path::new("_BBN"), &root.buses.0)),
        bytes(&Name::new(Path::new("_UID"), &root.buses.0)),
        bytes(&Name::new(Path::new("_CCA"), &ONE)),
    ];
    if let Some(node) = &root.node {
        parts.push(bytes(&Name::new(Path::new("_PXM"), node)));
    }
    parts.push(windows(number, root));
    parts.push(interrupt_routing());
    parts.push(control_method());
    parts.push(specific_method());
    parts.extend(inside);
    device(&format!("PC{number:02X}"), parts)
}

fn windows(number: u8, root: &Root) -> Vec<u8> {
    let (flat, cached) = (AddressSpaceCacheable::NotCacheable, AddressSpaceCacheable::Cacheable);
    let (first, last) = root.buses;
    let mut all = vec![bytes(&AddressSpace::new_bus_number(u16::from(first), u16::from(last)))];
    if number == 0 {
        all.push(bytes(&IO::new(0xcf8, 0xcf8, 1, 8)));
        // What lies below are the ports of the board and of the LPC bridge's power management.
        all.push(bytes(&AddressSpace::new_io(0_u16, 0xcf7, None)));
    }
    let Apertures { io, low, high, .. } = &root.apertures;
    if let Some((base, last)) = *io {
        all.push(bytes(&AddressSpace::new_io(base, last, None)));
    }
    for (base, last) in low.iter().copied() {
        all.push(bytes(&AddressSpace::new_memory(flat, true, base, last, None)));
    }
    for (base, last) in high.iter().copied() {
        all.push(bytes(&AddressSpace::new_memory(cached, true, base, last, None)));
    }
    resources(all)
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
    let differs = NotEqual::new(&word3, &local);
    let mark = Or::new(&word1, &word1, &masked);
    let other = If::new(&differs, vec![&mark]);
    let for_us = Equal::new(&Arg(0), &uuid);
    let known = If::new(&for_us, vec![&control, &keep, &grant, &other]);
    let mark_unknown = Or::new(&word1, &word1, &unrecognised);
    let unknown = Else::new(vec![&mark_unknown]);
    let answer = Return::new(&Arg(3));
    bytes(&Method::new(Path::new("_OSC"), 4, false, vec![&status, &known, &unknown, &answer]))
}

/// `_DSM` of PCI: functions 0 (which are there) and 5 (the OS may move what we have placed: it may
/// have to, for devices that come later).
fn specific_method() -> Vec<u8> {
    let uuid = Uuid::new("E5C937D0-3553-4D7A-9117-EA4D19C3434D");
    let (index, number) = (Arg(2), DSM_KEEP_CONFIGURATION);
    let supported = BufferData::new(vec![1 | 1 << DSM_KEEP_CONFIGURATION]);
    let which = Return::new(&supported);
    let asks_which = Equal::new(&index, &ZERO);
    let functions = If::new(&asks_which, vec![&which]);
    let may_move = Return::new(&ONE);
    let asks_keep = Equal::new(&index, &number);
    let keep = If::new(&asks_keep, vec![&may_move]);
    let revision = DSM_REVISION;
    let is_old = acpi_tables::aml::GreaterThan::new(&revision, &Arg(1));
    let nothing = BufferData::new(vec![0]);
    let refuse = Return::new(&nothing);
    let old = If::new(&is_old, vec![&refuse]);
    let for_us = Equal::new(&Arg(0), &uuid);
    let known = If::new(&for_us, vec![&old, &functions, &keep]);
    let last = Return::new(&nothing);
    bytes(&Method::new(Path::new("_DSM"), 4, false, vec![&known, &last]))
}
