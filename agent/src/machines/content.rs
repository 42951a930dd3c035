//! Content by digest: fetched from the gateway that asked for the machine, checked while it is
//! written and before each use, or while a disk is made of it; kept until space is wanted: then what no
//! machine needs goes, the longest unused first.

mod room;

use std::{
    fs,
    io::{self, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use overlay::{Overlay, OverlayStream, RequestError};
use sha2::{Digest, Sha256};
use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt, AsyncSeekExt, AsyncWriteExt},
};
use types::{
    forward::{StreamAnswer, StreamHeader},
    ids::{ContentId, NodeId},
};

pub(crate) use self::room::kept_for_content;
use self::room::{Claims, Coming, KEEP_FREE};
use super::{disk, disk_copy};
use crate::{events::Event, tasks::frames};

/// The other end must send something within this time.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// Status of a refusal by a gateway that serves as many streams as it can, or as this node may have
/// (RFC 6585 §4).
const BUSY: u16 = 429;

/// Attempts to get content of a gateway that is busy: for a minute, in which it serves others.
const BUSY_ATTEMPTS: u32 = 20;

/// Pause between two of them.
const BUSY_PAUSE: Duration = Duration::from_secs(3);

/// Bytes for which room is set aside at once where the length was not told: more than one read gives.
const PIECE: u64 = 64 << 20;

/// How much content may have, and take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Bytes that it may have at most.
    pub most: u64,
    /// What gives it no more.
    pub of: &'static str,
    /// Bytes that were promised to the disk which begins as it and is not made yet.
    pub own: u64,
}

impl Terms {
    /// What bounds content that only the node bounds.
    const NODE: &'static str = "the largest that this node can hold has";

    /// Bounds content by something of which so much is left.
    pub fn within(most: u64, of: &'static str) -> Self {
        Self { most, of, own: 0 }
    }

    /// Lets a disk of so many bytes begin as content, which goes when it is made.
    pub fn image(disk: u64) -> Self {
        Self { most: disk, of: "the disk that begins as it has", own: disk }
    }
}

/// Why content is not there.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ContentError {
    #[error("cannot ask {gateway} for content {content}: {reason}")]
    Ask { content: ContentId, gateway: NodeId, reason: String },
    #[error("{gateway} is too busy to send content {content}: {detail}")]
    Busy { content: ContentId, gateway: NodeId, detail: String },
    #[error("{gateway} refused content {content}: {detail}")]
    Refused { content: ContentId, gateway: NodeId, detail: String },
    #[error(
        "content {content} has {length} bytes, and DATA has room for {room} beside what machines' disks were promised: a machine that is deleted \
         makes room, smaller content or another node need none"
    )]
    NoRoom { content: ContentId, length: u64, room: u64 },
    #[error(
        "content {content} has {length} bytes, and {of} {most}: smaller content is needed, or another lease or node"
    )]
    TooLarge { content: ContentId, length: u64, of: &'static str, most: u64 },
    #[error("{gateway} stopped sending content {content} after {received} bytes")]
    Stalled { content: ContentId, gateway: NodeId, received: u64 },
    #[error("what {gateway} sent as content {content} has another digest: {found}")]
    Digest { content: ContentId, gateway: NodeId, found: ContentId },
    #[error("cannot keep content {content} in {path}")]
    Host { content: ContentId, path: String, source: io::Error },
}

/// When content came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// Just now, and it was checked.
    Now,
    /// Earlier; what its disk gives back may be something else.
    Before,
}

/// Content on this node.
#[derive(Debug, Clone)]
pub struct Cache {
    directory: PathBuf,
    claims: Arc<Mutex<Claims>>,
}

impl Cache {
    /// Uses `directory`; half-written files of an earlier run are removed.
    pub fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_some() {
                fs::remove_file(path)?;
            }
        }
        Ok(Self { directory: directory.to_owned(), claims: Arc::default() })
    }

    /// Returns the path of content, there or not.
    pub fn path(&self, content: ContentId) -> PathBuf {
        self.directory.join(content.to_string())
    }

    /// Returns whether content is there.
    pub fn has(&self, content: ContentId) -> bool {
        self.path(content).exists()
    }

    /// Returns whether content is there as it was written. What a disk gave back otherwise is said and
    /// removed: whoever it came from has it still.
    async fn is_whole(&self, content: ContentId) -> Result<bool, ContentError> {
        let path = self.path(content);
        let shown = path.display().to_string();
        let host = |source| ContentError::Host { content, path: shown.clone(), source };
        let look = move || fs::File::open(&path).and_then(|file| disk_copy::digest_of(&file));
        let damage = match tokio::task::spawn_blocking(look).await.map_err(io::Error::other) {
            Ok(Ok(found)) if found == content => return Ok(true),
            Ok(Ok(found)) => format!("it has digest {found}"),
            Ok(Err(error)) | Err(error) => error.to_string(),
        };
        self.give_up(content, &damage).map_err(host)?;
        Ok(false)
    }

    /// Removes content that its disk gave back otherwise than it was written.
    pub fn give_up(&self, content: ContentId, damage: &str) -> io::Result<()> {
        let path = self.path(content);
        fs::remove_file(&path)?;
        let reason = format!("{} was damaged and is fetched anew: {damage}", path.display());
        eprintln!("{}", Event::Trouble { place: "content", reason });
        Ok(())
    }

    /// Makes sure that content is there, and whole.
    pub async fn fetch(
        &self,
        overlay: &Overlay,
        gateway: NodeId,
        content: ContentId,
        terms: Terms,
    ) -> Result<(), ContentError> {
        // One that is damaged has gone after that.
        if self.has(content)
            && self.is_whole(content).await?
            && let Some(length) = self.length(content)
        {
            check(content, length, terms)?;
        }
        self.fetch_unchecked(overlay, gateway, content, terms).await.map(|_| ())
    }

    /// The same for whoever checks what was there already while it is used, and gives it up if it is damaged.
    pub async fn fetch_unchecked(
        &self,
        overlay: &Overlay,
        gateway: NodeId,
        content: ContentId,
        terms: Terms,
    ) -> Result<Fetched, ContentError> {
        if self.has(content) {
            self.note_use(content);
            return Ok(Fetched::Before);
        }
        let terms = self.bounded(content, terms)?;
        let begin = Instant::now();
        let mut attempt = 1;
        let (stream, length) = loop {
            match ask(overlay, gateway, content).await {
                Err(ContentError::Busy { .. }) if attempt < BUSY_ATTEMPTS => {
                    attempt += 1;
                    tokio::time::sleep(BUSY_PAUSE).await;
                }
                answer => break answer?,
            }
        };
        let bytes = self.receive(stream, (gateway, content), length, terms).await?;
        let ms = begin.elapsed().as_millis();
        eprintln!("{}", Event::ContentFetched { content, bytes, ms });
        Ok(Fetched::Now)
    }

    /// Writes what arrives, checks its digest, and gives it its name.
    async fn receive(
        &self,
        stream: impl AsyncRead + Unpin,
        (gateway, content): (NodeId, ContentId),
        length: Option<u64>,
        terms: Terms,
    ) -> Result<u64, ContentError> {
        // It goes, with what was set aside for it, when whoever waits for it does not any more.
        let coming = self.begin(content);
        let (received, found) =
            self.write(&coming, stream, (gateway, content), (length, terms)).await?;
        if length.is_some_and(|length| received < length) {
            return Err(ContentError::Stalled { content, gateway, received });
        }
        if found != content {
            return Err(ContentError::Digest { content, gateway, found });
        }
        tokio::fs::rename(coming.path(), self.path(content)).await.map_err(|source| {
            ContentError::Host { content, path: coming.path().display().to_string(), source }
        })?;
        Ok(received)
    }

    /// Writes what arrives, as far as there is room for it, and returns its length and digest.
    async fn write(
        &self,
        coming: &Coming,
        mut stream: impl AsyncRead + Unpin,
        (gateway, content): (NodeId, ContentId),
        (length, terms): (Option<u64>, Terms),
    ) -> Result<(u64, ContentId), ContentError> {
        let path = coming.path().display().to_string();
        let host = |source| ContentError::Host { content, path: path.clone(), source };
        if let Some(length) = length {
            check(content, length, terms)?;
        }
        // What the disk takes that is made of it was promised to that, and what it leaves is for both.
        let own = length.map_or(0, |length| terms.own.saturating_sub(length));
        let set_aside = |length: u64, bytes: u64| match self.set_aside(coming, bytes, own) {
            Ok(Ok(())) => Ok(bytes),
            Ok(Err(room)) => Err(ContentError::NoRoom { content, length, room }),
            Err(source) => Err(host(source)),
        };
        let mut room = length.map_or(Ok(0), |length| set_aside(length, length))?;
        let mut file = File::from_std(fs::File::create(coming.path()).map_err(host)?);
        let mut digest = Sha256::new();
        let mut buffer = vec![0; 256 << 10];
        let mut received = 0u64;
        loop {
            let stalled = ContentError::Stalled { content, gateway, received };
            let read = tokio::time::timeout(STALL_LIMIT, stream.read(&mut buffer)).await;
            let Ok(Ok(count)) = read else { return Err(stalled) };
            if count == 0 {
                break;
            }
            let bytes = u64::try_from(count).unwrap_or(u64::MAX);
            received += bytes;
            check(content, received, terms)?;
            if received > room {
                if length.is_some() {
                    return Err(ContentError::NoRoom { content, length: received, room });
                }
                room += set_aside(received, PIECE)?;
            }
            digest.update(&buffer[..count]);
            // What an image has nothing in takes no room.
            if disk_copy::is_zero(&buffer[..count]) {
                let count = i64::try_from(count).unwrap_or(i64::MAX);
                file.seek(SeekFrom::Current(count)).await.map_err(host)?;
            } else {
                file.write_all(&buffer[..count]).await.map_err(host)?;
            }
            coming.wrote(bytes);
        }
        // Only this tells that the last write failed.
        file.flush().await.map_err(host)?;
        file.set_len(received).await.map_err(host)?;
        file.sync_all().await.map_err(host)?;
        Ok((received, ContentId::from_bytes(digest.finalize().into())))
    }

    /// Returns the length of content that is here.
    pub fn length(&self, content: ContentId) -> Option<u64> {
        fs::metadata(self.path(content)).ok().map(|facts| facts.len())
    }

    /// Bounds content by what this node could hold if nothing else were there, as one file.
    fn bounded(&self, content: ContentId, terms: Terms) -> Result<Terms, ContentError> {
        let path = self.directory.display().to_string();
        let volume = rustix::fs::statvfs(&self.directory).map_err(|error| ContentError::Host {
            content,
            path,
            source: error.into(),
        })?;
        let all = volume.f_blocks.saturating_mul(volume.f_frsize).saturating_sub(KEEP_FREE);
        let most = all.min(disk::LARGEST.to_bytes().unwrap_or(u64::MAX));
        Ok(if terms.most <= most { terms } else { Terms { most, of: Terms::NODE, ..terms } })
    }

    /// Lets content count as used now. A file that cannot be marked goes earlier, which does no harm.
    fn note_use(&self, content: ContentId) {
        let file = fs::File::options().append(true).open(self.path(content));
        let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
    }
}

/// Asks a gateway for content; returns the stream on which it comes, and its length where that was told.
async fn ask(
    overlay: &Overlay,
    gateway: NodeId,
    content: ContentId,
) -> Result<(OverlayStream, Option<u64>), ContentError> {
    let failed = |reason: String| ContentError::Ask { content, gateway, reason };
    let mut stream = overlay.open_stream(gateway).await.map_err(|error| {
        let detail = error.to_string();
        if let RequestError::PeerBusy { .. } = error {
            ContentError::Busy { content, gateway, detail }
        } else {
            failed(detail)
        }
    })?;
    let header = StreamHeader::Content { content };
    let exchange = async {
        frames::write(&mut stream, &header).await?;
        frames::read::<StreamAnswer>(&mut stream).await
    };
    let answer = tokio::time::timeout(STALL_LIMIT, exchange)
        .await
        .map_err(|_| failed("no answer".to_owned()))?
        .map_err(|error| failed(error.to_string()))?;
    match answer {
        StreamAnswer::Open { length } => Ok((stream, length)),
        StreamAnswer::Refused(problem) if problem.status == BUSY => {
            Err(ContentError::Busy { content, gateway, detail: problem.detail })
        }
        StreamAnswer::Refused(problem) => {
            Err(ContentError::Refused { content, gateway, detail: problem.detail })
        }
    }
}

/// Checks a length against what content may have.
fn check(content: ContentId, length: u64, terms: Terms) -> Result<(), ContentError> {
    let Terms { most, of, .. } = terms;
    if length <= most { Ok(()) } else { Err(ContentError::TooLarge { content, length, of, most }) }
}

fn shown(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, os::unix::fs::MetadataExt};

    use super::{room::Spare, *};

    const GATEWAY: NodeId = NodeId::from_bytes([9; 32]);

    /// What bounds nothing.
    const ANY: Terms = Terms { most: u64::MAX, of: Terms::NODE, own: 0 };

    fn cache() -> (tempfile::TempDir, Cache) {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::open(directory.path()).expect("opened");
        (directory, cache)
    }

    fn id_of(bytes: &[u8]) -> ContentId {
        ContentId::from_bytes(Sha256::digest(bytes).into())
    }

    #[tokio::test]
    async fn content_is_kept_under_its_digest() {
        let (_directory, cache) = cache();
        let content = id_of(b"kernel");
        let received = cache.receive(&b"kernel"[..], (GATEWAY, content), Some(6), ANY).await;
        assert_eq!(received.expect("right"), 6);
        assert_eq!(fs::read(cache.path(content)).expect("kept"), b"kernel");
    }

    #[tokio::test]
    async fn zeroes_take_no_room() {
        let (_directory, cache) = cache();
        let mut bytes = vec![0; 3 << 20];
        bytes[1 << 20..(1 << 20) + 100].fill(7);
        let content = id_of(&bytes);
        cache.receive(&bytes[..], (GATEWAY, content), None, ANY).await.expect("right");
        assert!(fs::read(cache.path(content)).expect("kept") == bytes);
        let blocks = fs::metadata(cache.path(content)).expect("a file").blocks();
        assert!(blocks * 512 <= 256 << 10, "{blocks} blocks");
        assert!(cache.is_whole(content).await.expect("read"));
    }

    #[tokio::test]
    async fn content_that_was_altered_on_its_disk_is_noticed_and_goes() {
        let (directory, cache) = cache();
        let content = id_of(b"kernel");
        cache.receive(&b"kernel"[..], (GATEWAY, content), Some(6), ANY).await.expect("right");
        assert!(cache.is_whole(content).await.expect("read"));
        for altered in [&b"kernem"[..], b"kerne", b"kernels", b""] {
            fs::write(cache.path(content), altered).expect("altered");
            assert!(!cache.is_whole(content).await.expect("removed"));
            assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 0);
        }
    }

    #[tokio::test]
    async fn what_nobody_needs_goes_the_longest_unused_first_where_it_is_in_the_way() {
        let (_directory, cache) = cache();
        let all = [&b"first"[..], b"second", b"third", b"fourth"];
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        for (bytes, seconds) in all.iter().zip([30, 10, 20, 0]) {
            let length = u64::try_from(bytes.len()).ok();
            cache.receive(*bytes, (GATEWAY, id_of(bytes)), length, ANY).await.expect("right");
            let file = fs::File::options().append(true).open(cache.path(id_of(bytes)));
            file.and_then(|file| file.set_modified(at(seconds))).expect("marked");
        }
        let needed = BTreeSet::from([id_of(b"fourth")]);
        let names = |spare: Vec<Spare>| spare.iter().map(|it| shown(&it.path)).collect::<Vec<_>>();
        let listed = names(cache.spare(&needed).expect("listed"));
        assert_eq!(listed, [&b"second"[..], b"third", b"first"].map(|it| id_of(it).to_string()));
        let taken =
            |bytes: &&[u8]| fs::metadata(cache.path(id_of(bytes))).expect("a file").blocks() << 9;
        let could_go: u64 = all[..3].iter().map(taken).sum();
        assert!(could_go >= 16);
        assert_eq!(cache.settle(needed.clone(), 0).expect("nothing to do"), could_go);
        cache.note_use(id_of(b"second"));
        assert_eq!(names(cache.spare(&needed).expect("listed"))[2], id_of(b"second").to_string());
        // No volume has so much room, whatever goes.
        assert_eq!(cache.settle(needed, u64::MAX).expect("settled"), 0);
        let left = all.map(|bytes| cache.has(id_of(bytes)));
        assert_eq!(left, [false, false, false, true]);
    }

    #[tokio::test]
    async fn what_was_promised_to_disks_is_no_room_for_content() {
        let (_directory, cache) = cache();
        let content = id_of(b"kernel");
        let receive = async |length, terms| {
            cache.receive(&b"kernel"[..], (GATEWAY, content), length, terms).await
        };
        let free = cache.free().expect("a volume") * 2;
        cache.settle(BTreeSet::new(), free * 2).expect("settled");
        for length in [Some(6), None] {
            let refused = receive(length, ANY).await;
            assert!(matches!(refused, Err(ContentError::NoRoom { .. })), "{refused:?}");
        }
        // The disk that begins as it has room for it, if it has as much again.
        let small = receive(Some(6), Terms::image(free)).await;
        assert!(matches!(small, Err(ContentError::NoRoom { .. })), "{small:?}");
        assert_eq!(receive(Some(6), Terms::image(free * 2)).await.expect("room"), 6);
        cache.settle(BTreeSet::new(), 0).expect("settled");
        assert_eq!(receive(None, ANY).await.expect("room"), 6);
    }

    #[tokio::test]
    async fn content_beyond_its_bounds_is_told_before_it_comes() {
        let (directory, cache) = cache();
        let content = id_of(b"kernel");
        let terms = Terms::within(5, "the lease's memory has");
        for length in [Some(6), None] {
            let refused = cache.receive(&b"kernel"[..], (GATEWAY, content), length, terms).await;
            let Err(ContentError::TooLarge { length: 6, most: 5, .. }) = refused else {
                panic!("{refused:?}")
            };
        }
        assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 0);
        // Nothing is larger than the volume.
        let bounded = cache.bounded(content, Terms::image(1)).expect("a volume");
        let volume = rustix::fs::statvfs(directory.path()).expect("a volume");
        assert!(bounded.most <= volume.f_blocks * volume.f_frsize, "{bounded:?}");
        assert_eq!(cache.bounded(content, terms).expect("a volume"), terms);
    }

    #[tokio::test]
    async fn altered_short_and_long_content_leaves_nothing_behind() {
        let (directory, cache) = cache();
        let content = id_of(b"kernel");
        let altered = cache.receive(&b"kernal"[..], (GATEWAY, content), Some(6), ANY).await;
        assert!(matches!(altered, Err(ContentError::Digest { .. })), "{altered:?}");
        let short = cache.receive(&b"kern"[..], (GATEWAY, content), Some(6), ANY).await;
        assert!(matches!(short, Err(ContentError::Stalled { received: 4, .. })), "{short:?}");
        let long = cache.receive(&b"kernels"[..], (GATEWAY, content), Some(6), ANY).await;
        assert!(matches!(long, Err(ContentError::NoRoom { .. })), "{long:?}");
        assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 0);
    }
}
