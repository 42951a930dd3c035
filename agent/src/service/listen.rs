//! Waits for the address that the overlay is to listen on, where the configuration names one of the node's
//! own: it comes after the agent's start, by DHCP, over a bond that has to agree with its switch, or when
//! the network was asked whether it is free. Meanwhile the network is let be, which brings it.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use tokio::sync::watch;

use super::orphans;
use crate::{console::Page, events::Event, machines::init::Init};

/// Time between two looks for the address: short beside what brings it.
const LOOK: Duration = Duration::from_millis(500);

/// Time between two signs of life ([`crate::init::supervise::LIVENESS`] is longer).
const ALIVE: Duration = Duration::from_secs(5);

/// Waits until the node has the address, and says what it waits for.
pub(super) async fn address(listen: SocketAddr, init: &Init, pages: &watch::Sender<Page>) {
    if is_ours(listen) {
        return;
    }
    let reason = format!(
        "overlay.listen names {}, which the node does not have yet; it begins to serve when it has that address",
        listen.ip()
    );
    eprintln!("{}", Event::Trouble { place: "overlay", reason: reason.clone() });
    pages.send_modify(|page| page.error.clone_from(&reason));
    let appears = async {
        while !is_ours(listen) {
            tokio::time::sleep(LOOK).await;
        }
    };
    let living = async {
        while init.alive(Vec::new()).is_ok() {
            orphans::watch_over(init, &reason, pages).await;
            tokio::time::sleep(ALIVE).await;
        }
        std::process::exit(1)
    };
    tokio::select! {
        () = appears => pages.send_modify(|page| page.error.clear()),
        () = living => {}
    }
}

/// Whether a socket can be bound to the address, as far as the address is concerned: one that is still being
/// tried out (RFC 4862 §5.4) is none yet.
fn is_ours(mut listen: SocketAddr) -> bool {
    listen.set_port(0);
    let bound = UdpSocket::bind(listen);
    !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_address_that_the_node_lacks_is_waited_for() {
        let ours = |text: &str| is_ours(text.parse().expect("an address"));
        assert!(ours("127.0.0.1:4600"));
        assert!(ours("0.0.0.0:4600"));
        assert!(ours("[::]:4600"));
        // TEST-NET-1 (RFC 5737) is nobody's.
        assert!(!ours("192.0.2.7:4600"));
    }
}
