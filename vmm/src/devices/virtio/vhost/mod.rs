//! Devices whose queues the kernel serves (vhost): the driver's rings, checked and latched, go to
//! the kernel; a thread of ours starts and stops it, passes on interrupts where MSI-X is off, and
//! asks for a reset when the kernel says that a ring makes no sense.
//!
//! A device may have several descriptors, each with queues of its own (a network card's pairs). The
//! kernel serves the first one's from the start, and the others' when the driver says so on a control
//! queue, which the thread answers.
//!
//! System calls behind the filter (`ThreadKind::Event`): ppoll, read and write of eventfds, the
//! vhost, tap and KVM_IRQ_LINE ioctls, and those of the allocator and of locks.

mod thread;

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

use self::thread::Thread;
use super::{
    Activation, F_RING_EVENT_IDX, F_RING_INDIRECT_DESC, F_VERSION_1, VirtioError,
    transport::RingMemory, worker::Worker,
};
use crate::{sandbox::ThreadKind, sys::memory::GuestRam};

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
    /// Queues that each descriptor serves: the first one's from queue 0 on, then the next one's. The
    /// driver has to enable those of the first.
    const QUEUES: u16;
    /// The kind of device, for messages.
    const DEVICE: &'static str;

    /// The rings of descriptor number `unit` are set: lets the kernel use them.
    fn connect(&self, unit: u16, vhost: BorrowedFd<'_>, features: u64) -> io::Result<()>;

    /// Takes the rings away from the kernel. It does not touch them when this returns, also when this
    /// fails because they were not connected, or not wholly.
    fn disconnect(&self, unit: u16, vhost: BorrowedFd<'_>) -> io::Result<()>;

    /// Has the kernel ring `call` when it used buffers of ring `local` of a descriptor.
    fn ring(&self, vhost: &VhostFd, local: usize, call: &EventFd) -> io::Result<()> {
        vhost.set_vring_call(local, call).map_err(io::Error::other)
    }

    /// The driver wants these guest offloads and no others, of those in `features`, on which both sides agreed.
    /// Returns the features as they are in force then. What fails changes nothing.
    fn switch_offloads(&self, _features: u64, _offloads: u64) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns what the driver can do about descriptors after the first, with these features.
    fn steering(&self, _features: u64) -> Steering {
        Steering::default()
    }
}

/// How a driver uses further descriptors, and its control queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Steering {
    /// How many descriptors it may use beside the first.
    pub(super) more: u16,
    /// Index of the queue by which it says how many, and which offloads it takes.
    pub(super) control: Option<u16>,
}

/// The device's end: what vCPU threads call.
pub(super) struct Vhost<B> {
    first: Arc<VhostFd>,
    more: Vec<Arc<VhostFd>>,
    backend: Arc<B>,
    /// The features that are the kernel's business; others are between driver and device.
    known: u64,
    worker: Option<Worker<Activation>>,
}

impl<B: Backend + Sync> Vhost<B> {
    /// Takes over vhost descriptors, at least one, for this process and this memory. Returns them and the
    /// ring and device features that the kernel offers with all of them.
    pub(super) fn new(
        first: OwnedFd,
        more: Vec<OwnedFd>,
        backend: B,
        ram: &GuestRam,
    ) -> Result<(Self, u64), VirtioError> {
        let ram = Arc::new(ram.clone());
        let (first, mut offered) = take_over(first, &ram, B::DEVICE)?;
        let mut others = Vec::with_capacity(more.len());
        for fd in more {
            let (fd, features) = take_over(fd, &ram, B::DEVICE)?;
            offered &= features;
            others.push(fd);
        }
        // The header is between driver and tap; the kernel must not add one of its own.
        let known = offered & !(1 << VHOST_NET_F_VIRTIO_NET_HDR);
        let backend = Arc::new(backend);
        Ok((Self { first, more: others, backend, known, worker: None }, offered))
    }

    /// Returns the first descriptor.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.first.as_fd()
    }

    /// Starts the device's thread.
    pub(super) fn start(&mut self) -> Result<(), VirtioError> {
        let host = |what| move |source| VirtioError::Host { device: B::DEVICE, what, source };
        let all = [&self.first].into_iter().chain(&self.more).map(Arc::clone).collect();
        let (backend, known) = (Arc::clone(&self.backend), self.known);
        let prepare = move || Thread::new(all, backend, known);
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

    /// Has the thread look at how queues interrupt the driver.
    pub(super) fn look(&self) {
        self.worker.iter().for_each(Worker::wake);
    }

    pub(super) fn go_on(&self) {
        self.worker.iter().for_each(Worker::go_on);
    }
}

/// Makes a vhost descriptor this process's own and tells it of guest memory. Returns it and what it offers.
fn take_over(
    fd: OwnedFd,
    ram: &Arc<GuestRam>,
    device: &'static str,
) -> Result<(Arc<VhostFd>, u64), VirtioError> {
    let fd = VhostFd { fd, ram: Arc::clone(ram) };
    let failed = |what| move |source| VirtioError::Vhost { device, what, source };
    let offered = fd.get_features().map_err(failed("the descriptor is no vhost device"))?;
    if offered & F_VERSION_1 == 0 {
        let problem = "the kernel's vhost device does not know virtio 1".to_owned();
        return Err(VirtioError::Refused { device, problem });
    }
    fd.set_owner().map_err(failed("cannot own the vhost device"))?;
    fd.set_mem_table(&memory_table(ram)).map_err(failed("cannot tell vhost of guest memory"))?;
    Ok((Arc::new(fd), offered))
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
