//! Creation happens once for each key, every operation reaches the node, and only for its renter.

use lease::{
    api::{Machine, MachineState},
    hardware::{Attach, DiskWanted},
};
use types::{forward::ForwardedRequest, units::Mebibytes, vm::DiskModel};

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
    let replayed = [&first, &again].map(|answer| answer.field("idempotency-replayed"));
    assert_eq!(replayed, ["", "true"]);
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
async fn an_image_that_does_not_fit_is_told_before_a_lease_is_used() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 23, Manner::Prompt).await;
    let key = renter(24);
    let kernel = gateway.with_kernel(&key).await;
    let image = gateway.with_content(&key, &[7; (1 << 20) + 1]).await;
    let ask = async |disk: u64, own: Option<u64>, number: u8| {
        let mut wanted = lease(number, node.id(), &key);
        wanted.shape.disk_mib = Mebibytes(disk);
        let mut asked = create(&wanted);
        asked.image.disk = Some(image);
        asked.hardware.disk_mib = own.map(Mebibytes);
        let body = serde_json::to_vec(&asked).unwrap();
        gateway.ask(&key, with_body("POST", "/v1/machines", &body, &number.to_string())).await
    };
    for (disk, own, told) in [
        (0, None, "the lease grants no disk: ask for a lease with disk_mib of at least 2"),
        (1, None, "the image has 1048577 bytes, and the lease grants 1 MiB"),
        (4, Some(1), "hardware.disk_mib is 1: 2 to 4 are possible"),
    ] {
        let refused = ask(disk, own, 1).await;
        assert_eq!(refused.problem(), (422, "/problems/unprocessable".into()));
        assert!(refused.detail().contains(told), "{}", refused.detail());
    }
    assert_eq!(node.asked_to_create(), 0);
    assert_eq!(ask(2, None, 2).await.status, 201);
    // A kernel needs no disk.
    let body = serde_json::to_vec(&create(&lease(3, node.id(), &key))).unwrap();
    assert_eq!(gateway.ask(&key, with_body("POST", "/v1/machines", &body, "k")).await.status, 201);
    let machine = lease(2, node.id(), &key).id;
    let attach = async |content, size: u64| {
        let wanted = Attach::Disk(DiskWanted {
            name: "data".into(),
            size_mib: Some(Mebibytes(size)),
            model: DiskModel::default(),
            content: Some(content),
        });
        let target = format!("/v1/machines/{machine}/devices");
        let body = serde_json::to_vec(&wanted).unwrap();
        gateway.ask(&key, with_body("POST", &target, &body, "a")).await
    };
    let refused = attach(image, 1).await;
    assert_eq!(refused.problem(), (422, "/problems/unprocessable".into()));
    assert!(refused.detail().contains("size_mib is 1: at least 2"), "{}", refused.detail());
    assert_eq!(attach(kernel, 1).await.status, 202);
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
