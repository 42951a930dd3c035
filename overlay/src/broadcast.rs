//! Which rumours are new: one window of nonces per origin.
//!
//! An origin numbers its statements (`nonce`) within one start of it (`epoch`). Of each origin the
//! newest epoch counts, in it a nonce counts once, and nonces further behind the highest than the
//! window reaches are old. So a replayed or old rumour dies at the first node that it meets.
//! Signatures are not checked here: ask [`Windows::verdict`] first, which is cheap, then check,
//! then [`Windows::record`].

use std::{collections::BTreeMap, time::Duration};

use types::ids::NodeId;

use crate::wire::Rumour;

/// How far nonces of one origin may overtake each other on their way through the network.
pub const REACH: u64 = 256;
/// Origins remembered. Twice the directory, so that those who left stay known for a while; the
/// one not heard for the longest time makes room.
pub const ORIGINS: usize = 8_192;

/// What to do with a rumour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Not seen before.
    New,
    /// Seen, or too old to tell.
    Old,
    /// From before the origin's latest known start.
    OldEpoch,
}

/// The windows of all known origins.
#[derive(Debug, Default)]
pub struct Windows {
    origins: BTreeMap<NodeId, Window>,
}

#[derive(Debug, Clone)]
struct Window {
    epoch: u64,
    highest: u64,
    /// Bit `i` of the whole: nonce `highest - i` was seen.
    seen: [u64; WORDS],
    heard: Duration,
    proof: Option<Rumour>,
}

const WORD: u64 = 64;
#[allow(clippy::cast_possible_truncation, reason = "256 / 64 is 4")]
const WORDS: usize = (REACH / WORD) as usize;

impl Windows {
    /// Says whether a rumour is new.
    pub fn verdict(&self, origin: NodeId, epoch: u64, nonce: u64) -> Verdict {
        let Some(window) = self.origins.get(&origin) else { return Verdict::New };
        if epoch < window.epoch {
            return Verdict::OldEpoch;
        }
        if epoch > window.epoch || nonce > window.highest {
            return Verdict::New;
        }
        let behind = window.highest - nonce;
        if behind >= REACH || window.bit(behind) { Verdict::Old } else { Verdict::New }
    }

    /// Remembers a rumour whose signature is good.
    pub fn record(&mut self, now: Duration, origin: NodeId, epoch: u64, nonce: u64) {
        if !self.origins.contains_key(&origin) && self.origins.len() >= ORIGINS {
            let oldest = self.origins.iter().min_by_key(|(_, window)| window.heard);
            if let Some(oldest) = oldest.map(|(node, _)| *node) {
                self.origins.remove(&oldest);
            }
        }
        let fresh = Window { epoch, highest: nonce, seen: [0; WORDS], heard: now, proof: None };
        let window = self.origins.entry(origin).or_insert_with(|| fresh.clone());
        if epoch > window.epoch {
            *window = fresh;
        }
        if epoch < window.epoch {
            return;
        }
        window.heard = now;
        if nonce > window.highest {
            window.shift(nonce - window.highest);
            window.highest = nonce;
        }
        window.set(window.highest - nonce);
    }

    /// Keeps a recorded rumour to show to an origin that restarted below its epoch.
    pub fn keep_proof(&mut self, rumour: &Rumour) {
        if let Some(window) = self.origins.get_mut(&rumour.origin)
            && window.epoch == rumour.epoch
        {
            window.proof = Some(rumour.clone());
        }
    }

    /// Returns the rumour that shows an origin its latest known epoch.
    pub fn proof(&self, origin: NodeId) -> Option<&Rumour> {
        self.origins.get(&origin)?.proof.as_ref()
    }

    /// Returns the number of origins remembered.
    pub fn len(&self) -> usize {
        self.origins.len()
    }

    /// Says whether no origin is remembered.
    pub fn is_empty(&self) -> bool {
        self.origins.is_empty()
    }
}

impl Window {
    fn place(behind: u64) -> Option<(usize, u64)> {
        let word = usize::try_from(behind / WORD).ok().filter(|word| *word < WORDS)?;
        Some((word, 1 << (behind % WORD)))
    }

    fn bit(&self, behind: u64) -> bool {
        Self::place(behind).is_none_or(|(word, mask)| self.seen[word] & mask != 0)
    }

    fn set(&mut self, behind: u64) {
        if let Some((word, mask)) = Self::place(behind) {
            self.seen[word] |= mask;
        }
    }

    fn shift(&mut self, by: u64) {
        let old = std::mem::take(&mut self.seen);
        for behind in 0..REACH.saturating_sub(by) {
            if Self::place(behind).is_some_and(|(word, mask)| old[word] & mask != 0) {
                self.set(behind + by);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn node(n: u64) -> NodeId {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        NodeId::from_bytes(bytes)
    }

    proptest! {
        #[test]
        fn a_nonce_counts_once(nonces in prop::collection::vec(0u64..600, 0..300)) {
            let mut windows = Windows::default();
            let mut seen = BTreeSet::new();
            let mut highest = None;
            for nonce in nonces {
                let old = highest.is_some_and(|highest: u64| highest.saturating_sub(nonce) >= REACH);
                let new = !old && !seen.contains(&nonce);
                let verdict = windows.verdict(node(1), 1, nonce);
                prop_assert_eq!(verdict == Verdict::New, new);
                windows.record(Duration::ZERO, node(1), 1, nonce);
                seen.insert(nonce);
                highest = highest.max(Some(nonce));
            }
        }
    }

    #[test]
    fn a_new_start_ends_the_old_one() {
        let mut windows = Windows::default();
        windows.record(Duration::ZERO, node(1), 5, 100);
        assert_eq!(windows.verdict(node(1), 4, 1_000), Verdict::OldEpoch);
        assert_eq!(windows.verdict(node(1), 6, 0), Verdict::New);
        windows.record(Duration::ZERO, node(1), 6, 0);
        assert_eq!(windows.verdict(node(1), 5, 101), Verdict::OldEpoch);
        assert_eq!(windows.verdict(node(1), 6, 0), Verdict::Old);
    }

    #[test]
    fn memory_is_bounded_and_keeps_the_latest() {
        let mut windows = Windows::default();
        for n in 0..ORIGINS as u64 + 10 {
            windows.record(Duration::from_millis(n), node(n), 1, 1);
        }
        assert_eq!(windows.len(), ORIGINS);
        assert_eq!(windows.verdict(node(ORIGINS as u64), 1, 1), Verdict::Old);
    }
}
