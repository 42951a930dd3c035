//! The node's memory: machines, highest serials, answered requests, the time floor. What was
//! acknowledged was committed and synced before.

use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use types::{ids::MachineId, units::UnixSeconds};

use super::plan::Record;

const MACHINES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("machines");
const SERIALS: TableDefinition<'_, &str, u64> = TableDefinition::new("serials");
const ANSWERS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("answers");
const TIMES: TableDefinition<'_, &str, u64> = TableDefinition::new("times");

const FLOOR: &str = "floor";

/// Most answers that are kept; the oldest go first.
const MAX_ANSWERS: usize = 4096;

/// An answer that is given again when the same request comes again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answered {
    /// Digest of the request, so that another request under the same key is noticed.
    pub digest: String,
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: String,
    /// When.
    pub at: UnixSeconds,
}

/// Why something is not stored.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum StoreError {
    #[error("cannot open the store {path}")]
    Open { path: String, source: redb::DatabaseError },
    #[error("the store failed while it {doing}")]
    Failed { doing: &'static str, source: Box<redb::Error> },
    #[error("entry {key} in the store is no document of this release")]
    Document { key: String, source: serde_json::Error },
}

fn failed<E: Into<redb::Error>>(doing: &'static str) -> impl FnOnce(E) -> StoreError {
    move |source| StoreError::Failed { doing, source: Box::new(source.into()) }
}

/// The store.
#[derive(Debug)]
pub struct Store {
    database: Database,
}

impl Store {
    /// Opens the store, or makes an empty one.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let database = Database::create(path)
            .map_err(|source| StoreError::Open { path: path.display().to_string(), source })?;
        let store = Self { database };
        store.write("made its tables", |_| Ok(()))?;
        Ok(store)
    }

    /// Returns every machine.
    pub fn machines(&self) -> Result<Vec<Record>, StoreError> {
        let doing = "listed machines";
        let read = self.database.begin_read().map_err(failed(doing))?;
        let table = read.open_table(MACHINES).map_err(failed(doing))?;
        let mut records = Vec::new();
        for entry in table.iter().map_err(failed(doing))? {
            let (key, value) = entry.map_err(failed(doing))?;
            records.push(parse(key.value(), value.value())?);
        }
        Ok(records)
    }

    /// Keeps a machine, the serial of its lease, and the answer to the request that asked for it.
    pub fn put_machine(
        &self,
        record: &Record,
        answer: Option<(&str, &Answered)>,
    ) -> Result<(), StoreError> {
        let doing = "kept a machine";
        self.write(doing, |tables| {
            let id = record.terms.id.to_string();
            tables.machines.insert(id.as_str(), document(record).as_slice())?;
            let known = tables.serials.get(id.as_str())?.map_or(0, |serial| serial.value());
            tables.serials.insert(id.as_str(), record.terms.serial.max(known))?;
            if let Some((key, answer)) = answer {
                tables.answers.insert(key, document(answer).as_slice())?;
            }
            Ok(())
        })
    }

    /// Forgets a machine; its serial stays, so that its old lease cannot make it again.
    pub fn remove_machine(&self, id: MachineId) -> Result<(), StoreError> {
        self.write("forgot a machine", |tables| {
            tables.machines.remove(id.to_string().as_str()).map(|_| ())
        })
    }

    /// Returns the highest serial of a lease that was accepted.
    pub fn serial(&self, id: MachineId) -> Result<Option<u64>, StoreError> {
        let doing = "looked up a serial";
        let read = self.database.begin_read().map_err(failed(doing))?;
        let table = read.open_table(SERIALS).map_err(failed(doing))?;
        let serial = table.get(id.to_string().as_str()).map_err(failed(doing))?;
        Ok(serial.map(|serial| serial.value()))
    }

    /// Returns the answer that was given under an idempotency key.
    pub fn answer(&self, key: &str) -> Result<Option<Answered>, StoreError> {
        let doing = "looked up an answer";
        let read = self.database.begin_read().map_err(failed(doing))?;
        let table = read.open_table(ANSWERS).map_err(failed(doing))?;
        let value = table.get(key).map_err(failed(doing))?;
        value.map(|value| parse(key, value.value())).transpose()
    }

    /// Keeps the answer to a request, and forgets the oldest when there are too many.
    pub fn put_answer(&self, key: &str, answer: &Answered) -> Result<(), StoreError> {
        self.write("kept an answer", |tables| {
            tables.answers.insert(key, document(answer).as_slice())?;
            let mut ages = Vec::new();
            for entry in tables.answers.iter()? {
                let (key, value) = entry?;
                let at = serde_json::from_slice::<Answered>(value.value()).map_or(0, |a| a.at.0);
                ages.push((at, key.value().to_owned()));
            }
            ages.sort();
            let excess = ages.len().saturating_sub(MAX_ANSWERS);
            for (_, key) in &ages[..excess] {
                tables.answers.remove(key.as_str())?;
            }
            Ok(())
        })
    }

    /// Returns the latest time that was recorded.
    pub fn floor(&self) -> Result<UnixSeconds, StoreError> {
        let doing = "read the time floor";
        let read = self.database.begin_read().map_err(failed(doing))?;
        let table = read.open_table(TIMES).map_err(failed(doing))?;
        let floor = table.get(FLOOR).map_err(failed(doing))?;
        Ok(UnixSeconds(floor.map_or(0, |floor| floor.value())))
    }

    /// Records that it is `now`. An earlier time changes nothing.
    pub fn raise_floor(&self, now: UnixSeconds) -> Result<(), StoreError> {
        self.write("raised the time floor", |tables| {
            let known = tables.times.get(FLOOR)?.map_or(0, |floor| floor.value());
            tables.times.insert(FLOOR, known.max(now.0)).map(|_| ())
        })
    }

    fn write(
        &self,
        doing: &'static str,
        act: impl FnOnce(&mut Tables<'_>) -> Result<(), redb::StorageError>,
    ) -> Result<(), StoreError> {
        let write = self.database.begin_write().map_err(failed(doing))?;
        let mut tables = Tables {
            machines: write.open_table(MACHINES).map_err(failed(doing))?,
            serials: write.open_table(SERIALS).map_err(failed(doing))?,
            answers: write.open_table(ANSWERS).map_err(failed(doing))?,
            times: write.open_table(TIMES).map_err(failed(doing))?,
        };
        act(&mut tables).map_err(failed(doing))?;
        drop(tables);
        write.commit().map_err(failed(doing))
    }
}

struct Tables<'a> {
    machines: redb::Table<'a, &'static str, &'static [u8]>,
    serials: redb::Table<'a, &'static str, u64>,
    answers: redb::Table<'a, &'static str, &'static [u8]>,
    times: redb::Table<'a, &'static str, u64>,
}

fn document<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("records hold nothing that JSON cannot")
}

fn parse<T: for<'de> Deserialize<'de>>(key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(bytes)
        .map_err(|source| StoreError::Document { key: key.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_there_after_opening_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("agent.redb");
        let answer =
            Answered { digest: "d".into(), status: 201, body: "{}".into(), at: UnixSeconds(5) };
        {
            let store = Store::open(&path).expect("made");
            store.put_answer("k", &answer).expect("kept");
            store.raise_floor(UnixSeconds(9)).expect("raised");
            store.raise_floor(UnixSeconds(3)).expect("ignored");
        }
        let store = Store::open(&path).expect("opened");
        assert_eq!(store.answer("k").expect("read"), Some(answer));
        assert_eq!(store.answer("other").expect("read"), None);
        assert_eq!(store.floor().expect("read"), UnixSeconds(9));
        assert!(store.machines().expect("read").is_empty());
    }
}
