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

use types::operations::VmEventKind;

use super::flight::was_not_done;
use crate::events::Events;

/// Whether writes that were completed are lost, for all queues of one disk, as long as its file is open.
#[derive(Debug, Clone, Default)]
pub struct Losses(Arc<Record>);

#[derive(Debug, Default)]
struct Record {
    is_lossy: AtomicBool,
    disk: String,
    events: Events,
}

impl Losses {
    /// Returns those of the disk with this serial number, which has none yet, and is told of in `events`.
    pub fn of(serial: &str, events: Events) -> Self {
        Self(Arc::new(Record { is_lossy: AtomicBool::new(false), disk: serial.to_owned(), events }))
    }

    /// Returns what a sync comes to that ended with `result`: none succeeds after a loss.
    pub(super) fn judge(&self, result: io::Result<u32>) -> io::Result<u32> {
        match result {
            Ok(_) if self.0.is_lossy.load(Ordering::Acquire) => {
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            Err(error) if !was_not_done(&error) => {
                self.0.note(&error);
                Err(error)
            }
            judged => judged,
        }
    }
}

impl Record {
    fn note(&self, error: &io::Error) {
        if self.is_lossy.swap(true, Ordering::AcqRel) {
            return;
        }
        let disk = &self.disk;
        let what = format!(
            "disk {disk}: the host lost what was written ({error}); no flush succeeds any more"
        );
        eprintln!("event=disk-lost-writes disk={disk} reason=\"{error}\"");
        self.events.push(VmEventKind::DeviceFailed, what);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_sync_succeeds_after_one_that_failed() {
        let error = |code| Err(io::Error::from_raw_os_error(code));
        let code_of = |judged: io::Result<u32>| judged.err().and_then(|error| error.raw_os_error());
        let events = Events::default();
        let losses = Losses::of("data", events.clone());
        let other_queue = losses.clone();
        for code in [libc::EINTR, libc::ECANCELED] {
            assert_eq!(code_of(losses.judge(error(code))), Some(code));
            assert_eq!(other_queue.judge(Ok(0)).ok(), Some(0), "{code}");
        }
        assert_eq!(events.read(0, Duration::ZERO).events.len(), 0);
        for code in [libc::ENOSPC, libc::EIO] {
            assert_eq!(code_of(losses.judge(error(code))), Some(code));
            assert_eq!(code_of(other_queue.judge(Ok(512))), Some(libc::EIO));
            assert_eq!(Losses::default().judge(Ok(512)).ok(), Some(512));
        }
        // Once.
        let told = events.read(0, Duration::ZERO).events;
        assert_eq!(told.len(), 1);
        assert!(told[0].detail.starts_with("disk data: "), "{told:?}");
    }
}
