//! The client's workflow as a machine without input and output.
//!
//! A shell asks [`Client::next`] what to do, does it, and answers with the `handle_*` function that
//! the [`Request`] names, until there is no request. A new client begins with a refresh; after it,
//! [`Client::look_up`] and [`Client::walk`] begin a search, any number of times.
//!
//! Whatever must survive is a request to store it, made before anything that depends on it: a power
//! cut between any two requests leaves a store from which the next refresh goes on, and no trusted
//! version is forgotten.
//! Source: TUF specification 1.0.34, section 5. This module knows neither files nor networks.

mod refresh;
mod search;

use std::collections::VecDeque;

use jiff::Timestamp;

use crate::{
    metadata::{Delegations, Keys, Newest, RoleKeys, Root, Snapshot, Targets},
    pattern,
    target::{Naming, Target},
    verify::{self, UpdateError},
};
use search::Search;

/// Bounds on what a repository may ask of its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest root file, in bytes.
    pub root_bytes: u64,
    /// Longest timestamp file, in bytes.
    pub timestamp_bytes: u64,
    /// Longest snapshot file, in bytes.
    pub snapshot_bytes: u64,
    /// Longest file of a targets role, in bytes.
    pub targets_bytes: u64,
    /// Root versions that one refresh goes forward at most (5.3.3); the next refresh goes on.
    pub roots: u32,
    /// Roles that one search looks into at most, the top-level targets role included (5.6.7).
    pub roles: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            root_bytes: 512 << 10,
            timestamp_bytes: 16 << 10,
            snapshot_bytes: 2 << 20,
            targets_bytes: 5 << 20,
            roots: 1024,
            roles: 1024,
        }
    }
}

/// What the shell has to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Read this file of the store; answer with [`Client::handle_loaded`].
    Load {
        /// Name in the store.
        file: &'a str,
    },
    /// Fetch this file of the repository, at most `limit` bytes; answer with
    /// [`Client::handle_fetched`].
    Fetch {
        /// Place below the metadata URL, percent-encoded.
        location: &'a str,
        /// Most bytes to take.
        limit: u64,
    },
    /// Store this file so that a power cut leaves it or what was there before; answer with
    /// [`Client::handle_written`] once it is durable.
    Store {
        /// Name in the store.
        file: &'a str,
        /// Content, as it was received.
        bytes: &'a [u8],
    },
    /// Remove this file if it is there; answer with [`Client::handle_written`] once that is durable.
    Remove {
        /// Name in the store.
        file: &'a str,
    },
}

/// What came of the work so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// There are requests left.
    Working,
    /// The metadata is up to date; nothing was searched since.
    Refreshed,
    /// The target is this.
    Found(Box<Target>),
    /// No role that is trusted for this path describes it.
    NotFound,
    /// Every target path that some role describes, each once, in order. Whether a role is trusted
    /// for it, [`Client::look_up`] says.
    Names(Vec<String>),
    /// The last refresh failed, and nothing can be looked up.
    Failed,
}

/// A write that comes before the next read.
#[derive(Debug)]
enum Write {
    Remove(&'static str),
    Store(String, Vec<u8>),
}

#[derive(Debug)]
enum State {
    Answer(Outcome),
    Read(Reading, Step),
}

/// Where the next bytes come from.
#[derive(Debug)]
struct Reading {
    file: String,
    location: String,
    limit: u64,
}

/// What the next bytes are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// 5.3: the next root.
    FetchRoot,
    LoadTimestamp,
    /// 5.4
    FetchTimestamp,
    LoadSnapshot,
    /// 5.5
    FetchSnapshot,
    LoadTargets,
    /// 5.6
    FetchTargets,
    LoadRole,
    /// 5.6.7
    FetchRole,
}

impl Step {
    fn loads(self) -> Source {
        match self {
            Self::LoadTimestamp | Self::LoadSnapshot | Self::LoadTargets | Self::LoadRole => {
                Source::Store
            }
            Self::FetchRoot
            | Self::FetchTimestamp
            | Self::FetchSnapshot
            | Self::FetchTargets
            | Self::FetchRole => Source::Repository,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Repository,
    Store,
}

/// The workflow of one client. See the module for its use.
#[derive(Debug)]
pub struct Client {
    limits: Limits,
    now: Timestamp,
    root: Root,
    roots_fetched: u32,
    timestamp: Option<Newest>,
    snapshot: Option<Snapshot>,
    targets: Option<Targets>,
    search: Search,
    writes: VecDeque<Write>,
    state: State,
}

impl Client {
    /// Begins a refresh (5.1, 5.2).
    ///
    /// `shipped` is the root that came with the program, `stored` the store's `root.json`. The newer
    /// one of the two begins the chain; a stored one that cannot be read or is not signed by itself
    /// is passed over, so that damage to the store heals. `now` is the fixed time of this update.
    ///
    /// # Errors
    /// If `shipped` cannot be read or is not signed by itself.
    pub fn new(
        shipped: &[u8],
        stored: Option<&[u8]>,
        now: Timestamp,
        limits: Limits,
    ) -> Result<Self, UpdateError> {
        let shipped_root = refresh::own_root(shipped, &limits)?;
        let stored = stored.and_then(|bytes| refresh::own_root(bytes, &limits).ok());
        let mut writes = VecDeque::new();
        let root = match stored {
            Some(stored) if stored.header.version >= shipped_root.header.version => stored,
            older => {
                if older.is_some_and(|older| refresh::revokes(&older, &shipped_root)) {
                    refresh::forget(&mut writes);
                }
                writes.push_back(Write::Store("root.json".to_owned(), shipped.to_vec()));
                shipped_root
            }
        };
        let mut client = Self {
            limits,
            now,
            root,
            roots_fetched: 0,
            timestamp: None,
            snapshot: None,
            targets: None,
            search: Search::default(),
            writes,
            state: State::Answer(Outcome::Failed),
        };
        client.fetch_root()?;
        Ok(client)
    }

    /// Returns what to do next; the same until it is answered. `None`: see [`Client::outcome`].
    pub fn next(&self) -> Option<Request<'_>> {
        match (self.writes.front(), &self.state) {
            (Some(Write::Remove(file)), _) => Some(Request::Remove { file }),
            (Some(Write::Store(file, bytes)), _) => Some(Request::Store { file, bytes }),
            (None, State::Read(reading, step)) => Some(match step.loads() {
                Source::Store => Request::Load { file: &reading.file },
                Source::Repository => {
                    Request::Fetch { location: &reading.location, limit: reading.limit }
                }
            }),
            (None, State::Answer(_)) => None,
        }
    }

    /// Returns what came of the work so far.
    pub fn outcome(&self) -> Outcome {
        match &self.state {
            State::Answer(outcome) if self.writes.is_empty() => outcome.clone(),
            State::Answer(_) | State::Read(..) => Outcome::Working,
        }
    }

    /// Answers [`Request::Store`] and [`Request::Remove`]: it is durable.
    pub fn handle_written(&mut self) {
        self.writes.pop_front();
    }

    /// Answers [`Request::Load`] with the file, or `None` if there is none or it cannot be read.
    pub fn handle_loaded(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        self.answer(Source::Store, bytes)
    }

    /// Answers [`Request::Fetch`] with the file, or `None` if the repository has none. A shell that
    /// gets no answer, or a longer one, gives up the client instead.
    ///
    /// # Errors
    /// Those of the step. After an error in a refresh only a new client goes on; one in a search
    /// ends that search only. [`Client::next`] may still ask to store what was verified before.
    pub fn handle_fetched(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        self.answer(Source::Repository, bytes)
    }

    /// Begins the search for a target (5.7.1). Does nothing unless the refresh succeeded and no
    /// other search is under way.
    ///
    /// # Errors
    /// If a delegation of the top-level role leads to a role that the snapshot does not list.
    pub fn look_up(&mut self, path: &str) -> Result<(), UpdateError> {
        if self.idle() { self.begin_search(Some(path.to_owned())) } else { Ok(()) }
    }

    /// Begins to visit every role, to learn which targets there are; else as [`Client::look_up`].
    ///
    /// # Errors
    /// As [`Client::look_up`].
    pub fn walk(&mut self) -> Result<(), UpdateError> {
        if self.idle() { self.begin_search(None) } else { Ok(()) }
    }

    fn idle(&self) -> bool {
        matches!(&self.state, State::Answer(outcome) if *outcome != Outcome::Failed)
    }

    /// Returns the trusted top-level targets document, once the refresh succeeded.
    pub fn targets(&self) -> Option<&Targets> {
        self.targets.as_ref()
    }

    /// Returns the trusted root.
    pub fn root(&self) -> &Root {
        &self.root
    }

    fn answer(&mut self, source: Source, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        let step = match &self.state {
            State::Read(_, step) if self.writes.is_empty() && step.loads() == source => *step,
            State::Read(..) | State::Answer(_) => return Ok(()),
        };
        let result = match step {
            Step::FetchRoot => self.root_fetched(bytes),
            Step::LoadTimestamp => self.timestamp_loaded(bytes),
            Step::FetchTimestamp => self.timestamp_fetched(bytes),
            Step::LoadSnapshot => self.snapshot_loaded(bytes),
            Step::FetchSnapshot => self.snapshot_fetched(bytes),
            Step::LoadTargets => self.targets_loaded(bytes),
            Step::FetchTargets => self.targets_fetched(bytes),
            Step::LoadRole => self.role_loaded(bytes),
            Step::FetchRole => self.role_fetched(bytes),
        };
        if result.is_err() {
            let searched = self.targets.is_some();
            let after = if searched { Outcome::Refreshed } else { Outcome::Failed };
            self.state = State::Answer(after);
        }
        result
    }

    fn read(&mut self, step: Step, reading: Reading) {
        self.state = State::Read(reading, step);
    }

    fn naming(&self) -> Naming {
        if self.root.consistent_snapshot { Naming::Digest } else { Naming::Plain }
    }

    /// Names a file below the metadata URL; with consistent snapshots its version comes first.
    fn location(&self, role: &str, version: u64) -> String {
        let name = pattern::encode(role);
        match self.naming() {
            Naming::Digest => format!("{version}.{name}.json"),
            Naming::Plain => format!("{name}.json"),
        }
    }

    /// 5.6.2 to 5.6.5 for the top-level targets role and every delegated one.
    fn check_targets(
        &self,
        role: &str,
        bytes: &[u8],
        signers: &RoleKeys,
        keys: &Keys,
    ) -> Result<Targets, UpdateError> {
        let file = store_name(role);
        let listed = self.listed(role)?;
        verify::described(&file, bytes, listed)?;
        let envelope = verify::envelope(&file, bytes, self.limits.targets_bytes)?;
        verify::threshold(&file, &envelope, signers, keys)?;
        let targets = Targets::read(&envelope).map_err(|e| verify::unreadable(&file, e))?;
        verify::version(&file, targets.header.version, listed.version)?;
        verify::fresh(&file, &targets.header, self.now)?;
        Ok(targets)
    }

    fn listed(&self, role: &str) -> Result<&crate::metadata::Listed, UpdateError> {
        let listed = self.snapshot.as_ref().and_then(|snapshot| snapshot.roles.get(role));
        listed.ok_or_else(|| UpdateError::NotListed { file: store_name(role) })
    }

    /// Where a targets role's file is, and how long it may be.
    fn reading(&self, role: &str) -> Result<Reading, UpdateError> {
        let listed = self.listed(role)?;
        let most = self.limits.targets_bytes;
        Ok(Reading {
            file: store_name(role),
            location: self.location(role, listed.version),
            limit: listed.length.map_or(most, |length| length.min(most)),
        })
    }
}

/// Names a role's file in the store. No two roles share one, and none leaves its folder.
pub(crate) fn store_name(role: &str) -> String {
    format!("{}.json", pattern::encode(role))
}

/// The delegations of a role, if it has any.
fn delegations(targets: &Targets) -> Option<&Delegations> {
    targets.delegations.as_ref()
}
