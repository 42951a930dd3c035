//! What root complexes decode in a machine whose firmware places BARs: all that is free, shared so
//! that each can place what is below it. ACPI's `_CRS` and `etc/hardware-info` are both made from
//! this, so that operating system, firmware and VMM know one truth. Pure.
//!
//! The first root complex has what no other needs. Firmware is told of one range above 4 GiB for
//! each: processors have few registers (MTRRs) that say how such a range is cached, so it begins
//! where its largest BAR may and is no larger than it is likely to have to be.

use super::port::Windows;
use crate::layout;

/// What a root complex decodes, as first and last addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Apertures {
    /// I/O ports.
    pub io: Option<(u16, u16)>,
    /// Memory below 4 GiB, the range that firmware is told first.
    pub low: Vec<(u32, u32)>,
    /// Memory above 4 GiB.
    pub high: Vec<(u64, u64)>,
    /// The part of it that firmware is told.
    pub told: Option<(u64, u64)>,
}

impl From<Windows> for Apertures {
    fn from(windows: Windows) -> Self {
        let Windows { io, memory, prefetchable } = windows;
        let (low, high) = (Vec::from_iter(memory), Vec::from_iter(prefetchable));
        Self { io, low, high, told: prefetchable }
    }
}

/// Where nothing lies in a machine with firmware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Free {
    /// End of RAM below 4 GiB, at most.
    pub low: u64,
    /// Ranges above 4 GiB: first and last address, ascending.
    pub high: Vec<(u64, u64)>,
}

impl Free {
    /// Returns what is free below 4 GiB, first and last address: around configuration space.
    fn below(&self, ecam: u64) -> Vec<(u64, u64)> {
        let behind = ecam.saturating_add(layout::ECAM_SIZE).max(self.low);
        let pieces = [(self.low, ecam), (behind, layout::FIRMWARE_MMIO32_END)];
        let within = pieces.map(|(start, end)| (start, end.min(layout::FIRMWARE_MMIO32_END)));
        let some = within.into_iter().filter(|(start, end)| start < end);
        some.map(|(start, end)| (start, end - 1)).collect()
    }
}

/// How much of an address space something needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    /// Bytes.
    pub size: u64,
    /// Alignment of the largest piece, a power of two; 0 for nothing.
    pub align: u64,
}

impl Room {
    /// Adds a BAR or a bridge's window of `size` bytes, which begins at a multiple of the largest
    /// BAR that it can hold.
    pub fn add(&mut self, size: u64) {
        if size > 0 {
            let align = 1 << size.ilog2();
            self.size = self.size.saturating_add(up(size, align));
            self.align = self.align.max(align);
        }
    }
}

/// One root complex.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Share {
    /// Bytes of I/O ports that it needs.
    pub io: u64,
    /// What it needs below 4 GiB.
    pub low: Room,
    /// What it needs above 4 GiB.
    pub high: Room,
    /// What it has when the VMM places the BARs.
    pub placed: Windows,
}

/// The least that a root complex has below and above 4 GiB when there is room enough, in bytes;
/// above, what firmware would give it.
const LOW_LEAST: u64 = 16 << 20;
const HIGH_LEAST: u64 = 32 << 30;
/// Alignment of what a root complex has, in bytes.
const LOW_STEP: u64 = 1 << 20;
const HIGH_STEP: u64 = 1 << 30;
/// Firmware maps no more than this, 46 bits (edk2 OvmfPkg/Library/PlatformInitLib).
const HIGH_END: u64 = 1 << 46;

/// Shares what is `free` among root complexes; configuration space is at `ecam`.
pub fn share(free: &Free, ecam: u64, shares: &[Share]) -> Vec<Apertures> {
    let low: Vec<Room> = shares.iter().map(|share| share.low).collect();
    let below = free.below(ecam);
    // The VMM does not know yet where firmware puts configuration space.
    let is_free =
        |(first, last): &(u64, u64)| below.iter().any(|(from, to)| from <= first && last <= to);
    let placed = |share: &Share| share.placed.memory.map(|(a, b)| (u64::from(a), u64::from(b)));
    let placed: Vec<_> = shares.iter().map(|share| placed(share).filter(is_free)).collect();
    let low = Parts::of(below.clone(), &low, &placed, (LOW_LEAST, LOW_STEP));
    let mut above = free.high.clone();
    remove(&mut above, (ecam, ecam.saturating_add(layout::ECAM_SIZE - 1)));
    let high: Vec<Room> = shares.iter().map(|share| share.high).collect();
    let placed: Vec<_> = shares.iter().map(|share| share.placed.prefetchable).collect();
    let high = Parts::of(above, &high, &placed, (HIGH_LEAST, HIGH_STEP));
    let io = ports(shares);
    let narrow =
        |(first, last): (u64, u64)| Some((u32::try_from(first).ok()?, u32::try_from(last).ok()?));
    let all = io.into_iter().enumerate().map(|(number, io)| {
        if number == 0 {
            let mut left = low.left.clone();
            left.sort_by_key(|(first, last)| std::cmp::Reverse(last - first));
            let low = left.into_iter().filter_map(narrow).collect();
            return Apertures { io, low, high: high.left.clone(), told: high.first };
        }
        let (low, high) = (low.others[number - 1], high.others[number - 1]);
        let low = low.and_then(narrow).into_iter().collect();
        Apertures { io, low, high: high.into_iter().collect(), told: high }
    });
    all.collect()
}

/// Returns the I/O ports of each root complex: those of the first lie behind all others'.
fn ports(shares: &[Share]) -> Vec<Option<(u16, u16)>> {
    let mut next = u64::from(layout::PIO);
    let mut all = vec![None];
    for share in shares.iter().skip(1) {
        let first = next;
        next += up(share.io, 0x1000);
        all.push((next > first).then_some((first, next - 1)));
    }
    all[0] = Some((next, u64::from(layout::PIO_LAST)));
    let needed = shares.first().map_or(0, |share| share.io);
    if next + needed > u64::from(layout::PIO_LAST) + 1 {
        return shares.iter().map(|share| share.placed.io).collect();
    }
    let narrow =
        |(first, last): (u64, u64)| Some((u16::try_from(first).ok()?, u16::try_from(last).ok()?));
    all.into_iter().map(|range| range.and_then(narrow)).collect()
}

/// One kind of memory, shared.
struct Parts {
    /// What each but the first has.
    others: Vec<Option<(u64, u64)>>,
    /// What the first has.
    left: Vec<(u64, u64)>,
    /// Where of it firmware places the BARs of the first.
    first: Option<(u64, u64)>,
}

impl Parts {
    /// Gives each twice what it needs, because firmware places BARs in an order of its own; else
    /// what it needs; else what the VMM would place them in.
    fn of(
        free: Vec<(u64, u64)>,
        needs: &[Room],
        placed: &[Option<(u64, u64)>],
        (least, step): (u64, u64),
    ) -> Self {
        let twice = Self::with(&free, needs, |size| size.saturating_mul(2).max(least), step);
        let all = twice.or_else(|| Self::with(&free, needs, |size| size.max(step), step));
        all.unwrap_or_else(|| {
            let others: Vec<_> = placed.iter().skip(1).copied().collect();
            let mut left = free;
            others.iter().flatten().for_each(|range| remove(&mut left, *range));
            let first = left.iter().copied().max_by_key(|(first, last)| last - first);
            Self { others, left, first }
        })
    }

    fn with(
        free: &[(u64, u64)],
        needs: &[Room],
        wish: impl Fn(u64) -> u64,
        step: u64,
    ) -> Option<Self> {
        let mut left = free.to_vec();
        let seek = |left: &[(u64, u64)], room: &Room| {
            let align = room.align.max(step);
            find(left, up(wish(room.size), align), align)
        };
        let mut others = Vec::new();
        for room in needs.iter().skip(1) {
            let range = if room.size == 0 { None } else { Some(seek(&left, room)?) };
            range.into_iter().for_each(|range| remove(&mut left, range));
            others.push(range);
        }
        let first = Some(seek(&left, needs.first()?)?);
        Some(Self { others, left, first })
    }
}

/// Finds the lowest `size` bytes at a multiple of `align`.
fn find(free: &[(u64, u64)], size: u64, align: u64) -> Option<(u64, u64)> {
    free.iter().find_map(|(first, last)| {
        let start = first.checked_next_multiple_of(align)?;
        let end = start.checked_add(size.checked_sub(1)?)?;
        (end <= *last && end < HIGH_END).then_some((start, end))
    })
}

/// Takes a range out of what is free.
fn remove(free: &mut Vec<(u64, u64)>, (first, last): (u64, u64)) {
    let cut = |(start, end): (u64, u64)| {
        if last < start || first > end {
            return vec![(start, end)];
        }
        let before = (start < first).then(|| (start, first - 1));
        let behind = (last < end).then(|| (last + 1, end));
        before.into_iter().chain(behind).collect()
    };
    *free = free.drain(..).flat_map(cut).collect();
}

fn up(address: u64, step: u64) -> u64 {
    address.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "apertures_tests.rs"]
mod tests;
