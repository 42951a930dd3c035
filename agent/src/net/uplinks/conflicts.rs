//! What is done when other hosts have an uplink's IPv4 addresses.
//!
//! An address of a lease is declined, and the server asked for another. One of the configuration is kept, and
//! told. So is the address that a server gives after [`MAX_DECLINES`] others: a router that answers every
//! question (proxy ARP), or somebody who wants the node to have no address, would take each of them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use super::{
    guard::{Found, Guarding},
    task::{Task, Uplink},
};
use crate::net::{
    HardwareAddress,
    conflict::{Claim, Claims, Finding},
    kernel::AddressFacts,
};

/// So many addresses of a server's are declined in a row.
const MAX_DECLINES: u32 = 3;

/// What is known of the other hosts.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    guarding: Option<Guarding>,
    /// Who has addresses that are kept.
    shared: BTreeMap<Ipv4Addr, HardwareAddress>,
    /// What was taken last, and whose it is.
    taken: Option<(Ipv4Addr, HardwareAddress)>,
    /// Addresses that were declined since a lease was last renewed.
    declined: u32,
}

impl Conflicts {
    /// The cable came back, perhaps to another network.
    pub(super) fn handle_carrier(&mut self) {
        self.declined = 0;
        if let Some(guarding) = &self.guarding {
            guarding.carrier_is_back();
        }
    }

    /// A lease was renewed.
    pub(super) fn handle_renewal(&mut self) {
        // One that is kept although another host has it stays so.
        if self.shared.is_empty() {
            self.declined = 0;
        }
    }

    /// An address was declined. Returns what to tell people.
    pub(super) fn handle_decline(&mut self) -> String {
        self.declined = self.declined.saturating_add(1);
        let whose = self.taken.map_or(String::new(), |(address, other)| {
            format!("the address {address}, which the DHCP server gave, is in use by {other}; ")
        });
        format!("{whose}the server was told, and is asked for another")
    }
}

impl Uplink {
    /// Returns the addresses to guard, of those that the kernel has.
    fn claimed(&self, addresses: &[AddressFacts]) -> BTreeMap<Ipv4Addr, Claim> {
        let leased = self.lease.as_ref().map(|lease| lease.address.address());
        let given = match self.conflicts.declined {
            0..MAX_DECLINES => Claim::Given,
            MAX_DECLINES.. => Claim::Kept,
        };
        let own = addresses.iter().filter(|known| known.index == self.facts.index);
        let claimed = own.filter_map(|known| match known.assigned.address {
            IpAddr::V4(address) if self.addressing.addresses.contains(&known.assigned) => {
                Some((address, Claim::Kept))
            }
            IpAddr::V4(address) if leased == Some(address) => Some((address, given)),
            IpAddr::V4(_) | IpAddr::V6(_) => None,
        });
        claimed.collect()
    }

    /// Returns what to do about hosts that have addresses of this uplink.
    fn shared(&self) -> impl Iterator<Item = String> {
        let name = &self.addressing.label;
        self.conflicts.shared.iter().map(move |(address, other)| {
            let is_configured =
                self.addressing.addresses.iter().any(|assigned| assigned.address == *address);
            let remedy = match is_configured {
                true => "give one of them another address",
                false => {
                    "the DHCP server gives it all the same: have it give another, or that host use another"
                }
            };
            format!(
                "{name}: the host with the hardware address {other} has this node's address {address}, too, \
                 so that neither is reached reliably; {remedy}"
            )
        })
    }
}

impl Task {
    /// Has the addresses of each uplink guarded that it has now.
    pub(super) async fn guard(&mut self, addresses: &[AddressFacts]) {
        let is_idle = |uplink: &Uplink| {
            uplink.conflicts.guarding.is_none() && uplink.claimed(addresses).is_empty()
        };
        if self.uplinks.values().all(is_idle) {
            return;
        }
        let links = self.kernel.links().await.unwrap_or_default();
        let own: Vec<HardwareAddress> = links.iter().filter_map(|link| link.hardware).collect();
        for (index, uplink) in &mut self.uplinks {
            let idle = is_idle(uplink);
            let addresses = uplink.claimed(addresses);
            uplink.conflicts.shared.retain(|address, _| addresses.contains_key(address));
            let Some(hardware) = uplink.facts.hardware.filter(|_| !idle) else { continue };
            let claims = Claims { hardware, own: own.clone(), addresses };
            if let Some(guarding) = &uplink.conflicts.guarding {
                guarding.claim(claims);
                continue;
            }
            match Guarding::start(*index, claims, self.send_found.clone()) {
                Ok(guarding) => uplink.conflicts.guarding = Some(guarding),
                // Tried again at the next look.
                Err(error) => {
                    tracing::debug!(interface = uplink.facts.name, %error, "addresses not guarded");
                }
            }
        }
    }

    pub(super) fn handle_found(&mut self, found: &Found) {
        let Found { index, address, finding } = *found;
        let Some(uplink) = self.uplinks.get_mut(&index) else { return };
        let interface = &uplink.facts.name;
        match finding {
            Finding::Lost(other) => {
                tracing::warn!(interface, %address, %other, "another host has the address");
                uplink.conflicts.taken = Some((address, other));
                if let Some(client) = &uplink.client {
                    client.conflict(address);
                }
            }
            Finding::Shared(other) => {
                tracing::warn!(interface, %address, %other, "another host has the address, too");
                uplink.conflicts.shared.insert(address, other);
            }
            Finding::Alone => {
                tracing::info!(interface, %address, "no other host has the address any longer");
                uplink.conflicts.shared.remove(&address);
            }
        }
    }

    /// Returns what to do about other hosts that have the node's addresses.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = String> {
        self.uplinks.values().flat_map(Uplink::shared)
    }
}
