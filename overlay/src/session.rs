//! One link's incoming bytes: frames, in order, and no more than a neighbour has reason to send.
//!
//! Each side's first frame is its `Hello`; a second one is a fault. A token bucket bounds what a
//! neighbour makes us do, so that a flood, also one of replays, costs a bounded amount and ends
//! the link.

use std::{collections::VecDeque, time::Duration};

use crate::wire::{self, Frame, Hello, LINK_FRAME, WireError};

/// Work units that a link may cost per second. One unit is one frame, one rumour in it, or one
/// KiB. A network of [`crate::membership::MEMBERS`] nodes causes about 100 per second.
pub const UNITS_PER_SECOND: u64 = 2_000;
/// Units that may come at once: twice the whole directory, which a new neighbour sends.
pub const UNITS_AT_ONCE: u64 = 4 * crate::membership::MEMBERS as u64;

/// Why a link is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum PeerFault {
    #[error("bytes that are no frame: {0}")]
    Wire(#[from] WireError),
    #[error("the first frame is not a Hello")]
    NoHello,
    #[error("a second Hello on one link")]
    SecondHello,
    #[error("more frames or streams per second than any node has reason to send")]
    Flood,
}

/// What a link costs its receiver, per second, when its sender is honest: kept below the bound so
/// that nobody can make an honest node look like a flood by giving it much to hand on.
pub const SENT_PER_SECOND: u64 = UNITS_PER_SECOND * 3 / 4;
/// The same at once.
pub const SENT_AT_ONCE: u64 = UNITS_AT_ONCE * 3 / 4;

/// Streams that a peer may open per second.
pub const STREAMS_PER_SECOND: u64 = 200;
/// Streams that a peer may open at once.
pub const STREAMS_AT_ONCE: u64 = 1_000;

/// Streams that an honest node opens to one peer per second, its own and relayed ones.
pub const OPENED_PER_SECOND: u64 = STREAMS_PER_SECOND * 3 / 4;
/// The same at once.
pub const OPENED_AT_ONCE: u64 = STREAMS_AT_ONCE * 3 / 4;

/// A bound on a rate: tokens that refill with time.
#[derive(Debug)]
pub struct Bucket {
    tokens: u64,
    refilled: Duration,
    per_second: u64,
    at_once: u64,
}

impl Bucket {
    /// Starts full.
    pub fn new(now: Duration, per_second: u64, at_once: u64) -> Self {
        Self { tokens: at_once, refilled: now, per_second, at_once }
    }

    /// Takes `units` if there are as many.
    pub fn spend(&mut self, now: Duration, units: u64) -> Result<(), PeerFault> {
        let passed = now.saturating_sub(self.refilled).as_millis();
        let passed = u64::try_from(passed).unwrap_or(u64::MAX);
        let earned = passed.saturating_mul(self.per_second) / 1_000;
        if earned > 0 {
            self.tokens = self.tokens.saturating_add(earned).min(self.at_once);
            self.refilled = now;
        }
        self.tokens = self.tokens.checked_sub(units).ok_or(PeerFault::Flood)?;
        Ok(())
    }
}

/// The receiving half of a link.
#[derive(Debug)]
pub struct Session {
    /// Bytes of at most one unfinished frame.
    partial: Vec<u8>,
    frames: VecDeque<Frame>,
    hello: Greeting,
    bucket: Bucket,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Greeting {
    Awaited,
    Done,
}

impl Session {
    /// Starts at time `now`.
    pub fn new(now: Duration) -> Self {
        Self {
            partial: Vec::new(),
            frames: VecDeque::new(),
            hello: Greeting::Awaited,
            bucket: Bucket::new(now, UNITS_PER_SECOND, UNITS_AT_ONCE),
        }
    }

    /// Takes bytes as they arrived.
    pub fn handle_bytes(&mut self, now: Duration, bytes: &[u8]) -> Result<(), PeerFault> {
        self.bucket.spend(now, (bytes.len() / 1024) as u64)?;
        self.partial.extend_from_slice(bytes);
        let mut at = 0;
        while let Some((prefix, rest)) = self.partial[at..].split_first_chunk::<4>() {
            let length = wire::frame_length(*prefix, LINK_FRAME)?;
            let Some(value) = rest.get(..length) else { break };
            let frame = Frame::decode(value)?;
            at += 4 + length;
            self.admit(now, frame)?;
        }
        self.partial.drain(..at);
        Ok(())
    }

    /// Returns the next frame.
    pub fn poll_frame(&mut self) -> Option<Frame> {
        self.frames.pop_front()
    }

    /// Returns the next frame if it is the Hello that every link starts with.
    pub fn poll_hello(&mut self) -> Option<Hello> {
        match self.frames.pop_front()? {
            Frame::Hello(hello) => Some(hello),
            other @ (Frame::Ping
            | Frame::Rumours(_)
            | Frame::Shuffle(_)
            | Frame::ShuffleReply(_)
            | Frame::Goodbye(_)) => {
                self.frames.push_front(other);
                None
            }
        }
    }

    fn admit(&mut self, now: Duration, frame: Frame) -> Result<(), PeerFault> {
        let rumours = if let Frame::Rumours(rumours) = &frame { rumours.len() } else { 0 };
        self.bucket.spend(now, 1 + rumours as u64)?;
        match (self.hello, matches!(frame, Frame::Hello(_))) {
            (Greeting::Awaited, false) => return Err(PeerFault::NoHello),
            (Greeting::Done, true) => return Err(PeerFault::SecondHello),
            (Greeting::Awaited, true) => self.hello = Greeting::Done,
            (Greeting::Done, false) => {}
        }
        self.frames.push_back(frame);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Role;

    fn hello() -> Frame {
        let observed = "192.0.2.1:1".parse().expect("an address");
        Frame::Hello(Hello { role: Role::Seed, neighbours: 0, observed })
    }

    #[test]
    fn frames_arrive_whole_in_any_fragmentation() {
        let mut session = Session::new(Duration::ZERO);
        let bytes = [wire::to_frame(&hello()), wire::to_frame(&Frame::Ping)].concat();
        for byte in bytes {
            session.handle_bytes(Duration::ZERO, &[byte]).expect("good bytes");
        }
        assert_eq!(session.poll_frame(), Some(hello()));
        assert_eq!(session.poll_frame(), Some(Frame::Ping));
        assert_eq!(session.poll_frame(), None);
    }

    #[test]
    fn order_is_kept() {
        let mut session = Session::new(Duration::ZERO);
        let ping = wire::to_frame(&Frame::Ping);
        assert_eq!(session.handle_bytes(Duration::ZERO, &ping), Err(PeerFault::NoHello));
        let mut session = Session::new(Duration::ZERO);
        let twice = [wire::to_frame(&hello()), wire::to_frame(&hello())].concat();
        assert_eq!(session.handle_bytes(Duration::ZERO, &twice), Err(PeerFault::SecondHello));
    }

    #[test]
    fn floods_end_the_link_and_slow_talk_does_not() {
        let ping = wire::to_frame(&Frame::Ping);
        let run = |step_ms: u64| {
            let mut session = Session::new(Duration::ZERO);
            session.handle_bytes(Duration::ZERO, &wire::to_frame(&hello())).expect("hello");
            (0..3 * UNITS_AT_ONCE).try_for_each(|n| {
                session.handle_bytes(Duration::from_millis(n * step_ms), &ping)?;
                session.poll_frame();
                Ok(())
            })
        };
        assert_eq!(run(1), Ok(()));
        assert_eq!(run(0), Err(PeerFault::Flood));
    }

    #[test]
    fn long_and_broken_frames_are_faults() {
        let mut session = Session::new(Duration::ZERO);
        let error = session.handle_bytes(Duration::ZERO, &[0xff; 8]);
        assert!(matches!(error, Err(PeerFault::Wire(WireError::PeerLength { .. }))));
    }
}
