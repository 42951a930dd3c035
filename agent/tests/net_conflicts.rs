//! Uplinks on a network where another host has the node's address, against a real dnsmasq: a lease is declined,
//! an address of the configuration is kept and told.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;
mod uml;

use std::{
    fs::{self, File},
    net::IpAddr,
    process::{Child, Command},
    time::Duration,
};

use agent::net::{NetworkStatus, Uplinks};
use netns::{Namespace, can_run};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use types::config::{Network, NetworkMode};

/// Longer than three addresses take to be declined.
const LONG: Duration = Duration::from_secs(60);
/// Longer than an address is asked for before it is announced.
const SETTLED: Duration = Duration::from_secs(3);
/// The other host.
const OTHER: &str = "02:00:00:00:00:99";

/// A node, another host, and the switch between them, which has a DHCP server.
struct World {
    node: Namespace,
    other: Namespace,
    switch: Namespace,
    runtime: Option<Runtime>,
    status: watch::Receiver<NetworkStatus>,
    uplinks: Option<Uplinks>,
    server: Option<Child>,
    folder: TempDir,
}

impl World {
    fn new(what: &str) -> Option<Self> {
        can_run(what, &["ip", "ping", "dnsmasq"]).then(Self::build)
    }

    fn build() -> Self {
        let [node, other, switch] = [(); 3].map(|()| Namespace::new());
        switch.ip("link add br0 type bridge");
        switch.ip("addr add 192.168.50.1/24 dev br0");
        switch.ip("link set br0 up");
        for (host, port) in [(&node, "port0"), (&other, "port1")] {
            host.cable("eth0", &switch, port);
            switch.ip(&format!("link set {port} master br0 up"));
        }
        other.ip(&format!("link set eth0 address {OTHER} up"));
        let runtime = Some(node.runtime());
        let (_, status) = watch::channel(NetworkStatus::default());
        let (uplinks, server, folder) = (None, None, tempfile::tempdir_in("/run").unwrap());
        Self { node, other, switch, runtime, status, uplinks, server, folder }
    }

    /// Starts a server that looks for no other host itself, and gives the least address that it may.
    fn serve(&mut self, range: &str) {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new("dnsmasq");
        command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--no-hosts"]);
        command.args(["--interface=br0", "--bind-interfaces", "--user=root", "--pid-file="]);
        command.args(["--no-ping", "--dhcp-sequential-ip", "--dhcp-authoritative"]);
        command.args(["--log-facility=-", "--log-dhcp"]);
        command.arg(format!("--dhcp-leasefile={}", path("leases").display()));
        command.arg(format!("--dhcp-range={range},2m"));
        let log = File::create(path("log")).unwrap();
        command.stderr(log.try_clone().unwrap()).stdout(log);
        self.server = Some(self.switch.enter(|| command.spawn().unwrap()));
    }

    fn start(&mut self, spec: &Network) {
        let runtime = self.runtime.as_ref().unwrap();
        let uplinks = self.node.enter(|| {
            let _inside = runtime.enter();
            Uplinks::start(spec).unwrap()
        });
        self.status = uplinks.status();
        self.uplinks = Some(uplinks);
    }

    fn wait(
        &mut self,
        what: &str,
        wanted: impl Fn(&NetworkStatus) -> bool + Send,
    ) -> NetworkStatus {
        let found = self.runtime.as_ref().unwrap().block_on(async {
            let waiting = self.status.wait_for(|status| wanted(status));
            tokio::time::timeout(LONG, waiting).await.map(|found| found.unwrap().clone())
        });
        found.unwrap_or_else(|_| {
            panic!("not within {LONG:?}: {what}: {:?}\n{}", self.status.borrow(), self.log())
        })
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Whom the switch takes the address to be.
    fn neighbour(&self, address: &str) -> String {
        self.switch.ip(&format!("neigh show {address}"))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.uplinks = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
        if let Some(mut server) = self.server.take() {
            server.kill().ok();
            server.wait().ok();
        }
    }
}

fn has(status: &NetworkStatus, address: &str) -> bool {
    let address: IpAddr = address.parse().unwrap();
    status.addresses().any(|known| known == address)
}

fn kernel_has_vlans() -> bool {
    if !nix::unistd::geteuid().is_root() {
        return false;
    }
    let space = Namespace::new();
    space.try_run("ip link add probe1 type veth peer name probe2").status.success()
        && space.try_run("ip link add link probe1 name p.5 type vlan id 5").status.success()
}

fn fixed() -> Network {
    Network {
        interface: Some("eth0".to_owned()),
        mode: NetworkMode::Static,
        addresses: vec!["192.168.50.9/24".to_owned()],
        ..Network::default()
    }
}

#[test]
fn a_leased_address_that_another_host_has_is_declined_and_another_is_used() {
    let Some(mut world) = World::new("a lease in conflict") else { return };
    world.other.ip("addr add 192.168.50.100/24 dev eth0");
    world.serve("192.168.50.100,192.168.50.101");
    world.start(&Network::default());
    let told = world.wait("it is told", |status| {
        status.last_error.as_ref().is_some_and(|error| error.contains(OTHER))
    });
    assert!(told.last_error.unwrap().contains("192.168.50.100"));
    let status = world.wait("another address", |status| has(status, "192.168.50.101"));
    assert!(!has(&status, "192.168.50.100"), "{status:?}");
    assert!(world.log().contains("DHCPDECLINE(br0) 192.168.50.100"), "{}", world.log());
    world.node.reaches("192.168.50.1");
    assert_eq!(world.wait("it is good", |status| status.last_error.is_none()).problems, [""; 0]);
}

#[test]
fn a_host_that_takes_the_address_later_has_it_and_the_node_another() {
    let Some(mut world) = World::new("a lease that is taken") else { return };
    world.serve("192.168.50.100,192.168.50.101");
    world.start(&Network::default());
    world.wait("a lease", |status| has(status, "192.168.50.100"));
    std::thread::sleep(SETTLED);
    world.other.ip("addr add 192.168.50.100/24 dev eth0");
    // It asks for somebody, as hosts do.
    world.other.pings("192.168.50.1");
    world.wait("another address", |status| has(status, "192.168.50.101"));
}

#[test]
fn a_server_whose_addresses_are_all_taken_gives_one_that_is_kept_and_told() {
    let Some(mut world) = World::new("a router that has every address") else { return };
    for last in 100..110 {
        world.other.ip(&format!("addr add 192.168.50.{last}/24 dev eth0"));
    }
    world.serve("192.168.50.100,192.168.50.109");
    world.start(&Network::default());
    let told = world.wait("it is told", |status| !status.problems.is_empty());
    assert_eq!(world.log().matches("DHCPDECLINE").count(), 3, "{}", world.log());
    assert!(told.problems[0].contains(OTHER), "{told:?}");
    assert!(told.addresses().any(|known| known.is_ipv4()), "{told:?}");
}

#[test]
fn a_configured_address_that_another_host_has_is_kept_and_told_while_it_has_it() {
    let Some(mut world) = World::new("a static address in conflict") else { return };
    world.other.ip("addr add 192.168.50.9/24 dev eth0");
    world.other.pings("192.168.50.1");
    world.start(&fixed());
    let told = world.wait("it is told", |status| !status.problems.is_empty());
    assert!(told.problems[0].contains(OTHER), "{told:?}");
    assert!(told.problems[0].contains("192.168.50.9"), "{told:?}");
    assert!(has(&told, "192.168.50.9"), "{told:?}");
    std::thread::sleep(SETTLED);
    assert!(world.neighbour("192.168.50.9").contains(OTHER), "taken from its owner");
    world.other.ip("addr del 192.168.50.9/24 dev eth0");
    let status = world.wait("it is over", |status| status.problems.is_empty());
    assert!(has(&status, "192.168.50.9"), "{status:?}");
}

#[test]
fn a_host_that_has_the_address_in_a_vlan_has_another_networks() {
    let test = "a_host_that_has_the_address_in_a_vlan_has_another_networks";
    if !uml::is_here(test, &["veth", "bridge", "8021q"], kernel_has_vlans) {
        return;
    }
    let mut world = World::build();
    // It answers for an address on the interface that has it.
    world.other.enter(|| fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "1").unwrap());
    // One that the node has no interface for, and one that it has.
    for vlan in [10, 20] {
        world.other.ip(&format!("link add link eth0 name vlan{vlan} type vlan id {vlan}"));
        world.other.ip(&format!("link set vlan{vlan} up"));
    }
    world.node.ip("link set eth0 up");
    world.node.ip("link add link eth0 name vlan20 type vlan id 20");
    world.node.ip("link set vlan20 up");
    world.start(&fixed());
    world.wait("the address", |status| has(status, "192.168.50.9"));
    for vlan in [10, 20] {
        world.other.ip(&format!("addr add 192.168.50.9/24 dev vlan{vlan}"));
        world.other.pings("192.168.50.77");
        world.other.ip(&format!("addr del 192.168.50.9/24 dev vlan{vlan}"));
    }
    assert_eq!(world.status.borrow().problems, [""; 0]);
    // What is told is that it has it in this network.
    world.other.ip("addr add 192.168.50.9/24 dev eth0");
    world.other.pings("192.168.50.77");
    world.wait("it is told", |status| !status.problems.is_empty());
}
