//! The task that owns the uplinks.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, watch as channel};

use super::{
    Delegation, Plan, StableSecret, addressing::Addressing, client::Running, client6::Running6,
    complaints::Complaints, conflicts::Conflicts, guard::Found, routers::Routers,
    solicit::Solicitor, watch::Watch,
};
use crate::{
    events,
    net::{
        Carrier, DocumentServer, NamedDocument, NetworkStatus,
        dhcp::client::{Client, Event, Lease},
        dhcp6::client as dhcp6,
        kernel::{self, Advertisements, Kernel, KernelError, Notices, Route},
        layout::{self, Layout},
        links::LinkFacts,
        rdnss::NameServers,
    },
};

/// Events of clients that may wait; clients wait when there are more.
const QUEUE: usize = 16;
/// The kernel is looked at this often although it tells of changes: a notice may get lost when
/// there are very many.
const LOOK: Duration = Duration::from_secs(30);
/// After a failure it is tried again this soon.
const RETRY: Duration = Duration::from_secs(5);
/// Pause between two looks at the gateways, when there are several uplinks.
pub(super) const PROBE: Duration = Duration::from_secs(2);
/// Rounds of steps before the rest is left to the next look. Four are needed at most: take away,
/// make, attach, adjust.
const ROUNDS: usize = 6;

/// Settings of an uplink below `net`, with `{}` for its name.
const SETTINGS: [(&str, &str); 6] = [
    ("ipv4/conf/{}/accept_redirects", "0"),
    ("ipv4/conf/{}/accept_source_route", "0"),
    ("ipv6/conf/{}/accept_redirects", "0"),
    ("ipv6/conf/{}/accept_source_route", "0"),
    // The gateway's address of machines is nobody's business out there.
    ("ipv4/conf/{}/arp_ignore", "1"),
    // With the first address of a subnet the kernel takes the later ones away, the new one among them,
    // unless it is told to promote one (Linux `Documentation/networking/ip-sysctl.rst`).
    ("ipv4/conf/{}/promote_secondaries", "1"),
];
/// Further settings for SLAAC. 2 accepts advertisements although the node forwards packets.
const SLAAC: [(&str, &str); 5] = [
    ("ipv6/conf/{}/disable_ipv6", "0"),
    ("ipv6/conf/{}/accept_ra", "2"),
    ("ipv6/conf/{}/autoconf", "1"),
    ("ipv6/conf/{}/use_tempaddr", "0"),
    // Routes that routers advertise (RFC 4191 §2.3), of any length: the kernel takes none by itself.
    ("ipv6/conf/{}/accept_ra_rt_info_max_plen", "128"),
];
/// Further settings for configured addresses.
const NO_SLAAC: [(&str, &str); 3] = [
    ("ipv6/conf/{}/disable_ipv6", "0"),
    ("ipv6/conf/{}/accept_ra", "0"),
    ("ipv6/conf/{}/autoconf", "0"),
];

pub(super) struct Task {
    pub(super) plan: Plan,
    plans: channel::Receiver<Plan>,
    secret: Option<StableSecret>,
    pub(super) kernel: Kernel,
    notices: Notices,
    advertisements: Advertisements,
    /// Name servers in router advertisements.
    advertised: NameServers,
    events: mpsc::Receiver<(u32, Event)>,
    send_events: mpsc::Sender<(u32, Event)>,
    events6: mpsc::Receiver<(u32, dhcp6::Event)>,
    send_events6: mpsc::Sender<(u32, dhcp6::Event)>,
    found: mpsc::Receiver<Found>,
    pub(super) send_found: mpsc::Sender<Found>,
    pub(super) uplinks: BTreeMap<u32, Uplink>,
    publish: channel::Sender<NetworkStatus>,
    /// Of a client; cleared by the next lease.
    pub(super) last_error: Option<String>,
    /// Of the last look.
    look_error: Option<String>,
    problems: Vec<String>,
    complaints: Complaints,
    next_look: Instant,
    next_probe: Instant,
}

pub(super) struct Uplink {
    pub(super) facts: LinkFacts,
    pub(super) addressing: Addressing,
    pub(super) client: Option<Running>,
    client6: Option<Running6>,
    solicitor: Option<Solicitor>,
    pub(super) lease: Option<Lease>,
    pub(super) lease6: Option<dhcp6::Lease>,
    /// Whether the kernel has been told of everything.
    pub(super) applied: Applied,
    pub(super) routes: Vec<Route>,
    pub(super) watch: Watch,
    /// Those that advertised themselves.
    pub(super) routers: Routers,
    /// Other hosts that have its IPv4 addresses.
    pub(super) conflicts: Conflicts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Applied {
    Whole,
    InPart,
}

impl Task {
    pub(super) fn start(
        mut plans: channel::Receiver<Plan>,
        secret: Option<StableSecret>,
        publish: channel::Sender<NetworkStatus>,
    ) -> io::Result<Self> {
        let (kernel, notices) = (Kernel::open()?, Notices::open()?);
        let (send_events, events) = mpsc::channel(QUEUE);
        let (send_events6, events6) = mpsc::channel(QUEUE);
        let (send_found, found) = mpsc::channel(QUEUE);
        let plan = plans.borrow_and_update().clone();
        Ok(Self {
            plan,
            plans,
            secret,
            kernel,
            notices,
            advertisements: Advertisements::open()?,
            advertised: NameServers::default(),
            events,
            send_events,
            events6,
            send_events6,
            found,
            send_found,
            uplinks: BTreeMap::new(),
            publish,
            last_error: None,
            look_error: None,
            problems: Vec::new(),
            complaints: Complaints::default(),
            next_look: Instant::now(),
            next_probe: Instant::now(),
        })
    }

    pub(super) async fn run(mut self) {
        loop {
            let looked = self.look().await;
            let now = Instant::now();
            let next = now + if looked.is_ok() { LOOK } else { RETRY };
            let complaint = self.complaints.poll_timeout().map(|due| due.max(now + RETRY));
            self.next_look = complaint.map_or(next, |due| due.min(next));
            self.look_error = looked.err().map(|error| told(&error));
            self.publish().await;
            let probe = if self.probes() || self.has_spare_router() {
                self.next_probe
            } else {
                self.next_look
            };
            tokio::select! {
                () = self.notices.next() => {}
                () = tokio::time::sleep_until(self.next_look.into()) => {}
                () = tokio::time::sleep_until(probe.into()) => {
                    self.next_probe = Instant::now() + PROBE;
                    if self.probes() {
                        let probed = self.probe().await;
                        self.note(probed);
                    }
                    if self.has_spare_router() {
                        let probed = self.probe_routers().await;
                        self.note(probed);
                    }
                }
                messages = self.advertisements.next() => {
                    self.advertised.handle_messages(Instant::now(), &messages);
                }
                Some((index, event)) = self.events.recv() => {
                    let done = self.handle_event(index, event).await;
                    self.note(done);
                }
                Some((index, event)) = self.events6.recv() => {
                    let done = self.handle_event6(index, event).await;
                    self.note(done);
                }
                Some(found) = self.found.recv() => self.handle_found(&found),
                Ok(()) = self.plans.changed() => {
                    self.plan = self.plans.borrow_and_update().clone();
                    self.last_error = None;
                }
            }
        }
    }

    /// Remembers a failure for the status. It is cleared by the next lease.
    fn note(&mut self, result: Result<(), KernelError>) {
        if let Err(error) = result {
            self.last_error = Some(told(&error));
        }
    }

    /// Looks which interfaces there are and goes on towards what is wanted; new uplinks are set up,
    /// others followed.
    async fn look(&mut self) -> Result<(), KernelError> {
        let (layout, failure) = self.lay_out().await?;
        let problems = layout.problems.iter().map(ToString::to_string);
        let problems = problems.chain(self.plan.misplaced(&layout.uplinks));
        let problems = problems.chain(self.undelegated());
        self.problems = problems.chain(self.conflicts()).collect();
        for reason in self.complaints.handle_look(Instant::now(), &self.problems) {
            eprintln!("{}", events::Event::Trouble { place: "network", reason });
        }
        let stale: Vec<u32> = self.uplinks.keys().copied().collect();
        for index in stale {
            let still = layout.uplinks.iter().any(|(_, link)| link.index == index);
            if !still {
                self.release(index).await;
            }
        }
        for (place, facts) in layout.uplinks {
            let addressing = self.plan.addressing(place, &facts);
            match self.uplinks.get_mut(&facts.index) {
                Some(uplink) if uplink.addressing == addressing => uplink.follow(facts),
                Some(_) => {
                    self.release(facts.index).await;
                    self.add(facts, addressing);
                }
                None => self.add(facts, addressing),
            }
        }
        self.ask_routers();
        self.start_missing_clients().await?;
        self.apply_again().await?;
        self.follow_routers().await?;
        failure.map_or(Ok(()), Err)
    }

    /// Returns what to do when a prefix for machines is wanted and no server delegated one.
    fn undelegated(&self) -> Option<String> {
        let mut leases = self.uplinks.values().filter_map(|uplink| uplink.lease6.as_ref());
        let has_one = leases.any(|lease| !lease.prefixes.is_empty());
        (self.plan.delegation == Delegation::Wanted && !has_one).then(|| {
            "machines.ipv6 is \"delegated\", and no DHCPv6 server delegates a prefix to this node; have the \
             provider's server do so (by the DUID that is 00030001 and the card's address), on an uplink whose \
             ipv6 is \"auto\" or \"dhcp\", or leave machines.ipv6 out"
                .to_owned()
        })
    }

    /// Makes the interfaces as wanted. A step that fails is tried again at the next look; what is
    /// there already is used meanwhile.
    async fn lay_out(&self) -> Result<(Layout, Option<KernelError>), KernelError> {
        let mut failure = None;
        for _ in 0..ROUNDS {
            let layout = self.planned().await?;
            if layout.actions.is_empty() {
                return Ok((layout, failure));
            }
            // Addresses are made when an interface is switched on, by the settings of that moment.
            for (place, link) in &layout.uplinks {
                if !self.uplinks.contains_key(&link.index) {
                    self.settle(link, &self.plan.addressing(*place, link));
                }
            }
            failure = None;
            for action in &layout.actions {
                match self.kernel.carry_out(action).await {
                    Ok(()) => tracing::info!(%action, "uplinks"),
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
            if failure.is_some() {
                break;
            }
        }
        Ok((self.planned().await?, failure))
    }

    /// Returns the next steps, after what the kernel has now.
    async fn planned(&self) -> Result<Layout, KernelError> {
        let current: BTreeSet<u32> = self.uplinks.keys().copied().collect();
        Ok(layout::plan(&self.plan.desired, &self.kernel.links().await?, &current))
    }

    /// Sets what the kernel does by itself.
    fn settle(&self, link: &LinkFacts, addressing: &Addressing) {
        let set = |name: &str, value: &str| {
            let name = name.replace("{}", &link.name);
            if let Err(error) = kernel::set(&name, value) {
                tracing::debug!(setting = name, %error, "not set");
            }
        };
        let further = if addressing.listens() { &SLAAC[..] } else { &NO_SLAAC };
        for (name, value) in SETTINGS.iter().chain(further) {
            set(name, value);
        }
        set("ipv6/conf/{}/ra_defrtr_metric", &addressing.metric.to_string());
        if let Some(StableSecret(secret)) = self.secret {
            set("ipv6/conf/{}/stable_secret", &Ipv6Addr::from(secret).to_string());
        }
        if addressing.ipv6 == types::uplinks::Ipv6Source::Off {
            set("ipv6/conf/{}/disable_ipv6", "1");
        }
    }

    fn add(&mut self, facts: LinkFacts, addressing: Addressing) {
        self.settle(&facts, &addressing);
        tracing::info!(interface = facts.name, "uplink");
        self.uplinks.insert(facts.index, Uplink::new(facts, addressing));
    }

    /// Asks the routers of each uplink once, when nobody has told its name servers: an earlier agent may have
    /// heard the advertisement.
    fn ask_routers(&mut self) {
        for (index, uplink) in &mut self.uplinks {
            let listens = uplink.addressing.listens() && uplink.facts.carrier == Carrier::Up;
            let knows = self.advertised.on(*index).next().is_some();
            if !listens || knows || uplink.solicitor.is_some() {
                continue;
            }
            match Solicitor::start(&uplink.facts) {
                Ok(solicitor) => uplink.solicitor = Some(solicitor),
                // Tried again at the next look.
                Err(error) => {
                    tracing::debug!(interface = uplink.facts.name, %error, "routers not asked");
                }
            }
        }
    }

    /// Uplinks that want DHCP have a client. One that could not be started is tried again at the
    /// next look.
    async fn start_missing_clients(&mut self) -> Result<(), KernelError> {
        let indexes: Vec<u32> = self.uplinks.keys().copied().collect();
        for index in indexes {
            // An address is there already when an earlier agent got it.
            let addresses = self.ipv4_of(index).await?;
            let Some(uplink) = self.uplinks.get_mut(&index) else { continue };
            let Some(hardware) = uplink.facts.hardware else { continue };
            let (facts, now) = (&uplink.facts, Instant::now());
            let wants = uplink.addressing.ipv4 == types::uplinks::Ipv4Source::Dhcp;
            if wants && uplink.client.is_none() {
                let previous = addresses.iter().find_map(|known| match known.assigned.address {
                    IpAddr::V4(address) => Some(address),
                    IpAddr::V6(_) => None,
                });
                let client = Client::new(hardware, previous, seed(), now);
                match Running::start(facts, client, self.send_events.clone()) {
                    Ok(running) => uplink.client = Some(running),
                    Err(error) => {
                        let text = format!("cannot open DHCP on {}: {error}", facts.name);
                        self.last_error = Some(text);
                    }
                }
            }
            let (advertised, lease6) = (uplink.facts.advertised, uplink.lease6.as_ref());
            let wanted = uplink.addressing.dhcp6(advertised, lease6);
            if wanted == uplink.client6.as_ref().map(Running6::wanted) {
                continue;
            }
            let Some(wanted) = wanted else { continue };
            let client = dhcp6::Client::new(hardware, wanted, seed(), now);
            match Running6::start(facts, client, self.send_events6.clone()) {
                Ok(running) => uplink.client6 = Some(running),
                Err(error) => {
                    let text = format!("cannot open DHCPv6 on {}: {error}", facts.name);
                    self.last_error = Some(text);
                }
            }
        }
        Ok(())
    }

    /// Whether there is a choice between uplinks.
    fn probes(&self) -> bool {
        let with = self.uplinks.values().filter(|uplink| uplink.gateway().is_some());
        with.count() > 1
    }

    /// Asks the gateways whether they are there, and prefers uplinks accordingly.
    async fn probe(&mut self) -> Result<(), KernelError> {
        let mut changed = Vec::new();
        for (index, uplink) in &mut self.uplinks {
            let before = uplink.watch.standing();
            match (uplink.gateway(), uplink.facts.carrier) {
                (Some(_), Carrier::Down) => uplink.watch.handle_no_carrier(),
                (Some(gateway), Carrier::Up) => {
                    let found = self.kernel.probe(*index, gateway).await?;
                    uplink.watch.handle_look(found);
                }
                (None, _) => {}
            }
            if uplink.watch.standing() != before {
                tracing::info!(uplink = uplink.addressing.label, reach = ?uplink.watch.reach(), "gateway");
                changed.push(*index);
            }
        }
        for index in changed {
            self.sync_routes(index).await?;
        }
        Ok(())
    }

    async fn publish(&mut self) {
        let addresses = self.kernel.addresses().await.unwrap_or_default();
        let routes = self.kernel.default_routes().await.unwrap_or_default();
        self.advertised.handle_timeout(Instant::now());
        let mut by_rank: Vec<&Uplink> = self.uplinks.values().collect();
        by_rank.sort_by_key(|uplink| (uplink.watch.standing() as u8, uplink.addressing.metric));
        let mut ntp: Vec<IpAddr> = Vec::new();
        let mut dns: Vec<IpAddr> = Vec::new();
        let mut documents = Vec::new();
        let mut delegated = Vec::new();
        for uplink in by_rank {
            dns.extend(&uplink.addressing.dns);
            if let Some(lease) = &uplink.lease {
                ntp.extend(lease.ntp.iter().copied().map(IpAddr::V4));
                dns.extend(lease.dns.iter().copied().map(IpAddr::V4));
                documents.extend(lease.document.iter().map(|url| NamedDocument {
                    server: DocumentServer::Ipv4(lease.server),
                    url: url.clone(),
                }));
            }
            if let Some(lease) = &uplink.lease6 {
                ntp.extend(lease.ntp.iter().copied().map(IpAddr::V6));
                dns.extend(lease.dns.iter().copied().map(IpAddr::V6));
                delegated.extend_from_slice(&lease.prefixes);
                documents.extend(lease.document.iter().map(|url| NamedDocument {
                    server: DocumentServer::Ipv6(uplink.facts.name.clone()),
                    url: url.clone(),
                }));
            }
            dns.extend(self.advertised.on(uplink.facts.index).map(IpAddr::V6));
        }
        if !self.plan.dns.is_empty() {
            dns.clone_from(&self.plan.dns);
        }
        let status = NetworkStatus {
            interfaces: self
                .uplinks
                .values()
                .map(|uplink| uplink.status(&addresses, &self.advertised))
                .collect(),
            gateways: distinct(routes.iter().map(|route| route.gateway)),
            dns: distinct(dns.into_iter()),
            ntp: distinct(ntp.into_iter()),
            documents,
            delegated,
            last_error: self.look_error.clone().or_else(|| self.last_error.clone()),
            problems: self.problems.clone(),
        };
        self.publish.send_if_modified(|current| {
            let changed = *current != status;
            *current = status;
            changed
        });
        // Behind it: whoever waits for an address uses it at once.
        self.guard(&addresses).await;
    }
}

impl Uplink {
    fn new(facts: LinkFacts, addressing: Addressing) -> Self {
        Self {
            facts,
            addressing,
            client: None,
            client6: None,
            solicitor: None,
            lease: None,
            lease6: None,
            applied: Applied::InPart,
            routes: Vec::new(),
            watch: Watch::default(),
            routers: Routers::default(),
            conflicts: Conflicts::default(),
        }
    }

    fn follow(&mut self, facts: LinkFacts) {
        if self.facts.hardware != facts.hardware {
            self.ask_anew();
        }
        let is_back = self.facts.carrier == Carrier::Down && facts.carrier == Carrier::Up;
        if is_back {
            if let Some(client) = &self.client {
                client.carrier_is_back();
            }
            if let Some(client) = &self.client6 {
                client.carrier_is_back();
            }
            self.conflicts.handle_carrier();
        }
        if is_back || self.facts.power != facts.power {
            // Switched off, an interface loses routes and IPv6 addresses.
            self.applied = Applied::InPart;
            self.routes.clear();
        }
        self.facts = facts;
    }

    /// Ends the clients: they speak in the name of a hardware address that the interface has no longer. A
    /// bond takes that of its first card when the card joins. As in a restarted agent, what is there stays
    /// until others know the node by its new address.
    fn ask_anew(&mut self) {
        (self.client, self.client6) = (None, None);
        if self.lease.take().is_some() {
            self.applied = Applied::InPart;
            self.routes.clear();
        }
    }

    pub(super) fn gateway(&self) -> Option<IpAddr> {
        self.addressing.gateway(self.lease.as_ref())
    }
}

pub(super) fn told(error: &KernelError) -> String {
    let text = format!("{error}: {}", error.source);
    tracing::warn!(error = text, "uplinks");
    text
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
