//! Shows the task what passes a tap: a packet socket, and no more of it than its owner may cost.

use std::{io, os::fd::OwnedFd, time::Duration};

use tokio::{io::unix::AsyncFd, sync::mpsc, task::JoinHandle};
use types::ids::MachineId;

use super::bindings::Way;
use crate::sys::observe::{self, Passed};

/// Longest packet that is looked at: DHCP fits, and what discovery says is in its first bytes.
const MAX_PACKET: usize = 2048;
/// Pause after each packet: 200 a second are more than any guest needs, and what a guest that sends
/// more loses is its own.
const PAUSE: Duration = Duration::from_millis(5);

/// A packet that passed a guest's tap.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) machine: MachineId,
    pub(super) way: Way,
    pub(super) packet: Vec<u8>,
}

/// A running watch; ends when dropped.
#[derive(Debug)]
pub(super) struct Watch(JoinHandle<()>);

impl Watch {
    /// Starts to watch the interface.
    pub(super) fn start(
        machine: MachineId,
        index: u32,
        tell: mpsc::Sender<Seen>,
    ) -> io::Result<Self> {
        let socket = observe::open(index)?;
        Ok(Self(tokio::spawn(async move {
            while let Some((way, packet)) = receive(&socket).await {
                if tell.send(Seen { machine, way, packet }).await.is_err() {
                    return;
                }
                tokio::time::sleep(PAUSE).await;
            }
        })))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Waits for a packet; `None` when the interface is gone.
async fn receive(socket: &AsyncFd<OwnedFd>) -> Option<(Way, Vec<u8>)> {
    loop {
        let mut ready = socket.readable().await.ok()?;
        let mut packet = vec![0; MAX_PACKET];
        match ready.try_io(|socket| observe::read(socket.get_ref(), &mut packet)) {
            Ok(Ok((length, passed))) => {
                packet.truncate(length);
                let way = match passed {
                    Passed::In => Way::FromGuest,
                    Passed::Out => Way::ToGuest,
                };
                return Some((way, packet));
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
