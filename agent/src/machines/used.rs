//! What must not be forgotten when the store is lost: which leases were used, and what time it was. A file
//! beside the store, and a copy of it, each replaced as a whole and durable before what follows from it.
//!
//! A lease may make its machine again after the store was lost, as the machine is lost, too; one whose
//! machine was deleted may not, and neither may an earlier lease of the same machine. What is here of a
//! lease goes when its end is over by a time on which sources agreed: then it is of no use anyway.
//!
//! | line | content |
//! |---|---|
//! | 1 | `holdfast-leases 1 `, and the SHA-256 of all that follows the line's end, in hexadecimal |
//! | rest | JSON, [`Used`] |

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::Path,
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use types::{ids::MachineId, units::UnixSeconds};

use super::plan::Record;
use crate::{events::Event, twice};

/// Its name, beside the store.
pub(super) const FILE: &str = "leases.used";

/// Most leases that are kept: a server has a few dozen machines, and a lease stays here until its end.
/// Those that end first are forgotten first.
pub const MAX_LEASES: usize = 8192;

/// Longest file that is read, in bytes: no lease takes more than 128.
pub const MAX_BYTES: usize = 2 << 20;

/// What it begins with.
const HEAD: &str = "holdfast-leases 1 ";

/// How far the time may have gone on before it is written here, in seconds. The store has it to the second.
const TIME_STEP_S: u64 = 3600;

/// Why a file is not believed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum UsedError {
    #[error("it has {found} bytes; {MAX_BYTES} are the most")]
    TooLong { found: usize },
    #[error("it does not begin with {HEAD:?} and a digest")]
    Head,
    #[error("its digest is not the one that its first line says")]
    Digest,
    #[error("it is not the JSON that is expected")]
    Json(#[from] serde_json::Error),
    #[error("it cannot be read")]
    Read(#[from] io::Error),
}

/// Everything that is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Used {
    /// Latest time that the node had seen.
    pub seen: UnixSeconds,
    /// Latest time on which two sources had agreed.
    pub agreed: UnixSeconds,
    /// Leases by their ids.
    pub leases: BTreeMap<MachineId, Use>,
}

/// How a lease was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Use {
    /// Highest serial that was accepted.
    pub serial: u64,
    /// End of that one, where it is known.
    pub end: Option<UnixSeconds>,
    /// Whether its renter deleted the machine.
    pub gone: bool,
}

impl Use {
    /// Returns how the lease of a machine is used.
    fn of(record: &Record) -> Self {
        let lease = &record.lease;
        Self { serial: lease.serial, end: Some(lease.end), gone: record.deleted.is_some() }
    }

    /// Returns the highest serial that may not come again once the machine is lost; 0 when any may.
    pub fn spent(self) -> u64 {
        if self.gone { self.serial } else { self.serial.saturating_sub(1) }
    }
}

impl Used {
    /// Notes a machine. Returns whether anything is new.
    pub fn note(&mut self, record: &Record) -> bool {
        let (id, new) = (record.lease.id, Use::of(record));
        let known = self.leases.get(&id).copied();
        if known == Some(new) || known.is_some_and(|known| known.serial > new.serial) {
            return false;
        }
        self.leases.insert(id, new);
        while self.leases.len() > MAX_LEASES {
            // What ends at nobody knows when stays longest.
            let ends = |(id, of): (&MachineId, &Use)| (of.end.is_none(), of.end, *id);
            let Some((.., first)) = self.leases.iter().map(ends).min() else { break };
            self.leases.remove(&first);
        }
        true
    }

    /// Notes what time it is: seen, and agreed on if sources agree. Returns whether that is worth writing.
    pub fn note_time(&mut self, seen: UnixSeconds, agreed: Option<UnixSeconds>) -> bool {
        let agreed = agreed.unwrap_or_default();
        let far = self.seen.0.abs_diff(seen.0) >= TIME_STEP_S;
        if !far && agreed.since(self.agreed) < TIME_STEP_S {
            return false;
        }
        self.seen = seen;
        self.agreed = self.agreed.max(agreed);
        let now = self.agreed;
        self.leases.retain(|_, of| of.end.is_none_or(|end| end > now));
        true
    }

    /// Parses a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, UsedError> {
        if bytes.len() > MAX_BYTES {
            return Err(UsedError::TooLong { found: bytes.len() });
        }
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or(UsedError::Head)?;
        let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
        let said = line.strip_prefix(HEAD.as_bytes()).ok_or(UsedError::Head)?;
        if said != checksum(rest).as_bytes() {
            return Err(UsedError::Digest);
        }
        Ok(serde_json::from_slice(rest)?)
    }

    /// Writes a file.
    pub fn bytes(&self) -> Vec<u8> {
        let text = serde_json::to_string(self).expect("nothing in it that JSON cannot hold");
        format!("{HEAD}{}\n{text}", checksum(text.as_bytes())).into_bytes()
    }

    /// Replaces file and copy; durable when this returns.
    fn write(&self, path: &Path) -> io::Result<()> {
        let bytes = self.bytes();
        twice::replace(path, &bytes)?;
        twice::replace(&twice::copy_of(path), &bytes)
    }
}

/// What is kept, and whether it lies on the disk.
#[derive(Debug, Default)]
pub(super) struct Beside {
    pub used: Used,
    /// Whether file and copy hold all of it. They do not when one of them was damaged, when a cut came between
    /// the two, or when there was no room: then the next change is written whatever it changes.
    pub written: bool,
}

impl Beside {
    /// Changes it and replaces file and copy, durably, if `change` says that it did, or if they are still to be
    /// written. Nothing is changed here when that fails.
    pub(super) fn change(
        &mut self,
        path: &Path,
        change: impl FnOnce(&mut Used) -> bool,
    ) -> io::Result<()> {
        let mut changed = self.used.clone();
        if !change(&mut changed) && self.written {
            return Ok(());
        }
        self.written = false;
        changed.write(path)?;
        *self = Self { used: changed, written: true };
        Ok(())
    }
}

fn checksum(bytes: &[u8]) -> String {
    types::hex::encode(&Sha256::digest(bytes))
}

/// Reads the file at `path`, or its copy where that is damaged, which is said; `None` when neither can be
/// used. Says, too, whether both are what they should be.
pub(super) fn load(path: &Path) -> (Option<Used>, bool) {
    let copy = twice::copy_of(path);
    let found = [path, copy.as_path()].map(|path| (path, read(path)));
    for (path, found) in &found {
        if let Err(error) = found {
            let reason = format!("{}: {}", path.display(), crate::init::boot::chain(error));
            eprintln!("{}", Event::Trouble { place: "state", reason });
        }
    }
    let [first, second] = found.map(|(_, found)| found.ok().flatten());
    let whole = first.is_some() && first == second;
    (first.or(second), whole)
}

fn read(path: &Path) -> Result<Option<Used>, UsedError> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
        Ok(file) => file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?,
    };
    Used::parse(&bytes).map(Some)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::fs;

    use super::*;
    use crate::machines::plan::fixture;

    fn used() -> Used {
        let mut used = Used::default();
        assert!(used.note(&fixture::record()));
        used
    }

    #[test]
    fn only_what_is_new_is_noted_and_earlier_serials_are_not() {
        let (mut used, mut record) = (used(), fixture::record());
        assert!(!used.note(&record));
        record.lease.serial = 3;
        assert!(used.note(&record));
        record.lease.serial = 2;
        assert!(!used.note(&record));
        let kept = |used: &Used| used.leases[&record.lease.id];
        assert_eq!((kept(&used).serial, kept(&used).spent()), (3, 2));
        record.lease.serial = 3;
        record.deleted = Some(UnixSeconds(1500));
        assert!(used.note(&record));
        assert_eq!(kept(&used).spent(), 3);
    }

    #[test]
    fn leases_go_by_agreed_time_only_and_the_first_to_end_when_there_are_too_many() {
        let mut used = used();
        assert!(used.note_time(UnixSeconds(1 << 40), None));
        assert_eq!(used.leases.len(), 1, "one clock's word");
        assert!(!used.note_time(UnixSeconds((1 << 40) + 9), None));
        assert!(used.note_time(UnixSeconds(9000), Some(UnixSeconds(9000))));
        assert!(used.leases.is_empty());
        let mut record = fixture::record();
        for number in 0..=MAX_LEASES as u64 {
            let mut id = [0; 16];
            id[8..].copy_from_slice(&number.to_be_bytes());
            record.lease.id = MachineId::from_bytes(id);
            record.lease.end = UnixSeconds(10_000 + number);
            assert!(used.note(&record));
        }
        assert_eq!(used.leases.len(), MAX_LEASES);
        assert!(!used.leases.contains_key(&MachineId::from_bytes([0; 16])));
        assert!(used.bytes().len() < MAX_BYTES);
        assert_eq!(Used::parse(&used.bytes()).unwrap(), used);
    }

    #[test]
    fn no_altered_byte_of_either_file_is_believed_or_loses_anything() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        assert_eq!(load(&path), (None, false));
        let used = used();
        used.write(&path).unwrap();
        assert_eq!(load(&path), (Some(used.clone()), true));
        for file in [path.clone(), twice::copy_of(&path)] {
            let whole = fs::read(&file).unwrap();
            for at in 0..whole.len() {
                let mut altered = whole.clone();
                altered[at] ^= 1 << (at % 8);
                assert!(Used::parse(&altered).is_err(), "{at}");
                fs::write(&file, altered).unwrap();
                assert_eq!(load(&path), (Some(used.clone()), false), "{at}");
            }
            fs::write(&file, whole).unwrap();
        }
    }
}
