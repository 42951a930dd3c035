//! VHD, fixed and dynamic.
//! Source: Microsoft, "Virtual Hard Disk Image Format Specification" 1.0, "Hard Disk Footer
//! Format", "Dynamic Disk Header Format", "Block Allocation Table and Data Blocks".
//!
//! | Offset | Bytes | Field of the footer, the last 512 bytes (big-endian)        |
//! |--------|-------|-------------------------------------------------------------|
//! | 0      | 8     | "conectix"                                                  |
//! | 12     | 4     | version 1.0                                                 |
//! | 16     | 8     | offset of the dynamic header                                |
//! | 48     | 8     | size of the disk in bytes                                   |
//! | 60     | 4     | 2 fixed, 3 dynamic, 4 differencing                          |
//! | 64     | 4     | complement of the sum of all bytes but these                |
//!
//! | Offset | Bytes | Field of the dynamic header, 1024 bytes                     |
//! |--------|-------|-------------------------------------------------------------|
//! | 0      | 8     | "cxsparse"                                                  |
//! | 16     | 8     | offset of the table of blocks                               |
//! | 28     | 4     | entries of the table                                        |
//! | 32     | 4     | bytes of a block                                            |
//! | 36     | 4     | complement of the sum                                       |

use super::{
    Disk, Format, ImportError, Input, MAX_PIECE, MAX_TABLE, Piece, SECTOR, limited, number, sized,
};

const FORMAT: Format = Format::Vhd;
const COOKIE: &[u8] = b"conectix";
const SPARSE_COOKIE: &[u8] = b"cxsparse";
const FOOTER: u64 = 512;
/// A block that was never written.
const ABSENT: u32 = u32::MAX;
/// Largest block.
const MAX_BLOCK: u64 = 256 << 20;

const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;

/// A VHD image.
pub(super) struct Vhd {
    input: Input,
    size: u64,
    blocks: Option<Blocks>,
}

/// Where the blocks of a dynamic disk lie.
struct Blocks {
    bytes: u64,
    /// First sector of each, its bitmap.
    table: Vec<u32>,
    /// The bitmap read last, and of which block.
    bitmap: (u32, Vec<u8>),
}

/// Returns whether `input`, which begins with `head`, is a VHD.
pub(super) fn is_vhd(input: &Input, head: &[u8]) -> Result<bool, ImportError> {
    let mut footer = [0; 8];
    input.read_padded(input.length().saturating_sub(FOOTER), &mut footer)?;
    Ok(head.starts_with(COOKIE) || footer == COOKIE)
}

impl Vhd {
    pub(super) fn open(input: Input) -> Result<Self, ImportError> {
        let mut footer = [0; 512];
        let end = input.length().saturating_sub(FOOTER);
        input.read_padded(end, &mut footer)?;
        if !footer.starts_with(COOKIE) || !sum_fits(&footer, 64) {
            // A dynamic disk has a copy at its beginning.
            input.read_padded(0, &mut footer)?;
        }
        if !footer.starts_with(COOKIE) || !sum_fits(&footer, 64) {
            return Err(damaged("no footer with a right checksum".to_owned()));
        }
        let long = |at| u64::from_be_bytes(number(&footer, at));
        let kind = u32::from_be_bytes(number(&footer, 60));
        let size = sized(FORMAT, long(48))?;
        if !size.is_multiple_of(SECTOR) {
            return Err(damaged(format!("a disk of {size} bytes, not whole sectors")));
        }
        let blocks = match kind {
            FIXED if size > end => {
                return Err(damaged(format!("{end} bytes of a disk of {size}")));
            }
            FIXED => None,
            DYNAMIC => Some(Blocks::open(&input, long(16), size)?),
            DIFFERENCING => return Err(refused("has a parent".to_owned(), MERGE)),
            other => return Err(refused(format!("has disk type {other}"), CONVERT)),
        };
        Ok(Self { input, size, blocks })
    }
}

impl Blocks {
    fn open(input: &Input, at: u64, size: u64) -> Result<Self, ImportError> {
        let mut head = [0; 1024];
        input.read_padded(at, &mut head)?;
        if !head.starts_with(SPARSE_COOKIE) || !sum_fits(&head, 36) {
            return Err(damaged(format!("no dynamic header with a right checksum at {at:#x}")));
        }
        let entries = u64::from(u32::from_be_bytes(number(&head, 28)));
        let bytes = u64::from(u32::from_be_bytes(number(&head, 32)));
        let offset = u64::from_be_bytes(number(&head, 16));
        if !bytes.is_power_of_two() || !(SECTOR..=MAX_BLOCK).contains(&bytes) {
            return Err(damaged(format!("blocks of {bytes} bytes")));
        }
        limited(FORMAT, "the table of blocks", (entries * 4, MAX_TABLE))?;
        if entries < size.div_ceil(bytes) {
            return Err(damaged(format!("{entries} blocks are too few for {size} bytes")));
        }
        let end = offset.checked_add(entries * 4);
        if end.is_none_or(|end| end > input.length()) {
            return Err(damaged("the table of blocks is outside of the file".to_owned()));
        }
        let mut table = Vec::new();
        input.append(offset, entries * 4, &mut table)?;
        let (words, _) = table.as_chunks::<4>();
        let table = words.iter().map(|word| u32::from_be_bytes(*word)).collect();
        Ok(Self { bytes, table, bitmap: (ABSENT, Vec::new()) })
    }

    fn bitmap_bytes(&self) -> u64 {
        (self.bytes / SECTOR).div_ceil(8).next_multiple_of(SECTOR)
    }

    /// Returns whether a sector was ever written.
    fn is_written(&self, sector: u64) -> bool {
        let byte = usize::try_from(sector / 8).ok().and_then(|at| self.bitmap.1.get(at));
        byte.is_some_and(|byte| byte & (0x80 >> (sector % 8)) != 0)
    }

    fn piece(
        &mut self,
        input: &Input,
        (offset, size): (u64, u64),
        buffer: &mut Vec<u8>,
    ) -> Result<Piece, ImportError> {
        let inside = offset % self.bytes;
        let left = self.bytes - inside;
        let index = usize::try_from(offset / self.bytes).unwrap_or(usize::MAX);
        let first = self.table.get(index).copied().unwrap_or(ABSENT);
        if first == ABSENT {
            return Ok(Piece::Zeroes(left));
        }
        let at = u64::from(first) * SECTOR;
        let data = at + self.bitmap_bytes();
        if data + inside + left.min(size - offset) > input.length() {
            return Err(damaged(format!("a block at {at:#x}, outside of the file")));
        }
        if self.bitmap.0 != first {
            self.bitmap = (first, Vec::new());
            input.append(at, self.bitmap_bytes(), &mut self.bitmap.1)?;
        }
        let sector = inside / SECTOR;
        let written = self.is_written(sector);
        let most = left.min(MAX_PIECE) / SECTOR;
        let same = (0..most).take_while(|next| self.is_written(sector + next) == written).count();
        let length = (same as u64).max(1) * SECTOR - inside % SECTOR;
        if !written {
            return Ok(Piece::Zeroes(length));
        }
        input.append(data + inside, length, buffer)?;
        Ok(Piece::Bytes)
    }
}

impl Disk for Vhd {
    fn size(&self) -> u64 {
        self.size
    }

    fn piece(&mut self, offset: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError> {
        if let Some(blocks) = &mut self.blocks {
            return blocks.piece(&self.input, (offset, self.size), buffer);
        }
        let hole = self.input.hole(offset);
        if hole > 0 {
            return Ok(Piece::Zeroes(hole));
        }
        self.input.append(offset, MAX_PIECE.min(self.size - offset), buffer)?;
        Ok(Piece::Bytes)
    }
}

/// Returns whether the four bytes at `at` are the complement of the sum of all others.
fn sum_fits(bytes: &[u8], at: usize) -> bool {
    let others = bytes.iter().enumerate().filter(|(index, _)| !(at..at + 4).contains(index));
    let sum = others.fold(0u32, |sum, (_, byte)| sum.wrapping_add(u32::from(*byte)));
    u32::from_be_bytes(number(bytes, at)) == !sum
}

fn damaged(problem: String) -> ImportError {
    ImportError::Damaged { format: FORMAT.name(), problem }
}

const CONVERT: &str = "convert it to type 2, fixed, or type 3, dynamic";
const MERGE: &str = "merge it with its parents first, or convert it to a dynamic disk";

fn refused(problem: String, instead: &'static str) -> ImportError {
    ImportError::Unsupported { format: FORMAT.name(), problem, instead }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens a disk of one sector of this type; returns its size.
    fn opened(kind: u32) -> Result<u64, String> {
        let mut bytes = vec![0u8; 1024];
        let footer = &mut bytes[512..];
        footer[..8].copy_from_slice(COOKIE);
        footer[48..56].copy_from_slice(&512u64.to_be_bytes());
        footer[60..64].copy_from_slice(&kind.to_be_bytes());
        let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
        footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
        let disk = Vhd::open(Input::Memory(bytes));
        disk.map(|disk| disk.size).map_err(|error| error.to_string())
    }

    #[test]
    fn only_a_disk_with_parents_is_to_be_merged_with_them() {
        assert_eq!(opened(FIXED), Ok(512));
        let child = opened(DIFFERENCING).expect_err("refused");
        assert!(child.contains("merge it with its parents"), "{child}");
        let reserved = opened(5).expect_err("refused");
        assert!(reserved.contains("type 5") && reserved.contains("type 2, fixed"), "{reserved}");
        assert!(!reserved.contains("parents"), "{reserved}");
    }
}
