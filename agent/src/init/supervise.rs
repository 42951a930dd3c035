//! When the agent is started again. Pure.

use std::time::{Duration, Instant};

/// Delay before the first restart: long enough not to spin, short enough that nobody waits.
pub const FIRST_DELAY: Duration = Duration::from_millis(250);

/// Longest delay: a broken agent still gets a try every half minute, since a cable or a disk may
/// be what it lacks.
pub const LONGEST_DELAY: Duration = Duration::from_secs(30);

/// An agent that lived this long was sound, and its next restart starts over at the first delay.
pub const SOUND_AFTER: Duration = Duration::from_secs(60);

/// An agent that said nothing yet hangs after this long and is killed: it looks at devices, disks and a TPM
/// before it says something.
pub const START_LIMIT: Duration = Duration::from_secs(120);

/// An agent that said something once, and nothing for this long since, hangs and is killed: twice the time
/// after which the kernel gives a disk's request up, for which it may have to wait.
pub const LIVENESS: Duration = Duration::from_secs(60);

/// The agent's life, as far as init cares.
#[derive(Debug)]
pub struct Supervisor {
    state: State,
    delay: Duration,
    starts: u32,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Waiting {
        until: Option<Instant>,
    },
    /// `silent_at` is when it hangs, unless it says something before.
    Running {
        since: Instant,
        heard: Instant,
        silent_at: Instant,
    },
    Retired,
}

impl Default for Supervisor {
    fn default() -> Self {
        Self { state: State::Waiting { until: None }, delay: FIRST_DELAY, starts: 0 }
    }
}

impl Supervisor {
    /// Returns whether the agent is to be started now.
    pub fn poll_start(&self, now: Instant) -> Start {
        match self.state {
            State::Waiting { until } if until.is_none_or(|until| now >= until) => Start::Now,
            State::Waiting { .. } | State::Running { .. } | State::Retired => Start::Later,
        }
    }

    /// The agent was started. Returns how often that has happened.
    pub fn handle_started(&mut self, now: Instant) -> u32 {
        self.state = State::Running { since: now, heard: now, silent_at: now + START_LIMIT };
        self.starts += 1;
        self.starts
    }

    /// The agent gave a sign of life.
    pub fn handle_alive(&mut self, now: Instant) {
        if let State::Running { heard, silent_at, .. } = &mut self.state {
            (*heard, *silent_at) = (now, now + LIVENESS);
        }
    }

    /// The agent ended, or could not be started. Returns the delay before the next start.
    pub fn handle_ended(&mut self, now: Instant) -> Duration {
        match self.state {
            State::Running { since, .. } if now - since >= SOUND_AFTER => self.delay = FIRST_DELAY,
            State::Retired => return Duration::ZERO,
            State::Running { .. } | State::Waiting { .. } => {}
        }
        let delay = self.delay;
        self.state = State::Waiting { until: Some(now + delay) };
        self.delay = (self.delay * 2).min(LONGEST_DELAY);
        delay
    }

    /// Returns for how long the agent has been silent if it hangs and is to be killed. A kernel that cannot
    /// end it yet is asked again after [`LIVENESS`].
    pub fn poll_silent(&mut self, now: Instant) -> Option<Duration> {
        match &mut self.state {
            State::Running { heard, silent_at, .. } if now >= *silent_at => {
                *silent_at = now + LIVENESS;
                Some(now - *heard)
            }
            State::Running { .. } | State::Waiting { .. } | State::Retired => None,
        }
    }

    /// The node goes down: no further start.
    pub fn retire(&mut self) {
        self.state = State::Retired;
    }

    /// Returns when something is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Waiting { until } => until,
            State::Running { silent_at, .. } => Some(silent_at),
            State::Retired => None,
        }
    }
}

/// Whether to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Start it.
    Now,
    /// Not yet, or it runs.
    Later,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_to_a_bound_and_start_over_after_a_sound_life() {
        let mut now = Instant::now();
        let mut supervisor = Supervisor::default();
        let mut delays = Vec::new();
        for _ in 0..9 {
            assert_eq!(supervisor.poll_start(now), Start::Now);
            supervisor.handle_started(now);
            delays.push(supervisor.handle_ended(now).as_millis());
            assert_eq!(supervisor.poll_start(now), Start::Later);
            now = supervisor.poll_timeout().expect("a restart is due");
        }
        assert_eq!(delays, [250, 500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        supervisor.handle_started(now);
        assert_eq!(supervisor.handle_ended(now + SOUND_AFTER), FIRST_DELAY);
    }

    #[test]
    fn a_silent_agent_is_noticed_and_a_retired_one_never_started() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let mut supervisor = Supervisor::default();
        supervisor.handle_started(now);
        assert_eq!(supervisor.poll_silent(after(119)), None);
        assert_eq!(supervisor.poll_silent(after(120)), Some(START_LIMIT));
        supervisor.handle_started(now);
        supervisor.handle_alive(after(100));
        assert_eq!(supervisor.poll_silent(after(159)), None);
        assert_eq!(supervisor.poll_timeout(), Some(after(160)));
        assert_eq!(supervisor.poll_silent(after(160)), Some(LIVENESS));
        // It waits for a disk, and cannot be ended yet.
        assert_eq!(supervisor.poll_silent(after(161)), None);
        assert_eq!(supervisor.poll_silent(after(220)), Some(LIVENESS * 2));
        supervisor.retire();
        supervisor.handle_ended(now);
        assert_eq!(supervisor.poll_start(now + LIVENESS), Start::Later);
        assert_eq!(supervisor.poll_silent(after(999)), None);
    }
}
