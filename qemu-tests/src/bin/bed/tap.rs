//! Taps: made and opened by the agent's own code, in a program of its own, which sends the descriptors.

use std::{
    collections::BTreeMap,
    fs,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixListener},
    process::Command,
};

use anyhow::{Context, Result, bail};
use qemu_tests::bed::network::TAP;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use types::vm::MAX_QUEUE_PAIRS;

/// Where the program sends the descriptors to.
const SOCKET: &str = "/run/tap.sock";
/// Room for the descriptors of all queues that a device can have.
const ROOM: usize = rustix::cmsg_space!(ScmRights(MAX_QUEUE_PAIRS as usize));

/// Taps of a machine that is being launched: their queues, by name.
#[derive(Default)]
pub(super) struct Taps(BTreeMap<String, Vec<Option<OwnedFd>>>);

impl Taps {
    /// Returns one queue of a tap with that many.
    pub(super) fn queue(&mut self, name: &str, queues: u32, queue: u32) -> Result<OwnedFd> {
        if !self.0.contains_key(name) {
            let all = open(name, queues)?;
            self.0.insert(name.to_owned(), all.into_iter().map(Some).collect());
        }
        let all = self.0.get_mut(name).context("it was just put there")?;
        let slot = usize::try_from(queue).ok().and_then(|queue| all.get_mut(queue));
        slot.and_then(Option::take).with_context(|| format!("{name} has no queue {queue} left"))
    }
}

fn open(name: &str, queues: u32) -> Result<Vec<OwnedFd>> {
    fs::remove_file(SOCKET).ok();
    let listener = UnixListener::bind(SOCKET)?;
    let mut child = Command::new(TAP)
        .args([name, &queues.to_string(), SOCKET])
        .spawn()
        .context("cannot start the program that opens taps")?;
    let status = child.wait()?;
    if !status.success() {
        bail!("{name} with {queues} queues: {status}");
    }
    // What it sent is there, although it has ended.
    let (stream, _) = listener.accept()?;
    let mut room = [MaybeUninit::uninit(); ROOM];
    let mut rights = RecvAncillaryBuffer::new(&mut room);
    let mut byte = [0];
    recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut rights, RecvFlags::CMSG_CLOEXEC)?;
    let mut all = Vec::new();
    for message in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            all.extend(files);
        }
    }
    Ok(all)
}
