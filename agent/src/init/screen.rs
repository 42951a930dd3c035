//! The screen's program: started on the first virtual console, without privileges, and again with a
//! growing delay when it ends. While it runs, the kernel's messages go to the second console, which
//! alt+F2 shows. A server without a screen has none of it.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::process::Pid;

use super::{
    kmsg::{self, Level},
    logs::Lines,
    machines, memory,
    supervise::{Start, Supervisor},
};
use crate::{
    events::Event,
    spawn::{Console, DASHBOARD_ID, Ending},
    sys::{
        self,
        child::{self, Child},
    },
};

/// Console that it draws on, and the one that the kernel's messages go to meanwhile.
const CONSOLE: &str = "/dev/tty1";
const MESSAGES: &str = "/dev/tty2";
const MESSAGES_NUMBER: u8 = 2;

/// Descriptors it may hold: the terminal, pipes of its own, a connection or two.
const OPEN_FILES: u64 = 64;

/// Memory it may map, in bytes.
const ADDRESS_SPACE: u64 = 512 << 20;

/// The program and its life.
#[derive(Debug)]
pub struct Screen {
    program: Option<PathBuf>,
    supervisor: Supervisor,
    running: Option<Running>,
    /// Whose the console is: the agent's until it says otherwise.
    console: Console,
    /// Kept open, so that the console stays there for the kernel's messages.
    messages: Option<File>,
}

#[derive(Debug)]
struct Running {
    pid: Pid,
    pidfd: OwnedFd,
    output: Option<OwnedFd>,
    lines: Lines,
}

impl Screen {
    /// Prepares to start `program`; nothing is ever started when it is `None` or the server has no
    /// screen.
    pub fn new(program: Option<PathBuf>) -> Self {
        let program = program.filter(|_| has_screen(Path::new("/sys/class/vtconsole")));
        Self {
            program,
            supervisor: Supervisor::default(),
            running: None,
            console: Console::Agent,
            messages: None,
        }
    }

    /// The agent says whose the console is.
    pub fn handle_console(&mut self, console: Console) {
        self.console = console;
        if console == Console::Agent {
            self.give_back();
        }
    }

    /// Starts the program if it is time to.
    pub fn turn(&mut self, now: Instant) {
        // Nobody expects a sign of life from it: a screen that hangs harms nobody.
        self.supervisor.handle_alive(now);
        if self.running.is_some() || self.console == Console::Agent {
            return;
        }
        if self.supervisor.poll_start(now) == Start::Later {
            return;
        }
        let Some(program) = &self.program else { return };
        match launch(program.as_os_str().as_bytes()) {
            Ok(running) => {
                let starts = self.supervisor.handle_started(now);
                let pid = running.pid.as_raw_nonzero().get();
                kmsg::event(&Event::Screen { pid, starts });
                self.running = Some(running);
                self.clear_of_messages();
            }
            Err(error) => {
                let delay = self.supervisor.handle_ended(now);
                let text = format!("init: cannot start the screen: {error}; again in {delay:?}");
                kmsg::line(Level::Warning, &text);
            }
        }
    }

    /// Sends the kernel's messages elsewhere.
    fn clear_of_messages(&mut self) {
        if self.messages.is_some() {
            return;
        }
        let redirected = open(MESSAGES).and_then(|file| {
            sys::screen::redirect_messages(file.as_fd(), MESSAGES_NUMBER)?;
            Ok(file)
        });
        match redirected {
            Ok(file) => self.messages = Some(file),
            Err(error) => {
                let text = format!("init: the kernel's messages stay on the screen: {error}");
                kmsg::line(Level::Warning, &text);
            }
        }
    }

    /// Returns when something is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let waits =
            self.program.is_some() && self.running.is_none() && self.console == Console::Screen;
        self.supervisor.poll_timeout().filter(|_| waits)
    }

    /// Returns the pipe on which the program says what is wrong.
    pub fn output(&self) -> Option<&OwnedFd> {
        self.running.as_ref()?.output.as_ref()
    }

    /// Reads what the program says.
    pub fn handle_output(&mut self, now: Instant) {
        let Some(running) = &mut self.running else { return };
        let Some(output) = &running.output else { return };
        let lines = machines::read_lines(output, &mut running.lines, now);
        if lines.is_none() {
            running.output = None;
        }
        let lines = lines.unwrap_or_else(|| running.lines.handle_end(now));
        lines.iter().for_each(|line| kmsg::line(Level::Warning, line));
    }

    /// Notes that a child ended; whether it was the program.
    pub fn handle_ended(&mut self, pid: Pid, ending: Ending, now: Instant) -> Whose {
        if self.running.as_ref().is_none_or(|running| running.pid != pid) {
            return Whose::Others;
        }
        self.handle_output(now);
        self.running = None;
        let delay = self.supervisor.handle_ended(now);
        let text = format!("init: the screen ended ({ending}); again in {delay:?}");
        kmsg::line(Level::Warning, &text);
        Whose::Screen
    }

    /// The node goes down: the program ends, and the last messages are on the screen.
    pub fn retire(&mut self) {
        self.supervisor.retire();
        self.give_back();
    }

    /// Ends the program and puts the kernel's messages on its console again.
    fn give_back(&mut self) {
        if let Some(running) = &self.running {
            // It may have ended just now; the reaper will tell.
            let kill = rustix::process::Signal::KILL;
            let _ = rustix::process::pidfd_send_signal(&running.pidfd, kill);
        }
        if let Some(messages) = self.messages.take() {
            // The first console again. What cannot be shown there is on the serial port.
            let _ = sys::screen::redirect_messages(messages.as_fd(), 0);
        }
    }
}

/// Whose process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// The screen's.
    Screen,
    /// Another one's.
    Others,
}

/// Whether anything but the kernel's stand-in draws the consoles, by its list of what could.
fn has_screen(consoles: &Path) -> bool {
    let said = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let draws = |console: &fs::DirEntry| {
        let bound = said(console.path().join("bind")).trim() == "1";
        bound && !said(console.path().join("name")).contains("dummy")
    };
    fs::read_dir(consoles).into_iter().flatten().flatten().any(|console| draws(&console))
}

/// Opens a console, which must not become init's own.
fn open(console: &str) -> io::Result<File> {
    File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(console)
}

fn launch(program: &[u8]) -> io::Result<Running> {
    let console = open(CONSOLE)?;
    let (output, input) = machines::pipe()?;
    let program = CString::new(program)?;
    let (pid, pidfd) = child::start(Child {
        arguments: vec![program.clone()],
        program,
        files: vec![console.try_clone()?.into(), console.into(), input],
        namespaces: u64::from(libc::CLONE_NEWNET.unsigned_abs()),
        limits: vec![
            (libc::RLIMIT_NOFILE, OPEN_FILES),
            (libc::RLIMIT_AS, ADDRESS_SPACE),
            (libc::RLIMIT_CORE, 0),
        ],
        cgroup: None,
        user: Some(DASHBOARD_ID),
    })?;
    machines::rank(pid, memory::SCREEN);
    Ok(Running { pid, pidfd, output: Some(output), lines: Lines::new("dashboard: ".to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_a_screen_when_something_draws_on_it() {
        let folder = tempfile::tempdir().expect("a directory");
        let console = |name: &str, said: &str, bind: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(&path).expect("made");
            fs::write(path.join("name"), said).expect("written");
            fs::write(path.join("bind"), bind).expect("written");
        };
        assert!(!has_screen(folder.path()));
        console("vtcon0", "(S) dummy device\n", "1\n");
        console("vtcon1", "(M) frame buffer device\n", "0\n");
        assert!(!has_screen(folder.path()));
        console("vtcon1", "(M) frame buffer device\n", "1\n");
        assert!(has_screen(folder.path()));
    }
}
