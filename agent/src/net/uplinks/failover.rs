//! Passes over routers that are silent, and asks those that are back to advertise themselves.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Instant,
};

use super::{addressing::Standing, task::Task};
use crate::net::{Carrier, discovery, kernel::KernelError};

impl Task {
    /// Learns which routers there are.
    pub(super) async fn follow_routers(&mut self) -> Result<(), KernelError> {
        let routes = self.kernel.router_routes().await?;
        let now = Instant::now();
        for (index, uplink) in &mut self.uplinks {
            let own = routes.iter().filter(|route| route.index == *index);
            let present: Vec<Ipv6Addr> = own.map(|route| route.router).collect();
            uplink.routers.handle_routes(now, &present);
        }
        Ok(())
    }

    /// Whether there is a choice between routers of IPv6, advertised or configured.
    pub(super) fn has_spare_router(&self) -> bool {
        let advertised = self.uplinks.values().map(|uplink| uplink.routers.watched().len());
        let advertised: usize = advertised.sum();
        let configured = self.uplinks.values().filter(|uplink| uplink.has_ipv6_gateway());
        advertised > 0 && advertised + configured.count() > 1
    }

    /// Asks advertised routers whether they are there, and takes the routes of silent ones away while
    /// another answers.
    pub(super) async fn probe_routers(&mut self) -> Result<(), KernelError> {
        for (index, uplink) in &mut self.uplinks {
            if uplink.facts.carrier == Carrier::Down {
                uplink.routers.handle_no_carrier();
                continue;
            }
            for router in uplink.routers.watched() {
                let found = self.kernel.probe(*index, router.into()).await?;
                uplink.routers.handle_look(router, found);
            }
            if uplink.routers.poll_solicitation()
                && let Err(error) = discovery::open(&uplink.facts.name)
                    .and_then(|socket| discovery::solicit(&socket, *index))
            {
                tracing::debug!(uplink = uplink.addressing.label, %error, "routers not asked");
            }
        }
        let leads_on = self.uplinks.values().any(|uplink| {
            let good = uplink.watch.standing() == Standing::Good;
            uplink.routers.leads_on() || uplink.has_ipv6_gateway() && good
        });
        if !leads_on {
            return Ok(());
        }
        for route in self.kernel.router_routes().await? {
            let Some(uplink) = self.uplinks.get_mut(&route.index) else { continue };
            if uplink.routers.is_silent(route.router) {
                self.kernel.delete_router_route(&route).await?;
                uplink.routers.handle_passed_over(Instant::now(), route.router);
                let (uplink, router) = (&uplink.addressing.label, route.router);
                tracing::warn!(uplink, %router, "the router is silent and passed over");
            }
        }
        Ok(())
    }
}

impl super::task::Uplink {
    fn has_ipv6_gateway(&self) -> bool {
        self.gateway().is_some_and(|gateway| matches!(gateway, IpAddr::V6(_)))
    }
}
