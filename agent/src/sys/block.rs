//! ioctls of disks and of the file systems on them. Sources: `linux/fs.h`, `linux/ext4.h`.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `BLKRRPART`, `_IO(0x12, 95)`.
const REREAD_PARTITIONS: libc::c_ulong = 0x125f;
/// `EXT4_IOC_RESIZE_FS`, `_IOW('f', 16, __u64)`.
const RESIZE_EXT4: libc::c_ulong = 0x4008_6610;

/// `EXT4_IOC_CHECKPOINT`, `_IOW('f', 43, __u32)`.
const CHECKPOINT_EXT4: libc::c_ulong = 0x4004_662b;

/// `BLKPG`, `_IO(0x12, 105)`.
const PARTITION: libc::c_ulong = 0x1269;
/// `BLKPG_RESIZE_PARTITION`.
const RESIZE: libc::c_int = 3;

/// `struct blkpg_partition` of `linux/blkpg.h`; start and length are in bytes.
#[repr(C)]
struct Partition {
    start: i64,
    length: i64,
    number: libc::c_int,
    unused: [u8; 128],
}

/// `struct blkpg_ioctl_arg` of `linux/blkpg.h`.
#[repr(C)]
struct PartitionRequest {
    op: libc::c_int,
    flags: libc::c_int,
    length: libc::c_int,
    data: *mut Partition,
}

/// Tells the kernel that a partition is longer now, also while it is in use. Its start must be what
/// it was.
pub(crate) fn resize_partition(
    disk: BorrowedFd<'_>,
    number: i32,
    (start, bytes): (u64, u64),
) -> io::Result<()> {
    let signed = |value: u64| i64::try_from(value).map_err(io::Error::other);
    let mut partition =
        Partition { start: signed(start)?, length: signed(bytes)?, number, unused: [0; 128] };
    let length = libc::c_int::try_from(size_of::<Partition>()).map_err(io::Error::other)?;
    let request = PartitionRequest { op: RESIZE, flags: 0, length, data: &raw mut partition };
    // SAFETY: the ioctl reads the request and the partition that it points to; both live across the
    // call and are laid out as the kernel's header says.
    let result = unsafe { libc::ioctl(disk.as_raw_fd(), PARTITION, &raw const request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

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

/// Has the mounted ext4 that `root` is the root folder of write what only its journal has to its place. Fails
/// with `ENOTTY` when it is another file system.
pub(crate) fn checkpoint_ext4(root: BorrowedFd<'_>) -> io::Result<()> {
    let flags: u32 = 0;
    // SAFETY: the ioctl reads one u32, which lives across the call.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), CHECKPOINT_EXT4, &raw const flags) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
