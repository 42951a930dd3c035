//! Lines and events that are kept, each in a ring of its own, and what outlives them: counts, and
//! when parts of the node were up first. Pure: records in, documents out.

use std::collections::{BTreeMap, VecDeque};

use types::{
    logs::{Level, LogLine, LogSource, Logs, NodeEvent, NodeEvents},
    status::{BootPhase, WatchdogView},
};

use super::{events, record};

/// Most lines and bytes of text that are kept.
pub const MAX_LINES: usize = 4096;
/// Most bytes of text that are kept.
pub const MAX_BYTES: usize = 512 << 10;

/// Most events that are kept: those of weeks, however much others write.
pub const MAX_EVENTS: usize = 1024;

/// Most errors that are kept beside.
pub const MAX_ERRORS: usize = 64;

/// Most lines or events in one answer.
pub const MAX_ANSWER: usize = 500;

/// Most places of trouble that are counted apart; they are names in our source.
const MAX_PLACES: usize = 64;

/// Most watchdogs that are remembered.
const MAX_WATCHDOGS: usize = 8;

/// Events that end a step of the boot, when they come first.
const PHASES: [&str; 9] = [
    "mounts-verified",
    "init-ready",
    "agent-started",
    "node",
    "config",
    "online",
    "overlay-started",
    "agent-ready",
    "overlay-members",
];

/// What is kept.
#[derive(Debug, Default)]
pub struct Book {
    lines: VecDeque<LogLine>,
    bytes: usize,
    events: VecDeque<NodeEvent>,
    errors: VecDeque<LogLine>,
    next: u64,
    counts: BTreeMap<(LogSource, Level), u64>,
    gaps: u64,
    facts: Facts,
}

/// What events said that outlives them.
#[derive(Debug, Default)]
struct Facts {
    phases: Vec<BootPhase>,
    starts: Option<u64>,
    watchdogs: Vec<WatchdogView>,
    troubles: BTreeMap<String, u64>,
    happened: BTreeMap<String, u64>,
}

/// Which lines are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filter {
    /// Number of the first line.
    pub from: u64,
    /// Lines that matter less are left out.
    pub level: Level,
    /// Lines of others are left out.
    pub source: Option<LogSource>,
}

impl Filter {
    fn takes(&self, line: &LogLine) -> bool {
        line.number >= self.from
            && line.level <= self.level
            && self.source.is_none_or(|source| source == line.source)
    }
}

impl Book {
    /// Takes a record of the kernel's log.
    pub fn handle_record(&mut self, bytes: &[u8]) {
        let Some(line) = record::parse(bytes) else { return };
        // A log that starts anew has numbers that were there before.
        if line.number < self.next {
            return;
        }
        self.next = line.number.saturating_add(1);
        *self.counts.entry((line.source, line.level)).or_default() += 1;
        if let Some(event) = events::parse(&line) {
            self.facts.handle_event(&event);
            keep(&mut self.events, event, MAX_EVENTS);
        }
        if line.level == Level::Error {
            keep(&mut self.errors, line.clone(), MAX_ERRORS);
        }
        self.bytes += line.text.len();
        self.lines.push_back(line);
        while self.lines.len() > MAX_LINES || self.bytes > MAX_BYTES {
            let gone = self.lines.pop_front().map_or(0, |line| line.text.len());
            self.bytes = self.bytes.saturating_sub(gone);
        }
    }

    /// Records were overwritten before they were read.
    pub fn handle_gap(&mut self) {
        self.gaps += 1;
    }

    /// Returns the number that the next line will have at least.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Returns lines, the oldest first, at most [`MAX_ANSWER`].
    pub fn logs(&self, filter: Filter) -> Logs {
        let taken = self.lines.iter().filter(|line| filter.takes(line));
        let lines: Vec<_> = taken.take(MAX_ANSWER).cloned().collect();
        let next = match lines.last() {
            Some(last) if lines.len() == MAX_ANSWER => last.number.saturating_add(1),
            Some(_) | None => self.next.max(filter.from),
        };
        let oldest = self.lines.front().map_or(self.next, |line| line.number);
        Logs { lines, next, oldest }
    }

    /// Returns the newest lines that match, the oldest of them first.
    pub fn newest(&self, filter: Filter, count: usize) -> Vec<LogLine> {
        let newest = self.lines.iter().rev().filter(|line| filter.takes(line));
        let mut lines: Vec<_> = newest.take(count).cloned().collect();
        lines.reverse();
        lines
    }

    /// Returns events from a number on, the oldest first, at most [`MAX_ANSWER`].
    pub fn events(&self, from: u64) -> NodeEvents {
        let taken = self.events.iter().filter(|event| event.number >= from);
        let events: Vec<_> = taken.take(MAX_ANSWER).cloned().collect();
        let next = match events.last() {
            Some(last) if events.len() == MAX_ANSWER => last.number.saturating_add(1),
            Some(_) | None => self.next.max(from),
        };
        let oldest = self.events.front().map_or(self.next, |event| event.number);
        NodeEvents { events, next, oldest }
    }

    /// Returns the last errors, the newest first.
    pub fn errors(&self, count: usize) -> Vec<LogLine> {
        self.errors.iter().rev().take(count).cloned().collect()
    }

    /// Returns how many lines came, by writer and level.
    pub fn counts(&self) -> impl Iterator<Item = (LogSource, Level, u64)> {
        self.counts.iter().map(|((source, level), count)| (*source, *level, *count))
    }

    /// Returns how often records were overwritten before they were read.
    pub fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Returns how often what failed, by place.
    pub fn troubles(&self) -> impl Iterator<Item = (&str, u64)> {
        self.facts.troubles.iter().map(|(place, count)| (place.as_str(), *count))
    }

    /// Returns how often which event came.
    pub fn happened(&self) -> impl Iterator<Item = (&str, u64)> {
        self.facts.happened.iter().map(|(name, count)| (name.as_str(), *count))
    }

    /// Returns when parts of the node were up first.
    pub fn phases(&self) -> Vec<BootPhase> {
        self.facts.phases.clone()
    }

    /// Returns how often init started the agent.
    pub fn agent_starts(&self) -> Option<u64> {
        self.facts.starts
    }

    /// Returns the watchdogs that init armed.
    pub fn watchdogs(&self) -> Vec<WatchdogView> {
        self.facts.watchdogs.clone()
    }
}

impl Facts {
    fn handle_event(&mut self, event: &NodeEvent) {
        let name = event.name.as_str();
        if PHASES.contains(&name) && self.phases.iter().all(|phase| phase.name != name) {
            self.phases.push(BootPhase { name: name.to_owned(), at_ms: event.at_ms });
        }
        let field = |key: &str| event.fields.get(key).map(String::as_str).unwrap_or_default();
        match name {
            "agent-started" => self.starts = field("starts").parse().ok().or(self.starts),
            "trouble" => count(&mut self.troubles, field("place")),
            "watchdog-armed" if self.watchdogs.len() < MAX_WATCHDOGS => {
                self.watchdogs.push(WatchdogView {
                    name: field("device").to_owned(),
                    armed: true,
                    timeout_s: field("timeout_s").parse().unwrap_or(0),
                });
            }
            _ => {}
        }
        count(&mut self.happened, name);
    }
}

/// Counts a name, as long as there are not too many.
fn count(counts: &mut BTreeMap<String, u64>, name: &str) {
    if counts.len() < MAX_PLACES || counts.contains_key(name) {
        *counts.entry(name.to_owned()).or_default() += 1;
    }
}

fn keep<T>(ring: &mut VecDeque<T>, item: T, most: usize) {
    if ring.len() >= most {
        ring.pop_front();
    }
    ring.push_back(item);
}
