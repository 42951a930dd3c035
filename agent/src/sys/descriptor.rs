//! Descriptors that this process got from its parent.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::FdFlags;

/// Takes descriptor `number`, which the parent left open; `None` when it is not open. Programs that this one
/// executes do not get it.
///
/// Each number may be taken once, before anything else opens descriptors.
pub(crate) fn inherited(number: i32) -> Option<OwnedFd> {
    // SAFETY: only sets the flag; a closed number is answered with an error.
    let number_of = unsafe { BorrowedFd::borrow_raw(number) };
    let open = rustix::io::fcntl_setfd(number_of, FdFlags::CLOEXEC).is_ok();
    // SAFETY: it is open, and by this function's contract nobody else owns it.
    open.then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

/// Registers a descriptor with the runtime. Must be called inside a tokio runtime.
pub(crate) fn watched(descriptor: OwnedFd) -> std::io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open file until it is dropped, which is after it was
    // taken out of the reactor.
    Ok(unsafe { tokio::io::unix::AsyncFd::register(descriptor) }?)
}
