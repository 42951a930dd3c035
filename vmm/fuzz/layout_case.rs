//! Runs one fuzz case: an address map around whatever an IOMMU may report.
//!
//! | Bytes  | Meaning                                                                    |
//! |--------|----------------------------------------------------------------------------|
//! | 0..2   | memory in units of 64 MiB, less one (little endian)                        |
//! | 2      | bits 1:0: pages of 4 KiB, 2 MiB, 1 GiB, 4 KiB; bit 2: devices are peers    |
//! | 3      | physical address bits, modulo 33, plus 20                                  |
//! | 4      | number of usable ranges, modulo 8                                          |
//! | then   | per range 4 bytes: start and length (2 each), in units of 2 to the power   |
//! |        | given by the low five bits of the length, plus 12                          |
//! | then   | BARs of 2 bytes: function in bits 4:0, kind in bits 7:5; size as a power   |
//! |        | of two, modulo 52                                                          |

use vmm::{
    holes::{self, Holes, Peers},
    layout,
    pci::{
        allocate::{self, Above, Bridge, Demand, Request},
        function::{Bar, BarKind},
    },
    vfio::dma::IovaRange,
};

const HEADER: usize = 5;

/// Decodes and runs a case. Panics when something lies where it must not.
pub(crate) fn run(bytes: &[u8]) {
    let Some((header, rest)) = bytes.split_at_checked(HEADER) else { return };
    let memory = (u64::from(u16::from_le_bytes([header[0], header[1]])) + 1) << 26;
    let page = [4096, 2 << 20, 1 << 30, 4096][usize::from(header[2] & 3)];
    let peers = if header[2] & 4 == 0 { Peers::Apart } else { Peers::Reach };
    let bits = header[3] % 33 + 20;
    let count = usize::from(header[4] % 8) * 4;
    let (ranges, bars) = rest.split_at(count.min(rest.len()));
    let usable: Vec<IovaRange> = ranges.chunks_exact(4).map(range).collect();
    let holes = Holes::outside(&usable).and(holes::HYPERTRANSPORT);
    let between = |pair: &[IovaRange]| pair[0].last < u64::MAX && pair[0].last + 1 < pair[1].start;
    assert!(holes.list().windows(2).all(between), "holes touch");

    let memory = memory.next_multiple_of(page);
    let Ok(pieces) = holes::ram(memory, page, &holes) else { return };
    assert_eq!(pieces.iter().map(|piece| piece.1).sum::<u64>(), memory);
    let mut end = 0;
    for (address, length) in &pieces {
        assert!(*address >= end && *length > 0, "pieces out of order");
        end = address + length;
        assert_eq!(holes.first_within(*address, end - 1), None);
    }
    place(bars, (holes::end_of(&pieces), bits), &holes, peers);
}

fn range(bytes: &[u8]) -> IovaRange {
    let length = u64::from(u16::from_le_bytes([bytes[2], bytes[3]]));
    let unit = 12 + (length & 0x1f);
    let start = u64::from(u16::from_le_bytes([bytes[0], bytes[1]])) << unit;
    IovaRange { start, last: start.saturating_add(length << unit) }
}

fn place(bytes: &[u8], (start, bits): (u64, u8), holes: &Holes, peers: Peers) {
    let kinds = [BarKind::Memory64Prefetchable, BarKind::Memory32, BarKind::Memory64, BarKind::Io];
    let request = |(number, bytes): (usize, &[u8])| Request {
        function: usize::from(bytes[0] & 0x1f),
        above: Above::Bridge(usize::from(bytes[0] & 0x1f)),
        bar: Bar {
            index: u8::try_from(number % 6).unwrap_or(0),
            kind: kinds[usize::from(bytes[0] >> 5) % 4],
            size: 1 << (bytes[1] % 52),
            address: 0,
            decoding: false,
        },
    };
    let requests: Vec<Request> = bytes.chunks_exact(2).take(64).enumerate().map(request).collect();
    // A root port for each function.
    let bridges = [Bridge { above: Above::Root(0), memory: 0, prefetchable: 0 }; 32];
    let plan = holes::place_around(start, holes, peers, |ram_end| {
        let (requests, low) = (&requests, layout::MMIO32);
        allocate::place(&Demand { requests, bridges: &bridges, roots: 1, low, ram_end, bits })
    });
    let Ok(plan) = plan else { return };
    assert_eq!(plan.placed.len(), requests.len());
    assert!(plan.mmio64 >= start && plan.mmio64 + plan.mmio64_size <= 1 << bits);
    for (at, bar) in plan.placed.iter().enumerate() {
        assert!(bar.address.is_multiple_of(bar.size), "a BAR lies askew");
        let last = bar.address + (bar.size - 1);
        if bar.kind == BarKind::Memory64Prefetchable {
            assert!(bar.address >= plan.mmio64 && last < plan.mmio64 + plan.mmio64_size);
            assert!(peers == Peers::Apart || holes.first_within(bar.address, last).is_none());
        }
        let meets = plan.placed[..at].iter().any(|other| {
            (other.kind == BarKind::Io) == (bar.kind == BarKind::Io)
                && other.address <= last
                && bar.address <= other.address + (other.size - 1)
        });
        assert!(!meets, "two BARs lie in one place");
    }
}
