//! Groups of blocks: what their descriptors and bitmaps say. Each descriptor is
//! verified once more as it is used: what a disk returns may be another thing each time.

use std::os::unix::fs::FileExt;

use super::{
    BLOCK, Look, PER_GROUP, PIECE, Source, Stop, crc32c, ensure, half, inodes, wide, word,
};
use crate::seal::descriptors::has_superblock;

/// Bits of `bg_flags`: no inode was ever used, no block, and the table of inodes is zeroed.
const INODES_UNUSED: u16 = 1;
const BLOCKS_UNUSED: u16 = 2;
const ZEROED: u16 = 4;
/// Bitmaps lie side by side for as many groups as this, as a rule.
const BUNCH: u64 = 16;

/// A few blocks in a row, read together.
#[derive(Default)]
pub(super) struct Window {
    first: u64,
    bytes: Vec<u8>,
}

impl Window {
    /// Returns a block, and reads up to `ahead` of them when it is not there yet.
    fn block<D: FileExt>(
        &mut self,
        source: &mut Source<'_, D>,
        number: u64,
        ahead: u64,
    ) -> Result<&[u8], Stop> {
        let held = (self.bytes.len() / BLOCK) as u64;
        if number.checked_sub(self.first).is_none_or(|index| index >= held) {
            let count = ahead.min(BUNCH).min(source.blocks.saturating_sub(number)).max(1);
            self.bytes.resize(usize::try_from(count).unwrap_or(1) * BLOCK, 0);
            self.first = number;
            if let Err(stop) = source.read(number, &mut self.bytes) {
                self.bytes.clear();
                return Err(stop);
            }
        }
        let index = usize::try_from(number - self.first).unwrap_or(0);
        Ok(&self.bytes[index * BLOCK..][..BLOCK])
    }
}

/// What a descriptor says.
struct Group {
    number: u64,
    /// Its first block, and how many there are.
    start: u64,
    length: u64,
    block_map: u64,
    inode_map: u64,
    table: u64,
    /// Blocks of the table of inodes.
    table_length: u64,
    free_blocks: u32,
    free_inodes: u32,
    folders: u32,
    flags: u16,
    block_sum: u32,
    inode_sum: u32,
    /// Inodes at the table's end that were never used.
    unused: u32,
}

impl Group {
    fn own_metadata(&self) -> [(u64, u64); 3] {
        [(self.block_map, 1), (self.inode_map, 1), (self.table, self.table_length)]
    }
}

impl<D: FileExt> Look<'_, D> {
    pub(super) fn group(&mut self, number: u64, bytes: &[u8]) -> Result<(), Stop> {
        let good = bytes.len() == 64 && self.shape.is_good(number, bytes);
        ensure(good, || format!("the descriptor of group {number} has a wrong checksum"))?;
        let start = number * PER_GROUP;
        let count = |low, high| u32::from(half(bytes, low)) | u32::from(half(bytes, high)) << 16;
        let place = |low, high| wide(word(bytes, low), word(bytes, high));
        let group = Group {
            number,
            start,
            length: self.source.blocks.saturating_sub(start).min(PER_GROUP),
            block_map: place(0x00, 0x20),
            inode_map: place(0x04, 0x24),
            table: place(0x08, 0x28),
            table_length: u64::from(self.inodes_per_group / inodes::IN_BLOCK),
            free_blocks: count(0x0c, 0x2c),
            free_inodes: count(0x0e, 0x2e),
            folders: count(0x10, 0x30),
            flags: half(bytes, 0x12),
            block_sum: count(0x18, 0x38),
            inode_sum: count(0x1a, 0x3a),
            unused: count(0x1c, 0x32),
        };
        let known = group.flags & !(INODES_UNUSED | BLOCKS_UNUSED | ZEROED) == 0;
        ensure(known, || format!("group {number} has unknown flags"))?;
        for (at, length) in group.own_metadata() {
            let end = at.checked_add(length).filter(|end| at > 0 && *end <= self.source.blocks);
            ensure(end.is_some(), || format!("metadata of group {number} lies elsewhere"))?;
            self.space.run(at, length, 1);
        }
        self.space.run(start, self.copies(number), 1);
        self.free.blocks += u64::from(group.free_blocks);
        self.free.inodes += u64::from(group.free_inodes);
        self.blocks_of(&group)?;
        self.inodes_of(&group)
    }

    /// Returns how many blocks with superblock and descriptors a group begins with.
    fn copies(&self, group: u64) -> u64 {
        let shape = &self.shape;
        let own = u64::from(has_superblock(group));
        let index = group / shape.each();
        if index < shape.first_meta {
            return own * (1 + shape.count().min(shape.first_meta) + self.reserved);
        }
        let within = group % shape.each();
        own + u64::from(within <= 1 || within == shape.each() - 1)
    }

    /// Looks which blocks are marked as used.
    fn blocks_of(&mut self, group: &Group) -> Result<(), Stop> {
        let number = group.number;
        let miscounted = || format!("group {number} counts its free blocks wrongly");
        if group.flags & BLOCKS_UNUSED != 0 {
            let copies = self.copies(number);
            self.space.run(group.start, copies, -1);
            let mut used = copies;
            for (at, length) in group.own_metadata() {
                let inside = (group.start..group.start + group.length).contains(&at);
                if inside {
                    self.space.run(at, length, -1);
                    used += length;
                }
            }
            return ensure(u64::from(group.free_blocks) + used == group.length, miscounted);
        }
        let ahead = self.shape.groups - number;
        let map = self.block_maps.block(&mut self.source, group.block_map, ahead)?;
        let sum = crc32c(self.shape.seed, map);
        ensure(sum == group.block_sum, || {
            format!("the bitmap of blocks of group {number} has a wrong checksum")
        })?;
        let (mut used, mut padding) = (0, 0);
        for (first, end) in runs(map) {
            let (inside, beyond) = (end.min(group.length), first.max(group.length));
            padding += end.saturating_sub(beyond);
            if first < inside {
                self.space.run(group.start + first, inside - first, -1);
                used += inside - first;
            }
        }
        let padded = padding == PER_GROUP - group.length;
        ensure(padded && u64::from(group.free_blocks) + used == group.length, miscounted)
    }

    /// Looks at the inodes that were ever used.
    fn inodes_of(&mut self, group: &Group) -> Result<(), Stop> {
        let (number, all) = (group.number, self.inodes_per_group);
        let miscounted = || format!("group {number} counts its inodes wrongly");
        if group.flags & INODES_UNUSED != 0 {
            let none = group.free_inodes == all && group.folders == 0 && group.unused == all;
            return ensure(none, miscounted);
        }
        let ahead = self.shape.groups - number;
        let map = self.inode_maps.block(&mut self.source, group.inode_map, ahead)?;
        let (map, padding) = map.split_at((all / 8) as usize);
        ensure(crc32c(self.shape.seed, map) == group.inode_sum, || {
            format!("the bitmap of inodes of group {number} has a wrong checksum")
        })?;
        let map = map.to_vec();
        ensure(padding.iter().all(|byte| *byte == 0xff), miscounted)?;
        let (mut used, mut last) = (0, 0);
        for (first, end) in runs(&map) {
            used += end - first;
            last = end;
        }
        let ever = all.checked_sub(group.unused).map_or(0, u64::from);
        let counted = u64::from(group.free_inodes) + used == u64::from(all);
        ensure(counted && group.unused <= all && last <= ever, miscounted)?;
        let first = u32::try_from(number * u64::from(all)).unwrap_or(u32::MAX);
        let mut piece = Vec::new();
        let (mut done, mut folders) = (0_u32, 0);
        while u64::from(done) < ever {
            let bytes = usize::try_from(ever - u64::from(done)).unwrap_or(usize::MAX);
            let bytes = bytes.saturating_mul(inodes::BYTES).min(PIECE);
            piece.resize(bytes.next_multiple_of(BLOCK), 0);
            let skipped = u64::from(done / inodes::IN_BLOCK);
            self.source.read(group.table + skipped, &mut piece)?;
            for inode in piece[..bytes].as_chunks::<{ inodes::BYTES }>().0 {
                let used = map[(done / 8) as usize] >> (done % 8) & 1 == 1;
                done += 1;
                folders += u32::from(self.inode(first.saturating_add(done), inode, used)?);
            }
        }
        ensure(folders == group.folders, miscounted)
    }
}

/// Returns the runs of bits that are set: first bit, and the bit behind the last.
fn runs(map: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let length = map.len() as u64 * 8;
    // The first bit from `from` on that is not as in words that are `skipped`.
    let find = move |from: u64, skipped: u64| {
        let mut at = from;
        while at < length {
            let start = usize::try_from(at / 64 * 8).unwrap_or(usize::MAX);
            let mut eight = [0; 8];
            let bytes = map.get(start..).unwrap_or_default();
            let count = bytes.len().min(8);
            eight[..count].copy_from_slice(&bytes[..count]);
            let other = (u64::from_le_bytes(eight) ^ skipped) >> (at % 64);
            if other != 0 {
                return (at + u64::from(other.trailing_zeros())).min(length);
            }
            at = (at / 64 + 1) * 64;
        }
        length
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        let first = find(at, 0);
        at = find(first, u64::MAX);
        (first < length).then_some((first, at))
    })
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn runs_of_bits_are_found() {
        let mut map = vec![0; 32];
        for (bits, expected) in [
            (0..0, vec![]),
            (3..5, vec![(3, 5)]),
            (60..130, vec![(3, 5), (60, 130)]),
            (255..256, vec![(3, 5), (60, 130), (255, 256)]),
            (0..256, vec![(0, 256)]),
        ] {
            for bit in bits {
                map[bit / 8] |= 1_u8 << (bit % 8);
            }
            assert_eq!(runs(&map).collect::<Vec<_>>(), expected);
        }
        // One that is no multiple of eight bytes.
        assert_eq!(runs(&[0x80, 0x81]).collect::<Vec<_>>(), [(7, 9), (15, 16)]);
    }
}
