//! How much one client may ask: a token bucket for each address, in bounded memory.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

/// Requests that a client may make at once after a pause.
pub const BURST: u32 = 400;

/// Requests of one client in a second, in the long run.
pub const PER_SECOND: u32 = 100;

/// Clients that are remembered; a further one waits for a bucket that filled up again.
const MAX_CLIENTS: usize = 16_384;

/// The clients of the last while.
#[derive(Debug, Default)]
pub struct Limits {
    clients: BTreeMap<IpAddr, (f64, Instant)>,
}

impl Limits {
    /// Counts a request of `client`; `None` when it is too many.
    pub fn admit(&mut self, client: IpAddr, now: Instant) -> Option<()> {
        if !self.clients.contains_key(&client) && self.clients.len() >= MAX_CLIENTS {
            let refilled = Duration::from_secs(u64::from(BURST / PER_SECOND) + 1);
            self.clients.retain(|_, (_, at)| now.saturating_duration_since(*at) < refilled);
            if self.clients.len() >= MAX_CLIENTS {
                return None;
            }
        }
        let (tokens, at) = self.clients.entry(client).or_insert((f64::from(BURST), now));
        let gained = now.saturating_duration_since(*at).as_secs_f64() * f64::from(PER_SECOND);
        (*tokens, *at) = ((*tokens + gained).min(f64::from(BURST)), now);
        if *tokens < 1.0 {
            return None;
        }
        *tokens -= 1.0;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        let client = IpAddr::from([127, 0, 0, 1]);
        let passed = (0..BURST + 10).filter(|_| limits.admit(client, now).is_some()).count();
        assert_eq!(passed, BURST as usize);
        assert!(limits.admit(IpAddr::from([127, 0, 0, 2]), now).is_some());
        assert!(limits.admit(client, now + Duration::from_millis(20)).is_some());
    }
}
