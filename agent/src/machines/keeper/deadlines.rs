//! Machines' own processes are told when to end them, should this agent not be there to do it.

use tokio::sync::mpsc;
use types::{ids::MachineId, vm::Deadline};

use super::{Keeper, KeeperConfig};
use crate::{
    events::Event,
    init::boot::chain,
    machines::{
        deadline::{self, Told},
        execute::Progress,
        plan::{Process, Record},
        vmm::{self, VmmError},
    },
    sys::clock::boot_ms,
};

/// Returns when a machine's process is to end it.
pub(super) fn of(config: &KeeperConfig, record: &Record) -> Deadline {
    deadline::of(record.end(), config.clock.now_ms(), boot_ms(), config.spec.machines.grace_s)
}

impl Keeper {
    /// Has every process told whose deadline is not what it should be. A start brings its own along, and
    /// what was killed needs none.
    pub(super) fn tell_deadlines(&mut self) {
        let due: Vec<_> = self
            .machines
            .iter()
            .filter(|(_, entry)| matches!(entry.seen.process, Process::Running { .. }))
            .filter(|(_, entry)| entry.seen.busy.is_none() && entry.seen.killed.is_none())
            .filter_map(|(id, entry)| {
                let wanted = of(&self.config, &entry.record);
                Some((*id, entry.seen.deadline.poll(wanted, boot_ms())?))
            })
            .collect();
        for (machine, deadline) in due {
            if let Some(entry) = self.machines.get_mut(&machine) {
                entry.seen.deadline = Told::Telling(deadline);
            }
            tokio::spawn(tell(machine, deadline, self.progress.clone()));
        }
    }

    /// A process was told, or did not listen.
    pub(super) fn handle_told(
        &mut self,
        machine: MachineId,
        deadline: Deadline,
        result: Result<(), VmmError>,
    ) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        // A process that ended since has a successor, which is told anew.
        if entry.seen.deadline != Told::Telling(deadline) {
            return;
        }
        match result {
            Ok(()) => {
                entry.seen.deadline = Told::Knows(deadline);
                entry.seen.deaf = 0;
                let left_s = deadline.at_boot_ms.saturating_sub(boot_ms()) / 1000;
                eprintln!("{}", Event::MachineDeadline { machine, left_s });
            }
            Err(error) => {
                entry.seen.deadline = Told::Deaf { boot_ms: boot_ms() };
                entry.seen.deaf += 1;
                // The first time is news.
                if entry.seen.deaf == 1 {
                    let reason = format!("it does not know its deadline: {}", chain(&error));
                    eprintln!("{}", Event::MachineFailed { machine, reason });
                }
            }
        }
    }
}

async fn tell(machine: MachineId, deadline: Deadline, progress: mpsc::Sender<Progress>) {
    let result = vmm::put_deadline(machine, deadline).await;
    // The keeper outlives its tasks; when it is gone, so is the agent.
    let _ = progress.send(Progress::Told(machine, deadline, result)).await;
}
