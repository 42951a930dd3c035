//! The agent's process, from its start to the service.

use std::{os::fd::OwnedFd, path::Path};

use rustix::event::{PollFd, PollFlags, poll};

use super::{fail, run};
use crate::{
    events::Event,
    init::boot::chain,
    machines::init::Init,
    seal::unlock::{self, Opening},
    spawn::{self, Milestone, PacketError},
    sys,
};

/// Threads that tasks run on. They wait more than they work, some of them for disks, and servers with
/// hundreds of processors have them for tenants.
const WORKERS: usize = 4;

/// Where the agent begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Init has nothing mounted yet, and waits for the volumes.
    AtTheVolumes,
    /// Everything is mounted.
    AtTheService,
}

/// Runs the agent until it is told to end.
pub fn main(start: Start) -> ! {
    let Some(socket) = sys::descriptor::inherited(spawn::AGENT_FD) else {
        eprintln!("agent: descriptor 3 is not open; this program is started by init");
        std::process::exit(1);
    };
    if start == Start::AtTheVolumes && !opened_and_mounted(&socket) {
        // Init, which sees the socket closed, waits no longer, even where a disk keeps this process.
        drop(socket);
        std::process::exit(1);
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = match builder.worker_threads(WORKERS).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => fail("runtime", &error),
    };
    let (init, notices) = match runtime.block_on(async { Init::start(socket) }) {
        Ok(started) => started,
        Err(error) => fail("init", &error),
    };
    runtime.block_on(run(init, notices));
    // Nothing is left to do: tasks are not taken apart one by one, which some would call a fault, and
    // what hangs in a disk is not waited for.
    std::process::exit(0)
}

/// Opens the volumes and has init mount them. Returns whether both were done.
fn opened_and_mounted(socket: &OwnedFd) -> bool {
    let told = || {
        spawn::send(socket, &Milestone::VolumesOpen, &[])?;
        poll(&mut [PollFd::new(socket, PollFlags::IN)], None)
            .map_err(|error| PacketError::Socket { source: error.into() })?;
        spawn::receive::<Milestone>(socket)
    };
    if unlock::open_and_check(Path::new("/")) == Opening::GivenUp {
        return false;
    }
    match told() {
        Ok(Some((milestone, _))) => milestone == Milestone::VolumesMounted,
        Ok(None) => false,
        Err(error) => {
            eprintln!("{}", Event::Trouble { place: "init", reason: chain(&error) });
            false
        }
    }
}
