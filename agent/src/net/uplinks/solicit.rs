//! Asks the routers of an uplink for an advertisement.
//!
//! The kernel asks when an interface comes up, keeps what it uses itself, and passes name servers on only when an
//! advertisement comes: an agent that starts on an interface that is up already would know none until the next
//! one, which routers may send half an hour later.
//! Source: RFC 4861 §6.3.7 and §10.

use std::{io, net::SocketAddrV6, os::fd::OwnedFd, time::Duration};

use rustix::net::{RecvFlags, recvfrom};
use tokio::{io::unix::AsyncFd, task::JoinHandle, time::timeout};

use crate::net::{
    discovery::{self, ADVERTISEMENT},
    links::LinkFacts,
};

/// MAX_RTR_SOLICITATIONS and RTR_SOLICITATION_INTERVAL.
const SOLICITATIONS: u32 = 3;
const INTERVAL: Duration = Duration::from_secs(4);
/// MAX_RTR_SOLICITATION_DELAY, in milliseconds, within which each node chooses: servers of one power supply
/// start together.
const MAX_DELAY_MS: u64 = 1000;

/// Somebody who asks, or has asked; ends when dropped.
#[derive(Debug)]
pub(super) struct Solicitor {
    task: JoinHandle<()>,
}

impl Solicitor {
    /// Starts on an interface that is up.
    pub(super) fn start(link: &LinkFacts) -> io::Result<Self> {
        let socket = crate::sys::descriptor::watched(discovery::open(&link.name)?)?;
        Ok(Self { task: tokio::spawn(run(socket, link.index)) })
    }
}

impl Drop for Solicitor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Asks until an advertisement comes, whoever asked for it.
async fn run(socket: AsyncFd<OwnedFd>, index: u32) {
    // Without randomness all ask at once, which is no fault.
    let delay_ms = getrandom::u64().unwrap_or_default() % MAX_DELAY_MS;
    if timeout(Duration::from_millis(delay_ms), advertised(&socket)).await.is_ok() {
        return;
    }
    for _ in 0..SOLICITATIONS {
        if let Err(error) = discovery::solicit(socket.get_ref(), index) {
            tracing::debug!(index, %error, "router solicitation not sent");
        }
        if timeout(INTERVAL, advertised(&socket)).await.is_ok() {
            return;
        }
    }
}

/// Waits for an advertisement of a router on the link.
async fn advertised(socket: &AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut ready) = socket.readable().await else { return };
        let mut packet = [0; 8];
        let received = ready
            .try_io(|socket| Ok(recvfrom(socket.get_ref(), &mut packet[..], RecvFlags::empty())?));
        match received {
            Ok(Ok((_, _, Some(from)))) if packet[0] == ADVERTISEMENT => {
                // RFC 4861 §6.1.2: from elsewhere it is none.
                let from = SocketAddrV6::try_from(from);
                if from.is_ok_and(|from| from.ip().is_unicast_link_local()) {
                    return;
                }
            }
            Ok(Ok(_)) | Err(_) => {}
            // The interface is gone or off for now.
            Ok(Err(_)) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    }
}
