//! Content is uploaded by renters with a lease, up to a quota, for as long as it can be needed,
//! and is nobody else's.

use gateway::{
    api::bodies::{StandingLease, StoredContent},
    service::now,
    store::{RETAIN_S, Standing},
};
use lease::{SigningKey, authority::public_key, document::Lease};
use sha2::{Digest, Sha256};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use types::{
    forward::ForwardedRequest,
    ids::{ContentId, NodeId},
    units::UnixSeconds,
};

use crate::harness::{
    Serving, authority,
    client::{Answer, plain, rest, signed, with_body},
    create, lease,
    node::{Manner, Node},
    renter, show, until,
};

const NODE: NodeId = NodeId::from_bytes([9; 32]);

fn path(bytes: &[u8]) -> String {
    let digest: [u8; 32] = Sha256::digest(bytes).into();
    format!("/v1/content/{}", ContentId::from_bytes(digest))
}

/// Uploads: the signature covers no body.
async fn put(gateway: &Serving, key: &SigningKey, target: &str, bytes: &[u8]) -> Answer {
    let request = signed(key, plain("PUT", target));
    gateway.send(&ForwardedRequest { body: bytes.to_vec(), ..request }).await
}

#[tokio::test]
async fn uploading_needs_a_lease_that_counts_and_lasts() {
    let gateway = Serving::start().await;
    let (key, other) = (renter(71), renter(72));
    let (bytes, target) = (b"kernel", path(b"kernel"));
    let unsigned = gateway.send(&plain("PUT", &target)).await;
    assert_eq!(unsigned.problem(), (401, "/problems/unauthenticated".into()));
    let stranger = put(&gateway, &key, &target, bytes).await;
    assert_eq!(stranger.problem(), (403, "/problems/forbidden".into()));
    assert!(stranger.detail().contains("PUT /v1/leases/"), "{}", stranger.detail());
    let wanted = lease(1, NODE, &key);
    let theirs = gateway.ask(&other, show(&wanted)).await;
    assert_eq!(theirs.problem(), (403, "/problems/forbidden".into()));
    let mut once = show(&wanted);
    let envelope = lease::authority::sign(&wanted, &authority()[1]).unwrap();
    once.body = serde_json::to_vec(&envelope).unwrap();
    let once = gateway.ask(&key, once).await;
    assert_eq!(once.problem(), (403, "/problems/lease-refused".into()));
    let mut misnamed = show(&wanted);
    misnamed.target = format!("/v1/leases/{}", lease(2, NODE, &key).id);
    assert_eq!(gateway.ask(&key, misnamed).await.problem().0, 422);
    assert_eq!(put(&gateway, &key, &target, bytes).await.status, 403);

    let over = Lease { start: UnixSeconds(1), end: UnixSeconds(2), ..lease(2, NODE, &key) };
    assert_eq!(gateway.ask(&key, show(&over)).await.status, 200);
    let over = put(&gateway, &key, &target, bytes).await;
    assert_eq!(over.problem(), (403, "/problems/forbidden".into()));
    assert!(over.detail().contains("ended at 2"), "{}", over.detail());

    let shown: StandingLease = gateway.ask(&key, show(&wanted)).await.json();
    assert_eq!((shown.id, shown.end, shown.content_used), (wanted.id, wanted.end, 0));
    assert_eq!(shown.content_until, wanted.end.plus(RETAIN_S));
    let stored: StoredContent = put(&gateway, &key, &target, bytes).await.json();
    assert_eq!(stored.bytes, 6);
    let shown: StandingLease = gateway.ask(&key, show(&wanted)).await.json();
    assert_eq!(shown.content_used, 6);
}

#[tokio::test]
async fn a_renter_has_a_quota_and_gets_room_back() {
    let gateway = Serving::with(|config| config.max_per_renter = 10).await;
    let (key, other) = (renter(73), renter(74));
    gateway.ask(&key, show(&lease(1, NODE, &key))).await;
    gateway.ask(&other, show(&lease(2, NODE, &other))).await;
    assert_eq!(put(&gateway, &key, &path(b"12345678"), b"12345678").await.status, 201);
    let beyond = put(&gateway, &key, &path(b"abc"), b"abc").await;
    assert_eq!(beyond.problem(), (413, "/problems/quota-exceeded".into()));
    assert!(beyond.detail().contains("more than 2 bytes"), "{}", beyond.detail());
    // Announced length or not: what comes is what counts.
    let request = signed(&key, plain("PUT", &path(b"abc")));
    let fields: String =
        request.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let chunked = format!(
        "PUT {} HTTP/1.1\r\nhost: x\r\n{fields}transfer-encoding: chunked\r\nconnection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        request.target
    );
    let said = gateway.raw(chunked.as_bytes()).await;
    assert!(said.starts_with("HTTP/1.1 413 "), "{said}");
    // Once more the same costs nothing, and another renter has room of its own.
    assert_eq!(put(&gateway, &key, &path(b"12345678"), b"12345678").await.status, 201);
    assert_eq!(put(&gateway, &other, &path(b"abc"), b"abc").await.status, 201);
    assert_eq!(gateway.ask(&key, plain("DELETE", &path(b"12345678"))).await.status, 204);
    assert_eq!(put(&gateway, &key, &path(b"abc"), b"abc").await.status, 201);
}

#[tokio::test]
async fn what_does_not_fit_is_refused_before_it_is_sent() {
    let limit = |item, store| {
        Serving::with(move |config| (config.max_content, config.max_store) = (item, store))
    };
    let key = renter(90);
    for (item, store, problem) in
        [(10, 1000, (413, "/problems/too-large")), (1000, 10, (503, "/problems/unavailable"))]
    {
        let gateway = limit(item, store).await;
        let shown: StandingLease = gateway.ask(&key, show(&lease(1, NODE, &key))).await.json();
        assert_eq!(shown.content_max_bytes, item);
        assert_eq!(put(&gateway, &key, &path(b"12345678"), b"12345678").await.status, 201);
        let request = signed(&key, plain("PUT", &path(b"abcdefghijk")));
        let fields: String =
            request.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        // Nothing but the head is sent.
        let head = format!(
            "PUT {} HTTP/1.1\r\nhost: x\r\n{fields}content-length: 11\r\nconnection: close\r\n\r\n",
            request.target
        );
        let said = gateway.raw(head.as_bytes()).await;
        assert!(said.starts_with(&format!("HTTP/1.1 {} ", problem.0)), "{said}");
        assert!(said.contains(problem.1), "{said}");
        // What is there already takes no room.
        assert_eq!(put(&gateway, &key, &path(b"12345678"), b"12345678").await.status, 201);
    }
}

#[tokio::test]
async fn content_is_what_its_name_says() {
    let gateway = Serving::start().await;
    let key = renter(75);
    gateway.ask(&key, show(&lease(1, NODE, &key))).await;
    let target = path(b"kernel");
    let wrong = put(&gateway, &key, &target, b"kernal").await;
    assert_eq!(wrong.problem(), (422, "/problems/unprocessable".into()));
    let absent = gateway.ask(&key, plain("GET", &target)).await;
    assert_eq!(absent.problem(), (404, "/problems/not-found".into()));
    assert_eq!(put(&gateway, &key, &target, b"kernel").await.status, 201);
    assert_eq!(&*gateway.ask(&key, plain("GET", &target)).await.body, b"kernel");
    let head = gateway.ask(&key, plain("HEAD", &target)).await;
    assert_eq!((head.status, head.field("content-length")), (200, "6"));
}

#[tokio::test]
async fn a_digest_that_got_known_opens_nothing() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 76, Manner::Prompt).await;
    let (key, thief) = (renter(77), renter(78));
    gateway.ask(&key, show(&lease(1, NODE, &key))).await;
    gateway.ask(&thief, show(&lease(2, NODE, &thief))).await;
    let target = path(b"kernel");
    assert_eq!(put(&gateway, &key, &target, b"kernel").await.status, 201);
    assert_eq!(gateway.ask(&thief, plain("GET", &target)).await.problem().0, 404);
    assert_eq!(gateway.ask(&thief, plain("DELETE", &target)).await.problem().0, 404);
    // Who claims to have it must have it.
    assert_eq!(put(&gateway, &thief, &target, b"").await.problem().0, 422);
    let body = serde_json::to_vec(&create(&lease(3, node.id(), &thief))).unwrap();
    let started = gateway.ask(&thief, with_body("POST", "/v1/machines", &body, "k")).await;
    assert_eq!(started.problem(), (422, "/problems/unprocessable".into()));
    assert!(started.detail().contains("upload it first"), "{}", started.detail());
    assert_eq!(node.asked_to_create(), 0);
    // Content that two have stays when one lets go of it.
    assert_eq!(put(&gateway, &thief, &target, b"kernel").await.status, 201);
    assert_eq!(gateway.ask(&thief, plain("DELETE", &target)).await.status, 204);
    assert_eq!(&*gateway.ask(&key, plain("GET", &target)).await.body, b"kernel");
}

#[tokio::test]
async fn content_goes_when_its_renters_leases_are_long_over() {
    let gateway = Serving::start().await;
    let key = renter(79);
    gateway.ask(&key, show(&lease(1, NODE, &key))).await;
    assert_eq!(put(&gateway, &key, &path(b"kernel"), b"kernel").await.status, 201);
    let files =
        |folder: &std::path::Path| std::fs::read_dir(folder.join("content")).unwrap().count();
    assert_eq!(files(gateway.folder.path()), 1);
    let folder = gateway.stop().await;
    // The clock cannot be set on here; so the lease becomes an old one.
    let store = gateway::store::Store::open(&folder.path().join("store.redb")).unwrap();
    let end = UnixSeconds(now().0 - RETAIN_S);
    let ended = Standing { serial: 2, end, node: NODE };
    store.put_lease(public_key(&key), lease(1, NODE, &key).id, &ended).unwrap();
    drop(store);
    let gateway = Serving::with(|config| config.data_dir = folder.path().to_owned()).await;
    until("it is removed", async || files(folder.path()) == 0).await;
    assert_eq!(put(&gateway, &key, &path(b"kernel"), b"kernel").await.problem().0, 403);
}

/// Begins an upload of `kernel`, and sends half of it.
async fn begin(gateway: &Serving, key: &SigningKey) -> TcpStream {
    let request = signed(key, plain("PUT", &path(b"kernel")));
    let fields: String =
        request.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let mut stream = gateway.connect_from([127, 0, 0, 1]).await;
    let target = request.target;
    let head = format!("PUT {target} HTTP/1.1\r\nhost: x\r\n{fields}content-length: 6\r\n\r\nker");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// Uploads that go on.
fn parts(gateway: &Serving) -> usize {
    let entries = std::fs::read_dir(gateway.folder.path().join("content")).unwrap();
    entries.filter(|entry| entry.as_ref().unwrap().path().extension().is_some()).count()
}

#[tokio::test]
async fn a_second_upload_of_a_renter_is_refused_while_the_first_goes_on() {
    let gateway = Serving::start().await;
    let (key, other) = (renter(81), renter(82));
    gateway.ask(&key, show(&lease(1, NODE, &key))).await;
    gateway.ask(&other, show(&lease(2, NODE, &other))).await;
    let first = begin(&gateway, &key).await;
    until("it began", async || parts(&gateway) == 1).await;
    let second = put(&gateway, &key, &path(b"initrd"), b"initrd").await;
    assert_eq!(second.problem(), (429, "/problems/too-many-requests".into()));
    assert!(second.detail().contains("push again when it is done"), "{}", second.detail());
    assert_eq!(put(&gateway, &other, &path(b"initrd"), b"initrd").await.status, 201);
    drop(first);
    until("it left nothing", async || parts(&gateway) == 0).await;
    assert_eq!(put(&gateway, &key, &path(b"initrd"), b"initrd").await.status, 201);
}

#[tokio::test]
async fn an_upload_that_stops_or_breaks_off_leaves_nothing() {
    let gateway = Serving::with(|config| config.limits.body_ms = 500).await;
    let key = renter(80);
    gateway.ask(&key, show(&lease(1, NODE, &key))).await;
    let mut stops = begin(&gateway, &key).await;
    let said = rest(&mut stops).await;
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    let breaks = begin(&gateway, &key).await;
    until("it began", async || parts(&gateway) == 1).await;
    drop(breaks);
    until("it left nothing", async || parts(&gateway) == 0).await;
    assert_eq!(put(&gateway, &key, &path(b"kernel"), b"kernel").await.status, 201);
}
