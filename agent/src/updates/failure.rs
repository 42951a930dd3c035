//! Why the slots were not looked after, and what to do about it where that can be said.

use std::io;

use update::slots::fat::FatError;

use super::fetch::FetchFailure;
use crate::init::boot::chain;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub(super) enum UpdateError {
    #[error(transparent)]
    Fat(#[from] FatError),
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: String, source: io::Error },
    #[error(transparent)]
    Fetch(#[from] FetchFailure),
    #[error("cannot set firmware's variables")]
    Variables { source: io::Error },
    #[error("firmware has no free number for a boot entry")]
    NoNumber,
    #[error("init does not answer")]
    Init,
}

impl UpdateError {
    /// Whether it is for want of room.
    pub(super) fn is_full(&self) -> bool {
        let partition = matches!(
            self,
            Self::Fat(FatError::Full { .. })
                | Self::Fetch(FetchFailure::Fat(FatError::Full { .. }))
        );
        partition || is_state_full(self)
    }
}

/// Whether a file on STATE was not written for want of room.
fn is_state_full(error: &(dyn std::error::Error + 'static)) -> bool {
    let below = std::iter::successors(Some(error), |error| error.source());
    let mut kinds =
        below.filter_map(|error| error.downcast_ref::<io::Error>()).map(io::Error::kind);
    kinds.any(|kind| matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// Returns an error and everything under it in words, and what comes of it where people would ask.
pub(super) fn with_advice(error: &(dyn std::error::Error + 'static)) -> String {
    let mut reason = chain(error);
    if is_state_full(error) {
        reason.push_str(
            "; STATE is full: the node stays on the release that runs, and goes on when there is room",
        );
    }
    reason
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn want_of_room_is_told_from_other_failures() {
        let write = |source| {
            let path = "/state/slots.journal".to_owned();
            UpdateError::File { action: "write", path, source }
        };
        let full = write(io::Error::from_raw_os_error(libc::ENOSPC));
        assert!(full.is_full() && with_advice(&full).contains("STATE is full"));
        let other = write(io::Error::from_raw_os_error(libc::EIO));
        assert!(!other.is_full() && !with_advice(&other).contains("STATE is full"));
        let partition = FatError::Full { path: "/EFI/a".to_owned(), needed: 2, free: 1 };
        let partition = UpdateError::Fetch(FetchFailure::Fat(partition));
        assert!(partition.is_full() && !with_advice(&partition).contains("STATE is full"));
    }
}
