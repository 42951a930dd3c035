//! A folder that keeps trusted metadata: one file for each role, byte for byte as received.
//!
//! A file is written beside its place, synchronised, and renamed, so that a power cut leaves the
//! old or the new one. One process uses a folder at a time.

use std::{
    fs::{self, DirBuilder, File, TryLockError},
    io::{self, Read as _, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

/// Longest file that is read, in bytes: more than any limit on metadata.
const MAX_BYTES: u64 = 64 << 20;
/// Holds what is not yet a file of the store.
const UNFINISHED: &str = ".unfinished";
/// Its lock says that a process uses the folder.
const LOCK: &str = ".lock";

/// Why the store does not work.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum StoreError {
    #[error("{} is used by another process", folder.display())]
    Busy { folder: PathBuf },
    #[error("cannot {operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

/// An open folder.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    lock: File,
}

impl Store {
    /// Opens the folder and makes it if it is missing, for its owner only.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Io { operation: "open", path: folder.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(fail)?;
        let lock = File::create(folder.join(LOCK)).map_err(fail)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { folder: folder.to_owned(), lock }),
            Err(TryLockError::WouldBlock) => Err(StoreError::Busy { folder: folder.to_owned() }),
            Err(TryLockError::Error(source)) => Err(fail(source)),
        }
    }

    /// Returns a file, or `None` if there is none.
    pub fn load(&self, file: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.folder.join(file);
        let read = File::open(&path).and_then(|opened| {
            let mut bytes = Vec::new();
            opened.take(MAX_BYTES).read_to_end(&mut bytes)?;
            Ok(bytes)
        });
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(StoreError::Io { operation: "read", path, source }),
        }
    }

    /// Writes a file; once this returns, it is durable.
    pub fn write(&self, file: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.folder.join(file);
        let unfinished = self.folder.join(UNFINISHED);
        let write = || {
            let mut opened = File::create(&unfinished)?;
            opened.write_all(bytes)?;
            opened.sync_all()?;
            fs::rename(&unfinished, &path)?;
            self.sync()
        };
        write().map_err(|source| StoreError::Io { operation: "write", path: path.clone(), source })
    }

    /// Removes a file if it is there; once this returns, that is durable.
    pub fn remove(&self, file: &str) -> Result<(), StoreError> {
        let path = self.folder.join(file);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result.and_then(|()| self.sync()),
        }
        .map_err(|source| StoreError::Io { operation: "remove", path, source })
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // A lock lasts as long as any copy of its descriptor (flock(2)), and a process that another thread
        // starts just now has one until it runs its program.
        let _ = self.lock.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_free_when_its_store_is_gone_whoever_has_a_copy_of_the_descriptor() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(folder.path()).expect("opened");
        let busy = Store::open(folder.path()).expect_err("used");
        assert!(matches!(busy, StoreError::Busy { .. }), "{busy}");
        let copy = store.lock.try_clone().expect("a copy");
        drop(store);
        Store::open(folder.path()).expect("free");
        drop(copy);
    }
}
