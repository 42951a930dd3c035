//! Disks and devices of a machine that come and go, as renters ask for them.

use std::time::Duration;

use lease::{
    api::BEGUN,
    hardware::{Attach, Attachment, AttachmentState, Attachments},
    problem::Kind,
};
use types::{
    devices::{AttachedDevice, AttachedState},
    forward::{ForwardedResponse, Problem},
    ids::MachineId,
};

use super::answers::{json, of_process, refused};
use crate::machines::{
    attach::{Kept, Refusal, Seat},
    keeper::{Command, Leaving, Machines, State, View},
    vmm::{self, VmmError},
};

/// Lists what is attached to a machine or kept for it.
pub(super) async fn list(view: &View) -> Attachments {
    let machine = view.record.lease.id;
    let there = match view.state {
        State::Running | State::Stopping => vmm::devices(machine).await.unwrap_or_default(),
        State::Starting | State::Stopped | State::Ended => Vec::new(),
    };
    let kept = &view.record.attachments;
    let mut devices: Vec<Attachment> = kept.iter().map(|kept| describe(kept, &there)).collect();
    // What is on its way out and not kept, as a device.
    for device in there {
        if !devices.iter().any(|known| known.id == device.id)
            && let Ok(address) = device.id.parse()
        {
            let kept =
                Kept { device: Attach::Pci { address }, seat: Seat::Out, fault: String::new() };
            devices.push(describe(&kept, &[device]));
        }
    }
    Attachments { devices }
}

fn describe(kept: &Kept, there: &[AttachedDevice]) -> Attachment {
    let id = kept.device.id();
    let seen = there.iter().find(|device| device.id == id).map(|device| &device.state);
    let (state, detail) = match (seen, kept.seat) {
        _ if !kept.fault.is_empty() => (AttachmentState::Failed, kept.fault.clone()),
        (Some(AttachedState::Waiting), _) => (AttachmentState::Waiting, String::new()),
        (Some(AttachedState::Connected), Seat::In) => (AttachmentState::Attached, String::new()),
        (Some(AttachedState::Connected | AttachedState::Leaving), _) => {
            (AttachmentState::Leaving, String::new())
        }
        (Some(AttachedState::Unclean { reason }), _) => (AttachmentState::Failed, reason.clone()),
        (None, Seat::In) => (AttachmentState::Pending, String::new()),
        (None, Seat::Out) => (AttachmentState::Detached, String::new()),
    };
    Attachment { id, device: kept.device.clone(), state, detail }
}

/// Attaches something.
pub(super) async fn attach(
    machines: &Machines,
    machine: MachineId,
    wanted: Attach,
) -> Result<ForwardedResponse, Problem> {
    wanted.check().map_err(|error| Kind::Unprocessable.because(error.to_string()))?;
    let device = wanted.clone();
    let ask = |answer| Command::Attach(machine, wanted, answer);
    let done = machines.ask(ask).await.map_err(|error| refused(&error))?;
    answer(device, done).await
}

/// Detaches something, or erases what was detached.
pub(super) async fn detach(
    machines: &Machines,
    view: &View,
    name: &str,
    how: Leaving,
) -> Result<ForwardedResponse, Problem> {
    let machine = view.record.lease.id;
    let known = view.record.attachments.iter().find(|kept| kept.device.id() == name);
    let known = known.ok_or_else(|| refusal(&Refusal::Unknown { id: name.to_owned() }))?;
    if matches!(view.state, State::Running | State::Stopping) {
        leave(machine, name, how).await?;
    }
    let ask = |answer| Command::Detach(machine, name.to_owned(), how, answer);
    let done = machines.ask(ask).await.map_err(|error| refused(&error))?;
    answer(known.device.clone(), done).await
}

/// Has the machine's process let go of something, or sees to it that it has.
async fn leave(machine: MachineId, name: &str, how: Leaving) -> Result<(), Problem> {
    let removal = match how {
        Leaving::Asked => vmm::Removal::Asked,
        Leaving::Pulled => vmm::Removal::Pulled,
        Leaving::Erased => {
            let there = vmm::devices(machine).await.unwrap_or_default();
            let id = name.to_owned();
            let inside = there.iter().any(|device| device.id == id);
            return if inside { Err(refusal(&Refusal::In { id })) } else { Ok(()) };
        }
    };
    match vmm::detach(machine, name, removal).await {
        // It was never in it, or has left by itself.
        Ok(()) | Err(VmmError::Status { status: 404, .. }) => Ok(()),
        // It drops what it has not begun when nobody waits for that any more, and lists what it has.
        Err(VmmError::Late) if leaves(machine, name).await => Ok(()),
        Err(error) => Err(of_process(&error)),
    }
}

/// How long a process may take to see that nobody waits for its answer.
const NOTICE: Duration = Duration::from_secs(1);

/// Returns whether something is not in a machine any more, or not for long.
async fn leaves(machine: MachineId, name: &str) -> bool {
    tokio::time::sleep(NOTICE).await;
    let there = vmm::devices(machine).await;
    let stays =
        |device: &AttachedDevice| device.id == name && device.state != AttachedState::Leaving;
    there.is_ok_and(|there| !there.iter().any(stays))
}

async fn answer(device: Attach, done: Result<View, Refusal>) -> Result<ForwardedResponse, Problem> {
    let view = done.map_err(|error| refusal(&error))?;
    let id = device.id();
    let shown = list(&view).await.devices.into_iter().find(|known| known.id == id);
    // A device that has left, or a disk that was erased, is in no list any more.
    let (state, detail) = (AttachmentState::Detached, "nothing of it is kept".to_owned());
    Ok(json(BEGUN, &shown.unwrap_or(Attachment { id, device, state, detail })))
}

fn refusal(refusal: &Refusal) -> Problem {
    let kind = match refusal {
        Refusal::Unknown { .. } | Refusal::NotLeased { .. } => Kind::NotFound,
        Refusal::Room { .. } => Kind::NoCapacity,
        Refusal::Size { .. } | Refusal::Large { .. } => Kind::Unprocessable,
        Refusal::Attached { .. }
        | Refusal::Fixed { .. }
        | Refusal::NoPort { .. }
        | Refusal::Differs { .. }
        | Refusal::In { .. }
        | Refusal::Busy { .. }
        | Refusal::Many => Kind::Conflict,
    };
    kind.because(refusal.to_string())
}

#[cfg(test)]
mod tests {
    use lease::hardware::DiskWanted;
    use types::{devices::AttachDevice, units::Mebibytes, vm::DiskModel};

    use super::*;

    fn disk(seat: Seat, fault: &str) -> Kept {
        let device = Attach::Disk(DiskWanted {
            name: "data".into(),
            size_mib: Some(Mebibytes(1)),
            model: DiskModel::default(),
            content: None,
        });
        Kept { device, seat, fault: fault.into() }
    }

    fn shown(kept: &Kept, state: Option<AttachedState>) -> AttachmentState {
        let device = AttachDevice::Disk {
            read_only: false,
            serial: "data".into(),
            model: DiskModel::default(),
            limit: None,
            key: None,
        };
        let there = state.map(|state| AttachedDevice { id: "data".into(), device, slot: 1, state });
        describe(kept, there.as_slice()).state
    }

    #[test]
    fn what_is_wanted_and_what_is_there_make_the_state() {
        use AttachmentState as S;
        let (inside, outside) = (disk(Seat::In, ""), disk(Seat::Out, ""));
        assert_eq!(shown(&inside, None), S::Pending);
        assert_eq!(shown(&inside, Some(AttachedState::Waiting)), S::Waiting);
        assert_eq!(shown(&inside, Some(AttachedState::Connected)), S::Attached);
        assert_eq!(shown(&outside, Some(AttachedState::Connected)), S::Leaving);
        assert_eq!(shown(&outside, None), S::Detached);
        assert_eq!(shown(&disk(Seat::In, "no port"), None), S::Failed);
        let unclean = AttachedState::Unclean { reason: "no answer".into() };
        assert_eq!(shown(&outside, Some(unclean)), S::Failed);
    }
}
