//! The DHCPv6 client of one interface: a socket and a clock round [`Client`].

use std::{
    ffi::OsString,
    io,
    net::{Ipv6Addr, SocketAddrV6},
    time::Instant,
};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt::set_ipv6_v6only,
};
use tokio::{net::UdpSocket, sync::mpsc, task::JoinHandle};

use crate::net::{
    dhcp6::{
        CLIENT_PORT, MAX_MESSAGE, SERVER_PORT, SERVERS,
        client::{Client, Event, Wanted},
    },
    links::LinkFacts,
};

/// A running client; ends when dropped.
#[derive(Debug)]
pub(super) struct Running6 {
    wanted: Wanted,
    carrier: mpsc::Sender<()>,
    task: JoinHandle<()>,
}

impl Running6 {
    /// Starts `client` on an interface that is up. Events come with the interface's index.
    pub(super) fn start(
        link: &LinkFacts,
        client: Client,
        events: mpsc::Sender<(u32, Event)>,
    ) -> io::Result<Self> {
        let socket = open(&link.name)?;
        let (carrier, carriers) = mpsc::channel(1);
        let wanted = client.wanted();
        let (index, name) = (link.index, link.name.clone());
        let shell = Shell { index, name, client, socket, events, carriers };
        Ok(Self { wanted, carrier, task: tokio::spawn(shell.run()) })
    }

    /// Returns what it asks for.
    pub(super) fn wanted(&self) -> Wanted {
        self.wanted
    }

    /// Tells the client that the carrier came back.
    pub(super) fn carrier_is_back(&self) {
        // When one such notice waits already, it is enough.
        let _ = self.carrier.try_send(());
    }
}

impl Drop for Running6 {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Shell {
    index: u32,
    name: String,
    client: Client,
    socket: UdpSocket,
    events: mpsc::Sender<(u32, Event)>,
    carriers: mpsc::Receiver<()>,
}

impl Shell {
    async fn run(mut self) {
        let mut buffer = [0; MAX_MESSAGE];
        loop {
            while let Some(message) = self.client.poll_transmit() {
                let servers = SocketAddrV6::new(SERVERS, SERVER_PORT, 0, self.index);
                // While the link-local address is being checked nothing can be sent; the next
                // attempt is soon.
                if let Err(error) = self.socket.send_to(&message, servers).await {
                    tracing::debug!(interface = self.name, %error, "DHCPv6 message not sent");
                }
            }
            while let Some(event) = self.client.poll_event() {
                if self.events.send((self.index, event)).await.is_err() {
                    return;
                }
            }
            let deadline = self.client.poll_timeout();
            tokio::select! {
                received = self.socket.recv_from(&mut buffer) => match received {
                    Ok((length, _)) => self.client.handle_message(Instant::now(), &buffer[..length]),
                    // About an earlier message.
                    Err(_) => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
                },
                () = sleep_until(deadline) => self.client.handle_timeout(Instant::now()),
                notice = self.carriers.recv() => match notice {
                    Some(()) => self.client.handle_carrier(Instant::now()),
                    None => return,
                },
            }
        }
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

/// Opens a socket that sees only this interface.
fn open(interface: &str) -> io::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, flags, None)?;
    setsockopt(&socket, sockopt::BindToDevice, &OsString::from(interface))?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    set_ipv6_v6only(&socket, true)?;
    bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, CLIENT_PORT, 0, 0))?;
    UdpSocket::from_std(socket.into())
}
