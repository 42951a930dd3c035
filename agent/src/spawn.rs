//! What `agent` asks of `init` and what it is told: one JSON document per packet of a
//! `SOCK_SEQPACKET` socket, descriptors beside it (`SCM_RIGHTS`).
//!
//! init trusts the agent with machines, not with itself: every field is checked here, and nothing
//! the agent sends makes init wait.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};
use types::ids::MachineId;

/// The agent's end of the socket.
pub const AGENT_FD: i32 = 3;

/// Largest packet, in bytes.
pub const MAX_PACKET: usize = 64 << 10;

/// Most descriptors beside one packet; the kernel's own limit is 253 (`SCM_MAX_FD`).
pub const MAX_FILES: usize = 200;

/// Most machines that init runs and remembers.
pub const MAX_MACHINES: usize = 256;

/// Most characters of a process's last line that are passed on: a reason with its causes.
pub const MAX_SAID: usize = 600;

/// What init passes on as the last line of a machine's process that the kernel ended for want of memory.
pub const OUT_OF_MEMORY: &str = "the kernel ended it for want of memory";

/// Smallest and largest user id of a machine's process.
pub const UIDS: std::ops::RangeInclusive<u32> = 100_000..=199_999;

/// User and group of the screen's program, which may read the agent's local interface.
pub const DASHBOARD_ID: u32 = 90_000;

/// What the agent asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask", deny_unknown_fields)]
pub enum Request {
    /// Start the machine's VMM. The first descriptor becomes its number 3, the next 4, ….
    Spawn(SpawnOrder),
    /// End the machine's VMM at once. Answered by [`Answer::Exited`].
    Kill {
        /// Which.
        machine: MachineId,
    },
    /// Tell what runs. Answered by [`Answer::Machines`].
    List,
    /// Take the node down.
    Shutdown {
        /// How.
        action: Action,
    },
    /// Whether the screen's program may have the console.
    Screen {
        /// Whose it is.
        console: Console,
    },
    /// The agent is at work. Must come at least every [`crate::init::supervise::LIVENESS`].
    Alive {
        /// When machines that run have to end, which init sees to if the agent does not
        /// ([`crate::init::ends`]).
        ends: Vec<Due>,
    },
    /// What runs is the good release: if it was tried in this boot, that is over ([`crate::init::trial`]).
    Settled,
}

/// What both tell each other before anything else, where the agent was started to open the volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Milestone {
    /// The agent opened what can be opened, and had it checked.
    VolumesOpen,
    /// init mounted it: the agent goes on as the node's service.
    VolumesMounted,
}

/// When a machine has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Due {
    /// Which.
    pub machine: MachineId,
    /// Seconds that it has left; 0 when its end came.
    pub left_s: u64,
}

/// Who has the first console.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Console {
    /// The agent, which asks somebody there; the screen's program ends.
    Agent,
    /// The screen's program, from now on.
    Screen,
}

/// One VMM to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpawnOrder {
    /// Its machine.
    pub machine: MachineId,
    /// Memory its cgroup may use, in bytes.
    pub memory_bytes: u64,
    /// Threads and processes its cgroup may hold.
    pub tasks: u32,
    /// The host's CPUs that they may run on; any when empty.
    pub cpus: Vec<u32>,
}

/// What init tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "tell", deny_unknown_fields)]
pub enum Answer {
    /// The machine's VMM was started.
    Spawned {
        /// Which.
        machine: MachineId,
        /// Its process id.
        pid: i32,
    },
    /// It was not started.
    Refused {
        /// Which.
        machine: MachineId,
        /// Why.
        reason: String,
    },
    /// The machine's VMM ended.
    Exited {
        /// Which.
        machine: MachineId,
        /// How.
        status: Ending,
        /// Last line it wrote, at most [`MAX_SAID`] characters; empty when it wrote none. Of one that
        /// the kernel ended for want of memory, [`OUT_OF_MEMORY`].
        said: String,
    },
    /// What runs, and what ended since it was started last.
    Machines {
        /// One entry per machine.
        machines: Vec<Known>,
    },
    /// The node goes down: press the machines' power buttons now.
    ShuttingDown {
        /// How.
        action: Action,
        /// Machines are killed after this time, in seconds.
        grace_s: u64,
    },
}

/// A machine that init knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// Which.
    pub machine: MachineId,
    /// Its process id.
    pub pid: i32,
    /// How it ended; `None` while it runs.
    pub ended: Option<Ending>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Ending {
    /// It exited.
    Exit {
        /// Its status.
        code: i32,
    },
    /// It was killed.
    Signal {
        /// By this signal.
        number: i32,
    },
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exit { code } => write!(f, "exit-{code}"),
            Self::Signal { number } => write!(f, "signal-{number}"),
        }
    }
}

/// How the node goes down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Off.
    PowerOff,
    /// And up again.
    Reboot,
}

impl Action {
    /// Returns the action's name in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PowerOff => "power-off",
            Self::Reboot => "reboot",
        }
    }
}

/// Why a packet cannot be sent or understood.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum PacketError {
    #[error("the socket between init and agent is closed")]
    Closed,
    #[error("cannot use the socket between init and agent")]
    Socket { source: io::Error },
    #[error("a packet between init and agent is no document of this release")]
    Document { source: serde_json::Error },
    #[error(
        "a packet between init and agent was longer than {MAX_PACKET} bytes or carried more than {MAX_FILES} descriptors"
    )]
    Truncated,
}

/// Sends one document and the descriptors `files`, without waiting.
pub fn send<T: Serialize>(
    socket: impl AsFd,
    document: &T,
    files: &[OwnedFd],
) -> Result<(), PacketError> {
    let bytes = serde_json::to_vec(document).map_err(|source| PacketError::Document { source })?;
    if bytes.len() > MAX_PACKET || files.len() > MAX_FILES {
        return Err(PacketError::Truncated);
    }
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Err(PacketError::Closed),
        Err(error) => Err(PacketError::Socket { source: error.into() }),
    }
}

/// Receives one document and its descriptors, without waiting; `None` when there is none now.
pub fn receive<T: for<'de> Deserialize<'de>>(
    socket: impl AsFd,
) -> Result<Option<(T, Vec<OwnedFd>)>, PacketError> {
    let mut bytes = vec![0; MAX_PACKET];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received =
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        {
            Ok(received) => received,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(rustix::io::Errno::CONNRESET) => return Err(PacketError::Closed),
            Err(error) => return Err(PacketError::Socket { source: error.into() }),
        };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            files.extend(descriptors);
        }
    }
    if received.bytes == 0 {
        return Err(PacketError::Closed);
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(PacketError::Truncated);
    }
    let document = serde_json::from_slice(&bytes[..received.bytes])
        .map_err(|source| PacketError::Document { source })?;
    Ok(Some((document, files)))
}

/// Makes the two ends: init's and the agent's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn a_request_arrives_with_its_files() {
        let (init, agent) = pair().expect("a socket pair");
        let machine = MachineId::from_bytes([3; 16]);
        let order = SpawnOrder { machine, memory_bytes: 1 << 30, tasks: 64, cpus: vec![1, 2] };
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"spec").expect("written");
        send(&agent, &Request::Spawn(order.clone()), &[file.into()]).expect("sent");
        let (request, mut files) =
            receive::<Request>(&init).expect("received").expect("one packet");
        assert_eq!(request, Request::Spawn(order));
        let mut file = std::fs::File::from(files.pop().expect("one descriptor"));
        let mut text = String::new();
        file.rewind().expect("at the start");
        file.read_to_string(&mut text).expect("read");
        assert_eq!(text, "spec");
        assert!(receive::<Request>(&init).expect("nothing wrong").is_none());
    }

    #[test]
    fn the_ends_of_as_many_machines_as_there_may_be_fit_into_a_packet() {
        let (init, agent) = pair().expect("a socket pair");
        let machine = MachineId::from_bytes([0xff; 16]);
        let ends = vec![Due { machine, left_s: u64::MAX }; MAX_MACHINES];
        let alive = Request::Alive { ends };
        send(&agent, &alive, &[]).expect("sent");
        let (request, _) = receive::<Request>(&init).expect("received").expect("one packet");
        assert_eq!(request, alive);
    }

    #[test]
    fn rubbish_and_a_closed_end_are_told_apart() {
        let (init, agent) = pair().expect("a socket pair");
        rustix::io::write(&agent, b"{\"ask\":\"dance\"}").expect("sent");
        assert!(matches!(receive::<Request>(&init), Err(PacketError::Document { .. })));
        drop(agent);
        assert!(matches!(receive::<Request>(&init), Err(PacketError::Closed)));
    }
}
