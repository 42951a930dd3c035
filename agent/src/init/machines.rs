//! Processes of machines: children of init, each in namespaces and a cgroup of its own.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::Instant,
};

use rustix::{fs::Mode, fs::OFlags, process::Pid};
use types::ids::MachineId;

use super::{
    kmsg::{self, Level},
    logs::Lines,
    memory,
};
use crate::{
    spawn::{Ending, Known, MAX_FILES, MAX_MACHINES, MAX_SAID, OUT_OF_MEMORY, SpawnOrder},
    sys::child::{self, Child},
};

/// The program.
pub const VMM: &str = "/usr/bin/holdfast-vmm";

const CGROUPS: &str = "/sys/fs/cgroup/machines";

/// What a machine's cgroup bounds.
const CONTROLLERS: &str = "+memory +pids +cpu +cpuset";

/// Descriptors a VMM may hold: eventfds for thousands of interrupt vectors.
const OPEN_FILES: u64 = 16_384;

/// Most reads of what an ended machine left: more than its pipe holds.
const MAX_READS: usize = 17;

/// What init knows of one machine.
#[derive(Debug)]
pub struct Machine {
    pid: Pid,
    pidfd: OwnedFd,
    ended: Option<Ending>,
    /// The kernel ended it for want of memory.
    ran_out: bool,
    output: Option<OwnedFd>,
    lines: Lines,
    said: String,
}

impl Machine {
    /// Returns the end of the pipe on which its output arrives.
    pub fn output(&self) -> Option<&OwnedFd> {
        self.output.as_ref()
    }
}

/// Every machine that was started and not started again.
#[derive(Debug, Default)]
pub struct Machines {
    known: BTreeMap<MachineId, Machine>,
}

/// Why a VMM was not started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum SpawnError {
    #[error("the machine runs already, as process {pid}")]
    Running { pid: i32 },
    #[error("{found} descriptors came with the order; 1 to {MAX_FILES} are right")]
    Files { found: usize },
    #[error("{MAX_MACHINES} machines run already, which is the most")]
    Full,
    #[error("cannot make cgroup {path}: {source}")]
    Cgroup { path: String, source: io::Error },
    #[error("cannot start {VMM}: {source}")]
    Start { source: io::Error },
}

impl Machines {
    /// Prepares the cgroup under which machines get theirs.
    pub fn prepare_cgroups() -> io::Result<()> {
        fs::write("/sys/fs/cgroup/cgroup.subtree_control", CONTROLLERS)?;
        fs::create_dir_all(CGROUPS)?;
        fs::write(format!("{CGROUPS}/cgroup.subtree_control"), CONTROLLERS)
    }

    /// Starts a VMM. Returns its process id.
    pub fn spawn(&mut self, order: &SpawnOrder, files: Vec<OwnedFd>) -> Result<i32, SpawnError> {
        if let Some(machine) = self.known.get(&order.machine)
            && machine.ended.is_none()
        {
            return Err(SpawnError::Running { pid: machine.pid.as_raw_nonzero().get() });
        }
        if files.is_empty() || files.len() > MAX_FILES {
            return Err(SpawnError::Files { found: files.len() });
        }
        self.make_room()?;
        let start = |source| SpawnError::Start { source };
        let cgroup = cgroup_of(order)?;
        let (output, input) = pipe().map_err(start)?;
        let null = fs::File::open("/dev/null").map_err(start)?;
        let mut descriptors: Vec<OwnedFd> =
            vec![null.into(), input.try_clone().map_err(start)?, input];
        descriptors.extend(files);
        let program = CString::from(c"/usr/bin/holdfast-vmm");
        let namespaces = libc::CLONE_NEWPID
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS;
        let (pid, pidfd) = child::start(Child {
            arguments: vec![program.clone()],
            program,
            files: descriptors,
            namespaces: u64::from(namespaces.unsigned_abs()),
            limits: vec![
                (libc::RLIMIT_MEMLOCK, libc::RLIM_INFINITY),
                (libc::RLIMIT_NOFILE, OPEN_FILES),
                (libc::RLIMIT_CORE, 0),
            ],
            cgroup: Some(&cgroup),
            user: None,
        })
        .map_err(start)?;
        rank(pid, memory::MACHINE);
        let lines = Lines::new(prefix(order.machine));
        let said = String::new();
        let (ended, ran_out, output) = (None, false, Some(output));
        let machine = Machine { pid, pidfd, ended, ran_out, output, lines, said };
        self.known.insert(order.machine, machine);
        Ok(pid.as_raw_nonzero().get())
    }

    fn make_room(&mut self) -> Result<(), SpawnError> {
        while self.known.len() >= MAX_MACHINES {
            let ended = self.known.iter().find(|(_, machine)| machine.ended.is_some());
            let Some(id) = ended.map(|(id, _)| *id) else { return Err(SpawnError::Full) };
            self.known.remove(&id);
        }
        Ok(())
    }

    /// Notes that a child ended; its machine, if it was one.
    pub fn handle_ended(&mut self, pid: Pid, ending: Ending) -> Option<MachineId> {
        let running = |machine: &Machine| machine.pid == pid && machine.ended.is_none();
        let (id, machine) = self.known.iter_mut().find(|(_, machine)| running(machine))?;
        machine.ended = Some(ending);
        machine.ran_out = memory::ran_out(&cgroup_path(*id));
        // The process is gone, so the cgroup is empty; a kernel that says otherwise keeps it.
        let _ = fs::remove_dir(cgroup_path(*id));
        Some(*id)
    }

    /// Kills a machine's VMM; `false` when it does not run.
    pub fn kill(&self, id: MachineId) -> bool {
        let Some(machine) = self.known.get(&id).filter(|machine| machine.ended.is_none()) else {
            return false;
        };
        rustix::process::pidfd_send_signal(&machine.pidfd, rustix::process::Signal::KILL).is_ok()
    }

    /// Kills every machine's VMM.
    pub fn kill_all(&self) {
        for id in self.known.keys() {
            self.kill(*id);
        }
    }

    /// Returns how many run.
    pub fn running(&self) -> usize {
        self.known.values().filter(|machine| machine.ended.is_none()).count()
    }

    /// Returns everything known.
    pub fn list(&self) -> Vec<Known> {
        let entry = |(id, machine): (&MachineId, &Machine)| Known {
            machine: *id,
            pid: machine.pid.as_raw_nonzero().get(),
            ended: machine.ended,
        };
        self.known.iter().map(entry).collect()
    }

    /// Returns the machines whose output may arrive.
    pub fn outputs(&self) -> Vec<(MachineId, &OwnedFd)> {
        self.known.iter().filter_map(|(id, m)| Some((*id, m.output()?))).collect()
    }

    /// Reads a machine's output. Returns its complete lines.
    pub fn read_output(&mut self, id: MachineId, now: Instant) -> Vec<String> {
        let Some(machine) = self.known.get_mut(&id) else { return Vec::new() };
        let Some(output) = &machine.output else { return Vec::new() };
        let lines = match read_lines(output, &mut machine.lines, now) {
            Some(lines) => lines,
            None => {
                machine.output = None;
                machine.lines.handle_end(now)
            }
        };
        if let Some(last) = lines.last() {
            let text = last.strip_prefix(&prefix(id)).unwrap_or(last);
            machine.said = text.chars().take(MAX_SAID).collect();
        }
        lines
    }

    /// Reads what a machine left when it ended, as far as [`MAX_READS`] go. Returns its complete
    /// lines and the last one it ever wrote, or [`OUT_OF_MEMORY`].
    pub fn read_rest(&mut self, id: MachineId, now: Instant) -> (Vec<String>, String) {
        let mut lines = Vec::new();
        for _ in 0..MAX_READS {
            lines.extend(self.read_output(id, now));
            if self.known.get(&id).is_none_or(|machine| machine.output.is_none()) {
                break;
            }
        }
        let said = self.known.get(&id).map(|machine| match machine.ran_out {
            true => OUT_OF_MEMORY.to_owned(),
            false => machine.said.clone(),
        });
        (lines, said.unwrap_or_default())
    }
}

/// Makes a process count for the kernel's choice when memory runs out. One that is gone already counts
/// no more.
pub fn rank(process: Pid, adjustment: i32) {
    if let Err(error) = memory::set(process, adjustment) {
        let process = process.as_raw_nonzero();
        let text = format!("init: process {process} does not count {adjustment}: {error}");
        kmsg::line(Level::Warning, &text);
    }
}

fn prefix(id: MachineId) -> String {
    format!("vmm {id}: ")
}

/// Reads what has arrived on a pipe; `None` at its end.
pub fn read_lines(pipe: impl AsFd, lines: &mut Lines, now: Instant) -> Option<Vec<String>> {
    let mut buffer = [0; 4096];
    match rustix::io::read(pipe, &mut buffer) {
        Ok(0) => None,
        Ok(length) => Some(lines.handle_bytes(now, &buffer[..length])),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Some(Vec::new()),
        Err(_) => None,
    }
}

/// Makes a pipe for a child's output: read end (never blocking) and write end.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::fs::fcntl_setfl(&read, OFlags::NONBLOCK)?;
    Ok((read, write))
}

fn cgroup_path(machine: MachineId) -> PathBuf {
    PathBuf::from(format!("{CGROUPS}/{machine}"))
}

fn cgroup_of(order: &SpawnOrder) -> Result<OwnedFd, SpawnError> {
    let path = cgroup_path(order.machine);
    let failed =
        |source: io::Error| SpawnError::Cgroup { path: path.display().to_string(), source };
    match fs::create_dir(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        Err(_) | Ok(()) => {}
    }
    fs::write(path.join("memory.max"), order.memory_bytes.to_string()).map_err(failed)?;
    fs::write(path.join("pids.max"), order.tasks.to_string()).map_err(failed)?;
    // Also for what the kernel does on the process's behalf, which has no affinity of its own. An empty line is no
    // bound.
    let cpus: Vec<_> = order.cpus.iter().map(u32::to_string).collect();
    fs::write(path.join("cpuset.cpus"), format!("{}\n", cpus.join(","))).map_err(failed)?;
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| failed(error.into()))
}
