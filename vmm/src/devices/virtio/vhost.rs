//! Devices whose queues the kernel serves (vhost): the driver's rings, checked and latched, go to
//! the kernel; a thread of ours starts and stops it, passes on interrupts where MSI-X is off, and
//! asks for a reset when the kernel says that a ring makes no sense.
//!
//! System calls behind the filter (`ThreadKind::Event`): ppoll, read and write of eventfds, the
//! vhost, tap and KVM_IRQ_LINE ioctls, and those of the allocator and of locks.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use ::vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_kern::{VhostKernBackend, vhost_binding::VHOST_NET_F_VIRTIO_NET_HDR},
};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::{
    Activation, Distress, F_RING_EVENT_IDX, F_RING_INDIRECT_DESC, F_VERSION_1, MAX_RING_SIZE,
    ReadyQueue, VirtioError,
    transport::{QueueLayout, RingMemory},
    worker::{Inbox, Order, Patience, Worker},
};
use crate::{
    sandbox::ThreadKind,
    sys::{io::borrow_eventfd, memory::GuestRam},
};

/// Ring features that every vhost device of ours needs or may have.
const RING_FEATURES: u64 = F_VERSION_1 | F_RING_INDIRECT_DESC | F_RING_EVENT_IDX;

/// A vhost descriptor and the memory its rings lie in.
pub(super) struct VhostFd {
    fd: OwnedFd,
    ram: Arc<GuestRam>,
}

impl AsRawFd for VhostFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for VhostFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl VhostKernBackend for VhostFd {
    type AS = Arc<GuestRam>;

    fn mem(&self) -> &Self::AS {
        &self.ram
    }

    /// The kernel takes host addresses and checks no bounds of ours: each ring has to lie in one
    /// region, wholly.
    fn is_valid(&self, config: &VringConfigData) -> bool {
        let entries = u64::from(config.queue_size);
        config.queue_size.is_power_of_two()
            && config.queue_size <= config.queue_max_size
            && self.ram.contains(config.desc_table_addr, 16 * entries)
            && self.ram.contains(config.avail_ring_addr, 6 + 2 * entries)
            && self.ram.contains(config.used_ring_addr, 6 + 8 * entries)
    }
}

impl RingMemory for GuestRam {
    fn contains(&self, address: u64, length: u64) -> bool {
        use vm_memory::GuestAddress;
        let Some(last) = length.checked_sub(1).and_then(|behind| address.checked_add(behind))
        else {
            return false;
        };
        self.find_region(GuestAddress(address))
            .is_some_and(|region| last <= region.last_addr().raw_value())
    }
}

/// What differs between the devices of this kind. Called on the device's thread.
pub(super) trait Backend: Send + 'static {
    /// Number of queues that the kernel serves, from queue 0 on. The driver has to enable all.
    const QUEUES: u16;
    /// The kind of device, for messages.
    const DEVICE: &'static str;

    /// The rings are set: lets the kernel use them.
    fn connect(&self, vhost: BorrowedFd<'_>, features: u64) -> io::Result<()>;

    /// Takes the rings away from the kernel. It does not touch them when this returns.
    fn disconnect(&self, vhost: BorrowedFd<'_>) -> io::Result<()>;
}

/// The device's end: what vCPU threads call.
pub(super) struct Vhost<B> {
    fd: Arc<VhostFd>,
    backend: Arc<B>,
    /// The features that are the kernel's business; others are between driver and device.
    known: u64,
    worker: Option<Worker<Activation>>,
}

impl<B: Backend + Sync> Vhost<B> {
    /// Takes over a vhost descriptor, for this process and this memory. Returns it and the ring
    /// and device features that the kernel offers.
    pub(super) fn new(fd: OwnedFd, backend: B, ram: &GuestRam) -> Result<(Self, u64), VirtioError> {
        let fd = VhostFd { fd, ram: Arc::new(ram.clone()) };
        let failed = |what| move |source| VirtioError::Vhost { device: B::DEVICE, what, source };
        let offered = fd.get_features().map_err(failed("the descriptor is no vhost device"))?;
        if offered & F_VERSION_1 == 0 {
            return Err(VirtioError::Refused {
                device: B::DEVICE,
                problem: "the kernel's vhost device does not know virtio 1".to_owned(),
            });
        }
        fd.set_owner().map_err(failed("cannot own the vhost device"))?;
        fd.set_mem_table(&memory_table(ram))
            .map_err(failed("cannot tell vhost of guest memory"))?;
        // The header is between driver and tap; the kernel must not add one of its own.
        let known = offered & !(1 << VHOST_NET_F_VIRTIO_NET_HDR);
        let (fd, backend) = (Arc::new(fd), Arc::new(backend));
        Ok((Self { fd, backend, known, worker: None }, offered))
    }

    /// Returns the descriptor.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Starts the device's thread.
    pub(super) fn start(&mut self) -> Result<(), VirtioError> {
        let host = |what| move |source| VirtioError::Host { device: B::DEVICE, what, source };
        let (fd, backend) = (Arc::clone(&self.fd), Arc::clone(&self.backend));
        let known = self.known;
        let prepare = move || Thread::new(fd, backend, known);
        let worker = Worker::spawn(
            format!("vhost-{}", B::DEVICE),
            ThreadKind::Event,
            prepare,
            |thread: Thread<B>, inbox| thread.serve(&inbox),
        )
        .map_err(host("cannot start a thread"))?;
        self.worker = Some(worker);
        Ok(())
    }

    pub(super) fn activate(&self, activation: Activation) -> Result<(), VirtioError> {
        let Some(worker) = &self.worker else {
            let problem = "the device was not started".to_owned();
            return Err(VirtioError::Refused { device: B::DEVICE, problem });
        };
        worker.run(activation);
        Ok(())
    }

    pub(super) fn stop(&self) {
        if let Some(worker) = &self.worker {
            worker.stop();
        }
    }

    pub(super) fn stopped(&self) -> bool {
        self.worker.as_ref().is_none_or(Worker::is_idle)
    }

    pub(super) fn hold(&self) {
        self.worker.iter().for_each(Worker::hold);
    }

    pub(super) fn is_held(&self) -> bool {
        self.worker.iter().all(Worker::is_held)
    }

    pub(super) fn go_on(&self) {
        self.worker.iter().for_each(Worker::go_on);
    }
}

/// The features among `offered` that rings may have.
pub(super) fn ring_features(offered: u64) -> u64 {
    offered & RING_FEATURES
}

fn memory_table(ram: &GuestRam) -> Vec<VhostUserMemoryRegionInfo> {
    ram.iter()
        .map(|region| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            mmap_offset: 0,
            mmap_handle: -1,
        })
        .collect()
}

/// One queue that the kernel serves, and our ear for it.
struct Line {
    /// Rings when the kernel used buffers and MSI-X is off.
    call: EventFd,
    /// Rings when the kernel finds the ring senseless.
    error: EventFd,
}

/// What the driver has running now.
struct Live {
    queues: Vec<ReadyQueue>,
    distress: Distress,
    /// With which the kernel serves the rings, if it does.
    features: Option<u64>,
}

struct Thread<B> {
    fd: Arc<VhostFd>,
    backend: Arc<B>,
    known: u64,
    lines: Vec<Line>,
}

impl<B: Backend> Thread<B> {
    fn new(fd: Arc<VhostFd>, backend: Arc<B>, known: u64) -> io::Result<Self> {
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let lines = (0..B::QUEUES)
            .map(|_| Ok(Line { call: event()?, error: event()? }))
            .collect::<io::Result<_>>()?;
        Ok(Self { fd, backend, known, lines })
    }

    fn serve(self, inbox: &Inbox<Activation>) {
        let mut live: Option<Live> = None;
        loop {
            while let Some(order) = inbox.next() {
                match order {
                    Order::Run(activation) => live = Some(self.begin(activation)),
                    Order::Hold => self.hold(live.as_ref(), inbox),
                    Order::Stop => {
                        self.end();
                        live = None;
                        inbox.stopped();
                    }
                    Order::Quit => return self.end(),
                }
            }
            let mut descriptors = Vec::new();
            if let Some(live) = &live {
                self.relay(live);
                let lines = self.lines.iter().flat_map(|line| [&line.call, &line.error]);
                descriptors.extend(lines.map(borrow_eventfd));
            }
            inbox.wait(&descriptors, Patience::Forever);
        }
    }

    fn begin(&self, activation: Activation) -> Live {
        let Activation { features, queues, distress } = activation;
        let features = match self.try_begin(features, &queues) {
            Ok(()) => Some(features),
            Err(error) => {
                self.end();
                distress.raise(&error);
                None
            }
        };
        Live { queues, distress, features }
    }

    /// Takes the rings away from the kernel, which remembers how far it was, until told to go on.
    fn hold(&self, live: Option<&Live>, inbox: &Inbox<Activation>) {
        let served = live.and_then(|live| Some((live, live.features?)));
        let Some((live, features)) = served else { return inbox.hold() };
        // A device that was not connected refuses, which is as good.
        let _ = self.backend.disconnect(self.fd.as_fd());
        inbox.hold();
        if let Err(error) = self.backend.connect(self.fd.as_fd(), features) {
            live.distress.raise(&format_args!("vhost refused to go on: {error}"));
        }
    }

    /// Gives the rings to the kernel.
    fn try_begin(&self, features: u64, queues: &[ReadyQueue]) -> Result<(), BeginError> {
        let failed = |what| move |source| BeginError::Vhost { what, source };
        let kernels = features & self.known;
        self.fd.set_features(kernels).map_err(failed("set features"))?;
        for index in 0..B::QUEUES {
            let queue = queues.iter().find(|queue| queue.index == index);
            let queue = queue.ok_or(BeginError::Missing { index })?;
            let line = self.lines.get(usize::from(index)).ok_or(BeginError::Missing { index })?;
            self.set_ring(queue, line)?;
        }
        self.backend.connect(self.fd.as_fd(), features).map_err(BeginError::Connect)
    }

    fn set_ring(&self, queue: &ReadyQueue, line: &Line) -> Result<(), BeginError> {
        let failed = |what| move |source| BeginError::Vhost { what, source };
        let index = usize::from(queue.index);
        let layout = queue.ring.layout();
        let call = queue.signal.eventfd().unwrap_or(&line.call);
        self.fd.set_vring_num(index, layout.size).map_err(failed("set a ring's size"))?;
        self.fd.set_vring_base(index, 0).map_err(failed("set a ring's start"))?;
        self.fd.set_vring_addr(index, &ring_addresses(layout)).map_err(failed("place a ring"))?;
        self.fd.set_vring_call(index, call).map_err(failed("set an interrupt"))?;
        self.fd.set_vring_err(index, &line.error).map_err(failed("set an error signal"))?;
        self.fd.set_vring_kick(index, &queue.kick).map_err(failed("set a doorbell"))
    }

    /// Takes the rings away from the kernel and forgets what was signalled.
    fn end(&self) {
        // A device that was not connected refuses, which is as good.
        let _ = self.backend.disconnect(self.fd.as_fd());
        for line in &self.lines {
            let _ = line.call.read();
            let _ = line.error.read();
        }
    }

    /// Passes on what the kernel signalled.
    fn relay(&self, live: &Live) {
        for (index, line) in (0u16..).zip(&self.lines) {
            if line.call.read().is_ok()
                && let Some(queue) = live.queues.iter().find(|queue| queue.index == index)
            {
                queue.signal.trigger();
            }
            if line.error.read().is_ok() {
                live.distress.raise(&format_args!("the kernel gave up on queue {index}"));
            }
        }
    }
}

/// Why the kernel did not take the rings.
#[derive(Debug, thiserror::Error)]
enum BeginError {
    #[error("the driver did not enable queue {index}")]
    Missing { index: u16 },
    #[error("vhost refused to {what}: {source}")]
    Vhost { what: &'static str, source: ::vhost::Error },
    #[error("vhost refused to start: {0}")]
    Connect(io::Error),
}

fn ring_addresses(layout: &QueueLayout) -> VringConfigData {
    VringConfigData {
        queue_max_size: MAX_RING_SIZE,
        queue_size: layout.size,
        flags: 0,
        desc_table_addr: layout.descriptors,
        used_ring_addr: layout.used,
        avail_ring_addr: layout.available,
        log_addr: None,
    }
}
