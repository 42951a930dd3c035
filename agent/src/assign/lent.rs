//! Which drives hold, or may hold, what a renter wrote.
//!
//! A drive is noted on STATE before a renter gets it, and forgotten when it was erased: so it is not offered
//! as it is after a power cut, an agent's death or a failure to erase it. A node that keeps STATE in memory
//! forgets this with everything else.
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

/// Where the notes are, in the root.
const NOTES: &str = "state/lent-drives";
/// Where serial numbers are kept for as long as the node is on, in the root: a drive that is bound to
/// vfio-pci tells none.
const SERIALS: &str = "run/holdfast/drives";

/// Longest serial number, in bytes (NVM Express 1.4, figure 247: bytes 23:4).
const MAX_SERIAL: usize = 20;

/// Keeps a drive's serial number, as the kernel's driver knows it, before it is bound to vfio-pci.
pub fn keep_serial(root: &Path, device: Bdf) -> io::Result<()> {
    let Some(serial) = told(root, device) else { return Ok(()) };
    fs::create_dir_all(root.join(SERIALS))?;
    fs::write(root.join(SERIALS).join(device.to_string()), serial)
}

/// Notes that a renter gets a drive. It is on disk when this returns.
pub fn remember(root: &Path, device: Bdf) -> Result<(), AssignError> {
    let folder = root.join(NOTES);
    let path = folder.join(device.to_string());
    let write = || {
        fs::create_dir_all(&folder)?;
        let mut file = File::create(&path)?;
        file.write_all(serial(root, device).unwrap_or_default().as_bytes())?;
        file.sync_all()?;
        File::open(&folder)?.sync_all()
    };
    write().map_err(|source| failed(device, &path, source))
}

/// Forgets a drive, which was erased.
pub fn forget(root: &Path, device: Bdf) -> Result<(), AssignError> {
    for path in notes(root, device) {
        fs::remove_file(&path).map_err(|source| failed(device, &path, source))?;
    }
    Ok(())
}

/// Returns whether a drive is noted.
pub fn is_lent(root: &Path, device: Bdf) -> bool {
    !notes(root, device).is_empty()
}

/// Returns whether a block device is of a drive that this node binds as it likes, which makes it a
/// renter's and none of the node's. `entry` is its folder in sysfs.
pub fn is_foreign(entry: &Path) -> bool {
    let Ok(real) = fs::canonicalize(entry) else { return false };
    real.ancestors().any(|above| {
        let name = above.file_name().and_then(|name| name.to_str()?.parse::<Bdf>().ok());
        // The kernel prints a null pointer where nobody wrote anything.
        let driver = name.and_then(|_| fs::read_to_string(above.join("driver_override")).ok());
        driver.is_some_and(|driver| !matches!(driver.trim(), "" | "(null)"))
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
    fn a_disk_whose_driver_was_chosen_is_not_the_nodes() {
        let device = format!("sys/devices/pci0000:00/{DEVICE}");
        let disk = format!("{device}/nvme/nvme0/nvme0n1/nvme0n1p2");
        let root = testing::root(&[
            (&format!("{disk}/uevent"), b"PARTNAME=holdfast-state\n"),
            (&format!("{device}/driver_override"), b"(null)\n"),
        ]);
        let entry = root.path().join("entry");
        symlink(root.path().join(disk), &entry).expect("linked");
        assert!(!is_foreign(&entry));
        fs::write(root.path().join(device).join("driver_override"), "nvme\n").expect("written");
        assert!(is_foreign(&entry));
        assert!(!is_foreign(&root.path().join("nowhere")));
    }
}
