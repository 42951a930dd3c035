//! The task that owns machines' networks: it does what is asked, one thing after the other.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
    path::Path,
};

use tokio::sync::{mpsc, oneshot, watch};
use types::ids::MachineId;

use super::{
    MachineAddress, MachineNet, MachineNetError, MachineNetworksConfig, address,
    advertise::{Advertisement, Router},
    ipv6::{self, GUEST_LENGTH, Ipv6Net},
    renumber,
    serve::Server,
};
use crate::inventory;
use crate::net::{
    AssignedAddress, Carrier, Ipv4Prefix, NetworkStatus,
    dhcp::server::GuestLease,
    kernel::{self, Kernel, Route},
    links::LinkFacts,
    nft,
    ruleset::{self, Family, encode::Batch},
};

/// Largest and least MTU of a tap: Ethernet's, and IPv6's least, which every path carries.
const MAX_MTU: u16 = 1500;
const MIN_MTU: u16 = 1280;

/// Settings of a tap below `net`, with `{}` for its name. The packet filter says the same about
/// spoofing and IPv6; two locks on one door.
const TAP_SETTINGS: [(&str, &str); 7] = [
    // Answers ARP only for the address of this tap.
    ("ipv4/conf/{}/arp_ignore", "1"),
    ("ipv4/conf/{}/proxy_arp", "0"),
    ("ipv4/conf/{}/rp_filter", "1"),
    ("ipv4/conf/{}/accept_redirects", "0"),
    ("ipv4/conf/{}/send_redirects", "0"),
    ("ipv4/conf/{}/accept_source_route", "0"),
    ("ipv4/conf/{}/route_localnet", "0"),
];

/// Further settings with and without IPv6. The node is the guest's router and nothing else: it takes no
/// address from a guest, and lets it deny none. Written before the tap is up.
const WITH_IPV6: [(&str, &str); 7] = [
    ("ipv6/conf/{}/accept_ra", "0"),
    ("ipv6/conf/{}/autoconf", "0"),
    ("ipv6/conf/{}/accept_redirects", "0"),
    ("ipv6/conf/{}/accept_dad", "0"),
    ("ipv6/conf/{}/dad_transmits", "0"),
    ("ipv6/conf/{}/addr_gen_mode", "1"),
    ("ipv6/conf/{}/disable_ipv6", "0"),
];
const WITHOUT_IPV6: [(&str, &str); 1] = [("ipv6/conf/{}/disable_ipv6", "1")];
/// The node's address on every tap.
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// What callers ask of the task.
#[derive(Debug)]
pub(super) enum Request {
    Create {
        machine: MachineId,
        queues: u32,
        answer: oneshot::Sender<Result<MachineNet, MachineNetError>>,
    },
    Delete {
        machine: MachineId,
        answer: oneshot::Sender<Result<(), MachineNetError>>,
    },
}

#[derive(Debug)]
pub(super) struct Task {
    pub(super) config: MachineNetworksConfig,
    gateway: Ipv4Addr,
    pub(super) kernel: Kernel,
    pub(super) guests: BTreeMap<MachineId, Guest>,
    pub(super) uplinks: watch::Receiver<NetworkStatus>,
    publish: watch::Sender<Vec<MachineAddress>>,
    /// What guests are told and the filter allows.
    dns: Vec<Ipv4Addr>,
    dns6: Vec<Ipv6Addr>,
    /// Where guests' IPv6 networks come from now.
    pub(super) net: Option<Ipv6Net>,
    /// Whether an uplink delegated a prefix since the agent started.
    pub(super) was_delegated: bool,
}

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) address: MachineAddress,
    pub(super) index: u32,
    /// IPv6 networks that were its own.
    pub(super) retired: Vec<Ipv6Addr>,
    pub(super) server: Option<Server>,
    pub(super) router: Option<Router>,
}

/// What speaks for the node on one tap.
pub(super) struct Voices {
    pub(super) server: Server,
    pub(super) router: Option<Router>,
}

impl Task {
    pub(super) async fn start(
        config: MachineNetworksConfig,
        uplinks: watch::Receiver<NetworkStatus>,
        publish: watch::Sender<Vec<MachineAddress>>,
    ) -> Result<Self, MachineNetError> {
        let subnet = config.subnet;
        let gateway = address::gateway(subnet).ok_or(MachineNetError::Subnet { subnet })?;
        let kernel = Kernel::open().map_err(|source| MachineNetError::Setting {
            setting: "netlink socket".to_owned(),
            source,
        })?;
        let (dns, dns6) = name_servers(&uplinks);
        let guests = BTreeMap::new();
        let net = renumber::at_start(config.ipv6.as_ref());
        let mut task = Self {
            config,
            gateway,
            kernel,
            guests,
            uplinks,
            publish,
            dns,
            dns6,
            net,
            was_delegated: false,
        };
        // The filter first: nothing is forwarded without it.
        task.filter().await?;
        // Of a configuration in which machines were bridged.
        task.kernel.remove_bridge().await?;
        super::table::make_room(inventory::capacity(Path::new("/")).memory_mib)?;
        set("ipv4/ip_forward", "1")?;
        if task.config.ipv6.is_some() {
            set("ipv6/conf/all/forwarding", "1")?;
        }
        task.tell_net();
        task.take_over().await?;
        task.follow_delegation().await;
        Ok(task)
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Request>) {
        let mut uplinks = self.uplinks.clone();
        loop {
            tokio::select! {
                request = inbox.recv() => match request {
                    Some(request) => self.handle(request).await,
                    None => return,
                },
                Ok(()) = uplinks.changed() => self.follow_uplinks().await,
            }
        }
    }

    async fn handle(&mut self, request: Request) {
        // A caller that went away does not mind the answer.
        match request {
            Request::Create { machine, queues, answer } => {
                let _ = answer.send(self.create(machine, queues).await);
            }
            Request::Delete { machine, answer } => {
                let _ = answer.send(self.delete(machine).await);
            }
        }
        self.publish_guests();
    }

    pub(super) fn publish_guests(&self) {
        let known = self.guests.values().map(|guest| guest.address.clone()).collect();
        self.publish.send_replace(known);
    }

    /// Tells guests and the filter when name servers, or the prefix of their networks, changed.
    async fn follow_uplinks(&mut self) {
        self.follow_delegation().await;
        let (dns, dns6) = name_servers(&self.uplinks);
        if dns == self.dns && dns6 == self.dns6 {
            return;
        }
        (self.dns, self.dns6) = (dns, dns6);
        if let Err(error) = self.filter().await {
            tracing::error!(error = &error as &dyn std::error::Error, "packet filter not updated");
        }
        for guest in self.guests.values() {
            if let Some(server) = &guest.server {
                server.update(self.lease(&guest.address));
            }
            if let Some(router) = &guest.router {
                router.update(self.advertisement(&guest.address, &guest.retired));
            }
        }
    }

    pub(super) async fn filter(&self) -> Result<(), MachineNetError> {
        let chains = ruleset::shared(&ruleset::Shared {
            subnet: self.config.subnet,
            dns: self.dns.clone(),
            reachable: self.config.reachable.clone(),
            exit: self.config.exit,
            inbound: self.config.inbound,
            ipv6: self.net,
            dns6: self.dns6.clone(),
        });
        Ok(nft::commit(&Batch::replace_table(Family::Inet, &chains)).await?)
    }

    /// Takes over what an earlier agent made; what it did not finish is removed.
    async fn take_over(&mut self) -> Result<(), MachineNetError> {
        for link in self.kernel.links().await?.into_iter().filter(LinkFacts::is_tap) {
            let Some((machine, ipv4)) = address::parse_alias(&link.alias) else {
                self.kernel.delete_link(link.index).await?;
                continue;
            };
            let mtu = u16::try_from(link.mtu).unwrap_or(MAX_MTU);
            let address = self.address(machine, ipv4, mtu);
            let index = link.index;
            let voices = match self.connect(&address, index, &[]).await {
                Ok(voices) => Some(voices),
                // What the earlier agent set up still stands; one machine's trouble is not others'.
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(interface = link.name, error, "tap not taken over in full");
                    None
                }
            };
            let (server, router) = voices.map_or((None, None), |v| (Some(v.server), v.router));
            let retired = Vec::new();
            self.guests.insert(machine, Guest { address, index, retired, server, router });
        }
        self.publish_guests();
        Ok(())
    }

    async fn create(
        &mut self,
        machine: MachineId,
        queues: u32,
    ) -> Result<MachineNet, MachineNetError> {
        if let Some(guest) = self.guests.get(&machine) {
            let address = guest.address.clone();
            let (tap, more_queues) = reopen(&self.kernel, &address.interface, queues).await?;
            return Ok(MachineNet { tap, more_queues, address });
        }
        let address = self.new_address(machine)?;
        let (tap, more_queues) = open(&address.interface, queues)?;
        match self.finish(address).await {
            Ok(guest) => {
                let address = guest.address.clone();
                self.guests.insert(machine, guest);
                Ok(MachineNet { tap, more_queues, address })
            }
            Err(error) => {
                self.undo(machine).await;
                Err(error)
            }
        }
    }

    fn new_address(&self, machine: MachineId) -> Result<MachineAddress, MachineNetError> {
        let interface = address::interface(machine);
        let mut others = self.guests.values().map(|guest| &guest.address);
        if let Some(owner) = others.find(|other| other.interface == interface) {
            return Err(MachineNetError::NameTaken { interface, owner: owner.machine });
        }
        let subnet = self.config.subnet;
        let taken = |wanted| self.guests.values().any(|guest| guest.address.ipv4 == wanted);
        let last = match (self.net, &self.config.ipv6) {
            (None, Some(_)) => Some(ipv6::LAST_OF_UNKNOWN),
            (net, _) => net.map(|net| net.last()),
        };
        let ipv4 = address::allocate(subnet, last, machine, taken);
        let ipv4 = ipv4.ok_or(MachineNetError::Full { subnet })?;
        let address = self.address(machine, ipv4, self.mtu());
        self.tell_lack(&address);
        Ok(address)
    }

    /// Tells that there is no IPv6 network for a guest.
    pub(super) fn tell_lack(&self, address: &MachineAddress) {
        if let (Some(net), None) = (self.net, address.ipv6) {
            let (machine, prefix, length) = (address.machine, net.prefix(), net.length());
            tracing::warn!(%machine, %prefix, length, "no IPv6: machines.ipv6 has no network left");
        }
    }

    async fn finish(&self, address: MachineAddress) -> Result<Guest, MachineNetError> {
        let index = self.index(&address).await?;
        let Voices { server, router } = self.connect(&address, index, &[]).await?;
        // The alias comes last: a tap without one was not finished, and is removed at the start.
        let alias = address::alias(address.machine, address.ipv4);
        self.kernel.set_alias(index, &alias).await?;
        Ok(Guest { address, index, retired: Vec::new(), server: Some(server), router })
    }

    /// Gives a tap all that it needs; what it has already stays as it is. `retired` are IPv6 networks that the
    /// guest may have and is not to use any more.
    pub(super) async fn connect(
        &self,
        address: &MachineAddress,
        index: u32,
        retired: &[Ipv6Addr],
    ) -> Result<Voices, MachineNetError> {
        let chain = ruleset::guest(&ruleset::Guest {
            interface: address.interface.clone(),
            hardware: address.mac,
            address: address.ipv4,
            limit: self.config.limit,
            network6: address.ipv6,
        });
        nft::commit(&Batch::replace_chain(Family::Netdev, &chain)).await?;
        let speaks_ipv6 = address.ipv6.is_some() || !retired.is_empty();
        let further = if speaks_ipv6 { &WITH_IPV6[..] } else { &WITHOUT_IPV6 };
        for (name, value) in TAP_SETTINGS.iter().chain(further) {
            set(&name.replace("{}", &address.interface), value)?;
        }
        self.kernel.shape(index, self.config.limit).await?;
        self.kernel.set_up(index, Some(u32::from(address.mtu))).await?;
        let own = AssignedAddress { address: self.gateway.into(), prefix: 32 };
        self.kernel.add_address(index, own, None).await?;
        self.kernel.add_route(&self.route(address.ipv4, index)).await?;
        self.kernel.pin_neighbour(index, address.ipv4, address.mac).await?;
        let failed =
            |source| MachineNetError::Dhcp { interface: address.interface.clone(), source };
        let router = if speaks_ipv6 {
            self.route6(address.ipv6, index).await?;
            let told = self.advertisement(address, retired);
            Some(Router::start(&address.interface, index, told).map_err(failed)?)
        } else {
            None
        };
        let server = Server::start(&address.interface, self.lease(address)).map_err(failed)?;
        Ok(Voices { server, router })
    }

    /// Gives the node its address towards the guest, and the way to the guest's network.
    async fn route6(&self, network: Option<Ipv6Addr>, index: u32) -> Result<(), MachineNetError> {
        let own = AssignedAddress { address: ROUTER.into(), prefix: 64 };
        self.kernel.add_address(index, own, None).await?;
        match network {
            Some(network) => Ok(self.kernel.add_route(&way6(network, index)).await?),
            None => Ok(()),
        }
    }

    fn advertisement(&self, address: &MachineAddress, retired: &[Ipv6Addr]) -> Advertisement {
        let (network, mtu, retired) = (address.ipv6, address.mtu, retired.to_vec());
        Advertisement { network, retired, mtu, dns: self.dns6.clone() }
    }

    async fn delete(&mut self, machine: MachineId) -> Result<(), MachineNetError> {
        let Some(guest) = self.guests.get(&machine) else { return Ok(()) };
        let (index, ipv4, network) = (guest.index, guest.address.ipv4, guest.address.ipv6);
        let interface = guest.address.interface.clone();
        // Nothing enters without its chain's permission, so the tap goes first.
        self.kernel.delete_link(index).await?;
        self.guests.remove(&machine);
        delete_chain(&interface).await?;
        nft::forget(ipv4.octets()).await?;
        match network {
            Some(network) => forget6(network).await,
            None => Ok(()),
        }
    }

    /// Removes what an attempt left that did not succeed.
    async fn undo(&self, machine: MachineId) {
        let interface = address::interface(machine);
        let links = self.kernel.links().await.unwrap_or_default();
        if let Some(link) = links.iter().find(|link| link.name == interface) {
            // Not more can be done than to try.
            let _ = self.kernel.delete_link(link.index).await;
        }
        let _ = delete_chain(&interface).await;
    }

    async fn index(&self, address: &MachineAddress) -> Result<u32, MachineNetError> {
        let links = self.kernel.links().await?;
        let link = links.iter().find(|link| link.name == address.interface);
        link.map(|link| link.index).ok_or(MachineNetError::Unknown { machine: address.machine })
    }

    pub(super) fn address(&self, machine: MachineId, ipv4: Ipv4Addr, mtu: u16) -> MachineAddress {
        MachineAddress {
            machine,
            interface: address::interface(machine),
            mac: address::hardware(machine),
            ipv4,
            prefix: self.config.subnet.length(),
            gateway: self.gateway,
            ipv6: self.net.and_then(|net| net.of_guest(self.config.subnet, ipv4)),
            mtu,
        }
    }

    fn route(&self, guest: Ipv4Addr, index: u32) -> Route {
        Route {
            to: guest.into(),
            prefix: 32,
            gateway: None,
            source: Some(self.gateway),
            index,
            metric: 0,
        }
    }

    fn lease(&self, address: &MachineAddress) -> GuestLease {
        GuestLease {
            hardware: address.mac,
            address: Ipv4Prefix::new(address.ipv4, address.prefix)
                .unwrap_or(Ipv4Prefix::single(address.ipv4)),
            gateway: address.gateway,
            dns: self.dns.clone(),
            mtu: address.mtu,
        }
    }

    /// The smallest MTU of the uplinks, so that nothing a guest sends needs fragmenting here.
    fn mtu(&self) -> u16 {
        let uplinks = self.uplinks.borrow();
        let least = uplinks.interfaces.iter().map(|interface| interface.mtu).min();
        let least = least.and_then(|mtu| u16::try_from(mtu).ok()).unwrap_or(MAX_MTU);
        least.clamp(MIN_MTU, MAX_MTU)
    }
}

/// The way to a guest's IPv6 network.
pub(super) fn way6(network: Ipv6Addr, index: u32) -> Route {
    let (to, prefix) = (network.into(), GUEST_LENGTH);
    Route { to, prefix, gateway: None, source: None, index, metric: 1 }
}

/// Ends the flows of a guest's IPv6 network.
pub(super) async fn forget6(network: Ipv6Addr) -> Result<(), MachineNetError> {
    let [_, _, _, _, a, b, c, d, ..] = network.octets();
    Ok(nft::forget([a, b, c, d]).await?)
}

pub(super) async fn delete_chain(interface: &str) -> Result<(), MachineNetError> {
    // Many kernels remove the chain with its interface.
    for batch in [
        Batch::delete_chain(Family::Netdev, interface),
        Batch::delete_sources(Family::Netdev, interface),
    ] {
        match nft::commit(&batch).await {
            Err(error) if error.is_absent() => {}
            result => result?,
        }
    }
    Ok(())
}

/// Opens a tap that nobody else knows yet, with that many queues: the first and the others.
pub(super) fn open(
    interface: &str,
    queues: u32,
) -> Result<(OwnedFd, Vec<OwnedFd>), MachineNetError> {
    super::open_tap_queues(interface, queues)
        .map_err(|source| MachineNetError::Tap { interface: interface.to_owned(), source })
}

/// Opens a tap again whose machine does not run. A tap of one queue refuses a second process by itself;
/// one of several has a carrier as long as anybody is attached.
pub(super) async fn reopen(
    kernel: &Kernel,
    interface: &str,
    queues: u32,
) -> Result<(OwnedFd, Vec<OwnedFd>), MachineNetError> {
    let links = kernel.links().await?;
    if links.iter().any(|link| link.name == interface && link.carrier == Carrier::Up) {
        return Err(MachineNetError::Busy { interface: interface.to_owned() });
    }
    open(interface, queues)
}

/// Writes a setting below `net`, if this kernel has it.
pub(super) fn set_if_there(setting: &str, value: &str) -> Result<(), MachineNetError> {
    match kernel::set(setting, value) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result
            .map_err(|source| MachineNetError::Setting { setting: setting.to_owned(), source }),
    }
}

fn set(setting: &str, value: &str) -> Result<(), MachineNetError> {
    match kernel::set(setting, value) {
        // A kernel without IPv6 has nothing to switch off.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && setting.contains("ipv6") => {
            Ok(())
        }
        result => result
            .map_err(|source| MachineNetError::Setting { setting: setting.to_owned(), source }),
    }
}

/// The uplinks' name servers of either family, by one look at them: whoever looks again before the first look
/// ends waits behind a writer that waits for just that end.
fn name_servers(uplinks: &watch::Receiver<NetworkStatus>) -> (Vec<Ipv4Addr>, Vec<Ipv6Addr>) {
    let status = uplinks.borrow();
    (ipv4(&status.dns), ipv6_of(&status.dns))
}

fn ipv6_of(addresses: &[IpAddr]) -> Vec<Ipv6Addr> {
    let ipv6 = addresses.iter().filter_map(|address| match address {
        IpAddr::V6(address) if !address.is_loopback() => Some(*address),
        IpAddr::V6(_) | IpAddr::V4(_) => None,
    });
    ipv6.collect()
}

fn ipv4(addresses: &[IpAddr]) -> Vec<Ipv4Addr> {
    let ipv4 = addresses.iter().filter_map(|address| match address {
        IpAddr::V4(address) if !address.is_loopback() => Some(*address),
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    });
    ipv4.collect()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
            mpsc,
        },
        thread,
        time::Duration,
    };

    use super::*;

    #[test]
    fn name_servers_are_read_while_the_network_changes() {
        const LOOKS: usize = 100_000;
        // What is stuck stays so.
        const PATIENCE: Duration = Duration::from_secs(60);
        let servers = ["192.0.2.1", "127.0.0.1", "2001:db8::1", "::1"];
        let dns = servers.map(|server| server.parse().expect("an address")).to_vec();
        let (changes, uplinks) = watch::channel(NetworkStatus { dns, ..NetworkStatus::default() });
        let over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&over);
        thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                changes.send_modify(|status| status.last_error = Some("a change".to_owned()));
            }
        });
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let found = (0..LOOKS).fold(Default::default(), |_, _| name_servers(&uplinks));
            tell.send(found).expect("somebody waits");
        });
        let (ipv4, ipv6) =
            told.recv_timeout(PATIENCE).expect("each look ends, whatever is written meanwhile");
        over.store(true, Ordering::Relaxed);
        assert_eq!(ipv4, ["192.0.2.1".parse::<Ipv4Addr>().expect("an address")]);
        assert_eq!(ipv6, ["2001:db8::1".parse::<Ipv6Addr>().expect("an address")]);
    }
}
