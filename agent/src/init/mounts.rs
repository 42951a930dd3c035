//! What is mounted where, with which flags: one table, and a check that reads it back.
//! Source of the check: proc_pid_mountinfo(5).

use std::{fmt, fs, io, path::Path};

use rustix::mount::{MountFlags, mount};

use types::volumes::Protection;

use super::partitions;
use crate::{
    events::Event,
    seal::{unlock, volume},
};

/// One mount.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Where.
    pub path: &'static str,
    /// What file system.
    pub kind: &'static str,
    /// File system's own options.
    pub options: &'static str,
    /// Flags.
    pub flags: MountFlags,
    /// What it needs.
    pub need: Need,
}

/// What a mount needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Nothing: every boot has it.
    Always,
    /// This path, which not every machine has.
    Path(&'static str),
    /// The partition with this GPT name; memory when there is none.
    Partition(&'static str),
}

const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
const READ_ONLY: MountFlags = SAFE.union(MountFlags::RDONLY);

/// Mounts of the first stage: what finding and opening the root takes.
pub const EARLY: &[Entry] = &[
    Entry { path: "/proc", kind: "proc", options: "", flags: SAFE, need: Need::Always },
    Entry { path: "/sys", kind: "sysfs", options: "", flags: SAFE, need: Need::Always },
    Entry {
        path: "/dev",
        kind: "devtmpfs",
        options: "mode=0755",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        need: Need::Always,
    },
    Entry {
        path: "/run",
        kind: "tmpfs",
        options: "mode=0755,size=64m",
        flags: SAFE,
        need: Need::Always,
    },
];

/// Mounts of the second stage.
pub const LATE: &[Entry] = &[
    Entry {
        path: "/sys/fs/cgroup",
        kind: "cgroup2",
        options: "nsdelegate,memory_recursiveprot",
        flags: SAFE,
        need: Need::Always,
    },
    Entry {
        path: "/sys/kernel/security",
        kind: "securityfs",
        options: "",
        flags: READ_ONLY,
        need: Need::Always,
    },
    Entry {
        path: "/sys/firmware/efi/efivars",
        kind: "efivarfs",
        options: "",
        flags: READ_ONLY,
        need: Need::Path("/sys/firmware/efi/efivars"),
    },
    Entry {
        path: "/sys/fs/pstore",
        kind: "pstore",
        options: "",
        flags: SAFE,
        need: Need::Path("/sys/fs/pstore"),
    },
    Entry {
        path: "/tmp",
        kind: "tmpfs",
        options: "mode=1777,size=16m",
        flags: SAFE,
        need: Need::Always,
    },
    Entry {
        path: "/state",
        kind: "ext4",
        options: "",
        flags: SAFE,
        need: Need::Partition("holdfast-state"),
    },
    Entry {
        path: "/data",
        kind: "ext4",
        options: "",
        flags: SAFE,
        need: Need::Partition("holdfast-data"),
    },
];

/// The root file system, mounted from the image in the initramfs.
pub const ROOT: Entry = Entry {
    path: "/",
    kind: "erofs",
    options: "",
    flags: MountFlags::RDONLY.union(MountFlags::NOSUID).union(MountFlags::NODEV),
    need: Need::Always,
};

/// Options of `/state` and `/data` in memory. Machines' disks may take half of it.
const IN_MEMORY: &str = "mode=0700,size=50%";

/// Mounts one entry; `None` when the machine lacks what it needs.
pub fn apply(entry: &Entry) -> Result<Option<Mounted>, MountError> {
    match entry.need {
        Need::Always => do_mount(entry.kind, entry, entry.kind, entry.options).map(Some),
        Need::Path(path) if !Path::new(path).exists() => Ok(None),
        Need::Path(_) => do_mount(entry.kind, entry, entry.kind, entry.options).map(Some),
        Need::Partition(name) => apply_partition(entry, name).map(Some),
    }
}

/// A mount as it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// Where.
    pub path: &'static str,
    /// What file system.
    pub kind: String,
    /// Flags.
    pub flags: MountFlags,
    /// Why it is in memory although a partition was wanted.
    pub in_memory: Option<String>,
}

impl Mounted {
    /// Returns what to report of it.
    pub fn event(&self) -> Option<Event> {
        let reason = self.in_memory.clone()?;
        Some(Event::RamMode { path: self.path, reason })
    }
}

fn apply_partition(entry: &Entry, name: &'static str) -> Result<Mounted, MountError> {
    let open = volume::mapped(Path::new("/"), name).map(|path| path.display().to_string());
    let reason = match (open.or_else(|| partitions::find(name)), locked(name)) {
        (None, _) => format!("no partition is named {name}"),
        (Some(_), Some(reason)) => format!("{name} is locked: {reason}"),
        (Some(device), None) => match do_mount(&device, entry, entry.kind, entry.options) {
            Ok(mounted) => return Ok(mounted),
            Err(error) => format!("{error}: {}", error.source),
        },
    };
    let mounted = do_mount("tmpfs", entry, "tmpfs", IN_MEMORY)?;
    Ok(Mounted { in_memory: Some(reason), ..mounted })
}

/// Why a volume could not be opened.
fn locked(name: &str) -> Option<String> {
    let reports = unlock::report(Path::new("/")).into_iter();
    reports.filter(|report| report.name == name).find_map(|report| match report.protection {
        Protection::Locked { reason } => Some(reason),
        Protection::Sealed { .. }
        | Protection::Unsealed { .. }
        | Protection::Recovered { .. }
        | Protection::Plain => None,
    })
}

fn do_mount(source: &str, entry: &Entry, kind: &str, options: &str) -> Result<Mounted, MountError> {
    let options = std::ffi::CString::new(options).unwrap_or_default();
    mount(source, entry.path, kind, entry.flags, Some(options.as_c_str())).map_err(|error| {
        MountError {
            source_name: source.to_owned(),
            path: entry.path.to_owned(),
            kind: kind.to_owned(),
            source: error.into(),
        }
    })?;
    Ok(Mounted { path: entry.path, kind: kind.to_owned(), flags: entry.flags, in_memory: None })
}

/// Why something is not mounted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
#[error("cannot mount {source_name} on {path} as {kind}")]
pub struct MountError {
    source_name: String,
    path: String,
    kind: String,
    source: io::Error,
}

/// How a mount differs from what was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Where.
    pub path: String,
    /// What was seen, and what would be right.
    pub reason: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.reason)
    }
}

/// Reads `/proc/self/mountinfo` and compares it with what was made.
pub fn verify(made: &[Mounted]) -> io::Result<Vec<Difference>> {
    Ok(compare(made, &fs::read_to_string("/proc/self/mountinfo")?))
}

/// Compares what was made with the text of a `mountinfo`. The last mount on a path counts.
pub fn compare(made: &[Mounted], mountinfo: &str) -> Vec<Difference> {
    let seen: Vec<_> = mountinfo.lines().filter_map(parse_line).collect();
    let check = |mounted: &Mounted| {
        let difference = |reason| Some(Difference { path: mounted.path.to_owned(), reason });
        let Some(found) = seen.iter().rev().find(|found| found.path == mounted.path) else {
            return difference("not mounted".to_owned());
        };
        if found.kind != mounted.kind {
            return difference(format!("is {}, not {}", found.kind, mounted.kind));
        }
        let wanted = flag_names(mounted.flags);
        let missing: Vec<_> =
            wanted.into_iter().filter(|flag| !found.flags.contains(flag)).collect();
        if missing.is_empty() { None } else { difference(format!("lacks {}", missing.join(","))) }
    };
    made.iter().filter_map(check).collect()
}

struct Seen<'a> {
    path: &'a str,
    flags: Vec<&'a str>,
    kind: &'a str,
}

/// Fields: id, parent, major:minor, root, mount point, flags, optional…, "-", kind, source, options.
fn parse_line(line: &str) -> Option<Seen<'_>> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ').skip(4);
    let (path, flags) = (front.next()?, front.next()?);
    Some(Seen { path, flags: flags.split(',').collect(), kind: back.split(' ').next()? })
}

fn flag_names(flags: MountFlags) -> Vec<&'static str> {
    let named = [
        (MountFlags::RDONLY, "ro"),
        (MountFlags::NOSUID, "nosuid"),
        (MountFlags::NODEV, "nodev"),
        (MountFlags::NOEXEC, "noexec"),
    ];
    named.into_iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTINFO: &str = "\
22 1 0:20 / /proc rw,nosuid,nodev,noexec - proc proc rw
23 1 0:21 / /sys rw,nosuid,noexec shared:1 - sysfs sysfs rw
24 1 0:22 / /run rw,nosuid,nodev,noexec - ext4 /dev/sda rw
";

    fn made(path: &'static str, kind: &str) -> Mounted {
        Mounted { path, kind: kind.to_owned(), flags: SAFE, in_memory: None }
    }

    #[test]
    fn every_difference_is_named() {
        let wanted = [
            made("/proc", "proc"),
            made("/sys", "sysfs"),
            made("/run", "tmpfs"),
            made("/data", "ext4"),
        ];
        let found: Vec<_> = compare(&wanted, MOUNTINFO).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["/sys: lacks nodev", "/run: is ext4, not tmpfs", "/data: not mounted"]);
    }

    #[test]
    fn nothing_writable_can_hold_programs() {
        let writable = EARLY.iter().chain(LATE).filter(|entry| entry.path != "/dev");
        let lax: Vec<_> = writable.filter(|entry| !entry.flags.contains(SAFE)).collect();
        assert!(lax.is_empty(), "{lax:?}");
    }
}
