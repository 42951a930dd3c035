//! One machine: from its specification to running threads, and to its end.

mod board;
mod build;
mod chipset;
mod control;
mod deadline;
mod firmware;
pub mod hotplug;
mod map;
pub mod numa;
mod pause;
mod ports;
mod schedule;
mod smm;
mod start;
mod tree;

use std::{
    io,
    os::unix::net::UnixListener,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

pub use board::Board;
pub use build::{BuildError, MAX_VIRTIO, build};
pub use chipset::Chipset;
pub use control::{Control, Ending, EndingError, First, Kind};
pub use deadline::Press;
use hotplug::Manager;
use kvm_ioctls::VcpuFd;
pub use map::MapError;
pub use numa::NumaError;
pub use pause::{HoldError, Holder, Pauses};
pub use ports::PortError;
pub use schedule::{MAX_HOST_CPUS, isolate};
pub use smm::SmmWatch;
pub use tree::{Tree, TreeError};
use types::operations::VmEventKind;

use crate::{
    api,
    devices::power::Power,
    sandbox::{SandboxError, ThreadKind, apply_thread_filter},
    sys::{self, kvm::KvmError},
    vcpu,
    vfio::assign::Closer,
};

/// How long virtual CPUs have to leave the guest once the machine ends.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// How often they are reminded.
const KICK_EVERY: Duration = Duration::from_millis(10);

/// Why a machine cannot run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RunError {
    #[error("cannot start the {name} thread")]
    Thread { name: String, source: io::Error },
    #[error("cannot catch the signal that stops virtual CPUs")]
    Signal { source: io::Error },
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error("cannot serve the API")]
    Api { source: io::Error },
    #[error("cannot keep the machine's cores to itself; the host's kernel needs CONFIG_SCHED_CORE")]
    Cores { source: io::Error },
}

/// A machine that is built and not running yet.
pub struct Machine {
    /// What its virtual CPUs reach.
    pub board: Arc<Board>,
    /// Its virtual CPUs.
    pub vcpus: Vec<VcpuFd>,
    /// Sets the interval timer up, which has to end before they run.
    settling: JoinHandle<Result<(), KvmError>>,
    /// Where its API is asked.
    pub listener: UnixListener,
    /// Takes passed-through devices back.
    pub closer: Option<Closer>,
    /// Attaches and detaches devices.
    plugger: Manager,
    /// Where virtual CPUs run, in order.
    pub affinity: Vec<Vec<u32>>,
}

/// Runs the machine to its end, and returns how it ended.
pub fn run(machine: Machine) -> Result<Ending, RunError> {
    let caught = sys::signal::catch_kicks().and_then(|()| sys::signal::catch_broken_memory());
    caught.map_err(|source| RunError::Signal { source })?;
    let Machine { board, vcpus, settling, listener, closer, plugger, affinity } = machine;
    api::start(listener, &board)?;
    start_helpers(&board, plugger)?;
    let mut threads = Vec::new();
    for (id, fd) in vcpus.into_iter().enumerate() {
        let reached = Arc::clone(&board);
        let cpus = affinity.get(id).cloned().unwrap_or_default();
        let id = u32::try_from(id).unwrap_or(u32::MAX);
        let thread = Thread { name: format!("vcpu{id}"), kind: ThreadKind::Vcpu, cpus };
        let work = move || vcpu::run(id, fd, &reached);
        threads.push(spawn(thread, Arc::clone(&board), work)?);
    }
    settling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    apply_thread_filter(ThreadKind::Main)?;
    // First told, then done: what the guest does is told after it.
    board.events.push(VmEventKind::Started, "");
    board.control.start();
    let ending = wait(&board);
    board.events.push(ending.event(), ending.reason.clone());
    board.pauses.end();
    stop(threads);
    let failures = take_back(&board, closer);
    for failure in &failures {
        eprintln!("holdfast-vmm: {failure}");
        board.events.push(VmEventKind::DeviceFailed, failure.clone());
    }
    Ok(ending.despite(failures.len()))
}

/// Takes all devices back, and returns what failed.
fn take_back(board: &Board, closer: Option<Closer>) -> Vec<String> {
    let mut failures = closer.map(Closer::close).unwrap_or_default();
    let late = match board.hotplug.close() {
        Ok(more) => {
            failures.extend(more);
            None
        }
        Err(error) => Some(error.to_string()),
    };
    failures.iter().map(ToString::to_string).chain(late).collect()
}

/// Waits for the end. Meanwhile the PM timer carries now and then.
fn wait(board: &Board) -> Ending {
    loop {
        let carry = Power::carry_in(board.built.elapsed());
        if let Some(ending) = board.control.wait(carry) {
            return ending;
        }
        board::locked(&board.power).look(board.built.elapsed());
    }
}

/// Starts the threads beside those of virtual CPUs, devices and API.
fn start_helpers(board: &Arc<Board>, plugger: Manager) -> Result<(), RunError> {
    let start = |name: &str, kind, work: Box<dyn FnOnce() + Send>| {
        let thread = Thread { name: name.to_owned(), kind, cpus: Vec::new() };
        spawn(thread, Arc::clone(board), work)
    };
    let pressed = Arc::clone(board);
    // Not the thread that carries out the end: a device that hangs may hold this one up.
    let press = move || {
        while let First::Press(press) = pressed.control.wait_for_press() {
            pressed.press_for_deadline(press);
        }
    };
    start("deadline", ThreadKind::Timer, Box::new(press))?;
    let timed = Arc::clone(board);
    let follow = move || {
        while !timed.control.is_ended() {
            timed.chipset.follow_clock();
        }
    };
    start("clock", ThreadKind::Timer, Box::new(follow))?;
    if plugger.has_ports() {
        let (reached, shared) = (Arc::clone(board), Arc::clone(&board.hotplug));
        let plug = move || plugger.run(&reached, &shared);
        start("hotplug", ThreadKind::Plug, Box::new(plug))?;
    }
    if let Some(alarms) = board.alarms.clone() {
        let heard = Arc::clone(board);
        let listen = move || {
            // Without a poll there is nothing to listen by; devices work on.
            while let Ok(said) = alarms.wait() {
                said.into_iter().for_each(|said| heard.take_alarm(said));
            }
        };
        start("alarms", ThreadKind::Event, Box::new(listen))?;
    }
    if board.vm.has_pins() {
        let watched = Arc::clone(board);
        let watch = move || {
            if let Err(error) = watched.vm.watch_pins() {
                let reason = format!("interrupts of devices do not arrive: {error}");
                watched.control.end(Ending::host_fault(reason));
            }
        };
        start("pins", ThreadKind::Event, Box::new(watch))?;
    }
    Ok(())
}

/// A thread to start.
pub(crate) struct Thread {
    /// Its name.
    pub(crate) name: String,
    /// What it is for.
    pub(crate) kind: ThreadKind,
    /// Host CPUs that it may use; none means all.
    pub(crate) cpus: Vec<u32>,
}

/// Starts a thread that takes its place and filters itself first. One that cannot ends the machine.
pub(crate) fn spawn(
    thread: Thread,
    board: Arc<Board>,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, RunError> {
    let Thread { name, kind, cpus } = thread;
    let started = std::thread::Builder::new().name(name.clone()).spawn(move || {
        let fault = |reason| board.control.end(Ending::host_fault(reason));
        if let Err(error) = schedule::pin(&cpus) {
            return fault(format!("cannot run on host CPUs {cpus:?}: {error}"));
        }
        match apply_thread_filter(kind) {
            Ok(()) => {
                board.control.wait_for_start();
                work();
            }
            Err(error) => fault(error.to_string()),
        }
    });
    started.map_err(|source| RunError::Thread { name, source })
}

/// Gets virtual CPUs out of the guest. One that stays behind ends with the process.
fn stop(mut threads: Vec<JoinHandle<()>>) {
    let deadline = Instant::now() + STOP_LIMIT;
    while !threads.is_empty() && Instant::now() < deadline {
        threads.retain(|thread| !thread.is_finished());
        for thread in &threads {
            sys::signal::kick(thread);
        }
        std::thread::sleep(KICK_EVERY);
    }
}
