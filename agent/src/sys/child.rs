//! Starting a process by `clone3`, with namespaces, limits, a cgroup and exact descriptors.
//! Source: clone(2), "The clone3() system call".

use std::{
    ffi::{CString, c_char},
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use rustix::process::Pid;

/// Exit status of a child that could not execute its program.
pub(crate) const EXEC_FAILED: i32 = 127;

/// Descriptors are moved to numbers from here on before the child puts them where they belong, so
/// that no target number is still in use by another source.
const PARKING: i32 = 1024;

/// What to start.
#[derive(Debug)]
pub(crate) struct Child<'a> {
    /// Program.
    pub(crate) program: CString,
    /// Arguments, the program's name first.
    pub(crate) arguments: Vec<CString>,
    /// Descriptors 0, 1, 2, … of the child; no other stays open.
    pub(crate) files: Vec<OwnedFd>,
    /// `CLONE_NEW…` flags.
    pub(crate) namespaces: u64,
    /// Resource limits, soft and hard alike.
    pub(crate) limits: Vec<(u32, u64)>,
    /// Directory of the cgroup it starts in.
    pub(crate) cgroup: Option<&'a OwnedFd>,
    /// User and group that it runs as, and which it can never leave; this process's when `None`.
    pub(crate) user: Option<u32>,
}

/// Starts `child`. Returns its process id and a pidfd for it.
///
/// The calling process must have a single thread: the child of `clone3` runs its own code until
/// it executes the program.
pub(crate) fn start(child: Child<'_>) -> io::Result<(Pid, OwnedFd)> {
    let parked = child
        .files
        .iter()
        .map(|file| rustix::io::fcntl_dupfd_cloexec(file, PARKING))
        .collect::<Result<Vec<_>, _>>()?;
    let numbers: Vec<i32> = parked.iter().map(AsRawFd::as_raw_fd).collect();
    let mut arguments: Vec<*const c_char> =
        child.arguments.iter().map(|argument| argument.as_ptr()).collect();
    arguments.push(std::ptr::null());
    let environment: [*const c_char; 1] = [std::ptr::null()];

    let mut pidfd: i32 = -1;
    let mut flags = child.namespaces | libc::CLONE_PIDFD as u64;
    let mut cgroup = 0;
    if let Some(directory) = child.cgroup {
        flags |= CLONE_INTO_CGROUP;
        cgroup = u64::from(directory.as_raw_fd().unsigned_abs());
    }
    let mut request = CloneArgs {
        flags,
        pidfd: &raw mut pidfd as u64,
        exit_signal: libc::SIGCHLD as u64,
        cgroup,
        ..CloneArgs::default()
    };
    // SAFETY: the request lives across the call and has the size that is passed; `pidfd` is
    // writable. Without CLONE_VM the child gets a copy of this address space, and without a stack
    // it goes on here. It calls nothing but system calls until it executes or exits.
    let pid = unsafe {
        libc::syscall(libc::SYS_clone3, &raw mut request, std::mem::size_of::<CloneArgs>())
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if pid == 0 {
        // SAFETY: this is the child; every pointer was made before the clone and is still mapped.
        unsafe { become_program(&child, &numbers, &arguments, &environment) }
    }
    // SAFETY: the kernel stored a descriptor of this process there and nobody else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    Ok((pid.expect("clone3 returns a positive process id"), pidfd))
}

/// `CLONE_INTO_CGROUP` of `linux/sched.h`.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `struct clone_args` of `linux/sched.h`, version 2.
#[derive(Debug, Default)]
#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// # Safety
///
/// Only in the child of a clone, with `arguments` and `environment` ending in null.
unsafe fn become_program(
    child: &Child<'_>,
    numbers: &[i32],
    arguments: &[*const c_char],
    environment: &[*const c_char],
) -> ! {
    // SAFETY: system calls only; pointers are valid as the function demands.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::setsid();
        let mut target = 0;
        for number in numbers {
            if libc::dup2(*number, target) < 0 {
                libc::_exit(EXEC_FAILED);
            }
            target += 1;
        }
        libc::syscall(libc::SYS_close_range, target, u32::MAX, 0);
        for (resource, value) in &child.limits {
            let limit = libc::rlimit { rlim_cur: *value, rlim_max: *value };
            libc::setrlimit(*resource, &raw const limit);
        }
        if let Some(user) = child.user {
            // No other group, no privilege, and none to be had by executing something.
            let done = libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(user, user, user) == 0
                && libc::setresuid(user, user, user) == 0
                && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0;
            if !done {
                libc::_exit(EXEC_FAILED);
            }
        }
        libc::execve(child.program.as_ptr(), arguments.as_ptr(), environment.as_ptr());
        libc::_exit(EXEC_FAILED)
    }
}
