//! Inodes that a disk altered, where e2fsck takes for good what the kernel or the node does not.
//!
//! e2fsck makes the checksum of an inode right whose fields say nothing that it knows to be wrong. It does not look
//! for zeros in names of attributes, and the kernel then refuses the whole file, or folder; it takes it as
//! somebody's wish when a file is not to be written any more, or is said to be encrypted; and it gives up where a
//! value is said to be in another inode that is damaged. So attributes that the kernel would refuse are taken off,
//! and marks that no file of a node has: before e2fsck mends, and of what it left.
//!
//! Format: the kernel's Documentation/filesystems/ext4/inodes.rst and attributes.rst; what it refuses:
//! `check_xattrs` in fs/ext4/xattr.c and `__ext4_iget` in fs/ext4/inode.c.

use std::{io, os::unix::fs::FileExt, time::Instant};

use super::{
    descriptors::Shape,
    superblock::{self, BYTES as HEAD, crc32c, word},
};

/// Bytes of an inode.
pub(super) const BYTES: usize = 256;
/// Bytes of a block.
const BLOCK: usize = 4096;
/// Most that is read at once, in bytes.
const PIECE: usize = 256 << 10;
/// The first inode without a meaning of its own, and the one of those that is a folder of the node's.
const FIRST: u32 = 11;
const ROOT: u32 = 2;
/// Places of `s_inodes_per_group` and `s_inode_size`.
const PER_GROUP: usize = 0x28;
const SIZE: usize = 0x58;
/// Of `bg_flags`: no inode was ever used.
const NONE_USED: u16 = 1;
/// Where `i_flags` are, and those that a node's files have: an index, blocks counted as such, a tree of extents.
const FLAGS: usize = 0x20;
const KNOWN: u32 = 0x1000 | 0x4_0000 | 0x8_0000;
/// Where `i_extra_isize` is, which says how many fields there are behind the first 128 bytes.
const EXTRA: usize = 0x80;
/// Begin of the attributes in an inode (`EXT4_XATTR_MAGIC`), bytes of an entry before its name, and of the mark
/// behind the last one.
const ATTRIBUTES: [u8; 4] = 0xea02_0000_u32.to_le_bytes();
const ENTRY: usize = 16;
const END: usize = 4;

/// An inode's bytes.
pub(super) type Inode = [u8; BYTES];

/// What was taken off the inodes of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settled {
    /// Inodes that lost their attributes.
    pub attributes: usize,
    /// Inodes that lost a mark.
    pub marks: usize,
}

impl Settled {
    /// Returns what was taken off in two goes.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let Self { attributes, marks } = other;
        Self { attributes: self.attributes + attributes, marks: self.marks + marks }
    }

    /// Says what was taken off, if anything was.
    #[must_use]
    pub fn in_words(self) -> Option<String> {
        let Self { attributes, marks } = self;
        let taken = [
            (attributes, "with attributes that no kernel reads"),
            (marks, "with marks that no file of a node has"),
        ];
        let taken = taken.into_iter().filter(|(count, _)| *count > 0);
        let taken: Vec<_> = taken.map(|(count, what)| format!("{count} {what}")).collect();
        (!taken.is_empty()).then(|| format!("files {}: taken off", taken.join(", ")))
    }
}

/// Looks at all inodes in use of a volume whose journal was replayed, and takes off what does not belong there.
/// Blocks of 4096 bytes and inodes of 256, as the image's builder makes them; others are left alone, and so are
/// those of a group that is not described as its checksum says.
///
/// # Errors
/// When the volume cannot be read or written, or this is not done at `until`.
pub fn settle(volume: &impl FileExt, until: Instant) -> io::Result<Settled> {
    let mut own = [0; HEAD];
    volume.read_exact_at(&mut own, superblock::AT)?;
    let usual = superblock::is_whole(&own)
        && word(&own, superblock::LOG_BLOCK) == 2
        && usize::from(half(&own, SIZE)) == BYTES;
    let shape = Shape::of(&own).filter(|shape| usual && shape.each() == (BLOCK / 64) as u64);
    let Some(shape) = shape else { return Ok(Settled::default()) };
    let per_group = word(&own, PER_GROUP);
    let mut settled = Settled::default();
    for index in 0..shape.count() {
        let mut block = [0; BLOCK];
        volume.read_exact_at(&mut block, place(shape.place(index))?)?;
        let numbered = (index * shape.each()..shape.groups).zip(block.as_chunks::<64>().0);
        for (group, descriptor) in numbered {
            let unused =
                u32::from(half(descriptor, 0x1c)) | u32::from(half(descriptor, 0x32)) << 16;
            let ever = per_group.saturating_sub(unused);
            let table = u64::from(four(descriptor, 0x08)) | u64::from(four(descriptor, 0x28)) << 32;
            let first = group.checked_mul(per_group.into()).and_then(|n| u32::try_from(n).ok());
            let some = half(descriptor, 0x12) & NONE_USED == 0 && shape.is_good(group, descriptor);
            if let Some(first) = first.filter(|_| some) {
                let table = Table { volume, seed: shape.seed, at: place(table)?, first, ever };
                table.settle(until, &mut settled)?;
            }
        }
    }
    Ok(settled)
}

/// The inodes of a group.
struct Table<'a, D> {
    volume: &'a D,
    seed: u32,
    /// Where it begins, in bytes.
    at: u64,
    /// Inodes in front of it, and how many of its own were ever used.
    first: u32,
    ever: u32,
}

impl<D: FileExt> Table<'_, D> {
    fn settle(&self, until: Instant, settled: &mut Settled) -> io::Result<()> {
        let (mut piece, mut number, mut at) = (Vec::new(), self.first, self.at);
        let mut left = u64::from(self.ever) * BYTES as u64;
        while left > 0 {
            if Instant::now() >= until {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "its inodes were too many"));
            }
            piece.resize(usize::try_from(left).unwrap_or(PIECE).min(PIECE), 0);
            self.volume.read_exact_at(&mut piece, at)?;
            for inode in piece.as_chunks_mut::<BYTES>().0 {
                number = number.saturating_add(1);
                if let Some(found) = mend(number, self.seed, inode) {
                    self.volume.write_all_at(inode, at)?;
                    *settled = settled.and(found);
                }
                at += BYTES as u64;
            }
            left -= piece.len() as u64;
        }
        Ok(())
    }
}

/// Takes off an inode what the kernel or the node would not have; `None` when there is no such thing.
fn mend(number: u32, seed: u32, inode: &mut Inode) -> Option<Settled> {
    let used = half(inode, 0) != 0 && half(inode, 0x1a) != 0 && (number >= FIRST || number == ROOT);
    let (flags, attributes) = (four(inode, FLAGS), !attributes_are_good(inode));
    let marks = flags & !KNOWN != 0;
    if !used || !attributes && !marks {
        return None;
    }
    let seed = crc32c(crc32c(seed, &number.to_le_bytes()), &inode[0x64..0x68]);
    let sound = is_sound(seed, inode);
    if attributes {
        let begin = begin(inode);
        inode[begin..].fill(0);
    }
    inode[FLAGS..FLAGS + 4].copy_from_slice(&(flags & KNOWN).to_le_bytes());
    // What else is wrong with one that was not sound is for e2fsck to say.
    if sound {
        let sum = checksum(seed, inode).to_le_bytes();
        inode[0x7c..0x7e].copy_from_slice(&sum[..2]);
        if half(inode, EXTRA) >= 4 {
            inode[0x82..0x84].copy_from_slice(&sum[2..]);
        }
    }
    Some(Settled { attributes: attributes.into(), marks: marks.into() })
}

/// Whether the kernel reads an inode whose attributes are these: those inside it; it has none, or each has its
/// name and its value where there is room for them.
pub(super) fn attributes_are_good(inode: &Inode) -> bool {
    let Some(area) = inode.get(begin(inode)..).filter(|area| area.len() >= 2 * END) else {
        return true;
    };
    let Some(entries) = area.strip_prefix(&ATTRIBUTES) else { return true };
    let (mut rest, mut values) = (entries, Vec::new());
    while let Some(entry) = rest.get(..ENTRY).filter(|_| rest[..END] != [0; END]) {
        let length = usize::from(entry[0]);
        let next = (ENTRY + length).next_multiple_of(4);
        if next >= rest.len() || rest[ENTRY..ENTRY + length].contains(&0) {
            return false;
        }
        let (start, size) = (usize::from(half(entry, 2)), four(entry, 8));
        if four(entry, 4) != 0 {
            return false;
        }
        values.push((start, usize::try_from(size).unwrap_or(usize::MAX)));
        rest = &rest[next..];
    }
    // No mark is where an entry has no room.
    let marked = rest.starts_with(&[0; END]);
    let behind = entries.len() - rest.len() + END;
    let inside = |(start, size): &(usize, usize)| {
        let end = start.saturating_add(size.saturating_add(3) & !3);
        *size == 0 || *start >= behind && end <= entries.len()
    };
    marked && values.iter().all(inside)
}

/// Returns where an inode's attributes begin.
fn begin(inode: &Inode) -> usize {
    128 + usize::from(half(inode, EXTRA))
}

/// Whether an inode's checksum is right; `seed` is of its file system, its number, and its generation.
pub(super) fn is_sound(seed: u32, inode: &Inode) -> bool {
    let extra = half(inode, EXTRA);
    let sum = checksum(seed, inode).to_le_bytes();
    // Fields end where there is room for them, and at a word.
    extra <= 128
        && extra.is_multiple_of(4)
        && sum[..2] == inode[0x7c..0x7e]
        && (extra < 4 || sum[2..] == inode[0x82..0x84])
}

/// Returns an inode's checksum, of which only the low half has a place where there is no field behind.
fn checksum(seed: u32, inode: &Inode) -> u32 {
    let sum = crc32c(crc32c(seed, &inode[..0x7c]), &[0; 2]);
    let sum = crc32c(sum, &inode[0x7e..0x82]);
    if half(inode, EXTRA) < 4 {
        return crc32c(sum, &inode[0x82..]);
    }
    crc32c(crc32c(sum, &[0; 2]), &inode[0x84..])
}

/// Returns where a block begins, in bytes.
fn place(block: u64) -> io::Result<u64> {
    block.checked_mul(BLOCK as u64).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn four(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}
