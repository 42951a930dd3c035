//! One peer that opens all the streams it can leaves the gateway's content to the nodes.

use std::time::Duration;

use lease::SigningKey;
use overlay::{OverlayStream, RequestError};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use types::{
    forward::{ForwardedRequest, StreamAnswer, StreamHeader},
    ids::{ContentId, NodeId},
};

use crate::harness::{
    Serving,
    client::{plain, signed},
    lease,
    node::{Manner, Node},
    renter, show,
};

/// A node is answered within this time, which is less than what a gateway waits for a stream that
/// stands still.
const SOON: Duration = Duration::from_secs(20);

/// Longer than what a connection takes that is not read, when it is sent a few times.
const LENGTH: usize = 2 << 20;

async fn upload(gateway: &Serving, key: &SigningKey) -> ContentId {
    let bytes = vec![7; LENGTH];
    let content = ContentId::from_bytes(Sha256::digest(&bytes).into());
    let shown = show(&lease(1, NodeId::from_bytes([9; 32]), key));
    assert_eq!(gateway.ask(key, shown).await.status, 200);
    let request = signed(key, plain("PUT", &format!("/v1/content/{content}")));
    let stored = gateway.send(&ForwardedRequest { body: bytes, ..request }).await;
    assert_eq!(stored.status, 201);
    content
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

/// Fetches as a node does, and returns how many bytes came.
async fn fetch(node: &Node, gateway: &Serving, content: ContentId) -> usize {
    let exchange = async {
        let to = gateway.gateway.overlay.node_id();
        let mut stream = node.overlay.open_stream(to).await.unwrap();
        want(&mut stream, content).await.unwrap();
        let length = stream.read_u32().await.unwrap();
        let mut head = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut head).await.unwrap();
        let answer: StreamAnswer = serde_json::from_slice(&head).unwrap();
        assert!(matches!(answer, StreamAnswer::Open { .. }), "{answer:?}");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.unwrap()
    };
    tokio::time::timeout(SOON, exchange).await.expect("served soon")
}

#[tokio::test]
async fn silent_streams_of_one_peer_do_not_keep_content_from_nodes() {
    let gateway = Serving::start().await;
    let content = upload(&gateway, &renter(91)).await;
    let hostile = Node::join(&gateway, 92, Manner::Prompt).await;
    let node = Node::join(&gateway, 93, Manner::Prompt).await;
    let held = open_many(&hostile, &gateway).await;
    assert_eq!(fetch(&node, &gateway, content).await, LENGTH);
    assert!(held.len() < 100);
}

#[tokio::test]
async fn content_that_one_peer_does_not_read_is_sent_to_others() {
    let gateway = Serving::start().await;
    let content = upload(&gateway, &renter(94)).await;
    let hostile = Node::join(&gateway, 95, Manner::Prompt).await;
    let node = Node::join(&gateway, 96, Manner::Prompt).await;
    let mut held = open_many(&hostile, &gateway).await;
    for stream in &mut held {
        want(stream, content).await.unwrap();
    }
    assert_eq!(fetch(&node, &gateway, content).await, LENGTH);
    assert!(held.len() < 100);
}
