//! Where the kernel's messages go on the Linux console.
//! Source: ioctl_console(2), `TIOCLINUX` with subcode 11 (`TIOCL_SETKMSGREDIRECT`).

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Subcode of `TIOCLINUX` in `linux/tiocl.h`.
const SET_KMSG_REDIRECT: u8 = 11;

/// Sends the kernel's messages to virtual console `number` from now on. It must have been opened.
pub(crate) fn redirect_messages(console: BorrowedFd<'_>, number: u8) -> io::Result<()> {
    let request: [u8; 2] = [SET_KMSG_REDIRECT, number];
    // SAFETY: the kernel reads these two bytes, which outlive the call, and writes none of them; the
    // descriptor is open.
    let result = unsafe { libc::ioctl(console.as_raw_fd(), libc::TIOCLINUX, request.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
