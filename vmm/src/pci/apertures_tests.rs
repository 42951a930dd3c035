use proptest::{collection, prelude::*};

use super::*;

const GIB: u64 = 1 << 30;

/// A machine with 512 MiB on a processor of AMD's with 40 address bits.
fn free() -> Free {
    Free { low: 0x8000_0000, high: vec![(4 * GIB, 1012 * GIB - 1)] }
}

fn share_of(io: u64, low: &[u64], high: &[u64]) -> Share {
    let room = |sizes: &[u64]| {
        let mut room = Room::default();
        sizes.iter().for_each(|size| room.add(*size));
        room
    };
    Share { io, low: room(low), high: room(high), placed: Windows::default() }
}

#[test]
fn one_root_complex_has_all_that_is_free() {
    let all = share(&free(), 0xe000_0000, &[share_of(0x2000, &[1 << 20], &[1 << 14])]);
    let low = vec![(0x8000_0000, 0xdfff_ffff), (0xf000_0000, 0xfbff_ffff)];
    let told = Some((4 * GIB, 36 * GIB - 1));
    let one = Apertures { io: Some((0x1000, 0xffff)), low, high: free().high, told };
    assert_eq!(all, [one]);
}

#[test]
fn configuration_space_is_left_out_wherever_it_is() {
    let low = |ecam| share(&free(), ecam, &[share_of(0, &[], &[])]).remove(0).low;
    // Firmware is told of one range, which is the larger.
    assert_eq!(low(0xb000_0000), [(0xc000_0000, 0xfbff_ffff), (0x8000_0000, 0xafff_ffff)]);
    assert_eq!(low(1 << 34), [(0x8000_0000, 0xfbff_ffff)]);
    let high = share(&free(), 1 << 34, &[share_of(0, &[], &[])]).remove(0).high;
    assert_eq!(high, [(4 * GIB, 16 * GIB - 1), (16 * GIB + (256 << 20), 1012 * GIB - 1)]);
}

#[test]
fn large_bars_begin_where_they_can() {
    // 256 GiB behind one bridge and a little beside: twice as much would reach the hole.
    let all = share(&free(), 0xe000_0000, &[share_of(0, &[], &[256 * GIB, 1 << 20])]);
    assert_eq!(all[0].told, Some((256 * GIB, 768 * GIB - 1)));
    // What fits nowhere in one piece has the largest piece there is.
    let all = share(&free(), 0xe000_0000, &[share_of(0, &[], &[512 * GIB, 512 * GIB])]);
    assert_eq!(all[0].told, Some((4 * GIB, 1012 * GIB - 1)));
}

#[test]
fn root_complexes_share_without_touching() {
    let first = share_of(0x1000, &[1 << 20], &[1 << 20]);
    let second = share_of(0x2800, &[32 << 20], &[64 * GIB, 32 << 20]);
    let third = share_of(0, &[1 << 20], &[]);
    let all = share(&free(), 0xe000_0000, &[first, second, third]);
    assert_eq!(all[1].io, Some((0x1000, 0x3fff)));
    assert_eq!((all[0].io, all[2].io), (Some((0x4000, 0xffff)), None));
    assert_eq!(all[1].low, [(0x8000_0000, 0x83ff_ffff)]);
    assert_eq!(all[2].low, [(0x8400_0000, 0x84ff_ffff)]);
    assert_eq!(all[0].low, [(0x8500_0000, 0xdfff_ffff), (0xf000_0000, 0xfbff_ffff)]);
    // Twice (64 GiB and 32 MiB), in steps of the largest BAR.
    let wide = (64 * GIB, 256 * GIB - 1);
    assert_eq!((&all[1].high[..], all[1].told), (&[wide][..], Some(wide)));
    assert_eq!((&all[2].high[..], all[2].told), (&[][..], None));
    assert_eq!(all[0].high, [(4 * GIB, 64 * GIB - 1), (256 * GIB, 1012 * GIB - 1)]);
    assert_eq!(all[0].told, Some((4 * GIB, 36 * GIB - 1)));
}

#[test]
fn without_room_for_more_each_has_where_its_bars_were_placed() {
    let placed = Windows {
        io: Some((0x1000, 0x1fff)),
        memory: Some((0xc000_0000, 0xc00f_ffff)),
        prefetchable: Some((512 * GIB, 1024 * GIB - 1)),
    };
    let second = Share { placed, ..share_of(0x1_0000, &[1 << 31], &[512 * GIB]) };
    let first = Share {
        placed: Windows { io: Some((0x2000, 0xffff)), ..Windows::default() },
        ..share_of(0x1000, &[1 << 20], &[1 << 20])
    };
    let high = vec![(4 * GIB, 1024 * GIB - 1), (2048 * GIB, 2049 * GIB)];
    let first = Share { high: Room { size: 600 * GIB, align: GIB }, ..first };
    let all = share(&Free { high, ..free() }, 0xe000_0000, &[first, second]);
    assert_eq!(all[1], Apertures::from(placed));
    assert_eq!(all[0].io, Some((0x2000, 0xffff)));
    assert_eq!(all[0].low[..2], [(0x8000_0000, 0xbfff_ffff), (0xc010_0000, 0xdfff_ffff)]);
    assert_eq!(all[0].high, [(4 * GIB, 512 * GIB - 1), (2048 * GIB, 2049 * GIB)]);
    assert_eq!(all[0].told, Some((4 * GIB, 512 * GIB - 1)));
}

#[test]
fn a_root_complex_has_nothing_of_configuration_space() {
    let memory = Some((0xa000_0000, 0xbfff_ffff));
    let placed = Windows { memory, ..Windows::default() };
    let second = Share { placed, ..share_of(0, &[1 << 31], &[]) };
    let all = share(&free(), 0xb000_0000, &[share_of(0, &[1 << 20], &[]), second]);
    assert_eq!(all[1].low, []);
    assert_eq!(all[0].low, [(0xc000_0000, 0xfbff_ffff), (0x8000_0000, 0xafff_ffff)]);
}

proptest! {
    #[test]
    fn nothing_is_given_twice_nor_what_is_not_free(
        parts in collection::vec((0u64..8, 12u32..30, 12u32..43, 0usize..6), 1..5),
        holes in collection::vec((2u64..1000, 1u64..64), 0..4),
    ) {
        let mut high = vec![(4 * GIB, (1 << 42) - 1)];
        holes.iter().for_each(|(at, length)| remove(&mut high, (at * GIB, (at + length) * GIB)));
        let free = Free { low: 0x8000_0000, high };
        let make = |(io, low, high, count): &(u64, u32, u32, usize)| {
            share_of(io << 12, &vec![1 << low; *count], &vec![1 << high; *count])
        };
        let shares: Vec<Share> = parts.iter().map(make).collect();
        let all = share(&free, 0xe000_0000, &shares);
        prop_assert_eq!(all.len(), shares.len());
        let low = all.iter().flat_map(|root| &root.low).map(|(a, b)| (u64::from(*a), u64::from(*b)));
        let mut given: Vec<(u64, u64)> = low.collect();
        given.extend(all.iter().flat_map(|root| &root.high));
        given.sort_unstable();
        prop_assert!(given.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:x?}", given);
        let within = |piece: &(u64, u64), pieces: &[(u64, u64)]| {
            pieces.iter().any(|(first, last)| *first <= piece.0 && piece.1 <= *last)
        };
        let there = [&free.below(0xe000_0000)[..], &free.high].concat();
        prop_assert!(given.iter().all(|piece| within(piece, &there)), "{:x?}", given);
        prop_assert!(all.iter().all(|root| root.told.is_none_or(|told| within(&told, &root.high))));
    }
}
