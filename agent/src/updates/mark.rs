//! The sign of a program that was started from a slot: a variable of our own, which init writes before it
//! touches a disk. Without it, firmware did not start what it was to try.

use std::{fs, io, path::Path};

use update::{
    channel::Sha256,
    slots::{Place, mark_of},
};

use super::variables;
use crate::efivars;

/// The variable: [`mark_of`] the program that was started last from a slot, 32 bytes.
const NAME: &str = "HoldfastStarted";

/// Leaves the mark, where this boot is one from a slot; `root` is where `etc/os-release` is.
pub fn leave(folder: &Path, root: &Path) -> io::Result<()> {
    if !matches!(variables::place(folder), Some(Place::Slot(_))) {
        return Ok(());
    }
    let text = fs::read_to_string(root.join("etc/os-release"))?;
    efivars::keep(folder, NAME, &mark_of(&text).0)
}

/// Returns the mark that was left last.
pub(super) fn read(folder: &Path) -> Option<Sha256> {
    efivars::read(folder, NAME)?.try_into().ok().map(Sha256)
}

/// Forgets it.
pub(super) fn forget(folder: &Path) -> io::Result<()> {
    efivars::keep(folder, NAME, b"")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn a_start_from_a_slot_leaves_a_mark_until_it_is_forgotten() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("variables");
        fs::create_dir_all(root.path().join("etc")).unwrap();
        fs::create_dir_all(&folder).unwrap();
        fs::write(root.path().join("etc/os-release"), "VERSION_ID=1.2.3\n").unwrap();
        let start = |path: &str| {
            let units = path.encode_utf16().chain([0]).flat_map(u16::to_le_bytes);
            let bytes: Vec<u8> = [6, 0, 0, 0].into_iter().chain(units).collect();
            fs::write(folder.join(variables::IMAGE_IDENTIFIER), bytes).unwrap();
            leave(&folder, root.path()).unwrap();
            read(&folder)
        };
        leave(&folder, root.path()).unwrap();
        assert_eq!(read(&folder), None, "nothing says where it was started from");
        assert_eq!(start("\\EFI\\BOOT\\BOOTX64.EFI"), None, "that is no trial");
        assert_eq!(start("\\EFI\\HOLDFAST\\B.EFI"), Some(mark_of("VERSION_ID=1.2.3\n")));
        forget(&folder).unwrap();
        assert_eq!(read(&folder), None);
    }
}
