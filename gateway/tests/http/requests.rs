//! Requests that do not count are refused with what was wrong, before any node hears of them.

use gateway::service::now;
use lease::authority::sign;
use serde_json::{Value, json};
use types::{forward::MAX_BODY, units::UnixSeconds};

use crate::harness::{
    Serving,
    client::{plain, signed, signed_at, with_body},
    create, lease,
    node::{Manner, Node},
    renter, signed_lease,
};

#[tokio::test]
async fn a_signed_request_counts_once_and_for_a_while() {
    let gateway = Serving::start().await;
    let _node = Node::join(&gateway, 31, Manner::Prompt).await;
    let key = renter(32);
    let request = signed(&key, plain("GET", "/v1/machines"));
    assert_eq!(gateway.send(&request).await.status, 200);
    let replayed = gateway.send(&request).await;
    assert_eq!(replayed.problem(), (401, "/problems/replayed".into()));
    assert!(!replayed.field("www-authenticate").is_empty());
    let at = |time| signed_at(&key, plain("GET", "/v1/machines"), time);
    let old = gateway.send(&at(UnixSeconds(now().0 - 301))).await;
    assert_eq!(old.problem(), (401, "/problems/unauthenticated".into()));
    assert!(old.detail().contains("at most 300 s"), "{}", old.detail());
    let early = gateway.send(&at(now().plus(90))).await;
    assert_eq!(early.problem(), (401, "/problems/unauthenticated".into()));
    let unsigned = gateway.get("/v1/machines").await;
    assert_eq!(unsigned.problem(), (401, "/problems/unauthenticated".into()));
    assert!(unsigned.detail().contains("signature-input"), "{}", unsigned.detail());
}

#[tokio::test]
async fn an_altered_request_does_not_count() {
    let gateway = Serving::start().await;
    let key = renter(33);
    let refused = async |change: fn(&mut types::forward::ForwardedRequest)| {
        let mut request = signed(&key, with_body("POST", "/v1/machines", b"{\"a\":1}", "k"));
        change(&mut request);
        gateway.send(&request).await.problem()
    };
    let unauthenticated = (401, "/problems/unauthenticated".to_owned());
    assert_eq!(refused(|request| request.body = b"{\"a\":2}".to_vec()).await, unauthenticated);
    assert_eq!(refused(|request| request.headers[1].1 = "l".into()).await, unauthenticated);
    assert_eq!(refused(|request| request.target += "?x").await, unauthenticated);
    assert_eq!(refused(|request| request.headers[2].1 = String::new()).await, unauthenticated);
}

#[tokio::test]
async fn leases_that_do_not_count_reach_no_node() {
    let gateway = Serving::start().await;
    let node = Node::join(&gateway, 34, Manner::Prompt).await;
    let (key, other) = (renter(35), renter(36));
    gateway.with_kernel(&key).await;
    let wanted = lease(1, node.id(), &key);
    let ask = async |signer, body: Value| {
        let body = serde_json::to_vec(&body).unwrap();
        gateway.ask(signer, with_body("POST", "/v1/machines", &body, "k")).await
    };
    let body = json!(create(&wanted));
    let stranger = ask(&other, body.clone()).await;
    assert_eq!(stranger.problem(), (403, "/problems/forbidden".into()));
    let mut once = body.clone();
    once["lease"] = json!(sign(&wanted, &crate::harness::authority()[0]).unwrap());
    let once = ask(&key, once).await;
    assert_eq!(once.problem(), (403, "/problems/lease-refused".into()));
    assert!(once.detail().contains("1 of 2"), "{}", once.detail());
    let mut altered = body.clone();
    let longer = lease::document::Lease { end: wanted.end.plus(1), ..wanted.clone() };
    altered["lease"]["payload"] = json!(signed_lease(&longer))["payload"].clone();
    let altered = ask(&key, altered).await;
    assert_eq!(altered.problem(), (403, "/problems/lease-refused".into()));
    let absent = lease(2, types::ids::NodeId::from_bytes([9; 32]), &key);
    let absent = ask(&key, json!(create(&absent))).await;
    assert_eq!(absent.problem(), (502, "/problems/node-unreachable".into()));
    assert_eq!(node.asked_to_create(), 0);
}

#[tokio::test]
async fn bodies_are_refused_by_the_name_of_the_field() {
    let gateway = Serving::start().await;
    let key = renter(37);
    let wanted = lease(1, types::ids::NodeId::from_bytes([9; 32]), &key);
    let valid = json!(create(&wanted));
    let ask = async |body: &[u8]| {
        let answer = gateway.ask(&key, with_body("POST", "/v1/machines", body, "k")).await;
        assert_eq!(answer.problem(), (400, "/problems/malformed".into()));
        answer.detail()
    };
    let with = |pointer: &str, value: Value| {
        let mut body = valid.clone();
        *body.pointer_mut(pointer).unwrap() = value;
        serde_json::to_vec(&body).unwrap()
    };
    let said = ask(b"{\"lease\":").await;
    assert!(said.contains("EOF"), "{said}");
    let said = ask(b"").await;
    assert!(said.contains("EOF"), "{said}");
    let said = ask(&with("/image/kernel", json!(7))).await;
    assert!(said.starts_with("field image.kernel"), "{said}");
    let said = ask(&with("/image/kernel", json!("zz"))).await;
    assert!(said.starts_with("field image.kernel"), "{said}");
    let said = ask(&with("/lease/signatures/0/keyid", json!("zz"))).await;
    assert!(said.starts_with("field lease.signatures[0].keyid"), "{said}");
    let said = ask(&with("/image", json!({"kernal": "x"}))).await;
    assert!(said.contains("unknown field `kernal`"), "{said}");
    let said = ask(&with("/lease", json!({}))).await;
    assert!(said.contains("missing field `payload`"), "{said}");
    let said = ask(&[serde_json::to_vec(&valid).unwrap(), b"x".to_vec()].concat()).await;
    assert!(said.contains("trailing"), "{said}");
}

#[tokio::test]
async fn bodies_have_the_form_that_is_described_however_deep() {
    let gateway = Serving::start().await;
    let key = renter(39);
    let wanted = lease(1, types::ids::NodeId::from_bytes([9; 32]), &key);
    let valid = json!(create(&wanted));
    let ask = async |body: &Value| {
        let body = serde_json::to_vec(body).unwrap();
        let answer = gateway.ask(&key, with_body("POST", "/v1/machines", &body, "k")).await;
        assert_eq!(answer.problem(), (400, "/problems/malformed".into()));
        answer.detail()
    };
    // What serde would read as an object: its values in their order.
    let said = ask(&json!([valid["lease"], valid["image"], valid["hardware"]])).await;
    assert!(said.contains("expected a JSON object"), "{said}");
    let mut image = valid.clone();
    image["image"] = json!([valid["image"]["kernel"], null, null, "", null]);
    let said = ask(&image).await;
    assert!(said.starts_with("field image:"), "{said}");
    let mut signature = valid.clone();
    let first = &valid["lease"]["signatures"][0];
    signature["lease"]["signatures"][0] = json!([first["keyid"], first["sig"]]);
    let said = ask(&signature).await;
    assert!(said.starts_with("field lease.signatures[0]:"), "{said}");
    // And as the name of a variant.
    let mut switch = valid.clone();
    switch["hardware"]["hyperv"] = json!({"on": null});
    let said = ask(&switch).await;
    assert!(said.starts_with("field hardware.hyperv:"), "{said}");
}

#[tokio::test]
async fn a_console_is_followed_with_1_and_no_other_word() {
    let gateway = Serving::start().await;
    let key = renter(40);
    let ask = async |query: &str| {
        let path = format!("/v1/machines/{}/console?{query}", "01".repeat(16));
        gateway.ask(&key, plain("GET", &path)).await.problem().0
    };
    assert_eq!(ask("follow=true").await, 400);
    assert_eq!(ask("follow=2").await, 400);
    assert_eq!(ask("follow=1&follow=1").await, 400);
    // Nothing is wrong with these but that there is no such machine.
    assert_eq!(ask("follow=0").await, 404);
    assert_eq!(ask("follow=1").await, 404);
}

#[tokio::test]
async fn a_path_is_the_same_percent_encoded_where_it_need_not_be() {
    let gateway = Serving::start().await;
    let status = async |target: &str| {
        let request = format!("GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let said = gateway.raw(request.as_bytes()).await;
        said.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(status("/v1/%6Eodes").await, "200");
    assert_eq!(status("/v1%2Fnodes").await, "404");
    assert_eq!(status("/v1/nodes%").await, "400");
    assert_eq!(status("/v1/%zzodes").await, "400");
    // The signature covers the path as it came.
    let request = signed(&renter(41), plain("GET", "/v1/m%61chines"));
    assert_eq!(gateway.begin(&request).await.status(), 200);
}

#[tokio::test]
async fn the_server_as_a_whole_tells_its_methods_and_nothing_else() {
    let gateway = Serving::start().await;
    let ask = async |method: &str| {
        let request = format!("{method} * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        gateway.raw(request.as_bytes()).await
    };
    let said = ask("OPTIONS").await;
    assert!(said.starts_with("HTTP/1.1 204 "), "{said}");
    assert!(said.contains("\r\nallow: DELETE, GET, HEAD, OPTIONS, POST, PUT\r\n"), "{said}");
    let said = ask("GET").await;
    assert!(said.starts_with("HTTP/1.1 400 ") && said.contains("/problems/malformed"), "{said}");
}

#[tokio::test]
async fn a_creation_needs_its_key_and_its_media_type() {
    let gateway = Serving::start().await;
    let key = renter(38);
    let mut keyless = with_body("POST", "/v1/machines", b"{}", "k");
    keyless.headers.pop();
    let keyless = gateway.ask(&key, keyless).await;
    assert_eq!(keyless.problem(), (400, "/problems/malformed".into()));
    assert!(keyless.detail().contains("idempotency-key"), "{}", keyless.detail());
    let mut form = with_body("POST", "/v1/machines", b"{}", "k");
    form.headers[0].1 = "application/x-www-form-urlencoded".into();
    let form = gateway.ask(&key, form).await;
    assert_eq!(form.problem(), (415, "/problems/unsupported-media-type".into()));
}

#[tokio::test]
async fn large_bodies_are_refused_announced_or_not() {
    let gateway = Serving::start().await;
    let head = |length: usize| {
        format!(
            "POST /v1/machines HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    let announced = gateway.raw(head(MAX_BODY + 1).as_bytes()).await;
    assert!(announced.starts_with("HTTP/1.1 413 "), "{announced}");
    assert!(announced.contains("application/problem+json"), "{announced}");
    let chunked = "POST /v1/machines HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n100001\r\n";
    let bytes = [chunked.as_bytes(), &vec![b' '; MAX_BODY + 1], b"\r\n0\r\n\r\n"].concat();
    let unannounced = gateway.raw(&bytes).await;
    assert!(unannounced.starts_with("HTTP/1.1 413 "), "{unannounced}");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_told_apart() {
    let gateway = Serving::start().await;
    let nothing = gateway.get("/v1/nothing").await;
    assert_eq!(nothing.problem(), (404, "/problems/not-found".into()));
    assert!(nothing.detail().contains("/v1/openapi.json"), "{}", nothing.detail());
    assert_eq!(gateway.get("/").await.status, 404);
    assert_eq!(gateway.get("/v1/machines/zz").await.status, 404);
    let wrong = gateway.send(&plain("PATCH", "/v1/machines")).await;
    assert_eq!(wrong.problem(), (405, "/problems/method-not-allowed".into()));
    assert_eq!(wrong.field("allow"), "GET, POST");
    let wrong = gateway.send(&plain("POST", "/v1/nodes")).await;
    assert_eq!((wrong.status, wrong.field("allow")), (405, "GET, HEAD"));
}
