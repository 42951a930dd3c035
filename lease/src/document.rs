//! The lease and the envelope that carries its signatures.
//!
//! The envelope is DSSE v1 (github.com/secure-systems-lab/dsse, `envelope.md` and `protocol.md`):
//! what is signed is the pre-authentication encoding of payload type and payload, so a signature
//! made for one kind of document never counts for another. The payload is canonical JSON.
//!
//! Parsing a document says nothing about who signed it: that is `threshold`'s.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use types::{
    ids::{MachineId, NodeId, PublicKey},
    node::MachineShape,
    units::UnixSeconds,
};

use crate::canonical::{self, CanonicalError};

/// DSSE payload type of a lease.
pub const PAYLOAD_TYPE: &str = "application/vnd.holdfast.lease+json";

/// Version of the lease document that this build reads and writes.
pub const LEASE_VERSION: u32 = 1;

/// Largest envelope, in bytes.
pub const MAX_ENVELOPE: usize = 64 << 10;

/// Most signatures on an envelope.
pub const MAX_SIGNATURES: usize = 32;

/// Most devices in one lease. The largest servers have eight GPUs, eight network controllers and four
/// switches between the GPUs, and some drives.
pub const MAX_DEVICES: usize = 32;

/// What [`MAX_DEVICES`] is in messages.
const DEVICES: &str = "at most 32 different addresses";

/// The right to run one machine on one node for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// [`LEASE_VERSION`].
    pub version: u32,
    /// Name of the lease and of its machine.
    pub id: MachineId,
    /// Counts from 1; a renewal has a higher one.
    pub serial: u64,
    /// The only node on which this lease counts.
    pub node: NodeId,
    /// Who may use the machine.
    pub renter: PublicKey,
    /// What the machine is made of.
    pub shape: MachineShape,
    /// First second of the lease.
    pub start: UnixSeconds,
    /// First second after the lease.
    pub end: UnixSeconds,
    /// What it costs.
    pub price: Price,
}

/// Terms of payment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// What the price is counted in, as `EUR`: 1 to 16 upper-case letters or digits.
    pub unit: String,
    /// Millionths of the unit for each second.
    pub micro_per_second: u64,
}

impl Default for Price {
    fn default() -> Self {
        Self { unit: "FREE".to_owned(), micro_per_second: 0 }
    }
}

/// Why a document is no lease.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum DocumentError {
    #[error("the envelope has {found} bytes; at most {MAX_ENVELOPE} are read")]
    TooLarge { found: usize },
    #[error(
        "the envelope is not a DSSE envelope with payload, payloadType and signatures of keyid and sig"
    )]
    Envelope { source: serde_json::Error },
    #[error("the envelope has {found} signatures; at most {MAX_SIGNATURES} are read")]
    Signatures { found: usize },
    #[error("the payload type is {found:?}; expected {PAYLOAD_TYPE:?}")]
    PayloadType { found: String },
    #[error("the lease inside the envelope cannot be read")]
    Payload { source: CanonicalError },
    #[error("lease version {found} is not known to this release; it reads {LEASE_VERSION}")]
    Version { found: u32 },
    #[error("the lease's {field} is {found}; expected {expected}")]
    Field { field: &'static str, found: String, expected: &'static str },
}

impl Lease {
    /// Returns the canonical text, which is what is signed.
    pub fn to_bytes(&self) -> Result<Vec<u8>, DocumentError> {
        self.check()?;
        canonical::to_bytes(self).map_err(|source| DocumentError::Payload { source })
    }

    /// Parses the canonical text of a lease.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DocumentError> {
        let lease: Self =
            canonical::from_bytes(bytes).map_err(|source| DocumentError::Payload { source })?;
        lease.check()?;
        Ok(lease)
    }

    fn check(&self) -> Result<(), DocumentError> {
        let field =
            |field, found: String, expected| Err(DocumentError::Field { field, found, expected });
        if self.version != LEASE_VERSION {
            return Err(DocumentError::Version { found: self.version });
        }
        if self.serial == 0 {
            return field("serial", "0".into(), "1 or more");
        }
        if self.end <= self.start {
            return field("end", self.end.0.to_string(), "a time after its start");
        }
        if !(1..=255).contains(&self.shape.vcpus) {
            return field("shape.vcpus", self.shape.vcpus.to_string(), "1 to 255");
        }
        if self.shape.memory_mib.0 == 0 || self.shape.memory_mib.to_bytes().is_none() {
            return field("shape.memory_mib", self.shape.memory_mib.0.to_string(), "1 or more");
        }
        if self.shape.disk_mib.to_bytes().is_none() {
            return field("shape.disk_mib", self.shape.disk_mib.0.to_string(), "less than 2^44");
        }
        let rates = self.shape.disk_limit.iter().flat_map(|all| [all.bytes, all.operations]);
        if rates.flatten().any(|rate| rate.per_second == 0) {
            return field("shape.disk_limit", "0 per second".into(), "1 or more");
        }
        let devices: BTreeSet<_> = self.shape.devices.iter().collect();
        if devices.len() != self.shape.devices.len() || devices.len() > MAX_DEVICES {
            let found = format!("{} addresses", self.shape.devices.len());
            return field("shape.devices", found, DEVICES);
        }
        let letters = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit();
        if !(1..=16).contains(&self.price.unit.len()) || !self.price.unit.bytes().all(letters) {
            return field("price.unit", format!("{:?}", self.price.unit), "as \"EUR\"");
        }
        Ok(())
    }
}

/// A DSSE envelope: a payload and signatures over it, none of them checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Envelope {
    /// The signed bytes.
    #[serde(with = "types::base64_bytes")]
    pub payload: Vec<u8>,
    /// What the payload is.
    #[serde(rename = "payloadType")]
    pub payload_type: String,
    /// Signatures over [`pae`] of both.
    pub signatures: Vec<Signature>,
}

/// One signature of an envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signature {
    /// The key that is said to have signed.
    pub keyid: PublicKey,
    /// Ed25519 signature, 64 bytes.
    #[serde(with = "types::base64_bytes")]
    pub sig: Vec<u8>,
}

impl Envelope {
    /// Puts a lease into an envelope without signatures.
    pub fn new(lease: &Lease) -> Result<Self, DocumentError> {
        let payload = lease.to_bytes()?;
        Ok(Self { payload, payload_type: PAYLOAD_TYPE.to_owned(), signatures: Vec::new() })
    }

    /// Parses an envelope's JSON.
    pub fn from_json(bytes: &[u8]) -> Result<Self, DocumentError> {
        if bytes.len() > MAX_ENVELOPE {
            return Err(DocumentError::TooLarge { found: bytes.len() });
        }
        let envelope: Self =
            serde_json::from_slice(bytes).map_err(|source| DocumentError::Envelope { source })?;
        envelope.check()?;
        Ok(envelope)
    }

    /// Checks what must hold of every envelope before its signatures are looked at.
    pub fn check(&self) -> Result<(), DocumentError> {
        if self.signatures.len() > MAX_SIGNATURES {
            return Err(DocumentError::Signatures { found: self.signatures.len() });
        }
        if self.payload.len() > MAX_ENVELOPE {
            return Err(DocumentError::TooLarge { found: self.payload.len() });
        }
        if self.payload_type != PAYLOAD_TYPE {
            return Err(DocumentError::PayloadType { found: self.payload_type.clone() });
        }
        Ok(())
    }

    /// Reads the lease **without** checking any signature. For showing, and for finding the node
    /// that will check.
    pub fn unverified_lease(&self) -> Result<Lease, DocumentError> {
        self.check()?;
        Lease::from_bytes(&self.payload)
    }

    /// Returns the bytes that are signed.
    pub fn signed_bytes(&self) -> Vec<u8> {
        pae(&self.payload_type, &self.payload)
    }
}

/// DSSE's pre-authentication encoding (`protocol.md`, "Signature Definition").
pub fn pae(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    bytes.extend_from_slice(payload);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_is_that_of_the_specification() {
        let expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world";
        assert_eq!(pae("http://example.com/HelloWorld", b"hello world"), expected);
    }
}
