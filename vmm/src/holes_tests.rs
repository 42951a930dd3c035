use proptest::prelude::*;

use super::*;
use crate::pci::{
    allocate::{self, Above, Demand, Request},
    function::{Bar, BarKind},
};

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

fn range(start: u64, last: u64) -> IovaRange {
    IovaRange { start, last }
}

/// What hosts report with a 48-bit IOMMU.
fn intel() -> Holes {
    Holes::outside(&[range(0, 0xfedf_ffff), range(0xfef0_0000, (1 << 48) - 1)])
}

fn amd() -> Holes {
    intel().and(HYPERTRANSPORT)
}

fn place(
    requests: &[Request],
    (ram_end, bits): (u64, u8),
    holes: &Holes,
    peers: Peers,
) -> Result<Plan, PlaceError> {
    place_around(ram_end, holes, peers, |ram_end| {
        let (bridges, low) = ([], layout::MMIO32);
        allocate::place(&Demand { requests, bridges: &bridges, roots: 1, low, ram_end, bits })
    })
}

fn wide(function: usize, size: u64) -> Request {
    let kind = BarKind::Memory64Prefetchable;
    let bar = Bar { index: 0, kind, size, address: 0, decoding: false };
    Request { function, above: Above::Root(0), bar }
}

#[test]
fn holes_are_what_is_not_usable() {
    let expected = [range(0xfee0_0000, 0xfeef_ffff), range(1 << 48, u64::MAX)];
    assert_eq!(intel().list(), expected);
    assert_eq!(Holes::outside(&[range(0, u64::MAX)]).list(), []);
    assert_eq!(Holes::outside(&[]).list(), [range(0, u64::MAX)]);
}

#[test]
fn holes_that_touch_become_one() {
    let holes = Holes::default().and(range(0x3000, 0x3fff)).and(range(0x1000, 0x2fff));
    assert_eq!(holes.list(), [range(0x1000, 0x3fff)]);
}

#[test]
fn small_memory_is_where_it_always_was() {
    assert_eq!(ram(GIB, 4096, &amd()), Ok(vec![(0, GIB)]));
    assert_eq!(ram(8 * GIB, 4096, &amd()), Ok(vec![(0, 3 * GIB), (4 * GIB, 5 * GIB)]));
}

#[test]
fn two_tib_go_around_hypertransport() {
    let pieces = ram(2 * TIB, 1 << 30, &amd()).expect("room");
    let expected = [(0, 3 * GIB), (4 * GIB, 1008 * GIB), (1024 * GIB, 2 * TIB - 1011 * GIB)];
    assert_eq!(pieces, expected);
    assert_eq!(end_of(&pieces), 3 * TIB - 1011 * GIB);
}

#[test]
fn two_tib_without_hypertransport_are_two_pieces() {
    let pieces = ram(2 * TIB, 1 << 30, &intel()).expect("room");
    assert_eq!(pieces, [(0, 3 * GIB), (4 * GIB, 2 * TIB - 3 * GIB)]);
}

#[test]
fn a_hole_in_low_memory_ends_it() {
    let holes = amd().and(range(0x8000_1000, 0x8000_1fff));
    assert_eq!(ram(4 * GIB, 4096, &holes), Ok(vec![(0, 2 * GIB), (4 * GIB, 2 * GIB)]));
    let lower = amd().and(range(0x10_0000, 0x10_ffff));
    assert!(matches!(ram(4 * GIB, 4096, &lower), Err(HoleError::Low { .. })));
}

#[test]
fn memory_beyond_the_iommu_is_refused() {
    let narrow = Holes::outside(&[range(0, (1 << 39) - 1)]);
    assert!(matches!(ram(TIB, 4096, &narrow), Err(HoleError::High { .. })));
}

#[test]
fn bars_go_behind_a_hole_that_they_would_meet() {
    // Half a TiB of BAR behind 8 GiB of memory would lie from 512 GiB to 1 TiB.
    let plan = place(&[wide(0, TIB / 2)], (9 * GIB, 48), &amd(), Peers::Apart).expect("room");
    assert_eq!((plan.placed[0].address, plan.mmio64), (TIB, TIB));
}

#[test]
fn few_address_bits_put_bars_into_a_hole_unless_peers_reach_them() {
    let requests = [wide(0, TIB / 2)];
    let plan = place(&requests, (9 * GIB, 40), &amd(), Peers::Apart).expect("room");
    assert_eq!(plan.placed[0].address, TIB / 2);
    let refusal = place(&requests, (9 * GIB, 40), &amd(), Peers::Reach).expect_err("hole");
    assert!(matches!(refusal, PlaceError::AddressBits { bits: 40, .. }), "{refusal}");
}

#[test]
fn eight_gpus_behind_two_tib_have_no_hole_in_their_window() {
    let requests: Vec<Request> = (0..8).map(|function| wide(function, 256 * GIB)).collect();
    let pieces = ram(2 * TIB, GIB, &amd()).expect("room");
    let plan = place(&requests, (end_of(&pieces), 48), &amd(), Peers::Reach).expect("room");
    assert!(plan.placed.iter().all(|bar| bar.address % (256 * GIB) == 0));
    assert!(plan.mmio64 >= end_of(&pieces));
}

fn arbitrary_holes() -> impl Strategy<Value = Holes> {
    let hole = (0u64..1 << 49, 0u64..1 << 38)
        .prop_map(|(start, length)| range(start, start.saturating_add(length)));
    proptest::collection::vec(hole, 0..6)
        .prop_map(|list| list.into_iter().fold(Holes::default(), Holes::and))
}

proptest! {
    #[test]
    fn memory_is_whole_ordered_and_outside_of_holes(
        holes in arbitrary_holes(),
        gib in 1u64..4096,
        page in prop_oneof![Just(4096u64), Just(2u64 << 20), Just(GIB)],
    ) {
        let Ok(pieces) = ram(gib * GIB, page, &holes) else { return Ok(()) };
        prop_assert_eq!(pieces.iter().map(|piece| piece.1).sum::<u64>(), gib * GIB);
        let mut end = 0;
        for (address, length) in pieces {
            prop_assert!(address >= end && length > 0 && length % page == 0);
            prop_assert!(address == 0 || address >= layout::RAM_ABOVE && address % HIGH_STEP == 0);
            end = address + length;
            prop_assert!(address != 0 || end <= layout::RAM_GAP);
            prop_assert_eq!(holes.first_within(address, end - 1), None);
        }
    }

    #[test]
    fn bars_that_peers_reach_are_outside_of_holes(
        holes in arbitrary_holes(),
        sizes in proptest::collection::vec(12u32..40, 1..9),
        gib in 1u64..2048,
    ) {
        let requests: Vec<Request> =
            sizes.iter().enumerate().map(|(function, bits)| wide(function, 1 << bits)).collect();
        let Ok(pieces) = ram(gib * GIB, GIB, &holes) else { return Ok(()) };
        let end = end_of(&pieces);
        let Ok(plan) = place(&requests, (end, 52), &holes, Peers::Reach) else { return Ok(()) };
        prop_assert_eq!(plan.placed.len(), sizes.len());
        for bar in &plan.placed {
            prop_assert!(bar.address >= end && bar.address % bar.size == 0);
            prop_assert_eq!(holes.first_within(bar.address, bar.address + (bar.size - 1)), None);
        }
    }
}
