//! The DHCP server of one tap: a socket round [`GuestLease::answer`].

use std::{ffi::OsString, io, net::SocketAddrV4};

use nix::sys::socket::{setsockopt, sockopt};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use tokio::{net::UdpSocket, sync::watch, task::JoinHandle};

use crate::{
    net::dhcp::{CLIENT_PORT, MAX_MESSAGE, SERVER_PORT, server::GuestLease},
    sys::udp::send_no_checksum,
};

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
    // A tap whose guest completes checksums gets frames with a part of one. A client that reads frames below
    // its own network stack, as before it has an address, sees that part and takes it for a fault.
    send_no_checksum(&socket)?;
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

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Write},
        os::fd::OwnedFd,
        process::Command,
        time::Duration,
    };

    use super::*;
    use crate::{
        net::{
            HardwareAddress, Ipv4Prefix,
            dhcp::{client::Client, frame},
        },
        sys::tap,
    };

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    /// The header of virtio-net and that of Ethernet.
    const BEFORE_IPV4: usize = 12 + 14;
    /// Where a UDP header without IPv4 options has its checksum.
    const CHECKSUM: std::ops::Range<usize> = 26..28;

    /// What the server answers to a guest's first question, as the guest's card gets it.
    fn offer() -> Vec<u8> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a network of its own");
        let card = tap::open("card").expect("a tap");
        tap::take_unfinished_checksums(&card).expect("a kernel that offloads");
        let ip = |arguments: &str| {
            let done = Command::new("ip").args(arguments.split(' ')).status().expect("started");
            assert!(done.success(), "ip {arguments}");
        };
        ip("link set card up");
        ip("addr add 10.77.0.1/16 dev card");
        ip("neigh add 10.77.1.2 lladdr 02:00:00:00:00:01 dev card");
        let hardware = HardwareAddress(MAC);
        let lease = GuestLease {
            hardware,
            address: Ipv4Prefix::new([10, 77, 1, 2].into(), 16).expect("a length"),
            gateway: [10, 77, 0, 1].into(),
            dns: Vec::new(),
            mtu: 1500,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let _server = Server::start("card", lease).expect("a server");
            let mut client = Client::new(hardware, None, 1, std::time::Instant::now());
            client.handle_timeout(std::time::Instant::now());
            let question = client.poll_transmit().expect("a question").message;
            let packet = frame::wrap(&question).expect("short");
            let ethernet = [&[0; 12][..], &[0xff; 6], &MAC, &[8, 0], &packet].concat();
            File::from(card.try_clone().expect("another")).write_all(&ethernet).expect("sent");
            tokio::time::timeout(Duration::from_secs(5), udp(card)).await.expect("an answer")
        })
    }

    /// The next packet of a DHCP server that comes out of a tap.
    async fn udp(card: OwnedFd) -> Vec<u8> {
        let mut card = File::from(card);
        let mut bytes = [0; 2048];
        loop {
            let length = card.read(&mut bytes).unwrap_or(0);
            let packet = bytes[..length].get(BEFORE_IPV4..).unwrap_or_default();
            if frame::unwrap(packet).is_some() {
                return packet.to_vec();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[test]
    fn a_guest_that_reads_frames_itself_sees_no_unfinished_checksum() {
        if !nix::unistd::geteuid().is_root() || std::fs::metadata("/dev/net/tun").is_err() {
            println!("skipped: the checksum of DHCP answers: needs root and /dev/net/tun");
            return;
        }
        let packet = std::thread::spawn(offer).join().expect("an offer");
        assert_eq!(packet[CHECKSUM], [0, 0]);
    }
}
