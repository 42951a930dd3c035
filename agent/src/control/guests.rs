//! What renters ask of a guest that runs, and what it said before it ended.

use bytes::Bytes;
use lease::problem::Kind;
use types::{
    forward::{ForwardedResponse, Problem},
    ids::MachineId,
    vm::VmPhase,
};

use super::{
    answers::{self, json},
    routes::{Handling, Watched},
};
use crate::machines::{
    last_console::{self, Which},
    metrics, vmm,
};

/// Interrupts the guest, makes it wait, or lets it go on.
pub(super) async fn handle(machine: MachineId, how: Handling) -> Result<(), Problem> {
    let done = match how {
        Handling::Interrupt => vmm::power(machine, vmm::Power::Nmi).await,
        Handling::Pause => vmm::pause(machine).await,
        Handling::Resume => vmm::resume(machine).await,
    };
    done.map_err(|error| answers::of_process(&error))
}

/// Tells what the guest's process counted or noted.
pub(super) async fn watch(machine: MachineId, what: Watched) -> Result<ForwardedResponse, Problem> {
    let refuse = |error| answers::of_process(&error);
    match what {
        Watched::Counters => Ok(json(200, &vmm::counters(machine).await.map_err(refuse)?)),
        Watched::Events(from) => Ok(json(200, &vmm::events(machine, from).await.map_err(refuse)?)),
        Watched::Metrics => {
            let counters = vmm::counters(machine).await.map_err(refuse)?;
            Ok(ForwardedResponse {
                status: 200,
                content_type: metrics::MEDIA_TYPE.to_owned(),
                headers: Vec::new(),
                body: metrics::text(machine, &counters).into_bytes(),
            })
        }
    }
}

/// Says what a running guest does, if it is worth saying.
pub(super) async fn detail(machine: MachineId) -> Option<&'static str> {
    match vmm::state(machine).await.ok()?.phase {
        VmPhase::Paused => Some("the guest waits until it is resumed"),
        VmPhase::Panicked => Some("the guest says that its system has failed"),
        VmPhase::Sleeping => Some("the guest says that it sleeps; a stop wakes it first"),
        VmPhase::Running | VmPhase::Stopped => None,
    }
}

/// Returns console output: of the process that runs, or what the last one left.
pub(super) async fn console(machine: MachineId, from: u64) -> Result<ForwardedResponse, Problem> {
    match vmm::console(machine, from, 0).await {
        Ok(console) => Ok(answers::console(&console)),
        Err(error) => left(machine, Which::Latest, from).ok_or_else(|| answers::of_process(&error)),
    }
}

/// Types at the console: all of it, or nothing.
pub(super) async fn type_in(
    machine: MachineId,
    input: Bytes,
) -> Result<ForwardedResponse, Problem> {
    vmm::type_in(machine, input).await.map_err(|error| answers::of_process(&error))?;
    Ok(answers::done())
}

/// Returns the console output that the process before the latest left.
pub(super) fn previous_console(machine: MachineId) -> Result<ForwardedResponse, Problem> {
    left(machine, Which::Previous, 0).ok_or_else(|| {
        let detail =
            "the machine was started once since its node was; there is no previous console";
        Kind::NotFound.because(detail)
    })
}

fn left(machine: MachineId, which: Which, from: u64) -> Option<ForwardedResponse> {
    let tail = last_console::read(machine, which)?;
    let end = tail.from.saturating_add(u64::try_from(tail.bytes.len()).ok()?);
    let from = from.clamp(tail.from, end);
    let skip = usize::try_from(from - tail.from).ok()?;
    let bytes = bytes::Bytes::from(tail.bytes).slice(skip..);
    Some(answers::console(&vmm::Console { from, end, bytes }))
}
