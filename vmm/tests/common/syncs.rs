//! A host on which nothing becomes durable: what must not be said to be done shows there.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use std::thread;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Runs `work` on a thread where fdatasync fails with `error`, and on those that it starts. Syncs by io_uring do not.
pub fn where_syncs_fail<T: Send>(error: i32, work: impl FnOnce() -> T + Send) -> T {
    let filter = SeccompFilter::new(
        [(libc::SYS_fdatasync, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(error.cast_unsigned()),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    let filtered = || {
        seccompiler::apply_filter(&program).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}
