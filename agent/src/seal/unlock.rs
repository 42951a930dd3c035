//! Opening the volumes at the start, and having their file systems checked: by the agent's process, which init
//! starts before it mounts them and waits for with a deadline. What a TPM or a disk says never reaches PID 1.
//!
//! Whatever comes of it, PCR 15 is extended in the end: nothing that runs later, the agent's service among it,
//! gets a key from the TPM any more.

use std::{
    fs, io,
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use lease::attestation;
use types::{
    disk_key::DiskKey,
    volumes::{EscrowedKey, Protection, VolumeReport},
};
use update::disk::layout;

use super::{
    check,
    keys::{self, Sealer},
    recovery::RecoveryKey,
    signature,
    tpm::Tpm,
    volume::{self, Volume},
};
use crate::{
    events::Event,
    init::{own_disks, partitions},
    install::grow,
    local::host,
};

/// Where the report is, below the root.
pub const REPORT: &str = "run/holdfast/volumes.json";
/// Where is what was measured of them, below the root.
const MEASURED: &str = "run/holdfast/volumes-measured.json";
/// Where the recovery key is, sealed to operators, below the root.
const ESCROW: &str = "run/holdfast/recovery-key.json";
/// Where systemd-stub's files of the running release are kept, below the root.
const RELEASE: &str = "run/holdfast/release";

/// How long opening may take. A slow TPM takes seconds to make its storage key.
const LIMIT: Duration = Duration::from_secs(90);

/// What came of opening.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// It was done: what could be opened is open.
    Done,
    /// A TPM or a disk did not answer. A thread waits for it still.
    GivenUp,
}

/// Opens what can be opened, reports, and has what is open checked. A TPM or a disk that does not answer keeps
/// nobody from looking at what is open all the same.
pub fn open_and_check(root: &'static Path) -> Opening {
    crate::init::kmsg::open();
    let (tell_end, end) = mpsc::channel();
    thread::spawn(move || {
        unlock(root);
        // Who waits no longer has said so.
        tell_end.send(()).ok();
    });
    let opening = match end.recv_timeout(LIMIT) {
        Ok(()) => Opening::Done,
        Err(RecvTimeoutError::Disconnected) => Opening::GivenUp,
        Err(RecvTimeoutError::Timeout) => {
            let reason = format!("opening them was not done after {} s", LIMIT.as_secs());
            crate::init::kmsg::event(&Event::Trouble { place: "volumes", reason });
            Opening::GivenUp
        }
    };
    check::all(root);
    opening
}

fn unlock(root: &Path) {
    let mut sealer = sealer(root);
    let reports = open_all(&mut sealer);
    latch(&mut sealer, &reports);
    tell(root, &reports);
}

/// Returns what seals on this server.
pub fn sealer(root: &Path) -> Sealer {
    let release = signature::read(&root.join(RELEASE));
    Sealer { tpm: Tpm::open(root), release, additions: host::additions(root) }
}

/// Keeps the release's files, which are in the initramfs, in sight of later programs. Called before
/// the root is entered.
pub fn keep_release(from: &Path, to: &Path) -> io::Result<()> {
    let target = to.join(RELEASE);
    for name in [signature::KEY, signature::SIGNATURES] {
        let file = from.join(name);
        if file.exists() {
            fs::create_dir_all(&target)?;
            fs::copy(file, target.join(name))?;
        }
    }
    Ok(())
}

/// Reads the report of this boot; empty when the node runs from memory.
pub fn report(root: &Path) -> Vec<VolumeReport> {
    let text = fs::read(root.join(REPORT)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn open_all(sealer: &mut Sealer) -> Vec<VolumeReport> {
    let mut reports = Vec::new();
    let mut state = None;
    if let Some(device) = partitions::find(layout::STATE).or_else(|| adopt(sealer)) {
        let protection = match open(&device) {
            Ok(None) => Protection::Plain,
            Ok(Some(mut volume)) => {
                hand_out(&volume);
                match keys::open_state(&mut volume, sealer) {
                    Ok((key, protection)) => {
                        let protection = map(&volume, layout::STATE, &key, protection);
                        state = Some(key);
                        protection
                    }
                    Err(reason) => Protection::Locked { reason },
                }
            }
            Err(reason) => Protection::Locked { reason },
        };
        reports.push(VolumeReport { name: layout::STATE.to_owned(), protection });
    }
    if let Some(device) = partitions::find(layout::DATA) {
        let like = reports.first().map(|report| report.protection.clone());
        let protection = open_data(&device, state.as_ref(), like);
        reports.push(VolumeReport { name: layout::DATA.to_owned(), protection });
    }
    reports
}

/// Finds a STATE that is this server's though nobody remembers: its TPM opens it. Nothing is written to any.
fn adopt(sealer: &mut Sealer) -> Option<String> {
    let is_ours = |device: &String| {
        let volume = Volume::open(Path::new(device)).ok().flatten();
        volume.is_some_and(|volume| keys::tpm_opens(&volume, sealer))
    };
    let device = partitions::foreign(layout::STATE).into_iter().find(is_ours)?;
    own_disks::remember(Path::new("/"), &partitions::disk_of(&device)?);
    partitions::find(layout::STATE)
}

/// Leaves the recovery key, as it was sealed to operators, where later programs find it: what the disk says
/// in clear, and no secret without an operator's key.
fn hand_out(volume: &Volume) {
    let text = serde_json::to_vec(&keys::escrowed(volume)).unwrap_or_default();
    if let Err(error) = write(&Path::new("/").join(ESCROW), &text) {
        let reason = error.to_string();
        crate::init::kmsg::event(&Event::Trouble { place: "volumes", reason });
    }
}

/// Reads the recovery key as it was sealed to operators; empty when it was sealed to nobody.
pub fn escrowed(root: &Path) -> Vec<EscrowedKey> {
    let text = fs::read(root.join(ESCROW)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// Opens DATA; it is protected as well as STATE is.
fn open_data(device: &str, state: Option<&DiskKey>, like: Option<Protection>) -> Protection {
    match (open(device), state) {
        (Ok(None), _) => Protection::Plain,
        (Err(reason), _) => Protection::Locked { reason },
        (Ok(Some(_)), None) => Protection::Locked { reason: "STATE is not open".to_owned() },
        (Ok(Some(volume)), Some(state)) => {
            // Longer disks first: the mapping is as long as the partition then.
            let grown = Path::new(device).file_name().map(|name| grow::grow_below(Path::new(name)));
            let told = match grown {
                Some(Ok(mended)) => mended,
                Some(Err(error)) => Some(crate::init::boot::chain(&error)),
                None => None,
            };
            if let Some(reason) = told {
                crate::init::kmsg::event(&Event::Trouble { place: "data", reason });
            }
            match keys::open_data(&volume, state) {
                Ok(key) => map(&volume, layout::DATA, &key, like.unwrap_or(Protection::Plain)),
                Err(reason) => Protection::Locked { reason },
            }
        }
    }
}

fn open(device: &str) -> Result<Option<Volume>, String> {
    let opened = Volume::open(Path::new(device)).map_err(|error| format!("{device}: {error}"))?;
    let Some(volume) = &opened else { return Ok(None) };
    let reason = match volume.mend() {
        Ok(None) => return Ok(opened),
        Ok(Some(what)) => {
            format!("{device}: the header, {what}; it was made anew of the other copy")
        }
        // The volume opens all the same, as long as the other copy lasts.
        Err(error) => format!("{device}: a copy of the header is damaged and stays so: {error}"),
    };
    crate::init::kmsg::event(&Event::Trouble { place: "volumes", reason });
    Ok(opened)
}

fn map(volume: &Volume, name: &str, key: &DiskKey, protection: Protection) -> Protection {
    if volume::mapped(Path::new("/"), name).is_some() {
        return protection;
    }
    match volume.map(name, key) {
        Ok(_) => protection,
        Err(error) => Protection::Locked { reason: format!("the kernel cannot map it: {error}") },
    }
}

fn latch(sealer: &mut Sealer, reports: &[VolumeReport]) {
    let Ok(tpm) = &mut sealer.tpm else { return };
    let text = serde_json::to_vec(reports).unwrap_or_default();
    if let Err(error) = tpm.latch(&attestation::volumes_digest(&text)) {
        let reason = format!("PCR 15 not extended: {}", crate::init::boot::chain(&error));
        crate::init::kmsg::event(&Event::Trouble { place: "tpm", reason });
    }
    // Who attests the node compares it with the register; it stays when the report changes.
    if let Err(error) = write(&Path::new("/").join(MEASURED), &text) {
        let reason = error.to_string();
        crate::init::kmsg::event(&Event::Trouble { place: "volumes", reason });
    }
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(path, bytes)
}

/// Reads what was measured of the volumes at the start, as it was measured.
pub fn measured(root: &Path) -> String {
    fs::read_to_string(root.join(MEASURED)).unwrap_or_default()
}

fn tell(root: &Path, reports: &[VolumeReport]) {
    let starts = host::starts(root);
    for VolumeReport { name, protection } in reports {
        let (volume, how, notice) = (name.clone(), protection.name(), protection.notice(starts));
        crate::init::kmsg::event(&Event::Volume { volume, how, notice });
    }
    let text = serde_json::to_vec(reports).unwrap_or_default();
    let written = write(&root.join(REPORT), &text);
    if let Err(error) = written {
        let reason = error.to_string();
        crate::init::kmsg::event(&Event::Trouble { place: "volumes", reason });
    }
}

/// Opens locked volumes with the recovery key and seals STATE's key to the TPM again.
pub fn recover(root: &Path, key: &RecoveryKey) -> Result<(), String> {
    let device = partitions::find(layout::STATE).ok_or("the partition of STATE is gone")?;
    let mut volume = open(&device)?.ok_or("STATE is not encrypted")?;
    let state = keys::recover(&volume, key)?;
    let resealed = keys::reseal(&mut volume, &state, &mut sealer(root)).map(drop);
    let protection = map(&volume, layout::STATE, &state, Protection::Recovered { resealed });
    let mut reports = vec![VolumeReport { name: layout::STATE.to_owned(), protection }];
    if let Some(device) = partitions::find(layout::DATA) {
        let like = reports.first().map(|report| report.protection.clone());
        let mut protection = open_data(&device, Some(&state), like);
        if let (Protection::Locked { .. }, Ok(Some(volume))) = (&protection, open(&device))
            && let Ok(data) = keys::recover(&volume, key)
        {
            protection =
                map(&volume, layout::DATA, &data, Protection::Recovered { resealed: Ok(()) });
        }
        reports.push(VolumeReport { name: layout::DATA.to_owned(), protection });
    }
    tell(root, &reports);
    match reports.first().map(|report| &report.protection) {
        Some(Protection::Locked { reason }) => Err(reason.clone()),
        _ => Ok(()),
    }
}
