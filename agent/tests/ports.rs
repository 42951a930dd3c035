//! What listens is what `rootfs/ports.toml` declares: the agent's networks, overlay and clock run in
//! a namespace, and the kernel is asked for every socket there; a guest then tries every TCP port.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{collections::BTreeSet, time::Duration};

use agent::{
    net::{
        MachineNetworks, MachineNetworksConfig, Resolver, Uplinks,
        machines::{ipv6::Ipv6Net, open_tap},
    },
    time::{Clock, ClockConfig},
};
use netns::{Namespace, PATIENCE, Pump, can_run, wait_for};
use overlay::{Overlay, OverlayConfig, Role};
use serde::Deserialize;
use types::{config::NodeSpec, ids::MachineId, units::UnixSeconds};

const TABLE: &str = include_str!("../../rootfs/ports.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    port: Vec<Port>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Port {
    protocol: String,
    port: u16,
    from: String,
    program: String,
    reason: String,
    #[serde(default)]
    when: Option<String>,
}

fn table() -> Vec<Port> {
    toml::from_str::<Table>(TABLE).unwrap().port
}

fn declared(from: Option<&str>, protocol: &str) -> BTreeSet<u16> {
    let table = table().into_iter();
    // The node here has a configuration.
    let always = |port: &Port| port.when.is_none() && port.protocol == protocol;
    let fits = |port: &Port| always(port) && from.is_none_or(|from| port.from == from);
    table.filter(fits).map(|port| port.port).collect()
}

/// Local ports of sockets that are connected to nobody, as `/proc/net` tells them.
fn listening(space: &Namespace, protocol: &str) -> BTreeSet<u16> {
    let mut ports = BTreeSet::new();
    for family in ["", "6"] {
        let text = space.run(&format!("cat /proc/thread-self/net/{protocol}{family}"));
        for line in text.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let port =
                |word: &str| u16::from_str_radix(word.rsplit(':').next().unwrap(), 16).unwrap();
            if port(words[2]) == 0 {
                ports.insert(port(words[1]));
            }
        }
    }
    ports
}

#[test]
fn the_table_is_well_formed() {
    for port in table() {
        assert!(["tcp", "udp"].contains(&&*port.protocol), "{}", port.reason);
        assert!(["outside", "guest"].contains(&&*port.from), "{}", port.reason);
        assert!(port.when.as_deref().is_none_or(|when| when == "unclaimed"), "{}", port.reason);
        assert!(port.port > 0 && !port.program.is_empty() && !port.reason.is_empty());
    }
}

#[tokio::test]
async fn a_node_that_waits_to_be_claimed_listens_where_the_table_says() {
    let unclaimed = |port: &Port| port.when.as_deref() == Some("unclaimed");
    let ports: Vec<u16> = table().into_iter().filter(unclaimed).map(|port| port.port).collect();
    match agent::claim::listen().await {
        Ok(listener) => assert_eq!(ports, [listener.local_addr().unwrap().port()]),
        Err(error) => println!("skipped: the port of claims: {error}"),
    }
}

#[test]
fn what_listens_is_what_the_table_declares() {
    if !can_run("the table of ports", &["ip", "cat", "nft"]) {
        return;
    }
    let (node, router) = (Namespace::new(), Namespace::new());
    node.cable("eth0", &router, "eth0");
    router.ip("link set eth0 up");
    let runtime = node.runtime();
    let key = "01".repeat(32);
    let text = format!(
        "version = 1\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n[[network.uplinks]]\nname = \"a\"\n\
         card = {{ name = \"eth0\" }}\nipv6 = \"dhcp\"\n"
    );
    let spec = NodeSpec::parse(text.as_bytes()).unwrap();
    let guest = Namespace::new();
    let (parts, _pump) = node.enter(|| {
        runtime.block_on(async {
            let uplinks = Uplinks::start(&spec.network).unwrap();
            let networks = MachineNetworks::start(
                MachineNetworksConfig {
                    subnet: spec.machines.subnet.parse().unwrap(),
                    reachable: Vec::new(),
                    limit: None,
                    ipv6: Some(Ipv6Net::private([1, 2, 3, 4, 5])),
                },
                uplinks.status(),
            );
            let networks = networks.await.unwrap();
            let net = networks.create(MachineId::from_bytes([1; 16])).await.unwrap();
            let overlay = Overlay::start(OverlayConfig {
                key: ed25519_dalek::SigningKey::from_bytes(&[7; 32]),
                listen: spec.overlay.listen,
                seeds: Vec::new(),
                role: Role::Provider,
            });
            let overlay = overlay.await.unwrap();
            let network = uplinks.status();
            let clock = Clock::start(ClockConfig {
                floor: UnixSeconds(0),
                servers: Vec::new(),
                nts: None,
                resolver: Resolver::new(network.clone()),
                network,
            });
            let card = guest.enter(|| open_tap("eth0").unwrap());
            guest.ip(&format!("link set eth0 address {} up", net.address.mac));
            guest.ip(&format!("addr add {}/16 dev eth0", net.address.ipv4));
            ((uplinks, networks, overlay, clock), Pump::start(net.tap, card))
        })
    });
    // There is no lease here, so no renewal is under way.
    let mut expected = declared(None, "udp");
    expected.remove(&68);
    wait_for("the sockets", PATIENCE, || listening(&node, "udp").is_superset(&expected));
    assert_eq!(listening(&node, "udp"), expected);
    assert_eq!(listening(&node, "tcp"), declared(None, "tcp"));
    // Even what listens by mistake is not there for a guest.
    node.serve("0.0.0.0:8080");
    let found = guest.enter(|| scan(1..=u16::MAX));
    assert_eq!(found, declared(Some("guest"), "tcp"));
    // Without the filter the same scan finds it, so it would have before.
    node.run("nft flush ruleset");
    assert!(guest.enter(|| scan(8000..=8100)).contains(&8080));
    drop(parts);
    runtime.shutdown_timeout(Duration::from_secs(5));
}

/// TCP ports at which the gateway of machines says anything, a refusal included.
fn scan(range: std::ops::RangeInclusive<u16>) -> BTreeSet<u16> {
    use rustix::{
        event::{PollFd, PollFlags, Timespec, poll},
        net::{AddressFamily, SocketFlags, SocketType, connect, socket_with},
    };
    let mut found = BTreeSet::new();
    let ports: Vec<u16> = range.collect();
    for some in ports.chunks(800) {
        let sockets: Vec<_> = some
            .iter()
            .map(|port| {
                let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                let socket =
                    socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
                let gateway = std::net::SocketAddrV4::new([10, 77, 0, 1].into(), *port);
                let _ = connect(&socket, &gateway);
                (*port, socket)
            })
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        let mut waiting: Vec<PollFd<'_>> =
            sockets.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::OUT)).collect();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut waiting, Some(&now)).unwrap();
        for ((port, _), answer) in sockets.iter().zip(&waiting) {
            if !answer.revents().is_empty() {
                found.insert(*port);
            }
        }
    }
    found
}
