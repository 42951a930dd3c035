//! A node that cannot serve while machines run, as one whose disk is gone: it stays, and shows which machines
//! run and when each ends by itself. It takes no lease, which it could not remember, and ends no machine,
//! whose lease it does not know.

use std::time::Duration;

use tokio::{sync::watch, time::Instant};
use types::{ids::MachineId, vm::VmState};

use crate::{
    console::Page,
    events::Event,
    machines::{init::Init, vmm},
};

/// Time between two looks at what runs, and between two signs of life.
const LOOK: Duration = Duration::from_secs(5);

/// After this time the agent tries to start again. init begins an agent that lived so long at once
/// ([`crate::init::supervise::SOUND_AFTER`]).
const AGAIN: Duration = Duration::from_secs(60);

/// Shows why the node does not serve, and its machines, until the next try is due. Returns at once when no
/// machine runs.
pub(super) async fn watch_over(init: &Init, reason: &str, pages: &watch::Sender<Page>) {
    let again = Instant::now() + AGAIN;
    let mut shown = Vec::new();
    while Instant::now() < again {
        let Ok(known) = init.list().await else { return };
        let running: Vec<MachineId> =
            known.iter().filter(|known| known.ended.is_none()).map(|known| known.machine).collect();
        if running.is_empty() || init.alive(Vec::new()).is_err() {
            return;
        }
        if running != shown {
            let mut machines = Vec::new();
            for machine in &running {
                machines.push(describe(*machine, vmm::state(*machine).await.ok().as_ref()));
            }
            show(reason, &machines, pages);
            shown = running;
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn show(reason: &str, machines: &[String], pages: &watch::Sender<Page>) {
    let reason = format!(
        "{reason}; nothing new is accepted, and what runs ends with its lease: {}",
        machines.join(", ")
    );
    eprintln!("{}", Event::Trouble { place: "orphans", reason: reason.clone() });
    pages.send_modify(|page| page.error = reason);
}

/// Says when a machine ends by itself, if its process says so.
fn describe(machine: MachineId, state: Option<&VmState>) -> String {
    let left_ms = state.and_then(|state| {
        let deadline = state.deadline?;
        Some(deadline.at_boot_ms.saturating_sub(state.boot_ms))
    });
    match left_ms {
        Some(left_ms) => format!("{machine} in {} s", left_ms / 1000),
        None => format!("{machine}, whose process does not say when"),
    }
}

#[cfg(test)]
mod tests {
    use types::vm::{Deadline, VmPhase};

    use super::*;

    #[test]
    fn a_machine_is_shown_with_the_time_that_it_has_left() {
        let machine = MachineId::from_bytes([7; 16]);
        let deadline = Deadline { at_boot_ms: 90_500, grace_ms: 10_000 };
        let mut state = VmState {
            machine,
            phase: VmPhase::Running,
            console_end: 0,
            console_start: 0,
            deadline: Some(deadline),
            boot_ms: 60_000,
            clock_ahead_s: 0,
            problem: None,
        };
        assert_eq!(describe(machine, Some(&state)), format!("{machine} in 30 s"));
        state.deadline = None;
        let unknown = format!("{machine}, whose process does not say when");
        assert_eq!(describe(machine, Some(&state)), unknown);
        assert_eq!(describe(machine, None), unknown);
    }
}
