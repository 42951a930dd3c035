//! One update: answers a [`Client`]'s requests from a [`Store`] and a repository, and gets targets.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use aws_lc_rs::digest::{SHA256, digest};
use jiff::Timestamp;
use tokio::time::Instant;

use super::{FetchError, Fetcher, Span, Store, StoreError, fetch::METADATA_TIME};
use crate::{
    client::{Client, Limits, Outcome, Request},
    pattern,
    target::{Check, Target, TargetError},
    verify::UpdateError,
};

/// Largest target that is fetched, in bytes.
pub const TARGET_LIMIT: u64 = 16 << 30;
/// Slowest mirror that is of use, in bytes a second; it bounds how long a target may take.
pub(super) const SLOWEST: u64 = 8 << 10;
/// How often a target that broke off is resumed without a byte of progress.
pub(super) const IDLE_RESUMES: u32 = 3;
/// Pause before a target is resumed.
pub(super) const RESUME_PAUSE: Duration = Duration::from_secs(1);
/// Longest time for one refresh, or one search, with all files of metadata that it needs. A mirror that
/// drips keeps nobody from the next one; what was verified is stored, and the next refresh goes on.
const PATIENCE: Duration = Duration::from_secs(600);
/// Longest file name.
const MAX_NAME: usize = 255;

/// Why an update ended without what was asked for.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum SessionError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the repository's metadata is refused")]
    Update(#[from] UpdateError),
    #[error("no role that is trusted for {path:?} describes it")]
    NotFound { path: String },
    #[error("the repository has no file for target {path:?}")]
    Missing { path: String },
    #[error("{path:?} has {length} bytes, more than {TARGET_LIMIT}")]
    TooLarge { path: String, length: u64 },
    #[error("what the repository has for target {path:?} is refused")]
    Target { path: String, source: TargetError },
    #[error("cannot {operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

/// A target as `list` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its path.
    pub path: String,
    /// Its length in bytes.
    pub length: u64,
    /// The role that describes it.
    pub role: String,
}

/// A client with its store and repository.
#[derive(Debug)]
pub struct Session {
    client: Client,
    store: Store,
    pub(super) fetcher: Fetcher,
    metadata_url: String,
    targets_url: String,
    patience: Duration,
}

impl Session {
    /// Begins an update at the time `now`, with the root that came with the program.
    pub fn new(
        store: Store,
        fetcher: Fetcher,
        root: &[u8],
        now: Timestamp,
    ) -> Result<Self, SessionError> {
        let stored = store.load("root.json")?;
        let client = Client::new(root, stored.as_deref(), now, Limits::default())?;
        let (metadata_url, targets_url) = (String::new(), String::new());
        Ok(Self { client, store, fetcher, metadata_url, targets_url, patience: PATIENCE })
    }

    /// Sets the longest time for one refresh or one search, instead of ten minutes.
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Sets the URLs below which metadata and targets are.
    pub fn with_urls(mut self, metadata: &str, targets: &str) -> Self {
        let folder = |url: &str| format!("{}/", url.trim_end_matches('/'));
        (self.metadata_url, self.targets_url) = (folder(metadata), folder(targets));
        self
    }

    /// Returns the client, to read what it trusts.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Brings the metadata up to date.
    pub async fn refresh(&mut self) -> Result<(), SessionError> {
        self.run().await?;
        Ok(())
    }

    /// Looks a target up, after a refresh.
    pub async fn look_up(&mut self, path: &str) -> Result<Target, SessionError> {
        self.client.look_up(path)?;
        if let Outcome::Found(target) = self.run().await? {
            return Ok(*target);
        }
        Err(SessionError::NotFound { path: path.to_owned() })
    }

    /// Lists all targets, after a refresh.
    pub async fn list(&mut self) -> Result<Vec<Listed>, SessionError> {
        self.client.walk()?;
        let Outcome::Names(names) = self.run().await? else {
            return Ok(Vec::new());
        };
        let mut all = Vec::new();
        for name in names {
            self.client.look_up(&name)?;
            if let Outcome::Found(target) = self.run().await? {
                let Target { path, role, file, .. } = *target;
                all.push(Listed { path, length: file.length, role });
            }
        }
        Ok(all)
    }

    async fn run(&mut self) -> Result<Outcome, SessionError> {
        let mut refused = None;
        let end = Instant::now() + self.patience;
        while let Some(request) = self.client.next() {
            let result = match request {
                Request::Load { file } => {
                    let bytes = self.store.load(file)?;
                    self.client.handle_loaded(bytes.as_deref())
                }
                Request::Fetch { location, limit } => {
                    let url = format!("{}{location}", self.metadata_url);
                    let left = end.saturating_duration_since(Instant::now());
                    let bytes = self.fetcher.whole(&url, limit, left.min(METADATA_TIME)).await?;
                    self.client.handle_fetched(bytes.as_deref())
                }
                Request::Store { file, bytes } => {
                    self.store.write(file, bytes)?;
                    self.client.handle_written();
                    Ok(())
                }
                Request::Remove { file } => {
                    self.store.remove(file)?;
                    self.client.handle_written();
                    Ok(())
                }
            };
            // What was verified before is still stored.
            refused = refused.or(result.err());
        }
        match refused {
            Some(error) => Err(error.into()),
            None => Ok(self.client.outcome()),
        }
    }

    /// Gets a target into `folder` and returns its file, whose name is [`file_name`]. A file that is
    /// there and right is not fetched again; one that broke off is resumed, now or at the next call.
    pub async fn get(&mut self, target: &Target, folder: &Path) -> Result<PathBuf, SessionError> {
        let path = &target.path;
        if target.file.length > TARGET_LIMIT {
            return Err(SessionError::TooLarge { path: path.clone(), length: target.file.length });
        }
        let refused = |source| SessionError::Target { path: path.clone(), source };
        target.checkable().map_err(refused)?;
        let place = folder.join(file_name(path));
        if replay(target, &place)?.is_some_and(|check| check.finish().is_ok()) {
            return Ok(place);
        }
        let unfinished = folder.join(format!(".{}.part", file_name(path)));
        let resumed = replay(target, &unfinished)?.is_some_and(|check| check.found() > 0);
        let found = match self.fill(target, &unfinished).await {
            // What was resumed may be of an older version of the target.
            Err(SessionError::Target { source: TargetError::Digest { .. }, .. }) if resumed => {
                self.fill(target, &unfinished).await
            }
            found => found,
        };
        found?;
        let finish = || {
            fs::rename(&unfinished, &place)?;
            File::open(folder)?.sync_all()
        };
        finish().map_err(|source| io_error("finish", &place, source))?;
        Ok(place)
    }

    /// Completes an unfinished file. One that turns out wrong is removed.
    async fn fill(&mut self, target: &Target, unfinished: &Path) -> Result<(), SessionError> {
        let time = Duration::from_secs(60 + target.file.length / SLOWEST);
        let deadline = Instant::now() + time;
        let mut check = match replay(target, unfinished)? {
            Some(check) => check,
            None => target.check(),
        };
        let mut idle = 0;
        while check.found() < target.file.length {
            let before = check.found();
            match self.take(target, unfinished, &mut check, deadline).await {
                Ok(()) => break,
                Err(SessionError::Fetch(error)) if resumable(&error) => {
                    idle = if check.found() > before { 0 } else { idle + 1 };
                    if idle > IDLE_RESUMES || Instant::now() >= deadline {
                        return Err(error.into());
                    }
                    tokio::time::sleep(RESUME_PAUSE).await;
                }
                Err(error) => {
                    if matches!(error, SessionError::Target { .. }) {
                        remove(unfinished)?;
                    }
                    return Err(error);
                }
            }
        }
        if let Err(source) = check.finish() {
            if !matches!(source, TargetError::TooShort { .. }) {
                remove(unfinished)?;
            }
            return Err(SessionError::Target { path: target.path.clone(), source });
        }
        let file = OpenOptions::new().create(true).append(true).open(unfinished);
        let synced = file.and_then(|file| file.sync_all());
        synced.map_err(|source| io_error("write", unfinished, source))
    }

    /// Takes what one answer brings, from where the file ends.
    async fn take(
        &mut self,
        target: &Target,
        unfinished: &Path,
        check: &mut Check,
        deadline: Instant,
    ) -> Result<(), SessionError> {
        let url = format!("{}{}", self.targets_url, target.location);
        let opened = self.fetcher.open(&url, Span::from(check.found()), deadline).await?;
        let missing = || SessionError::Missing { path: target.path.clone() };
        let mut download = opened.ok_or_else(missing)?;
        // Not every server can resume; then the file begins anew.
        let restarts = download.from == 0;
        if restarts {
            *check = target.check();
        }
        let file = OpenOptions::new().create(true).append(true).open(unfinished);
        let mut file = file.map_err(|source| io_error("write", unfinished, source))?;
        if restarts {
            file.set_len(0).map_err(|source| io_error("write", unfinished, source))?;
        }
        while let Some(bytes) = download.next(deadline).await? {
            let refused = |source| SessionError::Target { path: target.path.clone(), source };
            check.update(&bytes).map_err(refused)?;
            file.write_all(&bytes).map_err(|source| io_error("write", unfinished, source))?;
        }
        Ok(())
    }
}

/// Names the file of a target: percent-encoded, so that none leaves its folder or hides in it. A name that
/// would be too long ends with the SHA-256 of the path, after a `%~` that no other name has.
pub fn file_name(path: &str) -> String {
    let encoded = pattern::encode(path);
    let name = match encoded.strip_prefix('.') {
        Some(rest) => format!("%2E{rest}"),
        None => encoded,
    };
    let most = MAX_NAME - ".".len() - ".part".len();
    if name.len() <= most {
        return name;
    }
    let digest = types::hex::encode(digest(&SHA256, path.as_bytes()).as_ref());
    let kept = &name[..most - "%~".len() - digest.len()];
    // No escape is cut in two: an end of another `%` would be no name that is read again.
    let cut = kept[kept.len() - 2..].find('%').map_or(kept.len(), |at| kept.len() - 2 + at);
    format!("{}%~{digest}", &kept[..cut])
}

/// Sends a file that is there through a check; `None` if there is none or it is too long.
fn replay(target: &Target, path: &Path) -> Result<Option<Check>, SessionError> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io_error("read", path, source)),
    };
    let mut check = target.check();
    let mut piece = vec![0; 64 << 10];
    loop {
        let read = file.read(&mut piece).map_err(|source| io_error("read", path, source))?;
        if read == 0 {
            return Ok(Some(check));
        }
        if check.update(&piece[..read]).is_err() {
            return Ok(None);
        }
    }
}

pub(super) fn resumable(error: &FetchError) -> bool {
    matches!(
        error,
        FetchError::Connect { .. }
            | FetchError::Stalled { .. }
            | FetchError::Exchange { .. }
            | FetchError::Elsewhere { .. }
    )
}

fn remove(path: &Path) -> Result<(), SessionError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(io_error("remove", path, error))
        }
        _ => Ok(()),
    }
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> SessionError {
    SessionError::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_file_of_its_own() {
        let long = ["a/".repeat(150), "a".repeat(300), "a".repeat(301), "é".repeat(2000)];
        let odd = ["..", ".", "a%2Fb", "a/b", "/a", "a//b", "a\0b", "-rf", "a\nb", ".a.part"];
        let all: Vec<String> = long.into_iter().chain(odd.map(str::to_owned)).collect();
        let names: std::collections::BTreeSet<String> = all.iter().map(|p| file_name(p)).collect();
        assert_eq!(names.len(), all.len());
        for name in names {
            assert!(name.len() <= MAX_NAME - 6 && !name.starts_with('.'), "{name}");
            let plain = |c: char| c.is_ascii_alphanumeric() || "_.-~%".contains(c);
            assert!(name.chars().all(plain), "{name}");
        }
    }
}
