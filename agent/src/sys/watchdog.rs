//! ioctls of watchdog devices. Source: Documentation/watchdog/watchdog-api.rst.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `WDIOC_SETTIMEOUT`, `_IOWR('W', 6, int)`.
const SET_TIMEOUT: libc::c_ulong = 0xc004_5706;

/// Sets the time after which the machine is reset unless the device is written to. Returns the
/// time that the device really uses, in seconds.
pub(crate) fn set_timeout(device: BorrowedFd<'_>, seconds: i32) -> io::Result<i32> {
    let mut value = seconds;
    // SAFETY: the ioctl reads and writes one int, which lives across the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), SET_TIMEOUT, &raw mut value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}
