//! Core scheduling: which threads may run on one physical core at the same time.
//! Source: Linux Documentation/admin-guide/hw-vuln/core-scheduling.rst, "Usage"; prctl(2).

use std::io;

/// Scope of PR_SCHED_CORE: all threads of the process (`PIDTYPE_TGID`).
const THREAD_GROUP: libc::c_ulong = 1;

/// Gives the process a cookie of its own: only threads that have it share a core with its threads.
pub fn own_cores() -> io::Result<()> {
    // SAFETY: PR_SCHED_CORE_CREATE takes numbers only; process 0 is the caller.
    let ret =
        unsafe { libc::prctl(libc::PR_SCHED_CORE, libc::PR_SCHED_CORE_CREATE, 0, THREAD_GROUP, 0) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
