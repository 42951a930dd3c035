//! Commands in flight, of virtio-blk and of NVMe: what a transfer has left, and how often a command is
//! started again.

use std::{io, time::Duration};

use vm_memory::{Address, GuestAddress};

/// How often a command is started again that was not done, before it has failed. With a pause before each
/// that is a second at least, in which other processes of the host may end.
const MOST: u32 = 1000;
/// How long a thread waits before it starts such commands again.
pub(in crate::devices) const PAUSE: Duration = Duration::from_millis(1);

/// How often a command was started again since it last moved on.
#[derive(Debug, Default)]
pub(in crate::devices) struct Tries(u32);

impl Tries {
    /// Returns whether a command that ended with `error` is to be started again, which counts as one more.
    pub(in crate::devices) fn take(&mut self, error: &io::Error) -> bool {
        let again = was_not_done(error) && self.0 < MOST;
        self.0 += u32::from(again);
        again
    }
}

/// Whether a command has to be started again: a signal came, or there was no worker of the kernel's to be had
/// (Linux io_uring/io-wq.c, `io_acct_cancel_pending_work`).
pub(super) fn was_not_done(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::ECANCELED))
}

/// Takes `moved` bytes off the front of a transfer; returns whether something is left.
pub(in crate::devices) fn advance(
    offset: &mut u64,
    segments: &mut Vec<(GuestAddress, u32)>,
    moved: u32,
) -> bool {
    *offset = offset.saturating_add(u64::from(moved));
    let mut rest = moved;
    segments.retain_mut(|(address, length)| {
        let taken = rest.min(*length);
        rest -= taken;
        *length -= taken;
        *address = GuestAddress(address.raw_value().saturating_add(u64::from(taken)));
        *length > 0
    });
    !segments.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_done_is_tried_again_but_not_for_ever() {
        let error = io::Error::from_raw_os_error;
        let mut tries = Tries::default();
        assert!(!tries.take(&error(libc::EIO)));
        for code in [libc::ECANCELED, libc::EINTR] {
            assert!((0..MOST / 2).all(|_| tries.take(&error(code))));
        }
        assert!(!tries.take(&error(libc::ECANCELED)) && !tries.take(&error(libc::EINTR)));
        assert!(Tries::default().take(&error(libc::ECANCELED)));
    }
}
