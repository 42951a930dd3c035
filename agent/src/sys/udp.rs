//! Datagrams without a checksum. Source: `socket(7)`, Linux `include/uapi/asm-generic/socket.h`, RFC 768.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd},
};

/// Has a UDP socket send IPv4 datagrams with checksum 0, which says that there is none.
///
/// IPv6 needs a checksum (RFC 8200 §8.1), and such a socket's stays as it is.
pub(crate) fn send_no_checksum(socket: impl AsFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    #[allow(clippy::cast_possible_truncation, reason = "the size of an integer is small")]
    let length = mem::size_of_val(&on) as libc::socklen_t;
    // SAFETY: the kernel reads the integer that the pointer names, whose size is given, during the call.
    let ret = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NO_CHECK,
            (&raw const on).cast(),
            length,
        )
    };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
