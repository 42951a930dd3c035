//! What a new release must have: the network, other nodes, the machines' store on its disk, and every
//! device, watchdog and TPM that there was before.

use std::{fs, path::Path};

use types::node::PciDevice;
use update::slots::gate::Checks;

/// What is expected of a release that was fetched without a network: that it needs none either.
const WITHOUT_NETWORK: &str = "no network needed";
const NO_NETWORK: &str = "no network";
const NO_NODE: &str = "no other node was reached";

/// What is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Health {
    /// What another release must have too.
    pub(super) present: Vec<String>,
    /// What is missing in any case.
    pub(super) missing: Vec<String>,
}

/// Looks. `members` is how many other nodes are known, `None` when none is expected.
pub(super) fn read(
    root: &Path,
    online: bool,
    members: Option<usize>,
    devices: &[PciDevice],
) -> Health {
    let mut missing = Vec::new();
    if !online {
        missing.push(NO_NETWORK.to_owned());
    }
    if members == Some(0) {
        missing.push(NO_NODE.to_owned());
    }
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    for path in ["/state", "/data"] {
        if !on_disk(&mounts, path) {
            missing.push(format!("{path} is not on the disk"));
        }
    }
    let device = |device: &PciDevice| {
        format!("device {} {:04x}:{:04x}", device.address, device.vendor, device.device)
    };
    let mut present: Vec<String> = devices.iter().map(device).collect();
    present.extend(named(root, "sys/class/watchdog", "watchdog"));
    present.extend(named(root, "sys/class/tpm", "TPM"));
    if !online {
        present.push(WITHOUT_NETWORK.to_owned());
    }
    Health { present, missing }
}

impl Health {
    /// Compares with what there was before.
    pub(super) fn checks(&self, expected: &[String]) -> Checks {
        let mut missing = self.missing.clone();
        if expected.iter().any(|wanted| wanted == WITHOUT_NETWORK) {
            missing.retain(|it| it != NO_NETWORK && it != NO_NODE);
        }
        let hardware = expected.iter().filter(|wanted| *wanted != WITHOUT_NETWORK);
        let lost = hardware.filter(|wanted| !self.present.contains(wanted));
        missing.extend(lost.map(|wanted| format!("{wanted} is gone")));
        Checks { missing }
    }
}

/// Whether a path has a file system of its own that is none in memory.
pub(super) fn on_disk(mountinfo: &str, path: &str) -> bool {
    let at = mountinfo.lines().rfind(|line| line.split(' ').nth(4) == Some(path));
    let kind = at.and_then(|line| line.split(" - ").nth(1));
    kind.is_some_and(|kind| !kind.starts_with("tmpfs "))
}

fn named(root: &Path, class: &str, what: &str) -> Vec<String> {
    let entries = fs::read_dir(root.join(class)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| {
            let identity = fs::read_to_string(entry.path().join("identity"));
            let name = entry.file_name().to_string_lossy().into_owned();
            format!("{what} {}", identity.map_or(name, |text| text.trim().to_owned()))
        })
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn what_was_there_before_must_be_there_again() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let line = |path: &str, kind: &str| format!("31 1 0:30 / {path} rw - {kind} /dev/x rw\n");
        write("proc/self/mountinfo", &(line("/state", "ext4") + &line("/data", "tmpfs")));
        write("sys/class/watchdog/watchdog0/identity", "i6300ESB timer\n");
        let health = read(root.path(), true, Some(2), &[]);
        assert_eq!(health.present, ["watchdog i6300ESB timer"]);
        assert_eq!(health.missing, ["/data is not on the disk"]);
        let gone = health.checks(&["TPM tpm0".to_owned()]);
        assert_eq!(gone.missing, ["/data is not on the disk", "TPM tpm0 is gone"]);
        let alone = read(root.path(), false, Some(0), &[]);
        assert_eq!(alone.missing[..2], ["no network", "no other node was reached"]);
        assert_eq!(read(root.path(), true, None, &[]).missing.len(), 1);
        // A node that had no network when it got the release is not asked for one.
        let data = ["/data is not on the disk"];
        assert_eq!(alone.checks(&alone.present).missing, data);
        assert_eq!(health.checks(&alone.present).missing, data);
        assert_eq!(alone.checks(&health.present).missing.len(), 3);
    }
}
