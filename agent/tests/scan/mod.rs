//! A scan of ports: every port of an address is tried, over TCP or UDP, and what it says is told.

#![allow(clippy::unwrap_used, reason = "a scan that cannot be made fails the test")]
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send,
        socket_with, sockopt,
    },
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

/// Most sockets that are open at a time, and those of everybody else in this program.
const AT_ONCE: u64 = 8000;
const OTHERS: u64 = 300;
/// Between two looks at them.
const LOOK: Duration = Duration::from_millis(10);

/// What a port is asked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

/// What a port said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Answer {
    /// A connection was accepted, or a datagram answered.
    Open,
    /// Somebody said that nobody is there.
    Refused,
    /// Nobody said anything.
    Silent,
}

/// Asks the ports of an address; waits so long for those that are silent.
pub(crate) fn scan(
    protocol: Protocol,
    address: SocketAddr,
    ports: impl IntoIterator<Item = u16>,
    patience: Duration,
) -> BTreeMap<u16, Answer> {
    let ports: Vec<u16> = ports.into_iter().collect();
    let mut answers = BTreeMap::new();
    for some in ports.chunks(at_once()) {
        let mut open: Vec<(u16, OwnedFd)> =
            some.iter().map(|port| (*port, ask(protocol, address, *port))).collect();
        let deadline = Instant::now() + patience;
        while !open.is_empty() && Instant::now() < deadline {
            std::thread::sleep(LOOK);
            let ready = ready(protocol, &open);
            open = open
                .into_iter()
                .zip(ready)
                .filter_map(|((port, socket), ready)| {
                    let answer = ready.then(|| said(protocol, &socket));
                    match answer {
                        Some(answer) => answers.insert(port, answer).and(None),
                        None => Some((port, socket)),
                    }
                })
                .collect();
        }
        answers.extend(open.into_iter().map(|(port, _)| (port, Answer::Silent)));
    }
    answers
}

/// As many as the kernel lets a program have.
fn at_once() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(AT_ONCE + OTHERS);
    if limit.current.is_some_and(|current| current < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit }).unwrap();
    }
    usize::try_from(wanted.saturating_sub(OTHERS).max(100)).unwrap()
}

fn ask(protocol: Protocol, mut address: SocketAddr, port: u16) -> OwnedFd {
    address.set_port(port);
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let kind = match protocol {
        Protocol::Tcp => SocketType::STREAM,
        Protocol::Udp => SocketType::DGRAM,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, kind, flags, None).unwrap();
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => panic!("no way to {address}: {error}"),
    }
    if protocol == Protocol::Udp {
        let _ = send(&socket, b"?", SendFlags::NOSIGNAL);
    }
    socket
}

fn ready(protocol: Protocol, open: &[(u16, OwnedFd)]) -> Vec<bool> {
    let wanted = match protocol {
        Protocol::Tcp => PollFlags::OUT,
        Protocol::Udp => PollFlags::IN,
    };
    let mut waiting: Vec<PollFd<'_>> =
        open.iter().map(|(_, socket)| PollFd::new(socket, wanted)).collect();
    poll(&mut waiting, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    waiting.iter().map(|answer| !answer.revents().is_empty()).collect()
}

fn said(protocol: Protocol, socket: &OwnedFd) -> Answer {
    let result = match protocol {
        Protocol::Tcp => sockopt::socket_error(socket).unwrap(),
        Protocol::Udp => recv(socket, &mut [0; 64][..], RecvFlags::empty()).map(drop),
    };
    match result {
        Ok(()) => Answer::Open,
        // Nobody could be asked: there is no way there.
        Err(Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::TIMEDOUT) => Answer::Silent,
        Err(_) => Answer::Refused,
    }
}
