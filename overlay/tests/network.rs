//! Whole nodes on 127.0.0.1.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::{future::Future, net::SocketAddr, time::Duration};

use bytes::Bytes;
use overlay::{
    Inbox, MemberEvent, Overlay, OverlayConfig, OverlayStream, Reach, RequestError, Role,
    SigningKey,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, sleep, timeout},
};
use types::ids::NodeId;

/// Everything that should happen happens within this time, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(45);

fn config(key: u8, role: Role, seeds: &[&Overlay]) -> OverlayConfig {
    OverlayConfig {
        key: SigningKey::from_bytes(&[key; 32]),
        listen: "127.0.0.1:0".parse().unwrap(),
        seeds: seeds.iter().map(|seed| (seed.node_id(), seed.local_addr())).collect(),
        role,
    }
}

async fn start(key: u8, role: Role, seeds: &[&Overlay]) -> (Overlay, Inbox) {
    Overlay::start(config(key, role, seeds)).await.unwrap()
}

async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

async fn knows(node: &Overlay, others: &[&Overlay]) {
    let ids: Vec<NodeId> = others.iter().map(|other| other.node_id()).collect();
    until("members are known", async || {
        let members = node.members();
        ids.iter().all(|id| members.iter().any(|member| member.id == *id))
    })
    .await;
}

fn lists(node: &Overlay, other: NodeId) -> bool {
    node.members().iter().any(|member| member.id == other)
}

/// Answers each request with the asker's key and the body reversed.
fn echo(mut inbox: Inbox) {
    tokio::spawn(async move {
        while let Some(request) = inbox.requests.recv().await {
            let mut answer = request.from.as_bytes().to_vec();
            answer.extend(request.body.iter().rev());
            request.reply(answer.into());
        }
    });
}

#[tokio::test]
async fn two_nodes_meet_through_a_seed_and_ask_each_other() {
    let (seed, _seed_inbox) = start(1, Role::Seed, &[]).await;
    let (a, _inbox_a) = start(2, Role::Gateway, &[&seed]).await;
    let (b, inbox_b) = start(3, Role::Provider, &[&seed]).await;
    echo(inbox_b);
    knows(&a, &[&seed, &b]).await;
    let answer = a.request(b.node_id(), Bytes::from_static(b"abc"), PATIENCE).await.unwrap();
    assert_eq!(&answer[..32], a.node_id().as_bytes());
    assert_eq!(&answer[32..], b"cba");
    let member = a.members().into_iter().find(|member| member.id == b.node_id()).unwrap();
    assert_eq!(member.role, Role::Provider);
    assert!(member.addresses.contains(&b.local_addr()));
    let connected = a.connected();
    assert!(connected.neighbours.contains(&seed.node_id()), "{connected:?}");
    assert!(connected.round_trips.contains_key(&b.node_id()), "{connected:?}");
    assert!(connected.traffic.sent_bytes > 0 && connected.traffic.received_bytes > 0);
    let nobody = NodeId::from_bytes([9; 32]);
    let error = a.request(nobody, Bytes::new(), PATIENCE).await.unwrap_err();
    assert!(matches!(error, RequestError::UnknownNode { .. }), "{error}");
}

#[tokio::test]
async fn another_key_at_the_address_is_refused() {
    let (imposter, _inbox) = start(4, Role::Seed, &[]).await;
    let expected = SigningKey::from_bytes(&[5; 32]).verifying_key().to_bytes();
    let mut config = config(6, Role::Provider, &[]);
    config.seeds = vec![(NodeId::from_bytes(expected), imposter.local_addr())];
    let (node, _node_inbox) = Overlay::start(config).await.unwrap();
    let (honest, _honest_inbox) = start(7, Role::Provider, &[&imposter]).await;
    knows(&imposter, &[&honest]).await;
    assert!(node.members().is_empty());
    assert!(!lists(&imposter, node.node_id()));
}

#[tokio::test]
async fn a_node_that_cannot_be_dialled_is_reached_through_its_neighbour() {
    let (seed, _seed_inbox) = start(11, Role::Seed, &[]).await;
    let hidden = config(12, Role::Provider, &[&seed]);
    let (hidden, mut hidden_inbox) =
        Overlay::start_with_reach(hidden, Reach::OutgoingOnly).await.unwrap();
    knows(&seed, &[&hidden]).await;
    // Hidden too, so that neither can dial the other: only the seed has both connections.
    let asker = config(13, Role::Gateway, &[&seed]);
    let (asker, _asker_inbox) =
        Overlay::start_with_reach(asker, Reach::OutgoingOnly).await.unwrap();
    knows(&asker, &[&hidden, &seed]).await;
    let streams = tokio::spawn(async move {
        let request = hidden_inbox.requests.recv().await.unwrap();
        request.reply(Bytes::from_static(b"from behind"));
        hidden_inbox.streams.recv().await.unwrap()
    });
    let answer = asker.request(hidden.node_id(), Bytes::from_static(b"hi"), PATIENCE).await;
    assert_eq!(answer.unwrap(), "from behind");
    let near = within("stream", asker.open_stream(hidden.node_id())).await.unwrap();
    let far = within("stream", streams).await.unwrap();
    assert!(near.is_relayed() && far.stream.is_relayed());
    assert_eq!(far.from, asker.node_id());
    // Sealing is slow in an unoptimised build, so less than on the direct way.
    exchange(near, far.stream, 2 << 20).await;
}

#[tokio::test]
async fn streams_carry_bytes_both_ways_over_a_connection_that_the_target_made() {
    let (gateway, _gateway_inbox) = start(21, Role::Gateway, &[]).await;
    let (node, mut inbox) = start(22, Role::Provider, &[&gateway]).await;
    knows(&gateway, &[&node]).await;
    let near = within("stream", gateway.open_stream(node.node_id())).await.unwrap();
    let far = within("stream", inbox.streams.recv()).await.unwrap();
    assert!(!near.is_relayed());
    assert_eq!(far.from, gateway.node_id());
    exchange(near, far.stream, 16 << 20).await;
}

async fn exchange(near: OverlayStream, far: OverlayStream, length: usize) {
    async fn one(stream: OverlayStream, length: usize, own: u8, others: u8) {
        let (mut read, mut write) = tokio::io::split(stream);
        let send = async {
            let piece = vec![own; 1 << 20];
            for _ in 0..length / piece.len() {
                write.write_all(&piece).await.unwrap();
            }
            write.shutdown().await.unwrap();
        };
        let receive = async {
            let mut all = Vec::new();
            read.read_to_end(&mut all).await.unwrap();
            assert!(all.len() == length && all.iter().all(|byte| *byte == others));
        };
        tokio::join!(send, receive);
    }
    let both = async { tokio::join!(one(near, length, 1, 2), one(far, length, 2, 1)) };
    within("bytes both ways", both).await;
}

#[tokio::test]
async fn a_stream_that_is_aborted_does_not_seem_to_end() {
    let (seed, _seed_inbox) = start(27, Role::Seed, &[]).await;
    let hidden = config(28, Role::Provider, &[&seed]);
    let (hidden, mut hidden_inbox) =
        Overlay::start_with_reach(hidden, Reach::OutgoingOnly).await.unwrap();
    knows(&seed, &[&hidden]).await;
    let asker = config(29, Role::Gateway, &[&seed]);
    let (asker, mut asker_inbox) =
        Overlay::start_with_reach(asker, Reach::OutgoingOnly).await.unwrap();
    knows(&asker, &[&hidden, &seed]).await;
    let relayed = within("stream", asker.open_stream(hidden.node_id())).await.unwrap();
    let direct = within("stream", seed.open_stream(asker.node_id())).await.unwrap();
    for (mut near, inbox) in [(relayed, &mut hidden_inbox), (direct, &mut asker_inbox)] {
        near.write_all(b"half").await.unwrap();
        let mut far = within("stream", inbox.streams.recv()).await.unwrap().stream;
        within("half", far.read_exact(&mut [0; 4])).await.unwrap();
        let relayed = near.is_relayed();
        near.abort();
        let rest = within("the rest", far.read_to_end(&mut Vec::new())).await;
        assert!(rest.is_err(), "relayed: {relayed}");
    }
}

#[tokio::test]
async fn one_half_can_end_before_the_other() {
    let (gateway, _gateway_inbox) = start(25, Role::Gateway, &[]).await;
    let (node, mut inbox) = start(26, Role::Provider, &[&gateway]).await;
    knows(&gateway, &[&node]).await;
    let mut near = within("stream", gateway.open_stream(node.node_id())).await.unwrap();
    let mut far = within("stream", inbox.streams.recv()).await.unwrap().stream;
    near.write_all(b"question").await.unwrap();
    near.shutdown().await.unwrap();
    let mut question = String::new();
    within("question", far.read_to_string(&mut question)).await.unwrap();
    far.write_all(b"answer").await.unwrap();
    far.shutdown().await.unwrap();
    let mut answer = String::new();
    within("answer", near.read_to_string(&mut answer)).await.unwrap();
    assert_eq!((question.as_str(), answer.as_str()), ("question", "answer"));
}

#[tokio::test]
async fn broadcasts_arrive_once_everywhere_but_at_their_origin() {
    let (seed, mut seed_inbox) = start(31, Role::Seed, &[]).await;
    let (a, mut inbox_a) = start(32, Role::Provider, &[&seed]).await;
    let (b, mut inbox_b) = start(33, Role::Provider, &[&seed]).await;
    knows(&a, &[&b]).await;
    knows(&b, &[&a]).await;
    a.broadcast(Bytes::from_static(b"first")).unwrap();
    a.broadcast(Bytes::from_static(b"second")).unwrap();
    for inbox in [&mut seed_inbox, &mut inbox_b] {
        let mut payloads = Vec::new();
        for _ in 0..2 {
            let broadcast = within("broadcast", inbox.broadcasts.recv()).await.unwrap();
            assert_eq!(broadcast.origin, a.node_id());
            payloads.push(broadcast.payload);
        }
        payloads.sort();
        assert_eq!(payloads, ["first", "second"]);
        assert!(inbox.broadcasts.try_recv().is_err());
    }
    assert!(inbox_a.broadcasts.try_recv().is_err());
    assert!(a.broadcast(Bytes::from(vec![0; overlay::wire::PAYLOAD + 1])).is_err());
}

#[tokio::test]
async fn who_leaves_is_gone_at_once_and_who_dies_soon() {
    let (seed, _seed_inbox) = start(41, Role::Seed, &[]).await;
    let (a, mut inbox) = start(42, Role::Provider, &[&seed]).await;
    let (leaver, _leaver_inbox) = start(43, Role::Provider, &[&seed]).await;
    let (victim, _victim_inbox) = start(44, Role::Provider, &[&seed]).await;
    let (leaver_id, victim_id) = (leaver.node_id(), victim.node_id());
    knows(&a, &[&seed, &leaver, &victim]).await;
    knows(&seed, &[&leaver, &victim]).await;
    leaver.leave().await;
    let error = leaver.request(a.node_id(), Bytes::new(), PATIENCE).await.unwrap_err();
    assert!(matches!(error, RequestError::Stopped), "{error}");
    until("leaver is gone", async || !lists(&a, leaver_id) && !lists(&seed, leaver_id)).await;
    drop(victim);
    let died = Instant::now();
    until("victim is gone", async || !lists(&a, victim_id) && !lists(&seed, victim_id)).await;
    let bound = overlay::membership::DEATH_BOUND;
    assert!(died.elapsed() < bound, "{:?}", died.elapsed());
    let mut seen = Vec::new();
    while let Ok(event) = inbox.events.try_recv() {
        seen.push(event);
    }
    assert!(seen.contains(&MemberEvent::Left(leaver_id)), "{seen:?}");
    assert!(seen.contains(&MemberEvent::Died(victim_id)), "{seen:?}");
}

#[tokio::test]
async fn a_restarted_node_is_found_again() {
    let (seed, _seed_inbox) = start(51, Role::Seed, &[]).await;
    let (first, _first_inbox) = start(52, Role::Provider, &[&seed]).await;
    knows(&seed, &[&first]).await;
    first.leave().await;
    let id = first.node_id();
    until("it is gone", async || !lists(&seed, id)).await;
    let (second, inbox) = start(52, Role::Provider, &[&seed]).await;
    echo(inbox);
    knows(&seed, &[&second]).await;
    let answer = seed.request(id, Bytes::from_static(b"x"), PATIENCE).await.unwrap();
    assert_eq!(answer[32..], *b"x");
}

#[tokio::test]
async fn requests_that_nobody_answers_end_with_a_reason() {
    let (a, _inbox_a) = start(61, Role::Gateway, &[]).await;
    let (b, mut inbox_b) = start(62, Role::Provider, &[&a]).await;
    knows(&a, &[&b]).await;
    let dropped = tokio::spawn(async move {
        drop(inbox_b.requests.recv().await.unwrap());
        inbox_b
    });
    let error = a.request(b.node_id(), Bytes::new(), PATIENCE).await.unwrap_err();
    assert!(matches!(error, RequestError::Broken { .. }), "{error}");
    let _inbox_b = dropped.await.unwrap();
    let error = a.request(b.node_id(), Bytes::new(), Duration::from_millis(300)).await.unwrap_err();
    assert!(matches!(error, RequestError::Deadline { .. }), "{error}");
    let long = Bytes::from(vec![0; overlay::wire::MESSAGE + 1]);
    let error = a.request(b.node_id(), long, PATIENCE).await.unwrap_err();
    assert!(matches!(error, RequestError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn a_seed_that_comes_late_is_joined() {
    let (reserved, _reserved_inbox) = start(71, Role::Seed, &[]).await;
    let address: SocketAddr = reserved.local_addr();
    let id = reserved.node_id();
    reserved.leave().await;
    drop(reserved);
    let mut config = config(72, Role::Provider, &[]);
    config.seeds = vec![(id, address)];
    let (node, _inbox) = Overlay::start(config).await.unwrap();
    sleep(Duration::from_millis(100)).await;
    assert!(node.members().is_empty());
    let mut late = self::config(71, Role::Seed, &[]);
    late.listen = address;
    let (seed, _seed_inbox) = within("the port is free again", async {
        loop {
            match Overlay::start(late.clone()).await {
                Ok(started) => return started,
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await;
    knows(&node, &[&seed]).await;
}
