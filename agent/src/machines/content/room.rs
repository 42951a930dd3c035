//! Room on DATA for content: beside what machines' disks were promised, and beside what else is on its way.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use types::ids::ContentId;

use super::{Cache, shown};
use crate::events::Event;

/// Space on /data that content leaves free, in bytes.
pub(super) const KEEP_FREE: u64 = 64 << 20;
/// Most that no disk is promised, in bytes: machines need what they start from beside their disks.
const MOST_KEPT: u64 = 4 << 30;

/// Returns how many bytes of a volume no disk is promised.
pub(crate) fn kept_for_content(volume: u64) -> u64 {
    (volume / 32).clamp(KEEP_FREE, MOST_KEPT)
}

/// What content has to leave room for.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Content that machines need.
    needed: BTreeSet<ContentId>,
    /// Bytes of the volume that were promised to their disks and are not written yet.
    promised: u64,
    /// Bytes that content on its way still gets, by its number.
    coming: BTreeMap<u64, u64>,
    /// The number of the next.
    next: u64,
}

impl Claims {
    /// Returns how many bytes stay free for anything but content `number` and the disk to which `own` were promised.
    fn others(&self, number: u64, own: u64) -> u64 {
        let coming = self.coming.iter().filter(|(other, _)| **other != number);
        let coming = coming.fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        self.promised.saturating_sub(own).saturating_add(KEEP_FREE).saturating_add(coming)
    }
}

/// Content that is being written. Its file, and what was set aside for the rest of it, go with this.
pub(super) struct Coming {
    path: PathBuf,
    number: u64,
    claims: Arc<Mutex<Claims>>,
}

impl Coming {
    /// Returns where it is written.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Notes that so many bytes of it are on the volume, or take no room there.
    pub(super) fn wrote(&self, bytes: u64) {
        if let Some(left) = locked(&self.claims).coming.get_mut(&self.number) {
            *left = left.saturating_sub(bytes);
        }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        locked(&self.claims).coming.remove(&self.number);
        // It has its own name by now, or was not made, or the next start removes it.
        let _ = fs::remove_file(&self.path);
    }
}

impl Cache {
    /// Begins to write content, for which nothing is set aside yet. Two machines may want the same at once: each
    /// writes a file of its own.
    pub(super) fn begin(&self, content: ContentId) -> Coming {
        let mut claims = self.claims();
        let number = claims.next;
        claims.next += 1;
        let path = self.directory.join(format!("{content}.{number}"));
        Coming { path, number, claims: Arc::clone(&self.claims) }
    }

    /// Sets room aside for `bytes` more of what is coming, beside everything but the disk to which `own` bytes were
    /// promised. What nobody needs goes for it. If there is less, returns how much there is.
    pub(super) fn set_aside(
        &self,
        coming: &Coming,
        bytes: u64,
        own: u64,
    ) -> io::Result<Result<(), u64>> {
        let mut claims = self.claims();
        let others = claims.others(coming.number, own);
        let left = claims.coming.get(&coming.number).copied().unwrap_or(0);
        let wanted = left.saturating_add(bytes);
        self.make_room(wanted.saturating_add(others), &claims.needed)?;
        let room = self.free()?.saturating_sub(others);
        if wanted > room {
            return Ok(Err(room));
        }
        claims.coming.insert(coming.number, wanted);
        Ok(Ok(()))
    }

    /// Returns how many bytes content on its way still gets.
    pub fn coming(&self) -> u64 {
        self.claims().coming.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    pub(super) fn free(&self) -> io::Result<u64> {
        let status = rustix::fs::statvfs(&self.directory)?;
        Ok(status.f_bavail * status.f_frsize)
    }

    /// Takes note of what machines need, and of how many bytes of the volume were promised to their disks.
    /// What is in the way of that goes, as far as nobody needs it. Returns how many bytes could go still.
    pub fn settle(&self, needed: BTreeSet<ContentId>, promised: u64) -> io::Result<u64> {
        let mut claims = self.claims();
        (claims.needed, claims.promised) = (needed, promised);
        self.make_room(promised.saturating_add(KEEP_FREE), &claims.needed)?;
        Ok(self.spare(&claims.needed)?.iter().map(|spare| spare.bytes).sum())
    }

    /// Removes content, but for what is `kept`, until so many bytes of the volume are free or none is left.
    fn make_room(&self, bytes: u64, kept: &BTreeSet<ContentId>) -> io::Result<()> {
        if self.free()? >= bytes {
            return Ok(());
        }
        for Spare { path, bytes: freed, .. } in self.spare(kept)? {
            fs::remove_file(&path)?;
            eprintln!("{}", Event::ContentDropped { content: shown(&path), bytes: freed });
            if self.free()? >= bytes {
                break;
            }
        }
        Ok(())
    }

    /// Lists whole content that is not `kept`, the longest unused first.
    pub(super) fn spare(&self, kept: &BTreeSet<ContentId>) -> io::Result<Vec<Spare>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            let content = shown(&path).parse::<ContentId>();
            // What is being written has a longer name; what is gone meanwhile takes no room.
            let (Ok(content), Ok(facts)) = (content, fs::metadata(&path)) else { continue };
            if !kept.contains(&content) {
                let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                // stat(2): blocks of 512 bytes, whatever the file system's are; holes give nothing back.
                found.push(Spare { used, path, bytes: facts.blocks() << 9 });
            }
        }
        found.sort();
        Ok(found)
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        locked(&self.claims)
    }
}

/// Content that could go.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Spare {
    used: SystemTime,
    pub(super) path: PathBuf,
    bytes: u64,
}

fn locked(claims: &Mutex<Claims>) -> MutexGuard<'_, Claims> {
    claims.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_aside_for_one_is_no_room_for_another() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::open(directory.path()).expect("opened");
        let content = ContentId::from_bytes([7; 32]);
        let (first, second) = (cache.begin(content), cache.begin(content));
        assert_ne!(first.path(), second.path());
        let most = cache.free().expect("a volume") - KEEP_FREE;
        let half = most / 2 + (64 << 20);
        assert_eq!(cache.set_aside(&first, half, 0).expect("a volume"), Ok(()));
        let refused = cache.set_aside(&second, half, 0).expect("a volume");
        assert!(refused.is_err_and(|room| room < half), "{refused:?}");
        assert_eq!(cache.coming(), half);
        // What is on the volume is counted there.
        first.wrote(half - 1);
        assert_eq!(cache.coming(), 1);
        fs::write(first.path(), "some").expect("written");
        drop(first);
        assert_eq!(
            (cache.coming(), fs::read_dir(directory.path()).expect("listed").count()),
            (0, 0)
        );
        assert_eq!(cache.set_aside(&second, half, 0).expect("a volume"), Ok(()));
    }

    #[test]
    fn a_part_of_a_large_volume_is_promised_to_no_disk() {
        let kept = [1u64 << 30, 64 << 30, 1 << 40].map(kept_for_content);
        assert_eq!(kept, [KEEP_FREE, 2 << 30, 4 << 30]);
    }
}
