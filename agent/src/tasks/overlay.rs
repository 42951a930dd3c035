//! The overlay's inbox and the node's offers: what arrives is handed to `control`, one task each.

use std::{net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use lease::problem::Kind;
use overlay::{Inbox, MemberEvent, Overlay};
use tokio::sync::{Notify, Semaphore, watch};
use types::{
    forward::ForwardedRequest,
    ids::NodeId,
    node::Offer,
    units::{Mebibytes, UnixSeconds},
};

use crate::{
    control::{Control, answers},
    events::Event,
    inventory::rules,
    machines::keeper::Snapshot,
    net::{Carrier, NetworkStatus},
};

/// Requests answered at the same time; more wait in the overlay's queue.
const MAX_REQUESTS: usize = 32;

/// How often an unchanged offer is repeated.
const OFFER_INTERVAL: Duration = Duration::from_secs(10);

/// An offer that is not repeated for this long counts no more: three were lost.
const OFFER_LIFE_S: u64 = 35;

/// Changes within this time make one offer.
const OFFER_PAUSE: Duration = Duration::from_millis(200);

/// Returns what the node offers.
pub fn offer(node: NodeId, name: &str, now: UnixSeconds, snapshot: &Snapshot) -> Offer {
    Offer {
        node,
        name: name.to_owned(),
        release: crate::service::release(),
        issued: now,
        expires: now.plus(OFFER_LIFE_S),
        vcpus: snapshot.free.vcpus,
        memory_mib: Mebibytes(snapshot.free.memory_mib),
        disk_mib: Mebibytes(snapshot.disk_mib),
        devices: rules::offered(&snapshot.devices),
    }
}

/// Serves what arrives until the overlay ends, and says when the first member is found.
pub async fn serve(
    mut inbox: Inbox,
    overlay: Overlay,
    control: Control,
    first_member: Arc<Notify>,
) {
    let requests = Arc::new(Semaphore::new(MAX_REQUESTS));
    loop {
        tokio::select! {
            Some(request) = inbox.requests.recv() => {
                let Ok(permit) = Arc::clone(&requests).acquire_owned().await else { return };
                let control = control.clone();
                tokio::spawn(async move {
                    let answer = match serde_json::from_slice::<ForwardedRequest>(&request.body) {
                        Ok(forwarded) => control.answer(request.from, &forwarded).await,
                        Err(error) => answers::problem(&Kind::Malformed.because(error)),
                    };
                    let bytes = serde_json::to_vec(&answer).unwrap_or_default();
                    request.reply(Bytes::from(bytes));
                    drop(permit);
                });
            }
            Some(stream) = inbox.streams.recv() => {
                // It has a place among its opener's, and then among its renter's.
                tokio::spawn(control.clone().serve_stream(stream));
            }
            // Other nodes' offers are for gateways.
            Some(_) = inbox.broadcasts.recv() => {}
            Some(event) = inbox.events.recv() => match event {
                MemberEvent::Joined(_) | MemberEvent::Left(_) | MemberEvent::Died(_) => {
                    let count = overlay.members().len();
                    eprintln!("{}", Event::OverlayMembers { count });
                    if count == 1 {
                        first_member.notify_one();
                    }
                }
            },
            else => return,
        }
    }
}

/// Tells the overlay when a node that reaches nobody has a new way to somebody.
pub async fn follow_network(overlay: Overlay, mut network: watch::Receiver<NetworkStatus>) {
    let mut known = Vec::new();
    loop {
        let ways = ways(&network.borrow_and_update());
        let has_new = ways.iter().any(|way| !known.contains(way));
        known = ways;
        if has_new && overlay.members().is_empty() {
            overlay.network_changed();
        }
        if network.changed().await.is_err() {
            return;
        }
    }
}

/// Returns the addresses from which others may be reached now, with their interfaces.
fn ways(network: &NetworkStatus) -> Vec<(u32, IpAddr)> {
    let connected = network.interfaces.iter().filter(|one| one.carrier == Carrier::Up);
    let addresses = connected
        .flat_map(|one| one.addresses.iter().map(|assigned| (one.index, assigned.address)));
    addresses.collect()
}

/// Publishes offers: at every change, when the first member is found, and from time to time.
pub async fn publish(overlay: Overlay, control: Control, first_member: Arc<Notify>) {
    let mut snapshot = control.snapshot();
    let mut said = None;
    loop {
        let offer = control.offer();
        let free = offer
            .devices
            .iter()
            .filter(|device| device.state == types::node::DeviceState::Free)
            .count();
        let summary = (free, offer.vcpus, offer.memory_mib.0);
        let sent = serde_json::to_vec(&offer)
            .map_err(|error| error.to_string())
            .and_then(|bytes| overlay.broadcast(bytes.into()).map_err(|error| error.to_string()));
        match sent {
            Ok(()) if said != Some(summary) => {
                let (devices_free, vcpus, memory_mib) = summary;
                eprintln!("{}", Event::Offered { devices_free, vcpus, memory_mib });
                said = Some(summary);
            }
            Ok(()) => {}
            Err(reason) => eprintln!("{}", Event::Trouble { place: "offer", reason }),
        }
        tokio::time::sleep(OFFER_PAUSE).await;
        tokio::select! {
            changed = snapshot.changed() => if changed.is_err() { return },
            // Whoever was not there yet did not hear it.
            () = first_member.notified() => {}
            () = tokio::time::sleep(OFFER_INTERVAL) => {}
        }
    }
}
