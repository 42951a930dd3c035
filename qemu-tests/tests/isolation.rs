//! A guest reaches the internet side, and nothing else: not the node, not another tenant's guest,
//! not under a borrowed name. What it may tell its node is what it sees of its devices. Each attempt that must fail stands beside the same attempt, by the same
//! program, where it must succeed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    net::{Ipv4Addr, TcpStream},
    time::{Duration, Instant},
};

use qemu_tests::harness::{
    agent::exchange,
    host::{Host, HostOptions, Medium, TEST_MACHINE},
    outside::Outside,
    scene::{GUEST_LIMIT, LeaseRequest, PushedGuest, Scene},
};
use types::gpu::READINGS_PORT;

/// How long the node may take for what it does at once.
const SOON: Duration = Duration::from_secs(90);
/// Where machines meet their node.
const NODE_SIDE: &str = "10.77.0.1";
/// UDP port of the node's overlay.
const OVERLAY: u16 = 4600;
/// Where the node serves metrics, to the internet side.
const METRICS: u16 = 9187;
/// What a driver said of a GPU, recorded.
const READING: &str = include_str!("../../agent/tests/data/h200.json");

/// A node with two machines of two leases, and a server outside.
struct World {
    scene: Scene,
    host: Host,
    outside: Outside,
    /// The node's address on the internet side.
    node_address: String,
    one: Tenant,
    two: Tenant,
}

/// A machine that is up.
struct Tenant {
    id: String,
    address: String,
    hardware: String,
    /// Its link-local IPv6 address.
    local: String,
}

impl World {
    fn new(folder: &std::path::Path) -> Self {
        let scene = Scene::start(folder).unwrap();
        let outside = Outside::start(Ipv4Addr::LOCALHOST.into()).unwrap();
        let extra = format!("[machines]\nvcpus = 2\n[metrics]\nlisten = \"0.0.0.0:{METRICS}\"\n");
        let config = Some(scene.node_config("isolating", &extra));
        let medium = Medium::Kernel(String::new());
        let options = HostOptions { config, medium, ..HostOptions::default() };
        let (host, node) = scene.boot("isolating", options).unwrap();
        let online = host.serial.wait("event=online address=203.0.113.", SOON).unwrap();
        let node_address = online.rsplit('=').next().unwrap().trim().to_owned();
        let guest = scene.push_probing_guest().unwrap();
        let ids = ["one", "two"].map(|name| create(&scene, &node, name, &guest));
        let [one, two] = ids.map(|id| Tenant::new(&scene, id));
        Self { scene, host, outside, node_address, one, two }
    }

    /// Runs a script in the first machine; returns what it told, line by line.
    fn ask(&self, script: &str) -> Vec<String> {
        let told = self.scene.ssh(&self.one.id, script).unwrap();
        println!("{told}");
        told.lines().map(str::to_owned).collect()
    }
}

fn create(scene: &Scene, node: &str, name: &str, guest: &PushedGuest) -> String {
    let request = LeaseRequest { name, node, memory_mib: 256, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, guest).unwrap();
    id
}

impl Tenant {
    fn new(scene: &Scene, id: String) -> Self {
        scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
        let told = scene.ssh(
            &id,
            "ip -4 -o addr show eth0 | awk '{print $4}' | cut -d/ -f1; cat /sys/class/net/eth0/address; \
             ip -6 -o addr show dev eth0 scope link | awk '{print $4}' | cut -d/ -f1",
        );
        let told = told.unwrap();
        let words: Vec<String> = told.split_whitespace().map(str::to_owned).collect();
        let [address, hardware, local] = <[String; 3]>::try_from(words).unwrap();
        Self { id, address, hardware, local }
    }
}

/// Says whether a program succeeds, in one line.
const TRY: &str =
    "try() { if \"$@\" >/dev/null 2>&1; then echo \"yes: $*\"; else echo \"no: $*\"; fi; }\n";

#[test]
fn a_guest_reaches_the_internet_side_and_neither_the_node_nor_another_guest() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path());
    reaches_the_internet_side(&world);
    reaches_no_address_of_the_node(&world);
    reaches_no_other_guest(&world);
    sends_in_its_own_name_only(&world);
    tells_its_node_of_its_gpus(&mut world);
}

fn reaches_the_internet_side(world: &World) {
    let port = world.outside.port;
    let closed = world.scene.gateway.overlay_port;
    let told = world.ask(&format!(
        "echo hello | nc -w 5 {TEST_MACHINE} {port}\nprobe tcp {TEST_MACHINE} {port} {closed}\n\
         probe udp {TEST_MACHINE} {port}\nprobe udp {TEST_MACHINE} {closed}\n\
         {TRY}try ping -c 1 -W 5 {TEST_MACHINE}"
    ));
    // The last of the datagrams went to the gateway's overlay: the same program as the node's.
    let expected = [
        "hello from outside".to_owned(),
        format!("tcp {TEST_MACHINE} {port} open"),
        format!("tcp {TEST_MACHINE} {closed} refused"),
        format!("udp {TEST_MACHINE} {port} answered"),
        format!("udp {TEST_MACHINE} {closed} answered"),
        format!("yes: ping -c 1 -W 5 {TEST_MACHINE}"),
    ];
    assert_eq!(told, expected);
    assert_eq!(world.outside.probes(), ["datagram"]);
}

/// A port that nobody listens at is no better than one with a server: "refused" would be the
/// node's answer too.
fn reaches_no_address_of_the_node(world: &World) {
    let ports = [1, 22, 53, 67, 80, 179, 443, 2375, OVERLAY, 8080, METRICS, 50051, 65535];
    let addresses = [NODE_SIDE, &world.node_address];
    let words = ports.map(|port: u16| port.to_string()).join(" ");
    let script = addresses.map(|address| {
        format!(
            "{{ probe tcp {address} {words}; probe udp {address} {OVERLAY}; probe udp {address} 53\n\
             try ping -c 2 -W 2 {address}; }} >/run/{address} &\n"
        )
    });
    let [one, two] = addresses;
    let script = format!("{TRY}{}wait; cat /run/{one} /run/{two}", script.concat());
    let expected = addresses.iter().flat_map(|address| {
        let tcp = ports.iter().map(move |port| format!("tcp {address} {port} silent"));
        let udp = [OVERLAY, 53].map(|port| format!("udp {address} {port} silent"));
        tcp.chain(udp).chain([format!("no: ping -c 2 -W 2 {address}")])
    });
    assert_eq!(world.ask(&script), expected.collect::<Vec<_>>());

    // IPv6: all nodes of the link, which is every address the node could have on it. The guest
    // answers itself, by the same program.
    let own = &world.one.local;
    let told = world.ask(&format!(
        "{TRY}try ping -6 -c 1 -W 2 {own}%eth0\n\
         ping -6 -c 2 -W 2 ff02::1%eth0 | grep -v {own} | grep -c 'bytes from'\n\
         ip -6 neigh show dev eth0 | grep -c lladdr\nip -6 route show default | wc -l\n\
         router=$(ip -6 route show default | cut -d' ' -f3)\n\
         ping -6 -c 2 -W 2 $router%eth0 >/dev/null 2>&1 && echo answers || echo silent"
    ));
    // The one router is the node, which forwards and does not answer.
    let own = format!("yes: ping -6 -c 1 -W 2 {own}%eth0");
    assert_eq!(told, [own.as_str(), "0", "0", "1", "silent"]);
}

fn reaches_no_other_guest(world: &World) {
    let Tenant { address, local, .. } = &world.two;
    let told = world.ask(&format!(
        "{TRY}try arping -c 2 -w 3 -I eth0 {NODE_SIDE}\ntry arping -c 2 -w 3 -I eth0 {address}\n\
         try ping -c 2 -W 2 {address}\ntry ping -6 -c 2 -W 2 {local}%eth0\nprobe tcp {address} 22 80\n\
         ip route add {address} via {NODE_SIDE}\nprobe tcp {address} 22\nprobe udp {address} 4600\n\
         ip route del {address}; probe tcp 127.0.0.1 22"
    ));
    let expected = [
        format!("yes: arping -c 2 -w 3 -I eth0 {NODE_SIDE}"),
        format!("no: arping -c 2 -w 3 -I eth0 {address}"),
        format!("no: ping -c 2 -W 2 {address}"),
        format!("no: ping -6 -c 2 -W 2 {local}%eth0"),
        format!("tcp {address} 22 silent"),
        format!("tcp {address} 80 silent"),
        format!("tcp {address} 22 silent"),
        format!("udp {address} 4600 silent"),
        "tcp 127.0.0.1 22 open".to_owned(),
    ];
    assert_eq!(told, expected);
}

/// Sixteen frames, made by hand: the first is honest and shows that they go out.
fn sends_in_its_own_name_only(world: &World) {
    let port = world.outside.port;
    let (one, two) = (&world.one, &world.two);
    let listen = "probe listen 10 </dev/null >/run/heard 2>&1 &";
    world.scene.ssh(&two.id, listen).unwrap();
    let told = world.ask(&format!(
        "probe forge {} {} {} {TEST_MACHINE} {port}",
        one.address, two.address, two.hardware
    ));
    assert_eq!(told, ["forged all"]);
    // The other machine hears what is for it, and only that.
    world.scene.ssh(&two.id, &format!("probe udp {TEST_MACHINE} {port}")).unwrap();
    let heard = "while ! grep -q all /run/heard; do sleep 1; done; cat /run/heard";
    let heard = world.scene.ssh(&two.id, heard).unwrap();
    assert_eq!(heard.lines().collect::<Vec<_>>(), ["heard datagram", "heard all"]);
    assert_eq!(world.outside.probes(), ["as-itself", "datagram"]);
}

/// Over vsock, under the machine's name and no other; what it says of GPUs is not counted, as its lease has none.
/// Rubbish is not taken, and what was said before stays.
fn tells_its_node_of_its_gpus(world: &mut World) {
    const REFUSED: &str = "holdfast_gpu_readings_refused_total";
    let port = world.host.forward_tcp(METRICS).unwrap();
    let scrape = |name: &str| {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let (status, text) = exchange(stream, "GET", "/metrics").unwrap();
        assert_eq!(status, 200, "{text}");
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let gpu_series = || {
        let lines = scrape("holdfast_gpu_");
        let lines = lines.into_iter().filter(|line| !line.starts_with(REFUSED));
        // Without its value, which is an age.
        let series = lines.filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned()));
        series.collect::<Vec<_>>()
    };
    assert_eq!(gpu_series(), Vec::<String>::new());
    let tell = format!("probe tell {READINGS_PORT}");
    let told = world.ask(&format!("printf '%s' '{READING}' | {tell}"));
    assert_eq!(told, [format!("told {READINGS_PORT}")]);
    let deadline = Instant::now() + SOON;
    let mut seen = gpu_series();
    while seen.is_empty() {
        assert!(Instant::now() < deadline, "nothing was taken");
        std::thread::sleep(Duration::from_millis(200));
        seen = gpu_series();
    }
    let told = format!("holdfast_gpu_reading_age_seconds{{machine=\"{}\"}}", world.one.id);
    assert_eq!(seen, [told]);
    world.ask(&format!("sleep 1; echo '{{\"version\":1,' | {tell}"));
    let told = format!("{REFUSED}{{machine=\"{}\"}} 1", world.one.id);
    while !scrape(REFUSED).contains(&told) {
        assert!(Instant::now() < deadline + SOON, "{:?}", scrape(REFUSED));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(gpu_series(), seen);
}
