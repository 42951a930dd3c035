//! Placing BARs: each at its natural alignment, largest first, in windows that grow with what is
//! to be placed.

use super::function::{Bar, BarKind};
use crate::{layout, vfio::dma::IovaRange};

/// One BAR to be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Which function, in the caller's numbering.
    pub function: usize,
    /// The BAR.
    pub bar: Bar,
}

/// Where a BAR went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Which function.
    pub function: usize,
    /// BAR index.
    pub index: u8,
    /// What it decodes.
    pub kind: BarKind,
    /// Its address.
    pub address: u64,
    /// Its size.
    pub size: u64,
}

/// Why the BARs do not fit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum PlaceError {
    #[error("the BARs need {needed:#x} bytes of {window}, which has {available:#x}")]
    Window { window: &'static str, needed: u64, available: u64 },
    #[error(
        "the devices' 64-bit BARs end at {end:#x}, but this host's CPUs address {bits} bits; use \
         less memory, fewer devices, or a host with more address bits"
    )]
    AddressBits { end: u64, bits: u8 },
    #[error(
        "the devices' 64-bit BARs end at {end:#x}, and devices that reach each other cannot use \
         {hole} of the host's IOMMU; use less memory or fewer devices"
    )]
    Peers { end: u64, hole: IovaRange },
}

/// Smallest step between BARs of different functions in 32-bit memory, so that each bridge has
/// windows of its own (PCIe 6.0 §7.5.1.3.8: 1 MiB).
const BRIDGE_STEP: u64 = 1 << 20;
/// Smallest step between I/O BARs of different bridges (4 KiB).
const BRIDGE_IO_STEP: u64 = 0x1000;

/// The 64-bit window begins and ends on multiples of 1 GiB.
const WINDOW_STEP: u64 = 1 << 30;

/// All BARs' places and the 64-bit window they need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The BARs.
    pub placed: Vec<Placed>,
    /// First address of 64-bit PCI memory.
    pub mmio64: u64,
    /// Length of 64-bit PCI memory, whole GiB and at least one.
    pub mmio64_size: u64,
}

/// Places all BARs behind RAM that ends at `ram_end`, on CPUs with `bits` physical address bits.
pub fn place(requests: &[Request], ram_end: u64, bits: u8) -> Result<Plan, PlaceError> {
    let limit = 1u64.checked_shl(u32::from(bits)).unwrap_or(u64::MAX);
    let largest = |function: usize| {
        let mine = requests.iter().filter(|r| r.function == function && is_64(r.bar.kind));
        mine.map(|r| r.bar.size).max().unwrap_or(0)
    };
    let mut ordered: Vec<&Request> = requests.iter().collect();
    // Small functions first: what they take lies in the gap below the first large BAR.
    ordered.sort_by_key(|request| {
        (largest(request.function), request.function, std::cmp::Reverse(request.bar.size))
    });
    let start = ram_end.checked_next_multiple_of(WINDOW_STEP).unwrap_or(u64::MAX);
    let mut windows =
        Cursors { memory32: layout::MMIO32, memory64: start, io: u64::from(layout::PIO) };
    let mut placed = Vec::new();
    let mut last = None;
    for request in ordered {
        if last != Some(request.function) {
            windows.next_bridge();
            last = Some(request.function);
        }
        let Request { function, bar } = *request;
        let address = windows.take(bar.kind, bar.size);
        placed.push(Placed { function, index: bar.index, kind: bar.kind, address, size: bar.size });
    }
    windows.check()?;
    let end = windows.memory64.max(start.saturating_add(1));
    let end = end.checked_next_multiple_of(WINDOW_STEP).unwrap_or(u64::MAX);
    if end > limit {
        return Err(PlaceError::AddressBits { end, bits });
    }
    Ok(Plan { placed, mmio64: start, mmio64_size: end - start })
}

fn is_64(kind: BarKind) -> bool {
    matches!(kind, BarKind::Memory64 | BarKind::Memory64Prefetchable)
}

struct Cursors {
    memory32: u64,
    memory64: u64,
    io: u64,
}

impl Cursors {
    /// Goes to where the next bridge's windows can begin.
    fn next_bridge(&mut self) {
        let up = |cursor: u64, step: u64| cursor.checked_next_multiple_of(step).unwrap_or(u64::MAX);
        self.memory32 = up(self.memory32, BRIDGE_STEP);
        self.memory64 = up(self.memory64, BRIDGE_STEP);
        self.io = up(self.io, BRIDGE_IO_STEP);
    }

    fn take(&mut self, kind: BarKind, size: u64) -> u64 {
        // A 64-bit BAR that is not prefetchable must lie below 4 GiB when it is behind a bridge,
        // whose 64-bit window is the prefetchable one.
        let cursor = match kind {
            BarKind::Memory32 | BarKind::Memory64 => &mut self.memory32,
            BarKind::Memory64Prefetchable => &mut self.memory64,
            BarKind::Io => &mut self.io,
        };
        let step = if kind == BarKind::Io { size } else { size.max(4096) };
        let address = cursor.checked_next_multiple_of(step).unwrap_or(u64::MAX);
        *cursor = address.saturating_add(step);
        address
    }

    fn check(&self) -> Result<(), PlaceError> {
        let fits = |window, start: u64, end: u64, available: u64| {
            let needed = end - start;
            if needed > available {
                Err(PlaceError::Window { window, needed, available })
            } else {
                Ok(())
            }
        };
        let size = layout::MMIO32_END - layout::MMIO32;
        fits("32-bit memory", layout::MMIO32, self.memory32, size)?;
        let ports = u64::from(layout::PIO_LAST - layout::PIO) + 1;
        fits("I/O ports", u64::from(layout::PIO), self.io, ports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(function: usize, index: u8, kind: BarKind, size: u64) -> Request {
        Request { function, bar: Bar { index, kind, size, address: 0, decoding: false } }
    }

    #[test]
    fn huge_bars_are_naturally_aligned_behind_ram() {
        let wide = BarKind::Memory64Prefetchable;
        let requests = [request(0, 0, BarKind::Memory32, 0x1000), request(0, 2, wide, 1 << 38)];
        let plan = place(&requests, 5 << 30, 42).expect("fits");
        let huge = plan.placed.iter().find(|bar| bar.index == 2).expect("placed");
        assert_eq!((huge.address, plan.mmio64, plan.mmio64_size), (1 << 38, 5 << 30, 507 << 30));
    }

    #[test]
    fn half_the_address_space_is_possible() {
        let wide = BarKind::Memory64Prefetchable;
        let requests = [request(0, 0, wide, 1 << 39), request(1, 4, wide, 1 << 14)];
        let plan = place(&requests, 5 << 30, 40).expect("fits");
        let end = plan.mmio64 + plan.mmio64_size;
        assert_eq!(
            (plan.placed[0].address, plan.placed[1].address, end),
            (5 << 30, 1 << 39, 1 << 40)
        );
    }

    #[test]
    fn too_few_address_bits_are_told() {
        let requests = [request(0, 0, BarKind::Memory64Prefetchable, 1 << 39)];
        let refusal = place(&requests, 5 << 30, 39).expect_err("ends at 2^40");
        assert_eq!(refusal, PlaceError::AddressBits { end: 1 << 40, bits: 39 });
    }

    #[test]
    fn as_many_devices_with_ports_as_there_are_root_ports_fit() {
        // Every NVIDIA GPU has a BAR of 128 ports, and every bridge opens a window of 4,096.
        let all: Vec<Request> =
            (0..14).map(|function| request(function, 5, BarKind::Io, 128)).collect();
        let plan = place(&all, 4 << 30, 40).expect("fits");
        let mut windows: Vec<u64> = plan.placed.iter().map(|bar| bar.address >> 12).collect();
        windows.dedup();
        assert_eq!((windows.len(), windows[0], windows[13] < 16), (14, 1, true));
    }

    #[test]
    fn functions_do_not_share_bridge_windows() {
        let requests =
            [request(0, 0, BarKind::Memory32, 0x1000), request(1, 0, BarKind::Memory32, 0x1000)];
        let plan = place(&requests, 1 << 32, 40).expect("fits");
        assert_eq!(plan.placed[1].address - plan.placed[0].address, BRIDGE_STEP);
    }

    #[test]
    fn full_windows_are_told() {
        let requests =
            [request(0, 0, BarKind::Memory32, 1 << 29), request(1, 0, BarKind::Memory32, 1 << 29)];
        assert!(matches!(place(&requests, 1 << 32, 40), Err(PlaceError::Window { .. })));
    }
}
