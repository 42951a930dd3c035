//! What a disk altered in STATE and DATA, seen from the service: files that lost their names get them back,
//! errors that the kernel meets are told, and a STATE that cannot be mounted is not replaced by a new one.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::Duration,
};

use types::config::NodeSpec;
use update::disk::layout;

use super::{AFTER_START, DATA, STATE};
use crate::{
    config::{Found, Source},
    events::Event,
    init::partitions,
    install::runs_from_memory,
    seal::{check, names},
    sys,
};

/// How often new files get names, and how often errors are looked for.
const LOOK: Duration = Duration::from_secs(30);

/// Where the volumes belong.
const PLACES: [(&str, &str, &str); 2] =
    [(layout::STATE, STATE, "state"), (layout::DATA, DATA, "data")];

/// Brings back what lost its name in volumes that were mended at this start, and says so. Nothing happens the
/// second time.
pub(super) fn settle() {
    let path = Path::new("/").join(check::MENDED);
    let Ok(mended) = fs::read_to_string(&path) else { return };
    for (name, at, place) in PLACES {
        if mended.lines().any(|line| line == name)
            && let Some(reason) = restored(Path::new(at))
        {
            eprintln!("{}", Event::Trouble { place, reason });
        }
    }
    if let Err(error) = fs::remove_file(&path) {
        let reason = format!("{}: {error}", path.display());
        eprintln!("{}", Event::Trouble { place: "volumes", reason });
    }
}

/// Returns what is to be said of files that had lost their names.
fn restored(root: &Path) -> Option<String> {
    let found = root.join(names::FOUND);
    match names::restore(root) {
        Err(error) => Some(format!("what lost its name stays in {}: {error}", found.display())),
        Ok(restored) => {
            let back = (!restored.back.is_empty()).then(|| {
                format!("lost their names and have them again: {}", restored.back.join(", "))
            });
            let left = (restored.left > 0).then(|| {
                format!("{} files stay without names in {}", restored.left, found.display())
            });
            let said: Vec<String> = [back, left].into_iter().flatten().collect();
            (!said.is_empty()).then(|| said.join("; "))
        }
    }
}

/// Why the node must not serve: it has a STATE that was not mounted. In its place would be a node that knows
/// neither its name nor its leases. `None` when STATE is there, or there is none.
pub(super) fn state_out_of_reach() -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let device = partitions::find(layout::STATE).filter(|_| runs_from_memory(&mounts))?;
    Some(format!(
        "STATE is on {device} and cannot be mounted; nothing on it was given up. Restart the server if its \
         disk can be helped, or install the node anew, as another one: with a section [install] that names \
         the disk in [install.disk], in a document on a volume labelled HOLDFAST or on the kernel's command \
         line"
    ))
}

/// Returns the document of somebody who wants another node in place of one whose STATE is out of reach. What
/// is in an image, or in STATE itself, was written before that, and may be in every server; and a disk that
/// nobody named may be one with machines on it.
pub(super) fn asks_for_another_node(found: &Found) -> Option<&NodeSpec> {
    let now = match found.source {
        Source::CommandLine | Source::CommandLineUrl(_) | Source::Volume(_) | Source::Claimed => {
            true
        }
        Source::Installed
        | Source::Customised
        | Source::Image
        | Source::Dhcp(..)
        | Source::Nowhere => false,
    };
    let spec = found.spec.as_ref().ok().filter(|_| now)?;
    spec.install.as_ref().is_some_and(|install| !install.disk.is_empty()).then_some(spec)
}

/// Gives new files their names, writes what only STATE's journal has to its place, and tells errors in the
/// volumes' file systems, for ever.
pub(super) async fn watch() {
    tokio::time::sleep(AFTER_START).await;
    let mut told = BTreeMap::new();
    loop {
        let looked = tokio::task::spawn_blocking(move || {
            look(&mut told);
            told
        });
        told = looked.await.expect("nothing in it panics, and nothing cancels it");
        tokio::time::sleep(LOOK).await;
    }
}

fn look(told: &mut BTreeMap<&'static str, u64>) {
    // Where a disk alters a journal, nobody knows what it held behind that. What does not work here shows in the
    // errors that the kernel counts; and in memory there is no journal.
    let state = File::open(STATE);
    state.and_then(|state| sys::block::checkpoint_ext4(state.as_fd())).ok();
    keep_names();
    for (_, at, place) in PLACES {
        let Ok(count) = errors(Path::new(at)) else { continue };
        if let Some(reason) = judge(at, count, told.entry(place).or_default()) {
            eprintln!("{}", Event::Trouble { place, reason });
        }
    }
}

/// Gives new files their names.
pub(super) fn keep_names() {
    for (_, at, _) in PLACES {
        // A folder that cannot be read is an error that the kernel counts.
        names::keep(Path::new(at)).ok();
    }
}

/// Returns what is new about the errors of a file system.
fn judge(at: &str, count: u64, told: &mut u64) -> Option<String> {
    let new = count > *told;
    *told = count;
    new.then(|| {
        format!(
            "the file system of {at} is damaged: the kernel met {count} errors in it, and refuses what they are \
             about; all else is in use, and the next start of the server mends what can be mended"
        )
    })
}

/// Returns how many errors the kernel met in the file system mounted at `path` since it was checked.
fn errors(path: &Path) -> io::Result<u64> {
    let device = rustix::fs::stat(path)?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let device = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))?;
    let name = device.file_name().map(PathBuf::from).unwrap_or_default();
    let text = fs::read_to_string(Path::new("/sys/fs/ext4").join(name).join("errors_count"))?;
    text.trim().parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_names_a_disk_here_and_now_gets_another_node_for_a_lost_one() {
        let document = |section: &str| {
            let key = "01".repeat(32);
            format!(
                "version = 1\nname = \"n\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n{section}"
            )
        };
        let asks = |source: Source, section: &str| {
            let spec = NodeSpec::parse(document(section).as_bytes()).map_err(Into::into);
            assert!(spec.is_ok(), "{spec:?}");
            asks_for_another_node(&Found { source, document: Vec::new(), spec }).is_some()
        };
        let named = "[install]\n[install.disk]\nserial = \"S1\"\n";
        assert!(asks(Source::CommandLine, named));
        assert!(asks(Source::Volume("sdb".into()), named));
        assert!(asks(Source::Claimed, named));
        assert!(!asks(Source::Customised, named));
        assert!(!asks(Source::Image, named));
        assert!(!asks(Source::Installed, named));
        assert!(!asks(Source::Volume("sdb".into()), "[install]\nconfirm = \"unattended\"\n"));
        assert!(!asks(Source::Volume("sdb".into()), ""));
    }

    #[test]
    fn errors_are_told_when_they_are_new() {
        let mut told = 0;
        assert_eq!(judge("/data", 0, &mut told), None);
        let first = judge("/data", 2, &mut told);
        assert!(first.is_some_and(|reason| reason.contains("2 errors")));
        assert_eq!(judge("/data", 2, &mut told), None);
        assert!(judge("/data", 3, &mut told).is_some());
        assert!(errors(Path::new("/proc")).is_err(), "no such file system");
    }
}
