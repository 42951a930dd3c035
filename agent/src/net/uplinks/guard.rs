//! Whether other hosts have an uplink's IPv4 addresses: a socket and a clock round [`Guard`].

use std::{
    io,
    net::Ipv4Addr,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use tokio::{
    io::unix::AsyncFd,
    sync::{mpsc, watch as channel},
    task::JoinHandle,
};

use super::client::{receive, sleep_until};
use crate::{
    net::conflict::{Claims, Finding, Guard},
    sys::packet,
};

/// Pause after each packet: nobody on the link costs the node more than 200 looks a second.
const PAUSE: Duration = Duration::from_millis(5);
/// Pause before the socket is used again after it reported an error, as that the link went down.
const RETRY: Duration = Duration::from_millis(500);

/// What was found out about an address of an interface.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) index: u32,
    pub(super) address: Ipv4Addr,
    pub(super) finding: Finding,
}

/// A running guard; ends when dropped.
#[derive(Debug)]
pub(super) struct Guarding {
    claims: channel::Sender<Claims>,
    carrier: mpsc::Sender<()>,
    task: JoinHandle<()>,
}

impl Guarding {
    /// Starts on an interface that is up.
    pub(super) fn start(
        index: u32,
        claims: Claims,
        findings: mpsc::Sender<Found>,
    ) -> io::Result<Self> {
        let guard = Guard::new(claims.clone(), Instant::now());
        let socket = open(index, &guard)?;
        let (claims, changes) = channel::channel(claims);
        let (carrier, carriers) = mpsc::channel(1);
        let shell = Shell { index, guard, socket, claims: changes, findings, carriers };
        Ok(Self { claims, carrier, task: tokio::spawn(shell.run()) })
    }

    /// Says what the interface claims now.
    pub(super) fn claim(&self, claims: Claims) {
        self.claims.send_if_modified(|known| {
            let is_changed = *known != claims;
            *known = claims;
            is_changed
        });
    }

    /// Tells the guard that the carrier came back.
    pub(super) fn carrier_is_back(&self) {
        // When one such notice waits already, it is enough.
        let _ = self.carrier.try_send(());
    }
}

impl Drop for Guarding {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Shell {
    index: u32,
    guard: Guard,
    socket: AsyncFd<OwnedFd>,
    claims: channel::Receiver<Claims>,
    findings: mpsc::Sender<Found>,
    carriers: mpsc::Receiver<()>,
}

impl Shell {
    async fn run(mut self) {
        loop {
            while let Some(frame) = self.guard.poll_transmit() {
                if let Err(error) = packet::send_frame(self.index, &frame) {
                    tracing::debug!(index = self.index, %error, "ARP not sent");
                }
            }
            while let Some((address, finding)) = self.guard.poll_finding() {
                let found = Found { index: self.index, address, finding };
                if self.findings.send(found).await.is_err() {
                    return;
                }
            }
            let deadline = self.guard.poll_timeout();
            tokio::select! {
                packet = receive(&self.socket) => match packet {
                    Some(packet) => {
                        self.guard.handle_packet(Instant::now(), &packet);
                        tokio::time::sleep(PAUSE).await;
                    }
                    None => tokio::time::sleep(RETRY).await,
                },
                () = sleep_until(deadline) => self.guard.handle_timeout(Instant::now()),
                changed = self.claims.changed() => {
                    let claims = self.claims.borrow_and_update().clone();
                    if changed.is_err() {
                        return;
                    }
                    self.follow(claims);
                }
                notice = self.carriers.recv() => match notice {
                    Some(()) => self.guard.handle_carrier(Instant::now()),
                    None => return,
                },
            }
        }
    }

    /// Goes over to other claims, and listens for them before they are asked for.
    fn follow(&mut self, claims: Claims) {
        self.guard.handle_claims(Instant::now(), claims);
        match open(self.index, &self.guard) {
            Ok(socket) => self.socket = socket,
            Err(error) => {
                tracing::warn!(index = self.index, %error, "conflicts are not looked for")
            }
        }
    }
}

fn open(index: u32, guard: &Guard) -> io::Result<AsyncFd<OwnedFd>> {
    packet::open_arp(index, &guard.watched().collect::<Vec<_>>())
}
