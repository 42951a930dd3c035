//! Inodes: their checksums, what they lie on, and what their trees of extents say.

use std::os::unix::fs::FileExt;

use super::{BLOCK, Look, RESIZE_INODE, Stop, crc32c, ensure, folders, half, wide, word};
use crate::seal::{
    descriptors::{JOURNAL_MAGIC, big, has_superblock},
    inodes::{attributes_are_good, is_sound},
};

pub(super) use crate::seal::inodes::BYTES;

/// Inodes in a block.
pub(super) const IN_BLOCK: u32 = 16;
/// Inodes with a meaning of their own, and the first one without.
const ROOT: u32 = 2;
const RESIZE: u32 = 7;
pub(super) const JOURNAL: u32 = 8;
pub(super) const FIRST: u32 = 11;
/// Where an inode has its map of blocks.
const MAP: std::ops::Range<usize> = 0x28..0x64;
/// Bits of `i_flags`: blocks are counted as such; there is a tree of extents, an index.
const HUGE: u32 = 0x4_0000;
const EXTENTS: u32 = 0x8_0000;
const INDEX: u32 = 0x1000;
/// Those that change nothing here: written at once, unchangeable, only grows, not dumped, no times, folders
/// written at once, at the top.
const HARMLESS: u32 = 0x8 | 0x10 | 0x20 | 0x40 | 0x80 | 0x1_0000 | 0x2_0000;
/// Most levels of a tree of extents, and the mark of its nodes.
const MAX_DEPTH: u16 = 5;
const NODE: u16 = 0xf30a;
/// Longest extent that is written; longer ones are not.
const WRITTEN: u16 = 32_768;
/// Shortest link's target that is not in the inode.
const SHORT: u64 = 60;
/// Most blocks of attributes that several inodes share.
const MAX_SHARED: usize = 4096;

/// Kinds as entries of folders have them.
const FILE: u8 = 1;
const FOLDER: u8 = 2;
const LINK: u8 = 7;

/// What lies behind an inode, as far as it was looked at.
pub(super) struct Content {
    pub(super) number: u32,
    pub(super) seed: u32,
    /// Blocks that it takes.
    blocks: u64,
    /// The block of the file behind those that were seen.
    next: u64,
    /// The last block of the file that is written.
    last: Option<u64>,
    /// Where the file begins on the volume.
    first: Option<u64>,
    pub(super) folder: Option<folders::Folder>,
}

/// Returns an inode's kind, or nothing where there is no such kind.
fn kind(mode: u16) -> Option<u8> {
    Some(match mode >> 12 {
        8 => FILE,
        4 => FOLDER,
        2 => 3,
        6 => 4,
        1 => 5,
        12 => 6,
        10 => LINK,
        _ => return None,
    })
}

impl<D: FileExt> Look<'_, D> {
    /// Looks at an inode, and returns whether it is a folder.
    pub(super) fn inode(
        &mut self,
        number: u32,
        bytes: &[u8; BYTES],
        used: bool,
    ) -> Result<bool, Stop> {
        if !used && bytes.iter().all(|byte| *byte == 0) {
            return Ok(false);
        }
        let seed = self.seed(number, &bytes[0x64..0x68]);
        // An inode that has a meaning and none yet is zeroed, too.
        let empty = number < FIRST && bytes.iter().all(|byte| *byte == 0);
        ensure(empty || is_sound(seed, bytes), || format!("inode {number} has a wrong checksum"))?;
        let odd = || format!("inode {number} is not of a known kind");
        let (mode, links, deleted) = (half(bytes, 0), half(bytes, 0x1a), word(bytes, 0x14));
        if !used {
            // What looks like a time is a list of inodes while it is small.
            let gone = deleted >= self.inodes || mode == 0 && deleted == 0;
            ensure(gone && links == 0 && number >= FIRST, odd)?;
            return Ok(false);
        }
        if number < FIRST && number != ROOT {
            self.special(number, seed, bytes)?;
            return Ok(false);
        }
        let kind = kind(mode).ok_or_else(|| Stop::Doubt(odd()))?;
        let folder = kind == FOLDER;
        // With one link, a folder has more than are counted.
        let linked = deleted == 0 && links > u16::from(folder);
        ensure(linked && (number != ROOT || folder), odd)?;
        ensure(attributes_are_good(bytes), || format!("inode {number} has odd attributes"))?;
        self.links.one(folders::key(number, kind), links.into());
        self.content(number, seed, bytes, kind)?;
        Ok(folder)
    }

    /// Looks at one of those with a meaning of their own.
    fn special(&mut self, number: u32, seed: u32, bytes: &[u8; BYTES]) -> Result<(), Stop> {
        let odd = || format!("inode {number} is not of a known kind");
        let map = &bytes[MAP];
        match number {
            JOURNAL => {
                let content = self.content(number, seed, bytes, FILE)?;
                let copied = self.superblock[0xfd] == 1 && self.superblock[0x10c..0x148] == *map;
                ensure(copied && half(bytes, 0x1a) == 1, odd)?;
                self.journal(&content)
            }
            RESIZE if word(&self.superblock, 0x5c) & RESIZE_INODE != 0 => {
                ensure(half(bytes, 0) >> 12 == 8 && half(bytes, 0x1a) == 1, odd)?;
                self.reserved(map, blocks_told(bytes))
            }
            _ => {
                let empty = map.iter().all(|byte| *byte == 0) && blocks_told(bytes) == 0;
                let none = number == RESIZE || half(bytes, 0) == 0 && half(bytes, 0x1a) == 0;
                ensure(empty && none && attributes(bytes) == 0, odd)
            }
        }
    }

    /// Looks at what an inode lies on.
    fn content(
        &mut self,
        number: u32,
        seed: u32,
        bytes: &[u8; BYTES],
        kind: u8,
    ) -> Result<Content, Stop> {
        let odd = || format!("inode {number} does not lie where it says");
        let flags = word(bytes, 0x20);
        let (size, map) = (wide(word(bytes, 0x04), word(bytes, 0x6c)), &bytes[MAP]);
        let folder = kind == FOLDER;
        let known = HARMLESS | EXTENTS | HUGE | if folder { INDEX } else { 0 };
        ensure(flags & !known == 0, || format!("inode {number} has unknown flags"))?;
        let indexed = flags & INDEX != 0;
        let mut content = Content {
            number,
            seed,
            blocks: 0,
            next: 0,
            last: None,
            first: None,
            folder: folder.then(|| folders::Folder::new(indexed)),
        };
        if flags & EXTENTS != 0 {
            ensure(matches!(kind, FILE | FOLDER | LINK), odd)?;
            self.extents(&mut content, map, None)?;
        } else {
            // A file without anything, a short link, a device, a pipe, a socket.
            let nothing = map.iter().all(|byte| *byte == 0) && size == 0;
            let short = kind == LINK && size > 0 && size < SHORT && length_of(map) == size;
            ensure(matches!(kind, 3..=6) && size == 0 || kind == FILE && nothing || short, odd)?;
        }
        let block = BLOCK as u64;
        match kind {
            FOLDER => {
                let whole = content.next > 0 && content.next.checked_mul(block) == Some(size);
                let settled = content.folder.as_ref().is_some_and(folders::Folder::is_settled);
                ensure(whole && settled, || format!("folder {number} is not whole"))?;
            }
            LINK if flags & EXTENTS != 0 => {
                let one = content.next == 1 && content.blocks == 1 && content.last == Some(0);
                let mut target = [0; BLOCK];
                self.source.read(content.first.unwrap_or(0), &mut target)?;
                ensure(one && size < block && length_of(&target) == size, odd)?;
            }
            _ => {
                let end = content.last.unwrap_or(0).saturating_mul(block);
                ensure(size >= end && size < 1 << 44, odd)?;
            }
        }
        let attributes = attributes(bytes);
        if attributes != 0 {
            content.blocks += 1;
            self.attributes(attributes)?;
        }
        let unit = if flags & HUGE == 0 { block / 512 } else { 1 };
        let counted = content.blocks.checked_mul(unit) == Some(blocks_told(bytes));
        ensure(counted, || format!("inode {number} counts its blocks wrongly"))?;
        Ok(content)
    }

    /// Looks at a node of a tree of extents; `above` is the number of levels that it has to have, and where its
    /// part of the file begins.
    fn extents(
        &mut self,
        content: &mut Content,
        node: &[u8],
        above: Option<(u16, u64)>,
    ) -> Result<(), Stop> {
        let number = content.number;
        let odd = || format!("the extents of inode {number} are not in order");
        let (entries, depth) = (half(node, 2), half(node, 6));
        let room = node.len().saturating_sub(12) / 12;
        let sane = half(node, 0) == NODE && usize::from(half(node, 4)) == room;
        let sane = sane && usize::from(entries) <= room && (depth == 0 || entries > 0);
        let fits = above.map_or(depth <= MAX_DEPTH, |(wanted, _)| depth == wanted && entries > 0);
        ensure(sane && fits, odd)?;
        let mut wanted = above.map(|(_, logical)| logical);
        for entry in node[12..].chunks_exact(12).take(entries.into()) {
            let logical = u64::from(word(entry, 0));
            let follows = wanted.take().is_none_or(|wanted| wanted == logical);
            ensure(follows && logical >= content.next, odd)?;
            if depth == 0 {
                self.extent(content, logical, entry)?;
                continue;
            }
            let child = wide(word(entry, 4), half(entry, 8).into());
            let mut block = [0; BLOCK];
            self.source.read(child, &mut block)?;
            let (covered, sum) = block.split_at(BLOCK - 4);
            ensure(crc32c(content.seed, covered).to_le_bytes() == *sum, || {
                format!("extents of inode {number} have a wrong checksum")
            })?;
            self.space.run(child, 1, 1);
            content.blocks += 1;
            self.extents(content, covered, Some((depth - 1, logical)))?;
        }
        Ok(())
    }

    fn extent(&mut self, content: &mut Content, logical: u64, entry: &[u8]) -> Result<(), Stop> {
        let number = content.number;
        let told = half(entry, 4);
        let written = told <= WRITTEN;
        let length = u64::from(if written { told } else { told - WRITTEN });
        let start = wide(word(entry, 8), half(entry, 6).into());
        let inside = start > 0 && length > 0 && start + length <= self.source.blocks;
        ensure(inside, || format!("inode {number} lies beyond the end"))?;
        self.space.run(start, length, 1);
        content.blocks += length;
        let before = std::mem::replace(&mut content.next, logical + length);
        content.first.get_or_insert(start);
        if written {
            content.last = Some(logical + length - 1);
        }
        if content.folder.is_some() {
            ensure(before == logical && written, || format!("folder {number} has holes"))?;
            self.folder(content, logical, start..start + length)?;
        }
        Ok(())
    }

    /// Looks at a block of attributes.
    fn attributes(&mut self, place: u64) -> Result<(), Stop> {
        if let Some(left) = self.shared.get_mut(&place) {
            *left = left.wrapping_sub(1);
            return ensure(*left < u32::MAX, || format!("block {place} has too many users"));
        }
        let mut block = [0; BLOCK];
        self.source.read(place, &mut block)?;
        let sum = crc32c(crc32c(self.shape.seed, &place.to_le_bytes()), &block[..0x10]);
        let sum = crc32c(crc32c(sum, &[0; 4]), &block[0x14..]);
        let users = word(&block, 0x04);
        let sane = word(&block, 0) == 0xea02_0000 && word(&block, 0x08) == 1 && users > 0;
        ensure(sane && sum == word(&block, 0x10), || {
            format!("attributes in block {place} have a wrong checksum")
        })?;
        self.space.run(place, 1, 1);
        if users > 1 {
            ensure(self.shared.len() < MAX_SHARED, || "attributes are much shared".to_owned())?;
            self.shared.insert(place, users - 1);
        }
        Ok(())
    }

    /// Looks at the journal's own superblock. Whatever else is in it is not read any more.
    fn journal(&mut self, content: &Content) -> Result<(), Stop> {
        let mut block = [0; 1024];
        self.source.read(content.first.unwrap_or(0), &mut block)?;
        let field = |at| big(&block, at);
        let usual = [(0, JOURNAL_MAGIC), (4, 4), (0x0c, 4096), (0x1c, 0), (0x20, 0)];
        let usual = usual.into_iter().all(|(at, value)| field(at) == value);
        // Revocations, wide numbers, commits without a barrier, checksums of the third version.
        let features = field(0x28);
        let known = field(0x24) == 0 && features & !0x17 == 0 && field(0x2c) == 0;
        let whole = content.next == content.blocks
            && content.last.map(|last| last + 1) == Some(content.next);
        let length = u64::from(field(0x10)) == content.next;
        let begins = field(0x14) > 0 && field(0x14) < field(0x10);
        let sum = crc32c(crc32c(crc32c(u32::MAX, &block[..0xfc]), &[0; 4]), &block[0x100..]);
        let summed = features & 0x10 == 0 || block[0x50] == 4 && sum == field(0xfc);
        ensure(usual && known && whole && length && begins && summed, || {
            "its journal is not an empty one of the known kind".to_owned()
        })
    }

    /// Looks at the blocks that are kept for more descriptors: one has the number of each, and each has the
    /// numbers of its copies. None of them has a checksum.
    fn reserved(&mut self, map: &[u8], told: u64) -> Result<(), Stop> {
        let odd = || "blocks for growing are not where they belong".to_owned();
        let place = u64::from(word(map, 13 * 4));
        let others = map.chunks_exact(4).enumerate().filter(|(index, _)| *index != 13);
        ensure(others.map(|(_, four)| word(four, 0)).all(|number| number == 0), odd)?;
        let first = 1 + self.shape.count();
        let mut block = [0; BLOCK];
        self.source.read(place, &mut block)?;
        self.space.run(place, 1, 1);
        for (at, four) in block.chunks_exact(4).enumerate() {
            let index = (at as u64 + 1024).wrapping_sub(self.shape.count() % 1024) % 1024;
            let wanted = if index < self.reserved { first + index } else { 0 };
            ensure(u64::from(word(four, 0)) == wanted, odd)?;
        }
        let copies: Vec<u64> = (1..self.shape.groups).filter(|n| has_superblock(*n)).collect();
        for at in first..first + self.reserved {
            self.source.read(at, &mut block)?;
            let (used, rest) = block.split_at_checked(copies.len() * 4).unwrap_or_default();
            let good = copies
                .iter()
                .zip(used.chunks_exact(4))
                .all(|(group, four)| u64::from(word(four, 0)) == at + group * super::PER_GROUP);
            ensure(good && !rest.is_empty() && rest.iter().all(|byte| *byte == 0), odd)?;
        }
        let counted = 1 + self.reserved * (1 + copies.len() as u64);
        ensure(told == counted * (BLOCK as u64 / 512), odd)
    }
}

/// Returns where an inode's attributes lie, if they have a block; 0 otherwise.
fn attributes(bytes: &[u8; BYTES]) -> u64 {
    wide(word(bytes, 0x68), half(bytes, 0x76).into())
}

/// Returns what an inode says how much it takes.
fn blocks_told(bytes: &[u8; BYTES]) -> u64 {
    wide(word(bytes, 0x1c), half(bytes, 0x74).into())
}

/// Returns the number of bytes before the first that is 0.
fn length_of(text: &[u8]) -> u64 {
    text.iter().position(|byte| *byte == 0).unwrap_or(text.len()) as u64
}
