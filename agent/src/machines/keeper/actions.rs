//! What the plan wants done, done or set going.

use std::io;

use tokio_util::sync::CancellationToken;
use types::{ids::MachineId, node::DeviceState, units::UnixSeconds};

use super::{
    Entry, Keeper, deadlines,
    liveness::{Storage, Voice},
    progress::Attempts,
    trouble,
};
use crate::{
    events::Event,
    init::boot::chain,
    machines::{
        disk, execute, last_console,
        plan::{
            self, Action, Failed, Node, Policy, Power, Process, Record, Released,
            SOURCES_TO_DESTROY, Seen, TimeTrust, Work,
        },
        recovery, vmm,
    },
    spawn::{Ending, OUT_OF_MEMORY},
};

impl Keeper {
    /// Plans for every machine and carries out what is due, until nothing is.
    pub(super) async fn act(&mut self) {
        // Before the time: sources that agree a moment later confirm another one.
        let confirmed = self.config.clock.status().borrow().sources >= SOURCES_TO_DESTROY;
        self.keep_standing();
        let now = self.config.clock.now();
        self.forget_pages();
        self.follow_calendar(now);
        // First, so that no machine is forgotten before its last receipt was made.
        self.close_accounts(now);
        let policy = Policy {
            grace_s: self.config.spec.machines.grace_s,
            retain_s: self.config.spec.machines.retain_s,
            time: if confirmed { TimeTrust::Confirmed } else { TimeTrust::Alone },
            node: if self.draining { Node::GoesDown } else { Node::Stays },
        };
        let due: Vec<_> = self
            .machines
            .iter()
            .filter_map(|(id, entry)| {
                Some((*id, plan::plan(now, &entry.record, &entry.seen, policy)?))
            })
            .collect();
        for (machine, action) in due {
            self.execute(now, machine, action);
        }
        // After a machine whose lease goes on has its own again.
        self.erase_drives();
        self.tell_deadlines();
    }

    fn execute(&mut self, now: UnixSeconds, machine: MachineId, action: Action) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        match action {
            Action::Start | Action::Reclaim if self.draining => {}
            Action::Reclaim => self.reclaim(now, machine),
            Action::Start => {
                // What it fetches must be known as needed before.
                self.make_room();
                self.keep_memory(machine);
                if let Err(error) = self.note_routes(machine) {
                    let reason = format!("what sets routes is not noted: {}", chain(&error));
                    return self.note_failure(machine, reason, Attempts::Several);
                }
                let Some(entry) = self.machines.get_mut(&machine) else { return };
                (entry.voice, entry.storage) = (Voice::default(), Storage::default());
                entry.seen = Seen {
                    busy: Some(Work::Start),
                    failures: entry.seen.failures,
                    warned: entry.seen.warned,
                    ..Seen::default()
                };
                let (tools, record) = (self.config.tools.clone(), entry.record.clone());
                let deadline = deadlines::of(&self.config, &record);
                entry.abandoned = CancellationToken::new();
                let (abandoned, progress) = (entry.abandoned.clone(), self.progress.clone());
                let start = execute::start(tools, record, (deadline, abandoned), progress);
                entry.task = Some(tokio::spawn(start).abort_handle());
            }
            // Its task tells when it has; what it does meanwhile is this machine's own work.
            Action::Abandon => entry.abandoned.cancel(),
            Action::Fail { status } => {
                entry.seen.process = Process::Absent;
                let reason = describe_ending(status, &std::mem::take(&mut entry.seen.said));
                self.note_failure(machine, reason, Attempts::Several);
            }
            Action::Settle { status, power } => self.note_end(now, machine, (status, power)),
            Action::Warn { left_s } => {
                entry.seen.warned = Some(entry.record.end());
                eprintln!("{}", Event::MachineWarned { machine, left_s });
            }
            Action::Press { because } => {
                entry.seen.pressed.get_or_insert(now);
                entry.seen.pressed_last = Some(now);
                press(machine, because);
            }
            Action::Kill { because } => {
                entry.seen.killed = Some(now);
                self.kill(machine, because);
            }
            // What is being plugged may be on the ladder still, and must be nobody else's yet. It tells when it ends.
            Action::Release if !entry.plugging.is_empty() => {
                entry.plugging.values().for_each(CancellationToken::cancel);
            }
            Action::Release => self.release(machine),
            Action::Destroy { because } => self.destroy(machine, because),
        }
    }

    /// Notes how a machine ended, and what becomes of it.
    fn note_end(&mut self, now: UnixSeconds, machine: MachineId, (status, power): (Ending, Power)) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.seen.busy = None;
        entry.seen.process = Process::Absent;
        entry.seen.pressed = None;
        entry.seen.pressed_last = None;
        entry.seen.killed = None;
        entry.seen.given_up = None;
        let stays_on = self.draining || entry.record.power != Power::On;
        if !stays_on {
            entry.record.power = power;
        }
        let last = now.min(entry.record.end());
        entry.record.meter.handle_stopped(last);
        let ending = describe_ending(status, &std::mem::take(&mut entry.seen.said));
        entry.record.note(now, format!("stopped: {ending}"));
        if !explained(&entry.record, status) {
            entry.record.last_stop = ending;
        }
        if is_failure(status) {
            entry.record.failed = Failed::Yes;
        }
        self.keep(machine);
    }

    /// Gives back the huge pages of machines whose processes are gone.
    fn forget_pages(&self) {
        let has = |entry: &Entry| {
            entry.seen.busy == Some(Work::Start)
                || matches!(entry.seen.process, Process::Running { .. })
        };
        self.config.tools.pages.keep_only(|machine| self.machines.get(&machine).is_some_and(has));
    }

    pub(super) fn kill(&self, machine: MachineId, because: &'static str) {
        eprintln!("{}", Event::MachineForced { machine, because });
        if let Err(error) = self.config.tools.init.kill(machine) {
            trouble("init", &error);
        }
    }

    /// Notes which devices of a machine set routes in the switches between GPUs, before it has them.
    fn note_routes(&mut self, machine: MachineId) -> io::Result<()> {
        let Some(entry) = self.machines.get(&machine) else { return Ok(()) };
        self.routed.note(self.devices.list(), &entry.record.lease.shape.devices)
    }

    fn release(&mut self, machine: MachineId) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.seen.busy = Some(Work::Release);
        let wanted = &entry.record.lease.shape.devices;
        let devices: Vec<_> = wanted
            .iter()
            .filter_map(|address| Some((*address, self.devices.get(*address)?.vendor)))
            .collect();
        for (address, _) in &devices {
            self.devices.set(*address, DeviceState::Resetting);
        }
        let erasing = self.erasing(machine);
        let (tools, progress) = (self.config.tools.clone(), self.progress.clone());
        tokio::spawn(recovery::release(tools, machine, (devices, erasing), progress));
    }

    /// Its lease ended by a clock that was wrong, and goes on: it gets again what it had, if nobody else has it.
    fn reclaim(&mut self, now: UnixSeconds, machine: MachineId) {
        let Some(entry) = self.machines.get(&machine) else { return };
        let mut record = entry.record.clone();
        let shape = record.lease.shape.clone();
        if let Err(error) = self.check_room(&record.lease) {
            let reason = format!("its lease goes on, but what it had is taken: {}", chain(&error));
            return self.note_failure(machine, reason, Attempts::Several);
        }
        record.promise = self.promise(machine, &shape);
        record.memory = self.choose_memory(machine, shape.memory_mib);
        record.released = Released::No;
        record.meter.handle_step(now, 0);
        record.note(now, "the time was wrong: its lease goes on");
        if let Err(error) = self.config.store.put_machine(&record) {
            return self.note_failure(machine, chain(&error), Attempts::Several);
        }
        self.lend(&shape.devices, machine);
        if let Some(entry) = self.machines.get_mut(&machine) {
            entry.record = record;
        }
    }

    fn destroy(&mut self, machine: MachineId, because: &'static str) {
        if let Err(error) = disk::destroy(&self.config.tools.disks, machine) {
            trouble("disk", &error);
            return;
        }
        match self.config.store.remove_machine(machine) {
            Ok(()) => {
                self.machines.remove(&machine);
                last_console::forget(machine);
                eprintln!("{}", Event::MachineDestroyed { machine, because });
            }
            Err(error) => trouble("store", &error),
        }
    }
}

/// Presses a machine's power button, without waiting for it.
pub(super) fn press(machine: MachineId, because: &'static str) {
    eprintln!("{}", Event::MachineButton { machine, because });
    tokio::spawn(async move {
        // A guest that waits would not see the button; one that does not is not changed.
        let _ = vmm::resume(machine).await;
        if let Err(error) = vmm::power(machine, vmm::Power::Button).await {
            let reason = format!("power button: {}", chain(&error));
            eprintln!("{}", Event::MachineFailed { machine, reason });
        }
    });
}

/// Says how a machine ended. What its process said last is a reason only when it failed.
fn describe_ending(status: Ending, said: &str) -> String {
    use types::vm::exit;
    let meaning = match status {
        Ending::Exit { code: exit::POWERED_OFF } => return format!("powered off ({status})"),
        Ending::Exit { code: exit::RESET } => return format!("reset ({status})"),
        Ending::Signal { number: libc::SIGKILL } if said == OUT_OF_MEMORY => {
            "no memory was left for it"
        }
        Ending::Signal { number: libc::SIGKILL } => return format!("ended by force ({status})"),
        Ending::Exit { code: exit::DEADLINE } => {
            return format!("ended by itself at its lease's end, as nobody else did ({status})");
        }
        Ending::Exit { code: exit::REFUSED } => "the machine cannot be run as asked",
        Ending::Exit { code: exit::GUEST_FAULT } => {
            "the guest did something that has no meaning, as a triple fault"
        }
        Ending::Exit { code: exit::HOST_FAULT } => "the node failed under the guest",
        Ending::Exit { .. } | Ending::Signal { .. } => "the machine's process failed",
    };
    let said = said.strip_prefix("holdfast-vmm: ").unwrap_or(said);
    if said.is_empty() {
        format!("{meaning} ({status})")
    } else {
        format!("{meaning} ({status}): {said}")
    }
}

/// Returns whether the status is a failure of guest or node, not an end that somebody wanted.
fn is_failure(status: Ending) -> bool {
    use types::vm::exit;
    match status {
        Ending::Exit { code } => ![exit::POWERED_OFF, exit::RESET, exit::DEADLINE].contains(&code),
        Ending::Signal { number } => number != libc::SIGKILL,
    }
}

/// Returns whether the record says already, and better, why the machine stopped.
fn explained(record: &Record, status: Ending) -> bool {
    let killed = matches!(status, Ending::Signal { number: libc::SIGKILL });
    killed && record.failed == Failed::Yes && !record.last_stop.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_the_kernel_ended_for_want_of_memory_says_so() {
        let killed = Ending::Signal { number: libc::SIGKILL };
        let told = describe_ending(killed, OUT_OF_MEMORY);
        assert!(told.starts_with("no memory was left for it (signal-9)"), "{told}");
        assert_eq!(describe_ending(killed, "the guest's last word"), "ended by force (signal-9)");
    }

    #[test]
    fn a_machine_that_ended_itself_in_time_did_not_fail() {
        let ended = Ending::Exit { code: types::vm::exit::DEADLINE };
        assert!(!is_failure(ended));
        let told = describe_ending(ended, "holdfast-vmm: its deadline passed");
        assert!(told.contains("at its lease's end") && !told.contains("failed"), "{told}");
    }
}
