//! What the kernel tells without being asked, over routing netlink. Each has a socket of its own: where very
//! many notices overflow one, the kernel drops what does not fit, and that must not be the answer to a request.
//! Source: netlink(7), "ENOBUFS".

use std::{io, time::Duration};

use bytes::BytesMut;
use futures_util::FutureExt;
use netlink_sys::{AsyncSocket, AsyncSocketExt, TokioSocket, protocols::NETLINK_ROUTE};
use rtnetlink::MulticastGroup;

/// Changes that the kernel tells of.
const GROUPS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv6Route,
];

/// `RTNLGRP_ND_USEROPT`.
const ND_USER_OPTIONS: u32 = 20;
/// Room for a few messages; an option has at most 2040 bytes. What is longer is cut off.
const MESSAGE_SIZE: usize = 8192;

/// How long to gather notices: longer than one change takes, shorter than anyone waits.
const SETTLE: Duration = Duration::from_millis(20);

/// Notices of changes; what they say is not looked at.
pub(in crate::net) struct Notices(TokioSocket);

impl Notices {
    /// Must be called inside a tokio runtime.
    pub(in crate::net) fn open() -> io::Result<Self> {
        open(GROUPS.map(|group| group as u32)).map(Self)
    }

    /// Waits for a notice. One that was lost because there were very many is one, too.
    pub(in crate::net) async fn next(&mut self) {
        let mut buffer = BytesMut::with_capacity(MESSAGE_SIZE);
        let first = self.0.recv(&mut buffer).await;
        // One change brings a handful of notices; one look at the kernel answers all of them. A socket
        // that is broken for good leads to no more than a look in this time.
        tokio::time::sleep(SETTLE).await;
        if first.is_err() {
            return;
        }
        loop {
            buffer.clear();
            let Some(Ok(_)) = self.0.recv(&mut buffer).now_or_never() else { break };
        }
    }
}

/// Router advertisements' options, as the kernel passes them on.
pub(in crate::net) struct Advertisements(TokioSocket);

impl Advertisements {
    /// Must be called inside a tokio runtime.
    pub(in crate::net) fn open() -> io::Result<Self> {
        open([ND_USER_OPTIONS]).map(Self)
    }

    /// Waits for netlink messages. Never returns when there will be none.
    pub(in crate::net) async fn next(&mut self) -> BytesMut {
        let mut buffer = BytesMut::with_capacity(MESSAGE_SIZE);
        while self.0.recv(&mut buffer).await.is_err() {
            // Some were lost because there were very many; the router repeats them.
            tokio::time::sleep(SETTLE).await;
        }
        buffer
    }
}

fn open(groups: impl IntoIterator<Item = u32>) -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
    socket.socket_mut().bind_auto()?;
    for group in groups {
        socket.socket_mut().add_membership(group)?;
    }
    Ok(socket)
}
