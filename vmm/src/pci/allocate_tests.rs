use proptest::prelude::*;

use super::*;

const WIDE: BarKind = BarKind::Memory64Prefetchable;

fn request(function: usize, index: u8, kind: BarKind, size: u64) -> Request {
    let bar = Bar { index, kind, size, address: 0, decoding: false };
    Request { function, above: Above::Bridge(function), bar }
}

fn below(above: Above) -> Bridge {
    Bridge { above, memory: 0, prefetchable: 0 }
}

fn flat(requests: &[Request], ram_end: u64, bits: u8) -> Result<Plan, PlaceError> {
    flat_from(layout::MMIO32, requests, ram_end, bits)
}

fn flat_from(low: u64, requests: &[Request], ram_end: u64, bits: u8) -> Result<Plan, PlaceError> {
    let count = requests.iter().map(|request| request.function + 1).max().unwrap_or(0);
    let bridges = vec![below(Above::Root(0)); count];
    place(&Demand { requests, bridges: &bridges, roots: 1, low, ram_end, bits })
}

#[test]
fn huge_bars_are_naturally_aligned_behind_ram() {
    let requests = [request(0, 0, BarKind::Memory32, 0x1000), request(0, 2, WIDE, 1 << 38)];
    let plan = flat(&requests, 5 << 30, 42).expect("fits");
    let huge = plan.placed.iter().find(|bar| bar.index == 2).expect("placed");
    assert_eq!((huge.address, plan.mmio64, plan.mmio64_size), (1 << 38, 5 << 30, 507 << 30));
}

#[test]
fn half_the_address_space_is_possible() {
    let requests = [request(0, 0, WIDE, 1 << 39), request(1, 4, WIDE, 1 << 14)];
    let plan = flat(&requests, 5 << 30, 40).expect("fits");
    let end = plan.mmio64 + plan.mmio64_size;
    assert_eq!((plan.placed[0].address, plan.placed[1].address, end), (1 << 39, 5 << 30, 1 << 40));
}

#[test]
fn too_few_address_bits_are_told() {
    let requests = [request(0, 0, WIDE, 1 << 39)];
    let refusal = flat(&requests, 5 << 30, 39).expect_err("ends at 2^40");
    assert_eq!(refusal, PlaceError::AddressBits { end: 1 << 40, bits: 39 });
    let requests = [request(0, 0, WIDE, 1 << 63), request(1, 0, WIDE, 1 << 63)];
    assert!(matches!(flat(&requests, 5 << 30, 57), Err(PlaceError::AddressBits { .. })));
}

#[test]
fn as_many_devices_with_ports_as_there_are_root_ports_fit() {
    // Every NVIDIA GPU has a BAR of 128 ports, and every bridge opens a window of 4,096.
    let all: Vec<Request> =
        (0..14).map(|function| request(function, 5, BarKind::Io, 128)).collect();
    let plan = flat(&all, 4 << 30, 40).expect("fits");
    let mut windows: Vec<u64> = plan.placed.iter().map(|bar| bar.address >> 12).collect();
    windows.dedup();
    assert_eq!((windows.len(), windows[0], windows[13] < 16), (14, 1, true));
}

/// With firmware, 32-bit PCI memory begins earlier; without, it is a third as large.
#[test]
fn eight_gpus_with_32_bit_bars_fit_where_firmware_has_room() {
    let gpu = |function| request(function, 0, BarKind::Memory32, 64 << 20);
    let table = |function| request(function, 1, BarKind::Memory32, 4096);
    let all: Vec<Request> = (0..8).flat_map(|function| [gpu(function), table(function)]).collect();
    let plan = flat_from(layout::FIRMWARE_RAM_GAP, &all, 4 << 30, 46).expect("fits");
    assert_eq!(plan.placed[0].address, 0x8000_0000);
    assert_eq!(plan.roots[0].memory, Some((0x8000_0000, 0xdfff_ffff)));
    let refusal = flat(&all, 4 << 30, 46).expect_err("fits not");
    assert!(matches!(refusal, PlaceError::Window { available: 0x2000_0000, .. }));
}

#[test]
fn functions_do_not_share_bridge_windows() {
    let requests =
        [request(0, 0, BarKind::Memory32, 0x1000), request(1, 0, BarKind::Memory32, 0x1000)];
    let plan = flat(&requests, 1 << 32, 40).expect("fits");
    assert_eq!(plan.placed[1].address - plan.placed[0].address, 1 << 20);
    assert_eq!(plan.bridges[0].memory, Some((0xc000_0000, 0xc00f_ffff)));
    assert_eq!(plan.bridges[0].prefetchable, None);
}

#[test]
fn full_windows_are_told() {
    let requests =
        [request(0, 0, BarKind::Memory32, 1 << 29), request(1, 0, BarKind::Memory32, 1 << 29)];
    assert!(matches!(flat(&requests, 1 << 32, 40), Err(PlaceError::Window { .. })));
}

#[test]
fn windows_nest_below_a_switch() {
    // Root port 0, upstream port 1, downstream ports 2 and 3, each with a large BAR.
    let bridges = [
        below(Above::Root(0)),
        below(Above::Bridge(0)),
        below(Above::Bridge(1)),
        below(Above::Bridge(1)),
    ];
    let requests = [request(2, 0, WIDE, 1 << 36), request(3, 0, WIDE, 1 << 38)];
    let demand = Demand {
        requests: &requests,
        bridges: &bridges,
        roots: 1,
        low: layout::MMIO32,
        ram_end: 5 << 30,
        bits: 46,
    };
    let plan = place(&demand).expect("fits");
    let window = |number: usize| plan.bridges[number].prefetchable.expect("open");
    assert_eq!(window(3), (1 << 38, (2 << 38) - 1));
    assert_eq!(window(2), (2 << 38, (2 << 38) + (1 << 36) - 1));
    assert_eq!(window(0), (1 << 38, (2 << 38) + (1 << 36) - 1));
    assert_eq!(window(1), window(0));
}

#[test]
fn empty_ports_keep_room() {
    let spare = Bridge { above: Above::Root(0), memory: 32 << 20, prefetchable: 1 << 37 };
    let demand = Demand {
        requests: &[],
        bridges: &[spare],
        roots: 1,
        low: layout::MMIO32,
        ram_end: 1 << 32,
        bits: 40,
    };
    let plan = place(&demand).expect("fits");
    assert_eq!(plan.bridges[0].memory, Some((0xc000_0000, 0xc1ff_ffff)));
    assert_eq!(plan.bridges[0].prefetchable, Some((1 << 37, (2 << 37) - 1)));
}

#[test]
fn root_complexes_lie_side_by_side() {
    let bridges = [below(Above::Root(0)), below(Above::Root(1))];
    let requests = [
        request(0, 0, WIDE, 1 << 36),
        request(1, 0, WIDE, 1 << 38),
        request(1, 1, BarKind::Memory32, 1 << 24),
    ];
    let demand = Demand {
        requests: &requests,
        bridges: &bridges,
        roots: 2,
        low: layout::MMIO32,
        ram_end: 5 << 30,
        bits: 46,
    };
    let plan = place(&demand).expect("fits");
    let (first, second) = (plan.roots[0], plan.roots[1]);
    assert_eq!(second.memory, Some((0xc000_0000, 0xc0ff_ffff)));
    assert_eq!(first.memory, Some((0xc100_0000, 0xdfff_ffff)));
    assert_eq!(second.prefetchable, Some((5 << 30, (2 << 38) - 1)));
    assert_eq!(first.prefetchable, Some((2 << 38, (2 << 38) + (1 << 36) - 1)));
    assert_eq!((first.io, second.io), (Some((layout::PIO, layout::PIO_LAST)), None));
}

proptest! {
    /// Random trees: no two BARs overlap, each is aligned and inside every bridge above it, and
    /// windows of neighbours are apart.
    #[test]
    fn bars_are_apart_and_inside(
        parents in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        bars in proptest::collection::vec((any::<prop::sample::Index>(), 0u32..30, 0..4u8), 0..24),
        roots in 1usize..4,
    ) {
        let place_of = |index: &prop::sample::Index, bridges: usize| {
            let at = index.index(bridges + roots);
            if at < bridges { Above::Bridge(at) } else { Above::Root(at - bridges) }
        };
        let bridges: Vec<Bridge> =
            parents.iter().enumerate().map(|(n, index)| below(place_of(index, n))).collect();
        let requests: Vec<Request> = bars
            .iter()
            .enumerate()
            .map(|(function, (index, bits, kind))| {
                let kind = [BarKind::Io, BarKind::Memory32, BarKind::Memory64, WIDE]
                    [usize::from(*kind)];
                let size = if kind == BarKind::Io { 32 } else { 1 << (*bits).clamp(4, 24) };
                let bar = Bar { index: 0, kind, size, address: 0, decoding: false };
                Request { function, above: place_of(index, bridges.len()), bar }
            })
            .collect();
        let demand = Demand {
            requests: &requests, bridges: &bridges, roots, low: layout::MMIO32, ram_end: 4 << 30, bits: 46,
        };
        let Ok(plan) = place(&demand) else { return Ok(()) };
        for (bar, request) in plan.placed.iter().zip(&requests) {
            prop_assert_eq!(bar.address % bar.size, 0);
            let last = bar.address + bar.size - 1;
            let mut above = request.above;
            loop {
                let (windows, next) = match above {
                    Above::Bridge(number) => {
                        (plan.bridges[number], Some(bridges[number].above))
                    }
                    Above::Root(number) => (plan.roots[number], None),
                };
                let (base, end) = match SpaceKind::of(bar.kind) {
                    SpaceKind::Io => windows.io.map(|(a, b)| (u64::from(a), u64::from(b))),
                    SpaceKind::Memory => windows.memory.map(|(a, b)| (u64::from(a), u64::from(b))),
                    SpaceKind::Prefetchable => windows.prefetchable,
                }.expect("a window");
                prop_assert!(base <= bar.address && last <= end);
                let Some(next) = next else { break };
                above = next;
            }
        }
        let mut spans: Vec<(bool, u64, u64)> = plan
            .placed
            .iter()
            .map(|bar| (bar.kind == BarKind::Io, bar.address, bar.address + bar.size))
            .collect();
        spans.sort_unstable();
        for pair in spans.windows(2) {
            prop_assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1);
        }
    }
}
