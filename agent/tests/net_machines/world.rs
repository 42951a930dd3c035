//! A node with machines' networks, guests on it, and the rest of the world, in network namespaces.

use std::{
    io::Write,
    net::IpAddr,
    os::unix::fs::PermissionsExt,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use agent::net::{
    MachineAddress, MachineNet, MachineNetworks, MachineNetworksConfig, NetworkStatus,
    machines::{
        bridged::Bridged,
        ipv6::{Exit, Supply},
        open_tap,
    },
    ruleset::ByteRate,
};
use tokio::{runtime::Runtime, sync::watch};
use types::{config::Inbound, ids::MachineId};

use crate::netns::{Namespace, Pump, can_run};

/// The node's address on its uplink.
pub(crate) const NODE: &str = "198.51.100.2";
/// Servers on the internet side: one on the internet, one in the provider's own network.
pub(crate) const SERVER: &str = "203.0.113.80:80";
pub(crate) const PRIVATE: &str = "192.168.7.1";

/// A node with an uplink, and the rest of the world behind it.
pub(crate) struct World {
    pub(crate) node: Namespace,
    pub(crate) internet: Namespace,
    pub(crate) networks: Option<MachineNetworks>,
    pub(crate) uplinks: watch::Sender<NetworkStatus>,
    pub(crate) runtime: Option<Runtime>,
    /// Datagrams that reached [`SERVER`].
    pub(crate) datagrams: Arc<AtomicU64>,
    pub(crate) limit: Option<ByteRate>,
    pub(crate) ipv6: Option<Supply>,
    pub(crate) exit: Exit,
    pub(crate) inbound: Inbound,
    pub(crate) bridged: Option<Bridged>,
}

impl World {
    pub(crate) fn new(what: &str) -> Option<Self> {
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
            exit: Exit::Masquerade,
            inbound: Inbound::Closed,
            bridged: None,
        };
        world.start_agent();
        Some(world)
    }

    pub(crate) fn start_agent(&mut self) {
        let config = MachineNetworksConfig {
            subnet: "10.77.0.0/16".parse().unwrap(),
            reachable: Vec::new(),
            limit: self.limit,
            ipv6: self.ipv6.clone(),
            exit: self.exit,
            inbound: self.inbound,
            bridged: self.bridged.clone(),
        };
        let started = MachineNetworks::start(config, self.uplinks.subscribe());
        let runtime = self.runtime.as_ref().unwrap();
        self.networks = Some(self.node.enter(|| runtime.block_on(started)).unwrap());
    }

    /// The agent dies: its tasks and sockets are gone, what is in the kernel stays.
    pub(crate) fn kill_agent(&mut self) {
        self.networks = None;
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
        self.runtime = Some(self.node.runtime());
    }

    pub(crate) fn networks(&self) -> &MachineNetworks {
        self.networks.as_ref().unwrap()
    }

    /// A guest with its card up, without an address.
    pub(crate) fn plug(&self, number: u8) -> Guest {
        let machine = MachineId::from_bytes([number; 16]);
        let runtime = self.runtime.as_ref().unwrap();
        Guest::plug(runtime.block_on(self.networks().create(machine, 1)).unwrap())
    }

    /// A guest that is configured as it was told, with a server.
    pub(crate) fn guest(&self, number: u8) -> Guest {
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
pub(crate) fn kernel_can_filter(what: &str, space: &Namespace) -> bool {
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
        "add set inet probe begun { type ipv4_addr ; flags dynamic,timeout ; timeout 60s ; }",
        "add rule inet probe forward update @begun { ip saddr limit rate over 9/second } drop",
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

pub(crate) struct Guest {
    pub(crate) space: Namespace,
    pub(crate) address: MachineAddress,
    _pump: Pump,
}

impl Guest {
    /// Puts the card of a machine into a namespace, with its card up and without an address.
    pub(crate) fn plug(net: MachineNet) -> Self {
        let space = Namespace::new();
        let card = space.enter(|| open_tap("eth0").unwrap());
        space.ip(&format!("link set eth0 address {} up", net.address.mac));
        Self { space, address: net.address, _pump: Pump::start(net.tap, card) }
    }

    /// Runs an ordinary DHCP client; returns address, mask, router, DNS and MTU as it was told.
    pub(crate) fn dhcp(&self) -> Option<String> {
        self.dhcp_as("")
    }

    /// Like [`Guest::dhcp`], with further options of the client, udhcpc.
    pub(crate) fn dhcp_as(&self, further: &str) -> Option<String> {
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
        let options = format!("-i eth0 -n -q -t 8 -T 1 -f -O mtu {further}");
        self.space.try_run(&format!("busybox udhcpc {options} -s {}", script.display()));
        std::fs::read_to_string(told).ok().map(|told| told.trim().to_owned())
    }

    pub(crate) fn ip(&self) -> String {
        self.address.ipv4.to_string()
    }
}
