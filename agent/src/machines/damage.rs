//! Looks whether the store is whole before anything in it is believed. The database checks its sums only
//! when it is asked to, and may end its process over what it does not expect: so a process of its own
//! looks, and a store that is damaged beyond repair is set aside, with a name, for a new one.
//!
//! A store that could not be looked at, for a disk that does not answer or for want of memory, stays.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use redb::{Database, DatabaseError, StorageError};

/// What is asked of the agent's program, before the store's path.
pub const WORD: &str = "check-store";
/// The looking process found damage and mended it.
const MENDED: u8 = 3;
/// It found damage that cannot be mended.
const DAMAGED: u8 = 4;
/// It could not look.
const UNKNOWN: u8 = 5;
/// What Rust's programs exit with when they panic, where that does not abort them.
const PANICKED: i32 = 101;
/// Longest time that it may take: a full store is a hundred megabytes. Half of what init gives the agent until it
/// says something ([`crate::init::supervise::START_LIMIT`]): the rest of the start is after it.
const LIMIT: Duration = Duration::from_secs(60);
/// Time between two looks at the process.
const POLL: Duration = Duration::from_millis(5);
/// Names for what was set aside; the first stays, for it is what the node had when it was well.
const ASIDE: [&str; 2] = [".damaged", ".damaged-again"];

/// How the store was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// There is none, or it is whole.
    Whole,
    /// It was damaged, and what was committed last and is whole is there.
    Mended,
    /// It was damaged beyond that and lies there now.
    SetAside(PathBuf),
    /// Nobody knows, for this reason.
    Unknown(String),
}

/// The looking process: judges the store that its second argument names.
pub fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(2) else { return ExitCode::from(UNKNOWN) };
    ExitCode::from(examine(Path::new(&path)))
}

/// Judges the store at `path`; returns the process's exit status. May panic over a damaged one.
pub(crate) fn examine(path: &Path) -> u8 {
    let judged = Database::open(path).and_then(|mut database| database.check_integrity());
    match judged {
        Ok(true) => 0,
        Ok(false) => MENDED,
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            if is_damage(&error) { DAMAGED } else { UNKNOWN }
        }
    }
}

fn is_damage(error: &DatabaseError) -> bool {
    if let DatabaseError::Storage(StorageError::Io(error)) = error {
        // Shorter than what its own head says.
        return matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData);
    }
    matches!(
        error,
        DatabaseError::Storage(StorageError::Corrupted(_)) | DatabaseError::UpgradeRequired(_)
    )
}

/// Looks at the store at `path` with `process`, which is to run [`main`] or [`examine`].
///
/// Fails when a damaged store cannot be set aside.
pub fn look(process: &mut Command, path: &Path) -> io::Result<Found> {
    if !path.try_exists()? {
        return Ok(Found::Whole);
    }
    let status = match run(process) {
        Ok(status) => status,
        Err(error) => return Ok(Found::Unknown(error.to_string())),
    };
    Ok(match status.code() {
        Some(0) => Found::Whole,
        Some(code) if code == i32::from(MENDED) => Found::Mended,
        Some(code) if code == i32::from(DAMAGED) || code == PANICKED => {
            Found::SetAside(set_aside(path)?)
        }
        None if is_own_fault(status) => Found::SetAside(set_aside(path)?),
        _ => Found::Unknown(format!("the process that looks ended with {status}")),
    })
}

/// Whether a process ended itself, or was ended for what it did; not by somebody, or for want of memory.
fn is_own_fault(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    matches!(status.signal(), Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGILL | libc::SIGTRAP))
}

fn run(process: &mut Command) -> io::Result<ExitStatus> {
    let mut child = process.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if begin.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(POLL);
    }
}

fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let named = ASIDE.map(|end| {
        let mut name = OsString::from(path);
        name.push(end);
        PathBuf::from(name)
    });
    let [first, last] = named;
    let aside = if first.try_exists()? { last } else { first };
    fs::rename(path, &aside)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())?;
    Ok(aside)
}

impl Found {
    /// Returns what people should know of the store at `path`; `None` when it is whole.
    pub fn in_words(&self, path: &Path) -> Option<String> {
        let path = path.display();
        match self {
            Self::Whole => None,
            Self::Mended => Some(format!(
                "{path} was damaged and is mended: what was committed last may be gone"
            )),
            Self::SetAside(aside) => Some(format!(
                "{path} was damaged and is set aside as {}: machines and receipts in it are not known \
                 any more; which leases were used up is",
                aside.display()
            )),
            Self::Unknown(reason) => Some(format!("{path} was not looked at: {reason}")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use types::units::UnixSeconds;

    use super::*;
    use crate::machines::{
        plan::fixture,
        store::{Answered, Store},
    };

    /// Variable by which a process knows that it is to look, and where.
    const STORE: &str = "HOLDFAST_LOOK_AT";
    /// Altered places of a store that are tried; an odd number, so that they fall everywhere in a page.
    const PLACES: usize = 41;

    /// The process that looks. In a usual run of the tests there is nothing for it to do.
    #[test]
    fn look_at_one() {
        let Some(path) = std::env::var_os(STORE) else { return };
        std::process::exit(examine(Path::new(&path)).into());
    }

    fn looked(path: &Path) -> Found {
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "machines::damage::tests::look_at_one", "--nocapture"]);
        look(process.env(STORE, path).stderr(Stdio::null()), path).unwrap()
    }

    /// A store with a bit of everything; returns its length.
    fn fill(path: &Path) -> u64 {
        let store = Store::open(path).unwrap();
        store.put_machine(&fixture::record()).unwrap();
        for number in 0..4_u8 {
            let body = char::from(b'a' + number).to_string().repeat(3000);
            let at = UnixSeconds(number.into());
            let answer = Answered { digest: number.to_string(), status: 200, body, at };
            store.put_answer(&number.to_string(), &answer).unwrap();
        }
        store.raise_floor(UnixSeconds(77)).unwrap();
        drop(store);
        fs::metadata(path).unwrap().len()
    }

    /// Everything that the agent reads at its start.
    fn content(path: &Path) -> String {
        let store = Store::open(path).unwrap();
        let answers = ["0", "1", "2", "3"].map(|key| store.answer(key).unwrap());
        let (machines, floor) = (store.machines().unwrap(), store.floor().unwrap());
        let serial = store.serial(fixture::record().lease.id).unwrap();
        format!("{machines:?} {answers:?} {floor:?} {serial:?}")
    }

    #[test]
    fn wherever_a_store_is_altered_it_is_told_or_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.redb");
        let length = usize::try_from(fill(&path)).unwrap();
        let whole = fs::read(&path).unwrap();
        assert_eq!(looked(&path), Found::Whole);
        let expected = content(&path);
        let used: Vec<usize> = (0..length).filter(|at| whole[*at] != 0).collect();
        let (mut told, step) = (0, used.len() / PLACES);
        for (number, at) in used.iter().step_by(step).enumerate() {
            let mut altered = whole.clone();
            altered[*at] ^= 1 << (number % 8);
            fs::write(&path, &altered).unwrap();
            let found = looked(&path);
            told += usize::from(found.in_words(&path).is_some());
            match found {
                Found::Whole => assert_eq!(content(&path), expected, "byte {at}, unsaid"),
                Found::Mended => drop(content(&path)),
                Found::SetAside(aside) => {
                    assert!(fs::read(&aside).unwrap().len() == length, "byte {at}");
                    assert!(Store::open(&path).unwrap().machines().unwrap().is_empty());
                }
                Found::Unknown(reason) => panic!("byte {at}: {reason}"),
            }
        }
        println!("altered: {} of {} places in use were told", told, used.len().div_ceil(step));
        assert!(told > 5, "{told}");
    }

    #[test]
    fn a_store_that_is_cut_short_or_no_store_is_set_aside_and_the_first_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.redb");
        assert_eq!(looked(&path), Found::Whole, "there is none");
        let length = fill(&path);
        File::options().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
        let first = folder.path().join("agent.redb.damaged");
        assert_eq!(looked(&path), Found::SetAside(first.clone()));
        let kept = fs::read(&first).unwrap();
        for _ in 0..2 {
            fs::write(&path, "no store").unwrap();
            let again = folder.path().join("agent.redb.damaged-again");
            assert_eq!(looked(&path), Found::SetAside(again));
        }
        assert!(fs::read(&first).unwrap() == kept);
    }

    #[test]
    fn a_store_that_cannot_be_looked_at_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.redb");
        fill(&path);
        let found = look(&mut Command::new("/nonexistent"), &path).unwrap();
        assert!(matches!(found, Found::Unknown(_)), "{found:?}");
        let found = look(&mut Command::new("/bin/false"), &path).unwrap();
        assert!(matches!(found, Found::Unknown(_)), "{found:?}");
        let mut killed = Command::new("/bin/sh");
        let found = look(killed.args(["-c", "kill -9 $$"]), &path).unwrap();
        assert!(matches!(found, Found::Unknown(_)), "{found:?}");
        assert!(path.exists());
    }
}
