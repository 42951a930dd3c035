//! Uplinks against DHCP servers that are neither dnsmasq nor Kea, and what such servers say in practice:
//! single addresses with a gateway outside, no gateway at all, leases of seconds, MTUs of another age.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use agent::net::{NetworkStatus, Uplinks};
use netns::{Namespace, can_run};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use types::config::Network;

/// An address, on a busy machine.
const LONG: Duration = Duration::from_secs(30);

/// A node, and a server at the other end of its cable.
struct World {
    node: Namespace,
    router: Namespace,
    runtime: Option<Runtime>,
    status: watch::Receiver<NetworkStatus>,
    uplinks: Option<Uplinks>,
    server: Option<Child>,
    folder: TempDir,
}

impl World {
    fn new(what: &str, programs: &[&str]) -> Option<Self> {
        if !can_run(what, &[&["ip", "ping"], programs].concat()) {
            return None;
        }
        let (node, router) = (Namespace::new(), Namespace::new());
        node.cable("eth0", &router, "eth0");
        router.ip("addr add 192.168.50.1/24 dev eth0");
        router.ip("link set eth0 up");
        let runtime = Some(node.runtime());
        let (_, status) = watch::channel(NetworkStatus::default());
        let (uplinks, server, folder) = (None, None, tempfile::tempdir().unwrap());
        Some(Self { node, router, runtime, status, uplinks, server, folder })
    }

    /// Starts udhcpd of busybox with these lines.
    fn udhcpd(&mut self, lines: &str) {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        let text = format!(
            "interface eth0\nlease_file {}\npidfile {}\n{lines}\n",
            path("leases"),
            path("pid")
        );
        fs::write(path("leases"), "").unwrap();
        fs::write(path("conf"), text).unwrap();
        let mut command = Command::new("busybox");
        command.args(["udhcpd", "-f", &path("conf")]);
        self.spawn(command);
    }

    /// Starts ISC's dhcpd with this configuration.
    fn dhcpd(&mut self, text: &str) {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        fs::write(path("leases"), "").unwrap();
        fs::write(path("conf"), text).unwrap();
        let mut command = Command::new("dhcpd");
        command.args(["-f", "-4", "--no-pid", "-cf", &path("conf"), "-lf", &path("leases")]);
        command.arg("eth0");
        self.spawn(command);
    }

    fn spawn(&mut self, mut command: Command) {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.server = Some(self.router.enter(|| command.spawn().unwrap()));
    }

    fn start(&mut self) {
        let runtime = self.runtime.as_ref().unwrap();
        let uplinks = self.node.enter(|| {
            let _inside = runtime.enter();
            Uplinks::start(&Network::default()).unwrap()
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
        found.unwrap_or_else(|_| panic!("not within {LONG:?}: {what}: {:?}", self.status.borrow()))
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

fn end(status: &NetworkStatus) -> Option<Instant> {
    status.interfaces.first()?.lease?.expires
}

#[test]
fn a_single_address_reaches_a_gateway_outside_of_it() {
    let Some(mut world) = World::new("udhcpd, a /32", &["busybox"]) else { return };
    world.router.ip("addr add 203.0.113.80/32 dev lo");
    world.router.ip("route add 192.168.50.77/32 dev eth0");
    // MTU 576 is what some servers say to everybody; the overlay's packets would not fit.
    world.udhcpd(
        "start 192.168.50.77\nend 192.168.50.77\noption subnet 255.255.255.255\n\
         option router 192.168.50.1\noption mtu 576\noption lease 20",
    );
    world.start();
    let status =
        world.wait("a lease", |status| end(status).is_some() && !status.gateways.is_empty());
    assert_eq!(status.last_error, None);
    assert_eq!(status.interfaces[0].mtu, 1500);
    world.node.reaches("203.0.113.80");
    // Leases of seconds are renewed in time.
    let first = end(&status);
    world.wait("a renewal", |status| end(status) > first);
    world.node.reaches("203.0.113.80");
}

#[test]
fn classless_routes_count_and_the_router_beside_them_does_not() {
    let Some(mut world) = World::new("udhcpd, routes", &["busybox"]) else { return };
    world.router.ip("addr add 203.0.113.80/32 dev lo");
    world.udhcpd(
        "start 192.168.50.77\nend 192.168.50.77\noption subnet 255.255.255.254\n\
         option router 192.168.50.9\noption staticroutes 203.0.113.0/24 192.168.50.1\n\
         option mtu 1400\noption lease 600",
    );
    world.start();
    let status = world.wait("a lease", |status| end(status).is_some());
    world.node.reaches("203.0.113.80");
    assert!(status.gateways.is_empty(), "{status:?}");
    let status = world.wait("the MTU", |status| status.interfaces[0].mtu == 1400);
    let told = status.interfaces[0].describe();
    assert!(told.contains("192.168.50.77/31"), "{told}");
}

#[test]
fn a_server_that_falls_silent_costs_the_address_at_the_leases_end_and_no_sooner() {
    let Some(mut world) = World::new("udhcpd, silence", &["busybox"]) else { return };
    let lines = "start 192.168.50.77\nend 192.168.50.77\noption subnet 255.255.255.0\n\
                 option router 192.168.50.1\noption lease 12";
    world.udhcpd(lines);
    world.start();
    let status = world.wait("a lease", |status| end(status).is_some());
    let mut server = world.server.take().unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    world.wait("the lease's end", |status| end(status).is_none());
    assert!(Instant::now() >= end(&status).unwrap(), "given up too soon");
    let gone = world.wait("no address", |status| status.addresses().all(|a| a.is_ipv6()));
    assert!(gone.last_error.unwrap().contains("no server renewed it"));
    world.udhcpd(lines);
    let back = world.wait("a new lease", |status| end(status).is_some());
    assert_eq!(back.last_error, None);
}

#[test]
fn dhcpd_of_isc_gives_what_it_gives_others() {
    let Some(mut world) = World::new("ISC dhcpd", &["dhcpd"]) else { return };
    world.dhcpd(
        "authoritative;\noption holdfast code 224 = text;\n\
         subnet 192.168.50.0 netmask 255.255.255.0 {\n  range 192.168.50.100 192.168.50.100;\n  \
         option routers 192.168.50.1;\n  option domain-name-servers 192.168.50.1;\n  \
         option ntp-servers 192.168.50.7;\n  option interface-mtu 1480;\n  \
         option holdfast \"http://boot.example/node.toml\";\n  default-lease-time 20;\n  \
         max-lease-time 20;\n}\n",
    );
    world.start();
    let status =
        world.wait("a lease", |status| end(status).is_some() && !status.gateways.is_empty());
    assert_eq!(status.documents[0].url, b"http://boot.example/node.toml");
    assert_eq!(status.ntp[0].to_string(), "192.168.50.7");
    world.wait("the MTU", |status| status.interfaces[0].mtu == 1480);
    let first = end(&status);
    world.wait("a renewal", |status| end(status) > first);
}
