//! Disks and devices that come and go while a machine runs. [`admit`] and its like decide, and are
//! pure; [`carry_out`] opens what is attached and hands it to the machine's process.
//!
//! What is attached is kept in the machine's record and plugged again after each start, so that
//! whatever is attached can be detached, too.

use std::{
    fs::File,
    io, iter,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use lease::hardware::{Attach, DiskWanted, MAX_ATTACHMENTS};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use types::{
    devices::{AttachDevice, AttachRequest, AttachedDevice, AttachedState},
    ids::{ContentId, MachineId},
    node::Bdf,
    units::Mebibytes,
    vm::VfioInterface,
};

use super::{
    content::{ContentError, Terms},
    disk::{self, DiskError, Opened},
    disk_copy::Image,
    execute::{Progress, Tools},
    plan::Record,
    plug::{self, PlugError},
    recovery,
    vmm::{self, VmmError},
};
use crate::assign::{self, AssignError};

/// Something that was attached, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// What it is.
    pub device: Attach,
    /// Whether it is to be in the machine.
    pub seat: Seat,
    /// Why it could not be attached; empty when it could.
    pub fault: String,
}

/// Where an attachment is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Seat {
    /// In the machine, whenever it runs.
    In,
    /// Out of it; what is on the disk is kept.
    Out,
}

/// Why nothing is attached or detached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Refusal {
    #[error("{id} is attached already")]
    Attached { id: String },
    #[error("nothing is attached or kept under the name {id}")]
    Unknown { id: String },
    #[error("{device} is not one of the lease's devices")]
    NotLeased { device: Bdf },
    #[error(
        "{device} was in the machine from the start; only what hardware.plugged_later names comes and goes"
    )]
    Fixed { device: Bdf },
    #[error(
        "the machine has {ports} spare ports for disks and all are in use; hardware.spare_ports says \
         how many it is made with"
    )]
    NoPort { ports: u8 },
    #[error("disk {name} wants {wanted} MiB; {free} MiB of the lease's disk space are left")]
    Room { name: String, wanted: u64, free: u64 },
    #[error(
        "disk {name} wants {wanted} MiB, and the largest that a node makes has {} MiB (16 TiB); attach several \
         smaller ones",
        disk::LARGEST.0
    )]
    Large { name: String, wanted: u64 },
    #[error("there is no disk {name} yet: a new one needs size_mib, or content to be read")]
    Size { name: String },
    #[error(
        "disk {name} is there already and stays as it is; attach it by its name alone, or erase it first"
    )]
    Differs { name: String },
    #[error("{id} is in the machine; detach it first")]
    In { id: String },
    #[error(
        "{id} is being attached still, or its being attached is given up; ask again in a moment"
    )]
    Busy { id: String },
    #[error("a machine remembers {MAX_ATTACHMENTS} attachments; erase one first")]
    Many,
}

/// Whether there is a disk of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    /// There is, and it stays as it is.
    Yes,
    /// There is none, whatever was asked for.
    No,
}

impl Made {
    /// Looks whether a machine has the disk that is to be attached.
    pub fn of(places: &disk::Places, machine: MachineId, wanted: &Attach) -> Self {
        match wanted {
            Attach::Disk(disk) if disk::is_extra_made(places, machine, &disk.name) => Self::Yes,
            Attach::Disk(_) | Attach::Pci { .. } => Self::No,
        }
    }
}

/// Decides about attaching `wanted` to a machine. Returns what is to be kept of it.
pub fn admit(record: &Record, wanted: Attach, made: Made) -> Result<Kept, Refusal> {
    let id = wanted.id();
    let known = record.attachments.iter().find(|kept| kept.device.id() == id);
    if known.is_some_and(|kept| kept.seat == Seat::In && kept.fault.is_empty()) {
        return Err(Refusal::Attached { id });
    }
    let device = match wanted {
        Attach::Pci { address } => {
            admit_device(record, address)?;
            Attach::Pci { address }
        }
        Attach::Disk(disk) => Attach::Disk(admit_disk(record, (known, made), disk)?),
    };
    if known.is_none() && record.attachments.len() >= MAX_ATTACHMENTS {
        return Err(Refusal::Many);
    }
    Ok(Kept { device, seat: Seat::In, fault: String::new() })
}

fn admit_device(record: &Record, device: Bdf) -> Result<(), Refusal> {
    if !record.lease.shape.devices.contains(&device) {
        return Err(Refusal::NotLeased { device });
    }
    if !record.hardware.plugged_later.contains(&device) {
        return Err(Refusal::Fixed { device });
    }
    Ok(())
}

fn admit_disk(
    record: &Record,
    (known, made): (Option<&Kept>, Made),
    wanted: DiskWanted,
) -> Result<DiskWanted, Refusal> {
    let ports = record.hardware.spare_ports;
    let others = record.attachments.iter().filter(|kept| kept.device.id() != wanted.name);
    let used = others
        .filter(|kept| kept.seat == Seat::In && matches!(kept.device, Attach::Disk(_)))
        .count();
    if used >= usize::from(ports) {
        return Err(Refusal::NoPort { ports });
    }
    if let Some(Kept { device: Attach::Disk(disk), .. }) = known {
        let alone = wanted.size_mib.is_none() && wanted.content.is_none();
        if alone || (wanted.size_mib == disk.size_mib && wanted.content == disk.content) {
            return Ok(DiskWanted { model: wanted.model, ..disk.clone() });
        }
        // What could not be made is asked for otherwise.
        if made == Made::Yes {
            return Err(Refusal::Differs { name: wanted.name });
        }
    }
    if wanted.size_mib.is_none() && wanted.content.is_none() {
        return Err(Refusal::Size { name: wanted.name });
    }
    let (size, free) = (wanted.size_mib.map_or(0, |size| size.0), free_mib(record, &wanted.name));
    if size > disk::LARGEST.0 {
        return Err(Refusal::Large { name: wanted.name, wanted: size });
    }
    if size > free {
        return Err(Refusal::Room { name: wanted.name, wanted: size, free });
    }
    Ok(wanted)
}

/// Returns how much of the lease's disk space no disk of the machine has but that of this name.
fn free_mib(record: &Record, name: &str) -> u64 {
    let shape = &record.lease.shape;
    let sizes = record.attachments.iter().filter_map(|kept| match &kept.device {
        Attach::Disk(disk) if disk.name != name => disk.size_mib,
        Attach::Disk(_) | Attach::Pci { .. } => None,
    });
    let used: u64 = sizes.map(|size| size.0).sum();
    shape.disk_mib.0.saturating_sub(record.hardware.own_disk(shape).0).saturating_sub(used)
}

/// Why something could not be attached.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AttachFailure {
    #[error(transparent)]
    Content(#[from] ContentError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Device(#[from] AssignError),
    #[error(transparent)]
    Plug(#[from] PlugError),
    #[error("cannot open {path}")]
    Open { path: String, source: io::Error },
    #[error("the machine's process does not say what it has")]
    Unsaid(#[source] VmmError),
    #[error("the node broke off")]
    Broken,
    #[error("it was taken back before its content had come")]
    Abandoned,
    #[error(
        "the guest still holds it since it was detached; ask again when it is detached, or pull it"
    )]
    Leaving,
    #[error("it has left the guest and could not be brought into a clean state: {reason}")]
    Unclean { reason: String },
}

/// How something came to be in a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plugged {
    /// It was there already, as after a restart of the agent.
    Before,
    /// It was plugged now.
    Now,
}

/// Attaches `device` to a machine that runs, and reports. Waits for no content once `abandoned` is cancelled.
pub async fn carry_out(
    tools: Tools,
    record: Record,
    (device, abandoned): (Attach, CancellationToken),
    progress: mpsc::Sender<Progress>,
) {
    let (machine, id) = (record.lease.id, device.id());
    let id_there = id.clone();
    let ready = async {
        fetch(&tools, &record, &device).await?;
        settled(machine, &id_there).await
    };
    let result = match abandoned.run_until_cancelled(ready).await {
        Some(Ok(Seat::Out)) => plug(&tools, &record, &device).await,
        Some(Ok(Seat::In)) => Ok(Plugged::Before),
        Some(Err(error)) => Err(error),
        None => Err(AttachFailure::Abandoned),
    };
    // The keeper outlives its tasks; when it is gone, so is the agent.
    let _ = progress.send(Progress::Attached(machine, id, result)).await;
}

/// Sees to it that everything is here which a disk is made from.
async fn fetch(tools: &Tools, record: &Record, device: &Attach) -> Result<(), ContentError> {
    let Attach::Disk(disk) = device else { return Ok(()) };
    let made = disk.size_mib.is_some()
        && super::disk::is_extra_made(&tools.disks, record.lease.id, &disk.name);
    let Some(content) = disk.content.filter(|_| !made) else { return Ok(()) };
    let terms = match disk.size_mib {
        Some(size) => Terms::image(size.to_bytes().unwrap_or(u64::MAX)),
        None => {
            let left = media_left(record, &disk.name, |content| tools.cache.length(content));
            Terms::within(
                left,
                "the lease's memory and disk space, which bound all media of a machine, leave",
            )
        }
    };
    tools.cache.fetch(&tools.overlay, record.gateway, content, terms).await
}

/// Returns how many bytes a medium may have that a guest reads as it is. They are no disks of the lease's, and stay
/// as long as they are attached: those of a machine have together what its lease grants of memory and disk space.
fn media_left(record: &Record, name: &str, length: impl Fn(ContentId) -> Option<u64>) -> u64 {
    let shape = &record.lease.shape;
    let granted = Mebibytes(shape.memory_mib.0.saturating_add(shape.disk_mib.0));
    let others = record.attachments.iter().filter(|kept| kept.seat == Seat::In);
    let taken = others.filter_map(|kept| match &kept.device {
        Attach::Disk(disk) if disk.size_mib.is_none() && disk.name != name => disk.content,
        Attach::Disk(_) | Attach::Pci { .. } => None,
    });
    let taken: u64 = taken.filter_map(length).sum();
    granted.to_bytes().unwrap_or(u64::MAX).saturating_sub(taken)
}

/// How long a guest may take to let go of what was detached and is to be attached again: Linux waits five seconds.
const LEAVING_LIMIT: Duration = Duration::from_secs(30);
/// How long the others may take, whose port it may need.
const OTHERS_LIMIT: Duration = Duration::from_secs(10);
/// How often is looked whether they have.
const LOOK: Duration = Duration::from_millis(250);

/// Returns whether something is in a machine, when nothing is on its way out any more.
async fn settled(machine: MachineId, id: &str) -> Result<Seat, AttachFailure> {
    let start = Instant::now();
    loop {
        let there = match vmm::devices(machine).await {
            Ok(there) => there,
            Err(VmmError::Connect { .. }) => Vec::new(),
            // What it has, it has still.
            Err(_) if start.elapsed() < LEAVING_LIMIT => {
                tokio::time::sleep(LOOK).await;
                continue;
            }
            Err(error) => return Err(AttachFailure::Unsaid(error)),
        };
        if let Some(seat) = seat_of(&there, id, start.elapsed())? {
            return Ok(seat);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Returns whether something is in a machine by what its process lists; `None` when it is too early to say
/// `waited` after that was asked first.
fn seat_of(
    there: &[AttachedDevice],
    id: &str,
    waited: Duration,
) -> Result<Option<Seat>, AttachFailure> {
    let known = there.iter().find(|known| known.id == id);
    let others_leave = || there.iter().any(|other| other.state == AttachedState::Leaving);
    match known.map(|known| &known.state) {
        None if waited < OTHERS_LIMIT && others_leave() => Ok(None),
        None => Ok(Some(Seat::Out)),
        Some(AttachedState::Waiting | AttachedState::Connected) => Ok(Some(Seat::In)),
        Some(AttachedState::Leaving) if waited < LEAVING_LIMIT => Ok(None),
        Some(AttachedState::Leaving) => Err(AttachFailure::Leaving),
        Some(AttachedState::Unclean { reason }) => {
            Err(AttachFailure::Unclean { reason: reason.clone() })
        }
    }
}

async fn plug(tools: &Tools, record: &Record, device: &Attach) -> Result<Plugged, AttachFailure> {
    let machine = record.lease.id;
    let (files, device) = match device {
        Attach::Disk(disk) => open_disk(tools, record, disk).await?,
        Attach::Pci { address } => {
            let interface = record.placement.as_ref().and_then(|place| place.interface);
            let interface = interface.unwrap_or(VfioInterface::Cdev);
            // What else is below its bridge may be in the machine.
            recovery::make_whole(&tools.root, &[*address], &[*address]).await?;
            let file = assign::open_one(&tools.root, *address, interface)?;
            (vec![file], AttachDevice::Pci { address: *address })
        }
    };
    let id = match &device {
        AttachDevice::Disk { serial, .. } => serial.clone(),
        AttachDevice::Pci { address } => address.to_string(),
    };
    let request = AttachRequest { id, device };
    let done = tokio::task::spawn_blocking(move || plug::plug(machine, &request, &files));
    done.await.map_err(|_| AttachFailure::Broken)??;
    Ok(Plugged::Now)
}

async fn open_disk(
    tools: &Tools,
    record: &Record,
    disk: &DiskWanted,
) -> Result<(Vec<OwnedFd>, AttachDevice), AttachFailure> {
    let image = disk.content.map(|content| tools.cache.path(content));
    let Opened { file, again, key } = match (disk.size_mib, image) {
        // It was fetched from the gateway that asked, or was here for another machine: no node knows whose it is, and
        // a lease and the digest are enough.
        (None, Some(path)) => match File::open(&path) {
            Ok(file) => Opened { file, again: Vec::new(), key: None },
            Err(source) => {
                return Err(AttachFailure::Open { path: path.display().to_string(), source });
            }
        },
        (size, image) => {
            let (places, machine) = (tools.disks.clone(), record.lease.id);
            let name = disk.name.clone();
            let size = size.unwrap_or(Mebibytes(0));
            let make = move || {
                // The machine's CPUs are at work.
                let image = image.as_deref().map(|path| Image { path, cpus: &[], unchecked: None });
                disk::open_extra(&places, machine, &name, size, image)
            };
            tokio::task::spawn_blocking(make).await.map_err(|_| AttachFailure::Broken)??
        }
    };
    let device = AttachDevice::Disk {
        read_only: disk.size_mib.is_none(),
        serial: disk.name.clone(),
        model: disk.model,
        // The machine has one for all its disks.
        limit: None,
        key,
    };
    Ok((iter::once(file).chain(again).map(OwnedFd::from).collect(), device))
}

/// Returns whether something is to be plugged after a start.
pub fn comes_back(kept: &Kept) -> bool {
    kept.seat == Seat::In
}

/// Destroys a disk that is out of its machine. Nothing happens when it was never made.
pub fn erase(tools: &Tools, machine: MachineId, device: &Attach) -> io::Result<()> {
    match device {
        Attach::Disk(disk) => disk::destroy_extra(&tools.disks, machine, &disk.name),
        Attach::Pci { .. } => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use types::vm::DiskModel;

    use super::*;
    use crate::machines::plan::fixture;

    const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
    const OTHER: Bdf = Bdf { segment: 0, bus: 2, device: 0, function: 0 };

    /// A machine with 100 MiB of disk space, half of it its own disk, and two spare ports.
    fn record() -> Record {
        let mut record = fixture::record();
        record.lease.shape.disk_mib = Mebibytes(100);
        record.lease.shape.devices = vec![DEVICE, OTHER];
        record.hardware.disk_mib = Some(Mebibytes(50));
        record.hardware.spare_ports = 2;
        record.hardware.plugged_later = vec![OTHER];
        record
    }

    fn disk(name: &str, size: Option<u64>) -> Attach {
        Attach::Disk(DiskWanted {
            name: name.to_owned(),
            size_mib: size.map(Mebibytes),
            model: DiskModel::default(),
            content: None,
        })
    }

    fn attach(record: &mut Record, wanted: Attach) -> Result<(), Refusal> {
        attach_to(record, wanted, Made::Yes)
    }

    fn attach_to(record: &mut Record, wanted: Attach, made: Made) -> Result<(), Refusal> {
        let kept = admit(record, wanted, made)?;
        record.attachments.retain(|known| known.device.id() != kept.device.id());
        record.attachments.push(kept);
        Ok(())
    }

    #[test]
    fn disks_stay_within_the_lease() {
        let mut record = record();
        assert_eq!(attach(&mut record, disk("a", Some(30))), Ok(()));
        // What no file can hold is told before what the lease has.
        let large = disk("b", Some(16 << 20));
        let refusal = attach(&mut record, large).expect_err("16 TiB");
        assert!(refusal.to_string().contains("several"), "{refusal}");
        let room = Refusal::Room { name: "b".into(), wanted: (16 << 20) - 1, free: 20 };
        assert_eq!(attach(&mut record, disk("b", Some((16 << 20) - 1))), Err(room));
        let room = Refusal::Room { name: "b".into(), wanted: 21, free: 20 };
        assert_eq!(attach(&mut record, disk("b", Some(21))), Err(room));
        assert_eq!(attach(&mut record, disk("b", Some(20))), Ok(()));
        let full = attach(&mut record, disk("c", None));
        assert_eq!(full, Err(Refusal::NoPort { ports: 2 }));
        let twice = attach(&mut record, disk("a", Some(30)));
        assert_eq!(twice, Err(Refusal::Attached { id: "a".into() }));
    }

    #[test]
    fn a_detached_disk_comes_back_as_it_was() {
        let mut record = record();
        attach(&mut record, disk("a", Some(30))).expect("room");
        record.attachments[0].seat = Seat::Out;
        let other = attach(&mut record, disk("a", Some(40)));
        assert_eq!(other, Err(Refusal::Differs { name: "a".into() }));
        assert_eq!(attach(&mut record, disk("a", None)), Ok(()));
        assert_eq!(
            record.attachments,
            [Kept { device: disk("a", Some(30)), seat: Seat::In, fault: String::new() }]
        );
        let new = attach(&mut record, disk("b", None));
        assert_eq!(new, Err(Refusal::Size { name: "b".into() }));
        // What is out still takes the lease's space.
        record.attachments[0].seat = Seat::Out;
        assert!(matches!(attach(&mut record, disk("b", Some(21))), Err(Refusal::Room { .. })));
    }

    #[test]
    fn a_disk_that_was_never_made_is_asked_for_otherwise() {
        let mut record = record();
        attach_to(&mut record, disk("a", Some(30)), Made::No).expect("room");
        let again = attach_to(&mut record, disk("a", Some(40)), Made::No);
        assert_eq!(again, Err(Refusal::Attached { id: "a".into() }));
        record.attachments[0].fault = "the image does not fit".to_owned();
        // The room of the one that it replaces is its own.
        let room = Refusal::Room { name: "a".into(), wanted: 51, free: 50 };
        assert_eq!(attach_to(&mut record, disk("a", Some(51)), Made::No), Err(room));
        assert_eq!(attach_to(&mut record, disk("a", Some(50)), Made::No), Ok(()));
        record.attachments[0].fault = "the image does not fit".to_owned();
        assert_eq!(attach_to(&mut record, disk("a", None), Made::No), Ok(()));
        let kept = Kept { device: disk("a", Some(50)), seat: Seat::In, fault: String::new() };
        assert_eq!(record.attachments, [kept]);
        record.attachments[0].fault = "the port is gone".to_owned();
        let made = attach_to(&mut record, disk("a", Some(20)), Made::Yes);
        assert_eq!(made, Err(Refusal::Differs { name: "a".into() }));
    }

    #[test]
    fn only_devices_that_come_later_come_and_go() {
        let mut record = record();
        let device = |address| Attach::Pci { address };
        assert_eq!(attach(&mut record, device(DEVICE)), Err(Refusal::Fixed { device: DEVICE }));
        let foreign = Bdf { bus: 9, ..DEVICE };
        let refusal = Refusal::NotLeased { device: foreign };
        assert_eq!(attach(&mut record, device(foreign)), Err(refusal));
        assert_eq!(attach(&mut record, device(OTHER)), Ok(()));
        let id = OTHER.to_string();
        assert_eq!(attach(&mut record, device(OTHER)), Err(Refusal::Attached { id }));
    }

    #[test]
    fn what_leaves_is_neither_in_nor_out() {
        let listed = |state| {
            let device = types::devices::AttachDevice::Pci { address: OTHER };
            vec![AttachedDevice { id: "a".to_owned(), device, slot: 3, state }]
        };
        let after = |id: &str, there: &[AttachedDevice], waited| {
            seat_of(there, id, waited).map_err(|error| error.to_string())
        };
        let seat = |there: &[AttachedDevice]| after("a", there, Duration::ZERO);
        assert_eq!(seat(&[]), Ok(Some(Seat::Out)));
        assert_eq!(seat(&listed(AttachedState::Waiting)), Ok(Some(Seat::In)));
        assert_eq!(seat(&listed(AttachedState::Connected)), Ok(Some(Seat::In)));
        let leaving = listed(AttachedState::Leaving);
        assert_eq!(seat(&leaving), Ok(None));
        let late = after("a", &leaving, LEAVING_LIMIT).expect_err("late");
        assert!(late.contains("still holds"), "{late}");
        // Another waits for its port, and not for long.
        assert_eq!(after("b", &leaving, Duration::ZERO), Ok(None));
        assert_eq!(after("b", &leaving, OTHERS_LIMIT), Ok(Some(Seat::Out)));
        let unclean = AttachedState::Unclean { reason: "it is gone".to_owned() };
        let refusal = seat(&listed(unclean)).expect_err("unclean");
        assert!(refusal.ends_with("clean state: it is gone"), "{refusal}");
    }

    #[test]
    fn media_are_bounded_by_the_lease() {
        let mut record = record();
        record.hardware.spare_ports = 8;
        record.lease.shape.memory_mib = Mebibytes(28);
        let medium = |name: &str| {
            Attach::Disk(DiskWanted {
                name: name.to_owned(),
                size_mib: None,
                model: DiskModel::default(),
                content: Some(ContentId::from_bytes([7; 32])),
            })
        };
        attach(&mut record, disk("data", Some(30))).expect("room");
        attach(&mut record, medium("a")).expect("room");
        let left = |record: &Record, name| media_left(record, name, |_| Some(100 << 20)) >> 20;
        assert_eq!((left(&record, "a"), left(&record, "b")), (128, 28));
        attach(&mut record, medium("b")).expect("room");
        assert_eq!(left(&record, "c"), 0);
        record.attachments[1].seat = Seat::Out;
        assert_eq!(left(&record, "c"), 28);
    }

    #[test]
    fn memory_of_attachments_is_bounded() {
        let mut record = record();
        record.hardware.spare_ports = 8;
        for number in 0..MAX_ATTACHMENTS {
            attach(&mut record, disk(&format!("d{number}"), Some(1))).expect("room");
            record.attachments[number].seat = Seat::Out;
        }
        assert_eq!(attach(&mut record, disk("more", Some(1))), Err(Refusal::Many));
    }
}
