//! The agent's process, as init holds it.

use std::{
    ffi::CString,
    fs, io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
    time::Instant,
};

use rustix::process::Pid;

use super::{
    kmsg::{self, Level},
    logs::Lines,
    machines, memory,
};
use crate::{
    spawn,
    sys::child::{self, Child},
};

/// Descriptors the agent may hold.
const FILES: u64 = 65_536;

/// The agent while it runs, or until its end was noticed.
#[derive(Debug)]
pub struct Agent {
    /// Its process id.
    pub pid: Pid,
    /// The same, and never another's.
    pub pidfd: OwnedFd,
    /// init's end of the socket; `None` once the agent closed the other one.
    pub socket: Option<OwnedFd>,
    /// What it writes; `None` once nobody can write any more.
    pub output: Option<OwnedFd>,
    lines: Lines,
}

impl Agent {
    /// Starts `program`, with `word` for its first argument.
    ///
    /// # Errors
    /// When there is no process or no descriptor to be had.
    pub fn launch(program: &Path, word: Option<&str>) -> io::Result<Self> {
        let (socket, theirs) = spawn::pair()?;
        let (output, input) = machines::pipe()?;
        let null = fs::File::open("/dev/null")?;
        let program = CString::new(program.as_os_str().as_bytes())?;
        let mut arguments = vec![program.clone()];
        arguments.extend(word.map(CString::new).transpose()?);
        let (pid, pidfd) = child::start(Child {
            program,
            arguments,
            files: vec![null.into(), input.try_clone()?, input, theirs],
            namespaces: 0,
            limits: vec![(libc::RLIMIT_NOFILE, FILES), (libc::RLIMIT_CORE, 0)],
            cgroup: None,
            user: None,
        })?;
        machines::rank(pid, memory::AGENT);
        let lines = Lines::new("agent: ".to_owned());
        Ok(Self { pid, pidfd, socket: Some(socket), output: Some(output), lines })
    }

    /// Passes on what it wrote.
    pub fn log_output(&mut self) {
        let Some(output) = &self.output else { return };
        let now = Instant::now();
        let lines = match machines::read_lines(output, &mut self.lines, now) {
            Some(lines) => lines,
            None => {
                self.output = None;
                self.lines.handle_end(now)
            }
        };
        lines.iter().for_each(|line| kmsg::line(Level::Notice, line));
    }

    /// Sends it a signal. It may have ended just now; the reaper will tell.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, signal);
    }
}
