//! The repository: looked at by the TUF client, and fetched from straight into a slot.

use std::{fs, path::Path, sync::Arc};

use jiff::Timestamp;
use rustls::RootCertStore;
use types::updates::Updates;
use update::{
    channel::{Decision, Release},
    delta,
    shell::{
        self, Base, CheckError, Checked, Checker, Fetcher, SessionError, Sink, SinkError, Source,
        Streamed,
    },
    slots::{
        Place,
        fat::{FatError, Volume, Writing},
        plan::{Offer, Offered, Urgency},
    },
    target::Target,
};

use super::{
    Parts,
    partition::{Device, Partition},
    places::Places,
};
use crate::{
    events::Event,
    init::boot::chain,
    net::{Resolver, resolve::Names},
    time::nts::establish::Roots,
};

/// Folder in STATE for trusted metadata.
pub(super) const STORE: &str = "tuf";

/// Why a program was not fetched.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub(super) enum FetchFailure {
    #[error(transparent)]
    Fat(#[from] FatError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Sink(#[from] SinkError),
    #[error("the repository offers no program any more")]
    Gone,
}

/// A repository.
pub(super) struct Repository {
    checker: Checker,
    mirrors: Vec<Source>,
    roots: RootCertStore,
    resolver: Resolver,
    places: Arc<Places>,
}

/// What was written to a place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    /// Bytes.
    pub(super) bytes: u64,
    /// Bytes that were fetched for that.
    pub(super) fetched: u64,
}

impl Repository {
    pub(super) fn new(updates: &Updates, parts: &Parts) -> Self {
        let roots = match updates.authorities.as_deref().map(Roots::from_pem) {
            None => Roots::public(),
            Some(Ok(roots)) => roots,
            Some(Err(error)) => {
                eprintln!("{}", Event::Trouble { place: "update", reason: chain(&error) });
                Roots::public()
            }
        };
        let checker = Checker {
            store: Path::new(crate::service::STATE).join(STORE),
            root: updates.root.clone().into_bytes(),
            sources: Vec::new(),
            channel: updates.channel.clone(),
            node: parts.node.as_bytes().to_vec(),
            floor: None,
        };
        Self {
            checker,
            mirrors: updates.mirrors.iter().map(|url| Source::below(url)).collect(),
            roots: roots.store().clone(),
            resolver: parts.uplinks.resolver(),
            places: Arc::new(Places::new(parts.overlay.clone(), Path::new("/"))),
        }
    }

    /// Returns where mirrors are.
    pub(super) fn mirrors(&self) -> &[Source] {
        &self.mirrors
    }

    /// Looks at the repository, at the first of these places that has it, for a node that runs a release
    /// and goes below none of another.
    pub(super) async fn check(
        &self,
        sources: &[Source],
        (running, floor): (Release, Option<Release>),
        now: Timestamp,
    ) -> Result<Checked, CheckError> {
        let fetcher = || {
            let names = Arc::new(Names(self.resolver.clone()));
            let fetcher = Fetcher::new(None).with_roots(self.roots.clone());
            fetcher.with_resolver(names).with_elsewhere(self.places.clone())
        };
        let checker = Checker { sources: sources.to_vec(), floor, ..self.checker.clone() };
        checker.check(&fetcher, running, now).await
    }

    /// Fetches what is new in the offered program from these sources into a place of the partition, beside
    /// the program that runs.
    pub(super) async fn fetch(
        &self,
        checked: &mut Checked,
        sources: &[Source],
        partition: &Partition,
        (place, runs): (Place, Option<Place>),
    ) -> Result<Written, FetchFailure> {
        let offered = checked.program.clone().ok_or(FetchFailure::Gone)?;
        let shell::Offered { target, sha256, chunks } = offered;
        let list = match chunks {
            Some(chunks) => self.chunks(checked, &chunks).await.unwrap_or_default(),
            None => Vec::new(),
        };
        // One that cannot be read is of no use, and that is all.
        let running = runs.filter(|_| !list.is_empty());
        let running = running
            .and_then(|from| tokio::task::block_in_place(|| partition.bytes(from)).ok().flatten());
        let base = Base { list: &list, program: running.as_deref().unwrap_or_default() };
        let mut volume = tokio::task::block_in_place(|| partition.volume())?;
        let length = target.file.length;
        let writing = volume.begin(place.path(), length)?;
        let mut slot = IntoSlot { volume, writing };
        let bases: Vec<String> = sources.iter().map(|source| source.targets.clone()).collect();
        let streamed = checked.session.stream_over(&target, &bases, base, &mut slot).await?;
        let Streamed { fetched } = streamed?;
        let IntoSlot { mut volume, writing } = slot;
        tokio::task::block_in_place(|| volume.finish(writing, sha256))?;
        Ok(Written { bytes: length, fetched })
    }

    /// Gets the list of a program's chunks; `None` when it cannot be had, which costs bytes only.
    async fn chunks(&self, checked: &mut Checked, target: &Target) -> Option<Vec<u8>> {
        let folder = self.checker.store.join(shell::DOCUMENTS);
        let file = checked.session.get(target, &folder).await.ok()?;
        for entry in fs::read_dir(&folder).ok()?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.contains(delta::KIND) && entry.path() != file {
                // One that stays takes a little room.
                let _ = fs::remove_file(entry.path());
            }
        }
        fs::read(file).ok()
    }
}

/// Returns what a look at the repository says.
pub(super) fn offer(checked: &Checked) -> Offer {
    let program = |release, urgency| match &checked.program {
        Some(found) => Offer::Program(Offered { release, sha256: found.sha256, urgency }),
        None => Offer::Nothing,
    };
    match checked.decision {
        Decision::Update(release) => program(release, Urgency::Usual),
        Decision::Replace(release) => program(release, Urgency::Now),
        Decision::Stay | Decision::Stranded | Decision::Wait(..) => Offer::Nothing,
    }
}

/// A place that is being written.
struct IntoSlot {
    volume: Volume<Device>,
    writing: Writing,
}

impl Sink for IntoSlot {
    fn take(&mut self, bytes: &[u8]) -> Result<(), SinkError> {
        let appended = self.volume.append(&mut self.writing, bytes);
        appended.map_err(|error| SinkError(Box::new(error)))
    }

    fn restart(&mut self) {
        self.writing.restart();
    }
}
