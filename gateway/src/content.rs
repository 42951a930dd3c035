//! Kernels and disk images in files named by their SHA-256.
//!
//! An upload goes to a file of its own, is hashed while it is written, reaches the disk, and is
//! renamed last: what has its name is whole and true, whenever the power went. Who may upload,
//! and for how long it is kept, is not decided here.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use sha2::{Digest, Sha256};
use tokio::{
    fs::{self, File},
    sync::{Mutex, OwnedMutexGuard},
};
use types::ids::ContentId;

use crate::sparse::Sparse;

/// Why content cannot be stored or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ContentError {
    #[error(
        "the upload has more than {limit} bytes, which is the largest that is kept; shrink the disk before importing \
         it, or ask the gateway's operator for a larger max_content"
    )]
    TooLarge { limit: u64 },
    #[error("the store holds {used} of {limit} bytes; there is no room for this upload")]
    Full { used: u64, limit: u64 },
    #[error("the upload has more than {left} bytes, which is what its renter may still upload")]
    Quota { left: u64 },
    #[error("the bytes have SHA-256 {found}; expected {expected}, the name they were sent under")]
    Digest { expected: ContentId, found: ContentId },
    #[error("no next byte of the upload came within {stall_ms} ms")]
    Stalled { stall_ms: u128 },
    #[error("the upload broke off: {message}")]
    BrokeOff { message: String },
    #[error("content {content} was removed while it was uploaded once more; upload it again")]
    Vanished { content: ContentId },
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
    names: Arc<Mutex<()>>,
}

/// The right to give names and take them, until it is dropped. It goes along with work that nobody waits for any more
/// when a client hangs up.
#[derive(Debug)]
pub struct Names {
    _guard: OwnedMutexGuard<()>,
}

/// What an uploader is granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Bytes that may come.
    pub allowance: u64,
    /// How long each next piece may take.
    pub stall: Duration,
}

/// Content that came whole and true and has no name yet. Dropping it forgets it.
#[derive(Debug)]
pub struct Upload<'a> {
    store: &'a ContentStore,
    content: ContentId,
    /// Where it is; `None` when the store had it already and it was only hashed.
    part: Option<PathBuf>,
    length: u64,
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
            names: Arc::default(),
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

    /// Returns the length of the largest content that is kept.
    pub fn max_item(&self) -> u64 {
        self.max_item
    }

    /// Checks an upload by the length that was declared, before anything of it came. Content that is here already
    /// takes no room.
    pub async fn check(
        &self,
        content: ContentId,
        length: u64,
        allowance: u64,
    ) -> Result<(), ContentError> {
        if length > self.max_item {
            return Err(ContentError::TooLarge { limit: self.max_item });
        }
        if length > allowance {
            return Err(ContentError::Quota { left: allowance });
        }
        let used = self.used.load(Ordering::Relaxed);
        let fits = used.checked_add(length).is_some_and(|all| all <= self.max_total);
        if !fits && !fs::try_exists(self.path(content)).await.unwrap_or(false) {
            return Err(ContentError::Full { used, limit: self.max_total });
        }
        Ok(())
    }

    /// Receives the bytes of `body`, whose digest must be `content`. Zeroes count and take no room on the disk.
    pub async fn receive<S, E>(
        &self,
        content: ContentId,
        mut body: S,
        terms: Terms,
    ) -> Result<Upload<'_>, ContentError>
    where
        S: Stream<Item = Result<Bytes, E>> + Unpin,
        E: std::fmt::Display,
    {
        let mut upload = Upload { store: self, content, part: None, length: 0 };
        let mut file = None;
        if !fs::try_exists(self.path(content)).await.unwrap_or(false) {
            let number = self.uploads.fetch_add(1, Ordering::Relaxed);
            let part = self.folder.join(format!("{}-{number}.part", content.short()));
            let made = File::create(&part).await.map_err(|e| host("create", &part, e))?;
            file = Some(Sparse::new(made));
            upload.part = Some(part);
        }
        let mut hash = Sha256::new();
        let stalled = ContentError::Stalled { stall_ms: terms.stall.as_millis() };
        loop {
            let Ok(next) = tokio::time::timeout(terms.stall, body.next()).await else {
                return Err(stalled);
            };
            let Some(chunk) = next.transpose().map_err(|e| broke_off(&e))? else { break };
            let at = upload.length;
            upload.grow(chunk.len() as u64, terms)?;
            hash.update(&chunk);
            if let Some(file) = &mut file {
                file.write(at, &chunk).await.map_err(|e| host("write", &self.folder, e))?;
            }
        }
        let found = ContentId::from_bytes(hash.finalize().into());
        if found != content {
            return Err(ContentError::Digest { expected: content, found });
        }
        if let Some(file) = file {
            file.finish(upload.length).await.map_err(|e| host("write", &self.folder, e))?;
        }
        Ok(upload)
    }

    /// Waits for the right to give names and take them, so that content and the list of who holds it change
    /// together.
    pub async fn names(&self) -> Names {
        Names { _guard: Arc::clone(&self.names).lock_owned().await }
    }

    /// Removes what is not among `held`, which was listed under the same right.
    pub fn retain(&self, held: &BTreeSet<ContentId>, _names: Names) -> Result<(), ContentError> {
        let fail = |source| host("clean", &self.folder, source);
        for entry in std::fs::read_dir(&self.folder).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let Ok(content) = name.parse::<ContentId>() else { continue };
            if !held.contains(&content) {
                let length = entry.metadata().map_err(fail)?.len();
                std::fs::remove_file(entry.path()).map_err(fail)?;
                self.give_back(length);
                tracing::info!(event = "content-removed", %content, bytes = length);
            }
        }
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        // There is always a number to write, so this always succeeds.
        let _ = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn path(&self, content: ContentId) -> PathBuf {
        self.folder.join(content.to_string())
    }
}

impl Upload<'_> {
    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Gives it its name.
    pub async fn keep(mut self, _names: &Names) -> Result<(), ContentError> {
        let (store, path) = (self.store, self.store.path(self.content));
        // Nothing is waited for here until it has its name: whoever drops this meanwhile drops either a part, whose
        // room is free again, or nothing.
        let there = path.exists();
        let Some(part) = &self.part else {
            let vanished = ContentError::Vanished { content: self.content };
            return if there { Ok(()) } else { Err(vanished) };
        };
        if there {
            // Somebody else was quicker; dropping removes this copy.
            return Ok(());
        }
        std::fs::rename(part, &path).map_err(|e| host("rename", part, e))?;
        self.part = None;
        let folder = File::open(&store.folder).await.map_err(|e| host("open", &path, e))?;
        folder.sync_all().await.map_err(|e| host("write", &path, e))
    }

    fn grow(&mut self, bytes: u64, terms: Terms) -> Result<(), ContentError> {
        let length = self.length.saturating_add(bytes);
        if length > self.store.max_item {
            return Err(ContentError::TooLarge { limit: self.store.max_item });
        }
        if length > terms.allowance {
            return Err(ContentError::Quota { left: terms.allowance });
        }
        if self.part.is_some() {
            let used = self.store.used.fetch_add(bytes, Ordering::Relaxed);
            self.length = length;
            if used.saturating_add(bytes) > self.store.max_total {
                return Err(ContentError::Full { used, limit: self.store.max_total });
            }
        }
        self.length = length;
        Ok(())
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            self.store.give_back(self.length);
            // What stays is removed at the next start.
            let _ = std::fs::remove_file(part);
        }
    }
}

fn broke_off(error: &impl std::fmt::Display) -> ContentError {
    ContentError::BrokeOff { message: error.to_string() }
}

fn host(operation: &'static str, path: &Path, source: io::Error) -> ContentError {
    ContentError::HostFile { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use futures_util::{FutureExt, stream};

    use super::*;

    const TERMS: Terms = Terms { allowance: 12, stall: Duration::from_millis(50) };

    fn body(bytes: &'static [u8]) -> impl Stream<Item = Result<Bytes, io::Error>> + Unpin {
        stream::iter(bytes.chunks(3).map(|chunk| Ok(Bytes::from_static(chunk))))
    }

    fn digest(bytes: &[u8]) -> ContentId {
        ContentId::from_bytes(Sha256::digest(bytes).into())
    }

    async fn put(store: &ContentStore, bytes: &'static [u8]) -> Result<(), ContentError> {
        let upload = store.receive(digest(bytes), body(bytes), TERMS).await?;
        let names = store.names().await;
        upload.keep(&names).await
    }

    fn files(folder: &Path) -> usize {
        std::fs::read_dir(folder).expect("folder").count()
    }

    #[tokio::test]
    async fn only_true_content_within_the_limits_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 13, 15).expect("opened");
        put(&store, b"0123456789").await.expect("kept");
        assert!(matches!(store.read(digest(b"0123456789")).await, Ok(Some((_, 10)))));
        put(&store, b"0123456789").await.expect("hashed again, not stored again");
        let wrong = store.receive(digest(b"x"), body(b"abc"), TERMS).await;
        assert!(matches!(wrong, Err(ContentError::Digest { .. })));
        let full = put(&store, b"abcdef").await;
        assert!(matches!(full, Err(ContentError::Full { .. })));
        put(&store, b"abcde").await.expect("room is given back");
        assert_eq!(files(folder.path()), 2);
    }

    #[tokio::test]
    async fn what_comes_is_checked_against_the_limits_of_one_item_and_one_renter() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 5, 100).expect("opened");
        let large = put(&store, b"abcdef").await;
        assert!(matches!(large, Err(ContentError::TooLarge { limit: 5 })), "{large:?}");
        put(&store, b"abcde").await.expect("as large as may be");
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 100, 100).expect("opened");
        let beyond = put(&store, b"0123456789012").await;
        assert!(matches!(beyond, Err(ContentError::Quota { left: 12 })), "{beyond:?}");
        put(&store, b"012345678901").await.expect("as much as may be");
    }

    #[tokio::test]
    async fn zeroes_count_and_take_no_room() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 8 << 20, 8 << 20).expect("opened");
        let mut disk = vec![0; 4 << 20];
        disk[1 << 20] = 1;
        let pieces = disk.chunks(100_001).map(|piece| Ok(Bytes::copy_from_slice(piece)));
        let pieces = stream::iter(pieces.collect::<Vec<io::Result<Bytes>>>());
        let terms = Terms { allowance: 8 << 20, ..TERMS };
        let upload = store.receive(digest(&disk), pieces, terms).await.expect("true");
        assert_eq!(upload.length(), 4 << 20);
        upload.keep(&store.names().await).await.expect("kept");
        let path = store.path(digest(&disk));
        assert!(std::fs::read(&path).expect("it is there") == disk);
        let blocks = path.metadata().expect("it is there").blocks();
        assert!(blocks * 512 < 1 << 20, "{blocks} blocks are held");
        assert_eq!(store.used.load(Ordering::Relaxed), 4 << 20);
    }

    #[tokio::test]
    async fn an_upload_that_nobody_waits_for_once_it_has_its_name_is_counted_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 100, 10).expect("opened");
        let upload = store.receive(digest(b"abcde"), body(b"abcde"), TERMS).await.expect("true");
        let names = store.names().await;
        // It gets its name at once, and what comes then is not waited for.
        drop(upload.keep(&names).now_or_never());
        assert!(store.path(digest(b"abcde")).exists());
        assert_eq!(store.used.load(Ordering::Relaxed), 5);
        store.retain(&BTreeSet::new(), names).expect("cleaned");
        assert_eq!(store.used.load(Ordering::Relaxed), 0);
        put(&store, b"0123456789").await.expect("all room is there again");
    }

    #[tokio::test]
    async fn names_stay_as_they_are_while_a_clean_goes_on_that_nobody_waits_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(ContentStore::open(folder.path(), 100, 10).expect("opened"));
        let (begin, begun) = std::sync::mpsc::channel::<()>();
        let (names, cleaning) = (store.names().await, Arc::clone(&store));
        let clean = tokio::task::spawn_blocking(move || {
            let _ = begun.recv();
            cleaning.retain(&BTreeSet::new(), names)
        });
        assert!(store.names().now_or_never().is_none());
        drop((clean, begin));
        drop(store.names().await);
    }

    #[tokio::test]
    async fn what_is_declared_is_checked_against_every_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 13, 15).expect("opened");
        put(&store, b"0123456789").await.expect("kept");
        let check = async |bytes: &'static [u8], length, allowance| {
            store.check(digest(bytes), length, allowance).await
        };
        assert!(matches!(check(b"a", 14, 99).await, Err(ContentError::TooLarge { limit: 13 })));
        assert!(matches!(check(b"a", 5, 4).await, Err(ContentError::Quota { left: 4 })));
        let full = check(b"a", 6, 99).await;
        assert!(matches!(full, Err(ContentError::Full { used: 10, limit: 15 })), "{full:?}");
        assert!(check(b"a", 5, 5).await.is_ok());
        assert!(check(b"0123456789", 10, 10).await.is_ok(), "it is here already");
    }

    #[tokio::test]
    async fn an_upload_that_stops_or_is_let_go_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 100, 10).expect("opened");
        let stops = body(b"abcdefgh").chain(stream::pending());
        let stopped = store.receive(digest(b"abcdefgh"), stops, TERMS).await;
        assert!(matches!(stopped, Err(ContentError::Stalled { .. })));
        let let_go = store.receive(digest(b"abcdefgh"), body(b"abcdefgh"), TERMS).await;
        drop(let_go.expect("whole"));
        assert_eq!(files(folder.path()), 0);
        put(&store, b"0123456789").await.expect("all room is there again");
    }

    #[tokio::test]
    async fn what_nobody_holds_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = ContentStore::open(folder.path(), 100, 10).expect("opened");
        put(&store, b"abcde").await.expect("kept");
        put(&store, b"vwxyz").await.expect("kept");
        let names = store.names().await;
        store.retain(&BTreeSet::from([digest(b"abcde")]), names).expect("cleaned");
        assert!(matches!(store.read(digest(b"abcde")).await, Ok(Some(_))));
        assert!(matches!(store.read(digest(b"vwxyz")).await, Ok(None)));
        put(&store, b"12345").await.expect("its room is there again");
    }
}
