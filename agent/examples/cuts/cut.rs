//! Where the power is cut, and what the disk holds then.

use anyhow::Result;

use crate::{
    disk::Disk,
    log::{Entry, Log, What},
};

/// What a disk writes as a whole.
const SECTOR: u64 = 512;

/// One way of losing power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// How many entries of the log came before.
    pub(crate) after: usize,
    /// What became of those that were not durable yet.
    pub(crate) how: How,
}

/// What became of writes that were not durable yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// All were done.
    Whole,
    /// The last was done up to some sector, and all others were done.
    Torn,
    /// Some were done, by this seed, and one of them up to some sector.
    Mixed(u64),
}

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.how {
            How::Whole => write!(f, "{}", self.after),
            How::Torn => write!(f, "{}-torn", self.after),
            How::Mixed(seed) => write!(f, "{}-mixed-{seed}", self.after),
        }
    }
}

impl std::str::FromStr for Cut {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("{text} is no cut; expected as 17, 17-torn or 17-mixed-3");
        let mut parts = text.split('-');
        let after = parts.next().and_then(|part| part.parse().ok()).ok_or_else(error)?;
        let how = match (parts.next(), parts.next()) {
            (None, None) => How::Whole,
            (Some("torn"), None) => How::Torn,
            (Some("mixed"), Some(seed)) => How::Mixed(seed.parse().map_err(|_| error())?),
            _ => return Err(error()),
        };
        Ok(Self { after, how })
    }
}

/// Chooses `points` cuts, in the order of the log: after each write first, then torn ones, then mixed
/// ones where something can be mixed. Fewer are spread evenly over the log.
pub(crate) fn choose(entries: &[Entry], points: usize) -> Vec<Cut> {
    let whole = (0..=entries.len()).map(|after| Cut { after, how: How::Whole });
    let writes = |entry: &Entry| matches!(entry.what, What::Write { .. });
    let mut pending = 0;
    let mut torn = Vec::new();
    let mut mixable = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        pending = if entry.what == What::Flush { 0 } else { pending + 1 };
        if writes(entry) && entry.length > SECTOR {
            torn.push(Cut { after: index + 1, how: How::Torn });
        }
        if pending > 1 {
            mixable.push(index + 1);
        }
    }
    let mut cuts: Vec<Cut> = whole.chain(torn).collect();
    let mut seed = 0;
    while cuts.len() < points && !mixable.is_empty() {
        cuts.extend(mixable.iter().map(|&after| Cut { after, how: How::Mixed(seed) }));
        seed += 1;
    }
    let all = cuts.len();
    let kept = points.min(all);
    let mut cuts: Vec<Cut> = (0..kept).map(|index| cuts[index * all / kept]).collect();
    cuts.sort_by_key(|cut| cut.after);
    cuts
}

/// Makes disks as cuts leave them, in the order of the log.
pub(crate) struct Replay<'a> {
    log: &'a Log,
    /// Everything that is durable for certain.
    durable: Disk,
    /// How many entries are in it.
    done: usize,
}

impl<'a> Replay<'a> {
    /// Begins with the disk as it was before the first entry.
    pub(crate) fn new(log: &'a Log, base: Disk) -> Self {
        Self { log, durable: base, done: 0 }
    }

    /// Returns the disk after a cut, which must not be before an earlier one.
    pub(crate) fn disk(&mut self, cut: Cut) -> Result<Disk> {
        let entries = &self.log.entries[..cut.after.min(self.log.entries.len())];
        let flushed = entries.iter().rposition(|entry| entry.what == What::Flush).unwrap_or(0);
        while self.done < flushed {
            apply(&mut self.durable, self.log, self.done, u64::MAX)?;
            self.done += 1;
        }
        let mut disk = self.durable.clone();
        let pending = &entries[self.done.min(entries.len())..];
        let last = pending.len().saturating_sub(1);
        let mut dice = Dice::new(cut);
        let torn = match cut.how {
            How::Whole => None,
            How::Torn => Some(last),
            How::Mixed(_) => usize::try_from(dice.below(pending.len() as u64 + 1)).ok(),
        };
        for (index, entry) in pending.iter().enumerate() {
            let durable = matches!(entry.what, What::Write { durable: true, .. }) && index < last;
            let mixed = matches!(cut.how, How::Mixed(_));
            if mixed && !durable && dice.below(2) == 0 {
                continue;
            }
            let sectors = entry.length / SECTOR;
            let whole = Some(index) != torn || durable || sectors < 2;
            let kept = if whole { entry.length } else { SECTOR * (1 + dice.below(sectors - 1)) };
            apply(&mut disk, self.log, self.done + index, kept)?;
        }
        Ok(disk)
    }
}

/// Does what the entry with this number did, for the first `most` bytes of it.
fn apply(disk: &mut Disk, log: &Log, number: usize, most: u64) -> Result<()> {
    let entry = &log.entries[number];
    match entry.what {
        What::Flush => return Ok(()),
        What::Discard => return Ok(disk.give_up(entry.offset, entry.length.min(most))?),
        What::Write { .. } => {}
    }
    let bytes = log.bytes(entry)?;
    let kept = usize::try_from(most).unwrap_or(usize::MAX).min(bytes.len());
    Ok(disk.put(entry.offset, &bytes[..kept], number as u64 + 1)?)
}

/// Numbers that a cut determines (Steele et al., SplitMix64).
struct Dice(u64);

impl Dice {
    fn new(cut: Cut) -> Self {
        let seed = if let How::Mixed(seed) = cut.how { seed } else { 0 };
        Self((cut.after as u64) << 32 ^ seed)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % limit.max(1)
    }
}
