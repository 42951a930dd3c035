//! How much one source may ask and hold: a token bucket for its requests, a count of its
//! connections, a memory of signed requests, all of them bounded.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use lease::request::{MAX_AGE_S, ReplayError, ReplayGuard, VerifiedRequest};
use types::units::UnixSeconds;

use crate::prefix::Prefix;

/// Requests that a source may make at once after a pause.
pub const BURST: u32 = 400;

/// Requests of one source in a second, in the long run.
pub const PER_SECOND: u32 = 100;

/// Sources that are remembered; a further one waits for a bucket that filled up again.
const MAX_SOURCES: usize = 16_384;

/// Who sends, as far as it costs something to be another: an IPv4 address, or the /64 of an IPv6
/// address, which is what one subscriber has (RFC 6177 §2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source(IpAddr);

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        })
    }
}

/// Returns who sent a request that came from `peer`: behind one of our `proxies`, the last address of
/// `x-forwarded-for` that is no proxy's. What stands before it anybody may have written.
pub fn client(peer: IpAddr, proxies: &[Prefix], forwarded_for: &[&str]) -> IpAddr {
    let is_proxy = |address| proxies.iter().any(|prefix| prefix.contains(address));
    let mut client = peer;
    for text in forwarded_for.iter().rev().flat_map(|field| field.rsplit(',')) {
        if !is_proxy(client) {
            break;
        }
        let text = text.trim();
        // Some proxies tell the port, too.
        let with_port = || text.parse::<SocketAddr>().map(|address| address.ip());
        let bare = text.trim_start_matches('[').trim_end_matches(']');
        let Ok(address) = bare.parse().or_else(|_| with_port()) else { break };
        client = address;
    }
    client
}

/// The requests of the last while.
#[derive(Debug, Default)]
pub struct Limits {
    sources: BTreeMap<Source, (f64, Instant)>,
}

impl Limits {
    /// Counts a request of `source`; `None` when it is too many.
    pub fn admit(&mut self, source: Source, now: Instant) -> Option<()> {
        if !self.sources.contains_key(&source) && self.sources.len() >= MAX_SOURCES {
            let refilled = Duration::from_secs(u64::from(BURST / PER_SECOND) + 1);
            self.sources.retain(|_, (_, at)| now.saturating_duration_since(*at) < refilled);
            if self.sources.len() >= MAX_SOURCES {
                return None;
            }
        }
        let (tokens, at) = self.sources.entry(source).or_insert((f64::from(BURST), now));
        let gained = now.saturating_duration_since(*at).as_secs_f64() * f64::from(PER_SECOND);
        (*tokens, *at) = ((*tokens + gained).min(f64::from(BURST)), now);
        if *tokens < 1.0 {
            return None;
        }
        *tokens -= 1.0;
        Some(())
    }
}

/// Who signed a request, as far as the gateway knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signer {
    /// A key of which the gateway was shown a lease.
    Renter,
    /// Any other key. There can be as many of them as somebody likes.
    Stranger,
}

/// The signed requests of the last while, each of which counts once. Strangers have a memory of
/// their own, so that they cannot fill the renters'.
#[derive(Debug)]
pub struct Replays {
    renters: ReplayGuard,
    strangers: ReplayGuard,
}

impl Replays {
    /// Remembers up to `capacity` requests of renters and as many of strangers.
    pub fn new(capacity: usize) -> Self {
        let guard = || ReplayGuard::new(capacity, MAX_AGE_S);
        Self { renters: guard(), strangers: guard() }
    }

    /// Remembers a request, or says that it was there before.
    pub fn admit(
        &mut self,
        now: UnixSeconds,
        signer: Signer,
        request: &VerifiedRequest,
    ) -> Result<(), ReplayError> {
        let (own, other) = match signer {
            Signer::Renter => (&mut self.renters, &self.strangers),
            Signer::Stranger => (&mut self.strangers, &self.renters),
        };
        // The signer may have become a renter since.
        if other.knows(request) {
            return Err(ReplayError::Replayed { nonce: request.nonce.clone() });
        }
        own.admit(now, request).map(drop)
    }
}

/// Why a connection is turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum SlotError {
    #[error("{limit} connections of your address are open, which is the most; close some")]
    Source { limit: usize },
    #[error("{limit} connections are open, which is the most; try again in a second")]
    All { limit: usize },
}

/// The open connections.
#[derive(Debug)]
pub struct Connections {
    limit: usize,
    limit_per_source: usize,
    open: Mutex<BTreeMap<Option<Source>, usize>>,
}

/// A connection that counts until it is dropped.
#[derive(Debug)]
pub struct Slot {
    connections: Arc<Connections>,
    source: Option<Source>,
}

impl Connections {
    /// Counts up to `limit` in all and `limit_per_source` of one source.
    pub fn new(limit: usize, limit_per_source: usize) -> Arc<Self> {
        Arc::new(Self { limit, limit_per_source, open: Mutex::default() })
    }

    /// Counts a connection of `source`; `None` for a proxy, which brings those of many.
    pub fn admit(self: &Arc<Self>, source: Option<Source>) -> Result<Slot, SlotError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = open.values().sum();
        let of_source = open.get(&source).copied().unwrap_or(0);
        if source.is_some() && of_source >= self.limit_per_source {
            return Err(SlotError::Source { limit: self.limit_per_source });
        }
        if all >= self.limit {
            return Err(SlotError::All { limit: self.limit });
        }
        open.insert(source, of_source + 1);
        Ok(Slot { connections: Arc::clone(self), source })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock().unwrap_or_else(PoisonError::into_inner);
        match open.get_mut(&self.source) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(open.remove(&self.source)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        text.parse::<IpAddr>().expect("an address").into()
    }

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        let client = source("127.0.0.1");
        let passed = (0..BURST + 10).filter(|_| limits.admit(client, now).is_some()).count();
        assert_eq!(passed, BURST as usize);
        assert!(limits.admit(source("127.0.0.2"), now).is_some());
        assert!(limits.admit(client, now + Duration::from_millis(20)).is_some());
    }

    #[test]
    fn a_source_is_what_one_subscriber_has() {
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:0:1"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
        assert_ne!(source("192.0.2.1"), source("192.0.2.2"));
    }

    #[test]
    fn strangers_cannot_fill_the_renters_memory_and_a_request_counts_once_in_both() {
        let request = |key: u8, nonce: u8| VerifiedRequest {
            key: types::ids::PublicKey::from_bytes([key; 32]),
            nonce: nonce.to_string(),
            created: UnixSeconds(100),
            idempotency_key: None,
            is_safe: true,
        };
        let (mut replays, now) = (Replays::new(2), UnixSeconds(100));
        replays.admit(now, Signer::Stranger, &request(1, 1)).expect("first");
        replays.admit(now, Signer::Stranger, &request(2, 1)).expect("second");
        let full = replays.admit(now, Signer::Stranger, &request(3, 1));
        assert_eq!(full, Err(ReplayError::Full));
        replays.admit(now, Signer::Renter, &request(4, 1)).expect("a renter goes on");
        let again = replays.admit(now, Signer::Renter, &request(1, 1));
        assert!(matches!(again, Err(ReplayError::Replayed { .. })), "{again:?}");
        replays.admit(now, Signer::Renter, &request(1, 2)).expect("another nonce");
    }

    #[test]
    fn connections_count_while_they_are_open() {
        let [a, b, c] = ["192.0.2.1", "192.0.2.2", "192.0.2.3"].map(|text| Some(source(text)));
        let connections = Connections::new(3, 2);
        let first = connections.admit(a).expect("first");
        let _second = connections.admit(a).expect("second");
        assert_eq!(connections.admit(a).err(), Some(SlotError::Source { limit: 2 }));
        let _third = connections.admit(b).expect("another source");
        assert_eq!(connections.admit(c).err(), Some(SlotError::All { limit: 3 }));
        drop(first);
        assert!(connections.admit(a).is_ok());
        assert_eq!(connections.open.lock().expect("unpoisoned").len(), 2);
    }

    #[test]
    fn a_proxys_connections_are_bounded_in_all() {
        let connections = Connections::new(3, 1);
        let proxied: Vec<_> = (0..3).filter_map(|_| connections.admit(None).ok()).collect();
        assert_eq!(proxied.len(), 3);
        assert_eq!(connections.admit(None).err(), Some(SlotError::All { limit: 3 }));
        drop(proxied);
        assert!(connections.admit(Some(source("192.0.2.1"))).is_ok());
    }

    #[test]
    fn a_proxy_tells_for_whom_it_asks_and_nobody_else_does() {
        let proxies: Vec<Prefix> =
            ["192.0.2.1", "10.0.0.0/8"].map(|text| text.parse().expect("a prefix")).to_vec();
        let of = |peer: &str, fields: &[&str]| {
            client(peer.parse().expect("an address"), &proxies, fields).to_string()
        };
        assert_eq!(of("198.51.100.7", &["203.0.113.9"]), "198.51.100.7");
        assert_eq!(of("192.0.2.1", &["203.0.113.9"]), "203.0.113.9");
        assert_eq!(of("192.0.2.1", &["1.1.1.1, 203.0.113.9 , 10.1.2.3"]), "203.0.113.9");
        assert_eq!(of("192.0.2.1", &["1.1.1.1", "203.0.113.9", "10.1.2.3"]), "203.0.113.9");
        assert_eq!(of("192.0.2.1", &["203.0.113.9:5000"]), "203.0.113.9");
        assert_eq!(of("192.0.2.1", &["[2001:db8::7]:5000"]), "2001:db8::7");
        assert_eq!(of("192.0.2.1", &["2001:db8::7"]), "2001:db8::7");
        assert_eq!(of("192.0.2.1", &["203.0.113.9, unknown"]), "192.0.2.1");
        assert_eq!(of("192.0.2.1", &[]), "192.0.2.1");
        assert_eq!(of("192.0.2.1", &["10.0.0.1"]), "10.0.0.1");
    }
}
