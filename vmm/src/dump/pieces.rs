//! Which bytes of guest memory a dump holds: what the guest has touched. The rest are holes in the
//! memory's file, which read as zeroes, and an ELF segment may end in zeroes that its file lacks.
//! Source: lseek(2), `SEEK_DATA` and `SEEK_HOLE`; System V ABI, "Program Header" (`p_filesz` below
//! `p_memsz`). Huge pages of hugetlbfs are data from end to end there, touched or not.

use std::{fs::File, io};

use rustix::fs::{SeekFrom, seek};

use crate::sys::memory::RamRegion;

/// Holes of fewer bytes are stored as zeroes: a program header for each would help nobody.
const LEAST_HOLE: u64 = 2 << 20;
/// Most pieces. Beyond, smaller holes are stored too. A core file counts its segments in 16 bits
/// (`PN_XNUM` in elf.h), and readers look through all of them for each address.
const MOST: usize = 4096;
/// Bytes of a region that are stored in any case: readers know segments without contents as ones that
/// were left out.
const FIRST: u64 = 4096;

/// A piece of guest memory: bytes that are stored, and zeroes behind them that are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Guest-physical address.
    pub(super) address: u64,
    /// Length in bytes.
    pub(super) size: u64,
    /// Bytes of it that are stored, from the first on.
    pub(super) stored: u64,
    /// Where the memory's file has them.
    pub(super) offset: u64,
}

/// Returns the pieces of `regions`, whose memory is in `file`, in the same order. Together they are all of it.
pub(super) fn pieces(file: &File, regions: &[RamRegion]) -> Vec<Piece> {
    let mut data = Data { ranges: Vec::new(), least: LEAST_HOLE, most: MOST };
    for (number, region) in regions.iter().enumerate() {
        let end = region.offset + region.size;
        data.add(Range {
            region: number,
            start: region.offset,
            end: end.min(region.offset + FIRST),
        });
        let mut at = region.offset;
        while let Some((start, stop)) = next(file, at, end) {
            data.add(Range { region: number, start, end: stop });
            at = stop;
        }
    }
    data.pieces(regions)
}

/// Returns the first data of `file` at or behind `at` and before `end`. What a file cannot tell is data.
fn next(file: &File, at: u64, end: u64) -> Option<(u64, u64)> {
    if at >= end {
        return None;
    }
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        // No data any more.
        Err(rustix::io::Errno::NXIO) => return None,
        Err(error) => {
            let error = io::Error::from(error);
            eprintln!("holdfast-vmm: the dump holds untouched memory too: {error}");
            return Some((at, end));
        }
    };
    let stop = seek(file, SeekFrom::Hole(start)).unwrap_or(end);
    (start < end).then(|| (start, if stop > start { stop.min(end) } else { end }))
}

/// Bytes of the memory's file that are data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    region: usize,
    start: u64,
    end: u64,
}

/// Ranges in order, with holes of `least` bytes at least between those of one region.
struct Data {
    ranges: Vec<Range>,
    least: u64,
    most: usize,
}

impl Data {
    fn add(&mut self, range: Range) {
        self.append(range);
        // A region is one range in the end, and there are few.
        while self.ranges.len() > self.most && self.least < 1 << 62 {
            self.least *= 2;
            for range in std::mem::take(&mut self.ranges) {
                self.append(range);
            }
        }
    }

    fn append(&mut self, range: Range) {
        match self.ranges.last_mut() {
            Some(last)
                if last.region == range.region
                    && range.start.saturating_sub(last.end) < self.least =>
            {
                last.end = last.end.max(range.end);
            }
            _ => self.ranges.push(range),
        }
    }

    fn pieces(&self, regions: &[RamRegion]) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(self.ranges.len());
        for (number, range) in self.ranges.iter().enumerate() {
            let region = &regions[range.region];
            let next = self.ranges.get(number + 1).filter(|next| next.region == range.region);
            let end = next.map_or(region.offset + region.size, |next| next.start);
            pieces.push(Piece {
                address: region.address + (range.start - region.offset),
                size: end - range.start,
                stored: range.end - range.start,
                offset: range.start,
            });
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn region(address: u64, size: u64, offset: u64) -> RamRegion {
        RamRegion { address, size, offset, host_address: 0 }
    }

    fn piece(address: u64, size: u64, stored: u64, offset: u64) -> Piece {
        Piece { address, size, stored, offset }
    }

    #[test]
    fn large_holes_are_left_out_and_small_ones_are_not() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(48 * MIB).expect("a length");
        for at in [MIB, 2 * MIB, 16 * MIB, 47 * MIB] {
            file.write_all_at(&[1; 4096], at).expect("written");
        }
        let regions = [region(0, 32 * MIB, 0), region(1 << 32, 16 * MIB, 32 * MIB)];
        let expected = [
            piece(0, 16 * MIB, 2 * MIB + 4096, 0),
            piece(16 * MIB, 16 * MIB, 4096, 16 * MIB),
            piece(1 << 32, 15 * MIB, 4096, 32 * MIB),
            piece((1 << 32) + 15 * MIB, MIB, 4096, 47 * MIB),
        ];
        assert_eq!(pieces(&file, &regions), expected);
    }

    #[test]
    fn data_across_regions_belongs_to_each() {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&[1; 8192], 0).expect("written");
        let regions = [region(0, 4096, 0), region(1 << 32, 4096, 4096)];
        let expected = [piece(0, 4096, 4096, 0), piece(1 << 32, 4096, 4096, 4096)];
        assert_eq!(pieces(&file, &regions), expected);
    }

    #[test]
    fn too_many_pieces_are_merged_over_their_smallest_holes() {
        let mut data = Data { ranges: Vec::new(), least: MIB, most: 2 };
        for start in [0, 2, 16] {
            let start = start * MIB;
            data.add(Range { region: 0, start, end: start + 4096 });
        }
        let expected =
            [piece(0, 16 * MIB, 2 * MIB + 4096, 0), piece(16 * MIB, 16 * MIB, 4096, 16 * MIB)];
        assert_eq!(data.pieces(&[region(0, 32 * MIB, 0)]), expected);
    }
}
