//! Nodes that do not prove what they run are listed so, and get no machines where proof is required.

use lease::api::NodeView;

use crate::harness::{
    Serving,
    client::with_body,
    create, lease,
    node::{Manner, Node},
    renter, until,
};

#[tokio::test]
async fn a_node_that_proves_nothing_gets_no_machines_where_proof_is_required() {
    let folder = tempfile::tempdir().unwrap();
    let release = folder.path().join("measurements.json");
    std::fs::write(&release, include_str!("../../../lease/fuzz/corpus/attestation/measurements"))
        .unwrap();
    let gateway = Serving::with(|config| {
        config.attestation.releases = vec![release];
        config.attestation.required = true;
    })
    .await;
    let node = Node::join(&gateway, 1, Manner::Prompt).await;
    let path = format!("/v1/nodes/{}", node.id());
    let shown = async || gateway.get(&path).await.json::<NodeView>().attestation;
    until("the node is asked", async || shown().await.is_some()).await;
    let found = shown().await.unwrap();
    assert_eq!((found.release, found.tpm), (None, None));
    let reason = found.refused.unwrap();
    assert_eq!(reason, "the server has no TPM");
    let key = renter(2);
    gateway.with_kernel(&key).await;
    let body = serde_json::to_vec(&create(&lease(1, node.id(), &key))).unwrap();
    let answer = gateway.ask(&key, with_body("POST", "/v1/machines", &body, "once")).await;
    assert_eq!(answer.problem(), (503, "/problems/unavailable".into()));
    assert!(String::from_utf8_lossy(&answer.body).contains(&reason), "{reason}");
    assert_eq!(node.asked_to_create(), 0);
}

#[tokio::test]
async fn a_challenge_is_brought_to_the_node_by_whoever_asks() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 1, Manner::Prompt).await;
    let path = format!("/v1/nodes/{}/attestation", node.id());
    let ask =
        async |body: &[u8]| gateway.ask(&renter(1), with_body("POST", &path, body, "once")).await;
    assert_eq!(ask(b"{}").await.problem().0, 400);
    // serde would take its values alone, in their order.
    let list = ask(format!("[\"{}\"]", "ab".repeat(32)).as_bytes()).await;
    assert_eq!(list.problem().0, 400);
    assert!(list.detail().contains("expected a JSON object"), "{}", list.detail());
    let inner = format!("{{\"nonce\":\"{}\",\"credential\":[\"\",\"\"]}}", "ab".repeat(32));
    let list = ask(inner.as_bytes()).await;
    assert_eq!(list.problem().0, 400);
    assert!(list.detail().starts_with("field credential:"), "{}", list.detail());
    // The node here has no TPM, and its word is what comes back.
    let nonce = format!("{{\"nonce\":\"{}\"}}", "ab".repeat(32));
    assert_eq!(ask(nonce.as_bytes()).await.problem().0, 409);
    let shown: NodeView = gateway.get(&format!("/v1/nodes/{}", node.id())).await.json();
    assert_eq!(shown.attestation, None, "without releases nobody is asked");
}

#[tokio::test]
async fn a_node_that_nobody_knows_is_told_before_the_challenge_is_read() {
    let gateway = Serving::start().await;
    let path = format!("/v1/nodes/{}/attestation", "9a".repeat(32));
    let wrong = gateway.send(&with_body("POST", &path, b"{\"nonce\":", "once")).await;
    assert_eq!(wrong.problem(), (404, "/problems/not-found".into()));
    let nonce = format!("{{\"nonce\":\"{}\"}}", "ab".repeat(32));
    let right = gateway.send(&with_body("POST", &path, nonce.as_bytes(), "once")).await;
    assert_eq!(right.problem(), (404, "/problems/not-found".into()));
}
