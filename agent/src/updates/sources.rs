//! When and where the task looks for releases, and how it fetches one.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use update::{
    shell::{CheckError, Checked, Source},
    slots::{Place, Slot},
};

use super::{
    PAUSE, Task,
    failure::{UpdateError, with_advice},
    fetch::{Repository, Written},
    places, tell,
};
use crate::{
    events::{Event, UpdateEvent},
    floors,
};

impl Task {
    /// Looks at the repository when it is time to: now and then, and when a volume comes.
    pub(super) async fn check_when_due(&mut self) {
        if tokio::task::block_in_place(|| self.volumes.look(Path::new("/"))) {
            self.next_check = Instant::now();
        }
        self.view.volumes = self.volumes.names().to_vec();
        let every = match (&self.repository, &self.parts.updates) {
            (Some(_), Some(updates)) => Duration::from_secs(updates.check_s),
            _ => return,
        };
        let from = self.partition.as_ref().and_then(|partition| partition.from);
        let sources = self.sources();
        if from.is_none() || sources.is_empty() || Instant::now() < self.next_check {
            return;
        }
        // It holds the store.
        self.checked = None;
        self.view.checks += 1;
        match self.look(&sources).await {
            Ok(checked) => {
                self.view.trouble = self.resting().unwrap_or_default().to_owned();
                self.keep_floors(&checked);
                self.checked = Some(checked);
                self.next_check = Instant::now() + every;
            }
            Err(error) => {
                self.view.failed_checks += 1;
                let reason = with_advice(&error);
                if reason != self.view.trouble {
                    eprintln!("{}", Event::Trouble { place: "update", reason: reason.clone() });
                }
                self.view.trouble = reason;
                self.next_check = Instant::now() + every.min(PAUSE);
            }
        }
    }

    /// Raises the floors by what fresh metadata says, and tells of a release that is below them.
    fn keep_floors(&mut self, checked: &Checked) {
        if let Some(release) = checked.too_old {
            let floor = self.parts.floors.floors().release.map_or(String::new(), String::from);
            let reason = format!(
                "the channel has release {release}, and this server does not go below {floor}, which was \
                 the channel's minimum before"
            );
            if reason != self.told_old {
                eprintln!("{}", Event::Trouble { place: "update", reason: reason.clone() });
                self.told_old.clone_from(&reason);
            }
            self.view.trouble = reason;
        }
        // What is on trial may be left again.
        let running = self.running.filter(|_| self.journal.trial.is_none());
        let to = floors::risen(self.parts.clock.now(), checked.minimum, running);
        tokio::task::block_in_place(|| self.parts.floors.raise(to));
    }

    /// Where releases may come from now: mirrors, other nodes when no mirror answers, volumes.
    fn sources(&self) -> Vec<Source> {
        let Some(repository) = &self.repository else { return Vec::new() };
        let mut sources = Vec::new();
        if self.parts.uplinks.status().borrow().is_online() {
            sources.extend_from_slice(repository.mirrors());
            sources.extend(places::nodes(&self.parts.overlay.members(), self.view.checks));
        }
        sources.extend(self.volumes.sources());
        sources
    }

    /// Reads what volumes know first, then what the network knows: neither keeps the other's newer word
    /// from the node.
    async fn look(&self, sources: &[Source]) -> Result<Checked, CheckError> {
        let Some(repository) = &self.repository else { return Err(CheckError::NoSource) };
        let volumes = self.volumes.sources();
        if !volumes.is_empty() && sources.len() > volumes.len() {
            // What is wrong with it shows when the network fails too.
            drop(self.look_at(repository, &volumes).await);
        }
        self.look_at(repository, sources).await
    }

    async fn look_at(
        &self,
        repository: &Repository,
        sources: &[Source],
    ) -> Result<Checked, CheckError> {
        let Some(running) = self.running else { return Err(CheckError::NoSource) };
        let seconds = i64::try_from(self.parts.clock.now().0).unwrap_or(i64::MAX);
        let now = Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX);
        let floor = self.parts.floors.floors().release;
        repository.check(sources, (running, floor), now).await
    }

    /// Writes the offered release to a slot: from a medium, from volumes, from the network.
    pub(super) async fn fetch(&mut self, slot: Slot) -> Result<(), UpdateError> {
        let begin = Instant::now();
        let place = Place::Slot(slot);
        let runs = self.lies();
        let Some(partition) = &self.partition else { return Ok(()) };
        let written = if let Some(medium) = &self.medium {
            let bytes = tokio::task::block_in_place(|| medium.write(partition, place))?;
            Written { bytes, fetched: 0 }
        } else {
            let mut sources = self.sources();
            // What lies here comes first.
            let near = self.volumes.names().len().min(sources.len());
            sources.rotate_right(near);
            let (Some(checked), Some(repository)) = (&mut self.checked, &self.repository) else {
                return Ok(());
            };
            repository.fetch(checked, &sources, partition, (place, runs)).await?
        };
        let Written { bytes, fetched } = written;
        let ms = begin.elapsed().as_millis();
        tell(UpdateEvent::Written { slot: slot.name(), bytes, ms, fetched });
        self.view.fetched_bytes += fetched;
        self.wrote(place, bytes)
    }
}
