//! Bridged machines: stations of the provider's network, which is dnsmasq's here, on an uplink where
//! the node has no address. What a guest may not do is done with raw frames.

use std::{
    fs::File,
    io::Write,
    net::{Ipv4Addr, Ipv6Addr},
    process::{Child, Command},
    time::Duration,
};

use agent::net::{
    MachineNetworks, MachineNetworksConfig, Uplinks,
    machines::{bridged::Bridged, ipv6::Exit},
    ruleset::ByteRate,
};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use types::{
    config::{Inbound, Neighbours, NodeSpec},
    ids::MachineId,
};

use crate::{
    netns::{Namespace, PATIENCE, SILENCE, can_run, wait_for},
    world::{Guest, kernel_can_filter},
};

/// The provider's network for machines, and its server.
const SERVER: &str = "192.168.60.1:80";
const SERVER6: &str = "[2600:60::1]:80";
/// The address that its server keeps for a client of a certain name.
const RESERVED: &str = "192.168.60.40";

const NODE: &str = r#"
    version = 1
    [authority]
    threshold = 1
    keys = ["0101010101010101010101010101010101010101010101010101010101010101"]
    [[network.uplinks]]
    name = "own"
    card = { name = "eth0" }
    ipv6 = "off"
    addresses = ["198.51.100.2/24"]
    [[network.uplinks]]
    name = "guests"
    card = { name = "eth1" }
    mtu = 1400
    ipv4 = "off"
    ipv6 = "off"
    [machines]
    network = "bridged"
    uplink = "guests"
"#;

/// A node with two uplinks: its own, and its machines'.
struct World {
    node: Namespace,
    /// The network of its own uplink.
    office: Namespace,
    /// The network of its machines.
    lan: Namespace,
    runtime: Option<Runtime>,
    uplinks: Option<Uplinks>,
    networks: Option<MachineNetworks>,
    dnsmasq: Child,
    folder: TempDir,
    neighbours: Neighbours,
    limit: Option<ByteRate>,
}

impl World {
    fn new(what: &str, neighbours: Neighbours) -> Option<Self> {
        if !can_run(what, &["ip", "ping", "dnsmasq", "busybox"]) {
            return None;
        }
        let (node, office, lan) = (Namespace::new(), Namespace::new(), Namespace::new());
        node.cable("eth0", &office, "eth0");
        node.cable("eth1", &lan, "eth0");
        if !kernel_can_filter(what, &node) || !can_bridge(what, &node) {
            return None;
        }
        office.ip("addr add 198.51.100.1/24 dev eth0");
        office.ip("link set eth0 up");
        lan.ip("addr add 192.168.60.1/24 dev eth0");
        lan.ip("addr add 2600:60::1/64 dev eth0 nodad");
        // One that needs no check: until it has one, a router answers from another address, which counts
        // for nothing (RFC 4861 §6.1.2).
        lan.ip("addr add fe80::1/64 dev eth0 nodad");
        lan.ip("link set eth0 up");
        for server in [SERVER, SERVER6] {
            lan.serve(server);
        }
        node.serve("0.0.0.0:8080");
        let folder = tempfile::tempdir().unwrap();
        let dnsmasq = dnsmasq(&lan, &folder);
        let runtime = Some(node.runtime());
        let (uplinks, networks, limit) = (None, None, None);
        let mut world = Self {
            node,
            office,
            lan,
            runtime,
            uplinks,
            networks,
            dnsmasq,
            folder,
            neighbours,
            limit,
        };
        world.start_agent();
        Some(world)
    }

    fn start_agent(&mut self) {
        let spec = NodeSpec::parse(NODE.as_bytes()).unwrap();
        let runtime = self.runtime.as_ref().unwrap();
        let (neighbours, limit) = (self.neighbours, self.limit);
        let (uplink, folder) = ("guests".to_owned(), self.folder.path().join("addresses"));
        let started = self.node.enter(|| {
            runtime.block_on(async {
                let uplinks = Uplinks::start(&spec.network).unwrap();
                let config = MachineNetworksConfig {
                    subnet: "10.77.0.0/16".parse().unwrap(),
                    reachable: Vec::new(),
                    exit: Exit::Routed,
                    inbound: Inbound::Closed,
                    limit,
                    ipv6: None,
                    bridged: Some(Bridged { uplink, neighbours, folder }),
                };
                let networks = MachineNetworks::start(config, uplinks.status()).await.unwrap();
                (uplinks, networks)
            })
        });
        (self.uplinks, self.networks) = (Some(started.0), Some(started.1));
        wait_for("the uplink to be a port", PATIENCE, || {
            let ports = self.node.ip("-o link show master machines0");
            ports.contains("eth1") && ports.contains("mtu 1400")
        });
    }

    fn kill_agent(&mut self) {
        (self.uplinks, self.networks) = (None, None);
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
        self.runtime = Some(self.node.runtime());
    }

    fn plug(&self, number: u8) -> Guest {
        let networks = self.networks.as_ref().unwrap();
        let runtime = self.runtime.as_ref().unwrap();
        let machine = MachineId::from_bytes([number; 16]);
        Guest::plug(runtime.block_on(networks.create(machine, 1)).unwrap())
    }

    /// A guest that asked for an IPv4 address, and the address.
    fn guest(&self, number: u8) -> (Guest, String) {
        self.guest_as(number, "")
    }

    /// The same of a guest whose DHCP client, udhcpc, has further options.
    fn guest_as(&self, number: u8, options: &str) -> (Guest, String) {
        let guest = self.plug(number);
        let told = guest.dhcp_as(options).expect("a lease");
        let own = told.split('/').next().unwrap().to_owned();
        assert!(own.starts_with("192.168.60."), "{told}");
        wait_for("the node to know the address", PATIENCE, || {
            self.known(number) == Some(own.clone())
        });
        guest.space.serve("0.0.0.0:80");
        (guest, own)
    }

    /// The address that the node knows of a machine.
    fn known(&self, number: u8) -> Option<String> {
        let networks = self.networks.as_ref().unwrap();
        let address = networks.adopt(MachineId::from_bytes([number; 16])).unwrap();
        address.known_ipv4().map(|address| address.to_string())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        (self.uplinks, self.networks) = (None, None);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
        let _ = self.dnsmasq.kill();
        let _ = self.dnsmasq.wait();
    }
}

fn can_bridge(what: &str, space: &Namespace) -> bool {
    let made = space.try_run("ip link add probe type bridge").status.success();
    if !made {
        println!("skipped: {what}: this kernel has no bridges");
    }
    space.try_run("ip link del probe");
    made
}

fn dnsmasq(lan: &Namespace, folder: &TempDir) -> Child {
    let mut command = Command::new("dnsmasq");
    command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--user=root"]);
    command.args(["--log-facility=-", "--interface=eth0", "--bind-interfaces", "--pid-file="]);
    command.arg(format!("--dhcp-leasefile={}", folder.path().join("leases").display()));
    command.args(["--dhcp-range=192.168.60.50,192.168.60.99,2m", "--dhcp-authoritative"]);
    // Whoever calls itself "web" has this address.
    command.arg(format!("--dhcp-host=id:77:65:62,{RESERVED}"));
    command.args(["--dhcp-range=2600:60::,ra-only,64", "--enable-ra", "--ra-param=eth0,5,600"]);
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    command.stderr(log.try_clone().unwrap()).stdout(log);
    lan.enter(|| command.spawn().unwrap())
}

/// Frames to hardware addresses that begin like this are counted where they come out of the uplink.
const COUNTED: [u8; 6] = [0x02, 0xde, 0xad, 0, 0, 0];

/// A machine whose guest sends what it likes.
struct Hostile {
    tap: File,
    mac: [u8; 6],
}

impl Hostile {
    /// Takes the place of a guest that has an address already.
    fn instead_of(world: &World, number: u8, guest: Guest) -> Self {
        let mac = guest.address.mac.0;
        drop(guest);
        let networks = world.networks.as_ref().unwrap();
        let machine = MachineId::from_bytes([number; 16]);
        let runtime = world.runtime.as_ref().unwrap();
        let net = runtime.block_on(networks.create(machine, 1)).unwrap();
        world.lan.run("nft add table netdev watch");
        let chain = "{ type filter hook ingress device eth0 priority -500 ; }";
        world.lan.run(&format!("nft add chain netdev watch in {chain}"));
        let these = "ether daddr & ff:ff:ff:ff:ff:00 == 02:de:ad:00:00:00";
        world.lan.run(&format!("nft add rule netdev watch in {these} counter"));
        Self { tap: File::from(net.tap), mac }
    }

    /// Sends a frame from its own hardware address to one that is counted.
    fn send(&mut self, kind: u16, payload: &[u8]) {
        self.send_as(self.mac, kind, payload);
    }

    fn send_as(&mut self, from: [u8; 6], kind: u16, payload: &[u8]) {
        // An empty virtio-net header comes first.
        let mut frame = vec![0; 12];
        frame.extend(COUNTED);
        frame.extend(from);
        frame.extend(kind.to_be_bytes());
        frame.extend_from_slice(payload);
        frame.resize(frame.len().max(12 + 60), 0);
        self.tap.write_all(&frame).unwrap();
    }
}

/// How many of a hostile guest's frames have come out.
fn arrived(world: &World) -> u64 {
    let rules = world.lan.run("nft list chain netdev watch in");
    let mut words = rules.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).unwrap().parse().unwrap()
}

fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap()
}

/// A UDP packet between two ports.
fn ipv4(from: Ipv4Addr, ports: (u16, u16), body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(28 + body.len()).unwrap();
    let mut packet = vec![0x45, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    packet.extend(from.octets());
    packet.extend([255; 4]);
    let checksum = !sum(&packet);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(ports.0.to_be_bytes());
    packet.extend(ports.1.to_be_bytes());
    packet.extend((length - 20).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend_from_slice(body);
    packet
}

fn arp(mac: [u8; 6], sender: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 2];
    packet.extend(mac);
    packet.extend(sender.octets());
    packet.extend([0; 10]);
    packet
}

fn ipv6(from: Ipv6Addr, next: u8, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(u16::try_from(body.len()).unwrap().to_be_bytes());
    packet.extend([next, 255]);
    packet.extend(from.octets());
    packet.extend(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets());
    packet.extend_from_slice(body);
    packet
}

/// A message of neighbour discovery about a target.
fn discovery(kind: u8, target: Ipv6Addr) -> Vec<u8> {
    [&[kind, 0, 0, 0, 0, 0, 0, 0], &target.octets()[..]].concat()
}

fn dhcp(direction: u8, client: [u8; 6]) -> Vec<u8> {
    let mut message = vec![0; 300];
    message[..3].copy_from_slice(&[direction, 1, 6]);
    message[28..34].copy_from_slice(&client);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    message
}

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;

#[test]
fn a_bridged_guest_is_a_station_of_the_providers_network() {
    let Some(world) = World::new("bridged guests", Neighbours::Apart) else { return };
    let (guest, own) = world.guest(1);
    assert_eq!(guest.address.mtu, 1400);
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE), Some(own.clone()));
    assert!(world.lan.ask_tcp(&format!("{own}:80"), PATIENCE).is_some());
    // IPv6 comes from the network's router, by SLAAC, and is bound while the guest checks it.
    let mut own6 = String::new();
    wait_for("an address by SLAAC", PATIENCE * 6, || {
        let text = guest.space.ip("-6 -o addr show dev eth0 scope global -tentative");
        let found = text.split_whitespace().find_map(|word| word.strip_suffix("/64"));
        own6 = found.unwrap_or_default().to_owned();
        !own6.is_empty()
    });
    assert_eq!(guest.space.ask_tcp(SERVER6, PATIENCE), Some(own6));
}

#[test]
fn a_guest_may_call_itself_as_its_dhcp_client_likes() {
    let Some(world) = World::new("DHCP client identifiers", Neighbours::Apart) else { return };
    // None; a string, RFC 2132; a DUID, RFC 4361; a string that says no type; firmware's UUID.
    let uuid = format!("00{}", "5a".repeat(16));
    let names = ["006869", "ff00000001000300010203", "77656233", &uuid];
    let mut options: Vec<String> = names.map(|name| format!("-x 0x3d:{name}")).to_vec();
    options.push("-C".to_owned());
    for (number, options) in (1..).zip(options) {
        let (guest, own) = world.guest_as(number, &options);
        assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE), Some(own), "{options}");
    }
    // One whose owner is away is had by whoever comes first under its name.
    let (guest, own) = world.guest_as(9, "-x 0x3d:776562");
    assert_eq!(own, RESERVED);
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE), Some(own));
    // Another image with the same identifier.
    let twin = world.plug(10);
    assert!(twin.dhcp_as("-x 0x3d:776562").expect("a lease").starts_with(RESERVED));
    assert_eq!(twin.space.ask_tcp(SERVER, SILENCE * 3), None);
    assert_eq!((world.known(9), world.known(10)), (Some(RESERVED.to_owned()), None));
}

#[test]
fn a_guest_does_not_get_a_stations_address_by_the_stations_name() {
    let Some(world) = World::new("another's client identifier", Neighbours::Apart) else { return };
    world.lan.ip(&format!("addr add {RESERVED}/32 dev lo"));
    let guest = world.plug(1);
    assert!(guest.dhcp_as("-x 0x3d:776562").expect("a lease").starts_with(RESERVED));
    assert_eq!(guest.space.ask_tcp(SERVER, SILENCE * 3), None);
    assert_eq!(world.known(1), None);
    // It comes back as itself.
    guest.space.ip("addr flush dev eth0");
    let own = guest.dhcp().expect("a lease");
    wait_for("its own address", PATIENCE, || {
        world.known(1).is_some_and(|known| own.starts_with(&known))
    });
}

#[test]
fn a_guest_keeps_many_addresses_also_when_the_agent_is_new() {
    let Some(mut world) = World::new("many addresses", Neighbours::Apart) else { return };
    let guest = world.plug(1);
    let all: Vec<String> = (1..=20).map(|n| format!("2600:60::7:{n:x}")).collect();
    for address in &all {
        guest.space.ip(&format!("addr add {address}/64 dev eth0"));
        std::thread::sleep(Duration::from_millis(250));
    }
    let reaches = |address: &String| {
        let command = format!("ping -6 -c 1 -W 1 -I {address} 2600:60::1");
        guest.space.try_run(&command).status.success()
    };
    for address in &all {
        wait_for(address, PATIENCE, || reaches(address));
    }
    world.kill_agent();
    world.start_agent();
    for address in &all {
        assert!(reaches(address), "{address}");
    }
}

#[test]
fn the_node_is_not_on_its_machines_network() {
    let Some(world) = World::new("the node beside a bridge", Neighbours::Apart) else { return };
    let (guest, own) = world.guest(1);
    for link in ["machines0", "eth1", &guest.address.interface] {
        assert_eq!(world.node.ip(&format!("-4 -o addr show dev {link}")), "", "{link}");
        assert_eq!(world.node.ip(&format!("-6 addr show dev {link}")), "", "{link}");
    }
    // Its own address, by way of every hardware address that it has there.
    for link in ["machines0", "eth1"] {
        let text = world.node.ip(&format!("-j link show {link}"));
        let links: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mac = links[0]["address"].as_str().unwrap().to_owned();
        for space in [&world.lan, &guest.space] {
            space.try_run("ip route replace 198.51.100.2/32 dev eth0");
            assert_eq!(space.ask_tcp("198.51.100.2:8080", SILENCE), None, "by ARP");
            space.ip(&format!("neigh replace 198.51.100.2 lladdr {mac} dev eth0"));
            assert_eq!(space.ask_tcp("198.51.100.2:8080", SILENCE), None, "by {link}'s address");
            space.ip("neigh del 198.51.100.2 dev eth0");
        }
    }
    // On its own uplink it is there, and knows no way to the machines of its own.
    assert!(world.office.ask_tcp("198.51.100.2:8080", PATIENCE).is_some());
    assert_eq!(world.node.ask_tcp(&format!("{own}:80"), SILENCE), None);
}

#[test]
fn a_hostile_guest_speaks_for_nobody_but_itself() {
    let Some(world) = World::new("spoofing on a bridge", Neighbours::Apart) else { return };
    let (guest, own) = world.guest(1);
    let own: Ipv4Addr = own.parse().unwrap();
    let mut hostile = Hostile::instead_of(&world, 1, guest);
    let mac = hostile.mac;
    let [a, b, c, d, e, f] = mac;
    let words = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]].map(u16::from_be_bytes);
    let link = Ipv6Addr::new(0xfe80, 0, 0, 0, words[0], words[1], words[2], words[3]);
    let router: Ipv6Addr = "fe80::1".parse().unwrap();
    let global: Ipv6Addr = "2600:60::1".parse().unwrap();
    let other = Ipv4Addr::new(192, 168, 60, 1);
    let advertisement = [&[134, 0, 0, 0, 64, 0, 7, 8][..], &[0; 8]].concat();
    let in_fragments = [&[60, 0, 0, 1, 0, 0, 0, 9], &[58, 0, 1, 4, 0, 0, 0, 0][..]].concat();

    hostile.send_as([2, 0, 0, 0, 0, 99], IPV4, &ipv4(own, (9, 9), b""));
    hostile.send_as([2, 0, 0, 0, 0, 99], ARP, &arp(mac, own));
    hostile.send(IPV4, &ipv4(other, (9, 9), b"another's address"));
    hostile.send(IPV4, &ipv4(Ipv4Addr::new(169, 254, 1, 1), (9, 9), b"no address"));
    hostile.send(ARP, &arp(mac, other));
    hostile.send(ARP, &arp([2, 0, 0, 0, 0, 99], own));
    hostile.send(IPV4, &ipv4(own, (67, 68), &dhcp(2, mac)));
    hostile.send(IPV4, &ipv4(own, (9, 68), &dhcp(2, mac)));
    hostile.send(IPV4, &ipv4(own, (68, 67), &dhcp(1, [2, 0, 0, 0, 0, 99])));
    hostile.send(IPV6, &ipv6(link, 58, &advertisement));
    hostile.send(IPV6, &ipv6(router, 58, &advertisement));
    hostile.send(IPV6, &ipv6(link, 44, &in_fragments));
    hostile.send(IPV6, &ipv6(link, 58, &discovery(136, router)));
    hostile.send(IPV6, &ipv6(link, 58, &discovery(136, global)));
    hostile.send(IPV6, &ipv6(global, 58, &discovery(135, router)));
    hostile.send(IPV6, &ipv6(link, 58, &discovery(137, router)));
    hostile.send(IPV6, &ipv6(link, 17, &[2, 35, 2, 34, 0, 8, 0, 0]));
    hostile.send(IPV6, &ipv6(global, 59, b""));
    // Tagged, for another VLAN; a bridge's; a switch's; a point-to-point server's; a length.
    let tagged = [&[0, 5, 8, 0], &ipv4(own, (9, 9), b"")[..]].concat();
    for kind in [0x8100, 0x88a8, 0x9100] {
        hostile.send(kind, &tagged);
    }
    for kind in [0x88cc, 0x8863, 0x8809, 38] {
        hostile.send(kind, &[0x42, 0x42, 3, 0, 0, 0]);
    }
    std::thread::sleep(SILENCE);
    assert_eq!(arrived(&world), 0, "of what it may not send");

    // The same kinds of frames in its own name.
    hostile.send(IPV4, &ipv4(own, (9, 9), b""));
    hostile.send(ARP, &arp(mac, own));
    hostile.send(IPV4, &ipv4(own, (68, 67), &dhcp(1, mac)));
    hostile.send(IPV6, &ipv6(link, 58, &discovery(136, link)));
    // Listeners of RFC 2710 and RFC 3810, behind the option that asks routers to look.
    let alert = [58, 0, 5, 2, 0, 0, 1, 0];
    let group: Ipv6Addr = "ff02::1:ff00:7".parse().unwrap();
    for kind in [131, 132, 143] {
        hostile.send(IPV6, &ipv6(link, 0, &[&alert[..], &discovery(kind, group)].concat()));
    }
    wait_for("what it may send", PATIENCE, || arrived(&world) == 7);
}

#[test]
fn a_frame_with_a_guests_address_from_outside_does_not_move_the_guest() {
    let Some(world) = World::new("a guest's address outside", Neighbours::Apart) else { return };
    let (guest, own) = world.guest(1);
    let text = world.lan.ip("-j link show eth0");
    let links: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mac = links[0]["address"].as_str().unwrap().to_owned();
    // As a switch that reflects the guest's frames would send it.
    world.lan.ip(&format!("link set eth0 address {}", guest.address.mac));
    let before = world.node.received("eth1");
    world.lan.pings("192.168.60.222");
    assert!(world.node.received("eth1") > before);
    world.lan.ip(&format!("link set eth0 address {mac}"));
    assert!(world.lan.ask_tcp(&format!("{own}:80"), PATIENCE).is_some());
}

#[test]
fn an_address_that_was_not_given_is_of_no_use() {
    let Some(world) = World::new("self-made addresses", Neighbours::Apart) else { return };
    let guest = world.plug(1);
    guest.space.ip("addr add 192.168.60.200/24 dev eth0");
    assert!(!guest.space.pings("192.168.60.1"));
    assert_eq!(world.known(1), None);
    // The router's, which it defends.
    guest.space.ip("addr flush dev eth0");
    guest.space.ip("addr add 2600:60::1/64 dev eth0");
    wait_for("the conflict to show", PATIENCE, || {
        guest.space.ip("-6 addr show dev eth0").contains("dadfailed")
    });
    let (other, own) = world.guest(2);
    assert_eq!(other.space.ask_tcp(SERVER, PATIENCE), Some(own));
}

#[test]
fn guests_of_one_node_are_apart_unless_the_provider_wants_them_together() {
    let Some(world) = World::new("bridged neighbours", Neighbours::Apart) else { return };
    let ((one, _), (_two, there)) = (world.guest(1), world.guest(2));
    assert_eq!(one.space.ask_tcp(&format!("{there}:80"), SILENCE), None);
    drop((one, _two, world));
    let Some(world) = World::new("bridged neighbours", Neighbours::Together) else { return };
    let ((one, here), (_two, there)) = (world.guest(1), world.guest(2));
    assert_eq!(one.space.ask_tcp(&format!("{there}:80"), PATIENCE), Some(here));
}

#[test]
fn a_new_agent_knows_the_addresses_and_guests_notice_nothing() {
    let Some(mut world) = World::new("a new agent and a bridge", Neighbours::Apart) else { return };
    let (guest, own) = world.guest(1);
    world.kill_agent();
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE), Some(own.clone()));
    world.start_agent();
    assert_eq!(world.known(1), Some(own.clone()));
    assert_eq!(guest.space.ask_tcp(SERVER, PATIENCE), Some(own));
    let machine = guest.address.machine;
    let networks = world.networks.as_ref().unwrap();
    world.runtime.as_ref().unwrap().block_on(networks.delete(machine)).unwrap();
    assert!(!world.node.ip("-o link").contains(&guest.address.interface));
    assert!(!world.node.run("nft list ruleset").contains(&guest.address.interface));
}

#[test]
fn a_bridged_guest_sends_no_faster_than_its_limit() {
    let Some(mut world) = World::new("a bridged guest's limit", Neighbours::Apart) else { return };
    world.limit = Some(ByteRate::from_mbit(8));
    world.kill_agent();
    world.start_agent();
    let (guest, _) = world.guest(1);
    let send = |count: u32| {
        guest.space.enter(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
            for _ in 0..count {
                let _ = socket.send_to(&[0; 1000], "192.168.60.1:9");
            }
        });
    };
    // As long as its kernel asks who that is, it keeps few packets and drops the others.
    send(1);
    wait_for("the router's hardware address", PATIENCE, || {
        guest.space.ip("neigh show 192.168.60.1").contains("lladdr")
    });
    let before = world.lan.received("eth0");
    send(2000);
    std::thread::sleep(SILENCE);
    // 8 Mbit/s with a burst of 128 KiB, in under a second or two.
    let packets = world.lan.received("eth0") - before;
    assert!((100..1900).contains(&packets), "{packets} of 2000 packets of 1000 bytes");
}
