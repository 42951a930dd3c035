//! Streams to a whole control interface: real overlays and signatures, and guests that are ports of this
//! machine.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lease::authority::public_key;
use overlay::{Inbox, Overlay, OverlayConfig, OverlayStream, RequestError, Role, SigningKey};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::{Notify, mpsc, watch},
};
use types::{
    config::NodeSpec,
    forward::{ForwardedRequest, StreamAnswer, StreamHeader},
    ids::{MachineId, NodeId},
    units::UnixSeconds,
};

use super::{Control, Parts, authority::Authority, guest_tests::Guest, streams::RENTERS_STREAMS};
use crate::{
    attest::Attestor,
    machines::{
        keeper::{Machines, Snapshot, State, View},
        plan::fixture::record,
        store::Store,
    },
    net::{MachineNetworks, NetworkStatus, Resolver},
    tasks::{self, frames},
    time::{Clock, ClockConfig, SystemClock},
    updates::Shelf,
};

/// Everything that should happen happens within this time, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(45);

/// Later than the build, which a clock is never before.
const NOW: u64 = 4_000_000_000;

#[derive(Debug)]
struct Still;

impl SystemClock for Still {
    fn now(&self) -> Duration {
        Duration::from_secs(NOW)
    }

    fn set(&self, _: Duration) -> std::io::Result<()> {
        Ok(())
    }

    fn slew(&self, _: i64) -> std::io::Result<()> {
        Ok(())
    }

    fn confirm(&self, _: Duration) -> std::io::Result<()> {
        Ok(())
    }
}

fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

/// The machine of the renter with this seed.
fn machine(seed: u8) -> View {
    let mut record = record();
    record.lease.id = MachineId::from_bytes([seed; 16]);
    record.lease.renter = public_key(&key(seed));
    View { record, state: State::Running, address: Some(Ipv4Addr::LOCALHOST), silent: false }
}

/// The control interface of a node with these machines.
fn control(overlay: &Overlay, root: &Path, machines: Vec<View>) -> Control {
    let authority = public_key(&key(1));
    let text = format!("version = 1\n[authority]\nthreshold = 1\nkeys = [\"{authority}\"]\n");
    let spec = NodeSpec::parse(text.as_bytes()).expect("valid");
    let store = Arc::new(Store::open(&root.join("agent.redb")).expect("opened"));
    let (_, network) = watch::channel(NetworkStatus::default());
    let clock = ClockConfig {
        seen: UnixSeconds(0),
        confirmed: UnixSeconds(0),
        agreed: UnixSeconds(0),
        servers: Vec::new(),
        nts: None,
        resolver: Resolver::new(network.clone()),
        network,
    };
    let clock = Arc::new(Clock::start_with(clock, Arc::new(Still)));
    Control::new(Parts {
        node: overlay.node_id(),
        authority: Authority::new(&spec, Arc::clone(&store), clock.now()).expect("valid"),
        spec,
        machines: Machines::shown(Snapshot { machines, ..Snapshot::default() }),
        store,
        clock,
        networks: Arc::new(MachineNetworks::none()),
        attestor: Attestor::new(key(2), root.to_owned()),
        updates: mpsc::channel(1).0,
        shelf: Arc::new(Shelf::new(root)),
        root: root.to_owned(),
    })
}

async fn overlay(seed: u8, role: Role, seeds: Vec<(NodeId, SocketAddr)>) -> (Overlay, Inbox) {
    let listen = "127.0.0.1:0".parse().expect("an address");
    Overlay::start(OverlayConfig { key: key(seed), listen, seeds, role }).await.expect("started")
}

/// Starts a member that knows the node.
async fn member(seed: u8, node: &Overlay) -> (Overlay, Inbox) {
    let seeds = vec![(node.node_id(), node.local_addr())];
    let (member, mut inbox) = overlay(seed, Role::Gateway, seeds).await;
    let joined =
        async { while member.members().is_empty() && inbox.events.recv().await.is_some() {} };
    tokio::time::timeout(PATIENCE, joined).await.expect("joined in time");
    (member, inbox)
}

/// What the renter with the first seed asks of the machine of the second one's.
fn signed(signer: u8, machine: u8, (method, rest): (&str, &str)) -> ForwardedRequest {
    let machine = MachineId::from_bytes([machine; 16]);
    let target = format!("/v1/machines/{machine}/{rest}");
    let mut request = ForwardedRequest {
        method: method.into(),
        target: target.trim_end_matches('/').to_owned(),
        headers: Vec::new(),
        body: Vec::new(),
    };
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).expect("random numbers");
    let nonce = types::hex::encode(&nonce);
    lease::request::sign(&key(signer), &mut request, UnixSeconds(NOW), &nonce).expect("signed");
    request
}

/// Opens a stream by a request.
async fn open(
    gateway: &Overlay,
    node: NodeId,
    request: ForwardedRequest,
) -> (OverlayStream, StreamAnswer) {
    let exchange = async {
        let mut stream = gateway.open_stream(node).await.expect("opened");
        frames::write(&mut stream, &StreamHeader::Request(request)).await.expect("written");
        let answer = frames::read(&mut stream).await.expect("answered");
        (stream, answer)
    };
    within(exchange).await
}

/// Opens a tunnel for the renter with this seed to the port of its machine.
async fn tunnel(
    gateway: &Overlay,
    node: NodeId,
    seed: u8,
    port: u16,
) -> (OverlayStream, StreamAnswer) {
    open(gateway, node, signed(seed, seed, ("GET", &format!("tunnel/{port}")))).await
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("in time")
}

/// A node with the machine of the renter with this seed, its process, and a gateway.
struct Scene {
    node: NodeId,
    seed: u8,
    gateway: Overlay,
    guest: Arc<Guest>,
    control: Control,
    _kept: (tempfile::TempDir, Overlay, Inbox),
}

impl Scene {
    /// No two tests have the same seed: sockets are named by machine.
    async fn start(seed: u8) -> Self {
        let guest = Guest::listen(MachineId::from_bytes([seed; 16]));
        let root = tempfile::tempdir().expect("a folder");
        let (node, inbox) = overlay(seed, Role::Provider, Vec::new()).await;
        let control = control(&node, root.path(), vec![machine(seed)]);
        let served = control.clone();
        tokio::spawn(tasks::overlay::serve(inbox, node.clone(), served, Arc::new(Notify::new())));
        let (gateway, inbox) = member(seed + 1, &node).await;
        Self { node: node.node_id(), seed, gateway, guest, control, _kept: (root, node, inbox) }
    }

    async fn open(&self, method: &str, rest: &str) -> (OverlayStream, StreamAnswer) {
        open(&self.gateway, self.node, signed(self.seed, self.seed, (method, rest))).await
    }

    async fn terminal(&self, rest: &str) -> OverlayStream {
        let (stream, answer) = self.open("GET", rest).await;
        assert_eq!(answer, StreamAnswer::Open { length: None });
        stream
    }
}

async fn read(stream: &mut OverlayStream, wanted: &str) {
    let mut bytes = vec![0; wanted.len()];
    let read = within(stream.read_exact(&mut bytes)).await;
    assert_eq!(String::from_utf8_lossy(&bytes), wanted, "{read:?}");
}

#[tokio::test]
async fn a_password_is_typed_without_a_poll_for_each_key() {
    let scene = Scene::start(21).await;
    scene.guest.print(b"boot\nunlock: ");
    let mut terminal = scene.terminal("terminal?from=0").await;
    read(&mut terminal, "boot\nunlock: ").await;
    let password = "correct horse battery staple, and more\r\n";
    let mut typed = String::new();
    for key in password.chars() {
        typed.push(key);
        terminal.write_all(key.to_string().as_bytes()).await.expect("written");
        scene.guest.until(|guest| guest.typed == typed.as_bytes()).await;
    }
    scene.guest.until(|guest| guest.waiting == 1).await;
    // The one that brought what was there, the one that waits, and those that nothing came to on a busy machine.
    assert!((2..typed.len() / 4).contains(&scene.guest.polls()), "{}", scene.guest.polls());
    scene.guest.print(b"\x1b[32mok\x1b[0m");
    read(&mut terminal, "\x1b[32mok\x1b[0m").await;
}

#[tokio::test]
async fn a_terminal_that_hangs_up_leaves_no_poll_behind() {
    let scene = Scene::start(24).await;
    let terminal = scene.terminal("terminal").await;
    scene.guest.until(|guest| guest.waiting == 1).await;
    drop(terminal);
    scene.guest.until(|guest| guest.waiting == 0).await;
    let follower = scene.terminal("console?follow=1").await;
    scene.guest.until(|guest| guest.waiting == 1).await;
    drop(follower);
    scene.guest.until(|guest| guest.waiting == 0).await;
}

#[tokio::test]
async fn what_a_full_console_refuses_is_typed_later_and_once() {
    let scene = Scene::start(27).await;
    scene.guest.change(|guest| guest.full = true);
    let mut terminal = scene.terminal("terminal").await;
    terminal.write_all(b"first ").await.expect("written");
    scene.guest.until(|guest| guest.refused > 0).await;
    terminal.write_all(b"second").await.expect("written");
    // What is printed is shown meanwhile.
    scene.guest.print(b"busy");
    read(&mut terminal, "busy").await;
    scene.guest.change(|guest| guest.full = false);
    scene.guest.until(|guest| guest.typed == b"first second").await;
}

#[tokio::test]
async fn a_terminal_begins_with_the_last_lines_as_text() {
    let scene = Scene::start(30).await;
    let long = "x".repeat(5000);
    scene.guest.print(format!("{long}\nlast\r\n\x1b[6n\x1b[1mlogin:\x1b[0m ").as_bytes());
    let mut terminal = scene.terminal("terminal").await;
    read(&mut terminal, "last\r\nlogin: ").await;
    scene.guest.print(b"\x1b[6n");
    read(&mut terminal, "\x1b[6n").await;
}

#[tokio::test]
async fn a_process_that_gives_nothing_at_once_is_not_asked_without_pause() {
    let scene = Scene::start(33).await;
    scene.guest.change(|guest| guest.hasty = true);
    let begun = Instant::now();
    let _terminal = scene.terminal("terminal").await;
    scene.guest.until(|guest| guest.polls >= 5).await;
    // Four pauses of a quarter of a second are between five polls.
    let passed = begun.elapsed();
    assert!(passed >= Duration::from_millis(900), "{passed:?}");
}

#[tokio::test]
async fn a_dump_is_refused_in_the_words_of_the_machines_process() {
    let scene = Scene::start(36).await;
    let (_, answer) = scene.open("POST", "dump").await;
    let StreamAnswer::Refused(problem) = answer else { panic!("not refused") };
    assert_eq!(problem.status, 409);
    assert!(problem.detail.ends_with(": it is being done already"), "{problem:?}");
}

/// All that is asked of one machine.
const ASKED: [(&str, &str); 19] = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "start"),
    ("POST", "stop"),
    ("POST", "restart"),
    ("PUT", "lease"),
    ("POST", "nmi"),
    ("POST", "pause"),
    ("POST", "resume"),
    ("GET", "counters"),
    ("GET", "metrics"),
    ("GET", "events"),
    ("GET", "devices"),
    ("POST", "devices"),
    ("DELETE", "devices/data"),
    ("GET", "console"),
    ("GET", "console?previous=1"),
    ("POST", "console"),
    ("GET", "receipts"),
];
/// What is opened as a stream.
const OPENED: [(&str, &str); 4] =
    [("POST", "dump"), ("GET", "terminal"), ("GET", "tunnel/22"), ("GET", "console?follow=1")];

#[tokio::test]
async fn another_renter_gets_nothing_of_a_machine() {
    let scene = Scene::start(39).await;
    let other = scene.seed + 5;
    for what in ASKED {
        let request = signed(other, scene.seed, what);
        let answer = scene.control.answer(scene.gateway.node_id(), &request).await;
        assert_eq!(answer.status, 404, "{what:?}: {}", String::from_utf8_lossy(&answer.body));
    }
    for what in OPENED {
        let request = signed(other, scene.seed, what);
        let (_, answer) = open(&scene.gateway, scene.node, request).await;
        let StreamAnswer::Refused(problem) = answer else { panic!("{what:?} was opened") };
        assert_eq!(problem.status, 404, "{what:?}: {problem:?}");
    }
    assert_eq!(scene.guest.polls(), 0, "the machine's process was asked");
    // The same words of the machine's own renter are heard.
    let request = signed(scene.seed, scene.seed, ("GET", "console"));
    let answer = scene.control.answer(scene.gateway.node_id(), &request).await;
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
}

#[tokio::test]
async fn what_is_carried_out_later_is_answered_as_begun() {
    let scene = Scene::start(45).await;
    for what in [("POST", "start"), ("POST", "stop"), ("POST", "restart"), ("DELETE", "")] {
        let request = signed(scene.seed, scene.seed, what);
        let answer = scene.control.answer(scene.gateway.node_id(), &request).await;
        assert_eq!(answer.status, lease::api::BEGUN, "{what:?}");
    }
}

#[tokio::test]
async fn neither_a_silent_peer_nor_a_renter_with_many_tunnels_keeps_others_out() {
    let root = tempfile::tempdir().expect("a folder");
    let guest = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let port = guest.local_addr().expect("bound").port();
    let (node, inbox) = overlay(3, Role::Provider, Vec::new()).await;
    let control = control(&node, root.path(), vec![machine(11), machine(12)]);
    tokio::spawn(tasks::overlay::serve(inbox, node.clone(), control, Arc::new(Notify::new())));
    let (gateway, _gateway_inbox) = member(4, &node).await;
    let (hostile, _hostile_inbox) = member(5, &node).await;
    let id = node.node_id();

    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(hostile.open_stream(id).await);
    }
    let busy = |opened: &&Result<_, _>| matches!(opened, Err(RequestError::PeerBusy { .. }));
    assert_eq!(silent.iter().filter(busy).count(), 4);

    let share = RENTERS_STREAMS / 16;
    let mut held = Vec::new();
    for _ in 0..share {
        held.push(tunnel(&gateway, id, 11, port).await);
    }
    let open = |answer: &StreamAnswer| matches!(answer, StreamAnswer::Open { .. });
    assert!(held.iter().all(|(_, answer)| open(answer)), "{held:?}");
    let (_, beyond) = tunnel(&gateway, id, 11, port).await;
    let StreamAnswer::Refused(problem) = beyond else {
        panic!("one renter has more than its share")
    };
    assert_eq!(problem.status, 429, "{problem:?}");
    let (_stream, neighbour) = tunnel(&gateway, id, 12, port).await;
    assert!(open(&neighbour), "{neighbour:?}");
}
