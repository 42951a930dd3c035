//! The agent's start: parts are made here and handed to each other. Every part that fails is
//! reported and shown; the others go on.

mod chores;
mod identity;
mod listen;
mod offered;
mod orphans;
mod process;
mod server;
mod space;
mod trust;
mod unconfigured;
mod volumes;

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ed25519_dalek::SigningKey;
use overlay::{Inbox, Overlay, OverlayConfig, Role};
use sha2::{Digest, Sha256};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Notify, mpsc, watch},
};
use types::{
    config::{MachineNetwork, NodeSpec, parse_prefix},
    ids::NodeId,
    status::Setting,
    units::UnixSeconds,
};

use crate::{
    assign::lent,
    attest::Attestor,
    config::{self, Found, settings},
    console::{self, Page},
    control::{Control, Parts, authority::Authority},
    events::Event,
    floors::Keeper,
    gpu::guests::GuestReadings,
    init::boot::chain,
    install::session,
    inventory,
    local::{Local, LocalConfig, Serving},
    logs::Logs,
    machines::{
        content::Cache,
        disk::Places,
        execute::Tools,
        init::{Init, Notice},
        keeper::{self, KeeperConfig, Machines},
        pages::HeldPages,
        store::Store,
    },
    net::{
        InterfaceStatus, Ipv4Prefix, MachineNetworks, Resolver, Uplinks,
        machines::{
            MachineNetworksConfig,
            bridged::Bridged,
            ipv6::{Exit, Ipv6Net, Supply},
        },
        ruleset::ByteRate,
        uplinks::{Delegation, StableSecret},
    },
    seal::locked,
    spawn::Console,
    tasks,
    time::{Clock, ClockConfig, NtsConfig, nts::establish::Roots},
    updates,
};

pub use self::process::{Start, main};
use self::{chores::Chores, server::Server};

pub(crate) const STATE: &str = "/state";
const DATA: &str = "/data";
/// Keys of machines' disks, below STATE.
const DISK_KEYS: &str = "disk-keys";
/// The file in STATE with the node's key.
pub(crate) const NODE_KEY: &str = "node.key";

/// When begins what nobody waits for: sooner, it would only make the start longer. Less than a start that fails
/// takes to be given up.
const AFTER_START: Duration = Duration::from_secs(2);

/// Returns the release that runs: the image's, or the one that this program was built for where there
/// is no image.
pub fn release() -> String {
    let image = updates::running_release().map(|release| release.to_string());
    image.unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned())
}

fn fail(place: &'static str, error: &(dyn std::error::Error + 'static)) -> ! {
    eprintln!("{}", Event::Trouble { place, reason: chain(error) });
    std::process::exit(1)
}

async fn run(init: Init, notices: mpsc::Receiver<Notice>) {
    if let Some(reason) = locked::reason(Path::new("/")) {
        locked::wait(&init, &reason).await;
    }
    volumes::settle();
    config::kept::settle(Path::new(STATE));
    remind_firmware();
    let (key, lost) = match identity::own_key().await {
        Ok(found) => found,
        Err(reason) => {
            // Nobody knows the node's name, so this is all there is to show.
            let (pages, page) = watch::channel(Page { release: release(), ..Page::default() });
            tokio::spawn(console::run(page));
            give_up(&init, reason, &pages).await
        }
    };
    let node = NodeId::from_bytes(key.verifying_key().to_bytes());
    eprintln!("{}", Event::Node { node, release: release() });
    let (views, chores) = start_views(node);
    let pages = &views.pages;
    tokio::spawn(space::watch(&[STATE, DATA]));
    // Files get their names whatever becomes of this start.
    tokio::spawn(volumes::watch());
    let found = config::settled(Path::new("/")).await;
    tokio::spawn(tell_unreadable());
    if let Some(reason) = lost {
        // The document may be another one by now.
        if let Some(spec) = volumes::asks_for_another_node(&found) {
            install(&found, spec, &init, pages).await;
        }
        give_up(&init, reason, pages).await
    }
    let (served, mut end) = match &found.spec {
        Ok(spec) => {
            install(&found, spec, &init, pages).await;
            let mut end = told_to_end();
            let started = async {
                match serve(spec, key, node, (&init, notices), &views).await {
                    Ok(served) => served,
                    Err(reason) => give_up(&init, reason, pages).await,
                }
            };
            // A node that is told to end while it starts ends no less properly.
            let served = tokio::select! {
                served = started => Some(served),
                () = ended(&mut end) => None,
            };
            tokio::spawn(give_way(found.source.clone()));
            (served, end)
        }
        Err(error) => {
            give_console(&init, Console::Screen);
            let uplinks = unconfigured::show((node, &found.source), error, &init, notices, &views);
            tokio::spawn(unconfigured::find_another(found, uplinks, pages.clone()));
            (None, told_to_end())
        }
    };
    chores.begin();
    ended(&mut end).await;
    if let Some((overlay, store)) = served {
        overlay.leave().await;
        if let Err(error) = store.close() {
            eprintln!("{}", Event::Trouble { place: "state", reason: chain(&error) });
        }
    }
    // init tells the agent to end when the node goes down, and at no other time.
    chores.end().await;
}

/// Has firmware remember which drives renters had.
fn remind_firmware() {
    if let Err(error) = lent::remind(Path::new("/")) {
        let reason =
            format!("firmware does not remember which drives renters had: {}", chain(&error));
        eprintln!("{}", Event::Trouble { place: "devices", reason });
    }
}

/// Tells of volumes that are called as one with a configuration, and cannot be read. They count for nothing, but
/// somebody meant them all the same; so nothing waits for it.
async fn tell_unreadable() {
    tokio::time::sleep(AFTER_START).await;
    let told = tokio::task::spawn_blocking(|| {
        for error in config::unreadable(Path::new("/")) {
            eprintln!("{}", Event::Trouble { place: "configuration", reason: chain(&error) });
        }
    });
    told.await.expect("nothing in it panics, and nothing cancels it");
}

/// Does what the configuration wants before the node serves: keys for firmware, and an installation, after
/// which it does not return.
async fn install(found: &Found, spec: &NodeSpec, init: &Init, pages: &watch::Sender<Page>) {
    show_config(found, spec, pages);
    trust::settle(spec).await;
    if spec.install.is_some() {
        give_console(init, Console::Agent);
        session::attempt(spec, &found.document, init, pages).await;
    }
    give_console(init, Console::Screen);
}

/// Says which configuration is in use.
fn show_config(found: &Found, spec: &NodeSpec, pages: &watch::Sender<Page>) {
    let (source, name) = (found.source.to_string(), spec.name.clone());
    eprintln!("{}", Event::Config { source, name });
    let settings = tell_settings(found, spec);
    pages.send_modify(|page| {
        page.name.clone_from(&spec.name);
        page.config = found.source.to_string();
        page.settings = settings;
    });
}

/// Shows the node to whoever looks. Its log is read with the chores.
fn start_views(node: NodeId) -> (Views, Chores) {
    let (pages, page) =
        watch::channel(Page { node: node.to_string(), release: release(), ..Page::default() });
    tokio::spawn(console::run(page.clone()));
    let (logs, reader) = Logs::new();
    let chores = Chores::new(logs.clone(), reader, pages.clone());
    let local = Local::start(LocalConfig {
        node,
        release: release(),
        logs,
        pages: page,
        root: PathBuf::from("/"),
    });
    (Views { pages, local }, chores)
}

/// Shows why the node cannot start, and what becomes of machines that run. The page is drawn; then init
/// starts the agent again, which is the cure for what passes.
async fn give_up(init: &Init, reason: String, pages: &watch::Sender<Page>) -> ! {
    eprintln!("{}", Event::Trouble { place: "start", reason: reason.clone() });
    pages.send_modify(|page| page.error.clone_from(&reason));
    orphans::watch_over(init, &reason, pages).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    std::process::exit(1)
}

/// Ends the agent when a volume is found after the node started with another document: init starts it
/// again, and then the volume's counts.
async fn give_way(source: config::Source) {
    if config::superseded(Path::new("/"), &source).await {
        std::process::exit(0)
    }
}

/// Tells each value of the configuration with its source; the log gets those that are no defaults.
fn tell_settings(found: &Found, spec: &NodeSpec) -> Vec<Setting> {
    let source = found.source.to_string();
    let settings = settings::list(&found.document, spec, &source);
    for Setting { key, value, .. } in settings.iter().filter(|said| said.source == source) {
        let (key, value) = (key.clone(), value.clone());
        eprintln!("{}", Event::ConfigValue { key, value, source: source.clone() });
    }
    settings
}

/// What shows the node to whoever looks.
struct Views {
    pages: watch::Sender<Page>,
    local: Local,
}

/// Says who speaks on the first console. Without init nobody does, and the agent ends soon.
fn give_console(init: &Init, console: Console) {
    if let Err(error) = init.give_console(console) {
        eprintln!("{}", Event::Trouble { place: "screen", reason: chain(&error) });
    }
}

/// Tells when the node goes down, from now on; until then the signal ends this process at once.
fn told_to_end() -> watch::Receiver<bool> {
    let mut signal = match signal(SignalKind::terminate()) {
        Ok(signal) => signal,
        Err(error) => fail("signals", &error),
    };
    let (tell, told) = watch::channel(false);
    tokio::spawn(async move {
        signal.recv().await;
        tell.send_replace(true);
    });
    told
}

/// Waits until the node goes down.
async fn ended(told: &mut watch::Receiver<bool>) {
    told.wait_for(|told| *told).await.expect("the sender waits for the signal, and says it");
}

/// Starts everything. Returns what is left and closed at the end.
async fn serve(
    spec: &NodeSpec,
    key: SigningKey,
    node: NodeId,
    (init, notices): (&Init, mpsc::Receiver<Notice>),
    Views { pages, local }: &Views,
) -> Result<(Overlay, Arc<Store>), String> {
    // The network takes longest to answer, so it is asked first.
    let kept = tasks::network::Keeper::load(Path::new(STATE), &spec.network);
    let uplinks = Uplinks::start_with(kept.network(), Some(stable_secret(&key)));
    let uplinks = Arc::new(uplinks.map_err(|e| chain(&e))?);
    local.tell_network(uplinks.status());
    let Server { devices, huge_mib, store, floors } = server::look_around(spec, init).await?;
    let seen = store.floor().map_err(|e| chain(&e))?;
    let confirmed = store.confirmed().map_err(|e| chain(&e))?;
    let agreed = store.agreed().map_err(|e| chain(&e))?.max(floors.floors().time);
    let clock = Arc::new(start_clock(spec, [seen, confirmed, agreed], &uplinks));
    let networks = Arc::new(start_networks(spec, &key, &uplinks).await?);
    listen::address(spec.overlay.listen, init, pages).await;
    let (overlay, inbox) = start_overlay(spec, &key).await?;
    let notice = watch_network(kept, spec, &uplinks, &overlay);
    let tools = tools(spec, init, &networks, &overlay)?;
    let attestor = Attestor::new(key.clone(), PathBuf::from("/"));
    let machines = keeper::start(KeeperConfig {
        spec: spec.clone(),
        key,
        tools: tools.clone(),
        store: Arc::clone(&store),
        last_seen: seen,
        clock: Arc::clone(&clock),
        devices,
        capacity: inventory::capacity(Path::new("/")),
        huge_mib,
        notices,
        known: init.list().await.map_err(|e| chain(&e))?,
    })
    .map_err(|e| chain(&e))?;
    let (words, shelf) =
        start_updates((spec, node), (&tools, &machines, floors), (&uplinks, &clock), pages);
    let control = Control::new(Parts {
        node,
        spec: spec.clone(),
        machines: machines.clone(),
        store: Arc::clone(&store),
        clock: Arc::clone(&clock),
        networks,
        updates: words,
        shelf,
        authority: Authority::new(spec, Arc::clone(&store), clock.now()).map_err(|e| chain(&e))?,
        attestor,
        root: PathBuf::from("/"),
    });
    let first = Arc::new(Notify::new());
    tokio::spawn(tasks::overlay::serve(inbox, overlay.clone(), control.clone(), first.clone()));
    tokio::spawn(tasks::overlay::publish(overlay.clone(), control, first));
    tokio::spawn(tasks::overlay::follow_network(overlay.clone(), uplinks.status()));
    let serving = Serving {
        spec: spec.clone(),
        machines: machines.clone(),
        overlay: overlay.clone(),
        clock: Arc::clone(&clock),
        readings: GuestReadings::start(),
    };
    local.tell_serving(serving);
    let count = machines.snapshot().borrow().machines.len();
    eprintln!("{}", Event::AgentReady { machines: count });
    let shown = Shown { uplinks, notice, machines, overlay: overlay.clone(), clock };
    tokio::spawn(show(pages.clone(), shown));
    Ok((overlay, store))
}

/// Returns what machines are made with.
fn tools(
    spec: &NodeSpec,
    init: &Init,
    networks: &Arc<MachineNetworks>,
    overlay: &Overlay,
) -> Result<Tools, String> {
    Ok(Tools {
        init: init.clone(),
        networks: Arc::clone(networks),
        overlay: overlay.clone(),
        cache: Cache::open(&Path::new(DATA).join("content")).map_err(|e| chain(&e))?,
        disks: Places { data: PathBuf::from(DATA), keys: Path::new(STATE).join(DISK_KEYS) },
        root: PathBuf::from("/"),
        cpus: offered::host_cpus(spec),
        pages: HeldPages::default(),
    })
}

/// Starts to look after slots and updates; what operators say about them goes into the sender.
fn start_updates(
    (spec, node): (&NodeSpec, NodeId),
    (tools, machines, floors): (&Tools, &Machines, Keeper),
    (uplinks, clock): (&Arc<Uplinks>, &Arc<Clock>),
    pages: &watch::Sender<Page>,
) -> (mpsc::Sender<updates::Word>, Arc<updates::Shelf>) {
    updates::start(updates::Parts {
        updates: spec.updates.clone(),
        node,
        init: tools.init.clone(),
        machines: machines.clone(),
        floors,
        overlay: tools.overlay.clone(),
        alone: spec.overlay.seeds.is_empty(),
        uplinks: Arc::clone(uplinks),
        clock: Arc::clone(clock),
        pages: pages.clone(),
    })
}

async fn start_overlay(spec: &NodeSpec, key: &SigningKey) -> Result<(Overlay, Inbox), String> {
    let started = Overlay::start(OverlayConfig {
        key: key.clone(),
        listen: spec.overlay.listen,
        seeds: spec.overlay.seeds.iter().map(|seed| (seed.node, seed.address)).collect(),
        role: Role::Provider,
    });
    let (overlay, inbox) = started.await.map_err(|error| chain(&error))?;
    eprintln!("{}", Event::OverlayStarted { port: overlay.local_addr().port() });
    Ok((overlay, inbox))
}

/// Brings the last good network back when the configured one does not reach the overlay.
fn watch_network(
    kept: tasks::network::Keeper,
    spec: &NodeSpec,
    uplinks: &Arc<Uplinks>,
    overlay: &Overlay,
) -> watch::Receiver<Option<String>> {
    let (tell, notice) = watch::channel(None);
    let (alone, overlay, network) =
        (spec.overlay.seeds.is_empty(), overlay.clone(), uplinks.status());
    // Without seeds nobody can be reached; then a gateway is enough.
    let is_reached = move || match alone {
        true => {
            let network = network.borrow();
            network.is_online() && !network.gateways.is_empty()
        }
        false => !overlay.members().is_empty(),
    };
    tokio::spawn(kept.run(Arc::clone(uplinks), is_reached, tell));
    notice
}

/// The secret of the node's IPv6 addresses: of its key, so that it lasts as long.
fn stable_secret(key: &SigningKey) -> StableSecret {
    let digest = Sha256::new()
        .chain_update(b"holdfast interface identifiers")
        .chain_update(key.as_bytes())
        .finalize();
    let mut secret = [0; 16];
    secret.copy_from_slice(&digest[..16]);
    StableSecret(secret)
}

/// Where the prefix of machines is kept that a server delegated, as long as their taps are there.
const DELEGATED: &str = "/run/holdfast/delegated";
/// Where bridged machines' addresses are kept while the host runs, as their taps are.
const ADDRESSES: &str = "/run/holdfast/addresses";

async fn start_networks(
    spec: &NodeSpec,
    key: &SigningKey,
    uplinks: &Uplinks,
) -> Result<MachineNetworks, String> {
    let subnet: Ipv4Prefix = spec.machines.subnet.parse().map_err(|error| chain(&error))?;
    let limit = spec.machines.net_mbit.map(ByteRate::from_mbit);
    let StableSecret(secret) = stable_secret(key);
    let [a, b, c, d, e, ..] = secret;
    let ipv6 = match spec.machines.ipv6.as_deref() {
        None => Some(Supply::Fixed(Ipv6Net::private([a, b, c, d, e]))),
        Some(types::config::DELEGATED) => {
            uplinks.ask_for_prefix(Delegation::Wanted);
            Some(Supply::Delegated(DELEGATED.into()))
        }
        Some(text) => match parse_prefix(text) {
            Some((IpAddr::V6(prefix), length)) => {
                Ipv6Net::routed(prefix, length).map(Supply::Fixed)
            }
            Some((IpAddr::V4(_), _)) | None => None,
        },
    };
    let exit = match spec.machines.network {
        MachineNetwork::Nat => Exit::Masquerade,
        MachineNetwork::Routed | MachineNetwork::Bridged => Exit::Routed,
    };
    let bridged = match (spec.machines.network, &spec.machines.uplink) {
        (MachineNetwork::Bridged, Some(uplink)) => {
            let (uplink, neighbours) = (uplink.clone(), spec.machines.neighbours);
            Some(Bridged { uplink, neighbours, folder: ADDRESSES.into() })
        }
        _ => None,
    };
    let (reachable, inbound) = (Vec::new(), spec.machines.inbound);
    let config = MachineNetworksConfig { subnet, reachable, exit, inbound, limit, ipv6, bridged };
    MachineNetworks::start(config, uplinks.status()).await.map_err(|error| chain(&error))
}

fn start_clock(
    spec: &NodeSpec,
    [seen, confirmed, agreed]: [UnixSeconds; 3],
    uplinks: &Uplinks,
) -> Clock {
    let resolver: Resolver = uplinks.resolver();
    let servers = spec.time.ntp.clone();
    let given = spec.time.nts_roots.as_ref().map(|text| Roots::from_pem(text));
    let given = given.and_then(|roots| {
        let tell = |error| {
            eprintln!("{}", Event::Trouble { place: "time", reason: chain(&error) });
        };
        roots.map_err(tell).ok()
    });
    let nts = (!spec.time.nts.is_empty()).then(|| NtsConfig {
        servers: spec.time.nts.clone(),
        roots: given.unwrap_or_else(Roots::public),
    });
    let network = uplinks.status();
    Clock::start(ClockConfig { seen, confirmed, agreed, servers, nts, network, resolver })
}

/// What the status page is about.
struct Shown {
    uplinks: Arc<Uplinks>,
    notice: watch::Receiver<Option<String>>,
    machines: Machines,
    overlay: Overlay,
    clock: Arc<Clock>,
}

/// Keeps the status page right.
async fn show(pages: watch::Sender<Page>, shown: Shown) {
    let Shown { uplinks, notice, machines, overlay, clock } = shown;
    let mut network = uplinks.status();
    let mut snapshot = machines.snapshot();
    let mut tick = tokio::time::interval(Duration::from_secs(2));
    let mut online = Vec::new();
    loop {
        let status = network.borrow_and_update().clone();
        let addresses: Vec<_> = status.addresses().collect();
        for address in addresses.iter().filter(|address| !online.contains(*address)) {
            eprintln!("{}", Event::Online { address: *address });
        }
        online.clone_from(&addresses);
        let now = snapshot.borrow_and_update().clone();
        let forgetful = Some(now.forgetful).filter(|reason| !reason.is_empty());
        let trouble = forgetful.or(status.last_error);
        let trouble = trouble.or_else(|| clock.status().borrow().last_error.clone());
        let notice = notice.borrow().clone();
        let page = Page {
            addresses: addresses.iter().map(ToString::to_string).collect(),
            network: notice.iter().chain(&status.problems).cloned().collect(),
            uplinks: status.interfaces.iter().map(InterfaceStatus::describe).collect(),
            members: overlay.members().len(),
            devices: now.devices,
            machines: now.machines,
            error: trouble.unwrap_or_default(),
            ..pages.borrow().clone()
        };
        pages.send_if_modified(|old| {
            let changed = *old != page;
            *old = page;
            changed
        });
        tokio::select! {
            _ = tick.tick() => {}
            _ = network.changed() => {}
            _ = snapshot.changed() => {}
        }
    }
}
