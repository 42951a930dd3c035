//! IPv6 of guests: a network of their own behind the node's address, or a routed one.

use std::net::{Ipv6Addr, UdpSocket};

use agent::net::{
    NetworkStatus,
    dhcp6::client::DelegatedPrefix,
    machines::ipv6::{Ipv6Net, Supply},
    ruleset::encode::SOURCES_KEPT,
};

use crate::{
    netns::{PATIENCE, SILENCE, wait_for},
    world::{Guest, World},
};

/// Servers on the internet side and at the node, and the node's own address there.
pub(crate) const SERVER6: &str = "[2600:113::80]:80";
const NODE6: &str = "2600:51::2";

impl World {
    /// Gives the node IPv6 on its uplink, and machines networks of their own.
    pub(crate) fn with_ipv6(self, net: Ipv6Net) -> Self {
        self.with_supply(Supply::Fixed(net))
    }

    fn with_supply(mut self, supply: Supply) -> Self {
        self.node.ip(&format!("addr add {NODE6}/64 dev eth0 nodad"));
        self.internet.ip("addr add 2600:51::1/64 dev eth0 nodad");
        self.internet.ip("addr add 2600:113::80/128 dev lo nodad");
        self.internet.ip(&format!("route add 2600:77::/48 via {NODE6}"));
        self.internet.ip(&format!("route add fd00::/8 via {NODE6}"));
        self.node.ip("route add default via 2600:51::1");
        self.internet.serve(SERVER6);
        self.node.serve("[::]:8081");
        self.ipv6 = Some(supply);
        self.kill_agent();
        self.start_agent();
        self
    }

    /// A guest that has given itself an address, and the address.
    pub(crate) fn guest6(&self, number: u8) -> (Guest, String) {
        let guest = self.plug(number);
        let mut own = None;
        wait_for("an address by SLAAC", PATIENCE * 3, || {
            let text = guest.space.ip("-6 -o addr show dev eth0 scope global");
            let found = text.split_whitespace().find(|word| word.ends_with("/64"));
            let ready = !text.contains("tentative");
            own = found.filter(|_| ready).map(|word| word.trim_end_matches("/64").to_owned());
            own.is_some()
        });
        let own = own.unwrap();
        guest.space.serve("[::]:80");
        (guest, own)
    }
}

pub(crate) fn machine_can_use_ipv6(world: Option<World>) -> Option<World> {
    world.filter(|_| std::fs::metadata("/proc/sys/net/ipv6").is_ok())
}

#[test]
fn a_guest_has_ipv6_of_its_own_behind_the_nodes_address() {
    let Some(world) = machine_can_use_ipv6(World::new("IPv6 of guests")) else { return };
    let world = world.with_ipv6(Ipv6Net::private([1, 2, 3, 4, 5]));
    let ((one, own), (two, other)) = (world.guest6(1), world.guest6(2));
    assert!(
        own.starts_with("fd01:203:405:") && other.starts_with("fd01:203:405:"),
        "{own} {other}"
    );
    let network = |address: &str| address.split(':').nth(3).unwrap().to_owned();
    assert_ne!(network(&own), network(&other));
    // It reaches the internet, under the node's name.
    assert_eq!(one.space.ask_tcp(SERVER6, PATIENCE).as_deref(), Some(NODE6));
    // Neither the node, nor the other guest, nor the provider's own network.
    assert_eq!(one.space.ask_tcp(&format!("[{NODE6}]:8081"), SILENCE), None);
    assert!(!one.space.pings("fe80::1%eth0"));
    assert_eq!(one.space.ask_tcp(&format!("[{other}]:80"), SILENCE), None);
    world.internet.ip("addr add fd99::1/128 dev lo nodad");
    world.internet.serve("[fd99::1]:80");
    assert_eq!(one.space.ask_tcp("[fd99::1]:80", SILENCE), None);
    // Nobody outside reaches it, not even who knows the way.
    assert_eq!(world.internet.ask_tcp(&format!("[{own}]:80"), SILENCE), None);
    // What it sends in another's name goes nowhere.
    let begin = world.internet.received("eth0");
    let forged = format!("{}:1", other.rsplit_once(':').unwrap().0);
    one.space.ip(&format!("addr add {forged}/128 dev eth0 nodad"));
    assert_eq!(one.space.ask_udp(&forged, SERVER6, SILENCE), None);
    assert!(world.internet.received("eth0") <= begin + 2, "it left the node");
    // The other guest still has its answers.
    assert_eq!(two.space.ask_tcp(SERVER6, PATIENCE).as_deref(), Some(NODE6));
}

#[test]
fn a_guest_of_a_routed_prefix_is_on_the_internet_itself_but_not_open_to_it() {
    let Some(world) = machine_can_use_ipv6(World::new("routed IPv6")) else { return };
    let net = Ipv6Net::routed("2600:77::".parse().unwrap(), 48).unwrap();
    let world = world.with_ipv6(net);
    let (one, own) = world.guest6(1);
    assert!(own.starts_with("2600:77:0:"), "{own}");
    assert_eq!(one.space.ask_tcp(SERVER6, PATIENCE), Some(own.clone()));
    assert_eq!(world.internet.ask_tcp(&format!("[{own}]:80"), SILENCE), None);
}

#[test]
fn a_guest_has_the_prefix_that_is_delegated_now() {
    let Some(world) = machine_can_use_ipv6(World::new("delegated IPv6")) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut world = world.with_supply(Supply::Delegated(folder.path().join("run/delegated")));
    let delegate = |world: &World, prefix: &str| {
        let delegated = DelegatedPrefix { prefix: prefix.parse().unwrap(), length: 56 };
        let delegated = vec![delegated];
        world.uplinks.send_replace(NetworkStatus { delegated, ..NetworkStatus::default() });
    };
    let has = |guest: &Guest, begin: &str| {
        let text = guest.space.ip("-6 -o addr show dev eth0 scope global -tentative -deprecated");
        let mut words = text.split_whitespace();
        words.find(|word| word.starts_with(begin)).map(|own| own.trim_end_matches("/64").to_owned())
    };
    // The machine is there before the prefix.
    let guest = world.plug(1);
    let begins_with = |guest: &Guest, begin: &str| {
        wait_for("an address by SLAAC", PATIENCE * 3, || has(guest, begin).is_some());
        has(guest, begin).unwrap()
    };
    delegate(&world, "2600:77:0:100::");
    let own = begins_with(&guest, "2600:77:0:1");
    assert_eq!(guest.space.ask_tcp(SERVER6, PATIENCE), Some(own.clone()));
    // An agent that has heard nothing yet leaves it what it has.
    world.kill_agent();
    world.uplinks.send_replace(NetworkStatus::default());
    world.start_agent();
    assert_eq!(guest.space.ask_tcp(SERVER6, PATIENCE), Some(own.clone()));
    // Another prefix takes the place of the first one, which is nobody's here any more.
    delegate(&world, "2600:77:0:200::");
    let new = begins_with(&guest, "2600:77:0:2");
    wait_for("the new address alone", PATIENCE, || {
        has(&guest, "2600:77:0:1").is_none()
            && guest.space.ask_tcp(SERVER6, PATIENCE) == Some(new.clone())
    });
    assert_eq!(guest.space.ask_udp(&own, SERVER6, SILENCE), None);
    assert!(!world.node.ip("-6 route").contains("2600:77:0:1"));
    // None is left.
    world.uplinks.send_replace(NetworkStatus::default());
    wait_for("the end of all", PATIENCE, || {
        has(&guest, "2600:").is_none() && !guest.space.ip("-6 route").contains("default")
    });
}

#[test]
fn a_guest_is_nobodys_router() {
    let Some(world) = machine_can_use_ipv6(World::new("router advertisements of guests")) else {
        return;
    };
    let world = world.with_ipv6(Ipv6Net::private([1, 2, 3, 4, 5]));
    let (one, _) = world.guest6(1);
    let dropped = || {
        let chain = format!("nft list chain netdev holdfast {}", one.address.interface);
        let text = world.node.run(&chain);
        // The last rule counts what none before allowed.
        let last = text.lines().rfind(|line| line.trim().starts_with("counter")).unwrap();
        let mut words = last.split_whitespace().skip_while(|word| *word != "packets");
        words.nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = dropped();
    // "2: eth0: …"
    let index = one.space.ip("-o link show dev eth0");
    let index: u32 = index.split(':').next().unwrap().parse().unwrap();
    one.space.enter(|| {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET6,
            rustix::net::SocketType::RAW,
            Some(rustix::net::ipproto::ICMPV6),
        )
        .unwrap();
        let everybody = std::net::SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, index);
        let mut packet = [0; 16];
        packet[0] = 134;
        packet[6..8].copy_from_slice(&1800_u16.to_be_bytes());
        rustix::net::sendto(&socket, &packet, rustix::net::SendFlags::empty(), &everybody).unwrap();
    });
    wait_for("the advertisement to be dropped", PATIENCE, || dropped() > before);
    assert!(!world.node.ip("-6 route show").contains("proto ra"));
}

impl Guest {
    /// Sends datagrams from addresses that the guest need not have.
    fn send_from(&self, sources: impl Iterator<Item = Ipv6Addr> + Send) {
        self.space.enter(|| {
            std::fs::write("/proc/sys/net/ipv6/ip_nonlocal_bind", "1").unwrap();
            sources.for_each(|source| {
                UdpSocket::bind((source, 0)).unwrap().send_to(b"?", SERVER6).unwrap();
            });
        });
    }
}

#[test]
fn a_guest_has_a_bounded_number_of_addresses_and_others_have_theirs() {
    let Some(world) = machine_can_use_ipv6(World::new("many IPv6 sources")) else { return };
    let world = world.with_ipv6(Ipv6Net::private([1, 2, 3, 4, 5]));
    let ((one, own), (two, _)) = (world.guest6(1), world.guest6(2));
    assert_eq!(one.space.ask_tcp(SERVER6, PATIENCE).as_deref(), Some(NODE6));
    let own: Ipv6Addr = own.parse().unwrap();
    let network = own.to_bits() & !u128::from(u64::MAX);
    let (most, _) = SOURCES_KEPT;
    one.send_from((0..most).map(|n| Ipv6Addr::from_bits(network | u128::from(n + 0x1000))));
    // One more is one too many; the one that was there has its place still.
    let more = Ipv6Addr::from_bits(network | 0xffff).to_string();
    one.space.ip(&format!("addr add {more}/64 dev eth0 nodad"));
    assert_eq!(one.space.ask_udp(&more, SERVER6, SILENCE), None);
    let own = own.to_string();
    assert_eq!(one.space.ask_udp(&own, SERVER6, PATIENCE).as_deref(), Some(NODE6));
    assert_eq!(two.space.ask_tcp(SERVER6, PATIENCE).as_deref(), Some(NODE6));
    let tap = one.address.interface.clone();
    let known = world.node.ip(&format!("-6 neigh show dev {tap}"));
    assert!(known.lines().count() <= usize::try_from(most).unwrap(), "{known}");
    // Nothing of it is left when the machine is gone.
    assert!(world.node.run("nft list ruleset").contains(&format!("sources_{tap}")));
    let runtime = world.runtime.as_ref().unwrap();
    runtime.block_on(world.networks().delete(one.address.machine)).unwrap();
    assert!(!world.node.run("nft list ruleset").contains(&tap));
}
