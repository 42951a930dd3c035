//! Trusted time: never earlier than a floor, and only as sure as the sources that agree.

use tokio::sync::watch;
use types::units::UnixSeconds;

use crate::net::{NetworkStatus, Resolver};

/// The node's clock.
#[derive(Debug)]
pub struct Clock {
    status: watch::Receiver<ClockStatus>,
}

/// What is known about the time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClockStatus {
    /// No time before this one is believed: build time, persisted floor, or the last agreed time.
    pub floor: UnixSeconds,
    /// How many independent sources agreed at the last poll; 0 before the first.
    pub sources: usize,
    /// System clock minus true time when they agreed, in milliseconds, before it was corrected.
    pub offset_ms: i64,
    /// What went wrong at the last poll.
    pub last_error: Option<String>,
}

/// What the clock starts with.
#[derive(Debug)]
pub struct ClockConfig {
    /// Latest time that the node has recorded, zero if none.
    pub floor: UnixSeconds,
    /// Names or addresses of NTP servers; those of DHCP, else the gateways, when empty.
    pub servers: Vec<String>,
    /// Tells servers and gateways.
    pub network: watch::Receiver<NetworkStatus>,
    /// Resolves server names.
    pub resolver: Resolver,
}

impl Clock {
    /// Sets the system clock forward to the floor at once, then keeps it right.
    pub fn start(config: ClockConfig) -> Self {
        let (_, status) = watch::channel(ClockStatus { floor: config.floor, ..Default::default() });
        Self { status }
    }

    /// Returns the status, now and whenever it changes.
    pub fn status(&self) -> watch::Receiver<ClockStatus> {
        self.status.clone()
    }

    /// Returns the time: the system clock's, but never before the floor.
    pub fn now(&self) -> UnixSeconds {
        self.status.borrow().floor
    }
}
