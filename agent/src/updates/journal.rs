//! The journal's file in STATE.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use update::slots::journal::{Journal, MAX_BYTES};

use crate::events::Event;

/// Its name.
pub(super) const FILE: &str = "slots.journal";
/// What is not yet the journal.
const UNFINISHED: &str = "slots.journal.new";
/// Where a damaged one goes.
const DAMAGED: &str = "slots.journal.damaged";

/// Reads the journal; `None` when there is none. A damaged one is set aside.
pub(super) fn load(folder: &Path) -> Option<Journal> {
    let path = folder.join(FILE);
    let mut bytes = Vec::new();
    let read =
        File::open(&path).and_then(|file| file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes));
    let reason = match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => error.to_string(),
        Ok(_) => match Journal::parse(&bytes) {
            Ok(journal) => return Some(journal),
            Err(error) => error.to_string(),
        },
    };
    let aside = folder.join(DAMAGED);
    let moved = fs::rename(&path, &aside);
    let moved = moved.map_or_else(|error| error.to_string(), |()| "set aside".to_owned());
    let reason = format!("{}: {reason}; {moved} as {}", path.display(), aside.display());
    eprintln!("{}", Event::Trouble { place: "update", reason });
    None
}

/// Replaces the journal; once this returns, it is durable.
pub(super) fn store(folder: &Path, journal: &Journal) -> io::Result<()> {
    let unfinished = folder.join(UNFINISHED);
    let mut options = File::options();
    let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&unfinished)?;
    file.write_all(&journal.bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, folder.join(FILE))?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn what_is_stored_is_loaded_and_what_is_damaged_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(load(folder.path()), None);
        let journal = Journal { last: "release 1.2.3 passed".to_owned(), ..Journal::default() };
        store(folder.path(), &journal).unwrap();
        assert_eq!(load(folder.path()), Some(journal));
        fs::write(folder.path().join(FILE), b"holdfast-slots 1 00\n{}").unwrap();
        assert_eq!(load(folder.path()), None);
        assert!(folder.path().join(DAMAGED).exists());
        assert!(!folder.path().join(FILE).exists());
    }
}
