//! Replacing a file.

use aws_lc_rs::digest::{Context, SHA256};

use super::{Entry, FatError, Storage, Table, Volume, disk, write_at};
use crate::channel::Sha256;

/// A replacement that is being written.
#[derive(Debug)]
pub struct Writing {
    path: String,
    pub(super) clusters: Vec<u32>,
    length: u64,
    written: u64,
}

impl Writing {
    /// Bytes that were written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Begins again.
    pub fn restart(&mut self) {
        self.written = 0;
    }
}

impl<S: Storage> Volume<S> {
    /// Begins to replace the file `path`, or to make it, with `length` bytes.
    pub fn begin(&mut self, path: &str, length: u64) -> Result<Writing, FatError> {
        if self.locate(path)?.is_none() {
            return Err(FatError::NoFolder { path: path.to_owned() });
        }
        let uses = self.uses()?;
        let mut clusters = self.table.unused(&uses);
        let unit = self.geometry.cluster as u64;
        let free = clusters.len() as u64 * unit;
        let count = usize::try_from(length.div_ceil(unit)).unwrap_or(usize::MAX);
        if clusters.len() < count || u32::try_from(length).is_err() {
            return Err(FatError::Full { path: path.to_owned(), needed: length, free });
        }
        clusters.truncate(count);
        Ok(Writing { path: path.to_owned(), clusters, length, written: 0 })
    }

    /// Writes what comes next.
    pub fn append(&mut self, writing: &mut Writing, mut bytes: &[u8]) -> Result<(), FatError> {
        let (found, wanted) = (writing.written + bytes.len() as u64, writing.length);
        if found > wanted {
            return Err(FatError::Length { path: writing.path.clone(), found, wanted });
        }
        let unit = self.geometry.cluster;
        while !bytes.is_empty() {
            let within = usize::try_from(writing.written % unit as u64).unwrap_or(0);
            let index = usize::try_from(writing.written / unit as u64).unwrap_or(usize::MAX);
            let (piece, rest) = bytes.split_at(bytes.len().min(unit - within));
            // Its length was checked above, and clusters are enough for it.
            let cluster = writing.clusters[index];
            let at = self.geometry.place(cluster) + within as u64;
            write_at(&mut self.storage, at, piece)?;
            writing.written += piece.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    /// Makes the replacement durable, reads it back, and lets the file be it. Until then the old one
    /// is whole, and when this fails it stays.
    pub fn finish(&mut self, writing: Writing, sha256: Sha256) -> Result<(), FatError> {
        let Writing { path, clusters, length, written } = writing;
        if written != length {
            return Err(FatError::Length { path, found: written, wanted: length });
        }
        self.storage.sync().map_err(disk("write to"))?;
        self.free_lost()?;
        self.table.link(&clusters);
        self.table.write(&mut self.storage, &self.geometry)?;
        self.forget_count()?;
        self.storage.sync().map_err(disk("write to"))?;
        let first = clusters.first().copied().unwrap_or(0);
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.check(&path, Entry::unnamed(first, length), sha256)?;
        self.switch(&path, first, length)?;
        self.storage.sync().map_err(disk("write to"))?;
        // From here on the new file counts, and what it was before belongs to nobody.
        self.free_lost()?;
        self.table.write(&mut self.storage, &self.geometry)?;
        self.storage.sync().map_err(disk("write to"))
    }

    /// Whether two paths lead to the very same clusters, as a cut of [`Volume::promote`] leaves them.
    pub fn is_shared(&mut self, one: &str, other: &str) -> Result<bool, FatError> {
        let (one, other) = (self.find(one)?, self.find(other)?);
        Ok(one.zip(other).is_some_and(|(one, other)| one.first != 0 && one.first == other.first))
    }

    /// Lets `to` be the file that `from` is, and `kept` what `to` was before; then `from` is gone. No
    /// content is written, only a sector for each name, and each is durable before the next one. What a
    /// cut leaves is whole: `kept` and `to`, or `to` and `from`, are then one file with two names.
    ///
    /// # Errors
    /// Fails when `from` is not the program `sha256`, read from the medium; nothing is changed then.
    pub fn promote(
        &mut self,
        (from, to, kept): (&str, &str, &str),
        sha256: Sha256,
    ) -> Result<(), FatError> {
        let missing = |path: &str| FatError::Missing { path: path.to_owned() };
        let new = self.find(from)?.ok_or_else(|| missing(from))?;
        self.check(from, new.clone(), sha256)?;
        if let Some(old) = self.find(to)?.filter(|old| old.first != new.first) {
            self.point(kept, &old)?;
        }
        self.point(to, &new)?;
        self.remove(from)
    }

    /// Takes a name away. Clusters that no other one leads to are free then.
    pub fn remove(&mut self, path: &str) -> Result<(), FatError> {
        self.erase(path)?;
        self.storage.sync().map_err(disk("write to"))?;
        self.free_lost()?;
        self.table.write(&mut self.storage, &self.geometry)?;
        self.storage.sync().map_err(disk("write to"))
    }

    /// Lets `path` lead to what `entry` leads to, durably.
    fn point(&mut self, path: &str, entry: &Entry) -> Result<(), FatError> {
        self.switch(path, entry.first, entry.length)?;
        self.storage.sync().map_err(disk("write to"))
    }

    /// Says of every cluster that no file uses that it is free.
    fn free_lost(&mut self) -> Result<(), FatError> {
        let uses = self.uses()?;
        let lost = self.table.unused(&uses);
        self.table.free(&lost);
        Ok(())
    }

    /// Reads back from the medium.
    fn check(&mut self, path: &str, entry: Entry, sha256: Sha256) -> Result<(), FatError> {
        self.storage.forget().map_err(disk("read back from"))?;
        self.table = Table::read(&mut self.storage, &self.geometry)?;
        let mut digest = Context::new(&SHA256);
        self.pour(path, &entry, &mut |piece| digest.update(piece))?;
        if digest.finish().as_ref() == sha256.0 {
            return Ok(());
        }
        Err(FatError::Differs { path: path.to_owned() })
    }

    /// Says that nobody counted the free clusters.
    fn forget_count(&mut self) -> Result<(), FatError> {
        let Some(at) = self.geometry.info else { return Ok(()) };
        // A hint to those who believe it; 488 and 492 of the sector FSInfo.
        write_at(&mut self.storage, at + 488, &[0xff; 8])
    }
}
