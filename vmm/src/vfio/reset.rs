//! Resets with a deadline: a device that hangs in reset holds up a thread of its own, nobody else.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use types::node::Bdf;

use super::device::{Device, Region};
use crate::sandbox::{SandboxError, ThreadKind, apply_thread_filter};

/// How long a device may take. A function-level reset has to be over after 0.1 s, and a device may
/// then answer late for a second (PCI Express 6.0 §6.6.1); GPUs have been seen to need several.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Why a device is not known to be clean.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ResetError {
    #[error("the kernel cannot reset {device}")]
    Refused { device: Bdf, source: io::Error },
    #[error("{device} did not finish its reset within {} s", DEADLINE.as_secs())]
    Deadline { device: Bdf },
    #[error("{device} reads as all ones after its reset: it did not come back")]
    Gone { device: Bdf },
    #[error("cannot start the thread that resets {device}")]
    Thread { device: Bdf, source: io::Error },
    #[error("cannot restrict the thread that resets {device}")]
    Filter { device: Bdf, source: SandboxError },
}

/// Whether the thread of a [`Resetter`] restricts its system calls. It does wherever a guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confinement {
    /// It does.
    Filtered,
    /// It does not: the process has no sandbox, as in unit tests.
    Open,
}

/// Resets one device, on a thread that was started beforehand: when a machine ends, its process may
/// no longer start threads.
#[derive(Debug)]
pub struct Resetter {
    device: Bdf,
    orders: mpsc::SyncSender<()>,
    results: Mutex<mpsc::Receiver<Result<(), ResetError>>>,
    deadline: Duration,
}

impl Resetter {
    /// Starts the thread.
    pub fn start(
        address: Bdf,
        device: Arc<dyn Device>,
        confinement: Confinement,
    ) -> Result<Self, ResetError> {
        let (orders, inbox) = mpsc::sync_channel::<()>(1);
        let (outbox, results) = mpsc::sync_channel(1);
        let work = move || {
            if confinement == Confinement::Filtered
                && let Err(source) = apply_thread_filter(ThreadKind::Reset)
            {
                let _ = outbox.send(Err(ResetError::Filter { device: address, source }));
                return;
            }
            while inbox.recv().is_ok() {
                if outbox.send(reset(address, &*device)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name(format!("reset {address}"))
            .spawn(work)
            .map_err(|source| ResetError::Thread { device: address, source })?;
        Ok(Self { device: address, orders, results: Mutex::new(results), deadline: DEADLINE })
    }

    /// Orders a reset, which [`Self::wait`] waits for; several devices can be at it at once.
    pub fn order(&self) {
        // The inbox is full or closed only after a reset that was never over; `wait` says so.
        let _ = self.orders.try_send(());
    }

    /// Waits until the device is reset and answers, or the deadline has passed.
    pub fn wait(&self) -> Result<(), ResetError> {
        let late = Err(ResetError::Deadline { device: self.device });
        let results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        results.recv_timeout(self.deadline).unwrap_or(late)
    }
}

fn reset(address: Bdf, device: &dyn Device) -> Result<(), ResetError> {
    device.reset().map_err(|source| ResetError::Refused { device: address, source })?;
    let mut identity = [0xff; 4];
    let answer = device.read(Region::Config, 0, &mut identity);
    if answer.is_err() || identity[..2] == [0xff; 2] {
        return Err(ResetError::Gone { device: address });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfio::fake::FakeDevice;

    fn start(device: FakeDevice) -> Resetter {
        let address = "0000:01:00.0".parse().expect("an address");
        let mut resetter =
            Resetter::start(address, Arc::new(device), Confinement::Open).expect("a thread");
        resetter.deadline = Duration::from_millis(200);
        resetter
    }

    #[test]
    fn a_device_that_answers_is_clean() {
        let resetter = start(FakeDevice::nvme());
        resetter.order();
        resetter.wait().expect("reset");
        resetter.order();
        resetter.wait().expect("reset again");
    }

    #[test]
    fn a_device_that_stays_away_is_named() {
        let resetter = start(FakeDevice::gone());
        resetter.order();
        assert!(matches!(resetter.wait(), Err(ResetError::Gone { .. })));
    }

    #[test]
    fn a_device_that_hangs_meets_the_deadline() {
        let resetter = start(FakeDevice::nvme().hanging());
        resetter.order();
        assert!(matches!(resetter.wait(), Err(ResetError::Deadline { .. })));
    }

    #[test]
    fn a_device_that_cannot_be_reset_is_refused() {
        let resetter = start(FakeDevice::nvme().unresettable());
        resetter.order();
        assert!(matches!(resetter.wait(), Err(ResetError::Refused { .. })));
    }
}
