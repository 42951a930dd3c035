//! Nodes are listed while they take part, and no longer.

use std::time::Duration;

use lease::api::NodeView;

use crate::harness::{
    Serving,
    client::{plain, signed, with_body},
    create, lease,
    node::{Manner, Node},
    renter, until, within,
};

#[tokio::test]
async fn nodes_are_listed_and_vanish_when_they_leave_or_die() {
    let gateway = Serving::start().await;
    assert_eq!(gateway.get("/v1/nodes").await.json::<Vec<NodeView>>(), Vec::new());
    let leaver = Node::join(&gateway, 1, Manner::Prompt).await;
    let victim = Node::join(&gateway, 2, Manner::Prompt).await;
    let (left, died) = (leaver.id(), victim.id());
    let listed = gateway.get("/v1/nodes").await.json::<Vec<NodeView>>();
    assert_eq!(listed.len(), 2);
    let shown: NodeView = gateway.get(&format!("/v1/nodes/{left}")).await.json();
    assert_eq!((shown.node, shown.vcpus), (left, 4));
    assert_eq!(shown.addresses, [leaver.overlay.local_addr()]);
    leaver.overlay.leave().await;
    let gone = async |id| gateway.get(&format!("/v1/nodes/{id}")).await.status == 404;
    until("who left is gone", async || gone(left).await).await;
    assert!(!gone(died).await);
    drop(victim);
    until("who died is gone", async || gone(died).await).await;
    assert_eq!(gateway.get("/v1/nodes").await.json::<Vec<NodeView>>(), Vec::new());
}

#[tokio::test]
async fn a_silent_node_is_given_up_and_others_go_on() {
    let gateway = Serving::with(|config| config.limits.node_ms = 1500).await;
    let silent = Node::join(&gateway, 3, Manner::Silent).await;
    let prompt = Node::join(&gateway, 4, Manner::Prompt).await;
    let key = renter(5);
    gateway.with_kernel(&key).await;
    let other = renter(6);
    gateway.with_kernel(&other).await;
    let ask = async |id, node: &Node| {
        let body = serde_json::to_vec(&create(&lease(id, node.id(), &key))).unwrap();
        gateway.ask(&key, with_body("POST", "/v1/machines", &body, "once")).await
    };
    let (late, meanwhile) = tokio::join!(ask(1, &silent), async {
        let body = serde_json::to_vec(&create(&lease(2, prompt.id(), &other))).unwrap();
        let request = with_body("POST", "/v1/machines", &body, "once");
        let asked = gateway.ask(&other, request);
        tokio::time::timeout(Duration::from_millis(1400), asked).await
    });
    assert_eq!(late.problem(), (504, "/problems/node-timeout".into()));
    assert_eq!(meanwhile.expect("while the other node is silent").status, 201);
    // The key was not used up by an answer that never came.
    assert_eq!(ask(3, &prompt).await.status, 201);
}

#[tokio::test]
async fn a_node_that_dies_with_a_request_in_hand_is_told() {
    let gateway = Serving::start().await;
    let careless = Node::join(&gateway, 7, Manner::Careless).await;
    let key = renter(8);
    gateway.with_kernel(&key).await;
    let body = serde_json::to_vec(&create(&lease(1, careless.id(), &key))).unwrap();
    let answer = gateway.ask(&key, with_body("POST", "/v1/machines", &body, "k")).await;
    assert_eq!(answer.problem(), (502, "/problems/node-unreachable".into()));
    let silent = Node::join(&gateway, 9, Manner::Silent).await;
    let body = serde_json::to_vec(&create(&lease(2, silent.id(), &key))).unwrap();
    let asked = gateway.ask(&key, with_body("POST", "/v1/machines", &body, "l"));
    let dies = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        silent.overlay.leave().await;
    };
    let (answer, ()) = tokio::join!(asked, dies);
    assert_eq!(answer.problem(), (502, "/problems/node-unreachable".into()));
    assert_eq!(gateway.get("/v1/healthz").await.status, 200);
}

#[tokio::test]
async fn what_anybody_may_read_has_a_head_and_nothing_is_for_caches() {
    let gateway = Serving::start().await;
    let head = b"HEAD /v1/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let head = gateway.raw(head).await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(head.contains("content-length: 1"), "{head}");
    assert_eq!(gateway.get("/v1/nodes").await.field("cache-control"), "no-store");
    let refused = gateway.get("/v1/machines").await;
    assert_eq!((refused.status, refused.field("cache-control")), (401, "no-store"));
}

#[tokio::test]
async fn a_node_that_nobody_saw_is_no_node_and_one_that_is_away_is_unreachable() {
    let gateway = Serving::start().await;
    let key = renter(131);
    let restart =
        |node: &str| signed(&key, plain("POST", &format!("/v1/nodes/{node}/restart-agent")));
    let never = gateway.send(&restart(&"ab".repeat(32))).await;
    assert_eq!(never.problem(), (404, "/problems/not-found".into()));
    let node = Node::join(&gateway, 130, Manner::Prompt).await;
    let id = node.id().to_string();
    within("the node leaves", node.overlay.leave()).await;
    let path = format!("/v1/nodes/{id}");
    until("the node is away", async || gateway.get(&path).await.status == 404).await;
    assert_eq!(gateway.send(&restart(&id)).await.problem().0, 502);
}
