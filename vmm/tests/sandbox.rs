//! Shows that nothing is left to a process behind the sandbox: what each wall refuses on its own,
//! and that the filter kills whoever tries anyway. Each attempt is a process of its own: this
//! program, started again with the attempt's name. Needs root, as `init` has.

use std::{
    env, fs, io,
    net::TcpStream,
    os::{
        fd::AsRawFd,
        unix::{
            net::UnixStream,
            process::{CommandExt, ExitStatusExt},
        },
    },
    process::{Command, ExitCode},
};

use vmm::sandbox::{self, ThreadKind};

/// User of the machine in this test.
const UID: u32 = 64_000;
/// Exit statuses of an attempt.
const REFUSED: u8 = 0;
const ALLOWED: u8 = 1;
const BROKEN: u8 = 2;

/// Tries; an error is what a wall answers.
type Act = fn() -> io::Result<()>;

/// What a machine's process might try.
const ATTEMPTS: &[(&str, Act)] = &[
    ("open a file of the host", || fs::File::open("/etc/passwd").map(drop)),
    ("open a file of /proc", || fs::File::open("/proc/self/maps").map(drop)),
    ("open a device", || fs::File::open("/dev/kvm").map(drop)),
    ("make a file", || fs::File::create("/file").map(drop)),
    ("make a directory", || fs::create_dir("/directory")),
    ("climb out of the root", || fs::File::open("/../../etc/passwd").map(drop)),
    ("connect to the host", || TcpStream::connect(("127.0.0.1", 22)).map(drop)),
    ("connect to the network", || TcpStream::connect(("192.0.2.1", 80)).map(drop)),
    ("connect to a service by path", || UnixStream::connect("/run/dbus/socket").map(drop)),
    ("run a program", || Err(Command::new("/proc/self/exe").exec())),
    ("become root", || Ok(rustix::thread::set_thread_uid(rustix::process::Uid::ROOT)?)),
    ("kill its parent", || {
        let parent = rustix::process::getppid().ok_or(io::ErrorKind::NotFound)?;
        Ok(rustix::process::kill_process(parent, rustix::process::Signal::CONT)?)
    }),
    ("mount a file system", || {
        let flags = rustix::mount::MountFlags::empty();
        Ok(rustix::mount::mount("x", "/", "tmpfs", flags, None)?)
    }),
    ("make the root writable", || {
        let flags = rustix::mount::MountFlags::empty();
        Ok(rustix::mount::mount_remount("/", flags, c"")?)
    }),
    ("use a descriptor that it was not given", || {
        // Opened before the walls went up, and not named to them.
        Ok(rustix::io::dup(borrowed(LEFT_OPEN)).map(drop)?)
    }),
    ("name the host", || Ok(rustix::system::sethostname(b"x")?)),
    ("trace its parent", || {
        let parent = rustix::process::getppid().ok_or(io::ErrorKind::NotFound)?;
        trace(parent.as_raw_nonzero().get())
    }),
];

/// Descriptor that the parent of the walls leaves open.
const LEFT_OPEN: i32 = 40;

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    if let (Some("--attempt"), Some(walls), Some(name)) =
        (arguments.next().as_deref(), arguments.next(), arguments.next())
    {
        return attempt(&walls, &name);
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: the sandbox from within: needs root");
        return ExitCode::SUCCESS;
    }
    let mut failures = 0;
    for (name, _) in ATTEMPTS {
        failures += check(name, "walls", |status| status.code() == Some(REFUSED.into()));
        // The filter kills the process (SIGSYS) before any other wall is asked.
        failures += check(name, "filter", |status| status.signal() == Some(libc::SIGSYS));
    }
    failures += check("nothing", "filter", |status| status.code() == Some(REFUSED.into()));
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one attempt in a process of its own. Returns 1 if it ended otherwise than expected.
fn check(name: &str, walls: &str, expected: fn(&std::process::ExitStatus) -> bool) -> u32 {
    let program = env::current_exe().expect("this program has a path");
    let status = Command::new(program)
        .args(["--attempt", walls, name])
        .status()
        .expect("this program can be started again");
    let verdict = if expected(&status) { "ok" } else { "FAILED" };
    println!("test {walls}: {name} ... {verdict} ({status})");
    u32::from(!expected(&status))
}

/// In the child: puts up the walls, then tries.
fn attempt(walls: &str, name: &str) -> ExitCode {
    let file = fs::File::open("/etc/passwd").expect("there is one outside");
    leave_open(&file);
    if let Err(error) = sandbox::enter(UID, &[]) {
        eprintln!(
            "{error}: {}",
            std::error::Error::source(&error).map_or_else(String::new, |s| s.to_string())
        );
        return ExitCode::from(BROKEN);
    }
    // `enter` has closed it.
    std::mem::forget(file);
    if walls == "filter"
        && let Err(error) = sandbox::apply_thread_filter(ThreadKind::Main)
    {
        eprintln!("{error}");
        return ExitCode::from(BROKEN);
    }
    let Some((_, act)) = ATTEMPTS.iter().find(|(known, _)| *known == name) else {
        return ExitCode::from(REFUSED);
    };
    ExitCode::from(if act().is_err() { REFUSED } else { ALLOWED })
}

#[allow(unsafe_code, reason = "a descriptor under a known number, as an inherited one")]
fn leave_open(file: &fs::File) {
    // SAFETY: the number is above what this program uses; nobody owns it.
    unsafe { libc::dup2(file.as_raw_fd(), LEFT_OPEN) };
}

#[allow(unsafe_code, reason = "whether the number is open is what is tried")]
fn borrowed(fd: i32) -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: only used to ask the kernel for a copy, which it refuses when closed.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}

#[allow(unsafe_code, reason = "no safe wrapper offers ptrace")]
fn trace(process: i32) -> io::Result<()> {
    // SAFETY: PTRACE_ATTACH takes no pointer that is read.
    let ret = unsafe { libc::ptrace(libc::PTRACE_ATTACH, process, 0, 0) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
