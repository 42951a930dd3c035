//! Machines that are stations of the provider's network, on the image we ship: a node with two cards, the
//! second one its machines', on networks whose DHCP servers and router are dnsmasq and this kernel.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use qemu_tests::harness::{
    host::{FIRST_CARD, Host, HostOptions, Medium, SECOND_CARD},
    lan::{Lan, SecondLan},
    outside::Outside,
    packages,
    scene::{GUEST_LIMIT, LeaseRequest, PushedGuest, Scene},
};

/// How long everybody may take for what is done at once.
const SOON: Duration = Duration::from_secs(90);
/// Says whether a program succeeds, in one line.
const TRY: &str =
    "try() { if \"$@\" >/dev/null 2>&1; then echo \"yes: $*\"; else echo \"no: $*\"; fi; }\n";

/// A node's configuration: its machines have the second card, where it has no address itself.
fn configuration() -> String {
    format!(
        "[[network.uplinks]]\nname = \"own\"\ncard = {{ mac = \"{FIRST_CARD}\" }}\n\
         [[network.uplinks]]\nname = \"guests\"\ncard = {{ mac = \"{SECOND_CARD}\" }}\n\
         ipv4 = \"off\"\nipv6 = \"off\"\n\
         [machines]\nvcpus = 2\nnetwork = \"bridged\"\nuplink = \"guests\"\n"
    )
}

/// A node on both networks with two machines of two leases, and a server in their network.
struct World {
    scene: Scene,
    host: Host,
    node: String,
    _second: SecondLan,
    outside: Outside,
    one: Station,
    two: Station,
}

/// A machine that is up.
struct Station {
    id: String,
    address: String,
    hardware: String,
}

impl World {
    fn new(lan: &Lan, folder: &Path) -> Self {
        let scene = Scene::start_at(folder, lan.gateway(), lan.gateway()).unwrap();
        let second = lan.add_second(folder).unwrap();
        let outside = Outside::start(SecondLan::ROUTER.into()).unwrap();
        let config = Some(scene.node_config("bridging", &configuration()));
        let (medium, uplink) = (Medium::Kernel(String::new()), lan.uplinks());
        let options = HostOptions { config, medium, uplink, ..HostOptions::default() };
        let (host, node) = scene.boot("bridging", options).unwrap();
        let guest = scene.push_probing_guest().unwrap();
        let ids = ["one", "two"].map(|name| create(&scene, &node, name, &guest));
        let [one, two] = ids.map(|id| Station::new(&scene, id));
        Self { scene, host, node, _second: second, outside, one, two }
    }

    /// Runs a script in the first machine, by ssh to its address; returns what it told, line by line.
    fn ask(&self, script: &str) -> Vec<String> {
        self.ask_at(&self.one.address, script)
    }

    /// Nothing of ours is between: a plain ssh client that can reach the machine.
    fn ask_at(&self, address: &str, script: &str) -> Vec<String> {
        let mut ssh = Command::new("ssh");
        ssh.arg("-i").arg(&self.scene.ssh.private).args(["-l", "root", "-F", "none"]);
        for option in ["BatchMode=yes", "ConnectTimeout=60", "StrictHostKeyChecking=no"] {
            ssh.args(["-o", option]);
        }
        ssh.args(["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", address, script]);
        let output = ssh.output().unwrap();
        let told = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{address}: {}: {told}{errors}", output.status);
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

impl Station {
    /// Its address is what its DHCP server gave, its console shows, and the renter is told.
    fn new(scene: &Scene, id: String) -> Self {
        let console = scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
        let given = console.split("guest: address ").nth(1).expect("an address by DHCP");
        let address = given.split('/').next().unwrap().to_owned();
        assert!(address.starts_with("198.51.100."), "{address}");
        let told = |machine: &serde_json::Value| machine["addresses"][0] == *address;
        scene.renter().wait(&["machines", "show", &id], SOON, told).unwrap();
        // Through gateway, overlay and node, which the provider's router connects with that network.
        let hardware = scene.ssh(&id, "cat /sys/class/net/eth0/address").unwrap();
        Self { id, address, hardware: hardware.trim().to_owned() }
    }
}

#[test]
fn bridged_machines_are_stations_of_the_providers_network() {
    let folder = tempfile::tempdir().unwrap();
    // Debian's mirrors are not on that network.
    packages::guest_root().unwrap();
    Lan::run("bridged machines", folder.path(), &[], |lan| {
        let world = World::new(lan, folder.path());
        meets_its_network(&world);
        meets_neither_node_nor_neighbour(&world);
        sends_in_its_own_name_only(&world);
        a_new_agent_knows_its_addresses(&world);
    });
}

fn meets_its_network(world: &World) {
    let (port, router) = (world.outside.port, SecondLan::ROUTER);
    let told = world.ask(&format!(
        "echo hello | nc -w 5 {router} {port}\nprobe tcp {router} {port}\nprobe udp {router} {port}\n\
         {TRY}try ping -c 1 -W 5 {router}"
    ));
    let expected = [
        "hello from outside".to_owned(),
        format!("tcp {router} {port} open"),
        format!("udp {router} {port} answered"),
        format!("yes: ping -c 1 -W 5 {router}"),
    ];
    assert_eq!(told, expected);
    assert_eq!(world.outside.probes(), ["datagram"]);

    // IPv6 is the network's, too: by the router's advertisements, from both sides.
    let prefix = SecondLan::PREFIX_V6;
    let script = format!(
        "ip -6 -o addr show dev eth0 scope global | grep -v tentative | grep -o '{prefix}[0-9a-f:]*'"
    );
    let deadline = Instant::now() + SOON;
    let own = loop {
        match &world.ask(&format!("{script}; true"))[..] {
            [own] => break own.clone(),
            found => assert!(Instant::now() < deadline, "no address by SLAAC: {found:?}"),
        }
        std::thread::sleep(Duration::from_secs(1));
    };
    let pinged = format!("ping -6 -c 1 -W 5 {prefix}:1");
    assert_eq!(world.ask(&format!("{TRY}try {pinged}")), [format!("yes: {pinged}")]);
    assert_eq!(world.ask_at(&own, "echo reached"), ["reached"]);
}

/// Each of what must fail by the same program as above.
fn meets_neither_node_nor_neighbour(world: &World) {
    let (router, two) = (SecondLan::ROUTER, &world.two.address);
    let told = world.ask(&format!(
        "{TRY}try arping -c 2 -w 3 -I eth0 {router}\ntry arping -c 2 -w 3 -I eth0 {two}\n\
         try ping -c 2 -W 2 {two}\nprobe tcp {two} 22"
    ));
    let expected = [
        format!("yes: arping -c 2 -w 3 -I eth0 {router}"),
        format!("no: arping -c 2 -w 3 -I eth0 {two}"),
        format!("no: ping -c 2 -W 2 {two}"),
        format!("tcp {two} 22 silent"),
    ];
    assert_eq!(told, expected);
    // Of all nodes of the link, the router alone answers, by whatever addresses it has.
    let hardware = world.ask(
        "ping -6 -c 2 -W 2 ff02::1%eth0 >/dev/null\n\
         ip -6 neigh show dev eth0 | grep -o 'lladdr [0-9a-f:]*' | sort -u | wc -l",
    );
    assert_eq!(hardware, ["1"]);
}

/// Frames made by hand. Only its own name reaches the server; what the router passes on to the other
/// machine by itself is the provider's network's doing.
fn sends_in_its_own_name_only(world: &World) {
    let (port, router) = (world.outside.port, SecondLan::ROUTER);
    let (one, two) = (&world.one, &world.two);
    world.ask_at(&two.address, "probe listen 15 </dev/null >/run/heard 2>&1 &");
    let forged = world.ask(&format!(
        "ping -c 1 -W 5 {router} >/dev/null; probe forge {} {} {} {router} {port}",
        one.address, two.address, two.hardware
    ));
    assert_eq!(forged, ["forged all"]);
    world.ask_at(&two.address, &format!("probe udp {router} {port}"));
    let heard = "while ! grep -q all /run/heard; do sleep 1; done; cat /run/heard";
    assert_eq!(
        world.ask_at(&two.address, heard),
        ["heard by-the-gateway", "heard datagram", "heard all"]
    );
    assert_eq!(world.outside.probes(), ["as-itself", "datagram"]);
}

/// No machine notices; the renter is told its address again though no DHCP server was asked.
fn a_new_agent_knows_its_addresses(world: &World) {
    let operator = world.scene.cli.with_key(&world.scene.operator.file);
    let mark = world.host.serial.mark();
    operator.text(&["node", "restart-agent", &world.node]).unwrap();
    world.host.serial.wait_from(mark, "event=machine-adopted", SOON).unwrap();
    let told = |machine: &serde_json::Value| machine["addresses"][0] == *world.one.address;
    world.scene.renter().wait(&["machines", "show", &world.one.id], SOON, told).unwrap();
    assert_eq!(world.ask("echo still here"), ["still here"]);
}
