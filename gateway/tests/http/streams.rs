//! Consoles that go on and TCP tunnels, in both directions, to their ends.

use futures_util::{SinkExt, StreamExt};
use http_body_util::BodyExt;
use lease::SigningKey;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Error, Message, client::IntoClientRequest},
};
use types::forward::StreamAnswer;

use crate::harness::{
    Serving,
    client::{plain, signed},
    lease,
    node::{Manner, Node, answer},
    renter, show, within,
};

const MACHINE: &str = "/v1/machines/01010101010101010101010101010101";

async fn tunnel(gateway: &Serving, key: &SigningKey) -> Result<WebSocketStream<TcpStream>, Error> {
    open(gateway, key, "tunnel/22").await
}

/// Opens a WebSocket to something of the machine.
async fn open(
    gateway: &Serving,
    key: &SigningKey,
    rest: &str,
) -> Result<WebSocketStream<TcpStream>, Error> {
    let target = format!("{MACHINE}/{rest}");
    let mut request = format!("ws://{}{target}", gateway.http).into_client_request().unwrap();
    for (name, value) in signed(key, plain("GET", &target)).headers {
        let name = hyper::header::HeaderName::try_from(name).unwrap();
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    let stream = TcpStream::connect(gateway.http).await.unwrap();
    tokio_tungstenite::client_async(request, stream).await.map(|(socket, _)| socket)
}

/// A tunnel and its end at the node.
async fn tunnel_to(
    gateway: &Serving,
    node: &mut Node,
) -> (WebSocketStream<TcpStream>, overlay::OverlayStream) {
    open_to(gateway, node, "tunnel/22").await
}

/// A WebSocket and its end at the node.
async fn open_to(
    gateway: &Serving,
    node: &mut Node,
    rest: &str,
) -> (WebSocketStream<TcpStream>, overlay::OverlayStream) {
    let key = renter(41);
    gateway.ask(&key, show(&lease(1, node.id(), &key))).await;
    let (socket, (request, stream)) = tokio::join!(open(gateway, &key, rest), node.accept());
    assert_eq!(request.target, format!("{MACHINE}/{rest}"));
    assert!(lease::request::verify(&request, gateway::service::now(), 300).is_ok());
    (socket.unwrap(), stream)
}

fn binary(bytes: &'static [u8]) -> Message {
    Message::Binary(bytes::Bytes::from_static(bytes))
}

#[tokio::test]
async fn a_followed_console_shows_what_comes_as_it_comes() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 42, Manner::Prompt).await;
    let key = renter(43);
    gateway.ask(&key, show(&lease(1, node.id(), &key))).await;
    let request = signed(&key, plain("GET", &format!("{MACHINE}/console?follow=1")));
    let (response, (asked, mut console)) =
        tokio::join!(within("a console", gateway.begin(&request)), node.accept());
    assert_eq!(asked.target, request.target);
    assert!(lease::request::verify(&asked, gateway::service::now(), 300).is_ok());
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    console.write_all(b"first").await.unwrap();
    console.flush().await.unwrap();
    let frame = within("first", body.frame()).await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "first");
    console.write_all(b"second").await.unwrap();
    console.flush().await.unwrap();
    let frame = within("second", body.frame()).await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "second");
    console.shutdown().await.unwrap();
    assert!(within("the end", body.frame()).await.is_none());
}

#[tokio::test]
async fn a_console_whose_node_dies_breaks_off() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 44, Manner::Prompt).await;
    let key = renter(45);
    gateway.ask(&key, show(&lease(1, node.id(), &key))).await;
    let request = signed(&key, plain("GET", &format!("{MACHINE}/console?follow=1")));
    let (response, (_, console)) =
        tokio::join!(within("a console", gateway.begin(&request)), node.accept());
    let mut body = response.into_body();
    drop((console, node));
    // An error, not an end: the client can tell that something is missing.
    let last = within("the end", body.frame()).await;
    assert!(last.unwrap().is_err());
    assert_eq!(gateway.get("/v1/healthz").await.status, 200);
}

#[tokio::test]
async fn a_tunnel_carries_bytes_both_ways() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 46, Manner::Prompt).await;
    let (socket, mut guest) = tunnel_to(&gateway, &mut node).await;
    let sent: Vec<u8> = (0..3 << 20).map(|index: u32| index.to_le_bytes()[1]).collect();
    let (mut up, mut down) = socket.split();
    let (mut from_client, mut to_client) = tokio::io::split(&mut guest);
    let client_sends = async {
        for piece in sent.chunks(60_000) {
            up.send(Message::Binary(bytes::Bytes::copy_from_slice(piece))).await.unwrap();
        }
    };
    let client_receives = async {
        let mut all = Vec::new();
        while all.len() < sent.len() {
            all.extend_from_slice(&down.next().await.unwrap().unwrap().into_data());
        }
        all
    };
    let guest_receives = async {
        let mut all = vec![0; sent.len()];
        from_client.read_exact(&mut all).await.unwrap();
        all
    };
    let guest_sends = async {
        to_client.write_all(&sent).await.unwrap();
        to_client.flush().await.unwrap();
    };
    let both = async { tokio::join!(client_sends, client_receives, guest_receives, guest_sends) };
    let ((), at_client, at_guest, ()) = within("bytes both ways", both).await;
    assert!(at_client == sent && at_guest == sent);
}

#[tokio::test]
async fn either_end_of_a_tunnel_can_end_first() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 47, Manner::Prompt).await;
    let (mut socket, mut guest) = tunnel_to(&gateway, &mut node).await;
    socket.send(binary(b"question")).await.unwrap();
    socket.send(binary(b"")).await.unwrap();
    let mut question = String::new();
    within("half-close", guest.read_to_string(&mut question)).await.unwrap();
    assert_eq!(question, "question");
    guest.write_all(b"answer").await.unwrap();
    guest.shutdown().await.unwrap();
    let message = within("answer", socket.next()).await.unwrap().unwrap();
    assert_eq!(message, binary(b"answer"));
    let Message::Close(Some(end)) = next(&mut socket).await else { panic!("no close frame") };
    assert_eq!((u16::from(end.code), end.reason.as_str()), (1000, "the guest ended it"));

    let (mut socket, mut guest) = tunnel_to(&gateway, &mut node).await;
    socket.close(None).await.unwrap();
    let mut nothing = Vec::new();
    within("the end", guest.read_to_end(&mut nothing)).await.unwrap();
    assert_eq!(nothing, b"");
}

#[tokio::test]
async fn a_tunnel_ends_with_its_node_and_is_refused_in_its_words() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 48, Manner::Prompt).await;
    let key = renter(49);
    gateway.ask(&key, show(&lease(1, node.id(), &key))).await;
    let refuse = async {
        let mut stream = within("a stream", node.streams.recv()).await.unwrap().stream;
        let problem = lease::problem::Kind::Conflict.because("port 22 is closed");
        answer(&mut stream, &StreamAnswer::Refused(problem)).await;
        stream.shutdown().await.unwrap();
    };
    let (refused, ()) = tokio::join!(tunnel(&gateway, &key), refuse);
    let Err(Error::Http(refused)) = refused else { panic!("not refused") };
    assert_eq!(refused.status(), 409);
    let said = String::from_utf8_lossy(refused.body().as_ref().unwrap()).into_owned();
    assert!(said.contains("port 22 is closed"), "{said}");

    let (mut socket, guest) = tunnel_to(&gateway, &mut node).await;
    drop((node, guest));
    let Message::Close(Some(end)) = next(&mut socket).await else { panic!("no close frame") };
    assert_eq!(u16::from(end.code), 1011);
    assert!(end.reason.starts_with("the machine's node is gone"), "{}", end.reason);
}

#[tokio::test]
async fn a_tunnel_is_a_signed_websocket() {
    let gateway = Serving::start().await;
    let _node = Node::join(&gateway, 50, Manner::Prompt).await;
    let target = format!("{MACHINE}/tunnel/22");
    let unsigned = gateway.get(&target).await;
    assert_eq!(unsigned.problem(), (401, "/problems/unauthenticated".into()));
    let no_socket = gateway.ask(&renter(51), plain("GET", &target)).await;
    assert_eq!(no_socket.problem(), (400, "/problems/malformed".into()));
}

#[tokio::test]
async fn a_silent_node_opens_no_console() {
    let gateway = Serving::with(|config| config.limits.node_ms = 500).await;
    let node = Node::join(&gateway, 52, Manner::Silent).await;
    let key = renter(53);
    gateway.ask(&key, show(&lease(1, node.id(), &key))).await;
    let follow = plain("GET", &format!("{MACHINE}/console?follow=1"));
    let answer = gateway.ask(&key, follow).await;
    assert_eq!(answer.problem(), (504, "/problems/node-timeout".into()));
}

/// The next message that is no ping.
async fn next(socket: &mut WebSocketStream<TcpStream>) -> Message {
    loop {
        let message = within("a message", socket.next()).await.unwrap().unwrap();
        if !matches!(message, Message::Ping(_)) {
            return message;
        }
    }
}

#[tokio::test]
async fn a_terminal_shows_and_types() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 54, Manner::Prompt).await;
    let (mut socket, mut console) = open_to(&gateway, &mut node, "terminal?from=7").await;
    console.write_all(b"unlock: ").await.unwrap();
    console.flush().await.unwrap();
    assert_eq!(next(&mut socket).await, binary(b"unlock: "));
    socket.send(binary(b"secret")).await.unwrap();
    // Browsers send text, and a frame without bytes types nothing.
    socket.send(binary(b"")).await.unwrap();
    socket.send(Message::Text("\u{fc}\r".into())).await.unwrap();
    let mut typed = [0; 9];
    within("what was typed", console.read_exact(&mut typed)).await.unwrap();
    assert_eq!(&typed, b"secret\xc3\xbc\r");
    console.shutdown().await.unwrap();
    let Message::Close(Some(end)) = next(&mut socket).await else { panic!("no close frame") };
    assert_eq!((u16::from(end.code), end.reason.as_str()), (1000, "the machine runs no more"));
}

#[tokio::test]
async fn a_terminal_says_that_its_node_is_gone() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 55, Manner::Prompt).await;
    let (mut socket, console) = open_to(&gateway, &mut node, "terminal").await;
    drop((console, node));
    let Message::Close(Some(end)) = next(&mut socket).await else { panic!("no close frame") };
    assert_eq!(u16::from(end.code), 1011);
    assert!(end.reason.starts_with("the machine's node is gone"), "{}", end.reason);
}

#[tokio::test]
async fn a_terminal_whose_client_is_gone_ends_at_the_node() {
    let gateway = Serving::start().await;
    let mut node = Node::join(&gateway, 56, Manner::Prompt).await;
    let (socket, mut console) = open_to(&gateway, &mut node, "terminal").await;
    drop(socket);
    let mut nothing = Vec::new();
    // The stream ends, or is reset.
    let _ = within("the end", console.read_to_end(&mut nothing)).await;
    assert_eq!(nothing, b"");
}

#[tokio::test]
async fn a_terminal_is_a_signed_websocket() {
    let gateway = Serving::start().await;
    let target = format!("{MACHINE}/terminal");
    let unsigned = gateway.get(&target).await;
    assert_eq!(unsigned.problem(), (401, "/problems/unauthenticated".into()));
    let no_socket = gateway.ask(&renter(57), plain("GET", &target)).await;
    assert_eq!(no_socket.problem(), (400, "/problems/malformed".into()));
    assert!(no_socket.detail().starts_with("a terminal is a WebSocket"), "{no_socket:?}");
}

#[tokio::test]
async fn a_quiet_tunnel_is_kept_open_by_pings_and_ends_when_it_is_idle() {
    let gateway = Serving::with(|config| {
        (config.limits.ping_ms, config.limits.idle_ms) = (50, 2_000);
    })
    .await;
    let mut node = Node::join(&gateway, 49, Manner::Prompt).await;
    let (mut socket, _guest) = tunnel_to(&gateway, &mut node).await;
    let first = within("a ping", socket.next()).await.unwrap().unwrap();
    assert_eq!(first, Message::Ping(bytes::Bytes::new()));
    let Message::Close(Some(end)) = next(&mut socket).await else { panic!("no close frame") };
    assert_eq!(u16::from(end.code), 1001);
    assert!(end.reason.ends_with("for 2s"), "{}", end.reason);
}

#[tokio::test]
async fn a_tunnel_in_one_direction_is_not_idle() {
    let gateway = Serving::with(|config| config.limits.idle_ms = 1_000).await;
    let mut node = Node::join(&gateway, 50, Manner::Prompt).await;
    let (mut socket, mut guest) = tunnel_to(&gateway, &mut node).await;
    let began = tokio::time::Instant::now();
    // The client says nothing all the time: the guest's bytes alone keep the tunnel.
    while began.elapsed() < std::time::Duration::from_millis(2_500) {
        guest.write_all(b"x").await.unwrap();
        guest.flush().await.unwrap();
        let shown = within("a byte", socket.next()).await.unwrap().unwrap();
        assert_eq!(shown.into_data(), "x");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}
