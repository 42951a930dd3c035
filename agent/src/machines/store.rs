//! The node's memory: machines, highest serials, receipts, answered requests, nonces, the time
//! floor. What was acknowledged was committed and synced before. What a new store must know when this
//! one is lost is kept beside it ([`super::used`]), and written first.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use lease::{metering::SignedReceipt, request::MAX_AHEAD_S};
use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition};
use serde::{Deserialize, Serialize};
use types::{
    ids::{MachineId, PublicKey},
    units::UnixSeconds,
};

use super::{
    closed,
    plan::Record,
    used::{self, Beside, Use, Used},
};
use crate::{events::Event, init::boot::chain};

const MACHINES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("machines");
const SERIALS: TableDefinition<'_, &str, u64> = TableDefinition::new("serials");
const ANSWERS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("answers");
const TIMES: TableDefinition<'_, &str, u64> = TableDefinition::new("times");

/// Receipts in the order in which they were made, whatever machine they are of.
const RECEIPTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("receipts");
/// Machine and number of each receipt.
const RECEIPTS_OF: TableDefinition<'_, (&str, u64), ()> = TableDefinition::new("receipts-of");
/// Until when a nonce is remembered, key and nonce.
const NONCES: TableDefinition<'_, (u64, &str, &str), ()> = TableDefinition::new("nonces");

/// Extension of a store that is not whole yet.
const UNFINISHED: &str = "unfinished";

/// Latest time that the node has seen, latest after a time source had confirmed its clock, and latest on which
/// two had agreed.
const FLOOR: &str = "floor";
const CONFIRMED: &str = "confirmed";
const AGREED: &str = "agreed";
/// There while nobody knows since when requests are remembered: the store before this one was lost.
const LOST: &str = "lost";
/// No request that was signed earlier counts.
const REQUESTS: &str = "requests";

/// Most receipts that are kept, of all machines; the oldest go first. A machine that runs makes
/// one an hour, so these are a year of seven.
const MAX_RECEIPTS: u64 = 65_536;

/// Most outdated nonces that are forgotten when a new one is kept.
const MAX_FORGOTTEN: usize = 64;

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

/// A receipt and whose it is; it outlives its machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptReceipt {
    renter: PublicKey,
    signed: SignedReceipt,
}

/// Why something is not stored.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum StoreError {
    #[error("cannot open the store {path}")]
    Open { path: String, source: redb::DatabaseError },
    #[error("cannot write {path}")]
    File { path: String, source: io::Error },
    #[error("the store failed while it {doing}")]
    Failed { doing: &'static str, source: Box<redb::Error> },
    #[error(
        "STATE is full: nothing new can be remembered until there is room on it, and what was \
         acknowledged before is kept"
    )]
    Full { source: Box<StoreError> },
    #[error("the store is closed: the node goes down")]
    Closed,
    #[error("entry {key} in the store is no document of this release")]
    Document { key: String, source: serde_json::Error },
}

fn failed<E: Into<redb::Error>>(doing: &'static str) -> impl FnOnce(E) -> StoreError {
    move |source| StoreError::Failed { doing, source: Box::new(source.into()) }
}

/// Says of a failure that it is for want of room, where it is.
fn full_or(error: StoreError) -> StoreError {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    let is_full = |error: &io::Error| matches!(error.kind(), StorageFull | QuotaExceeded);
    let full = match &error {
        StoreError::File { source, .. } => is_full(source),
        StoreError::Failed { source, .. } => {
            matches!(&**source, redb::Error::Io(source) if is_full(source))
        }
        StoreError::Open { source, .. } => matches!(
            source,
            redb::DatabaseError::Storage(redb::StorageError::Io(source)) if is_full(source)
        ),
        StoreError::Full { .. } | StoreError::Document { .. } | StoreError::Closed => false,
    };
    if full { StoreError::Full { source: Box::new(error) } } else { error }
}

/// The database of a store.
#[derive(Debug)]
enum Handle {
    Open(Database),
    /// Its disk failed; it is opened when it is used again.
    Failed,
    /// The node goes down, and nothing is read or written any more.
    Closed,
}

/// The store.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    database: Mutex<Handle>,
    beside: Mutex<Beside>,
}

impl Store {
    /// Opens the store, or makes an empty one. That gets its name once it is whole: one that was begun
    /// is no database, and would keep the node from starting for good. It begins with what the one before
    /// it must not have forgotten, if there was one.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let file = |source| StoreError::File { path: path.display().to_string(), source };
        let (known, whole) = used::load(&path.with_file_name(used::FILE));
        if !path.try_exists().map_err(file)? {
            if known.is_some() {
                let reason = format!(
                    "{} is not there any more: machines and receipts in it are not known; which leases were \
                     used up is",
                    path.display()
                );
                eprintln!("{}", Event::Trouble { place: "state", reason });
            }
            let unfinished = path.with_extension(UNFINISHED);
            match fs::remove_file(&unfinished) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file(error)),
                Err(_) | Ok(()) => {
                    let new = Self::open_file(&unfinished)?;
                    known.as_ref().map_or(Ok(()), |known| new.inherit(known))?;
                }
            }
            let folder = path.parent().unwrap_or(Path::new("/"));
            fs::rename(&unfinished, path).map_err(file)?;
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(file)?;
        }
        let store = Self::open_file(path)?;
        store.settle_used(known, whole)?;
        Ok(store)
    }

    /// Takes over what was kept beside a store that is lost.
    fn inherit(&self, known: &Used) -> Result<(), StoreError> {
        self.write("took over what an earlier store knew", |tables| {
            for (id, of) in known.leases.iter().filter(|(_, of)| of.spent() > 0) {
                tables.serials.insert(id.to_string().as_str(), of.spent())?;
            }
            tables.times.insert(FLOOR, known.seen.0)?;
            // Whether a source had confirmed it is not known.
            tables.times.insert(CONFIRMED, known.seen.0)?;
            tables.times.insert(AGREED, known.agreed.0)?;
            tables.times.insert(LOST, 1).map(|_| ())
        })
    }

    /// Brings what is kept beside the store in line with it. Want of room is told, and does not keep the node
    /// from starting: until there is some, nothing new is acknowledged.
    fn settle_used(&self, known: Option<Used>, whole: bool) -> Result<(), StoreError> {
        let mut used = match known {
            Some(known) => known,
            None => Used { leases: self.serials()?, ..Used::default() },
        };
        let mut new = !whole;
        for record in self.machines()? {
            new |= used.note(&record);
        }
        new |= used.note_time(self.floor()?, Some(self.agreed()?));
        *self.beside() = Beside { used, written: !new };
        match self.keep_beside(|_| false) {
            Err(error @ StoreError::Full { .. }) => {
                eprintln!("{}", Event::Trouble { place: "state", reason: chain(&error) });
                Ok(())
            }
            other => other,
        }
    }

    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.beside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns every lease of which a serial is known, as used up.
    fn serials(&self) -> Result<BTreeMap<MachineId, Use>, StoreError> {
        let doing = "listed serials";
        let read = self.begin(doing, Database::begin_read)?;
        let table = read.open_table(SERIALS).map_err(failed(doing))?;
        let mut found = BTreeMap::new();
        for entry in table.iter().map_err(failed(doing))? {
            let (key, serial) = entry.map_err(failed(doing))?;
            // Only ids were written.
            if let Ok(id) = key.value().parse() {
                found.insert(id, Use { serial: serial.value(), end: None, gone: true });
            }
        }
        Ok(found)
    }

    /// Changes what is kept beside the store, durably, if `change` says that it did.
    fn keep_beside(&self, change: impl FnOnce(&mut Used) -> bool) -> Result<(), StoreError> {
        let path = self.path.with_file_name(used::FILE);
        self.beside()
            .change(&path, change)
            .map_err(|source| StoreError::File { path: path.display().to_string(), source })
            .map_err(full_or)
    }

    fn open_file(path: &Path) -> Result<Self, StoreError> {
        let database = Database::create(path)
            .map_err(|source| StoreError::Open { path: path.display().to_string(), source })?;
        let database = Mutex::new(Handle::Open(database));
        let store = Self { path: path.to_owned(), database, beside: Mutex::default() };
        if !store.has_tables()? {
            store.write("made its tables", |_| Ok(()))?;
        }
        Ok(store)
    }

    /// Whether no table is missing, as one of this release is in a store that an earlier one made.
    fn has_tables(&self) -> Result<bool, StoreError> {
        let doing = "looked for its tables";
        let read = self.begin(doing, Database::begin_read)?;
        let all = read.list_tables().map_err(failed(doing))?.count();
        Ok(all >= Tables::COUNT)
    }

    /// Closes the store for good, and notes that it is whole as it is now ([`closed`]). Whoever asks it for
    /// something later is told that it is closed.
    pub fn close(&self) -> Result<(), StoreError> {
        let mut database = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let was = std::mem::replace(&mut *database, Handle::Closed);
        let Handle::Open(open) = was else { return Ok(()) };
        drop(open);
        closed::note(&self.path)
            .map_err(|source| StoreError::File { path: self.path.display().to_string(), source })
    }

    /// Returns every machine. One that this release cannot read, as after a fall-back from a newer release,
    /// is said and left where it is: it must not keep the node from serving all others.
    pub fn machines(&self) -> Result<Vec<Record>, StoreError> {
        let doing = "listed machines";
        let read = self.begin(doing, Database::begin_read)?;
        let table = read.open_table(MACHINES).map_err(failed(doing))?;
        let mut records = Vec::new();
        for entry in table.iter().map_err(failed(doing))? {
            let (key, value) = entry.map_err(failed(doing))?;
            match parse(key.value(), value.value()) {
                Ok(record) => records.push(record),
                Err(error) => {
                    let reason = format!("{}; the machine is left alone", chain(&error));
                    eprintln!("{}", Event::Trouble { place: "store", reason });
                }
            }
        }
        Ok(records)
    }

    /// Keeps a machine and the serial of its lease.
    pub fn put_machine(&self, record: &Record) -> Result<(), StoreError> {
        self.keep_beside(|used| used.note(record))?;
        self.write("kept a machine", |tables| tables.put_machine(record))
    }

    /// Keeps a receipt together with the machine whose meter it closed.
    pub fn put_receipt(&self, record: &Record, signed: &SignedReceipt) -> Result<(), StoreError> {
        self.keep_beside(|used| used.note(record))?;
        self.write("kept a receipt", |tables| {
            tables.put_machine(record)?;
            let number = tables.receipts.last()?.map_or(1, |(last, _)| last.value() + 1);
            let kept = KeptReceipt { renter: record.lease.renter, signed: signed.clone() };
            let id = record.lease.id.to_string();
            tables.receipts.insert(number, document(&kept).as_slice())?;
            tables.receipts_of.insert((id.as_str(), number), ())?;
            if tables.receipts.len()? > MAX_RECEIPTS {
                let oldest = tables.receipts.pop_first()?.and_then(|(number, value)| {
                    let kept: KeptReceipt = serde_json::from_slice(value.value()).ok()?;
                    Some((kept.signed.receipt.lease.to_string(), number.value()))
                });
                if let Some((id, number)) = oldest {
                    tables.receipts_of.remove((id.as_str(), number))?;
                }
            }
            Ok(())
        })
    }

    /// Returns receipts of a machine that was, or is, `renter`'s: those with a number above
    /// `after`, at most `limit`, oldest first.
    pub fn receipts(
        &self,
        id: MachineId,
        renter: PublicKey,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, SignedReceipt)>, StoreError> {
        let doing = "looked up receipts";
        let id = id.to_string();
        let read = self.begin(doing, Database::begin_read)?;
        let numbers = read.open_table(RECEIPTS_OF).map_err(failed(doing))?;
        let receipts = read.open_table(RECEIPTS).map_err(failed(doing))?;
        let range = (id.as_str(), after.saturating_add(1))..=(id.as_str(), u64::MAX);
        let mut found = Vec::new();
        for entry in numbers.range(range).map_err(failed(doing))? {
            let (key, _) = entry.map_err(failed(doing))?;
            let number = key.value().1;
            let Some(value) = receipts.get(number).map_err(failed(doing))? else { continue };
            let kept: KeptReceipt = parse(&id, value.value())?;
            if kept.renter == renter {
                found.push((number, kept.signed));
            }
            if found.len() >= limit {
                break;
            }
        }
        Ok(found)
    }

    /// Returns the nonces that are remembered: until when, whose, which.
    pub fn nonces(&self) -> Result<Vec<(UnixSeconds, PublicKey, String)>, StoreError> {
        let doing = "listed nonces";
        let read = self.begin(doing, Database::begin_read)?;
        let table = read.open_table(NONCES).map_err(failed(doing))?;
        let mut nonces = Vec::new();
        for entry in table.iter().map_err(failed(doing))? {
            let (key, _) = entry.map_err(failed(doing))?;
            let (until, key, nonce) = key.value();
            // Only keys were written.
            if let Ok(key) = key.parse() {
                nonces.push((UnixSeconds(until), key, nonce.to_owned()));
            }
        }
        Ok(nonces)
    }

    /// Remembers a nonce, and forgets some that are outdated.
    pub fn put_nonce(
        &self,
        now: UnixSeconds,
        until: UnixSeconds,
        key: PublicKey,
        nonce: &str,
    ) -> Result<(), StoreError> {
        self.write("remembered a nonce", |tables| {
            for _ in 0..MAX_FORGOTTEN {
                let first = tables.nonces.first()?.map(|(key, _)| key.value().0);
                if first.is_none_or(|until| until > now.0) {
                    break;
                }
                tables.nonces.pop_first()?;
            }
            tables.nonces.insert((until.0, key.to_string().as_str(), nonce), ()).map(|_| ())
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
        let read = self.begin(doing, Database::begin_read)?;
        let table = read.open_table(SERIALS).map_err(failed(doing))?;
        let serial = table.get(id.to_string().as_str()).map_err(failed(doing))?;
        Ok(serial.map(|serial| serial.value()))
    }

    /// Returns the answer that was given under an idempotency key.
    pub fn answer(&self, key: &str) -> Result<Option<Answered>, StoreError> {
        let doing = "looked up an answer";
        let read = self.begin(doing, Database::begin_read)?;
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
        self.time(FLOOR)
    }

    /// Returns the latest time that was recorded after a source had confirmed the clock; zero in a store of an
    /// earlier release, which did not tell them apart.
    pub fn confirmed(&self) -> Result<UnixSeconds, StoreError> {
        self.time(CONFIRMED)
    }

    /// Returns the latest time on which two sources had agreed.
    pub fn agreed(&self) -> Result<UnixSeconds, StoreError> {
        self.time(AGREED)
    }

    fn time(&self, name: &str) -> Result<UnixSeconds, StoreError> {
        let doing = "read the time floor";
        let read = self.begin(doing, Database::begin_read)?;
        let table = read.open_table(TIMES).map_err(failed(doing))?;
        let time = table.get(name).map_err(failed(doing))?;
        Ok(UnixSeconds(time.map_or(0, |time| time.value())))
    }

    /// Returns the time before which no request counts that was signed: zero, unless the requests that
    /// came before were forgotten with an earlier store. Then it is the first `now` that is told here, and
    /// as much later as clocks may be ahead.
    pub fn requests_from(&self, now: UnixSeconds) -> Result<UnixSeconds, StoreError> {
        if self.time(LOST)?.0 > 0 {
            self.write("noted which requests count", |tables| {
                tables.times.insert(REQUESTS, now.plus(MAX_AHEAD_S).0)?;
                tables.times.remove(LOST).map(|_| ())
            })?;
        }
        self.time(REQUESTS)
    }

    /// Records that two sources agree that it is `now`, whatever was seen before.
    pub fn agree_on(&self, now: UnixSeconds) -> Result<(), StoreError> {
        self.keep_beside(|used| used.note_time(now, Some(now)))?;
        self.write("recorded the time", |tables| {
            let known = tables.times.get(AGREED)?.map_or(0, |time| time.value());
            tables.times.insert(AGREED, known.max(now.0))?;
            tables.times.insert(CONFIRMED, now.0)?;
            tables.times.insert(FLOOR, now.0).map(|_| ())
        })
    }

    /// Records that it is `now` by a clock that a source has confirmed, whatever was seen before that none had.
    pub fn confirm(&self, now: UnixSeconds) -> Result<(), StoreError> {
        self.keep_beside(|used| used.note_time(now, None))?;
        self.write("recorded the time", |tables| {
            let known = tables.times.get(CONFIRMED)?.map_or(0, |time| time.value());
            tables.times.insert(CONFIRMED, known.max(now.0))?;
            tables.times.insert(FLOOR, now.0).map(|_| ())
        })
    }

    /// Records that it is `now` by a clock that no source has confirmed. An earlier time changes nothing.
    pub fn raise_floor(&self, now: UnixSeconds) -> Result<(), StoreError> {
        self.keep_beside(|used| used.note_time(used.seen.max(now), None))?;
        self.write("raised the time floor", |tables| {
            let known = tables.times.get(FLOOR)?.map_or(0, |floor| floor.value());
            tables.times.insert(FLOOR, known.max(now.0)).map(|_| ())
        })
    }

    /// Begins a transaction, in the database that is opened again when it failed before.
    fn begin<T>(
        &self,
        doing: &'static str,
        begin: impl FnOnce(&Database) -> Result<T, redb::TransactionError>,
    ) -> Result<T, StoreError> {
        let mut database = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*database, Handle::Failed) {
            let open = Database::open(&self.path).map_err(|source| self.unopened(source))?;
            *database = Handle::Open(open);
        }
        match &*database {
            Handle::Open(open) => begin(open).map_err(failed(doing)),
            Handle::Failed | Handle::Closed => Err(StoreError::Closed),
        }
    }

    fn unopened(&self, source: redb::DatabaseError) -> StoreError {
        StoreError::Open { path: self.path.display().to_string(), source }
    }

    /// Writes. A database that a disk failed once refuses everything from then on, so it is opened again
    /// for whatever comes next.
    fn write(
        &self,
        doing: &'static str,
        act: impl FnOnce(&mut Tables<'_>) -> Result<(), redb::StorageError>,
    ) -> Result<(), StoreError> {
        let written = self.try_write(doing, act);
        if let Err(StoreError::Failed { source, .. }) = &written
            && matches!(**source, redb::Error::Io(_) | redb::Error::PreviousIo)
        {
            let mut database = self.database.lock().unwrap_or_else(PoisonError::into_inner);
            if !matches!(*database, Handle::Closed) {
                *database = Handle::Failed;
            }
        }
        written.map_err(full_or)
    }

    fn try_write(
        &self,
        doing: &'static str,
        act: impl FnOnce(&mut Tables<'_>) -> Result<(), redb::StorageError>,
    ) -> Result<(), StoreError> {
        let write = self.begin(doing, Database::begin_write)?;
        let mut tables = Tables {
            machines: write.open_table(MACHINES).map_err(failed(doing))?,
            serials: write.open_table(SERIALS).map_err(failed(doing))?,
            answers: write.open_table(ANSWERS).map_err(failed(doing))?,
            times: write.open_table(TIMES).map_err(failed(doing))?,
            receipts: write.open_table(RECEIPTS).map_err(failed(doing))?,
            receipts_of: write.open_table(RECEIPTS_OF).map_err(failed(doing))?,
            nonces: write.open_table(NONCES).map_err(failed(doing))?,
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
    receipts: redb::Table<'a, u64, &'static [u8]>,
    receipts_of: redb::Table<'a, (&'static str, u64), ()>,
    nonces: redb::Table<'a, (u64, &'static str, &'static str), ()>,
}

impl Tables<'_> {
    /// How many there are.
    const COUNT: usize = 7;

    fn put_machine(&mut self, record: &Record) -> Result<(), redb::StorageError> {
        let id = record.lease.id.to_string();
        self.machines.insert(id.as_str(), document(record).as_slice())?;
        let known = self.serials.get(id.as_str())?.map_or(0, |serial| serial.value());
        self.serials.insert(id.as_str(), record.lease.serial.max(known))?;
        Ok(())
    }
}

fn document<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("records hold nothing that JSON cannot")
}

fn parse<T: for<'de> Deserialize<'de>>(key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(bytes)
        .map_err(|source| StoreError::Document { key: key.to_owned(), source })
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
