//! The task that owns the uplinks.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, watch};

use super::{Plan, Source, client::Running};
use crate::net::{
    AssignedAddress, Carrier, InterfaceStatus, LeaseStatus, NetworkStatus,
    dhcp::client::{Client, Event, Lease, Loss},
    kernel::{self, AddressFacts, Advertisements, Kernel, KernelError, Notices, Route},
    links::{self, LinkFacts},
    rdnss::NameServers,
};

/// Events of clients that may wait; clients wait when there are more.
const QUEUE: usize = 16;
/// The kernel is looked at this often although it tells of changes: a notice may get lost when
/// there are very many.
const LOOK: Duration = Duration::from_secs(30);
/// After a failure it is tried again this soon.
const RETRY: Duration = Duration::from_secs(5);
/// Metric of the routes of the interface with index 0; the interface's index is added, so that the
/// order is stable and no two interfaces have the same.
const METRIC: u32 = 1024;

/// Settings of an uplink below `net`, with `{}` for its name.
const SETTINGS: [(&str, &str); 3] = [
    ("ipv4/conf/{}/accept_redirects", "0"),
    ("ipv4/conf/{}/accept_source_route", "0"),
    // The gateway's address of machines is nobody's business out there.
    ("ipv4/conf/{}/arp_ignore", "1"),
];
/// Further settings for SLAAC. 2 accepts advertisements although the node forwards packets.
const SLAAC: [(&str, &str); 4] = [
    ("ipv6/conf/{}/disable_ipv6", "0"),
    ("ipv6/conf/{}/accept_ra", "2"),
    ("ipv6/conf/{}/autoconf", "1"),
    ("ipv6/conf/{}/use_tempaddr", "0"),
];
/// Further settings for configured addresses.
const NO_SLAAC: [(&str, &str); 3] = [
    ("ipv6/conf/{}/disable_ipv6", "0"),
    ("ipv6/conf/{}/accept_ra", "0"),
    ("ipv6/conf/{}/autoconf", "0"),
];

pub(super) struct Task {
    plan: Plan,
    kernel: Kernel,
    notices: Notices,
    advertisements: Advertisements,
    /// Name servers in router advertisements.
    advertised: NameServers,
    events: mpsc::Receiver<(u32, Event)>,
    send_events: mpsc::Sender<(u32, Event)>,
    uplinks: BTreeMap<u32, Uplink>,
    publish: watch::Sender<NetworkStatus>,
    last_error: Option<String>,
    next_look: Instant,
}

struct Uplink {
    facts: LinkFacts,
    client: Option<Running>,
    lease: Option<Lease>,
    /// Whether the kernel has been told of the lease.
    applied: Applied,
    routes: Vec<Route>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Applied {
    Whole,
    InPart,
}

impl Task {
    pub(super) fn start(plan: Plan, publish: watch::Sender<NetworkStatus>) -> io::Result<Self> {
        let (kernel, notices) = Kernel::open_with_notices()?;
        let (send_events, events) = mpsc::channel(QUEUE);
        Ok(Self {
            plan,
            kernel,
            notices,
            advertisements: Advertisements::open()?,
            advertised: NameServers::default(),
            events,
            send_events,
            uplinks: BTreeMap::new(),
            publish,
            last_error: None,
            next_look: Instant::now(),
        })
    }

    pub(super) async fn run(mut self) {
        loop {
            let looked = self.look().await;
            self.next_look = Instant::now() + if looked.is_ok() { LOOK } else { RETRY };
            self.note(looked);
            self.publish().await;
            tokio::select! {
                () = self.notices.next() => {}
                () = tokio::time::sleep_until(self.next_look.into()) => {}
                messages = self.advertisements.next() => {
                    self.advertised.handle_messages(Instant::now(), &messages);
                }
                Some((index, event)) = self.events.recv() => {
                    let done = self.handle_event(index, event).await;
                    self.note(done);
                }
            }
        }
    }

    /// Remembers a failure for the status. It is cleared by the next lease.
    fn note(&mut self, result: Result<(), KernelError>) {
        if let Err(error) = result {
            let text = format!("{error}: {}", error.source);
            tracing::warn!(error = text, "uplinks");
            self.last_error = Some(text);
        }
    }

    /// Looks which interfaces there are; new ones are set up, others followed.
    async fn look(&mut self) -> Result<(), KernelError> {
        let all = self.kernel.links().await?;
        let mut found: Vec<LinkFacts> =
            links::uplinks(&all, self.plan.interface.as_deref()).cloned().collect();
        if let Source::Static { .. } = self.plan.source {
            // Configured addresses belong to one interface.
            found.truncate(1);
        }
        self.uplinks.retain(|index, _| found.iter().any(|link| link.index == *index));
        for facts in found {
            match self.uplinks.get_mut(&facts.index) {
                Some(uplink) => uplink.follow(facts),
                None => self.add(facts).await?,
            }
        }
        self.apply_again().await?;
        self.start_missing_clients().await
    }

    async fn add(&mut self, facts: LinkFacts) -> Result<(), KernelError> {
        let further = match self.plan.source {
            Source::Auto => &SLAAC[..],
            Source::Static { .. } => &NO_SLAAC,
        };
        for (name, value) in SETTINGS.iter().chain(further) {
            let name = name.replace("{}", &facts.name);
            if let Err(error) = kernel::set(&name, value) {
                tracing::debug!(setting = name, %error, "not set");
            }
        }
        self.kernel.set_up(facts.index, None).await?;
        let mut uplink = Uplink::new(facts.clone());
        if let Source::Static { addresses, gateways } = self.plan.source.clone() {
            self.configure(&mut uplink, &addresses, &gateways).await?;
        }
        tracing::info!(interface = facts.name, "uplink");
        self.uplinks.insert(facts.index, uplink);
        Ok(())
    }

    /// Every uplink has a client, unless addresses are configured. One that could not be started
    /// is tried again at the next look.
    async fn start_missing_clients(&mut self) -> Result<(), KernelError> {
        if self.plan.source != Source::Auto {
            return Ok(());
        }
        let missing = self.uplinks.values().filter(|uplink| uplink.client.is_none());
        for facts in missing.map(|uplink| uplink.facts.clone()).collect::<Vec<_>>() {
            let Some(hardware) = facts.hardware else { continue };
            // An address is there already when an earlier agent got it.
            let addresses = self.ipv4_of(facts.index).await?;
            let previous = addresses.iter().find_map(|known| ipv4(known.assigned.address));
            let client = Client::new(hardware, previous, seed(), Instant::now());
            let started = Running::start(&facts, client, self.send_events.clone());
            match (started, self.uplinks.get_mut(&facts.index)) {
                (Ok(running), Some(uplink)) => uplink.client = Some(running),
                (Ok(_), None) => {}
                (Err(error), _) => {
                    self.last_error = Some(format!("cannot open DHCP on {}: {error}", facts.name));
                }
            }
        }
        Ok(())
    }

    async fn configure(
        &self,
        uplink: &mut Uplink,
        addresses: &[AssignedAddress],
        gateways: &[IpAddr],
    ) -> Result<(), KernelError> {
        let index = uplink.facts.index;
        for address in addresses {
            self.kernel.add_address(index, *address, None).await?;
        }
        for (known, gateway) in gateways.iter().enumerate() {
            let later = u32::try_from(known).unwrap_or(0) * 256;
            let any: IpAddr = match gateway {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            };
            let route = Route {
                to: any,
                prefix: 0,
                gateway: Some(*gateway),
                source: None,
                index,
                metric: METRIC + index + later,
            };
            self.kernel.add_route(&route).await?;
            uplink.routes.push(route);
        }
        Ok(())
    }

    async fn handle_event(&mut self, index: u32, event: Event) -> Result<(), KernelError> {
        let Some(uplink) = self.uplinks.get_mut(&index) else { return Ok(()) };
        let name = uplink.facts.name.clone();
        match event {
            Event::Leased(lease) => {
                tracing::info!(interface = name, address = %lease.address, "DHCP lease");
                uplink.lease = Some(lease.clone());
                uplink.applied = Applied::InPart;
                self.last_error = None;
                self.apply(index, &lease).await
            }
            Event::Lost(loss) => {
                let why = match loss {
                    Loss::Expired => "the DHCP lease ended and no server renewed it",
                    Loss::Refused => "the DHCP server withdrew the address",
                };
                tracing::warn!(interface = name, why, "DHCP lease lost");
                uplink.lease = None;
                self.last_error = Some(format!("{name}: {why}"));
                self.withdraw(index).await
            }
        }
    }

    async fn apply(&mut self, index: u32, lease: &Lease) -> Result<(), KernelError> {
        let address = lease.address.address();
        let assigned = AssignedAddress { address: address.into(), prefix: lease.address.length() };
        let left = lease.expires.map(|end| end.saturating_duration_since(Instant::now()));
        // Rounded up: the client is the one that decides.
        let valid = left.map(|left| u32::try_from(left.as_secs() + 1).unwrap_or(u32::MAX));
        if let Some(mtu) = lease.mtu {
            self.kernel.set_up(index, Some(u32::from(mtu))).await?;
        }
        self.kernel.add_address(index, assigned, valid).await?;
        for other in self.ipv4_of(index).await? {
            if other.assigned != assigned {
                self.kernel.delete_address(&other).await?;
            }
        }
        let routes: Vec<Route> = lease
            .routes
            .iter()
            .map(|(to, gateway)| Route {
                to: to.network().into(),
                prefix: to.length(),
                gateway: (!gateway.is_unspecified()).then_some((*gateway).into()),
                source: Some(address),
                index,
                metric: METRIC + index,
            })
            .collect();
        let old = self
            .uplinks
            .get_mut(&index)
            .map(|uplink| std::mem::replace(&mut uplink.routes, routes.clone()));
        for stale in old.unwrap_or_default().iter().filter(|old| !routes.contains(old)) {
            self.kernel.delete_route(stale).await?;
        }
        for route in &routes {
            self.kernel.add_route(route).await?;
        }
        if let Some(uplink) = self.uplinks.get_mut(&index) {
            uplink.applied = Applied::Whole;
        }
        Ok(())
    }

    /// Tries again what the kernel did not take before.
    async fn apply_again(&mut self) -> Result<(), KernelError> {
        let pending = self.uplinks.iter().filter(|(_, uplink)| uplink.applied == Applied::InPart);
        let pending: Vec<(u32, Lease)> =
            pending.filter_map(|(index, uplink)| Some((*index, uplink.lease.clone()?))).collect();
        for (index, lease) in pending {
            self.apply(index, &lease).await?;
        }
        Ok(())
    }

    /// Takes away what DHCP gave; the routes go with the address.
    async fn withdraw(&mut self, index: u32) -> Result<(), KernelError> {
        let routes = self.uplinks.get_mut(&index).map(|uplink| std::mem::take(&mut uplink.routes));
        for route in routes.unwrap_or_default() {
            self.kernel.delete_route(&route).await?;
        }
        for address in self.ipv4_of(index).await? {
            self.kernel.delete_address(&address).await?;
        }
        Ok(())
    }

    /// The IPv4 addresses of an interface, but for those it gave itself.
    async fn ipv4_of(&self, index: u32) -> Result<Vec<AddressFacts>, KernelError> {
        let mut all = self.kernel.addresses().await?;
        all.retain(|known| {
            known.index == index
                && ipv4(known.assigned.address).is_some_and(|address| !address.is_link_local())
        });
        Ok(all)
    }

    async fn publish(&mut self) {
        let addresses = self.kernel.addresses().await.unwrap_or_default();
        let routes = self.kernel.default_routes().await.unwrap_or_default();
        let leases = || self.uplinks.values().filter_map(|uplink| uplink.lease.as_ref());
        let ntp = distinct(leases().flat_map(|lease| &lease.ntp).copied().map(IpAddr::V4));
        let dns = if self.plan.dns.is_empty() {
            self.advertised.handle_timeout(Instant::now());
            let by_dhcp = leases().flat_map(|lease| &lease.dns).copied().map(IpAddr::V4);
            let advertised = self.uplinks.keys().flat_map(|index| self.advertised.on(*index));
            distinct(by_dhcp.chain(advertised.map(IpAddr::V6)))
        } else {
            self.plan.dns.clone()
        };
        let status = NetworkStatus {
            interfaces: self.uplinks.values().map(|uplink| uplink.status(&addresses)).collect(),
            gateways: distinct(routes.iter().map(|route| route.gateway)),
            dns,
            ntp,
            last_error: self.last_error.clone(),
        };
        self.publish.send_if_modified(|current| {
            let changed = *current != status;
            *current = status;
            changed
        });
    }
}

impl Uplink {
    fn new(facts: LinkFacts) -> Self {
        let (client, lease, routes) = (None, None, Vec::new());
        Self { facts, client, lease, applied: Applied::Whole, routes }
    }

    fn follow(&mut self, facts: LinkFacts) {
        let is_back = self.facts.carrier == Carrier::Down && facts.carrier == Carrier::Up;
        if let (true, Some(client)) = (is_back, &self.client) {
            client.carrier_is_back();
        }
        self.facts = facts;
    }

    fn status(&self, addresses: &[AddressFacts]) -> InterfaceStatus {
        let own = addresses.iter().filter(|known| known.index == self.facts.index);
        InterfaceStatus {
            name: self.facts.name.clone(),
            index: self.facts.index,
            hardware: self.facts.hardware.unwrap_or(crate::net::HardwareAddress([0; 6])),
            carrier: self.facts.carrier,
            mtu: self.facts.mtu,
            addresses: own.map(|known| known.assigned).collect(),
            lease: self.lease.as_ref().map(|lease| LeaseStatus {
                address: lease.address,
                server: lease.server,
                expires: lease.expires,
            }),
        }
    }
}

fn ipv4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

fn distinct(addresses: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let mut seen = Vec::new();
    for address in addresses {
        if !seen.contains(&address) {
            seen.push(address);
        }
    }
    seen
}

/// Transaction numbers need to differ between nodes that boot at once; when the kernel gives no
/// randomness, the hardware address in each message still tells clients apart.
fn seed() -> u64 {
    getrandom::u64().unwrap_or_default()
}
