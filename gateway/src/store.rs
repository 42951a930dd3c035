//! What the gateway must not forget: which leases it was shown and so on which node each machine
//! is, how requests with an idempotency key were answered, and whose content it keeps. One redb file; every change is on disk before it is
//! acknowledged.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use types::{
    forward::ForwardedResponse,
    ids::{ContentId, MachineId, NodeId, PublicKey},
    units::UnixSeconds,
};

/// How long an answer can be asked for again, in seconds.
pub const KEEP_ANSWERS_S: u64 = 48 * 3600;

/// How long a renter's content is kept after the last lease, in seconds: as long as nodes keep
/// the machine, so that a renewal finds what it started from.
pub const RETAIN_S: u64 = 10 * 24 * 3600;

/// How long a lease is remembered after its end, in seconds: receipts of its machine are asked for
/// that long.
pub const REMEMBER_S: u64 = 400 * 24 * 3600;

/// Renter, slash, lease to JSON of [`Standing`].
const LEASES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("leases");
/// Renter, slash, content to its length in bytes.
const HELD: TableDefinition<'_, &str, u64> = TableDefinition::new("held");
/// Renter, slash, idempotency key to JSON of [`Answer`].
const ANSWERS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("answers");

/// What is known of a lease that its renter showed and enough keys signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// The highest serial that was shown.
    pub serial: u64,
    /// The end of the lease with that serial.
    pub end: UnixSeconds,
    /// Its node, which has the machine if there is one.
    pub node: NodeId,
}

impl Standing {
    /// Says whether what belongs to the machine is still kept.
    pub fn retains(&self, now: UnixSeconds) -> bool {
        self.end.plus(RETAIN_S) > now
    }
}

/// A request that was done, and its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// SHA-256 over method, target and body, in hexadecimal.
    pub digest: String,
    /// When it was done.
    pub at: UnixSeconds,
    /// What was answered.
    pub response: ForwardedResponse,
}

/// Why the store failed. None of these is the caller's fault.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum StoreError {
    #[error(
        "another gateway runs on {}; stop it, or give this one a folder of its own with --data-dir",
        folder.display()
    )]
    Busy { folder: PathBuf },
    #[error("the gateway's store failed")]
    HostDatabase { source: Box<redb::Error> },
    #[error("an entry of the gateway's store cannot be read")]
    HostEntry { source: serde_json::Error },
}

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> Self {
        Self::HostDatabase { source: Box::new(error.into()) }
    }
}

/// The open store.
pub struct Store {
    database: Database,
}

impl Store {
    /// Opens the store at `path`, making it when there is none.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let database = Database::create(path);
        if matches!(database, Err(DatabaseError::DatabaseAlreadyOpen)) {
            return Err(StoreError::Busy { folder: path.parent().unwrap_or(path).to_owned() });
        }
        let database = database?;
        let transaction = database.begin_write()?;
        transaction.open_table(ANSWERS)?;
        transaction.open_table(LEASES)?;
        transaction.open_table(HELD)?;
        transaction.commit()?;
        Ok(Self { database })
    }

    /// Returns the nodes that a renter's leases name, but for leases whose machines are long gone.
    pub fn nodes_of(&self, renter: PublicKey, now: UnixSeconds) -> Result<Vec<NodeId>, StoreError> {
        let standings = self.standings(renter)?.into_iter();
        let nodes: BTreeSet<_> =
            standings.filter(|lease| lease.retains(now)).map(|lease| lease.node).collect();
        Ok(nodes.into_iter().collect())
    }

    /// Returns what is known of the request that `renter` named `key`.
    pub fn answer(&self, renter: PublicKey, key: &str) -> Result<Option<Answer>, StoreError> {
        self.get(ANSWERS, &format!("{renter}/{key}"))
    }

    /// Remembers it.
    pub fn put_answer(
        &self,
        renter: PublicKey,
        key: &str,
        answer: &Answer,
    ) -> Result<(), StoreError> {
        let json = encode(answer)?;
        let transaction = self.database.begin_write()?;
        transaction.open_table(ANSWERS)?.insert(format!("{renter}/{key}").as_str(), &*json)?;
        transaction.commit()?;
        Ok(())
    }

    /// Remembers a lease that `renter` showed, unless one with a higher serial is known.
    pub fn put_lease(
        &self,
        renter: PublicKey,
        lease: MachineId,
        standing: &Standing,
    ) -> Result<(), StoreError> {
        let (name, json) = (format!("{renter}/{lease}"), encode(standing)?);
        let transaction = self.database.begin_write()?;
        {
            let mut leases = transaction.open_table(LEASES)?;
            let known = leases.get(name.as_str())?.map(|value| decode::<Standing>(value.value()));
            if known.transpose()?.is_some_and(|known| known.serial >= standing.serial) {
                return Ok(());
            }
            leases.insert(name.as_str(), &*json)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Returns what is known of a lease.
    pub fn standing(
        &self,
        renter: PublicKey,
        lease: MachineId,
    ) -> Result<Option<Standing>, StoreError> {
        self.get(LEASES, &format!("{renter}/{lease}"))
    }

    /// Returns when the last of a renter's leases ends or ended.
    pub fn last_end(&self, renter: PublicKey) -> Result<Option<UnixSeconds>, StoreError> {
        Ok(self.standings(renter)?.into_iter().map(|standing| standing.end).max())
    }

    fn standings(&self, renter: PublicKey) -> Result<Vec<Standing>, StoreError> {
        let table = self.database.begin_read()?.open_table(LEASES)?;
        let entries = table.range::<&str>(of(renter).as_str()..end_of(renter).as_str())?;
        entries.map(|entry| decode(entry?.1.value())).collect()
    }

    /// Remembers that `renter` uploaded `content` of `bytes` bytes.
    pub fn hold(
        &self,
        renter: PublicKey,
        content: ContentId,
        bytes: u64,
    ) -> Result<(), StoreError> {
        let transaction = self.database.begin_write()?;
        transaction.open_table(HELD)?.insert(format!("{renter}/{content}").as_str(), bytes)?;
        transaction.commit()?;
        Ok(())
    }

    /// Returns the length of content that `renter` uploaded; `None` when there is none.
    pub fn held(&self, renter: PublicKey, content: ContentId) -> Result<Option<u64>, StoreError> {
        let table = self.database.begin_read()?.open_table(HELD)?;
        Ok(table.get(format!("{renter}/{content}").as_str())?.map(|bytes| bytes.value()))
    }

    /// Returns whether somebody who uploaded `content` has a lease of `node`, or had one whose machine is kept still.
    pub fn may_fetch(
        &self,
        node: NodeId,
        content: ContentId,
        now: UnixSeconds,
    ) -> Result<bool, StoreError> {
        let table = self.database.begin_read()?.open_table(HELD)?;
        // From one renter to the next, whatever else they uploaded.
        let mut begin = String::new();
        loop {
            let first = table.range::<&str>(begin.as_str()..)?.next();
            let Some(entry) = first else { return Ok(false) };
            let (name, _) = entry?;
            let renter = name.value().split('/').next().unwrap_or_default();
            let holds = table.get(format!("{renter}/{content}").as_str())?.is_some();
            if let (true, Ok(renter)) = (holds, renter.parse::<PublicKey>())
                && self.nodes_of(renter, now)?.contains(&node)
            {
                return Ok(true);
            }
            begin = format!("{renter}0");
        }
    }

    /// Forgets that `renter` uploaded `content`.
    pub fn release(&self, renter: PublicKey, content: ContentId) -> Result<(), StoreError> {
        let transaction = self.database.begin_write()?;
        transaction.open_table(HELD)?.remove(format!("{renter}/{content}").as_str())?;
        transaction.commit()?;
        Ok(())
    }

    /// Returns the bytes that a renter uploaded and that are still kept.
    pub fn used(&self, renter: PublicKey) -> Result<u64, StoreError> {
        let table = self.database.begin_read()?.open_table(HELD)?;
        let mut used = 0u64;
        for entry in table.range::<&str>(of(renter).as_str()..end_of(renter).as_str())? {
            used = used.saturating_add(entry?.1.value());
        }
        Ok(used)
    }

    /// Forgets answers and leases that are too old to be asked for, and what renters whose leases
    /// are over uploaded. Returns the content that is still held.
    pub fn forget(&self, now: UnixSeconds) -> Result<BTreeSet<ContentId>, StoreError> {
        let transaction = self.database.begin_write()?;
        transaction.open_table(ANSWERS)?.retain(|_, value| {
            serde_json::from_slice::<Answer>(value)
                .is_ok_and(|answer| now.since(answer.at) < KEEP_ANSWERS_S)
        })?;
        let (mut renters, mut held) = (BTreeSet::new(), BTreeSet::new());
        transaction.open_table(LEASES)?.retain(|name, value| {
            let Ok(standing) = serde_json::from_slice::<Standing>(value) else { return false };
            if let (true, Some((renter, _))) = (standing.retains(now), name.split_once('/')) {
                renters.insert(renter.to_owned());
            }
            standing.end.plus(REMEMBER_S) > now
        })?;
        transaction.open_table(HELD)?.retain(|name, _| {
            let Some((renter, content)) = name.split_once('/') else { return false };
            let stands = renters.contains(renter);
            if let (true, Ok(content)) = (stands, content.parse()) {
                held.insert(content);
            }
            stands
        })?;
        transaction.commit()?;
        Ok(held)
    }

    fn get<T: DeserializeOwned>(
        &self,
        table: TableDefinition<'_, &str, &[u8]>,
        key: &str,
    ) -> Result<Option<T>, StoreError> {
        let table = self.database.begin_read()?.open_table(table)?;
        table.get(key)?.map(|value| decode(value.value())).transpose()
    }
}

/// Where the entries of a renter begin.
fn of(renter: PublicKey) -> String {
    format!("{renter}/")
}

/// Where they end: `0` follows the slash.
fn end_of(renter: PublicKey) -> String {
    format!("{renter}0")
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(value).map_err(|source| StoreError::HostEntry { source })
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(bytes).map_err(|source| StoreError::HostEntry { source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_is_there_after_opening_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store.redb");
        let renter = PublicKey::from_bytes([2; 32]);
        let (content_type, headers) = ("application/json".into(), Vec::new());
        let response = ForwardedResponse { status: 201, content_type, headers, body: vec![1] };
        let answer = Answer { digest: "d".into(), at: UnixSeconds(10), response };
        let store = Store::open(&path).expect("made");
        store.put_answer(renter, "k", &answer).expect("kept");
        let told = Store::open(&path).err().expect("in use").to_string();
        assert!(told.contains("another gateway runs on") && told.contains("--data-dir"), "{told}");
        drop(store);
        let store = Store::open(&path).expect("opened");
        store.forget(UnixSeconds(11)).expect("kept");
        assert_eq!(store.answer(renter, "k").expect("read"), Some(answer));
        store.forget(UnixSeconds(10 + KEEP_ANSWERS_S)).expect("dropped");
        assert_eq!(store.answer(renter, "k").expect("read"), None);
    }

    #[test]
    fn a_node_may_fetch_what_one_of_its_renters_uploaded() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store.redb")).expect("made");
        let renters = [1, 2, 3].map(|number| PublicKey::from_bytes([number; 32]));
        let nodes = [4, 5, 6].map(|number| NodeId::from_bytes([number; 32]));
        let [x, y, z] = [7, 8, 9].map(|number| ContentId::from_bytes([number; 32]));
        let lease = MachineId::from_bytes([1; 16]);
        for (renter, node) in renters.into_iter().zip(nodes) {
            let standing = Standing { serial: 1, end: UnixSeconds(100), node };
            store.put_lease(renter, lease, &standing).expect("kept");
        }
        for (renter, content) in [(0, x), (0, y), (2, x), (2, z)] {
            store.hold(renters[renter], content, 10).expect("kept");
        }
        let at = |content, time| {
            let may = |node| store.may_fetch(node, content, UnixSeconds(time)).expect("read");
            nodes.map(may)
        };
        assert_eq!(at(x, 100), [true, false, true]);
        assert_eq!(at(y, 100), [true, false, false]);
        assert_eq!(at(z, 100), [false, false, true]);
        assert_eq!(at(x, 100 + RETAIN_S), [false; 3], "their machines are gone");
    }

    #[test]
    fn content_is_held_until_the_last_lease_and_its_retention_are_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store.redb")).expect("made");
        let (a, b) = (PublicKey::from_bytes([1; 32]), PublicKey::from_bytes([2; 32]));
        let (x, y) = (ContentId::from_bytes([3; 32]), ContentId::from_bytes([4; 32]));
        let (first, second) = (MachineId::from_bytes([5; 16]), MachineId::from_bytes([6; 16]));
        let node = NodeId::from_bytes([7; 32]);
        let standing = |serial, end| Standing { serial, end: UnixSeconds(end), node };
        store.put_lease(a, first, &standing(2, 100)).expect("kept");
        store.put_lease(a, first, &standing(1, 900)).expect("older, ignored");
        store.put_lease(b, second, &standing(1, 200)).expect("kept");
        assert_eq!(store.last_end(a).expect("read"), Some(UnixSeconds(100)));
        assert_eq!(store.nodes_of(a, UnixSeconds(100)).expect("read"), [node]);
        store.hold(a, x, 10).expect("kept");
        store.hold(b, x, 10).expect("kept");
        store.hold(b, y, 7).expect("kept");
        assert_eq!((store.used(a).expect("read"), store.used(b).expect("read")), (10, 17));
        let at = |time: u64| UnixSeconds(RETAIN_S + time);
        assert_eq!(store.forget(at(99)).expect("done"), BTreeSet::from([x, y]));
        assert_eq!(store.held(a, x).expect("read"), Some(10));
        assert_eq!(store.forget(at(100)).expect("done"), BTreeSet::from([x, y]));
        assert_eq!(store.held(a, x).expect("read"), None);
        assert_eq!(store.nodes_of(a, at(100)).expect("read"), []);
        // Where the machine was is known for longer.
        assert!(store.standing(a, first).expect("read").is_some());
        store.release(b, y).expect("done");
        assert_eq!(store.forget(at(199)).expect("done"), BTreeSet::from([x]));
        assert_eq!(store.forget(at(200)).expect("done"), BTreeSet::new());
    }
}
