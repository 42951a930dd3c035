//! TAP devices. Source: Linux `Documentation/networking/tuntap.rst`, `include/uapi/linux/if_tun.h`.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
};

/// Length of `struct virtio_net_hdr_mrg_rxbuf`, which virtio 1.0 puts before every frame.
const VIRTIO_NET_HEADER: libc::c_int = 12;

/// Attaches to the tap `name`, making it when there is none, and makes it stay when it is closed.
///
/// The descriptor has one queue, no packet information and virtio-net headers of twelve bytes.
/// Fails with `EBUSY` when another process is attached.
pub(crate) fn open(name: &str) -> io::Result<OwnedFd> {
    attach(name, flags::<ONE_QUEUE>())
}

/// The same for a tap with several queues, attached all: returns the first and the `more` others.
///
/// The kernel lets others attach further queues, so whoever calls this must know that nobody did. Fails
/// with `EINVAL` when the tap was made with one queue.
pub(crate) fn open_queues(name: &str, more: u32) -> io::Result<(OwnedFd, Vec<OwnedFd>)> {
    let first = attach(name, flags::<MANY_QUEUES>())?;
    let others = (0..more).map(|_| attach(name, flags::<MANY_QUEUES>()));
    Ok((first, others.collect::<io::Result<_>>()?))
}

fn attach(name: &str, flags: libc::c_short) -> io::Result<OwnedFd> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    let mut request = request(name)?;
    // SAFETY: TUNSETIFF reads and writes the `ifreq` that the pointer names, which outlives the
    // call and whose flags member is the one that the kernel reads.
    let ret = unsafe {
        request.ifr_ifru.ifru_flags = flags;
        libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as libc::Ioctl, &raw mut request)
    };
    check(ret)?;
    set_header_size(&file)?;
    // SAFETY: TUNSETPERSIST takes an integer, and the borrowed fd stays open for the call.
    let ret = unsafe {
        libc::ioctl(file.as_raw_fd(), libc::TUNSETPERSIST as libc::Ioctl, 1 as libc::c_int)
    };
    check(ret)?;
    Ok(file.into())
}

fn set_header_size(file: &File) -> io::Result<()> {
    let size = VIRTIO_NET_HEADER;
    // SAFETY: TUNSETVNETHDRSZ reads the integer that the pointer names, which outlives the call.
    let ret = unsafe {
        libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ as libc::Ioctl, &raw const size)
    };
    check(ret)
}

/// Says that who reads frames completes their checksums, as a VMM does whose guest's driver takes such frames.
#[cfg(test)]
pub(crate) fn take_unfinished_checksums(tap: &OwnedFd) -> io::Result<()> {
    let offloads = libc::c_ulong::from(libc::TUN_F_CSUM);
    // SAFETY: TUNSETOFFLOAD takes an integer, and the borrowed fd stays open for the call.
    let ret = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD as libc::Ioctl, offloads) };
    check(ret)
}

/// No packet information, virtio-net headers.
const ONE_QUEUE: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
/// The same, with as many queues as there are descriptors.
const MANY_QUEUES: libc::c_int = ONE_QUEUE | libc::IFF_MULTI_QUEUE;

/// Cannot be cut: the flags are at most 0x5102.
fn flags<const FLAGS: libc::c_int>() -> libc::c_short {
    const { assert!(FLAGS <= libc::c_short::MAX as libc::c_int) };
    #[allow(clippy::cast_possible_truncation, reason = "asserted in the line above")]
    let flags = FLAGS as libc::c_short;
    flags
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: every bit pattern of zeroes is a valid `ifreq`, which holds integers only.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() || name.contains('\0') {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = libc::c_char::from_ne_bytes([byte]);
    }
    Ok(request)
}

fn check(ret: libc::c_int) -> io::Result<()> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
