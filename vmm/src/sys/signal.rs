//! The signal that gets a virtual CPU out of the guest, and the one that says that memory is broken.
//! Source: Linux Documentation/virt/kvm/api.rst, KVM_RUN: "EINTR"; Documentation/mm/hwpoison.rst;
//! sigaction(2), `BUS_MCEERR_AR`.

use std::{
    cell::Cell,
    io,
    os::unix::thread::JoinHandleExt,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    thread::JoinHandle,
};

use types::vm::exit;

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

thread_local! {
    /// Whether this thread runs a guest: then nothing of ours touched what is broken.
    static IN_GUEST: Cell<bool> = const { Cell::new(false) };
}

/// Where a guest met broken memory, as an address of this process, [`NOWHERE`] if nobody knows; 0 while none did.
static BROKEN: AtomicU64 = AtomicU64::new(0);
/// No memory of a guest is there.
const NOWHERE: u64 = 1;

/// What is said when a thread of ours met it, which cannot go on: its access has no result.
const ENDED: &[u8] =
    b"holdfast-vmm: the host's memory is broken, or a file behind it became shorter (SIGBUS)\n";

/// Catches that memory is broken. Without this the process would end without a word.
pub fn catch_broken_memory() -> io::Result<()> {
    // SAFETY: all-zero is a valid `sigaction`; the handler has the arguments that `SA_SIGINFO` gives it.
    let ret = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = broken;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
    };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

extern "C" fn broken(_signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if IN_GUEST.get() {
        // SAFETY: the kernel gives the handler what it says of this signal, which has an address.
        let address = unsafe { (*info).si_addr() };
        // 0 where the processor told none (Linux arch/x86/kernel/cpu/mce/core.c, `kill_me_now`).
        let told = u64::try_from(address.addr()).unwrap_or(u64::MAX);
        BROKEN.store(told.max(NOWHERE), Ordering::Release);
        return;
    }
    // SAFETY: both calls may be made in a handler, and the bytes live for ever.
    unsafe {
        libc::write(libc::STDERR_FILENO, ENDED.as_ptr().cast(), ENDED.len());
        libc::_exit(exit::HOST_FAULT);
    }
}

/// Has the calling thread run a guest by `run`, whose memory may be broken.
pub fn in_guest<T>(run: impl FnOnce() -> T) -> T {
    IN_GUEST.set(true);
    let result = run();
    IN_GUEST.set(false);
    result
}

/// Returns where a guest met broken memory, as an address of this process, or one that none of its memory has.
pub fn broken_memory() -> Option<u64> {
    Some(BROKEN.load(Ordering::Acquire)).filter(|address| *address != 0)
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
