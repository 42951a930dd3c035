//! Folders: entries of 32 bytes.
//!
//! | offset | bytes | meaning                                  |
//! |--------|-------|------------------------------------------|
//! | 0      | 11    | name; 0xe5: free; 0: free, as all behind |
//! | 11     | 1     | attributes                               |
//! | 20     | 2     | first cluster, high half                 |
//! | 26     | 2     | first cluster, low half                  |
//! | 28     | 4     | length in bytes                          |

use super::{FatError, Storage, Volume, disk, read_at, table::Use, write_at};

/// Bytes of an entry.
const ENTRY: usize = 32;
/// Attribute of folders.
const FOLDER: u8 = 0x10;
/// Attribute of the volume's label, which parts of long names have too.
const LABEL: u8 = 0x08;
/// Attribute of files that changed since a backup, as new ones have.
const ARCHIVE: u8 = 0x20;
/// First byte of a name that says that its entry is free.
const FREE: u8 = 0xe5;
/// Depth to which folders may lie in each other.
const DEPTH: u32 = 8;
/// Most entries that are looked at in all.
const ENTRIES: usize = 16 << 10;

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    name: [u8; 11],
    attributes: u8,
    /// First cluster; 0 when there is none.
    pub(super) first: u32,
    /// Length in bytes.
    pub length: u32,
    /// Where the entry is on the storage.
    at: u64,
}

/// The folder that a path leads to, and its last part.
pub(super) struct Located {
    pub(super) entries: Vec<Entry>,
    pub(super) name: [u8; 11],
    /// Where something lies behind the folder's end that would be in the folder were the end taken.
    behind: Option<u64>,
}

impl Entry {
    fn parse(bytes: &[u8], at: u64) -> Option<Self> {
        let bytes: &[u8; ENTRY] = bytes.try_into().ok()?;
        let half = |at: usize| u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let mut name = [0; 11];
        name.copy_from_slice(&bytes[..11]);
        Some(Self {
            name,
            attributes: bytes[11],
            first: half(20) << 16 | half(26),
            length: half(28) | half(30) << 16,
            at,
        })
    }

    /// A chain that has no entry yet.
    pub(super) fn unnamed(first: u32, length: u32) -> Self {
        Self { name: [0; 11], attributes: ARCHIVE, first, length, at: 0 }
    }

    pub(super) fn is(&self, name: [u8; 11]) -> bool {
        self.name == name && self.attributes & (FOLDER | LABEL) == 0
    }

    fn is_folder(&self) -> bool {
        self.attributes & (FOLDER | LABEL) == FOLDER && self.name[0] != b'.'
    }

    fn is_free(&self) -> bool {
        [0, FREE].contains(&self.name[0])
    }
}

/// Returns a name as entries hold it; `None` when it is no short one.
fn short(name: &str) -> Option<[u8; 11]> {
    let (base, suffix) = name.split_once('.').unwrap_or((name, ""));
    let plain = |part: &str| part.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit());
    if base.is_empty() || base.len() > 8 || suffix.len() > 3 || !plain(base) || !plain(suffix) {
        return None;
    }
    let mut short = [b' '; 11];
    short[..base.len()].copy_from_slice(base.as_bytes());
    short[8..8 + suffix.len()].copy_from_slice(suffix.as_bytes());
    Some(short)
}

impl<S: Storage> Volume<S> {
    /// Returns all entries of a folder, free ones too.
    fn entries(&mut self, first: u32, path: &str) -> Result<Vec<Entry>, FatError> {
        let damaged = || FatError::Damaged { path: path.to_owned() };
        let chain = self.table.chain(first).ok_or_else(damaged)?;
        let mut found = Vec::new();
        let mut bytes = vec![0; self.geometry.cluster];
        for cluster in chain {
            let start = self.geometry.place(cluster);
            read_at(&mut self.storage, start, &mut bytes)?;
            for (index, piece) in bytes.chunks_exact(ENTRY).enumerate() {
                found.extend(Entry::parse(piece, start + (index * ENTRY) as u64));
            }
            if found.len() > ENTRIES {
                return Err(damaged());
            }
        }
        Ok(found)
    }

    /// Returns the folder that `path` leads to, up to its end, and the last part of the path; `None`
    /// when a folder is not there.
    pub(super) fn locate(&mut self, path: &str) -> Result<Option<Located>, FatError> {
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut entries = self.entries(self.geometry.root, "/")?;
        for part in folders.split('/').filter(|part| !part.is_empty()) {
            let used = entries.iter().take_while(|entry| entry.name[0] != 0);
            let found = short(part).and_then(|name| {
                used.clone().find(|entry| entry.name == name && entry.is_folder())
            });
            let Some(found) = found.cloned() else { return Ok(None) };
            entries = self.entries(found.first, path)?;
        }
        let Some(name) = short(name) else { return Ok(None) };
        // Behind the end only one free entry matters: a new file takes it.
        let used = entries.iter().position(|entry| entry.name[0] == 0);
        let end = used.map_or(entries.len(), |used| used + 1);
        let behind = entries.get(end).filter(|entry| entry.name[0] != 0).map(|entry| entry.at);
        entries.truncate(end);
        Ok(Some(Located { entries, name, behind }))
    }

    /// Returns what each cluster belongs to. Names may share a file, but what a folder shares would change
    /// with its entries: nothing is written to such a volume.
    pub(super) fn uses(&mut self) -> Result<Vec<Use>, FatError> {
        let mut uses = vec![Use::Free; usize::try_from(self.geometry.end).unwrap_or(0)];
        let mut folders = vec![(self.geometry.root, 0)];
        let mut seen = 0;
        self.table.mark(self.geometry.root, Use::Folder, &mut uses);
        while let Some((folder, depth)) = folders.pop() {
            let entries = self.entries(folder, "a folder")?;
            for entry in entries.iter().take_while(|entry| entry.name[0] != 0) {
                seen += 1;
                if seen > ENTRIES || depth > DEPTH {
                    return Err(FatError::Damaged { path: "a folder".to_owned() });
                }
                if entry.is_free() || entry.attributes & LABEL != 0 || entry.name[0] == b'.' {
                    continue;
                }
                let what = if entry.is_folder() { Use::Folder } else { Use::File };
                if !self.table.mark(entry.first, what, &mut uses) {
                    return Err(FatError::Damaged { path: entry.name.escape_ascii().to_string() });
                }
                if entry.is_folder() {
                    folders.push((entry.first, depth + 1));
                }
            }
        }
        Ok(uses)
    }

    /// Lets the file `path` be the chain that begins at `first`: one sector is written. A new file that takes the
    /// folder's end moves the end before.
    pub(super) fn switch(&mut self, path: &str, first: u32, length: u32) -> Result<(), FatError> {
        let no_folder = || FatError::NoFolder { path: path.to_owned() };
        let Located { entries, name, behind } = self.locate(path)?.ok_or_else(no_folder)?;
        let old = entries.iter().find(|entry| entry.is(name));
        let full = || FatError::FolderFull { path: path.to_owned() };
        let place = old.or_else(|| entries.iter().find(|entry| entry.is_free()));
        let place = place.ok_or_else(full)?;
        let (at, is_new, is_end) = (place.at, old.is_none(), place.name[0] == 0);
        if let Some(behind) = behind.filter(|_| is_end) {
            self.change(behind, |entry| entry[0] = 0)?;
            self.storage.sync().map_err(disk("write to"))?;
        }
        self.change(at, |entry| {
            if is_new {
                entry.fill(0);
                entry[..11].copy_from_slice(&name);
                entry[11] = ARCHIVE;
            }
            let [a, b, c, d] = first.to_le_bytes();
            entry[20..22].copy_from_slice(&[c, d]);
            entry[26..28].copy_from_slice(&[a, b]);
            entry[28..32].copy_from_slice(&length.to_le_bytes());
        })
    }

    /// Takes the entry of the file `path` away, if there is one: one sector is written.
    pub(super) fn erase(&mut self, path: &str) -> Result<(), FatError> {
        let Some(entry) = self.find(path)? else { return Ok(()) };
        self.change(entry.at, |entry| entry[0] = FREE)
    }

    /// Changes an entry.
    fn change(&mut self, at: u64, how: impl FnOnce(&mut [u8])) -> Result<(), FatError> {
        let sector = self.geometry.sector as u64;
        let mut bytes = vec![0; self.geometry.sector];
        read_at(&mut self.storage, at / sector * sector, &mut bytes)?;
        let start = usize::try_from(at % sector).unwrap_or(0);
        how(&mut bytes[start..start + ENTRY]);
        write_at(&mut self.storage, at / sector * sector, &bytes)
    }
}
