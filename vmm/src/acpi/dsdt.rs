//! The DSDT: the processors, the PCI roots (see `roots`), the serial port, the clock, fw_cfg, `\_S5`, `\_PIC`, and
//! whom an operating system tells that it sleeps.
//! Source: ACPI 6.5 §5.8.1 (\_PIC), §6.2 (device configuration), §7.4.2.6 (\_S5), §8.4 (processors), §9.1.1 (_DSM), §19 (AML); Intel
//! "Low Power S0 Idle" (document 599443), §3 "_DSM"; Microsoft "Modern standby firmware
//! notifications".

use acpi_tables::{
    Aml,
    aml::{
        AddressSpace, AddressSpaceCacheable, Arg, BufferData, Device, EISAName, Equal, Field,
        FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Method, Name,
        OpRegion, OpRegionSpace, Package, Path, ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
    },
    sdt::Sdt,
};

use super::{OEM, OEM_REVISION, OEM_TABLE, Platform, bytes, roots};
use crate::{
    devices::{cmos, fw_cfg, power, pvpanic, serial},
    layout,
    pci::chipset::LPC_SLOT,
};

/// Hardware id of a processor.
pub(super) const PROCESSOR_ID: &str = "ACPI0007";

pub(super) fn build(platform: &Platform) -> Vec<u8> {
    let mut table = Sdt::new(*b"DSDT", 36, 2, OEM, OEM_TABLE, OEM_REVISION);
    let off = Package::new(vec![&power::SLEEP_OFF, &power::SLEEP_OFF, &ZERO, &ZERO]);
    table.append_slice(&bytes(&Name::new(Path::new("_S5_"), &off)));
    table.append_slice(&interrupt_model());
    let mut scope: Vec<u8> = (0..platform.cpus.count()).flat_map(processor).collect();
    for (number, root) in (0u8..).zip(&platform.roots) {
        let inside = if number == 0 { vec![lpc_bridge()] } else { Vec::new() };
        scope.extend(roots::build(number, root, inside));
    }
    scope.extend(ecam_reservation(platform.ecam));
    scope.extend(sleep_listener());
    table.append_slice(&Scope::raw(Path::new("_SB_"), scope));
    table.as_slice().to_vec()
}

/// Takes note which interrupt controllers the system uses, which changes nothing: `_PRT` has inputs of the I/O APIC
/// only. The specification lets a machine have no such method, but illumos then does without I/O APIC.
fn interrupt_model() -> Vec<u8> {
    let (note, model) = (Path::new("PICF"), Arg(0));
    let take = Store::new(&note, &model);
    let method = Method::new(Path::new("_PIC"), 1, false, vec![&take]);
    [bytes(&Name::new(Path::new("PICF"), &ZERO)), bytes(&method)].concat()
}

/// The LPC bridge, and what has ports behind it. These are the first root's, which has them from its own window (ACPI 6.5
/// §6.4.3.5): beside it, Windows would find the same ports given out twice.
fn lpc_bridge() -> Vec<u8> {
    let address = u32::from(LPC_SLOT) << 16;
    let parts = vec![
        bytes(&Name::new(Path::new("_ADR"), &address)),
        serial_port(),
        clock(),
        power_ports(),
        panic_port(),
        fw_cfg_ports(),
    ];
    device("LPC_", parts)
}

/// `_CRS` with these descriptors.
pub(super) fn resources(descriptors: Vec<Vec<u8>>) -> Vec<u8> {
    let descriptors: Vec<Raw> = descriptors.into_iter().map(Raw).collect();
    let children = descriptors.iter().map(|descriptor| descriptor as &dyn Aml).collect();
    bytes(&Name::new(Path::new("_CRS"), &ResourceTemplate::new(children)))
}

/// What each processor of the MADT has beside it, with the same unique id: inventories and drivers, as Windows'
/// and FreeBSD's, know processors by these.
fn processor(id: u32) -> Vec<u8> {
    let parts = vec![
        bytes(&Name::new(Path::new("_HID"), &PROCESSOR_ID)),
        bytes(&Name::new(Path::new("_UID"), &id)),
    ];
    device(&format!("C{id:03X}"), parts)
}

/// An ISA interrupt, edge-triggered and active high: the short descriptor (ACPI 6.5 §6.4.2.1), which is all that
/// illumos of before 2021 reads of such devices.
fn isa_interrupt(line: u32) -> Vec<u8> {
    let [low, high] = 1u16.checked_shl(line).unwrap_or(0).to_le_bytes();
    vec![0x22, low, high]
}

fn serial_port() -> Vec<u8> {
    let uid = 0u8;
    let ports = u8::try_from(serial::LENGTH).unwrap_or(8);
    let resources = resources(vec![
        isa_interrupt(serial::GSI),
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

/// The clock with CMOS memory. It is edge-triggered, as ISA interrupts are.
fn clock() -> Vec<u8> {
    let ports = u8::try_from(cmos::LENGTH).unwrap_or(2);
    let resources = resources(vec![
        bytes(&IO::new(cmos::BASE, cmos::BASE, 1, ports)),
        isa_interrupt(cmos::GSI),
    ]);
    let id = EISAName::new("PNP0B00");
    device("RTC_", vec![bytes(&Name::new(Path::new("_HID"), &id)), resources])
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

/// What a system finds fw_cfg by. Source: QEMU docs/specs/fw_cfg.rst, "ACPI Interface".
fn fw_cfg_ports() -> Vec<u8> {
    let ports = u8::try_from(fw_cfg::LENGTH).unwrap_or(12);
    let resources = resources(vec![bytes(&IO::new(fw_cfg::BASE, fw_cfg::BASE, 1, ports))]);
    // Present, decoding, not shown to users, working (ACPI 6.5 §6.3.7).
    let status = 0x0bu8;
    let parts = vec![
        bytes(&Name::new(Path::new("_HID"), &fw_cfg::HARDWARE_ID)),
        bytes(&Name::new(Path::new("_STA"), &status)),
        resources,
    ];
    device("FWCF", parts)
}

/// Functions of the sleep listener's `_DSM`: which devices have to sleep first, on the way into sleep, and on the way
/// out.
const SLEEP_CONSTRAINTS: u8 = 1;
const SLEEP_ENTRY: u8 = 5;
const SLEEP_EXIT: u8 = 6;
/// Who defines these functions with the same numbers: Intel, and Microsoft for every platform. Linux asks
/// for the first on Intel's processors, for the second on AMD's.
const SLEEP_INTERFACES: [(&str, Constraints); 2] = [
    ("C4EB40A0-6CD2-11E2-BCFD-0800200C9A66", Constraints::None),
    ("11E00D56-CE64-47CE-837B-1F898F9AA461", Constraints::Untold),
];

/// Which devices have to sleep first, as an interface tells it: FreeBSD asks Intel's for them and takes it ill where it
/// does not know; Microsoft's has no such function.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Constraints {
    None,
    Untold,
}

/// The system power management controller: it is told of a sleep in which processors idle, the only one
/// there is. The fixed description does not call that sleep as good as S3, so nobody takes to it by
/// himself.
fn sleep_listener() -> Vec<u8> {
    let (offset, length) = (power::SLEEP_PORT, 1u8);
    let region = OpRegion::new(Path::new("SLPR"), OpRegionSpace::SystemIO, &offset, &length);
    let named = |name| vec![FieldEntry::Named(name, 8)];
    let field = Field::new(
        Path::new("SLPR"),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        named(*b"SLPN"),
    );
    let id = EISAName::new("PNP0D80");
    let uid = 0u8;
    let parts = vec![
        bytes(&Name::new(Path::new("_HID"), &id)),
        bytes(&Name::new(Path::new("_UID"), &uid)),
        bytes(&region),
        bytes(&field),
        sleep_method(),
    ];
    device("SLPC", parts)
}

fn sleep_method() -> Vec<u8> {
    let functions = 1 | 1 << SLEEP_ENTRY | 1 << SLEEP_EXIT;
    let supported = |more: u8| BufferData::new(vec![functions | more, 0, 0, 0]);
    let (most, all) = (supported(0), supported(1 << SLEEP_CONSTRAINTS));
    let (most, all) = (Return::new(&most), Return::new(&all));
    let none = Package::new(Vec::new());
    let none = Return::new(&none);
    let (register, asleep) = (Path::new("SLPN"), power::ASLEEP);
    let (enter, leave) = (Store::new(&register, &asleep), Store::new(&register, &ZERO));
    let index = Arg(2);
    let asks = |function: &'static dyn Aml| Equal::new(&index, function);
    let (which_is, first_is) = (asks(&ZERO), asks(&SLEEP_CONSTRAINTS));
    let (entry_is, exit_is) = (asks(&SLEEP_ENTRY), asks(&SLEEP_EXIT));
    let (most, all) = (If::new(&which_is, vec![&most]), If::new(&which_is, vec![&all]));
    let none = If::new(&first_is, vec![&none]);
    let entry = If::new(&entry_is, vec![&enter]);
    let exit = If::new(&exit_is, vec![&leave]);
    let mut body: Vec<Raw> = Vec::new();
    for (interface, constraints) in SLEEP_INTERFACES {
        let uuid = Uuid::new(interface);
        let for_us = Equal::new(&Arg(0), &uuid);
        let answers: Vec<&dyn Aml> = match constraints {
            Constraints::None => vec![&all, &none, &entry, &exit],
            Constraints::Untold => vec![&most, &entry, &exit],
        };
        body.push(Raw(bytes(&If::new(&for_us, answers))));
    }
    // As long as the answer above: Linux reads four bytes, however few there are.
    let nothing = BufferData::new(vec![0; 4]);
    body.push(Raw(bytes(&Return::new(&nothing))));
    let children = body.iter().map(|part| part as &dyn Aml).collect();
    bytes(&Method::new(Path::new("_DSM"), 4, true, children))
}

/// Ports that Linux claims for the LPC bridge's power management, whole (its `ICH_PMBASE` quirk).
const PM_CLAIM: u8 = 0x80;

/// The bridge's power management.
fn power_ports() -> Vec<u8> {
    let resources = resources(vec![bytes(&IO::new(power::PM_BASE, power::PM_BASE, 0, PM_CLAIM))]);
    let id = EISAName::new("PNP0C02");
    let uid = 1u8;
    let parts = vec![
        bytes(&Name::new(Path::new("_HID"), &id)),
        bytes(&Name::new(Path::new("_UID"), &uid)),
        resources,
    ];
    device("PMIO", parts)
}

/// ECAM must be reserved by a motherboard device for Linux to use it (PCI Firmware 3.3 §4.1.2).
fn ecam_reservation(ecam: u64) -> Vec<u8> {
    let (flat, last) = (AddressSpaceCacheable::NotCacheable, ecam + (layout::ECAM_SIZE - 1));
    let resources = resources(vec![bytes(&AddressSpace::new_memory(flat, true, ecam, last, None))]);
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
