//! What renters ask of machines: checked as far as the gateway can, forwarded as it came, and
//! answered once for each idempotency key.

use std::sync::Arc;

use axum::{
    http::{HeaderValue, StatusCode},
    response::Response,
};
use futures_util::{StreamExt, stream};
use lease::{
    api::{CreateMachine, Image, LeaseRenewal, MAX_CMDLINE},
    document::Lease,
    problem::Kind,
    request::VerifiedRequest,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use types::{
    forward::{ForwardedRequest, ForwardedResponse, Problem},
    ids::{MachineId, NodeId},
};

use super::{content::check_held, forwarding, json_response, kept, leases, parse};
use crate::{
    service::{Gateway, now},
    store::{Answer, Place, StoreError},
};

/// Nodes asked at a time.
const ASKED_AT_ONCE: usize = 16;

pub(super) async fn create(
    gateway: &Arc<Gateway>,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let key = who.idempotency_key.as_deref().ok_or_else(|| {
        Kind::Malformed.because("field idempotency-key is missing; a random one for each machine")
    })?;
    let lease = wanted_lease(gateway, request, who)?;
    let digest = request_digest(request);
    // The same request may be under way; this one then gets its answer.
    let _turn = gateway.creations.take((who.key, key.to_owned())).await;
    if let Some(known) = read(gateway.store.answer(who.key, key))? {
        if known.digest != digest {
            return Err(Kind::KeyReused.because(format!(
                "idempotency key {key:?} was used for another request; use a new one"
            )));
        }
        return Ok(forwarding::response(known.response));
    }
    let response = forwarding::ask(gateway, lease.node, request).await?;
    // A refusal is not the node's last word: the next attempt may go better, and the node knows
    // the key too.
    if response.status < 300 {
        let place = Place { node: lease.node, renter: who.key };
        let answer = Answer { digest, at: now(), response: response.clone() };
        let (renter, key) = (who.key, key.to_owned());
        kept(gateway, move |store| store.put_created(lease.id, &place, renter, &key, &answer))
            .await?;
        leases::remember(gateway, &lease).await?;
    }
    Ok(forwarding::response(response))
}

/// Checks what can be checked here, so that mistakes are told without the node.
fn wanted_lease(
    gateway: &Gateway,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Lease, Problem> {
    let wanted: CreateMachine = parse(&request.body)?;
    let lease = leases::check(gateway, &wanted.lease, who)?;
    if wanted.image.cmdline.len() > MAX_CMDLINE {
        return Err(Kind::Unprocessable
            .because(format!("the kernel command line has more than {MAX_CMDLINE} bytes")));
    }
    let Image { kernel, initrd, disk, cmdline: _ } = wanted.image;
    for content in [Some(kernel), initrd, disk].into_iter().flatten() {
        check_held(gateway, who.key, content)
            .map_err(|absent| Kind::Unprocessable.because(absent.detail))?;
    }
    Ok(lease)
}

/// Forwards a later lease and, when the node took it, keeps the renter's content for as long.
pub(super) async fn renew(
    gateway: &Arc<Gateway>,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let lease = leases::check(gateway, &parse::<LeaseRenewal>(&request.body)?.lease, who)?;
    let response = act(gateway, machine, request, who).await?;
    if response.status().is_success() {
        leases::remember(gateway, &lease).await?;
    }
    Ok(response)
}

pub(super) async fn act(
    gateway: &Arc<Gateway>,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let nodes = forwarding::candidates(gateway, machine)?;
    let searching = nodes.len() > 1;
    let mut answers = ask_all(gateway, nodes, request);
    let mut last = None;
    while let Some((node, answer)) = answers.next().await {
        match answer {
            Ok(answer) if answer.status == 404 => {
                last = Some(Ok(answer));
            }
            Ok(answer) => {
                if searching && answer.status < 300 {
                    let place = Place { node, renter: who.key };
                    kept(gateway, move |store| store.put_place(machine, &place)).await?;
                }
                return Ok(forwarding::response(answer));
            }
            Err(problem) => last = Some(last.unwrap_or(Err(problem))),
        }
    }
    match last {
        Some(Ok(answer)) => Ok(forwarding::response(answer)),
        Some(Err(problem)) => Err(problem),
        None => Err(Kind::NotFound.because(format!("no node here has machine {machine}"))),
    }
}

/// Puts the lists of all nodes together. Nodes that did not answer are named in a field.
pub(super) async fn list(
    gateway: &Arc<Gateway>,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let mut nodes = read(gateway.store.nodes_of(who.key))?;
    nodes.extend(gateway.providers());
    nodes.sort_unstable();
    nodes.dedup();
    let mut answers = ask_all(gateway, nodes, request);
    let (mut machines, mut silent) = (Vec::<Value>::new(), Vec::new());
    while let Some((node, answer)) = answers.next().await {
        let list = answer.ok().filter(|answer| answer.status == 200);
        match list.and_then(|answer| serde_json::from_slice::<Vec<Value>>(&answer.body).ok()) {
            Some(list) => machines.extend(list),
            None => silent.push(node.to_string()),
        }
    }
    machines.sort_by_key(|machine| machine["id"].to_string());
    let mut response = json_response(StatusCode::OK, &machines);
    if let (false, Ok(value)) = (silent.is_empty(), HeaderValue::try_from(silent.join(" "))) {
        response.headers_mut().insert("holdfast-unreachable-nodes", value);
    }
    Ok(response)
}

fn ask_all<'a>(
    gateway: &'a Gateway,
    nodes: Vec<NodeId>,
    request: &'a ForwardedRequest,
) -> impl StreamExt<Item = (NodeId, Result<ForwardedResponse, Problem>)> + Unpin + 'a {
    let ask = move |node| async move { (node, forwarding::ask(gateway, node, request).await) };
    Box::pin(stream::iter(nodes).map(ask).buffer_unordered(ASKED_AT_ONCE))
}

fn read<T>(result: Result<T, StoreError>) -> Result<T, Problem> {
    result.map_err(|error| Kind::Internal.caused_by(&error))
}

fn request_digest(request: &ForwardedRequest) -> String {
    let mut hash = Sha256::new();
    for part in [request.method.as_bytes(), request.target.as_bytes(), &request.body] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    types::hex::encode(&hash.finalize())
}
