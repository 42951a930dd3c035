//! Default routes that the kernel made of router advertisements. Thin: it decides nothing.

use std::net::Ipv6Addr;

use netlink_packet_route::{
    AddressFamily,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol},
};

use super::{Kernel, KernelError, absent_is_fine, answered, failed};

/// A default route through a router that advertised itself.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::net) struct RouterRoute {
    pub(in crate::net) index: u32,
    pub(in crate::net) router: Ipv6Addr,
    /// As the kernel told it, to delete it.
    message: RouteMessage,
}

impl Kernel {
    /// Returns those of all interfaces.
    pub(in crate::net) async fn router_routes(&self) -> Result<Vec<RouterRoute>, KernelError> {
        let found = self.routes(AddressFamily::Inet6).await?;
        Ok(found.into_iter().filter_map(RouterRoute::read).collect())
    }

    /// Deletes one. The router's next advertisement makes it anew.
    pub(in crate::net) async fn delete_router_route(
        &self,
        route: &RouterRoute,
    ) -> Result<(), KernelError> {
        let done = answered(self.handle.route().del(route.message.clone()).execute()).await;
        let RouterRoute { index, router, .. } = route;
        absent_is_fine(done.map_err(failed(|| format!("pass over {router} on interface {index}"))))
    }
}

impl RouterRoute {
    /// `None` when it is another route.
    fn read(message: RouteMessage) -> Option<Self> {
        let header = &message.header;
        let is_advertised = header.table == RouteHeader::RT_TABLE_MAIN
            && header.protocol == RouteProtocol::Ra
            && header.destination_prefix_length == 0;
        let (mut index, mut router) = (None, None);
        for attribute in &message.attributes {
            #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
            match attribute {
                RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => router = Some(*gateway),
                RouteAttribute::Oif(found) => index = Some(*found),
                _ => {}
            }
        }
        is_advertised.then_some(())?;
        Some(Self { index: index?, router: router?, message })
    }
}
