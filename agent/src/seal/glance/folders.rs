//! Folders: their blocks' checksums, the names in them, and their index.
//!
//! An index is a tree of one or two levels in blocks of the folder. Each other block has to be in it once.

use std::{ops::Range, os::unix::fs::FileExt};

use super::{BLOCK, Balance, Look, PIECE, Stop, crc32c, ensure, half, inodes::Content, word};

/// Where the entries of a block end: behind them is a checksum in an entry of its own.
const END: usize = BLOCK - 12;
/// Where a root and a node of an index have their entries.
const ROOT_ENTRIES: usize = 32;
const NODE_ENTRIES: usize = 8;
/// Kind of a folder in entries.
const FOLDER: u8 = 2;

/// Returns the number that an inode and its kind are accounted under.
pub(super) fn key(inode: u32, kind: u8) -> u64 {
    u64::from(inode) << 8 | u64::from(kind)
}

/// A folder whose blocks are looked at.
pub(super) struct Folder {
    indexed: bool,
    /// Whether there are nodes between root and blocks of names.
    nodes: bool,
    /// Blocks that the index has, without those that are there; nodes are told from the others.
    index: Balance,
}

impl Folder {
    pub(super) fn new(indexed: bool) -> Self {
        Self { indexed, nodes: false, index: Balance::default() }
    }

    /// Whether the index has exactly the blocks that are there.
    pub(super) fn is_settled(&self) -> bool {
        self.index.is_even()
    }
}

impl<D: FileExt> Look<'_, D> {
    /// Looks at the blocks of a folder that lie at `place`, the first of which is its block `logical`.
    pub(super) fn folder(
        &mut self,
        content: &mut Content,
        logical: u64,
        place: Range<u64>,
    ) -> Result<(), Stop> {
        let (mut at, mut logical) = (place.start, logical);
        let mut piece = Vec::new();
        while at < place.end {
            let count = (place.end - at).min((PIECE / BLOCK) as u64);
            piece.resize(usize::try_from(count).unwrap_or(1) * BLOCK, 0);
            self.source.read(at, &mut piece)?;
            for block in piece.as_chunks().0 {
                self.folder_block(content, logical, block)?;
                logical += 1;
            }
            at += count;
        }
        Ok(())
    }

    fn folder_block(
        &mut self,
        content: &mut Content,
        logical: u64,
        block: &[u8; BLOCK],
    ) -> Result<(), Stop> {
        let (number, seed) = (content.number, content.seed);
        let odd = || format!("block {logical} of folder {number} is not of the known kind");
        if logical == 0 {
            let dots = word(block, 0) == number
                && block[4..12] == [12, 0, 1, FOLDER, b'.', 0, 0, 0]
                && block[18..22] == [2, FOLDER, b'.', b'.'];
            ensure(dots, odd)?;
        }
        let Some(folder) = content.folder.as_mut().filter(|folder| folder.indexed) else {
            return self.names(number, seed, logical, block);
        };
        if logical == 0 {
            // No further levels than one; its own length, and the kind of its hash.
            let sane = word(block, 24) == 0 && block[28] <= 5 && block[29] == 8 && block[30] <= 1;
            ensure(sane && usize::from(half(block, 16)) == BLOCK - 12, odd)?;
            folder.nodes = block[30] == 1;
            self.links.one(key(number, FOLDER), -1);
            self.links.one(key(word(block, 12), FOLDER), -1);
            return folder.root_or_node(number, seed, block, ROOT_ENTRIES);
        }
        if word(block, 0) == 0 && usize::from(half(block, 4)) == BLOCK {
            ensure(folder.nodes, odd)?;
            folder.index.one(logical << 1 | 1, -1);
            return folder.root_or_node(number, seed, block, NODE_ENTRIES);
        }
        folder.index.one(logical << 1, -1);
        self.names(number, seed, logical, block)
    }

    /// Looks at a block with names.
    fn names(
        &mut self,
        number: u32,
        seed: u32,
        logical: u64,
        block: &[u8; BLOCK],
    ) -> Result<(), Stop> {
        let odd = || format!("block {logical} of folder {number} has a wrong checksum");
        let (names, tail) = block.split_at(END);
        let tailed = tail[..8] == [0, 0, 0, 0, 12, 0, 0, 0xde];
        ensure(tailed && crc32c(seed, names) == word(tail, 8), odd)?;
        let mut at = 0;
        while at < END {
            // What is left may be shorter than an entry.
            let entry = names.get(at..at + 12).ok_or_else(|| Stop::Doubt(odd()))?;
            let (inode, length) = (word(entry, 0), usize::from(half(entry, 4)));
            let (name, kind) = (usize::from(entry[6]), entry[7]);
            let fits = length >= 12 && length % 4 == 0 && length <= END - at && name + 8 <= length;
            let known = inode == 0 || inode <= self.inodes && name > 0;
            ensure(fits && known, odd)?;
            if inode != 0 {
                self.links.one(key(inode, kind), -1);
            }
            at += length;
        }
        Ok(())
    }
}

impl Folder {
    /// Looks at a block of the index, whose entries begin at `begin`.
    fn root_or_node(
        &mut self,
        number: u32,
        seed: u32,
        block: &[u8; BLOCK],
        begin: usize,
    ) -> Result<(), Stop> {
        let odd = || format!("the index of folder {number} has a wrong checksum");
        let (limit, count) = (usize::from(half(block, begin)), usize::from(half(block, begin + 2)));
        ensure(limit == (BLOCK - begin) / 8 - 1 && (1..=limit).contains(&count), odd)?;
        let (used, tail) = (&block[..begin + count * 8], &block[begin + limit * 8..]);
        let sum = crc32c(crc32c(crc32c(seed, used), &tail[..4]), &[0; 4]);
        ensure(sum == word(tail, 4), odd)?;
        // The root's entries are nodes, if there are any.
        let nodes = self.nodes && begin == ROOT_ENTRIES;
        for entry in used[begin..].chunks_exact(8) {
            self.index.one(u64::from(word(entry, 4)) << 1 | u64::from(nodes), 1);
        }
        Ok(())
    }
}
