//! ACPI tables: what a guest must be told and nothing more. The layout is fixed by `layout`, the
//! bytes by `acpi_tables`; the FADT is ours because it names fixed hardware.
//! Source: ACPI 6.5 §5.2; PCI Firmware 3.3 §4.1.2 (MCFG), §4.5 (_OSC).

mod affinity;
mod dsdt;
mod fadt;
mod madt;
mod roots;

use acpi_tables::{Aml, mcfg::MCFG, rsdp::Rsdp, xsdt::XSDT};

pub use roots::Root;

use crate::{layout, machine::numa::Node, pci::port::Windows};

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
    pub vcpus: u32,
    /// PCI root complexes.
    pub roots: Vec<Root>,
    /// NUMA nodes; none for one that has everything.
    pub nodes: Vec<Node>,
    /// Where enhanced configuration space is.
    pub ecam: u64,
    /// With firmware, which places BARs itself: where it may, all behind the first root complex.
    pub firmware: Option<FirmwareWindows>,
}

/// Where firmware may place BARs: all that holds nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirmwareWindows {
    /// End of RAM below 4 GiB, at most.
    pub low: u64,
    /// Ranges above 4 GiB: first and last address.
    pub high: Vec<(u64, u64)>,
    /// What firmware has opened behind each root complex but the first, in their order. The first has
    /// all else.
    pub opened: Vec<Vec<Windows>>,
}

/// What is left of `ranges` without `taken`; both are first and last, ascending among themselves.
fn without(ranges: Vec<(u64, u64)>, taken: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let cut = |ranges: Vec<(u64, u64)>, (first, last): (u64, u64)| {
        let pieces = ranges.into_iter().flat_map(move |(start, end)| {
            let before = first.checked_sub(1).map(|before| (start, before.min(end)));
            let behind = last.checked_add(1).map(|behind| (behind.max(start), end));
            before.into_iter().chain(behind)
        });
        pieces.filter(|(start, end)| start <= end).collect()
    };
    taken.iter().copied().fold(ranges, cut)
}

impl FirmwareWindows {
    /// Returns what the first root complex decodes of the ports from `first` to `last`.
    fn ports(&self, (first, last): (u16, u16)) -> Vec<(u16, u16)> {
        let all = vec![(first.into(), last.into())];
        let narrow =
            |(first, last): (u64, u64)| Some((first.try_into().ok()?, last.try_into().ok()?));
        let ports = |windows: &Windows| windows.io.map(|(first, last)| (first.into(), last.into()));
        without(all, &self.taken(ports)).into_iter().filter_map(narrow).collect()
    }

    /// Returns what the first root complex decodes above 4 GiB.
    fn above(&self) -> Vec<(u64, u64)> {
        without(self.high.clone(), &self.taken(|windows| windows.prefetchable))
    }

    fn taken(&self, of: impl Fn(&Windows) -> Option<(u64, u64)>) -> Vec<(u64, u64)> {
        let mut taken: Vec<_> = self.opened.iter().flatten().filter_map(of).collect();
        taken.sort_unstable();
        taken
    }

    /// Returns where BARs may lie below 4 GiB, first and last address: around configuration space.
    fn below(&self, ecam: u64) -> Vec<(u32, u32)> {
        let behind = ecam.saturating_add(layout::ECAM_SIZE).max(self.low);
        let pieces = [(self.low, ecam), (behind, layout::FIRMWARE_MMIO32_END)];
        let within = pieces.map(|(start, end)| (start, end.min(layout::FIRMWARE_MMIO32_END)));
        let some = within.into_iter().filter(|(start, end)| start < end);
        let some = some.map(|(start, end)| (start, end - 1)).collect();
        let memory = |windows: &Windows| windows.memory.map(|(a, b)| (a.into(), b.into()));
        // Prefetchable windows may lie here, too.
        let left = without(without(some, &self.taken(memory)), &self.taken(|w| w.prefetchable));
        left.into_iter()
            .filter_map(|(first, last)| Some((first.try_into().ok()?, last.try_into().ok()?)))
            .collect()
    }
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
pub fn tables(platform: &Platform) -> Result<Vec<Table>, AcpiError> {
    let mut tables = Vec::new();
    // The root pointer has 36 bytes; tables follow on 64-byte steps.
    let mut next = layout::ACPI + 64;
    let mut place = |bytes: Vec<u8>| {
        let address = next;
        next = (address + bytes.len() as u64).next_multiple_of(64);
        tables.push(Table { address, bytes });
        address
    };
    let facs = place(fadt::facs());
    let fadt = place(fadt::build(facs, 0));
    let madt = place(madt::build(platform.vcpus));
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
    mcfg.add_ecam(platform.ecam, 0, 0, 255);
    let mcfg = place(bytes(&mcfg));
    let mut all = vec![fadt, madt, mcfg];
    all.push(place(affinity::pptt(platform.vcpus)));
    if !platform.nodes.is_empty() {
        all.push(place(affinity::srat(&platform.nodes)));
        all.extend(affinity::slit(&platform.nodes).map(&mut place));
    }
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    all.into_iter().for_each(|table| xsdt.add_entry(table));
    let xsdt = place(bytes(&xsdt));
    // The last: what firmware opens makes it longer, and nothing else may move then.
    let dsdt = place(dsdt::build(platform));
    for table in tables.iter_mut().filter(|table| table.address == fadt) {
        table.bytes = fadt::build(facs, dsdt);
    }
    let (needed, available) = (next - layout::ACPI, layout::ACPI_END - layout::ACPI);
    if needed > available {
        return Err(AcpiError { needed, available });
    }
    let root = Table { address: layout::ACPI, bytes: bytes(&Rsdp::new(OEM, xsdt)) };
    tables.insert(0, root);
    Ok(tables)
}

pub(crate) fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;

    fn platform() -> Platform {
        let memory = Some((0xc000_0000, 0xdfff_ffff));
        let windows = Windows { io: Some((0x1000, 0xffff)), memory, prefetchable: None };
        let root = |first, last| Root { buses: (first, last), windows, node: Some(0) };
        let node = Node { id: 0, vcpus: vec![0], memory: vec![(0, 1 << 30)], distances: vec![10] };
        let roots = vec![root(0, 15), root(16, 255)];
        Platform { vcpus: 4, roots, nodes: vec![node], ecam: layout::ECAM, firmware: None }
    }

    #[test]
    fn every_table_sums_to_zero() {
        for table in tables(&platform()).expect("room") {
            let sum = table.bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            let has_no_checksum = table.bytes.starts_with(b"FACS");
            assert!(sum == 0 || has_no_checksum, "{:?}", &table.bytes[..4]);
        }
    }

    #[test]
    fn firmware_may_place_bars_around_configuration_space() {
        let windows = FirmwareWindows {
            low: 0x8000_0000,
            high: vec![(1 << 32, (1 << 40) - 1)],
            opened: Vec::new(),
        };
        let low = [(0x8000_0000, 0xdfff_ffff), (0xf000_0000, 0xfbff_ffff)];
        assert_eq!(windows.below(0xe000_0000), low);
        assert_eq!(windows.below(0xb000_0000)[1], (0xc000_0000, 0xfbff_ffff));
        assert_eq!(windows.below(1 << 34), [(0x8000_0000, 0xfbff_ffff)]);
        let firmware = Some(windows);
        let tables = tables(&Platform { firmware, ..platform() }).expect("room");
        assert!(tables.iter().any(|table| table.bytes.starts_with(b"DSDT")));
    }

    #[test]
    fn what_firmware_opens_behind_other_roots_is_theirs_alone() {
        let first = Windows {
            io: Some((0x6000, 0x6fff)),
            memory: Some((0x9000_0000, 0x900f_ffff)),
            prefetchable: Some((0x9010_0000, 0x901f_ffff)),
        };
        let high = Some((0x10_0000_0000, 0x1f_ffff_ffff));
        let second = Windows { io: None, memory: None, prefetchable: high };
        let windows = FirmwareWindows {
            low: 0x8000_0000,
            high: vec![(1 << 32, (1 << 40) - 1)],
            opened: vec![vec![second, first]],
        };
        assert_eq!(windows.ports((0x1000, 0xffff)), [(0x1000, 0x5fff), (0x7000, 0xffff)]);
        let low = [(0x8000_0000, 0x8fff_ffff), (0x9020_0000, 0xdfff_ffff)];
        assert_eq!(windows.below(0xe000_0000)[..2], low);
        let above = [(1 << 32, 0xf_ffff_ffff), (0x20_0000_0000, (1 << 40) - 1)];
        assert_eq!(windows.above(), above);

        let before = FirmwareWindows { opened: Vec::new(), ..windows.clone() };
        let tables = |firmware| tables(&Platform { firmware, ..platform() }).expect("room");
        let (before, after) = (tables(Some(before)), tables(Some(windows)));
        let (last, others) = before.split_last().expect("many");
        assert!(last.bytes.starts_with(b"DSDT"));
        assert_eq!(after[..others.len()], *others);
        // The root that is not the first tells what was opened: its descriptor of the window.
        let window = [0x10_0000_0000u64, 0x1f_ffff_ffff].map(u64::to_le_bytes).concat();
        let tells = |table: &Table| table.bytes.windows(16).any(|bytes| bytes == window);
        assert!(tells(&after[others.len()]) && !tells(last));
    }

    #[test]
    fn ranges_are_cut_at_both_ends() {
        let range = || vec![(10, 20)];
        assert_eq!(without(range(), &[(0, 9), (21, 30)]), [(10, 20)]);
        assert_eq!(without(range(), &[(0, 12), (14, 14), (20, 25)]), [(13, 13), (15, 19)]);
        assert!(without(range(), &[(0, u64::MAX)]).is_empty());
    }

    #[test]
    fn most_processors_fit() {
        let vcpus = (0..spec::MAX_VCPUS).collect();
        let nodes = vec![Node { vcpus, ..platform().nodes[0].clone() }];
        let platform = Platform { vcpus: spec::MAX_VCPUS, nodes, ..platform() };
        assert!(tables(&platform).is_ok());
    }
}
