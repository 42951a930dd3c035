//! The clock against time servers that agree, lie, stay silent and move. No real clock is touched.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use agent::{
    net::{NetworkStatus, Resolver},
    time::{Clock, ClockConfig, ClockStatus, SystemClock, build_time},
};
use netns::{Namespace, can_run};
use tokio::sync::watch;
use types::units::UnixSeconds;

/// 2026-12-01T00:00:00Z, true time in these tests.
const TRUTH: u64 = 1_796_083_200;
const NTP_TO_UNIX: u64 = 2_208_988_800;

/// A clock that runs, and can be set without harm.
#[derive(Debug)]
struct TestClock {
    start: Instant,
    at_start: Mutex<Duration>,
    /// What it was called right within, in milliseconds, since it was set.
    confirmed: Mutex<Vec<u128>>,
}

impl TestClock {
    fn at(seconds: u64) -> Arc<Self> {
        let at_start = Mutex::new(Duration::from_secs(seconds));
        Arc::new(Self { start: Instant::now(), at_start, confirmed: Mutex::default() })
    }

    fn confirmed(&self) -> Vec<u128> {
        self.confirmed.lock().unwrap().clone()
    }
}

impl SystemClock for TestClock {
    fn now(&self) -> Duration {
        *self.at_start.lock().unwrap() + self.start.elapsed()
    }

    fn set(&self, time: Duration) -> io::Result<()> {
        *self.at_start.lock().unwrap() = time - self.start.elapsed();
        // As the kernel does.
        self.confirmed.lock().unwrap().clear();
        Ok(())
    }

    fn slew(&self, offset_us: i64) -> io::Result<()> {
        let mut at_start = self.at_start.lock().unwrap();
        *at_start = match Duration::from_micros(offset_us.unsigned_abs()) {
            change if offset_us < 0 => *at_start - change,
            change => *at_start + change,
        };
        Ok(())
    }

    fn confirm(&self, error: Duration) -> io::Result<()> {
        self.confirmed.lock().unwrap().push(error.as_millis());
        Ok(())
    }
}

/// A time server that is off by some seconds.
fn server(off: i64) -> String {
    server_on(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), off)
}

fn server_on(socket: UdpSocket, off: i64) -> String {
    let address = socket.local_addr().unwrap();
    let start = Instant::now();
    std::thread::spawn(move || {
        let mut request = [0; 48];
        while let Ok((48, peer)) = socket.recv_from(&mut request) {
            let now = TRUTH.saturating_add_signed(off) + NTP_TO_UNIX;
            let time = (Duration::from_secs(now) + start.elapsed()).as_nanos();
            let stamp = u64::try_from((time << 32) / 1_000_000_000).unwrap();
            let mut answer = [0; 48];
            answer[0] = 0b00_100_100;
            answer[1] = 2;
            answer[24..32].copy_from_slice(&request[40..48]);
            answer[32..40].copy_from_slice(&stamp.to_be_bytes());
            answer[40..48].copy_from_slice(&stamp.to_be_bytes());
            socket.send_to(&answer, peer).unwrap();
        }
    });
    address.to_string()
}

fn start(system: &Arc<TestClock>, agreed: u64, servers: Vec<String>) -> Clock {
    start_knowing(system, [0, 0, agreed], servers)
}

/// A clock that starts with the times that were seen, confirmed by a source, and agreed on by two.
fn start_knowing(system: &Arc<TestClock>, known: [u64; 3], servers: Vec<String>) -> Clock {
    let [seen, confirmed, agreed] = known.map(UnixSeconds);
    let (_, network) = watch::channel(NetworkStatus::default());
    let config = ClockConfig {
        seen,
        confirmed,
        agreed,
        servers,
        nts: None,
        resolver: Resolver::new(network.clone()),
        network,
    };
    Clock::start_with(config, Arc::clone(system) as Arc<dyn SystemClock>)
}

async fn wait(clock: &Clock, wanted: impl FnMut(&ClockStatus) -> bool) -> ClockStatus {
    let mut status = clock.status();
    let found = tokio::time::timeout(Duration::from_secs(10), status.wait_for(wanted)).await;
    found.expect("the clock polls").unwrap().clone()
}

fn is_close(time: UnixSeconds, wanted: u64) -> bool {
    time.0.abs_diff(wanted) <= 5
}

#[tokio::test]
async fn agreeing_servers_set_the_clock_and_raise_the_floor() {
    let system = TestClock::at(0);
    let clock = start(&system, 0, vec![server(0), server(0), server(0)]);
    // At once it is no earlier than the build.
    assert!(clock.now() >= build_time());
    let status = wait(&clock, |status| status.sources > 0).await;
    assert_eq!(status.sources, 3);
    assert!(is_close(clock.now(), TRUTH), "{:?}", clock.now());
    assert!(is_close(status.floor, TRUTH), "{status:?}");
}

#[tokio::test]
async fn milliseconds_are_those_of_a_clock_that_is_believed_only() {
    let system = TestClock::at(TRUTH);
    system.set(Duration::from_millis(TRUTH * 1000 + 250)).unwrap();
    let clock = start(&system, 0, Vec::new());
    let (before, after) = (clock.now_ms(), clock.now_ms());
    assert!((TRUTH * 1000 + 250..TRUTH * 1000 + 5000).contains(&before), "{before}");
    assert!((before..before + 5000).contains(&after), "{after}");
    let ahead = start(&system, TRUTH + 100, Vec::new());
    system.set(Duration::from_millis(TRUTH * 1000 + 250)).unwrap();
    assert_eq!(ahead.now_ms(), (TRUTH + 100) * 1000, "the floor");
}

#[tokio::test]
async fn one_liar_among_three_changes_nothing() {
    let system = TestClock::at(TRUTH - 100);
    let clock = start(&system, 0, vec![server(0), server(3_000_000), server(0)]);
    let status = wait(&clock, |status| status.sources > 0).await;
    assert_eq!(status.sources, 2);
    assert!(is_close(clock.now(), TRUTH), "{:?}", clock.now());
}

#[tokio::test]
async fn two_that_contradict_each_other_decide_nothing() {
    let system = TestClock::at(TRUTH - 100);
    let clock = start(&system, 0, vec![server(0), server(3_000_000)]);
    let status = wait(&clock, |status| status.last_error.is_some()).await;
    assert_eq!(status.sources, 0);
    assert!(is_close(clock.now(), TRUTH - 100));
}

#[tokio::test]
async fn a_lone_server_sets_the_clock_but_not_the_floor() {
    let system = TestClock::at(TRUTH + 50_000);
    let clock = start(&system, 0, vec![server(0)]);
    let status = wait(&clock, |status| status.sources > 0).await;
    assert_eq!(status.floor, build_time());
    assert!(is_close(clock.now(), TRUTH), "{:?}", clock.now());
}

#[tokio::test]
async fn no_server_takes_the_node_before_its_floor() {
    let system = TestClock::at(TRUTH);
    let floor = TRUTH + 1000;
    let clock = start(&system, floor, vec![server(0), server(0)]);
    let status = wait(&clock, |status| status.last_error.is_some()).await;
    assert_eq!((status.sources, status.floor), (0, UnixSeconds(floor)));
    assert!(clock.now() >= UnixSeconds(floor));
}

#[tokio::test]
async fn a_hardware_clock_that_was_ten_years_ahead_does_not_stick() {
    let ahead = TRUTH + 10 * 365 * 86_400;
    // It was right when two sources agreed last, then ran without a network.
    let system = TestClock::at(ahead);
    let known = [ahead, ahead, TRUTH - 500];
    let clock = start_knowing(&system, known, vec![server(0), server(0)]);
    assert!(clock.now() >= UnixSeconds(ahead), "without sources, what was seen counts");
    let status = wait(&clock, |status| status.sources > 0).await;
    assert!(is_close(status.floor, TRUTH), "{status:?}");
    assert!(is_close(clock.now(), TRUTH), "{:?}", clock.now());
    // One that says so may lie when another had said that it is so late.
    let clock = start_knowing(&system, known, vec![server(0)]);
    let status = wait(&clock, |status| status.last_error.is_some()).await;
    assert_eq!(status.sources, 0);
    assert!(clock.now() >= UnixSeconds(ahead));
    // When only this clock had, it is believed, but not before what is sure.
    let clock = start_knowing(&system, [ahead, TRUTH - 300, TRUTH - 500], vec![server(0)]);
    let status = wait(&clock, |status| status.sources > 0).await;
    assert_eq!(status.floor, UnixSeconds(TRUTH - 300));
    assert!(is_close(clock.now(), TRUTH), "{:?}", clock.now());
    let clock = start_knowing(&system, [ahead, TRUTH - 300, TRUTH + 500], vec![server(0)]);
    wait(&clock, |status| status.last_error.is_some()).await;
    assert!(clock.now() >= UnixSeconds(ahead));
}

#[tokio::test]
async fn a_clock_that_sources_set_or_find_right_is_confirmed_after_that() {
    for off in [50_000, 0] {
        let system = TestClock::at(TRUTH + off);
        let clock = start(&system, 0, vec![server(0)]);
        wait(&clock, |status| status.sources > 0).await;
        let confirmed = system.confirmed();
        // A server here is right within 5 ms, and as much as it takes to ask it.
        assert!(matches!(confirmed[..], [5..1000]), "{off}: {confirmed:?}");
    }
}

#[tokio::test]
async fn a_clock_on_which_sources_do_not_agree_is_not_confirmed() {
    let system = TestClock::at(TRUTH);
    let clock = start(&system, 0, vec![server(0), server(3_000_000)]);
    wait(&clock, |status| status.last_error.is_some()).await;
    assert_eq!(system.confirmed(), [] as [u128; 0]);
}

#[tokio::test]
async fn silent_servers_leave_the_clock_alone_and_are_named() {
    let system = TestClock::at(TRUTH);
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address: SocketAddr = silent.local_addr().unwrap();
    let clock = start(&system, 0, vec![address.to_string()]);
    let status = wait(&clock, |status| status.last_error.is_some()).await;
    assert!(status.last_error.unwrap().contains(&address.to_string()));
    assert!(is_close(clock.now(), TRUTH));
}

#[tokio::test]
async fn a_node_without_an_address_says_so_and_asks_for_no_setting() {
    let system = TestClock::at(TRUTH);
    let clock = start(&system, 0, Vec::new());
    let status = wait(&clock, |status| status.last_error.is_some()).await;
    assert!(status.last_error.unwrap().contains("no address"));
}

#[tokio::test]
async fn servers_named_by_dhcp_are_asked_when_none_is_configured() {
    let (publish, network) = watch::channel(NetworkStatus::default());
    let config = ClockConfig {
        seen: UnixSeconds(0),
        confirmed: UnixSeconds(0),
        agreed: UnixSeconds(0),
        servers: Vec::new(),
        nts: None,
        resolver: Resolver::new(network.clone()),
        network,
    };
    let clock = Clock::start_with(config, TestClock::at(TRUTH));
    wait(&clock, |status| status.last_error.is_some()).await;
    // Nobody answers there, but it is asked.
    let ntp = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    publish.send_replace(NetworkStatus { ntp, ..NetworkStatus::default() });
    let asked = |status: &ClockStatus| {
        status.last_error.as_ref().is_some_and(|error| error.contains("127.0.0.1:123"))
    };
    wait(&clock, asked).await;
}

/// A server that answers nothing but a kiss code, and how often it was asked.
fn kissing(code: [u8; 4]) -> (String, Arc<AtomicU64>) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let asked = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&asked);
    std::thread::spawn(move || {
        let mut request = [0; 48];
        while let Ok((48, peer)) = socket.recv_from(&mut request) {
            counter.fetch_add(1, Ordering::Relaxed);
            let mut answer = [0; 48];
            answer[0] = 0b11_100_100;
            answer[12..16].copy_from_slice(&code);
            answer[24..32].copy_from_slice(&request[40..48]);
            socket.send_to(&answer, peer).unwrap();
        }
    });
    (address, asked)
}

#[tokio::test]
async fn a_server_that_wants_to_be_left_alone_is_not_asked_again() {
    for (code, wish) in [(*b"DENY", "left alone"), (*b"RATE", "less often")] {
        let (server, asked) = kissing(code);
        let (publish, network) = watch::channel(NetworkStatus::default());
        let config = ClockConfig {
            seen: UnixSeconds(0),
            confirmed: UnixSeconds(0),
            agreed: UnixSeconds(0),
            servers: vec![server],
            nts: None,
            resolver: Resolver::new(network.clone()),
            network,
        };
        let clock = Clock::start_with(config, TestClock::at(TRUTH));
        wait(&clock, |status| status.last_error.is_some()).await;
        assert_eq!(asked.load(Ordering::Relaxed), 1, "{wish}");
        // A network that appears has every server asked at once.
        publish.send_replace(NetworkStatus::default());
        let told = |status: &ClockStatus| {
            let error = status.last_error.as_deref().unwrap_or_default();
            error.contains(wish) && !error.contains("code")
        };
        wait(&clock, told).await;
        assert_eq!(asked.load(Ordering::Relaxed), 1, "{wish}");
    }
}

/// What a clock says that asks `time.example`, in a namespace with a name server.
fn in_namespace(
    space: &Namespace,
    runtime: &tokio::runtime::Runtime,
    wanted: fn(&ClockStatus) -> bool,
) -> ClockStatus {
    let dns = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    let (_publish, network) = watch::channel(NetworkStatus { dns, ..NetworkStatus::default() });
    let config = ClockConfig {
        seen: UnixSeconds(0),
        confirmed: UnixSeconds(0),
        agreed: UnixSeconds(0),
        servers: vec!["time.example".to_owned()],
        nts: None,
        resolver: Resolver::new(network.clone()),
        network,
    };
    space.enter(|| {
        runtime.block_on(async {
            let clock = Clock::start_with(config, TestClock::at(TRUTH - 100));
            let mut status = clock.status();
            let waiting = status.wait_for(wanted);
            let found = tokio::time::timeout(Duration::from_secs(25), waiting).await;
            found.unwrap_or_else(|_| panic!("{:?}", clock.status().borrow())).unwrap().clone()
        })
    })
}

#[test]
fn a_name_is_asked_at_all_its_addresses_on_a_network_without_ipv4() {
    let test = "a time server by name without IPv4";
    if !can_run(test, &["ip", "dnsmasq"]) {
        return;
    }
    let space = Namespace::new();
    let runtime = space.runtime();
    // Nothing leads to the first; the second is silent; the third answers.
    let _names = space.name("time.example", &["192.0.2.7", "fd00::6", "fd00::7"]);
    let _silent = space.enter(|| {
        for address in ["fd00::6", "fd00::7"] {
            space.ip(&format!("addr add {address}/128 dev lo nodad"));
        }
        server_on(UdpSocket::bind("[fd00::7]:123").unwrap(), 0);
        UdpSocket::bind("[fd00::6]:123").unwrap()
    });
    let status = in_namespace(&space, &runtime, |status| status.sources == 1);
    assert_eq!(status.last_error, None);
}

#[test]
fn every_address_of_a_name_that_was_tried_is_told() {
    let test = "the addresses of a time server";
    if !can_run(test, &["ip", "dnsmasq"]) {
        return;
    }
    let space = Namespace::new();
    let runtime = space.runtime();
    let _names = space.name("time.example", &["192.0.2.7", "fd00::7"]);
    let status = in_namespace(&space, &runtime, |status| {
        status.last_error.as_ref().is_some_and(|error| error.contains("192.0.2.7"))
    });
    assert!(status.last_error.unwrap().contains("[fd00::7]:123"));
}
