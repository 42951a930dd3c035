//! Kernels and disk images in files named by their SHA-256.
//!
//! An upload goes to a file of its own, is hashed while it is written, reaches the disk, and is
//! renamed last: what has its name is whole and true, whenever the power went.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use sha2::{Digest, Sha256};
use tokio::{
    fs::{self, File},
    io::AsyncWriteExt,
};
use types::ids::ContentId;

/// Why content cannot be stored or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ContentError {
    #[error("the upload has more than {limit} bytes, which is the largest that is kept")]
    TooLarge { limit: u64 },
    #[error("the store holds {used} of {limit} bytes; there is no room for this upload")]
    Full { used: u64, limit: u64 },
    #[error("the bytes have SHA-256 {found}; expected {expected}, the name they were sent under")]
    Digest { expected: ContentId, found: ContentId },
    #[error("the upload broke off: {message}")]
    BrokeOff { message: String },
    #[error("cannot {operation} {}", path.display())]
    HostFile { operation: &'static str, path: PathBuf, source: io::Error },
}

/// A folder of content.
#[derive(Debug)]
pub struct ContentStore {
    folder: PathBuf,
    max_item: u64,
    max_total: u64,
    used: AtomicU64,
    uploads: AtomicU64,
}

impl ContentStore {
    /// Opens the store in `folder`, removing uploads that broke off.
    pub fn open(folder: &Path, max_item: u64, max_total: u64) -> Result<Self, ContentError> {
        let fail = |source| host("open", folder, source);
        std::fs::create_dir_all(folder).map_err(fail)?;
        let mut used = 0u64;
        for entry in std::fs::read_dir(folder).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            if entry.file_name().to_string_lossy().ends_with(".part") {
                std::fs::remove_file(entry.path()).map_err(fail)?;
            } else {
                used = used.saturating_add(entry.metadata().map_err(fail)?.len());
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            max_item,
            max_total,
            used: AtomicU64::new(used),
            uploads: AtomicU64::new(0),
        })
    }

    /// Opens content for reading, with its length; `None` when it is not here.
    pub async fn read(&self, content: ContentId) -> Result<Option<(File, u64)>, ContentError> {
        let path = self.path(content);
        match File::open(&path).await {
            Ok(file) => {
                let length = file.metadata().await.map_err(|e| host("read", &path, e))?.len();
                Ok(Some((file, length)))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(host("read", &path, source)),
        }
    }

    /// Stores the bytes of `body` under their digest, which must be `content`.
    pub async fn write<S, E>(&self, content: ContentId, body: S) -> Result<(), ContentError>
    where
        S: Stream<Item = Result<Bytes, E>> + Unpin,
        E: std::fmt::Display,
    {
        let number = self.uploads.fetch_add(1, Ordering::Relaxed);
        let part = self.folder.join(format!("{}-{number}.part", content.short()));
        let mut reserved = 0;
        let result = self.receive(content, body, &part, &mut reserved).await;
        if result.is_err() {
            self.used.fetch_sub(reserved, Ordering::Relaxed);
            // What stays is removed at the next start.
            let _ = fs::remove_file(&part).await;
        }
        result
    }

    async fn receive<S, E>(
        &self,
        content: ContentId,
        mut body: S,
        part: &Path,
        reserved: &mut u64,
    ) -> Result<(), ContentError>
    where
        S: Stream<Item = Result<Bytes, E>> + Unpin,
        E: std::fmt::Display,
    {
        let mut file = File::create(part).await.map_err(|e| host("create", part, e))?;
        let mut hash = Sha256::new();
        while let Some(chunk) = body.next().await {
            let chunk = chunk.map_err(|e| ContentError::BrokeOff { message: e.to_string() })?;
            let length = chunk.len() as u64;
            if *reserved + length > self.max_item {
                return Err(ContentError::TooLarge { limit: self.max_item });
            }
            let used = self.used.fetch_add(length, Ordering::Relaxed);
            *reserved += length;
            if used + length > self.max_total {
                return Err(ContentError::Full { used, limit: self.max_total });
            }
            hash.update(&chunk);
            file.write_all(&chunk).await.map_err(|e| host("write", part, e))?;
        }
        let found = ContentId::from_bytes(hash.finalize().into());
        if found != content {
            return Err(ContentError::Digest { expected: content, found });
        }
        file.sync_all().await.map_err(|e| host("write", part, e))?;
        let path = self.path(content);
        let replaced = fs::metadata(&path).await.is_ok();
        fs::rename(part, &path).await.map_err(|e| host("rename", part, e))?;
        if replaced {
            self.used.fetch_sub(*reserved, Ordering::Relaxed);
        }
        let folder = File::open(&self.folder).await.map_err(|e| host("open", &self.folder, e))?;
        folder.sync_all().await.map_err(|e| host("write", &self.folder, e))
    }

    fn path(&self, content: ContentId) -> PathBuf {
        self.folder.join(content.to_string())
    }
}

fn host(operation: &'static str, path: &Path, source: io::Error) -> ContentError {
    ContentError::HostFile { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    fn body(bytes: &'static [u8]) -> impl Stream<Item = Result<Bytes, io::Error>> + Unpin {
        stream::iter(bytes.chunks(3).map(|chunk| Ok(Bytes::from_static(chunk))))
    }

    fn digest(bytes: &[u8]) -> ContentId {
        ContentId::from_bytes(Sha256::digest(bytes).into())
    }

    #[tokio::test]
    async fn only_true_content_within_the_limits_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 10, 15).expect("opened");
        let ten = digest(b"0123456789");
        store.write(ten, body(b"0123456789")).await.expect("kept");
        assert!(matches!(store.read(ten).await, Ok(Some((_, 10)))));
        store.write(ten, body(b"0123456789")).await.expect_err("no room for two at a time");
        let wrong = store.write(digest(b"x"), body(b"abc")).await;
        assert!(matches!(wrong, Err(ContentError::Digest { .. })));
        let large = store.write(digest(b"x"), body(b"0123456789a")).await;
        assert!(matches!(large, Err(ContentError::TooLarge { .. } | ContentError::Full { .. })));
        store.write(digest(b"abcde"), body(b"abcde")).await.expect("room is given back");
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 2);
    }
}
