//! Keys of machines' disks: one file for each disk, below a folder on STATE. A disk is destroyed by
//! destroying its key, which takes no longer for a large disk than for a small one and does not ask
//! what a disk's controller keeps of overwritten blocks.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use types::{
    disk_key::{DiskKey, KEY_BYTES},
    ids::MachineId,
};

/// Returns the key of a disk. `name` is the disk's file name without its end.
pub fn read(keys: &Path, machine: MachineId, name: &str) -> io::Result<DiskKey> {
    let bytes = zeroize::Zeroizing::new(fs::read(file(keys, machine, name))?);
    let bytes: [u8; KEY_BYTES] = bytes.as_slice().try_into().map_err(io::Error::other)?;
    Ok(DiskKey::from_bytes(bytes))
}

/// Makes the key of a new disk, durable when this returns. One that is there already stays: it is of an
/// attempt that did not come as far as the disk, or of a disk on a DATA that is out of reach for now.
pub fn make(keys: &Path, machine: MachineId, name: &str) -> io::Result<DiskKey> {
    let mut bytes = zeroize::Zeroizing::new([0; KEY_BYTES]);
    getrandom::fill(bytes.as_mut()).map_err(io::Error::other)?;
    let folder = folder(keys, machine);
    fs::create_dir_all(&folder)?;
    let path = file(keys, machine, name);
    if path.exists() {
        return read(keys, machine, name);
    }
    let partial = path.with_extension("partial");
    destroy_file(&partial)?;
    let mut new = File::options().write(true).create_new(true).mode(0o600).open(&partial)?;
    new.write_all(bytes.as_ref())?;
    new.sync_all()?;
    fs::rename(&partial, &path)?;
    for folder in [&folder, keys] {
        File::open(folder)?.sync_all()?;
    }
    Ok(DiskKey::from_bytes(*bytes))
}

/// Destroys the key of one disk. Nothing happens when there is none.
pub fn destroy(keys: &Path, machine: MachineId, name: &str) -> io::Result<()> {
    destroy_file(&file(keys, machine, name))
}

/// Destroys the keys of all disks of a machine. Nothing happens when there are none.
pub fn destroy_all(keys: &Path, machine: MachineId) -> io::Result<()> {
    let folder = folder(keys, machine);
    match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(entries) => {
            for entry in entries {
                destroy_file(&entry?.path())?;
            }
        }
    }
    fs::remove_dir(&folder)?;
    File::open(keys)?.sync_all()
}

/// Overwrites a key where it lies before its file goes: STATE's file system does not move blocks that
/// are overwritten.
fn destroy_file(path: &Path) -> io::Result<()> {
    let mut file = match File::options().write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    file.write_all(&[0; KEY_BYTES])?;
    file.sync_all()?;
    fs::remove_file(path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

fn folder(keys: &Path, machine: MachineId) -> PathBuf {
    keys.join(machine.to_string())
}

fn file(keys: &Path, machine: MachineId, name: &str) -> PathBuf {
    folder(keys, machine).join(format!("{name}.key"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: MachineId = MachineId::from_bytes([5; 16]);

    #[test]
    fn a_key_stays_until_it_is_destroyed() {
        let keys = tempfile::tempdir().expect("a directory");
        let made = make(keys.path(), MACHINE, "disk").expect("made");
        let other = make(keys.path(), MACHINE, "extra-a").expect("made");
        assert_ne!(made, other);
        assert_eq!(read(keys.path(), MACHINE, "disk").expect("read"), made);
        assert_eq!(make(keys.path(), MACHINE, "disk").expect("there already"), made);
        // A link keeps what the file holds in view after it is gone.
        let seen = keys.path().join("seen");
        fs::hard_link(file(keys.path(), MACHINE, "disk"), &seen).expect("linked");
        destroy(keys.path(), MACHINE, "disk").expect("destroyed");
        assert_eq!(fs::read(&seen).expect("read"), [0; KEY_BYTES]);
        assert!(read(keys.path(), MACHINE, "disk").is_err());
        destroy_all(keys.path(), MACHINE).expect("destroyed");
        destroy_all(keys.path(), MACHINE).expect("nothing to do");
        assert!(read(keys.path(), MACHINE, "extra-a").is_err());
    }
}
