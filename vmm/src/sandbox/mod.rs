//! The walls around the process: what is left of the system once a guest may speak to us.
//!
//! [`enter`] takes everything away that the whole process shares (file system, privileges,
//! descriptors); [`apply_thread_filter`] then takes away, thread by thread, the system calls that
//! its work does not need. Opening devices and files is somebody else's work: they arrive as
//! descriptors. The calls themselves are in `sys::sandbox`.
//!
//! Order in `main`: read the specification, [`enter`], open and wire everything, start the threads
//! (each calls [`apply_thread_filter`] before it serves), then filter the main thread. A thread that is
//! started by a filtered thread keeps its parent's filter, and adds its own where that is another.

mod filter;
mod syscalls;

use std::{io, os::fd::RawFd};

pub use syscalls::{Arguments, SYSCALLS, Syscall};

use crate::sys::sandbox as sys;

/// What a thread is for; its system calls follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Waits for the others, and carries out the end.
    Main,
    /// Runs one virtual CPU and the device models that its exits reach.
    Vcpu,
    /// Serves the queues of block devices through `io_uring`.
    Block,
    /// Answers the HTTP API, and starts more of its kind behind its filter.
    Api,
    /// Waits for descriptors (timers, eventfds, console input) and acts on them.
    Event,
    /// Attaches and detaches devices: takes them from their descriptors, starts their threads. Its
    /// filter holds for those threads too, so it allows what theirs do.
    Plug,
    /// Asks the kernel to reset passed-through devices, and may hang there.
    Reset,
    /// Acts for the guest's hardware at set times: presses the power button when the deadline is near,
    /// interrupts for the clock.
    Timer,
}

/// Why the walls could not be put up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum SandboxError {
    #[error("user id {uid} is not for machines; expected at least 1000")]
    PrivilegedUser { uid: u32 },
    #[error("cannot {step}")]
    Step { step: &'static str, source: io::Error },
    #[error("cannot restrict file access and network by Landlock")]
    Landlock { source: landlock::RulesetError },
    #[error("cannot install the system call filter of {kind:?} threads")]
    Install { kind: ThreadKind, source: io::Error },
}

/// What [`enter`] could not do because the kernel lacks it. Worth a line in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LandlockCover {
    /// Every right that this build knows of is denied.
    Full,
    /// The kernel knows only some of the rights; those are denied.
    Partial,
    /// The kernel has no Landlock, or it is switched off.
    Missing,
}

/// Smallest user id a machine may have; below are the system's.
const FIRST_MACHINE_UID: u32 = 1000;

/// The step that is the same for process and thread.
const ALLOCATOR: &str = "keep the allocator from opening files";

/// Leaves the host behind, in this order: namespaces that are still shared with the parent, the
/// file system (an empty, read-only root), descriptors other than 0, 1, 2 and `keep`, user and
/// groups, capabilities, privileges gained by exec, core dumps, and file and network access at all
/// (Landlock). Must be called while the process has one thread, with root's privileges.
pub fn enter(uid: u32, keep: &[RawFd]) -> Result<LandlockCover, SandboxError> {
    if uid < FIRST_MACHINE_UID {
        return Err(SandboxError::PrivilegedUser { uid });
    }
    let step = |step| move |source| SandboxError::Step { step, source };
    sys::quiet_allocator().map_err(step(ALLOCATOR))?;
    sys::leave_namespaces().map_err(step("leave the parent's namespaces"))?;
    sys::empty_root().map_err(step("move into an empty root"))?;
    sys::close_others(keep).map_err(step("close inherited descriptors"))?;
    sys::limit_resources().map_err(step("limit core dumps"))?;
    sys::drop_bounding_set().map_err(step("empty the capability bounding set"))?;
    sys::take_user(uid).map_err(step("take on the machine's user"))?;
    sys::drop_capabilities().map_err(step("drop capabilities"))?;
    sys::no_new_privileges().map_err(step("forbid new privileges"))?;
    deny_access()
}

/// Kills the process on any system call of this thread that its kind does not need.
pub fn apply_thread_filter(kind: ThreadKind) -> Result<(), SandboxError> {
    sys::quiet_allocator_of_threads()
        .map_err(|source| SandboxError::Step { step: ALLOCATOR, source })?;
    syscalls::compile(kind).iter().try_for_each(|program| {
        sys::install_filter(program).map_err(|source| SandboxError::Install { kind, source })
    })
}

fn deny_access() -> Result<LandlockCover, SandboxError> {
    use landlock::{ABI, Access, AccessFs, AccessNet, RulesetAttr, RulesetStatus, Scope};
    const NEWEST: ABI = ABI::V9;

    let status = landlock::Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|rules| rules.scope(Scope::from_all(NEWEST)))
        .and_then(landlock::Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(|source| SandboxError::Landlock { source })?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => LandlockCover::Full,
        RulesetStatus::PartiallyEnforced => LandlockCover::Partial,
        RulesetStatus::NotEnforced => LandlockCover::Missing,
    })
}
