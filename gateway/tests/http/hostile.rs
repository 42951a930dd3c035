//! Clients that are slow, silent or many lose their connection; everybody else goes on.

use std::time::Duration;

use gateway::config::{GatewayConfig, HttpLimits};
use tokio::{io::AsyncWriteExt, net::TcpStream, time::Instant};

use crate::harness::{
    Serving,
    client::{rest, signed, with_body},
    renter, until, within,
};

/// Limits that tests can wait for.
fn short(config: &mut GatewayConfig) {
    config.limits = HttpLimits { head_ms: 600, body_ms: 600, ..HttpLimits::default() };
}

/// Sends one byte after the other until the other end has enough.
async fn drip(stream: &mut TcpStream, bytes: &[u8]) -> Result<(), std::io::Error> {
    for byte in bytes.iter().cycle() {
        stream.write_all(std::slice::from_ref(byte)).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test]
async fn a_head_that_does_not_end_is_not_waited_for() {
    let gateway = Serving::with(short).await;
    let mut slow = TcpStream::connect(gateway.http).await.unwrap();
    slow.write_all(b"GET /v1/healthz HTTP/1.1\r\nx: ").await.unwrap();
    let (broken, ()) = tokio::join!(within("an end", drip(&mut slow, b"a")), async {
        assert_eq!(gateway.get("/v1/healthz").await.status, 200);
    });
    assert!(broken.is_err());
}

#[tokio::test]
async fn a_connection_without_a_request_is_closed() {
    let gateway = Serving::with(short).await;
    let mut silent = TcpStream::connect(gateway.http).await.unwrap();
    let began = Instant::now();
    assert_eq!(rest(&mut silent).await, "");
    assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
    // Also when a request was answered before.
    let mut idle = TcpStream::connect(gateway.http).await.unwrap();
    idle.write_all(b"GET /v1/healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert!(rest(&mut idle).await.starts_with("HTTP/1.1 200 OK"));
}

#[tokio::test]
async fn a_body_that_does_not_end_is_not_waited_for() {
    let gateway = Serving::with(short).await;
    let request = signed(&renter(61), with_body("POST", "/v1/machines", b"{}", "k"));
    let fields: String =
        request.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let mut slow = TcpStream::connect(gateway.http).await.unwrap();
    let head =
        format!("POST /v1/machines HTTP/1.1\r\nhost: x\r\n{fields}content-length: 1000\r\n\r\n");
    slow.write_all(head.as_bytes()).await.unwrap();
    let (said, ()) = tokio::join!(rest(&mut slow), async {
        assert_eq!(gateway.get("/v1/healthz").await.status, 200);
    });
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    assert!(said.contains("/problems/too-slow"), "{said}");
}

#[tokio::test]
async fn connections_of_one_source_are_bounded_and_other_sources_go_on() {
    let gateway = Serving::with(|config| config.limits.connections_per_source = 3).await;
    let held = [
        gateway.connect_from([127, 0, 0, 7]).await,
        gateway.connect_from([127, 0, 0, 7]).await,
        gateway.connect_from([127, 0, 0, 7]).await,
    ];
    let mut fourth = gateway.connect_from([127, 0, 0, 7]).await;
    let said = rest(&mut fourth).await;
    assert!(said.starts_with("HTTP/1.1 429 "), "{said}");
    assert!(said.contains("application/problem+json"), "{said}");
    let date = said.lines().find_map(|line| line.strip_prefix("date: "));
    assert!(date.is_some_and(|date| date.ends_with(" GMT")), "{said}");
    assert_eq!(gateway.get("/v1/healthz").await.status, 200);
    drop(held);
    until("its own connections count no more", async || {
        let mut next = gateway.connect_from([127, 0, 0, 7]).await;
        let request = b"GET /v1/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        next.write_all(request).await.unwrap();
        rest(&mut next).await.starts_with("HTTP/1.1 200 ")
    })
    .await;
}

#[tokio::test]
async fn connections_are_bounded_in_all() {
    let gateway = Serving::with(|config| config.limits.connections = 2).await;
    let first = gateway.connect_from([127, 0, 0, 8]).await;
    let _second = gateway.connect_from([127, 0, 0, 9]).await;
    let said = rest(&mut gateway.connect_from([127, 0, 0, 10]).await).await;
    assert!(said.starts_with("HTTP/1.1 503 "), "{said}");
    drop(first);
    until("there is room again", async || {
        let said = gateway.raw(b"GET /v1/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        said.await.starts_with("HTTP/1.1 200 ")
    })
    .await;
}

#[tokio::test]
async fn a_client_that_reads_nothing_loses_its_connection() {
    let gateway = Serving::with(|config| {
        config.limits = HttpLimits { unread_ms: 1000, connections: 1, ..HttpLimits::default() };
    })
    .await;
    // Many answers, none of which is read: the buffers fill and the gateway can write no more.
    let mut deaf = TcpStream::connect(gateway.http).await.unwrap();
    let requests = b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(380);
    let asked = async {
        let _ = deaf.write_all(&requests).await;
        std::future::pending::<()>().await;
    };
    let freed = until("the only place is free again", async || {
        let mut next = gateway.connect_from([127, 0, 0, 11]).await;
        let request = b"GET /v1/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        let _ = next.write_all(request).await;
        rest(&mut next).await.starts_with("HTTP/1.1 200 ")
    });
    tokio::select! {
        () = asked => {}
        () = freed => {}
    }
}

#[tokio::test]
async fn more_requests_than_the_rate_allows_are_put_off() {
    let gateway = Serving::start().await;
    let requests = b"GET /v1/healthz HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1500);
    let last = b"GET /v1/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let said = gateway.raw(&[&requests[..], last].concat()).await;
    assert!(said.contains("HTTP/1.1 200 ") && said.contains("HTTP/1.1 429 "));
    assert!(said.contains("retry-after: 1"));
    let mut other = gateway.connect_from([127, 0, 0, 12]).await;
    other.write_all(last).await.unwrap();
    assert!(rest(&mut other).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn bytes_that_are_no_http_end_their_connection_alone() {
    let gateway = Serving::start().await;
    let said = gateway.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 rubbish\r\n\r\n").await;
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 400 "), "{said}");
    let long = format!("GET /v1/{} HTTP/1.1\r\n\r\n", "a".repeat(200_000));
    let said = gateway.raw(long.as_bytes()).await;
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{said}");
    let fields: String = (0..500).map(|index| format!("x-{index}: y\r\n")).collect();
    let said = gateway.raw(format!("GET / HTTP/1.1\r\n{fields}\r\n").as_bytes()).await;
    assert!(said.starts_with("HTTP/1.1 431 "), "{said}");
    assert_eq!(gateway.get("/v1/healthz").await.status, 200);
}

#[tokio::test]
async fn a_request_names_one_host() {
    let gateway = Serving::start().await;
    let none = gateway.raw(b"GET /v1/healthz HTTP/1.1\r\nconnection: close\r\n\r\n").await;
    assert!(none.starts_with("HTTP/1.1 400 ") && none.contains("/problems/malformed"), "{none}");
    let two = b"GET /v1/healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n";
    assert!(gateway.raw(two).await.starts_with("HTTP/1.1 400 "));
    let status = async |host: &str| {
        let request =
            format!("GET /v1/healthz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let said = gateway.raw(request.as_bytes()).await;
        said.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(status("").await, "200");
    assert_eq!(status("gateway.example:8080").await, "200");
    assert_eq!(status("[::1]:8080").await, "200");
    assert_eq!(status("a b").await, "400");
    assert_eq!(status("a, b").await, "400");
    assert_eq!(status("me@a").await, "400");
    assert_eq!(status("a/b").await, "400");
    assert_eq!(status("a:b").await, "400");
    assert_eq!(status("::1").await, "400");
    assert_eq!(status("\u{fc}").await, "400");
    // HTTP/1.0 has no such field (RFC 9112 §3.2).
    assert!(gateway.raw(b"GET /v1/healthz HTTP/1.0\r\n\r\n").await.starts_with("HTTP/1.0 200 "));
}

#[tokio::test]
async fn clients_of_our_proxy_are_bounded_one_by_one() {
    let proxies = vec!["127.0.0.1".parse().unwrap()];
    let limits = HttpLimits { proxies, connections_per_source: 1, ..HttpLimits::default() };
    let gateway = Serving::with(|config| config.limits = limits).await;
    let request = |client: &str, last: &str| {
        format!("GET /v1/healthz HTTP/1.1\r\nhost: x\r\nx-forwarded-for: {client}\r\n{last}\r\n")
    };
    let last = request("203.0.113.1", "connection: close\r\n");
    let requests = request("203.0.113.1", "").repeat(1500) + &last;
    assert!(gateway.raw(requests.as_bytes()).await.contains("HTTP/1.1 429 "));
    // Connections of the proxy's are not counted as one client's, and another client has its own requests.
    let _held = TcpStream::connect(gateway.http).await.unwrap();
    let other = gateway.raw(request("203.0.113.2", "connection: close\r\n").as_bytes()).await;
    assert!(other.starts_with("HTTP/1.1 200 "), "{other}");
}
