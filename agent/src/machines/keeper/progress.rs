//! What init and running actions tell the keeper.

use tokio::task::AbortHandle;
use types::{
    ids::MachineId,
    node::{Bdf, DeviceState},
};

use super::{Entry, Keeper, actions::press, lost, trouble};
use crate::{
    assign::Recovered,
    events::Event,
    init::boot::chain,
    machines::{
        execute::{Progress, StartError, TakenBack},
        init::Notice,
        plan::{Failed, MAX_ATTEMPTS, Power, Process, Released, SHUTDOWN, Work},
        quarantine, sandbox,
    },
};

/// How often something is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempts {
    /// Once: it would end the same way.
    One,
    /// [`MAX_ATTEMPTS`] times.
    Several,
}

impl Keeper {
    pub(super) async fn handle_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Exited(machine, status, said) => {
                eprintln!("{}", Event::MachineExited { machine, status: status.to_string() });
                if let Some(entry) = self.machines.get_mut(&machine) {
                    if entry.seen.busy == Some(Work::Start) {
                        entry.task.take().inspect(AbortHandle::abort);
                    }
                    entry.seen.process = Process::Ended { status };
                    entry.seen.said = said;
                }
            }
            Notice::ShuttingDown(_) => {
                self.draining = true;
                let now = self.config.clock.now();
                let running = |entry: &Entry| matches!(entry.seen.process, Process::Running { .. });
                for (machine, entry) in self.machines.iter_mut().filter(|(_, e)| running(e)) {
                    entry.seen.pressed.get_or_insert(now);
                    entry.seen.pressed_last = Some(now);
                    press(*machine, SHUTDOWN);
                }
            }
            Notice::Lost(error) => lost(&error.to_string()),
        }
    }

    pub(super) fn handle_progress(&mut self, report: Progress) {
        match report {
            Progress::Placed(machine, placement, kept) => {
                if let Some(entry) = self.machines.get_mut(&machine)
                    && entry.seen.busy == Some(Work::Start)
                    && !entry.abandoned.is_cancelled()
                {
                    entry.record.placement = Some(*placement);
                    self.keep(machine);
                    // One whose process was killed meanwhile has nobody who listens.
                    let _ = kept.send(());
                }
            }
            Progress::Spawned(machine, pid) => {
                if let Some(entry) = self.machines.get_mut(&machine)
                    && entry.seen.busy == Some(Work::Start)
                {
                    entry.seen.process = Process::Running { pid };
                }
            }
            Progress::Answered(machine, pid, heard) => self.handle_answer(machine, pid, heard),
            Progress::Unanswered(machine, pid) => self.handle_silence(machine, pid),
            Progress::Attached(machine, id, result) => self.handle_attached(machine, &id, result),
            Progress::Running(machine, pid, took) => {
                let Some(entry) = self.machines.get_mut(&machine) else { return };
                if entry.seen.busy != Some(Work::Start) {
                    return;
                }
                entry.seen.busy = None;
                entry.seen.failures = 0;
                let now = self.config.clock.now();
                entry.record.note(now, "started");
                entry.record.meter.handle_started(now);
                entry.record.failed = Failed::No;
                entry.record.last_stop = String::new();
                let ms = took.as_millis();
                eprintln!("{}", Event::MachineStarted { machine, pid, ms });
                let facts = sandbox::facts(&self.config.tools.root.join("proc"), pid);
                eprintln!("{}", Event::MachineSandbox { machine, facts });
                self.keep(machine);
                self.plug_all(machine);
            }
            Progress::Told(machine, deadline, result) => {
                self.handle_told(machine, deadline, result);
            }
            Progress::Failed(machine, error) => self.handle_failed(machine, &error),
            Progress::Released(machine, results, waiting) => {
                self.handle_released(machine, results, &waiting);
            }
            Progress::Climbed(device) => self.devices.let_go(device),
            Progress::Recovered(results) => self.settle(results),
        }
    }

    fn handle_failed(&mut self, machine: MachineId, error: &StartError) {
        if let (StartError::Abandoned, Some(entry)) = (error, self.machines.get_mut(&machine)) {
            // Nothing failed: its end came, or its renter stopped it.
            entry.seen.busy = None;
            entry.record.note(self.config.clock.now(), format!("not started: {error}"));
            return self.keep(machine);
        }
        let attempts = if error.is_final() { Attempts::One } else { Attempts::Several };
        self.note_failure(machine, chain(error), attempts);
    }

    /// Notes that a machine could not be started, and stops it after so many attempts.
    pub(super) fn note_failure(&mut self, machine: MachineId, reason: String, attempts: Attempts) {
        let now = self.config.clock.now();
        eprintln!("{}", Event::MachineFailed { machine, reason: reason.clone() });
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.seen.busy = None;
        entry.seen.failures += 1;
        entry.seen.failed = now;
        entry.record.note(now, format!("not started: {reason}"));
        entry.record.last_stop = reason;
        entry.record.failed = Failed::Yes;
        if attempts == Attempts::One || entry.seen.failures >= MAX_ATTEMPTS {
            entry.record.power = Power::Off;
            entry.seen.failures = 0;
        }
        let running = matches!(entry.seen.process, Process::Running { .. });
        if running {
            entry.seen.given_up = Some(now);
        }
        self.keep(machine);
        if running {
            self.kill(machine, "not-started");
        }
    }

    fn handle_released(&mut self, machine: MachineId, results: Vec<TakenBack>, waiting: &[Bdf]) {
        self.settle(results);
        self.hold_drives(waiting);
        self.tell_waiting(waiting);
        let now = self.config.clock.now();
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.seen.busy = None;
        entry.record.released = Released::Yes;
        entry.record.note(now, "ended: devices and network taken back");
        let late_s = now.since(entry.record.end());
        eprintln!("{}", Event::MachineEnded { machine, late_s });
        self.keep(machine);
    }

    /// Offers what answers again if it was to be offered, and quarantines what does not.
    fn settle(&mut self, results: Vec<TakenBack>) {
        let root = &self.config.tools.root;
        for TakenBack { device: address, result } in results {
            let (state, noted) = match result {
                Ok(Recovered { rung, took }) => {
                    let ms = took.as_millis();
                    eprintln!("{}", Event::DeviceReset { address, rung, ms });
                    let device = self.devices.get(address);
                    let cleared = device.map_or(Ok(()), |device| self.routed.handle_reset(device));
                    let noted = quarantine::forget(root, address).and(cleared);
                    (self.devices.verdict(address), noted)
                }
                Err(error) => {
                    let reason = chain(&error);
                    eprintln!("{}", Event::DeviceQuarantined { address, reason: reason.clone() });
                    let since = self.config.clock.now();
                    let noted = quarantine::remember(root, address, since, &reason);
                    (DeviceState::Quarantined { reason, since: Some(since) }, noted)
                }
            };
            if let Err(error) = noted {
                trouble("quarantine", &error);
            }
            self.devices.set(address, state);
        }
    }
}
