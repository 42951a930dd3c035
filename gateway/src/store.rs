//! What the gateway must not forget: which node has which machine, and how requests with an
//! idempotency key were answered. One redb file; every change is on disk before it is
//! acknowledged.

use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use types::{
    forward::ForwardedResponse,
    ids::{MachineId, NodeId, PublicKey},
    units::UnixSeconds,
};

/// How long an answer can be asked for again, in seconds.
pub const KEEP_ANSWERS_S: u64 = 48 * 3600;

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

    /// Forgets answers that are too old to be asked for.
    pub fn forget(&self, now: UnixSeconds) -> Result<(), StoreError> {
        let transaction = self.database.begin_write()?;
        transaction.open_table(ANSWERS)?.retain(|_, value| {
            serde_json::from_slice::<Answer>(value)
                .is_ok_and(|answer| now.since(answer.at) < KEEP_ANSWERS_S)
        })?;
        transaction.commit()?;
        Ok(())
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
}
