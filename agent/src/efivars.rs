//! Firmware's variables through efivarfs, where a file holds four bytes of attributes and then the
//! variable, and this system's own ones. Source: the kernel's Documentation/filesystems/efivarfs.rst.
//!
//! Own variables outlast every disk, no renter reaches them, and there is little room for them: they hold
//! what a node without STATE must not forget.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::{
    fs::{IFlags, ioctl_getflags, ioctl_setflags},
    mount::{MountFlags, mount_remount},
};
use update::efi;

/// Where the kernel shows them, read-only but for the moment of a change.
pub const FOLDER: &str = "/sys/firmware/efi/efivars";
/// Vendor of our own variables, made up for them.
const VENDOR: &str = "6c362a4c-1db5-4ad4-a4b3-bb517f5ed052";
/// Bytes of attributes.
const ATTRIBUTES: usize = 4;
/// Most bytes that are written to a variable of our own: firmware's whole store is often 64 KiB, of which the
/// kernel keeps 5 free (`EFI_MIN_RESERVE` in arch/x86/platform/efi/quirks.c).
const LIMIT: usize = 4096;

/// Runs `act` while variables can be written to. One change at a time: whoever is done makes them read-only.
pub fn writable<T>(folder: &Path, act: impl FnOnce() -> T) -> io::Result<T> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_remount(folder, flags, c"")?;
    let done = act();
    mount_remount(folder, flags | MountFlags::RDONLY, c"")?;
    Ok(done)
}

/// Returns where the variables are in `root`; `None` where no UEFI firmware tells any.
pub fn folder(root: &Path) -> Option<PathBuf> {
    let folder = root.join(FOLDER.trim_start_matches('/'));
    let mut entries = fs::read_dir(&folder).ok()?;
    entries.next().is_some().then_some(folder)
}

/// Returns what a variable of our own says; `None` where it is not there.
pub fn read(folder: &Path, name: &str) -> Option<Vec<u8>> {
    let bytes = fs::read(file(folder, name)).ok()?;
    Some(bytes.get(ATTRIBUTES..)?.to_vec())
}

/// Has a variable of our own say `content`, which is kept without power; deletes it when that is empty. What
/// it says already is not written again: firmware's memory wears out.
pub fn keep(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let file = file(folder, name);
    if read(folder, name).unwrap_or_default() == content {
        return Ok(());
    }
    if content.len() > LIMIT {
        let reason =
            format!("{} bytes are more than the {LIMIT} that are asked of firmware", content.len());
        return Err(io::Error::new(io::ErrorKind::StorageFull, reason));
    }
    let change = || {
        unprotect(&file)?;
        if content.is_empty() {
            return fs::remove_file(&file);
        }
        // The kernel wants attributes and content in one piece.
        fs::write(&file, [&efi::ATTRIBUTES.to_le_bytes(), content].concat())
    };
    if is_mounted(folder)? { writable(folder, change)? } else { change() }
}

/// Makes a variable alterable: of those that it does not know, the kernel lets nobody alter one by accident.
fn unprotect(file: &Path) -> io::Result<()> {
    let file = match File::open(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    // Other file systems know no such thing.
    let Ok(flags) = ioctl_getflags(&file) else { return Ok(()) };
    if flags.contains(IFlags::IMMUTABLE) {
        ioctl_setflags(&file, flags - IFlags::IMMUTABLE)?;
    }
    Ok(())
}

/// Whether a folder is where a file system is mounted.
fn is_mounted(folder: &Path) -> io::Result<bool> {
    let above = folder.parent().unwrap_or(folder);
    Ok(rustix::fs::stat(folder)?.st_dev != rustix::fs::stat(above)?.st_dev)
}

fn file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}-{VENDOR}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_variables_are_kept_altered_and_deleted() {
        let root = tempfile::tempdir().expect("a directory");
        let place = root.path().join("sys/firmware/efi/efivars");
        assert_eq!(folder(root.path()), None);
        fs::create_dir_all(&place).expect("made");
        assert_eq!(folder(root.path()), None, "firmware that tells none");
        fs::write(place.join(format!("BootOrder-{}", efi::GLOBAL)), b"1234").expect("written");
        assert_eq!(folder(root.path()).as_deref(), Some(place.as_path()));

        assert_eq!(read(&place, "Own"), None);
        keep(&place, "Own", b"").expect("nothing to delete");
        for content in [&b"one"[..], b"two", b"two"] {
            keep(&place, "Own", content).expect("kept");
            assert_eq!(read(&place, "Own").as_deref(), Some(content));
        }
        let written = fs::read(file(&place, "Own")).expect("read");
        assert_eq!(written[..ATTRIBUTES], [7, 0, 0, 0]);
        let error = keep(&place, "Own", &[1; LIMIT + 1]).expect_err("too long");
        assert!(error.to_string().contains("4097 bytes are more than the 4096"), "{error}");
        keep(&place, "Own", b"").expect("deleted");
        assert!(!file(&place, "Own").exists());
    }
}
