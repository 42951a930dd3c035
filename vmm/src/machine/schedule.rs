//! Where the machine's threads run: virtual CPUs on chosen host CPUs, and nobody else's thread on a
//! core beside them. All of it happens before threads filter themselves.
//! Source: sched_setaffinity(2); Linux Documentation/admin-guide/hw-vuln/core-scheduling.rst.

use std::io;

use rustix::thread::{CpuSet, sched_setaffinity};
use types::vm::CoreScheduling;

use super::RunError;
use crate::sys::schedule;

/// Most host CPUs that a set can name.
pub const MAX_HOST_CPUS: u32 = 1024;

const _: () = assert!(MAX_HOST_CPUS as usize == CpuSet::MAX_CPU);

/// Keeps the calling thread on `cpus`; none means anywhere.
pub(super) fn pin(cpus: &[u32]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    let known = cpus.iter().filter(|cpu| **cpu < MAX_HOST_CPUS);
    known.filter_map(|cpu| usize::try_from(*cpu).ok()).for_each(|cpu| set.set(cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// Takes the process, and what it starts from now on, out of what may share a core with others.
pub fn isolate(wanted: CoreScheduling) -> Result<(), RunError> {
    match wanted {
        CoreScheduling::Shared => Ok(()),
        CoreScheduling::Own => match schedule::own_cores() {
            // A host whose cores have one thread each: there is nothing to share.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result.map_err(|source| RunError::Cores { source }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_put() {
        let before = rustix::thread::sched_getaffinity(None).expect("a set");
        let first = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).expect("a CPU");
        let pinned = std::thread::spawn(move || {
            pin(&[u32::try_from(first).expect("small")]).expect("a CPU of ours");
            rustix::thread::sched_getaffinity(None).expect("a set")
        });
        let after = pinned.join().expect("it only asks");
        assert_eq!((after.count(), after.is_set(first)), (1, true));
        pin(&[]).expect("anywhere");
        assert_eq!(rustix::thread::sched_getaffinity(None).expect("a set"), before);
    }

    #[test]
    fn cpus_that_the_host_does_not_have_are_refused() {
        assert!(pin(&[MAX_HOST_CPUS - 1]).is_err());
    }
}
