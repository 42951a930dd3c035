//! Machines' networks against the real kernel: a guest reaches the internet side, never the node,
//! never another guest. Guests are namespaces whose network card is the other end of the tap.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod icmp;
mod netns;

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use agent::net::{
    MachineAddress, MachineNetworks, MachineNetworksConfig, NetworkStatus,
    machines::{ipv6::Ipv6Net, open_tap},
    ruleset::{ByteRate, FLOWS_PER_GUEST},
};
use netns::{Namespace, PATIENCE, Pump, SILENCE, can_run, wait_for};
use tokio::{runtime::Runtime, sync::watch};
use types::ids::MachineId;

/// The node's address on its uplink.
const NODE: &str = "198.51.100.2";
/// Servers on the internet side: one on the internet, one in the provider's own network.
const SERVER: &str = "203.0.113.80:80";
const PRIVATE: &str = "192.168.7.1";

/// A node with an uplink, and the rest of the world behind it.
struct World {
    node: Namespace,
    internet: Namespace,
    networks: Option<MachineNetworks>,
    uplinks: watch::Sender<NetworkStatus>,
    runtime: Option<Runtime>,
    /// Datagrams that reached [`SERVER`].
    datagrams: Arc<AtomicU64>,
    limit: Option<ByteRate>,
    ipv6: Option<Ipv6Net>,
}

impl World {
    fn new(what: &str) -> Option<Self> {
        if !can_run(what, &["ip", "ping"]) {
            return None;
        }
        let (node, internet) = (Namespace::new(), Namespace::new());
        node.cable("eth0", &internet, "eth0");
        if !kernel_can_filter(what, &node) {
            return None;
        }
        node.ip(&format!("addr add {NODE}/24 dev eth0"));
        node.ip("link set eth0 up");
        internet.ip("addr add 198.51.100.1/24 dev eth0");
        internet.ip("addr add 203.0.113.80/32 dev lo");
        internet.ip(&format!("addr add {PRIVATE}/32 dev lo"));
        internet.ip("link set eth0 up");
        // A careless neighbour that routes to the guests.
        internet.ip(&format!("route add 10.77.0.0/16 via {NODE}"));
        node.ip("route add default via 198.51.100.1");
        let datagrams = internet.serve(SERVER);
        for port in [53, 80] {
            internet.serve(&format!("{PRIVATE}:{port}"));
        }
        for port in [80, 8080] {
            node.serve(&format!("0.0.0.0:{port}"));
        }
        let dns = vec![PRIVATE.parse::<IpAddr>().unwrap()];
        let (uplinks, _) = watch::channel(NetworkStatus { dns, ..NetworkStatus::default() });
        let runtime = Some(node.runtime());
        let mut world = Self {
            node,
            internet,
            networks: None,
            uplinks,
            runtime,
            datagrams,
            limit: None,
            ipv6: None,
        };
        world.start_agent();
        Some(world)
    }

    fn start_agent(&mut self) {
        let config = MachineNetworksConfig {
            subnet: "10.77.0.0/16".parse().unwrap(),
            reachable: Vec::new(),
            limit: self.limit,
            ipv6: self.ipv6,
        };
        let started = MachineNetworks::start(config, self.uplinks.subscribe());
        let runtime = self.runtime.as_ref().unwrap();
        self.networks = Some(self.node.enter(|| runtime.block_on(started)).unwrap());
    }

    /// The agent dies: its tasks and sockets are gone, what is in the kernel stays.
    fn kill_agent(&mut self) {
        self.networks = None;
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
        self.runtime = Some(self.node.runtime());
    }

    fn networks(&self) -> &MachineNetworks {
        self.networks.as_ref().unwrap()
    }

    /// A guest with its card up, without an address.
    fn plug(&self, number: u8) -> Guest {
        let machine = MachineId::from_bytes([number; 16]);
        let runtime = self.runtime.as_ref().unwrap();
        let net = runtime.block_on(self.networks().create(machine)).unwrap();
        let space = Namespace::new();
        let card = space.enter(|| open_tap("eth0").unwrap());
        space.ip(&format!("link set eth0 address {} up", net.address.mac));
        Guest { space, address: net.address, _pump: Pump::start(net.tap, card) }
    }

    /// A guest that is configured as it was told, with a server.
    fn guest(&self, number: u8) -> Guest {
        let guest = self.plug(number);
        guest.space.ip(&format!("addr add {}/16 dev eth0", guest.ip()));
        guest.space.ip("route add default via 10.77.0.1");
        guest.space.serve("0.0.0.0:80");
        guest
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.networks = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

/// Asks the kernel, through nftables' own program, for each kind of rule that the filter needs.
fn kernel_can_filter(what: &str, space: &Namespace) -> bool {
    if !can_run(what, &["nft"]) {
        return false;
    }
    let probes = [
        "add table netdev probe",
        "add chain netdev probe in { type filter hook ingress device eth0 priority -500 ; }",
        "add rule netdev probe in limit rate 5/second accept",
        "add table inet probe",
        "add chain inet probe forward { type filter hook forward priority 0 ; }",
        "add rule inet probe forward ct state established counter accept",
        "add rule inet probe forward ct mark set 1",
        "add set inet probe flows { type ipv4_addr ; flags dynamic ; size 100 ; }",
        "add rule inet probe forward ct state new add @flows { ip saddr ct count over 9 } drop",
        "add rule inet probe forward reject with icmpx admin-prohibited",
        "add chain inet probe out { type nat hook postrouting priority 100 ; }",
        "add rule inet probe out masquerade",
    ];
    let refused = probes.iter().find(|probe| {
        let output = space.try_run(&format!("nft {probe}"));
        !output.status.success()
    });
    if let Some(refused) = refused {
        println!("skipped: {what}: this kernel refuses `nft {refused}`");
    }
    space.try_run("nft flush ruleset");
    refused.is_none()
}

struct Guest {
    space: Namespace,
    address: MachineAddress,
    _pump: Pump,
}

impl Guest {
    /// Runs an ordinary DHCP client; returns address, mask, router, DNS and MTU as it was told.
    fn dhcp(&self) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("bound");
        let told = folder.path().join("told");
        let text = format!(
            "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\nip addr flush dev eth0\n\
             ip addr add $ip/$mask dev eth0\nip link set eth0 mtu $mtu\n\
             ip route add default via $router\necho $ip/$mask $router $dns $mtu > {}\n",
            told.display()
        );
        std::fs::File::create(&script).unwrap().write_all(text.as_bytes()).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let options = "-i eth0 -n -q -t 8 -T 1 -f -O mtu";
        self.space.try_run(&format!("busybox udhcpc {options} -s {}", script.display()));
        std::fs::read_to_string(told).ok().map(|told| told.trim().to_owned())
    }

    fn ip(&self) -> String {
        self.address.ipv4.to_string()
    }
}

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
    let again = world.runtime.as_ref().unwrap().block_on(world.networks().create(machine));
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

/// Bytes per second that arrive over a TCP connection, measured after the burst, for two seconds.
fn measure(listen: (&Namespace, &str), connect: (&Namespace, &str), from: Sender) -> f64 {
    let listener = listen.0.enter(|| TcpListener::bind(listen.1).unwrap());
    let address = connect.1.parse().unwrap();
    let other = connect.0.enter(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    let (accepted, _) = listener.accept().unwrap();
    let (mut sender, mut receiver) = match from {
        Sender::Listener => (accepted, other),
        Sender::Connector => (other, accepted),
    };
    std::thread::spawn(move || while sender.write_all(&[0; 16_384]).is_ok() {});
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut read_for = |time: Duration| {
        let (begin, mut count) = (Instant::now(), 0.0);
        let mut buffer = [0; 65_536];
        while begin.elapsed() < time {
            count += receiver.read(&mut buffer).unwrap() as f64;
        }
        count / begin.elapsed().as_secs_f64()
    };
    read_for(Duration::from_millis(700));
    read_for(Duration::from_secs(2))
}

#[derive(Clone, Copy)]
enum Sender {
    Listener,
    Connector,
}

#[test]
fn a_guest_gets_its_bandwidth_in_both_directions_and_no_more() {
    let Some(mut world) = World::new("bandwidth limits") else { return };
    let rate = ByteRate::from_mbit(20);
    world.limit = Some(rate);
    world.kill_agent();
    world.start_agent();
    let (one, server) = (world.guest(1), "203.0.113.80:5001");
    one.space.reaches("203.0.113.80");
    let share = |bytes: f64| bytes / rate.per_second as f64;
    let down = share(measure((&world.internet, server), (&one.space, server), Sender::Listener));
    assert!((0.80..1.05).contains(&down), "received {down} of its limit");
    let server = "203.0.113.80:5002";
    let up = share(measure((&world.internet, server), (&one.space, server), Sender::Connector));
    assert!((0.55..1.10).contains(&up), "sent {up} of its limit");
    // Without a limit, which a restarted agent takes away, it is far more.
    world.limit = None;
    world.kill_agent();
    world.start_agent();
    let server = "203.0.113.80:5003";
    let free = share(measure((&world.internet, server), (&one.space, server), Sender::Listener));
    assert!(free > 3.0, "received {free} of the former limit");
}

/// Servers on the internet side and at the node, and the node's own address there.
const SERVER6: &str = "[2600:113::80]:80";
const NODE6: &str = "2600:51::2";

impl World {
    /// Gives the node IPv6 on its uplink, and machines networks of their own.
    fn with_ipv6(mut self, net: Ipv6Net) -> Self {
        self.node.ip(&format!("addr add {NODE6}/64 dev eth0 nodad"));
        self.internet.ip("addr add 2600:51::1/64 dev eth0 nodad");
        self.internet.ip("addr add 2600:113::80/128 dev lo nodad");
        self.internet.ip(&format!("route add 2600:77::/48 via {NODE6}"));
        self.internet.ip(&format!("route add fd00::/8 via {NODE6}"));
        self.node.ip("route add default via 2600:51::1");
        self.internet.serve(SERVER6);
        self.node.serve("[::]:8081");
        self.ipv6 = Some(net);
        self.kill_agent();
        self.start_agent();
        self
    }

    /// A guest that has given itself an address, and the address.
    fn guest6(&self, number: u8) -> (Guest, String) {
        let guest = self.plug(number);
        let mut own = None;
        wait_for("an address by SLAAC", PATIENCE * 3, || {
            let text = guest.space.ip("-6 -o addr show dev eth0 scope global");
            let found = text.split_whitespace().find(|word| word.ends_with("/64"));
            let ready = !text.contains("tentative");
            own = found.filter(|_| ready).map(|word| word.trim_end_matches("/64").to_owned());
            own.is_some()
        });
        let own = own.unwrap();
        guest.space.serve("[::]:80");
        (guest, own)
    }
}

fn machine_can_use_ipv6(world: Option<World>) -> Option<World> {
    world.filter(|_| std::fs::metadata("/proc/sys/net/ipv6").is_ok())
}

#[test]
fn a_guest_has_ipv6_of_its_own_behind_the_nodes_address() {
    let Some(world) = machine_can_use_ipv6(World::new("IPv6 of guests")) else { return };
    let world = world.with_ipv6(Ipv6Net::private([1, 2, 3, 4, 5]));
    let ((one, own), (two, other)) = (world.guest6(1), world.guest6(2));
    assert!(
        own.starts_with("fd01:203:405:") && other.starts_with("fd01:203:405:"),
        "{own} {other}"
    );
    let network = |address: &str| address.split(':').nth(3).unwrap().to_owned();
    assert_ne!(network(&own), network(&other));
    // It reaches the internet, under the node's name.
    assert_eq!(one.space.ask_tcp(SERVER6, PATIENCE).as_deref(), Some(NODE6));
    // Neither the node, nor the other guest, nor the provider's own network.
    assert_eq!(one.space.ask_tcp(&format!("[{NODE6}]:8081"), SILENCE), None);
    assert!(!one.space.pings("fe80::1%eth0"));
    assert_eq!(one.space.ask_tcp(&format!("[{other}]:80"), SILENCE), None);
    world.internet.ip("addr add fd99::1/128 dev lo nodad");
    world.internet.serve("[fd99::1]:80");
    assert_eq!(one.space.ask_tcp("[fd99::1]:80", SILENCE), None);
    // Nobody outside reaches it, not even who knows the way.
    assert_eq!(world.internet.ask_tcp(&format!("[{own}]:80"), SILENCE), None);
    // What it sends in another's name goes nowhere.
    let begin = world.internet.received("eth0");
    let forged = format!("{}:1", other.rsplit_once(':').unwrap().0);
    one.space.ip(&format!("addr add {forged}/128 dev eth0 nodad"));
    assert_eq!(one.space.ask_udp(&forged, SERVER6, SILENCE), None);
    assert!(world.internet.received("eth0") <= begin + 2, "it left the node");
    // The other guest still has its answers.
    assert_eq!(two.space.ask_tcp(SERVER6, PATIENCE).as_deref(), Some(NODE6));
}

#[test]
fn a_guest_of_a_routed_prefix_is_on_the_internet_itself_but_not_open_to_it() {
    let Some(world) = machine_can_use_ipv6(World::new("routed IPv6")) else { return };
    let net = Ipv6Net::routed("2600:77::".parse().unwrap(), 48).unwrap();
    let world = world.with_ipv6(net);
    let (one, own) = world.guest6(1);
    assert!(own.starts_with("2600:77:0:"), "{own}");
    assert_eq!(one.space.ask_tcp(SERVER6, PATIENCE), Some(own.clone()));
    assert_eq!(world.internet.ask_tcp(&format!("[{own}]:80"), SILENCE), None);
}

#[test]
fn a_guest_is_nobodys_router() {
    let Some(world) = machine_can_use_ipv6(World::new("router advertisements of guests")) else {
        return;
    };
    let world = world.with_ipv6(Ipv6Net::private([1, 2, 3, 4, 5]));
    let (one, _) = world.guest6(1);
    let dropped = || {
        let chain = format!("nft list chain netdev holdfast {}", one.address.interface);
        let text = world.node.run(&chain);
        // The last rule counts what none before allowed.
        let last = text.lines().rfind(|line| line.trim().starts_with("counter")).unwrap();
        let mut words = last.split_whitespace().skip_while(|word| *word != "packets");
        words.nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = dropped();
    // "2: eth0: …"
    let index = one.space.ip("-o link show dev eth0");
    let index: u32 = index.split(':').next().unwrap().parse().unwrap();
    one.space.enter(|| {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET6,
            rustix::net::SocketType::RAW,
            Some(rustix::net::ipproto::ICMPV6),
        )
        .unwrap();
        let everybody = std::net::SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, index);
        let mut packet = [0; 16];
        packet[0] = 134;
        packet[6..8].copy_from_slice(&1800_u16.to_be_bytes());
        rustix::net::sendto(&socket, &packet, rustix::net::SendFlags::empty(), &everybody).unwrap();
    });
    wait_for("the advertisement to be dropped", PATIENCE, || dropped() > before);
    assert!(!world.node.ip("-6 route show").contains("proto ra"));
}
