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
//! After each rung the device has to answer with its revision and class: its vendor and device id the kernel
//! answers from memory. A rung that hangs keeps the kernel's locks of the device, so no other is tried after it.
//!
//! The set's rung needs the locks of all devices of the set, and the kernel does not wait for them
//! (`vfio_pci_dev_set_hot_reset` in drivers/vfio/pci/vfio_pci_core.c): all functions are through with
//! their own rung before the first set's begins, and each set is reset once.
//!
//! While the guest has another device of the set, the set is not reset. A device that only this would
//! have reset counts as it answers: it stays with the same guest, and the last of the set that is taken
//! back carries the rung.
//!
//! By groups the kernel resets a set only if all of its devices are of groups that the machine holds: one that was
//! taken back before has taken its group with it, and is in the way if it does not share one with those that stay.
//! Source: linux/vfio.h; PCI Express Base Specification 6.0 §6.6.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use types::node::Bdf;

use super::{
    device::{Device, Region, Rung},
    neighbours::{Bus, Neighbours},
};
use crate::sandbox::{SandboxError, ThreadKind, apply_thread_filter};

/// Longest that the kernel waits for a device after one kind of reset: it doubles its pauses until their sum is
/// over 60 s (`pci_dev_wait` in drivers/pci/pci.c).
const KERNEL_WAIT: Duration = Duration::from_secs(66);
/// How long a device may take. PCI Express 6.0 §6.6.1 gives it a second, and GPUs and network cards that load
/// firmware have been seen to need half a minute. The kernel waits after a function-level reset, and once more
/// after that of its bus when the first did not help; until it is through, it holds up whoever opened the
/// device.
pub const DEADLINE: Duration = Duration::from_secs(2 * KERNEL_WAIT.as_secs() + 8);
/// How often a rung is tried whose devices the kernel has in use for a moment, and the pause between.
const BUSY_TRIES: u32 = 100;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

const _: () = {
    // The other half is for the reset itself.
    assert!(BUSY_PAUSE.as_millis() * BUSY_TRIES as u128 <= DEADLINE.as_millis() / 2);
};

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
pub struct Resetter {
    address: Bdf,
    device: Arc<dyn Device>,
    neighbours: Neighbours,
    orders: mpsc::SyncSender<Order>,
    deadline: Duration,
}

/// What the thread is told. Each order has a way back of its own: a report that comes too late is nobody's, and
/// never taken for that of a later order.
struct Order {
    rung: Rung,
    /// Until when its report is waited for.
    until: Instant,
    outbox: mpsc::SyncSender<Result<Found, ResetError>>,
}

/// An order that was given.
struct Ordered {
    rung: Rung,
    until: Instant,
    /// Where its report comes out; none where the thread is not through with an earlier order, and another waits
    /// already.
    report: Option<mpsc::Receiver<Result<Found, ResetError>>>,
}

/// What a rung has done.
#[derive(Debug)]
enum Found {
    /// The device is reset and answers.
    Clean,
    /// The kernel does not carry the rung out.
    Refused(io::Error),
    /// The kernel has carried it out; the device does not answer.
    Silent,
}

impl Resetter {
    /// Starts the thread. `neighbours` are all devices of the machine.
    pub fn start(
        address: Bdf,
        device: Arc<dyn Device>,
        neighbours: &Neighbours,
        confinement: Confinement,
    ) -> Result<Self, ResetError> {
        let (orders, inbox) = mpsc::sync_channel::<Order>(1);
        let reached = Arc::clone(&device);
        let work = move || {
            if confinement == Confinement::Filtered
                && let Err(source) = apply_thread_filter(ThreadKind::Reset)
            {
                // Whoever orders first is told; who orders later finds nobody here.
                if let Ok(Order { outbox, .. }) = inbox.recv() {
                    let _ = outbox.send(Err(ResetError::Filter { device: address, source }));
                }
                return;
            }
            while let Ok(Order { rung, until, outbox }) = inbox.recv() {
                // What could not be begun in time is not done: nobody waits for it, and the guest may use the device.
                if Instant::now() < until {
                    // Nor does anybody wait for what lasted too long.
                    let _ = outbox.send(Ok(carry_out(&*reached, rung)));
                }
            }
        };
        thread::Builder::new()
            .name(format!("reset {address}"))
            .spawn(work)
            .map_err(|source| ResetError::Thread { device: address, source })?;
        let neighbours = neighbours.clone();
        Ok(Self { address, device, neighbours, orders, deadline: DEADLINE })
    }

    /// Orders a rung, which [`Self::wait`] waits for; several devices can be at it at once.
    fn order(&self, rung: Rung) -> Ordered {
        let (outbox, report) = mpsc::sync_channel(1);
        let until = Instant::now() + self.deadline;
        // The inbox is full or closed only after a reset that was never over; `wait` says so.
        let sent = self.orders.try_send(Order { rung, until, outbox });
        Ordered { rung, until, report: sent.is_ok().then_some(report) }
    }

    /// Waits until what was ordered is over, or has taken longer than its deadline, which began with the order: of
    /// many devices that hang, none waits for another's.
    fn wait(&self, ordered: Ordered) -> Result<Found, ResetError> {
        let Ordered { rung, until, report } = ordered;
        let late = || ResetError::Deadline { device: self.address, rung };
        let report = report.ok_or_else(late)?;
        let left = until.saturating_duration_since(Instant::now());
        report.recv_timeout(left).map_err(|_| late())?
    }

    /// Returns whether its set is to be reset after the rung of its function, which found `own`:
    /// while nobody has others of the set than `known`.
    fn wants_set(&self, own: &Result<Found, ResetError>, known: &[Bdf]) -> bool {
        let bus = Bus::from(self.address);
        let wants = match own {
            Ok(Found::Refused(_) | Found::Silent) => true,
            Ok(Found::Clean) => self.neighbours.is_owed(bus),
            Err(_) => false,
        };
        wants && !self.neighbours.has_others(bus, known)
    }

    /// Returns how the device is after the rung of its function, which found `own`, and none of its
    /// set.
    fn judge_alone(&self, own: Result<Found, ResetError>) -> Result<(), ResetError> {
        match own? {
            Found::Clean => Ok(()),
            Found::Refused(_) if answers(&*self.device) => {
                self.neighbours.owe(self.address.into());
                Ok(())
            }
            Found::Refused(_) | Found::Silent => Err(ResetError::Gone { device: self.address }),
        }
    }

    /// Returns how the device is after the rung of its function, which found `own`, and that of its
    /// set.
    fn judge(
        &self,
        own: Result<Found, ResetError>,
        set: &Result<Found, ResetError>,
    ) -> Result<(), ResetError> {
        let device = self.address;
        match (own?, set) {
            // Whoever holds the set up holds the device up.
            (_, Err(_)) => Err(ResetError::Deadline { device, rung: Rung::Set }),
            (Found::Clean, Ok(Found::Refused(_))) => Ok(()),
            (Found::Refused(function), Ok(Found::Refused(set))) => {
                let source = set.raw_os_error().map(io::Error::from_raw_os_error);
                let source = source.unwrap_or_else(|| set.kind().into());
                Err(ResetError::Refused { device, function: function.to_string(), source })
            }
            (Found::Silent, Ok(Found::Refused(_))) => Err(ResetError::Gone { device }),
            (_, Ok(Found::Clean | Found::Silent)) if answers(&*self.device) => Ok(()),
            (_, Ok(Found::Clean | Found::Silent)) => Err(ResetError::Gone { device }),
        }
    }
}

/// Brings devices that were just bound into a clean state. The kernel resets a device when it is
/// opened; only one whose reset did not work then, or that does not answer after it, is reset here.
/// One that does not answer afterwards either is an error.
pub(super) fn clean(resetters: &[Arc<Resetter>]) -> Result<(), ResetError> {
    let is_unclean =
        |resetter: &&Arc<Resetter>| !(resetter.device.was_reset() && answers(&*resetter.device));
    let unclean: Vec<_> = resetters.iter().filter(is_unclean).map(Arc::clone).collect();
    reset_all(&unclean).into_iter().collect()
}

/// Resets devices, each by the first rung after which it answers: all functions at once, then, once
/// for each bus on which that was not enough and where nobody has another device, the set. Returns
/// what became of them, in order.
pub(super) fn reset_all(resetters: &[Arc<Resetter>]) -> Vec<Result<(), ResetError>> {
    let ordered: Vec<_> = resetters.iter().map(|one| one.order(Rung::Function)).collect();
    let found: Vec<_> =
        resetters.iter().zip(ordered).map(|(one, ordered)| one.wait(ordered)).collect();
    // Devices of one bus are one set; the first that needs it orders it for all.
    let known: Vec<Bdf> = resetters.iter().map(|resetter| resetter.address).collect();
    let mut leaders = BTreeMap::new();
    for (resetter, own) in resetters.iter().zip(&found) {
        if resetter.wants_set(own, &known) {
            leaders.entry(Bus::from(resetter.address)).or_insert(resetter);
        }
    }
    let ordered: Vec<_> = leaders.values().map(|leader| leader.order(Rung::Set)).collect();
    let mut sets = BTreeMap::new();
    for ((bus, leader), ordered) in leaders.into_iter().zip(ordered) {
        let set = leader.wait(ordered);
        if let Ok(Found::Clean | Found::Silent) = set {
            leader.neighbours.settle(bus);
        }
        sets.insert(bus, set);
    }
    let judged = resetters.iter().zip(found).map(|(resetter, own)| {
        match sets.get(&resetter.address.into()) {
            Some(set) => resetter.judge(own, set),
            None => resetter.judge_alone(own),
        }
    });
    judged.collect()
}

/// Carries out one rung, and again while the kernel has a device of the set in use for a moment.
fn carry_out(device: &dyn Device, rung: Rung) -> Found {
    let mut result = device.reset(rung);
    for _ in 0..BUSY_TRIES {
        let busy = result
            .as_ref()
            .is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)));
        if !busy {
            break;
        }
        thread::sleep(BUSY_PAUSE);
        result = device.reset(rung);
    }
    match result {
        Err(error) => Found::Refused(error),
        Ok(()) if answers(device) => Found::Clean,
        Ok(()) => Found::Silent,
    }
}

/// Offset of revision and class.
const CLASS: u64 = 0x08;

/// Whether a device answers for its configuration space. Vendor and device id, with which one would ask, are what
/// the host's kernel read when the device was opened (Linux drivers/vfio/pci/vfio_pci_config.c,
/// `init_pci_cap_basic_perm`); revision and class come from the device each time, and are never all ones.
fn answers(device: &dyn Device) -> bool {
    let mut class = [0xff; 4];
    device.read(Region::Config, CLASS, &mut class).is_ok() && class != [0xff; 4]
}

#[cfg(test)]
#[path = "reset_tests.rs"]
pub(super) mod tests;
