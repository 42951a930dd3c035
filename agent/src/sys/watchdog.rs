//! ioctls of watchdog devices. Source: Documentation/watchdog/watchdog-api.rst.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// `WDIOC_GETSUPPORT`, `_IOR('W', 0, struct watchdog_info)`.
const GET_SUPPORT: libc::c_ulong = 0x8028_5700;
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

/// `struct watchdog_info` of `linux/watchdog.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct Info {
    options: u32,
    firmware_version: u32,
    identity: [u8; 32],
}

const _: () = assert!(size_of::<Info>() == 0x28, "what the ioctl's number says");

/// Returns what the device calls itself.
pub(crate) fn identity(device: BorrowedFd<'_>) -> io::Result<String> {
    let mut info = Info::default();
    // SAFETY: the ioctl writes one `Info`, which lives across the call and is valid with any bytes.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), GET_SUPPORT, &raw mut info) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let end = info.identity.iter().position(|byte| *byte == 0).unwrap_or(info.identity.len());
    Ok(String::from_utf8_lossy(&info.identity[..end]).trim().to_owned())
}
