//! The DHCP server of one tap: a socket round [`GuestLease::answer`].

use std::{ffi::OsString, io, net::SocketAddrV4};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use tokio::{net::UdpSocket, sync::watch, task::JoinHandle};

use crate::net::dhcp::{CLIENT_PORT, MAX_MESSAGE, SERVER_PORT, server::GuestLease};

/// A running server; ends when dropped.
#[derive(Debug)]
pub(super) struct Server {
    lease: watch::Sender<GuestLease>,
    task: JoinHandle<()>,
}

impl Server {
    /// Starts answering on an interface that is up.
    pub(super) fn start(interface: &str, lease: GuestLease) -> io::Result<Self> {
        let socket = open(interface)?;
        let (lease, current) = watch::channel(lease);
        let task = tokio::spawn(serve(socket, current));
        Ok(Self { lease, task })
    }

    /// Answers with `lease` from now on.
    pub(super) fn update(&self, lease: GuestLease) {
        self.lease.send_if_modified(|current| {
            let changed = *current != lease;
            *current = lease;
            changed
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Opens a socket that sees only this interface. Other taps have theirs on the same port.
fn open(interface: &str) -> io::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    setsockopt(&socket, sockopt::BindToDevice, &OsString::from(interface))?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    setsockopt(&socket, sockopt::Broadcast, &true)?;
    bind(&socket, &SocketAddrV4::new(std::net::Ipv4Addr::UNSPECIFIED, SERVER_PORT))?;
    UdpSocket::from_std(socket.into())
}

async fn serve(socket: UdpSocket, lease: watch::Receiver<GuestLease>) {
    let mut buffer = [0; MAX_MESSAGE];
    loop {
        // An error is about an earlier answer, or the interface is gone and the task soon too.
        let Ok((length, _)) = socket.recv_from(&mut buffer).await else {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            continue;
        };
        let reply = lease.borrow().answer(&buffer[..length]);
        if let Some(reply) = reply {
            let sent = socket.send_to(&reply.message, (reply.to, CLIENT_PORT)).await;
            if let Err(error) = sent {
                tracing::debug!(to = %reply.to, %error, "DHCP answer not sent");
            }
        }
    }
}
