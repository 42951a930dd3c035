//! Keys of machines' disks: one file for each disk, below a folder on STATE. A disk is destroyed by
//! destroying its key, which takes no longer for a large disk than for a small one and does not ask
//! what a disk's controller keeps of overwritten blocks.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use types::{
    disk_key::{DiskKey, KEY_BYTES},
    ids::MachineId,
};

use crate::twice;

/// Returns the key of a disk. `name` is the disk's file name without its end. One that is damaged is
/// mended by its copy.
pub fn read(keys: &Path, machine: MachineId, name: &str) -> io::Result<DiskKey> {
    let bytes = twice::read::<KEY_BYTES>(&file(keys, machine, name))?;
    Ok(DiskKey::from_bytes(*bytes.ok_or(io::ErrorKind::NotFound)?))
}

/// Makes the key of a new disk, durable when this returns. One that is there already stays: it is of an
/// attempt that did not come as far as the disk, or of a disk on a DATA that is out of reach for now.
pub fn make(keys: &Path, machine: MachineId, name: &str) -> io::Result<DiskKey> {
    let folder = folder(keys, machine);
    fs::create_dir_all(&folder)?;
    let path = file(keys, machine, name);
    if let Some(bytes) = twice::read::<KEY_BYTES>(&path)? {
        return Ok(DiskKey::from_bytes(*bytes));
    }
    let mut bytes = zeroize::Zeroizing::new([0; KEY_BYTES]);
    getrandom::fill(bytes.as_mut()).map_err(io::Error::other)?;
    twice::write(&path, &bytes)?;
    File::open(keys)?.sync_all()?;
    Ok(DiskKey::from_bytes(*bytes))
}

/// Whether a disk was made that has, or had, this key: one that is not there any more is lost, and none is put
/// in its place.
pub fn is_marked(keys: &Path, machine: MachineId, name: &str) -> bool {
    mark_file(keys, machine, name).exists()
}

/// Remembers that a disk was made, durably when this returns.
pub fn mark(keys: &Path, machine: MachineId, name: &str) -> io::Result<()> {
    let path = mark_file(keys, machine, name);
    fs::create_dir_all(folder(keys, machine))?;
    File::create(&path)?.sync_all()?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Destroys the key of one disk. Nothing happens when there is none.
pub fn destroy(keys: &Path, machine: MachineId, name: &str) -> io::Result<()> {
    let path = file(keys, machine, name);
    // The copy first: a key without one is whole, and a cut in between loses nothing.
    twice::all_of(&path).iter().try_for_each(|path| destroy_file(path))?;
    destroy_file(&mark_file(keys, machine, name))
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
    let length = file.metadata()?.len().max(KEY_BYTES as u64);
    io::copy(&mut io::repeat(0).take(length), &mut file)?;
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

fn mark_file(keys: &Path, machine: MachineId, name: &str) -> PathBuf {
    folder(keys, machine).join(format!("{name}.made"))
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
        // Links keep what the files hold in view after they are gone.
        let path = file(keys.path(), MACHINE, "disk");
        let seen = ["seen", "copy"].map(|name| keys.path().join(name));
        fs::hard_link(&path, &seen[0]).expect("linked");
        fs::hard_link(twice::copy_of(&path), &seen[1]).expect("linked");
        destroy(keys.path(), MACHINE, "disk").expect("destroyed");
        let left = seen.map(|path| fs::read(path).expect("read")).concat();
        assert!(left.len() > 2 * KEY_BYTES && left.iter().all(|byte| *byte == 0));
        assert!(read(keys.path(), MACHINE, "disk").is_err());
        destroy_all(keys.path(), MACHINE).expect("destroyed");
        destroy_all(keys.path(), MACHINE).expect("nothing to do");
        assert!(read(keys.path(), MACHINE, "extra-a").is_err());
    }
}
