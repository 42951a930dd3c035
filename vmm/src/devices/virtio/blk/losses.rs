//! What a disk has lost. The kernel tells of a failed write to the medium once for each open file, at the next sync,
//! whoever asks for it and whatever the sync was for, and takes what is lost for written from then on (fsync(2), EIO).
//! A guest that asks again, as drivers do, must not hear that all is well.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::flight::was_not_done;

/// How a command makes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syncs {
    /// All that was written before.
    All,
    /// What it writes itself.
    Own,
}

/// Whether writes that were completed are lost, for all queues of one disk, as long as its file is open.
#[derive(Debug, Clone, Default)]
pub struct Losses(Arc<AtomicBool>);

impl Losses {
    /// Returns what a command comes to that syncs and ended with `result`: none succeeds after a loss.
    pub(super) fn judge(&self, syncs: Syncs, result: io::Result<u32>) -> io::Result<u32> {
        match result {
            Ok(_) if self.0.load(Ordering::Acquire) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Err(error) if is_loss(syncs, &error) && !self.0.swap(true, Ordering::AcqRel) => {
                eprintln!(
                    "the host lost what was written to a disk ({error}): no flush of it succeeds any more"
                );
                Err(error)
            }
            judged => judged,
        }
    }
}

/// Whether something that was written before is lost. A write that found no room, or bytes that are no memory, has
/// not come to its sync.
fn is_loss(syncs: Syncs, error: &io::Error) -> bool {
    let code = error.raw_os_error();
    let before = matches!(code, Some(libc::EFAULT | libc::ENOSPC | libc::EDQUOT));
    !(was_not_done(error) || syncs == Syncs::Own && before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sync_succeeds_after_one_that_failed() {
        let error = |code| Err(io::Error::from_raw_os_error(code));
        let code_of = |judged: io::Result<u32>| judged.err().and_then(|error| error.raw_os_error());
        let (own, all) = (Syncs::Own, Syncs::All);
        let losses = Losses::default();
        let other_queue = losses.clone();
        for (syncs, code) in
            [(own, libc::ENOSPC), (own, libc::EFAULT), (all, libc::EINTR), (all, libc::ECANCELED)]
        {
            assert_eq!(code_of(losses.judge(syncs, error(code))), Some(code));
            assert_eq!(other_queue.judge(all, Ok(0)).ok(), Some(0), "{code}");
        }
        for (syncs, code) in [(own, libc::EIO), (all, libc::EIO), (all, libc::ENOSPC)] {
            let (losses, other_disk) = (Losses::default(), Losses::default());
            let other_queue = losses.clone();
            assert_eq!(code_of(losses.judge(syncs, error(code))), Some(code));
            for syncs in [own, all] {
                assert_eq!(code_of(other_queue.judge(syncs, Ok(512))), Some(libc::EIO));
                assert_eq!(other_disk.judge(syncs, Ok(512)).ok(), Some(512));
            }
        }
    }
}
