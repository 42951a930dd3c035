//! From the kernel's hand-over to the supervision loop, as a table of phases.
//!
//! PID 1 starts in the initramfs, which holds this program and the root as one EROFS image. It
//! mounts the image by file, moves into it and goes on there: the image must stay where it is (it
//! is the root's storage), and nothing else of the initramfs is worth freeing.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Instant,
};

use rustix::{
    mount::{MountFlags, mount, mount_move},
    process::{Resource, Rlimit, chdir, chroot, setrlimit},
    system::{RebootCommand, reboot, sethostname},
};

use update::disk::layout;

use super::{
    agent::Agent,
    kmsg::{self, Level},
    machines::Machines,
    mounts::{self, Entry, Mounted, Need},
    own_disks, partitions, serial,
    serve::{self, Programs},
    settings, unlock,
    watchdog::Watchdogs,
};
use crate::{assign::lent, efivars, events::Event, updates::mark};

/// The root's image in the initramfs.
const IMAGE: &str = "/root.erofs";

/// What was put into the finished image, and where it is kept when the initramfs is left.
const CUSTOMISED: &str = "/customised/holdfast.toml";

/// Where it is mounted before it becomes the root.
const NEW_ROOT: &str = "/newroot";

/// Where systemd-stub puts what goes beside a release.
const EXTRA: &str = "/.extra";

/// The agent's program.
const AGENT: &str = "/usr/bin/agent";

/// The screen's program.
const DASHBOARD: &str = "/usr/bin/dashboard";

/// Descriptors init may hold, and children may ask for.
const OPEN_FILES: u64 = 65_536;

/// What the phases fill in.
#[derive(Debug)]
struct Boot {
    begin: Instant,
    made: Vec<Mounted>,
    watchdogs: Option<Watchdogs>,
    /// What opened the volumes, and waits until they are mounted.
    agent: Option<Agent>,
}

/// One phase: its name, and what it does. A phase that fails is reported and the boot goes on:
/// a node that shows what is wrong is worth more than one that restarts for ever.
#[derive(Debug)]
struct Phase {
    name: &'static str,
    act: fn(&mut Boot) -> io::Result<()>,
}

const PHASES: &[Phase] = &[
    Phase { name: "early-mounts", act: early_mounts },
    Phase { name: "log", act: open_log },
    Phase { name: "settings", act: apply_settings },
    Phase { name: "serial", act: |_| serial::start(Path::new("/")) },
    Phase { name: "watchdog", act: arm_watchdogs },
    Phase { name: "release", act: keep_release },
    Phase { name: "customised", act: keep_customised },
    Phase { name: "root", act: enter_root },
    Phase { name: "limits", act: raise_limits },
    Phase { name: "late-mounts", act: late_mounts },
    Phase { name: "verify-mounts", act: verify_mounts },
    Phase { name: "cgroups", act: |_| Machines::prepare_cgroups() },
    Phase { name: "host-name", act: |_| Ok(sethostname(b"holdfast")?) },
    Phase { name: "ctrl-alt-del", act: |_| Ok(reboot(RebootCommand::CadOff)?) },
];

/// Runs PID 1. Never returns.
pub fn run() -> ! {
    install_panic_hook();
    let mut boot = Boot { begin: Instant::now(), made: Vec::new(), watchdogs: None, agent: None };
    for Phase { name, act } in PHASES {
        if let Err(error) = act(&mut boot) {
            kmsg::line(Level::Error, &format!("init: phase {name} failed: {error}"));
        }
    }
    let watchdogs = boot.watchdogs.take().unwrap_or_else(|| Watchdogs::arm().0);
    kmsg::event(&Event::InitReady { ms: boot.begin.elapsed().as_millis() });
    let programs = Programs {
        agent: Path::new(AGENT),
        waiting: boot.agent,
        dashboard: Some(Path::new(DASHBOARD)),
    };
    serve::run(watchdogs, programs)
}

fn early_mounts(boot: &mut Boot) -> io::Result<()> {
    for entry in mounts::EARLY {
        // In the initramfs nothing exists but what the image's builder put there.
        fs::create_dir_all(entry.path)?;
        boot.made.extend(mounts::apply(entry).map_err(io::Error::other)?);
    }
    Ok(())
}

fn open_log(_: &mut Boot) -> io::Result<()> {
    kmsg::open();
    Ok(())
}

fn arm_watchdogs(boot: &mut Boot) -> io::Result<()> {
    let (watchdogs, events) = Watchdogs::arm();
    boot.watchdogs = Some(watchdogs);
    events.iter().for_each(kmsg::event);
    Ok(())
}

/// What the release says of its own measurements is in the initramfs, out of sight later.
fn keep_release(_: &mut Boot) -> io::Result<()> {
    crate::seal::unlock::keep_release(Path::new(EXTRA), Path::new("/"))
}

/// Waits for the disk and has its volumes opened. A server without an installed disk has none.
fn open_volumes(boot: &mut Boot) -> io::Result<()> {
    let root = Path::new("/");
    let names = [layout::STATE, layout::DATA];
    if let Err(error) = lent::recall(root) {
        trouble(format!("which drives renters had is not known: {}", chain(&error)));
    }
    partitions::settle(&names);
    if let Some(device) = partitions::started_from_renters(root) {
        trouble(format!(
            "the server was started from {device}, which is on a drive that a renter had: nothing on it is \
             believed; put the server's own disk, its medium or the network before it in the firmware's boot order"
        ));
    }
    let absent = partitions::absent(root);
    let started = partitions::started_from_installed(root);
    if let Some(disk) = &started {
        own_disks::remember(root, disk);
    }
    let is_there = |name: &&str| partitions::find(name).is_some();
    let opened = if names.iter().any(|name| is_there(name) || !partitions::foreign(name).is_empty())
    {
        // Which may find that one of the others is this server's.
        unlock::run(Path::new(AGENT), boot.watchdogs.as_mut()).map(|agent| boot.agent = Some(agent))
    } else {
        Ok(())
    };
    names.iter().for_each(|name| tell_foreign(name));
    match started {
        Some(own) => own_disks::replaced(&absent, &own).for_each(trouble),
        None => partitions::absent(root).iter().for_each(|disk| trouble(disk.told_absent())),
    }
    opened
}

fn trouble(reason: String) {
    kmsg::event(&Event::Trouble { place: "volumes", reason });
}

/// Says which partitions of this name are nothing to this server.
fn tell_foreign(name: &str) {
    for device in partitions::foreign(name) {
        trouble(format!(
            "{device} is called {name}, but this server was neither started from its disk nor installed on it, \
             or more than one disk could be that one, and a renter could have made it: it is left alone; if it \
             is the server's, start the server from that disk once, without the others"
        ));
    }
}

fn keep_customised(_: &mut Boot) -> io::Result<()> {
    let document = match fs::read(CUSTOMISED) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read?,
    };
    let kept = Path::new("/").join(crate::config::CUSTOMISED);
    fs::create_dir_all(kept.parent().unwrap_or(Path::new("/run")))?;
    let mut options = fs::File::options();
    let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(kept)?;
    file.write_all(&document)
}

fn enter_root(boot: &mut Boot) -> io::Result<()> {
    fs::create_dir_all(NEW_ROOT)?;
    let root = mounts::ROOT;
    mount(IMAGE, NEW_ROOT, root.kind, root.flags, None)?;
    for entry in mounts::EARLY {
        mount_move(entry.path, format!("{NEW_ROOT}{}", entry.path))?;
    }
    chdir(NEW_ROOT)?;
    mount_move(".", "/")?;
    chroot(".")?;
    chdir("/")?;
    boot.made.push(Mounted {
        path: "/",
        kind: root.kind.to_owned(),
        flags: root.flags,
        in_memory: None,
    });
    Ok(())
}

fn apply_settings(_: &mut Boot) -> io::Result<()> {
    for (setting, error) in settings::apply() {
        let text = format!("init: cannot set {} ({}): {error}", setting.path, setting.reason);
        kmsg::line(Level::Warning, &text);
    }
    Ok(())
}

fn late_mounts(boot: &mut Boot) -> io::Result<()> {
    let of_the_disk = |entry: &&Entry| matches!(entry.need, Need::Partition(_));
    // Firmware's variables, which tell of two disks the right one, come before the disk.
    mounts::LATE
        .iter()
        .filter(|entry| !of_the_disk(entry))
        .for_each(|entry| mount_late(boot, entry));
    // Before anything that could hang or fail: whoever looks later knows that firmware started this.
    let folder = Path::new(efivars::FOLDER);
    if let Err(error) = mark::leave(folder, Path::new("/")) {
        let text = format!("init: no sign that the slot was started is left: {error}");
        kmsg::line(Level::Warning, &text);
    }
    if let Err(error) = open_volumes(boot) {
        kmsg::line(Level::Error, &format!("init: the disk's volumes were not opened: {error}"));
    }
    mounts::LATE.iter().filter(of_the_disk).for_each(|entry| mount_late(boot, entry));
    boot.made.iter().filter_map(Mounted::event).for_each(|event| kmsg::event(&event));
    Ok(())
}

fn mount_late(boot: &mut Boot, entry: &Entry) {
    match mounts::apply(entry) {
        Ok(mounted) => boot.made.extend(mounted),
        Err(error) => kmsg::line(Level::Error, &format!("init: {}", chain(&error))),
    }
}

fn verify_mounts(boot: &mut Boot) -> io::Result<()> {
    let differences = mounts::verify(&boot.made)?;
    for mounts::Difference { path, reason } in &differences {
        kmsg::event(&Event::MountWrong { path: path.clone(), reason: reason.clone() });
    }
    if differences.is_empty() {
        kmsg::event(&Event::MountsVerified { count: boot.made.len() });
    }
    Ok(())
}

fn raise_limits(_: &mut Boot) -> io::Result<()> {
    let limit = Rlimit { current: Some(OPEN_FILES), maximum: Some(OPEN_FILES) };
    Ok(setrlimit(Resource::Nofile, limit)?)
}

/// A panic of PID 1 is written down and the machine restarts; the program never unwinds to its
/// end, which would be a kernel panic without a reason.
fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        kmsg::line(Level::Error, &format!("init: {panic}"));
        rustix::fs::sync();
        let _ = reboot(RebootCommand::Restart);
        loop {
            std::thread::park();
        }
    }));
}

/// Returns the error and everything under it, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

/// Unmounts what holds data, or makes it read-only; whether everything was clean.
pub fn unmount_data() -> bool {
    let clean = |path: &str| {
        rustix::mount::unmount(path, rustix::mount::UnmountFlags::empty()).is_ok()
            || rustix::mount::mount_remount(path, MountFlags::RDONLY, c"").is_ok()
    };
    ["/data", "/state"].map(clean).iter().all(|clean| *clean)
}
