//! Disk and network descriptors below the safe interfaces: an io_uring and plain positioned
//! reads and writes between one file and guest memory, and the ioctls of tap and vhost.
//!
//! Guest memory is named by guest addresses only; host addresses never leave this file.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd},
    thread,
    time::Duration,
};

use ::types::vm::MAX_DISK_WORKERS;
use io_uring::{IoUring, opcode, register::Restriction, squeue, types::Fixed};
use vhost::vhost_kern::vhost_binding::{
    VHOST_NET_SET_BACKEND, VHOST_VSOCK_SET_GUEST_CID, VHOST_VSOCK_SET_RUNNING, vhost_vring_file,
};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::{
    eventfd::EventFd,
    ioctl::{ioctl_with_ref, ioctl_with_val},
};

use crate::sys::memory::GuestRam;

/// TUNSETOFFLOAD, `_IOW('T', 208, unsigned int)` (linux/if_tun.h).
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
/// TUNSETVNETHDRSZ, `_IOW('T', 216, int)` (linux/if_tun.h).
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
/// TUNSETQUEUE, `_IOW('T', 217, int)`, and the two flags of its `ifreq` (linux/if_tun.h).
const TUNSETQUEUE: libc::c_ulong = 0x4004_54d9;
const IFF_ATTACH_QUEUE: libc::c_short = 0x0200;
const IFF_DETACH_QUEUE: libc::c_short = 0x0400;

/// One transfer or command for a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskCommand<'a> {
    /// From the file at `offset` into guest memory.
    Read {
        /// Byte offset in the file.
        offset: u64,
        /// Where the bytes go, in order.
        into: &'a [(GuestAddress, u32)],
    },
    /// From guest memory to the file at `offset`.
    Write {
        /// Byte offset in the file.
        offset: u64,
        /// Where the bytes come from, in order.
        from: &'a [(GuestAddress, u32)],
    },
    /// Makes all finished writes durable.
    Sync,
    /// Gives the range back to the file system; it reads as zeroes or as before.
    Punch {
        /// Byte offset in the file.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Makes the range read as zeroes and keeps its space.
    Zero {
        /// Byte offset in the file.
        offset: u64,
        /// Bytes.
        length: u64,
    },
}

/// `fallocate` modes of [`DiskCommand::Punch`] and [`DiskCommand::Zero`].
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// How long [`DiskRing::wait`] waits where the kernel cannot.
const PAUSE: Duration = Duration::from_millis(1);

/// Most pieces of memory in one transfer (`UIO_MAXIOV`, `include/uapi/linux/uio.h`).
const MAX_VECTORS: usize = 1024;

/// Returns the host addresses of guest memory, or an error when a part is not memory. The
/// addresses hold while `ram` is mapped. Of memory in more than [`MAX_VECTORS`] pieces, which segments that
/// cross a border of two regions make, it returns the first: the transfer is a short one then.
fn vectors(ram: &GuestRam, segments: &[(GuestAddress, u32)]) -> io::Result<Box<[libc::iovec]>> {
    let outside = |_| io::Error::from_raw_os_error(libc::EFAULT);
    let mut vectors = Vec::with_capacity(segments.len());
    for &(address, length) in segments {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?;
        for slice in GuestMemoryBackend::get_slices(ram, address, length) {
            let slice = slice.map_err(outside)?;
            vectors.push(libc::iovec {
                iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                iov_len: slice.len(),
            });
        }
    }
    vectors.truncate(MAX_VECTORS);
    Ok(vectors.into_boxed_slice())
}

/// An io_uring for one file and one guest's memory. It can do nothing but the commands above, to
/// nothing but that file: the ring is restricted before it is enabled, so that it opens no way
/// around the system call filter.
pub struct DiskRing {
    ring: IoUring,
    ram: GuestRam,
    _file: OwnedFd,
    /// What the kernel may read of each command in flight, by token.
    in_flight: Vec<Option<Held>>,
    flying: usize,
}

/// The vectors of a command, and the bytes that they name unless those are the guest's.
#[derive(Default)]
struct Held {
    vectors: Box<[libc::iovec]>,
    _bytes: Box<[u8]>,
}

// SAFETY: The raw pointers in `in_flight` are addresses for the kernel, never dereferenced here,
// and `ram`, which keeps them mapped, moves with them.
unsafe impl Send for DiskRing {}

impl DiskRing {
    /// Makes a ring for up to `depth` commands in flight, with tokens `0..depth`.
    pub fn new(file: BorrowedFd<'_>, ram: GuestRam, depth: u16) -> io::Result<Self> {
        let file = file.try_clone_to_owned()?;
        let mut builder = IoUring::builder();
        builder.dontfork().setup_r_disabled().setup_submit_all();
        let ring: IoUring = builder.build(u32::from(depth))?;
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        // Bounded work is that on files and block devices; there is no other. Both have to be named, and 0 leaves
        // one as it is.
        submitter.register_iowq_max_workers(&mut [MAX_DISK_WORKERS, 1])?;
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Writev::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
            Restriction::sqe_op(opcode::Fallocate::CODE),
            Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()),
        ])?;
        submitter.register_enable_rings()?;
        Ok(Self {
            ring,
            ram,
            _file: file,
            in_flight: (0..depth).map(|_| None).collect(),
            flying: 0,
        })
    }

    /// Returns the descriptor that is readable while completions wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The ring's descriptor is open as long as `self.ring` is, and the borrow of
        // `self` outlives the returned one.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Queues a command; [`Self::submit`] hands it to the kernel. `token` must not be in flight.
    pub fn queue(&mut self, token: u16, command: DiskCommand<'_>) -> io::Result<()> {
        let file = Fixed(0);
        let mut held = Held::default();
        let entry = match command {
            DiskCommand::Read { offset, into } => {
                held.vectors = vectors(&self.ram, into)?;
                let vectors = &held.vectors;
                opcode::Readv::new(file, vectors.as_ptr(), count(vectors)?).offset(offset).build()
            }
            DiskCommand::Write { offset, from } => {
                held.vectors = vectors(&self.ram, from)?;
                writev(&held.vectors, offset)?
            }
            DiskCommand::Sync => {
                opcode::Fsync::new(file).flags(io_uring::types::FsyncFlags::DATASYNC).build()
            }
            DiskCommand::Punch { offset, length } => {
                opcode::Fallocate::new(file, length).offset(offset).mode(PUNCH).build()
            }
            DiskCommand::Zero { offset, length } => {
                opcode::Fallocate::new(file, length).offset(offset).mode(ZERO).build()
            }
        };
        self.push(token, &entry, held)
    }

    /// Queues a write of bytes that are not the guest's.
    pub fn queue_write(&mut self, token: u16, offset: u64, bytes: Box<[u8]>) -> io::Result<()> {
        let vectors: Box<[_]> = Box::new([vector_of(&bytes)]);
        let entry = writev(&vectors, offset)?;
        self.push(token, &entry, Held { vectors, _bytes: bytes })
    }

    fn push(&mut self, token: u16, entry: &squeue::Entry, held: Held) -> io::Result<()> {
        let slot = self
            .in_flight
            .get_mut(usize::from(token))
            .filter(|slot| slot.is_none())
            .ok_or(io::ErrorKind::ResourceBusy)?;
        let entry = entry.clone().user_data(token.into());
        // SAFETY: The entry names only the registered file, guest memory that `self.ram` keeps
        // mapped, and vectors and bytes that stay in `in_flight` until the command completes;
        // `drop` waits for every command in flight or leaks what they use.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| io::ErrorKind::ResourceBusy)?;
        *slot = Some(held);
        self.flying += 1;
        Ok(())
    }

    /// Hands queued commands to the kernel; returns whether it took all of them. The rest stays
    /// queued for the next call.
    pub fn submit(&mut self) -> io::Result<bool> {
        if self.ring.submission().is_empty() {
            return Ok(true);
        }
        match self.ring.submit() {
            Ok(_) => {}
            Err(error) if was_interrupted(&error) => {}
            // Whoever hears that something is left asks again at once.
            Err(error) if is_short_of_memory(&error) => thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
        Ok(self.ring.submission().is_empty())
    }

    /// Hands queued commands to the kernel and waits until at least one in flight has completed, or until it was
    /// interrupted, or for a moment where the kernel is short of memory.
    pub fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(error) if was_interrupted(&error) => Ok(()),
            // It did not begin to wait, and whoever asks again at once would keep a processor busy.
            Err(error) if is_short_of_memory(&error) => {
                thread::sleep(PAUSE);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the next completed command: its token, and its bytes or its error.
    pub fn complete(&mut self) -> Option<(u16, io::Result<u32>)> {
        let entry = self.ring.completion().next()?;
        let token = u16::try_from(entry.user_data()).ok()?;
        if self.in_flight.get_mut(usize::from(token))?.take().is_some() {
            self.flying -= 1;
        }
        let result = u32::try_from(entry.result())
            .map_err(|_| io::Error::from_raw_os_error(entry.result().saturating_neg()));
        Some((token, result))
    }
}

fn was_interrupted(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINTR)
}

/// Whether the kernel had no memory for commands, which passes (io_uring_enter(2), EAGAIN and EBUSY).
fn is_short_of_memory(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
}

fn writev(vectors: &[libc::iovec], offset: u64) -> io::Result<squeue::Entry> {
    let entry = opcode::Writev::new(Fixed(0), vectors.as_ptr(), count(vectors)?);
    Ok(entry.offset(offset).build())
}

/// Names bytes that are only read from.
fn vector_of(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

fn count(vectors: &[libc::iovec]) -> io::Result<u32> {
    u32::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

impl Drop for DiskRing {
    fn drop(&mut self) {
        while self.flying > 0 {
            if self.wait().is_err() {
                // The kernel may still use the vectors and the guest's memory: keep both.
                std::mem::forget(std::mem::take(&mut self.in_flight));
                std::mem::forget(self.ram.clone());
                return;
            }
            while self.complete().is_some() {}
        }
    }
}

/// Carries out one command at once, for hosts without io_uring. Returns the bytes moved.
pub fn disk_command(
    file: BorrowedFd<'_>,
    ram: &GuestRam,
    command: DiskCommand<'_>,
) -> io::Result<u32> {
    let fd = file.as_raw_fd();
    let result = match command {
        DiskCommand::Read { offset, into } => {
            let held = vectors(ram, into)?;
            // SAFETY: The vectors name mapped guest memory, which `ram` keeps for the whole call.
            unsafe { libc::preadv(fd, held.as_ptr(), vector_count(&held)?, file_offset(offset)?) }
        }
        DiskCommand::Write { offset, from } => {
            let held = vectors(ram, from)?;
            // SAFETY: As for the read above.
            unsafe { libc::pwritev(fd, held.as_ptr(), vector_count(&held)?, file_offset(offset)?) }
        }
        DiskCommand::Sync => {
            rustix::fs::fdatasync(file)?;
            0
        }
        DiskCommand::Punch { offset, length } => return fallocate(file, PUNCH, offset, length),
        DiskCommand::Zero { offset, length } => return fallocate(file, ZERO, offset, length),
    };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Writes bytes that are not the guest's at once. Returns how many were written.
pub fn disk_write(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> io::Result<u32> {
    let vector = vector_of(bytes);
    let offset = file_offset(offset)?;
    // SAFETY: The vector names `bytes`, which outlive the call and are only read.
    let result = unsafe { libc::pwritev(file.as_raw_fd(), &raw const vector, 1, offset) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn fallocate(file: BorrowedFd<'_>, mode: i32, offset: u64, length: u64) -> io::Result<u32> {
    let flags = rustix::fs::FallocateFlags::from_bits_retain(mode.cast_unsigned());
    rustix::fs::fallocate(file, flags, offset, length)?;
    Ok(0)
}

fn vector_count(vectors: &[libc::iovec]) -> io::Result<i32> {
    i32::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn file_offset(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Tells the kernel which frames the guest takes unsegmented or unsummed (TUN_F_*).
pub fn set_tap_offload(tap: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value; the result is checked.
    check(unsafe { ioctl_with_val(&tap, TUNSETOFFLOAD, flags.into()) })
}

/// Sets the size of the virtio-net header that the tap speaks.
pub fn set_tap_header_size(tap: BorrowedFd<'_>, size: i32) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one int, which lives across the call; the result is checked.
    check(unsafe { ioctl_with_ref(&tap, TUNSETVNETHDRSZ, &size) })
}

/// Whether a queue of a tap takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TapQueue {
    /// The kernel puts frames into it.
    Attached,
    /// It does not; what was in it is dropped.
    Detached,
}

/// Attaches or detaches one queue of a tap with IFF_MULTI_QUEUE. Fails with `EINVAL` when it is so already,
/// or has no such flag.
pub fn set_tap_queue(tap: BorrowedFd<'_>, state: TapQueue) -> io::Result<()> {
    // SAFETY: every bit pattern of zeroes is a valid `ifreq`, which holds integers only.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_flags = match state {
        TapQueue::Attached => IFF_ATTACH_QUEUE,
        TapQueue::Detached => IFF_DETACH_QUEUE,
    };
    // SAFETY: TUNSETQUEUE reads the `ifreq`, which lives across the call; the result is checked.
    check(unsafe { ioctl_with_ref(&tap, TUNSETQUEUE, &request) })
}

/// Connects queue `index` of a vhost-net device with a tap, or with nothing.
pub fn set_vhost_net_backend(
    vhost: BorrowedFd<'_>,
    index: u32,
    tap: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let file = vhost_vring_file { index, fd: tap.map_or(-1, |tap| tap.as_raw_fd()) };
    // SAFETY: VHOST_NET_SET_BACKEND reads the structure, which lives across the call; the result
    // is checked.
    check(unsafe { ioctl_with_ref(&vhost, VHOST_NET_SET_BACKEND(), &file) })
}

/// Gives a vhost-vsock device its guest's context id.
pub fn set_vsock_cid(vhost: BorrowedFd<'_>, cid: u64) -> io::Result<()> {
    // SAFETY: VHOST_VSOCK_SET_GUEST_CID reads one u64, which lives across the call; the result
    // is checked.
    check(unsafe { ioctl_with_ref(&vhost, VHOST_VSOCK_SET_GUEST_CID(), &cid) })
}

/// Whether a vhost-vsock device moves data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VsockState {
    /// It does not look at its rings.
    Stopped,
    /// It does.
    Running,
}

/// Starts or stops a vhost-vsock device.
pub fn set_vsock_state(vhost: BorrowedFd<'_>, state: VsockState) -> io::Result<()> {
    let running: libc::c_int = match state {
        VsockState::Stopped => 0,
        VsockState::Running => 1,
    };
    // SAFETY: VHOST_VSOCK_SET_RUNNING reads one int, which lives across the call; the result is
    // checked.
    check(unsafe { ioctl_with_ref(&vhost, VHOST_VSOCK_SET_RUNNING(), &running) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Duplicates an eventfd into the type that the vhost crate takes.
pub fn duplicate_eventfd(event: BorrowedFd<'_>) -> io::Result<EventFd> {
    let owned = event.try_clone_to_owned()?;
    // SAFETY: The descriptor is open and owned by nobody else from here on.
    Ok(unsafe { EventFd::from_raw_fd(owned.into_raw_fd()) })
}

/// Borrows an eventfd for calls that want a borrowed descriptor.
pub fn borrow_eventfd(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: The descriptor is open as long as `event` is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    use vm_memory::GuestMemoryMmap;

    use super::*;

    /// Runs `work` on a thread where io_uring_enter fails with `error`.
    fn where_rings_fail<T: Send>(error: i32, work: impl FnOnce() -> T + Send) -> T {
        let filter = SeccompFilter::new(
            [(libc::SYS_io_uring_enter, Vec::new())].into(),
            SeccompAction::Allow,
            SeccompAction::Errno(error.cast_unsigned()),
            std::env::consts::ARCH.try_into().expect("an architecture with filters"),
        );
        let program: BpfProgram = filter.expect("a filter").try_into().expect("a program");
        let filtered = || {
            seccompiler::apply_filter(&program).expect("a thread takes a filter");
            work()
        };
        thread::scope(|scope| scope.spawn(filtered).join().expect("it ends"))
    }

    /// What is in flight still is: whoever waits for it has to ask again, and must not be told to give up.
    #[test]
    fn a_wait_for_which_the_kernel_has_no_memory_does_not_fail() {
        let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC);
        let file = file.expect("a file");
        let ram: GuestRam =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).expect("memory");
        let Ok(mut ring) = DiskRing::new(file.as_fd(), ram, 4) else {
            println!("skipped: a ring is waited for: this kernel gives no io_uring");
            return;
        };
        ring.queue(0, DiskCommand::Sync).expect("room");
        for error in [libc::EAGAIN, libc::EBUSY, libc::EINTR] {
            assert!(where_rings_fail(error, || ring.wait()).is_ok(), "{error}");
            assert!(ring.complete().is_none(), "nothing was begun");
        }
        let begun = std::time::Instant::now();
        assert!(!where_rings_fail(libc::EAGAIN, || ring.submit()).expect("it passes"));
        assert!(begun.elapsed() >= PAUSE, "who asks again at once keeps a processor busy");
        assert!(where_rings_fail(libc::EINVAL, || ring.wait()).is_err());
        ring.wait().expect("it is waited for");
        let done = ring.complete().map(|(token, result)| (token, result.ok()));
        assert_eq!(done, Some((0, Some(0))));
    }
}
