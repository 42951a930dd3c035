//! Takes back what a machine held: its network, and its devices, which are reset and, if they are drives,
//! erased. Each is a task of its own with a deadline; the keeper waits for none of them. What a machine gets is
//! looked at here, too, and reset if it is not whole.

use std::path::Path;

use tokio::{sync::mpsc, task::spawn_blocking, time::timeout};
use types::{ids::MachineId, node::Bdf};

use super::{
    execute::{Progress, TakenBack, Tools},
    keeper::Erasing,
    vmm,
};
use crate::{
    assign::{self, AssignError, ERASE_LIMIT, EraseError, Erased, Recovered, erase, lent},
    events::Event,
};

/// Takes back what a machine held, its drives only as far as they may be erased, and reports.
pub async fn release(
    tools: Tools,
    machine: MachineId,
    (devices, erasing): (Vec<(Bdf, u16)>, Erasing),
    progress: mpsc::Sender<Progress>,
) {
    if let Err(error) = tools.networks.delete(machine).await {
        let reason = format!("network not taken away: {error}");
        eprintln!("{}", Event::MachineFailed { machine, reason });
    }
    let _ = std::fs::remove_file(vmm::socket_path(machine));
    let set: Vec<Bdf> = devices.iter().map(|(device, _)| *device).collect();
    let (drives, mut results) = split(&tools.root, reset(&tools, devices, &set).await);
    if erasing == Erasing::Later {
        let waiting = drives.iter().map(|(device, _)| *device).collect();
        let back = |(device, recovered)| TakenBack { device, result: Ok(recovered) };
        results.extend(drives.into_iter().map(back));
        let _ = progress.send(Progress::Released(machine, results, waiting)).await;
        return;
    }
    // Erasing may take long, and the machine is gone. That its drives are not erased yet is noted
    // elsewhere (`assign::lent`).
    let _ = progress.send(Progress::Released(machine, results, Vec::new())).await;
    if !drives.is_empty() {
        let results = erase(&tools, drives).await;
        let _ = progress.send(Progress::Recovered(results)).await;
    }
}

/// Resets a device that no machine has once more, and erases it if it is a drive. `set` are the devices
/// that may lose their state with it.
pub async fn recover(
    tools: Tools,
    device: (Bdf, u16),
    set: Vec<Bdf>,
    progress: mpsc::Sender<Progress>,
) {
    let back = reset(&tools, vec![device], &set).await;
    let _ = progress.send(Progress::Climbed(device.0)).await;
    let (drives, mut results) = split(&tools.root, back);
    results.extend(erase(&tools, drives).await);
    let _ = progress.send(Progress::Recovered(results)).await;
}

/// Sees to it that devices of a machine, which nobody uses, are whole before it gets them. `set` are the devices
/// that may lose their state with one.
pub async fn make_whole(root: &Path, devices: &[Bdf], set: &[Bdf]) -> Result<(), AssignError> {
    for device in devices.iter().copied() {
        let (root, set) = (root.to_owned(), set.to_vec());
        let look = spawn_blocking(move || assign::make_whole(&root, device, &set));
        match timeout(assign::RESET_LIMIT, look).await {
            Ok(Ok(result)) => result?,
            Ok(Err(_)) | Err(_) => return Err(AssignError::ResetLate { device }),
        }
    }
    Ok(())
}

/// Tells drives that answer, and have to be erased, from what is done.
fn split(root: &Path, results: Vec<TakenBack>) -> (Vec<(Bdf, Recovered)>, Vec<TakenBack>) {
    let (mut drives, mut done) = (Vec::new(), Vec::new());
    for TakenBack { device, result } in results {
        match result {
            Ok(recovered) if erase::is_drive(root, device) => {
                drives.push((device, recovered));
            }
            result => done.push(TakenBack { device, result }),
        }
    }
    (drives, done)
}

/// Erases drives, all at once.
async fn erase(tools: &Tools, drives: Vec<(Bdf, Recovered)>) -> Vec<TakenBack> {
    let until = tokio::time::Instant::now() + ERASE_LIMIT;
    let begin = |(device, recovered)| {
        eprintln!("{}", Event::DriveErasing { address: device });
        let root = tools.root.clone();
        let work = spawn_blocking(move || erase::erase(&root, device));
        (device, recovered, work)
    };
    let begun: Vec<_> = drives.into_iter().map(begin).collect();
    let mut results = Vec::new();
    for (device, recovered, work) in begun {
        let result = match tokio::time::timeout_at(until, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => Err(AssignError::NotErased { device, source: EraseError::Late }),
        };
        let result = result.map(|Erased { method, took }| {
            let (how, ms) = (method.name(), took.as_millis());
            eprintln!("{}", Event::DriveErased { address: device, how, ms });
            Recovered { took: recovered.took + took, ..recovered }
        });
        results.push(TakenBack { device, result });
    }
    results
}

/// Resets devices, one after the other, and leaves them bound to vfio-pci.
async fn reset(tools: &Tools, devices: Vec<(Bdf, u16)>, set: &[Bdf]) -> Vec<TakenBack> {
    let mut results = Vec::new();
    for (device, vendor) in devices {
        let (root, set) = (tools.root.clone(), set.to_vec());
        let reset = spawn_blocking(move || reset_one(&root, (device, vendor), &set));
        let result = match timeout(assign::RESET_LIMIT, reset).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => Err(AssignError::ResetLate { device }),
        };
        results.push(TakenBack { device, result });
    }
    results
}

fn reset_one(
    root: &Path,
    (device, vendor): (Bdf, u16),
    set: &[Bdf],
) -> Result<Recovered, AssignError> {
    let recovered = assign::reset(root, device, vendor, set)?;
    // One that the kernel found by itself has its driver, which knows which it is.
    lent::keep_serial(root, device).map_err(|source| {
        let source = EraseError::Serial { source };
        AssignError::NotErased { device, source }
    })?;
    // It may be quarantined because it could not be bound.
    assign::bind_group(root, &[device])?;
    Ok(recovered)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::assign::Rung;

    #[test]
    fn a_drive_that_its_driver_has_is_known_before_it_is_taken_from_it() {
        let device = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
        let file = |name| format!("sys/bus/pci/devices/{device}/{name}");
        let root = crate::testing::root(&[
            (&file("config"), &[0xde, 0x10]),
            (&file("resource"), b""),
            (&file("nvme/nvme0/serial"), b"NEW\n"),
            (&format!("run/holdfast/drives/{device}"), b"OLD"),
            ("sys/bus/pci/drivers_probe", b""),
        ]);
        let unbound = reset_one(root.path(), (device, 0x10de), &[device]).expect_err("no driver");
        assert!(matches!(unbound, AssignError::Bind { .. }), "{unbound}");
        let kept = root.path().join(format!("run/holdfast/drives/{device}"));
        assert_eq!(std::fs::read_to_string(kept).expect("kept"), "NEW");
    }

    #[test]
    fn only_drives_that_answer_are_erased() {
        let device = |bus| Bdf { segment: 0, bus, device: 0, function: 0 };
        let class = |bus| format!("sys/bus/pci/devices/{}/class", device(bus));
        let root = crate::testing::root(&[
            (&class(1), b"0x010802\n"),
            (&class(2), b"0x030200\n"),
            (&class(3), b"0x010802\n"),
        ]);
        let recovered = Recovered { rung: Rung::Function, took: Duration::ZERO };
        let gone = AssignError::ResetLate { device: device(3) };
        let back = |bus, result| TakenBack { device: device(bus), result };
        let results = vec![back(1, Ok(recovered)), back(2, Ok(recovered)), back(3, Err(gone))];
        let (drives, done) = split(root.path(), results);
        assert_eq!(drives, [(device(1), recovered)]);
        let done: Vec<_> = done.iter().map(|back| (back.device, back.result.is_ok())).collect();
        assert_eq!(done, [(device(2), true), (device(3), false)]);
    }
}
