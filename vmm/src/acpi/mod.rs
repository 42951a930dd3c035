//! ACPI tables: what a guest must be told and nothing more. The layout is fixed by `layout`, the
//! bytes by `acpi_tables`; the FADT is ours because it names fixed hardware.
//! Source: ACPI 6.5 §5.2; PCI Firmware 3.3 §4.1.2 (MCFG), §4.5 (_OSC); Microsoft "Windows ACPI Emulated Devices
//! Table" (WAET).

mod affinity;
mod dsdt;
mod fadt;
mod madt;
mod roots;
mod spcr;

use acpi_tables::{Aml, mcfg::MCFG, rsdp::Rsdp, sdt::Sdt, xsdt::XSDT};

pub use roots::Root;

use crate::{layout, machine::numa::Node, sys::kvm::Controllers, vcpu::Cpus};

/// Who made the tables.
pub(crate) const OEM: [u8; 6] = *b"HOLDFT";
/// Which tables they are.
pub(crate) const OEM_TABLE: [u8; 8] = *b"HOLDFAST";
/// Revision of the tables.
pub(crate) const OEM_REVISION: u32 = 1;

/// What the tables describe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// Virtual CPUs.
    pub cpus: Cpus,
    /// PCI root complexes.
    pub roots: Vec<Root>,
    /// NUMA nodes; none for one that has everything.
    pub nodes: Vec<Node>,
    /// Where enhanced configuration space is.
    pub ecam: u64,
}

/// A table by its signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Where it lies.
    pub address: u64,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// Why the tables cannot be made.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ACPI tables need {needed} bytes; there is room for {available}")]
pub struct AcpiError {
    needed: u64,
    available: u64,
}

/// Builds all tables; the first is the root pointer at [`layout::ACPI`].
pub fn tables(platform: &Platform) -> Vec<Table> {
    let mut tables = Vec::new();
    // The root pointer has 36 bytes; tables follow on 64-byte steps.
    let mut next = layout::ACPI + 64;
    let mut place = |bytes: Vec<u8>| {
        let address = next;
        next = (address + bytes.len() as u64).next_multiple_of(64);
        tables.push(Table { address, bytes });
        address
    };
    let dsdt = place(dsdt::build(platform));
    let facs = place(fadt::facs());
    let fadt = place(fadt::build(facs, dsdt, platform.cpus.count()));
    let madt = place(madt::build(&platform.cpus));
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
    mcfg.add_ecam(platform.ecam, 0, 0, 255);
    let mcfg = place(bytes(&mcfg));
    let mut all = vec![fadt, madt, mcfg];
    all.push(place(affinity::pptt(&platform.cpus)));
    all.push(place(spcr::build(Controllers::of(platform.cpus.id_limit()))));
    if !platform.nodes.is_empty() {
        all.push(place(affinity::srat(&platform.nodes, &platform.cpus)));
        all.extend(affinity::slit(&platform.nodes).map(&mut place));
    }
    all.push(place(emulated_devices()));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    all.into_iter().for_each(|table| xsdt.add_entry(table));
    let xsdt = place(bytes(&xsdt));
    let root = Table { address: layout::ACPI, bytes: bytes(&Rsdp::new(OEM, xsdt)) };
    tables.insert(0, root);
    tables
}

/// WAET: the PM timer can be trusted at one reading. Windows takes it for a flawed chip's else, and reads more than
/// once, each time with an exit. Not told is that the clock goes on interrupting where nobody reads its flags (bit 0),
/// as ours does not.
fn emulated_devices() -> Vec<u8> {
    const PM_TIMER_GOOD: u32 = 1 << 1;
    let mut table = Sdt::new(*b"WAET", 36, 1, OEM, OEM_TABLE, OEM_REVISION);
    table.append(PM_TIMER_GOOD);
    table.as_slice().to_vec()
}

/// Checks that all tables fit the place that a kernel without firmware finds them at.
pub fn check_room(tables: &[Table]) -> Result<(), AcpiError> {
    let ends = tables.iter().map(|table| table.address + table.bytes.len() as u64);
    let needed = ends.max().unwrap_or(layout::ACPI) - layout::ACPI;
    let available = layout::ACPI_END - layout::ACPI;
    if needed > available { Err(AcpiError { needed, available }) } else { Ok(()) }
}

pub(crate) fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{pci::port::Windows, spec, vcpu::tests::placed};

    fn platform() -> Platform {
        let memory = Some((0xc000_0000, 0xdfff_ffff));
        let windows = Windows { io: Some((0x1000, 0xffff)), memory, prefetchable: None };
        let root =
            |first, last| Root { buses: (first, last), apertures: windows.into(), node: Some(0) };
        let node = Node { id: 0, vcpus: vec![0], memory: vec![(0, 1 << 30)], distances: vec![10] };
        let roots = vec![root(0, 15), root(16, 255)];
        Platform { cpus: Cpus::in_one_package(4), roots, nodes: vec![node], ecam: layout::ECAM }
    }

    #[test]
    fn every_table_sums_to_zero() {
        for table in tables(&platform()) {
            let sum = table.bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            let has_no_checksum = table.bytes.starts_with(b"FACS");
            assert!(sum == 0 || has_no_checksum, "{:?}", &table.bytes[..4]);
        }
    }

    #[test]
    fn systems_say_which_interrupt_controllers_they_use() {
        let tables = tables(&platform());
        let dsdt =
            &tables.iter().find(|table| table.bytes.starts_with(b"DSDT")).expect("there").bytes;
        // A method (0x14) of 12 bytes with one argument, which stores (0x70) its argument (0x68).
        let method = b"\x14\x0c_PIC\x01\x70\x68PICF";
        assert!(dsdt.windows(method.len()).any(|part| part == method));
    }

    #[test]
    fn systems_find_fw_cfg_by_its_hardware_id() {
        let tables = tables(&platform());
        let dsdt =
            &tables.iter().find(|table| table.bytes.starts_with(b"DSDT")).expect("there").bytes;
        let id = dsdt.windows(8).position(|part| part == b"QEMU0002").expect("named");
        // Sixteen bits of address, decoded: 0x510 to 0x510, steps of 1, 12 ports.
        let ports = [0x47, 1, 0x10, 5, 0x10, 5, 1, 12];
        assert!(dsdt[id..id + 64].windows(8).any(|part| part == ports));
    }

    #[test]
    fn every_processor_has_an_object_with_its_unique_id() {
        let tables = tables(&platform());
        let dsdt =
            &tables.iter().find(|table| table.bytes.starts_with(b"DSDT")).expect("there").bytes;
        // The string with its end, then _UID: zero and one have opcodes of their own, others a byte prefix.
        let id = [dsdt::PROCESSOR_ID.as_bytes(), b"\0\x08_UID"].concat();
        let found = dsdt.windows(id.len() + 2).filter(|part| part.starts_with(&id));
        let ids: Vec<&[u8]> = found.map(|part| &part[id.len()..]).collect();
        assert_eq!((ids[0][0], ids[1][0], ids[2], ids[3]), (0, 1, &[10, 2][..], &[10, 3][..]));
        assert_eq!(ids.len(), 4);
    }

    #[test]
    fn most_processors_fit() {
        let vcpus = (0..spec::MAX_VCPUS).collect();
        let threads: Vec<_> = (0..spec::MAX_VCPUS).map(|at| (at / 512, at / 16, at / 2)).collect();
        let nodes = vec![Node { vcpus, ..platform().nodes[0].clone() }];
        let platform = Platform { cpus: placed(&threads), nodes, ..platform() };
        assert_eq!(check_room(&tables(&platform)), Ok(()));
        // Firmware places them where there is room for any.
        let roots = vec![platform.roots[0].clone(); 200];
        assert!(check_room(&tables(&Platform { roots, ..platform })).is_err());
    }
}
