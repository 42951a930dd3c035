//! Updates: facts are gathered, `update::slots::plan` decides, and this does what it says.
//!
//! `partition` is the EFI system partition, `slots` what is done to it, `variables` are firmware's, `mark` is what init leaves there, `health` is what a new
//! release must have, `journal` is the file in STATE. `sources` and `fetch` are where releases come from,
//! `places` those that are no mirrors, `medium` the one that the node was started from, `shelf` what other
//! nodes get. One task owns all of it.

mod failure;
mod fetch;
mod health;
mod journal;
pub mod mark;
mod medium;
mod partition;
mod places;
mod shelf;
mod slots;
mod sources;
pub mod variables;

#[cfg(test)]
mod flips;
#[cfg(test)]
pub(crate) mod injected;
#[cfg(test)]
mod peers_tests;

pub use shelf::Shelf;

use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use overlay::Overlay;
use tokio::sync::{mpsc, watch};
use types::{
    ids::NodeId,
    updates::{FailedRelease, Updates, UpdatesView},
};
use update::{
    channel::{Release, Sha256},
    shell::Checked,
    slots::{
        Contents, Place, Program,
        firmware::{self, Usable},
        gate::{self, Gate, Times},
        journal::Journal,
        plan::{Action, Facts, Offer, Rest, plan},
        release_of,
        window::Window,
    },
};

use self::{
    failure::{UpdateError, with_advice},
    fetch::Repository,
    health::Health,
    medium::Medium,
    partition::Partition,
    places::Volumes,
    slots::contents,
};
use crate::{
    console::Page,
    efivars,
    events::{Event, UpdateEvent},
    evidence,
    floors::Keeper,
    machines::{
        init::Init,
        keeper::{Machines, State},
    },
    net::Uplinks,
    spawn::Action as Way,
    tasks::background,
    time::Clock,
};

/// How often facts are looked at.
const LOOK: Duration = Duration::from_secs(2);
/// What a node says that is told of no repository.
const NO_SECTION: &str = "no repository: the configuration has no section [updates]";
/// How long variables are believed that nobody here changed: reading them stops the whole server for a
/// moment on some firmware.
const VARIABLES_AGE: Duration = Duration::from_secs(60);
/// How long everything must last before a new release passes.
const HOLD: Duration = Duration::from_secs(10);
/// How long what failed is left alone at first; each time twice as long, up to an hour.
const PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// How long a release has when no configuration says so, in seconds.
const GATE_S: u64 = 600;

/// Where the running release says what it is.
const OS_RELEASE: &str = "/etc/os-release";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What an operator says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Try the offered release now, whatever runs on the node.
    Apply,
    /// Look at the repository now.
    Check,
    /// Forget which releases failed, and which firmware did not start.
    Forget,
    /// Stay on what runs until told otherwise.
    Hold,
    /// Follow the repository again.
    Resume,
}

/// What the task works with.
pub struct Parts {
    /// The configuration's section. Without it the slots are still looked after.
    pub updates: Option<Updates>,
    /// The node.
    pub node: NodeId,
    /// Its way to init.
    pub init: Init,
    /// Its machines.
    pub machines: Machines,
    /// What it does not go below.
    pub floors: Keeper,
    /// Other nodes.
    pub overlay: Overlay,
    /// Whether other nodes are expected.
    pub alone: bool,
    /// The network.
    pub uplinks: Arc<Uplinks>,
    /// The time.
    pub clock: Arc<Clock>,
    /// Where the state is shown.
    pub pages: watch::Sender<Page>,
}

/// Returns the name of the release that runs, as the image says.
pub fn running_release() -> Option<Release> {
    release_of(&fs::read_to_string(OS_RELEASE).ok()?)
}

/// Starts the task; what operators say goes into the sender. Other nodes are served from the shelf.
pub fn start(parts: Parts) -> (mpsc::Sender<Word>, Arc<Shelf>) {
    let (words, said) = mpsc::channel(8);
    let shelf = Arc::new(Shelf::new(Path::new(crate::service::STATE)));
    let shared = Arc::clone(&shelf);
    tokio::spawn(async move { Task::new(parts, shared).await.run(said).await });
    (words, shelf)
}

struct Task {
    parts: Parts,
    shelf: Arc<Shelf>,
    partition: Option<Partition>,
    medium: Option<Medium>,
    volumes: Volumes,
    contents: Contents,
    journal: Journal,
    running: Option<Release>,
    /// The program that runs, where a file on the partition is it.
    runs: Option<Program>,
    /// Whether init knows that this is no trial.
    settled: bool,
    /// Which program a slot started last.
    started: Option<Sha256>,
    /// Whether the last boot ended in a crash.
    crashed: bool,
    boot: String,
    begin: Instant,
    held: Option<Instant>,
    repository: Option<Repository>,
    checked: Option<Checked>,
    firmware: Option<(Instant, firmware::Firmware)>,
    next_check: Instant,
    failures: u32,
    rest_until: Instant,
    /// What failed last.
    failed: String,
    /// What was told last of a release below the floors.
    told_old: String,
    view: UpdatesView,
}

impl Task {
    async fn new(parts: Parts, shelf: Arc<Shelf>) -> Self {
        let root = Path::new("/");
        let partition = partition::find(root);
        partition.iter().for_each(|partition| shelf.open(partition.clone()));
        let partition = partition.or_else(|| partition::beside_state(root));
        let started_from = partition.as_ref().and_then(|partition| partition.from);
        let medium = partition.as_ref().filter(|_| started_from.is_none());
        let medium = medium.and_then(|_| tokio::task::block_in_place(|| Medium::find(root)));
        // Digests of all that the disk can start take seconds, and a node serves without them.
        let disk = partition.clone();
        let loaded = background::run(move || contents(disk.as_ref())).await;
        let contents = loaded.unwrap_or_else(|error| {
            trouble(&error);
            Contents::default()
        });
        // Later another program may take the name that this one was started by.
        let os_release = fs::read_to_string(OS_RELEASE).unwrap_or_default();
        let files = [started_from, started_from.and(Some(Place::Fallback))].into_iter().flatten();
        let mut files = files.filter_map(|place| contents.at(place));
        let runs = files.find(|program| program.os_release == os_release).cloned();
        let now = Instant::now();
        let repository = parts.updates.as_ref().map(|updates| Repository::new(updates, &parts));
        shelf.stock(&contents);
        let mut task = Self {
            shelf,
            medium,
            volumes: Volumes::default(),
            repository,
            contents,
            journal: Journal::default(),
            running: running_release(),
            runs,
            settled: false,
            started: mark::read(Path::new(efivars::FOLDER)),
            crashed: evidence::crashed(root),
            boot: fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned(),
            begin: now,
            held: None,
            checked: None,
            firmware: None,
            next_check: now,
            failures: 0,
            rest_until: now,
            failed: String::new(),
            told_old: String::new(),
            view: UpdatesView::default(),
            partition,
            parts,
        };
        task.load_journal();
        task.tell_damage();
        task.parts.floors.judge(task.running);
        if started_from.is_some() {
            let least = task.parts.floors.floors();
            tokio::task::block_in_place(|| task.parts.floors.raise(least));
        }
        task
    }

    /// Reads the journal, or makes one of what partition and firmware say.
    fn load_journal(&mut self) {
        let folder = Path::new(crate::service::STATE);
        let from = self.partition.as_ref().and_then(|partition| partition.from);
        let firmware = self.firmware();
        self.journal = journal::load(folder)
            .unwrap_or_else(|| update::slots::journal::rebuilt(&self.contents, &firmware, from));
        if self.partition.is_some()
            && let Err(error) = self.note(self.journal.clone())
        {
            trouble(&error);
        }
    }

    fn note(&mut self, journal: Journal) -> Result<(), UpdateError> {
        if journal.last != self.journal.last && !journal.last.is_empty() {
            tell(UpdateEvent::Judged { verdict: journal.last.clone() });
        }
        self.journal = journal;
        let folder = Path::new(crate::service::STATE);
        journal::store(folder, &self.journal).map_err(|source| {
            let path = folder.join(journal::FILE).display().to_string();
            UpdateError::File { action: "write", path, source }
        })
    }

    fn firmware(&mut self) -> firmware::Firmware {
        if let Some((read, known)) = &self.firmware
            && read.elapsed() < VARIABLES_AGE
        {
            return known.clone();
        }
        let found = self.read_firmware();
        self.firmware = Some((Instant::now(), found.clone()));
        found
    }

    fn read_firmware(&self) -> firmware::Firmware {
        let Some(partition) = &self.partition else { return firmware::Firmware::default() };
        let (variables, usable) = match variables::read(Path::new(efivars::FOLDER)) {
            Ok(variables) => (variables, Usable::Yes),
            Err(_) => (firmware::Variables::default(), Usable::No),
        };
        firmware::Firmware::read(&variables, &partition.place, usable)
    }

    async fn run(mut self, mut said: mpsc::Receiver<Word>) {
        let mut told = String::new();
        loop {
            let action = plan(&self.facts());
            self.tell_init();
            let rest = if let Action::Rest(rest) = &action {
                self.in_words(rest)
            } else if let Some(reason) = self.resting() {
                reason.to_owned()
            } else {
                match self.act(&action).await {
                    Ok(()) => continue,
                    Err(error) => {
                        self.fail(&error);
                        self.view.trouble.clone()
                    }
                }
            };
            if rest != told {
                tell(UpdateEvent::State(rest.clone()));
                told.clone_from(&rest);
            }
            self.show(rest);
            self.check_when_due().await;
            match tokio::time::timeout(LOOK, said.recv()).await {
                Ok(Some(word)) => self.obey(word),
                // Nobody can say anything any more; time goes on.
                Ok(None) => tokio::time::sleep(LOOK).await,
                Err(_) => {}
            }
        }
    }

    /// Tells init once that what runs is good.
    fn tell_init(&mut self) {
        let runs = self.runs.as_ref().map(|program| program.sha256);
        let is_good = self.journal.trial.is_none() && runs.is_some() && runs == self.journal.good;
        if is_good && !self.settled {
            // Without init the agent ends soon.
            self.settled = self.parts.init.settled().is_ok();
        }
    }

    fn in_words(&self, rest: &Rest) -> String {
        let aimless = *rest == Rest::Unknown && self.repository.is_none();
        if aimless { NO_SECTION.to_owned() } else { rest.to_string() }
    }

    fn fail(&mut self, error: &UpdateError) {
        let reason = with_advice(error);
        eprintln!("{}", Event::Trouble { place: "update", reason: reason.clone() });
        self.view.trouble.clone_from(&reason);
        self.failed = reason;
        if error.is_full() {
            // Looking whether there is room costs nothing.
            self.failures = 0;
        }
        let pause = PAUSE.saturating_mul(1 << self.failures.min(7)).min(LONGEST_PAUSE);
        self.failures += 1;
        self.rest_until = Instant::now() + pause;
    }

    /// Why nothing is done for now; a look at the repository that succeeds does not change that.
    fn resting(&self) -> Option<&str> {
        (Instant::now() < self.rest_until).then_some(&*self.failed)
    }

    fn obey(&mut self, word: Word) {
        let journal = match word {
            Word::Check => None,
            Word::Forget => {
                Some(Journal { failed: Vec::new(), unstarted: None, ..self.journal.clone() })
            }
            Word::Hold => Some(Journal { held: true, ..self.journal.clone() }),
            Word::Resume => Some(Journal { held: false, ..self.journal.clone() }),
            Word::Apply => {
                let offered = match self.offer() {
                    Offer::Program(offered) => Some(offered.release),
                    Offer::Unknown | Offer::Nothing => None,
                };
                Some(Journal { insisted: offered, ..self.journal.clone() })
            }
        };
        if let Some(Err(error)) = journal.map(|journal| self.note(journal)) {
            trouble(&error);
        }
        (self.next_check, self.rest_until, self.failures) = (Instant::now(), Instant::now(), 0);
    }

    fn facts(&mut self) -> Facts {
        let from = self.partition.as_ref().and_then(|partition| partition.from);
        let now = self.parts.clock.now().0;
        let window = self.parts.updates.as_ref().and_then(|updates| updates.window.as_ref());
        let window = window.map(|window| Window {
            begin_s: window.begin_s(),
            length_s: u64::from(window.minutes) * 60,
        });
        let health = self.health();
        let gate = self.gate(&health);
        Facts {
            journal: self.journal.clone(),
            contents: self.contents.clone(),
            firmware: self.firmware(),
            from,
            medium: self.medium.as_ref().map(Medium::offer),
            runs: self.runs.clone(),
            started: self.started,
            crashed: self.crashed,
            boot: self.boot.clone(),
            offer: self.offer(),
            machines: self.machines(),
            window_s: window.map_or(0, |window| window.opens_in(now)),
            gate,
            present: health.present,
        }
    }

    fn machines(&self) -> Vec<String> {
        let snapshot = self.parts.machines.snapshot();
        let snapshot = snapshot.borrow();
        let runs = |state| matches!(state, State::Starting | State::Running | State::Stopping);
        let running = snapshot.machines.iter().filter(|view| runs(view.state));
        running.map(|view| view.record.lease.id.to_string()).collect()
    }

    fn health(&self) -> Health {
        let network = self.parts.uplinks.status();
        let online = network.borrow().is_online();
        let members = self.parts.overlay.members().len();
        let snapshot = self.parts.machines.snapshot();
        let devices = snapshot.borrow().devices.clone();
        let reached = if self.parts.alone { None } else { Some(members) };
        health::read(Path::new("/"), online, reached, &devices)
    }

    fn gate(&mut self, health: &Health) -> Gate {
        let expected = self.journal.trial.as_ref().map(|trial| trial.expected.clone());
        let checks = health.checks(&expected.unwrap_or_default());
        let now = Instant::now();
        match checks.missing.is_empty() {
            true => self.held = self.held.or(Some(now)),
            false => self.held = None,
        }
        let seconds = self.parts.updates.as_ref().map_or(GATE_S, |updates| updates.gate_s);
        let limit = Duration::from_secs(seconds);
        let held = self.held.map(|since| now - since);
        gate::judge(&checks, self.begin.elapsed(), held, Times { limit, hold: HOLD })
    }

    fn offer(&self) -> Offer {
        self.checked.as_ref().map_or(Offer::Unknown, fetch::offer)
    }

    async fn act(&mut self, action: &Action) -> Result<(), UpdateError> {
        match action {
            Action::Note(journal) => self.note((**journal).clone()),
            Action::Mend { from, sha256 } => self.mend(*from, *sha256),
            Action::Promote { slot, sha256 } => self.promote(*slot, *sha256),
            Action::Release(slot) => self.release(*slot),
            Action::Fetch(slot) => self.fetch(*slot).await,
            Action::MakeEntry(place) => {
                self.change(|variables, _, at| firmware::make_entry(variables, at, *place))
            }
            Action::List(places) => self.change(|_, firmware, _| firmware::list(firmware, places)),
            Action::Append(slot) => self.change(|_, firmware, _| firmware::append(firmware, *slot)),
            Action::Arm(slot) => {
                // Whatever it says is of an earlier trial.
                let forgotten = mark::forget(Path::new(efivars::FOLDER));
                forgotten.map_err(|source| UpdateError::Variables { source })?;
                self.started = None;
                self.change(|_, firmware, _| firmware::arm(firmware, *slot))
            }
            Action::Disarm => self.change(|_, _, _| firmware::disarm()),
            Action::Restart => {
                let because = self.journal.trial.as_ref().map(|trial| trial.release.to_string());
                tell(UpdateEvent::Restart { release: because.unwrap_or_default() });
                self.show("restarting".to_owned());
                self.parts.init.shutdown(Way::Reboot).map_err(|_| UpdateError::Init)?;
                std::future::pending::<()>().await;
                Ok(())
            }
            Action::Rest(_) => Ok(()),
        }
    }

    fn change(
        &mut self,
        changes: impl FnOnce(
            &firmware::Variables,
            &firmware::Firmware,
            &firmware::Partition,
        ) -> Vec<firmware::Change>,
    ) -> Result<(), UpdateError> {
        self.firmware = None;
        let Some(partition) = &self.partition else { return Ok(()) };
        let folder = Path::new(efivars::FOLDER);
        let failed = |source| UpdateError::Variables { source };
        let variables = variables::read(folder).map_err(failed)?;
        let firmware = firmware::Firmware::read(&variables, &partition.place, Usable::Yes);
        let changes = changes(&variables, &firmware, &partition.place);
        if changes.is_empty() {
            return Err(UpdateError::NoNumber);
        }
        variables::apply(folder, &changes).map_err(failed)
    }

    fn show(&mut self, state: String) {
        let from = self.partition.as_ref().and_then(|partition| partition.from);
        let offered = match self.offer() {
            Offer::Program(offered) => offered.release.to_string(),
            Offer::Unknown | Offer::Nothing => String::new(),
        };
        let failed = self.journal.failed.iter().map(|failed| FailedRelease {
            release: failed.release.to_string(),
            reason: failed.reason.clone(),
        });
        let running = self.runs.as_ref().map(|program| program.sha256);
        let trial = self.journal.trial.as_ref().is_some_and(|t| Some(t.sha256) == running);
        self.view = UpdatesView {
            state,
            slot: self.lies().or(from).map(|place| place.name().to_owned()).unwrap_or_default(),
            offered,
            trial,
            held: self.journal.held,
            last: self.journal.last.clone(),
            failed: failed.collect(),
            ..self.view.clone()
        };
        let view = self.view.clone();
        self.parts.pages.send_if_modified(|page| {
            let changed = page.updates != view;
            page.updates = view;
            changed
        });
    }
}

fn tell(event: UpdateEvent) {
    eprintln!("{}", Event::Update(event));
}

fn trouble(error: &(dyn std::error::Error + 'static)) {
    eprintln!("{}", Event::Trouble { place: "update", reason: with_advice(error) });
}
