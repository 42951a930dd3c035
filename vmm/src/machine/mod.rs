//! One machine: from its specification to running threads, and to its end.

mod board;
mod build;
mod control;
pub mod hotplug;
mod map;
pub mod numa;
mod ports;
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
pub use control::{Control, Ending, Kind};
use hotplug::Manager;
use kvm_ioctls::VcpuFd;
pub use map::MapError;
pub use numa::NumaError;
pub use ports::PortError;
pub use tree::{Tree, TreeError};

use crate::{
    api,
    sandbox::{SandboxError, ThreadKind, apply_thread_filter},
    sys, vcpu,
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
    #[error("cannot serve the API")]
    Api { source: io::Error },
}

/// A machine that is built and not running yet.
pub struct Machine {
    /// What its virtual CPUs reach.
    pub board: Arc<Board>,
    /// Its virtual CPUs.
    pub vcpus: Vec<VcpuFd>,
    /// Where its API is asked.
    pub listener: UnixListener,
    /// Takes passed-through devices back.
    pub closer: Option<Closer>,
    /// Attaches and detaches devices.
    plugger: Manager,
}

/// Runs the machine to its end, and returns how it ended.
pub fn run(machine: Machine) -> Result<Ending, RunError> {
    sys::signal::catch_kicks().map_err(|source| RunError::Signal { source })?;
    let Machine { board, vcpus, listener, closer, plugger } = machine;
    api::start(listener, &board)?;
    let (reached, shared) = (Arc::clone(&board), Arc::clone(&board.hotplug));
    if plugger.has_ports() {
        let plug = move || plugger.run(&reached, &shared);
        spawn("hotplug".to_owned(), ThreadKind::Plug, Arc::clone(&board), plug)?;
    } else {
        drop(plugger);
    }
    let mut threads = Vec::new();
    for (id, fd) in vcpus.into_iter().enumerate() {
        let reached = Arc::clone(&board);
        let work = move || vcpu::run(fd, &reached);
        threads.push(spawn(format!("vcpu{id}"), ThreadKind::Vcpu, Arc::clone(&board), work)?);
    }
    apply_thread_filter(ThreadKind::Main)?;
    board.control.start();
    let ending = board.control.wait();
    stop(threads);
    let mut failures = closer.map(Closer::close).unwrap_or_default();
    match board.hotplug.close() {
        Ok(more) => failures.extend(more),
        Err(error) => {
            let reason = format!("{}; {error}", ending.reason);
            return Ok(Ending::host_fault(reason));
        }
    }
    for error in &failures {
        eprintln!("holdfast-vmm: {error}");
    }
    if failures.is_empty() {
        return Ok(ending);
    }
    let reason = format!("{}; {} devices did not come back", ending.reason, failures.len());
    Ok(Ending::host_fault(reason))
}

/// Starts a thread that filters itself first. One that cannot ends the machine.
pub(crate) fn spawn(
    name: String,
    kind: ThreadKind,
    board: Arc<Board>,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, RunError> {
    let started = std::thread::Builder::new().name(name.clone()).spawn(move || {
        match apply_thread_filter(kind) {
            Ok(()) => {
                board.control.wait_for_start();
                work();
            }
            Err(error) => board.control.end(Ending::host_fault(error.to_string())),
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
