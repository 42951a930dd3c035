//! What the last boot left behind: crashes that the kernel wrote into firmware's variables or into
//! memory that a restart keeps, and the end of the log, which the node writes to STATE now and then.
//!
//! Crashes move to the folder `crashes` of STATE, a bounded number of them, and are taken out of
//! firmware, which has little room, once they are durable there. [`parts`] puts them together.

pub mod parts;

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use types::{
    evidence::{Crash, Ended, LastBoot, MAX_CRASHES, MAX_LINES},
    logs::Level,
};

use self::parts::{MAX_PIECE, MAX_PIECES, Piece, Report};
use crate::{
    events::Event,
    init::logs::LINES_PER_SECOND,
    logs::{Logs, book::Filter},
};

/// Where the kernel shows what it kept.
pub const PSTORE: &str = "/sys/fs/pstore";
/// Folder for crashes, below STATE.
const CRASHES: &str = "crashes";
/// The end of the log, below STATE: of this boot, and of the one before.
const CURRENT: &str = "log.current";
const PREVIOUS: &str = "log.previous";
/// What is not yet a file of ours.
const UNFINISHED: &str = ".unfinished";
/// First line of a log whose boot ended as it should.
const PROPERLY: &str = "ended properly";
/// First line of a log whose boot goes on, or ended otherwise.
const GOES_ON: &str = "goes on";
/// Most lines of the log that are written.
const KEPT_LINES: usize = 400;
/// Longest log that is read, in bytes.
const MAX_LOG: u64 = 1 << 20;
/// How often the log is written when it changed: a hang shows up to a minute ago, and a disk takes 60 MiB
/// a day of a node that always has something to say.
const EVERY: Duration = Duration::from_secs(60);

/// Says in memory that the last boot ended in a crash, once that was put away; below the root.
const CRASHED: &str = "run/holdfast/crashed";

/// How long what is in STATE lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasting {
    /// It is on a disk.
    Disk,
    /// It is in memory: the newest crash then stays where the kernel keeps it.
    Memory,
}

/// Whether the boot before this one ended in a crash that the kernel kept, put away by now or not.
pub fn crashed(root: &Path) -> bool {
    let kept = fs::read_dir(root.join(PSTORE.trim_start_matches('/')));
    root.join(CRASHED).exists() || kept.is_ok_and(|mut kept| kept.next().is_some())
}

/// Lets [`crashed`] remember what it says now, whatever becomes of what the kernel kept.
pub fn remember_crash(root: &Path) -> io::Result<()> {
    if !crashed(root) {
        return Ok(());
    }
    let path = root.join(CRASHED);
    fs::create_dir_all(path.parent().unwrap_or(root))?;
    fs::write(path, b"")
}

/// Looks at what the last boot left, once for each boot: the agent may start again. `boot` is the
/// kernel's name for this one.
pub fn collect(pstore: &Path, (state, lasting): (&Path, Lasting), boot: &str) -> LastBoot {
    let kept = keep_crashes(pstore, state, lasting);
    let turned = turn(state, boot);
    let mut last = LastBoot::default();
    let read = read(state, &mut last);
    for reason in [kept, turned, read].into_iter().filter_map(Result::err) {
        let reason = format!("what the last boot left: {reason}");
        eprintln!("{}", Event::Trouble { place: "evidence", reason });
    }
    last
}

/// Moves crashes from the kernel to STATE.
fn keep_crashes(pstore: &Path, state: &Path, lasting: Lasting) -> io::Result<()> {
    let pieces = pieces(pstore)?;
    if pieces.is_empty() {
        return Ok(());
    }
    let folder = state.join(CRASHES);
    fs::create_dir_all(&folder)?;
    let first = names(&folder)?.last().map_or(0, |(number, _)| number + 1);
    let reports = parts::reports(pieces);
    let count = reports.len();
    for (index, report) in reports.into_iter().enumerate() {
        let name = format!("{:06}.txt", first + index as u64);
        store(&folder, &name, report.text.as_bytes())?;
        let newer = count - 1 - index;
        told(&name, &report, newer).iter().for_each(|line| eprintln!("{line}"));
        // One that stays in firmware is told again.
        let goes = lasting == Lasting::Disk || newer > 0;
        for name in report.names.iter().filter(|_| goes) {
            fs::remove_file(pstore.join(name))?;
        }
    }
    let all = names(&folder)?;
    for (_, name) in &all[..all.len().saturating_sub(MAX_CRASHES)] {
        fs::remove_file(folder.join(name))?;
    }
    Ok(())
}

/// Returns what the log says of a crash, of which `newer` newer ones are told, too: its end if there is none,
/// and nothing of one that is not kept. Together they are few beside what a process may write each second
/// ([`LINES_PER_SECOND`]), and the agent has more to say.
fn told(name: &str, report: &Report, newer: usize) -> Vec<String> {
    if newer >= MAX_CRASHES {
        return Vec::new();
    }
    let reason = parts::reason(&report.text);
    let event = Event::CrashKept { file: name.to_owned(), reason };
    let shown = if newer == 0 { MAX_LINES } else { 0 };
    let lines = parts::last_lines(&report.text, shown);
    let lines = lines.into_iter().map(|line| format!("crash| {line}"));
    std::iter::once(event.to_string()).chain(lines).collect()
}

const _: () = {
    let lines = MAX_CRASHES + MAX_LINES;
    assert!(lines <= LINES_PER_SECOND as usize / 2, "the agent's other lines would be left out");
};

fn pieces(pstore: &Path) -> io::Result<Vec<Piece>> {
    let entries = match fs::read_dir(pstore) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut pieces = Vec::new();
    for entry in entries.take(MAX_PIECES) {
        let entry = entry?;
        let mut bytes = Vec::new();
        File::open(entry.path())?.take(MAX_PIECE).read_to_end(&mut bytes)?;
        pieces.push(Piece { name: entry.file_name().to_string_lossy().into_owned(), bytes });
    }
    Ok(pieces)
}

/// Returns the crashes that are kept, the oldest first.
fn names(folder: &Path) -> io::Result<Vec<(u64, String)>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let number = name.strip_suffix(".txt").and_then(|number| number.parse().ok());
        names.extend(number.map(|number| (number, name)));
    }
    names.sort();
    Ok(names)
}

/// Makes the log of the last boot the previous one, if this is another boot.
fn turn(state: &Path, boot: &str) -> io::Result<()> {
    let current = state.join(CURRENT);
    match head(&current)? {
        Some((of, _)) if of == boot => Ok(()),
        Some(_) => {
            fs::rename(&current, state.join(PREVIOUS))?;
            File::open(state)?.sync_all()
        }
        None => Ok(()),
    }
}

/// Returns a log's boot, and the rest of it.
fn head(path: &Path) -> io::Result<Option<(String, String)>> {
    let mut text = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?.take(MAX_LOG).read_to_end(&mut text)?,
    };
    let text = String::from_utf8_lossy(&text).into_owned();
    let (boot, rest) = text.split_once('\n').unwrap_or((&text, ""));
    Ok(Some((boot.to_owned(), rest.to_owned())))
}

fn read(state: &Path, last: &mut LastBoot) -> io::Result<()> {
    if let Some((_, rest)) = head(&state.join(PREVIOUS))? {
        let (how, lines) = rest.split_once('\n').unwrap_or((&rest, ""));
        let properly = how == PROPERLY;
        last.ended = Some(if properly { Ended::Properly } else { Ended::Abruptly });
        if !properly {
            last.lines = parts::last_lines(lines, MAX_LINES);
        }
    }
    let folder = state.join(CRASHES);
    let all = match names(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        all => all?,
    };
    for (_, name) in all.iter().rev().take(MAX_CRASHES) {
        let text = fs::read(folder.join(name))?;
        let bytes = text.len() as u64;
        let text = String::from_utf8_lossy(&text);
        let newest = last.crashes.is_empty();
        let lines = if newest { parts::last_lines(&text, MAX_LINES) } else { Vec::new() };
        let crash = Crash { name: name.clone(), reason: parts::reason(&text), bytes, lines };
        last.crashes.push(crash);
    }
    Ok(())
}

/// Replaces a file; once this returns, it is durable.
fn store(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let unfinished = folder.join(UNFINISHED);
    let mut options = File::options();
    let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&unfinished)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&unfinished, folder.join(name))?;
    File::open(folder)?.sync_all()
}

/// Writes the end of the log to STATE.
#[derive(Debug, Clone)]
pub struct Keeper {
    logs: Logs,
    state: PathBuf,
    boot: String,
    /// Whether the boot was said to have ended. Whoever writes holds it.
    ended: Arc<Mutex<bool>>,
}

impl Keeper {
    /// Keeps the end of `logs` in the folder `state`, for the boot of this name.
    pub fn new(logs: Logs, state: &Path, boot: &str) -> Self {
        let (state, boot) = (state.to_owned(), boot.to_owned());
        Self { logs, state, boot, ended: Arc::default() }
    }

    /// Writes whenever something was added, now and then.
    pub async fn run(self) {
        let mut written = 0;
        loop {
            self.logs.wait(written).await;
            written = self.logs.book().next();
            let keeper = self.clone();
            let done = tokio::task::spawn_blocking(move || keeper.write(GOES_ON)).await;
            if let Ok(Err(error)) = done {
                // A line for each failure would be a reason for the next one.
                eprintln!("{}", Event::Trouble { place: "evidence", reason: error.to_string() });
                tokio::time::sleep(EVERY * 10).await;
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Says that the boot ends as it should. Nothing is written after it.
    pub fn end(&self) -> io::Result<()> {
        self.write(PROPERLY)
    }

    fn write(&self, how: &str) -> io::Result<()> {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *ended {
            return Ok(());
        }
        *ended = how == PROPERLY;
        let filter = Filter { from: 0, level: Level::Info, source: None };
        let lines = self.logs.book().newest(filter, KEPT_LINES);
        let mut text = format!("{}\n{how}\n", self.boot);
        for line in lines {
            text.push_str(&line.text.replace(|c: char| c.is_control(), "?"));
            text.push('\n');
        }
        store(&self.state, CURRENT, text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn panic(pstore: &Path, number: u32) {
        let name = format!("dmesg-efi_pstore-17000000{number:02}01001");
        let text = format!("Panic#1 Part1\n<0>[1.0] Kernel panic - not syncing: number {number}\n");
        fs::write(pstore.join(name), text).unwrap();
    }

    fn keeper(state: &Path, boot: &str) -> Keeper {
        let log = state.join("kmsg");
        fs::write(&log, "5,7,100,-;agent[1]: the last word\n").unwrap();
        let (logs, reader) = Logs::new();
        reader.start(&log);
        while logs.book().next() == 0 {
            std::thread::yield_now();
        }
        Keeper::new(logs, state, boot)
    }

    #[test]
    fn crashes_move_to_the_disk_and_few_are_kept() {
        let (pstore, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for number in 0..12 {
            panic(pstore.path(), number);
            let last = collect(pstore.path(), (state.path(), Lasting::Disk), "boot");
            assert_eq!(
                last.crashes[0].reason,
                format!("Kernel panic - not syncing: number {number}")
            );
            assert_eq!(fs::read_dir(pstore.path()).unwrap().count(), 0);
        }
        let last = collect(pstore.path(), (state.path(), Lasting::Disk), "boot");
        assert_eq!(last.crashes.len(), MAX_CRASHES);
        assert_eq!(last.crashes[0].name, "000011.txt");
        assert!(last.crashes[1].lines.is_empty() && !last.crashes[0].lines.is_empty());
    }

    #[test]
    fn a_crash_of_the_last_boot_is_known_after_it_was_put_away() {
        let (root, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let pstore = root.path().join("sys/fs/pstore");
        fs::create_dir_all(&pstore).unwrap();
        remember_crash(root.path()).unwrap();
        assert!(!crashed(root.path()));
        panic(&pstore, 1);
        assert!(crashed(root.path()));
        remember_crash(root.path()).unwrap();
        collect(&pstore, (state.path(), Lasting::Disk), "boot");
        assert_eq!(fs::read_dir(&pstore).unwrap().count(), 0);
        assert!(crashed(root.path()));
    }

    #[test]
    fn what_cannot_be_kept_stays_where_it_is() {
        let (pstore, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        panic(pstore.path(), 1);
        fs::write(state.path().join(CRASHES), b"no folder").unwrap();
        let to = (state.path(), Lasting::Disk);
        assert!(collect(pstore.path(), to, "boot").crashes.is_empty());
        assert_eq!(fs::read_dir(pstore.path()).unwrap().count(), 1);
        assert!(collect(Path::new("/nonexistent"), to, "boot").crashes.is_empty());
    }

    #[test]
    fn without_a_disk_the_newest_crash_stays_in_firmware() {
        let (pstore, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        (0..3).for_each(|number| panic(pstore.path(), number));
        let last = collect(pstore.path(), (state.path(), Lasting::Memory), "boot");
        assert_eq!(last.crashes.len(), 3);
        let left: Vec<_> = fs::read_dir(pstore.path()).unwrap().collect();
        assert_eq!(left.len(), 1);
    }

    #[test]
    fn a_crash_that_firmware_took_seconds_for_stays_whole() {
        let (pstore, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        panic(pstore.path(), 1);
        let rest = "dmesg-efi_pstore-170000000202001";
        fs::write(pstore.path().join(rest), "Panic#1 Part2\n<6>[0.1] before\n").unwrap();
        let last = collect(pstore.path(), (state.path(), Lasting::Memory), "boot");
        assert_eq!(last.crashes.len(), 1);
        assert_eq!(last.crashes[0].reason, "Kernel panic - not syncing: number 1");
        assert_eq!(last.crashes[0].lines.len(), 2);
        assert_eq!(fs::read_dir(pstore.path()).unwrap().count(), 2);
    }

    #[test]
    fn many_crashes_leave_room_in_the_log() {
        let text = "<6>[1.0] a line\n".repeat(100);
        let report = Report { text, names: Vec::new() };
        let lines = (0..500).map(|newer| told("000001.txt", &report, newer).len());
        assert_eq!(lines.clone().take(3).collect::<Vec<_>>(), [MAX_LINES + 1, 1, 1]);
        assert_eq!(lines.sum::<usize>(), MAX_LINES + MAX_CRASHES);
    }

    #[test]
    fn a_boot_that_did_not_end_shows_its_last_lines() {
        let (pstore, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let look = |boot| collect(pstore.path(), (state.path(), Lasting::Disk), boot);
        assert_eq!(look("one"), LastBoot::default());
        keeper(state.path(), "one").write(GOES_ON).unwrap();
        // The agent starts again in the same boot.
        assert_eq!(look("one").ended, None);
        let last = look("two");
        assert_eq!(last.ended, Some(Ended::Abruptly));
        assert!(last.lines.iter().any(|line| line.contains("the last word")), "{last:?}");
        assert_eq!(look("two"), last);
        let two = keeper(state.path(), "two");
        two.end().unwrap();
        // One that was about to be written then comes too late.
        two.write(GOES_ON).unwrap();
        let last = look("three");
        assert_eq!((last.ended, last.lines.len()), (Some(Ended::Properly), 0));
    }
}
