//! The mark of an installation that was begun and not finished, in the last 4 KiB of the disk's first
//! MiB. It is written when the disk was cleared and removed when the partition table is whole, so that a
//! power cut between the two parts of the table leaves a disk which the next try takes.
//!
//! It counts only where nothing else is: a disk that somebody used later has more than this in its
//! first or last MiB. Pure.

use update::disk::{gpt::ALIGNMENT, layout};

/// Bytes of the mark: a block of any disk.
pub const BYTES: usize = 4096;
/// Where it is on the disk, in bytes.
pub const AT: u64 = ALIGNMENT - BYTES as u64;

/// What it begins with; zeros follow.
const TEXT: &[u8] = b"holdfast: an installation that is not finished\n";
/// Most bytes of a partition table at either end of a disk: with blocks of 4096 bytes, the protective
/// MBR, the header and four blocks of entries (UEFI 2.10 §5.3).
const TABLE: usize = 6 * 4096;

/// Returns the mark.
pub fn mark() -> [u8; BYTES] {
    let mut mark = [0; BYTES];
    mark[..TEXT.len()].copy_from_slice(TEXT);
    mark
}

/// Whether a disk with this first and last MiB holds the mark, at most parts of our own partition
/// table, and nothing else.
pub fn is(first: &[u8], last: &[u8]) -> bool {
    let Some((before, found)) = first.split_at_checked(first.len().saturating_sub(BYTES)) else {
        return false;
    };
    let Some((head, gap)) = before.split_at_checked(TABLE) else { return false };
    let Some((space, tail)) = last.split_at_checked(last.len().saturating_sub(TABLE)) else {
        return false;
    };
    found == mark()
        && gap.iter().chain(space).all(|&byte| byte == 0)
        && is_ours(head)
        && is_ours(tail)
}

/// Whether the bytes are zero, or of a table with our partitions, or its header alone: the writer puts
/// that of the backup first.
fn is_ours(table: &[u8]) -> bool {
    const SECTOR: usize = 512;
    let name: Vec<u8> = layout::ESP.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let is_empty = |sector: &[u8]| sector.iter().all(|&byte| byte == 0);
    table.windows(name.len()).any(|part| part == name)
        || table.chunks(SECTOR).all(|sector| is_empty(sector) || sector.starts_with(b"EFI PART"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use update::disk::{gpt::BlockSize, layout::Identities};

    use super::*;
    use crate::install::probe::{Content, content};

    /// The first and last MiB of a disk with the mark and the first `writes` writes of a table.
    fn ends(block: BlockSize, writes: usize) -> [Vec<u8>; 2] {
        let table = layout::smallest(Identities::random(), block).unwrap();
        let mut disk = [vec![0; 1 << 20], vec![0; 1 << 20]];
        disk[0][usize::try_from(AT).unwrap()..].copy_from_slice(&mark());
        for (offset, bytes) in table.writes().into_iter().rev().take(writes) {
            let end = (table.bytes - ALIGNMENT).min(offset);
            let (half, at) = if offset < ALIGNMENT { (0, offset) } else { (1, offset - end) };
            let at = usize::try_from(at).unwrap();
            disk[half][at..at + bytes.len()].copy_from_slice(&bytes);
        }
        disk
    }

    #[test]
    fn whatever_is_there_of_the_table_the_next_try_takes_the_disk() {
        for block in [BlockSize::B512, BlockSize::B4096] {
            for writes in 0..=5 {
                let [first, last] = ends(block, writes);
                assert_eq!(content(&first, &last, &[]), Content::Nothing, "{writes} writes");
            }
        }
    }

    #[test]
    fn what_somebody_else_put_there_later_is_something() {
        for (half, at) in [(0, 0x438), (0, 1 << 19), (1, 0), (1, (1 << 20) - 0x2000)] {
            let mut disk = ends(BlockSize::B512, 0);
            disk[half][at] = 1;
            let [first, last] = disk;
            assert_ne!(content(&first, &last, &[]), Content::Nothing, "{half} {at}");
        }
        let [mut first, last] = ends(BlockSize::B512, 5);
        first[1 << 18] = 1;
        assert_ne!(content(&first, &last, &[]), Content::Nothing);
        let [first, last] = ends(BlockSize::B512, 5);
        let names = [layout::ESP, layout::STATE, layout::DATA].map(str::to_owned);
        assert_eq!(content(&first, &last, &names), Content::Holdfast);
    }
}
