//! What a release has in common with another one, by its chunks, so that a node fetches only the rest.
//! Pure.
//!
//! A program is cut where its content says (a rolling sum of the last 64 bytes), so that bytes that
//! moved are still found. The list of a program's chunks is a target of the repository, of the kind
//! `uki-chunks`. It is a hint: what is put together from it counts only when the whole has the digest
//! that metadata says. A list that is missing, damaged or of no use costs nothing but the saving.
//!
//! | offset | bytes | meaning |
//! |---|---|---|
//! | 0 | 8 | `HFCHUNK1` |
//! | 8 | 8 | length of the program, little-endian |
//! | 16 | 4 | how many chunks, little-endian |
//! | 20 | 36 each | a chunk's length, 4 bytes little-endian, and its SHA-256 |

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Range,
};

use aws_lc_rs::digest::{SHA256, digest};

use crate::disk::medium::PROGRAM_LIMIT;

/// Kind of the list among the files of a release.
pub const KIND: &str = "uki-chunks";
/// Longest list that is read, in bytes: of the longest program, in chunks of twice the shortest
/// length.
pub const MAX_BYTES: u64 = 20 + 36 * (PROGRAM_LIMIT / (2 * SHORTEST as u64));

const MAGIC: &[u8; 8] = b"HFCHUNK1";
const HEAD: usize = 20;
const ENTRY: usize = 36;
/// Shortest chunk but for the last, in bytes.
const SHORTEST: usize = 4 << 10;
/// Longest chunk, in bytes.
const LONGEST: usize = 64 << 10;
/// A chunk ends where so many of the sum's upper bits are zero: every 16 KiB, or so.
const BITS: u32 = 14;
/// What is there already is fetched all the same when it is shorter than this and lies between what is
/// not: a request costs more.
const BRIDGE: u64 = 16 << 10;
/// Most pieces that are fetched; with more than these, requests cost more than bytes.
const MAX_FETCHES: usize = 1024;

/// Why a list of chunks is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ChunksError {
    #[error("it does not begin as a list of chunks does")]
    Head,
    #[error("it says {count} chunks and has {bytes} bytes")]
    Length { count: u32, bytes: usize },
    #[error(
        "its chunks are of no length, or longer than is allowed, or not as long as the program"
    )]
    Chunks,
}

/// The chunks of a program, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunks {
    length: u64,
    chunks: Vec<(u32, [u8; 32])>,
}

/// Where bytes of a program come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// They are there, in this range of the other program.
    Copy(Range<usize>),
    /// They are to be fetched: this range of the program.
    Fetch(Range<u64>),
}

impl Chunks {
    /// Cuts a program. One of more than [`PROGRAM_LIMIT`] bytes is no program of a release.
    pub fn of(program: &[u8]) -> Self {
        let chunk = |range: Range<usize>| {
            let bytes = &program[range];
            (u32::try_from(bytes.len()).unwrap_or(u32::MAX), sha256(bytes))
        };
        Self { length: program.len() as u64, chunks: cuts(program).map(chunk).collect() }
    }

    /// Parses a list.
    pub fn parse(bytes: &[u8]) -> Result<Self, ChunksError> {
        let head = bytes.get(..HEAD).filter(|head| head.starts_with(MAGIC));
        let head = head.ok_or(ChunksError::Head)?;
        let mut length = [0; 8];
        length.copy_from_slice(&head[8..16]);
        let length = u64::from_le_bytes(length);
        let count = u32::from_le_bytes([head[16], head[17], head[18], head[19]]);
        let entries = &bytes[HEAD..];
        let wanted = usize::try_from(count).ok().and_then(|count| count.checked_mul(ENTRY));
        if wanted != Some(entries.len()) || bytes.len() as u64 > MAX_BYTES {
            return Err(ChunksError::Length { count, bytes: bytes.len() });
        }
        let chunk = |entry: &[u8]| {
            let mut digest = [0; 32];
            digest.copy_from_slice(&entry[4..]);
            (u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]), digest)
        };
        let chunks: Vec<_> = entries.chunks_exact(ENTRY).map(chunk).collect();
        let right = |(length, _): &(u32, [u8; 32])| (1..=LONGEST).contains(&(*length as usize));
        let sum: u64 = chunks.iter().map(|(length, _)| u64::from(*length)).sum();
        if sum != length || length > PROGRAM_LIMIT || !chunks.iter().all(right) {
            return Err(ChunksError::Chunks);
        }
        Ok(Self { length, chunks })
    }

    /// Writes a list.
    pub fn bytes(&self) -> Vec<u8> {
        let count = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        let mut bytes = [&MAGIC[..], &self.length.to_le_bytes(), &count.to_le_bytes()].concat();
        for (length, digest) in &self.chunks {
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(digest);
        }
        bytes
    }

    /// Returns the program's length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Says where the program's bytes come from for whoever has `other`; `None` when that saves less
    /// than a tenth.
    pub fn plan(&self, other: &[u8]) -> Option<Vec<Piece>> {
        let mut there: BTreeMap<[u8; 32], Range<usize>> = BTreeMap::new();
        for range in cuts(other) {
            if let Entry::Vacant(entry) = there.entry(sha256(&other[range.clone()])) {
                entry.insert(range);
            }
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let mut at = 0;
        for (length, digest) in &self.chunks {
            let end = at + u64::from(*length);
            let found = there.get(digest).filter(|range| range.len() as u64 == end - at);
            let piece = found.map_or(Piece::Fetch(at..end), |range| Piece::Copy(range.clone()));
            join(&mut pieces, piece);
            at = end;
        }
        let pieces = bridged(pieces);
        let fetches = pieces.iter().filter(|piece| matches!(piece, Piece::Fetch(_))).count();
        let fetched = fetched(&pieces);
        (fetches <= MAX_FETCHES && fetched <= self.length / 10 * 9).then_some(pieces)
    }
}

/// Returns how many bytes of a plan are to be fetched.
pub fn fetched(pieces: &[Piece]) -> u64 {
    let bytes = |piece: &Piece| match piece {
        Piece::Copy(_) => 0,
        Piece::Fetch(range) => range.end - range.start,
    };
    pieces.iter().map(bytes).sum()
}

/// Appends a piece, or lengthens the last one when it goes on where that ends.
fn join(pieces: &mut Vec<Piece>, piece: Piece) {
    match (pieces.last_mut(), &piece) {
        (Some(Piece::Copy(last)), Piece::Copy(next)) if last.end == next.start => {
            last.end = next.end;
        }
        (Some(Piece::Fetch(last)), Piece::Fetch(next)) => last.end = next.end,
        _ => pieces.push(piece),
    }
}

/// Fetches what is there when it is short and lies between what is fetched.
fn bridged(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    let mut at = 0;
    let mut rest = pieces.into_iter().peekable();
    while let Some(piece) = rest.next() {
        let length = match &piece {
            Piece::Copy(range) => range.len() as u64,
            Piece::Fetch(range) => range.end - range.start,
        };
        let after = matches!(joined.last(), Some(Piece::Fetch(_)));
        let before = matches!(rest.peek(), Some(Piece::Fetch(_)));
        let short = length < BRIDGE && after && before;
        let piece = if short { Piece::Fetch(at..at + length) } else { piece };
        join(&mut joined, piece);
        at += length;
    }
    joined
}

/// Cuts bytes into chunks.
fn cuts(bytes: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let start = at;
        at += first(rest);
        Some(start..at)
    })
}

/// Returns the length of the first chunk of bytes that are not empty.
fn first(bytes: &[u8]) -> usize {
    let end = bytes.len().min(LONGEST);
    // The sum forgets what is 64 bytes ago.
    let begin = SHORTEST.saturating_sub(64).min(end);
    let mut sum = 0_u64;
    for (at, byte) in bytes[..end].iter().enumerate().skip(begin) {
        sum = (sum << 1).wrapping_add(GEAR[usize::from(*byte)]);
        if at + 1 >= SHORTEST && sum >> (u64::BITS - BITS) == 0 {
            return at + 1;
        }
    }
    end
}

/// A random-looking number for each byte, by SplitMix64. Every maker and reader of lists has the same.
const GEAR: [u64; 256] = {
    let mut table = [0; 256];
    let mut state = 0_u64;
    let mut at = 0;
    while at < table.len() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        table[at] = mixed ^ (mixed >> 31);
        at += 1;
    }
    table
};

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut sum = [0; 32];
    sum.copy_from_slice(digest(&SHA256, bytes).as_ref());
    sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes without a pattern.
    fn noise(seed: u64, length: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()[6]
        };
        (0..length).map(|_| next()).collect()
    }

    fn apply(pieces: &[Piece], other: &[u8], program: &[u8]) -> Vec<u8> {
        let at = |at: u64| usize::try_from(at).expect("short");
        let bytes = |piece: &Piece| match piece {
            Piece::Copy(range) => other[range.clone()].to_vec(),
            Piece::Fetch(range) => program[at(range.start)..at(range.end)].to_vec(),
        };
        pieces.iter().flat_map(bytes).collect()
    }

    #[test]
    fn what_moved_is_found_and_only_the_rest_fetched() {
        let old = noise(1, 3 << 20);
        let new = [&old[..1 << 20], &noise(2, 10_000), &old[1 << 20..], &noise(3, 777)].concat();
        let pieces = Chunks::of(&new).plan(&old).expect("a plan");
        assert_eq!(apply(&pieces, &old, &new), new);
        assert!(fetched(&pieces) < 200 << 10, "{} bytes", fetched(&pieces));
    }

    #[test]
    fn the_same_program_is_fetched_not_at_all_and_another_one_whole() {
        let old = noise(1, 1 << 20);
        assert_eq!(Chunks::of(&old).plan(&old), Some(vec![Piece::Copy(0..1 << 20)]));
        assert_eq!(Chunks::of(&noise(2, 1 << 20)).plan(&old), None);
        assert_eq!(Chunks::of(&old).plan(&[]), None);
    }

    #[test]
    fn chunks_have_the_lengths_that_are_meant() {
        let lengths: Vec<usize> = cuts(&noise(5, 4 << 20)).map(|range| range.len()).collect();
        let inner = &lengths[..lengths.len() - 1];
        assert!(inner.iter().all(|length| (SHORTEST..=LONGEST).contains(length)), "{lengths:?}");
        let mean = (4 << 20) / lengths.len();
        assert!((12 << 10..28 << 10).contains(&mean), "{mean}");
        assert_eq!(cuts(&vec![0; 200 << 10]).count(), 4);
    }

    #[test]
    fn a_list_that_does_not_add_up_is_refused() {
        let whole = Chunks::of(&noise(1, 100_000)).bytes();
        assert_eq!(Chunks::parse(&whole), Ok(Chunks::of(&noise(1, 100_000))));
        let mut more = whole.clone();
        more[8] ^= 1;
        assert_eq!(Chunks::parse(&more), Err(ChunksError::Chunks));
        let mut endless = whole.clone();
        endless[HEAD + 3] = 0xff;
        assert_eq!(Chunks::parse(&endless), Err(ChunksError::Chunks));
        let cut = &whole[..whole.len() - 1];
        assert!(matches!(Chunks::parse(cut), Err(ChunksError::Length { .. })));
        assert_eq!(Chunks::parse(&whole[1..]), Err(ChunksError::Head));
    }

    proptest! {
        #[test]
        fn a_plan_gives_the_program(
            seeds in proptest::collection::vec((0_u64..6, 1_usize..90_000), 1..8),
            other in proptest::collection::vec((0_u64..6, 1_usize..90_000), 1..8),
        ) {
            let make = |parts: &[(u64, usize)]| -> Vec<u8> {
                parts.iter().flat_map(|(seed, length)| noise(*seed, *length)).collect()
            };
            let (new, old) = (make(&seeds), make(&other));
            if let Some(pieces) = Chunks::of(&new).plan(&old) {
                prop_assert!(apply(&pieces, &old, &new) == new);
            }
        }
    }
}
