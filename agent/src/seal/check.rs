//! Checks the file systems of STATE and DATA before they are mounted, and mends what a disk altered in them.
//! The kernel checks little at a mount, mends nothing, and refuses later what it cannot read. So `glance` looks at
//! what is clean; at what is not, or what it doubts, e2fsck looks, and only where that finds something does it
//! write; what it lets pass and the kernel does not, `inodes` takes off. The process that opens the volumes has
//! them checked, too: init waits for it with a deadline, and nothing that a disk says reaches PID 1.
//!
//! What was mended may have lost its name; `names` gives it back once the volume is mounted.
//!
//! Source of the exit statuses and options: e2fsck(8).

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use types::volumes::{Protection, VolumeReport};
use update::disk::layout;

use super::{
    glance::{self, Budget, Glance},
    inodes::{self, Settled},
    superblock::{self, Found},
    unlock,
    volume::{self, Volume},
};
use crate::{
    events::Event,
    init::{kmsg, partitions},
};

/// Where the names of the volumes are that were mended, below the root: one a line.
pub const MENDED: &str = "run/holdfast/volumes-mended";
/// The program.
const PROGRAM: &str = "/usr/bin/e2fsck";
/// Exit statuses from this one on: errors are left, or it could not do its work.
const LEFT: i32 = 4;
/// How often it is let at what is damaged: what it mends may show more.
const ROUNDS: usize = 3;
/// Time between two looks at it.
const POLL: Duration = Duration::from_millis(5);
/// Most that is kept of what it says, in bytes.
const MAX_SAID: u64 = 64 << 10;
/// Most that is told of it, in characters.
const MAX_TOLD: usize = 200;

/// Most that a glance reads, in bytes: more than a disk gives in its time.
const MAX_GLANCED: u64 = 64 << 30;

/// How long each step may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Looking, which changes nothing and can be given up at any time. A disk with many machines takes longer
    /// than anybody wants to wait at each start, and is mounted all the same.
    pub look: Duration,
    /// Replaying the journal, and mending.
    pub mend: Duration,
}

impl Limits {
    /// What a node grants.
    pub const NODE: Self = Self { look: Duration::from_secs(20), mend: Duration::from_secs(900) };
    /// How long a node glances at DATA: no start waits long for many disks. What would have been found in the
    /// rest of it the kernel meets later, by its checksums, and the next start mends.
    pub const BRIEF: Duration = Duration::from_secs(3);
}

/// How a file system was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    /// Nothing is wrong with it.
    Whole,
    /// It was damaged, and is not any more.
    Mended {
        /// The first things that were wrong.
        what: String,
    },
    /// It could not be looked at to its end.
    Unknown {
        /// Why.
        reason: String,
    },
    /// It is damaged and stays so.
    Damaged {
        /// What is wrong.
        what: String,
    },
}

/// Checks every volume that is open. They lie on different parts of a disk, and go side by side.
pub(super) fn all(root: &Path) {
    let of = |name| open_device(root, name).is_some_and(|at| judge(name, &at)).then_some(name);
    let mended: Vec<&str> = thread::scope(|scope| {
        let begun = [layout::STATE, layout::DATA].map(|name| scope.spawn(move || of(name)));
        begun.into_iter().filter_map(|check| check.join().ok().flatten()).collect()
    });
    if mended.is_empty() {
        return;
    }
    let path = root.join(MENDED);
    let made = path.parent().map_or(Ok(()), fs::create_dir_all);
    if let Err(error) = made.and_then(|()| fs::write(&path, mended.join("\n"))) {
        tell("volumes", format!("which ones were mended cannot be written down: {error}"));
    }
}

/// Returns the device that a volume's file system lies on; `None` when it is locked, or not there.
fn open_device(root: &Path, name: &str) -> Option<PathBuf> {
    if let Some(device) = volume::mapped(root, name) {
        return Some(device);
    }
    let device = PathBuf::from(partitions::find(name)?);
    let locked = |report: &VolumeReport| {
        report.name == name && matches!(report.protection, Protection::Locked { .. })
    };
    // What is encrypted and not open is nothing to look at, let alone to write to.
    let plain = matches!(Volume::open(&device), Ok(None));
    (plain && !unlock::report(root).iter().any(locked)).then_some(device)
}

/// Mends a volume, says what was wrong, and returns whether its files may have lost their names.
fn judge(name: &str, device: &Path) -> bool {
    let place = if name == layout::STATE { "state" } else { "data" };
    if let Some(reason) = mend_superblock(device) {
        tell(place, reason);
    } else {
        let limit = if name == layout::STATE { Limits::NODE.look } else { Limits::BRIEF };
        match look(device, limit) {
            Glance::Whole => return false,
            Glance::TooLong => {
                if name == layout::STATE {
                    let reason = format!("it was not done after {} s", limit.as_secs());
                    tell(place, format!("its file system was not checked: {reason}"));
                }
                return false;
            }
            Glance::Doubtful { .. } => {}
        }
    }
    match check(Path::new(PROGRAM), device, Limits::NODE) {
        Checked::Whole => false,
        Checked::Mended { what } => {
            tell(place, format!("its file system was damaged and is mended: {what}"));
            true
        }
        Checked::Unknown { reason } => {
            tell(place, format!("its file system was not checked: {reason}"));
            false
        }
        Checked::Damaged { what } => {
            tell(place, format!("its file system is damaged and cannot be mended: {what}"));
            true
        }
    }
}

/// Glances at a volume for as long as `limit`. What is not clean is doubted at once.
fn look(device: &Path, limit: Duration) -> Glance {
    let budget = Budget { until: Instant::now() + limit, bytes: MAX_GLANCED };
    match File::open(device) {
        Ok(device) => glance::glance(&device, budget),
        Err(error) => Glance::Doubtful { what: format!("it cannot be opened: {error}") },
    }
}

/// Mends what a power cut tore, or a disk altered, of the superblock and of the descriptors behind it.
fn mend_superblock(device: &Path) -> Option<String> {
    let opened = File::options().read(true).write(true).open(device);
    Some(match opened.and_then(|device| superblock::mend(&device)) {
        Ok(Found::Whole) => return None,
        Ok(Found::Mended) => {
            "its superblock was written by half when the power went, and is whole again".to_owned()
        }
        Ok(Found::Restored { at }) => format!(
            "its superblock was altered, at byte {at} of it, and was made anew of its backup"
        ),
        Ok(Found::Damaged) => "its superblock is damaged, and so is the backup".to_owned(),
        Ok(Found::AheadOfGroups) => {
            "it was growing when the power went; what describes its new part was taken from its journal"
                .to_owned()
        }
        Ok(Found::JournalAltered) => "its journal was altered, and what only it held is lost".to_owned(),
        Ok(Found::GroupRestored { group }) => format!(
            "the description of its block group {group} was altered; where its tables lie was taken from a backup"
        ),
        Ok(Found::GroupDamaged { group }) => {
            format!("its block group {group} is not described as its checksum says")
        }
        Err(error) => format!("its superblock cannot be read: {error}"),
    })
}

/// Checks the file system on `device` with e2fsck, which is `program`. What the superblock is needed for
/// comes first ([`superblock::mend`]).
pub fn check(program: &Path, device: &Path, limits: Limits) -> Checked {
    match try_check(program, device, limits) {
        Ok(checked) => checked,
        Err(error) => Checked::Unknown { reason: format!("{}: {error}", program.display()) },
    }
}

fn try_check(program: &Path, device: &Path, limits: Limits) -> io::Result<Checked> {
    let marks = superblock::marks(&File::open(device)?)?;
    let run = |words: &[&str], limit| Run::start(program, words, device)?.finish(limit);
    if marks.replay {
        // As the kernel does at a mount. What comes of it is seen by looking.
        run(&["-y", "-E", "journal_only"], limits.mend)?;
    }
    let mut found = run(&["-f", "-n"], limits.look)?;
    let clean = found.status == 0 && !marks.damaged;
    let said = (!clean).then(|| found.in_words());
    let taken = settle(device, limits)?;
    if clean {
        return Ok(taken.in_words().map_or(Checked::Whole, |what| Checked::Mended { what }));
    }
    for _ in 0..ROUNDS {
        found = run(&["-f", "-y"], limits.mend)?;
        if found.status < LEFT {
            let taken = taken.and(settle(device, limits)?).in_words();
            let what: Vec<String> = taken.into_iter().chain(said).collect();
            return Ok(Checked::Mended { what: what.join("; ") });
        }
    }
    Ok(Checked::Damaged { what: found.in_words() })
}

/// Takes off what e2fsck lets pass, or gives up at.
fn settle(device: &Path, limits: Limits) -> io::Result<Settled> {
    let device = File::options().read(true).write(true).open(device)?;
    let settled = inodes::settle(&device, Instant::now() + limits.mend)?;
    device.sync_all()?;
    Ok(settled)
}

/// What the program said in the end.
struct Said {
    status: i32,
    text: String,
}

impl Said {
    /// Returns the first lines that tell of something, without questions and their answers.
    fn in_words(&self) -> String {
        let idle = |line: &str| {
            line.is_empty()
                || line.starts_with("Pass ")
                || line.starts_with("e2fsck ")
                || line.contains("is in the future")
                || line.contains("now = ")
        };
        let told = self.text.lines().map(|line| {
            let line = line.trim();
            let question = line.strip_suffix("? no").or_else(|| line.strip_suffix("? yes"));
            question.map_or(line, |rest| rest.rsplit_once(". ").map_or("", |(said, _)| said))
        });
        let told: Vec<&str> = told.filter(|line| !idle(line)).collect();
        let mut words: String = told.join("; ").chars().filter(|c| !c.is_control()).collect();
        if let Some((end, _)) = words.char_indices().nth(MAX_TOLD) {
            words.truncate(end);
            words.push('…');
        }
        if words.is_empty() { format!("e2fsck ended with status {}", self.status) } else { words }
    }
}

/// The program at work; ended when this goes.
struct Run {
    child: Child,
    output: Option<ChildStdout>,
}

impl Run {
    fn start(program: &Path, words: &[&str], device: &Path) -> io::Result<Self> {
        let mut child = Command::new(program)
            .args(words)
            .arg(device)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let output = child.stdout.take();
        Ok(Self { child, output })
    }

    /// Waits for its end. Fails when it was ended by somebody, or takes longer than `limit`.
    fn finish(mut self, limit: Duration) -> io::Result<Said> {
        let output = self.output.take();
        let reader = thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(mut output) = output {
                output.by_ref().take(MAX_SAID).read_to_end(&mut text).ok();
                // Whoever is not listened to any more would stop.
                io::copy(&mut output, &mut io::sink()).ok();
            }
            text
        });
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if begin.elapsed() > limit {
                let reason = format!("it was not done after {} s", limit.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            thread::sleep(POLL);
        };
        let text = reader.join().unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let status =
            status.code().ok_or_else(|| io::Error::other(format!("ended with {status}")))?;
        Ok(Said { status, text })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // One that has ended is not there any more.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn tell(place: &'static str, reason: String) {
    kmsg::event(&Event::Trouble { place, reason });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn said(text: &str) -> String {
        Said { status: 4, text: text.to_owned() }.in_words()
    }

    #[test]
    fn what_was_wrong_is_told_without_questions() {
        let text = "Superblock last mount time (x,\n\tnow = y) is in the future.\nFix? no\n\n\
            Pass 1: Checking inodes, blocks, and sizes\nInode 29 (/node.key) is an illegal socket.\n\
            Clear? yes\n\nBlock bitmap differences:  -8360\nFix? yes\n";
        let told = "Superblock last mount time (x,; Inode 29 (/node.key) is an illegal socket.; \
            Block bitmap differences:  -8360";
        assert_eq!(said(text), told);
        assert_eq!(said("Inode 7 is bad. Clear? yes\n"), "Inode 7 is bad");
        assert_eq!(said("Pass 1: x\n"), "e2fsck ended with status 4");
        assert_eq!(said(&"ü".repeat(1000)).chars().count(), MAX_TOLD + 1);
    }

    #[test]
    fn what_hangs_or_is_no_program_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("device");
        fs::write(&device, [0; 4096]).unwrap();
        let hasty = Limits { look: Duration::from_millis(50), mend: Duration::from_millis(50) };
        let none = check(Path::new("/nonexistent"), &device, hasty);
        assert!(matches!(none, Checked::Unknown { .. }), "{none:?}");
        let script = folder.path().join("hangs");
        fs::write(&script, "#!/bin/sh\nexec sleep 100\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(&script, mode).unwrap();
        let Checked::Unknown { reason } = check(&script, &device, hasty) else {
            panic!("it waited")
        };
        assert!(reason.contains("not done after 0 s"), "{reason}");
    }
}
