//! Choices that need no secrecy: whom to dial, when to jitter.
//!
//! SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).

use std::time::Duration;

/// A seeded sequence: the same seed makes the same choices.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts a sequence.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next value.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a value below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let value = self.draw() % bound as u64;
        usize::try_from(value).expect("below a usize")
    }

    /// Returns one of `items`.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        if items.is_empty() { None } else { items.get(self.below(items.len())) }
    }

    /// Returns up to `count` of `items`, in random order.
    pub fn sample<T>(&mut self, mut items: Vec<T>, count: usize) -> Vec<T> {
        let mut chosen = Vec::new();
        while chosen.len() < count && !items.is_empty() {
            chosen.push(items.swap_remove(self.below(items.len())));
        }
        chosen
    }

    /// Returns `time` plus or minus a quarter.
    pub fn jitter(&mut self, time: Duration) -> Duration {
        let share = u32::try_from(self.below(513)).unwrap_or(0);
        time * (768 + share) / 1024
    }
}
