//! Machines that are stations of the provider's network: taps in one bridge with one uplink, on which
//! the node has no address.
//!
//! Addresses are given by the network's own DHCP server and routers. The node watches how that
//! happens ([`bindings`]) and lets each guest use what is its own ([`crate::net::ruleset::bridged`]).
//! Guests of one node do not reach each other directly unless the provider wants them to: their ports
//! are isolated. What is known of a guest's addresses is in its tap's alias and beside it ([`rest`]), so
//! that a restarted agent knows it.

mod alias;
pub mod bindings;
mod rest;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::PathBuf,
    time::Instant,
};

use tokio::sync::{mpsc, watch as channel};
use types::{config::Neighbours, ids::MachineId};

use self::{
    bindings::Bindings,
    watch::{Missed, Seen, Watch, Watched},
};
use super::{MachineAddress, MachineNet, MachineNetError, address, task::Request};
use crate::net::{
    NetworkStatus,
    kernel::{
        Kernel,
        bridge::{BRIDGE, Port},
    },
    links::LinkFacts,
    nft,
    ruleset::{self, ByteRate, Family, encode::Batch},
};
use crate::sys::packet;

/// Packets that may wait to be looked at, of all guests.
const PACKETS: usize = 64;
/// Least and largest MTU of a tap: IPv6's least, and what switches with jumbo frames carry.
const MTU: std::ops::RangeInclusive<u16> = 1280..=9216;
/// Settings below `net` that keep bridged frames away from the node's own filter, where the kernel
/// has them: rules for bridges are at their ports.
const NOT_ROUTED: [&str; 3] = [
    "bridge/bridge-nf-call-iptables",
    "bridge/bridge-nf-call-ip6tables",
    "bridge/bridge-nf-call-arptables",
];

/// How bridged machines are connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bridged {
    /// What the configuration calls the uplink.
    pub uplink: String,
    /// Whether machines of this node reach each other directly.
    pub neighbours: Neighbours,
    /// Folder for what taps have no room to say, made when it is wanted. It must be lost when the host
    /// restarts, as taps are.
    pub folder: PathBuf,
}

#[derive(Debug)]
pub(super) struct Task {
    config: Bridged,
    limit: Option<ByteRate>,
    kernel: Kernel,
    bridge: u32,
    /// Index of the uplink that is a port.
    plugged: Option<u32>,
    guests: BTreeMap<MachineId, Guest>,
    uplinks: channel::Receiver<NetworkStatus>,
    publish: channel::Sender<Vec<MachineAddress>>,
    tell: mpsc::Sender<Seen>,
    packets: mpsc::Receiver<Seen>,
}

#[derive(Debug)]
struct Guest {
    address: MachineAddress,
    index: u32,
    bindings: Bindings,
    _watch: Watch,
}

impl Task {
    /// Sets the filter, makes the bridge, and takes over what an earlier agent left.
    pub(super) async fn start(
        (config, limit): (Bridged, Option<ByteRate>),
        uplinks: channel::Receiver<NetworkStatus>,
        publish: channel::Sender<Vec<MachineAddress>>,
    ) -> Result<Self, MachineNetError> {
        let kernel = Kernel::open().map_err(|source| MachineNetError::Setting {
            setting: "netlink socket".to_owned(),
            source,
        })?;
        // The filter first: nothing is forwarded without it.
        nft::commit(&Batch::replace_table(Family::Inet, &ruleset::bridged::shared(BRIDGE))).await?;
        for setting in NOT_ROUTED {
            super::task::set_if_there(setting, "0")?;
        }
        let bridge = kernel.make_bridge().await?;
        let deaf = ruleset::bridged::deaf(BRIDGE);
        nft::commit(&Batch::replace_chain(Family::Netdev, &deaf)).await?;
        super::task::set_if_there(&format!("ipv6/conf/{BRIDGE}/disable_ipv6"), "1")?;
        // The node answers ARP for none of its addresses there.
        super::task::set_if_there(&format!("ipv4/conf/{BRIDGE}/arp_ignore"), "8")?;
        kernel.set_up(bridge, None).await?;
        let (tell, packets) = mpsc::channel(PACKETS);
        let mut task = Self {
            config,
            limit,
            kernel,
            bridge,
            plugged: None,
            guests: BTreeMap::new(),
            uplinks,
            publish,
            tell,
            packets,
        };
        task.take_over().await?;
        task.follow_uplinks().await;
        Ok(task)
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Request>) {
        let mut uplinks = self.uplinks.clone();
        loop {
            let deadline = self.guests.values().filter_map(|guest| guest.bindings.poll_timeout());
            let deadline = deadline.min();
            tokio::select! {
                request = inbox.recv() => match request {
                    Some(request) => self.handle(request).await,
                    None => return,
                },
                Ok(()) = uplinks.changed() => self.follow_uplinks().await,
                Some(seen) = self.packets.recv() => self.handle_packet(seen).await,
                () = sleep_until(deadline) => self.handle_timeout().await,
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

    async fn handle_packet(&mut self, seen: Seen) {
        let Some(guest) = self.guests.get_mut(&seen.machine) else { return };
        if seen.watched == Watched::Uses {
            guest.bindings.handle_use(&seen.frame);
            return;
        }
        let before = guest.bindings.leased();
        if seen.missed == Missed::Some {
            guest.bindings.handle_loss(Instant::now());
        }
        guest.bindings.handle_frame(Instant::now(), seen.way, &seen.frame);
        guest.speak(self.plugged);
        let after = guest.bindings.leased();
        if before == after {
            return;
        }
        let given = after.map(|leased| leased.address);
        let others = self.guests.iter_mut().filter(|(machine, _)| **machine != seen.machine);
        let mut changed = vec![seen.machine];
        for (machine, other) in others {
            // What the network gives to one is no longer another's.
            if given.is_some() && other.bindings.leased().map(|leased| leased.address) == given {
                other.bindings.forget_lease();
                changed.push(*machine);
            }
        }
        for machine in changed {
            self.settle(machine).await;
        }
    }

    async fn handle_timeout(&mut self) {
        let now = Instant::now();
        let due = |guest: &Guest| guest.bindings.poll_timeout().is_some_and(|at| at <= now);
        let due: Vec<MachineId> =
            self.guests.iter().filter(|(_, guest)| due(guest)).map(|(id, _)| *id).collect();
        for machine in due {
            let Some(mut guest) = self.guests.remove(&machine) else { continue };
            let others = &self.guests;
            let taken = |address| others.values().any(|other| other.bindings.has(address));
            let before = guest.bindings.clone();
            guest.bindings.handle_timeout(now, taken);
            guest.speak(self.plugged);
            let changed = !guest.bindings.is_same(&before);
            self.guests.insert(machine, guest);
            if changed {
                self.settle(machine).await;
            }
        }
    }

    /// Tells the kernel, and whoever listens, what a guest's addresses are now.
    async fn settle(&mut self, machine: MachineId) {
        let Some(guest) = self.guests.get_mut(&machine) else { return };
        let ipv4 = guest.bindings.leased().map(|leased| leased.address);
        guest.address.ipv4 = ipv4.unwrap_or(Ipv4Addr::UNSPECIFIED);
        let guest = &self.guests[&machine];
        let done = async {
            self.filter(&guest.address, &guest.bindings).await?;
            self.remember(guest.index, machine, &guest.bindings).await
        };
        if let Err(error) = done.await {
            let (error, interface) = (&error as &dyn std::error::Error, &guest.address.interface);
            tracing::error!(interface, error, "a machine's addresses are not let through");
        }
        self.publish_guests();
    }

    fn publish_guests(&self) {
        let known = self.guests.values().map(|guest| guest.address.clone()).collect();
        self.publish.send_replace(known);
    }

    /// Plugs the uplink in, once it is there and whenever it is another one.
    async fn follow_uplinks(&mut self) {
        let found = self.uplinks.borrow().interfaces.iter().find_map(|interface| {
            (interface.label == self.config.uplink).then_some(interface.index)
        });
        let Some(index) = found.filter(|index| self.plugged != Some(*index)) else { return };
        match self.kernel.plug(index, self.bridge, Port::Uplink).await {
            Ok(()) => {
                tracing::info!(uplink = self.config.uplink, "machines are bridged to it");
                self.plugged = Some(index);
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                let uplink = &self.config.uplink;
                tracing::error!(
                    uplink,
                    error,
                    "machines are not bridged; is the uplink a bridge's, or wireless?"
                );
            }
        }
    }

    async fn take_over(&mut self) -> Result<(), MachineNetError> {
        for link in self.kernel.links().await?.into_iter().filter(LinkFacts::is_tap) {
            let known = alias::parse(&link.alias, alias::uptime());
            // One that was not bridged gets its address from the provider's network from now on.
            let routed = || Some((address::parse_alias(&link.alias)?.0, alias::Known::default()));
            let Some((machine, known)) = known.or_else(routed) else {
                self.kernel.delete_link(link.index).await?;
                continue;
            };
            let mtu = u16::try_from(link.mtu).unwrap_or(*MTU.end());
            let hardware = address::hardware(machine);
            let leased = known.leased(Instant::now());
            let mut bound = rest::kept(&self.config.folder, machine);
            bound.retain(|address| !known.ipv6.contains(address));
            bound.extend(known.ipv6);
            let bindings = Bindings::new(hardware, leased, bound);
            match self.connect(machine, link.index, (mtu, bindings)).await {
                Ok(guest) => {
                    self.guests.insert(machine, guest);
                }
                // What the earlier agent set up still stands; one machine's trouble is not others'.
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(interface = link.name, error, "tap not taken over in full");
                }
            }
        }
        let machines: BTreeSet<MachineId> = self.guests.keys().copied().collect();
        rest::clean(&self.config.folder, &machines);
        self.publish_guests();
        Ok(())
    }

    async fn create(
        &mut self,
        machine: MachineId,
        queues: u32,
    ) -> Result<MachineNet, MachineNetError> {
        let interface = address::interface(machine);
        if let Some(guest) = self.guests.get_mut(&machine) {
            guest.bindings.handle_start();
            let address = guest.address.clone();
            let reopened = super::task::reopen(&self.kernel, &interface, queues);
            let (tap, more_queues) = reopened.await?;
            return Ok(MachineNet { tap, more_queues, address });
        }
        let mut others = self.guests.values().map(|guest| &guest.address);
        if let Some(owner) = others.find(|other| other.interface == interface) {
            return Err(MachineNetError::NameTaken { interface, owner: owner.machine });
        }
        let (tap, more_queues) = super::task::open(&interface, queues)?;
        match self.finish(machine, &interface).await {
            Ok(guest) => {
                let address = guest.address.clone();
                self.guests.insert(machine, guest);
                Ok(MachineNet { tap, more_queues, address })
            }
            Err(error) => {
                // Not more can be done than to try.
                if let Ok(index) = self.index(machine, &interface).await {
                    let _ = self.kernel.delete_link(index).await;
                }
                let _ = super::task::delete_chain(&interface).await;
                Err(error)
            }
        }
    }

    async fn finish(&self, machine: MachineId, interface: &str) -> Result<Guest, MachineNetError> {
        let index = self.index(machine, interface).await?;
        let bindings = Bindings::new(address::hardware(machine), None, Vec::new());
        let guest = self.connect(machine, index, (self.mtu(), bindings)).await?;
        // The alias comes last: a tap without one was not finished, and is removed at the start.
        self.remember(index, machine, &guest.bindings).await?;
        Ok(guest)
    }

    async fn index(&self, machine: MachineId, interface: &str) -> Result<u32, MachineNetError> {
        let links = self.kernel.links().await?;
        let link = links.iter().find(|link| link.name == interface);
        link.map(|link| link.index).ok_or(MachineNetError::Unknown { machine })
    }

    /// Gives a tap all that it needs; what it has already stays as it is.
    async fn connect(
        &self,
        machine: MachineId,
        index: u32,
        (mtu, bindings): (u16, Bindings),
    ) -> Result<Guest, MachineNetError> {
        let ipv4 = bindings.leased().map_or(Ipv4Addr::UNSPECIFIED, |leased| leased.address);
        let address = MachineAddress {
            machine,
            interface: address::interface(machine),
            mac: address::hardware(machine),
            ipv4,
            prefix: 32,
            gateway: Ipv4Addr::UNSPECIFIED,
            ipv6: None,
            mtu,
        };
        self.filter(&address, &bindings).await?;
        let interface = &address.interface;
        super::task::set_if_there(&format!("ipv6/conf/{interface}/disable_ipv6"), "1")?;
        let failed = |source| MachineNetError::Dhcp { interface: interface.clone(), source };
        let watch = Watch::start(machine, index, self.tell.clone()).map_err(failed)?;
        let port = match self.config.neighbours {
            Neighbours::Apart => Port::Apart,
            Neighbours::Together => Port::Together,
        };
        self.kernel.plug(index, self.bridge, port).await?;
        self.kernel.place(index, address.mac).await?;
        self.kernel.shape(index, self.limit).await?;
        self.kernel.set_up(index, Some(u32::from(mtu))).await?;
        Ok(Guest { address, index, bindings, _watch: watch })
    }

    async fn filter(
        &self,
        address: &MachineAddress,
        bindings: &Bindings,
    ) -> Result<(), MachineNetError> {
        let chain = ruleset::bridged::guest(&ruleset::bridged::Port {
            interface: address.interface.clone(),
            hardware: address.mac,
            ipv4: bindings.leased().map(|leased| leased.address),
            ipv6: bindings.ipv6(),
            limit: self.limit,
        });
        Ok(nft::commit(&Batch::replace_chain(Family::Netdev, &chain)).await?)
    }

    async fn remember(
        &self,
        index: u32,
        machine: MachineId,
        bindings: &Bindings,
    ) -> Result<(), MachineNetError> {
        let known = alias::Known::of(bindings, Instant::now());
        let rest = &known.ipv6[..known.ipv6.len().saturating_sub(alias::ROOM)];
        if let Err(error) = rest::keep(&self.config.folder, machine, rest) {
            let (folder, error) = (self.config.folder.display(), &error as &dyn std::error::Error);
            tracing::error!(%folder, error, "a restarted agent will not know all addresses of a machine");
        }
        let text = alias::write(machine, &known, alias::uptime());
        Ok(self.kernel.set_alias(index, &text).await?)
    }

    async fn delete(&mut self, machine: MachineId) -> Result<(), MachineNetError> {
        let Some(guest) = self.guests.get(&machine) else { return Ok(()) };
        let (index, interface) = (guest.index, guest.address.interface.clone());
        // Nothing enters without its chain's permission, so the tap goes first.
        self.kernel.delete_link(index).await?;
        self.guests.remove(&machine);
        // What stays is removed at the start.
        let _ = rest::keep(&self.config.folder, machine, &[]);
        super::task::delete_chain(&interface).await
    }

    /// The uplink's MTU: a larger frame would not pass it.
    fn mtu(&self) -> u16 {
        let uplinks = self.uplinks.borrow();
        let uplink = uplinks.interfaces.iter().find(|found| found.label == self.config.uplink);
        let mtu = uplink.and_then(|uplink| u16::try_from(uplink.mtu).ok()).unwrap_or(1500);
        mtu.clamp(*MTU.start(), *MTU.end())
    }
}

impl Guest {
    /// Asks the network in the guest's name whether somebody has its address, and tells why it has none.
    fn speak(&mut self, uplink: Option<u32>) {
        if let (Some(probe), Some(uplink)) = (self.bindings.poll_probe(Instant::now()), uplink)
            && let Err(error) = packet::send_frame(uplink, &probe)
        {
            tracing::debug!(interface = self.address.interface, %error, "ARP probe not sent");
        }
        while let Some(refusal) = self.bindings.poll_refusal() {
            let machine = self.address.machine;
            tracing::warn!(%machine, %refusal, "a machine gets no IPv4 address");
        }
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
