//! Uploads and downloads of content.
//!
//! Content is uploaded by renters with a lease that this gateway was shown, up to a quota, and is
//! held by those who uploaded it: they alone can read it here or have this gateway ask for a machine
//! that starts from it, so a digest that got known opens nothing here. Of the nodes, those get it of
//! which a holder has a lease (`service`). It is kept until the last of its holders' leases and the
//! retention after it are over.
//!
//! On a node it is nobody's: what is there already is used for whichever leased machine names its
//! digest, whatever gateway asks for that.
//!
//! An upload's signature covers method and path; the path names the SHA-256 of the body, so it
//! needs no `content-digest`.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::Response,
};
use lease::{problem::Kind, request::VerifiedRequest};
use tokio_util::io::ReaderStream;
use types::{
    forward::Problem,
    ids::{ContentId, PublicKey},
};

use super::{bodies::StoredContent, json_response, kept, response};
use crate::{
    content::{ContentError, Terms},
    service::{Gateway, now},
    store::Store,
};

/// How long an upload waits for another one of its renter, which may have just ended. The command waits two seconds to
/// be asked for the file, so that it hears of a refusal before it sends any; one that waits for minutes would take the
/// gateway for gone.
const TURN: Duration = Duration::from_secs(1);

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
    who: &VerifiedRequest,
    wanted: Wanted,
) -> Result<Response, Problem> {
    check_held(gateway, who.key, content)?;
    let found =
        gateway.content.read(content).await.map_err(|error| Kind::Internal.caused_by(&error))?;
    let (file, length) = found.ok_or_else(|| absent(content))?;
    let body = match wanted {
        Wanted::Body => Body::from_stream(ReaderStream::with_capacity(file, 256 << 10)),
        Wanted::Head => Body::empty(),
    };
    let mut response = response(StatusCode::OK, "application/octet-stream", body);
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

/// Checks that a renter uploaded this content. Returns its length in bytes.
pub(super) fn check_held(
    gateway: &Gateway,
    renter: PublicKey,
    content: ContentId,
) -> Result<u64, Problem> {
    let held = gateway.store.held(renter, content);
    held.map_err(|error| Kind::Internal.caused_by(&error))?.ok_or_else(|| absent(content))
}

fn absent(content: ContentId) -> Problem {
    Kind::NotFound.because(format!("your key has no content {content} here; upload it first"))
}

pub(super) async fn write(
    gateway: &Arc<Gateway>,
    content: ContentId,
    who: &VerifiedRequest,
    parts: &Parts,
    body: Body,
) -> Result<Response, Problem> {
    let renter = who.key;
    check_lease(gateway, renter)?;
    // Uploads of one renter come one after the other, so that each sees what is left.
    let turn = tokio::time::timeout(TURN, gateway.uploads.take(renter)).await;
    let _turn = turn.map_err(|_| {
        Kind::TooManyRequests
            .because("another upload of your key is under way; push again when it is done")
    })?;
    let store = |error| Kind::Internal.caused_by(&error);
    let used = gateway.store.used(renter).map_err(store)?;
    let again = gateway.store.held(renter, content).map_err(store)?.unwrap_or(0);
    let allowance = gateway.max_per_renter.saturating_sub(used.saturating_sub(again));
    let declared = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    if let Some(length) = declared.and_then(|text| text.parse().ok()) {
        let fits = gateway.content.check(content, length, allowance).await;
        fits.map_err(|error| refuse(&error))?;
    }
    let terms = Terms { allowance, stall: Duration::from_millis(gateway.http.body_ms) };
    let received = gateway.content.receive(content, body.into_data_stream(), terms).await;
    let upload = received.map_err(|error| refuse(&error))?;
    let bytes = upload.length();
    let names = gateway.content.names().await;
    upload.keep(&names).await.map_err(|error| refuse(&error))?;
    // The client may hang up: until it is written down who holds it, nobody may clean.
    let hold = move |store: &Store| {
        let held = store.hold(renter, content, bytes);
        drop(names);
        held
    };
    kept(gateway, hold).await?;
    tracing::info!(event = "content-stored", %content, %renter, bytes);
    Ok(json_response(StatusCode::CREATED, &StoredContent { content, bytes }))
}

pub(super) async fn remove(
    gateway: &Arc<Gateway>,
    content: ContentId,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    check_held(gateway, who.key, content)?;
    let renter = who.key;
    kept(gateway, move |store| store.release(renter, content)).await?;
    clean(gateway).await?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    Ok(response)
}

/// Removes content that nobody holds any more.
pub(crate) async fn clean(gateway: &Arc<Gateway>) -> Result<(), Problem> {
    let names = gateway.content.names().await;
    let (at, gateway) = (now(), Arc::clone(gateway));
    // This goes on when the client hangs up, and the names go along: what is uploaded meanwhile is not in the list.
    let clean = move || {
        let held = gateway.store.forget(at).map_err(|error| Kind::Internal.caused_by(&error))?;
        let retained = gateway.content.retain(&held, names);
        retained.map_err(|error| Kind::Internal.caused_by(&error))
    };
    let cleaned = tokio::task::spawn_blocking(clean).await;
    cleaned.map_err(|error| Kind::Internal.caused_by(&error))?
}

/// Checks that a renter has a lease that has not ended.
fn check_lease(gateway: &Gateway, renter: PublicKey) -> Result<(), Problem> {
    let last = gateway.store.last_end(renter);
    match last.map_err(|error| Kind::Internal.caused_by(&error))? {
        Some(end) if end > now() => Ok(()),
        Some(end) => Err(Kind::Forbidden.because(format!(
            "the last lease of your key that this gateway knows ended at {}; bring a later one \
             with PUT /v1/leases/{{id}}, or `holdfast lease register FILE`",
            end.0
        ))),
        None => Err(Kind::Forbidden.because(
            "this gateway knows no lease of your key; bring one with PUT /v1/leases/{id}, or \
             `holdfast lease register FILE`",
        )),
    }
}

fn refuse(error: &ContentError) -> Problem {
    let kind = match error {
        ContentError::TooLarge { .. } => Kind::TooLarge,
        ContentError::Quota { .. } => Kind::QuotaExceeded,
        ContentError::Full { .. } | ContentError::Vanished { .. } => Kind::Unavailable,
        ContentError::Digest { .. } => Kind::Unprocessable,
        ContentError::BrokeOff { .. } => Kind::Malformed,
        ContentError::Stalled { .. } => Kind::TooSlow,
        ContentError::HostFile { .. } => Kind::Internal,
    };
    kind.caused_by(error)
}
