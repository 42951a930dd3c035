//! Uploads and downloads of content.
//!
//! An upload's signature covers method and path; the path names the SHA-256 of the body, so it
//! needs no `content-digest`.

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use lease::problem::Kind;
use tokio_util::io::ReaderStream;
use types::{forward::Problem, ids::ContentId};

use super::{json_response, response};
use crate::{content::ContentError, service::Gateway};

/// Which part of an answer is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// All of it.
    Body,
    /// Status and fields.
    Head,
}

pub(super) async fn read(
    gateway: &Gateway,
    content: ContentId,
    wanted: Wanted,
) -> Result<Response, Problem> {
    let found =
        gateway.content.read(content).await.map_err(|error| Kind::Internal.caused_by(&error))?;
    let (file, length) =
        found.ok_or_else(|| Kind::NotFound.because(format!("content {content} is not here")))?;
    let body = match wanted {
        Wanted::Body => Body::from_stream(ReaderStream::with_capacity(file, 256 << 10)),
        Wanted::Head => Body::empty(),
    };
    let mut response = response(StatusCode::OK, "application/octet-stream", body);
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

pub(super) async fn write(
    gateway: &Gateway,
    content: ContentId,
    body: Body,
) -> Result<Response, Problem> {
    let present = gateway.content.read(content).await;
    if !matches!(present, Ok(Some(_))) {
        let written = gateway.content.write(content, body.into_data_stream()).await;
        written.map_err(|error| refuse(&error))?;
        tracing::info!(event = "content-stored", %content);
    }
    Ok(json_response(StatusCode::CREATED, &serde_json::json!({ "content": content })))
}

fn refuse(error: &ContentError) -> Problem {
    let kind = match error {
        ContentError::TooLarge { .. } => Kind::TooLarge,
        ContentError::Full { .. } => Kind::Unavailable,
        ContentError::Digest { .. } => Kind::Unprocessable,
        ContentError::BrokeOff { .. } => Kind::Malformed,
        ContentError::HostFile { .. } => Kind::Internal,
    };
    kind.caused_by(error)
}
