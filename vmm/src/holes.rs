//! Addresses that devices cannot use, and guest memory and 64-bit PCI memory laid out around them.
//! Pure: what the host's IOMMU reports comes in, addresses go out.
//!
//! A device reaches guest memory at the guest's own addresses. So no guest memory may lie where the
//! host's IOMMU keeps addresses for itself, or cannot translate:
//!
//! | From            | To              | Kept by                                              |
//! |-----------------|-----------------|------------------------------------------------------|
//! | 0xfee0_0000     | 0xfeef_ffff     | interrupt messages; lies in the gap below 4 GiB      |
//! | 0xfd_0000_0000  | 0xff_ffff_ffff  | HyperTransport, AMD: never translated                |
//! | as reported     | as reported     | firmware, the IOMMU's width (IOMMU_IOAS_IOVA_RANGES) |
//!
//! Source: linux/iommufd.h; AMD I/O Virtualization Technology (IOMMU) Specification 48882,
//! "Special Address Controls" (GPA/IOVA 0xfd_0000_0000 to 0xff_ffff_ffff).

use crate::{
    layout,
    pci::allocate::{PlaceError, Plan},
    vfio::dma::IovaRange,
};

/// What AMD's IOMMUs never translate.
pub const HYPERTRANSPORT: IovaRange = IovaRange { start: 0xfd_0000_0000, last: 0xff_ffff_ffff };

/// Pieces of memory above 4 GiB begin and end on multiples of the largest page.
const HIGH_STEP: u64 = 1 << 30;
/// Memory below 4 GiB ends on a multiple of the middle page, or of the page it is made of.
const LOW_STEP: u64 = 2 << 20;
/// Least memory below the first hole: boot structures, and a kernel.
const LEAST_LOW: u64 = 16 << 20;

/// Why guest memory cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum HoleError {
    #[error(
        "devices cannot use {hole}, which leaves {low:#x} bytes of memory from address 0; a guest \
         starts in the first 16 MiB"
    )]
    Low { hole: IovaRange, low: u64 },
    #[error("{missing:#x} bytes of guest memory lie behind {hole}, the last addresses there are")]
    High { hole: IovaRange, missing: u64 },
}

/// Whether devices reach each other's BARs, at the guest's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peers {
    /// They reach memory only.
    Apart,
    /// They reach each other.
    Reach,
}

/// Addresses to stay out of: ascending, and never touching each other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holes(Vec<IovaRange>);

impl Holes {
    /// Returns what lies outside of the `usable` ranges.
    pub fn outside(usable: &[IovaRange]) -> Self {
        let mut sorted: Vec<IovaRange> =
            usable.iter().copied().filter(|range| range.start <= range.last).collect();
        sorted.sort_unstable_by_key(|range| range.start);
        let mut holes = Vec::new();
        let mut next = Some(0);
        for range in sorted {
            let Some(start) = next else { break };
            if range.start > start {
                holes.push(IovaRange { start, last: range.start - 1 });
            }
            next = range.last.checked_add(1).map(|behind| behind.max(start));
        }
        holes.extend(next.map(|start| IovaRange { start, last: u64::MAX }));
        Self(holes)
    }

    /// Adds a hole.
    #[must_use]
    pub fn and(mut self, hole: IovaRange) -> Self {
        self.0.push(hole);
        self.0.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<IovaRange> = Vec::new();
        for range in self.0 {
            match merged.last_mut() {
                Some(last) if range.start <= last.last.saturating_add(1) => {
                    last.last = last.last.max(range.last);
                }
                _ => merged.push(range),
            }
        }
        Self(merged)
    }

    /// Returns the holes, ascending.
    pub fn list(&self) -> &[IovaRange] {
        &self.0
    }

    /// Returns the first hole that has an address from `start` to `last`.
    pub fn first_within(&self, start: u64, last: u64) -> Option<IovaRange> {
        self.0.iter().find(|hole| hole.last >= start && hole.start <= last).copied()
    }
}

/// Returns the pieces of guest memory, (address, length), ascending, for `bytes` of memory in pages
/// of `page` bytes. Below 4 GiB memory ends at the first hole; above, it goes around all of them.
pub fn ram(bytes: u64, page: u64, holes: &Holes) -> Result<Vec<(u64, u64)>, HoleError> {
    let first = holes.first_within(0, layout::RAM_GAP - 1);
    let low =
        first.map_or(layout::RAM_GAP, |hole| hole.start / LOW_STEP.max(page) * LOW_STEP.max(page));
    let low = low.min(bytes);
    if let Some(hole) = first
        && low < LEAST_LOW.min(bytes)
    {
        return Err(HoleError::Low { hole, low });
    }
    let mut pieces = vec![(0, low)];
    let mut missing = bytes - low;
    let mut cursor = layout::RAM_ABOVE;
    while missing > 0 {
        let hole = holes.first_within(cursor, u64::MAX);
        let room = hole.map_or(u64::MAX, |hole| hole.start).saturating_sub(cursor);
        let length = missing.min(room / HIGH_STEP * HIGH_STEP);
        if length > 0 {
            pieces.push((cursor, length));
            missing -= length;
        }
        if missing == 0 {
            break;
        }
        let Some(hole) = hole else {
            // Without a hole the room is 2^64 less 4 GiB, more than `bytes` can be.
            let hole = IovaRange { start: u64::MAX, last: u64::MAX };
            return Err(HoleError::High { hole, missing });
        };
        cursor = hole
            .last
            .checked_add(1)
            .and_then(|behind| behind.checked_next_multiple_of(HIGH_STEP))
            .ok_or(HoleError::High { hole, missing })?;
    }
    Ok(pieces)
}

/// Returns the first address above the `pieces` of guest memory, at least 4 GiB.
pub fn end_of(pieces: &[(u64, u64)]) -> u64 {
    let ends = pieces.iter().map(|(address, length)| address.saturating_add(*length));
    ends.max().unwrap_or(0).max(layout::RAM_ABOVE)
}

/// Places all BARs behind memory that ends at `ram_end`, so that the window of 64-bit BARs has no
/// hole in it. `place` places them from an address on. Where the CPUs' address bits leave no such
/// place, BARs that only the guest's CPUs reach may lie in a hole; those that other devices reach
/// may not.
pub fn place_around(
    ram_end: u64,
    holes: &Holes,
    peers: Peers,
    place: impl Fn(u64) -> Result<Plan, PlaceError>,
) -> Result<Plan, PlaceError> {
    let mut start = ram_end;
    // Each step goes behind one hole more.
    for _ in 0..=holes.list().len() {
        let plan = match place(start) {
            Err(PlaceError::AddressBits { .. }) if start != ram_end && peers == Peers::Apart => {
                break;
            }
            result => result?,
        };
        let end = plan.mmio64.saturating_add(plan.mmio64_size);
        let Some(hole) = holes.first_within(plan.mmio64, end - 1) else { return Ok(plan) };
        match hole.last.checked_add(1) {
            Some(behind) => start = behind,
            // Beyond what the IOMMU translates at all.
            None if peers == Peers::Apart => return Ok(plan),
            None => return Err(PlaceError::Peers { end, hole }),
        }
    }
    place(ram_end)
}

#[cfg(test)]
#[path = "holes_tests.rs"]
mod tests;
