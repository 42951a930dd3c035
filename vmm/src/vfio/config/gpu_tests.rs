//! What a guest sees of a GPU that exists: bytes read from an H200, not written by us.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use super::*;
use crate::vfio::{
    bars,
    capabilities::{walk, walk_extended},
    device::{Area, RegionInfo},
    quirks,
};

const BYTES: &str = include_str!("../../../tests/data/h200.hex");
const MIB: u64 = 1 << 20;
/// As the host's kernel told them: registers, memory, and what the driver talks to its firmware by.
const SIZES: [u64; 6] = [16 * MIB, 0, 256 << 30, 0, 32 * MIB, 0];

fn snapshot() -> Vec<u8> {
    let mut config = vec![0; 4096];
    for line in BYTES.lines().filter(|line| !line.starts_with('#')) {
        let (offset, bytes) = line.split_once(": ").unwrap();
        let offset = usize::from_str_radix(offset, 16).unwrap();
        let bytes: Vec<u8> =
            bytes.split(' ').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        config[offset..offset + bytes.len()].copy_from_slice(&bytes);
    }
    config
}

/// Returns the filter, and what the guest reads through it.
fn seen(clique: Option<u8>) -> (ConfigFilter, Vec<u8>) {
    let mut config = snapshot();
    let facts = Facts {
        snapshot: &config,
        bar_sizes: SIZES,
        rom_size: 0,
        vectors: [1, 16, 9],
        quirks: &quirks::of(0x10de, 0x2335),
        clique,
    };
    let filter = ConfigFilter::new(&facts).unwrap();
    filter.read(0, &mut config);
    (filter, config)
}

#[test]
fn its_bars_have_their_sizes_and_are_free_to_place() {
    let (mut filter, config) = seen(None);
    let bars = filter.bars();
    let found: Vec<_> = bars.iter().map(|bar| (bar.index, bar.kind, bar.size)).collect();
    let wide = BarKind::Memory64Prefetchable;
    assert_eq!(found, [(0, wide, SIZES[0]), (2, wide, SIZES[2]), (4, wide, SIZES[4])]);
    assert!(bars.iter().all(|bar| bar.address == 0 && !bar.decoding), "nothing of the host's");
    assert_eq!(word(&config, COMMAND) & u16::from(COMMAND_MEMORY | COMMAND_IO), 0);
    // As firmware and kernels size a BAR: all ones, and what stays is the size.
    assert_eq!(filter.write(0x18, &[0xff; 8], |_, _| panic!("a BAR is ours")), Written::Registers);
    let mut sized = [0; 8];
    filter.read(0x18, &mut sized);
    assert_eq!(u64::from_le_bytes(sized) & !0xf, !(SIZES[2] - 1));
    filter.place_bar(2, 0x40_0000_0000);
    assert_eq!(filter.bars()[1].address, 0x40_0000_0000);
}

#[test]
fn its_capabilities_are_those_that_it_has() {
    let (filter, config) = seen(None);
    let found: Vec<_> = walk(&config).iter().map(|found| (found.id, found.offset)).collect();
    assert_eq!(found, [(0x01, 0x40), (MSI, 0x48), (EXPRESS, 0x60), (MSIX, 0xb0)]);
    assert_eq!(filter.function_reset(), Some((0x69, 0x80)), "it resets itself");
    // Latency tolerance, errors, power budget, serial number and NVIDIA's own are told; what only a host can use
    // was taken out by its kernel, whose entries without an id a walk steps over.
    let found: Vec<_> = walk_extended(&config).iter().map(|found| found.id).collect();
    assert_eq!(found, [0, 0x18, 0, 0x01, 0, 0, 0x0b, 0x04, 0x03]);
    // The last user had switched messages on; this one finds them off.
    assert_eq!(word(&snapshot(), 0xb2), 0x8008);
    assert_eq!(word(&config, 0xb2), 0x0008);
}

#[test]
fn all_of_its_memory_is_mapped_and_all_registers_but_the_table() {
    let (filter, _) = seen(None);
    let layout = filter.msix_layout().unwrap();
    assert_eq!((layout.bar, layout.table), (0, 0xb9_0000), "it has its page and stays there");
    let plan = |bar: usize, trapped| {
        let whole = vec![Area { offset: 0, size: SIZES[bar] }];
        let info = RegionInfo { size: SIZES[bar], mappable: whole };
        let areas = bars::plan(&info, SIZES[bar], trapped);
        areas.iter().map(|area| (area.offset, area.size)).collect::<Vec<_>>()
    };
    let table = layout.table..layout.table + 9 * 16;
    assert_eq!(plan(0, Some(table)), [(0, 0xb9_0000), (0xb9_1000, SIZES[0] - 0xb9_1000)]);
    assert_eq!(plan(2, None), [(0, SIZES[2])]);
}

#[test]
fn its_clique_is_where_its_driver_looks() {
    let (_, config) = seen(Some(2));
    let last = *walk(&config).last().unwrap();
    assert_eq!((last.id, last.offset), (0x09, 0xc8));
    assert_eq!(config[0xc8..0xd0], [0x09, 0, 8, b'P', b'2', b'P', 2 << 3, 0]);
}
