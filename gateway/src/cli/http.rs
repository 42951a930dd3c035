//! HTTP/1.1 to the gateway. Requests that can be repeated safely are repeated when gateway or
//! node are briefly away; each attempt is signed afresh, under the same idempotency key.

use std::time::Duration;

use axum::http::{self, HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::{Body, Incoming};
use hyper_util::rt::TokioIo;
use lease::{
    SigningKey,
    request::{CARRIED_FIELDS, sign},
};
use serde_json::Value;
use tokio::net::TcpStream;
use types::forward::{ForwardedRequest, Problem};

use super::CliError;
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
pub(crate) type Outgoing = BoxBody<Bytes, std::io::Error>;

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

    /// Asks something that needs no signature.
    pub(crate) async fn get(&self, target: &str) -> Result<Value, CliError> {
        let request = ForwardedRequest {
            method: "GET".into(),
            target: target.to_owned(),
            headers: Vec::new(),
            body: Vec::new(),
        };
        self.repeat(&request, None).await.and_then(|bytes| self.parse(&bytes))
    }

    /// Asks something signed, with a JSON body if any, and returns the JSON answer.
    pub(crate) async fn signed(
        &self,
        key: &SigningKey,
        method: &str,
        target: &str,
        body: Option<(Value, String)>,
    ) -> Result<Value, CliError> {
        let bytes = self.signed_bytes(key, method, target, body).await?;
        if bytes.is_empty() { Ok(Value::Null) } else { self.parse(&bytes) }
    }

    /// The same, for answers that are no JSON. `body` comes with its idempotency key.
    pub(crate) async fn signed_bytes(
        &self,
        key: &SigningKey,
        method: &str,
        target: &str,
        body: Option<(Value, String)>,
    ) -> Result<Bytes, CliError> {
        let mut headers = Vec::new();
        let mut bytes = Vec::new();
        if let Some((value, idempotency_key)) = body {
            headers.push(("content-type".to_owned(), "application/json".to_owned()));
            headers.push(("idempotency-key".to_owned(), idempotency_key));
            bytes = value.to_string().into_bytes();
        } else if method != "GET" {
            headers.push(("idempotency-key".to_owned(), nonce()?));
        }
        let request = ForwardedRequest {
            method: method.to_owned(),
            target: target.to_owned(),
            headers,
            body: bytes,
        };
        self.repeat(&request, Some(key)).await
    }

    /// Sends a request until it is answered by other than a passing failure.
    async fn repeat(
        &self,
        request: &ForwardedRequest,
        key: Option<&SigningKey>,
    ) -> Result<Bytes, CliError> {
        let mut pause = PAUSE;
        for _ in 1..ATTEMPTS {
            let result = self.once(request, key).await;
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
        self.once(request, key).await
    }

    async fn once(
        &self,
        request: &ForwardedRequest,
        key: Option<&SigningKey>,
    ) -> Result<Bytes, CliError> {
        let mut request = request.clone();
        if let Some(key) = key {
            sign_now(key, &mut request)?;
        }
        let body = Full::new(Bytes::from(request.body.clone()));
        let answer = self.send(&request, body.map_err(|never| match never {}).boxed()).await?;
        let limited = http_body_util::Limited::new(answer.into_body(), MAX_ANSWER);
        let body = tokio::time::timeout(ANSWER, limited.collect())
            .await
            .map_err(|_| self.unreachable("the answer did not arrive within 60 s"))?
            .map_err(|error| self.unreachable(error))?;
        Ok(body.to_bytes())
    }

    /// Sends one request; an answer other than success is an error.
    pub(crate) async fn send(
        &self,
        request: &ForwardedRequest,
        body: Outgoing,
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
        let request = self.http_request(request, body)?;
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
        CliError::Unreachable { url: self.url.clone(), message: message.to_string() }
    }

    pub(crate) fn answer(&self, message: impl ToString) -> CliError {
        CliError::Answer { url: self.url.clone(), message: message.to_string() }
    }

    fn parse(&self, bytes: &[u8]) -> Result<Value, CliError> {
        serde_json::from_slice(bytes).map_err(|error| self.answer(error))
    }

    fn http_request(
        &self,
        request: &ForwardedRequest,
        body: Outgoing,
    ) -> Result<Request<Outgoing>, CliError> {
        let mut builder = Request::builder()
            .method(request.method.as_str())
            .uri(request.target.as_str())
            .header(header::HOST, self.authority()?)
            .header(header::USER_AGENT, HeaderValue::from_static("holdfast"));
        if let Some(length) = body.size_hint().exact()
            && length > 0
        {
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
