//! Signs of life: the agent's own, for which init waits, and those of machines' processes.

use std::time::{Duration, Instant};

use types::ids::MachineId;

use super::{Entry, Keeper, trouble};
use crate::{
    events::Event,
    machines::{
        execute::{Heard, Progress},
        plan::Process,
        vmm::{self, VmmError},
    },
    spawn::Due,
};

/// How often init is told that the agent is at work and when machines end: a renewal must be there before
/// init thinks that a machine is late ([`crate::init::ends::GRACE`]).
pub(super) const TELL: Duration = Duration::from_secs(1);

/// How often processes of machines are asked whether they are there.
pub(super) const ASK: Duration = Duration::from_secs(5);

/// A process that answered nothing for this long is silent: three questions.
const SILENT_AFTER: Duration = Duration::from_secs(15);

/// Whether a machine's process answers. Pure.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Voice {
    asked: bool,
    /// When it answered last, or should have answered first.
    heard: Option<Instant>,
    silent: bool,
}

/// How often it is told that more requests failed, at most.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// What a machine's disks are kept on. Pure.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Storage {
    failed: u64,
    told: Option<Instant>,
}

impl Storage {
    /// Notes that so many requests failed by now; returns the number when it is to be told.
    fn handle_count(&mut self, failed: u64, now: Instant) -> Option<u64> {
        // A disk that was detached takes its count along.
        self.failed = self.failed.min(failed);
        let lately = self.told.is_some_and(|told| now - told < TOLD_EVERY);
        if failed == self.failed || lately {
            return None;
        }
        (self.failed, self.told) = (failed, Some(now));
        Some(failed)
    }
}

/// What is new about a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    FellSilent(Duration),
    Answers,
}

impl Voice {
    /// Whether the process is silent.
    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    fn handle_answer(&mut self, now: Instant) -> Option<Change> {
        (self.asked, self.heard) = (false, Some(now));
        std::mem::take(&mut self.silent).then_some(Change::Answers)
    }

    fn handle_silence(&mut self, now: Instant) -> Option<Change> {
        self.asked = false;
        let silent = now - *self.heard.get_or_insert(now);
        if self.silent || silent < SILENT_AFTER {
            return None;
        }
        self.silent = true;
        Some(Change::FellSilent(silent))
    }
}

impl Keeper {
    /// Tells init that the agent is at work, and when machines have to end.
    pub(super) fn give_sign(&self) {
        let now = self.config.clock.now();
        let due = |(machine, entry): (&MachineId, &Entry)| {
            let record = &entry.record;
            let left_s = if record.is_over(now) { 0 } else { record.end().since(now) };
            let runs = matches!(entry.seen.process, Process::Running { .. });
            runs.then_some(Due { machine: *machine, left_s })
        };
        let ends = self.machines.iter().filter_map(due).collect();
        if let Err(error) = self.config.tools.init.alive(ends) {
            trouble("init", &error);
        }
    }

    /// Asks every process that runs a machine whether it is there; the answers come as progress.
    pub(super) fn ask_machines(&mut self) {
        for (machine, entry) in &mut self.machines {
            let Process::Running { pid } = entry.seen.process else { continue };
            if entry.seen.busy.is_some() || entry.voice.asked {
                continue;
            }
            entry.voice.asked = true;
            let (machine, progress) = (*machine, self.progress.clone());
            tokio::spawn(async move {
                let report = match vmm::counters(machine).await {
                    Err(
                        VmmError::Connect { .. }
                        | VmmError::Http { .. }
                        | VmmError::Late
                        | VmmError::Silent,
                    ) => Progress::Unanswered(machine, pid),
                    // Whatever it says, it says something.
                    Err(VmmError::Status { .. } | VmmError::Body { .. }) => {
                        Progress::Answered(machine, pid, Heard::default())
                    }
                    Ok(counted) => {
                        let failed = counted.devices.iter().map(|device| device.media_errors);
                        let failed = Some(failed.sum());
                        let state = vmm::state(machine).await.ok();
                        let clock_ahead_s = state.map(|state| state.clock_ahead_s);
                        Progress::Answered(machine, pid, Heard { failed, clock_ahead_s })
                    }
                };
                // The keeper outlives its tasks; when it is gone, so is the agent.
                let _ = progress.send(report).await;
            });
        }
    }

    pub(super) fn handle_answer(&mut self, machine: MachineId, process: i32, heard: Heard) {
        if let Some(failed) = heard.failed {
            self.note_storage(machine, process, failed);
        }
        if let Some(ahead_s) = heard.clock_ahead_s {
            self.note_clock(machine, process, ahead_s);
        }
        let change = |voice: &mut Voice| voice.handle_answer(Instant::now());
        self.note_voice(machine, process, change);
    }

    pub(super) fn handle_silence(&mut self, machine: MachineId, process: i32) {
        let change = |voice: &mut Voice| voice.handle_silence(Instant::now());
        self.note_voice(machine, process, change);
    }

    /// Notes what is new about a machine's disks, if that process still runs it.
    fn note_storage(&mut self, machine: MachineId, process: i32, failed: u64) {
        let now = self.config.clock.now();
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        if entry.seen.process != (Process::Running { pid: process }) {
            return;
        }
        let Some(failed) = entry.storage.handle_count(failed, Instant::now()) else { return };
        eprintln!("{}", Event::MachineStorage { machine, failed });
        let note = format!("the server's storage failed {failed} requests of its disks");
        entry.record.note(now, note);
        self.keep(machine);
    }

    /// Keeps what a guest set its clock to, if that process still runs it.
    fn note_clock(&mut self, machine: MachineId, process: i32, ahead_s: i64) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        let runs = entry.seen.process == (Process::Running { pid: process });
        if !runs || entry.record.clock_ahead_s == ahead_s {
            return;
        }
        entry.record.clock_ahead_s = ahead_s;
        self.keep(machine);
    }

    /// Notes what is new about the voice of a machine, if that process still runs it.
    fn note_voice(
        &mut self,
        machine: MachineId,
        process: i32,
        change: impl FnOnce(&mut Voice) -> Option<Change>,
    ) {
        let now = self.config.clock.now();
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        if entry.seen.process != (Process::Running { pid: process }) {
            return;
        }
        match change(&mut entry.voice) {
            None => return,
            Some(Change::FellSilent(silent)) => {
                let silent_s = silent.as_secs();
                eprintln!("{}", Event::MachineSilent { machine, silent_s });
                entry
                    .record
                    .note(now, format!("its process has answered nothing for {silent_s} s"));
            }
            Some(Change::Answers) => {
                eprintln!("{}", Event::MachineAnswers { machine });
                entry.record.note(now, "its process answers again");
            }
        }
        self.keep(machine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_storage_is_told_now_and_then() {
        let now = Instant::now();
        let mut storage = Storage::default();
        let mut count =
            |failed, seconds| storage.handle_count(failed, now + Duration::from_secs(seconds));
        assert_eq!(count(0, 0), None);
        assert_eq!([count(2, 5), count(3, 10), count(9, 60)], [Some(2), None, None]);
        assert_eq!([count(9, 65), count(9, 900)], [Some(9), None]);
        // Of another disk, after the first was detached.
        assert_eq!([count(0, 950), count(1, 990)], [None, Some(1)]);
    }

    #[test]
    fn a_process_that_answers_nothing_is_told_once_and_so_is_its_return() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let mut voice = Voice::default();
        assert_eq!(voice.handle_answer(now), None);
        assert_eq!((voice.handle_silence(after(10)), voice.is_silent()), (None, false));
        let silent = Some(Change::FellSilent(SILENT_AFTER));
        assert_eq!((voice.handle_silence(after(15)), voice.is_silent()), (silent, true));
        assert_eq!(voice.handle_silence(after(20)), None);
        assert_eq!(voice.handle_answer(after(25)), Some(Change::Answers));
        assert_eq!((voice.handle_answer(after(30)), voice.is_silent()), (None, false));
        // One that never answered has as long, from the first question on.
        let mut voice = Voice::default();
        assert_eq!((voice.handle_silence(now), voice.handle_silence(after(14))), (None, None));
        assert_eq!(voice.handle_silence(after(15)), silent);
    }
}
