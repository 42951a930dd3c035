//! Passes over routers that are silent, and asks those that are back to advertise themselves.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddrV6},
    time::Instant,
};

use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with,
    sockopt::set_ipv6_multicast_hops,
};

use super::{addressing::Standing, task::Task};
use crate::net::{Carrier, kernel::KernelError};

/// RFC 4861 §4.1: a router solicitation without options, to all routers of the link, and its hop limit.
const SOLICITATION: [u8; 8] = [133, 0, 0, 0, 0, 0, 0, 0];
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
const HOPS: u32 = 255;

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
                && let Err(error) = solicit(*index)
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

/// Asks the routers of a link to advertise themselves.
fn solicit(index: u32) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET6, SocketType::RAW, flags, Some(ipproto::ICMPV6))?;
    set_ipv6_multicast_hops(&socket, HOPS)?;
    let to = SocketAddrV6::new(ALL_ROUTERS, 0, 0, index);
    sendto(&socket, &SOLICITATION, SendFlags::empty(), &to)?;
    Ok(())
}
