//! virtio 1.2 devices over PCI: the transport, the rings, and block, net, entropy and socket.
//!
//! `transport` decides what a register write means and holds no descriptor, thread or lock; `pci`
//! is the shell that gives it a BAR, interrupts and doorbells; each device runs on threads of its
//! own and sees nothing but rings that were checked and latched when the driver enabled them.
//! Source: Virtual I/O Device (VIRTIO) Version 1.2, OASIS, cited as "virtio §".

pub mod blk;
pub mod control;
pub mod interrupt;
pub mod net;
pub mod pci;
pub mod ring;
pub mod rng;
pub mod transport;
pub mod vsock;

mod vhost;
pub(in crate::devices) mod worker;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use vmm_sys_util::eventfd::EventFd;

pub use interrupt::{Interrupts, QueueSignal};
pub use pci::VirtioPci;
pub use ring::Ring;

use types::operations::VmEventKind;

use crate::{
    counters::Registry, devices::throttle::Limits, events::Events, irq::InterruptSource,
    sys::memory::GuestRam,
};

/// Bit 28: descriptors may name a table of descriptors (virtio §6).
pub const F_RING_INDIRECT_DESC: u64 = 1 << 28;
/// Bit 29: `used_event` and `avail_event` say when to notify (virtio §6).
pub const F_RING_EVENT_IDX: u64 = 1 << 29;
/// Bit 32: not a legacy device (virtio §6). Always offered and always required.
pub const F_VERSION_1: u64 = 1 << 32;

/// Rings of every device have at most this many entries: what Linux asks of a block device by default.
pub const MAX_RING_SIZE: u16 = 256;
/// Every chain has at most this many descriptors, which bounds each request. A table of descriptors may be
/// longer than its ring, though virtio §2.7.5.3.1 asks drivers for less: viostor, Windows' driver of disks, puts
/// up to 515 into one and takes no notice of `seg_max` without `size_max`. The kernel takes as many
/// pieces of memory in one transfer (`UIO_MAXIOV`, `include/uapi/linux/uio.h`).
pub const MAX_CHAIN: u16 = 1024;

/// Why a virtio device could not be made, or stopped working.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum VirtioError {
    #[error("virtio-{device}: {what}: {source}")]
    Host { device: &'static str, what: &'static str, source: io::Error },
    #[error("virtio-{device}: {what}: {source}")]
    Vhost { device: &'static str, what: &'static str, source: ::vhost::Error },
    #[error("virtio-{device}: {problem}")]
    Refused { device: &'static str, problem: String },
}

/// What a device is, as configuration space shows it (virtio §4.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// Name in messages, as `blk`.
    pub name: &'static str,
    /// virtio device id (virtio §5): the PCI device id is 0x1040 more.
    pub virtio_id: u16,
    /// PCI class, subclass and programming interface.
    pub class: [u8; 3],
}

/// One virtio device behind a transport. Methods are called with the function's lock held, from
/// vCPU threads: none may wait for a disk, a network or another thread.
pub trait VirtioDevice: Send {
    /// Returns what the device is.
    fn identity(&self) -> DeviceIdentity;

    /// Returns the features offered to the driver.
    fn features(&self) -> u64;

    /// Returns the number of queues; each has up to [`MAX_RING_SIZE`] entries.
    fn queue_count(&self) -> u16;

    /// Reads the device's configuration. Bytes past its end are zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Starts the device's threads. Called once, after the sandbox is entered and before the
    /// guest runs; the threads wait for [`Self::activate`].
    fn start(&mut self) -> Result<(), VirtioError>;

    /// The driver said DRIVER_OK.
    fn activate(&mut self, activation: Activation) -> Result<(), VirtioError>;

    /// Tells the device to stop using the rings and guest memory.
    fn stop(&mut self);

    /// Returns whether no ring is in use any more after [`Self::stop`].
    fn stopped(&mut self) -> bool;

    /// Tells the device to finish what it took from its rings and to leave guest memory alone,
    /// without forgetting the rings. A device whose work is the kernel's has nothing to finish.
    fn hold(&mut self) {}

    /// Returns whether guest memory is left alone after [`Self::hold`].
    fn is_held(&mut self) -> bool {
        true
    }

    /// Goes on after [`Self::hold`].
    fn go_on(&mut self) {}

    /// The driver chose other vectors, or another kind of interrupts, for queues that it is using. A device that
    /// interrupts by [`QueueSignal::trigger`] alone has nothing to do.
    fn signals_changed(&mut self) {}
}

/// What a device receives when the driver says DRIVER_OK.
#[derive(Debug)]
pub struct Activation {
    /// Features both sides agreed on.
    pub features: u64,
    /// The enabled queues, ascending by index.
    pub queues: Vec<ReadyQueue>,
    /// How the device says that it needs a reset.
    pub distress: Distress,
}

/// One enabled queue: its ring, checked and latched, its doorbell and its interrupt.
#[derive(Debug)]
pub struct ReadyQueue {
    /// Index among the device's queues.
    pub index: u16,
    /// The ring.
    pub ring: Ring,
    /// Signalled when the driver notifies.
    pub kick: Arc<EventFd>,
    /// Interrupts the driver.
    pub signal: QueueSignal,
}

/// Times that one device writes a line about a ring that makes no sense; a guest that goes on
/// costs no more lines.
const MAX_COMPLAINTS: u32 = 8;

/// Sets DEVICE_NEEDS_RESET (virtio §2.1.2) from a device's thread.
#[derive(Debug, Clone)]
pub struct Distress {
    shared: Arc<DistressFlag>,
    interrupts: Arc<Interrupts>,
}

/// What [`Distress`] and the registers share.
#[derive(Debug)]
pub struct DistressFlag {
    device: &'static str,
    raised: AtomicBool,
    complaints: AtomicU32,
    events: Events,
}

impl DistressFlag {
    /// Returns the flag of a device, not raised.
    pub fn new(device: &'static str, events: Events) -> Self {
        Self { device, raised: AtomicBool::new(false), complaints: AtomicU32::new(0), events }
    }

    /// Returns whether the device needs a reset.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// The device was reset.
    pub fn clear(&self) {
        self.raised.store(false, Ordering::Release);
    }
}

impl Distress {
    /// Returns the means to set `flag` and interrupt the driver.
    pub fn new(flag: Arc<DistressFlag>, interrupts: Arc<Interrupts>) -> Self {
        Self { shared: flag, interrupts }
    }

    /// Marks the device as needing a reset and tells the driver, once.
    pub fn raise(&self, reason: &dyn std::fmt::Display) {
        if self.shared.raised.swap(true, Ordering::AcqRel) {
            return;
        }
        self.interrupts.signal_config();
        if self.shared.complaints.fetch_add(1, Ordering::AcqRel) < MAX_COMPLAINTS {
            let device = self.shared.device;
            eprintln!("event=virtio-needs-reset device={device} reason=\"{reason}\"");
            self.shared.events.push(VmEventKind::DeviceFailed, format!("{device}: {reason}"));
        }
    }
}

/// Turns a guest's write to an address into a signal, without leaving the kernel.
pub trait Doorbells: Send + Sync {
    /// Signals `event` on any write to `address`.
    fn register(&self, address: u64, event: &EventFd) -> io::Result<()>;

    /// Takes back what [`Self::register`] did.
    fn unregister(&self, address: u64, event: &EventFd) -> io::Result<()>;
}

/// What every virtio function needs from the machine around it.
#[derive(Clone)]
pub struct Platform {
    /// Guest memory.
    pub ram: GuestRam,
    /// Doorbells, usually `sys::kvm::Vm`.
    pub doorbells: Arc<dyn Doorbells>,
    /// Interrupts, usually `sys::kvm::Vm`.
    pub interrupts: Arc<dyn InterruptSource>,
    /// Where devices count what they do.
    pub activity: Registry,
    /// Where devices say that they do not work any more.
    pub events: Events,
    /// What all disks of the machine share of what they may move.
    pub limits: Limits,
}

/// Reads `data.len()` bytes of `fields` at `offset`; bytes past the end are zero.
fn read_fields(fields: &[u8], offset: u64, data: &mut [u8]) {
    for (index, byte) in (0u64..).zip(data.iter_mut()) {
        *byte = offset
            .checked_add(index)
            .and_then(|at| usize::try_from(at).ok())
            .and_then(|at| fields.get(at).copied())
            .unwrap_or(0);
    }
}
