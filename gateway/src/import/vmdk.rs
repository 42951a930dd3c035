//! VMDK: sparse extents, stream-optimized ones, and descriptors that name extents.
//! Source: VMware, "Virtual Disk Format 5.0", "The Descriptor File", "Hosted Sparse Extents",
//! "Stream-Optimized Compressed Sparse Extents".
//!
//! | Offset | Bytes | Field of a sparse extent's header (little-endian)           |
//! |--------|-------|-------------------------------------------------------------|
//! | 0      | 4     | "KDMV"                                                      |
//! | 4      | 4     | version, 1 to 3                                             |
//! | 8      | 4     | flags                                                       |
//! | 12     | 8     | capacity in sectors                                         |
//! | 20     | 8     | sectors of a grain                                          |
//! | 28     | 8     | descriptor: first sector                                    |
//! | 36     | 8     | descriptor: sectors                                         |
//! | 44     | 4     | entries of a grain table                                    |
//! | 56     | 8     | grain directory: first sector, or all ones: at the end      |
//! | 73     | 4     | "\n \r\n": damaged by a transfer as text if not              |
//! | 77     | 2     | compression: 0 none, 1 deflate                              |

use std::io::Read;

use super::{
    Disk, Folder, Format, ImportError, Input, MAX_PIECE, MAX_TABLE, Piece, SECTOR, limited, number,
    sized,
};

/// First bytes of a sparse extent.
pub(super) const MAGIC: &[u8] = b"KDMV";
/// First line of a descriptor, in small letters and without spaces.
const TITLE: &str = "#diskdescriptorfile";

const FORMAT: Format = Format::Vmdk;
/// Largest descriptor.
const MAX_DESCRIPTOR: u64 = 1 << 20;
/// Most extents of a descriptor.
const MAX_EXTENTS: usize = 4096;
/// Largest grain.
const MAX_GRAIN: u64 = MAX_PIECE;
/// Flags: an entry of 1 reads as zeroes; grains are compressed.
const FLAG_ZERO: u32 = 1 << 2;
const FLAG_COMPRESSED: u32 = 1 << 16;
/// Where a header whose directory is at the end has its copy: before the last marker.
const FOOTER_FROM_END: u64 = 1024;
const AT_END: u64 = u64::MAX;
/// End of an image's name, and of its pieces'.
const END: &str = ".vmdk";
const NEWLINES: &[u8] = b"\n \r\n";
/// Bytes before the data of a compressed grain: its sector and its length.
const GRAIN_HEAD: usize = 12;

/// A VMDK image.
pub(super) struct Vmdk {
    size: u64,
    /// First byte of each extent, and the extent; ascending.
    extents: Vec<(u64, Extent)>,
}

enum Extent {
    Flat { input: Input, offset: u64, size: u64 },
    Sparse(Sparse),
    Zero { size: u64 },
}

impl Vmdk {
    pub(super) fn open(input: Input, folder: &dyn Folder) -> Result<Self, ImportError> {
        let mut head = [0; 512];
        input.read_padded(0, &mut head)?;
        if !head.starts_with(MAGIC) {
            return Self::described(&descriptor(&input, (0, input.length()))?, folder);
        }
        check_head(&head)?;
        let long = |at| u64::from_le_bytes(number(&head, at));
        let (sector, sectors) = (long(28), long(36));
        let place = (sector.saturating_mul(SECTOR), sectors.saturating_mul(SECTOR));
        let text = if sector == 0 { String::new() } else { descriptor(&input, place)? };
        if !is_descriptor(text.as_bytes()) {
            return Err(ImportError::Unsupported {
                format: FORMAT.name(),
                problem: "is one piece of a disk".to_owned(),
                instead: "import the .vmdk that names it and the others",
            });
        }
        // Without sectors of its own, or with other extents, it only carries the descriptor.
        if long(12) == 0 || extents(&text).count() > 1 {
            return Self::described(&text, folder);
        }
        check_parent(&text)?;
        let sparse = Sparse::open(input)?;
        Ok(Self { size: sparse.size, extents: vec![(0, Extent::Sparse(sparse))] })
    }

    /// Opens the extents that a descriptor names.
    fn described(text: &str, folder: &dyn Folder) -> Result<Self, ImportError> {
        if !is_descriptor(text.as_bytes()) {
            return Err(damaged("it does not begin like one".to_owned()));
        }
        check_parent(text)?;
        let (mut size, mut tables, mut opened) = (0u64, 0, Vec::new());
        for line in extents(text) {
            if opened.len() >= MAX_EXTENTS {
                return Err(damaged(format!("more than {MAX_EXTENTS} extents")));
            }
            let extent = Extent::parse(line, folder)?;
            if let Extent::Sparse(sparse) = &extent {
                // The directories of all of them are in memory at once.
                tables += sparse.directory.len() as u64 * 4;
                limited(FORMAT, "the grain directory", (tables, MAX_TABLE))?;
            }
            let start = size;
            size = size.saturating_add(extent.size());
            sized(FORMAT, size)?;
            opened.push((start, extent));
        }
        if opened.is_empty() {
            return Err(damaged("its descriptor names no extent".to_owned()));
        }
        Ok(Self { size, extents: opened })
    }
}

impl Disk for Vmdk {
    fn size(&self) -> u64 {
        self.size
    }

    fn piece(&mut self, offset: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError> {
        let index = self.extents.partition_point(|(start, _)| *start <= offset).saturating_sub(1);
        let Some((start, extent)) = self.extents.get_mut(index) else {
            return Ok(Piece::Zeroes(self.size - offset));
        };
        let (inside, left) = (offset - *start, extent.size() - (offset - *start));
        let piece = extent.piece(inside, buffer)?;
        buffer.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        Ok(match piece {
            Piece::Zeroes(length) => Piece::Zeroes(length.min(left)),
            Piece::Bytes => Piece::Bytes,
        })
    }
}

impl Extent {
    /// Parses `RW 204800 FLAT "disk-flat.vmdk" 0`.
    fn parse(line: &str, folder: &dyn Folder) -> Result<Self, ImportError> {
        let bad = || damaged(format!("the extent {line:?} makes no sense"));
        let (front, name) = line.split_once('"').map_or((line, ""), |(front, rest)| (front, rest));
        let mut words = front.split_whitespace().skip(1);
        let sectors: u64 = words.next().and_then(|word| word.parse().ok()).ok_or_else(bad)?;
        let size = sectors.checked_mul(SECTOR).filter(|size| *size > 0).ok_or_else(bad)?;
        let kind = words.next().ok_or_else(bad)?.to_ascii_uppercase();
        if kind == "ZERO" {
            return Ok(Self::Zero { size });
        }
        let (name, rest) = name.split_once('"').ok_or_else(bad)?;
        check_name(name, folder.image())?;
        match kind.as_str() {
            "FLAT" | "VMFS" => {
                // After the first sector, there may be words about partitions.
                let sector = rest.split_whitespace().next().unwrap_or("0");
                let sector: Option<u64> = sector.parse().ok();
                let offset = sector.and_then(|it| it.checked_mul(SECTOR)).ok_or_else(bad)?;
                let input = folder.open(name)?;
                if offset.checked_add(size).is_none_or(|end| end > input.length()) {
                    return Err(damaged(format!("{name} has {} bytes, too few", input.length())));
                }
                Ok(Self::Flat { input, offset, size })
            }
            "SPARSE" => {
                let sparse = Sparse::open(folder.open(name)?)?;
                if sparse.size == size { Ok(Self::Sparse(sparse)) } else { Err(bad()) }
            }
            other => Err(refused(format!("has an extent of kind {other}"))),
        }
    }

    fn size(&self) -> u64 {
        match self {
            Self::Flat { size, .. } | Self::Zero { size } => *size,
            Self::Sparse(sparse) => sparse.size,
        }
    }

    fn piece(&mut self, inside: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError> {
        match self {
            Self::Zero { size } => Ok(Piece::Zeroes(*size - inside)),
            Self::Sparse(sparse) => sparse.piece(inside, buffer),
            Self::Flat { input, offset, size } => {
                let hole = input.hole(*offset + inside);
                if hole > 0 {
                    return Ok(Piece::Zeroes(hole));
                }
                input.append(*offset + inside, MAX_PIECE.min(*size - inside), buffer)?;
                Ok(Piece::Bytes)
            }
        }
    }
}

/// A hosted sparse extent.
struct Sparse {
    input: Input,
    size: u64,
    grain: u64,
    entries: u64,
    flags: u32,
    /// First sectors of the grain tables.
    directory: Vec<u32>,
    /// The grain table read last, and its first sector.
    table: (u32, Vec<u32>),
}

impl Sparse {
    fn open(input: Input) -> Result<Self, ImportError> {
        let mut head = [0; 512];
        input.read_padded(0, &mut head)?;
        if u64::from_le_bytes(number(&head, 56)) == AT_END {
            input.read_padded(input.length().saturating_sub(FOOTER_FROM_END), &mut head)?;
        }
        let short = |at| u32::from_le_bytes(number(&head, at));
        let long = |at| u64::from_le_bytes(number(&head, at));
        check_head(&head)?;
        let flags = short(8);
        let compression = u16::from_le_bytes(number(&head, 77));
        if compression > 1 || (compression == 0) == (flags & FLAG_COMPRESSED != 0) {
            return Err(refused(format!("has compression {compression}")));
        }
        let size = long(12).saturating_mul(SECTOR);
        sized(FORMAT, size)?;
        let grain = long(20).saturating_mul(SECTOR);
        let entries = u64::from(short(44));
        if !grain.is_power_of_two() || grain > MAX_GRAIN || !(1..=65536).contains(&entries) {
            return Err(damaged(format!("grains of {grain} bytes, {entries} to a table")));
        }
        let tables = size.div_ceil(grain * entries);
        limited(FORMAT, "the grain directory", (tables * 4, MAX_TABLE))?;
        let directory = words(&input, long(56), tables)?;
        let table = (0, Vec::new());
        Ok(Self { input, size, grain, entries, flags, directory, table })
    }

    fn piece(&mut self, inside: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError> {
        let reach = self.grain * self.entries;
        let slot = usize::try_from(inside / reach).unwrap_or(usize::MAX);
        let at = self.directory.get(slot).copied().unwrap_or(0);
        if at == 0 {
            return Ok(Piece::Zeroes(reach - inside % reach));
        }
        if self.table.0 != at {
            self.table = (at, words(&self.input, at.into(), self.entries)?);
        }
        let index = inside / self.grain % self.entries;
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let first = self.table.1.get(index).copied().unwrap_or(0);
        let (skip, left) = (inside % self.grain, self.grain - inside % self.grain);
        if first == 0 || (first == 1 && self.flags & FLAG_ZERO != 0) {
            return Ok(Piece::Zeroes(left));
        }
        let at = u64::from(first) * SECTOR;
        let is_packed = self.flags & FLAG_COMPRESSED != 0;
        let needed =
            if is_packed { GRAIN_HEAD as u64 } else { skip + left.min(self.size - inside) };
        if at + needed > self.input.length() {
            return Err(damaged(format!("a grain at {at:#x}, outside of the file")));
        }
        if !is_packed {
            self.input.append(at + skip, left, buffer)?;
            return Ok(Piece::Bytes);
        }
        self.decompress(at, inside - skip, buffer)?;
        buffer.drain(..usize::try_from(skip).unwrap_or(0));
        Ok(Piece::Bytes)
    }

    /// Unpacks the grain at `at`, which says that it is the one at `inside`. The last grain of a
    /// disk may be short.
    fn decompress(&self, at: u64, inside: u64, buffer: &mut Vec<u8>) -> Result<(), ImportError> {
        let mut head = [0; GRAIN_HEAD];
        self.input.read_padded(at, &mut head)?;
        let sector = u64::from_le_bytes(number(&head, 0));
        let length = u64::from(u32::from_le_bytes(number(&head, 8)));
        let bad = |problem: String| damaged(format!("the compressed grain at {at:#x}: {problem}"));
        if sector.checked_mul(SECTOR) != Some(inside) {
            return Err(bad(format!("it is of sector {sector}")));
        }
        if length > 2 * self.grain {
            return Err(bad(format!("{length} bytes are more than it can need")));
        }
        if at + GRAIN_HEAD as u64 + length > self.input.length() {
            return Err(bad("it reaches past the end of the file".to_owned()));
        }
        let mut packed = Vec::new();
        self.input.append(at + GRAIN_HEAD as u64, length, &mut packed)?;
        let reader = flate2::read::ZlibDecoder::new(&packed[..]);
        // The checksum is behind the last byte: it is looked at by reading on.
        reader.take(self.grain + 1).read_to_end(buffer).map_err(|error| bad(error.to_string()))?;
        let wanted = self.grain.min(self.size - inside);
        if !(wanted..=self.grain).contains(&(buffer.len() as u64)) {
            return Err(bad(format!("more or less than {wanted} bytes come out")));
        }
        Ok(())
    }
}

/// Checks that `head` is an undamaged header of a known version.
fn check_head(head: &[u8; 512]) -> Result<(), ImportError> {
    if !head.starts_with(MAGIC) {
        return Err(damaged("no header where one should be".to_owned()));
    }
    let version = u32::from_le_bytes(number(head, 4));
    if !(1..=3).contains(&version) {
        return Err(refused(format!("has version {version}")));
    }
    if head[73..77] != *NEWLINES {
        return Err(damaged("it was transferred as text, which changed line ends".to_owned()));
    }
    Ok(())
}

/// Reads `count` numbers from `sector` on.
fn words(input: &Input, sector: u64, count: u64) -> Result<Vec<u32>, ImportError> {
    let offset = sector.checked_mul(SECTOR);
    let end = offset.and_then(|offset| offset.checked_add(count * 4));
    let (Some(offset), Some(true)) = (offset, end.map(|end| end <= input.length())) else {
        return Err(damaged(format!("a table at sector {sector}, outside of the file")));
    };
    let mut bytes = Vec::new();
    input.append(offset, count * 4, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Returns whether `bytes` begin as a descriptor: with its title, or with comments and then a version.
pub(super) fn is_descriptor(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.trim_start_matches('\u{feff}').lines().map(|line| {
        let words: String = line.split_whitespace().collect();
        words.to_ascii_lowercase()
    });
    let first = lines.find(|line| line == TITLE || !(line.is_empty() || line.starts_with('#')));
    first.is_some_and(|line| line == TITLE || line.starts_with("version="))
}

/// Returns the descriptor at an offset, of a length; zeroes end it.
fn descriptor(input: &Input, (offset, length): (u64, u64)) -> Result<String, ImportError> {
    limited(FORMAT, "the descriptor", (length, MAX_DESCRIPTOR))?;
    let mut bytes = Vec::new();
    input.append(offset, length, &mut bytes)?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

/// Returns the lines of a descriptor that name extents.
fn extents(descriptor: &str) -> impl Iterator<Item = &str> {
    let is_extent = |line: &&str| {
        let first = line.split_whitespace().next().unwrap_or_default();
        ["RW", "RDONLY", "NOACCESS"].iter().any(|word| first.eq_ignore_ascii_case(word))
    };
    descriptor.lines().map(str::trim).filter(is_extent)
}

/// Checks that a file bears the name of a piece of the image: the image's own with something behind it, as
/// `disk-flat.vmdk` and `disk-s001.vmdk` for `disk.vmdk`. Whoever made the image would else choose what of the
/// user's folder comes into the disk.
fn check_name(name: &str, image: &str) -> Result<(), ImportError> {
    if name.is_empty() || name.contains(['/', '\\', '\0']) || name == ".." || name == "." {
        return Err(refused(format!("has its extent at {name:?}, elsewhere")));
    }
    let Some(piece) = stem(name) else {
        return Err(refused(format!("has its extent at {name:?}, which is no name of a .vmdk")));
    };
    let own = stem(image).unwrap_or(image);
    let front = piece.get(..own.len()).filter(|front| front.eq_ignore_ascii_case(own));
    if front.is_some() && (piece.len() == own.len() || piece[own.len()..].starts_with('-')) {
        return Ok(());
    }
    let made = piece.rsplit_once('-').map_or(piece, |(made, _)| made);
    Err(ImportError::Unsupported {
        format: FORMAT.name(),
        problem: format!(
            "is named {image:?}, and its extent {name:?} belongs to one named {:?}",
            format!("{made}{END}")
        ),
        instead: "an image reads no files but those that begin with its own name: if it was renamed, rename it back",
    })
}

/// Returns a name without its `.vmdk`; `None` when it has none.
fn stem(name: &str) -> Option<&str> {
    let (stem, end) = name.split_at_checked(name.len().checked_sub(END.len())?)?;
    end.eq_ignore_ascii_case(END).then_some(stem)
}

fn check_parent(descriptor: &str) -> Result<(), ImportError> {
    let is_child = |line: &str| {
        let (key, value) = line.split_once('=').unwrap_or_default();
        let (key, value) = (key.trim(), value.trim().trim_matches('"'));
        (key.eq_ignore_ascii_case("parentCID") && !value.eq_ignore_ascii_case("ffffffff"))
            || (key.eq_ignore_ascii_case("parentFileNameHint") && !value.is_empty())
    };
    if descriptor.lines().any(is_child) {
        return Err(refused("has a parent".to_owned()));
    }
    Ok(())
}

fn damaged(problem: String) -> ImportError {
    ImportError::Damaged { format: FORMAT.name(), problem }
}

fn refused(problem: String) -> ImportError {
    let instead = "convert it first, as by `qemu-img convert` or by exporting it as OVF";
    ImportError::Unsupported { format: FORMAT.name(), problem, instead }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use super::*;
    use crate::import::file::Beside;

    fn open(image: &Path, extent: &str) -> Result<u64, String> {
        let text = format!("# Disk DescriptorFile\nRW 1 FLAT \"{extent}\" 0\n");
        let folder = Beside::new(image, image.with_extension("partial"));
        let disk = Vmdk::open(Input::Memory(text.into_bytes()), &folder);
        disk.map(|disk| disk.size).map_err(|error| error.to_string())
    }

    #[test]
    fn an_image_reads_only_its_own_pieces() {
        let folder = tempfile::tempdir().expect("a folder");
        let image = folder.path().join("disk.vmdk");
        let names = ["disk-flat.vmdk", "disk-s001.VMDK", "Disk-000001-f001.vmdk", "disk.vmdk"];
        for name in names {
            fs::write(folder.path().join(name), [1; 512]).expect("written");
            assert_eq!(open(&image, name), Ok(512), "{name}");
        }
        for (name, told) in [
            ("notes.txt", "no name of a .vmdk"),
            ("disk-flat.txt", "no name of a .vmdk"),
            ("disks.vmdk", "one named \"disks.vmdk\""),
            ("other-flat.vmdk", "one named \"other.vmdk\""),
            ("../disk-flat.vmdk", "elsewhere"),
        ] {
            let refusal = open(&image, name).expect_err(name);
            assert!(refusal.contains(told), "{name}: {refusal}");
        }
        let renamed = open(&folder.path().join("new.vmdk"), "disk-flat.vmdk").expect_err("renamed");
        assert!(renamed.contains("is named \"new.vmdk\""), "{renamed}");
        assert!(renamed.contains("rename it back"), "{renamed}");
    }

    #[test]
    fn a_piece_is_a_file_and_no_link_to_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let [image, secret, link, below] =
            ["disk.vmdk", "secret", "disk-flat.vmdk", "disk-s001.vmdk"]
                .map(|name| folder.path().join(name));
        fs::write(&secret, [1; 512]).expect("written");
        symlink(&secret, &link).expect("linked");
        fs::create_dir(&below).expect("made");
        assert!(open(&image, "disk-flat.vmdk").is_err());
        assert!(open(&image, "disk-s001.vmdk").is_err());
    }
}
