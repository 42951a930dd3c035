//! Finding partitions by their GPT names, as the kernel tells them. When several disks have one, that
//! of the disk counts which the system was started from.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Longest wait for disks that are still being probed.
const LIMIT: Duration = Duration::from_secs(5);

/// Disks that did not change for this long are complete.
const QUIET: Duration = Duration::from_millis(400);

const POLL: Duration = Duration::from_millis(20);

/// Waits until every partition of `names` is there, or no disk has appeared for a while.
pub fn settle(names: &[&str]) {
    let begin = Instant::now();
    let mut seen = block_devices();
    let mut changed = begin;
    while begin.elapsed() < LIMIT && changed.elapsed() < QUIET {
        if names.iter().all(|name| find(name).is_some()) {
            return;
        }
        std::thread::sleep(POLL);
        let now = block_devices();
        if now != seen {
            (seen, changed) = (now, Instant::now());
        }
    }
}

/// Variable in which systemd-stub leaves the identity of the partition that it was started from, as
/// text in UTF-16. Source: systemd's Boot Loader Interface.
const STARTED_FROM: &str =
    "/sys/firmware/efi/efivars/LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";

/// Returns the device file of the partition with this GPT name.
pub fn find(name: &str) -> Option<String> {
    let started_from = fs::read(STARTED_FROM).ok().map(|bytes| identity(&bytes));
    find_in(Path::new("/sys/class/block"), name, started_from.as_deref())
}

/// Returns the kernel's name of the partition with this GPT name below `root`.
pub(crate) fn find_below(root: &Path, name: &str) -> Option<String> {
    let started_from = fs::read(root.join(STARTED_FROM.trim_start_matches('/'))).ok();
    let started_from = started_from.map(|bytes| identity(&bytes));
    let device = find_in(&root.join("sys/class/block"), name, started_from.as_deref())?;
    device.strip_prefix("/dev/").map(str::to_owned)
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

fn find_in(class: &Path, name: &str, started_from: Option<&str>) -> Option<String> {
    let mut entries: Vec<_> = fs::read_dir(class).ok()?.flatten().map(|e| e.path()).collect();
    entries.sort();
    let all: Vec<Found> = entries.iter().filter_map(|entry| read(entry)).collect();
    let disk = all.iter().find(|part| Some(part.id.as_str()) == started_from).map(|p| &p.disk);
    let mut named: Vec<&Found> = all.iter().filter(|part| part.name == name).collect();
    named.sort_by_key(|part| Some(&part.disk) != disk);
    named.first().map(|part| format!("/dev/{}", part.device))
}

fn read(entry: &Path) -> Option<Found> {
    let uevent = fs::read_to_string(entry.join("uevent")).ok()?;
    let value = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key));
    let disk = fs::canonicalize(entry).ok()?.parent()?.to_owned();
    Some(Found {
        device: value("DEVNAME=")?.to_owned(),
        disk,
        name: value("PARTNAME=")?.to_owned(),
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
    fn a_partition_is_found_by_its_name() {
        let class = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            fs::create_dir(class.path().join(name)).expect("made");
            fs::write(class.path().join(name).join("uevent"), text).expect("written");
        };
        write("vda", "MAJOR=254\nDEVNAME=vda\nDEVTYPE=disk\n");
        write("vda2", "DEVNAME=vda2\nDEVTYPE=partition\nPARTN=2\nPARTNAME=holdfast-state\n");
        assert_eq!(find_in(class.path(), "holdfast-state", None).as_deref(), Some("/dev/vda2"));
        assert_eq!(find_in(class.path(), "holdfast", None), None);
    }

    #[test]
    fn of_two_disks_that_counts_which_the_system_was_started_from() {
        let sys = tempfile::tempdir().expect("a directory");
        let class = sys.path().join("class");
        fs::create_dir(&class).expect("made");
        for disk in ["sda", "sdb"] {
            for (number, name) in [(1, "holdfast-esp"), (2, "holdfast-state")] {
                let part = sys.path().join(format!("{disk}/{disk}{number}"));
                fs::create_dir_all(&part).expect("made");
                let text =
                    format!("DEVNAME={disk}{number}\nPARTNAME={name}\nPARTUUID={disk}-{number}\n");
                fs::write(part.join("uevent"), text).expect("written");
                std::os::unix::fs::symlink(&part, class.join(format!("{disk}{number}")))
                    .expect("linked");
            }
        }
        let found = |from| find_in(&class, "holdfast-state", from);
        assert_eq!(found(Some("sdb-1")).as_deref(), Some("/dev/sdb2"));
        assert_eq!(found(Some("sdz-1")).as_deref(), Some("/dev/sda2"));
        assert_eq!(found(None).as_deref(), Some("/dev/sda2"));
        let variable = [&[6, 0, 0, 0][..], &[b'S', 0, b'd', 0, b'B', 0, 0, 0]].concat();
        assert_eq!(identity(&variable), "sdb");
    }
}
