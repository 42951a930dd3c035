//! Uplinks whose DHCP server is elsewhere: Kea behind a relay, and the server in systemd-networkd.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{
    fs::{self, File},
    process::{Child, Command},
    time::{Duration, Instant},
};

use agent::net::{NetworkStatus, Uplinks};
use netns::{Namespace, can_run};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use types::config::Network;

/// A lease, its end and another, on a busy machine.
const LONG: Duration = Duration::from_secs(40);
/// Where Debian has it.
const NETWORKD: &str = "/usr/lib/systemd/systemd-networkd";

/// A node, the router at the other end of its cable, and a server behind that.
struct World {
    node: Namespace,
    router: Namespace,
    server: Namespace,
    runtime: Option<Runtime>,
    status: watch::Receiver<NetworkStatus>,
    uplinks: Option<Uplinks>,
    programs: Vec<Child>,
    folder: TempDir,
}

impl World {
    fn new(what: &str, programs: &[&str]) -> Option<Self> {
        if !can_run(what, &[&["ip", "ping"], programs].concat()) {
            return None;
        }
        let [node, router, server] = [(); 3].map(|()| Namespace::new());
        node.cable("eth0", &router, "eth0");
        router.cable("eth1", &server, "eth0");
        router.ip("addr add 192.168.50.1/24 dev eth0");
        router.ip("addr add 10.9.0.1/24 dev eth1");
        server.ip("addr add 10.9.0.2/24 dev eth0");
        for (space, name) in [(&router, "eth0"), (&router, "eth1"), (&server, "eth0")] {
            space.ip(&format!("link set {name} up"));
        }
        node.ip("link set eth0 up");
        server.ip("route add 192.168.50.0/24 via 10.9.0.1");
        router.enter(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
        let runtime = Some(node.runtime());
        let (_, status) = watch::channel(NetworkStatus::default());
        let folder = tempfile::tempdir().unwrap();
        let (uplinks, programs) = (None, Vec::new());
        Some(Self { node, router, server, runtime, status, uplinks, programs, folder })
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Starts Kea behind the router, with one address whose lease is renewed after four seconds.
    fn kea(&mut self, address: &str) {
        let folder = self.folder.path().display();
        let text = format!(
            r#"{{ "Dhcp4": {{
                "interfaces-config": {{ "interfaces": [ "eth0" ], "dhcp-socket-type": "udp" }},
                "lease-database": {{ "type": "memfile", "persist": false }},
                "authoritative": true, "renew-timer": 4, "rebind-timer": 9, "valid-lifetime": 14,
                "subnet4": [ {{ "id": 1, "subnet": "192.168.50.0/24",
                    "pools": [ {{ "pool": "{address}-{address}" }} ],
                    "option-data": [
                        {{ "name": "routers", "data": "192.168.50.9" }},
                        {{ "code": 121, "space": "dhcp4", "csv-format": false,
                           "data": "00c0a83201" }},
                        {{ "name": "interface-mtu", "data": "1400" }},
                        {{ "name": "domain-name-servers", "data": "10.9.0.2" }} ] }} ],
                "loggers": [ {{ "name": "kea-dhcp4", "severity": "DEBUG", "debuglevel": 50,
                    "output_options": [ {{ "output": "stdout" }} ] }} ]
            }} }}"#
        );
        fs::write(self.path("kea.conf"), text).unwrap();
        let mut command = Command::new("kea-dhcp4");
        command.args(["-c", &self.path("kea.conf")]);
        command.env("KEA_PIDFILE_DIR", folder.to_string());
        command.env("KEA_LOCKFILE_DIR", folder.to_string());
        let log = File::create(self.path("kea.log")).unwrap();
        command.stderr(log.try_clone().unwrap()).stdout(log);
        self.programs.push(self.server.enter(|| command.spawn().unwrap()));
    }

    /// Starts ISC's relay on the router.
    fn relay(&mut self) {
        let mut command = Command::new("dhcrelay");
        command.args(["-4", "-d", "--no-pid", "-id", "eth0", "-iu", "eth1", "10.9.0.2"]);
        let log = File::create(self.path("relay.log")).unwrap();
        command.stderr(log.try_clone().unwrap()).stdout(log);
        self.programs.push(self.router.enter(|| command.spawn().unwrap()));
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
        found.unwrap_or_else(|_| {
            let logs = ["kea.log", "relay.log", "networkd.log"].map(|log| self.log(log)).concat();
            panic!("not within {LONG:?}: {what}: {:?}\n{logs}", self.status.borrow())
        })
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Ends the program that was started at this place.
    fn end(&mut self, place: usize) {
        let mut program = self.programs.remove(place);
        program.kill().ok();
        program.wait().ok();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.uplinks = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
        while !self.programs.is_empty() {
            self.end(0);
        }
    }
}

fn has(status: &NetworkStatus, address: &str) -> bool {
    status.addresses().any(|known| known.to_string() == address)
}

fn end(status: &NetworkStatus) -> Option<Instant> {
    status.interfaces.first()?.lease?.expires
}

#[test]
fn kea_behind_a_relay_gives_renews_and_changes_the_address() {
    let programs = ["kea-dhcp4", "dhcrelay"];
    let Some(mut world) = World::new("Kea behind a relay", &programs) else { return };
    world.kea("192.168.50.100");
    world.relay();
    world.start();
    let status = world.wait("a lease", |status| has(status, "192.168.50.100"));
    let told = status.interfaces[0].describe();
    assert!(told.contains("DHCP from 10.9.0.2"), "{told}");
    let status = world.wait("the MTU", |status| status.interfaces[0].mtu == 1400);
    assert_eq!(status.gateways[0].to_string(), "192.168.50.1", "option 121 counts");
    world.node.reaches("10.9.0.2");
    let first = end(&status);
    world.wait("a renewal", |status| end(status) > first);
    // A server that knows the node no longer and gives other addresses.
    world.end(0);
    world.kea("192.168.50.101");
    let status = world.wait("the other address", |status| has(status, "192.168.50.101"));
    assert!(!has(&status, "192.168.50.100"), "{status:?}");
    world.node.reaches("10.9.0.2");
}

#[test]
fn the_server_of_systemd_networkd_gives_and_renews() {
    let Some(mut world) = World::new("systemd-networkd", &["unshare"]) else { return };
    if fs::metadata(NETWORKD).is_err() {
        println!("skipped: systemd-networkd: needs {NETWORKD}");
        return;
    }
    let text = "[Match]\nName=eth0\n[Network]\nAddress=192.168.50.1/24\nDHCPServer=yes\n\
                [DHCPServer]\nPoolOffset=100\nPoolSize=10\nDefaultLeaseTimeSec=12\n\
                EmitDNS=yes\nDNS=192.168.50.1\nEmitRouter=yes\n";
    fs::write(world.path("eth0.network"), text).unwrap();
    world.router.ip("addr flush dev eth0");
    // It reads what is in folders of the system, of which it gets its own.
    let script = format!(
        "mount -t sysfs -o ro none /sys && mount -t tmpfs none /run && mkdir -p /run/systemd/network /run/systemd/netif/links \
         /run/systemd/netif/leases /run/systemd/netif/lldp && cp {} /run/systemd/network/ && \
         chown -R systemd-network /run/systemd/netif && exec {NETWORKD}",
        world.path("eth0.network")
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    let log = File::create(world.path("networkd.log")).unwrap();
    command.stderr(log.try_clone().unwrap()).stdout(log);
    world.programs.push(world.router.enter(|| command.spawn().unwrap()));
    world.start();
    let status = world.wait("a lease", |status| end(status).is_some());
    world.node.reaches("192.168.50.1");
    let first = end(&status);
    world.wait("a renewal", |status| end(status) > first);
}
