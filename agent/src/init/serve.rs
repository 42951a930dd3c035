//! The loop of PID 1: signals, the agent's requests, output of children, deadlines.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::Pid,
    system::{RebootCommand, reboot},
};
use types::ids::MachineId;

use super::{
    agent::Agent,
    boot,
    ends::Ends,
    kmsg::{self, Level},
    machines::Machines,
    power, reap,
    screen::{Screen, Whose},
    shutdown::{Facts, MACHINES_GRACE, Presence, SYNC_LIMIT, Shutdown, Step},
    silent,
    supervise::{Start, Supervisor},
    trial::{self, Trial, Verdict},
    watchdog::{self, Watchdogs},
};
use crate::{
    events::Event,
    spawn::{self, Action, Answer, Ending, Milestone, PacketError, Request},
};

/// Requests handled in one turn, so that an agent that floods cannot keep init from its loop.
const MAX_REQUESTS: usize = 32;

/// What the loop starts.
#[derive(Debug)]
pub struct Programs<'a> {
    /// The agent's.
    pub agent: &'a Path,
    /// An agent that runs, and waits to be told that the volumes are mounted.
    pub waiting: Option<Agent>,
    /// The screen's.
    pub dashboard: Option<&'a Path>,
}

/// Runs the loop. Never returns.
pub fn run(watchdogs: Watchdogs, programs: Programs<'_>) -> ! {
    let signals = block_signals();
    let buttons = power::listen()
        .inspect_err(|error| {
            kmsg::line(Level::Warning, &format!("init: no power button: {error}"));
        })
        .ok();
    let mut init = Init {
        watchdogs,
        fed: Instant::now(),
        machines: Machines::default(),
        ends: Ends::default(),
        supervisor: Supervisor::default(),
        program: programs.agent.to_owned(),
        agent: None,
        shutdown: None,
        screen: Screen::new(programs.dashboard.map(Path::to_owned)),
        trial: Trial::new(Instant::now(), trial::read(), trial::limit()),
    };
    if let Some(agent) = programs.waiting {
        init.release(agent);
    }
    // Children that ended before signals were blocked are told by none.
    init.collect_ended();
    loop {
        init.turn(Instant::now());
        init.wait(&signals, buttons.as_ref());
    }
}

fn block_signals() -> SignalFd {
    let mut mask = SigSet::empty();
    for signal in
        [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGPWR, Signal::SIGUSR2]
    {
        mask.add(signal);
    }
    mask.thread_block().expect("a valid set can be blocked");
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    SignalFd::with_flags(&mask, flags).expect("descriptors are left this early")
}

#[derive(Debug)]
struct Init {
    watchdogs: Watchdogs,
    fed: Instant,
    machines: Machines,
    ends: Ends,
    supervisor: Supervisor,
    program: PathBuf,
    agent: Option<Agent>,
    shutdown: Option<Shutdown>,
    screen: Screen,
    trial: Trial,
}

impl Init {
    /// Everything that time alone makes due.
    fn turn(&mut self, now: Instant) {
        let in_time = self.shutdown.as_ref().is_none_or(|shutdown| shutdown.is_in_time(now));
        if in_time && now - self.fed >= watchdog::INTERVAL {
            self.watchdogs.feed();
            self.fed = now;
        }
        while let Some(machine) = self.ends.poll_overdue(now) {
            if self.machines.kill(machine) {
                kmsg::event(&Event::MachineOverdue { machine });
            }
        }
        if let Some(silent) = self.supervisor.poll_silent(now) {
            let pid = self.agent.as_ref().map_or(0, |agent| agent.pid.as_raw_nonzero().get());
            let threads = silent::threads(&Path::new("/proc").join(pid.to_string()));
            kmsg::event(&Event::AgentSilent { silent_s: silent.as_secs(), threads });
            self.signal_agent(rustix::process::Signal::KILL);
        }
        if self.agent.is_none() && self.supervisor.poll_start(now) == Start::Now {
            self.start_agent(now);
        }
        self.screen.turn(now);
        if self.trial.judge(now, self.machines.running()) == Verdict::Restart {
            self.begin_shutdown(Action::Reboot, "trial");
        }
        self.step_down(now);
    }

    fn start_agent(&mut self, now: Instant) {
        match Agent::launch(&self.program, None) {
            Ok(agent) => self.take_on(agent, now),
            Err(error) => {
                let delay = self.supervisor.handle_ended(now);
                let program = self.program.display();
                let text = format!("init: cannot start {program}: {error}; again in {delay:?}");
                kmsg::line(Level::Error, &text);
            }
        }
    }

    /// Lets an agent that waits go on.
    fn release(&mut self, agent: Agent) {
        let told = agent.socket.as_ref().map(|it| spawn::send(it, &Milestone::VolumesMounted, &[]));
        if let Some(Err(error)) = told {
            kmsg::line(Level::Error, &format!("init: agent not told: {}", boot::chain(&error)));
        }
        self.take_on(agent, Instant::now());
    }

    fn take_on(&mut self, agent: Agent, now: Instant) {
        let starts = self.supervisor.handle_started(now);
        let pid = agent.pid.as_raw_nonzero().get();
        kmsg::event(&Event::AgentStarted { pid, starts });
        self.agent = Some(agent);
    }

    fn begin_shutdown(&mut self, action: Action, because: &'static str) {
        if self.shutdown.is_none() {
            kmsg::event(&Event::Shutdown { action: action.name(), because });
            self.supervisor.retire();
            self.screen.retire();
            self.shutdown = Some(Shutdown::new(Instant::now(), action));
        }
    }

    fn step_down(&mut self, now: Instant) {
        let agent = if self.agent.is_some() { Presence::Running } else { Presence::Gone };
        let facts = Facts { machines: self.machines.running(), agent };
        let Some(shutdown) = &mut self.shutdown else { return };
        let action = shutdown.action();
        match shutdown.poll_step(now, facts) {
            None => {}
            Some(Step::TellAgent) => {
                self.tell(&Answer::ShuttingDown { action, grace_s: MACHINES_GRACE.as_secs() });
            }
            Some(Step::KillMachines) => self.machines.kill_all(),
            Some(Step::TerminateAgent) => self.signal_agent(rustix::process::Signal::TERM),
            Some(Step::KillAgent) => self.signal_agent(rustix::process::Signal::KILL),
            Some(Step::Finish) => finish(action),
        }
    }

    fn signal_agent(&self, signal: rustix::process::Signal) {
        if let Some(agent) = &self.agent {
            agent.signal(signal);
        }
    }

    fn tell(&mut self, answer: &Answer) {
        let Some(agent) = &mut self.agent else { return };
        let Some(socket) = &agent.socket else { return };
        if let Err(error) = spawn::send(socket, answer, &[]) {
            kmsg::line(Level::Error, &format!("init: agent not told: {}", boot::chain(&error)));
        }
    }

    fn wait(&mut self, signals: &SignalFd, buttons: Option<&OwnedFd>) {
        let mut sources = vec![Source::Signals];
        let mut descriptors = vec![signals.as_fd()];
        if let Some(buttons) = buttons {
            sources.push(Source::Buttons);
            descriptors.push(buttons.as_fd());
        }
        if let Some(agent) = &self.agent {
            for (source, file) in
                [(Source::Requests, &agent.socket), (Source::AgentOutput, &agent.output)]
            {
                sources.extend(file.as_ref().map(|_| source));
                descriptors.extend(file.as_ref().map(AsFd::as_fd));
            }
        }
        sources.extend(self.screen.output().map(|_| Source::ScreenOutput));
        descriptors.extend(self.screen.output().map(AsFd::as_fd));
        for (machine, output) in self.machines.outputs() {
            sources.push(Source::MachineOutput(machine));
            descriptors.push(output.as_fd());
        }
        let mut polled: Vec<_> =
            descriptors.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        if poll(&mut polled, Some(&self.timeout())).is_err() {
            return;
        }
        let ready: Vec<_> = sources
            .into_iter()
            .zip(&polled)
            .filter(|(_, polled)| !polled.revents().is_empty())
            .map(|(source, _)| source)
            .collect();
        drop(polled);
        for source in ready {
            self.handle(source, signals, buttons);
        }
    }

    fn timeout(&self) -> Timespec {
        let now = Instant::now();
        let next = [
            Some(self.fed + watchdog::INTERVAL),
            self.supervisor.poll_timeout(),
            self.ends.poll_timeout(),
            self.screen.poll_timeout(),
            self.shutdown.as_ref().map(Shutdown::poll_timeout),
        ];
        let left = next.into_iter().flatten().map(|at| at.saturating_duration_since(now)).min();
        // A deadline in the past is handled by the next turn; the pause keeps a stuck one from
        // spinning.
        let left =
            left.unwrap_or(watchdog::INTERVAL).clamp(Duration::from_millis(5), watchdog::INTERVAL);
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(0),
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    }

    fn handle(&mut self, source: Source, signals: &SignalFd, buttons: Option<&OwnedFd>) {
        match source {
            Source::Signals => self.handle_signals(signals),
            Source::Buttons => {
                let pressed = buttons.map(power::read);
                if matches!(pressed, Some(Ok(power::Pressed::Yes))) {
                    self.begin_shutdown(Action::PowerOff, "power-button");
                }
            }
            Source::Requests => self.handle_requests(),
            Source::AgentOutput => self.handle_agent_output(),
            Source::ScreenOutput => self.screen.handle_output(Instant::now()),
            Source::MachineOutput(machine) => {
                let lines = self.machines.read_output(machine, Instant::now());
                lines.iter().for_each(|line| kmsg::line(Level::Notice, line));
            }
        }
    }

    fn handle_signals(&mut self, signals: &SignalFd) {
        while let Ok(Some(info)) = signals.read_signal() {
            let signal = i32::try_from(info.ssi_signo).ok().and_then(|n| Signal::try_from(n).ok());
            match signal {
                Some(Signal::SIGINT) => self.begin_shutdown(Action::Reboot, "ctrl-alt-del"),
                Some(Signal::SIGTERM) => self.begin_shutdown(Action::Reboot, "sigterm"),
                Some(Signal::SIGPWR) => self.begin_shutdown(Action::PowerOff, "sigpwr"),
                Some(Signal::SIGUSR2) => self.begin_shutdown(Action::PowerOff, "sigusr2"),
                Some(_) | None => {}
            }
        }
        self.collect_ended();
    }

    fn collect_ended(&mut self) {
        for (pid, ending) in reap::collect() {
            self.handle_ended(pid, ending);
        }
    }

    fn handle_ended(&mut self, pid: Pid, ending: Ending) {
        if self.agent.as_ref().is_some_and(|agent| agent.pid == pid) {
            self.handle_agent_output();
            self.agent = None;
            let delay = self.supervisor.handle_ended(Instant::now());
            let restart_ms = delay.as_millis();
            kmsg::event(&Event::AgentExited { status: ending.to_string(), restart_ms });
            return;
        }
        if self.screen.handle_ended(pid, ending, Instant::now()) == Whose::Screen {
            return;
        }
        if let Some(machine) = self.machines.handle_ended(pid, ending) {
            self.ends.handle_gone(machine);
            let (lines, said) = self.machines.read_rest(machine, Instant::now());
            lines.iter().for_each(|line| kmsg::line(Level::Notice, line));
            self.tell(&Answer::Exited { machine, status: ending, said });
        }
    }

    fn handle_agent_output(&mut self) {
        if let Some(agent) = &mut self.agent {
            agent.log_output();
        }
    }

    fn handle_requests(&mut self) {
        for _ in 0..MAX_REQUESTS {
            let Some(socket) = self.agent.as_ref().and_then(|agent| agent.socket.as_ref()) else {
                return;
            };
            match spawn::receive::<Request>(socket) {
                Ok(Some((request, files))) => self.handle_request(request, files),
                Ok(None) => return,
                Err(PacketError::Closed) => {
                    if let Some(agent) = &mut self.agent {
                        agent.socket = None;
                    }
                    return;
                }
                Err(error) => {
                    let text = format!("init: request ignored: {}", boot::chain(&error));
                    kmsg::line(Level::Warning, &text);
                }
            }
        }
    }

    fn handle_request(&mut self, request: Request, files: Vec<OwnedFd>) {
        match request {
            Request::Alive { ends } => {
                let now = Instant::now();
                self.supervisor.handle_alive(now);
                self.ends.handle_told(now, &ends);
            }
            Request::List => {
                let machines = self.machines.list();
                self.tell(&Answer::Machines { machines });
            }
            Request::Kill { machine } => {
                self.machines.kill(machine);
            }
            Request::Settled => self.trial.settle(),
            Request::Screen { console } => self.screen.handle_console(console),
            Request::Shutdown { action } => self.begin_shutdown(action, "agent"),
            Request::Spawn(order) => {
                let machine = order.machine;
                let result = if self.shutdown.is_some() {
                    Err("the node goes down".to_owned())
                } else {
                    self.machines.spawn(&order, files).map_err(|error| error.to_string())
                };
                match result {
                    Ok(pid) => self.tell(&Answer::Spawned { machine, pid }),
                    Err(reason) => self.tell(&Answer::Refused { machine, reason }),
                }
            }
        }
    }
}

/// Where something happened.
#[derive(Debug, Clone, Copy)]
enum Source {
    Signals,
    Buttons,
    Requests,
    AgentOutput,
    ScreenOutput,
    MachineOutput(MachineId),
}

/// Writes everything, unmounts, and leaves to the kernel.
fn finish(action: Action) -> ! {
    // A disk that no longer answers must not keep the node from going down.
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        rustix::fs::sync();
        // Nobody listens any more when the limit was passed.
        let _ = sender.send(boot::unmount_data());
    });
    let unmounted = receiver.recv_timeout(SYNC_LIMIT).unwrap_or(false);
    kmsg::event(&Event::ShutdownDone { action: action.name(), unmounted });
    let command = match action {
        Action::PowerOff => RebootCommand::PowerOff,
        Action::Reboot => RebootCommand::Restart,
    };
    if let Err(error) = reboot(command) {
        kmsg::line(Level::Error, &format!("init: {} failed: {error}", action.name()));
    }
    loop {
        // The watchdog, which nobody feeds now, has the last word.
        std::thread::park();
    }
}
