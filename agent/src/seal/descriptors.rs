//! Descriptors of ext4's block groups, where a power cut left them behind the superblock.
//!
//! A file system that grows writes new descriptors and a superblock that counts them. Both are in the
//! journal, but when they are written to their places later nothing orders them, and the kernel looks at
//! the descriptors before it replays the journal: with the new count and the old descriptors it refuses
//! to mount what has nothing wrong. So the descriptors are fetched from the journal before the mount;
//! everything else is left to the kernel, which writes the same blocks once more.
//!
//! Where the journal does not help, a disk has altered a descriptor. e2fsck believes it then, and takes for the
//! group's inodes whatever lies where it says: all files of the group are gone. Where a group's tables lie never
//! changes, and the backups say it, so that is taken from them.
//!
//! Formats: the kernel's Documentation/filesystems/ext4/group_descr.rst and journal.rst.

use std::{collections::BTreeMap, io, ops::Range, os::unix::fs::FileExt};

use super::superblock::{BLOCKS, BYTES, INCOMPAT, LOG_BLOCK, PER_GROUP, crc32c, word};

/// Places of `s_first_data_block`, `s_uuid`, `s_desc_size`, `s_first_meta_bg` and `s_checksum_seed`.
const FIRST_DATA_BLOCK: usize = 0x14;
const UUID: Range<usize> = 0x68..0x78;
const DESCRIPTOR_SIZE: usize = 0xfe;
const FIRST_META_GROUP: usize = 0x104;
const SEED: usize = 0x270;
/// Place of `s_jnl_backup_type`, whose value 1 says that `s_jnl_blocks` is there: the journal's map of
/// extents, as its inode has it.
const JOURNAL_KEPT: usize = 0xfd;
const JOURNAL: Range<usize> = 0x10c..0x148;
/// Bits of `s_feature_incompat`.
const META_GROUPS: u32 = 0x10;
const WIDE: u32 = 0x80;
const OWN_SEED: u32 = 0x2000;
/// Place of `bg_checksum` in a descriptor.
const SUM: usize = 0x1e;
/// Places of where a group's bitmaps and its inodes lie: low halves, and the high ones of a wide descriptor.
const TABLES: [Range<usize>; 2] = [0x00..0x0c, 0x20..0x2c];

/// Most backups of a descriptor that are looked at.
const MOST_BACKUPS: usize = 4;

/// Start of a block of the journal's own (`JBD2_MAGIC_NUMBER`), and its kinds.
pub(super) const JOURNAL_MAGIC: u32 = 0xc03b_3998;
const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
/// The kind of its superblock (`JBD2_SUPERBLOCK_V2`).
const JOURNAL_KIND: u32 = 4;
const REVOKE: u32 = 5;
/// Bits of the journal's `s_feature_incompat` that are known here: revocations, wide numbers, commits
/// without a barrier. Checksums of the third version are always there.
const KNOWN: u32 = 0x1 | 0x2 | 0x4 | CHECKSUMS;
const CHECKSUMS: u32 = 0x10;
/// The same bits with checksums of the second version and fast commits: all that there are.
const ALL_KNOWN: u32 = 0x3f;
/// Place of the journal's `s_checksum`.
const JOURNAL_SUM: usize = 0xfc;
/// Bits of a tag: its block began with the magic, its UUID is the one before, it is the last.
const ESCAPED: u32 = 1;
const SAME_UUID: u32 = 2;
const LAST: u32 = 8;

/// How the descriptors were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checked {
    /// Each has the right checksum.
    Whole,
    /// Some had not, and have after what the journal held was written in their place.
    Mended,
    /// This group's had not, and the journal does not help; where its tables lie was otherwise in a backup, and is
    /// as there now.
    Restored {
        /// Number of the block group, the first if there are more.
        group: u64,
    },
    /// This group's has not, and neither journal nor backups help.
    Damaged {
        /// Number of the block group.
        group: u64,
    },
}

/// Checks all descriptors of the file system with this superblock, and mends them from its journal, or else from
/// its backups.
///
/// # Errors
/// When the volume cannot be read or written; it may be shorter than its superblock says.
pub(super) fn mend(volume: &impl FileExt, superblock: &[u8; BYTES]) -> io::Result<Checked> {
    let Some(shape) = Shape::of(superblock) else { return Ok(Checked::Whole) };
    let Some(group) = shape.first_bad(volume, &BTreeMap::new())? else { return Ok(Checked::Whole) };
    let held = Journal::open(volume, superblock, shape.block)?
        .map_or(Ok(BTreeMap::new()), |journal| journal.copies(volume, &shape))?;
    if held.is_empty() || shape.first_bad(volume, &held)?.is_some() {
        let restored = shape.restore(volume)?;
        return Ok(restored.map_or(Checked::Damaged { group }, |group| Checked::Restored { group }));
    }
    for (block, bytes) in &held {
        volume.write_all_at(bytes, block * shape.block)?;
    }
    Ok(Checked::Mended)
}

/// Whether all descriptors of the file system with this superblock have the right checksum. e2fsck takes a wrong
/// one for harmless, and the kernel does not.
///
/// # Errors
/// When the volume cannot be read.
pub(super) fn are_whole(volume: &impl FileExt, superblock: &[u8; BYTES]) -> io::Result<bool> {
    let bad = Shape::of(superblock).map(|shape| shape.first_bad(volume, &BTreeMap::new()));
    Ok(bad.transpose()?.flatten().is_none())
}

/// Takes features that nobody knows, and an unknown kind of superblock, from the journal's superblock, if its
/// checksum is wrong. Whether there were any: e2fsck, which makes a damaged journal anew, does not touch what it
/// takes for one of the future.
///
/// # Errors
/// When the volume cannot be read or written.
pub(super) fn settle_journal(volume: &impl FileExt, superblock: &[u8; BYTES]) -> io::Result<bool> {
    let pieces = Some(&superblock[JOURNAL]).filter(|_| superblock[JOURNAL_KEPT] == 1);
    let first = pieces.and_then(extents).and_then(|pieces| pieces.first().map(|(first, _)| *first));
    let (Some(first), Some(shape)) = (first, Shape::of(superblock)) else { return Ok(false) };
    let Some(own) = read_mapped(volume, first, shape.block)? else { return Ok(false) };
    let sum = crc32c(crc32c(u32::MAX, &own[..JOURNAL_SUM]), &[0; 4]);
    let sum = crc32c(sum, &own[JOURNAL_SUM + 4..BYTES]);
    if big(&own, 0) != JOURNAL_MAGIC || sum == big(&own, JOURNAL_SUM) {
        return Ok(false);
    }
    let features = [0x24, 0x28, 0x2c].map(|at| big(&own, at));
    let known = [features[0] & 1, features[1] & ALL_KNOWN, 0];
    if (big(&own, 4), features) == (JOURNAL_KIND, known) {
        return Ok(false);
    }
    let at = first * shape.block;
    volume.write_all_at(&JOURNAL_KIND.to_be_bytes(), at + 4)?;
    volume.write_all_at(&known.map(u32::to_be_bytes).concat(), at + 0x24)?;
    Ok(true)
}

/// Where a file system has its descriptors.
pub(super) struct Shape {
    /// Bytes of a block.
    block: u64,
    /// Number of block groups.
    pub(super) groups: u64,
    per_group: u64,
    first_data_block: u64,
    /// Bytes of a descriptor.
    size: usize,
    /// First descriptor block that lies in its own groups; `u64::MAX` when none does.
    pub(super) first_meta: u64,
    pub(super) seed: u32,
}

impl Shape {
    /// Returns `None` for what no kernel would mount.
    pub(super) fn of(superblock: &[u8; BYTES]) -> Option<Self> {
        let incompat = word(superblock, INCOMPAT);
        let block = 1024_u64.checked_shl(word(superblock, LOG_BLOCK)).filter(|b| *b <= 65_536)?;
        let wide = incompat & WIDE != 0;
        let high = if wide { u64::from(word(superblock, BLOCKS.1)) << 32 } else { 0 };
        let blocks = u64::from(word(superblock, BLOCKS.0)) | high;
        let per_group = u64::from(word(superblock, PER_GROUP));
        let first_data_block = u64::from(word(superblock, FIRST_DATA_BLOCK));
        let told = usize::from(u16::from_le_bytes([
            superblock[DESCRIPTOR_SIZE],
            superblock[DESCRIPTOR_SIZE + 1],
        ]));
        let size = if wide { told } else { 32 };
        let sane = (32..=1024).contains(&size) && size.is_power_of_two();
        let per_group =
            Some(per_group).filter(|count| *count > 0 && *count <= 8 * block && sane)?;
        let meta = incompat & META_GROUPS != 0;
        Some(Self {
            block,
            groups: blocks.checked_sub(first_data_block)?.div_ceil(per_group),
            per_group,
            first_data_block,
            size,
            first_meta: if meta { word(superblock, FIRST_META_GROUP).into() } else { u64::MAX },
            seed: if incompat & OWN_SEED != 0 {
                word(superblock, SEED)
            } else {
                crc32c(u32::MAX, &superblock[UUID])
            },
        })
    }

    /// Number of descriptors in a block.
    pub(super) fn each(&self) -> u64 {
        self.block / self.size as u64
    }

    /// Number of blocks with descriptors.
    pub(super) fn count(&self) -> u64 {
        self.groups.div_ceil(self.each())
    }

    /// Returns on which block of the volume descriptor block `index` lies.
    pub(super) fn place(&self, index: u64) -> u64 {
        if index < self.first_meta {
            return self.first_data_block + 1 + index;
        }
        let group = index * self.each();
        self.first_data_block + group * self.per_group + u64::from(has_superblock(group))
    }

    /// Returns the first group whose descriptor has a wrong checksum, with `held` in place of what the
    /// volume has.
    fn first_bad(
        &self,
        volume: &impl FileExt,
        held: &BTreeMap<u64, Vec<u8>>,
    ) -> io::Result<Option<u64>> {
        for index in 0..self.count() {
            let place = self.place(index);
            let block = match held.get(&place) {
                Some(bytes) => bytes.clone(),
                None => read(volume, place, self.block)?,
            };
            let first = index * self.each();
            let numbered = (first..self.groups).zip(block.chunks_exact(self.size));
            for (group, descriptor) in numbered {
                if !self.is_good(group, descriptor) {
                    return Ok(Some(group));
                }
            }
        }
        Ok(None)
    }

    /// Takes where the tables of groups with bad descriptors lie from the backups. What else such a descriptor says
    /// e2fsck finds out by itself, as the checksum tells it to. Returns the first group that had it otherwise.
    fn restore(&self, volume: &impl FileExt) -> io::Result<Option<u64>> {
        let mut restored = None;
        for index in 0..self.count() {
            let place = self.place(index);
            let Some(mut block) = read_mapped(volume, place, self.block)? else { break };
            let first = index * self.each();
            let numbered = (first..self.groups).zip(block.chunks_exact_mut(self.size));
            let mut altered = false;
            for (group, descriptor) in numbered {
                if self.is_good(group, descriptor) {
                    continue;
                }
                let Some(backup) = self.backup(volume, group) else { continue };
                for tables in TABLES.into_iter().filter(|range| range.end <= self.size) {
                    if descriptor[tables.clone()] != backup[tables.clone()] {
                        descriptor[tables.clone()].copy_from_slice(&backup[tables]);
                        altered = true;
                        restored = restored.or(Some(group));
                    }
                }
            }
            if altered {
                volume.write_all_at(&block, place * self.block)?;
            }
        }
        Ok(restored)
    }

    /// Returns a good descriptor of this group from a backup.
    fn backup(&self, volume: &impl FileExt, group: u64) -> Option<Vec<u8>> {
        let (index, each) = (group / self.each(), self.each());
        let within = usize::try_from(group % each).ok()?;
        let meta = index >= self.first_meta;
        // The second and the last group of those that a block describes, or every one with a superblock.
        let places = if meta { index * each + 1..index * each + each } else { 1..self.groups };
        places
            .take_while(|place| *place < self.groups)
            .filter(|place| {
                if meta {
                    place % each <= 1 || (place + 1) % each == 0
                } else {
                    has_superblock(*place)
                }
            })
            .take(MOST_BACKUPS)
            .find_map(|place| {
                let behind = if meta { u64::from(has_superblock(place)) } else { 1 + index };
                let place = self.first_data_block + place * self.per_group + behind;
                // What lies beyond the volume's end is no backup.
                let block = read(volume, place, self.block).ok()?;
                let descriptor = block.chunks_exact(self.size).nth(within)?;
                self.is_good(group, descriptor).then(|| descriptor.to_vec())
            })
    }

    pub(super) fn is_good(&self, group: u64, descriptor: &[u8]) -> bool {
        let number = u32::try_from(group).unwrap_or(u32::MAX).to_le_bytes();
        let sum = crc32c(crc32c(self.seed, &number), &descriptor[..SUM]);
        let sum = crc32c(crc32c(sum, &[0, 0]), &descriptor[SUM + 2..]);
        sum.to_le_bytes()[..2] == descriptor[SUM..SUM + 2]
    }
}

/// Whether a block group begins with a copy of the superblock (`sparse_super`).
pub(super) fn has_superblock(group: u64) -> bool {
    let power = |base: u64| std::iter::successors(Some(base), move |n| n.checked_mul(base));
    group <= 1
        || [3, 5, 7]
            .into_iter()
            .any(|base| power(base).take_while(|n| *n <= group).any(|n| n == group))
}

fn read(volume: &impl FileExt, block: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    let at = block.checked_mul(length).ok_or(io::ErrorKind::InvalidData)?;
    volume.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

/// Reads a block that a map of the journal names. `None` beyond the volume's end: the superblock has a copy of the
/// map, which may be altered while the journal's own is whole, and then the kernel mounts what this cannot read.
fn read_mapped(volume: &impl FileExt, block: u64, length: u64) -> io::Result<Option<Vec<u8>>> {
    let beyond = [io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidData];
    match read(volume, block, length) {
        Err(error) if beyond.contains(&error.kind()) => Ok(None),
        block => block.map(Some),
    }
}

pub(super) fn big(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |four| u32::from_be_bytes([four[0], four[1], four[2], four[3]]))
}

/// A journal with transactions that are to be replayed.
struct Journal {
    /// Pieces of the volume that it lies on: first block and number of blocks.
    pieces: Vec<(u64, u64)>,
    block: u64,
    /// Blocks of it that the log goes round in.
    log: Range<u64>,
    /// Where the oldest transaction begins, and its number.
    start: (u64, u32),
    seed: u32,
}

impl Journal {
    /// Returns `None` for one that is empty, or of a kind that is not known here.
    fn open(
        volume: &impl FileExt,
        superblock: &[u8; BYTES],
        block: u64,
    ) -> io::Result<Option<Self>> {
        if superblock[JOURNAL_KEPT] != 1 {
            return Ok(None);
        }
        let Some(pieces) = extents(&superblock[JOURNAL]) else { return Ok(None) };
        let Some((first, _)) = pieces.first() else { return Ok(None) };
        let Some(own) = read_mapped(volume, *first, block)? else { return Ok(None) };
        let incompat = big(&own, 0x28);
        let known = big(&own, 0) == JOURNAL_MAGIC
            && big(&own, 4) == 4
            && u64::from(big(&own, 12)) == block
            && incompat & CHECKSUMS != 0
            && incompat & !KNOWN == 0;
        let [length, begin, sequence, start] = [0x10, 0x14, 0x18, 0x1c].map(|at| big(&own, at));
        let log = u64::from(begin)..u64::from(length);
        if !known || begin == 0 || start == 0 || !log.contains(&start.into()) {
            return Ok(None);
        }
        let seed = crc32c(u32::MAX, &own[0x30..0x40]);
        Ok(Some(Self { pieces, block, log, start: (start.into(), sequence), seed }))
    }

    /// Returns the newest committed copies of descriptor blocks, by the block that they belong on.
    fn copies(&self, volume: &impl FileExt, shape: &Shape) -> io::Result<BTreeMap<u64, Vec<u8>>> {
        let wanted: std::collections::BTreeSet<u64> =
            (0..shape.count()).map(|index| shape.place(index)).collect();
        let (mut held, mut pending) = (BTreeMap::new(), BTreeMap::new());
        let (mut at, mut sequence) = self.start;
        // The log may be full; nothing in it is looked at twice.
        let mut left = self.log.end - self.log.start;
        while left > 0 {
            let Some(bytes) = self.read(volume, at)? else { break };
            if big(&bytes, 0) != JOURNAL_MAGIC || big(&bytes, 8) != sequence {
                break;
            }
            let mut passed = 1;
            match big(&bytes, 4) {
                DESCRIPTOR if self.is_whole(&bytes, bytes.len() - 4) => {
                    for tag in tags(&bytes) {
                        let place = self.after(at, passed);
                        passed += 1;
                        if wanted.contains(&tag.block) {
                            let Some(copy) = self.copy(volume, place, &tag, sequence)? else {
                                return Ok(held);
                            };
                            pending.insert(tag.block, copy);
                        }
                    }
                }
                COMMIT if self.is_whole(&bytes, 0x10) => {
                    held.append(&mut pending);
                    sequence = sequence.wrapping_add(1);
                }
                REVOKE => {}
                _ => break,
            }
            at = self.after(at, passed);
            left = left.saturating_sub(passed);
        }
        Ok(held)
    }

    /// Returns the block `count` behind `at`, going round.
    fn after(&self, at: u64, count: u64) -> u64 {
        let length = self.log.end - self.log.start;
        self.log.start + (at - self.log.start + count) % length
    }

    /// Reads a block of the journal; `None` where the map ends, or leads out of the volume.
    fn read(&self, volume: &impl FileExt, at: u64) -> io::Result<Option<Vec<u8>>> {
        let mut skipped = at;
        for (first, count) in &self.pieces {
            if skipped < *count {
                return read_mapped(volume, first + skipped, self.block);
            }
            skipped -= count;
        }
        Ok(None)
    }

    /// Reads the copy that `tag` tells of; `None` when its checksum is wrong.
    fn copy(
        &self,
        volume: &impl FileExt,
        at: u64,
        tag: &Tag,
        sequence: u32,
    ) -> io::Result<Option<Vec<u8>>> {
        let Some(mut bytes) = self.read(volume, at)? else { return Ok(None) };
        if crc32c(crc32c(self.seed, &sequence.to_be_bytes()), &bytes) != tag.sum {
            return Ok(None);
        }
        if tag.flags & ESCAPED != 0 {
            bytes[..4].copy_from_slice(&JOURNAL_MAGIC.to_be_bytes());
        }
        Ok(Some(bytes))
    }

    /// Whether a block of the journal's own has the right checksum, which lies at `place`.
    fn is_whole(&self, bytes: &[u8], place: usize) -> bool {
        let sum = crc32c(crc32c(self.seed, &bytes[..place]), &[0; 4]);
        crc32c(sum, &bytes[place + 4..]) == big(bytes, place)
    }
}

/// What a block of the journal says of one that follows.
struct Tag {
    /// Where it belongs.
    block: u64,
    flags: u32,
    sum: u32,
}

/// Reads the tags of a descriptor block (`journal_block_tag3_s`).
fn tags(bytes: &[u8]) -> Vec<Tag> {
    let (mut found, mut at) = (Vec::new(), 12);
    while at + 16 <= bytes.len() - 4 {
        let [low, flags, high, sum] = [0, 4, 8, 12].map(|place| big(bytes, at + place));
        found.push(Tag { block: u64::from(high) << 32 | u64::from(low), flags, sum });
        if flags & LAST != 0 {
            break;
        }
        at += if flags & SAME_UUID == 0 { 32 } else { 16 };
    }
    found
}

/// Reads a map of extents without further levels: first block and number of blocks of each piece, in
/// the order of the file. `None` for any other map.
fn extents(map: &[u8]) -> Option<Vec<(u64, u64)>> {
    let half = |at: usize| map.get(at..at + 2).map(|two| u16::from_le_bytes([two[0], two[1]]));
    let (magic, count, depth) = (half(0)?, half(2)?, half(6)?);
    if magic != 0xf30a || depth != 0 || count > 4 {
        return None;
    }
    let (mut pieces, mut next) = (Vec::new(), 0);
    for at in (1..=usize::from(count)).map(|index| index * 12) {
        let logical = u64::from(half(at)?) | u64::from(half(at + 2)?) << 16;
        let (length, high) = (u64::from(half(at + 4)?), u64::from(half(at + 6)?));
        let low = u64::from(half(at + 8)?) | u64::from(half(at + 10)?) << 16;
        // Longer ones are not written yet; a journal has none, and no holes.
        if logical != next || length == 0 || length > 32_768 {
            return None;
        }
        pieces.push((high << 32 | low, length));
        next += length;
    }
    Some(pieces)
}
