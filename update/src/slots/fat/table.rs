//! The table of clusters, in memory; only sectors that changed are written.

use std::collections::BTreeSet;

use super::{FIRST, FatError, Geometry, Storage, read_at, write_at};

/// What of an entry is a cluster's number; the rest is kept as it is.
const NUMBER: u32 = 0x0fff_ffff;
/// From here on a number says that a chain ends.
const LAST: u32 = 0x0fff_fff8;
/// What the end of a chain is written as.
const END: u32 = 0x0fff_ffff;
/// Number that says that the cluster cannot be used.
const BAD: u32 = 0x0fff_fff7;

/// What a cluster belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Nothing.
    Free,
    /// Files.
    File,
    /// A folder.
    Folder,
}

/// A table.
#[derive(Debug)]
pub(super) struct Table {
    bytes: Vec<u8>,
    end: u32,
    sector: usize,
    changed: BTreeSet<usize>,
}

impl Table {
    pub(super) fn read<S: Storage>(storage: &mut S, geometry: &Geometry) -> Result<Self, FatError> {
        let mut bytes = vec![0; geometry.table];
        read_at(storage, geometry.tables, &mut bytes)?;
        let (end, sector) = (geometry.end, geometry.sector);
        Ok(Self { bytes, end, sector, changed: BTreeSet::new() })
    }

    fn at(cluster: u32) -> usize {
        usize::try_from(cluster).unwrap_or(usize::MAX / 4) * 4
    }

    fn raw(&self, cluster: u32) -> u32 {
        let at = Self::at(cluster);
        self.bytes
            .get(at..at + 4)
            .map_or(BAD, |bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn get(&self, cluster: u32) -> u32 {
        self.raw(cluster) & NUMBER
    }

    fn set(&mut self, cluster: u32, value: u32) {
        let at = Self::at(cluster);
        let new = (self.raw(cluster) & !NUMBER | value).to_le_bytes();
        if let Some(place) = self.bytes.get_mut(at..at + 4)
            && *place != new
        {
            place.copy_from_slice(&new);
            self.changed.insert(at / self.sector);
        }
    }

    /// Returns the clusters of a chain; `None` when it leaves the table or comes back to itself. A
    /// file without bytes has none.
    pub(super) fn chain(&self, first: u32) -> Option<Vec<u32>> {
        let mut chain = Vec::new();
        let mut next = first;
        if first == 0 {
            return Some(chain);
        }
        let most = usize::try_from(self.end).ok()?;
        loop {
            if !(FIRST..self.end).contains(&next) || chain.len() >= most {
                return None;
            }
            chain.push(next);
            next = self.get(next);
            if next >= LAST {
                return Some(chain);
            }
        }
    }

    /// Marks the part of a chain that makes sense; returns whether it shares no cluster, but as files do
    /// with files.
    pub(super) fn mark(&self, first: u32, what: Use, uses: &mut [Use]) -> bool {
        let mut next = first;
        while (FIRST..self.end).contains(&next) {
            let index = usize::try_from(next).unwrap_or(usize::MAX);
            match uses.get_mut(index) {
                Some(found @ Use::Free) => *found = what,
                Some(found) => return *found == Use::File && what == Use::File,
                None => return true,
            }
            next = self.get(next);
        }
        true
    }

    /// Returns the clusters that nothing uses, lowest first.
    pub(super) fn unused(&self, uses: &[Use]) -> Vec<u32> {
        let all = (FIRST..self.end).zip(uses.iter().skip(2));
        let free = all.filter(|(cluster, what)| **what == Use::Free && self.get(*cluster) != BAD);
        free.map(|(cluster, _)| cluster).collect()
    }

    /// Makes a chain of `clusters`.
    pub(super) fn link(&mut self, clusters: &[u32]) {
        let next = clusters.iter().skip(1).copied().chain([END]);
        for (cluster, next) in clusters.iter().zip(next) {
            self.set(*cluster, next);
        }
    }

    /// Says that clusters are free.
    pub(super) fn free(&mut self, clusters: &[u32]) {
        clusters.iter().for_each(|cluster| self.set(*cluster, 0));
    }

    /// Writes what changed, to every copy.
    pub(super) fn write<S: Storage>(
        &mut self,
        storage: &mut S,
        geometry: &Geometry,
    ) -> Result<(), FatError> {
        for copy in (0..geometry.copies).rev() {
            let start = geometry.tables + u64::from(copy) * geometry.table as u64;
            for sector in &self.changed {
                let at = sector * self.sector;
                write_at(storage, start + at as u64, &self.bytes[at..at + self.sector])?;
            }
        }
        self.changed.clear();
        Ok(())
    }
}
