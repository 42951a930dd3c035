//! HTTP/1.1 to the gateway. Requests that can be repeated safely are repeated when gateway or
//! node are briefly away; each attempt is signed afresh, under the same idempotency key.

use std::{path::PathBuf, sync::Arc, time::Duration};

use axum::http::{self, HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use lease::{
    SigningKey,
    request::{CARRIED_FIELDS, sign},
};
use serde_json::Value;
use tokio::sync::Notify;
use tokio_util::io::ReaderStream;
use types::forward::{ForwardedRequest, Problem};

use super::{
    CliError, Peer,
    arguments::GATEWAY,
    calls::Call,
    connection::{self, Place, Unconnected, Wire},
};
use crate::{keyfile, service::now};

/// Attempts of a request that can be repeated.
const ATTEMPTS: u32 = 4;

/// Pause before the first repetition; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(500);

/// How long the gateway may take to take the connection.
const CONNECT: Duration = Duration::from_secs(10);

/// How long the gateway may take to answer; its own deadline for nodes is shorter.
pub(super) const ANSWER: Duration = Duration::from_secs(60);

/// Largest answer that is kept in memory.
const MAX_ANSWER: usize = 64 << 20;

/// An upload waits this long to be asked for, so that one which is refused is not sent; not everything on the way
/// knows to ask (RFC 9110 §10.1.1).
const ASKED_FOR: Duration = Duration::from_secs(2);

/// A request's body.
type Outgoing = BoxBody<Bytes, std::io::Error>;

/// What is sent along with a request's head.
struct Payload {
    body: Outgoing,
    length: u64,
    /// Told when the body is asked for; `None` where it is sent at once.
    asked: Option<Arc<Notify>>,
}

/// A gateway, by its URL.
pub(crate) struct Client {
    url: String,
    authorities: Option<PathBuf>,
}

/// A random name for a request.
pub(crate) fn nonce() -> Result<String, CliError> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        CliError::Key(keyfile::KeyFileError::Random { message: error.to_string() })
    })?;
    Ok(types::hex::encode(&bytes))
}

impl Client {
    /// `authorities` is a PEM file of those that may vouch for the gateway; the system's without one.
    pub(crate) fn new(url: String, authorities: Option<PathBuf>) -> Self {
        Self { url, authorities }
    }

    /// Returns the file of those that may vouch for the gateway, if one was named.
    pub(crate) fn authorities(&self) -> Option<PathBuf> {
        self.authorities.as_ref().map(|path| std::path::absolute(path).unwrap_or(path.clone()))
    }

    /// Sends a request, again and again while it fails for a passing reason, and returns the body
    /// of the answer.
    pub(crate) async fn ask(
        &self,
        call: &Call,
        key: Option<&SigningKey>,
    ) -> Result<Bytes, CliError> {
        self.ask_whole(call, key).await.map(http::Response::into_body)
    }

    /// The same with the answer's fields.
    pub(crate) async fn ask_whole(
        &self,
        call: &Call,
        key: Option<&SigningKey>,
    ) -> Result<http::Response<Bytes>, CliError> {
        let mut pause = PAUSE;
        for _ in 1..ATTEMPTS {
            let result = self.once(call, key).await;
            let passing = match &result {
                Err(CliError::Refused { problem }) => matches!(problem.status, 429 | 502..=504),
                Err(CliError::Unreachable { .. }) => true,
                Ok(_) | Err(_) => false,
            };
            if !passing {
                return result;
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        self.once(call, key).await
    }

    async fn once(
        &self,
        call: &Call,
        key: Option<&SigningKey>,
    ) -> Result<http::Response<Bytes>, CliError> {
        let (head, body) = self.begin(call, key).await?.into_parts();
        let limited = http_body_util::Limited::new(body, MAX_ANSWER);
        let body = tokio::time::timeout(ANSWER, limited.collect())
            .await
            .map_err(|_| self.unreachable("the answer did not arrive within 60 s"))?
            .map_err(|error| self.broken(&*error))?;
        Ok(http::Response::from_parts(head, body.to_bytes()))
    }

    /// Signs and sends a request once and returns the answer, whose body may go on.
    pub(crate) async fn begin(
        &self,
        call: &Call,
        key: Option<&SigningKey>,
    ) -> Result<http::Response<Incoming>, CliError> {
        let mut request = call.request.clone();
        if let Some(key) = key {
            sign_now(key, &mut request)?;
        }
        let Some(path) = &call.file else {
            let length = request.body.len() as u64;
            let body = Full::new(Bytes::from(request.body.clone()));
            let body = body.map_err(|never| match never {}).boxed();
            let sent = self.send(&request, Payload { body, length, asked: None });
            return tokio::time::timeout(ANSWER, sent)
                .await
                .map_err(|_| self.unreachable("no answer within 60 s"))?;
        };
        let fail = |operation, source| CliError::File { operation, path: path.clone(), source };
        let file = tokio::fs::File::open(path).await.map_err(|source| fail("open", source))?;
        let length = file.metadata().await.map_err(|source| fail("read", source))?.len();
        let asked = Arc::new(Notify::new());
        let wait = Arc::clone(&asked);
        // An answer that comes in this time ends the request, and nothing is read.
        let wait = stream::once(async move {
            let _ = tokio::time::timeout(ASKED_FOR, wait.notified()).await;
        });
        let pieces = ReaderStream::with_capacity(file, 256 << 10).map_ok(Frame::data);
        let pieces = wait.map(|()| None).chain(pieces.map(Some)).filter_map(async |piece| piece);
        let body = BodyExt::boxed(StreamBody::new(pieces));
        self.send(&request, Payload { body, length, asked: Some(asked) }).await
    }

    /// Connects with the gateway.
    pub(crate) async fn connect(&self) -> Result<Box<dyn Wire>, CliError> {
        let place = self.place()?;
        let connect = connection::open(&place, self.authorities.as_deref());
        tokio::time::timeout(CONNECT, connect)
            .await
            .unwrap_or_else(|_| Err(Unconnected::Happened("no connection within 10 s".into())))
            .map_err(|failed| match failed {
                Unconnected::Told(message) => CliError::Usage { message },
                // Nobody named it, and a new user may not know that somebody has to.
                Unconnected::Happened(message) if self.url == GATEWAY => self.unreachable(format!(
                    "{message}; --gateway URL or HOLDFAST_GATEWAY names another one"
                )),
                Unconnected::Happened(message) => self.unreachable(message),
            })
    }

    /// Sends one request; an answer other than success is an error.
    async fn send(
        &self,
        request: &ForwardedRequest,
        payload: Payload,
    ) -> Result<http::Response<Incoming>, CliError> {
        let request = self.http_request(request, payload)?;
        let stream = self.connect().await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(&error))?;
        tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(|error| self.broken(&error))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let limited = http_body_util::Limited::new(answer.into_body(), 1 << 20);
        let body = limited.collect().await.map_err(|error| self.broken(&*error))?.to_bytes();
        Err(self.refused(status, &body))
    }

    /// Returns what the gateway's refusal says.
    pub(crate) fn refused(&self, status: StatusCode, body: &[u8]) -> CliError {
        if let Ok(problem) = serde_json::from_slice::<Problem>(body) {
            return CliError::Refused { problem };
        }
        match status {
            // A gateway says more: this is somebody before it that cannot reach it.
            StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => {
                self.unreachable(format!("a proxy before it answers {status}"))
            }
            StatusCode::PAYLOAD_TOO_LARGE => self.answer(format!(
                "{status}, in the words of a proxy before it, whose limit of bodies is too low for this file"
            )),
            _ => self.answer(format!(
                "HTTP status {status} without a problem document; is this a gateway's URL, with http:// or https:// as it should be?"
            )),
        }
    }

    /// Returns where the gateway is.
    pub(crate) fn place(&self) -> Result<Place, CliError> {
        Place::parse(&self.url).ok_or_else(|| CliError::Usage {
            message: format!(
                "the gateway's URL is {:?}; expected http://HOST:PORT or https://HOST",
                self.url
            ),
        })
    }

    /// Says that a connection broke, with every cause.
    pub(crate) fn broken(&self, error: &(dyn std::error::Error + 'static)) -> CliError {
        let other = error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse);
        let hint = if other { "; something else than a gateway answers there" } else { "" };
        self.unreachable(format!("{}{hint}", lease::problem::chain(error)))
    }

    pub(crate) fn unreachable(&self, message: impl ToString) -> CliError {
        let (peer, url) = (Peer::Gateway, self.url.clone());
        CliError::Unreachable { peer, url, message: message.to_string() }
    }

    pub(crate) fn answer(&self, message: impl ToString) -> CliError {
        let (peer, url) = (Peer::Gateway, self.url.clone());
        CliError::Answer { peer, url, message: message.to_string() }
    }

    /// Parses a JSON answer; an empty one is null.
    pub(crate) fn parse(&self, bytes: &[u8]) -> Result<Value, CliError> {
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(bytes).map_err(|error| {
            self.answer(format!("it is no JSON ({error}); is this a gateway's URL?"))
        })
    }

    fn http_request(
        &self,
        request: &ForwardedRequest,
        payload: Payload,
    ) -> Result<Request<Outgoing>, CliError> {
        let mut builder = Request::builder()
            .method(request.method.as_str())
            .uri(request.target.as_str())
            .header(header::HOST, self.place()?.authority())
            .header(header::USER_AGENT, HeaderValue::from_static("holdfast"));
        if payload.length > 0 || request.method == "PUT" {
            builder = builder.header(header::CONTENT_LENGTH, payload.length);
        }
        if payload.asked.is_some() {
            builder = builder.header(header::EXPECT, HeaderValue::from_static("100-continue"));
        }
        for name in CARRIED_FIELDS {
            if let Some(value) = request.header(name) {
                builder = builder.header(name, value);
            }
        }
        let mut built = builder.body(payload.body).map_err(|error| self.answer(error))?;
        if let Some(asked) = payload.asked {
            hyper::ext::on_informational(&mut built, move |interim| {
                if interim.status() == StatusCode::CONTINUE {
                    asked.notify_one();
                }
            });
        }
        Ok(built)
    }
}

/// Signs a request with a new nonce.
pub(crate) fn sign_now(key: &SigningKey, request: &mut ForwardedRequest) -> Result<(), CliError> {
    sign(key, request, now(), &nonce()?).map_err(|source| CliError::Lease {
        what: "the request cannot be signed".into(),
        source: Box::new(source),
    })
}
