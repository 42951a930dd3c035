//! The signal that gets a virtual CPU out of the guest.
//! Source: Linux Documentation/virt/kvm/api.rst, KVM_RUN: "EINTR".

use std::{io, os::unix::thread::JoinHandleExt, thread::JoinHandle};

/// Returns the signal: the first that nobody else uses.
fn number() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// Installs a handler that does nothing: the interrupted call is what matters.
pub fn catch_kicks() -> io::Result<()> {
    // SAFETY: all-zero is a valid `sigaction`; the handler touches nothing.
    let ret = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(number(), &raw const action, std::ptr::null_mut())
    };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Interrupts a thread's system call.
pub fn kick<T>(thread: &JoinHandle<T>) {
    // SAFETY: the handle keeps the thread's identifier valid until it is joined.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), number()) };
}

/// A thread of this process, for as long as the process lives: a number that is no longer a
/// thread's is not interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thread(libc::pid_t);

impl Thread {
    /// Returns the calling thread.
    pub fn current() -> Self {
        Self(rustix::thread::gettid().as_raw_pid())
    }

    /// Interrupts the thread's system call.
    pub fn kick(self) {
        // SAFETY: tgkill takes numbers only; the signal has a handler that does nothing.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, number()) };
    }
}
