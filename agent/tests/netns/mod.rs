//! Network namespaces for tests: nothing here touches the machine's own network.

#![allow(clippy::unwrap_used, reason = "a test bench that cannot be built fails the test")]
#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod certificate;

use std::{
    fs::File,
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
    process::{Child, Command, Output},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long to wait for an answer that must not come.
pub(crate) const SILENCE: Duration = Duration::from_millis(600);
/// How long to wait for an answer that must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A network namespace; gone when dropped.
pub(crate) struct Namespace(File);

impl Namespace {
    /// Makes an empty namespace with loopback up.
    pub(crate) fn new() -> Self {
        let file = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        let namespace = Self(file.join().unwrap());
        namespace.ip("link set lo up");
        namespace
    }

    /// Runs a function inside.
    pub(crate) fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                body()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs a program inside, whatever becomes of it.
    pub(crate) fn try_run(&self, command: &str) -> Output {
        let mut words = command.split_whitespace();
        let mut command = Command::new(words.next().unwrap());
        command.args(words);
        self.enter(|| command.output().unwrap())
    }

    /// Runs a program inside that must succeed.
    pub(crate) fn run(&self, command: &str) -> String {
        let output = self.try_run(command);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn ip(&self, arguments: &str) -> String {
        self.run(&format!("ip {arguments}"))
    }

    /// A path by which `ip` can name the namespace.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Links two namespaces by a virtual cable.
    pub(crate) fn cable(&self, name: &str, other: &Self, other_name: &str) {
        self.ip(&format!(
            "link add {name} type veth peer name {other_name} netns {}",
            other.path()
        ));
    }

    /// A runtime whose threads live inside.
    pub(crate) fn runtime(&self) -> tokio::runtime::Runtime {
        self.enter(|| {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap()
        })
    }

    /// Answers every TCP connection, and every datagram, with the address it came from. Returns
    /// the number of datagrams that came.
    pub(crate) fn serve(&self, address: &str) -> Arc<AtomicU64> {
        let datagrams = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&datagrams);
        self.enter(|| {
            let listener = TcpListener::bind(address).unwrap();
            let socket = UdpSocket::bind(address).unwrap();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let mut stream: TcpStream = stream;
                    let peer = stream.peer_addr().unwrap().ip().to_string();
                    let _ = stream.write_all(peer.as_bytes());
                }
            });
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
                    counter.fetch_add(1, Ordering::Relaxed);
                    let _ = socket.send_to(peer.ip().to_string().as_bytes(), peer);
                }
            });
        });
        datagrams
    }

    /// What a server made by [`Namespace::serve`] says over TCP; `None` when it is not reached.
    pub(crate) fn ask_tcp(&self, server: &str, patience: Duration) -> Option<String> {
        let server: SocketAddr = server.parse().unwrap();
        self.enter(|| {
            let mut stream = TcpStream::connect_timeout(&server, patience).ok()?;
            stream.set_read_timeout(Some(patience)).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            Some(answer)
        })
    }

    /// Like [`Namespace::ask_tcp`] over UDP, from an address of choice.
    pub(crate) fn ask_udp(&self, from: &str, server: &str, patience: Duration) -> Option<String> {
        self.enter(|| {
            let socket = UdpSocket::bind((from.parse::<IpAddr>().unwrap(), 0)).ok()?;
            socket.set_read_timeout(Some(patience)).unwrap();
            socket.send_to(b"?", server).ok()?;
            let mut buffer = [0; 64];
            let length = socket.recv(&mut buffer).ok()?;
            Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
        })
    }

    /// Whether an address answers an echo request.
    pub(crate) fn pings(&self, address: &str) -> bool {
        self.try_run(&format!("ping -c 1 -W 1 {address}")).status.success()
    }

    /// Waits until an address answers: links take a moment to pass the first frame.
    pub(crate) fn reaches(&self, address: &str) {
        wait_for(address, PATIENCE, || self.pings(address));
    }

    /// Starts a name server at 127.0.0.1 that knows one name, with these addresses.
    pub(crate) fn name(&self, name: &str, addresses: &[&str]) -> NameServer {
        let mut command = Command::new("dnsmasq");
        command.args([
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--user=root",
        ]);
        command.args(["--no-hosts", "--pid-file=", "--listen-address=127.0.0.1"]);
        command.args(["--bind-interfaces", "--log-facility=-"]);
        command.args(addresses.iter().map(|address| format!("--address=/{name}/{address}")));
        command.stderr(std::process::Stdio::null());
        let server = NameServer(self.enter(|| command.spawn().unwrap()));
        wait_for("the name server", PATIENCE, || {
            self.enter(|| TcpStream::connect("127.0.0.1:53").is_ok())
        });
        server
    }

    /// Packets that an interface has received.
    pub(crate) fn received(&self, interface: &str) -> u64 {
        let text = self.ip(&format!("-j -s link show {interface}"));
        let links: serde_json::Value = serde_json::from_str(&text).unwrap();
        links[0]["stats64"]["rx"]["packets"].as_u64().unwrap()
    }
}

/// A name server; gone when dropped.
pub(crate) struct NameServer(Child);

impl Drop for NameServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Passes frames between two taps, as a VMM and a guest's network card would.
pub(crate) struct Pump {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    pub(crate) fn start(one: OwnedFd, other: OwnedFd) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (one, other) = (File::from(one), File::from(other));
            while !stopped.load(Ordering::Relaxed) {
                pass(&one, &other);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

fn pass(one: &File, other: &File) {
    let mut waiting = [one, other].map(|file| PollFd::new(file, PollFlags::IN));
    let patience = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    if poll(&mut waiting, Some(&patience)) == Ok(0) {
        return;
    }
    let mut frame = [0; 65_600];
    for (mut from, mut to) in [(one, other), (other, one)] {
        while let Ok(length) = from.read(&mut frame) {
            // A tap that is down takes nothing, like a card without a driver.
            let _ = to.write(&frame[..length]);
        }
    }
}

/// Waits until `condition` holds.
pub(crate) fn wait_for(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {patience:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns whether `what` can run here; says why when it cannot.
pub(crate) fn can_run(what: &str, programs: &[&str]) -> bool {
    let reason = if !nix::unistd::geteuid().is_root() {
        Some("needs root for network namespaces".to_owned())
    } else if std::fs::metadata("/dev/net/tun").is_err() {
        Some("needs /dev/net/tun".to_owned())
    } else {
        programs.iter().find(|name| find(name).is_none()).map(|name| format!("needs {name}"))
    };
    if let Some(reason) = &reason {
        println!("skipped: {what}: {reason}");
    }
    reason.is_none()
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.find_map(|folder| Some(folder.join(program)).filter(|file| file.is_file()))
}
