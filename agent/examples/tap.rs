//! Opens a tap as the agent does for a machine, for tests that start a VMM without an agent.
//!
//! `tap NAME QUEUES` makes it, if there is none, and leaves it; `tap NAME QUEUES SOCKET` sends the
//! descriptors of its queues to whoever listens on the socket.

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use agent::net::machines::open_tap_queues;
use anyhow::{Context, Result, bail};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use types::vm::MAX_QUEUE_PAIRS;

/// Room for the descriptors of all queues that a device can have.
const ROOM: usize = rustix::cmsg_space!(ScmRights(MAX_QUEUE_PAIRS as usize));

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (name, queues, socket) = match arguments.as_slice() {
        [name, queues] => (name, queues, None),
        [name, queues, socket] => (name, queues, Some(socket)),
        _ => bail!("expected NAME QUEUES [SOCKET]"),
    };
    let queues: u32 = queues.parse().with_context(|| format!("{queues} queues"))?;
    if !(1..=MAX_QUEUE_PAIRS).contains(&queues) {
        bail!("{queues} queues; 1 to {MAX_QUEUE_PAIRS} are possible");
    }
    let (first, more) =
        open_tap_queues(name, queues).with_context(|| format!("cannot open {name}"))?;
    let Some(socket) = socket else { return Ok(()) };
    let stream = UnixStream::connect(socket).with_context(|| socket.clone())?;
    let all: Vec<BorrowedFd<'_>> =
        [&first].into_iter().chain(&more).map(|queue| queue.as_fd()).collect();
    let mut room = [MaybeUninit::uninit(); ROOM];
    let mut rights = SendAncillaryBuffer::new(&mut room);
    if !rights.push(SendAncillaryMessage::ScmRights(&all)) {
        bail!("no room for {} descriptors", all.len());
    }
    sendmsg(&stream, &[IoSlice::new(b"t")], &mut rights, SendFlags::empty())?;
    Ok(())
}
