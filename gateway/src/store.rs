//! What the gateway must not forget: which node has which machine, how requests with an
//! idempotency key were answered, which leases it was shown and whose content it keeps. One redb file; every change is on disk before it is
//! acknowledged.

use std::{collections::BTreeSet, path::Path};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
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

/// Renter, slash, lease to JSON of [`Standing`].
const LEASES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("leases");
/// Renter, slash, content to its length in bytes.
const HELD: TableDefinition<'_, &str, u64> = TableDefinition::new("held");
/// Machine (hexadecimal) to JSON of [`Place`].
const MACHINES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("machines");
/// Renter, slash, idempotency key to JSON of [`Answer`].
const ANSWERS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("answers");

/// Where a machine is and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its node.
    pub node: NodeId,
    /// Its renter.
    pub renter: PublicKey,
}

/// What is known of a lease that its renter showed and enough keys signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// The highest serial that was shown.
    pub serial: u64,
    /// The end of the lease with that serial.
    pub end: UnixSeconds,
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
        let database = Database::create(path)?;
        let transaction = database.begin_write()?;
        transaction.open_table(MACHINES)?;
        transaction.open_table(ANSWERS)?;
        transaction.open_table(LEASES)?;
        transaction.open_table(HELD)?;
        transaction.commit()?;
        Ok(Self { database })
    }

    /// Returns where a machine is.
    pub fn place(&self, machine: MachineId) -> Result<Option<Place>, StoreError> {
        self.get(MACHINES, &machine.to_string())
    }

    /// Remembers where a machine is.
    pub fn put_place(&self, machine: MachineId, place: &Place) -> Result<(), StoreError> {
        self.put(MACHINES, &machine.to_string(), place)
    }

    /// Returns the nodes that have, or had, machines of `renter`.
    pub fn nodes_of(&self, renter: PublicKey) -> Result<Vec<NodeId>, StoreError> {
        let table = self.database.begin_read()?.open_table(MACHINES)?;
        let mut nodes = std::collections::BTreeSet::new();
        for entry in table.iter()? {
            let (_, value) = entry?;
            let place: Place = decode(value.value())?;
            if place.renter == renter {
                nodes.insert(place.node);
            }
        }
        Ok(nodes.into_iter().collect())
    }

    /// Returns what is known of the request that `renter` named `key`.
    pub fn answer(&self, renter: PublicKey, key: &str) -> Result<Option<Answer>, StoreError> {
        self.get(ANSWERS, &format!("{renter}/{key}"))
    }

    /// Remembers a machine that was made, and the answer to the request that `renter` named
    /// `key`: both or neither.
    pub fn put_created(
        &self,
        machine: MachineId,
        place: &Place,
        renter: PublicKey,
        key: &str,
        answer: &Answer,
    ) -> Result<(), StoreError> {
        let (place, answer) = (encode(place)?, encode(answer)?);
        let transaction = self.database.begin_write()?;
        transaction.open_table(MACHINES)?.insert(machine.to_string().as_str(), &*place)?;
        let name = format!("{renter}/{key}");
        transaction.open_table(ANSWERS)?.insert(name.as_str(), &*answer)?;
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
        match self.standing(renter, lease)? {
            Some(known) if known.serial >= standing.serial => Ok(()),
            _ => self.put(LEASES, &format!("{renter}/{lease}"), standing),
        }
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
        let table = self.database.begin_read()?.open_table(LEASES)?;
        let mut last = None;
        for entry in table.range::<&str>(of(renter).as_str()..end_of(renter).as_str())? {
            let standing: Standing = decode(entry?.1.value())?;
            last = last.max(Some(standing.end));
        }
        Ok(last)
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

    /// Forgets answers and leases that are too old to be asked for, and what renters without
    /// lease uploaded. Returns the content that is still held.
    pub fn forget(&self, now: UnixSeconds) -> Result<BTreeSet<ContentId>, StoreError> {
        let transaction = self.database.begin_write()?;
        transaction.open_table(ANSWERS)?.retain(|_, value| {
            serde_json::from_slice::<Answer>(value)
                .is_ok_and(|answer| now.since(answer.at) < KEEP_ANSWERS_S)
        })?;
        let (mut renters, mut held) = (BTreeSet::new(), BTreeSet::new());
        transaction.open_table(LEASES)?.retain(|name, value| {
            let standing = serde_json::from_slice::<Standing>(value);
            let stands = standing.is_ok_and(|standing| standing.end.plus(RETAIN_S) > now);
            if let (true, Some((renter, _))) = (stands, name.split_once('/')) {
                renters.insert(renter.to_owned());
            }
            stands
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

    fn put<T: Serialize>(
        &self,
        table: TableDefinition<'_, &str, &[u8]>,
        key: &str,
        value: &T,
    ) -> Result<(), StoreError> {
        let bytes = encode(value)?;
        let transaction = self.database.begin_write()?;
        transaction.open_table(table)?.insert(key, bytes.as_slice())?;
        transaction.commit()?;
        Ok(())
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
        let (machine, renter) = (MachineId::from_bytes([1; 16]), PublicKey::from_bytes([2; 32]));
        let place = Place { node: NodeId::from_bytes([3; 32]), renter };
        let (content_type, headers) = ("application/json".into(), Vec::new());
        let response = ForwardedResponse { status: 201, content_type, headers, body: vec![1] };
        let answer = Answer { digest: "d".into(), at: UnixSeconds(10), response };
        let store = Store::open(&path).expect("made");
        store.put_created(machine, &place, renter, "k", &answer).expect("kept");
        drop(store);
        let store = Store::open(&path).expect("opened");
        store.forget(UnixSeconds(11)).expect("kept");
        assert_eq!(store.place(machine).expect("read"), Some(place.clone()));
        assert_eq!(store.answer(renter, "k").expect("read"), Some(answer));
        assert_eq!(store.nodes_of(renter).expect("read"), vec![place.node]);
        store.forget(UnixSeconds(10 + KEEP_ANSWERS_S)).expect("dropped");
        assert_eq!(store.answer(renter, "k").expect("read"), None);
    }

    #[test]
    fn content_is_held_until_the_last_lease_and_its_retention_are_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store.redb")).expect("made");
        let (a, b) = (PublicKey::from_bytes([1; 32]), PublicKey::from_bytes([2; 32]));
        let (x, y) = (ContentId::from_bytes([3; 32]), ContentId::from_bytes([4; 32]));
        let (first, second) = (MachineId::from_bytes([5; 16]), MachineId::from_bytes([6; 16]));
        let standing = |serial, end| Standing { serial, end: UnixSeconds(end) };
        store.put_lease(a, first, &standing(2, 100)).expect("kept");
        store.put_lease(a, first, &standing(1, 900)).expect("older, ignored");
        store.put_lease(b, second, &standing(1, 200)).expect("kept");
        assert_eq!(store.last_end(a).expect("read"), Some(UnixSeconds(100)));
        store.hold(a, x, 10).expect("kept");
        store.hold(b, x, 10).expect("kept");
        store.hold(b, y, 7).expect("kept");
        assert_eq!((store.used(a).expect("read"), store.used(b).expect("read")), (10, 17));
        let at = |time: u64| UnixSeconds(RETAIN_S + time);
        assert_eq!(store.forget(at(99)).expect("done"), BTreeSet::from([x, y]));
        assert_eq!(store.held(a, x).expect("read"), Some(10));
        assert_eq!(store.forget(at(100)).expect("done"), BTreeSet::from([x, y]));
        assert_eq!(
            (store.held(a, x).expect("read"), store.last_end(a).expect("read")),
            (None, None)
        );
        store.release(b, y).expect("done");
        assert_eq!(store.forget(at(199)).expect("done"), BTreeSet::from([x]));
        assert_eq!(store.forget(at(200)).expect("done"), BTreeSet::new());
    }
}
