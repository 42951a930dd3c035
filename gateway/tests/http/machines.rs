//! Creation happens once for each key, every operation reaches the node, and only for its renter.

use lease::api::{Machine, MachineState};
use types::forward::ForwardedRequest;

use crate::harness::{
    Serving,
    client::{plain, signed, with_body},
    create, lease,
    node::{Manner, Node},
    renter, show,
};

fn creation(lease: &lease::document::Lease, key: &str) -> ForwardedRequest {
    with_body("POST", "/v1/machines", &serde_json::to_vec(&create(lease)).unwrap(), key)
}

#[tokio::test]
async fn a_creation_that_is_repeated_is_answered_again_and_done_once() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 11, Manner::Prompt).await;
    let key = renter(12);
    gateway.with_kernel(&key).await;
    let wanted = lease(1, node.id(), &key);
    let first = gateway.ask(&key, creation(&wanted, "same")).await;
    assert_eq!(first.status, 201, "{}", first.detail());
    let again = gateway.ask(&key, creation(&wanted, "same")).await;
    assert_eq!((again.status, &again.body), (201, &first.body));
    assert_eq!(node.asked_to_create(), 1);
    let other = gateway.ask(&key, creation(&lease(2, node.id(), &key), "same")).await;
    assert_eq!(other.problem(), (422, "/problems/key-reused".into()));
    // Another renter's key of the same name is another key.
    let stranger = renter(13);
    gateway.with_kernel(&stranger).await;
    let theirs = gateway.ask(&stranger, creation(&lease(3, node.id(), &stranger), "same")).await;
    assert_eq!(theirs.status, 201);
    assert_eq!(node.asked_to_create(), 2);
}

#[tokio::test]
async fn creations_at_the_same_time_reach_the_node_once() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 14, Manner::Prompt).await;
    let key = renter(15);
    gateway.with_kernel(&key).await;
    let wanted = lease(1, node.id(), &key);
    let ask = || gateway.ask(&key, creation(&wanted, "same"));
    let (a, b, c) = tokio::join!(ask(), ask(), ask());
    assert_eq!((a.status, b.status, c.status), (201, 201, 201));
    assert_eq!((&a.body, &b.body), (&b.body, &c.body));
    assert_eq!(node.asked_to_create(), 1);
}

#[tokio::test]
async fn an_acknowledged_creation_outlives_the_gateway() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 16, Manner::Prompt).await;
    let key = renter(17);
    gateway.with_kernel(&key).await;
    let wanted = lease(1, node.id(), &key);
    let first = gateway.ask(&key, creation(&wanted, "same")).await;
    let folder = gateway.stop().await;
    let gateway = Serving::with(|config| config.data_dir = folder.path().to_owned()).await;
    // The node is away, so the answer can only be the one that was kept.
    let again = gateway.ask(&key, creation(&wanted, "same")).await;
    assert_eq!((again.status, &again.body), (201, &first.body));
    assert_eq!(node.asked_to_create(), 1);
}

#[tokio::test]
async fn every_operation_reaches_the_machine() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 18, Manner::Prompt).await;
    let key = renter(19);
    gateway.with_kernel(&key).await;
    let wanted = lease(1, node.id(), &key);
    let made: Machine = gateway.ask(&key, creation(&wanted, "k")).await.json();
    let path = format!("/v1/machines/{}", made.id);
    let listed: Vec<Machine> = gateway.ask(&key, plain("GET", "/v1/machines")).await.json();
    assert_eq!(listed, std::slice::from_ref(&made));
    assert_eq!(gateway.ask(&key, plain("GET", &path)).await.json::<Machine>(), made);
    let state = async |method: &str, target: &str| {
        let answer = gateway.ask(&key, plain(method, target)).await;
        (answer.status, answer.json::<Machine>().state)
    };
    assert_eq!(state("POST", &format!("{path}/stop")).await, (202, MachineState::Stopping));
    assert_eq!(state("POST", &format!("{path}/start")).await, (202, MachineState::Starting));
    assert_eq!(state("POST", &format!("{path}/restart")).await, (202, MachineState::Starting));
    let renewal = serde_json::json!({ "lease": crate::harness::signed_lease(&wanted) });
    let renewal = serde_json::to_vec(&renewal).unwrap();
    let renewal = with_body("PUT", &format!("{path}/lease"), &renewal, "r");
    assert_eq!(gateway.ask(&key, renewal).await.status, 200);
    let console = gateway.ask(&key, plain("GET", &format!("{path}/console"))).await;
    assert_eq!((console.status, &*console.body), (200, b"so far\n".as_slice()));
    assert_eq!(console.field("holdfast-console-from"), "0");
    assert_eq!(console.field("holdfast-console-end"), "7");
    let typed = plain("POST", &format!("{path}/console"));
    let typed = ForwardedRequest { body: b"root\r".to_vec(), ..typed };
    let answer = gateway.ask(&key, typed).await;
    assert_eq!((answer.status, answer.field("content-type")), (204, ""));
    let shown: Machine = gateway.ask(&key, plain("GET", &path)).await.json();
    assert_eq!(shown.detail, "root\r");
    assert_eq!(state("DELETE", &path).await, (202, MachineState::Destroyed));
}

#[tokio::test]
async fn a_machine_of_another_gateway_is_found_by_its_lease_and_only_by_its_renter() {
    let gateway = Serving::start().await;
    let _empty = Node::join(&gateway, 20, Manner::Prompt).await;
    let node = Node::join(&gateway, 21, Manner::Prompt).await;
    let key = renter(22);
    gateway.with_kernel(&key).await;
    let wanted = lease(1, node.id(), &key);
    // It was made through another gateway: the node knows it, this one does not.
    let made = signed(&key, creation(&wanted, "k"));
    let body = serde_json::to_vec(&made).unwrap();
    let patience = crate::harness::PATIENCE;
    gateway.gateway.overlay.request(node.id(), body.into(), patience).await.unwrap();
    let path = format!("/v1/machines/{}", wanted.id);
    let unknown = gateway.ask(&key, plain("GET", &path)).await;
    assert_eq!(unknown.problem(), (404, "/problems/not-found".into()));
    assert!(unknown.detail().contains("PUT /v1/leases/"), "{}", unknown.detail());
    assert_eq!(gateway.ask(&key, show(&wanted)).await.status, 200);
    assert_eq!(gateway.ask(&key, plain("GET", &path)).await.status, 200);
    let stranger = gateway.ask(&renter(23), plain("DELETE", &path)).await;
    assert_eq!(stranger.problem(), (404, "/problems/not-found".into()));
    let theirs: Vec<Machine> = gateway.ask(&renter(23), plain("GET", "/v1/machines")).await.json();
    assert_eq!(theirs, Vec::new());
    let unknown = "/v1/machines/00000000000000000000000000000000";
    let nothing = gateway.ask(&key, plain("GET", unknown)).await;
    assert_eq!(nothing.problem(), (404, "/problems/not-found".into()));
}
