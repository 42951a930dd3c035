//! Machines' networks against the real kernel: a guest reaches the internet side, never the node,
//! never another guest. Guests are namespaces whose network card is the other end of the tap.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod bandwidth;
mod bridged;
mod flows;
#[path = "../icmp/mod.rs"]
mod icmp;
mod ipv6;
#[path = "../netns/mod.rs"]
mod netns;
mod routed;
mod world;

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    os::fd::OwnedFd,
    sync::atomic::Ordering,
    time::Duration,
};

use agent::net::{
    NetworkStatus,
    machines::{MachineNet, MachineNetError},
    ruleset::FLOWS_PER_GUEST,
};
use netns::{PATIENCE, SILENCE, can_run, wait_for};
use rustix::net::{ipproto, sockopt::Timeout};
use types::ids::MachineId;
use world::{NODE, PRIVATE, SERVER, World};

#[test]
fn a_guest_is_told_its_address_gateway_dns_and_mtu() {
    let Some(world) = World::new("DHCP for guests") else { return };
    if !can_run("DHCP for guests", &["busybox"]) {
        return;
    }
    let guest = world.plug(1);
    let expected = format!("{}/16 10.77.0.1 {PRIVATE} 1500", guest.ip());
    assert_eq!(guest.dhcp(), Some(expected));
}

#[test]
fn a_guest_reaches_the_internet_with_the_nodes_address() {
    let Some(world) = World::new("the internet for guests") else { return };
    let guest = world.guest(1);
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    assert_eq!(guest.space.ask_udp("0.0.0.0", SERVER, PATIENCE).as_deref(), Some(NODE));
    assert!(guest.space.pings("203.0.113.80"));
}

#[test]
fn a_guest_reaches_no_address_of_the_node() {
    let Some(world) = World::new("the node is out of guests' reach") else { return };
    let guest = world.guest(1);
    for address in ["10.77.0.1", NODE] {
        for port in [80, 8080, 67] {
            let server = format!("{address}:{port}");
            assert_eq!(guest.space.ask_tcp(&server, SILENCE), None, "TCP {server}");
            assert_eq!(guest.space.ask_udp("0.0.0.0", &server, SILENCE), None, "UDP {server}");
        }
        assert!(!guest.space.pings(address), "{address} answers");
    }
}

#[test]
fn a_guest_reaches_no_ipv6_of_the_node_nor_of_anyone() {
    let Some(world) = World::new("IPv6 of guests") else { return };
    let (guest, other) = (world.guest(1), world.guest(2));
    world.node.ip("addr add fd00::1/64 dev eth0");
    guest.space.ip("addr add fd00:1::2/64 dev eth0 nodad");
    guest.space.ip("-6 route add default dev eth0");
    let before = other.space.received("eth0");
    assert!(!guest.space.pings("fd00::1"));
    // The answer is the guest's own; it is the frame that matters.
    guest.space.pings("ff02::1%eth0");
    let tap = &guest.address.interface;
    assert_eq!(world.node.ip(&format!("-6 addr show dev {tap}")), "");
    assert_eq!(other.space.received("eth0"), before);
}

#[test]
fn a_guest_reaches_no_other_guest() {
    let Some(world) = World::new("guests apart") else { return };
    let (guest, other) = (world.guest(1), world.guest(2));
    let before = other.space.received("eth0");
    let server = format!("{}:80", other.ip());
    assert_eq!(guest.space.ask_tcp(&server, SILENCE), None);
    // The same through the gateway, and by hardware address: no frame arrives.
    guest.space.ip(&format!("route add {} via 10.77.0.1", other.ip()));
    assert_eq!(guest.space.ask_tcp(&server, SILENCE), None);
    assert_eq!(guest.space.ask_udp("0.0.0.0", &server, SILENCE), None);
    guest.space.ip(&format!("route del {}", other.ip()));
    let neighbour = format!("{} lladdr {}", other.ip(), other.address.mac);
    guest.space.ip(&format!("neigh replace {neighbour} dev eth0"));
    assert!(!guest.space.pings(&other.ip()));
    guest.space.try_run("ping -b -c 1 -W 1 10.77.255.255");
    assert_eq!(other.space.received("eth0"), before, "frames of one guest arrived at another");
}

#[test]
fn a_guest_sends_only_with_its_own_addresses() {
    let Some(world) = World::new("spoofing") else { return };
    if !can_run("spoofing", &["busybox"]) {
        return;
    }
    let (guest, other) = (world.guest(1), world.guest(2));
    let forged = ["10.77.200.200", "203.0.113.99", &other.ip()];
    for address in forged {
        guest.space.ip(&format!("addr add {address}/32 dev eth0"));
        assert_eq!(guest.space.ask_udp(address, SERVER, SILENCE), None, "as {address}");
        assert_eq!(world.datagrams.load(Ordering::Relaxed), 0, "as {address}");
        guest.space.ip(&format!("addr del {address}/32 dev eth0"));
    }
    guest.space.ip("link set eth0 address 02:00:00:00:00:99");
    guest.space.ip("neigh flush all");
    assert_eq!(guest.space.ask_udp("0.0.0.0", SERVER, SILENCE), None);
    assert_eq!(guest.dhcp(), None, "another hardware address got a lease");
    assert_eq!(world.datagrams.load(Ordering::Relaxed), 0);
    // Others and the node's view of them are untouched.
    assert_eq!(other.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
}

#[test]
fn a_guest_cannot_claim_another_address_by_arp() {
    let Some(world) = World::new("ARP") else { return };
    if !can_run("ARP", &["busybox"]) {
        return;
    }
    let (guest, other) = (world.guest(1), world.guest(2));
    for address in [other.ip(), "10.77.0.1".to_owned()] {
        guest.space.try_run(&format!("busybox arping -U -c 1 -w 1 -I eth0 -s {address} {address}"));
    }
    let neighbours = world.node.ip("-4 neigh show");
    let lines: Vec<&str> = neighbours.lines().filter(|line| line.contains(" dev hf")).collect();
    assert!(lines.iter().all(|line| line.contains("PERMANENT")), "{lines:?}");
    let reached = world.node.ask_tcp(&format!("{}:80", other.ip()), PATIENCE);
    assert_eq!(reached.as_deref(), Some("10.77.0.1"));
}

/// ICMP errors name the flow they are about, and no one checks who sends them. One that says a path
/// carries only small packets shows in the route.
#[test]
fn a_guest_cannot_disturb_the_nodes_flows_by_icmp() {
    let Some(world) = World::new("forged ICMP errors") else { return };
    let guest = world.guest(1);
    let here = format!("{NODE}:5555");
    let flow = world.node.enter(|| UdpSocket::bind(&here).unwrap());
    let answered = || {
        flow.set_read_timeout(Some(PATIENCE)).unwrap();
        flow.send_to(b"?", SERVER).unwrap();
        flow.recv(&mut [0; 64]).is_ok()
    };
    assert!(answered());
    let shrunk = || world.node.ip("route get 203.0.113.80").contains("mtu 600");
    guest.space.enter(|| icmp::send_too_big(NODE, SERVER, 600));
    std::thread::sleep(SILENCE);
    assert!(!shrunk(), "a guest's forged error was believed");
    // The same from outside is heeded, so it would have shown.
    world.internet.enter(|| icmp::send_too_big(NODE, SERVER, 600));
    wait_for("an error from outside", PATIENCE, shrunk);
}

/// What fits no flow is not translated, so the guest's own address would show.
#[test]
fn what_fits_no_flow_of_a_guest_does_not_leave() {
    let Some(world) = World::new("packets of no flow") else { return };
    let guest = world.guest(1);
    let heard = [ipproto::ICMP, ipproto::TCP].map(|protocol| {
        let socket = world.internet.enter(|| icmp::raw(protocol));
        let patience = Some(SILENCE);
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Recv, patience).unwrap();
        socket
    });
    // Sources of the packets that come until it is quiet.
    let sources = |socket: &OwnedFd| -> BTreeSet<Ipv4Addr> {
        let mut packet = [0; 128];
        std::iter::from_fn(|| {
            let read = rustix::io::read(socket, &mut packet).ok()?;
            let source: [u8; 4] = packet[..read].get(12..16)?.try_into().ok()?;
            Some(source.into())
        })
        .collect()
    };
    guest.space.enter(|| {
        icmp::send_too_big("203.0.113.80", "192.0.2.9:80", 600);
        icmp::send_reset(&guest.ip(), SERVER);
    });
    // What belongs to a flow arrives by the same way.
    assert!(guest.space.pings("203.0.113.80"));
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    let node: Ipv4Addr = NODE.parse().unwrap();
    assert_eq!(heard.each_ref().map(sources), [BTreeSet::from([node]), BTreeSet::from([node])]);
}

#[test]
fn a_guest_cannot_use_up_the_table_of_flows() {
    let Some(world) = World::new("a limit of flows") else { return };
    let (guest, other) = (world.guest(1), world.guest(2));
    let count = || -> u32 {
        let file = "/proc/sys/net/netfilter/nf_conntrack_count";
        world.node.enter(|| std::fs::read_to_string(file).unwrap()).trim().parse().unwrap()
    };
    let target = SERVER.split(':').next().unwrap();
    let socket = guest.space.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    // A refusal by ICMP shows at the next datagram; it is of no interest.
    let flood = |ports: std::ops::Range<u16>| {
        ports.for_each(|port| {
            let _ = socket.send_to(b"?", (target, port));
            std::thread::sleep(Duration::from_micros(50));
        });
    };
    flood(20_000..40_000);
    let full = count();
    assert!((FLOWS_PER_GUEST * 9 / 10..FLOWS_PER_GUEST + 100).contains(&full), "{full} flows");
    assert_eq!(guest.space.ask_tcp(SERVER, SILENCE), None, "one flow too many");
    assert_eq!(other.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    // A deleted machine takes its flows with it.
    let runtime = world.runtime.as_ref().unwrap();
    runtime.block_on(world.networks().delete(guest.address.machine)).unwrap();
    assert!(count() < 100, "the flows went with the machine");
}

#[test]
fn the_node_opens_connections_to_a_guest() {
    let Some(world) = World::new("tunnels into guests") else { return };
    let guest = world.guest(1);
    let reached = world.node.ask_tcp(&format!("{}:80", guest.ip()), PATIENCE);
    assert_eq!(reached.as_deref(), Some("10.77.0.1"));
}

#[test]
fn nobody_outside_opens_connections_to_a_guest() {
    let Some(world) = World::new("guests closed to the outside") else { return };
    let guest = world.guest(1);
    assert_eq!(world.internet.ask_tcp(&format!("{}:80", guest.ip()), SILENCE), None);
    assert!(!world.internet.pings(&guest.ip()));
}

#[test]
fn private_networks_are_closed_but_for_name_servers() {
    let Some(world) = World::new("private networks") else { return };
    if !can_run("private networks", &["busybox"]) {
        return;
    }
    let guest = world.guest(1);
    assert_eq!(guest.space.ask_tcp(&format!("{PRIVATE}:80"), SILENCE), None);
    let server = format!("{PRIVATE}:53");
    assert_eq!(guest.space.ask_tcp(&server, PATIENCE).as_deref(), Some(NODE));
    assert_eq!(guest.space.ask_udp("0.0.0.0", &server, PATIENCE).as_deref(), Some(NODE));
    // The uplinks learn of another server: the old one is closed, guests are told the new one.
    let dns = vec![IpAddr::from(Ipv4Addr::new(203, 0, 113, 53))];
    world.uplinks.send_replace(NetworkStatus { dns, ..NetworkStatus::default() });
    wait_for("the old name server is closed", PATIENCE, || {
        guest.space.ask_tcp(&server, SILENCE).is_none()
    });
    assert!(guest.dhcp().unwrap().contains("203.0.113.53"));
}

#[test]
fn running_guests_survive_the_agent() {
    let Some(mut world) = World::new("a restart of the agent") else { return };
    if !can_run("a restart of the agent", &["busybox"]) {
        return;
    }
    let guest = world.guest(1);
    world.kill_agent();
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    assert_eq!(guest.space.ask_tcp("10.77.0.1:80", SILENCE), None);
    world.start_agent();
    let machine = guest.address.machine;
    assert_eq!(world.networks().adopt(machine).unwrap(), guest.address);
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    assert!(guest.dhcp().is_some(), "the new agent answers no DHCP");
    // While its VMM lives, nobody else gets the tap.
    let again = world.runtime.as_ref().unwrap().block_on(world.networks().create(machine, 1));
    assert!(again.is_err());
}

#[test]
fn a_machine_that_starts_again_keeps_its_address() {
    let Some(world) = World::new("a restart of a machine") else { return };
    let guest = world.guest(1);
    let before = guest.address.clone();
    drop(guest);
    assert_eq!(world.guest(1).address, before);
}

/// A tap with several queues lets anybody attach one more; the node does not.
#[test]
fn a_tap_of_several_queues_belongs_to_one_process_at_a_time() {
    let Some(world) = World::new("several queues") else { return };
    let machine = MachineId::from_bytes([9; 16]);
    let open =
        |queues| world.runtime.as_ref().unwrap().block_on(world.networks().create(machine, queues));
    let net = open(3).unwrap();
    assert_eq!(net.more_queues.len(), 2);
    assert!(matches!(open(3), Err(MachineNetError::Busy { .. })));
    // As long as one of them is open.
    let MachineNet { tap, mut more_queues, address } = net;
    drop((tap, more_queues.pop()));
    assert!(matches!(open(3), Err(MachineNetError::Busy { .. })));
    drop(more_queues);
    let again = open(3).unwrap();
    assert_eq!((again.more_queues.len(), again.address), (2, address));
}

#[test]
fn a_deleted_machine_leaves_nothing_behind() {
    let Some(world) = World::new("deletion") else { return };
    if !can_run("deletion", &["nft"]) {
        return;
    }
    let (guest, other) = (world.guest(1), world.guest(2));
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    assert_eq!(other.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    let tap = guest.address.interface.clone();
    let runtime = world.runtime.as_ref().unwrap();
    runtime.block_on(world.networks().delete(guest.address.machine)).unwrap();
    runtime.block_on(world.networks().delete(guest.address.machine)).unwrap();
    assert!(!world.node.ip("link show").contains(&tap));
    assert!(!world.node.ip("route show").contains(&guest.ip()));
    assert!(!world.node.run("nft list ruleset").contains(&tap));
    assert!(world.networks().adopt(guest.address.machine).is_err());
    // Its flows are forgotten, others' are not. Not every kernel shows them in /proc.
    if let Ok(flows) =
        world.node.enter(|| std::fs::read_to_string("/proc/thread-self/net/nf_conntrack"))
    {
        assert!(!flows.contains(&format!("src={} ", guest.ip())), "{flows}");
        assert!(flows.contains(&format!("src={} ", other.ip())), "{flows}");
    }
    assert_eq!(other.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
}

/// The version that wrote the golden file.
const NFT_VERSION: &str = "v1.0.6";

/// What the kernel holds is what was meant: read back by nftables' own program.
#[test]
fn the_packet_filter_reads_back_as_meant() {
    let Some(world) = World::new("the packet filter as nft reads it") else { return };
    if !can_run("the packet filter as nft reads it", &["nft"]) {
        return;
    }
    // Other versions print some matches in other words; what the rules do is tested above.
    let version = world.node.run("nft --version");
    if !version.contains(NFT_VERSION) {
        println!(
            "skipped: the packet filter as nft reads it: {} is not {NFT_VERSION}",
            version.trim()
        );
        return;
    }
    let _guest = world.plug(1);
    let mut found: serde_json::Value =
        serde_json::from_str(&world.node.run("nft -j list ruleset")).unwrap();
    normalise(&mut found);
    let text = serde_json::to_string_pretty(&found).unwrap() + "\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/ruleset.json");
    if std::env::var_os("HOLDFAST_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    assert!(text == golden, "set HOLDFAST_BLESS=1 to accept a wanted change:\n{text}");
}

/// Leaves out what differs from run to run.
fn normalise(value: &mut serde_json::Value) {
    use serde_json::Value;
    match value {
        Value::Object(members) => {
            for volatile in ["handle", "metainfo", "packets", "bytes"] {
                members.remove(volatile);
            }
            members.values_mut().for_each(normalise);
        }
        Value::Array(elements) => {
            elements.iter_mut().for_each(normalise);
            elements.retain(|element| element.as_object().is_none_or(|o| !o.is_empty()));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
