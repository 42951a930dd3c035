//! The time is kept, with what it rests on: a later agent goes below none of it on less.

use std::time::Duration;

use super::Keeper;
use crate::{
    machines::store::{Store, StoreError},
    time::{Clock, Standing},
};

/// How often the time is recorded.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);

impl Keeper {
    /// Keeps the time as it is.
    pub(super) fn keep_time(&mut self) {
        let kept = record(&self.config.clock, &self.config.store);
        self.judge_store(kept);
    }

    /// Keeps the time as soon as it rests on more than before, before anything follows from it: a power cut a
    /// moment later must not bring back the time of a clock that sources overruled.
    pub(super) fn keep_standing(&mut self) {
        let standing = self.config.clock.status().borrow().standing();
        if standing > self.kept {
            self.keep_time();
        }
        self.kept = standing;
    }
}

fn record(clock: &Clock, store: &Store) -> Result<(), StoreError> {
    // Before the time: what a source confirms a moment later is another one.
    let standing = clock.status().borrow().standing();
    let now = clock.now();
    match standing {
        Standing::Seen => store.raise_floor(now),
        Standing::Confirmed => store.confirm(now),
        Standing::Agreed => store.agree_on(now),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        net::{Ipv4Addr, UdpSocket},
        sync::{Arc, Mutex},
    };

    use tokio::sync::watch;
    use types::units::UnixSeconds;

    use super::*;
    use crate::{
        net::{NetworkStatus, Resolver},
        time::{ClockConfig, SystemClock},
    };

    /// 2026-12-01T00:00:00Z, and a clock that is ten years ahead.
    const TRUTH: u64 = 1_796_083_200;
    const AHEAD: u64 = TRUTH + 10 * 365 * 86_400;
    const NTP_TO_UNIX: u64 = 2_208_988_800;

    /// A clock that stands, at so many seconds since 1970.
    #[derive(Debug)]
    struct Still(Mutex<Duration>);

    impl SystemClock for Still {
        fn now(&self) -> Duration {
            *self.0.lock().expect("nobody panics")
        }

        fn set(&self, time: Duration) -> io::Result<()> {
            *self.0.lock().expect("nobody panics") = time;
            Ok(())
        }

        fn slew(&self, _offset_us: i64) -> io::Result<()> {
            Ok(())
        }

        fn confirm(&self, _error: Duration) -> io::Result<()> {
            Ok(())
        }
    }

    /// A time server at which it is always [`TRUTH`].
    fn server() -> String {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        let address = socket.local_addr().expect("bound").to_string();
        std::thread::spawn(move || {
            let mut request = [0; 48];
            while let Ok((48, peer)) = socket.recv_from(&mut request) {
                let stamp = ((TRUTH + NTP_TO_UNIX) << 32).to_be_bytes();
                let mut answer = [0; 48];
                (answer[0], answer[1]) = (0b00_100_100, 2);
                answer[24..32].copy_from_slice(&request[40..48]);
                answer[32..40].copy_from_slice(&stamp);
                answer[40..48].copy_from_slice(&stamp);
                let _ = socket.send_to(&answer, peer);
            }
        });
        address
    }

    /// The clock of an agent that starts with this store, when the hardware's says `hardware`.
    fn start(store: &Store, hardware: u64, servers: Vec<String>) -> Clock {
        let (_, network) = watch::channel(NetworkStatus::default());
        let config = ClockConfig {
            seen: store.floor().expect("read"),
            confirmed: store.confirmed().expect("read"),
            agreed: store.agreed().expect("read"),
            servers,
            nts: None,
            resolver: Resolver::new(network.clone()),
            network,
        };
        Clock::start_with(config, Arc::new(Still(Mutex::new(Duration::from_secs(hardware)))))
    }

    async fn wait(clock: &Clock, standing: Standing) {
        let mut status = clock.status();
        let found = status.wait_for(|status| status.standing() == standing);
        tokio::time::timeout(Duration::from_secs(10), found).await.expect("polled").expect("runs");
    }

    fn times(store: &Store) -> [u64; 3] {
        [store.floor(), store.confirmed(), store.agreed()].map(|time| time.expect("read").0)
    }

    #[tokio::test]
    async fn a_clock_that_no_source_has_confirmed_raises_nothing_that_a_source_cannot_lower() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("agent.redb")).expect("made");
        let clock = start(&store, AHEAD, Vec::new());
        record(&clock, &store).expect("kept");
        assert_eq!(times(&store), [AHEAD, 0, 0]);
        // Without a source, what was seen counts whatever the hardware says next.
        let clock = start(&store, TRUTH, Vec::new());
        assert_eq!(clock.now(), UnixSeconds(AHEAD));
        // One source is enough against a clock that nobody vouches for, and that time is kept.
        let clock = start(&store, AHEAD, vec![server()]);
        wait(&clock, Standing::Confirmed).await;
        assert_eq!(clock.now(), UnixSeconds(TRUTH));
        record(&clock, &store).expect("kept");
        assert_eq!(times(&store), [TRUTH, TRUTH, 0]);
    }

    #[tokio::test]
    async fn what_a_source_confirmed_two_overrule() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("agent.redb")).expect("made");
        store.confirm(UnixSeconds(AHEAD)).expect("kept");
        let clock = start(&store, AHEAD, vec![server(), server()]);
        wait(&clock, Standing::Agreed).await;
        record(&clock, &store).expect("kept");
        assert_eq!(times(&store), [TRUTH, TRUTH, TRUTH]);
    }
}
