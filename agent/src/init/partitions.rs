//! Finding partitions by their GPT names, as the kernel tells them. That of the disk counts which the system was
//! started from, else that of the server's own disk.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, Instant},
};

use update::disk::layout;

use super::own_disks::{self, Own};
use crate::assign::lent;

/// Longest wait for disks that are still being probed, and for the one that the system was started
/// from, which firmware has read a moment ago, or that is the server's own: so it is there.
const LIMIT: Duration = Duration::from_secs(5);
const STARTED_FROM_LIMIT: Duration = Duration::from_secs(10);

/// Disks that did not change for this long are complete, where a controller finds them by itself and in
/// its own time.
const QUIET: Duration = Duration::from_millis(400);

/// The same elsewhere: the kernel waits for its other probes before it starts this program
/// (`async_synchronize_full` in `init/main.c`), those of AHCI and NVMe among them.
const QUIET_PROBED: Duration = Duration::from_millis(60);

/// Classes of such controllers: SCSI, RAID, SAS, Fibre Channel (PCI Code and ID Assignment).
const LATE_CLASSES: [&str; 4] = ["0x0100", "0x0104", "0x0107", "0x0c04"];

/// Vendor of virtual disks, which are SCSI controllers by class and find nothing by themselves.
const VIRTIO: &str = "0x1af4";

const POLL: Duration = Duration::from_millis(20);

/// Waits until every partition of `names` is there, or nothing more is expected.
pub fn settle(names: &[&str]) {
    let begin = Instant::now();
    let quiet = if has_late(Path::new("/sys/bus/pci/devices")) { QUIET } else { QUIET_PROBED };
    let mut seen = block_devices();
    let mut changed = begin;
    let awaited = awaited();
    loop {
        let facts = Facts {
            complete: names.iter().all(|name| find(name).is_some()),
            awaited: awaited.iter().any(|id| !has_partition(id)),
            waited: begin.elapsed(),
            unchanged: changed.elapsed(),
        };
        if facts.is_settled(quiet) {
            return;
        }
        std::thread::sleep(POLL);
        let now = block_devices();
        if now != seen {
            (seen, changed) = (now, Instant::now());
        }
    }
}

/// Returns the partition that the system was started from, if it was one, and that of the server's own disk,
/// which holds who this node is.
fn awaited() -> Vec<String> {
    let remembered = match own() {
        Own::Unknown => Vec::new(),
        Own::With(ids) => ids,
    };
    started_from().into_iter().chain(remembered).collect()
}

/// What is known of the disks at one moment.
#[derive(Debug, Clone, Copy)]
struct Facts {
    /// Every partition that is looked for is there.
    complete: bool,
    /// The partition that the system was started from, or that is the server's own, is not.
    awaited: bool,
    /// How long they were waited for.
    waited: Duration,
    /// How long none came.
    unchanged: Duration,
}

impl Facts {
    fn is_settled(&self, quiet: Duration) -> bool {
        let Self { complete, awaited, waited, unchanged } = *self;
        if complete {
            return true;
        }
        if awaited { waited >= STARTED_FROM_LIMIT } else { waited >= LIMIT || unchanged >= quiet }
    }
}

/// Whether a controller may find its disks later than the kernel waits for.
fn has_late(devices: &Path) -> bool {
    let mut entries = fs::read_dir(devices).into_iter().flatten().flatten();
    entries.any(|entry| {
        let told = |name| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let late = LATE_CLASSES.iter().any(|late| told("class").starts_with(late));
        late && !told("vendor").starts_with(VIRTIO)
    })
}

/// Variable in which systemd-stub leaves the identity of the partition that it was started from, as
/// text in UTF-16. Source: systemd's Boot Loader Interface.
pub(crate) const STARTED_FROM: &str =
    "/sys/firmware/efi/efivars/LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";

/// Returns the device file of the partition with this GPT name.
pub fn find(name: &str) -> Option<String> {
    find_in(Path::new("/"), name, started_from().as_deref(), own)
}

/// Returns the device files of partitions with this GPT name on disks that are not known to be this server's,
/// where there is none on one that is.
pub fn foreign(name: &str) -> Vec<String> {
    if find(name).is_some() {
        return Vec::new();
    }
    let all = list(Path::new("/")).into_iter();
    all.filter(|part| part.name == name).map(|part| part.path()).collect()
}

/// Returns the identity of the EFI system partition of the disk that a partition's device file is on.
pub(crate) fn boot_partition_beside(device: &str) -> Option<String> {
    let all = list(Path::new("/"));
    let disk = &all.iter().find(|part| part.path() == device)?.disk;
    let mut beside = all.iter().filter(|part| part.disk == *disk && part.name == layout::ESP);
    beside.next().map(|part| part.id.clone())
}

/// Returns the partition that the system was started from, if that is on a disk with a STATE.
pub(super) fn started_from_installed() -> Option<String> {
    let id = started_from()?;
    let all = list(Path::new("/"));
    let disk = &all.iter().find(|part| part.id == id)?.disk;
    all.iter().any(|part| part.disk == *disk && part.name == layout::STATE).then_some(id)
}

fn own() -> Own {
    own_disks::read(Path::new("/"))
}

/// The variable stays as it is while the system runs, and each look at it calls the firmware.
fn started_from() -> Option<String> {
    static FOUND: OnceLock<String> = OnceLock::new();
    if FOUND.get().is_none() {
        let read = fs::read(STARTED_FROM).ok()?;
        FOUND.set(identity(&read)).ok();
    }
    FOUND.get().cloned()
}

/// Whether a partition with this identity is there.
fn has_partition(id: &str) -> bool {
    list(Path::new("/")).iter().any(|part| part.id == id)
}

/// Returns the kernel's name of the partition with this GPT name below `root`.
pub(crate) fn find_below(root: &Path, name: &str) -> Option<String> {
    let started_from = started_from_below(root);
    let own = || own_disks::read(root);
    let device = find_in(root, name, started_from.as_deref(), own)?;
    device.strip_prefix("/dev/").map(str::to_owned)
}

/// Returns the kernel's name of the disk below `root` that the system was started from; `None` when it was no
/// disk with partitions, as a CD or the network.
pub(crate) fn started_from_disk(root: &Path) -> Option<String> {
    let id = started_from_below(root)?;
    let mut parts = list(root).into_iter();
    parts.find(|part| part.id == id)?.disk.file_name()?.to_str().map(str::to_owned)
}

fn started_from_below(root: &Path) -> Option<String> {
    let read = fs::read(root.join(STARTED_FROM.trim_start_matches('/'))).ok()?;
    Some(identity(&read))
}

/// Reads a variable: four bytes of attributes, then text.
fn identity(variable: &[u8]) -> String {
    let text = variable.get(4..).unwrap_or_default().chunks_exact(2);
    let units = text.map(|pair| u16::from_le_bytes([pair[0], pair[1]])).take_while(|&u| u != 0);
    char::decode_utf16(units).filter_map(Result::ok).collect::<String>().to_ascii_lowercase()
}

/// A partition, as its `uevent` tells it.
struct Found {
    device: String,
    disk: PathBuf,
    name: String,
    id: String,
}

impl Found {
    fn path(&self) -> String {
        format!("/dev/{}", self.device)
    }
}

/// Finds a partition on the disk that the system was started from, else on the server's own; `own` is asked
/// only then.
fn find_in(
    root: &Path,
    name: &str,
    started_from: Option<&str>,
    own: impl FnOnce() -> Own,
) -> Option<String> {
    let all = list(root);
    let disk = all.iter().find(|part| Some(part.id.as_str()) == started_from).map(|p| &p.disk);
    let named: Vec<&Found> = all.iter().filter(|part| part.name == name).collect();
    if let Some(part) = named.iter().find(|part| Some(&part.disk) == disk) {
        return Some(part.path());
    }
    let own = if named.is_empty() { return None } else { own() };
    let is_own = |part: &&&Found| {
        let beside = all.iter().filter(|other| other.disk == part.disk);
        own.may_have(beside.map(|other| other.id.as_str()))
    };
    named.iter().find(is_own).map(|part| part.path())
}

/// Lists all partitions but renters', by the kernel's names.
fn list(root: &Path) -> Vec<Found> {
    let entries = fs::read_dir(root.join("sys/class/block")).into_iter().flatten().flatten();
    let mut entries: Vec<_> = entries.map(|entry| entry.path()).collect();
    entries.sort();
    entries.iter().filter_map(|entry| read(root, entry)).collect()
}

/// Reads a partition; one on a renter's drive is none.
fn read(root: &Path, entry: &Path) -> Option<Found> {
    let uevent = fs::read_to_string(entry.join("uevent")).ok()?;
    let value = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key));
    let name = value("PARTNAME=").filter(|_| !lent::is_foreign(root, entry))?.to_owned();
    let disk = fs::canonicalize(entry).ok()?.parent()?.to_owned();
    Some(Found {
        device: value("DEVNAME=")?.to_owned(),
        disk,
        name,
        id: value("PARTUUID=").unwrap_or_default().to_ascii_lowercase(),
    })
}

fn block_devices() -> BTreeSet<std::ffi::OsString> {
    let entries = fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_started_from_is_waited_for_and_the_rest_as_long_as_it_comes() {
        let ms = Duration::from_millis;
        let settled = |complete, awaited, waited, unchanged| {
            let facts = Facts { complete, awaited, waited: ms(waited), unchanged: ms(unchanged) };
            facts.is_settled(QUIET_PROBED)
        };
        assert!(settled(true, true, 0, 0));
        assert!(!settled(false, false, 30, 30));
        assert!(settled(false, false, 60, 60));
        assert!(!settled(false, false, 4_000, 20));
        assert!(settled(false, false, 5_000, 20));
        // A disk of a slow controller, which holds who this node is.
        assert!(!settled(false, true, 5_000, 5_000));
        assert!(settled(false, true, 10_000, 10_000));
    }

    #[test]
    fn controllers_that_take_their_time_are_known_by_class() {
        let devices = tempfile::tempdir().expect("a directory");
        let add = |name: &str, class: &str| {
            fs::create_dir(devices.path().join(name)).expect("made");
            fs::write(devices.path().join(name).join("class"), class).expect("written");
        };
        // AHCI, NVMe, USB.
        for (name, class) in [("a", "0x010601\n"), ("b", "0x010802\n"), ("c", "0x0c0330\n")] {
            add(name, class);
        }
        add("v", "0x010000\n");
        fs::write(devices.path().join("v/vendor"), "0x1af4\n").expect("written");
        assert!(!has_late(devices.path()));
        add("d", "0x010700\n");
        assert!(has_late(devices.path()));
    }

    #[test]
    fn a_partition_is_found_by_its_name() {
        let root = tempfile::tempdir().expect("a directory");
        let class = root.path().join("sys/class/block");
        let write = |name: &str, text: &str| {
            fs::create_dir_all(class.join(name)).expect("made");
            fs::write(class.join(name).join("uevent"), text).expect("written");
        };
        write("vda", "MAJOR=254\nDEVNAME=vda\nDEVTYPE=disk\n");
        write("vda2", "DEVNAME=vda2\nDEVTYPE=partition\nPARTN=2\nPARTNAME=holdfast-state\n");
        let found = |name| find_in(root.path(), name, None, || Own::Unknown);
        assert_eq!(found("holdfast-state").as_deref(), Some("/dev/vda2"));
        assert_eq!(found("holdfast"), None);
    }

    #[test]
    fn of_two_disks_that_counts_which_the_system_was_started_from() {
        let root = tempfile::tempdir().expect("a directory");
        let class = root.path().join("sys/class/block");
        fs::create_dir_all(&class).expect("made");
        for disk in ["sda", "sdb"] {
            for (number, name) in [(1, "holdfast-esp"), (2, "holdfast-state")] {
                let part = root.path().join(format!("{disk}/{disk}{number}"));
                fs::create_dir_all(&part).expect("made");
                let text =
                    format!("DEVNAME={disk}{number}\nPARTNAME={name}\nPARTUUID={disk}-{number}\n");
                fs::write(part.join("uevent"), text).expect("written");
                std::os::unix::fs::symlink(&part, class.join(format!("{disk}{number}")))
                    .expect("linked");
            }
        }
        let found = |from| find_in(root.path(), "holdfast-state", from, || Own::Unknown);
        assert_eq!(found(Some("sdb-1")).as_deref(), Some("/dev/sdb2"));
        assert_eq!(found(Some("sdz-1")).as_deref(), Some("/dev/sda2"));
        assert_eq!(found(None).as_deref(), Some("/dev/sda2"));
        let owned = |from, own: &[&str]| {
            let own = Own::With(own.iter().map(|id| (*id).to_owned()).collect());
            find_in(root.path(), "holdfast-state", from, || own)
        };
        assert_eq!(owned(None, &[]), None, "a renter may have made it");
        assert_eq!(owned(None, &["sdb-1"]).as_deref(), Some("/dev/sdb2"));
        assert_eq!(owned(Some("sda-1"), &["sdb-1"]).as_deref(), Some("/dev/sda2"));
        let variable = [&[6, 0, 0, 0][..], &[b'S', 0, b'd', 0, b'B', 0, 0, 0]].concat();
        assert_eq!(identity(&variable), "sdb");
    }
}
