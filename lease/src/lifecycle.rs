//! How one lease takes the place of another, as a pure function. What happens to a
//! machine while a lease runs and after it ended is decided by its node.

use crate::{document::Lease, threshold::VerifiedLease};

/// Why a lease does not renew another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RenewalError {
    #[error("the renewal is of lease {found}; expected {expected}")]
    Id { found: types::ids::MachineId, expected: types::ids::MachineId },
    #[error(
        "the renewal's {field} differs from the lease's; only serial, end and price may change"
    )]
    Changed { field: &'static str },
    #[error("the renewal has serial {found}; expected more than {current}")]
    Serial { found: u64, current: u64 },
    #[error("the renewal ends at {found}, before the {current} that was granted")]
    Shorter { found: u64, current: u64 },
}

/// Checks that `next` may take the place of `current`, and returns it.
pub fn renew(current: &Lease, next: VerifiedLease) -> Result<Lease, RenewalError> {
    let next = next.into_lease();
    if next.id != current.id {
        return Err(RenewalError::Id { found: next.id, expected: current.id });
    }
    if next.serial <= current.serial {
        return Err(RenewalError::Serial { found: next.serial, current: current.serial });
    }
    for (field, same) in [
        ("node", next.node == current.node),
        ("renter", next.renter == current.renter),
        ("shape", next.shape == current.shape),
        ("start", next.start == current.start),
    ] {
        if !same {
            return Err(RenewalError::Changed { field });
        }
    }
    if next.end < current.end {
        return Err(RenewalError::Shorter { found: next.end.0, current: current.end.0 });
    }
    Ok(next)
}
