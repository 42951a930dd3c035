//! Authenticated time against real servers, chronyd and NTPsec's: keys, cookies, whom to trust, and who is in
//! the middle.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]

mod netns;

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use agent::{
    net::{NetworkStatus, Resolver},
    time::{Clock, ClockConfig, ClockStatus, NtsConfig, SystemClock, nts::establish::Roots},
};
use netns::{Namespace, can_run, certificate::certify, wait_for};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use types::units::UnixSeconds;

/// How long things take at most: a server that has no time yet is asked again after 16 s, and after 32 more.
const LONG: Duration = Duration::from_secs(60);
/// Where keys are agreed on.
const KEYS: u16 = 4460;
/// How far this clock is off at the start.
const OFF: Duration = Duration::from_secs(86_400 * 3);

/// A clock beside the machine's.
#[derive(Debug, Default)]
struct TestClock(Mutex<i128>);

impl TestClock {
    fn error_ms(&self) -> i128 {
        *self.0.lock().unwrap() / 1_000_000
    }
}

fn truth() -> i128 {
    i128::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

impl SystemClock for TestClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(u64::try_from(truth() + *self.0.lock().unwrap()).unwrap())
    }

    fn set(&self, time: Duration) -> io::Result<()> {
        *self.0.lock().unwrap() = i128::try_from(time.as_nanos()).unwrap() - truth();
        Ok(())
    }

    fn slew(&self, offset_us: i64) -> io::Result<()> {
        *self.0.lock().unwrap() += i128::from(offset_us) * 1000;
        Ok(())
    }

    fn confirm(&self, _error: Duration) -> io::Result<()> {
        Ok(())
    }
}

/// A namespace with a time server.
struct World {
    space: Namespace,
    runtime: Option<Runtime>,
    folder: TempDir,
    server: Option<Child>,
}

impl World {
    fn new(test: &str) -> Option<Self> {
        if !can_run(test, &["ip", "chronyd", "openssl"]) {
            return None;
        }
        let space = Namespace::new();
        let runtime = Some(space.runtime());
        let mut world = Self { space, runtime, folder: tempfile::tempdir().unwrap(), server: None };
        certify(world.folder.path(), "localhost", "DNS:time.example,IP:127.0.0.1");
        world.serve("");
        Some(world)
    }

    /// Starts chronyd, with these lines in its configuration.
    fn serve(&mut self, more: &str) {
        self.serve_at(KEYS, more);
    }

    /// The same, with another port for keys.
    fn serve_at(&mut self, keys: u16, more: &str) {
        let folder = self.folder.path().display().to_string();
        let text = format!(
            "local stratum 3\nallow all\nport 123\nbindaddress 127.0.0.1\ncmdport 0\n\
             ntsserverkey {folder}/key.pem\nntsservercert {folder}/cert.pem\n\
             ntsport {keys}\nntsdumpdir {folder}\n\
             pidfile {folder}/pid\nbindcmdaddress /\n{more}\n"
        );
        let mut command = Command::new("chronyd");
        command.args(["-d", "-x", "-u", "root", "-f"]);
        self.run(command, &text, keys);
    }

    /// Starts NTPsec's server. It may not set the machine's clock.
    fn serve_by_ntpsec(&mut self) {
        let folder = self.folder.path().display().to_string();
        let text = format!(
            "disable ntp\ntos orphan 3 orphanwait 1\ninterface ignore all\ninterface listen 127.0.0.1\nnts enable\n\
             nts key {folder}/key.pem\nnts cert {folder}/cert.pem\nnts cookie {folder}/cookies\n"
        );
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-sys_time", "ntpd", "-n", "-c"]);
        self.run(command, &text, KEYS);
    }

    /// Has this server take the place of the one before; its command wants the name of a configuration.
    fn run(&mut self, mut command: Command, config: &str, keys: u16) {
        if let Some(mut old) = self.server.take() {
            old.kill().unwrap();
            old.wait().unwrap();
        }
        let path = self.folder.path().join("config");
        fs::write(&path, config).unwrap();
        let log = fs::File::create(self.folder.path().join("log")).unwrap();
        command.arg(&path).stdin(Stdio::null()).stderr(log.try_clone().unwrap()).stdout(log);
        self.server = Some(self.space.enter(|| command.spawn().unwrap()));
        wait_for("the time server", LONG, || {
            self.space.enter(|| std::net::TcpStream::connect(("127.0.0.1", keys)).is_ok())
        });
    }

    fn start(&self, system: &Arc<TestClock>, servers: &[&str], roots: Roots) -> Clock {
        let dns = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
        let (_, network) = watch::channel(NetworkStatus { dns, ..NetworkStatus::default() });
        let nts = NtsConfig { servers: servers.iter().map(ToString::to_string).collect(), roots };
        let config = ClockConfig {
            seen: UnixSeconds(0),
            confirmed: UnixSeconds(0),
            agreed: UnixSeconds(0),
            servers: Vec::new(),
            nts: Some(nts),
            resolver: Resolver::new(network.clone()),
            network,
        };
        let system: Arc<dyn SystemClock> = Arc::clone(system) as _;
        let runtime = self.runtime.as_ref().unwrap();
        self.space.enter(|| {
            let _inside = runtime.enter();
            Clock::start_with(config, system)
        })
    }

    fn roots(&self) -> Roots {
        let text = fs::read_to_string(self.folder.path().join("ca.pem")).unwrap();
        Roots::from_pem(&text).unwrap()
    }

    fn wait(&self, clock: &Clock, wanted: impl Fn(&ClockStatus) -> bool) -> ClockStatus {
        let mut status = clock.status();
        let runtime = self.runtime.as_ref().unwrap();
        let found = runtime.block_on(async {
            let waiting = status.wait_for(|status| wanted(status));
            tokio::time::timeout(LONG, waiting).await.map(|found| found.unwrap().clone())
        });
        found.unwrap_or_else(|_| {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap();
            panic!("not within {LONG:?}: {:?}\n{log}", clock.status().borrow())
        })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

fn off() -> Arc<TestClock> {
    let nanos = i128::try_from(OFF.as_nanos()).unwrap();
    Arc::new(TestClock(Mutex::new(nanos)))
}

#[test]
fn authenticated_time_sets_a_clock_that_is_days_off() {
    let Some(world) = World::new("NTS") else { return };
    let system = off();
    let clock = world.start(&system, &["127.0.0.1"], world.roots());
    let status = world.wait(&clock, |status| status.sources == 1);
    assert_eq!(status.last_error, None);
    assert!(system.error_ms().abs() < 100, "{} ms", system.error_ms());
}

#[test]
fn the_server_of_ntpsec_is_understood_too() {
    const TEST: &str = "NTS of NTPsec";
    let Some(mut world) = World::new(TEST) else { return };
    if !can_run(TEST, &["ntpd", "setpriv"]) {
        return;
    }
    world.serve_by_ntpsec();
    let system = off();
    let clock = world.start(&system, &["127.0.0.1"], world.roots());
    world.wait(&clock, |status| status.sources == 1);
    assert!(system.error_ms().abs() < 100, "{} ms", system.error_ms());
}

#[test]
fn a_name_is_asked_at_its_other_addresses_when_the_first_is_out_of_reach() {
    let Some(mut world) = World::new("NTS by name without IPv4") else { return };
    if !can_run("NTS by name without IPv4", &["dnsmasq"]) {
        return;
    }
    let _names = world.space.name("time.example", &["192.0.2.7", "::1"]);
    world.serve("bindaddress ::1\n");
    let system = off();
    let clock = world.start(&system, &["time.example"], world.roots());
    world.wait(&clock, |status| status.sources == 1);
    assert!(system.error_ms().abs() < 100, "{} ms", system.error_ms());
}

#[test]
fn a_stranger_is_not_believed_and_is_named() {
    let Some(world) = World::new("NTS with an unknown authority") else { return };
    let system = off();
    let clock = world.start(&system, &["127.0.0.1"], Roots::public());
    let status = world.wait(&clock, |status| status.last_error.is_some());
    let error = status.last_error.unwrap();
    assert!(error.contains("127.0.0.1") && error.contains("time.nts_roots"), "{error}");
    assert_eq!(status.sources, 0);
    assert!(system.error_ms() > 86_400_000);
}

/// Passes datagrams to the time server and back, at an address of its own: questions as far as `passes` says
/// so, answers as `alter` leaves them.
fn relay(
    space: &Namespace,
    mut passes: impl FnMut(&[u8]) -> bool + Send + 'static,
    mut alter: impl FnMut(&mut [u8]) + Send + 'static,
) {
    space.enter(|| {
        let front = UdpSocket::bind("127.0.0.2:123").unwrap();
        let back = UdpSocket::bind("127.0.0.1:0").unwrap();
        back.connect("127.0.0.1:123").unwrap();
        std::thread::spawn(move || {
            let mut packet = [0; 4096];
            while let Ok((length, client)) = front.recv_from(&mut packet) {
                if !passes(&packet[..length]) {
                    continue;
                }
                back.send(&packet[..length]).unwrap();
                let length = back.recv(&mut packet).unwrap();
                alter(&mut packet[..length]);
                front.send_to(&packet[..length], client).unwrap();
            }
        });
    });
}

/// Has chronyd send its clients to [`relay`].
const BY_RELAY: &str = "ntsntpserver 127.0.0.2\n";

#[test]
fn an_altered_answer_is_not_believed() {
    let Some(mut world) = World::new("NTS with a man in the middle") else { return };
    let altered = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&altered);
    let an_hour_later = move |packet: &mut [u8]| {
        packet[34] = packet[34].wrapping_add(0x0e);
        packet[42] = packet[42].wrapping_add(0x0e);
        counter.fetch_add(1, Ordering::Relaxed);
    };
    relay(&world.space, |_| true, an_hour_later);
    world.serve(BY_RELAY);
    let system = off();
    let clock = world.start(&system, &["127.0.0.1"], world.roots());
    let status = world.wait(&clock, |status| status.last_error.is_some());
    assert!(altered.load(Ordering::Relaxed) > 0);
    assert!(status.last_error.unwrap().contains("not signed"));
    assert!(system.error_ms() > 86_400_000);
}

/// Loses the first question; returns the lengths of all.
fn lose_the_first(space: &Namespace) -> Arc<Mutex<Vec<usize>>> {
    let lengths: Arc<Mutex<Vec<usize>>> = Arc::default();
    let seen = Arc::clone(&lengths);
    let passes = move |question: &[u8]| {
        let mut seen = seen.lock().unwrap();
        seen.push(question.len());
        seen.len() > 1
    };
    relay(space, passes, |_| {});
    lengths
}

#[test]
fn keys_are_agreed_on_anew_with_a_server_that_falls_silent() {
    let Some(mut world) = World::new("NTS with a server that falls silent") else { return };
    let lengths = lose_the_first(&world.space);
    world.serve(BY_RELAY);
    let clock = world.start(&off(), &["127.0.0.1"], world.roots());
    let status = world.wait(&clock, |status| status.last_error.is_some());
    assert!(status.last_error.unwrap().contains("does not answer"));
    world.wait(&clock, |status| status.sources == 1);
    // Of the first keys there is one cookie less, and the question has room for another one.
    let lengths = lengths.lock().unwrap();
    assert_eq!(lengths[..], [lengths[0]; 2]);
}

#[test]
fn the_old_keys_stay_when_there_are_no_new_ones() {
    let Some(mut world) = World::new("NTS without new keys") else { return };
    let lengths = lose_the_first(&world.space);
    world.serve(BY_RELAY);
    let clock = world.start(&off(), &["127.0.0.1"], world.roots());
    world.wait(&clock, |status| status.last_error.is_some());
    // Its own keys are still the same.
    world.serve_at(KEYS + 1, BY_RELAY);
    world.wait(&clock, |status| status.sources == 1);
    let lengths = lengths.lock().unwrap();
    assert!(lengths.len() == 2 && lengths[1] > lengths[0], "{lengths:?}");
}
