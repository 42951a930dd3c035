//! The repository: looked at by the TUF client, and fetched from straight into a slot.

use std::{path::Path, sync::Arc};

use jiff::Timestamp;
use rustls::RootCertStore;
use types::updates::Updates;
use update::{
    channel::{Decision, Release},
    shell::{CheckError, Checked, Checker, Fetcher, SessionError, Sink, SinkError, Source},
    slots::{
        Place,
        fat::{FatError, Volume, Writing},
        plan::{Offer, Offered, Urgency},
    },
};

use super::{
    Parts,
    partition::{Device, Partition},
};
use crate::{
    events::Event,
    init::boot::chain,
    net::{Resolver, resolve::Names},
    time::nts::establish::Roots,
};

/// Folder in STATE for trusted metadata.
const STORE: &str = "tuf";

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
    roots: RootCertStore,
    resolver: Resolver,
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
            sources: updates.mirrors.iter().map(|url| Source::below(url)).collect(),
            channel: updates.channel.clone(),
            node: parts.node.as_bytes().to_vec(),
        };
        Self { checker, roots: roots.store().clone(), resolver: parts.uplinks.resolver() }
    }

    /// Looks at the repository.
    pub(super) async fn check(
        &self,
        running: Release,
        now: Timestamp,
    ) -> Result<Checked, CheckError> {
        let fetcher = || {
            let names = Arc::new(Names(self.resolver.clone()));
            Fetcher::new(None).with_roots(self.roots.clone()).with_resolver(names)
        };
        self.checker.check(&fetcher, running, now).await
    }

    /// Fetches the offered program into a place; returns its length.
    pub(super) async fn fetch(
        &self,
        checked: &mut Checked,
        partition: &Partition,
        place: Place,
    ) -> Result<u64, FetchFailure> {
        let (target, sha256) = checked.program.clone().ok_or(FetchFailure::Gone)?;
        let mut volume = tokio::task::block_in_place(|| partition.volume())?;
        let length = target.file.length;
        let writing = volume.begin(place.path(), length)?;
        let mut slot = IntoSlot { volume, writing };
        let bases: Vec<String> =
            self.checker.sources.iter().map(|source| source.targets.clone()).collect();
        checked.session.stream(&target, &bases, &mut slot).await??;
        let IntoSlot { mut volume, writing } = slot;
        tokio::task::block_in_place(|| volume.finish(writing, sha256))?;
        Ok(length)
    }
}

/// Returns what a look at the repository says.
pub(super) fn offer(checked: &Checked) -> Offer {
    let program = |release, urgency| match &checked.program {
        Some((_, sha256)) => Offer::Program(Offered { release, sha256: *sha256, urgency }),
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
