//! Which parts of a BAR the guest reaches without leaving its virtual CPU, and where they are.
//!
//! A part is mapped if the kernel lets it be mapped, if it consists of whole pages, and if it holds
//! nothing of the MSI-X table. All else is trapped.

use std::{io, ops::Range, sync::Arc};

use super::{
    device::{Area, Device, Region, RegionInfo},
    places::{Place, Places},
};
use crate::{
    pci::function::Bar,
    sys::{
        kvm::{self, MemorySlot, Vm},
        memory::{Access, Mapping},
    },
};

/// Granularity of mappings.
const PAGE: u64 = 4096;
/// Largest page that processor and IOMMU can use; host and guest addresses agree modulo this.
const LARGEST_PAGE: u64 = 1 << 30;

/// A mapped part of a BAR.
pub struct Part {
    /// The BAR.
    pub bar: u8,
    /// Which part of it.
    pub area: Area,
    /// Where this process has it.
    pub mapping: Arc<Mapping>,
}

/// Gives parts of BARs to the guest. Dropping what comes back takes them away.
pub trait Slots: Send + Sync {
    /// Lets the guest reach `part` at `guest`.
    fn map(&self, guest: u64, part: &Part) -> io::Result<Box<dyn Send>>;
}

impl Slots for Arc<Vm> {
    fn map(&self, guest: u64, part: &Part) -> io::Result<Box<dyn Send>> {
        let place = kvm::Place { guest, size: part.mapping.size() as u64 };
        let slot: MemorySlot = Vm::map(self, place, &part.mapping, 0, Access::ReadWrite)
            .map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Box::new(slot))
    }
}

/// Returns the parts of a BAR of `size` bytes to map, ascending, without the pages that overlap
/// `trapped`.
pub fn plan(info: &RegionInfo, size: u64, trapped: Option<Range<u64>>) -> Vec<Area> {
    // Without a table the hole lies behind everything.
    let hole = trapped.map_or(u64::MAX..u64::MAX, |range| {
        range.start / PAGE * PAGE..range.end.div_ceil(PAGE).saturating_mul(PAGE)
    });
    let mut parts = Vec::new();
    let mut end_of_last = 0;
    for area in &info.mappable {
        let start = area.offset.div_ceil(PAGE).saturating_mul(PAGE).max(end_of_last);
        let end = area.offset.saturating_add(area.size).min(size);
        // The kernel maps a small BAR only when nothing else lies in its page.
        let small = end == info.size && end < PAGE && size >= PAGE;
        let end = if small { PAGE } else { end / PAGE * PAGE };
        let around = [start..end.min(hole.start), start.max(hole.end)..end];
        parts.extend(
            around
                .into_iter()
                .filter(|part| part.start < part.end)
                .map(|part| Area { offset: part.start, size: part.end - part.start }),
        );
        end_of_last = end_of_last.max(end);
    }
    parts
}

/// The mapped parts of one BAR.
pub struct MappedBar {
    index: u8,
    place: Place,
}

impl MappedBar {
    /// Maps what [`plan`] says of BAR `bar`. Nothing is placed yet.
    pub fn new(
        device: &dyn Device,
        bar: &Bar,
        trapped: Option<Range<u64>>,
        (places, slots): (&Arc<Places>, &Arc<dyn Slots>),
    ) -> io::Result<Self> {
        let parts = parts(device, bar, trapped)?;
        Ok(Self { index: bar.index, place: places.add(bar.size, parts, Arc::clone(slots)) })
    }

    /// Returns its place, and where `bars` say that it decodes.
    pub fn decodes(&self, bars: &[Bar]) -> (&Place, Option<u64>) {
        let bar = bars.iter().find(|bar| bar.index == self.index && bar.decoding);
        (&self.place, bar.map(|bar| bar.address).filter(|address| *address != 0))
    }

    /// Takes the parts away, as [`Place::forget`].
    pub fn forget(&mut self) {
        self.place.forget();
    }
}

/// Maps into this process what [`plan`] says of a BAR.
fn parts(device: &dyn Device, bar: &Bar, trapped: Option<Range<u64>>) -> io::Result<Vec<Part>> {
    let info = device.region(Region::Bar(bar.index))?;
    let modulus = bar.size.min(LARGEST_PAGE);
    let map = |area: Area| {
        let mapping = device.map(bar.index, area, modulus)?;
        Ok(Part { bar: bar.index, area, mapping })
    };
    plan(&info, bar.size, trapped).into_iter().map(map).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{pci::function::BarKind, vfio::fake::FakeDevice};

    fn area(offset: u64, size: u64) -> Area {
        Area { offset, size }
    }

    fn check(mappable: &[Area], size: u64, trapped: Option<Range<u64>>, expected: &[Area]) {
        let info = RegionInfo { size, mappable: mappable.to_vec() };
        assert_eq!(plan(&info, size, trapped), expected);
    }

    #[test]
    fn a_bar_without_a_table_is_mapped_whole() {
        check(&[area(0, 0x4000)], 0x4000, None, &[area(0, 0x4000)]);
    }

    #[test]
    fn the_pages_of_the_table_are_trapped() {
        let expected = [area(0, 0x2000), area(0x3000, 0x1000)];
        check(&[area(0, 0x4000)], 0x4000, Some(0x2000..0x2410), &expected);
    }

    #[test]
    fn a_table_at_either_end_leaves_one_part() {
        check(&[area(0, 0x4000)], 0x4000, Some(0..0x10), &[area(0x1000, 0x3000)]);
        check(&[area(0, 0x4000)], 0x4000, Some(0x3ff0..0x4000), &[area(0, 0x3000)]);
    }

    #[test]
    fn less_than_a_page_is_trapped() {
        check(&[area(0, 0x100)], 0x100, None, &[]);
    }

    #[test]
    fn a_small_bar_that_has_its_page_is_mapped() {
        let info = RegionInfo { size: 0x100, mappable: vec![area(0, 0x100)] };
        assert_eq!(plan(&info, 0x1000, None), [area(0, 0x1000)]);
        assert_eq!(plan(&info, 0x1000, Some(0x40..0x80)), []);
    }

    #[test]
    fn sparse_parts_are_kept_apart() {
        let sparse = [area(0x1000, 0x1000), area(0x8000, 0x2000)];
        check(&sparse, 0x1_0000, None, &sparse);
    }

    #[test]
    fn parts_lie_in_memory_as_they_do_in_the_bar_so_that_the_largest_pages_fit() {
        let size = 4 << 30;
        let mut device = FakeDevice::nvme();
        device.bars[0] = RegionInfo { size, mappable: vec![area(0, size)] };
        let bar = Bar { index: 0, kind: BarKind::Memory64, size, address: 8 << 30, decoding: true };
        let parts = parts(&device, &bar, Some(0x6000_0000..0x6000_1000)).expect("room");
        let offsets: Vec<u64> = parts.iter().map(|part| part.area.offset).collect();
        assert_eq!(offsets, [0, 0x6000_1000]);
        for part in &parts {
            let residue = part.mapping.host_address() % LARGEST_PAGE;
            assert_eq!(residue, part.area.offset % LARGEST_PAGE, "{:#x}", part.area.offset);
        }
    }

    proptest! {
        #[test]
        fn parts_are_pages_inside_and_outside_the_table(
            areas in proptest::collection::vec((0u64..0x2_0000, 0u64..0x2_0000), 0..6),
            table in proptest::option::of((0u64..0x2_0000, 1u64..0x8000)),
        ) {
            let mappable = areas.iter().map(|(offset, size)| area(*offset, *size)).collect();
            let info = RegionInfo { size: 0x1_0000, mappable };
            let trapped = table.map(|(start, size)| start..start + size);
            let parts = plan(&info, 0x1_0000, trapped.clone());
            let mut last = 0;
            for part in parts {
                prop_assert!(part.size > 0 && part.offset % PAGE == 0 && part.size % PAGE == 0);
                prop_assert!(part.offset >= last && part.offset + part.size <= 0x1_0000);
                last = part.offset + part.size;
                if let Some(table) = &trapped {
                    prop_assert!(last <= table.start || part.offset >= table.end);
                }
            }
        }
    }
}
