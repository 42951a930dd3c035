//! Peers that hold a key and break every other rule, against whole nodes on 127.0.0.1.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::{net::UdpSocket, time::Duration};

use bytes::Bytes;
use ed25519_dalek::SigningKey;
use quinn::{Connection, ConnectionError, RecvStream, SendStream};
use tokio::time::{Instant, sleep, timeout};
use types::ids::NodeId;

use super::{
    Inbox, Overlay, OverlayConfig, Reach, frames,
    node::{self, CLOSE_FAULT, RELAYED, UNREAD},
    outbound,
    places::SHARE,
    tls::Tls,
};
use crate::{
    identity::Identity,
    sealed::{self, Purpose},
    wire::{
        Answer, Frame, Heard, Hello, MESSAGE_FRAME, Opening, Parcel, Refusal, Role, Rumour,
        Statement,
    },
};

const PATIENCE: Duration = Duration::from_secs(45);

async fn start(key: u8, role: Role, seeds: &[&Overlay]) -> (Overlay, Inbox) {
    let config = OverlayConfig {
        key: SigningKey::from_bytes(&[key; 32]),
        listen: "127.0.0.1:0".parse().unwrap(),
        seeds: seeds.iter().map(|seed| (seed.node_id(), seed.local_addr())).collect(),
        role,
    };
    Overlay::start(config).await.unwrap()
}

/// Starts a gateway and a node that answers requests with "ok".
async fn victim_and_friend(key: u8) -> (Overlay, Overlay, Inbox) {
    let (victim, mut inbox) = start(key, Role::Gateway, &[]).await;
    tokio::spawn(async move {
        while let Some(request) = inbox.requests.recv().await {
            request.reply(Bytes::from_static(b"ok"));
        }
    });
    let (friend, friend_inbox) = start(key + 1, Role::Provider, &[&victim]).await;
    let deadline = Instant::now() + PATIENCE;
    while friend.members().is_empty() || victim.members().is_empty() {
        assert!(Instant::now() < deadline, "the friend did not join");
        sleep(Duration::from_millis(20)).await;
    }
    (victim, friend, friend_inbox)
}

async fn still_serves(victim: &Overlay, friend: &Overlay) {
    let answer = friend.request(victim.node_id(), Bytes::from_static(b"?"), PATIENCE).await;
    assert_eq!(answer.unwrap(), "ok");
}

/// A connection made with a good key. The endpoint has to live as long.
async fn intruder(key: u8, victim: &Overlay) -> (Identity, quinn::Endpoint, Connection) {
    let identity = Identity::new(SigningKey::from_bytes(&[key; 32]));
    let tls = Tls::new(&identity).unwrap();
    let endpoint = node::bind(&tls, "127.0.0.1:0".parse().unwrap()).unwrap();
    let config = tls.client(victim.node_id()).unwrap();
    let connecting = endpoint.connect_with(config, victim.local_addr(), "holdfast").unwrap();
    let connection = timeout(PATIENCE, connecting).await.unwrap().unwrap();
    (identity, endpoint, connection)
}

async fn say(connection: &Connection, bytes: &[u8]) -> (SendStream, RecvStream) {
    let (mut send, receive) = connection.open_bi().await.unwrap();
    send.write_all(bytes).await.unwrap();
    (send, receive)
}

/// Waits until the victim closes the connection and returns its reason.
async fn thrown_out(connection: &Connection) -> String {
    let error = timeout(PATIENCE, connection.closed()).await.expect("closed in time");
    let ConnectionError::ApplicationClosed(close) = error else { panic!("closed by: {error}") };
    assert_eq!(close.error_code, CLOSE_FAULT);
    String::from_utf8(close.reason.to_vec()).unwrap()
}

fn hello() -> Frame {
    let observed = "127.0.0.1:9".parse().unwrap();
    Frame::Hello(Hello { role: Role::Provider, neighbours: 0, observed })
}

#[tokio::test]
async fn garbage_on_streams_ends_the_connection_with_a_reason() {
    let (victim, friend, _inbox) = victim_and_friend(101).await;
    let (_, _endpoint, connection) = intruder(103, &victim).await;
    let _stream = say(&connection, &[0, 0, 0, 3, 0xff, 0xff, 0xff]).await;
    let reason = thrown_out(&connection).await;
    assert!(reason.contains("not a stream opening"), "{reason}");
    let (_, _endpoint, connection) = intruder(103, &victim).await;
    let _stream = say(&connection, &[0xff; 64]).await;
    let reason = thrown_out(&connection).await;
    assert!(reason.contains("at most"), "{reason}");
    still_serves(&victim, &friend).await;
}

#[tokio::test]
async fn a_wrong_key_is_refused_by_its_name() {
    let (victim, friend, _inbox) = victim_and_friend(171).await;
    let expected = Identity::new(SigningKey::from_bytes(&[173; 32])).id();
    let addresses = [victim.local_addr()];
    let dialled = super::connect::to(&friend.running.node, expected, &addresses, PATIENCE);
    let reason = dialled.await.unwrap_err();
    assert!(reason.contains(&format!("expected the key of node {expected}")), "{reason}");
    assert!(reason.contains(&victim.node_id().to_string()), "{reason}");
}

#[tokio::test]
async fn garbage_datagrams_change_nothing() {
    let (victim, friend, _inbox) = victim_and_friend(111).await;
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    for n in 0..2_000usize {
        let bytes: Vec<u8> =
            (0..n % 1_400).map(|at| ((at * 31) ^ (n * 17)).to_le_bytes()[0]).collect();
        let _ = socket.send_to(&bytes, victim.local_addr());
    }
    still_serves(&victim, &friend).await;
}

#[tokio::test]
async fn a_flood_of_frames_ends_the_connection() {
    let (victim, friend, _inbox) = victim_and_friend(121).await;
    let (_, _endpoint, connection) = intruder(123, &victim).await;
    let opening = [crate::wire::to_frame(&Opening::Link), crate::wire::to_frame(&hello())].concat();
    let (mut send, _receive) = say(&connection, &opening).await;
    let pings = crate::wire::to_frame(&Frame::Ping).repeat(10_000);
    let flood = async { while send.write_all(&pings).await.is_ok() {} };
    timeout(PATIENCE, flood).await.expect("cut off in time");
    let reason = thrown_out(&connection).await;
    assert!(reason.contains("per second"), "{reason}");
    still_serves(&victim, &friend).await;
}

#[tokio::test]
async fn a_flood_of_streams_ends_the_connection() {
    let (victim, friend, _inbox) = victim_and_friend(131).await;
    let (_, _endpoint, connection) = intruder(133, &victim).await;
    let flood = async {
        while let Ok((mut send, _receive)) = connection.open_bi().await {
            let _ = send.write_all(&[0]).await;
            let _ = send.reset(0u32.into());
        }
    };
    timeout(PATIENCE, flood).await.expect("cut off in time");
    let reason = thrown_out(&connection).await;
    assert!(reason.contains("per second"), "{reason}");
    still_serves(&victim, &friend).await;
}

#[tokio::test]
async fn a_forged_rumour_ends_the_connection_and_is_not_believed() {
    let (victim, friend, _inbox) = victim_and_friend(141).await;
    let (identity, _endpoint, connection) = intruder(143, &victim).await;
    let mut rumour = Rumour::new(&identity, u64::MAX - 1, 1, &Statement::Leave);
    rumour.origin = friend.node_id();
    let forged = Frame::Rumours(vec![Heard { rumour, age_ms: 0 }]);
    let bytes = [
        crate::wire::to_frame(&Opening::Link),
        crate::wire::to_frame(&hello()),
        crate::wire::to_frame(&forged),
    ];
    let _stream = say(&connection, &bytes.concat()).await;
    let reason = thrown_out(&connection).await;
    assert!(reason.contains("signature"), "{reason}");
    assert!(victim.members().iter().any(|member| member.id == friend.node_id()));
    still_serves(&victim, &friend).await;
}

async fn ask(connection: &Connection, opening: &Opening) -> Answer {
    let (_send, mut receive) = say(connection, &crate::wire::to_frame(opening)).await;
    let value = frames::read(&mut receive, MESSAGE_FRAME, PATIENCE).await.unwrap();
    Answer::decode(&value).unwrap()
}

fn refused(answer: Answer, words: &str) {
    let Answer::Refused(Refusal::Unacceptable, reason) = answer else { panic!("{answer:?}") };
    assert!(reason.contains(words), "{reason}");
}

#[tokio::test]
async fn a_replayed_or_altered_request_is_refused() {
    let (victim, friend, _inbox) = victim_and_friend(151).await;
    let own = &friend.running.node;
    let (from, to) = (friend.node_id(), victim.node_id());
    let plain = outbound::letter(own, to, b"once").unwrap();
    let sealed = sealed::seal(&own.identity, to, Purpose::Request, &plain).unwrap();
    let opening = Opening::Request(Parcel { from, to, sealed: sealed.clone() });
    let connection = own.connection(to).unwrap();
    assert!(matches!(ask(&connection, &opening).await, Answer::Sealed(_)));
    refused(ask(&connection, &opening).await, "already received");
    // Another peer replays what it overheard, and then alters it.
    let (_, _endpoint, connection) = intruder(153, &victim).await;
    refused(ask(&connection, &opening).await, "already received");
    let mut altered = sealed;
    *altered.last_mut().unwrap() ^= 1;
    let opening = Opening::Request(Parcel { from, to, sealed: altered });
    refused(ask(&connection, &opening).await, "altered");
    still_serves(&victim, &friend).await;
}

#[tokio::test]
async fn a_relay_takes_nothing_in_the_name_of_another() {
    let (victim, friend, _inbox) = victim_and_friend(161).await;
    let (_, _endpoint, connection) = intruder(163, &victim).await;
    let from = NodeId::from_bytes([7; 32]);
    let parcel = Parcel { from, to: friend.node_id(), sealed: vec![0; 64] };
    let _stream = say(&connection, &crate::wire::to_frame(&Opening::Request(parcel))).await;
    let reason = thrown_out(&connection).await;
    assert!(reason.contains("hand on once"), "{reason}");
    still_serves(&victim, &friend).await;
}

/// Opens a stream and returns what the other end says to that.
async fn open(connection: &Connection, opening: &Opening) -> ((SendStream, RecvStream), Answer) {
    let (send, mut receive) = say(connection, &crate::wire::to_frame(opening)).await;
    let value = frames::read(&mut receive, MESSAGE_FRAME, PATIENCE).await.unwrap();
    ((send, receive), Answer::decode(&value).unwrap())
}

#[tokio::test]
async fn silent_streams_of_one_peer_leave_room_for_others() {
    let (victim, _victim_inbox) = start(191, Role::Gateway, &[]).await;
    let (friend, _friend_inbox) = start(192, Role::Provider, &[&victim]).await;
    knows(&friend, &victim).await;
    let (_, _endpoint, connection) = intruder(193, &victim).await;
    let mut held = Vec::new();
    // More than wait for their taker at a time, and nobody takes them here.
    for _ in 0..150 {
        held.push(open(&connection, &Opening::Stream).await);
    }
    let accepted = held.iter().filter(|(_, answer)| *answer == Answer::Accepted).count();
    assert_eq!(accepted, UNREAD / SHARE);
    let busy = |answer: &Answer| matches!(answer, Answer::Refused(Refusal::Busy, _));
    assert!(held.iter().skip(accepted).all(|(_, answer)| busy(answer)));
    friend.open_stream(victim.node_id()).await.unwrap();
}

/// Starts a node that cannot be dialled and joins through the relay.
async fn hidden(key: u8, relay: &Overlay) -> (Overlay, Inbox) {
    let config = OverlayConfig {
        key: SigningKey::from_bytes(&[key; 32]),
        listen: "127.0.0.1:0".parse().unwrap(),
        seeds: vec![(relay.node_id(), relay.local_addr())],
        role: Role::Provider,
    };
    Overlay::start_with_reach(config, Reach::OutgoingOnly).await.unwrap()
}

async fn knows(one: &Overlay, other: &Overlay) {
    let id = other.node_id();
    let deadline = Instant::now() + PATIENCE;
    while !one.members().iter().any(|member| member.id == id) {
        assert!(Instant::now() < deadline, "the members do not know each other in time");
        sleep(Duration::from_millis(20)).await;
    }
}

async fn relays(relay: &Overlay, count: usize) {
    let deadline = Instant::now() + PATIENCE;
    while relay.running.node.relayed.free() != RELAYED - count {
        assert!(Instant::now() < deadline, "{:?}", relay.running.node.relayed);
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn one_peers_streams_to_its_friends_leave_the_relay_to_others() {
    let (relay, _relay_inbox) = start(201, Role::Seed, &[]).await;
    let (friend, _friend_inbox) = hidden(202, &relay).await;
    let (node, mut inbox) = hidden(203, &relay).await;
    knows(&friend, &node).await;
    tokio::spawn(async move {
        while let Some(request) = inbox.requests.recv().await {
            request.reply(Bytes::from_static(b"ok"));
        }
    });
    // Targets that take every stream and answer none.
    let targets = [intruder(204, &relay).await, intruder(205, &relay).await];
    let sources = [intruder(206, &relay).await, intruder(206, &relay).await];
    let from = sources[0].0.id();
    let (_, _, first) = &sources[0];
    let (_, _, second) = &sources[1];
    let share = RELAYED / SHARE;
    let parcel = |index: usize| {
        let to = targets[index % 2].0.id();
        Opening::SealedStream(Parcel { from, to, sealed: vec![0; 64] })
    };
    let mut held = Vec::new();
    for index in 0..share {
        let connection = if index % 2 == 0 { first } else { second };
        held.push(say(connection, &crate::wire::to_frame(&parcel(index))).await);
    }
    relays(&relay, share).await;
    let Answer::Refused(Refusal::Busy, reason) = ask(first, &parcel(0)).await else {
        panic!("one peer has more than its share")
    };
    assert!(reason.contains("too much to hand on"), "{reason}");
    still_serves(&node, &friend).await;
    drop(held);
    relays(&relay, 0).await;
}

#[tokio::test]
async fn a_relayed_stream_that_its_target_drops_is_held_nowhere() {
    let (relay, _relay_inbox) = start(211, Role::Seed, &[]).await;
    let (friend, _friend_inbox) = hidden(212, &relay).await;
    let (node, mut inbox) = hidden(213, &relay).await;
    knows(&friend, &node).await;
    let near = friend.open_stream(node.node_id()).await.unwrap();
    assert!(near.is_relayed());
    relays(&relay, 1).await;
    drop(inbox.streams.recv().await.unwrap());
    relays(&relay, 0).await;
}
