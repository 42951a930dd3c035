//! What each kind of thread may not do: every call here kills the process, whatever its arguments
//! point to. Each attempt is a process of its own: this program, started again with the names of
//! kind and call. The filter is the only wall here, so that nothing else can refuse first.

use std::{
    env, io,
    os::unix::process::ExitStatusExt,
    process::{Command, ExitCode, ExitStatus},
};

use vmm::sandbox::{self, ThreadKind};

/// Exit status of an attempt that came back.
const CAME_BACK: u8 = 1;
/// Exit status of an attempt that could not be made.
const BROKEN: u8 = 2;

const KINDS: &[(&str, ThreadKind)] = &[
    ("main", ThreadKind::Main),
    ("vcpu", ThreadKind::Vcpu),
    ("block", ThreadKind::Block),
    ("api", ThreadKind::Api),
    ("event", ThreadKind::Event),
    ("reset", ThreadKind::Reset),
    ("plug", ThreadKind::Plug),
    ("timer", ThreadKind::Timer),
];

/// Exit status of an attempt that the kernel answered as if it did not know the call.
const UNKNOWN: u8 = 3;

/// What every thread does, by the allocator and not by number.
const ALLOCATE: &str = "allocate";

/// What a thread of the API does to a connection whose request it refuses.
const HALF_CLOSE: &str = "shutdown SHUT_WR";

/// Kinds that start threads: told that there is no `clone3`, they take `clone`, whose flags are looked at.
const STARTERS: &[&str] = &["api", "plug"];

/// What the thread that attaches devices does, and no other: it makes their rings.
const PLUG: &[&str] = &["io_uring_setup", "io_uring_register", "prlimit64"];

/// A call by number, with its first three arguments. No pointer in them leads anywhere.
struct Call {
    name: &'static str,
    number: libc::c_long,
    arguments: [libc::c_long; 3],
}

const fn call(
    name: &'static str,
    number: libc::c_long,
    first: libc::c_long,
    second: libc::c_long,
    third: libc::c_long,
) -> Call {
    Call { name, number, arguments: [first, second, third] }
}

const EXECUTABLE: libc::c_long = (libc::PROT_READ | libc::PROT_EXEC) as libc::c_long;

/// Flags of a new thread, as the filters know them.
const THREAD: libc::c_long = 0x3d_0f00;

/// What no thread of a running machine does.
const NEVER: &[Call] = &[
    call("open", libc::SYS_open, 0, 0, 0),
    call("openat", libc::SYS_openat, -100, 0, 0),
    call("openat2", libc::SYS_openat2, -100, 0, 0),
    call("memfd_create", libc::SYS_memfd_create, 0, 0, 0),
    call("socket", libc::SYS_socket, 1, 1, 0),
    call("socketpair", libc::SYS_socketpair, 1, 1, 0),
    call("connect", libc::SYS_connect, 0, 0, 0),
    call("bind", libc::SYS_bind, 0, 0, 0),
    call("sendmsg", libc::SYS_sendmsg, 0, 0, 0),
    call("shutdown SHUT_RD", libc::SYS_shutdown, 0, 0, 0),
    call("shutdown SHUT_RDWR", libc::SYS_shutdown, 0, 2, 0),
    call("execve", libc::SYS_execve, 0, 0, 0),
    call("execveat", libc::SYS_execveat, -100, 0, 0),
    call("fork", libc::SYS_fork, 0, 0, 0),
    call("vfork", libc::SYS_vfork, 0, 0, 0),
    call("clone", libc::SYS_clone, 0, 0, 0),
    call(
        "clone with a user namespace",
        libc::SYS_clone,
        THREAD | libc::CLONE_NEWUSER as libc::c_long,
        0,
        0,
    ),
    call("clone without what makes a thread", libc::SYS_clone, libc::SIGCHLD as libc::c_long, 0, 0),
    call("kill", libc::SYS_kill, 0, 0, 0),
    call("tgkill of another process", libc::SYS_tgkill, 1, 1, 0),
    call("ptrace", libc::SYS_ptrace, 0, 0, 0),
    call("process_vm_readv", libc::SYS_process_vm_readv, 1, 0, 0),
    call("pidfd_open", libc::SYS_pidfd_open, 1, 0, 0),
    call("pidfd_getfd", libc::SYS_pidfd_getfd, 0, 0, 0),
    call("mount", libc::SYS_mount, 0, 0, 0),
    call("umount2", libc::SYS_umount2, 0, 0, 0),
    call("pivot_root", libc::SYS_pivot_root, 0, 0, 0),
    call("chroot", libc::SYS_chroot, 0, 0, 0),
    call("unshare", libc::SYS_unshare, 0, 0, 0),
    call("setns", libc::SYS_setns, 0, 0, 0),
    call("bpf", libc::SYS_bpf, 0, 0, 0),
    call("seccomp", libc::SYS_seccomp, 0, 0, 0),
    call("perf_event_open", libc::SYS_perf_event_open, 0, 0, 0),
    call("userfaultfd", libc::SYS_userfaultfd, 0, 0, 0),
    call("io_uring_setup", libc::SYS_io_uring_setup, 1, 0, 0),
    call("io_uring_register", libc::SYS_io_uring_register, 0, 0, 0),
    call("keyctl", libc::SYS_keyctl, 0, 0, 0),
    call("setuid", libc::SYS_setuid, 0, 0, 0),
    call("capset", libc::SYS_capset, 0, 0, 0),
    call("prctl PR_SET_DUMPABLE", libc::SYS_prctl, 4, 1, 0),
    call("prlimit64", libc::SYS_prlimit64, 0, 0, 0),
    call("sched_setaffinity", libc::SYS_sched_setaffinity, 0, 0, 0),
    call("reboot", libc::SYS_reboot, 0, 0, 0),
    call("init_module", libc::SYS_init_module, 0, 0, 0),
    call("kexec_load", libc::SYS_kexec_load, 0, 0, 0),
    call("ioperm", libc::SYS_ioperm, 0, 0, 0),
    call("modify_ldt", libc::SYS_modify_ldt, 0, 0, 0),
    call("mmap that is executable", libc::SYS_mmap, 0, 4096, EXECUTABLE),
    call("mprotect to executable", libc::SYS_mprotect, 0, 4096, EXECUTABLE),
    call("ioctl TIOCSTI", libc::SYS_ioctl, 0, 0x5412, 0),
    call("ioctl KVM_CREATE_VM", libc::SYS_ioctl, 0, 0xae01, 0),
    call("ioctl KVM_CREATE_VCPU", libc::SYS_ioctl, 0, 0xae41, 0),
    call("ioctl KVM_SET_SREGS", libc::SYS_ioctl, 0, 0x4138_ae84, 0),
    call("ioctl TUNSETIFF", libc::SYS_ioctl, 0, 0x4004_54ca, 0),
    call("ioctl TUNSETVNETHDRSZ", libc::SYS_ioctl, 0, 0x4004_54d8, 0),
    call("ioctl VHOST_SET_MEM_TABLE", libc::SYS_ioctl, 0, 0x4008_af03, 0),
    call("ioctl VHOST_SET_LOG_BASE", libc::SYS_ioctl, 0, 0x4008_af04, 0),
    call("fcntl F_SETOWN", libc::SYS_fcntl, 0, 8, 0),
];

/// What some kinds do and others never.
const ELSEWHERE: &[(Call, &[&str])] = &[
    (
        call("ioctl KVM_RUN", libc::SYS_ioctl, 0, 0xae80, 0),
        &["main", "block", "api", "event", "timer"],
    ),
    (
        call("accept4", libc::SYS_accept4, 0, 0, 0),
        &["main", "vcpu", "block", "event", "reset", "timer"],
    ),
    (
        call("sendto", libc::SYS_sendto, 0, 0, 0),
        &["main", "vcpu", "block", "event", "reset", "timer"],
    ),
    (
        call("recvfrom", libc::SYS_recvfrom, 0, 0, 0),
        &["main", "vcpu", "block", "event", "reset", "timer"],
    ),
    (
        call("setsockopt", libc::SYS_setsockopt, 0, 0, 0),
        &["main", "vcpu", "block", "event", "timer"],
    ),
    (
        call(HALF_CLOSE, libc::SYS_shutdown, 0, 1, 0),
        &["main", "vcpu", "block", "event", "reset", "plug", "timer"],
    ),
    (call("io_uring_enter", libc::SYS_io_uring_enter, 0, 0, 0), &["main", "api", "event", "timer"]),
    (call("fdatasync", libc::SYS_fdatasync, 0, 0, 0), &["main", "api", "event", "reset", "timer"]),
    (call("fallocate", libc::SYS_fallocate, 0, 0, 0), &["main", "api", "event", "reset", "timer"]),
    (call("pwrite64", libc::SYS_pwrite64, 0, 0, 0), &["block", "api", "event", "timer"]),
    (call("preadv", libc::SYS_preadv, 0, 0, 0), &["main", "vcpu", "api", "event", "timer"]),
    (call("eventfd2", libc::SYS_eventfd2, 0, 0, 0), &["block", "api", "event", "reset", "timer"]),
    (call("ioctl KVM_SIGNAL_MSI", libc::SYS_ioctl, 0, 0x4020_aea5, 0), &["reset"]),
    (
        call("ioctl KVM_IRQFD", libc::SYS_ioctl, 0, 0x4020_ae76, 0),
        &["block", "api", "event", "timer"],
    ),
    (
        call("ioctl VFIO_DEVICE_RESET", libc::SYS_ioctl, 0, 0x3b6f, 0),
        &["vcpu", "block", "api", "timer"],
    ),
    (
        call("ioctl VHOST_SET_VRING_ADDR", libc::SYS_ioctl, 0, 0x4028_af11, 0),
        &["main", "vcpu", "block", "api", "timer"],
    ),
    (
        call("ioctl TUNSETQUEUE", libc::SYS_ioctl, 0, 0x4004_54d9, 0),
        &["main", "vcpu", "block", "api", "reset", "timer"],
    ),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [flag, kind, name] = arguments.as_slice()
        && flag == "--attempt"
    {
        return attempt(kind, name);
    }
    let mut failures = 0;
    for (kind, _) in KINDS {
        let does = |call: &&Call| *kind == "plug" && PLUG.contains(&call.name);
        for call in NEVER.iter().filter(|call| !does(call)) {
            failures += check(kind, call.name);
        }
    }
    for (call, kinds) in ELSEWHERE {
        for kind in *kinds {
            failures += check(kind, call.name);
        }
    }
    for (kind, _) in KINDS {
        failures += match STARTERS.contains(kind) {
            true => expect(kind, "clone3", UNKNOWN),
            false => check(kind, "clone3"),
        };
    }
    // The other way round: what is allowed comes back, or all of the above would mean nothing.
    for (kind, _) in KINDS {
        failures += expect(kind, "getpid", CAME_BACK);
    }
    failures += expect("api", HALF_CLOSE, CAME_BACK);
    // A process that did not enter the sandbox has arenas of the allocator for its threads.
    for (kind, _) in KINDS {
        failures += expect(kind, ALLOCATE, CAME_BACK);
    }
    println!("{} kinds, {} calls and more, {failures} failures", KINDS.len(), NEVER.len());
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn check(kind: &str, name: &str) -> u32 {
    let status = run(kind, name);
    if status.signal() == Some(libc::SIGSYS) {
        return 0;
    }
    println!("{kind}: {name} ended with {status}");
    1
}

fn expect(kind: &str, name: &str, code: u8) -> u32 {
    let status = run(kind, name);
    if status.code() == Some(code.into()) {
        return 0;
    }
    println!("{kind}: {name} ended with {status}");
    1
}

fn run(kind: &str, name: &str) -> ExitStatus {
    let program = env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.args(["--attempt", kind, name]).status().expect("this program can be started again")
}

fn attempt(kind: &str, name: &str) -> ExitCode {
    if name == ALLOCATE {
        return allocate(kind);
    }
    let all = NEVER.iter().chain(ELSEWHERE.iter().map(|(call, _)| call));
    let others =
        [call("getpid", libc::SYS_getpid, 0, 0, 0), call("clone3", libc::SYS_clone3, 0, 0, 0)];
    let call = all.chain(&others).find(|call| call.name == name);
    let kind = KINDS.iter().find(|(known, _)| *known == kind);
    let (Some(call), Some((_, kind))) = (call, kind) else { return ExitCode::from(BROKEN) };
    if rustix::thread::set_no_new_privs(true).is_err()
        || sandbox::apply_thread_filter(*kind).is_err()
    {
        return ExitCode::from(BROKEN);
    }
    let unknown = make(call).is_err_and(|error| error.raw_os_error() == Some(libc::ENOSYS));
    ExitCode::from(if unknown { UNKNOWN } else { CAME_BACK })
}

/// Threads that all run at once, take memory behind their filters and give it back: as many as need a
/// ninth arena, and as much as makes an arena shrink.
fn allocate(kind: &str) -> ExitCode {
    const THREADS: usize = 16;
    const PIECES: usize = 64;
    const PIECE: usize = 64 << 10;
    let Some((_, kind)) = KINDS.iter().find(|(known, _)| *known == kind) else {
        return ExitCode::from(BROKEN);
    };
    if rustix::thread::set_no_new_privs(true).is_err() {
        return ExitCode::from(BROKEN);
    }
    let start = std::sync::Barrier::new(THREADS);
    let filtered = std::thread::scope(|scope| {
        let all: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    let filtered = sandbox::apply_thread_filter(*kind).is_ok();
                    let pieces: Vec<_> = (0..PIECES).map(|_| vec![1u8; PIECE]).collect();
                    start.wait();
                    drop(std::hint::black_box(pieces));
                    start.wait();
                    filtered
                })
            })
            .collect();
        all.into_iter().all(|thread| thread.join().is_ok_and(|filtered| filtered))
    });
    ExitCode::from(if filtered { CAME_BACK } else { BROKEN })
}

#[allow(unsafe_code, reason = "calls by number are what is tried")]
fn make(call: &Call) -> io::Result<()> {
    let [first, second, third] = call.arguments;
    // SAFETY: the filter kills the process first; were it not to, the kernel refuses null pointers
    // and calls on standard input that it is not made for.
    let ret = unsafe { libc::syscall(call.number, first, second, third, 0, 0, 0) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
