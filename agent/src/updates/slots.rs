//! What the task reads of the partition and does to it.

use update::{
    channel::Sha256,
    slots::{Contents, Place, Program, Slot, fat::FatError},
};

use super::{Task, failure::UpdateError, partition::Partition, tell, trouble};
use crate::events::{Event, UpdateEvent};

impl Task {
    /// Says which programs were altered on the disk. The plan mends what can be mended.
    pub(super) fn tell_damage(&self) {
        let journal = &self.journal;
        let tried = journal.trial.as_ref().map(|trial| Place::Slot(trial.slot));
        for place in Place::ALL.into_iter().filter(|place| Some(*place) != tried) {
            let found = self.contents.at(place).filter(|found| !journal.has_failed(found.sha256));
            let Some(found) = found.filter(|found| journal.is_altered(found)) else { continue };
            let copies = |program: &Program| journal.good == Some(program.sha256);
            let is_there = Place::ALL.into_iter().filter_map(|at| self.contents.at(at)).any(copies);
            let then = match (found.release() == journal.release, is_there, place) {
                (true, true, Place::Fallback) => "is mended by its copy",
                (_, _, Place::Slot(_)) => "is not started; an update writes it anew",
                _ => "there is no other copy of it",
            };
            let runs = match self.runs.as_ref() == Some(found) && place == Place::Fallback {
                true => "; the node was started from it: restart it when no machine runs",
                false => "",
            };
            let reason = format!("{} was altered on the disk and {then}{runs}", place.path());
            eprintln!("{}", Event::Trouble { place: "update", reason });
        }
    }

    pub(super) fn mend(&mut self, from: Slot, sha256: Sha256) -> Result<(), UpdateError> {
        let Some(partition) = &self.partition else { return Ok(()) };
        let written = tokio::task::block_in_place(|| partition.mend(from, sha256))?;
        self.wrote(Place::Fallback, written)
    }

    pub(super) fn promote(&mut self, slot: Slot, sha256: Sha256) -> Result<(), UpdateError> {
        let Some(partition) = &self.partition else { return Ok(()) };
        if let Err(error) = tokio::task::block_in_place(|| partition.promote(slot, sha256)) {
            // Some of the names may have changed.
            self.look_again()?;
            return Err(error.into());
        }
        tell(UpdateEvent::Promoted { slot: slot.name() });
        self.failures = 0;
        self.contents.promote(slot);
        self.shelf.stock(&self.contents);
        Ok(())
    }

    pub(super) fn release(&mut self, slot: Slot) -> Result<(), UpdateError> {
        let Some(partition) = &self.partition else { return Ok(()) };
        tokio::task::block_in_place(|| partition.remove(slot))?;
        self.look_again()
    }

    /// Looks at what every place holds now.
    fn look_again(&mut self) -> Result<(), UpdateError> {
        self.failures = 0;
        self.contents = tokio::task::block_in_place(|| contents(self.partition.as_ref()))?;
        self.shelf.stock(&self.contents);
        Ok(())
    }

    /// The place where the running program is now.
    pub(super) fn lies(&self) -> Option<Place> {
        let runs = self.runs.as_ref()?.sha256;
        let from = self.partition.as_ref().and_then(|partition| partition.from);
        let places = [from, Some(Place::Fallback)].into_iter().flatten();
        places.into_iter().find(|place| self.contents.holds(*place, runs))
    }

    /// Looks at what a place holds now.
    pub(super) fn wrote(&mut self, place: Place, bytes: u64) -> Result<(), UpdateError> {
        self.view.written_bytes += bytes;
        self.failures = 0;
        let Some(partition) = &self.partition else { return Ok(()) };
        let seen = tokio::task::block_in_place(|| {
            Ok::<_, FatError>((partition.program(place)?, partition.shared()?))
        });
        let (program, shared) = seen?;
        self.contents.set(place, program);
        self.contents.shared = shared;
        self.shelf.stock(&self.contents);
        Ok(())
    }
}

/// Reads every place. One that is damaged counts as empty.
pub(super) fn contents(partition: Option<&Partition>) -> Result<Contents, UpdateError> {
    let mut contents = Contents::default();
    let Some(partition) = partition else { return Ok(contents) };
    for place in Place::ALL {
        let program: Result<Option<Program>, FatError> = partition.program(place);
        match program {
            Ok(program) => contents.set(place, program),
            Err(error @ (FatError::Damaged { .. } | FatError::Length { .. })) => {
                trouble(&error);
            }
            Err(error) => return Err(error.into()),
        }
    }
    contents.shared = partition.shared()?;
    Ok(contents)
}
