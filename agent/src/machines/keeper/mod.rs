//! The task that owns the machines: takes commands, observes, plans, and has actions executed.
//!
//! `commands` is what others ask, `progress` what init and running actions tell, `actions` what
//! the plan wants, `accounts` what was used, `attach` what comes and goes while a machine runs,
//! `deadlines` what ends machines without this task, `drives` when what a renter wrote is erased, `floor` what
//! time it was, `liveness` who is at work, `room` what is free of the disk.

mod accounts;
mod actions;
mod attach;
mod commands;
mod deadlines;
mod drives;
mod floor;
mod liveness;
mod progress;
mod room;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    time::Duration,
};

use lease::{
    SigningKey,
    document::Lease,
    hardware::{Attach, Hardware},
    threshold::VerifiedLease,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::AbortHandle,
};
use tokio_util::sync::CancellationToken;
use types::{
    config::NodeSpec,
    ids::MachineId,
    node::{Bdf, PciDevice},
    units::UnixSeconds,
};

use super::{
    attach::Refusal,
    devices::Devices,
    execute::{Progress, Tools},
    init::Notice,
    plan::{Power, Process, Record, Released, Seen, Work},
    routed::Routed,
    store::{Store, StoreError},
};
use crate::{
    events::Event,
    inventory::Capacity,
    spawn::Known,
    sys::clock::boot_ms,
    time::{Clock, Standing},
};

pub use attach::Leaving;
pub use commands::RefusedError;
pub use drives::Erasing;

/// How often the clock is looked at: leases end on the second.
const TICK: Duration = Duration::from_millis(200);

/// Commands and progress that may wait.
const QUEUE: usize = 64;

/// What is asked of the keeper.
#[derive(Debug)]
pub enum Command {
    /// Make a machine.
    Create(Box<Order>, oneshot::Sender<Result<View, RefusedError>>),
    /// Accept a later lease.
    Renew(Box<VerifiedLease>, oneshot::Sender<Result<View, RefusedError>>),
    /// Turn on or off.
    Power(MachineId, Switch, oneshot::Sender<Result<View, RefusedError>>),
    /// End it and destroy its disk.
    Delete(MachineId, oneshot::Sender<Result<View, RefusedError>>),
    /// Attach a disk or a device.
    Attach(MachineId, Attach, oneshot::Sender<Result<Result<View, Refusal>, RefusedError>>),
    /// Detach, or erase, what was attached under a name.
    Detach(
        MachineId,
        String,
        Leaving,
        oneshot::Sender<Result<Result<View, Refusal>, RefusedError>>,
    ),
    /// Reset a quarantined device once more, erase it if it is a drive, and offer it again if it answers.
    Recover(Bdf, oneshot::Sender<Result<(), RefusedError>>),
}

/// A machine to make.
#[derive(Debug, Clone)]
pub struct Order {
    /// Its lease, verified.
    pub lease: Lease,
    /// What it starts from.
    pub image: lease::api::Image,
    /// What is chosen of the hardware, checked.
    pub hardware: Hardware,
    /// Who asked.
    pub gateway: types::ids::NodeId,
}

/// How a machine is turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// On.
    Start,
    /// Off, by the power button first.
    Stop,
    /// Off and on again at once.
    Restart,
}

/// A machine as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// What is kept of it.
    pub record: Record,
    /// What it does.
    pub state: State,
    /// Its address.
    pub address: Option<Ipv4Addr>,
    /// Whether its process runs and answers nothing.
    pub silent: bool,
}

/// What a machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It is being started, or will be.
    Starting,
    /// It runs.
    Running,
    /// It was asked to stop.
    Stopping,
    /// It is stopped and can be started.
    Stopped,
    /// Its lease is over; its disk is kept.
    Ended,
}

impl State {
    /// Returns the state's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Ended => "ended",
        }
    }
}

/// Everything others may know.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// Machines.
    pub machines: Vec<View>,
    /// Devices.
    pub devices: Vec<PciDevice>,
    /// Processors and memory that are free.
    pub free: Capacity,
    /// Disk space that is free, in MiB.
    pub disk_mib: u64,
    /// Why the store keeps nothing; empty while it does.
    pub forgetful: String,
}

/// A handle to the keeper. Clones share it.
#[derive(Debug, Clone)]
pub struct Machines {
    commands: mpsc::Sender<Command>,
    snapshot: watch::Receiver<Snapshot>,
}

impl Machines {
    /// Returns machines that nobody keeps, as a test describes them. What turns or ends one is acknowledged.
    #[cfg(test)]
    pub(crate) fn shown(snapshot: Snapshot) -> Self {
        let (commands, mut asked) = mpsc::channel(1);
        let machines = Self { commands, snapshot: watch::channel(snapshot).1 };
        let shown = machines.snapshot();
        tokio::spawn(async move {
            while let Some(command) = asked.recv().await {
                if let Command::Power(id, _, answer) | Command::Delete(id, answer) = command {
                    let known =
                        shown.borrow().machines.iter().find(|it| it.record.lease.id == id).cloned();
                    let _ = answer.send(known.ok_or(RefusedError::Unknown { machine: id }));
                }
            }
        });
        machines
    }

    /// Returns everything as it is now, and whenever it changes.
    pub fn snapshot(&self) -> watch::Receiver<Snapshot> {
        self.snapshot.clone()
    }

    /// Returns one machine.
    pub fn get(&self, machine: MachineId) -> Option<View> {
        let snapshot = self.snapshot.borrow();
        snapshot.machines.iter().find(|view| view.record.lease.id == machine).cloned()
    }

    /// Asks the keeper and waits for its answer.
    pub async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<T, RefusedError>>) -> Command,
    ) -> Result<T, RefusedError> {
        let (sender, answer) = oneshot::channel();
        self.commands.send(command(sender)).await.map_err(|_| RefusedError::Draining)?;
        answer.await.map_err(|_| RefusedError::Draining)?
    }
}

/// What the keeper starts with.
#[derive(Debug)]
pub struct KeeperConfig {
    /// The node's configuration.
    pub spec: NodeSpec,
    /// The node's key, which signs receipts.
    pub key: SigningKey,
    /// What executes.
    pub tools: Tools,
    /// What remembers. Shared with the control interface, which keeps answers in it.
    pub store: std::sync::Arc<Store>,
    /// Latest time that an earlier agent recorded: until then, machines ran as it said.
    pub last_seen: UnixSeconds,
    /// What tells the time.
    pub clock: std::sync::Arc<Clock>,
    /// Devices as the inventory's rules see them, already bound.
    pub devices: Vec<PciDevice>,
    /// The server's size.
    pub capacity: Capacity,
    /// Memory of it that is set aside as huge pages, in MiB.
    pub huge_mib: u64,
    /// What init tells.
    pub notices: mpsc::Receiver<Notice>,
    /// What init runs.
    pub known: Vec<Known>,
}

#[derive(Debug)]
struct Entry {
    record: Record,
    seen: Seen,
    voice: liveness::Voice,
    storage: liveness::Storage,
    /// Carries out the latest start.
    task: Option<AbortHandle>,
    /// Has it give up what it waits for of others.
    abandoned: CancellationToken,
    /// What is being attached, by its name; the same for each.
    plugging: BTreeMap<String, CancellationToken>,
}

impl Entry {
    fn new(record: Record) -> Self {
        Self {
            record,
            seen: Seen::default(),
            voice: liveness::Voice::default(),
            storage: liveness::Storage::default(),
            task: None,
            abandoned: CancellationToken::new(),
            plugging: BTreeMap::new(),
        }
    }
}

#[derive(Debug)]
struct Keeper {
    config: KeeperConfig,
    machines: BTreeMap<MachineId, Entry>,
    devices: Devices,
    /// Devices whose renters may have left routes in the switches between GPUs.
    routed: Routed,
    progress: mpsc::Sender<Progress>,
    publish: watch::Sender<Snapshot>,
    draining: bool,
    /// See [`Snapshot::forgetful`].
    forgetful: String,
    /// Space of content that no machine needs, in MiB.
    spare_mib: u64,
    /// What the time rested on when it was kept last.
    kept: Standing,
    /// Drives that hold what a renter wrote and wait to be erased.
    waiting: BTreeSet<Bdf>,
    /// Tells when somebody set the clock.
    calendar: accounts::Calendar,
}

/// Starts the keeper; machines that run already are taken over.
pub fn start(config: KeeperConfig) -> Result<Machines, StoreError> {
    let (commands, inbox) = mpsc::channel(QUEUE);
    let (progress, reports) = mpsc::channel(QUEUE);
    let (publish, snapshot) = watch::channel(Snapshot::default());
    let devices = Devices::new(config.devices.clone());
    let routed = Routed::recall(&config.tools.root, devices.list());
    let calendar = accounts::Calendar::new(config.clock.now_ms(), boot_ms());
    let mut keeper = Keeper {
        config,
        machines: BTreeMap::new(),
        devices,
        routed,
        progress,
        publish,
        draining: false,
        forgetful: String::new(),
        spare_mib: 0,
        kept: Standing::Seen,
        waiting: BTreeSet::new(),
        calendar,
    };
    keeper.adopt()?;
    keeper.publish();
    tokio::spawn(keeper.run(inbox, reports));
    Ok(Machines { commands, snapshot })
}

impl Keeper {
    fn adopt(&mut self) -> Result<(), StoreError> {
        for record in self.config.store.machines()? {
            let id = record.lease.id;
            if record.released == Released::No {
                self.devices.lease(&record.lease.shape.devices, id);
            }
            self.machines.insert(id, Entry::new(record));
        }
        for known in std::mem::take(&mut self.config.known) {
            let machine = known.machine;
            match (self.machines.get_mut(&machine), known.ended) {
                (Some(entry), None) => {
                    let places = entry.record.placement.as_ref();
                    let places = places.map_or(&[][..], |placement| &placement.memory);
                    self.config.tools.pages.adopt(machine, places);
                    entry.seen.process = Process::Running { pid: known.pid };
                    eprintln!("{}", Event::MachineAdopted { machine, pid: known.pid });
                }
                // An end that was settled is no news: what came after it counts, as a renter's start.
                (Some(entry), Some(status)) if entry.record.meter.is_running() => {
                    entry.seen.process = Process::Ended { status };
                }
                (Some(_), Some(_)) => {}
                (None, None) => self.kill(machine, "unknown"),
                (None, Some(_)) => {}
            }
        }
        let (now, last_seen) = (self.config.clock.now(), self.config.last_seen);
        let mut resumed = Vec::new();
        for (id, entry) in &mut self.machines {
            let process = entry.seen.process;
            let ran = entry.record.meter.is_running();
            accounts::resume(&mut entry.record, process, now, last_seen);
            if matches!(process, Process::Running { .. }) && !ran {
                resumed.push(*id);
            }
        }
        // The next agent takes an end for news when this one saw it run.
        resumed.into_iter().for_each(|machine| self.keep(machine));
        self.keep_promises();
        self.keep_drives();
        let running = |entry: &Entry| matches!(entry.seen.process, Process::Running { .. });
        let running: Vec<MachineId> =
            self.machines.iter().filter(|(_, e)| running(e)).map(|(id, _)| *id).collect();
        running.into_iter().for_each(|machine| self.plug_all(machine));
        Ok(())
    }

    async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Command>,
        mut reports: mpsc::Receiver<Progress>,
    ) {
        let mut tick = tokio::time::interval(TICK);
        let mut floor = tokio::time::interval(floor::INTERVAL);
        let mut tell = tokio::time::interval(liveness::TELL);
        let mut ask = tokio::time::interval(liveness::ASK);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                _ = floor.tick() => {
                    self.keep_time();
                    self.make_room();
                }
                _ = tell.tick() => self.give_sign(),
                _ = ask.tick() => self.ask_machines(),
                Some(command) = inbox.recv() => self.handle_command(command).await,
                Some(report) = reports.recv() => self.handle_progress(report),
                notice = self.config.notices.recv() => match notice {
                    Some(notice) => self.handle_notice(notice).await,
                    None => lost("the socket to init is closed"),
                },
            }
            self.act().await;
            self.publish();
        }
    }

    /// Says when the store begins to fail, and when it works again: once each, not every time.
    fn judge_store(&mut self, kept: Result<(), StoreError>) {
        let reason = match (kept, self.forgetful.is_empty()) {
            (Err(error), true) => {
                let cure = match error {
                    StoreError::Full { .. } => "make room on STATE",
                    StoreError::Open { .. }
                    | StoreError::File { .. }
                    | StoreError::Failed { .. }
                    | StoreError::Document { .. }
                    | StoreError::Closed => "restart the node with a disk that works",
                };
                let error = crate::init::boot::chain(&error);
                self.forgetful = format!(
                    "nothing is remembered any more: {error}; machines go on and end with their leases, \
                     nothing new is accepted: {cure}"
                );
                self.forgetful.clone()
            }
            (Ok(()), false) => {
                self.forgetful.clear();
                "what happens is remembered again".to_owned()
            }
            (Err(_), false) | (Ok(()), true) => return,
        };
        eprintln!("{}", Event::Trouble { place: "disk", reason });
    }

    /// Commits what is known of a machine.
    fn keep(&self, machine: MachineId) {
        let Some(entry) = self.machines.get(&machine) else { return };
        if let Err(error) = self.config.store.put_machine(&entry.record) {
            trouble("store", &error);
        }
    }

    fn view(&self, machine: MachineId) -> Result<View, RefusedError> {
        let entry = self.machines.get(&machine).ok_or(RefusedError::Unknown { machine })?;
        let address =
            self.config.tools.networks.adopt(machine).ok().and_then(|net| net.known_ipv4());
        let state = match (entry.seen.process, entry.record.power) {
            _ if entry.record.released == Released::Yes => State::Ended,
            _ if entry.seen.busy == Some(Work::Start) => State::Starting,
            (Process::Running { .. }, Power::On) if entry.seen.pressed.is_none() => State::Running,
            (Process::Running { .. }, _) => State::Stopping,
            (Process::Ended { .. }, _) => State::Stopping,
            (Process::Absent, Power::On) => State::Starting,
            (Process::Absent, Power::Off) => State::Stopped,
        };
        let running = matches!(entry.seen.process, Process::Running { .. });
        let silent = running && entry.voice.is_silent();
        Ok(View { record: entry.record.clone(), state, address, silent })
    }

    fn publish(&self) {
        let snapshot = Snapshot {
            machines: self.machines.keys().filter_map(|id| self.view(*id).ok()).collect(),
            devices: self.routed.shown(self.devices.list()),
            free: self.free(),
            disk_mib: self.free_disk_mib(),
            forgetful: self.forgetful.clone(),
        };
        self.publish.send_if_modified(|old| {
            let changed = *old != snapshot;
            *old = snapshot;
            changed
        });
    }
}

fn trouble(place: &'static str, error: &dyn std::error::Error) {
    let reason = crate::init::boot::chain(error);
    eprintln!("{}", Event::Trouble { place, reason });
}

/// Without init the agent can do nothing; a new agent gets a new socket.
fn lost(reason: &str) -> ! {
    eprintln!("{}", Event::Trouble { place: "init", reason: reason.to_owned() });
    std::process::exit(1)
}
