//! HTTP/1.1 to the gateway. Requests that can be repeated safely are repeated when gateway or
//! node are briefly away; each attempt is signed afresh, under the same idempotency key.

use std::time::Duration;

use axum::http::{self, HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use futures_util::TryStreamExt;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use lease::{
    SigningKey,
    request::{CARRIED_FIELDS, sign},
};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_util::io::ReaderStream;
use types::forward::{ForwardedRequest, Problem};

use super::{CliError, Peer, calls::Call};
use crate::{keyfile, service::now};

/// Attempts of a request that can be repeated.
const ATTEMPTS: u32 = 4;

/// Pause before the first repetition; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(500);

/// How long the gateway may take to take the connection.
const CONNECT: Duration = Duration::from_secs(10);

/// How long the gateway may take to answer; its own deadline for nodes is shorter.
const ANSWER: Duration = Duration::from_secs(60);

/// Largest answer that is kept in memory.
const MAX_ANSWER: usize = 64 << 20;

/// A request's body.
type Outgoing = BoxBody<Bytes, std::io::Error>;

/// A gateway, by its URL.
pub(crate) struct Client {
    url: String,
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
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.trim_end_matches('/').to_owned() }
    }

    /// Sends a request, again and again while it fails for a passing reason, and returns the body
    /// of the answer.
    pub(crate) async fn ask(
        &self,
        call: &Call,
        key: Option<&SigningKey>,
    ) -> Result<Bytes, CliError> {
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

    async fn once(&self, call: &Call, key: Option<&SigningKey>) -> Result<Bytes, CliError> {
        let answer = self.begin(call, key).await?;
        let limited = http_body_util::Limited::new(answer.into_body(), MAX_ANSWER);
        let body = tokio::time::timeout(ANSWER, limited.collect())
            .await
            .map_err(|_| self.unreachable("the answer did not arrive within 60 s"))?
            .map_err(|error| self.unreachable(error))?;
        Ok(body.to_bytes())
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
            let body = Full::new(Bytes::from(request.body.clone()));
            let body = body.map_err(|never| match never {}).boxed();
            let length = request.body.len() as u64;
            return self.send(&request, body, length).await;
        };
        let fail = |operation, source| CliError::File { operation, path: path.clone(), source };
        let file = tokio::fs::File::open(path).await.map_err(|source| fail("open", source))?;
        let length = file.metadata().await.map_err(|source| fail("read", source))?.len();
        let chunks = ReaderStream::with_capacity(file, 256 << 10).map_ok(Frame::data);
        self.send(&request, BodyExt::boxed(StreamBody::new(chunks)), length).await
    }

    /// Sends one request; an answer other than success is an error.
    async fn send(
        &self,
        request: &ForwardedRequest,
        body: Outgoing,
        length: u64,
    ) -> Result<http::Response<Incoming>, CliError> {
        let connect = TcpStream::connect(self.authority()?);
        let stream = tokio::time::timeout(CONNECT, connect)
            .await
            .map_err(|_| self.unreachable("no connection within 10 s"))?
            .map_err(|error| self.unreachable(error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.unreachable(error))?;
        tokio::spawn(connection);
        let request = self.http_request(request, body, length)?;
        let answer = sender.send_request(request).await.map_err(|error| self.unreachable(error))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let limited = http_body_util::Limited::new(answer.into_body(), 1 << 20);
        let body = limited.collect().await.map_err(|error| self.unreachable(error))?.to_bytes();
        Err(self.refused(status, &body))
    }

    /// Returns what the gateway's refusal says.
    pub(crate) fn refused(&self, status: StatusCode, body: &[u8]) -> CliError {
        match serde_json::from_slice::<Problem>(body) {
            Ok(problem) => CliError::Refused { problem },
            Err(_) => self.answer(format!("HTTP status {status} without a problem document")),
        }
    }

    /// Returns host and port of the URL.
    pub(crate) fn authority(&self) -> Result<String, CliError> {
        let rest = self.url.strip_prefix("http://").ok_or_else(|| CliError::Usage {
            message: format!(
                "the gateway's URL is {:?}; expected http://HOST:PORT (put a TLS proxy's local end there)",
                self.url
            ),
        })?;
        if rest.is_empty() || rest.contains('/') {
            let message = format!("the gateway's URL is {:?}; expected http://HOST:PORT", self.url);
            return Err(CliError::Usage { message });
        }
        let bracket = rest.rfind(']').map_or(0, |position| position + 1);
        Ok(if rest[bracket..].contains(':') { rest.to_owned() } else { format!("{rest}:80") })
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
        serde_json::from_slice(bytes).map_err(|error| self.answer(error))
    }

    fn http_request(
        &self,
        request: &ForwardedRequest,
        body: Outgoing,
        length: u64,
    ) -> Result<Request<Outgoing>, CliError> {
        let mut builder = Request::builder()
            .method(request.method.as_str())
            .uri(request.target.as_str())
            .header(header::HOST, self.authority()?)
            .header(header::USER_AGENT, HeaderValue::from_static("holdfast"));
        if length > 0 || request.method == "PUT" {
            builder = builder.header(header::CONTENT_LENGTH, length);
        }
        for name in CARRIED_FIELDS {
            if let Some(value) = request.header(name) {
                builder = builder.header(name, value);
            }
        }
        builder.body(body).map_err(|error| self.answer(error))
    }
}

/// Signs a request with a new nonce.
pub(crate) fn sign_now(key: &SigningKey, request: &mut ForwardedRequest) -> Result<(), CliError> {
    sign(key, request, now(), &nonce()?).map_err(|source| CliError::Lease {
        what: "the request cannot be signed".into(),
        source: Box::new(source),
    })
}
