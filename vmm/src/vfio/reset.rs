//! Resets, rung by rung, each with a deadline: a device that hangs in reset holds up a thread of its
//! own, nobody else.
//!
//! | rung     | how                                          | when                               |
//! |----------|----------------------------------------------|------------------------------------|
//! | function | VFIO_DEVICE_RESET: function-level reset, or  | always first; the kernel does the  |
//! |          | what the kernel has in its place             | same when a device is opened       |
//! | set      | VFIO_DEVICE_PCI_HOT_RESET: the bus or slot,  | when the function's reset fails,   |
//! |          | with all of the machine's devices on it      | or leaves the device silent        |
//! | –        | none; the device is not to be given away     | when neither brings the device     |
//! |          | ("quarantine", which the agent decides on)   | back, or a rung meets its deadline |
//!
//! After each rung the device has to answer with its vendor id. A rung that hangs keeps the kernel's
//! locks of the device, so no other is tried after it.
//! Source: linux/vfio.h; PCI Express Base Specification 6.0 §6.6.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use types::node::Bdf;

use super::device::{Device, Region, Rung};
use crate::sandbox::{SandboxError, ThreadKind, apply_thread_filter};

/// How long a device may take. A function-level reset has to be over after 0.1 s, and a device may
/// then answer late for a second (PCI Express 6.0 §6.6.1); GPUs have been seen to need several.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Why a device is not known to be clean.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ResetError {
    #[error("the kernel cannot reset {device} ({function}), nor the set of devices it is in")]
    Refused { device: Bdf, function: String, source: io::Error },
    #[error("{device} did not finish a reset ({rung:?}) within {} s", DEADLINE.as_secs())]
    Deadline { device: Bdf, rung: Rung },
    #[error("{device} reads as all ones after every reset there is: it did not come back")]
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
    reports: Mutex<mpsc::Receiver<Report>>,
    deadline: Duration,
}

/// What the thread says of its work.
#[derive(Debug)]
enum Report {
    /// It begins with a rung.
    Begins(Rung),
    /// It is through with all it does.
    Over(Result<(), ResetError>),
}

impl Resetter {
    /// Starts the thread.
    pub fn start(
        address: Bdf,
        device: Arc<dyn Device>,
        confinement: Confinement,
    ) -> Result<Self, ResetError> {
        let (orders, inbox) = mpsc::sync_channel::<()>(1);
        // Room for all reports of one order, so that the thread never waits for its reader.
        let (outbox, reports) = mpsc::sync_channel(3);
        let work = move || {
            if confinement == Confinement::Filtered
                && let Err(source) = apply_thread_filter(ThreadKind::Reset)
            {
                let failed = ResetError::Filter { device: address, source };
                let _ = outbox.send(Report::Over(Err(failed)));
                return;
            }
            while inbox.recv().is_ok() {
                let result = climb(address, &*device, |rung| {
                    // Nobody listens any more when the machine has given the device up.
                    let _ = outbox.send(Report::Begins(rung));
                });
                if outbox.send(Report::Over(result)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name(format!("reset {address}"))
            .spawn(work)
            .map_err(|source| ResetError::Thread { device: address, source })?;
        Ok(Self { device: address, orders, reports: Mutex::new(reports), deadline: DEADLINE })
    }

    /// Orders a reset, which [`Self::wait`] waits for; several devices can be at it at once.
    pub fn order(&self) {
        // The inbox is full or closed only after a reset that was never over; `wait` says so.
        let _ = self.orders.try_send(());
    }

    /// Waits until the device is reset and answers, or a rung has taken longer than its deadline.
    pub fn wait(&self) -> Result<(), ResetError> {
        let reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = Rung::Function;
        loop {
            match reports.recv_timeout(self.deadline) {
                Ok(Report::Begins(rung)) => at = rung,
                Ok(Report::Over(result)) => return result,
                Err(_) => return Err(ResetError::Deadline { device: self.device, rung: at }),
            }
        }
    }
}

/// Resets a device by the first rung after which it answers, and tells each rung to `begins`.
fn climb(
    address: Bdf,
    device: &dyn Device,
    mut begins: impl FnMut(Rung),
) -> Result<(), ResetError> {
    begins(Rung::Function);
    let function = device.reset(Rung::Function);
    if function.is_ok() && answers(device) {
        return Ok(());
    }
    begins(Rung::Set);
    let set = device.reset(Rung::Set);
    match (function, set) {
        (_, Ok(())) if answers(device) => Ok(()),
        (Err(function), Err(source)) => {
            Err(ResetError::Refused { device: address, function: function.to_string(), source })
        }
        (Ok(()), _) | (Err(_), Ok(())) => Err(ResetError::Gone { device: address }),
    }
}

/// Whether a device answers for its configuration space. A virtual function never does: the host's
/// kernel knows its vendor id from the physical function, and that is what is read here.
pub(super) fn answers(device: &dyn Device) -> bool {
    let mut identity = [0xff; 4];
    device.read(Region::Config, 0, &mut identity).is_ok() && identity[..2] != [0xff; 2]
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
        assert!(matches!(resetter.wait(), Err(ResetError::Deadline { rung: Rung::Function, .. })));
    }

    #[test]
    fn a_device_that_cannot_be_reset_is_refused() {
        let resetter = start(FakeDevice::nvme().unresettable());
        resetter.order();
        assert!(matches!(resetter.wait(), Err(ResetError::Refused { .. })));
    }

    #[test]
    fn a_device_whose_function_cannot_be_reset_goes_with_its_set() {
        let device = Arc::new(FakeDevice::nvme().reset_by_set());
        let mut rungs = Vec::new();
        climb("0000:01:00.0".parse().expect("an address"), &*device, |rung| rungs.push(rung))
            .expect("reset");
        assert_eq!(rungs, [Rung::Function, Rung::Set]);
    }

    #[test]
    fn a_device_that_is_silent_after_its_own_reset_is_reset_with_its_set() {
        let device = Arc::new(FakeDevice::nvme().silent_until_set());
        let mut rungs = Vec::new();
        climb("0000:01:00.0".parse().expect("an address"), &*device, |rung| rungs.push(rung))
            .expect("reset");
        assert_eq!(rungs, [Rung::Function, Rung::Set]);
    }
}
