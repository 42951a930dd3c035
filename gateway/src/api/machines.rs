//! What renters ask of machines: checked as far as the gateway can, forwarded as it came, and
//! answered once for each idempotency key.

use std::sync::Arc;

use axum::{
    http::{HeaderValue, StatusCode},
    response::Response,
};
use futures_util::{StreamExt, stream};
use lease::{
    api::{CreateMachine, LeaseRenewal, Machine},
    document::Lease,
    hardware::{Attach, DiskWanted},
    problem::Kind,
    request::VerifiedRequest,
};
use sha2::{Digest, Sha256};
use types::{
    forward::{ForwardedRequest, ForwardedResponse, Problem},
    ids::{MachineId, NodeId},
    units::Mebibytes,
};

use super::{content::check_held, forwarding, json_response, kept, leases, object};
use crate::{
    service::{Gateway, now},
    store::{Answer, StoreError},
};

/// Nodes asked at a time.
const ASKED_AT_ONCE: usize = 16;
/// Bytes.
const MIB: u64 = 1 << 20;

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
        let mut response = forwarding::response(known.response);
        response.headers_mut().insert(forwarding::REPLAYED, HeaderValue::from_static("true"));
        return Ok(response);
    }
    attested(gateway, lease.node)?;
    // Known before the node is asked: whatever happens then, the machine can be found.
    leases::remember(gateway, &lease).await?;
    let response = forwarding::ask(gateway, lease.node, request).await?;
    // A refusal is not the node's last word: the next attempt may go better, and the node knows
    // the key too.
    if response.status < 300 {
        let answer = Answer { digest, at: now(), response: response.clone() };
        let (renter, key) = (who.key, key.to_owned());
        kept(gateway, move |store| store.put_answer(renter, &key, &answer)).await?;
    }
    Ok(forwarding::response(response))
}

/// Refuses a node that did not prove its release, where that is required.
fn attested(gateway: &Gateway, node: NodeId) -> Result<(), Problem> {
    let found = gateway.directory().attestation(node).cloned();
    match gateway.attestation.objection(found.as_ref()) {
        None => Ok(()),
        Some(reason) => Err(Kind::Unavailable.because(format!(
            "node {node} has not proved which release it runs, which this gateway requires: {reason}"
        ))),
    }
}

/// Checks what can be checked here, so that mistakes are told without the node.
fn wanted_lease(
    gateway: &Gateway,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Lease, Problem> {
    let wanted: CreateMachine = object(&request.body)?;
    let lease = leases::check(gateway, &wanted.lease, who)?;
    wanted.image.check().map_err(|error| Kind::Unprocessable.because(error.to_string()))?;
    let hardware = wanted.hardware.check(&lease.shape);
    hardware.map_err(|error| Kind::Unprocessable.because(error.to_string()))?;
    for content in wanted.image.contents() {
        let length = check_held(gateway, who.key, content)
            .map_err(|absent| Kind::Unprocessable.because(absent.detail))?;
        if wanted.image.disk == Some(content) {
            let disk = wanted.hardware.own_disk(&lease.shape);
            check_disk(length, disk, lease.shape.disk_mib)?;
        }
    }
    Ok(lease)
}

/// Checks that an image of so many bytes fits on a machine's own disk: the machine would else fail once its lease
/// is used.
fn check_disk(image: u64, disk: Mebibytes, granted: Mebibytes) -> Result<(), Problem> {
    let needed = image.div_ceil(MIB);
    let what = if granted.0 == 0 {
        format!(
            "image.disk names a disk's content, and the lease grants no disk: ask for a lease with disk_mib of at \
             least {needed}"
        )
    } else if needed > granted.0 {
        format!(
            "the image has {image} bytes, and the lease grants {} MiB of disk: ask for a lease with disk_mib of at \
             least {needed}, or upload a smaller image",
            granted.0
        )
    } else if needed > disk.0 {
        format!(
            "the image has {image} bytes, and hardware.disk_mib is {}: {needed} to {} are possible with it",
            disk.0, granted.0
        )
    } else {
        return Ok(());
    };
    Err(Kind::Unprocessable.because(what))
}

/// Forwards a later lease and, when the node took it, keeps the renter's content for as long.
pub(super) async fn renew(
    gateway: &Arc<Gateway>,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let lease = leases::check(gateway, &object::<LeaseRenewal>(&request.body)?.lease, who)?;
    let response = act(gateway, machine, request, who).await?;
    if response.status().is_success() {
        leases::remember(gateway, &lease).await?;
    }
    Ok(response)
}

/// Forwards that something is to be attached, when the signer may read what is to be on it.
pub(super) async fn attach(
    gateway: &Arc<Gateway>,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let wanted: Attach = object(&request.body)?;
    wanted.check().map_err(|error| Kind::Unprocessable.because(error.to_string()))?;
    if let Attach::Disk(DiskWanted { name, content: Some(content), size_mib, .. }) = wanted {
        let length = check_held(gateway, who.key, content)
            .map_err(|absent| Kind::Unprocessable.because(absent.detail))?;
        let needed = length.div_ceil(MIB);
        if let Some(size) = size_mib.filter(|size| size.0 < needed) {
            return Err(Kind::Unprocessable.because(format!(
                "what disk {name} is to hold at first has {length} bytes, and size_mib is {}: at least {needed} are \
                 needed, or none for a disk that can only be read",
                size.0
            )));
        }
    }
    act(gateway, machine, request, who).await
}

pub(super) async fn act(
    gateway: &Arc<Gateway>,
    machine: MachineId,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let node = leases::node(gateway, machine, who)?;
    forwarding::ask(gateway, node, request).await.map(forwarding::response)
}

/// Puts the lists of the nodes together that the renter's leases name. Nodes that did not answer
/// are named in a field; what a node says of other nodes or renters does not count.
pub(super) async fn list(
    gateway: &Arc<Gateway>,
    request: &ForwardedRequest,
    who: &VerifiedRequest,
) -> Result<Response, Problem> {
    let nodes = read(gateway.store.nodes_of(who.key, now()))?;
    let mut answers = ask_all(gateway, nodes, request);
    let (mut machines, mut silent) = (Vec::new(), Vec::new());
    while let Some((node, answer)) = answers.next().await {
        let list = answer.ok().filter(|answer| answer.status == 200);
        match list.and_then(|answer| serde_json::from_slice::<Vec<Machine>>(&answer.body).ok()) {
            Some(list) => {
                machines.extend(list.into_iter().filter(|m| m.node == node && m.renter == who.key))
            }
            None => silent.push(node.to_string()),
        }
    }
    machines.sort_by_key(|machine| machine.id);
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
