//! Uplinks against a real dnsmasq: leases are kept, changed and given up; SLAAC; static addresses.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{
    net::{IpAddr, TcpStream},
    process::{Child, Command},
    sync::Arc,
    time::{Duration, Instant},
};

use agent::{
    net::{NetworkStatus, Uplinks},
    tasks::network::Keeper,
};
use netns::{Namespace, can_run};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use types::{
    config::{Network, NetworkMode},
    uplinks::{Card, StaticRoute, Uplink},
};

/// Longer than any of these leases takes to be renewed, rebound or refused.
const LONG: Duration = Duration::from_secs(30);

/// A node and, at the other end of its cable, a server.
struct World {
    node: Namespace,
    router: Namespace,
    runtime: Option<Runtime>,
    uplinks: Option<Uplinks>,
    status: watch::Receiver<NetworkStatus>,
    dnsmasq: Option<Dnsmasq>,
}

struct Dnsmasq {
    child: Child,
    folder: TempDir,
}

impl Dnsmasq {
    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Dnsmasq {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl World {
    fn new(what: &str) -> Option<Self> {
        if !can_run(what, &["ip", "ping", "dnsmasq"]) {
            return None;
        }
        let (node, router) = (Namespace::new(), Namespace::new());
        node.cable("eth0", &router, "eth0");
        router.ip("addr add 192.168.50.1/24 dev eth0");
        router.ip("addr add fd00:50::1/64 dev eth0 nodad");
        router.ip("link set eth0 up");
        let runtime = Some(node.runtime());
        let (_, status) = watch::channel(NetworkStatus::default());
        Some(Self { node, router, runtime, uplinks: None, status, dnsmasq: None })
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

    fn kill_agent(&mut self) {
        self.uplinks = None;
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
        self.runtime = Some(self.node.runtime());
    }

    /// Replaces the server. Leases are two minutes, its least, but renewed after four seconds.
    fn serve(&mut self, range: &str, more: &[&str]) {
        self.dnsmasq = None;
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("dnsmasq");
        command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--port=53"]);
        command.args(["--no-resolv", "--no-hosts", "--log-facility=-", "--interface=eth0"]);
        command.args(["--bind-interfaces", "--user=root", "--pid-file="]);
        command.arg(format!("--dhcp-leasefile={}", folder.path().join("leases").display()));
        command.arg(format!("--dhcp-range={range},2m"));
        command.args(["--dhcp-option=option:T1,4", "--dhcp-option=option:T2,9"]);
        command.args(["--dhcp-option=option:ntp-server,192.168.50.7", "--dhcp-authoritative"]);
        command.args(["--address=/gateway.example/203.0.113.5"]);
        command.args(more);
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        command.stderr(log.try_clone().unwrap()).stdout(log);
        let child = self.router.enter(|| command.spawn().unwrap());
        self.dnsmasq = Some(Dnsmasq { child, folder });
    }

    /// Waits until the status is as wanted.
    fn wait(
        &mut self,
        what: &str,
        wanted: impl Fn(&NetworkStatus) -> bool + Send,
    ) -> NetworkStatus {
        let runtime = self.runtime.as_ref().unwrap();
        let found = runtime.block_on(async {
            let waiting = self.status.wait_for(|status| wanted(status));
            tokio::time::timeout(LONG, waiting).await.map(|found| found.unwrap().clone())
        });
        found.unwrap_or_else(|_| {
            let log = self.dnsmasq.as_ref().map(Dnsmasq::log).unwrap_or_default();
            panic!("not within {LONG:?}: {what}: {:?}\n{log}", self.status.borrow())
        })
    }

    fn wait_for_lease(&mut self) -> NetworkStatus {
        self.wait("a lease", |status| lease_end(status).is_some())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.uplinks = None;
        self.dnsmasq = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

fn lease_end(status: &NetworkStatus) -> Option<Instant> {
    status.interfaces.first()?.lease?.expires
}

fn has(status: &NetworkStatus, address: &str) -> bool {
    let address: IpAddr = address.parse().unwrap();
    status.addresses().any(|known| known == address)
}

fn begins(status: &NetworkStatus, prefix: &str) -> bool {
    status.addresses().any(|known| known.to_string().starts_with(prefix))
}

const RANGE: &str = "192.168.50.100,192.168.50.100";

#[test]
fn dhcp_gives_address_gateway_name_and_time_servers() {
    let Some(mut world) = World::new("DHCPv4") else { return };
    world.serve(RANGE, &[]);
    world.start(&Network::default());
    let status = world.wait_for_lease();
    assert!(has(&status, "192.168.50.100"), "{status:?}");
    assert_eq!(status.gateways, ["192.168.50.1".parse::<IpAddr>().unwrap()]);
    assert_eq!(status.dns, ["192.168.50.1".parse::<IpAddr>().unwrap()]);
    assert_eq!(status.ntp, ["192.168.50.7".parse::<IpAddr>().unwrap()]);
    assert_eq!(status.last_error, None);
    let told = status.interfaces[0].describe();
    assert!(told.contains("192.168.50.100/24 (DHCP from 192.168.50.1)"), "{told}");
    assert!(told.contains("name server 192.168.50.1 (DHCP from 192.168.50.1)"), "{told}");
    assert!(told.contains("MTU 1500 (the card's)"), "{told}");
    world.node.reaches("192.168.50.1");
    let kernel = world.node.ip("-4 addr show dev eth0");
    assert!(kernel.contains("dynamic") && !kernel.contains("forever"), "{kernel}");
    let route = world.node.ip("-4 route show default");
    assert!(route.contains("via 192.168.50.1 dev eth0 proto dhcp src 192.168.50.100"), "{route}");
    // Names resolve with the servers that DHCP named.
    let resolver = world.uplinks.as_ref().unwrap().resolver();
    let runtime = world.runtime.as_ref().unwrap();
    let lookup = |name| world.node.enter(|| runtime.block_on(resolver.lookup_socket(name)));
    assert_eq!(lookup("gateway.example:4600").unwrap(), ["203.0.113.5:4600".parse().unwrap()]);
    assert!(lookup("absent.example:4600").is_err());
}

#[test]
fn a_lease_is_renewed_before_it_ends() {
    let Some(mut world) = World::new("DHCPv4 renewal") else { return };
    world.serve(RANGE, &[]);
    world.start(&Network::default());
    let first = lease_end(&world.wait_for_lease()).unwrap();
    world.wait("a renewal", |status| lease_end(status) > Some(first));
}

#[test]
fn another_server_is_found_when_the_first_is_gone() {
    let Some(mut world) = World::new("DHCPv4 rebinding") else { return };
    world.serve(RANGE, &[]);
    world.start(&Network::default());
    world.wait_for_lease();
    world.router.ip("addr del 192.168.50.1/24 dev eth0");
    world.router.ip("addr add 192.168.50.2/24 dev eth0");
    world.serve(RANGE, &[]);
    let moved = world.wait("the other server", |status| {
        status.gateways.iter().any(|gateway| gateway.to_string() == "192.168.50.2")
    });
    assert!(has(&moved, "192.168.50.100"), "{moved:?}");
    assert_eq!(moved.gateways.len(), 1, "the old route stays: {moved:?}");
}

#[test]
fn a_refused_address_is_given_up_and_replaced() {
    let Some(mut world) = World::new("DHCPv4 refusal") else { return };
    world.serve(RANGE, &[]);
    world.start(&Network::default());
    world.wait_for_lease();
    world.router.ip("addr flush dev eth0");
    world.router.ip("addr add 192.168.60.1/24 dev eth0");
    world.serve("192.168.60.100,192.168.60.100", &[]);
    let moved = world.wait("the new network", |status| has(status, "192.168.60.100"));
    assert!(!has(&moved, "192.168.50.100"), "{moved:?}");
    assert_eq!(moved.gateways, ["192.168.60.1".parse::<IpAddr>().unwrap()]);
}

#[test]
fn a_replugged_cable_leads_to_the_network_at_its_other_end() {
    let Some(mut world) = World::new("a replugged cable") else { return };
    world.serve(RANGE, &["--dhcp-option=option:T1,60", "--dhcp-option=option:T2,90"]);
    world.start(&Network::default());
    world.wait_for_lease();
    world.router.ip("link set eth0 down");
    world.wait("no carrier", |status| {
        status.interfaces.iter().all(|link| link.carrier == agent::net::Carrier::Down)
    });
    world.router.ip("addr flush dev eth0");
    world.router.ip("addr add 192.168.60.1/24 dev eth0");
    world.serve("192.168.60.100,192.168.60.100", &[]);
    world.router.ip("link set eth0 up");
    world.wait("the new network", |status| has(status, "192.168.60.100"));
}

/// As a bond's does when its first card joins it.
#[test]
fn a_lease_is_asked_for_anew_when_the_hardware_address_changes() {
    let Some(mut world) = World::new("another hardware address") else { return };
    let long = ["--dhcp-option=option:T1,60", "--dhcp-option=option:T2,90"];
    let known = "--dhcp-host=02:00:00:00:00:42,192.168.50.150";
    world.serve(RANGE, &[&long[..], &[known]].concat());
    world.start(&Network::default());
    world.wait_for_lease();
    world.node.ip("link set eth0 address 02:00:00:00:00:42");
    let status = world.wait("the lease of the new address", |status| has(status, "192.168.50.150"));
    assert!(!has(&status, "192.168.50.100"), "{status:?}");
    let routes = world.node.ip("-4 route show");
    assert!(!routes.contains("192.168.50.100"), "{routes}");
    world.node.reaches("192.168.50.1");
}

#[test]
fn a_restarted_agent_keeps_the_address() {
    let Some(mut world) = World::new("a restart of the agent") else { return };
    world.serve("192.168.50.100,192.168.50.200", &[]);
    world.start(&Network::default());
    let before: Vec<_> = world.wait_for_lease().addresses().collect();
    world.kill_agent();
    world.node.reaches("192.168.50.1");
    world.start(&Network::default());
    let after: Vec<_> = world.wait_for_lease().addresses().collect();
    assert_eq!(before, after);
}

#[test]
fn router_advertisements_give_an_ipv6_address_and_gateway() {
    let Some(mut world) = World::new("SLAAC") else { return };
    let server = "--dhcp-option=option6:dns-server,[fd00:50::53]";
    world.serve(RANGE, &["--enable-ra", "--dhcp-range=fd00:50::,ra-only,64,2m", server]);
    world.start(&Network::default());
    let status = world.wait("an IPv6 address", |status| {
        begins(status, "fd00:50::")
            && status.gateways.iter().any(IpAddr::is_ipv6)
            && status.dns.iter().any(|server| server.to_string() == "fd00:50::53")
    });
    assert!(
        status
            .gateways
            .iter()
            .all(|gateway| gateway.to_string().starts_with("fe80") || gateway.is_ipv4())
    );
    world.node.reaches("fd00:50::1");
}

#[test]
fn configured_addresses_need_no_server() {
    let Some(mut world) = World::new("static addresses") else { return };
    world.start(&Network {
        interface: Some("eth0".to_owned()),
        mode: NetworkMode::Static,
        addresses: vec!["192.168.50.9/24".to_owned(), "fd00:50::9/64".to_owned()],
        gateways: vec!["192.168.50.1".parse().unwrap(), "fd00:50::1".parse().unwrap()],
        dns: vec!["192.0.2.53".parse().unwrap()],
        ..Network::default()
    });
    let status = world.wait("the addresses", |status| {
        has(status, "192.168.50.9") && has(status, "fd00:50::9") && status.gateways.len() == 2
    });
    assert_eq!(status.dns, ["192.0.2.53".parse::<IpAddr>().unwrap()]);
    world.node.reaches("192.168.50.1");
    let routes = world.node.ip("-6 route show default");
    assert!(routes.contains("via fd00:50::1 dev eth0"), "{routes}");
}

#[test]
fn an_interface_is_found_by_its_hardware_address_and_others_are_left_alone() {
    let Some(mut world) = World::new("interfaces by hardware address") else { return };
    world.node.cable("eth1", &world.router, "eth1");
    world.node.ip("link set eth0 address 02:00:00:00:00:42");
    world.serve(RANGE, &[]);
    let interface = Some("02:00:00:00:00:42".to_owned());
    world.start(&Network { interface, ..Network::default() });
    let status = world.wait_for_lease();
    assert_eq!(status.interfaces.len(), 1);
    assert!(!world.node.ip("link show eth1").contains(",UP"));
}

#[test]
fn an_interface_that_appears_later_is_used() {
    let Some(mut world) = World::new("hotplug") else { return };
    world.serve(RANGE, &[]);
    world.node.ip("link set eth0 name spare");
    world.start(&Network { interface: Some("eth0".to_owned()), ..Network::default() });
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(world.status.borrow().interfaces.len(), 0);
    world.node.ip("link set spare name eth0");
    world.wait_for_lease();
}

/// The node's own card with one IPv4 address, and its gateway.
fn fixed(address: &str) -> Network {
    Network {
        interface: Some("eth0".to_owned()),
        mode: NetworkMode::Static,
        addresses: vec![address.to_owned()],
        gateways: vec!["192.168.50.1".parse().unwrap()],
        ..Network::default()
    }
}

/// A listed uplink on the node's card, with an IPv4 address.
fn listed(routes: Vec<StaticRoute>) -> Network {
    let card = Card { name: Some("eth0".to_owned()), ..Card::default() };
    let uplink = Uplink {
        addresses: vec!["192.168.50.9/24".to_owned()],
        gateways: vec!["192.168.50.1".parse().unwrap()],
        routes,
        ..Uplink::of_card("wan", card)
    };
    Network { uplinks: vec![uplink], ..Network::default() }
}

impl World {
    /// As kernels are built: the addresses that came later go with the first of their subnet.
    fn demote_secondaries(&self) {
        self.node.enter(|| {
            for interface in ["all", "default", "eth0"] {
                let file = format!("/proc/sys/net/ipv4/conf/{interface}/promote_secondaries");
                std::fs::write(file, "0").unwrap();
            }
        });
    }

    /// Starts the agent anew with another configuration; the address of before is in the kernel.
    fn restart_with(&mut self, spec: &Network, address: &str) {
        self.kill_agent();
        self.demote_secondaries();
        self.start(spec);
        self.wait("the new address alone", |status| {
            has(status, address) && status.addresses().filter(IpAddr::is_ipv4).count() == 1
        });
        // Whatever was done in the wrong order has happened by now.
        std::thread::sleep(Duration::from_millis(500));
        let kernel = self.node.ip("-4 -o addr show dev eth0");
        assert!(kernel.contains(address) && kernel.lines().count() == 1, "{kernel}");
        self.node.reaches("192.168.50.1");
    }

    fn default_routes(&self) -> String {
        self.node.ip("-4 route show default")
    }
}

#[test]
fn another_address_of_the_same_subnet_takes_the_place_of_the_first() {
    let Some(mut world) = World::new("another static address") else { return };
    world.demote_secondaries();
    world.start(&fixed("192.168.50.9/24"));
    world.wait("the first address", |status| has(status, "192.168.50.9"));
    world.restart_with(&fixed("192.168.50.10/24"), "192.168.50.10");
    assert!(world.default_routes().contains("via 192.168.50.1 dev eth0"));
}

#[test]
fn a_static_address_takes_the_place_of_a_leased_one_of_its_subnet() {
    let Some(mut world) = World::new("a static address instead of a lease") else { return };
    world.demote_secondaries();
    world.serve(RANGE, &[]);
    world.start(&Network::default());
    world.wait_for_lease();
    world.restart_with(&fixed("192.168.50.10/24"), "192.168.50.10");
    let routes = world.default_routes();
    assert!(routes.contains("via 192.168.50.1 dev eth0"), "{routes}");
    assert!(!routes.contains("192.168.50.100"), "{routes}");
}

#[test]
fn a_route_that_the_kernel_refuses_keeps_no_other_out_and_is_tried_again() {
    let Some(mut world) = World::new("a refused route") else { return };
    // No next hop while it is the node's own.
    world.node.ip("addr add 169.254.7.7/32 dev eth0");
    let route =
        |to: &str, via: &str| StaticRoute { to: to.to_owned(), via: Some(via.parse().unwrap()) };
    world.start(&listed(vec![
        route("10.1.0.0/16", "169.254.7.7"),
        route("10.2.0.0/16", "192.168.50.1"),
    ]));
    let routes = |world: &World| world.node.ip("-4 route show");
    world.wait("the refusal", |status| {
        status.last_error.as_ref().is_some_and(|error| error.contains("10.1.0.0"))
    });
    netns::wait_for("the other route", LONG, || routes(&world).contains("10.2.0.0/16"));
    assert!(!routes(&world).contains("10.1.0.0/16"));
    world.node.ip("addr del 169.254.7.7/32 dev eth0");
    netns::wait_for("the refused route", LONG, || routes(&world).contains("10.1.0.0/16"));
    world.wait("no error", |status| status.last_error.is_none());
}

#[test]
fn routes_of_an_earlier_configuration_go_and_others_stay() {
    let Some(mut world) = World::new("routes of an earlier agent") else { return };
    world.serve(RANGE, &[]);
    world.start(&Network::default());
    world.wait_for_lease();
    world.kill_agent();
    // As an earlier agent made them, but for the last two.
    world.node.ip("route add 10.9.0.0/16 via 192.168.50.1 dev eth0 proto dhcp metric 700");
    world.node.ip("-6 route add fd00:9::/64 via fd00:50::1 dev eth0 proto static metric 7 onlink");
    world.node.ip("route add 10.8.0.0/16 via 192.168.50.1 dev eth0 proto boot metric 700");
    world.node.ip("route add 10.7.0.0/16 dev lo proto static");
    let card = Card { name: Some("eth0".to_owned()), ..Card::default() };
    let uplinks = vec![Uplink::of_card("wan", card)];
    world.start(&Network { uplinks, ..Network::default() });
    netns::wait_for("one default route, of the new metric", LONG, || {
        let routes = world.default_routes();
        routes.lines().count() == 1 && routes.contains("metric 1024")
    });
    let routes = world.node.ip("-4 route show");
    assert!(!routes.contains("10.9.0.0/16"), "{routes}");
    assert!(routes.contains("10.8.0.0/16") && routes.contains("10.7.0.0/16"), "{routes}");
    assert!(routes.contains("192.168.50.0/24"), "{routes}");
    let routes = world.node.ip("-6 route show");
    assert!(!routes.contains("fd00:9::/64"), "{routes}");
    assert!(routes.contains("fe80::/64"), "{routes}");
}

/// A configuration that reaches nobody, by accident.
fn cut_off() -> Network {
    Network {
        interface: Some("eth0".to_owned()),
        mode: NetworkMode::Static,
        addresses: vec!["192.168.51.9/24".to_owned()],
        gateways: vec!["192.168.51.1".parse().unwrap()],
        trial_s: 9,
        ..Network::default()
    }
}

impl World {
    /// Runs the agent's keeper of configurations until the process ends; the notice comes back.
    fn keep(
        &mut self,
        state: &std::path::Path,
        wanted: &Network,
    ) -> watch::Receiver<Option<String>> {
        let keeper = Keeper::load(state, wanted);
        self.start(keeper.network());
        let uplinks = Arc::new(self.uplinks.take().unwrap());
        let server = "192.168.50.1:4600".parse().unwrap();
        let is_reached =
            move || TcpStream::connect_timeout(&server, Duration::from_millis(200)).is_ok();
        let (tell, notice) = watch::channel(None);
        self.runtime.as_ref().unwrap().spawn(keeper.run(uplinks, is_reached, tell));
        notice
    }
}

#[test]
fn a_network_that_cuts_the_node_off_is_undone_also_after_a_restart() {
    let Some(mut world) = World::new("the last good network") else { return };
    let state = tempfile::tempdir().unwrap();
    world.serve(RANGE, &[]);
    world.router.serve("192.168.50.1:4600");
    world.keep(state.path(), &Network { trial_s: 3, ..Network::default() });
    world.wait_for_lease();
    let record = state.path().join("network.toml");
    netns::wait_for("the good network on disk", LONG, || record.exists());
    world.kill_agent();
    // The document changes, for the worse.
    let notice = world.keep(state.path(), &cut_off());
    world.wait("the new network", |status| has(status, "192.168.51.9"));
    let back = world.wait("the last good one", |status| has(status, "192.168.50.100"));
    assert!(!has(&back, "192.168.51.9"), "{back:?}");
    world.node.reaches("192.168.50.1");
    netns::wait_for("a notice", LONG, || {
        notice.borrow().as_ref().is_some_and(|text| text.contains("last good one is in use"))
    });
    netns::wait_for("the refusal on disk", LONG, || {
        std::fs::read_to_string(&record).unwrap().contains("refused")
    });
    world.kill_agent();
    world.keep(state.path(), &cut_off());
    let again = world.wait_for_lease();
    assert!(has(&again, "192.168.50.100") && !has(&again, "192.168.51.9"), "{again:?}");
}
