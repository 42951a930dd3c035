//! One peer that opens all the streams it can leaves the gateway's content to the nodes.

use std::time::Duration;

use lease::SigningKey;
use overlay::{OverlayStream, RequestError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use types::{
    forward::{StreamAnswer, StreamHeader},
    ids::ContentId,
};

use crate::harness::{
    Serving, lease,
    node::{Manner, Node},
    renter, show,
};

/// A node is answered within this time, which is less than what a gateway waits for a stream that
/// stands still.
const SOON: Duration = Duration::from_secs(20);

/// Longer than what a connection takes that is not read, when it is sent a few times.
const LENGTH: usize = 2 << 20;

/// Uploads as a renter who has leases of these nodes.
async fn upload(gateway: &Serving, key: &SigningKey, nodes: &[&Node]) -> ContentId {
    for (number, node) in (1..).zip(nodes) {
        assert_eq!(gateway.ask(key, show(&lease(number, node.id(), key))).await.status, 200);
    }
    gateway.with_content(key, &vec![7; LENGTH]).await
}

/// Opens streams until the gateway takes no more, at most 100, and says nothing on them.
async fn open_many(peer: &Node, gateway: &Serving) -> Vec<OverlayStream> {
    let to = gateway.gateway.overlay.node_id();
    let mut opened = Vec::new();
    for _ in 0..100 {
        opened.push(peer.overlay.open_stream(to).await);
    }
    let busy = |refused: &RequestError| matches!(refused, RequestError::PeerBusy { .. });
    assert!(opened.iter().filter_map(|opened| opened.as_ref().err()).all(busy));
    opened.into_iter().flatten().collect()
}

/// Says on a stream that content is wanted.
async fn want(stream: &mut OverlayStream, content: ContentId) -> std::io::Result<()> {
    let head = serde_json::to_vec(&StreamHeader::Content { content }).unwrap();
    stream.write_u32(u32::try_from(head.len()).unwrap()).await?;
    stream.write_all(&head).await?;
    stream.flush().await
}

/// Fetches as a node does, and returns what was answered and how many bytes came.
async fn ask(node: &Node, gateway: &Serving, content: ContentId) -> (StreamAnswer, usize) {
    let exchange = async {
        let to = gateway.gateway.overlay.node_id();
        let mut stream = node.overlay.open_stream(to).await.unwrap();
        want(&mut stream, content).await.unwrap();
        let length = stream.read_u32().await.unwrap();
        let mut head = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut head).await.unwrap();
        let mut bytes = Vec::new();
        let came = stream.read_to_end(&mut bytes).await.unwrap();
        (serde_json::from_slice(&head).unwrap(), came)
    };
    tokio::time::timeout(SOON, exchange).await.expect("served soon")
}

/// Returns how many bytes of content came.
async fn fetch(node: &Node, gateway: &Serving, content: ContentId) -> usize {
    let (answer, came) = ask(node, gateway, content).await;
    assert!(matches!(answer, StreamAnswer::Open { .. }), "{answer:?}");
    came
}

#[tokio::test]
async fn content_goes_to_nodes_that_its_uploaders_have_leases_of() {
    let gateway = Serving::start().await;
    let stranger = Node::join(&gateway, 97, Manner::Prompt).await;
    let node = Node::join(&gateway, 98, Manner::Prompt).await;
    let content = upload(&gateway, &renter(99), &[&node]).await;
    // One who knows the digest and has a lease of it, but not the content.
    let thief = renter(100);
    assert_eq!(gateway.ask(&thief, show(&lease(9, stranger.id(), &thief))).await.status, 200);
    let (answer, came) = ask(&stranger, &gateway, content).await;
    let StreamAnswer::Refused(problem) = answer else { panic!("{answer:?}") };
    assert_eq!((problem.status, came), (404, 0));
    assert!(problem.detail.contains("has a lease of node"), "{}", problem.detail);
    assert_eq!(fetch(&node, &gateway, content).await, LENGTH);
}

#[tokio::test]
async fn silent_streams_of_one_peer_do_not_keep_content_from_nodes() {
    let gateway = Serving::start().await;
    let hostile = Node::join(&gateway, 92, Manner::Prompt).await;
    let node = Node::join(&gateway, 93, Manner::Prompt).await;
    let content = upload(&gateway, &renter(91), &[&node]).await;
    let held = open_many(&hostile, &gateway).await;
    assert_eq!(fetch(&node, &gateway, content).await, LENGTH);
    assert!(held.len() < 100);
}

#[tokio::test]
async fn content_that_one_peer_does_not_read_is_sent_to_others() {
    let gateway = Serving::start().await;
    let hostile = Node::join(&gateway, 95, Manner::Prompt).await;
    let node = Node::join(&gateway, 96, Manner::Prompt).await;
    let content = upload(&gateway, &renter(94), &[&hostile, &node]).await;
    let mut held = open_many(&hostile, &gateway).await;
    for stream in &mut held {
        want(stream, content).await.unwrap();
    }
    assert_eq!(fetch(&node, &gateway, content).await, LENGTH);
    assert!(held.len() < 100);
}
