//! The way of a signed request to its node and back.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use lease::problem::Kind;
use overlay::RequestError;
use types::{
    forward::{ForwardedRequest, ForwardedResponse, Problem},
    ids::NodeId,
};

use crate::service::Gateway;

/// Attempts to hand a request to its node. Only those that certainly did not reach it are
/// repeated: the node counts each signed request once.
const ATTEMPTS: u32 = 3;

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(300);

/// Field of an answer that was given before under the same idempotency key, and tells how it was then. Nodes have it
/// too.
pub(crate) const REPLAYED: &str = "idempotency-replayed";

/// Sends the request to a node and returns its answer, whatever that is.
pub(super) async fn ask(
    gateway: &Gateway,
    node: NodeId,
    request: &ForwardedRequest,
) -> Result<ForwardedResponse, Problem> {
    let body = serde_json::to_vec(request).map_err(|error| Kind::Internal.caused_by(&error))?;
    let body = bytes::Bytes::from(body);
    let mut attempt = 1;
    loop {
        match gateway.overlay.request(node, body.clone(), gateway.node_deadline()).await {
            Ok(answer) => {
                return serde_json::from_slice(&answer).map_err(|error| {
                    Kind::NodeUnreachable
                        .because(format!("the answer of node {node} cannot be read: {error}"))
                });
            }
            Err(RequestError::PeerBusy { .. }) if attempt < ATTEMPTS => {
                attempt += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(refuse(&error)),
        }
    }
}

/// Says what an overlay's failure means to the caller.
pub(super) fn refuse(error: &RequestError) -> Problem {
    let kind = match error {
        RequestError::Deadline { .. } => Kind::NodeTimeout,
        RequestError::PeerBusy { .. } | RequestError::Stopped => Kind::Unavailable,
        RequestError::TooLong { .. } => Kind::TooLarge,
        RequestError::UnknownNode { .. }
        | RequestError::Unreachable { .. }
        | RequestError::Broken { .. }
        | RequestError::PeerRefused { .. }
        | RequestError::PeerAnswer { .. } => Kind::NodeUnreachable,
    };
    kind.caused_by(error)
}

/// Turns a node's answer into the gateway's.
pub(super) fn response(answer: ForwardedResponse) -> Response {
    let mut response = Response::new(Body::from(answer.body));
    *response.status_mut() = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let media = HeaderValue::from_str(&answer.content_type)
        .unwrap_or(HeaderValue::from_static("application/octet-stream"));
    // An answer without a body has no form (RFC 9110 §15.3.5).
    if response.status() != StatusCode::NO_CONTENT {
        response.headers_mut().insert(header::CONTENT_TYPE, media);
    }
    for (name, value) in answer.headers {
        // A node can add fields of its own, none that steer the connection.
        let ours = name.starts_with("holdfast-")
            || matches!(name.as_str(), REPLAYED | "location" | "retry-after");
        if let (true, Ok(name), Ok(value)) =
            (ours, HeaderName::try_from(name), HeaderValue::try_from(value))
        {
            response.headers_mut().append(name, value);
        }
    }
    response
}
