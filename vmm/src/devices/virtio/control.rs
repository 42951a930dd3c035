//! The control queue of a network device: by it the driver says how many pairs of queues it uses.
//! Source: virtio §5.1.6.5 "Control Virtqueue"; §5.1.6.5.5 "Automatic receive steering in multiqueue
//! mode".
//!
//! | Bytes | Field                   | Written by | Value                                        |
//! |-------|-------------------------|------------|----------------------------------------------|
//! | 1     | class                   | driver     | 4, VIRTIO_NET_CTRL_MQ                        |
//! | 1     | command                 | driver     | 0, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET           |
//! | 2     | virtqueue_pairs         | driver     | 1 up to the pairs that it has enabled        |
//! | 1     | ack                     | device     | 0, VIRTIO_NET_OK, or 1, VIRTIO_NET_ERR       |
//!
//! Everything else that a driver may say there belongs to features that are not offered, and is an
//! error. How the bytes are spread over descriptors is the driver's affair (virtio §2.7.4).
//!
//! Turning pairs on and off takes locks that all of the host's network shares. So a driver that goes on
//! asking is answered at a pace, and later than it would like.

use std::time::Instant;

use types::vm::{Rate, RateLimit};
use vm_memory::Bytes;

use super::{
    ReadyQueue,
    ring::{Chain, Ring, RingError},
};
use crate::devices::throttle::{Admission, Throttle};

/// VIRTIO_NET_CTRL_MQ.
const CLASS_MQ: u8 = 4;
/// VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET.
const VQ_PAIRS_SET: u8 = 0;
/// VIRTIO_NET_OK and VIRTIO_NET_ERR.
const OK: u8 = 0;
const ERR: u8 = 1;

/// Bytes of the only command there is.
const COMMAND_SIZE: usize = 4;
/// Commands answered before the thread looks at its orders again.
const BATCH: u16 = 16;
/// Commands answered each second, and how many at once: a driver sends one when it starts and one for
/// each change that its administrator makes. Windows' NetKVM waits half a second for an answer.
const PACE: RateLimit =
    RateLimit { bytes: None, operations: Some(Rate { per_second: 10, burst: 16 }) };

/// The pairs of queues of a device.
pub trait Pairs {
    /// Returns how many can be used: those that the driver has enabled, from the first on.
    fn possible(&self) -> u16;

    /// Uses the first `count` pairs and no others. `count` is at least 1 and at most
    /// [`Self::possible`]. When that fails, what was used before is used still.
    fn set(&mut self, count: u16) -> Result<(), Refused>;
}

/// The host cannot do what the driver asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

/// How fast a device answers commands. It outlives resets, which a driver may ask for at any time.
#[derive(Debug)]
pub struct Pace(Option<Throttle>);

impl Pace {
    /// Returns the pace of a device that was asked nothing before `now`.
    pub fn new(now: Instant) -> Self {
        Self(Throttle::new(Some(PACE), now))
    }

    /// Takes the turn of one command; returns when that is.
    pub(super) fn admit(&mut self, now: Instant) -> Instant {
        match self.0.as_mut().map(|throttle| throttle.admit(now, 0)) {
            Some(Admission::At(time)) => time,
            Some(Admission::Now) | None => now,
        }
    }
}

/// When the queue wants to be looked at again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// When the driver kicks.
    Idle,
    /// At once.
    More,
    /// At this time: a command waits for it.
    At(Instant),
}

/// A control queue that the driver has enabled.
#[derive(Debug)]
pub struct ControlQueue {
    queue: ReadyQueue,
    /// A command that was taken from the ring and waits for its time, which this is.
    taken: Option<(Chain, Instant)>,
    progress: Progress,
}

impl ControlQueue {
    /// Returns the queue, which may hold commands already.
    pub fn new(queue: ReadyQueue) -> Self {
        Self { queue, taken: None, progress: Progress::More }
    }

    /// Returns the queue's parts, its doorbell above all.
    pub fn queue(&self) -> &ReadyQueue {
        &self.queue
    }

    /// Answers what there is, up to a batch. An error means that the ring makes no sense.
    pub fn turn(
        &mut self,
        pairs: &mut impl Pairs,
        pace: &mut Pace,
        now: Instant,
    ) -> Result<Progress, RingError> {
        let kicked = self.queue.kick.read().is_ok();
        if !kicked && self.progress == Progress::Idle {
            return Ok(Progress::Idle);
        }
        self.progress = self.answer_batch(pairs, pace, now)?;
        if self.queue.ring.needs_signal()? {
            self.queue.signal.trigger();
        }
        Ok(self.progress)
    }

    fn answer_batch(
        &mut self,
        pairs: &mut impl Pairs,
        pace: &mut Pace,
        now: Instant,
    ) -> Result<Progress, RingError> {
        let ring = &mut self.queue.ring;
        ring.disable_kicks()?;
        for _ in 0..BATCH {
            let taken = match self.taken.take() {
                Some(taken) => Some(taken),
                None => ring.pop()?.map(|chain| (chain, pace.admit(now))),
            };
            let Some((chain, time)) = taken else {
                if ring.enable_kicks()? {
                    continue;
                }
                return Ok(Progress::Idle);
            };
            if time > now {
                self.taken = Some((chain, time));
                return Ok(Progress::At(time));
            }
            let written = answer(ring, &chain, pairs);
            ring.push_used(chain.head, written)?;
        }
        Ok(Progress::More)
    }
}

/// Carries out one command and says how that went, in the first byte that the driver left for it.
/// Returns the bytes written; a driver that left no such byte hears nothing, and nothing is done.
fn answer(ring: &Ring, chain: &Chain, pairs: &mut impl Pairs) -> u32 {
    let Some(place) = chain.writable.first() else { return 0 };
    let ack = match read_command(ring, chain) {
        Some([CLASS_MQ, VQ_PAIRS_SET, low, high]) => set(pairs, u16::from_le_bytes([low, high])),
        _ => ERR,
    };
    ring.ram().write_slice(&[ack], place.address).map_or(0, |()| 1)
}

fn set(pairs: &mut impl Pairs, count: u16) -> u8 {
    if !(1..=pairs.possible()).contains(&count) {
        return ERR;
    }
    pairs.set(count).map_or(ERR, |()| OK)
}

/// Returns the command, wherever its bytes lie; `None` when it has another length or is not in memory.
fn read_command(ring: &Ring, chain: &Chain) -> Option<[u8; COMMAND_SIZE]> {
    let mut command = [0; COMMAND_SIZE];
    let mut rest = command.as_mut_slice();
    for segment in &chain.readable {
        let length = usize::try_from(segment.length).ok()?;
        let (part, behind) = rest.split_at_mut_checked(length)?;
        ring.ram().read_slice(part, segment.address).ok()?;
        rest = behind;
    }
    rest.is_empty().then_some(command)
}
