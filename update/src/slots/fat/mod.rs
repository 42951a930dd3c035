//! The EFI system partition's FAT32 volume: files are read, and replaced so that a power cut leaves
//! the old one or the new one.
//!
//! A replacement goes into clusters that no file uses, then into the tables; it is read back; then
//! one sector's write lets the file's directory entry name the new clusters. What a cut leaves
//! marked without belonging to a file is free to the next replacement, so nothing has to be cleaned
//! up and no file with another name is ever in the way. A file takes the place of another one without
//! being written again: entries change hands, a sector each. Folders are not made; the installer does.
//!
//! Source: Microsoft, FAT32 File System Specification 1.03.
//!
//! | offset in sector 0 | bytes | meaning                                    |
//! |--------------------|-------|--------------------------------------------|
//! | 11                 | 2     | bytes in a sector                          |
//! | 13                 | 1     | sectors in a cluster                       |
//! | 14                 | 2     | sectors before the tables                  |
//! | 16                 | 1     | number of tables, one a copy of the other  |
//! | 22                 | 2     | 0: FAT32                                   |
//! | 32                 | 4     | sectors of the volume                      |
//! | 36                 | 4     | sectors of a table                         |
//! | 40                 | 2     | bit 7: the copies are not written          |
//! | 44                 | 4     | first cluster of the root folder           |
//! | 48                 | 2     | sector with the number of free clusters    |
//! | 510                | 2     | 0x55 0xaa                                  |

mod folder;
mod table;
mod write;

#[cfg(test)]
mod tests;

use std::io::{self, Read, Seek, SeekFrom, Write};

pub use folder::Entry;
pub use write::Writing;

use folder::Located;
use table::Table;

/// Shortest and longest sectors, in bytes.
const SECTORS: std::ops::RangeInclusive<usize> = 512..=4096;
/// Longest cluster, in bytes.
const MAX_CLUSTER: usize = 128 << 10;
/// Most clusters: what 512 MiB have when they are as short as they can be.
const MAX_CLUSTERS: u32 = 1 << 20;
/// First cluster that a table knows.
const FIRST: u32 = 2;

/// What a volume lies on.
pub trait Storage: Read + Write + Seek {
    /// Makes everything that was written durable.
    fn sync(&mut self) -> io::Result<()>;
    /// Lets the next reads come from the medium itself.
    fn forget(&mut self) -> io::Result<()>;
}

/// Why a volume cannot be used as asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum FatError {
    #[error("cannot {action} the EFI system partition")]
    Disk { action: &'static str, source: io::Error },
    #[error(
        "the EFI system partition holds no FAT32 volume that can be used: its {field} is {found}"
    )]
    Volume { field: &'static str, found: u32 },
    #[error("{path}: the volume's tables contradict each other there")]
    Damaged { path: String },
    #[error("{path}: there is no such folder")]
    NoFolder { path: String },
    #[error("{path}: there is no such file")]
    Missing { path: String },
    #[error("{path}: its folder is full")]
    FolderFull { path: String },
    #[error(
        "the EFI system partition is full: {path} takes {needed} bytes and {free} are free; remove what \
         others have put there"
    )]
    Full { path: String, needed: u64, free: u64 },
    #[error("{path}: what was written is not what is read back; the disk does not keep its data")]
    Differs { path: String },
    #[error("{path} has {found} bytes instead of {wanted}")]
    Length { path: String, found: u64, wanted: u64 },
}

fn disk(action: &'static str) -> impl FnOnce(io::Error) -> FatError {
    move |source| FatError::Disk { action, source }
}

/// Where things are on a volume.
#[derive(Debug, Clone, Copy)]
struct Geometry {
    sector: usize,
    cluster: usize,
    /// First byte of the first table.
    tables: u64,
    /// Bytes of one table.
    table: usize,
    copies: u32,
    /// First byte of the first cluster.
    data: u64,
    /// One more than the last cluster's number.
    end: u32,
    root: u32,
    info: Option<u64>,
}

/// An open volume.
#[derive(Debug)]
pub struct Volume<S> {
    storage: S,
    geometry: Geometry,
    table: Table,
}

impl<S: Storage> Volume<S> {
    /// Opens a volume.
    pub fn open(mut storage: S) -> Result<Self, FatError> {
        let mut boot = [0; 512];
        read_at(&mut storage, 0, &mut boot)?;
        let geometry = Geometry::parse(&boot)?;
        let table = Table::read(&mut storage, &geometry)?;
        Ok(Self { storage, geometry, table })
    }

    /// Returns the storage again.
    pub fn into_inner(self) -> S {
        self.storage
    }

    /// Finds the file at `path`, which has short names in capitals and slashes between.
    pub fn find(&mut self, path: &str) -> Result<Option<Entry>, FatError> {
        let Some(Located { entries, name, .. }) = self.locate(path)? else { return Ok(None) };
        Ok(entries.iter().find(|entry| entry.is(name)).cloned())
    }

    /// Reads a file, of at most `limit` bytes.
    pub fn read(&mut self, path: &str, limit: u64) -> Result<Option<Vec<u8>>, FatError> {
        let Some(entry) = self.find(path)? else { return Ok(None) };
        let found = u64::from(entry.length);
        if found > limit {
            return Err(FatError::Length { path: path.to_owned(), found, wanted: limit });
        }
        let mut bytes = Vec::new();
        self.pour(path, &entry, &mut |piece| bytes.extend_from_slice(piece))?;
        Ok(Some(bytes))
    }

    /// Reads a file cluster by cluster.
    fn pour(
        &mut self,
        path: &str,
        entry: &Entry,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(), FatError> {
        let damaged = || FatError::Damaged { path: path.to_owned() };
        let chain = self.table.chain(entry.first).ok_or_else(damaged)?;
        let length = usize::try_from(entry.length).map_err(|_| damaged())?;
        if chain.len() != length.div_ceil(self.geometry.cluster) {
            return Err(damaged());
        }
        let mut buffer = vec![0; self.geometry.cluster];
        let mut left = length;
        for cluster in chain {
            let piece = &mut buffer[..left.min(self.geometry.cluster)];
            let at = self.geometry.place(cluster);
            read_at(&mut self.storage, at, piece)?;
            each(piece);
            left -= piece.len();
        }
        Ok(())
    }
}

impl Geometry {
    fn parse(boot: &[u8; 512]) -> Result<Self, FatError> {
        let u16_at = |at: usize| u32::from(u16::from_le_bytes([boot[at], boot[at + 1]]));
        let u32_at = |at: usize| u16_at(at) | u16_at(at + 2) << 16;
        let wrong = |field, found| Err(FatError::Volume { field, found });
        let size = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
        if u16_at(510) != 0xaa55 {
            return wrong("signature", u16_at(510));
        }
        let sector = size(u16_at(11));
        if !SECTORS.contains(&sector) || !sector.is_power_of_two() {
            return wrong("sector length", u16_at(11));
        }
        let cluster = sector * usize::from(boot[13]);
        if !cluster.is_power_of_two() || cluster > MAX_CLUSTER {
            return wrong("cluster length", boot[13].into());
        }
        if u16_at(22) != 0 || u16_at(17) != 0 {
            return wrong("kind", u16_at(22));
        }
        let copies = u32::from(boot[16]);
        if !(1..=2).contains(&copies) || u16_at(40) & 0x80 != 0 {
            return wrong("number of tables", copies);
        }
        let (total, reserved, length) = (u32_at(32), u16_at(14), u32_at(36));
        let before = u64::from(reserved) + u64::from(copies) * u64::from(length);
        let sectors = u64::from(total).saturating_sub(before);
        let count = sectors / u64::from(boot[13]);
        let end = u32::try_from(count).ok().and_then(|count| count.checked_add(FIRST));
        let Some(end) = end.filter(|end| (FIRST + 1..=MAX_CLUSTERS + FIRST).contains(end)) else {
            return wrong("number of sectors", total);
        };
        let bytes = size(length).saturating_mul(sector);
        if reserved == 0 || bytes / 4 < size(end) || bytes > size(MAX_CLUSTERS) * 8 {
            return wrong("table length", length);
        }
        let root = u32_at(44);
        if !(FIRST..end).contains(&root) {
            return wrong("root folder", root);
        }
        let unit = sector as u64;
        let info = u16_at(48);
        let info = (info > 0 && info < reserved).then(|| u64::from(info) * unit);
        let tables = u64::from(reserved) * unit;
        Ok(Self {
            sector,
            cluster,
            tables,
            table: bytes,
            copies,
            data: before * unit,
            end,
            root,
            info,
        })
    }

    /// First byte of a cluster, whose number the table has.
    fn place(&self, cluster: u32) -> u64 {
        self.data + u64::from(cluster - FIRST) * self.cluster as u64
    }
}

fn read_at<S: Storage>(storage: &mut S, at: u64, bytes: &mut [u8]) -> Result<(), FatError> {
    storage.seek(SeekFrom::Start(at)).map_err(disk("read"))?;
    storage.read_exact(bytes).map_err(disk("read"))
}

fn write_at<S: Storage>(storage: &mut S, at: u64, bytes: &[u8]) -> Result<(), FatError> {
    storage.seek(SeekFrom::Start(at)).map_err(disk("write to"))?;
    storage.write_all(bytes).map_err(disk("write to"))
}
