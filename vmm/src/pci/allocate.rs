//! Placing BARs: each at its natural alignment, those behind one bridge together, so that bridges
//! have windows that nest as the bridges do, and root complexes have theirs side by side.

use super::{
    function::{Bar, BarKind},
    port::Windows,
};
use crate::{layout, vfio::dma::IovaRange};

/// What is right above a function or a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Above {
    /// A root complex, by number.
    Root(usize),
    /// A bridge, by its index in the list of bridges.
    Bridge(usize),
}

/// One bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bridge {
    /// What is above: for a bridge, one earlier in the list.
    pub above: Above,
    /// 32-bit memory that its window has at least, in bytes.
    pub memory: u64,
    /// 64-bit prefetchable memory that its window has at least, in bytes.
    pub prefetchable: u64,
}

/// One BAR to be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Which function, in the caller's numbering.
    pub function: usize,
    /// What is above it.
    pub above: Above,
    /// The BAR.
    pub bar: Bar,
}

/// Everything to be placed, and what around.
#[derive(Debug, Clone, Copy)]
pub struct Demand<'a> {
    /// BARs.
    pub requests: &'a [Request],
    /// Bridges, each after the one above it.
    pub bridges: &'a [Bridge],
    /// Number of root complexes, at least 1.
    pub roots: usize,
    /// First address of 32-bit PCI memory, which ends at [`layout::MMIO32_END`]; a multiple of 1 GiB.
    pub low: u64,
    /// First address behind RAM.
    pub ram_end: u64,
    /// Physical address bits of the processors.
    pub bits: u8,
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

/// The 64-bit window begins and ends on multiples of 1 GiB.
const WINDOW_STEP: u64 = 1 << 30;

/// All BARs' places and the windows they need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The BARs.
    pub placed: Vec<Placed>,
    /// What each bridge forwards.
    pub bridges: Vec<Windows>,
    /// What each root complex has. Together these are the whole windows; the first has what nobody
    /// needs.
    pub roots: Vec<Windows>,
    /// First address of 64-bit PCI memory.
    pub mmio64: u64,
    /// Length of 64-bit PCI memory, whole GiB and at least one.
    pub mmio64_size: u64,
}

/// Places all BARs.
pub fn place(demand: &Demand<'_>) -> Result<Plan, PlaceError> {
    let limit = 1u64.checked_shl(u32::from(demand.bits)).unwrap_or(u64::MAX);
    let start = up(demand.ram_end, WINDOW_STEP);
    let io = Space::lay(demand, SpaceKind::Io, u64::from(layout::PIO));
    io.check("I/O ports", u64::from(layout::PIO_LAST - layout::PIO) + 1)?;
    let memory = Space::lay(demand, SpaceKind::Memory, demand.low);
    memory.check("32-bit memory", layout::MMIO32_END - demand.low)?;
    let wide = Space::lay(demand, SpaceKind::Prefetchable, start);
    let end = up(wide.end.max(start.saturating_add(1)), WINDOW_STEP);
    if end > limit {
        return Err(PlaceError::AddressBits { end, bits: demand.bits });
    }
    let bridges = (0..demand.bridges.len()).map(|bridge| Windows {
        io: io.bridge(bridge).and_then(narrow),
        memory: memory.bridge(bridge).and_then(narrow),
        prefetchable: wide.bridge(bridge),
    });
    let roots = (0..demand.roots).map(|root| Windows {
        io: io.root(root, u64::from(layout::PIO_LAST)).and_then(narrow),
        memory: memory.root(root, layout::MMIO32_END - 1).and_then(narrow),
        prefetchable: wide.root(root, end - 1),
    });
    let placed = demand.requests.iter().enumerate().map(|(number, request)| {
        let Request { function, bar, .. } = *request;
        let space = match SpaceKind::of(bar.kind) {
            SpaceKind::Io => &io,
            SpaceKind::Memory => &memory,
            SpaceKind::Prefetchable => &wide,
        };
        let address = space.requests[number];
        Placed { function, index: bar.index, kind: bar.kind, address, size: bar.size }
    });
    Ok(Plan {
        placed: placed.collect(),
        bridges: bridges.collect(),
        roots: roots.collect(),
        mmio64: start,
        mmio64_size: end - start,
    })
}

/// Which window a BAR behind a bridge has to be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SpaceKind {
    Io,
    Memory,
    Prefetchable,
}

impl SpaceKind {
    fn of(kind: BarKind) -> Self {
        match kind {
            BarKind::Io => Self::Io,
            // A 64-bit BAR that is not prefetchable must lie below 4 GiB when it is behind a
            // bridge, whose 64-bit window is the prefetchable one.
            BarKind::Memory32 | BarKind::Memory64 => Self::Memory,
            BarKind::Memory64Prefetchable => Self::Prefetchable,
        }
    }

    /// Granularity of bridges' windows (PCIe 6.0 §7.5.1.3.6, §7.5.1.3.8).
    fn bridge_step(self) -> u64 {
        match self {
            Self::Io => 0x1000,
            Self::Memory | Self::Prefetchable => 1 << 20,
        }
    }

    /// Smallest step between BARs: pages, so that each can be mapped by itself.
    fn bar_step(self) -> u64 {
        match self {
            Self::Io => 1,
            Self::Memory | Self::Prefetchable => 4096,
        }
    }

    fn kept(self, bridge: &Bridge) -> u64 {
        match self {
            Self::Io => 0,
            Self::Memory => bridge.memory,
            Self::Prefetchable => bridge.prefetchable,
        }
    }
}

/// Something to place in one piece.
#[derive(Debug, Clone, Copy)]
struct Block {
    content: Content,
    size: u64,
    align: u64,
}

#[derive(Debug, Clone, Copy)]
enum Content {
    Request(usize),
    Bridge(usize),
}

/// One kind of address space, laid out.
struct Space {
    start: u64,
    end: u64,
    /// Address of each request of this kind; 0 for the others.
    requests: Vec<u64>,
    /// Base and size of each bridge's window; size 0 for none.
    bridges: Vec<(u64, u64)>,
    /// Base and end of each root complex.
    roots: Vec<(u64, u64)>,
}

impl Space {
    fn lay(demand: &Demand<'_>, kind: SpaceKind, start: u64) -> Self {
        let (requests, bridges) = (demand.requests.len(), demand.bridges.len());
        let mut space = Self {
            start,
            end: start,
            requests: vec![0; requests],
            bridges: vec![(0, 0); bridges],
            roots: vec![(start, start); demand.roots],
        };
        // From the leaves up, how large everything is and where in its bridge.
        let mut aligns = vec![1; bridges];
        for number in (0..bridges).rev() {
            let mut blocks = space.blocks(demand, kind, Above::Bridge(number), &aligns);
            blocks.sort_by_key(|block| std::cmp::Reverse(block.align));
            let mut end = 0;
            let step = kind.bridge_step();
            let mut align = step;
            for block in blocks {
                end = space.put(block, end);
                align = align.max(block.align);
            }
            let size = up(end.max(kind.kept(&demand.bridges[number])), step);
            let natural = if size == 0 { 1 } else { 1 << size.ilog2() };
            aligns[number] =
                align.max(if kind.kept(&demand.bridges[number]) == 0 { 1 } else { natural });
            space.bridges[number].1 = size;
        }
        // Root complexes side by side, the first last, small alignments first: what they take lies
        // in the gap below the first large BAR.
        for root in (1..demand.roots).chain([0]) {
            let base = up(space.end, kind.bridge_step());
            let mut blocks = space.blocks(demand, kind, Above::Root(root), &aligns);
            blocks.sort_by_key(|block| block.align);
            let end = blocks.into_iter().fold(base, |end, block| space.put(block, end));
            space.end = up(end, kind.bridge_step());
            space.roots[root] = (base, space.end);
        }
        space.resolve(demand, kind);
        space
    }

    fn blocks(
        &self,
        demand: &Demand<'_>,
        kind: SpaceKind,
        above: Above,
        aligns: &[u64],
    ) -> Vec<Block> {
        let bars = demand.requests.iter().enumerate();
        let bars = bars.filter(|(_, request)| {
            request.above == above && SpaceKind::of(request.bar.kind) == kind
        });
        let bars = bars.map(|(number, request)| {
            let size = request.bar.size.max(kind.bar_step());
            Block { content: Content::Request(number), size, align: size }
        });
        let bridges = demand.bridges.iter().enumerate();
        let bridges =
            bridges.filter(|(number, bridge)| bridge.above == above && self.bridges[*number].1 > 0);
        let bridges = bridges.map(|(number, _)| Block {
            content: Content::Bridge(number),
            size: self.bridges[number].1,
            align: aligns[number],
        });
        bars.chain(bridges).collect()
    }

    /// Puts a block at the first place from `cursor` on. Returns where it ends.
    fn put(&mut self, block: Block, cursor: u64) -> u64 {
        let address = up(cursor, block.align);
        match block.content {
            Content::Request(number) => self.requests[number] = address,
            Content::Bridge(number) => self.bridges[number].0 = address,
        }
        address.saturating_add(block.size)
    }

    /// Turns places within bridges into addresses, from the root complexes down.
    fn resolve(&mut self, demand: &Demand<'_>, kind: SpaceKind) {
        let within = |bridges: &[(u64, u64)], above| match above {
            Above::Root(_) => 0,
            Above::Bridge(number) => bridges.get(number).map_or(0, |(base, _)| *base),
        };
        for number in 0..demand.bridges.len() {
            let base = within(&self.bridges, demand.bridges[number].above);
            self.bridges[number].0 = self.bridges[number].0.saturating_add(base);
        }
        for (number, request) in demand.requests.iter().enumerate() {
            if SpaceKind::of(request.bar.kind) == kind {
                let base = within(&self.bridges, request.above);
                self.requests[number] = self.requests[number].saturating_add(base);
            }
        }
    }

    fn check(&self, window: &'static str, available: u64) -> Result<(), PlaceError> {
        let needed = self.end - self.start;
        if needed > available {
            return Err(PlaceError::Window { window, needed, available });
        }
        Ok(())
    }

    fn bridge(&self, number: usize) -> Option<(u64, u64)> {
        let (base, size) = self.bridges[number];
        Some((base, base.checked_add(size.checked_sub(1)?)?))
    }

    /// Returns what a root complex has, if anything; the first has everything up to `last`.
    fn root(&self, number: usize, last: u64) -> Option<(u64, u64)> {
        let (base, end) = self.roots[number];
        let last = if number == 0 { last } else { end.checked_sub(1)? };
        (base <= last).then_some((base, last))
    }
}

fn up(address: u64, step: u64) -> u64 {
    address.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

fn narrow<T: TryFrom<u64>>((base, last): (u64, u64)) -> Option<(T, T)> {
    Some((T::try_from(base).ok()?, T::try_from(last).ok()?))
}

#[cfg(test)]
#[path = "allocate_tests.rs"]
mod tests;
