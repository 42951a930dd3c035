//! Devices that come and go while the guest runs. The API and the ports' slots leave orders; one
//! thread carries them out, because taking a device may last.
//!
//! A device goes into a free spare port, which tells the guest. When the guest gives the slot power,
//! the device joins the bus and the link comes up. It leaves when the guest, asked by the attention
//! button, has taken the power away; or at once, when it is pulled.

mod manager;

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError},
    },
    time::{Duration, Instant},
};

pub(super) use manager::{Manager, Spare, Supplies};
use types::{
    devices::{AttachDevice, AttachRequest, AttachedDevice, MAX_DEVICE_NAME},
    node::Bdf,
    vm::MAX_DISK_QUEUES,
};

use crate::{
    devices::DeviceError,
    pci::port::SlotWatch,
    vfio::{
        alarms::Since,
        assign::AssignError,
        reset::{DEADLINE, ResetError},
    },
};

/// Most orders that wait.
const MAX_ORDERS: usize = 64;
/// How long an order may take: a device may need two resets, and pinning memory takes its time.
const ORDER_LIMIT: Duration = Duration::from_secs(300);
/// How long taking everything back may last at the end of the machine: two resets, as they may take. However many
/// devices there are, theirs begin at once.
const CLOSE_LIMIT: Duration = Duration::from_secs(2 * DEADLINE.as_secs() + 5);

const _: () = {
    // One that did not work when the device was opened, and that of its set.
    assert!(ORDER_LIMIT.as_secs() > 2 * DEADLINE.as_secs());
};

/// Why a device cannot be attached or detached.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum PlugError {
    #[error(
        "{id:?} is no name; 1 to {MAX_DEVICE_NAME} letters, digits, '.', ':', '_' and '-' are one"
    )]
    Name { id: String },
    #[error("{id} is attached already")]
    Taken { id: String },
    #[error("no device {id} is attached")]
    Unknown { id: String },
    #[error(
        "{found} descriptors came with the request; of this device it takes 1 at least and {most} at most"
    )]
    Descriptors { found: usize, most: usize },
    #[error("no spare port is free; a machine has those of spare_ports in its specification")]
    NoPort,
    #[error("the machine was started without passthrough, so it can take no device of the host")]
    NoPassthrough,
    #[error(
        "the device needs {memory:#x} bytes of 32-bit and {prefetchable:#x} bytes of 64-bit memory; \
         slot {slot} keeps {kept:#x} and {kept_prefetchable:#x}"
    )]
    Window { slot: u16, memory: u64, prefetchable: u64, kept: u64, kept_prefetchable: u64 },
    #[error("the device cannot be given to the guest: {0}")]
    Assign(Box<AssignError>),
    #[error(transparent)]
    Disk(#[from] DeviceError),
    #[error("the machine is busy with other devices, or ends")]
    Busy,
}

/// How a device leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The guest is asked.
    Asked,
    /// It is pulled, whatever the guest does with it.
    Pulled,
}

/// What the thread is told.
pub(super) enum Order {
    Attach(AttachRequest, (OwnedFd, Vec<OwnedFd>), Reply),
    Detach(String, Removal, Reply),
    /// The guest has switched the power of a slot.
    Look,
    /// The machine has ended: take everything back.
    Close(SyncSender<Vec<ResetError>>),
}

/// What whoever gave an order is told.
pub(super) enum Told {
    /// It is carried out now.
    Begun,
    /// It is done.
    Done(Result<AttachedDevice, PlugError>),
}

/// Where that goes.
pub(super) struct Reply(SyncSender<Told>);

impl Reply {
    /// Carries an order out, unless nobody waits for it any more: whoever gave up has been told that it was not.
    pub(super) fn unless_abandoned(self, act: impl FnOnce() -> Result<AttachedDevice, PlugError>) {
        if self.0.send(Told::Begun).is_ok() {
            // Who asked may give up meanwhile.
            let _ = self.0.send(Told::Done(act()));
        }
    }
}

/// How often somebody who waits for an order is looked for.
const SLICE: Duration = Duration::from_millis(250);

/// Where orders are left.
pub struct Hotplug {
    orders: SyncSender<Order>,
    /// The thread is told to look at the slots, and has not begun.
    looks: AtomicBool,
    devices: Arc<Mutex<Vec<AttachedDevice>>>,
}

impl Hotplug {
    /// Makes the place, and the end where orders come out.
    pub(super) fn new() -> (Arc<Self>, Receiver<Order>) {
        let (orders, inbox) = mpsc::sync_channel(MAX_ORDERS);
        let looks = AtomicBool::new(false);
        (Arc::new(Self { orders, looks, devices: Arc::default() }), inbox)
    }

    /// A place where nobody carries orders out, for a machine without spare ports.
    pub fn absent() -> Arc<Self> {
        Self::new().0
    }

    /// Plugs a device, and returns how far it is. Nothing comes of it once `gone` says that nobody waits for that,
    /// unless it was begun.
    pub fn attach(
        &self,
        request: AttachRequest,
        files: Vec<OwnedFd>,
        gone: impl Fn() -> bool,
    ) -> Result<AttachedDevice, PlugError> {
        let id = &request.id;
        let fits = |c: char| c.is_ascii_alphanumeric() || ".:_-".contains(c);
        if id.is_empty() || id.len() > MAX_DEVICE_NAME || !id.chars().all(fits) {
            return Err(PlugError::Name { id: id.chars().take(MAX_DEVICE_NAME).collect() });
        }
        let found = files.len();
        let most = match &request.device {
            AttachDevice::Pci { .. } => 1,
            AttachDevice::Disk { .. } => MAX_DISK_QUEUES.into(),
        };
        let mut files = files.into_iter();
        let first = files.next().filter(|_| found <= most);
        let first = first.ok_or(PlugError::Descriptors { found, most })?;
        self.give(|reply| Order::Attach(request, (first, files.collect()), reply), gone)
    }

    /// Unplugs a device, and returns how far it is; `gone` as for [`Self::attach`].
    pub fn detach(
        &self,
        id: &str,
        removal: Removal,
        gone: impl Fn() -> bool,
    ) -> Result<AttachedDevice, PlugError> {
        self.give(|reply| Order::Detach(id.to_owned(), removal, reply), gone)
    }

    /// Returns what is attached.
    pub fn devices(&self) -> Vec<AttachedDevice> {
        self.list().clone()
    }

    /// Returns the name of a device of the host that is attached.
    pub fn id_of(&self, device: Bdf) -> Option<String> {
        let is = |known: &&AttachedDevice| matches!(known.device, AttachDevice::Pci { address } if address == device);
        self.list().iter().find(is).map(|known| known.id.clone())
    }

    /// Pulls a device of the host, which wants it back; `gone` as for [`Self::attach`]. Returns whether the guest no
    /// longer has it: nor has it one that came later and is in no slot, which is being taken, or was given back.
    pub(super) fn pull(&self, device: Bdf, since: Since, gone: impl Fn() -> bool) -> bool {
        let Some(id) = self.id_of(device) else { return since == Since::Later };
        match self.detach(&id, Removal::Pulled, gone) {
            Ok(_) => true,
            Err(PlugError::Unknown { .. }) => since == Since::Later,
            Err(_) => false,
        }
    }

    /// Takes everything back. The virtual CPUs must have stopped.
    pub(super) fn close(&self) -> Result<Vec<ResetError>, io::Error> {
        let (reply, answer) = mpsc::sync_channel(1);
        let late = || io::Error::other("attached devices were not taken back in time");
        match self.orders.try_send(Order::Close(reply)) {
            Ok(()) => {}
            Err(TrySendError::Disconnected(_)) => return Ok(Vec::new()),
            Err(TrySendError::Full(_)) => return Err(late()),
        }
        answer.recv_timeout(CLOSE_LIMIT).map_err(|_| late())
    }

    pub(super) fn list(&self) -> MutexGuard<'_, Vec<AttachedDevice>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread begins to look at the slots: what is switched from now on is news again.
    pub(super) fn begin_look(&self) {
        self.looks.store(false, Ordering::Release);
    }

    fn give(
        &self,
        order: impl FnOnce(Reply) -> Order,
        gone: impl Fn() -> bool,
    ) -> Result<AttachedDevice, PlugError> {
        let (reply, answer) = mpsc::sync_channel(2);
        self.orders.try_send(order(Reply(reply))).map_err(|error| match error {
            TrySendError::Full(_) => PlugError::Busy,
            // Nobody is there in a machine without spare ports.
            TrySendError::Disconnected(_) => PlugError::NoPort,
        })?;
        let deadline = Instant::now() + ORDER_LIMIT;
        loop {
            match answer.recv_timeout(SLICE) {
                Ok(Told::Begun) => {}
                Ok(Told::Done(result)) => return result,
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline && !gone() => {}
                Err(_) => return Err(PlugError::Busy),
            }
        }
    }
}

impl SlotWatch for Hotplug {
    fn power_switched(&self, _slot: u16) {
        // However often a guest switches: one order of these waits, and leaves room for the others.
        if !self.looks.swap(true, Ordering::AcqRel) && self.orders.try_send(Order::Look).is_err() {
            // Whatever order is carried out next looks at all slots afterwards.
            self.begin_look();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, thread};

    use types::devices::{AttachDevice, AttachedState};

    use super::*;

    fn request() -> AttachRequest {
        let address = "0000:01:00.0".parse().expect("an address");
        AttachRequest { id: "a".to_owned(), device: AttachDevice::Pci { address } }
    }

    fn file() -> Vec<OwnedFd> {
        vec![File::open("/dev/null").expect("there").into()]
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_not_done() {
        let (hotplug, inbox) = Hotplug::new();
        let gave_up = [
            hotplug.attach(request(), file(), || true).map(drop),
            hotplug.detach("a", Removal::Pulled, || true).map(drop),
        ];
        assert!(gave_up.iter().all(|result| matches!(result, Err(PlugError::Busy))), "{gave_up:?}");
        for order in inbox.try_iter() {
            let (Order::Attach(_, _, reply) | Order::Detach(_, _, reply)) = order else {
                panic!("what?")
            };
            reply.unless_abandoned(|| unreachable!("it was given up"));
        }
        // Who waits is told, however long it takes.
        let AttachRequest { id, device } = request();
        let shown = AttachedDevice { id, device, slot: 3, state: AttachedState::Waiting };
        let done = shown.clone();
        let worker = thread::spawn(move || {
            let Ok(Order::Detach(_, _, reply)) = inbox.recv() else { panic!("what?") };
            thread::sleep(2 * SLICE);
            reply.unless_abandoned(|| Ok(done));
        });
        assert_eq!(hotplug.detach("a", Removal::Asked, || false).expect("done"), shown);
        worker.join().expect("ended");
    }

    #[test]
    fn what_is_in_no_slot_need_not_be_pulled_if_it_came_later() {
        let (hotplug, inbox) = Hotplug::new();
        let AttachRequest { id, device } = request();
        let AttachDevice::Pci { address } = device else { panic!("what?") };
        assert!(hotplug.pull(address, Since::Later, || false));
        assert!(!hotplug.pull(address, Since::Start, || false));
        hotplug.list().push(AttachedDevice { id, device, slot: 3, state: AttachedState::Leaving });
        assert!(!hotplug.pull(address, Since::Later, || true), "it may be in its slot");
        drop(inbox.try_recv().expect("an order"));
        let worker = thread::spawn(move || {
            let Ok(Order::Detach(id, Removal::Pulled, reply)) = inbox.recv() else {
                panic!("what?")
            };
            reply.unless_abandoned(|| Err(PlugError::Unknown { id }));
        });
        assert!(hotplug.pull(address, Since::Later, || false));
        worker.join().expect("ended");
    }

    #[test]
    fn a_guest_that_switches_without_end_leaves_room_for_the_end() {
        let (hotplug, inbox) = Hotplug::new();
        (0..10 * u16::try_from(MAX_ORDERS).expect("few"))
            .for_each(|slot| hotplug.power_switched(slot));
        let looks = inbox.try_iter().filter(|order| matches!(order, Order::Look)).count();
        assert_eq!(looks, 1);
        // What is switched while the thread looks is news.
        hotplug.begin_look();
        hotplug.power_switched(3);
        assert!(matches!(inbox.try_recv(), Ok(Order::Look)));
    }
}
