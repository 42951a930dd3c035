//! The control queue of a network device: by it the driver says how many pairs of queues it uses, and
//! which frames it takes without checksums and unsegmented.
//! Source: virtio §5.1.6.5 "Control Virtqueue", of it "Automatic receive steering in multiqueue mode" and
//! "Offloads State Configuration".
//!
//! | Bytes | Field           | Written by | Value                                                |
//! |-------|-----------------|------------|------------------------------------------------------|
//! | 1     | class           | driver     | 4, VIRTIO_NET_CTRL_MQ                                |
//! | 1     | command         | driver     | 0, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET                   |
//! | 2     | virtqueue_pairs | driver     | 1 up to the pairs that it has enabled                |
//! | 1     | ack             | device     | 0, VIRTIO_NET_OK, or 1, VIRTIO_NET_ERR               |
//!
//! | Bytes | Field           | Written by | Value                                                |
//! |-------|-----------------|------------|------------------------------------------------------|
//! | 1     | class           | driver     | 5, VIRTIO_NET_CTRL_GUEST_OFFLOADS                    |
//! | 1     | command         | driver     | 0, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET                |
//! | 8     | offloads        | driver     | those that are on, as feature bits; others are off   |
//! | 1     | ack             | device     | 0, VIRTIO_NET_OK, or 1, VIRTIO_NET_ERR               |
//!
//! Everything else that a driver may say there belongs to features that are not offered, and is an
//! error. How the bytes are spread over descriptors is the driver's affair (virtio §2.7.4).
//!
//! Both take locks that all of the host's network shares. So a driver that goes on asking is answered at a
//! pace, and later than it would like.

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
/// VIRTIO_NET_CTRL_GUEST_OFFLOADS.
const CLASS_GUEST_OFFLOADS: u8 = 5;
/// VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET.
const GUEST_OFFLOADS_SET: u8 = 0;
/// VIRTIO_NET_OK and VIRTIO_NET_ERR.
const OK: u8 = 0;
const ERR: u8 = 1;

/// Bytes of the longest command.
const LONGEST: usize = 10;
/// Commands answered before the thread looks at its orders again.
const BATCH: u16 = 16;
/// Commands answered each second, and how many at once: a driver sends one when it starts and one for
/// each change that its administrator makes. Windows' NetKVM waits half a second for an answer.
const PACE: RateLimit =
    RateLimit { bytes: None, operations: Some(Rate { per_second: 10, burst: 16 }) };

/// The device that the driver gives its commands to. What fails changes nothing.
pub trait Card {
    /// Returns how many pairs of queues can be used: those that the driver has enabled, from the first on.
    fn possible_pairs(&self) -> u16;

    /// Uses the first `count` pairs and no others. `count` is at least 1 and at most
    /// [`Self::possible_pairs`].
    fn set_pairs(&mut self, count: u16) -> Result<(), Refused>;

    /// Takes the guest offloads whose feature bits these are, and no others. They are the driver's word.
    fn set_offloads(&mut self, offloads: u64) -> Result<(), Refused>;
}

/// The driver may not ask that, or the host cannot do it.
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
        card: &mut impl Card,
        pace: &mut Pace,
        now: Instant,
    ) -> Result<Progress, RingError> {
        let kicked = self.queue.kick.read().is_ok();
        if !kicked && self.progress == Progress::Idle {
            return Ok(Progress::Idle);
        }
        self.progress = self.answer_batch(card, pace, now)?;
        if self.queue.ring.needs_signal()? {
            self.queue.signal.trigger();
        }
        Ok(self.progress)
    }

    fn answer_batch(
        &mut self,
        card: &mut impl Card,
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
            let written = answer(ring, &chain, card);
            ring.push_used(chain.head, written)?;
        }
        Ok(Progress::More)
    }
}

/// What a driver may ask for.
enum Command {
    Pairs(u16),
    Offloads(u64),
}

/// Carries out one command and says how that went, in the first byte that the driver left for it.
/// Returns the bytes written; a driver that left no such byte hears nothing, and nothing is done.
fn answer(ring: &Ring, chain: &Chain, card: &mut impl Card) -> u32 {
    let Some(place) = chain.writable.first() else { return 0 };
    let ack = read_command(ring, chain).map_or(ERR, |command| carry_out(&command, card));
    ring.ram().write_slice(&[ack], place.address).map_or(0, |()| 1)
}

fn carry_out(command: &Command, card: &mut impl Card) -> u8 {
    let outcome = match *command {
        Command::Pairs(count) if (1..=card.possible_pairs()).contains(&count) => {
            card.set_pairs(count)
        }
        Command::Pairs(_) => Err(Refused),
        Command::Offloads(offloads) => card.set_offloads(offloads),
    };
    outcome.map_or(ERR, |()| OK)
}

/// Returns the command, wherever its bytes lie; `None` when it is none, has another length or is not in memory.
fn read_command(ring: &Ring, chain: &Chain) -> Option<Command> {
    let mut bytes = [0; LONGEST];
    let mut length = 0;
    for segment in &chain.readable {
        let end = usize::try_from(segment.length).ok()?.checked_add(length)?;
        let part = bytes.get_mut(length..end)?;
        ring.ram().read_slice(part, segment.address).ok()?;
        length = end;
    }
    let [class, command, operand @ ..] = bytes.get(..length)? else { return None };
    match (*class, *command) {
        (CLASS_MQ, VQ_PAIRS_SET) => {
            Some(Command::Pairs(u16::from_le_bytes(operand.try_into().ok()?)))
        }
        (CLASS_GUEST_OFFLOADS, GUEST_OFFLOADS_SET) => {
            Some(Command::Offloads(u64::from_le_bytes(operand.try_into().ok()?)))
        }
        _ => None,
    }
}
