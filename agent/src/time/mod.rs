//! Trusted time: never earlier than a floor, and only as sure as the sources that agree.
//!
//! The floor is the largest of: the build's time, the last time on which two sources or more agreed, the
//! last time after a source had confirmed the clock, and the last time that the caller has seen. The last of
//! these may come from a hardware clock that is years ahead: any source overrules it. What a source had
//! confirmed two overrule that agree, one does not; and nobody what two had agreed on ([`Standing`]).
//!
//! Sources are NTP servers: the configured ones, else those that DHCP names, else the gateways; and servers of
//! authenticated time ([`nts`]), which silence those that were only found. [`Clock`] asks them, sets the
//! system clock when they agree ([`select`]), and tells how many agree, because what cannot be undone must not
//! depend on one. Small errors are slewed away, large ones are steps. It disciplines no frequency: between two
//! polls an oscillator loses less than anyone here minds. A clock that sources confirm the kernel writes to
//! the hardware clock, with which the next start begins.

pub mod nts;
pub mod select;
pub mod sntp;

mod manners;
mod poll;
mod secure;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::time::{ClockId, Timespec, clock_settime};
use tokio::{sync::watch, task::JoinHandle};
use types::units::UnixSeconds;

pub use self::secure::NtsConfig;
use self::select::Trust;
use crate::net::{NetworkStatus, Resolver};

/// No release is older than this: 2026-11-01T00:00:00Z, when the build does not say its time.
const OLDEST_BUILD: u64 = 1_793_491_200;

/// Returns the time of the build, before which no clock is right.
pub fn build_time() -> UnixSeconds {
    let said = option_env!("SOURCE_DATE_EPOCH").and_then(|text| text.parse().ok());
    UnixSeconds(said.unwrap_or(0).max(OLDEST_BUILD))
}

/// The node's clock; stops being kept right when dropped.
#[derive(Debug)]
pub struct Clock {
    status: watch::Receiver<ClockStatus>,
    system: Arc<dyn SystemClock>,
    /// Latest time handed out while two sources agreed, in seconds since 1970.
    seen: AtomicU64,
    task: JoinHandle<()>,
}

/// What is known about the time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClockStatus {
    /// No time before this one is believed.
    pub floor: UnixSeconds,
    /// How many independent sources agreed at the last poll; 0 before the first, or when they
    /// contradict each other.
    pub sources: usize,
    /// True time minus system time when they agreed, in milliseconds, before it was corrected.
    pub offset_ms: i64,
    /// Whether sources have set the system clock, or found it right, since the start.
    pub trust: Trust,
    /// What went wrong at the last poll.
    pub last_error: Option<String>,
}

impl ClockStatus {
    /// Returns what the time rests on.
    pub fn standing(&self) -> Standing {
        match self.trust {
            _ if self.sources >= poll::SURE => Standing::Agreed,
            Trust::Set => Standing::Confirmed,
            Trust::Unset => Standing::Seen,
        }
    }
}

/// What a time rests on, the least first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// The hardware clock, and what was known at the start. A source may say that it is earlier.
    #[default]
    Seen,
    /// A source, which has confirmed the clock since the start. Two that agree may say that it is earlier.
    Confirmed,
    /// Two sources or more, which agreed at the last poll. It is never again earlier.
    Agreed,
}

/// What the clock starts with.
#[derive(Debug)]
pub struct ClockConfig {
    /// Latest time that the node has seen and persisted, zero if none. A source overrules it.
    pub seen: UnixSeconds,
    /// Latest time of them after a source had confirmed the clock, zero if none. Two sources that agree
    /// overrule it.
    pub confirmed: UnixSeconds,
    /// Latest time on which two sources had agreed, zero if none. Nothing overrules it.
    pub agreed: UnixSeconds,
    /// Names or addresses of NTP servers; those of DHCP, else the gateways, when empty.
    pub servers: Vec<String>,
    /// Servers of authenticated time, if there are any.
    pub nts: Option<NtsConfig>,
    /// Tells servers and gateways.
    pub network: watch::Receiver<NetworkStatus>,
    /// Resolves server names.
    pub resolver: Resolver,
}

/// The clock of the machine, or what stands for it in a test.
pub trait SystemClock: std::fmt::Debug + Send + Sync {
    /// Returns the time since 1970-01-01T00:00:00Z.
    fn now(&self) -> Duration;
    /// Sets it.
    fn set(&self, time: Duration) -> io::Result<()>;
    /// Lets it catch up by so many microseconds without a step; at most two seconds.
    fn slew(&self, offset_us: i64) -> io::Result<()>;
    /// Says that it is right within `error`, so that the hardware clock may be set by it.
    fn confirm(&self, error: Duration) -> io::Result<()>;
}

/// The kernel's clock.
#[derive(Debug)]
pub struct KernelClock;

impl SystemClock for KernelClock {
    fn now(&self) -> Duration {
        // A clock before 1970 is as good as one at 1970.
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }

    fn set(&self, time: Duration) -> io::Result<()> {
        let tv_sec = i64::try_from(time.as_secs()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let tv_nsec = i64::from(time.subsec_nanos());
        Ok(clock_settime(ClockId::Realtime, Timespec { tv_sec, tv_nsec })?)
    }

    fn slew(&self, offset_us: i64) -> io::Result<()> {
        crate::sys::clock::slew(offset_us)
    }

    fn confirm(&self, error: Duration) -> io::Result<()> {
        crate::sys::clock::confirm(error)
    }
}

impl Clock {
    /// Sets the system clock forward to the floor at once, then keeps it right.
    ///
    /// Must be called inside a tokio runtime.
    pub fn start(config: ClockConfig) -> Self {
        Self::start_with(config, Arc::new(KernelClock))
    }

    /// Like [`Clock::start`], with a clock of choice.
    pub fn start_with(config: ClockConfig, system: Arc<dyn SystemClock>) -> Self {
        let known = config.seen.max(config.confirmed).max(config.agreed);
        let floor = known.max(build_time());
        let mut status = ClockStatus { floor, ..ClockStatus::default() };
        let at_least = Duration::from_secs(floor.0);
        if system.now() < at_least
            && let Err(error) = system.set(at_least)
        {
            status.last_error = Some(format!("cannot set the system clock: {error}"));
        }
        let (publish, status) = watch::channel(status);
        let poller = poll::Poller::new(config, Arc::clone(&system), publish);
        Self { status, system, seen: AtomicU64::new(0), task: tokio::spawn(poller.run()) }
    }

    /// Returns the status, now and whenever it changes.
    pub fn status(&self) -> watch::Receiver<ClockStatus> {
        self.status.clone()
    }

    /// Returns the time: the system clock's, but never before the floor, and, once two sources have
    /// agreed, never before what it has returned since.
    pub fn now(&self) -> UnixSeconds {
        self.believe(self.system.now())
    }

    /// Returns the same in milliseconds. Of a time that is not the system clock's, no more than the second
    /// is known.
    pub fn now_ms(&self) -> u64 {
        let system = self.system.now();
        let now = self.believe(system).0;
        let ms = if now == system.as_secs() { system.subsec_millis().into() } else { 0 };
        now.saturating_mul(1000).saturating_add(ms)
    }

    fn believe(&self, system: Duration) -> UnixSeconds {
        let (floor, sources) = {
            let status = self.status.borrow();
            (status.floor, status.sources)
        };
        let now = system.as_secs().max(floor.0);
        // A clock that is years ahead must not stick, the hardware's or a lone source's, so only what
        // two agree on does.
        let seen = if sources >= poll::SURE {
            self.seen.fetch_max(now, Ordering::Relaxed)
        } else {
            self.seen.load(Ordering::Relaxed)
        };
        UnixSeconds(now.max(seen))
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.task.abort();
    }
}
