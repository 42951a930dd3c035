//! Which drives hold, or may hold, what a renter wrote.
//!
//! A drive is noted on STATE before a renter gets it, and forgotten when it was erased: so it is not offered
//! as it is after a power cut, an agent's death or a failure to erase it. A node that keeps STATE in memory
//! has a variable of firmware's remember it beside: a line for each drive.
//!
//! One file per drive, named by its address; its content is the drive's serial number where one is known.
//! A serial number that is known counts instead of the address: cards that come and go change addresses, and
//! a provider puts other drives into the same place.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use types::node::Bdf;

use super::{AssignError, device_path};
use crate::{efivars, install};

/// Where the notes are, in the root.
const NOTES: &str = "state/lent-drives";
/// Where serial numbers are kept for as long as the node is on, in the root: a drive that is bound to
/// vfio-pci tells none.
const SERIALS: &str = "run/holdfast/drives";

/// The variable, for a node that keeps STATE in memory.
const VARIABLE: &str = "LentDrives";

/// Longest serial number, in bytes (NVM Express 1.4, figure 247: bytes 23:4).
const MAX_SERIAL: usize = 20;

/// Keeps a drive's serial number, as the kernel's driver knows it, before it is bound to vfio-pci.
pub fn keep_serial(root: &Path, device: Bdf) -> io::Result<()> {
    let Some(serial) = told(root, device) else { return Ok(()) };
    fs::create_dir_all(root.join(SERIALS))?;
    fs::write(root.join(SERIALS).join(device.to_string()), serial)
}

/// Takes over what firmware remembers, before the first look at any drive. Where STATE is on disk, firmware
/// need not remember it any longer.
pub fn recall(root: &Path) -> io::Result<()> {
    let Some(variables) = efivars::folder(root) else { return Ok(()) };
    let remembered = efivars::read(&variables, VARIABLE).unwrap_or_default();
    for (device, serial) in parse(&remembered) {
        note(root, device, &serial)?;
    }
    if is_in_memory(root) { Ok(()) } else { efivars::keep(&variables, VARIABLE, b"") }
}

/// Notes that a renter gets a drive. It outlasts a power cut when this returns.
pub fn remember(root: &Path, device: Bdf) -> Result<(), AssignError> {
    let serial = serial(root, device).unwrap_or_default();
    let path = root.join(NOTES).join(device.to_string());
    note(root, device, &serial).map_err(|source| failed(device, &path, source))?;
    tell_firmware(root, device)
}

/// Forgets a drive, which was erased.
pub fn forget(root: &Path, device: Bdf) -> Result<(), AssignError> {
    for path in notes(root, device) {
        fs::remove_file(&path).map_err(|source| failed(device, &path, source))?;
    }
    tell_firmware(root, device)
}

fn note(root: &Path, device: Bdf, serial: &str) -> io::Result<()> {
    let folder = root.join(NOTES);
    fs::create_dir_all(&folder)?;
    let mut file = File::create(folder.join(device.to_string()))?;
    file.write_all(serial.as_bytes())?;
    file.sync_all()?;
    File::open(&folder)?.sync_all()
}

/// Has firmware remember all notes, where they are in memory and there is a firmware.
fn tell_firmware(root: &Path, device: Bdf) -> Result<(), AssignError> {
    let Some(variables) = efivars::folder(root).filter(|_| is_in_memory(root)) else {
        return Ok(());
    };
    let mut lines: Vec<String> = fs::read_dir(root.join(NOTES))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let serial = fs::read_to_string(entry.path()).ok()?;
            Some(format!("{} {serial}\n", entry.file_name().to_str()?))
        })
        .collect();
    lines.sort();
    let path = Path::new(efivars::FOLDER).join(VARIABLE);
    efivars::keep(&variables, VARIABLE, lines.concat().as_bytes())
        .map_err(|source| failed(device, &path, source))
}

/// Reads the variable's lines, as far as they are any.
fn parse(bytes: &[u8]) -> Vec<(Bdf, String)> {
    let text = String::from_utf8_lossy(bytes);
    let line = |line: &str| {
        let (device, serial) = line.split_once(' ')?;
        let printable = serial.chars().filter(char::is_ascii_graphic).take(MAX_SERIAL);
        Some((device.parse().ok()?, printable.collect()))
    };
    text.lines().filter_map(line).collect()
}

fn is_in_memory(root: &Path) -> bool {
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    install::runs_from_memory(&mounts)
}

/// Returns whether a drive is noted.
pub fn is_lent(root: &Path, device: Bdf) -> bool {
    !notes(root, device).is_empty()
}

/// Returns whether a block device is of a drive that is noted, or that this node binds as it likes, which makes
/// it a renter's and none of the node's. `entry` is its folder in sysfs.
pub fn is_foreign(root: &Path, entry: &Path) -> bool {
    let Ok(real) = fs::canonicalize(entry) else { return false };
    real.ancestors().any(|above| {
        let name = above.file_name().and_then(|name| name.to_str()?.parse::<Bdf>().ok());
        let Some(device) = name else { return false };
        // The kernel prints a null pointer where nobody wrote anything.
        let driver = fs::read_to_string(above.join("driver_override")).unwrap_or_default();
        !matches!(driver.trim(), "" | "(null)") || is_lent(root, device)
    })
}

/// Returns the notes that are about a drive.
fn notes(root: &Path, device: Bdf) -> Vec<PathBuf> {
    let mine = serial(root, device);
    let entries = fs::read_dir(root.join(NOTES)).into_iter().flatten().flatten();
    let about = |path: &PathBuf| {
        let noted = fs::read_to_string(path).unwrap_or_default();
        let named = path.file_name().is_some_and(|name| name == device.to_string().as_str());
        match &mine {
            Some(mine) if !noted.is_empty() => *mine == noted,
            Some(_) | None => named,
        }
    };
    entries.map(|entry| entry.path()).filter(about).collect()
}

/// Returns a drive's serial number, as the kernel's driver tells it or as it was kept.
fn serial(root: &Path, device: Bdf) -> Option<String> {
    let kept = || fs::read_to_string(root.join(SERIALS).join(device.to_string())).ok();
    told(root, device).or_else(kept)
}

fn told(root: &Path, device: Bdf) -> Option<String> {
    let mut entries = fs::read_dir(device_path(root, device).join("nvme")).ok()?.flatten();
    let text = fs::read_to_string(entries.next()?.path().join("serial")).ok()?;
    let printable = text.trim().chars().filter(|c| c.is_ascii_graphic()).take(MAX_SERIAL);
    Some(printable.collect::<String>()).filter(|serial| !serial.is_empty())
}

fn failed(device: Bdf, path: &Path, source: io::Error) -> AssignError {
    AssignError::Open { device, path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing;

    const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
    const OTHER: Bdf = Bdf { segment: 0, bus: 2, device: 0, function: 0 };

    #[test]
    fn a_drive_is_noted_until_it_was_erased() {
        let root = testing::root(&[]);
        assert!(!is_lent(root.path(), DEVICE));
        remember(root.path(), DEVICE).expect("noted");
        remember(root.path(), DEVICE).expect("noted again");
        assert!(is_lent(root.path(), DEVICE) && !is_lent(root.path(), OTHER));
        forget(root.path(), DEVICE).expect("forgotten");
        forget(root.path(), DEVICE).expect("nothing to forget");
        assert!(!is_lent(root.path(), DEVICE));
    }

    #[test]
    fn firmware_remembers_what_a_state_in_memory_would_forget() {
        let mounts = |kind: &str| format!("31 1 0:30 / /state rw - {kind} none rw\n");
        let root = testing::root(&[
            ("sys/firmware/efi/efivars/BootOrder-1", b"123456"),
            ("proc/self/mountinfo", mounts("tmpfs").as_bytes()),
            (&format!("sys/bus/pci/devices/{DEVICE}/nvme/nvme0/serial"), b"S1\n"),
        ]);
        let folder = efivars::folder(root.path()).expect("there is firmware");
        let remembered = || efivars::read(&folder, VARIABLE).unwrap_or_default();
        let cut = || {
            fs::remove_dir_all(root.path().join("state")).expect("removed");
            recall(root.path()).expect("recalled");
            [DEVICE, OTHER].map(|device| is_lent(root.path(), device))
        };
        recall(root.path()).expect("there is nothing");
        remember(root.path(), DEVICE).expect("noted");
        remember(root.path(), OTHER).expect("noted");
        assert_eq!(remembered(), format!("{DEVICE} S1\n{OTHER} \n").as_bytes());
        assert_eq!(cut(), [true, true]);
        forget(root.path(), OTHER).expect("forgotten");
        assert_eq!(cut(), [true, false]);

        // What something else wrote there stops nobody.
        efivars::keep(&folder, VARIABLE, b"\xff\n0000:02:00.0 \0x\x7f\n0000:01:00.0")
            .expect("kept");
        assert_eq!(parse(&remembered()), [(OTHER, "x".to_owned())]);
        assert_eq!(cut(), [false, true]);

        // The node was installed meanwhile.
        fs::write(root.path().join("proc/self/mountinfo"), mounts("ext4")).expect("written");
        recall(root.path()).expect("recalled");
        assert!(is_lent(root.path(), OTHER) && remembered().is_empty());
        remember(root.path(), DEVICE).expect("noted");
        assert!(remembered().is_empty(), "firmware's memory wears out");
    }

    #[test]
    fn a_drive_is_known_wherever_it_is_and_one_in_its_place_is_another() {
        let place = |device| format!("sys/bus/pci/devices/{device}/nvme/nvme0/serial");
        let root = testing::root(&[(&place(DEVICE), b"S1  \n")]);
        keep_serial(root.path(), DEVICE).expect("kept");
        // vfio-pci has it.
        fs::remove_dir_all(device_path(root.path(), DEVICE)).expect("removed");
        remember(root.path(), DEVICE).expect("noted");
        assert!(is_lent(root.path(), DEVICE));

        // The node was off, and its cards were moved.
        fs::remove_dir_all(root.path().join("run")).expect("removed");
        for (device, serial) in [(DEVICE, "S2\n"), (OTHER, "S1\n")] {
            let path = root.path().join(place(device));
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, serial).expect("written");
        }
        assert!(!is_lent(root.path(), DEVICE) && is_lent(root.path(), OTHER));
        forget(root.path(), OTHER).expect("forgotten");
        assert!(!is_lent(root.path(), OTHER));
    }

    #[test]
    fn a_disk_that_a_renter_had_or_whose_driver_was_chosen_is_not_the_nodes() {
        let device = format!("sys/devices/pci0000:00/{DEVICE}");
        let disk = format!("{device}/nvme/nvme0/nvme0n1/nvme0n1p2");
        let root = testing::root(&[
            (&format!("{disk}/uevent"), b"PARTNAME=holdfast-state\n"),
            (&format!("{device}/driver_override"), b"(null)\n"),
        ]);
        let entry = root.path().join("entry");
        symlink(root.path().join(disk), &entry).expect("linked");
        let foreign = || is_foreign(root.path(), &entry);
        assert!(!foreign());
        // After a power cut, nothing was bound yet.
        remember(root.path(), DEVICE).expect("noted");
        assert!(foreign());
        forget(root.path(), DEVICE).expect("forgotten");
        assert!(!foreign());
        fs::write(root.path().join(device).join("driver_override"), "nvme\n").expect("written");
        assert!(foreign());
        assert!(!is_foreign(root.path(), &root.path().join("nowhere")));
    }
}
