//! What leases and the configuration say, told to the kernel.

use std::{net::IpAddr, time::Instant};

use types::uplinks::Ipv4Source;

use super::task::{Applied, Task, told};
use crate::net::{
    AssignedAddress,
    dhcp::client::{Event, Lease, Loss},
    dhcp6::client as dhcp6,
    kernel::{self, AddressFacts, KernelError, Route},
};

/// `INFINITY_LIFE_TIME`.
const EVER: u32 = u32::MAX;

/// The MTU that a server said, or what the card can do, if that is less.
fn possible(said: u16, most: Option<u32>) -> u32 {
    u32::from(said).min(most.unwrap_or(u32::MAX))
}

impl Task {
    pub(super) async fn handle_event(
        &mut self,
        index: u32,
        event: Event,
    ) -> Result<(), KernelError> {
        let Some(uplink) = self.uplinks.get_mut(&index) else { return Ok(()) };
        let name = uplink.facts.name.clone();
        match event {
            Event::Leased(lease) => {
                tracing::info!(interface = name, address = %lease.address, "DHCP lease");
                let before = uplink.lease.replace(lease.clone());
                if before.is_some_and(|before| before.address == lease.address) {
                    uplink.conflicts.handle_renewal();
                }
                uplink.applied = Applied::InPart;
                self.last_error = None;
                self.apply_lease(index, &lease).await
            }
            Event::Lost(loss) => {
                let why: &str = match loss {
                    Loss::Expired => "the DHCP lease ended and no server renewed it",
                    Loss::Refused => "the DHCP server withdrew the address",
                    Loss::Taken => &uplink.conflicts.handle_decline(),
                };
                tracing::warn!(interface = name, why, "DHCP lease lost");
                uplink.lease = None;
                self.last_error = Some(format!("{name}: {why}"));
                self.sync_routes(index).await?;
                for address in self.ipv4_of(index).await? {
                    self.kernel.delete_address(&address).await?;
                }
                Ok(())
            }
        }
    }

    pub(super) async fn handle_event6(
        &mut self,
        index: u32,
        event: dhcp6::Event,
    ) -> Result<(), KernelError> {
        let Some(uplink) = self.uplinks.get_mut(&index) else { return Ok(()) };
        let name = uplink.facts.name.clone();
        let before = uplink.lease6.take();
        let lease = match event {
            dhcp6::Event::Leased(lease) => {
                self.last_error = None;
                Some(lease)
            }
            dhcp6::Event::Lost => {
                let why = match &before {
                    Some(_) => "the DHCPv6 lease is lost",
                    None => "the DHCPv6 server grants nothing, and is asked again",
                };
                self.last_error = Some(format!("{name}: {why}"));
                None
            }
        };
        let addresses: Vec<_> = lease.iter().flat_map(|lease| lease.addresses.clone()).collect();
        uplink.lease6 = lease;
        let now = Instant::now();
        let left = |end: Option<Instant>| match end {
            // Rounded up: the client is the one that decides.
            Some(end) => {
                u32::try_from(end.saturating_duration_since(now).as_secs() + 1).unwrap_or(EVER)
            }
            None => EVER,
        };
        for leased in &addresses {
            let assigned = AssignedAddress { address: leased.address.into(), prefix: 128 };
            let (preferred, valid) = (left(leased.preferred_until), left(leased.valid_until));
            self.kernel.add_granted_address(index, assigned, preferred.min(valid), valid).await?;
            tracing::info!(interface = name, address = %leased.address, "DHCPv6 lease");
        }
        let gone = before.iter().flat_map(|lease| &lease.addresses);
        let gone: Vec<IpAddr> = gone
            .filter(|old| addresses.iter().all(|leased| leased.address != old.address))
            .map(|old| old.address.into())
            .collect();
        for known in self.kernel.addresses().await? {
            if known.index == index && gone.contains(&known.assigned.address) {
                self.kernel.delete_address(&known).await?;
            }
        }
        Ok(())
    }

    async fn apply_lease(&mut self, index: u32, lease: &Lease) -> Result<(), KernelError> {
        let address = lease.address.address();
        let assigned = AssignedAddress { address: address.into(), prefix: lease.address.length() };
        let left = lease.expires.map(|end| end.saturating_duration_since(Instant::now()));
        // Rounded up: the client is the one that decides.
        let valid = left.map(|left| u32::try_from(left.as_secs() + 1).unwrap_or(u32::MAX));
        let uplink = self.uplinks.get(&index);
        let configured = uplink.and_then(|uplink| uplink.addressing.mtu);
        let most = uplink.and_then(|uplink| uplink.facts.max_mtu);
        if let (Some(said), None) = (lease.mtu, configured) {
            // An address with another MTU than the network's is worth more than none.
            if let Err(error) = self.kernel.set_up(index, Some(possible(said, most))).await {
                self.last_error = Some(told(&error));
            }
        }
        self.kernel.add_address(index, assigned, valid).await?;
        let others = self.ipv4_of(index).await?;
        let others: Vec<_> =
            others.into_iter().filter(|known| known.assigned != assigned).collect();
        for other in &others {
            self.kernel.delete_address(other).await?;
        }
        // Where secondary addresses are not promoted, it went with the first of its subnet, and routes
        // with it.
        if !others.is_empty() {
            self.kernel.add_address(index, assigned, valid).await?;
            self.forget_routes(index);
        }
        self.finish(index).await
    }

    /// Gives the interface the addresses that are configured, and takes away others of their
    /// families.
    async fn configure(&mut self, index: u32) -> Result<(), KernelError> {
        let Some(uplink) = self.uplinks.get(&index) else { return Ok(()) };
        let wanted = uplink.addressing.addresses.clone();
        let listens = uplink.addressing.listens();
        let static4 = uplink.addressing.ipv4 != Ipv4Source::Dhcp;
        for address in &wanted {
            self.kernel.add_address(index, *address, None).await?;
        }
        let mut is_fewer = false;
        for known in self.kernel.addresses().await? {
            let stale = match known.assigned.address {
                IpAddr::V4(address) => static4 && !address.is_link_local(),
                IpAddr::V6(address) => !listens && !address.is_unicast_link_local(),
            };
            if known.index == index && stale && !wanted.contains(&known.assigned) {
                self.kernel.delete_address(&known).await?;
                is_fewer = true;
            }
        }
        // Where secondary addresses are not promoted, some went with the first of their subnet, and
        // routes with them.
        if is_fewer {
            for address in &wanted {
                self.kernel.add_address(index, *address, None).await?;
            }
            self.forget_routes(index);
        }
        self.finish(index).await
    }

    /// Has every wanted route added anew; the kernel may have deleted some by itself.
    fn forget_routes(&mut self, index: u32) {
        if let Some(uplink) = self.uplinks.get_mut(&index) {
            uplink.routes.clear();
        }
    }

    /// Makes the routes that go with an interface's addresses, after which the kernel knows all.
    async fn finish(&mut self, index: u32) -> Result<(), KernelError> {
        self.sync_routes(index).await?;
        self.delete_earlier_routes(index).await?;
        if let Some(uplink) = self.uplinks.get_mut(&index) {
            uplink.applied = Applied::Whole;
        }
        Ok(())
    }

    /// Deletes the routes that an earlier agent made and that are not wanted. With another metric they
    /// stand beside the wanted ones, and an uplink whose gateway is silent would be preferred by them.
    async fn delete_earlier_routes(&self, index: u32) -> Result<(), KernelError> {
        let Some(uplink) = self.uplinks.get(&index) else { return Ok(()) };
        // Until there is a lease, what an earlier one gave is better than nothing.
        let waits = uplink.addressing.ipv4 == Ipv4Source::Dhcp && uplink.lease.is_none();
        for made in self.kernel.made_routes(index).await? {
            let is_kept = waits && made.route.to.is_ipv4();
            if !is_kept && !uplink.routes.contains(&made.route) {
                tracing::info!(interface = uplink.facts.name, route = ?made.route, "not wanted");
                self.kernel.delete_made_route(&made).await?;
            }
        }
        Ok(())
    }

    /// Tells the kernel what it does not know yet: of new uplinks, and what it did not take before.
    pub(super) async fn apply_again(&mut self) -> Result<(), KernelError> {
        let pending = self.uplinks.iter().filter(|(_, uplink)| uplink.applied == Applied::InPart);
        let pending: Vec<(u32, Option<Lease>)> =
            pending.map(|(index, uplink)| (*index, uplink.lease.clone())).collect();
        let mut failure = None;
        for (index, lease) in pending {
            let applied = match lease {
                Some(lease) => match self.apply_lease(index, &lease).await {
                    // IPv6 may be configured beside it.
                    Ok(()) => self.configure(index).await,
                    refused => refused,
                },
                None => self.configure(index).await,
            };
            // One uplink's trouble is not others'.
            failure = failure.or(applied.err());
        }
        failure.map_or(Ok(()), Err)
    }

    /// Makes the interface's routes those that are wanted now. A route that the kernel refuses keeps no
    /// other out; it is tried again with the next look.
    ///
    /// # Errors
    ///
    /// The first refusal.
    pub(super) async fn sync_routes(&mut self, index: u32) -> Result<(), KernelError> {
        let Some(uplink) = self.uplinks.get(&index) else { return Ok(()) };
        let standing = uplink.watch.standing();
        let wanted = uplink.addressing.wanted_routes(index, uplink.lease.as_ref(), standing);
        let old = uplink.routes.clone();
        let (mut present, mut failure) = (Vec::new(), None);
        for route in wanted {
            let added = match old.contains(&route) {
                true => Ok(()),
                false => self.kernel.add_route(&route).await,
            };
            match added {
                Ok(()) => present.push(route),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let stale: Vec<Route> = old.into_iter().filter(|old| !present.contains(old)).collect();
        for route in stale {
            if let Err(error) = self.kernel.delete_route(&route).await {
                present.push(route);
                failure = failure.or(Some(error));
            }
        }
        if let Some(uplink) = self.uplinks.get_mut(&index) {
            uplink.routes = present;
            if failure.is_some() {
                uplink.applied = Applied::InPart;
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Takes from an interface what an uplink had there. Errors tell that it has gone by itself.
    pub(super) async fn release(&mut self, index: u32) {
        let Some(uplink) = self.uplinks.remove(&index) else { return };
        tracing::info!(interface = uplink.facts.name, "no longer an uplink as it was");
        for route in &uplink.routes {
            let _ = self.kernel.delete_route(route).await;
        }
        for known in self.kernel.addresses().await.unwrap_or_default() {
            if known.index == index {
                let _ = self.kernel.delete_address(&known).await;
            }
        }
        // What routers advertised goes too, and a link-local address comes back.
        for value in ["1", "0"] {
            let name = format!("ipv6/conf/{}/disable_ipv6", uplink.facts.name);
            let _ = kernel::set(&name, value);
        }
    }

    /// The IPv4 addresses of an interface, but for those it gave itself.
    pub(super) async fn ipv4_of(&self, index: u32) -> Result<Vec<AddressFacts>, KernelError> {
        let mut all = self.kernel.addresses().await?;
        all.retain(|known| match known.assigned.address {
            IpAddr::V4(address) => known.index == index && !address.is_link_local(),
            IpAddr::V6(_) => false,
        });
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_says_more_than_the_card_can_do_costs_no_address() {
        assert_eq!(possible(9000, Some(1500)), 1500);
        assert_eq!(possible(9000, Some(9194)), 9000);
        assert_eq!(possible(1400, None), 1400);
    }
}
