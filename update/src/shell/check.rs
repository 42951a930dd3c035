//! One look at a repository: which release a node should run, and which target that is.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;

use super::{Fetcher, Session, SessionError, Store, StoreError};
use crate::{
    channel::{self, Channel, Decision, DocumentError, Manifest, Release, Sha256},
    delta,
    disk::medium,
    target::Target,
};

/// Kind of the file in a manifest that nodes start.
const UKI: &str = "uki";
/// Folder in the store for documents, each under the name that [`super::file_name`] makes of its path.
pub const DOCUMENTS: &str = "documents";

/// Where a repository is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// URL below which its metadata is.
    pub metadata: String,
    /// URL below which its targets are.
    pub targets: String,
}

impl Source {
    /// The two folders of a repository as the release tool makes them, below `url`.
    pub fn below(url: &str) -> Self {
        let url = url.trim_end_matches('/');
        Self { metadata: format!("{url}/metadata"), targets: format!("{url}/targets") }
    }
}

/// Who looks.
#[derive(Debug, Clone)]
pub struct Checker {
    /// Folder of the trusted metadata.
    pub store: PathBuf,
    /// Root metadata that came another way.
    pub root: Vec<u8>,
    /// Where the repository is; the first that answers is asked.
    pub sources: Vec<Source>,
    /// The channel to follow.
    pub channel: String,
    /// The node, for its place in waves.
    pub node: Vec<u8>,
    /// The oldest release that the node takes, whatever the channel says.
    pub floor: Option<Release>,
}

/// What was found.
#[derive(Debug)]
pub struct Checked {
    /// What the node should do.
    pub decision: Decision,
    /// The program to do it with, where there is one.
    pub program: Option<Offered>,
    /// The oldest release that may run, by the channel.
    pub minimum: Option<Release>,
    /// The channel's release, where that is below the floor.
    pub too_old: Option<Release>,
    /// What to fetch it with.
    pub session: Session,
}

/// A program that a node should run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offered {
    /// The program.
    pub target: Target,
    /// Its digest.
    pub sha256: Sha256,
    /// The list of its chunks, where the release has one.
    pub chunks: Option<Target>,
}

/// Why nothing was found.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum CheckError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("{path} of the repository is refused")]
    Document { path: String, source: DocumentError },
    #[error("{path} of the repository contradicts what it describes")]
    Contradiction { path: String },
    #[error("{path} has {length} bytes, more than {limit}")]
    TooLong { path: String, length: u64, limit: u64 },
    #[error("no place is configured that a repository could be at")]
    NoSource,
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl From<StoreError> for CheckError {
    fn from(error: StoreError) -> Self {
        Self::Session(error.into())
    }
}

impl Checker {
    /// Looks, for a node that runs `running`, at the time `now`. `fetcher` makes what fetches.
    pub async fn check(
        &self,
        fetcher: &(dyn Fn() -> Fetcher + Sync),
        running: Release,
        now: Timestamp,
    ) -> Result<Checked, CheckError> {
        let mut last = CheckError::NoSource;
        for source in &self.sources {
            let store = Store::open(&self.store)?;
            let session = Session::new(store, fetcher(), &self.root, now)?;
            let session = session.with_urls(&source.metadata, &source.targets);
            match self.look(session, running, now).await {
                Ok(checked) => return Ok(checked),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn look(
        &self,
        mut session: Session,
        running: Release,
        now: Timestamp,
    ) -> Result<Checked, CheckError> {
        session.refresh().await?;
        let path = Channel::target(&self.channel);
        let bytes = self.document(&mut session, &path).await?;
        let refused = |source| CheckError::Document { path: path.clone(), source };
        let mut channel = Channel::parse(&bytes).map_err(refused)?;
        if channel.channel != self.channel {
            return Err(CheckError::Contradiction { path });
        }
        let minimum = channel.minimum;
        channel.minimum = minimum.max(self.floor);
        let too_old = channel.release.filter(|release| self.floor.is_some_and(|f| *release < f));
        let decision = channel.decide(&self.node, running, now);
        let program = match decision {
            Decision::Update(release) | Decision::Replace(release) => {
                Some(self.program(&mut session, release).await?)
            }
            Decision::Stay | Decision::Stranded | Decision::Wait(..) => None,
        };
        Ok(Checked { decision, program, minimum, too_old, session })
    }

    /// Finds the program of a release.
    async fn program(
        &self,
        session: &mut Session,
        release: Release,
    ) -> Result<Offered, CheckError> {
        let path = Manifest::target(&self.channel, release);
        let bytes = self.document(session, &path).await?;
        let refused = |source| CheckError::Document { path: path.clone(), source };
        let manifest = Manifest::parse(&bytes).map_err(refused)?;
        let file = manifest.files.get(UKI).filter(|_| manifest.release == release);
        let file = file.ok_or_else(|| CheckError::Contradiction { path: path.clone() })?;
        let target = session.look_up(&file.target).await?;
        let same = target.file.length == file.length
            && target.file.hashes.sha256.is_none_or(|found| found == file.sha256.0);
        if !same {
            return Err(CheckError::Contradiction { path });
        }
        let (length, limit) = (file.length, medium::PROGRAM_LIMIT);
        if length > limit {
            return Err(CheckError::TooLong { path: file.target.clone(), length, limit });
        }
        let chunks = self.chunks(session, &manifest).await?;
        Ok(Offered { target, sha256: file.sha256, chunks })
    }

    /// Finds the list of the program's chunks. One that is too long is none.
    async fn chunks(
        &self,
        session: &mut Session,
        manifest: &Manifest,
    ) -> Result<Option<Target>, CheckError> {
        let Some(file) = manifest.files.get(delta::KIND) else { return Ok(None) };
        match session.look_up(&file.target).await {
            Ok(target) => Ok(Some(target).filter(|found| found.file.length <= delta::MAX_BYTES)),
            Err(SessionError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Gets a document, unless the one that is there is the right one.
    async fn document(&self, session: &mut Session, path: &str) -> Result<Vec<u8>, CheckError> {
        let target = session.look_up(path).await?;
        let (length, limit) = (target.file.length, channel::MAX_BYTES as u64);
        if length > limit {
            return Err(CheckError::TooLong { path: path.to_owned(), length, limit });
        }
        let folder = self.store.join(DOCUMENTS);
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CheckError::Io { path, source }
        };
        fs::create_dir_all(&folder).map_err(failed(&folder))?;
        let file = session.get(&target, &folder).await?;
        let bytes = fs::read(&file).map_err(failed(&file))?;
        if path.ends_with("manifest.json") {
            forget_others(&folder, &file).map_err(failed(&folder))?;
        }
        Ok(bytes)
    }
}

/// Removes the manifests of other releases.
fn forget_others(folder: &Path, kept: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.to_string_lossy();
        if path != kept && name.contains("manifest.json") {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}
