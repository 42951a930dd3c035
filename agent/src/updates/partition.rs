//! The EFI system partition that the node was started from.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use rustix::fs::{Advice, fadvise};
use update::{
    channel::Sha256,
    disk::{layout, medium},
    slots::{
        Place, Program, Slot,
        fat::{FatError, Storage, Volume},
        firmware,
    },
};

use super::variables;
use crate::{assign::lent, init::partitions};

/// The kernel counts sectors of this length, whatever the disk's are.
const KERNEL_SECTOR: u64 = 512;

/// A partition.
#[derive(Debug, Clone)]
pub(super) struct Partition {
    pub(super) device: PathBuf,
    /// Where firmware finds it.
    pub(super) place: firmware::Partition,
    /// Which file of it was started.
    pub(super) from: Option<Place>,
}

/// Its device file.
pub(super) struct Device(File);

/// Finds the partition below `root`; `None` when the node was not started from one.
pub(super) fn find(root: &Path) -> Option<Partition> {
    let folder = root.join(crate::efivars::FOLDER.trim_start_matches('/'));
    let wanted = variables::partition(&folder)?;
    let from = variables::place(&folder);
    let mut entries = fs::read_dir(partitions::started_from_disk(root)?).ok()?.flatten();
    let found = entries.find_map(|entry| read(root, &entry.path(), &wanted))?;
    Some(Partition { from, ..found })
}

/// Finds the partition of the disk that STATE is on, for a node that was started from elsewhere; `None`
/// when STATE is in memory.
pub(super) fn beside_state(root: &Path) -> Option<Partition> {
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    if !super::health::on_disk(&mounts, "/state") {
        return None;
    }
    let class = root.join("sys/class/block");
    let state = partitions::find_below(root, layout::STATE)?;
    let disk = fs::canonicalize(class.join(state)).ok()?.parent()?.to_owned();
    let mut entries = fs::read_dir(disk).ok()?.flatten();
    entries.find_map(|entry| {
        let uevent = fs::read_to_string(entry.path().join("uevent")).ok()?;
        let id = uevent.lines().find_map(|line| line.strip_prefix("PARTUUID="))?;
        read(root, &entry.path(), id)
    })
}

/// Reads what the kernel tells of a partition, if it is the one of this identity, on an installed disk.
fn read(root: &Path, entry: &Path, wanted: &str) -> Option<Partition> {
    if lent::is_foreign(root, entry) {
        return None;
    }
    let uevent = fs::read_to_string(entry.join("uevent")).ok()?;
    let value = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key));
    let id = value("PARTUUID=")?;
    if !id.eq_ignore_ascii_case(wanted) || value("PARTNAME=") != Some(update::disk::layout::ESP) {
        return None;
    }
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let disk = fs::canonicalize(entry).ok()?.parent()?.to_owned();
    let block = number(disk.join("queue/logical_block_size"))?;
    let bytes = |name: &str| number(entry.join(name)).map(|sectors| sectors * KERNEL_SECTOR);
    Some(Partition {
        device: root.join("dev").join(value("DEVNAME=")?),
        place: firmware::Partition {
            number: u32::try_from(number(entry.join("partition"))?).ok()?,
            first: bytes("start")?.checked_div(block)?,
            blocks: bytes("size")?.checked_div(block)?,
            id: id.parse().ok()?,
        },
        from: None,
    })
}

impl Partition {
    /// Opens the volume on it.
    pub(super) fn volume(&self) -> Result<Volume<Device>, FatError> {
        let file = File::options().read(true).write(true).open(&self.device);
        let file = file.map_err(|source| FatError::Disk { action: "open", source })?;
        let mut device = Device(file);
        device.forget().map_err(|source| FatError::Disk { action: "read", source })?;
        Volume::open(device)
    }

    /// Returns what a place holds.
    pub(super) fn program(&self, place: Place) -> Result<Option<Program>, FatError> {
        let bytes = self.volume()?.read(place.path(), medium::PROGRAM_LIMIT)?;
        Ok(bytes.map(|bytes| Program::of(&bytes)))
    }

    /// Copies a slot's program to the fallback path, if it is `sha256`; returns its length.
    pub(super) fn mend(&self, from: Slot, sha256: Sha256) -> Result<u64, FatError> {
        let mut volume = self.volume()?;
        let path = Place::Slot(from).path();
        let damaged = || FatError::Damaged { path: path.to_owned() };
        let bytes = volume.read(path, medium::PROGRAM_LIMIT)?.ok_or_else(damaged)?;
        drop(volume);
        self.write(Place::Fallback, &bytes, sha256)
    }

    /// Lets the fallback path be what a slot is, and the other slot what that was.
    pub(super) fn promote(&self, slot: Slot, sha256: Sha256) -> Result<(), FatError> {
        let kept = Place::Slot(slot.other()).path();
        let names = (Place::Slot(slot).path(), Place::Fallback.path(), kept);
        self.volume()?.promote(names, sha256)
    }

    /// Takes a slot's file away.
    pub(super) fn remove(&self, slot: Slot) -> Result<(), FatError> {
        self.volume()?.remove(Place::Slot(slot).path())
    }

    /// Returns the slot that is one file with the fallback path.
    pub(super) fn shared(&self) -> Result<Option<Slot>, FatError> {
        let mut volume = self.volume()?;
        for slot in Slot::ALL {
            if volume.is_shared(Place::Slot(slot).path(), Place::Fallback.path())? {
                return Ok(Some(slot));
            }
        }
        Ok(None)
    }

    /// Writes a program, verified; returns its length.
    pub(super) fn write(&self, to: Place, bytes: &[u8], sha256: Sha256) -> Result<u64, FatError> {
        let mut volume = self.volume()?;
        let mut writing = volume.begin(to.path(), bytes.len() as u64)?;
        volume.append(&mut writing, bytes)?;
        volume.finish(writing, sha256)?;
        Ok(bytes.len() as u64)
    }
}

impl Read for Device {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Device {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Seek for Device {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

impl Storage for Device {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn forget(&mut self) -> io::Result<()> {
        Ok(fadvise(&self.0, 0, None, Advice::DontNeed)?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_partition_is_that_which_the_node_was_started_from() {
        let root = tempfile::tempdir().unwrap();
        let disk = root.path().join("sys/devices/nvme0n1");
        let class = root.path().join("sys/class/block");
        let part = disk.join("nvme0n1p1");
        for folder in [&disk.join("queue"), &part, &class] {
            fs::create_dir_all(folder).unwrap();
        }
        let id = "00112233-4455-6677-8899-aabbccddeeff";
        let uevent = format!("DEVNAME=nvme0n1p1\nPARTNAME=holdfast-esp\nPARTUUID={id}\n");
        for (name, text) in [
            ("uevent", uevent.as_str()),
            ("partition", "1\n"),
            ("start", "2048\n"),
            ("size", "8192\n"),
        ] {
            fs::write(part.join(name), text).unwrap();
        }
        fs::write(disk.join("queue/logical_block_size"), "4096\n").unwrap();
        symlink(&part, class.join("nvme0n1p1")).unwrap();
        let found = read(root.path(), &class.join("nvme0n1p1"), id).unwrap();
        let wanted =
            firmware::Partition { number: 1, first: 256, blocks: 1024, id: id.parse().unwrap() };
        assert_eq!(found.place, wanted);
        assert!(find(root.path()).is_none());
        assert!(read(root.path(), &class.join("nvme0n1p1"), "other").is_none());

        let units = id.encode_utf16().flat_map(u16::to_le_bytes);
        let variable = root.path().join(partitions::STARTED_FROM.trim_start_matches('/'));
        fs::create_dir_all(variable.parent().unwrap()).unwrap();
        fs::write(variable, [6, 0, 0, 0].into_iter().chain(units).collect::<Vec<u8>>()).unwrap();
        assert_eq!(find(root.path()).unwrap().place, wanted);
        // Somebody gave his partition the same identity.
        let copy = root.path().join("sys/devices/sda/sda1");
        fs::create_dir_all(&copy).unwrap();
        fs::copy(part.join("uevent"), copy.join("uevent")).unwrap();
        symlink(&copy, class.join("sda1")).unwrap();
        assert!(find(root.path()).is_none());
    }
}
