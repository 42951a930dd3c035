//! What a machine used, second by second, as receipts that its node signs.
//!
//! Seconds and millionths are integers and every second is counted in exactly one receipt, so
//! the receipts of a time add up to the same however the time is split.

use ed25519_dalek::{Signer, SigningKey};
use serde::{Deserialize, Serialize};
use types::{
    ids::{MachineId, NodeId, PublicKey},
    units::UnixSeconds,
};

use crate::{
    authority::public_key,
    canonical::{self, CanonicalError, MAX_INTEGER},
    document::{Lease, Price, pae},
};

/// Payload type of a receipt in DSSE's pre-authentication encoding.
pub const PAYLOAD_TYPE: &str = "application/vnd.holdfast.receipt+json";

/// What a machine used from one time to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// Lease and machine.
    pub lease: MachineId,
    /// Serial of the lease in force.
    pub serial: u64,
    /// The node that counted.
    pub node: NodeId,
    /// First second.
    pub from: UnixSeconds,
    /// First second after it.
    pub to: UnixSeconds,
    /// Seconds in between in which the machine ran.
    pub running_s: u64,
    /// What that costs, in millionths of `unit`.
    pub micro: u64,
    /// What the price is counted in.
    pub unit: String,
}

/// A receipt and its node's signature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignedReceipt {
    /// What was used.
    pub receipt: Receipt,
    /// Ed25519 signature by the node's key, in hexadecimal.
    pub signature: String,
}

/// Why there is no receipt, or why one does not count.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum MeterError {
    #[error("{seconds} s at {micro_per_second} millionths a second are more than can be counted")]
    Overflow { seconds: u64, micro_per_second: u64 },
    #[error("the receipt cannot be written canonically")]
    Form { source: CanonicalError },
    #[error("the receipt is not signed by its node {node}")]
    Signature { node: NodeId },
    #[error("the receipt's {field} is {found}; by the lease it is {expected}")]
    Lease { field: &'static str, found: String, expected: String },
}

/// Counts the seconds of one machine. Whoever counts keeps it on disk at every change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meter {
    from: UnixSeconds,
    running_since: Option<UnixSeconds>,
    counted_s: u64,
}

impl Meter {
    /// Begins to count a machine that does not run.
    pub fn new(from: UnixSeconds) -> Self {
        Self { from, running_since: None, counted_s: 0 }
    }

    /// The machine runs from `now` on.
    pub fn handle_started(&mut self, now: UnixSeconds) {
        self.running_since.get_or_insert(now);
    }

    /// The machine does not run from `now` on.
    pub fn handle_stopped(&mut self, now: UnixSeconds) {
        if let Some(since) = self.running_since.take() {
            self.counted_s = self.counted_s.saturating_add(now.since(since));
        }
    }

    /// The calendar says `now` after it was set by so many seconds, forward or, below zero, back. What ran
    /// counts as long as it ran, and nothing that was counted lies in the future.
    pub fn handle_step(&mut self, now: UnixSeconds, step_s: i64) {
        let shifted =
            |since: UnixSeconds| UnixSeconds(since.0.saturating_add_signed(step_s)).min(now);
        self.running_since = self.running_since.map(shifted);
        let first = UnixSeconds(now.0.saturating_sub(self.running_s(now)));
        self.from = self.from.min(first);
    }

    /// Whether the machine runs, as far as it was told.
    pub fn is_running(&self) -> bool {
        self.running_since.is_some()
    }

    /// Returns the first second that no receipt counts yet.
    pub fn from(&self) -> UnixSeconds {
        self.from
    }

    /// Returns the seconds that no receipt counts yet and in which the machine ran, up to `now`.
    pub fn running_s(&self, now: UnixSeconds) -> u64 {
        let running = self.running_since.map_or(0, |since| now.since(since));
        self.counted_s.saturating_add(running)
    }

    /// Closes the books at `now` and goes on counting from there.
    pub fn close(&mut self, now: UnixSeconds, lease: &Lease) -> Result<Receipt, MeterError> {
        let mut closed = self.clone();
        let running = closed.running_since.is_some();
        closed.handle_stopped(now);
        let running_s = closed.counted_s;
        let receipt = Receipt {
            lease: lease.id,
            serial: lease.serial,
            node: lease.node,
            from: self.from,
            to: now,
            running_s,
            micro: cost(&lease.price, running_s)?,
            unit: lease.price.unit.clone(),
        };
        *self = Self { from: now, running_since: running.then_some(now), counted_s: 0 };
        Ok(receipt)
    }
}

fn cost(price: &Price, seconds: u64) -> Result<u64, MeterError> {
    let micro_per_second = price.micro_per_second;
    seconds
        .checked_mul(micro_per_second)
        .filter(|micro| *micro <= MAX_INTEGER)
        .ok_or(MeterError::Overflow { seconds, micro_per_second })
}

/// Signs a receipt with the node's key.
pub fn sign(receipt: Receipt, key: &SigningKey) -> Result<SignedReceipt, MeterError> {
    if NodeId::from(public_key(key)) != receipt.node {
        return Err(MeterError::Signature { node: receipt.node });
    }
    let signature = key.sign(&signed_bytes(&receipt)?).to_bytes();
    Ok(SignedReceipt { receipt, signature: types::hex::encode(&signature) })
}

/// Checks that the node which the receipt names signed it.
pub fn verify(signed: &SignedReceipt) -> Result<&Receipt, MeterError> {
    let refuse = || MeterError::Signature { node: signed.receipt.node };
    let key = PublicKey::from(signed.receipt.node).verifier().ok_or_else(refuse)?;
    let bytes = types::hex::decode::<64>(&signed.signature).map_err(|_| refuse())?;
    let signature = ed25519_dalek::Signature::from_bytes(&bytes);
    key.verify_strict(&signed_bytes(&signed.receipt)?, &signature).map_err(|_| refuse())?;
    Ok(&signed.receipt)
}

/// Checks what a receipt says against its lease, so that a renter need not take the node's word for
/// more than the seconds in which the machine ran.
pub fn check(receipt: &Receipt, lease: &Lease) -> Result<(), MeterError> {
    let most = receipt.to.since(receipt.from).min(lease.end.since(lease.start));
    let checks = [
        ("lease", receipt.lease.to_string(), lease.id.to_string()),
        ("serial", receipt.serial.to_string(), lease.serial.to_string()),
        ("node", receipt.node.to_string(), lease.node.to_string()),
        ("unit", receipt.unit.clone(), lease.price.unit.clone()),
        ("micro", receipt.micro.to_string(), cost(&lease.price, receipt.running_s)?.to_string()),
        ("running_s", receipt.running_s.to_string(), receipt.running_s.min(most).to_string()),
        ("to", receipt.to.0.to_string(), receipt.to.min(lease.end).0.to_string()),
    ];
    for (field, found, expected) in checks {
        if found != expected {
            return Err(MeterError::Lease { field, found, expected });
        }
    }
    Ok(())
}

fn signed_bytes(receipt: &Receipt) -> Result<Vec<u8>, MeterError> {
    let text = canonical::to_bytes(receipt).map_err(|source| MeterError::Form { source })?;
    Ok(pae(PAYLOAD_TYPE, &text))
}
