//! Remembers which devices are quarantined, as long as the node is on: the agent may be restarted
//! meanwhile, and must not offer them again. A power cycle resets them for good and forgets it all, but for
//! drives that were not erased, which `assign::lent` knows: their erasing is tried once more.
//!
//! One file per device, named by its address: the time in Unix seconds, a line feed, the reason.

use std::{fs, io, path::Path};

use types::{
    node::{Bdf, DeviceState},
    units::UnixSeconds,
};

/// Where the files are, in the root.
const FOLDER: &str = "run/holdfast/quarantine";

/// Remembers a device.
pub fn remember(root: &Path, device: Bdf, since: UnixSeconds, reason: &str) -> io::Result<()> {
    let folder = root.join(FOLDER);
    fs::create_dir_all(&folder)?;
    // Renamed into place, so that a reader never sees half of it.
    let new = folder.join(".new");
    fs::write(&new, format!("{}\n{reason}", since.0))?;
    fs::rename(new, folder.join(device.to_string()))
}

/// Forgets a device, which answers again.
pub fn forget(root: &Path, device: Bdf) -> io::Result<()> {
    remove(&root.join(FOLDER).join(device.to_string()))
}

/// Removes a file, if it is there.
pub(super) fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns the state of a device that is remembered.
pub fn recall(root: &Path, device: Bdf) -> Option<DeviceState> {
    let text = fs::read_to_string(root.join(FOLDER).join(device.to_string())).ok()?;
    let (since, reason) = text.split_once('\n').unwrap_or(("", &text));
    let since = since.parse().ok().map(UnixSeconds);
    Some(DeviceState::Quarantined { reason: reason.to_owned(), since })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_remembered_until_it_is_forgotten() {
        let root = tempfile::tempdir().expect("a folder");
        let device: Bdf = "0000:41:00.0".parse().expect("an address");
        assert_eq!(recall(root.path(), device), None);
        remember(root.path(), device, UnixSeconds(1_700_000_000), "no\nanswer").expect("written");
        let reason = "no\nanswer".to_owned();
        let since = Some(UnixSeconds(1_700_000_000));
        let expected = DeviceState::Quarantined { reason, since };
        assert_eq!(recall(root.path(), device), Some(expected));
        forget(root.path(), device).expect("removed");
        forget(root.path(), device).expect("nothing to remove");
        assert_eq!(recall(root.path(), device), None);
    }
}
