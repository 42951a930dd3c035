//! Token buckets without quanta: a request waits exactly until its tokens exist.
//!
//! Each bucket keeps one number, the time at which it will be full of tokens that it owes nobody
//! ("theoretical arrival time" of ITU-T I.371, annex A). Taking tokens moves that time ahead by
//! what they cost; a request may go as soon as the time is no further ahead than the burst. So
//! nothing is refilled by a timer, and nothing is rounded to a tick. A request that is larger than
//! the burst goes when the bucket is full, and those behind it wait for what it overdrew.
//!
//! Turns are taken in the order in which requests ask: one that has to wait is told when it goes, and
//! its tokens are spoken for from then on. So small requests of one queue do not keep a large one of
//! another from ever finding enough. A request that never goes, because its queue was reset, has used
//! its turn all the same.
//!
//! Holds no clock: time is an argument.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use types::vm::{Rate, RateLimit};

const NANOSECONDS: u128 = 1_000_000_000;

/// One limit.
#[derive(Debug, Clone)]
pub struct Throttle {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

/// When a request may go. Its tokens are taken, so it does not ask again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Now.
    Now,
    /// At this time, which is never before that of one who asked earlier.
    At(Instant),
}

#[derive(Debug, Clone)]
struct Bucket {
    per_second: u64,
    burst: u64,
    /// When all that was taken is paid for.
    paid: Instant,
}

impl Throttle {
    /// Returns full buckets for `limit`, or `None` where nothing is bounded.
    pub fn new(limit: Option<RateLimit>, now: Instant) -> Option<Self> {
        let limit = limit?;
        let bucket = |rate: Rate| Bucket {
            per_second: rate.per_second.max(1),
            burst: rate.burst,
            paid: now,
        };
        let throttle =
            Self { bytes: limit.bytes.map(bucket), operations: limit.operations.map(bucket) };
        (throttle.bytes.is_some() || throttle.operations.is_some()).then_some(throttle)
    }

    /// Takes the tokens of one request that moves `bytes`, and says when they exist.
    pub fn admit(&mut self, now: Instant, bytes: u64) -> Admission {
        let ready = |bucket: &Option<Bucket>, cost| {
            bucket.as_ref().map_or(now, |bucket| bucket.ready(now, cost))
        };
        let at = ready(&self.bytes, bytes).max(ready(&self.operations, 1)).max(now);
        if let Some(bucket) = &mut self.bytes {
            bucket.take(at, bytes);
        }
        if let Some(bucket) = &mut self.operations {
            bucket.take(at, 1);
        }
        if at > now { Admission::At(at) } else { Admission::Now }
    }
}

impl Bucket {
    /// Returns when `cost` tokens exist.
    fn ready(&self, now: Instant, cost: u64) -> Instant {
        let wait = self.duration(cost.max(self.burst)) - self.duration(cost);
        // paid + cost − max(burst, cost), without going below the clock's zero.
        let paid = self.paid.max(now);
        paid.checked_sub(wait).unwrap_or(now)
    }

    /// Takes `cost` tokens at a time that [`Self::ready`] allows.
    fn take(&mut self, at: Instant, cost: u64) {
        let paid = self.paid.max(at);
        self.paid = paid.checked_add(self.duration(cost)).unwrap_or(paid);
    }

    /// Returns how long `tokens` take to accrue.
    fn duration(&self, tokens: u64) -> Duration {
        let nanoseconds = u128::from(tokens) * NANOSECONDS / u128::from(self.per_second);
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// All that bounds a disk: what it may move alone, and what all disks may move together. Clones share
/// their tokens.
#[derive(Debug, Clone, Default)]
pub struct Limits(Vec<Arc<Mutex<Throttle>>>);

impl Limits {
    /// Returns `limit` with full buckets. Without one nothing is bounded.
    pub fn new(limit: Option<RateLimit>, now: Instant) -> Self {
        let throttle = Throttle::new(limit, now).map(|throttle| Arc::new(Mutex::new(throttle)));
        Self(throttle.into_iter().collect())
    }

    /// Returns these and `others`.
    pub fn and(mut self, others: &Self) -> Self {
        self.0.extend_from_slice(&others.0);
        self
    }

    /// Takes the tokens of one request that moves `bytes` of each, and says when they exist in all.
    pub fn admit(&self, now: Instant, bytes: u64) -> Admission {
        let turn = |throttle: &Arc<Mutex<Throttle>>| {
            let mut throttle = throttle.lock().unwrap_or_else(PoisonError::into_inner);
            match throttle.admit(now, bytes) {
                Admission::At(at) => at,
                Admission::Now => now,
            }
        };
        let at = self.0.iter().map(turn).max().unwrap_or(now);
        if at > now { Admission::At(at) } else { Admission::Now }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn throttle(
        bytes: Option<(u64, u64)>,
        operations: Option<(u64, u64)>,
        now: Instant,
    ) -> Throttle {
        let rate = |(per_second, burst)| Rate { per_second, burst };
        let limit = RateLimit { bytes: bytes.map(rate), operations: operations.map(rate) };
        Throttle::new(Some(limit), now).expect("a limit")
    }

    /// Admits requests of `bytes` one after the other, each at the first possible time, and
    /// returns when each went, in microseconds.
    fn departures(throttle: &mut Throttle, start: Instant, requests: &[u64]) -> Vec<u128> {
        let mut now = start;
        let go = |bytes: &u64| {
            if let Admission::At(at) = throttle.admit(now, *bytes) {
                now = at;
            }
            (now - start).as_micros()
        };
        requests.iter().map(go).collect()
    }

    #[test]
    fn without_a_limit_there_is_no_throttle() {
        let now = Instant::now();
        assert!(Throttle::new(None, now).is_none());
        let empty = RateLimit { bytes: None, operations: None };
        assert!(Throttle::new(Some(empty), now).is_none());
    }

    #[test]
    fn requests_are_evenly_spaced_behind_the_burst() {
        let now = Instant::now();
        let mut throttle = throttle(Some((1_000_000, 4096)), None, now);
        let times = departures(&mut throttle, now, &[4096; 5]);
        assert_eq!(times, [0, 4096, 8192, 12288, 16384]);
    }

    #[test]
    fn a_saved_burst_goes_at_once() {
        let now = Instant::now();
        let mut throttle = throttle(None, Some((1000, 3)), now);
        assert_eq!(departures(&mut throttle, now, &[1 << 20; 5]), [0, 0, 0, 1000, 2000]);
    }

    #[test]
    fn more_than_the_burst_goes_when_full_and_is_paid_for_after() {
        let now = Instant::now();
        let mut throttle = throttle(Some((1_000_000, 1000)), None, now);
        assert_eq!(departures(&mut throttle, now, &[10_000, 10, 1000]), [0, 9010, 10010]);
    }

    #[test]
    fn the_scarcer_of_two_limits_decides() {
        let now = Instant::now();
        let mut throttle = throttle(Some((1_000_000, 1)), Some((100, 1)), now);
        assert_eq!(
            departures(&mut throttle, now, &[10, 20_000, 1, 1]),
            [0, 10_000, 30_000, 40_000]
        );
    }

    #[test]
    fn idling_saves_no_more_than_the_burst() {
        let start = Instant::now();
        let mut throttle = throttle(None, Some((1000, 2)), start);
        let later = start + Duration::from_secs(3600);
        assert_eq!(departures(&mut throttle, later, &[0; 4]), [0, 0, 1000, 2000]);
    }

    /// Returns when a request that asks at `now` goes.
    fn turn(throttle: &mut Throttle, now: Instant, bytes: u64) -> Instant {
        match throttle.admit(now, bytes) {
            Admission::Now => now,
            Admission::At(at) => at,
        }
    }

    /// One queue asks for 64 KiB once, the other for 4 KiB as soon as its last request went: at the rate,
    /// and with a burst of 64 KiB, that never leaves 64 KiB of tokens.
    #[test]
    fn small_requests_do_not_keep_a_large_one_waiting() {
        let start = Instant::now();
        let mut throttle = throttle(Some((1 << 20, 64 << 10)), None, start);
        let mut small = start;
        for _ in 0..32 {
            small = turn(&mut throttle, small, 4 << 10);
        }
        let large = turn(&mut throttle, small, 64 << 10);
        let behind: Vec<Instant> = (0..3).map(|_| turn(&mut throttle, small, 4 << 10)).collect();
        let milliseconds = |at: Instant| at.duration_since(start).as_secs_f64() * 1000.0;
        // 32 × 4 KiB, less the burst, take 62.5 ms; 64 KiB take as long again, 4 KiB 3.9 ms.
        assert!((milliseconds(small) - 62.5).abs() < 0.01, "{small:?}");
        assert!((milliseconds(large) - 125.0).abs() < 0.01, "{large:?}");
        assert!(behind.iter().all(|at| *at > large));
        assert!((milliseconds(behind[2]) - 125.0 - 3.0 * 3.90625).abs() < 0.01, "{behind:?}");
    }

    #[test]
    fn turns_are_given_in_the_order_of_asking() {
        let now = Instant::now();
        let mut throttle = throttle(Some((1_000_000, 1000)), Some((1000, 4)), now);
        let costs = [10_000, 0, 1, 1000, 5000, 0, 0, 0, 0, 0, 700, 3];
        let turns = costs.map(|bytes| turn(&mut throttle, now, bytes));
        assert!(turns.is_sorted(), "{turns:?}");
    }

    fn operations(per_second: u64) -> RateLimit {
        RateLimit { bytes: None, operations: Some(Rate { per_second, burst: 1 }) }
    }

    /// When each of `asked` requests of `limits` goes, in milliseconds.
    fn milliseconds(limits: &Limits, now: Instant, asked: u32) -> Vec<u128> {
        let turn = |_| match limits.admit(now, 512) {
            Admission::Now => 0,
            Admission::At(at) => at.duration_since(now).as_millis(),
        };
        (0..asked).map(turn).collect()
    }

    #[test]
    fn disks_that_share_a_limit_move_no_more_together_and_one_alone_all_of_it() {
        let now = Instant::now();
        let machine = Limits::new(Some(operations(100)), now);
        let disks = [None; 9].map(|own| Limits::new(own, now).and(&machine));
        assert_eq!(milliseconds(&disks[0], now, 4), [0, 10, 20, 30]);
        assert_eq!(milliseconds(&disks[8], now, 2), [40, 50]);
        assert_eq!(milliseconds(&disks[0].clone(), now, 1), [60]);
    }

    #[test]
    fn a_disk_keeps_to_its_own_limit_as_well() {
        let now = Instant::now();
        let machine = Limits::new(Some(operations(100)), now);
        let slow = Limits::new(Some(operations(10)), now).and(&machine);
        assert_eq!(milliseconds(&slow, now, 3), [0, 100, 200]);
        assert_eq!(milliseconds(&Limits::default().and(&machine), now, 2), [30, 40]);
        assert_eq!(milliseconds(&Limits::new(None, now), now, 2), [0, 0]);
    }

    #[test]
    fn absurd_numbers_are_survived() {
        let now = Instant::now();
        let mut throttle = throttle(Some((0, u64::MAX)), Some((u64::MAX, 0)), now);
        assert_eq!(throttle.admit(now, u64::MAX), Admission::Now);
        throttle.admit(now, u64::MAX);
    }
}
