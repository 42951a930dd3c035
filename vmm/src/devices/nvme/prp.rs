//! Physical region pages: where a command's data lies.
//! Source: NVMe 1.4 §4.3 "Physical Region Page Entry and List", figures 107 to 109.
//!
//! The memory page size is 4 KiB, the only one that CAP offers. The first page may begin anywhere
//! on a dword; every other page, and every list but the first, begins on a page. The last entry of
//! a list that does not hold all is a pointer to the next list.

use vm_memory::{Bytes, GuestAddress};

use super::command::Status;
use crate::sys::memory::GuestRam;

/// Bytes of a memory page (CC.MPS = 0).
pub const PAGE: u64 = 4096;
/// Bytes of a list entry.
const ENTRY: u64 = 8;

/// Returns the pieces of guest memory that hold `length` bytes, in order, neighbours merged.
/// Whether they are memory is seen when they are used.
///
/// The number of lists read is bounded by `length`: every list but the first holds at least 511
/// pages of data.
pub fn segments(
    ram: &GuestRam,
    (first, second): (u64, u64),
    length: u64,
) -> Result<Vec<(GuestAddress, u32)>, Status> {
    let mut pieces = Pieces::default();
    if length == 0 {
        return Ok(pieces.0);
    }
    if !first.is_multiple_of(4) {
        return Err(Status::PRP_OFFSET);
    }
    let here = length.min(PAGE - first % PAGE);
    pieces.add(first, here);
    let mut left = length - here;
    if left == 0 {
        return Ok(pieces.0);
    }
    if left <= PAGE {
        pieces.add(page(second)?, left);
        return Ok(pieces.0);
    }
    if !second.is_multiple_of(ENTRY) {
        return Err(Status::PRP_OFFSET);
    }
    let mut list = second;
    while left > 0 {
        let fitting = (PAGE - list % PAGE) / ENTRY;
        let needed = left.div_ceil(PAGE);
        let pages = if needed > fitting { fitting - 1 } else { needed };
        let mut next = 0;
        for (index, entry) in (0..).zip(entries(ram, list, fitting.min(needed))?) {
            if index == pages {
                next = page(entry)?;
                break;
            }
            let here = left.min(PAGE);
            pieces.add(page(entry)?, here);
            left -= here;
        }
        list = next;
    }
    Ok(pieces.0)
}

/// Copies `data` to where the PRPs say.
pub fn write(ram: &GuestRam, prps: (u64, u64), data: &[u8]) -> Result<(), Status> {
    write_front(ram, prps, data.len() as u64, data)
}

/// Copies `data` to the front of the `length` bytes that the PRPs name; what is behind it stays as it is.
pub fn write_front(
    ram: &GuestRam,
    prps: (u64, u64),
    length: u64,
    data: &[u8],
) -> Result<(), Status> {
    let mut rest = data;
    for (address, piece) in segments(ram, prps, length)? {
        if rest.is_empty() {
            break;
        }
        let (part, behind) = rest.split_at(rest.len().min(piece as usize));
        ram.write_slice(part, address).map_err(|_| Status::DATA_TRANSFER)?;
        rest = behind;
    }
    Ok(())
}

/// Fills `data` from where the PRPs say.
pub fn read(ram: &GuestRam, prps: (u64, u64), data: &mut [u8]) -> Result<(), Status> {
    let pieces = segments(ram, prps, data.len() as u64)?;
    let mut rest = data;
    for (address, length) in pieces {
        let (part, behind) = rest.split_at_mut(rest.len().min(length as usize));
        ram.read_slice(part, address).map_err(|_| Status::DATA_TRANSFER)?;
        rest = behind;
    }
    Ok(())
}

fn page(entry: u64) -> Result<u64, Status> {
    if entry.is_multiple_of(PAGE) { Ok(entry) } else { Err(Status::PRP_OFFSET) }
}

/// Reads `count` entries, at most a page of them.
fn entries(ram: &GuestRam, at: u64, count: u64) -> Result<Vec<u64>, Status> {
    let bytes = usize::try_from((count * ENTRY).min(PAGE)).unwrap_or(0);
    let mut list = vec![0; bytes];
    ram.read_slice(&mut list, GuestAddress(at)).map_err(|_| Status::DATA_TRANSFER)?;
    let (words, _) = list.as_chunks::<8>();
    Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

/// Pieces of memory in order.
#[derive(Default)]
struct Pieces(Vec<(GuestAddress, u32)>);

impl Pieces {
    /// Adds at most a page.
    fn add(&mut self, address: u64, length: u64) {
        let length = u32::try_from(length).unwrap_or(0);
        if let Some((start, before)) = self.0.last_mut()
            && start.0.checked_add(u64::from(*before)) == Some(address)
            && let Some(both) = before.checked_add(length)
        {
            *before = both;
            return;
        }
        self.0.push((GuestAddress(address), length));
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::*;

    const RAM: u64 = 8 << 20;

    fn ram() -> GuestRam {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).expect("memory")
    }

    fn list(ram: &GuestRam, at: u64, entries: &[u64]) {
        for (index, entry) in (0u64..).zip(entries) {
            ram.write_obj(*entry, GuestAddress(at + 8 * index)).expect("inside");
        }
    }

    fn pieces(ram: &GuestRam, prps: (u64, u64), length: u64) -> Result<Vec<(u64, u32)>, Status> {
        let found = segments(ram, prps, length)?;
        Ok(found.into_iter().map(|(address, length)| (address.0, length)).collect())
    }

    #[test]
    fn one_page_needs_one_entry() {
        let ram = ram();
        assert_eq!(pieces(&ram, (0x1000, 7), 4096), Ok(vec![(0x1000, 4096)]));
        assert_eq!(pieces(&ram, (0x1e00, 7), 512), Ok(vec![(0x1e00, 512)]));
        assert_eq!(pieces(&ram, (0, 0), 0), Ok(vec![]));
    }

    #[test]
    fn two_pages_need_two() {
        let ram = ram();
        assert_eq!(pieces(&ram, (0x1e00, 0x5000), 1024), Ok(vec![(0x1e00, 512), (0x5000, 512)]));
        assert_eq!(pieces(&ram, (0x1000, 0x2000), 8192), Ok(vec![(0x1000, 8192)]));
        assert_eq!(pieces(&ram, (0x1e00, 0x5008), 1024), Err(Status::PRP_OFFSET));
    }

    #[test]
    fn more_pages_need_a_list() {
        let ram = ram();
        list(&ram, 0x8010, &[0x5000, 0x7000]);
        let expected = vec![(0x1ffc, 4), (0x5000, 4096), (0x7000, 4)];
        assert_eq!(pieces(&ram, (0x1ffc, 0x8010), 4104), Ok(expected));
        list(&ram, 0x8010, &[0x5000, 0x7004]);
        assert_eq!(pieces(&ram, (0x1ffc, 0x8010), 4104), Err(Status::PRP_OFFSET));
        assert_eq!(pieces(&ram, (0x1ffc, 0x8014), 4104), Err(Status::PRP_OFFSET));
        assert_eq!(pieces(&ram, (0x1ffe, 0x8010), 4104), Err(Status::PRP_OFFSET));
    }

    #[test]
    fn the_last_entry_of_a_full_list_points_to_the_next() {
        let ram = ram();
        list(&ram, 0x8ff0, &[0x5000, 0x9000]);
        list(&ram, 0x9000, &[0x7000, 0xb000]);
        let expected = vec![(0x1000, 4096), (0x5000, 4096), (0x7000, 4096), (0xb000, 4096)];
        assert_eq!(pieces(&ram, (0x1000, 0x8ff0), 4 * 4096), Ok(expected));
        // Two pages fit the two entries: none is a pointer.
        let expected = vec![(0x1000, 4096), (0x5000, 4096), (0x9000, 4096)];
        assert_eq!(pieces(&ram, (0x1000, 0x8ff0), 3 * 4096), Ok(expected));
        // A list of one entry that is a pointer.
        list(&ram, 0x8ff8, &[0x9000]);
        let expected = vec![(0x1000, 4096), (0x7000, 4096), (0xb000, 4096)];
        assert_eq!(pieces(&ram, (0x1000, 0x8ff8), 3 * 4096), Ok(expected));
        list(&ram, 0x8ff8, &[0x9008]);
        assert_eq!(pieces(&ram, (0x1000, 0x8ff8), 3 * 4096), Err(Status::PRP_OFFSET));
    }

    #[test]
    fn lists_outside_memory_are_transfer_errors() {
        let ram = ram();
        assert_eq!(pieces(&ram, (0x1000, RAM), 3 * 4096), Err(Status::DATA_TRANSFER));
        assert_eq!(pieces(&ram, (0x1000, u64::MAX - 7), 3 * 4096), Err(Status::DATA_TRANSFER));
        assert_eq!(write(&ram, (RAM, 0), &[1; 16]), Err(Status::DATA_TRANSFER));
        assert_eq!(read(&ram, (u64::MAX - 4095, 0), &mut [1; 16]), Err(Status::DATA_TRANSFER));
    }

    #[test]
    fn a_list_that_points_to_itself_ends_with_the_data() {
        let ram = ram();
        list(&ram, 0x9000, &[0x9000; 512]);
        let found = pieces(&ram, (0x1000, 0x9000), 1 << 20).expect("pages");
        assert_eq!(found.len(), 256);
    }

    #[test]
    fn pages_are_those_of_the_transfer_where_there_is_less_data() {
        let ram = ram();
        let (prps, length) = ((0x1f00, 0x8000), 12 << 10);
        list(&ram, 0x8000, &[0x5000, 0x7000, RAM]);
        list(&ram, 0x5000, &[u64::MAX; 2]);
        write_front(&ram, prps, length, &[7; 264]).expect("inside");
        let word = |at| ram.read_obj::<u64>(GuestAddress(at)).expect("inside");
        assert_eq!([0x5000, 0x5008].map(word), [0x0707_0707_0707_0707, u64::MAX]);
        assert_eq!(word(0x8000), 0x5000, "the list is no page of data");
        list(&ram, 0x8000, &[0x5000, 0x7000, 0x9004]);
        assert_eq!(write_front(&ram, prps, length, &[7; 264]), Err(Status::PRP_OFFSET));
    }

    #[test]
    fn data_goes_where_the_entries_say() {
        let ram = ram();
        let data: Vec<u8> = (0u8..=255).cycle().take(600).collect();
        write(&ram, (0x1f00, 0x4000), &data).expect("inside");
        let mut back = vec![0; 600];
        read(&ram, (0x1f00, 0x4000), &mut back).expect("inside");
        assert_eq!(back, data);
        let mut part = [0; 4];
        ram.read_slice(&mut part, GuestAddress(0x4000)).expect("inside");
        assert_eq!(part, [0, 1, 2, 3]);
    }
}
