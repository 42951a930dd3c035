//! What listens is what `rootfs/ports.toml` declares: the agent's networks, overlay and clock run in
//! a namespace, and the kernel is asked for every socket there; somebody outside and a guest then try
//! every port, over TCP and UDP, IPv4 and IPv6.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;
mod scan;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    time::Duration,
};

use agent::{
    net::{
        MachineNetworks, MachineNetworksConfig, Resolver, Uplinks,
        machines::{
            ipv6::{Exit, Ipv6Net, Supply},
            open_tap,
        },
    },
    time::{Clock, ClockConfig},
};
use netns::{Namespace, PATIENCE, Pump, can_run, wait_for};
use overlay::{Overlay, OverlayConfig, Role};
use scan::{Answer, Protocol, scan};
use serde::Deserialize;
use types::{
    config::{Inbound, NodeSpec},
    ids::MachineId,
    units::UnixSeconds,
};

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
                    exit: Exit::Masquerade,
                    inbound: Inbound::Closed,
                    limit: None,
                    ipv6: Some(Supply::Fixed(Ipv6Net::private([1, 2, 3, 4, 5]))),
                    bridged: None,
                },
                uplinks.status(),
            );
            let networks = networks.await.unwrap();
            let net = networks.create(MachineId::from_bytes([1; 16]), 1).await.unwrap();
            let overlay = Overlay::start(OverlayConfig {
                key: ed25519_dalek::SigningKey::from_bytes(&[7; 32]),
                listen: spec.overlay.listen,
                seeds: Vec::new(),
                role: Role::Provider,
            });
            let overlay = overlay.await.unwrap();
            let network = uplinks.status();
            let clock = Clock::start(ClockConfig {
                seen: UnixSeconds(0),
                confirmed: UnixSeconds(0),
                agreed: UnixSeconds(0),
                servers: Vec::new(),
                nts: None,
                resolver: Resolver::new(network.clone()),
                network,
            });
            let card = guest.enter(|| open_tap("eth0").unwrap());
            guest.ip(&format!("link set eth0 address {} up", net.address.mac));
            guest.ip(&format!("addr add {}/16 dev eth0", net.address.ipv4));
            guest.ip("route add default via 10.77.0.1");
            ((uplinks, networks, overlay, clock), Pump::start(net.tap, card))
        })
    });
    // There is no lease here, so no renewal is under way.
    let mut expected = declared(None, "udp");
    expected.remove(&68);
    wait_for("the sockets", PATIENCE, || listening(&node, "udp").is_superset(&expected));
    assert_eq!(listening(&node, "udp"), expected);
    assert_eq!(listening(&node, "tcp"), declared(None, "tcp"));
    from_outside(&node, &router);
    from_a_guest(&node, &guest);
    drop(parts);
    runtime.shutdown_timeout(Duration::from_secs(5));
}

/// The node's addresses on its uplink.
const OUTSIDE: [&str; 2] = ["198.51.100.2", "2001:db8:51::2"];
/// UDP ports at which something listens on many a machine, fewer than the kernel speaks of at once.
const USUAL: [u16; 32] = [
    7, 9, 19, 53, 67, 68, 69, 111, 123, 137, 161, 162, 177, 389, 427, 500, 514, 520, 546, 547, 623,
    1434, 1812, 1900, 2049, 4500, 4600, 5060, 5353, 5355, 11_211, 51_820,
];
/// How long a silent port is waited for: nothing is between the two.
const SILENT: Duration = Duration::from_millis(150);

fn at(address: &str) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), 0)
}

/// Who reaches an uplink finds what the table declares for it, and nothing else.
fn from_outside(node: &Namespace, router: &Namespace) {
    for (address, other, length) in
        [(OUTSIDE[0], "198.51.100.1", 24), (OUTSIDE[1], "2001:db8:51::1", 64)]
    {
        let late = if length == 64 { "nodad" } else { "" };
        node.ip(&format!("addr add {address}/{length} dev eth0 {late}"));
        router.ip(&format!("addr add {other}/{length} dev eth0 {late}"));
    }
    // The kernel tells only a few times a second that a port is closed; for IPv6 there is a limit that
    // cannot be changed, beside that for each neighbour.
    node.enter(|| {
        for setting in ["ipv4/icmp_ratemask", "ipv6/icmp/ratelimit"] {
            std::fs::write(format!("/proc/sys/net/{setting}"), "0").unwrap();
        }
    });
    router.reaches(OUTSIDE[0]);
    router.reaches(OUTSIDE[1]);
    for address in OUTSIDE.map(at) {
        let tcp = router.enter(|| scan(Protocol::Tcp, address, 1..=u16::MAX, PATIENCE));
        let open = tcp.iter().filter(|(_, answer)| **answer == Answer::Open);
        let open: BTreeSet<u16> = open.map(|(port, _)| *port).collect();
        assert_eq!(open, declared(Some("outside"), "tcp"), "TCP of {address}");
        // A port that says nothing may be open; one that is closed says so.
        let ports = if address.is_ipv4() { (1..=u16::MAX).collect() } else { USUAL.to_vec() };
        let udp = router.enter(|| scan(Protocol::Udp, address, ports, PATIENCE));
        let open = udp.iter().filter(|(_, answer)| **answer != Answer::Refused);
        let open: BTreeSet<u16> = open.map(|(port, _)| *port).collect();
        let mut declared = declared(Some("outside"), "udp");
        assert!(open.contains(&4600), "UDP of {address}: {open:?}");
        // DHCP's are there on the uplink's own addresses only, while there are some.
        declared.retain(|port| open.contains(port) || *port == 4600);
        assert_eq!(open, declared, "UDP of {address}");
    }
}

/// A guest finds nothing on any address of the node, not even what listens by mistake.
fn from_a_guest(node: &Namespace, guest: &Namespace) {
    node.serve("0.0.0.0:8080");
    node.serve("[::]:8081");
    let index = guest.ip("-o link show dev eth0").split(':').next().unwrap().parse().unwrap();
    let router6 = SocketAddrV6::new("fe80::1".parse().unwrap(), 0, 0, index);
    // The node's address on its uplink is behind the gateway.
    let gateways =
        [SocketAddr::from(([10, 77, 0, 1], 0)), SocketAddr::from(router6), at(OUTSIDE[0])];
    for gateway in gateways {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let all = guest.enter(|| scan(protocol, gateway, 1..=u16::MAX, SILENT));
            let found: Vec<_> =
                all.iter().filter(|(_, answer)| **answer != Answer::Silent).collect();
            // The one port that is there says nothing to what is no DHCP.
            assert!(found.is_empty(), "{protocol:?} of {gateway}: {found:?}");
        }
    }
    // Without the filter the same scan finds it, so it would have before.
    node.run("nft flush ruleset");
    for (protocol, gateway, port) in [
        (Protocol::Tcp, gateways[0], 8080),
        (Protocol::Udp, gateways[0], 8080),
        (Protocol::Tcp, gateways[1], 8081),
        (Protocol::Udp, gateways[1], 8081),
    ] {
        let all = guest.enter(|| scan(protocol, gateway, port..=port, PATIENCE));
        assert_eq!(all[&port], Answer::Open, "{protocol:?} of {gateway}");
    }
}
