//! The task that owns the machines: takes commands, observes, plans, and has actions executed.

use std::{collections::BTreeMap, net::Ipv4Addr, time::Duration};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::AbortHandle,
};
use types::{
    config::NodeSpec,
    ids::MachineId,
    node::{DeviceState, PciDevice},
    units::UnixSeconds,
};

use super::{
    devices::Devices,
    disk,
    execute::{self, Progress, Tools},
    init::Notice,
    plan::{
        self, Action, Failed, MAX_ATTEMPTS, Policy, Power, Process, Record, Released, Seen,
        TimeTrust, Work,
    },
    sandbox,
    store::{Store, StoreError},
    vmm,
};
use crate::{
    assign::AssignError,
    events::Event,
    inventory::Capacity,
    inventory::rules::{self, DeviceError},
    spawn::{Known, UIDS},
    time::Clock,
};

/// How often the clock is looked at: leases end on the second.
const TICK: Duration = Duration::from_millis(200);

/// How often the time is recorded.
const FLOOR_INTERVAL: Duration = Duration::from_secs(5);

/// Commands and progress that may wait.
const QUEUE: usize = 64;

/// What is asked of the keeper.
#[derive(Debug)]
pub enum Command {
    /// Make a machine.
    Create(Box<Order>, oneshot::Sender<Result<View, RefusedError>>),
    /// Accept a later lease.
    Renew(Box<plan::Terms>, oneshot::Sender<Result<View, RefusedError>>),
    /// Turn on or off.
    Power(MachineId, Switch, oneshot::Sender<Result<View, RefusedError>>),
    /// End it and destroy its disk.
    Delete(MachineId, oneshot::Sender<Result<View, RefusedError>>),
}

/// A machine to make.
#[derive(Debug, Clone)]
pub struct Order {
    /// Its lease, verified.
    pub terms: plan::Terms,
    /// What it starts from.
    pub image: plan::Image,
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

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RefusedError {
    #[error("there is no machine {machine} on this node")]
    Unknown { machine: MachineId },
    #[error("machine {machine} exists already")]
    Exists { machine: MachineId },
    #[error(
        "lease {machine} has serial {found}; serial {known} was accepted before, and a later one is needed"
    )]
    Serial { machine: MachineId, found: u64, known: u64 },
    #[error("the lease covers {start} to {end} (Unix seconds); it is {now}")]
    Time { start: u64, end: u64, now: u64 },
    #[error("the machine wants {wanted} {what}; {free} are free on this node")]
    Room { what: &'static str, wanted: u64, free: u64 },
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("a renewal keeps renter, shape and node; {what} differs")]
    Changed { what: &'static str },
    #[error("the node goes down")]
    Draining,
    #[error("the node cannot remember it: {0}")]
    Store(#[from] StoreError),
    #[error("the machine's process did not do it: {0}")]
    Vmm(#[from] vmm::VmmError),
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
}

/// A handle to the keeper. Clones share it.
#[derive(Debug, Clone)]
pub struct Machines {
    commands: mpsc::Sender<Command>,
    snapshot: watch::Receiver<Snapshot>,
}

impl Machines {
    /// Returns everything as it is now, and whenever it changes.
    pub fn snapshot(&self) -> watch::Receiver<Snapshot> {
        self.snapshot.clone()
    }

    /// Returns one machine.
    pub fn get(&self, machine: MachineId) -> Option<View> {
        let snapshot = self.snapshot.borrow();
        snapshot.machines.iter().find(|view| view.record.terms.id == machine).cloned()
    }

    /// Asks the keeper and waits for its answer.
    pub async fn ask(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<View, RefusedError>>) -> Command,
    ) -> Result<View, RefusedError> {
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
    /// What executes.
    pub tools: Tools,
    /// What remembers. Shared with the control interface, which keeps answers in it.
    pub store: std::sync::Arc<Store>,
    /// What tells the time.
    pub clock: std::sync::Arc<Clock>,
    /// Devices as the inventory's rules see them, already bound.
    pub devices: Vec<PciDevice>,
    /// The server's size.
    pub capacity: Capacity,
    /// What init tells.
    pub notices: mpsc::Receiver<Notice>,
    /// What init runs.
    pub known: Vec<Known>,
}

#[derive(Debug)]
struct Entry {
    record: Record,
    seen: Seen,
    task: Option<AbortHandle>,
    delete: bool,
}

#[derive(Debug)]
struct Keeper {
    config: KeeperConfig,
    machines: BTreeMap<MachineId, Entry>,
    devices: Devices,
    progress: mpsc::Sender<Progress>,
    publish: watch::Sender<Snapshot>,
    draining: bool,
}

/// Starts the keeper; machines that run already are taken over.
pub fn start(config: KeeperConfig) -> Result<Machines, StoreError> {
    let (commands, inbox) = mpsc::channel(QUEUE);
    let (progress, reports) = mpsc::channel(QUEUE);
    let (publish, snapshot) = watch::channel(Snapshot::default());
    let devices = Devices::new(config.devices.clone());
    let mut keeper =
        Keeper { config, machines: BTreeMap::new(), devices, progress, publish, draining: false };
    keeper.adopt()?;
    keeper.publish();
    tokio::spawn(keeper.run(inbox, reports));
    Ok(Machines { commands, snapshot })
}

impl Keeper {
    fn adopt(&mut self) -> Result<(), StoreError> {
        for record in self.config.store.machines()? {
            let id = record.terms.id;
            if record.released == Released::No {
                self.devices.lease(&record.terms.shape.devices, id);
            }
            let entry = Entry { record, seen: Seen::default(), task: None, delete: false };
            self.machines.insert(id, entry);
        }
        for known in std::mem::take(&mut self.config.known) {
            let machine = known.machine;
            match (self.machines.get_mut(&machine), known.ended) {
                (Some(entry), None) => {
                    entry.seen.process = Process::Running { pid: known.pid };
                    eprintln!("{}", Event::MachineAdopted { machine, pid: known.pid });
                }
                (Some(entry), Some(status)) => entry.seen.process = Process::Ended { status },
                (None, None) => self.kill(machine, "unknown"),
                (None, Some(_)) => {}
            }
        }
        Ok(())
    }

    async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Command>,
        mut reports: mpsc::Receiver<Progress>,
    ) {
        let mut tick = tokio::time::interval(TICK);
        let mut floor = tokio::time::interval(FLOOR_INTERVAL);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                _ = floor.tick() => self.keep_time(),
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

    fn keep_time(&self) {
        if let Err(error) = self.config.store.raise_floor(self.config.clock.now()) {
            trouble("store", &error);
        }
        if let Err(error) = self.config.tools.init.alive() {
            trouble("init", &error);
        }
    }

    async fn handle_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Exited(machine, status) => {
                eprintln!("{}", Event::MachineExited { machine, status: status.to_string() });
                if let Some(entry) = self.machines.get_mut(&machine) {
                    if entry.seen.busy == Some(Work::Start) {
                        entry.task.take().inspect(AbortHandle::abort);
                        entry.seen.busy = None;
                    }
                    entry.seen.process = Process::Ended { status };
                }
            }
            Notice::ShuttingDown(_) => {
                self.draining = true;
                let running: Vec<_> = self
                    .machines
                    .iter()
                    .filter(|(_, entry)| matches!(entry.seen.process, Process::Running { .. }))
                    .map(|(id, _)| *id)
                    .collect();
                for machine in running {
                    press(machine, "shutdown");
                }
            }
            Notice::Lost(error) => lost(&error.to_string()),
        }
    }

    fn handle_progress(&mut self, report: Progress) {
        match report {
            Progress::Spawned(machine, pid) => {
                if let Some(entry) = self.machines.get_mut(&machine)
                    && entry.seen.busy == Some(Work::Start)
                {
                    entry.seen.process = Process::Running { pid };
                }
            }
            Progress::Running(machine, pid, took) => {
                let Some(entry) = self.machines.get_mut(&machine) else { return };
                if entry.seen.busy != Some(Work::Start) {
                    return;
                }
                entry.seen.busy = None;
                entry.seen.failures = 0;
                entry.record.note(self.config.clock.now(), "started");
                entry.record.failed = Failed::No;
                entry.record.last_stop = String::new();
                let ms = took.as_millis();
                eprintln!("{}", Event::MachineStarted { machine, pid, ms });
                let facts = sandbox::facts(&self.config.tools.root.join("proc"), pid);
                eprintln!("{}", Event::MachineSandbox { machine, facts });
                self.keep(machine);
            }
            Progress::Failed(machine, error) => self.handle_failed(machine, &error),
            Progress::Released(machine, results) => self.handle_released(machine, results),
        }
    }

    fn handle_failed(&mut self, machine: MachineId, error: &execute::StartError) {
        let now = self.config.clock.now();
        let reason = crate::init::boot::chain(error);
        eprintln!("{}", Event::MachineFailed { machine, reason: reason.clone() });
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.seen.busy = None;
        entry.seen.failures += 1;
        entry.seen.failed = now;
        entry.record.note(now, format!("not started: {reason}"));
        entry.record.last_stop = reason;
        entry.record.failed = Failed::Yes;
        if error.is_final() || entry.seen.failures >= MAX_ATTEMPTS {
            entry.record.power = Power::Off;
            entry.seen.failures = 0;
        }
        let running = matches!(entry.seen.process, Process::Running { .. });
        self.keep(machine);
        if running {
            self.kill(machine, "not-started");
        }
    }

    fn handle_released(
        &mut self,
        machine: MachineId,
        results: Vec<(types::node::Bdf, Result<Duration, AssignError>)>,
    ) {
        for (address, result) in results {
            let state = match result {
                Ok(took) => {
                    eprintln!("{}", Event::DeviceReset { address, ms: took.as_millis() });
                    DeviceState::Free
                }
                Err(error) => {
                    let reason = crate::init::boot::chain(&error);
                    eprintln!("{}", Event::DeviceQuarantined { address, reason: reason.clone() });
                    DeviceState::Quarantined { reason }
                }
            };
            self.devices.set(address, state);
        }
        let now = self.config.clock.now();
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.seen.busy = None;
        entry.record.released = Released::Yes;
        entry.record.note(now, "ended: devices and network taken back");
        let late_s = now.since(entry.record.terms.end);
        eprintln!("{}", Event::MachineEnded { machine, late_s });
        let delete = entry.delete;
        self.keep(machine);
        if delete {
            self.destroy(machine, "renter");
        }
    }

    /// Commits what is known of a machine.
    fn keep(&self, machine: MachineId) {
        let Some(entry) = self.machines.get(&machine) else { return };
        if let Err(error) = self.config.store.put_machine(&entry.record, None) {
            trouble("store", &error);
        }
    }

    /// Plans for every machine and carries out what is due, until nothing is.
    async fn act(&mut self) {
        let now = self.config.clock.now();
        let policy = Policy {
            grace_s: self.config.spec.machines.grace_s,
            retain_s: self.config.spec.machines.retain_s,
            time: if self.config.clock.status().borrow().sources > 0 {
                TimeTrust::Confirmed
            } else {
                TimeTrust::Alone
            },
        };
        let due: Vec<_> = self
            .machines
            .iter()
            .filter_map(|(id, entry)| {
                Some((*id, plan::plan(now, &entry.record, &entry.seen, policy)?))
            })
            .collect();
        for (machine, action) in due {
            self.execute(now, machine, action);
        }
    }

    fn execute(&mut self, now: UnixSeconds, machine: MachineId, action: Action) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        match action {
            Action::Start if self.draining => {}
            Action::Start => {
                entry.seen = Seen {
                    busy: Some(Work::Start),
                    failures: entry.seen.failures,
                    warned: entry.seen.warned,
                    ..Seen::default()
                };
                let (tools, record) = (self.config.tools.clone(), entry.record.clone());
                let task = tokio::spawn(execute::start(tools, record, self.progress.clone()));
                entry.task = Some(task.abort_handle());
            }
            Action::Settle { status, power } => {
                entry.seen.process = Process::Absent;
                entry.seen.pressed = None;
                entry.seen.killed = None;
                let stays_on = self.draining || entry.record.power != Power::On;
                if !stays_on {
                    entry.record.power = power;
                }
                let ending = describe_ending(status);
                entry.record.note(now, format!("stopped: {ending}"));
                if !explained(&entry.record, status) {
                    entry.record.last_stop = ending;
                }
                if is_failure(status) {
                    entry.record.failed = Failed::Yes;
                }
                self.keep(machine);
            }
            Action::Warn { left_s } => {
                entry.seen.warned = Some(entry.record.terms.end);
                eprintln!("{}", Event::MachineWarned { machine, left_s });
            }
            Action::Press { because } => {
                entry.seen.pressed = Some(now);
                press(machine, because);
            }
            Action::Kill { because } => {
                entry.seen.killed = Some(now);
                self.kill(machine, because);
            }
            Action::Release => self.release(machine),
            Action::Destroy => self.destroy(machine, "retention-over"),
        }
    }

    fn kill(&self, machine: MachineId, because: &'static str) {
        eprintln!("{}", Event::MachineForced { machine, because });
        if let Err(error) = self.config.tools.init.kill(machine) {
            trouble("init", &error);
        }
    }

    fn release(&mut self, machine: MachineId) {
        let Some(entry) = self.machines.get_mut(&machine) else { return };
        entry.seen.busy = Some(Work::Release);
        let wanted = &entry.record.terms.shape.devices;
        let devices: Vec<_> = wanted
            .iter()
            .filter_map(|address| Some((*address, self.devices.get(*address)?.vendor)))
            .collect();
        for (address, _) in &devices {
            self.devices.set(*address, DeviceState::Resetting);
        }
        let (tools, progress) = (self.config.tools.clone(), self.progress.clone());
        tokio::spawn(execute::release(tools, machine, devices, progress));
    }

    fn destroy(&mut self, machine: MachineId, because: &'static str) {
        if let Err(error) = disk::destroy(&self.config.tools.data, machine) {
            trouble("disk", &error);
            return;
        }
        match self.config.store.remove_machine(machine) {
            Ok(()) => {
                self.machines.remove(&machine);
                eprintln!("{}", Event::MachineDestroyed { machine, because });
            }
            Err(error) => trouble("store", &error),
        }
    }

    async fn handle_command(&mut self, command: Command) {
        // Whoever asked may have gone; the command counts nevertheless.
        match command {
            Command::Create(order, answer) => drop(answer.send(self.create(*order))),
            Command::Renew(terms, answer) => drop(answer.send(self.renew(*terms))),
            Command::Power(machine, switch, answer) => {
                drop(answer.send(self.switch(machine, switch).await));
            }
            Command::Delete(machine, answer) => drop(answer.send(self.delete(machine))),
        }
    }

    fn create(&mut self, order: Order) -> Result<View, RefusedError> {
        let now = self.config.clock.now();
        let machine = order.terms.id;
        if self.draining {
            return Err(RefusedError::Draining);
        }
        if self.machines.contains_key(&machine) {
            return Err(RefusedError::Exists { machine });
        }
        if let Some(known) = self.config.store.serial(machine)?
            && order.terms.serial <= known
        {
            return Err(RefusedError::Serial { machine, found: order.terms.serial, known });
        }
        check_time(now, &order.terms)?;
        self.check_room(&order.terms)?;
        let mut record = Record {
            terms: order.terms,
            image: order.image,
            gateway: order.gateway,
            power: Power::On,
            uid: self.free_uid(),
            created: now,
            last_stop: String::new(),
            failed: Failed::No,
            events: Vec::new(),
            released: Released::No,
        };
        record.note(now, "accepted");
        self.config.store.put_machine(&record, None)?;
        self.devices.lease(&record.terms.shape.devices, machine);
        let (serial, end) = (record.terms.serial, record.terms.end.0);
        eprintln!("{}", Event::MachineAccepted { machine, serial, end });
        let entry = Entry { record, seen: Seen::default(), task: None, delete: false };
        self.machines.insert(machine, entry);
        self.view(machine)
    }

    fn renew(&mut self, terms: plan::Terms) -> Result<View, RefusedError> {
        let machine = terms.id;
        let known = self.machines.get(&machine).ok_or(RefusedError::Unknown { machine })?;
        let old = &known.record.terms;
        if terms.serial <= old.serial {
            let (found, known) = (terms.serial, old.serial);
            return Err(RefusedError::Serial { machine, found, known });
        }
        if terms.renter != old.renter {
            return Err(RefusedError::Changed { what: "renter" });
        }
        if terms.shape != old.shape {
            return Err(RefusedError::Changed { what: "shape" });
        }
        check_time(self.config.clock.now(), &terms)?;
        let mut record = known.record.clone();
        if record.released == Released::Yes {
            self.check_room(&terms)?;
            record.released = Released::No;
            record.power = Power::On;
        }
        record.terms = terms;
        record.note(self.config.clock.now(), "lease renewed");
        self.config.store.put_machine(&record, None)?;
        self.devices.lease(&record.terms.shape.devices, machine);
        let (serial, end) = (record.terms.serial, record.terms.end.0);
        eprintln!("{}", Event::MachineRenewed { machine, serial, end });
        if let Some(entry) = self.machines.get_mut(&machine) {
            entry.record = record;
        }
        self.view(machine)
    }

    async fn switch(&mut self, machine: MachineId, to: Switch) -> Result<View, RefusedError> {
        let now = self.config.clock.now();
        let entry = self.machines.get_mut(&machine).ok_or(RefusedError::Unknown { machine })?;
        check_time(now, &entry.record.terms)?;
        let running = matches!(entry.seen.process, Process::Running { .. });
        match to {
            Switch::Start | Switch::Restart => entry.record.power = Power::On,
            Switch::Stop => entry.record.power = Power::Off,
        }
        entry.seen.failures = 0;
        entry.record.failed = Failed::No;
        self.config.store.put_machine(&entry.record, None)?;
        if to == Switch::Restart && running && entry.seen.busy.is_none() {
            vmm::power(machine, vmm::Power::Reset).await?;
        }
        self.view(machine)
    }

    fn delete(&mut self, machine: MachineId) -> Result<View, RefusedError> {
        let view = self.view(machine)?;
        let entry = self.machines.get_mut(&machine).ok_or(RefusedError::Unknown { machine })?;
        entry.record.power = Power::Off;
        entry.delete = true;
        // The lease ends now; everything else follows from that, also after a power cut.
        entry.record.terms.end = entry.record.terms.end.min(self.config.clock.now());
        self.config.store.put_machine(&entry.record, None)?;
        if entry.record.released == Released::Yes && entry.seen.busy.is_none() {
            self.destroy(machine, "renter");
        }
        Ok(view)
    }

    fn check_room(&self, terms: &plan::Terms) -> Result<(), RefusedError> {
        let shape = &terms.shape;
        let free = self.free();
        let checks = [
            ("virtual CPUs", u64::from(shape.vcpus), u64::from(free.vcpus)),
            ("MiB of memory", shape.memory_mib.0, free.memory_mib),
            ("MiB of disk", shape.disk_mib.0, self.free_disk_mib()),
        ];
        for (what, wanted, free) in checks {
            if wanted > free {
                return Err(RefusedError::Room { what, wanted, free });
            }
        }
        Ok(rules::check_free(self.devices.list(), &shape.devices)?)
    }

    fn free(&self) -> Capacity {
        let held = self.machines.values().filter(|entry| entry.record.released == Released::No);
        let shapes: Vec<_> = held.map(|entry| &entry.record.terms.shape).collect();
        let vcpus: u32 = shapes.iter().map(|shape| shape.vcpus).sum();
        let memory: u64 = shapes.iter().map(|shape| shape.memory_mib.0).sum();
        let all = self.config.capacity;
        let reserve = self.config.spec.machines.reserve_mib.0;
        Capacity {
            vcpus: all.vcpus.saturating_sub(vcpus),
            memory_mib: all.memory_mib.saturating_sub(reserve).saturating_sub(memory),
        }
    }

    fn free_disk_mib(&self) -> u64 {
        let status = rustix::fs::statvfs(&self.config.tools.data);
        status.map_or(0, |status| (status.f_bavail * status.f_frsize) >> 20)
    }

    fn free_uid(&self) -> u32 {
        let used: Vec<_> = self.machines.values().map(|entry| entry.record.uid).collect();
        UIDS.into_iter().find(|uid| !used.contains(uid)).unwrap_or(*UIDS.end())
    }

    fn view(&self, machine: MachineId) -> Result<View, RefusedError> {
        let entry = self.machines.get(&machine).ok_or(RefusedError::Unknown { machine })?;
        let address = self.config.tools.networks.adopt(machine).ok().map(|net| net.ipv4);
        let state = match (entry.seen.process, entry.record.power) {
            _ if entry.record.released == Released::Yes => State::Ended,
            _ if entry.seen.busy == Some(Work::Start) => State::Starting,
            (Process::Running { .. }, Power::On) if entry.seen.pressed.is_none() => State::Running,
            (Process::Running { .. }, _) => State::Stopping,
            (Process::Ended { .. }, _) => State::Stopping,
            (Process::Absent, Power::On) => State::Starting,
            (Process::Absent, Power::Off) => State::Stopped,
        };
        Ok(View { record: entry.record.clone(), state, address })
    }

    fn publish(&self) {
        let snapshot = Snapshot {
            machines: self.machines.keys().filter_map(|id| self.view(*id).ok()).collect(),
            devices: self.devices.list().to_vec(),
            free: self.free(),
            disk_mib: self.free_disk_mib(),
        };
        self.publish.send_if_modified(|old| {
            let changed = *old != snapshot;
            *old = snapshot;
            changed
        });
    }
}

fn check_time(now: UnixSeconds, terms: &plan::Terms) -> Result<(), RefusedError> {
    if now >= terms.end || terms.end <= terms.start {
        let (start, end, now) = (terms.start.0, terms.end.0, now.0);
        return Err(RefusedError::Time { start, end, now });
    }
    Ok(())
}

/// Presses a machine's power button, without waiting for it.
fn press(machine: MachineId, because: &'static str) {
    eprintln!("{}", Event::MachineButton { machine, because });
    tokio::spawn(async move {
        if let Err(error) = vmm::power(machine, vmm::Power::Button).await {
            let reason = format!("power button: {}", crate::init::boot::chain(&error));
            eprintln!("{}", Event::MachineFailed { machine, reason });
        }
    });
}

fn describe_ending(status: crate::spawn::Ending) -> String {
    use types::vm::exit;
    let meaning = match status {
        crate::spawn::Ending::Exit { code: exit::POWERED_OFF } => "powered off",
        crate::spawn::Ending::Exit { code: exit::REFUSED } => {
            "the machine cannot be run as asked; the node's log says why"
        }
        crate::spawn::Ending::Exit { code: exit::RESET } => "reset",
        crate::spawn::Ending::Exit { code: exit::GUEST_FAULT } => {
            "the guest did something that has no meaning, as a triple fault"
        }
        crate::spawn::Ending::Exit { code: exit::HOST_FAULT } => "the node failed under the guest",
        crate::spawn::Ending::Signal { number: libc::SIGKILL } => "ended by force",
        crate::spawn::Ending::Exit { .. } | crate::spawn::Ending::Signal { .. } => {
            "the machine's process failed"
        }
    };
    format!("{meaning} ({status})")
}

/// Returns whether the status is a failure of guest or node, not an end that somebody wanted.
fn is_failure(status: crate::spawn::Ending) -> bool {
    use types::vm::exit;
    match status {
        crate::spawn::Ending::Exit { code } => code != exit::POWERED_OFF && code != exit::RESET,
        crate::spawn::Ending::Signal { number } => number != libc::SIGKILL,
    }
}

/// Returns whether the record says already, and better, why the machine stopped.
fn explained(record: &Record, status: crate::spawn::Ending) -> bool {
    let killed = matches!(status, crate::spawn::Ending::Signal { number: libc::SIGKILL });
    killed && record.failed == Failed::Yes && !record.last_stop.is_empty()
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
