//! Leases that renters show: they open uploading, and say on which node a machine is. No node is
//! believed that, and none is asked that no lease names.

use std::sync::Arc;

use axum::{http::StatusCode, response::Response};
use lease::{
    document::{Envelope, Lease},
    problem::Kind,
    request::VerifiedRequest,
};
use types::{
    forward::{ForwardedRequest, Problem},
    ids::{MachineId, NodeId},
};

use super::{bodies::StandingLease, json_response, kept, object};
use crate::{
    service::Gateway,
    store::{RETAIN_S, Standing},
};

/// Takes a lease that its renter shows. One that ended still tells where the machine was.
pub(super) async fn show(
    gateway: &Arc<Gateway>,
    id: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let lease = check(gateway, &object::<Envelope>(&request.body)?, who)?;
    if lease.id != id {
        let detail = format!("the path names lease {id}, the body holds lease {}", lease.id);
        return Err(Kind::Unprocessable.because(detail));
    }
    let end = lease.end;
    remember(gateway, &lease).await?;
    let store = |error| Kind::Internal.caused_by(&error);
    let standing = gateway.store.standing(who.key, id).map_err(store)?;
    let standing = standing.unwrap_or(Standing { serial: lease.serial, end, node: lease.node });
    let last = gateway.store.last_end(who.key).map_err(store)?.unwrap_or(end);
    let answer = StandingLease {
        id,
        serial: standing.serial,
        end: standing.end,
        content_until: last.plus(RETAIN_S),
        content_limit: gateway.max_per_renter,
        content_max_bytes: gateway.content.max_item(),
        content_used: gateway.store.used(who.key).map_err(store)?,
    };
    Ok(json_response(StatusCode::OK, &answer))
}

/// Checks that enough keys signed a lease, and that it is the signer's.
pub(super) fn check(
    gateway: &Gateway,
    envelope: &Envelope,
    who: &VerifiedRequest,
) -> Result<Lease, Problem> {
    let lease =
        envelope.unverified_lease().map_err(|error| Kind::Unprocessable.caused_by(&error))?;
    if lease.renter != who.key {
        return Err(Kind::Forbidden.because(format!(
            "the lease names the renter {}, the request is signed by {}",
            lease.renter, who.key
        )));
    }
    gateway.authority.verify(envelope).map_err(|error| Kind::LeaseRefused.caused_by(&error))?;
    Ok(lease)
}

/// Returns the node of the signer's machine.
pub(super) fn node(
    gateway: &Gateway,
    machine: MachineId,
    who: &VerifiedRequest,
) -> Result<NodeId, Problem> {
    let known = gateway.store.standing(who.key, machine);
    let known = known.map_err(|error| Kind::Internal.caused_by(&error))?;
    known.map(|standing| standing.node).ok_or_else(|| {
        Kind::NotFound.because(format!(
            "this gateway knows no lease {machine} of your key; if there is one, show it with \
             PUT /v1/leases/{machine}, or `holdfast lease register FILE`"
        ))
    })
}

/// Keeps what follows from a lease that was checked. A lower serial changes nothing.
pub(super) async fn remember(gateway: &Arc<Gateway>, lease: &Lease) -> Result<(), Problem> {
    let (renter, id) = (lease.renter, lease.id);
    let standing = Standing { serial: lease.serial, end: lease.end, node: lease.node };
    kept(gateway, move |store| store.put_lease(renter, id, &standing)).await
}
