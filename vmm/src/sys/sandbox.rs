//! System calls that take the host away from the process. What is taken and in which order is
//! decided in `sandbox`.
//! Source: namespaces(7), pivot_root(2), capabilities(7), prctl(2), close_range(2).

use std::{fs, io, os::fd::RawFd, sync::OnceLock};

use rustix::{
    mount::{MountFlags, MountPropagationFlags, UnmountFlags},
    process::{Resource, Rlimit},
};

/// Highest capability number that `capget` version 3 can express.
const CAPABILITIES: u8 = 63;
/// Header version of `capset` (linux/capability.h, `_LINUX_CAPABILITY_VERSION_3`).
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// Namespaces that must not be the parent's: `/proc` name and clone flag. A process namespace
/// holds for children only, so it stays as the parent made it.
const NAMESPACES: [(&str, libc::c_int); 4] = [
    ("mnt", libc::CLONE_NEWNS),
    ("net", libc::CLONE_NEWNET),
    ("ipc", libc::CLONE_NEWIPC),
    ("uts", libc::CLONE_NEWUTS),
];

/// Unshares the namespaces that are still those of the parent. A parent that cannot be seen is
/// behind a process namespace, made by the same hand as the others.
pub(crate) fn leave_namespaces() -> io::Result<()> {
    let mut flags = libc::CLONE_NEWNS;
    for (name, flag) in NAMESPACES {
        let own = fs::read_link(format!("/proc/self/ns/{name}"));
        let parent = match rustix::process::getppid() {
            Some(pid) => fs::read_link(format!("/proc/{}/ns/{name}", pid.as_raw_nonzero())),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        if let (Ok(own), Ok(parent)) = (own, parent)
            && own == parent
        {
            flags |= flag;
        }
    }
    // SAFETY: unshare takes no pointer, and none of these flags splits off memory or descriptors.
    check(unsafe { libc::unshare(flags) })
}

/// Makes an empty, read-only tmpfs the root and detaches what was there.
pub(crate) fn empty_root() -> io::Result<()> {
    // Nothing that happens here may travel back to the parent's mounts.
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let options = Some(c"size=4096,nr_inodes=1,mode=0555");
    // Any directory serves as mount point: the tmpfs becomes the root at once.
    rustix::mount::mount("holdfast", "/proc", "tmpfs", flags, options)?;
    std::env::set_current_dir("/proc")?;
    // With both names ".", the old root lands on top of the new one and is detached from there.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")?;
    rustix::mount::mount_remount("/", flags | MountFlags::RDONLY, c"")?;
    Ok(())
}

/// Closes every descriptor but 0, 1, 2 and `keep`.
pub(crate) fn close_others(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep {
        if fd > first {
            close_range(first, fd - 1)?;
        }
        first = first.max(fd + 1);
    }
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the process has one thread and the caller named every descriptor that is in use.
    check(unsafe { libc::close_range(first, last, 0) })
}

/// Most arenas of the allocator. Threads allocate at their start and with requests of the API, not for
/// what guests do.
const ARENAS: libc::c_int = 1;

/// Whether the allocator took what keeps it from opening files; the first to ask decides.
static ALLOCATOR_IS_QUIET: OnceLock<bool> = OnceLock::new();

/// Keeps the allocator of a process with one thread to the main arena. Others open files, which no
/// filtered thread may: the ninth counts processors, and the first that shrinks reads whether memory is
/// overcommitted. Source: glibc malloc/arena.c, `arena_get2` and `shrink_heap`; mallopt(3), `M_ARENA_MAX`.
pub(crate) fn quiet_allocator() -> io::Result<()> {
    taken(*ALLOCATOR_IS_QUIET.get_or_init(|| set_allocator(libc::M_ARENA_MAX, ARENAS)))
}

/// The same for a process that has threads, as those of tests do, and with them arenas: there come no
/// more, and none shrinks. Does nothing behind [`quiet_allocator`]. Source: mallopt(3),
/// `M_TRIM_THRESHOLD`.
pub(crate) fn quiet_allocator_of_threads() -> io::Result<()> {
    taken(*ALLOCATOR_IS_QUIET.get_or_init(|| {
        set_allocator(libc::M_ARENA_MAX, ARENAS)
            && set_allocator(libc::M_TRIM_THRESHOLD, libc::c_int::MAX)
    }))
}

fn set_allocator(parameter: libc::c_int, value: libc::c_int) -> bool {
    // SAFETY: mallopt takes no pointer, and the allocator's lock for what threads share.
    unsafe { libc::mallopt(parameter, value) == 1 }
}

/// Fuzz targets are linked with AddressSanitizer's allocator, which has no arenas and takes no parameter.
fn taken(taken: bool) -> io::Result<()> {
    if taken || cfg!(fuzzing) { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// Forbids core dumps: they would hold guest memory.
pub(crate) fn limit_resources() -> io::Result<()> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    Ok(rustix::process::setrlimit(Resource::Core, none)?)
}

/// Empties the bounding set, so that no exec can bring a capability back.
pub(crate) fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..=CAPABILITIES {
        // SAFETY: PR_CAPBSET_DROP takes no pointer.
        let ret = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability)) };
        match check(ret) {
            // The kernel knows fewer capabilities than the format has room for.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            result => result?,
        }
    }
    Ok(())
}

/// Becomes user and group `uid`, with no further groups, for all three ids.
pub(crate) fn take_user(uid: u32) -> io::Result<()> {
    // SAFETY: zero groups are read from the null pointer; the process has one thread.
    check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: setresgid takes no pointer.
    check(unsafe { libc::setresgid(uid, uid, uid) })?;
    // SAFETY: setresuid takes no pointer.
    check(unsafe { libc::setresuid(uid, uid, uid) })
}

/// Drops effective, permitted, inheritable and ambient capabilities.
pub(crate) fn drop_capabilities() -> io::Result<()> {
    // SAFETY: PR_CAP_AMBIENT with PR_CAP_AMBIENT_CLEAR_ALL takes no pointer.
    check(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) })?;
    // Layouts of linux/capability.h: the header is version and pid, the data two triples
    // (effective, permitted, inheritable) of 32 bits.
    let header: [u32; 2] = [CAPABILITY_VERSION, 0];
    let nothing: [u32; 6] = [0; 6];
    // SAFETY: both arrays have the size that this version of the header announces.
    let ret = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), nothing.as_ptr()) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// No exec grants anything any more, and nobody of the same user can attach or read the memory.
pub(crate) fn no_new_privileges() -> io::Result<()> {
    // SAFETY: PR_SET_NO_NEW_PRIVS takes no pointer.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: PR_SET_DUMPABLE takes no pointer.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) })
}

/// Has every further system call of this thread pass `program`, which nothing takes back. Who is not
/// root must give up new privileges first; this does.
/// Source: seccomp(2), `SECCOMP_SET_MODE_FILTER`.
pub(crate) fn install_filter(program: &[libc::sock_filter]) -> io::Result<()> {
    // SAFETY: PR_SET_NO_NEW_PRIVS takes no pointer.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    let len = libc::c_ushort::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel copies `len` instructions, which are there, and writes nothing.
    let ret = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn check(ret: libc::c_int) -> io::Result<()> {
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
