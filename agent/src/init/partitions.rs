//! Finding partitions by their GPT names, as the kernel tells them.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
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

/// Returns the device file of the partition with this GPT name.
pub fn find(name: &str) -> Option<String> {
    find_in(Path::new("/sys/class/block"), name)
}

fn find_in(class: &Path, name: &str) -> Option<String> {
    let mut entries: Vec<_> = fs::read_dir(class).ok()?.flatten().map(|e| e.path()).collect();
    entries.sort();
    entries.iter().find_map(|entry| {
        let uevent = fs::read_to_string(entry.join("uevent")).ok()?;
        let value = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key));
        (value("PARTNAME=") == Some(name)).then(|| value("DEVNAME="))?.map(|d| format!("/dev/{d}"))
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
        assert_eq!(find_in(class.path(), "holdfast-state").as_deref(), Some("/dev/vda2"));
        assert_eq!(find_in(class.path(), "holdfast"), None);
    }
}
