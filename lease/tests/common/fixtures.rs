//! Keys, a lease and who signs it.

#![allow(clippy::unwrap_used, reason = "fixtures that cannot fail")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use lease::{
    SigningKey, authority,
    document::{Envelope, Lease, Price},
    threshold::AuthoritySet,
};
use types::{
    config::Authority,
    ids::{MachineId, NodeId},
    node::MachineShape,
    units::{Mebibytes, UnixSeconds},
};

pub fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

pub fn lease() -> Lease {
    Lease {
        version: 1,
        id: MachineId::from_bytes([9; 16]),
        serial: 1,
        node: NodeId::from(authority::public_key(&key(7))),
        renter: authority::public_key(&key(8)),
        shape: MachineShape {
            vcpus: 2,
            memory_mib: Mebibytes(512),
            disk_mib: Mebibytes(20),
            devices: vec!["0000:01:00.0".parse().unwrap()],
            disk_limit: None,
        },
        start: UnixSeconds(1000),
        end: UnixSeconds(2000),
        price: Price { unit: "EUR".into(), micro_per_second: 139 },
    }
}

pub fn authorities(threshold: u32) -> AuthoritySet {
    let keys = [1, 2, 3].map(|seed| authority::public_key(&key(seed))).to_vec();
    AuthoritySet::new(&Authority { threshold, keys }).unwrap()
}

pub fn signed_by(lease: &Lease, seeds: &[u8]) -> Envelope {
    let envelope = Envelope::new(lease).unwrap();
    seeds
        .iter()
        .fold(envelope, |envelope, seed| authority::add_signature(&envelope, &key(*seed)).unwrap())
}
