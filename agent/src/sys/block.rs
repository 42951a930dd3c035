//! ioctls of disks and of the file systems on them. Sources: `linux/fs.h`, `linux/ext4.h`.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `BLKRRPART`, `_IO(0x12, 95)`.
const REREAD_PARTITIONS: libc::c_ulong = 0x125f;
/// `EXT4_IOC_RESIZE_FS`, `_IOW('f', 16, __u64)`.
const RESIZE_EXT4: libc::c_ulong = 0x4008_6610;

/// Has the kernel read a disk's partition table again. Fails with `EBUSY` while one of its
/// partitions is in use.
pub(crate) fn reread_partitions(disk: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the ioctl takes no argument.
    let result = unsafe { libc::ioctl(disk.as_raw_fd(), REREAD_PARTITIONS) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Grows the mounted ext4 that `root` is the root folder of to `blocks` of its own blocks; does
/// nothing when it has as many. Fails with `EINVAL` when it has more, and with `ENOTTY` when it is
/// another file system.
pub(crate) fn resize_ext4(root: BorrowedFd<'_>, blocks: u64) -> io::Result<()> {
    // SAFETY: the ioctl reads one u64, which lives across the call.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), RESIZE_EXT4, &raw const blocks) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
