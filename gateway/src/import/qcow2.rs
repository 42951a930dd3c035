//! qcow2, versions 2 and 3.
//! Source: QEMU docs/interop/qcow2.txt, "Header", "Cluster mapping", "Compressed Clusters",
//! "Extended L2 Entries".
//!
//! | Offset | Bytes | Field of the header (big-endian)                            |
//! |--------|-------|-------------------------------------------------------------|
//! | 0      | 4     | "QFI\xfb"                                                   |
//! | 4      | 4     | version                                                     |
//! | 8      | 8     | backing file name: refused                                  |
//! | 20     | 4     | cluster_bits                                                |
//! | 24     | 8     | size of the disk in bytes                                   |
//! | 32     | 4     | encryption method: refused                                  |
//! | 36     | 4     | entries of the first table                                  |
//! | 40     | 8     | offset of the first table                                   |
//! | 72     | 8     | incompatible features (version 3)                           |
//! | 104    | 1     | compression: 0 zlib, 1 zstd (if feature bit 3)              |

use std::io::Read;

use super::{Disk, Format, ImportError, Input, MAX_TABLE, Piece, limited, number, sized, zstd};

/// First bytes.
pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";

const FORMAT: Format = Format::Qcow2;
/// Offset of a table or of a cluster, in entries of both tables.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Entry of a second table: the cluster is compressed.
const COMPRESSED: u64 = 1 << 62;
/// Entry of a second table, version 3: reads as zeroes.
const ZERO: u64 = 1;
/// Compressed clusters are counted in these.
const SECTOR: u64 = 512;

/// Subclusters of a cluster, as an extended entry of a second table tells them.
const SUBCLUSTERS: u32 = 32;
/// Smallest clusters with subclusters, which are of whole sectors.
const MIN_EXTENDED_BITS: u32 = 14;

/// Incompatible feature bits.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_ENTRIES: u64 = 1 << 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    Zlib,
    Zstd,
}

/// An entry of a second table.
struct Entry {
    /// Where the cluster lies, and its flags.
    word: u64,
    /// From bit 0 on: which subclusters lie there. From bit 32 on: which read as zeroes.
    subclusters: u64,
}

impl Entry {
    /// Returns whether there is data at `inside` of a cluster, and how many bytes on that goes on.
    fn run(&self, cluster: u64, inside: u64) -> Result<(bool, u64), ImportError> {
        let (data, zeroes) = (self.subclusters, self.subclusters >> SUBCLUSTERS);
        if data & zeroes != 0 {
            return Err(damaged(format!("subclusters {:#018x}", self.subclusters)));
        }
        let unit = cluster / u64::from(SUBCLUSTERS);
        let first = inside / unit;
        let is_data = |index: u64| data >> index & 1 != 0;
        let same = |index: &u64| is_data(*index) == is_data(first);
        let end = (first..u64::from(SUBCLUSTERS)).take_while(same).last().unwrap_or(first) + 1;
        Ok((is_data(first), end * unit - inside))
    }
}

/// A qcow2 image.
pub(super) struct Qcow2 {
    input: Input,
    size: u64,
    cluster_bits: u32,
    version: u32,
    /// Words of an entry of a second table: 2 where it tells of subclusters.
    words: u64,
    compression: Compression,
    /// The first table.
    first: Vec<u64>,
    /// The second table read last, and where it lies.
    second: (u64, Vec<u64>),
}

impl Qcow2 {
    pub(super) fn open(input: Input) -> Result<Self, ImportError> {
        let mut head = [0; 112];
        input.read_padded(0, &mut head)?;
        let short = |at| u32::from_be_bytes(number(&head, at));
        let long = |at| u64::from_be_bytes(number(&head, at));
        if head[..4] != MAGIC {
            return Err(damaged("it does not begin like one".to_owned()));
        }
        let version = short(4);
        if !matches!(version, 2 | 3) {
            return Err(refused(format!("has version {version}"), CONVERT));
        }
        let features = if version == 3 { long(72) } else { 0 };
        check_features(features)?;
        if long(8) != 0 {
            return Err(refused("has a backing file".to_owned(), FLATTEN));
        }
        if short(32) != 0 {
            return Err(refused("is encrypted".to_owned(), CONVERT));
        }
        let kind = if version == 3 && short(100) > 104 { head[104] } else { 0 };
        let compression = match (features & COMPRESSION != 0, kind) {
            (_, 0) => Compression::Zlib,
            (true, 1) => Compression::Zstd,
            (true, other) => return Err(refused(format!("has compression {other}"), CONVERT)),
            (false, other) => {
                return Err(damaged(format!("compression {other}, but not the feature of others")));
            }
        };
        let cluster_bits = short(20);
        let words = if features & EXTENDED_ENTRIES == 0 { 1 } else { 2 };
        if !(if words == 1 { 9 } else { MIN_EXTENDED_BITS }..=21).contains(&cluster_bits) {
            return Err(damaged(format!("clusters of 2^{cluster_bits} bytes")));
        }
        // Disks have whole sectors; what the last cluster holds behind its end is nobody's.
        let size = sized(FORMAT, long(24).checked_next_multiple_of(SECTOR).unwrap_or(u64::MAX))?;
        let (entries, offset) = (u64::from(short(36)), long(40));
        limited(FORMAT, "the first table", (entries * 8, MAX_TABLE))?;
        let per_entry = (1u64 << (2 * cluster_bits - 3)) / words;
        if entries < size.div_ceil(per_entry) {
            return Err(damaged(format!("{entries} entries of the first table are too few")));
        }
        let first = table(&input, offset, entries)?;
        let second = (0, Vec::new());
        Ok(Self { input, size, cluster_bits, version, words, compression, first, second })
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns how many bytes a second table is for.
    fn reach(&self) -> u64 {
        self.cluster() * (self.cluster() / 8 / self.words)
    }

    /// Returns the entry of the second table for `offset`, or `None` where there is none.
    fn entry(&mut self, offset: u64) -> Result<Option<Entry>, ImportError> {
        let per_table = self.cluster() / 8 / self.words;
        let index = offset >> self.cluster_bits;
        let slot = usize::try_from(index / per_table).unwrap_or(usize::MAX);
        let at = self.first.get(slot).copied().unwrap_or(0) & OFFSET;
        if at == 0 {
            return Ok(None);
        }
        if self.second.0 != at {
            if !at.is_multiple_of(self.cluster()) {
                return Err(damaged(format!("a table at {at:#x}, between clusters")));
            }
            self.second = (at, table(&self.input, at, self.cluster() / 8)?);
        }
        let slot = usize::try_from(index % per_table * self.words).unwrap_or(usize::MAX);
        let words = self.second.1.get(slot..).unwrap_or_default();
        let Some(word) = words.first().copied() else { return Ok(None) };
        let subclusters = match words.get(1) {
            Some(bitmap) if self.words == 2 => *bitmap,
            _ if word & OFFSET == 0 || (self.version == 3 && word & ZERO != 0) => 0,
            _ => u32::MAX.into(),
        };
        Ok(Some(Entry { word, subclusters }))
    }

    fn decompress(&self, entry: u64, buffer: &mut Vec<u8>) -> Result<(), ImportError> {
        let bits = 62 - (self.cluster_bits - 8);
        let at = entry & ((1 << bits) - 1);
        let sectors = (entry & !COMPRESSED & !(1 << 63)) >> bits;
        let length = (sectors + 1) * SECTOR - at % SECTOR;
        if at >= self.input.length() {
            return Err(damaged(format!("a compressed cluster at {at:#x}, outside of the file")));
        }
        // Its last sector need not be whole. What is not there is an end, not zeroes.
        let mut packed = Vec::new();
        self.input.append(at, length.min(self.input.length() - at), &mut packed)?;
        let bad = |error: String| damaged(format!("the compressed cluster at {at:#x}: {error}"));
        // A stream that does not end with the cluster is no stream of one: they have no checksum.
        let cluster = self.cluster();
        match self.compression {
            Compression::Zlib => {
                let mut reader = flate2::read::DeflateDecoder::new(&packed[..]).take(cluster + 1);
                reader.read_to_end(buffer).map_err(|error| bad(error.to_string()))?;
            }
            Compression::Zstd => zstd::unpack(&packed, cluster, buffer).map_err(bad)?,
        }
        if buffer.len() as u64 == cluster {
            return Ok(());
        }
        Err(bad(format!("more or less than {cluster} bytes come out")))
    }
}

impl Disk for Qcow2 {
    fn size(&self) -> u64 {
        self.size
    }

    fn piece(&mut self, offset: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError> {
        let cluster = self.cluster();
        let inside = offset % cluster;
        let Some(entry) = self.entry(offset)? else {
            // The whole table is missing.
            let reach = self.reach();
            return Ok(Piece::Zeroes(reach - offset % reach));
        };
        if entry.word & COMPRESSED != 0 {
            self.decompress(entry.word, buffer)?;
            buffer.drain(..usize::try_from(inside).unwrap_or(0));
            return Ok(Piece::Bytes);
        }
        let (is_data, left) = entry.run(cluster, inside)?;
        if !is_data {
            return Ok(Piece::Zeroes(left));
        }
        let at = entry.word & OFFSET;
        if at == 0 || !at.is_multiple_of(cluster) {
            return Err(damaged(format!("a cluster at {at:#x}, where none can be")));
        }
        if at + inside + left.min(self.size - offset) > self.input.length() {
            return Err(damaged(format!("a cluster at {at:#x}, outside of the file")));
        }
        self.input.append(at + inside, left, buffer)?;
        Ok(Piece::Bytes)
    }
}

const CONVERT: &str = "convert it with the program that made it";
const FLATTEN: &str = "flatten it first, as by `qemu-img convert`";

fn check_features(features: u64) -> Result<(), ImportError> {
    // A dirty image has wrong reference counts at worst; the mapping counts.
    let known = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION | EXTENDED_ENTRIES;
    let problem = if features & CORRUPT != 0 {
        return Err(damaged("its own program marked it so".to_owned()));
    } else if features & EXTERNAL_DATA != 0 {
        "keeps its data in another file".to_owned()
    } else if features & !known != 0 {
        format!("has the unknown features {:#x}", features & !known)
    } else {
        return Ok(());
    };
    Err(refused(problem, FLATTEN))
}

/// Reads a table of `entries`.
fn table(input: &Input, offset: u64, entries: u64) -> Result<Vec<u64>, ImportError> {
    let end = offset.checked_add(entries * 8);
    if end.is_none_or(|end| end > input.length()) {
        return Err(damaged(format!("a table at {offset:#x}, outside of the file")));
    }
    let mut bytes = Vec::new();
    input.append(offset, entries * 8, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<8>();
    Ok(words.iter().map(|word| u64::from_be_bytes(*word)).collect())
}

fn damaged(problem: String) -> ImportError {
    ImportError::Damaged { format: FORMAT.name(), problem }
}

fn refused(problem: String, instead: &'static str) -> ImportError {
    ImportError::Unsupported { format: FORMAT.name(), problem, instead }
}
