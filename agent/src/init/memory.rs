//! Whom the kernel ends when the node has no memory left, and who was ended so.
//! Source: Linux Documentation/filesystems/proc.rst, "/proc/<pid>/oom_score_adj", and
//! Documentation/admin-guide/cgroup-v2.rst, "memory.events".
//!
//! The kernel ends the process with most memory; 1000 points of adjustment are all the memory that
//! there is. init, which is process 1, is never chosen.

use std::{fs, io, path::Path};

use rustix::process::Pid;

/// The agent goes only when it has nine tenths of all memory itself: without it nobody ends leases.
pub const AGENT: i32 = -900;
/// Machines go before the agent, the largest of them first.
pub const MACHINE: i32 = 0;
/// The screen goes before any machine: it is started again and loses nothing.
pub const SCREEN: i32 = 800;

/// Sets what a process that was just started counts.
pub fn set(process: Pid, adjustment: i32) -> io::Result<()> {
    set_below(Path::new("/proc"), process, adjustment)
}

fn set_below(proc: &Path, process: Pid, adjustment: i32) -> io::Result<()> {
    let process = process.as_raw_nonzero().to_string();
    fs::write(proc.join(process).join("oom_score_adj"), adjustment.to_string())
}

/// Whether the kernel ended a process in this cgroup for want of memory, the cgroup's or the node's.
pub fn ran_out(cgroup: &Path) -> bool {
    let events = fs::read_to_string(cgroup.join("memory.events")).unwrap_or_default();
    let killed = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    killed.is_some_and(|count| count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_what_it_is_told() {
        let own = rustix::process::getpid();
        // Anybody may make a process of their own count more.
        set(own, SCREEN).expect("set");
        let told = fs::read_to_string("/proc/self/oom_score_adj").expect("read");
        assert_eq!(told.trim(), SCREEN.to_string());
        let gone = Pid::from_raw(i32::MAX).expect("a number");
        assert!(set(gone, AGENT).is_err());
        const { assert!(AGENT < MACHINE && MACHINE < SCREEN) };
    }

    #[test]
    fn the_kernels_count_tells_who_was_ended() {
        let cgroup = tempfile::tempdir().expect("a directory");
        assert!(!ran_out(cgroup.path()));
        let tell = |text| fs::write(cgroup.path().join("memory.events"), text).expect("written");
        tell("low 0\nhigh 0\nmax 7\noom 1\noom_kill 0\noom_group_kill 0\n");
        assert!(!ran_out(cgroup.path()));
        tell("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n");
        assert!(ran_out(cgroup.path()));
    }
}
