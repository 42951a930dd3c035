//! The DHCP client of one interface: sockets and a clock round [`Client`].

use std::{
    ffi::OsString,
    io,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    os::fd::OwnedFd,
    time::Instant,
};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use tokio::{io::unix::AsyncFd, sync::mpsc, task::JoinHandle};

use crate::{
    net::{
        dhcp::{
            CLIENT_PORT, SERVER_PORT,
            client::{Client, Destination, Event, Transmit},
            frame,
        },
        links::LinkFacts,
    },
    sys::packet,
};

/// The largest IPv4 packet that is read; longer ones are no DHCP.
const MAX_PACKET: usize = 2048;
/// Notices that may wait.
const NOTICES: usize = 4;

/// What the client is told.
#[derive(Debug, Clone, Copy)]
enum Notice {
    /// The carrier came back.
    Carrier,
    /// Another host has this address.
    Conflict(Ipv4Addr),
}

/// A running client; ends when dropped.
#[derive(Debug)]
pub(super) struct Running {
    notices: mpsc::Sender<Notice>,
    task: JoinHandle<()>,
}

impl Running {
    /// Starts `client` on an interface that is up. Events come with the interface's index.
    pub(super) fn start(
        link: &LinkFacts,
        client: Client,
        events: mpsc::Sender<(u32, Event)>,
    ) -> io::Result<Self> {
        let socket = packet::open(link.index)?;
        let (notices, noticed) = mpsc::channel(NOTICES);
        let shell = Shell {
            index: link.index,
            name: link.name.clone(),
            client,
            socket,
            renewals: None,
            events,
            noticed,
        };
        Ok(Self { notices, task: tokio::spawn(shell.run()) })
    }

    /// Tells the client that the carrier came back.
    pub(super) fn carrier_is_back(&self) {
        // When so many notices wait, one of them is this.
        let _ = self.notices.try_send(Notice::Carrier);
    }

    /// Tells the client that another host has this address. It is told again while the other stays.
    pub(super) fn conflict(&self, address: Ipv4Addr) {
        let _ = self.notices.try_send(Notice::Conflict(address));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Shell {
    index: u32,
    name: String,
    client: Client,
    socket: AsyncFd<OwnedFd>,
    /// Sends renewals, and keeps the kernel from refusing their answers, which the packet socket
    /// reads.
    renewals: Option<UdpSocket>,
    events: mpsc::Sender<(u32, Event)>,
    noticed: mpsc::Receiver<Notice>,
}

impl Shell {
    async fn run(mut self) {
        loop {
            while let Some(transmit) = self.client.poll_transmit() {
                if let Err(error) = self.transmit(&transmit) {
                    tracing::debug!(interface = self.name, %error, "DHCP message not sent");
                }
            }
            while let Some(event) = self.client.poll_event() {
                self.renewals = None;
                if self.events.send((self.index, event)).await.is_err() {
                    return;
                }
            }
            let deadline = self.client.poll_timeout();
            tokio::select! {
                packet = receive(&self.socket) => {
                    if let Some((_, message)) = packet.as_deref().and_then(frame::unwrap) {
                        self.client.handle_message(Instant::now(), message);
                    }
                }
                () = sleep_until(deadline) => self.client.handle_timeout(Instant::now()),
                notice = self.noticed.recv() => match notice {
                    Some(Notice::Carrier) => self.client.handle_carrier(Instant::now()),
                    Some(Notice::Conflict(address)) => {
                        self.client.handle_conflict(Instant::now(), address);
                    }
                    None => return,
                },
            }
        }
    }

    fn transmit(&mut self, transmit: &Transmit) -> io::Result<()> {
        match transmit.to {
            Destination::Broadcast => {
                let packet = frame::wrap(&transmit.message).ok_or(io::ErrorKind::InvalidInput)?;
                packet::broadcast(self.socket.get_ref(), self.index, &packet)
            }
            Destination::Server { from, server } => {
                let from = SocketAddrV4::new(from, CLIENT_PORT);
                let socket = match self.renewals.take() {
                    Some(socket) => socket,
                    None => open(&self.name, from)?,
                };
                let sent = socket.send_to(&transmit.message, (server, SERVER_PORT));
                self.renewals = Some(socket);
                sent.map(drop)
            }
        }
    }
}

pub(super) async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

/// Waits for a packet; `None` when the socket reports an error, as that the link went down.
pub(super) async fn receive(socket: &AsyncFd<OwnedFd>) -> Option<Vec<u8>> {
    loop {
        let mut ready = socket.readable().await.ok()?;
        let mut packet = vec![0; MAX_PACKET];
        match ready.try_io(|socket| Ok(rustix::io::read(socket.get_ref(), &mut packet)?)) {
            Ok(Ok(length)) => {
                packet.truncate(length);
                return Some(packet);
            }
            Ok(Err(_)) => return None,
            Err(_would_block) => {}
        }
    }
}

fn open(interface: &str, from: SocketAddrV4) -> io::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    setsockopt(&socket, sockopt::BindToDevice, &OsString::from(interface))?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(&socket, &from)?;
    Ok(socket.into())
}
