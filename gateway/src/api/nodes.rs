//! Nodes and health: answered from what the gateway knows.

use axum::{http::StatusCode, response::Response};
use lease::{api::NodeView, problem::Kind};
use types::{forward::Problem, ids::NodeId, node::Offer};

use super::{bodies::Health, json_response};
use crate::service::{Gateway, now};

pub(super) fn health(gateway: &Gateway) -> Response {
    let members = gateway.overlay.members().len();
    let nodes = gateway.directory().offers(now()).len();
    let (status, node) = ("ok".to_owned(), gateway.overlay.node_id());
    json_response(StatusCode::OK, &Health { status, gateway: node, members, nodes })
}

pub(super) fn list(gateway: &Gateway) -> Response {
    let offers = gateway.directory().offers(now());
    // The directory is let go of in between: each view takes it again.
    let views: Vec<NodeView> =
        offers.into_iter().filter_map(|offer| view(gateway, offer)).collect();
    json_response(StatusCode::OK, &views)
}

pub(super) fn show(gateway: &Gateway, node: NodeId) -> Result<Response, Problem> {
    let offer = gateway.directory().offer(now(), node);
    let view = offer.and_then(|offer| view(gateway, offer)).ok_or_else(|| {
        Kind::NotFound.because(format!("node {node} is not in the overlay now, or offers nothing"))
    })?;
    Ok(json_response(StatusCode::OK, &view))
}

/// Refuses a node that nobody here has heard of: its name is wrong. One that was there and is away is asked, and
/// then cannot be reached.
pub(super) fn known(gateway: &Gateway, node: NodeId) -> Result<(), Problem> {
    let is_member = || gateway.overlay.members().iter().any(|member| member.id == node);
    if gateway.directory().saw(node) || is_member() {
        return Ok(());
    }
    Err(Kind::NotFound.because(format!("this gateway has never seen node {node} in the overlay")))
}

/// Puts an offer and what the overlay knows together; `None` when the node is gone.
fn view(gateway: &Gateway, offer: Offer) -> Option<NodeView> {
    let member = gateway.overlay.members().into_iter().find(|member| member.id == offer.node)?;
    let attestation = gateway.directory().attestation(offer.node).cloned();
    let heard = member.last_heard.as_secs();
    Some(NodeView { attestation, ..NodeView::new(offer, member.addresses, heard) })
}
