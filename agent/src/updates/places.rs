//! Where releases come from besides mirrors: other nodes of the overlay, and volumes that somebody
//! plugged in. Nothing that they hold is believed without signatures.
//!
//! A node is `node://ID/PATH`, a volume `volume://DEVICE/PATH`. A volume is a FAT file system with the
//! folder [`FOLDER`], which is a repository as mirrors have it.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use fatfs::{FileSystem, FsOptions};
use overlay::{Member, Overlay, Role};
use tokio::{
    io::{AsyncWriteExt, DuplexStream},
    runtime::Handle,
    sync::oneshot,
    time::timeout,
};
use types::{
    forward::{StreamAnswer, StreamHeader},
    ids::NodeId,
};
use update::{
    disk::{Bounded, LOOKING, medium::PROGRAM_LIMIT},
    shell::{Bytes, Elsewhere, Opening, Source, Span, Wanted},
};

use crate::{assign::lent, tasks::frames};

/// Folder of a volume with a repository.
const FOLDER: &str = "holdfast-updates";
/// Schemes of the URLs.
const NODE: &str = "node://";
const VOLUME: &str = "volume://";
/// Most nodes that are asked in one look.
const MAX_NODES: usize = 3;
/// Most volumes that count.
const MAX_VOLUMES: usize = 4;
/// A node answers a request within this time or is of no use.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes of a volume that wait to be taken, and that are read at once.
const BUFFER: usize = 256 << 10;
const PIECE: usize = 64 << 10;
/// Bytes that are read of a volume at most.
const VOLUME_BYTES: u64 = LOOKING + PROGRAM_LIMIT;

/// Opens files of nodes and volumes.
pub(super) struct Places {
    overlay: Overlay,
    root: PathBuf,
}

impl Places {
    /// Asks nodes over `overlay`, and reads devices below `root`.
    pub(super) fn new(overlay: Overlay, root: &Path) -> Self {
        Self { overlay, root: root.to_owned() }
    }
}

impl Elsewhere for Places {
    fn open(&self, wanted: Wanted) -> Opening {
        let Wanted { url, span } = wanted;
        if let Some((device, path)) = split(&url, VOLUME) {
            let device = self.root.join("dev").join(device);
            let path = format!("{FOLDER}/{path}");
            return Opening(Box::pin(of_volume(device, path, span)));
        }
        let node = split(&url, NODE)
            .and_then(|(node, path)| Some((node.parse::<NodeId>().ok()?, path.to_owned())));
        let overlay = self.overlay.clone();
        Opening(Box::pin(async move {
            let Some((node, path)) = node else { return Err(io::ErrorKind::InvalidInput.into()) };
            of_node(&overlay, node, path, span).await
        }))
    }
}

/// Returns the host and the path of a URL with this scheme.
fn split<'a>(url: &'a str, scheme: &str) -> Option<(&'a str, &'a str)> {
    url.strip_prefix(scheme)?.split_once('/')
}

/// Chooses nodes to ask: other ones each `turn`.
pub(super) fn nodes(members: &[Member], turn: u64) -> Vec<Source> {
    let mut ids: Vec<NodeId> =
        members.iter().filter(|it| it.role == Role::Provider).map(|it| it.id).collect();
    ids.sort();
    let turn = usize::try_from(turn).unwrap_or(0);
    let first = turn.wrapping_mul(MAX_NODES) % ids.len().max(1);
    ids.rotate_left(first);
    ids.iter().take(MAX_NODES).map(|id| Source::below(&format!("{NODE}{id}"))).collect()
}

async fn of_node(
    overlay: &Overlay,
    node: NodeId,
    path: String,
    span: Span,
) -> io::Result<Option<Bytes>> {
    let header = StreamHeader::Release { path, from: span.from, to: span.to };
    let exchange = async {
        let mut stream = overlay.open_stream(node).await.map_err(io::Error::other)?;
        frames::write(&mut stream, &header).await?;
        let answer = frames::read::<StreamAnswer>(&mut stream).await?;
        Ok::<_, io::Error>((stream, answer))
    };
    let (stream, answer) = timeout(ANSWER, exchange).await??;
    match answer {
        StreamAnswer::Open { .. } => Ok(Some(Bytes(Box::new(stream)))),
        StreamAnswer::Refused(problem) if problem.status == 404 => Ok(None),
        StreamAnswer::Refused(problem) => Err(io::Error::other(problem.detail)),
    }
}

/// Volumes with a repository.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    devices: BTreeSet<OsString>,
    found: Vec<String>,
}

impl Volumes {
    /// Looks whether devices came or went below `root`; true when other volumes have a repository now.
    pub(super) fn look(&mut self, root: &Path) -> bool {
        let entries = fs::read_dir(root.join("sys/class/block")).into_iter().flatten().flatten();
        let ours = entries.filter(|entry| !lent::is_foreign(root, &entry.path()));
        let devices: BTreeSet<OsString> = ours.map(|entry| entry.file_name()).collect();
        if devices == self.devices {
            return false;
        }
        let names = devices.iter().filter_map(|name| name.to_str());
        let has = |name: &&str| has_repository(&root.join("dev").join(name));
        let found = names.filter(has).take(MAX_VOLUMES).map(str::to_owned).collect();
        self.devices = devices;
        std::mem::replace(&mut self.found, found) != self.found
    }

    /// Returns the devices' names.
    pub(super) fn names(&self) -> &[String] {
        &self.found
    }

    /// Returns where their repositories are.
    pub(super) fn sources(&self) -> Vec<Source> {
        self.found.iter().map(|name| Source::below(&format!("{VOLUME}{name}"))).collect()
    }
}

fn has_repository(device: &Path) -> bool {
    let Ok(file) = File::open(device) else { return false };
    let Ok(volume) = FileSystem::new(Bounded::new(file, VOLUME_BYTES), FsOptions::new()) else {
        return false;
    };
    volume.root_dir().open_dir(&format!("{FOLDER}/metadata")).is_ok()
}

async fn of_volume(device: PathBuf, path: String, span: Span) -> io::Result<Option<Bytes>> {
    let (tell, told) = oneshot::channel();
    let (near, far) = tokio::io::duplex(BUFFER);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || read_volume(&device, &path, span, (tell, near, runtime)));
    let found = told.await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))??;
    Ok(found.then(|| Bytes(Box::new(far))))
}

/// Says whether the file is there, and passes its bytes on.
fn read_volume(
    device: &Path,
    path: &str,
    span: Span,
    (tell, mut to, runtime): (oneshot::Sender<io::Result<bool>>, DuplexStream, Handle),
) {
    let opened = File::open(device)
        .and_then(|file| FileSystem::new(Bounded::new(file, VOLUME_BYTES), FsOptions::new()));
    let volume = match opened {
        Ok(volume) => volume,
        Err(error) => return drop(tell.send(Err(error))),
    };
    let root = volume.root_dir();
    let opened = root.open_file(path).and_then(|mut file| {
        file.seek(SeekFrom::Start(span.from))?;
        Ok(file)
    });
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return drop(tell.send(Ok(false))),
        Err(error) => return drop(tell.send(Err(error))),
    };
    if tell.send(Ok(true)).is_err() {
        return;
    }
    let wanted = span.to.unwrap_or(u64::MAX).saturating_sub(span.from);
    let mut file = file.take(wanted);
    let mut piece = vec![0; PIECE];
    // Whoever reads sees the end too early, and goes on elsewhere.
    while let Ok(count @ 1..) = file.read(&mut piece) {
        if runtime.block_on(to.write_all(&piece[..count])).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::io::Write;

    use tokio::io::AsyncReadExt;

    use super::*;

    /// A server with a stick that has a repository with one file, and another one that has none.
    fn server(bytes: &[u8]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for name in ["sda", "sdb"] {
            fs::create_dir_all(root.path().join("sys/class/block").join(name)).unwrap();
        }
        fs::create_dir_all(root.path().join("dev")).unwrap();
        for (name, folder) in [("sda", "other"), ("sdb", FOLDER)] {
            let mut storage = io::Cursor::new(vec![0; 4 << 20]);
            fatfs::format_volume(&mut storage, fatfs::FormatVolumeOptions::new()).unwrap();
            let volume = FileSystem::new(&mut storage, FsOptions::new()).unwrap();
            let folder = volume.root_dir().create_dir(folder).unwrap();
            let metadata = folder.create_dir("metadata").unwrap();
            metadata.create_file("timestamp.json").unwrap().write_all(bytes).unwrap();
            drop((metadata, folder));
            drop(volume);
            fs::write(root.path().join("dev").join(name), storage.into_inner()).unwrap();
        }
        root
    }

    async fn read(root: &Path, path: &str, span: Span) -> io::Result<Option<Vec<u8>>> {
        let opened = of_volume(root.join("dev/sdb"), format!("{FOLDER}/{path}"), span).await?;
        let Some(mut bytes) = opened else { return Ok(None) };
        let mut all = Vec::new();
        bytes.0.read_to_end(&mut all).await?;
        Ok(Some(all))
    }

    #[tokio::test]
    async fn a_stick_with_a_repository_is_found_and_read() {
        let bytes: Vec<u8> = (0..600_000_u32).map(|at| at.to_le_bytes()[1]).collect();
        let root = server(&bytes);
        let mut volumes = Volumes::default();
        assert!(volumes.look(root.path()) && !volumes.look(root.path()));
        assert_eq!(volumes.names(), ["sdb"]);
        assert_eq!(volumes.sources(), [Source::below("volume://sdb")]);
        let path = "metadata/timestamp.json";
        let whole = read(root.path(), path, Span::default()).await.unwrap();
        assert!(whole.as_ref() == Some(&bytes));
        let part =
            read(root.path(), path, Span { from: 300_000, to: Some(500_000) }).await.unwrap();
        assert!(part.unwrap() == bytes[300_000..500_000]);
        assert_eq!(read(root.path(), "metadata/1.root.json", Span::default()).await.unwrap(), None);
        fs::remove_dir(root.path().join("sys/class/block/sdb")).unwrap();
        assert!(volumes.look(root.path()));
        assert!(volumes.names().is_empty());
    }

    #[tokio::test]
    async fn a_volume_without_an_end_is_given_up() {
        let root = server(b"x");
        let device = root.path().join("dev/sdb");
        let mut volume = Bounded::new(File::open(&device).unwrap(), 1000);
        let mut all = Vec::new();
        assert!(volume.read_to_end(&mut all).is_err());
        fs::write(&device, vec![0xff; 1 << 20]).unwrap();
        assert!(read(root.path(), "metadata/timestamp.json", Span::default()).await.is_err());
        let mut volumes = Volumes::default();
        assert!(!volumes.look(root.path()));
    }

    #[test]
    fn every_node_gets_its_turn() {
        let member = |byte: u8, role| Member {
            id: NodeId::from_bytes([byte; 32]),
            role,
            addresses: Vec::new(),
            last_heard: Duration::ZERO,
        };
        let mut members: Vec<Member> = (0..7).map(|byte| member(byte, Role::Provider)).collect();
        members.push(member(9, Role::Gateway));
        let mut asked: Vec<String> =
            (0..3).flat_map(|turn| nodes(&members, turn)).map(|source| source.targets).collect();
        assert_eq!(asked.len(), 9);
        asked.sort();
        asked.dedup();
        assert_eq!(asked.len(), 7);
        assert!(nodes(&[], 5).is_empty());
    }
}
