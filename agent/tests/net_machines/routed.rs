//! Guests whose addresses are routed to the node: no address is translated, and they are open to the
//! outside where the provider says so, and only there.

use std::{net::UdpSocket, sync::atomic::Ordering, time::Duration};

use agent::net::{
    machines::ipv6::{Exit, Ipv6Net},
    ruleset::FLOWS_PER_GUEST,
};
use types::config::Inbound;

use crate::{
    ipv6::{SERVER6, machine_can_use_ipv6},
    netns::{PATIENCE, SILENCE},
    world::{SERVER, World},
};

impl World {
    /// The node that routes its machines' IPv4. The world knows the way to them already.
    fn routed(mut self, inbound: Inbound) -> Self {
        (self.exit, self.inbound) = (Exit::Routed, inbound);
        self.kill_agent();
        self.start_agent();
        self
    }
}

#[test]
fn a_routed_guest_is_seen_under_its_own_address_and_still_closed() {
    let Some(world) = World::new("routed IPv4") else { return };
    let world = world.routed(Inbound::Closed);
    let guest = world.guest(1);
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE), Some(guest.ip()));
    assert_eq!(guest.space.ask_udp("0.0.0.0", SERVER, PATIENCE), Some(guest.ip()));
    assert_eq!(world.internet.ask_tcp(&format!("{}:80", guest.ip()), SILENCE), None);
    // The node itself still reaches it, for tunnels.
    assert!(world.node.ask_tcp(&format!("{}:80", guest.ip()), PATIENCE).is_some());
}

#[test]
fn an_open_guest_is_reached_from_outside_and_from_nowhere_else() {
    let Some(world) = World::new("open guests") else { return };
    let world = world.routed(Inbound::Open);
    let (guest, other) = (world.guest(1), world.guest(2));
    let server = format!("{}:80", guest.ip());
    assert_eq!(world.internet.ask_tcp(&server, PATIENCE).as_deref(), Some("198.51.100.1"));
    assert!(world.internet.ask_udp("0.0.0.0", &server, PATIENCE).is_some());
    assert!(world.internet.pings(&guest.ip()));
    // Guests stay apart, and away from the node.
    assert_eq!(other.space.ask_tcp(&server, SILENCE), None);
    assert_eq!(guest.space.ask_tcp("10.77.0.1:80", SILENCE), None);
    // Nobody's else address leaves.
    let before = world.datagrams.load(Ordering::Relaxed);
    for forged in ["203.0.113.99", &other.ip()] {
        guest.space.ip(&format!("addr add {forged}/32 dev eth0"));
        assert_eq!(guest.space.ask_udp(forged, SERVER, SILENCE), None, "as {forged}");
        guest.space.ip(&format!("addr del {forged}/32 dev eth0"));
    }
    assert_eq!(world.datagrams.load(Ordering::Relaxed), before);
    // The node forwards to guests, and to nothing else.
    world.internet.ip("route add 192.0.2.0/24 via 198.51.100.2");
    assert!(!world.internet.pings("192.0.2.1"));
}

#[test]
fn who_floods_an_open_guest_takes_nothing_from_another() {
    let Some(world) = World::new("floods from outside") else { return };
    let world = world.routed(Inbound::Open);
    let (guest, other) = (world.guest(1), world.guest(2));
    let count = || -> u32 {
        let file = "/proc/sys/net/netfilter/nf_conntrack_count";
        world.node.enter(|| std::fs::read_to_string(file).unwrap()).trim().parse().unwrap()
    };
    world.internet.enter(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        for port in 20_000..32_000 {
            // A refusal by ICMP shows at the next datagram; it is of no interest.
            let _ = socket.send_to(b"?", (guest.ip(), port));
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    let full = count();
    assert!(full < FLOWS_PER_GUEST + 100, "{full} flows");
    assert!(full > FLOWS_PER_GUEST / 2, "the flood did not arrive: {full} flows");
    let reached = world.internet.ask_tcp(&format!("{}:80", other.ip()), PATIENCE);
    assert!(reached.is_some(), "another guest is cut off");
    let runtime = world.runtime.as_ref().unwrap();
    runtime.block_on(world.networks().delete(guest.address.machine)).unwrap();
    assert!(count() < 100, "the flows went with the machine");
}

#[test]
fn an_open_guest_is_reached_by_ipv6() {
    let Some(world) = machine_can_use_ipv6(World::new("open guests, IPv6")) else { return };
    let mut world = world;
    world.inbound = Inbound::Open;
    let net = Ipv6Net::routed("2600:77::".parse().unwrap(), 48).unwrap();
    let world = world.with_ipv6(net);
    let ((one, own), (two, _)) = (world.guest6(1), world.guest6(2));
    assert_eq!(one.space.ask_tcp(SERVER6, PATIENCE), Some(own.clone()));
    let server = format!("[{own}]:80");
    assert!(world.internet.ask_tcp(&server, PATIENCE).is_some());
    assert_eq!(two.space.ask_tcp(&server, SILENCE), None);
    // IPv4 of the same guest is behind the node's address, and closed.
    assert_eq!(world.internet.ask_tcp(&format!("{}:80", one.address.ipv4), SILENCE), None);
}
