//! The members that are reachable as far as this node knows.

use std::{
    collections::{BTreeMap, btree_map},
    time::Duration,
};

use types::ids::NodeId;

use super::SUSPICION;
use crate::wire::{Announcement, Heard, Rumour};

/// Members remembered at most. More are neither listed nor reachable by name through this node.
pub const MEMBERS: usize = 4_096;
/// No announcement counts for longer: a directory of the full size, announced every 205 s.
const LIFETIME_MAX: Duration = Duration::from_secs(900);

/// One member.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What it says of itself.
    pub announcement: Announcement,
    /// Its incarnation.
    pub epoch: u64,
    /// When its newest announcement was made, on this node's clock.
    pub announced: Duration,
    /// When it was last heard of, on this node's clock.
    pub heard: Duration,
    nonce: u64,
    expires: Duration,
    suspected_until: Option<Duration>,
    rumour: Rumour,
    /// Highest seen difference of its uptime to ours: the least delayed announcement tells best.
    ahead_ms: i128,
}

impl Entry {
    /// Returns the member's uptime at our uptime `now`, as far as known.
    pub fn uptime_ms(&self, now: Duration) -> u64 {
        u64::try_from(millis(now) + self.ahead_ms).unwrap_or(0)
    }
}

/// What an announcement changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Joined,
    None,
}

#[derive(Debug, Default)]
pub(super) struct Directory {
    entries: BTreeMap<NodeId, Entry>,
}

impl Directory {
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, &Entry)> {
        self.entries.iter().map(|(node, entry)| (*node, entry))
    }

    pub(super) fn get(&self, node: NodeId) -> Option<&Entry> {
        self.entries.get(&node)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Takes an announcement whose signature is good and whose rumour is new.
    pub(super) fn handle_announcement(
        &mut self,
        now: Duration,
        heard: &Heard,
        announcement: Announcement,
    ) -> Change {
        let age = Duration::from_millis(heard.age_ms);
        let lifetime = Duration::from_millis(announcement.lifetime_ms).min(LIFETIME_MAX);
        let Some(left) = lifetime.checked_sub(age).filter(|left| !left.is_zero()) else {
            return Change::None;
        };
        let Heard { rumour, .. } = heard;
        let full = self.entries.len() >= MEMBERS;
        let measured = i128::from(announcement.uptime_ms) + i128::from(heard.age_ms) - millis(now);
        let fresh = Entry {
            announcement,
            epoch: rumour.epoch,
            announced: now.saturating_sub(age),
            heard: now,
            nonce: rumour.nonce,
            expires: now + left,
            suspected_until: None,
            rumour: rumour.clone(),
            ahead_ms: measured,
        };
        match self.entries.entry(rumour.origin) {
            btree_map::Entry::Vacant(_) if full => Change::None,
            btree_map::Entry::Vacant(vacant) => {
                vacant.insert(fresh);
                Change::Joined
            }
            btree_map::Entry::Occupied(mut occupied) => {
                let known = occupied.get();
                if (known.epoch, known.nonce) < (rumour.epoch, rumour.nonce) {
                    let same = known.epoch == rumour.epoch;
                    let ahead_ms = if same { known.ahead_ms.max(measured) } else { measured };
                    occupied.insert(Entry { ahead_ms, ..fresh });
                }
                Change::None
            }
        }
    }

    /// Takes note that a node was heard directly.
    pub(super) fn handle_alive(&mut self, now: Duration, node: NodeId) {
        if let Some(entry) = self.entries.get_mut(&node) {
            entry.heard = now;
            entry.suspected_until = None;
        }
    }

    /// Takes note that a neighbour of `node` reports it silent.
    pub(super) fn handle_suspicion(&mut self, now: Duration, node: NodeId, epoch: u64) {
        if let Some(entry) = self.entries.get_mut(&node)
            && entry.epoch <= epoch
            && entry.suspected_until.is_none()
        {
            entry.suspected_until = Some(now + SUSPICION);
        }
    }

    /// Forgets a node that said it leaves.
    pub(super) fn handle_leave(&mut self, node: NodeId) -> Option<Entry> {
        self.entries.remove(&node)
    }

    /// Forgets and returns those that fell silent.
    pub(super) fn handle_timeout(&mut self, now: Duration) -> Vec<NodeId> {
        let gone = |entry: &Entry| {
            now >= entry.expires || entry.suspected_until.is_some_and(|until| now >= until)
        };
        let dead: Vec<NodeId> =
            self.iter().filter(|(_, entry)| gone(entry)).map(|(node, _)| node).collect();
        for node in &dead {
            self.entries.remove(node);
        }
        dead
    }

    /// Returns all announcements with their ages, for a new neighbour.
    pub(super) fn all(&self, now: Duration) -> Vec<Heard> {
        self.entries
            .values()
            .map(|entry| {
                let age = now.saturating_sub(entry.announced).as_millis();
                let age_ms = u64::try_from(age).unwrap_or(u64::MAX);
                Heard { rumour: entry.rumour.clone(), age_ms }
            })
            .collect()
    }
}

fn millis(time: Duration) -> i128 {
    i128::try_from(time.as_millis()).unwrap_or(i128::MAX)
}
