//! IPv6 uplinks against radvd, and DHCPv6 against Kea: what routers ask for is done, no more.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use agent::net::{
    NetworkStatus, Uplinks,
    uplinks::{Delegation, StableSecret},
};
use netns::{Namespace, can_run};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use types::config::{Network, NodeSpec};

const LONG: Duration = Duration::from_secs(40);

struct World {
    node: Namespace,
    router: Namespace,
    runtime: Option<Runtime>,
    uplinks: Option<Uplinks>,
    status: watch::Receiver<NetworkStatus>,
    servers: Vec<Child>,
    folder: TempDir,
}

impl World {
    fn new(test: &str) -> Option<Self> {
        if !can_run(test, &["ip", "ping", "radvd", "kea-dhcp6"]) {
            return None;
        }
        let (node, router) = (Namespace::new(), Namespace::new());
        node.cable("eth0", &router, "eth0");
        router.enter(|| fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")).unwrap();
        router.ip("link set eth0 address 02:00:00:00:00:fe");
        router.ip("addr add fd00:50::1/64 dev eth0 nodad");
        router.ip("link set eth0 up");
        let runtime = Some(node.runtime());
        let (_, status) = watch::channel(NetworkStatus::default());
        let (uplinks, servers, folder) = (None, Vec::new(), tempfile::tempdir().unwrap());
        Some(Self { node, router, runtime, uplinks, status, servers, folder })
    }

    fn start(&mut self, secret: [u8; 16], uplink: &str) {
        let key = "01".repeat(32);
        let text = format!(
            "version = 1\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n[[network.uplinks]]\n\
             name = \"a\"\ncard = {{ name = \"eth0\" }}\nipv4 = \"off\"\n{uplink}\n"
        );
        let spec: Network = NodeSpec::parse(text.as_bytes()).unwrap().network;
        let runtime = self.runtime.as_ref().unwrap();
        let uplinks = self.node.enter(|| {
            let _inside = runtime.enter();
            Uplinks::start_with(&spec, Some(StableSecret(secret))).unwrap()
        });
        self.status = uplinks.status();
        self.uplinks = Some(uplinks);
    }

    /// Router advertisements with these flags.
    fn advertise(&mut self, flags: &str, prefix: &str) {
        let path = self.folder.path().join("radvd.conf");
        let text = format!(
            "interface eth0 {{ AdvSendAdvert on; MinRtrAdvInterval 3; MaxRtrAdvInterval 4; {flags}\n\
             prefix {prefix} {{ AdvOnLink on; AdvAutonomous on; }};\n\
             RDNSS fd00:50::53 {{ AdvRDNSSLifetime 60; }}; }};\n"
        );
        fs::write(&path, text).unwrap();
        let mut command = Command::new("radvd");
        command.args(["--nodaemon", "--logmethod", "stderr", "--config"]).arg(&path);
        command.arg("--pidfile").arg(self.folder.path().join("radvd.pid"));
        self.spawn(command, "radvd.log");
    }

    /// Kea with one address, whose lease is to be renewed after two seconds.
    fn serve(&mut self, rapid: &str) {
        self.serve_with(rapid, "");
    }

    /// The same with more that it has on the link.
    fn serve_with(&mut self, rapid: &str, more: &str) {
        let folder = self.folder.path().display().to_string();
        let text = format!(
            r#"{{ "Dhcp6": {{
                "data-directory": "{folder}",
                "interfaces-config": {{ "interfaces": [ "eth0" ] }},
                "lease-database": {{ "type": "memfile", "persist": true, "name": "{folder}/leases" }},
                "renew-timer": 3, "rebind-timer": 8, "preferred-lifetime": 12, "valid-lifetime": 20,
                "option-data": [ {{ "name": "dns-servers", "data": "fd00:50::5353" }},
                                 {{ "name": "sntp-servers", "data": "fd00:50::123" }} ],
                "subnet6": [ {{ "subnet": "fd00:50::/64", "interface": "eth0", "rapid-commit": {rapid}, {more}
                    "pools": [ {{ "pool": "fd00:50::1000-fd00:50::1000" }} ] }} ],
                "loggers": [ {{ "name": "kea-dhcp6", "severity": "DEBUG", "debuglevel": 50,
                    "output_options": [ {{ "output": "stdout" }} ] }} ]
            }} }}"#
        );
        let path = self.folder.path().join("kea.conf");
        fs::write(&path, text).unwrap();
        let mut command = Command::new("kea-dhcp6");
        command.arg("-c").arg(&path);
        command.env("KEA_PIDFILE_DIR", &folder).env("KEA_LOCKFILE_DIR", &folder);
        // Kea binds to the link-local address, which must have been checked.
        // There is none before the cable has two ends.
        self.node.ip("link set eth0 up");
        netns::wait_for("the router's link-local address", LONG, || {
            let known = self.router.ip("-6 addr show dev eth0");
            known.contains("fe80") && !known.contains("tentative")
        });
        self.spawn(command, "kea.log");
    }

    fn spawn(&mut self, mut command: Command, log: &str) {
        let log = fs::File::create(self.folder.path().join(log)).unwrap();
        command.stdin(Stdio::null()).stderr(log.try_clone().unwrap()).stdout(log);
        let child = self.router.enter(|| command.spawn().unwrap());
        self.servers.push(child);
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(Path::new(self.folder.path()).join(name)).unwrap_or_default()
    }

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
            let logs = [self.log("radvd.log"), self.log("kea.log")].concat();
            panic!("not within {LONG:?}: {what}: {:?}\n{logs}", self.status.borrow())
        })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.uplinks = None;
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

const LEASED: &str = "fd00:50::1000";

fn has(status: &NetworkStatus, address: &str) -> bool {
    status.addresses().any(|known| known.to_string() == address)
}

fn has_server(status: &NetworkStatus, address: &str) -> bool {
    status.dns.iter().any(|known| known.to_string() == address)
}

/// The address that the node gave itself.
fn own(status: &NetworkStatus) -> Option<String> {
    let mut all = status.addresses().map(|address| address.to_string());
    all.find(|address| address.starts_with("fd00:50") && address != LEASED)
}

#[test]
fn a_managed_network_gives_an_address_and_servers_and_renews_them() {
    let Some(mut world) = World::new("DHCPv6") else { return };
    world.advertise("AdvManagedFlag on;", "fd00:50::/64");
    world.serve("false");
    world.start([7; 16], "");
    let status = world.wait("an address", |status| {
        has(status, LEASED) && has_server(status, "fd00:50::5353") && own(status).is_some()
    });
    assert_eq!(status.ntp.len(), 1, "{status:?}");
    world.node.reaches("fd00:50::1");
    let kernel = world.node.ip("-6 addr show dev eth0");
    let line = kernel.split(&format!("{LEASED}/128")).nth(1).unwrap();
    assert!(line.lines().nth(1).unwrap().trim().starts_with("valid_lft"), "{kernel}");
    assert!(!line.lines().nth(1).unwrap().contains("forever"), "{kernel}");
    netns::wait_for("a renewal", LONG, || {
        world.log("kea.log").contains("DHCP6_PROCESS_IA_NA_EXTEND")
    });
    assert!(has(&world.status.borrow(), LEASED));
    // The server goes; so does the address, at the lease's end.
    world.servers[1].kill().unwrap();
    world.wait("the end of the lease", |status| !has(status, LEASED));
    assert!(!world.node.ip("-6 addr show dev eth0").contains(LEASED));
}

const PREFIXES: &str =
    r#""pd-pools": [ { "prefix": "2600:77::", "prefix-len": 48, "delegated-len": 56 } ],"#;

#[test]
fn a_server_delegates_a_prefix_and_keeps_it_for_the_node() {
    let Some(mut world) = World::new("DHCPv6 prefix delegation") else { return };
    world.serve_with("false", PREFIXES);
    // With no word of routers, and with an address beside it.
    for uplink in ["", "ipv6 = \"dhcp\""] {
        world.start([7; 16], uplink);
        world.uplinks.as_ref().unwrap().ask_for_prefix(Delegation::Wanted);
        let status = world.wait("a prefix", |status| {
            !status.delegated.is_empty() && has(status, LEASED) != uplink.is_empty()
        });
        let delegated = status.delegated[0];
        assert_eq!(delegated.length, 56);
        assert!(delegated.prefix.to_string().starts_with("2600:77:"), "{delegated:?}");
        assert!(status.interfaces[0].describe().contains("delegated 2600:77:"), "{status:?}");
        let before = world.log("kea.log").matches("DHCP6_PROCESS_IA_PD_EXTEND").count();
        netns::wait_for("a renewal", LONG, || {
            world.log("kea.log").matches("DHCP6_PROCESS_IA_PD_EXTEND").count() > before
        });
        assert_eq!(world.status.borrow().delegated, [delegated]);
        world.uplinks = None;
    }
}

#[test]
fn a_server_without_prefixes_is_told_of_and_its_configuration_used() {
    let Some(mut world) = World::new("no prefix to delegate") else { return };
    world.serve("false");
    world.start([7; 16], "");
    world.uplinks.as_ref().unwrap().ask_for_prefix(Delegation::Wanted);
    let status = world.wait("its servers", |status| has_server(status, "fd00:50::5353"));
    assert!(status.problems[0].contains("no DHCPv6 server delegates"), "{status:?}");
    assert!(status.delegated.is_empty());
}

#[test]
fn routes_that_routers_advertise_are_taken() {
    let Some(mut world) = World::new("route information") else { return };
    world.advertise("route 2600:9::/48 { AdvRouteLifetime 600; };", "fd00:50::/64");
    world.start([7; 16], "ipv6 = \"slaac\"");
    netns::wait_for("the route", LONG, || world.node.ip("-6 route").contains("2600:9::/48 via"));
}

#[test]
fn a_server_that_may_commits_rapidly() {
    let Some(mut world) = World::new("DHCPv6 rapid commit") else { return };
    world.serve("true");
    world.start([7; 16], "ipv6 = \"dhcp\"");
    world.wait("an address", |status| has(status, LEASED));
    let log = world.log("kea.log");
    assert!(log.contains("SOLICIT") && !log.contains("REQUEST ("), "{log}");
}

#[test]
fn a_network_with_other_configuration_is_asked_for_no_address() {
    let Some(mut world) = World::new("stateless DHCPv6") else { return };
    world.advertise("AdvOtherConfigFlag on;", "fd00:50::/64");
    world.serve("false");
    world.start([7; 16], "");
    let status = world.wait("its servers", |status| {
        has_server(status, "fd00:50::5353") && has_server(status, "fd00:50::53")
    });
    assert!(!has(&status, LEASED), "{status:?}");
    assert!(own(&status).is_some(), "{status:?}");
}

/// A router on a switch with the node, and its link-local address.
fn second_router(switch: &Namespace, port: &str, local: &str) -> Namespace {
    let router = Namespace::new();
    router.cable("eth0", switch, port);
    router.enter(|| fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")).unwrap();
    router.enter(|| fs::write("/proc/sys/net/ipv6/conf/eth0/addr_gen_mode", "1")).unwrap();
    router.ip(&format!("addr add {local}/64 dev eth0 nodad"));
    router.ip("link set eth0 up");
    router
}

/// A node on a switch with two routers that advertise themselves seldom.
struct Switched {
    world: World,
    switch: Namespace,
    _routers: [Namespace; 2],
}

impl Switched {
    fn new(test: &str) -> Option<Self> {
        let mut world = World::new(test)?;
        let switch = Namespace::new();
        world.node.ip("link del eth0");
        world.node.cable("eth0", &switch, "node");
        let routers = [("one", "fe80::1"), ("two", "fe80::2")]
            .map(|(port, local)| second_router(&switch, port, local));
        switch.ip("link add br0 type bridge mcast_snooping 0");
        for port in ["node", "one", "two"] {
            switch.ip(&format!("link set {port} master br0 up"));
        }
        switch.ip("link set br0 up");
        for (number, router) in routers.iter().enumerate() {
            let path = world.folder.path().join(format!("radvd{number}.conf"));
            let text = "interface eth0 { AdvSendAdvert on; MinRtrAdvInterval 300; MaxRtrAdvInterval \
                        600; MinDelayBetweenRAs 3;\nprefix fd00:50::/64 { }; };\n";
            fs::write(&path, text).unwrap();
            let mut command = Command::new("radvd");
            command.args(["--nodaemon", "--logmethod", "stderr", "--config"]).arg(&path);
            command.arg("--pidfile").arg(path.with_extension("pid"));
            command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::null());
            world.servers.push(router.enter(|| command.spawn().unwrap()));
        }
        // As on a node with machines, which is their router.
        world.node.enter(|| fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")).unwrap();
        world.start([7; 16], "ipv6 = \"slaac\"");
        Some(Self { world, switch, _routers: routers })
    }

    /// What is behind a port is gone; the cable has its signal all the same.
    fn cut(&self, port: &str) {
        self.switch.ip(&format!("link set {port} nomaster"));
    }

    fn mend(&self, port: &str) {
        self.switch.ip(&format!("link set {port} master br0"));
    }

    fn routers(&self) -> String {
        self.world.node.ip("-6 route show default")
    }

    fn leads_through(&self, router: &str) -> bool {
        let way = self.world.node.try_run("ip -6 route get 2600::1");
        String::from_utf8_lossy(&way.stdout).contains(&format!("via {router} "))
    }
}

#[test]
fn a_router_that_dies_is_passed_over_and_used_again_when_it_is_back() {
    let Some(net) = Switched::new("two routers on a link") else { return };
    netns::wait_for("both routers", LONG, || {
        net.routers().contains("fe80::1 ") && net.routers().contains("fe80::2 ")
    });
    let [(port, dies), (spare, other)] = match net.leads_through("fe80::1") {
        true => [("one", "fe80::1"), ("two", "fe80::2")],
        false => [("two", "fe80::2"), ("one", "fe80::1")],
    };
    net.cut(port);
    netns::wait_for("the other router", Duration::from_secs(15), || net.leads_through(other));
    assert!(!net.routers().contains(&format!("{dies} ")), "{}", net.routers());
    // It is back, and the other one dies: nobody advertises itself unasked for minutes.
    net.mend(port);
    net.cut(spare);
    netns::wait_for("the first router", LONG, || net.leads_through(dies));
    // The last one is kept, whatever it does.
    net.cut(port);
    std::thread::sleep(Duration::from_secs(10));
    assert!(net.leads_through(dies), "{}", net.routers());
}

#[test]
fn own_addresses_are_stable_on_a_network_and_tell_no_hardware_address() {
    let Some(mut world) = World::new("stable addresses") else { return };
    world.node.ip("link set eth0 address 02:00:00:00:00:42");
    world.advertise("", "fd00:50::/64");
    world.start([7; 16], "ipv6 = \"slaac\"");
    let first = own(&world.wait("an address", |status| own(status).is_some())).unwrap();
    assert!(!first.ends_with("ff:fe00:42"), "{first}");
    let again = |world: &mut World, secret: [u8; 16]| {
        world.uplinks = None;
        world.node.ip("link set eth0 down");
        world.start(secret, "ipv6 = \"slaac\"");
        own(&world.wait("an address", |status| own(status).is_some())).unwrap()
    };
    assert_eq!(again(&mut world, [7; 16]), first);
    assert_ne!(again(&mut world, [8; 16]), first);
}

/// The kernel asks routers when an interface comes up, and keeps no name servers.
#[test]
fn a_restarted_agent_learns_name_servers_of_routers_that_only_answer() {
    let Some(mut world) = World::new("router solicitations") else { return };
    world.advertise("UnicastOnly on;", "fd00:50::/64");
    world.start([7; 16], "ipv6 = \"slaac\"");
    world.wait("a name server", |status| has_server(status, "fd00:50::53"));
    world.uplinks = None;
    world.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
    world.runtime = Some(world.node.runtime());
    world.start([7; 16], "ipv6 = \"slaac\"");
    world.wait("a name server again", |status| has_server(status, "fd00:50::53"));
}
