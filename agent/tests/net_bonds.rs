//! Bonds, VLANs and large frames against a real bond at the other end, and several uplinks whose
//! gateways come and go.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;
mod uml;

use std::time::Duration;

use agent::net::{NetworkStatus, Reach, Uplinks, uplinks::StableSecret};
use netns::{Namespace, can_run, wait_for};
use tokio::{runtime::Runtime, sync::watch};
use types::config::{Network, NodeSpec};

const LONG: Duration = Duration::from_secs(40);
const MODULES: [&str; 4] = ["veth", "bonding", "8021q", "bridge"];

/// A node and a switch with two cables between them.
struct World {
    node: Namespace,
    switch: Namespace,
    runtime: Option<Runtime>,
    uplinks: Option<Uplinks>,
    status: watch::Receiver<NetworkStatus>,
}

impl World {
    /// `test` is the test's name, by which it runs itself inside another kernel.
    fn new(test: &str) -> Option<Self> {
        if !uml::is_here(test, &MODULES, kernel_has_bonds) {
            return None;
        }
        Self::plain(test)
    }

    fn plain(test: &str) -> Option<Self> {
        if !can_run_without_taps(test) {
            return None;
        }
        let (node, switch) = (Namespace::new(), Namespace::new());
        for number in 0..2 {
            node.cable(&format!("eth{number}"), &switch, &format!("sw{number}"));
            node.ip(&format!("link set eth{number} address 02:00:00:00:01:0{number}"));
        }
        let runtime = Some(node.runtime());
        let (_, status) = watch::channel(NetworkStatus::default());
        Some(Self { node, switch, runtime, uplinks: None, status })
    }

    /// A bond of both ports at the other end.
    fn bond_switch(&self, options: &str) {
        self.switch.ip(&format!("link add swbond type bond {options}"));
        for port in ["sw0", "sw1"] {
            self.switch.ip(&format!("link set {port} down"));
            self.switch.ip(&format!("link set {port} master swbond"));
        }
        self.switch.ip("link set swbond up");
    }

    fn start(&mut self, uplinks: &str) {
        let runtime = self.runtime.as_ref().unwrap();
        let uplinks = self.node.enter(|| {
            let _inside = runtime.enter();
            Uplinks::start_with(&network(uplinks), Some(StableSecret([7; 16]))).unwrap()
        });
        self.status = uplinks.status();
        self.uplinks = Some(uplinks);
    }

    fn reconfigure(&self, uplinks: &str) {
        self.uplinks.as_ref().unwrap().reconfigure(&network(uplinks)).unwrap();
    }

    fn kill_agent(&mut self) {
        self.uplinks = None;
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
        self.runtime = Some(self.node.runtime());
    }

    fn wait(&mut self, what: &str, wanted: impl Fn(&NetworkStatus) -> bool + Send) {
        let runtime = self.runtime.as_ref().unwrap();
        let found = runtime.block_on(async {
            let waiting = self.status.wait_for(|status| wanted(status));
            tokio::time::timeout(LONG, waiting).await.map(|found| found.unwrap().clone())
        });
        if found.is_err() {
            let links = self.node.ip("-d addr show");
            panic!("not within {LONG:?}: {what}: {:?}\n{links}", self.status.borrow());
        }
    }

    fn bond_file(&self, name: &str) -> String {
        self.node.run(&format!("cat /proc/net/bonding/{name}"))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.uplinks = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

fn network(uplinks: &str) -> Network {
    let key = "01".repeat(32);
    let authority = format!("[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n");
    let text = format!("version = 1\n{authority}{uplinks}");
    NodeSpec::parse(text.as_bytes()).unwrap().network
}

fn kernel_has_bonds() -> bool {
    if !nix::unistd::geteuid().is_root() {
        return false;
    }
    let space = Namespace::new();
    let bond = space.try_run("ip link add probe0 type bond").status.success();
    let card = space.try_run("ip link add probe1 type veth peer name probe2").status.success();
    bond && card
        && space.try_run("ip link add link probe1 name p.5 type vlan id 5").status.success()
}

fn can_run_without_taps(test: &str) -> bool {
    if std::fs::metadata("/dev/net/tun").is_ok() {
        return can_run(test, &["ip", "ping"]);
    }
    // User-Mode Linux has no tun driver unless it is loaded; nothing here needs one.
    true
}

fn has(status: &NetworkStatus, address: &str) -> bool {
    status.addresses().any(|known| known.to_string() == address)
}

/// Largest payload of an echo request in a frame of 9000 bytes: less IPv4's and ICMP's headers.
const JUMBO_PING: &str = "-M do -s 8972";

const LACP: &str = r#"
    [[network.uplinks]]
    name = "bond0"
    ipv4 = "off"
    ipv6 = "off"
    [network.uplinks.bond]
    mode = "802.3ad"
    lacp_rate = "fast"
    hash = "layer3+4"
    cards = [{ mac = "02:00:00:00:01:00" }, { name = "eth1" }]
    [[network.uplinks]]
    name = "bond0.7"
    over = "bond0"
    vlan = 7
    mtu = 9000
    addresses = ["192.0.2.5/24", "2001:db8::5/64"]
    gateways = ["192.0.2.1"]
"#;

#[test]
fn lacp_with_a_vlan_and_large_frames_survives_a_cut_cable() {
    let test = "lacp_with_a_vlan_and_large_frames_survives_a_cut_cable";
    let Some(mut world) = World::new(test) else { return };
    world.bond_switch("mode 802.3ad miimon 100 lacp_rate fast");
    world.switch.ip("link set swbond mtu 9000");
    world.switch.ip("link add link swbond name swbond.7 type vlan id 7");
    world.switch.ip("addr add 192.0.2.1/24 dev swbond.7");
    world.switch.ip("addr add 2001:db8::1/64 dev swbond.7 nodad");
    world.switch.ip("link set swbond.7 up mtu 9000");
    world.start(LACP);
    world.wait("the addresses", |status| has(status, "192.0.2.5") && has(status, "2001:db8::5"));
    let told: Vec<String> =
        world.status.borrow().interfaces.iter().map(|link| link.describe()).collect();
    assert!(told[1].contains("192.0.2.5/24 (configured), "), "{told:?}");
    assert!(told[1].contains("MTU 9000 (configured)"), "{told:?}");
    world.node.reaches("192.0.2.1");
    world.node.reaches("2001:db8::1");
    let bond = world.bond_file("bond0");
    assert!(bond.contains("IEEE 802.3ad") && bond.contains("layer3+4 (1)"), "{bond}");
    assert!(bond.contains("LACP rate: fast"), "{bond}");
    assert!(
        bond.contains("Slave Interface: eth0") && bond.contains("Slave Interface: eth1"),
        "{bond}"
    );
    // Both cards are in one aggregator, whose partner is the switch and not "nobody".
    wait_for("an aggregate of two", LONG, || {
        world.bond_file("bond0").contains("Number of ports: 2")
    });
    assert!(!world.bond_file("bond0").contains("Partner Mac Address: 00:00:00:00:00:00"));
    let jumbo = format!("ping -c 1 -W 2 {JUMBO_PING} 192.0.2.1");
    wait_for("a large frame", LONG, || world.node.try_run(&jumbo).status.success());
    let route = world.node.ip("route show default");
    assert!(route.contains("via 192.0.2.1 dev bond0.7"), "{route}");
    // A cable is cut: the other one carries on.
    world.switch.ip("link set sw0 down");
    wait_for("the other card", LONG, || world.node.pings("192.0.2.1"));
    wait_for("an aggregate of one", LONG, || {
        world.bond_file("bond0").contains("Number of ports: 1")
    });
    // A restarted agent finds all of it and changes nothing.
    let before = world.node.ip("-o link show");
    world.kill_agent();
    world.start(LACP);
    world.wait("the addresses", |status| has(status, "192.0.2.5"));
    assert_eq!(world.node.ip("-o link show"), before);
    assert_eq!(world.status.borrow().last_error, None);
}

#[test]
fn one_card_takes_over_from_the_other_and_back_goes_the_bond_when_unwanted() {
    let test = "one_card_takes_over_from_the_other_and_back_goes_the_bond_when_unwanted";
    let Some(mut world) = World::new(test) else { return };
    world.switch.ip("link add br0 type bridge");
    for port in ["sw0", "sw1"] {
        world.switch.ip(&format!("link set {port} master br0 up"));
    }
    world.switch.ip("addr add 192.0.2.1/24 dev br0");
    world.switch.ip("link set br0 up");
    let watch = |how: &str| {
        format!(
            "[[network.uplinks]]\nname = \"bond0\"\naddresses = [\"192.0.2.5/24\"]\n\
             bond = {{ mode = \"active-backup\", cards = [{{ name = \"eth*\" }}], {how} }}\n"
        )
    };
    world.start(&watch("mii_ms = 50"));
    world.wait("the address", |status| has(status, "192.0.2.5"));
    world.node.reaches("192.0.2.1");
    let active = |world: &World| {
        let file = world.bond_file("bond0");
        let line = file.lines().find(|line| line.starts_with("Currently Active Slave")).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    let first = active(&world);
    world.switch.ip(&format!("link set {} down", first.replace("eth", "sw")));
    wait_for("the other card", LONG, || active(&world) != first);
    world.node.reaches("192.0.2.1");
    world.switch.ip(&format!("link set {} up", first.replace("eth", "sw")));
    // ARP instead of carriers: the bond is made anew.
    world.reconfigure(&watch("mii_ms = 0, arp_ms = 200, arp_targets = [\"192.0.2.1\"]"));
    wait_for("ARP", LONG, || {
        let file = world.node.try_run("cat /proc/net/bonding/bond0").stdout;
        String::from_utf8_lossy(&file).contains("ARP Polling Interval")
    });
    world.node.reaches("192.0.2.1");
    // A card alone instead.
    world.reconfigure(
        "[[network.uplinks]]\nname = \"a\"\naddresses = [\"192.0.2.6/24\"]\ncard = { name = \"eth1\" }\n",
    );
    world.wait("the card", |status| has(status, "192.0.2.6"));
    world.node.reaches("192.0.2.1");
    assert!(!world.node.try_run("ip link show bond0").status.success());
}

#[test]
fn a_silent_gateway_is_left_for_the_next_uplink_and_preferred_again_when_it_speaks() {
    let Some(mut world) = World::plain("several uplinks") else { return };
    for (port, network) in [("sw0", 1), ("sw1", 2)] {
        world.switch.ip(&format!("addr add 198.51.{network}.1/24 dev {port}"));
        world.switch.ip(&format!("link set {port} up"));
    }
    let uplink = |name: &str, card: &str, network: u32, priority: u32| {
        format!(
            "[[network.uplinks]]\nname = \"{name}\"\ncard = {{ name = \"{card}\" }}\npriority = {priority}\n\
             addresses = [\"198.51.{network}.5/24\"]\ngateways = [\"198.51.{network}.1\"]\n"
        )
    };
    world.start(&[uplink("spare", "eth1", 2, 9), uplink("main", "eth0", 1, 1)].concat());
    let through = |world: &World| {
        let route = world.node.ip("route get 203.0.113.1");
        route.split(" dev ").nth(1).unwrap().split(' ').next().unwrap().to_owned()
    };
    world.wait("both gateways", |status| {
        status.interfaces.iter().filter(|link| link.reach == Reach::Answers).count() == 2
    });
    assert_eq!(through(&world), "eth0");
    // The switch forwards nothing any more; the cable still has a carrier.
    world.switch.ip("link set sw0 arp off");
    world.switch.ip("addr flush dev sw0");
    world.wait("silence", |status| {
        status.interfaces.iter().any(|link| link.label == "main" && link.reach == Reach::Silent)
    });
    wait_for("the spare uplink", LONG, || through(&world) == "eth1");
    world.switch.ip("link set sw0 arp on");
    world.switch.ip("addr add 198.51.1.1/24 dev sw0");
    wait_for("the main uplink", LONG, || through(&world) == "eth0");
    // Without a carrier nothing is waited for.
    world.switch.ip("link set sw0 down");
    wait_for("the spare uplink again", Duration::from_secs(5), || through(&world) == "eth1");
}

#[test]
fn a_card_that_is_not_there_is_told_with_those_that_are() {
    let Some(mut world) = World::plain("a missing card") else { return };
    world.start(
        "[[network.uplinks]]\nname = \"a\"\ncard = { name = \"eth0\" }\naddresses = [\"192.0.2.5/24\"]\n\
         [[network.uplinks]]\nname = \"b\"\ncard = { mac = \"02:00:00:00:09:09\" }\n",
    );
    world.wait("the address and the complaint", |status| {
        let told = |problem: &String| {
            problem.contains("02:00:00:00:09:09") && problem.contains("eth1 (mac 02:00:00:00:01:01")
        };
        has(status, "192.0.2.5") && status.problems.iter().any(told)
    });
}
