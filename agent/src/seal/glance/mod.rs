//! A glance at an ext4 that was cleanly unmounted: does anything speak against it? e2fsck looks closer, but it is
//! another program, whose code has to be loaded at each start; so it is asked only where this doubts.
//!
//! Every checksum of metadata is verified: descriptors here, bitmaps in `groups`, inodes and their trees of extents
//! in `inodes`, folders in `folders`. Against a disk that gives old blocks back, which have good checksums, two
//! accounts are kept ([`Balance`]): each block that is marked as used belongs to something, once, and each inode
//! has as many names as it says. What is not known here is doubted, and nothing is written. Blocks of 4096 bytes
//! and inodes of 256, as the image's builder makes them; its features, and those that come with growing.
//!
//! Format: the kernel's Documentation/filesystems/ext4/.

use std::{collections::BTreeMap, io, os::unix::fs::FileExt, time::Instant};

use super::{
    descriptors::Shape,
    superblock::{self, BYTES, crc32c},
};

mod folders;
mod groups;
mod inodes;
#[cfg(test)]
mod tests;

/// Bytes of a block.
const BLOCK: usize = 4096;
/// Blocks of a group: the bits of a block.
const PER_GROUP: u64 = 8 * BLOCK as u64;
/// Most that is read at once, in bytes.
const PIECE: usize = 256 << 10;
/// Most blocks of a volume that is understood: 4 PiB.
const MAX_BLOCKS: u64 = 1 << 40;
/// Features that have to be there, and those that may: of `s_feature_compat`, `_incompat` and `_ro_compat`.
const FEATURES: [(u32, u32); 3] = [
    // A journal; and attributes, blocks reserved for growing, indexed folders.
    (0x04, 0x04 | 0x08 | 0x10 | 0x20),
    // Kinds in folders, extents, wide numbers; and descriptors in their own groups, groups in bunches.
    (0x02 | 0x40 | 0x80, 0x02 | 0x40 | 0x80 | 0x10 | 0x200),
    // Few superblocks, checksums; and large files, huge ones, many folders, large inodes.
    (0x01 | 0x400, 0x01 | 0x400 | 0x02 | 0x08 | 0x20 | 0x40),
];
/// Of `s_feature_compat`: blocks reserved for growing; of `s_feature_incompat`: descriptors in their own groups.
const RESIZE_INODE: u32 = 0x10;
const META_GROUPS: u32 = 0x10;

/// What a glance says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Glance {
    /// Nothing speaks against it.
    Whole,
    /// Something is wrong, or is not understood here.
    Doubtful {
        /// The first such thing.
        what: String,
    },
    /// Its limits did not suffice.
    TooLong,
}

/// What a glance may take.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// When it ends.
    pub until: Instant,
    /// Most bytes that are read.
    pub bytes: u64,
}

/// Looks at the ext4 on `volume` and writes nothing. Whatever its bytes are, this ends within its budget, and needs
/// a few hundred kibibytes of memory.
pub fn glance(volume: &impl FileExt, budget: Budget) -> Glance {
    match Look::begin(volume, budget).and_then(Look::finish) {
        Ok(()) => Glance::Whole,
        Err(Stop::Doubt(what)) => Glance::Doubtful { what },
        Err(Stop::Limit) => Glance::TooLong,
    }
}

/// Why it ends early.
#[derive(Debug)]
enum Stop {
    Doubt(String),
    Limit,
}

/// Goes on if `good`, and doubts otherwise.
fn ensure(good: bool, what: impl FnOnce() -> String) -> Result<(), Stop> {
    if good { Ok(()) } else { Err(Stop::Doubt(what())) }
}

/// Returns the number at `at`, little-endian; 0 beyond the end.
fn half(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |two| u16::from_le_bytes([two[0], two[1]]))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}

/// Returns a number whose halves lie apart.
fn wide(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Two lists of numbers are compared without keeping them: one is added and the other taken away, by count, sum
/// and sum of squares. What a disk does by accident leaves a rest.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Balance([i128; 3]);

impl Balance {
    /// Adds the numbers from `start` on, each `times` times.
    fn run(&mut self, start: u64, count: u64, times: i128) {
        // Counts, sums and sums of squares of all numbers below `end`.
        let below = |end: u64| {
            let end = i128::from(end);
            let pairs = end.wrapping_mul(end.wrapping_sub(1));
            [end, pairs / 2, pairs.wrapping_mul(end.wrapping_mul(2).wrapping_sub(1)) / 6]
        };
        let (first, last) = (below(start), below(start.saturating_add(count)));
        for (sum, (first, last)) in self.0.iter_mut().zip(first.into_iter().zip(last)) {
            *sum = sum.wrapping_add(last.wrapping_sub(first).wrapping_mul(times));
        }
    }

    /// Adds one number, `times` times.
    fn one(&mut self, number: u64, times: i128) {
        let (mut term, number) = (times, i128::from(number));
        for sum in &mut self.0 {
            *sum = sum.wrapping_add(term);
            term = term.wrapping_mul(number);
        }
    }

    fn is_even(&self) -> bool {
        *self == Self::default()
    }
}

/// The volume, as far as the budget goes.
struct Source<'a, D> {
    device: &'a D,
    budget: Budget,
    /// Blocks that the file system has.
    blocks: u64,
}

impl<D: FileExt> Source<'_, D> {
    /// Reads from the beginning of `block`.
    fn read(&mut self, block: u64, into: &mut [u8]) -> Result<(), Stop> {
        let length = into.len() as u64;
        if Instant::now() >= self.budget.until {
            return Err(Stop::Limit);
        }
        self.budget.bytes = self.budget.bytes.checked_sub(length).ok_or(Stop::Limit)?;
        let end = block.saturating_add(length.div_ceil(BLOCK as u64));
        ensure(block > 0 && end <= self.blocks, || format!("block {block} is none of it"))?;
        let read = self.device.read_exact_at(into, block * BLOCK as u64);
        read.map_err(|error| unreadable(&error))
    }
}

fn unreadable(error: &io::Error) -> Stop {
    Stop::Doubt(format!("it cannot be read: {error}"))
}

/// What is counted over all groups, and told by the superblock.
#[derive(Debug, Default, PartialEq, Eq)]
struct Free {
    blocks: u64,
    inodes: u64,
}

/// A look at work.
struct Look<'a, D> {
    source: Source<'a, D>,
    superblock: [u8; BYTES],
    shape: Shape,
    inodes_per_group: u32,
    inodes: u32,
    /// Blocks behind the descriptors that are kept for more of them.
    reserved: u64,
    free: Free,
    /// Blocks that belong to something, without those that are marked as used.
    space: Balance,
    /// Links that inodes count, without the entries of folders, by inode and kind.
    links: Balance,
    /// Blocks with attributes that several inodes share: how many more there have to be.
    shared: BTreeMap<u64, u32>,
    block_maps: groups::Window,
    inode_maps: groups::Window,
}

impl<'a, D: FileExt> Look<'a, D> {
    fn begin(device: &'a D, budget: Budget) -> Result<Self, Stop> {
        let marks = superblock::marks(device).map_err(|error| unreadable(&error))?;
        ensure(!marks.damaged && !marks.replay, || "it is marked as damaged, or open".to_owned())?;
        let mut own = [0; BYTES];
        device.read_exact_at(&mut own, superblock::AT).map_err(|error| unreadable(&error))?;
        ensure(superblock::is_whole(&own), || "its superblock has a wrong checksum".to_owned())?;
        let odd = || Stop::Doubt("its shape is not known here".to_owned());
        let shape = Shape::of(&own).ok_or_else(odd)?;
        let blocks = wide(word(&own, 0x04), word(&own, 0x150));
        let (inodes, inodes_per_group) = (word(&own, 0), word(&own, 0x28));
        let features = [0x5c, 0x60, 0x64].map(|at| word(&own, at));
        let known = features
            .iter()
            .zip(FEATURES)
            .all(|(has, (needed, known))| has & needed == needed && has & !known == 0);
        let grows = features[0] & RESIZE_INODE != 0;
        let reserved = u64::from(half(&own, 0xce));
        // Both ways to grow at once, or room without the inode that keeps it.
        let one_way = !(grows && features[1] & META_GROUPS != 0) && (grows || reserved == 0);
        let usual = [
            (word(&own, 0x14), 0), // first block of data
            (word(&own, 0x18), 2), // size of blocks and clusters
            (word(&own, 0x1c), 2),
            (word(&own, 0x20), 8 * 4096), // blocks and clusters of a group
            (word(&own, 0x24), 8 * 4096),
            (half(&own, 0x3a).into(), 1), // clean, no errors
            (word(&own, 0x4c), 1),        // revision
            (word(&own, 0x54), inodes::FIRST),
            (half(&own, 0x58).into(), 256), // size of inodes
            (half(&own, 0x5a).into(), 0),   // which copy this is
            (word(&own, 0xe0), inodes::JOURNAL),
            (word(&own, 0xe4), 0),         // journal elsewhere
            (word(&own, 0xe8), 0),         // inodes that are to be deleted
            (half(&own, 0xfe).into(), 64), // size of descriptors
            (own[0x175].into(), 1),        // kind of checksums
        ];
        let counted = shape.groups.checked_mul(inodes_per_group.into()) == Some(inodes.into());
        let sane = known && one_way && usual.iter().all(|(is, should)| is == should);
        let sane = sane && counted && blocks <= MAX_BLOCKS && reserved <= 1024;
        ensure(
            sane && inodes_per_group % 16 == 0 && u64::from(inodes_per_group) <= PER_GROUP,
            || "its superblock is not of the known kind".to_owned(),
        )?;
        Ok(Self {
            source: Source { device, budget, blocks },
            superblock: own,
            shape,
            inodes_per_group,
            inodes,
            reserved,
            free: Free::default(),
            space: Balance::default(),
            links: Balance::default(),
            shared: BTreeMap::new(),
            block_maps: groups::Window::default(),
            inode_maps: groups::Window::default(),
        })
    }

    /// Looks at everything, and then whether it adds up.
    fn finish(mut self) -> Result<(), Stop> {
        let mut block = [0; BLOCK];
        for index in 0..self.shape.count() {
            self.source.read(self.shape.place(index), &mut block)?;
            let numbered = (index * self.shape.each()..self.shape.groups).zip(block.chunks(64));
            for (number, descriptor) in numbered {
                self.group(number, descriptor)?;
            }
        }
        let own = &self.superblock;
        let told = Free {
            blocks: wide(word(own, 0x0c), word(own, 0x158)),
            inodes: word(own, 0x10).into(),
        };
        ensure(told == self.free, || format!("it counts {told:?}, and has {:?}", self.free))?;
        ensure(self.space.is_even(), || "blocks are used otherwise than marked".to_owned())?;
        ensure(self.links.is_even(), || "links and names do not agree".to_owned())?;
        ensure(self.shared.values().all(|left| *left == 0), || {
            "a shared block of attributes has too few users".to_owned()
        })
    }

    /// Returns what checksums of an inode's own metadata begin with.
    fn seed(&self, inode: u32, generation: &[u8]) -> u32 {
        crc32c(crc32c(self.shape.seed, &inode.to_le_bytes()), generation)
    }
}
