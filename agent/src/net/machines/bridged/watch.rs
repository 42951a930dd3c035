//! Shows the task what passes a tap: packet sockets, and no more of them than their owner may cost.
//!
//! Whoever defends an address is watched by a socket of its own, so that a guest that sends very much
//! delays nobody but itself. So is what a guest uses: of that some may be missed.

use std::{io, os::fd::OwnedFd, time::Duration};

use tokio::{io::unix::AsyncFd, sync::mpsc, task::JoinHandle};
use types::ids::MachineId;

use super::bindings::Way;
pub(super) use crate::sys::observe::Watched;
use crate::sys::observe::{self, Passed};

/// Longest frame that is looked at: DHCP fits, and what discovery says is in its first bytes.
const MAX_FRAME: usize = 2048;
/// Pause after each frame: 200 a second are more than any guest needs, and what a guest that sends
/// more loses is its own.
const PAUSE: Duration = Duration::from_millis(5);

/// A frame that passed a guest's tap.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) machine: MachineId,
    /// Why it was looked at.
    pub(super) watched: Watched,
    pub(super) way: Way,
    pub(super) frame: Vec<u8>,
    pub(super) missed: Missed,
}

/// Whether frames before were lost, because there were more than could be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missed {
    /// All were seen.
    None,
    /// Some were not.
    Some,
}

/// A running watch; ends when dropped.
#[derive(Debug)]
pub(super) struct Watch(Vec<JoinHandle<()>>);

impl Watch {
    /// Starts to watch the interface.
    pub(super) fn start(
        machine: MachineId,
        index: u32,
        tell: mpsc::Sender<Seen>,
    ) -> io::Result<Self> {
        let mut sockets = Vec::new();
        for watched in [Watched::Claims, Watched::Defences, Watched::Uses] {
            sockets.push((watched, observe::open(index, watched)?));
        }
        let shown = sockets
            .into_iter()
            .map(|(watched, socket)| tokio::spawn(show((machine, watched), socket, tell.clone())));
        Ok(Self(shown.collect()))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

async fn show(
    (machine, watched): (MachineId, Watched),
    socket: AsyncFd<OwnedFd>,
    tell: mpsc::Sender<Seen>,
) {
    while let Some((way, frame)) = receive(&socket).await {
        // After the frame was read: what was lost before it counts with it at the latest.
        let missed = match observe::lost(socket.get_ref()) {
            Ok(0) => Missed::None,
            Ok(_) | Err(_) => Missed::Some,
        };
        if tell.send(Seen { machine, watched, way, frame, missed }).await.is_err() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Waits for a frame; `None` when the interface is gone.
async fn receive(socket: &AsyncFd<OwnedFd>) -> Option<(Way, Vec<u8>)> {
    loop {
        let mut ready = socket.readable().await.ok()?;
        let mut frame = vec![0; MAX_FRAME];
        match ready.try_io(|socket| observe::read(socket.get_ref(), &mut frame)) {
            Ok(Ok((length, passed))) => {
                frame.truncate(length);
                let way = match passed {
                    Passed::In => Way::FromGuest,
                    Passed::Out => Way::ToGuest,
                };
                return Some((way, frame));
            }
            // A tap that goes down says so once, and may come up again.
            Ok(Err(error)) if error.raw_os_error() == Some(libc::ENETDOWN) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Ok(Err(_)) => return None,
            Err(_would_block) => {}
        }
    }
}
