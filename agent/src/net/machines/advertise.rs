//! The router of one tap: advertisements, by the clock and when the guest asks.
//! Source: RFC 4861 §4.2 and §6.2, RFC 8106 §5.1.
//!
//! | Offset | Size | Field                                             |
//! |--------|------|---------------------------------------------------|
//! | 0      | 2    | 134, 0                                            |
//! | 2      | 2    | checksum, by the kernel                           |
//! | 4      | 2    | hop limit, flags                                  |
//! | 6      | 2    | lifetime in seconds                               |
//! | 8      | 8    | reachable time and retransmission, not said       |
//! | 16     |      | options: prefix (3), MTU (5), name servers (25)   |

use std::{
    io,
    net::{Ipv6Addr, SocketAddrV6},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::net::{RecvFlags, SendFlags, recv, sendto};
use tokio::{io::unix::AsyncFd, sync::watch, task::JoinHandle};

use super::ipv6::GUEST_LENGTH;
use crate::net::discovery::{self, ADVERTISEMENT, SOLICITATION};

/// All nodes on a link.
const EVERYBODY: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Pause between two advertisements nobody asked for, and how long one counts.
const PERIOD: Duration = Duration::from_secs(200);
const LIFETIME_S: u16 = 1800;
/// How long addresses are valid and preferred.
const VALID_S: u32 = 86_400;
const PREFERRED_S: u32 = 14_400;
/// A guest that keeps asking gets no more answers than this (RFC 4861 MIN_DELAY_BETWEEN_RAS is 3 s;
/// a guest that boots asks thrice within seconds).
const LEAST_PAUSE: Duration = Duration::from_millis(500);
/// No more name servers are told.
const MAX_SERVERS: usize = 4;

/// What a guest is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Advertisement {
    /// Its network; the node is not its router while it has none.
    pub(super) network: Option<Ipv6Addr>,
    /// Networks that were its own and are not to be used any more.
    pub(super) retired: Vec<Ipv6Addr>,
    pub(super) mtu: u16,
    pub(super) dns: Vec<Ipv6Addr>,
}

impl Advertisement {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![ADVERTISEMENT, 0, 0, 0, 64, 0];
        bytes.extend(self.network.map_or(0, |_| LIFETIME_S).to_be_bytes());
        bytes.extend([0; 8]);
        let current = self.network.map(|network| (network, VALID_S, PREFERRED_S));
        // RFC 9096 §3.3; hosts keep such addresses for two hours for what they have begun.
        let retired = self.retired.iter().map(|network| (*network, 0, 0));
        for (network, valid_s, preferred_s) in current.into_iter().chain(retired) {
            // On this link (L), for addresses of its own (A).
            bytes.extend([3, 4, GUEST_LENGTH, 0b1100_0000]);
            bytes.extend(u32::to_be_bytes(valid_s));
            bytes.extend(u32::to_be_bytes(preferred_s));
            bytes.extend([0; 4]);
            bytes.extend(network.octets());
        }
        bytes.extend([5, 1, 0, 0]);
        bytes.extend(u32::from(self.mtu).to_be_bytes());
        let dns = &self.dns[..self.dns.len().min(MAX_SERVERS)];
        if !dns.is_empty() {
            let units = u8::try_from(1 + 2 * dns.len()).unwrap_or(1);
            bytes.extend([25, units, 0, 0]);
            bytes.extend(u32::from(LIFETIME_S).to_be_bytes());
            bytes.extend(dns.iter().flat_map(Ipv6Addr::octets));
        }
        bytes
    }
}

/// A running router; ends when dropped.
#[derive(Debug)]
pub(super) struct Router {
    told: watch::Sender<Advertisement>,
    task: JoinHandle<()>,
}

impl Router {
    /// Starts on an interface that is up.
    pub(super) fn start(interface: &str, index: u32, told: Advertisement) -> io::Result<Self> {
        let socket = crate::sys::descriptor::watched(discovery::open(interface)?)?;
        let (told, current) = watch::channel(told);
        Ok(Self { told, task: tokio::spawn(run(socket, index, current)) })
    }

    /// Tells this from now on.
    pub(super) fn update(&self, told: Advertisement) {
        self.told.send_if_modified(|current| {
            let changed = *current != told;
            *current = told;
            changed
        });
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(socket: AsyncFd<OwnedFd>, index: u32, mut told: watch::Receiver<Advertisement>) {
    let mut last: Option<Instant> = None;
    loop {
        let packet = told.borrow_and_update().to_bytes();
        let to = SocketAddrV6::new(EVERYBODY, 0, 0, index);
        let sent = sendto(socket.get_ref(), &packet, SendFlags::empty(), &to);
        if let Err(error) = sent {
            tracing::debug!(index, %error, "router advertisement not sent");
        }
        // Early failures are common: the link comes up together with the guest.
        let period = if sent.is_ok() { PERIOD } else { Duration::from_secs(1) };
        last = last.max(Some(Instant::now()));
        tokio::select! {
            () = tokio::time::sleep(period) => {}
            () = solicited(&socket) => {
                let earliest = last.map_or_else(Instant::now, |last| last + LEAST_PAUSE);
                tokio::time::sleep_until(earliest.into()).await;
            }
            Ok(()) = told.changed() => {}
        }
    }
}

/// Waits until the guest asks for a router.
async fn solicited(socket: &AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut ready) = socket.readable().await else { return };
        let mut packet = [0; 64];
        let received =
            ready.try_io(|socket| Ok(recv(socket.get_ref(), &mut packet[..], RecvFlags::empty())?));
        match received {
            Ok(Ok(_)) if packet[0] == SOLICITATION => return,
            Ok(Ok(_)) | Err(_) => {}
            // The interface is gone, and the task soon too.
            Ok(Err(_)) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advertisement_is_whole_options_of_eight_bytes() {
        let network: Ipv6Addr = "fd00:1:2:3::".parse().expect("an address");
        let dns = vec!["2600::53".parse().expect("an address"); 9];
        let told = Advertisement { network: Some(network), retired: Vec::new(), mtu: 1500, dns };
        let bytes = told.to_bytes();
        let mut options = &bytes[16..];
        let mut kinds = Vec::new();
        while let [kind, units, ..] = *options {
            kinds.push(kind);
            options = &options[usize::from(units) * 8..];
        }
        assert_eq!((kinds, options.len()), (vec![3, 5, 25], 0));
        assert_eq!(bytes[32..48], network.octets());
    }

    #[test]
    fn a_network_that_was_taken_away_is_neither_preferred_nor_routed() {
        let network = "2600:1:2:3::".parse().expect("an address");
        let gone = Advertisement { network: None, retired: vec![network], mtu: 1500, dns: vec![] };
        let bytes = gone.to_bytes();
        assert_eq!(bytes[6..8], [0, 0], "the router's lifetime");
        assert_eq!((bytes[20..28].to_vec(), &bytes[32..48]), (vec![0; 8], &network.octets()[..]));
    }
}
