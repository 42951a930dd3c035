//! A client of the gateway. Each answer is compared with the served document, and that an error
//! is a problem document.

use std::net::SocketAddr;

use bytes::Bytes;
use gateway::service::now;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Request, body::Incoming};
use hyper_util::rt::TokioIo;
use lease::{SigningKey, request::sign};
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};
use types::{
    forward::{ForwardedRequest, Problem},
    units::UnixSeconds,
};

use super::{Serving, schema::check_exchange, within};

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    /// Returns the JSON body.
    pub(crate) fn json<T: DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// Returns the status and the name of the problem.
    pub(crate) fn problem(&self) -> (u16, String) {
        (self.status, self.json::<Problem>().kind)
    }

    /// Returns what the problem document says was wrong.
    pub(crate) fn detail(&self) -> String {
        self.json::<Problem>().detail
    }

    /// Returns a field, empty when it is absent.
    pub(crate) fn field(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// A request without signature.
pub(crate) fn plain(method: &str, target: &str) -> ForwardedRequest {
    ForwardedRequest {
        method: method.into(),
        target: target.into(),
        headers: Vec::new(),
        body: Vec::new(),
    }
}

/// A request with a JSON body and an idempotency key, without signature.
pub(crate) fn with_body(method: &str, target: &str, body: &[u8], key: &str) -> ForwardedRequest {
    let headers = vec![
        ("content-type".to_owned(), "application/json".to_owned()),
        ("idempotency-key".to_owned(), key.to_owned()),
    ];
    ForwardedRequest { headers, body: body.to_vec(), ..plain(method, target) }
}

/// The request signed now by `key`.
pub(crate) fn signed(key: &SigningKey, request: ForwardedRequest) -> ForwardedRequest {
    signed_at(key, request, now())
}

/// The request signed at a time.
pub(crate) fn signed_at(
    key: &SigningKey,
    mut request: ForwardedRequest,
    at: UnixSeconds,
) -> ForwardedRequest {
    let mut nonce = [0u8; 16];
    getrandom::fill(&mut nonce).unwrap();
    sign(key, &mut request, at, &types::hex::encode(&nonce)).unwrap();
    request
}

impl Serving {
    /// Sends a request and reads the answer to its end.
    pub(crate) async fn send(&self, request: &ForwardedRequest) -> Answer {
        within(&request.target, async {
            let answer = self.begin(request).await;
            let (parts, body) = answer.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let answer = Answer { status: parts.status.as_u16(), headers: parts.headers, body };
            if answer.status >= 400 && request.method != "HEAD" {
                assert_eq!(answer.field("content-type"), Problem::MEDIA_TYPE, "{answer:?}");
                assert_eq!(answer.json::<Problem>().status, answer.status, "{answer:?}");
            }
            check_exchange(request, &answer);
            answer
        })
        .await
    }

    /// Sends a request and returns the answer whose body may go on.
    pub(crate) async fn begin(&self, request: &ForwardedRequest) -> hyper::Response<Incoming> {
        let stream = TcpStream::connect(self.http).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut builder = Request::builder()
            .method(request.method.as_str())
            .uri(&request.target)
            .header("host", self.http.to_string());
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        let request = builder.body(Full::new(Bytes::from(request.body.clone()))).unwrap();
        sender.send_request(request).await.unwrap()
    }

    /// Signs with `key` and sends.
    pub(crate) async fn ask(&self, key: &SigningKey, request: ForwardedRequest) -> Answer {
        self.send(&signed(key, request)).await
    }

    /// Asks what needs no signature.
    pub(crate) async fn get(&self, target: &str) -> Answer {
        self.send(&plain("GET", target)).await
    }

    /// Connects from an address of the loopback network.
    pub(crate) async fn connect_from(&self, source: [u8; 4]) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((source, 0))).unwrap();
        socket.connect(self.http).await.unwrap()
    }

    /// Sends bytes as they are and returns what comes until the other end closes.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.http).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        rest(&mut stream).await
    }
}

/// Reads until the other end closes or breaks the connection.
pub(crate) async fn rest(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    // A connection that is reset has told what it had to tell.
    let _ = within("the end of the connection", stream.read_to_end(&mut all)).await;
    String::from_utf8(all).unwrap()
}
