//! Which servers want to be left alone, and for how long. Pure.
//! Source: RFC 5905 §7.4 ("kiss codes").

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Pause after the first wish to be asked less often: RFC 5905 calls polls at 2^6 s the most frequent ones that
/// are polite.
const FIRST_PAUSE: Duration = Duration::from_secs(64);
/// It is doubled to this and no further: RFC 5905 MAXPOLL, 2^17 s.
const LONGEST_PAUSE: Duration = Duration::from_secs(1 << 17);
/// No more servers are remembered; the longest known go first. More are asked by nobody.
const MAX_SERVERS: usize = 256;

/// What servers have asked for since the start, by their names or addresses.
#[derive(Debug, Default)]
pub(super) struct Manners {
    wishes: BTreeMap<String, Wish>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// Not to be asked at all: it serves others.
    Never { since: Instant },
    /// To be asked less often.
    Seldom { pause: Duration, until: Instant },
}

impl Wish {
    /// When it was told, or confirmed.
    fn age_from(self) -> Instant {
        match self {
            Self::Never { since } => since,
            Self::Seldom { until, pause } => until.checked_sub(pause).unwrap_or(until),
        }
    }
}

/// Why a server is not asked now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum LeftAlone {
    #[error(
        "the time server {server} wants not to be asked by this node, and is left alone until the node's service \
         starts again; time.ntp names others"
    )]
    Denied { server: String },
    #[error("the time server {server} wants to be asked less often, and is next in {left_s} s")]
    Early { server: String, left_s: u64 },
}

impl Manners {
    /// Returns whether a server may be asked at `now`.
    pub(super) fn check(&self, now: Instant, server: &str) -> Result<(), LeftAlone> {
        match self.wishes.get(server) {
            Some(Wish::Never { .. }) => Err(LeftAlone::Denied { server: server.to_owned() }),
            Some(Wish::Seldom { until, .. }) if now < *until => {
                let left_s = (*until - now).as_secs() + 1;
                Err(LeftAlone::Early { server: server.to_owned(), left_s })
            }
            Some(Wish::Seldom { .. }) | None => Ok(()),
        }
    }

    /// Takes a server's kiss code. Others than those that ask for something are its own affair.
    pub(super) fn handle_kiss(&mut self, now: Instant, server: &str, code: [u8; 4]) {
        let wish = match &code {
            b"DENY" | b"RSTR" => Wish::Never { since: now },
            b"RATE" => {
                let pause = match self.wishes.get(server) {
                    Some(Wish::Seldom { pause, .. }) => (*pause * 2).min(LONGEST_PAUSE),
                    Some(Wish::Never { .. }) | None => FIRST_PAUSE,
                };
                Wish::Seldom { pause, until: now + pause }
            }
            _ => return,
        };
        self.wishes.insert(server.to_owned(), wish);
        while self.wishes.len() > MAX_SERVERS {
            let oldest = self.wishes.iter().min_by_key(|(_, wish)| wish.age_from());
            let Some(oldest) = oldest.map(|(server, _)| server.clone()) else { break };
            self.wishes.remove(&oldest);
        }
    }

    /// Notes that a server told the time: one that wanted to be asked seldom still does.
    pub(super) fn handle_answer(&mut self, now: Instant, server: &str) {
        if let Some(Wish::Seldom { pause, until }) = self.wishes.get_mut(server) {
            *until = now + *pause;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: &str = "192.0.2.1:123";

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn who_denies_is_never_asked_again_and_others_are() {
        let (mut manners, now) = (Manners::default(), Instant::now());
        let denied = Err(LeftAlone::Denied { server: SERVER.to_owned() });
        for code in [*b"DENY", *b"RSTR"] {
            manners.handle_kiss(now, SERVER, code);
            manners.handle_answer(now, SERVER);
            assert_eq!(manners.check(now + seconds(1 << 20), SERVER), denied);
        }
        assert_eq!(manners.check(now, "192.0.2.2:123"), Ok(()));
    }

    #[test]
    fn the_pause_of_who_is_asked_too_often_begins_at_64_s_doubles_and_stays() {
        let (mut manners, now) = (Manners::default(), Instant::now());
        let early = |left_s| Err(LeftAlone::Early { server: SERVER.to_owned(), left_s });
        manners.handle_kiss(now, SERVER, *b"RATE");
        assert_eq!(manners.check(now + seconds(63), SERVER), early(2));
        assert_eq!(manners.check(now + seconds(64), SERVER), Ok(()));
        let later = now + seconds(64);
        manners.handle_kiss(later, SERVER, *b"RATE");
        assert_eq!(manners.check(later + seconds(127), SERVER), early(2));
        let later = later + seconds(128);
        manners.handle_answer(later, SERVER);
        assert_eq!(manners.check(later + seconds(127), SERVER), early(2));
        for _ in 0..40 {
            manners.handle_kiss(later, SERVER, *b"RATE");
        }
        assert_eq!(manners.check(later + LONGEST_PAUSE, SERVER), Ok(()));
    }

    #[test]
    fn codes_that_ask_for_nothing_change_nothing() {
        let (mut manners, now) = (Manners::default(), Instant::now());
        manners.handle_kiss(now, SERVER, *b"INIT");
        manners.handle_answer(now, SERVER);
        assert_eq!(manners.check(now, SERVER), Ok(()));
    }

    #[test]
    fn no_number_of_servers_fills_the_memory_and_the_oldest_go_first() {
        let (mut manners, now) = (Manners::default(), Instant::now());
        for number in 0..=MAX_SERVERS as u64 {
            manners.handle_kiss(now + seconds(number), &number.to_string(), *b"DENY");
        }
        assert_eq!(manners.wishes.len(), MAX_SERVERS);
        assert_eq!(manners.check(now, "0"), Ok(()));
        assert!(manners.check(now, "1").is_err());
    }
}
