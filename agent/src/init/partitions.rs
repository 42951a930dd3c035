//! Finding partitions by their GPT names, as the kernel tells them. That of the disk counts which the system was
//! started from, else that of the server's own disk. Nothing on a renter's drive counts, and of several disks with
//! the identity that is looked for only the one whose hardware is remembered.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, Instant},
};

use update::disk::layout;

use super::own_disks::{self, Disk, Own};
use crate::{assign::lent, install::disks};

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
    let root = Path::new("/");
    let quiet = if has_late(Path::new("/sys/bus/pci/devices")) { QUIET } else { QUIET_PROBED };
    let mut seen = block_devices();
    let mut changed = begin;
    let (started_from, own) = (started_from(), own());
    loop {
        let all = list_all(root);
        let missing = missing(&all, started_from.as_deref(), own.clone().disks());
        let find = |name: &str| find_in(root, name, started_from.as_deref(), || own.clone());
        let facts = Facts {
            complete: names.iter().all(|name| find(name).is_some())
                && !missing.iter().any(|disk| is_copied(disk, started_from.as_deref())),
            awaited: !missing.is_empty(),
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

/// Returns those that are not there yet of the disks that are waited for: the one that the system was started
/// from, and the server's own, which holds who this node is.
fn missing(all: &[Found], started_from: Option<&str>, own: Vec<Disk>) -> Vec<Disk> {
    let known = own.iter().any(|disk| Some(disk.partition.as_str()) == started_from);
    let other = started_from.filter(|_| !known);
    let other = other.map(|id| Disk { partition: id.to_owned(), hardware: None });
    other.into_iter().chain(own).filter(|disk| disks_of(all, disk).is_empty()).collect()
}

/// Whether what has the identity of this missing disk is other hardware, on which the disk that the system was
/// started from may have been copied.
fn is_copied(missing: &Disk, started_from: Option<&str>) -> bool {
    missing.hardware.is_some() && Some(missing.partition.as_str()) == started_from
}

/// What is known of the disks at one moment.
#[derive(Debug, Clone, Copy)]
struct Facts {
    /// Every partition that is looked for is there, and on no copy of its disk.
    complete: bool,
    /// The disk that the system was started from, or the server's own, is not.
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

/// Returns the disk that a partition's device file is on, as it is remembered; `None` where its EFI system
/// partition has no identity.
pub(crate) fn disk_of(device: &str) -> Option<Disk> {
    let all = list(Path::new("/"));
    let disk = &all.iter().find(|part| part.path() == device)?.disk;
    let mut beside = all.iter().filter(|part| part.disk == *disk && part.name == layout::ESP);
    beside.next().and_then(|part| part.identified())
}

/// Returns the disk that the system was started from, if that has a STATE.
pub(super) fn started_from_installed(root: &Path) -> Option<Disk> {
    let all = list(root);
    let id = started_from_below(root)?;
    let disk = started_disk(&all, &id, || own_disks::read(root))?;
    let mut parts = all.iter().filter(|part| part.disk == *disk);
    let esp = parts.clone().find(|part| part.id == id)?;
    parts.any(|part| part.name == layout::STATE).then(|| esp.identified())?
}

/// Returns the device file of the partition that the system was started from, if that is on a renter's drive.
pub(super) fn started_from_renters(root: &Path) -> Option<String> {
    let id = started_from_below(root)?;
    let with = |part: &&Found| part.id == id;
    let all = list_all(root);
    let renters = all.iter().filter(with).all(|part| part.owner == Owner::Renter);
    all.iter().find(with).filter(|_| renters).map(Found::path)
}

/// Returns the disks that are remembered as the server's and are not there.
pub(crate) fn absent(root: &Path) -> Vec<Disk> {
    let all = list(root);
    let own = own_disks::read(root).disks().into_iter();
    own.filter(|disk| disks_of(&all, disk).is_empty()).collect()
}

fn own() -> Own {
    own_disks::read(Path::new("/"))
}

/// The variable stays as it is while the system runs, and each look at it calls the firmware.
fn started_from() -> Option<String> {
    static FOUND: OnceLock<String> = OnceLock::new();
    if FOUND.get().is_none() {
        FOUND.set(started_from_below(Path::new("/"))?).ok();
    }
    FOUND.get().cloned()
}

/// Returns the kernel's name of the partition with this GPT name below `root`.
pub(crate) fn find_below(root: &Path, name: &str) -> Option<String> {
    let started_from = started_from_below(root);
    let own = || own_disks::read(root);
    let device = find_in(root, name, started_from.as_deref(), own)?;
    device.strip_prefix("/dev/").map(str::to_owned)
}

/// Returns the folder in sysfs of the disk below `root` that the system was started from; `None` when it was no
/// disk with partitions, as a CD or the network, or a renter's drive.
pub(crate) fn started_from_disk(root: &Path) -> Option<PathBuf> {
    let id = started_from_below(root)?;
    started_disk(&list(root), &id, || own_disks::read(root)).map(Path::to_owned)
}

fn started_from_below(root: &Path) -> Option<String> {
    let read = fs::read(root.join(STARTED_FROM.trim_start_matches('/'))).ok()?;
    Some(identity(&read)).filter(|id| !id.is_empty())
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
    /// Its disk's folder in sysfs.
    disk: PathBuf,
    name: String,
    id: String,
    owner: Owner,
}

/// Whose a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// It may be the server's.
    Server,
    /// A renter's.
    Renter,
}

impl Found {
    fn path(&self) -> String {
        format!("/dev/{}", self.device)
    }

    /// Returns the partition's disk, as it is remembered.
    fn identified(&self) -> Option<Disk> {
        let hardware = Some(disks::hardware(&self.disk));
        (!self.id.is_empty()).then(|| Disk { partition: self.id.clone(), hardware })
    }
}

/// Finds a partition on the disk that the system was started from, else on the server's own; `own` is asked
/// only where it matters.
fn find_in(
    root: &Path,
    name: &str,
    started_from: Option<&str>,
    own: impl Fn() -> Own,
) -> Option<String> {
    let all = list(root);
    let named: Vec<&Found> = all.iter().filter(|part| part.name == name).collect();
    let on = |disk: &Path| named.iter().find(|part| part.disk == disk).map(|part| part.path());
    let first = named.first()?.path();
    let started = started_from.and_then(|id| started_disk(&all, id, &own));
    started.and_then(on).or_else(|| match own() {
        Own::Unknown => Some(first),
        Own::Remembered(disks) => {
            disks.iter().filter_map(|disk| only(disks_of(&all, disk))).find_map(on)
        }
    })
}

/// Returns the disk that the system was started from, by the identity of the partition. Whoever knows an
/// identity can give it to a disk of his, so of several the one counts whose hardware is remembered.
fn started_disk<'a>(all: &'a [Found], id: &str, own: impl Fn() -> Own) -> Option<&'a Path> {
    let with = disks_of(all, &Disk { partition: id.to_owned(), hardware: None });
    if with.len() < 2 {
        return with.first().copied();
    }
    let is_this = |disk: &Disk| disk.partition == id && disk.hardware.is_some();
    let mut known = own().disks().into_iter().filter(is_this);
    known.find_map(|disk| only(disks_of(all, &disk)))
}

/// Returns all disks with a disk's identity, on its hardware where that is remembered.
fn disks_of<'a>(all: &'a [Found], disk: &Disk) -> Vec<&'a Path> {
    let with = all.iter().filter(|part| part.id == disk.partition).map(|part| &*part.disk);
    let with: BTreeSet<&Path> = with.collect();
    with.into_iter().filter(|path| disk.may_be(&disks::hardware(path))).collect()
}

/// Returns the only one; `None` where there is none, or several.
fn only<T: Copy>(of: Vec<T>) -> Option<T> {
    of.first().copied().filter(|_| of.len() == 1)
}

/// Lists all partitions but renters', by the kernel's names.
fn list(root: &Path) -> Vec<Found> {
    let all = list_all(root).into_iter();
    all.filter(|part| part.owner == Owner::Server).collect()
}

/// Lists all partitions, by the kernel's names.
fn list_all(root: &Path) -> Vec<Found> {
    let entries = fs::read_dir(root.join("sys/class/block")).into_iter().flatten().flatten();
    let mut entries: Vec<_> = entries.map(|entry| entry.path()).collect();
    entries.sort();
    entries.iter().filter_map(|entry| read(root, entry)).collect()
}

/// Reads a partition.
fn read(root: &Path, entry: &Path) -> Option<Found> {
    let uevent = fs::read_to_string(entry.join("uevent")).ok()?;
    let value = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key));
    let name = value("PARTNAME=")?.to_owned();
    let disk = fs::canonicalize(entry).ok()?.parent()?.to_owned();
    Some(Found {
        device: value("DEVNAME=")?.to_owned(),
        disk,
        name,
        id: value("PARTUUID=").unwrap_or_default().to_ascii_lowercase(),
        owner: if lent::is_foreign(root, entry) { Owner::Renter } else { Owner::Server },
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

    /// A server's root with disks of a name and a serial number each, all with these identities.
    fn server(disks: &[(&str, &str)], identity: impl Fn(&str) -> String) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let class = root.path().join("sys/class/block");
        fs::create_dir_all(&class).expect("made");
        for (disk, serial) in disks {
            let folder = root.path().join(format!("sys/devices/{disk}"));
            fs::create_dir_all(&folder).expect("made");
            fs::write(folder.join("serial"), serial).expect("written");
            for (number, name) in [(1, layout::ESP), (2, layout::STATE)] {
                let part = folder.join(format!("{disk}{number}"));
                fs::create_dir_all(&part).expect("made");
                let id = identity(disk);
                let text =
                    format!("DEVNAME={disk}{number}\nPARTNAME={name}\nPARTUUID={id}-{number}\n");
                fs::write(part.join("uevent"), text).expect("written");
                std::os::unix::fs::symlink(&part, class.join(format!("{disk}{number}")))
                    .expect("linked");
            }
        }
        root
    }

    /// Has firmware tell which partition the system was started from.
    fn start_from(root: &Path, id: &str) {
        let path = root.join(STARTED_FROM.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        let units = id.encode_utf16().flat_map(u16::to_le_bytes);
        fs::write(path, [6, 0, 0, 0].into_iter().chain(units).collect::<Vec<u8>>())
            .expect("written");
    }

    fn disk(partition: &str, hardware: Option<&str>) -> Disk {
        Disk { partition: partition.to_owned(), hardware: hardware.map(str::to_owned) }
    }

    const TWO: [(&str, &str); 2] = [("sda", "A"), ("sdb", "B")];

    #[test]
    fn of_two_disks_that_counts_which_the_system_was_started_from() {
        let root = server(&TWO, str::to_owned);
        let found = |from| find_in(root.path(), layout::STATE, from, || Own::Unknown);
        assert_eq!(found(Some("sdb-1")).as_deref(), Some("/dev/sdb2"));
        assert_eq!(found(Some("sdz-1")).as_deref(), Some("/dev/sda2"));
        assert_eq!(found(None).as_deref(), Some("/dev/sda2"));
        let owned = |from, own: &[Disk]| {
            find_in(root.path(), layout::STATE, from, || Own::Remembered(own.to_vec()))
        };
        assert_eq!(owned(None, &[]), None, "a renter may have made it");
        for own in [disk("sdb-1", None), disk("sdb-1", Some("B"))] {
            let own = [own];
            assert_eq!(owned(None, &own).as_deref(), Some("/dev/sdb2"));
            assert_eq!(owned(Some("sda-1"), &own).as_deref(), Some("/dev/sda2"));
            assert_eq!(owned(Some("sdz-1"), &own).as_deref(), Some("/dev/sdb2"));
        }
        assert_eq!(owned(None, &[disk("sdb-1", Some("A"))]), None, "it was copied");
        let variable = [&[6, 0, 0, 0][..], &[b'S', 0, b'd', 0, b'B', 0, 0, 0]].concat();
        assert_eq!(identity(&variable), "sdb");
    }

    #[test]
    fn of_copies_of_a_disk_only_the_one_counts_whose_hardware_is_remembered() {
        let root = server(&TWO, |_| "own".to_owned());
        start_from(root.path(), "own-1");
        let found = |from, own: &[Disk]| {
            find_in(root.path(), layout::STATE, from, || Own::Remembered(own.to_vec()))
        };
        for from in [None, Some("own-1")] {
            assert_eq!(found(from, &[]), None);
            assert_eq!(found(from, &[disk("own-1", None)]), None);
            assert_eq!(found(from, &[disk("own-1", Some("C"))]), None);
            let own = [disk("own-1", Some("B"))];
            assert_eq!(found(from, &own).as_deref(), Some("/dev/sdb2"));
        }
        assert_eq!(started_from_installed(root.path()), None);
        assert_eq!(started_from_disk(root.path()), None);
        let own = disk("own-1", Some("B"));
        own_disks::remember(root.path(), &own);
        assert_eq!(started_from_installed(root.path()), Some(own));
        assert!(started_from_disk(root.path()).is_some_and(|disk| disk.ends_with("sdb")));
        assert!(absent(root.path()).is_empty());
    }

    #[test]
    fn a_disk_is_remembered_with_its_hardware_and_told_when_it_is_gone() {
        let root = server(&TWO, str::to_owned);
        start_from(root.path(), "sda-1");
        let own = disk("sda-1", Some("A"));
        assert_eq!(started_from_installed(root.path()), Some(own.clone()));
        own_disks::remember(root.path(), &own);
        assert!(absent(root.path()).is_empty());
        fs::write(root.path().join("sys/devices/sda/serial"), "Z").expect("written");
        assert_eq!(absent(root.path()), [own]);
    }

    #[test]
    fn the_remembered_hardware_is_waited_for_where_a_copy_of_it_is_there_before() {
        let root = server(&TWO[1..], |_| "own".to_owned());
        let all = list_all(root.path());
        let own = disk("own-1", Some("A"));
        let missing_of = |own: &Disk| missing(&all, Some("own-1"), vec![own.clone()]);
        assert_eq!(missing_of(&own), std::slice::from_ref(&own));
        assert!(is_copied(&own, Some("own-1")));
        assert!(missing_of(&disk("own-1", Some("B"))).is_empty());
        // A stick that the system was started from holds nothing that could be copied.
        let stick = disk("stick-1", None);
        let missing = missing(&all, Some("stick-1"), Vec::new());
        assert_eq!(missing, std::slice::from_ref(&stick));
        assert!(!is_copied(&stick, Some("stick-1")));
    }

    #[test]
    fn a_start_from_a_renters_drive_is_not_believed() {
        let root = server(&TWO, str::to_owned);
        start_from(root.path(), "sda-1");
        let chosen = root.path().join("sys/devices/0000:01:00.0");
        fs::create_dir_all(&chosen).expect("made");
        fs::rename(root.path().join("sys/devices/sda"), chosen.join("sda")).expect("moved");
        let class = root.path().join("sys/class/block");
        for part in ["sda1", "sda2"] {
            fs::remove_file(class.join(part)).expect("removed");
            std::os::unix::fs::symlink(chosen.join("sda").join(part), class.join(part))
                .expect("linked");
        }
        assert!(started_from_installed(root.path()).is_some());
        assert_eq!(started_from_renters(root.path()), None);
        let noted = root.path().join("sys/firmware/efi/efivars");
        crate::efivars::keep(&noted, "LentDrives", b"0000:01:00.0 \n").expect("kept");
        lent::recall(root.path()).expect("recalled");
        assert_eq!(started_from_installed(root.path()), None);
        assert_eq!(started_from_disk(root.path()), None);
        assert_eq!(started_from_renters(root.path()).as_deref(), Some("/dev/sda1"));
        assert_eq!(find_below(root.path(), layout::STATE), None);
        // It is there: nobody waits for it.
        assert!(missing(&list_all(root.path()), Some("sda-1"), Vec::new()).is_empty());
    }
}
