//! What a node gives to other nodes: the metadata and documents that it trusts, and the programs in its
//! slots. Whoever asks verifies them; a bounded number is served at a time, at a bounded rate.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};

use lease::problem::Kind;
use overlay::OverlayStream;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::Semaphore,
    time::{Instant, sleep_until, timeout},
};
use types::forward::{Problem, StreamAnswer};
use update::{
    channel::Sha256,
    disk::medium,
    shell::{Span, file_name},
    slots::{Contents, Place, Program},
};

use super::{fetch::STORE, partition::Partition};
use crate::tasks::frames;

/// Nodes that are served at a time: a program of each is in memory meanwhile.
const PLACES: usize = 2;
/// Bytes a second for each: a program in a few seconds, and little of a server's uplink.
const RATE: u64 = 8 << 20;
/// Bytes that are sent at once.
const PIECE: usize = 64 << 10;
/// Longest time in which whoever asked takes nothing.
const STALL: Duration = Duration::from_secs(30);
/// Longest document that is given, in bytes: what a store may hold at most.
const DOCUMENT_LIMIT: u64 = 16 << 20;

/// What the node can give.
#[derive(Debug)]
pub struct Shelf {
    state: PathBuf,
    partition: OnceLock<Partition>,
    programs: Mutex<Vec<(Place, Sha256)>>,
    places: Semaphore,
}

/// A file of the repository.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Asked {
    /// Metadata of a role, and its version where the name says one.
    Metadata { file: String, version: Option<u64> },
    /// A target, by its digest.
    Target { path: String, sha256: Sha256 },
}

/// Something that can be given.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Document(Vec<u8>),
    Program(Place),
}

impl Shelf {
    /// Makes a shelf of the folder `state`.
    pub(crate) fn new(state: &Path) -> Self {
        let (programs, places) = (Mutex::default(), Semaphore::new(PLACES));
        Self { state: state.to_owned(), partition: OnceLock::new(), programs, places }
    }

    /// Gives the programs on `partition`, too.
    pub(super) fn open(&self, partition: Partition) {
        // There is one, and whoever finds it again finds the same.
        self.partition.get_or_init(|| partition);
    }

    /// Takes note of what the slots hold.
    pub(super) fn stock(&self, contents: &Contents) {
        let held = |place| Some((place, contents.at(place)?.sha256));
        let held = Place::ALL.into_iter().filter_map(held).collect();
        *self.programs.lock().unwrap_or_else(PoisonError::into_inner) = held;
    }

    /// Answers a request for bytes of a file.
    pub(crate) async fn serve(&self, mut stream: OverlayStream, path: &str, span: Span) {
        // Whoever hangs up does not want to know.
        let _ = self.answer(&mut stream, path, span).await;
    }

    async fn answer(
        &self,
        stream: &mut (impl AsyncWrite + Unpin),
        path: &str,
        span: Span,
    ) -> io::Result<()> {
        let refuse = |refusal: Problem| StreamAnswer::Refused(refusal);
        let Ok(_place) = self.places.try_acquire() else {
            let busy = Kind::TooManyRequests.because("other nodes are served; try another one");
            frames::write(stream, &refuse(busy)).await?;
            return stream.shutdown().await;
        };
        let read = tokio::task::block_in_place(|| self.read(path));
        let bytes = match read {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                let none = Kind::NotFound.because(format!("{path} is not on this node"));
                frames::write(stream, &refuse(none)).await?;
                return stream.shutdown().await;
            }
            Err(error) => {
                frames::write(stream, &refuse(Kind::Internal.because(error))).await?;
                return stream.shutdown().await;
            }
        };
        let end = span.to.map_or(bytes.len(), |to| index(to).min(bytes.len()));
        let wanted = bytes.get(index(span.from)..end).unwrap_or_default();
        frames::write(stream, &StreamAnswer::Open { length: Some(wanted.len() as u64) }).await?;
        send(stream, wanted).await?;
        stream.shutdown().await
    }

    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        match self.find(path)? {
            None => Ok(None),
            Some(Found::Document(bytes)) => Ok(Some(bytes)),
            Some(Found::Program(place)) => {
                let Some(partition) = self.partition.get() else { return Ok(None) };
                partition.bytes(place).map_err(io::Error::other)
            }
        }
    }

    fn find(&self, path: &str) -> io::Result<Option<Found>> {
        let store = self.state.join(STORE);
        match parse(path) {
            None => Ok(None),
            Some(Asked::Metadata { file, version }) => {
                let bytes = document(&store.join(file))?;
                let right = |bytes: &Vec<u8>| version.is_none() || version_of(bytes) == version;
                Ok(bytes.filter(right).map(Found::Document))
            }
            Some(Asked::Target { path, sha256 }) => {
                let programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if let Some((place, _)) = programs.iter().find(|(_, held)| *held == sha256) {
                    return Ok(Some(Found::Program(*place)));
                }
                let documents = store.join(update::shell::DOCUMENTS);
                let bytes = document(&documents.join(file_name(&path)))?;
                let right = |bytes: &Vec<u8>| Program::of(bytes).sha256 == sha256;
                Ok(bytes.filter(right).map(Found::Document))
            }
        }
    }
}

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap_or(usize::MAX)
}

/// Sends bytes at [`RATE`].
async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    let begin = Instant::now();
    let mut sent = 0_u64;
    for piece in bytes.chunks(PIECE) {
        timeout(STALL, stream.write_all(piece)).await??;
        sent += piece.len() as u64;
        sleep_until(begin + Duration::from_micros(sent * 1_000_000 / RATE)).await;
    }
    Ok(())
}

/// Reads what a path in a repository asks for. Only plain paths are understood: no other ones are in a
/// repository that the release tool makes.
fn parse(path: &str) -> Option<Asked> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-%".contains(&byte);
    if path.len() > 512 || !path.bytes().all(plain) || path.split('/').any(|part| part == "..") {
        return None;
    }
    if let Some(name) = path.strip_prefix("metadata/") {
        if name.contains('/') || !name.ends_with(".json") || name.starts_with('.') {
            return None;
        }
        let versioned = name.split_once('.').and_then(|(version, rest)| {
            let version = version.parse().ok()?;
            Some(Asked::Metadata { file: rest.to_owned(), version: Some(version) })
        });
        let newest = Asked::Metadata { file: name.to_owned(), version: None };
        return Some(versioned.unwrap_or(newest));
    }
    let (folder, name) = path.strip_prefix("targets/")?.rsplit_once('/')?;
    let (digest, name) = name.split_once('.')?;
    let sha256 = types::hex::decode(digest).ok().map(Sha256)?;
    Some(Asked::Target { path: format!("{folder}/{name}"), sha256 })
}

fn document(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() && found.len() <= DOCUMENT_LIMIT => fs::read(path).map(Some),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the version that metadata says it has.
fn version_of(bytes: &[u8]) -> Option<u64> {
    let document: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    document.get("signed")?.get("version")?.as_u64()
}

impl Partition {
    /// Returns a program's bytes.
    pub(super) fn bytes(
        &self,
        place: Place,
    ) -> Result<Option<Vec<u8>>, update::slots::fat::FatError> {
        self.volume()?.read(place.path(), medium::PROGRAM_LIMIT)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn shelf() -> (tempfile::TempDir, Shelf) {
        let state = tempfile::tempdir().unwrap();
        let documents = state.path().join(STORE).join(update::shell::DOCUMENTS);
        fs::create_dir_all(&documents).unwrap();
        fs::write(documents.join("stable%2Fchannel.json"), b"{}").unwrap();
        fs::write(state.path().join("node.key"), [7; 32]).unwrap();
        let metadata = br#"{"signed":{"version":3}}"#;
        for file in ["timestamp.json", "targets.json"] {
            fs::write(state.path().join(STORE).join(file), metadata).unwrap();
        }
        let shelf = Shelf::new(state.path());
        (state, shelf)
    }

    #[test]
    fn metadata_is_given_by_its_version_and_targets_by_their_digest() {
        let (_state, shelf) = shelf();
        let found = |path: &str| shelf.find(path).unwrap().is_some();
        assert!(found("metadata/timestamp.json") && found("metadata/3.targets.json"));
        assert!(!found("metadata/4.targets.json") && !found("metadata/1.root.json"));
        let digest = types::hex::encode(&Program::of(b"{}").sha256.0);
        assert!(found(&format!("targets/stable/{digest}.channel.json")));
        let other = types::hex::encode(&[1; 32]);
        assert!(!found(&format!("targets/stable/{other}.channel.json")));
        let mut contents = Contents::default();
        let program = Program { sha256: Sha256([1; 32]), os_release: String::new() };
        contents.set(Place::Fallback, Some(program));
        shelf.stock(&contents);
        let path = format!("targets/stable/1.0.0/{other}.holdfast.efi");
        assert_eq!(shelf.find(&path).unwrap(), Some(Found::Program(Place::Fallback)));
    }

    #[test]
    fn nothing_else_of_the_state_is_given() {
        let (_state, shelf) = shelf();
        for path in [
            "metadata/../node.key",
            "metadata/../../state/node.key",
            "node.key",
            "metadata/.lock",
            "metadata/",
            "targets/x",
            "metadata/documents/stable%2Fchannel.json",
            "metadata//state/node.key.json",
            "targets/../0000000000000000000000000000000000000000000000000000000000000000.node.key",
        ] {
            assert_eq!(shelf.find(path).unwrap(), None, "{path}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_part_is_given_and_no_more_than_two_are_served() {
        let (_state, shelf) = shelf();
        let (mut near, mut far) = tokio::io::duplex(1 << 16);
        let span = Span { from: 2, to: Some(8) };
        shelf.answer(&mut near, "metadata/timestamp.json", span).await.unwrap();
        let answer: StreamAnswer = frames::read(&mut far).await.unwrap();
        assert_eq!(answer, StreamAnswer::Open { length: Some(6) });
        let mut bytes = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut far, &mut bytes).await.unwrap();
        assert_eq!(bytes, b"signed");
        let _held = shelf.places.acquire_many(2).await.unwrap();
        let (mut near, mut far) = tokio::io::duplex(1 << 16);
        shelf.answer(&mut near, "metadata/timestamp.json", Span::default()).await.unwrap();
        let answer: StreamAnswer = frames::read(&mut far).await.unwrap();
        assert!(matches!(answer, StreamAnswer::Refused(problem) if problem.status == 429));
    }

    #[tokio::test]
    async fn nobody_is_served_faster_than_the_rate() {
        let begin = Instant::now();
        let (mut near, mut far) = tokio::io::duplex(1 << 20);
        let reader =
            tokio::spawn(async move { tokio::io::copy(&mut far, &mut tokio::io::sink()).await });
        send(&mut near, &vec![0; 2 << 20]).await.unwrap();
        drop(near);
        assert_eq!(reader.await.unwrap().unwrap(), 2 << 20);
        let wanted = Duration::from_millis(250);
        assert!(begin.elapsed() >= wanted, "{:?}", begin.elapsed());
    }
}
