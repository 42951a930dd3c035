//! The kernel's interfaces, addresses and routes, over routing netlink, and its settings in
//! `/proc/sys/net`. Thin: it decides nothing.

pub(super) mod bridge;
mod links;
mod notices;
mod routers;
mod shaping;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use futures_util::TryStreamExt;
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressMessage, CacheInfo},
    route::{
        RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
        RouteVia,
    },
};
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};

pub(super) use self::{
    links::Neighbour,
    notices::{Advertisements, Notices},
};
use super::{AssignedAddress, HardwareAddress, Ipv4Prefix};

/// How long the kernel may take to answer: bringing a card up makes some firmware load, and all requests wait
/// for each other. An answer that takes longer was lost, as netlink allows where memory is short (netlink(7)).
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// A connection to the kernel. Ends when the last copy is dropped.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    handle: Handle,
}

/// Why the kernel did not do it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation}")]
pub struct KernelError {
    /// What was to be done.
    pub operation: String,
    /// What the kernel said.
    pub source: Refusal,
}

/// How the kernel did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Refusal {
    #[error(transparent)]
    Said(rtnetlink::Error),
    #[error("the kernel did not answer within {} s", ANSWER_LIMIT.as_secs())]
    Silent,
}

impl KernelError {
    /// Returns whether what was to be deleted is not there, or what was to be added is.
    pub fn is_done_already(&self) -> bool {
        let Refusal::Said(rtnetlink::Error::NetlinkError(error)) = &self.source else {
            return false;
        };
        let done = [libc::EEXIST, libc::ENOENT, libc::ESRCH, libc::ENODEV, libc::EADDRNOTAVAIL];
        done.contains(&-error.raw_code())
    }
}

/// An address on an interface.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AddressFacts {
    pub(super) index: u32,
    pub(super) assigned: AssignedAddress,
    /// As the kernel told it, to delete it.
    pub(super) message: AddressMessage,
}

/// A default route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DefaultRoute {
    pub(super) metric: u32,
    pub(super) gateway: IpAddr,
}

impl Kernel {
    /// Must be called inside a tokio runtime.
    pub(super) fn open() -> io::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        tokio::spawn(connection);
        Ok(Self { handle })
    }

    /// Takes an interface up, with the MTU when one is given.
    pub(super) async fn set_up(&self, index: u32, mtu: Option<u32>) -> Result<(), KernelError> {
        let mut message = LinkUnspec::new_with_index(index).up();
        if let Some(mtu) = mtu {
            message = message.mtu(mtu);
        }
        let done = answered(self.handle.link().set(message.build()).execute()).await;
        done.map_err(failed(|| format!("take interface {index} up")))
    }

    pub(super) async fn set_alias(&self, index: u32, alias: &str) -> Result<(), KernelError> {
        let message = LinkUnspec::new_with_index(index).alias(alias).build();
        let done = answered(self.handle.link().set(message).execute()).await;
        done.map_err(failed(|| format!("name interface {index} {alias:?}")))
    }

    pub(super) async fn delete_link(&self, index: u32) -> Result<(), KernelError> {
        let done = answered(self.handle.link().del(index).execute()).await;
        absent_is_fine(done.map_err(failed(|| format!("delete interface {index}"))))
    }

    pub(super) async fn addresses(&self) -> Result<Vec<AddressFacts>, KernelError> {
        let found = answered(self.handle.address().get().execute().try_collect()).await;
        let messages: Vec<AddressMessage> =
            found.map_err(failed(|| "list the addresses".to_owned()))?;
        Ok(messages.into_iter().filter_map(address_facts).collect())
    }

    /// Adds an address, or renews it. It goes by itself after `valid_s` seconds.
    pub(super) async fn add_address(
        &self,
        index: u32,
        address: AssignedAddress,
        valid_s: Option<u32>,
    ) -> Result<(), KernelError> {
        let AssignedAddress { address, prefix } = address;
        let mut request = self.handle.address().add(index, address, prefix).replace();
        // rtnetlink 0.24 puts a broadcast address of its own into the request, which is right for
        // prefixes of length 0 to 30 only when the host part is all ones; ours is computed.
        if let IpAddr::V4(address) = address {
            let broadcast = Ipv4Prefix::new(address, prefix).map(Ipv4Prefix::broadcast);
            for attribute in &mut request.message_mut().attributes {
                if let (AddressAttribute::Broadcast(slot), Some(broadcast)) = (attribute, broadcast)
                {
                    *slot = broadcast;
                }
            }
        }
        if let Some(valid) = valid_s {
            let mut cache = CacheInfo::default();
            cache.ifa_preferred = valid;
            cache.ifa_valid = valid;
            request.message_mut().attributes.push(AddressAttribute::CacheInfo(cache));
        }
        let done = answered(request.execute()).await;
        done.map_err(failed(|| format!("give interface {index} the address {address}/{prefix}")))
    }

    /// Adds an address that somebody granted, or changes its times, in seconds.
    pub(super) async fn add_granted_address(
        &self,
        index: u32,
        address: AssignedAddress,
        preferred_s: u32,
        valid_s: u32,
    ) -> Result<(), KernelError> {
        let AssignedAddress { address, prefix } = address;
        let mut request = self.handle.address().add(index, address, prefix).replace();
        let mut cache = CacheInfo::default();
        cache.ifa_preferred = preferred_s;
        cache.ifa_valid = valid_s;
        request.message_mut().attributes.push(AddressAttribute::CacheInfo(cache));
        let done = answered(request.execute()).await;
        done.map_err(failed(|| format!("give interface {index} the address {address}/{prefix}")))
    }

    pub(super) async fn delete_address(&self, facts: &AddressFacts) -> Result<(), KernelError> {
        let done = answered(self.handle.address().del(facts.message.clone()).execute()).await;
        let AssignedAddress { address, prefix } = facts.assigned;
        absent_is_fine(done.map_err(failed(|| format!("take the address {address}/{prefix} away"))))
    }

    pub(super) async fn add_route(&self, route: &Route) -> Result<(), KernelError> {
        let done = answered(self.handle.route().add(route.message()).replace().execute()).await;
        done.map_err(failed(|| format!("add {route:?}")))
    }

    pub(super) async fn delete_route(&self, route: &Route) -> Result<(), KernelError> {
        let done = answered(self.handle.route().del(route.message()).execute()).await;
        absent_is_fine(done.map_err(failed(|| format!("delete {route:?}"))))
    }

    /// Returns the routes of the main table that lead out of an interface and that an agent made:
    /// those of the protocols that [`Route`] has.
    pub(super) async fn made_routes(&self, index: u32) -> Result<Vec<MadeRoute>, KernelError> {
        let mut made = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let found = self.routes(family).await?;
            let known = found.into_iter().filter_map(MadeRoute::read);
            made.extend(known.filter(|known| known.route.index == index));
        }
        Ok(made)
    }

    /// Deletes a route as the kernel told it.
    pub(super) async fn delete_made_route(&self, made: &MadeRoute) -> Result<(), KernelError> {
        let done = answered(self.handle.route().del(made.message.clone()).execute()).await;
        absent_is_fine(done.map_err(failed(|| format!("delete {:?}", made.route))))
    }

    async fn routes(&self, family: AddressFamily) -> Result<Vec<RouteMessage>, KernelError> {
        let mut query = RouteMessage::default();
        query.header.address_family = family;
        let found = answered(self.handle.route().get(query).execute().try_collect()).await;
        found.map_err(failed(|| "list the routes".to_owned()))
    }

    /// Returns the default routes, best first.
    pub(super) async fn default_routes(&self) -> Result<Vec<DefaultRoute>, KernelError> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let found = self.routes(family).await?;
            routes.extend(found.iter().filter_map(default_route));
        }
        routes.sort();
        Ok(routes)
    }

    /// Fixes the hardware address of a neighbour, so that nobody can claim its address.
    pub(super) async fn pin_neighbour(
        &self,
        index: u32,
        address: Ipv4Addr,
        hardware: HardwareAddress,
    ) -> Result<(), KernelError> {
        let request = self.handle.neighbours().add(index, address.into());
        let done = answered(request.link_layer_address(&hardware.0).replace().execute()).await;
        done.map_err(failed(|| format!("pin {address} to {hardware} on interface {index}")))
    }
}

/// A route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Route {
    pub(super) to: IpAddr,
    pub(super) prefix: u8,
    /// The link itself when `None`.
    pub(super) gateway: Option<IpAddr>,
    /// Source of what the node sends along it.
    pub(super) source: Option<Ipv4Addr>,
    pub(super) index: u32,
    pub(super) metric: u32,
}

impl Route {
    fn message(&self) -> RouteMessage {
        match self.to {
            IpAddr::V4(to) => {
                let mut builder = RouteMessageBuilder::<Ipv4Addr>::new()
                    .destination_prefix(to, self.prefix)
                    .output_interface(self.index)
                    .protocol(RouteProtocol::Dhcp)
                    .priority(self.metric);
                match self.gateway {
                    // The gateway may lie outside the prefix, as clouds like it.
                    Some(IpAddr::V4(gateway)) => builder = builder.gateway(gateway).onlink(),
                    Some(IpAddr::V6(gateway)) => builder = builder.via(gateway),
                    None => builder = builder.scope(RouteScope::Link),
                }
                if let Some(source) = self.source {
                    builder = builder.pref_source(source);
                }
                builder.build()
            }
            IpAddr::V6(to) => {
                let mut builder = RouteMessageBuilder::<Ipv6Addr>::new()
                    .destination_prefix(to, self.prefix)
                    .output_interface(self.index)
                    .protocol(RouteProtocol::Static)
                    .priority(self.metric);
                if let Some(IpAddr::V6(gateway)) = self.gateway {
                    builder = builder.gateway(gateway).onlink();
                }
                builder.build()
            }
        }
    }
}

/// A route that an agent made, this one or an earlier one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MadeRoute {
    pub(super) route: Route,
    /// As the kernel told it, to delete it.
    message: RouteMessage,
}

impl MadeRoute {
    /// `None` when it is another table's, or nobody's that makes routes as [`Route::message`] does.
    fn read(message: RouteMessage) -> Option<Self> {
        let header = &message.header;
        #[allow(clippy::wildcard_enum_match_arm, reason = "no other family has such routes")]
        let (any, protocol): (IpAddr, _) = match header.address_family {
            AddressFamily::Inet => (Ipv4Addr::UNSPECIFIED.into(), RouteProtocol::Dhcp),
            AddressFamily::Inet6 => (Ipv6Addr::UNSPECIFIED.into(), RouteProtocol::Static),
            _ => return None,
        };
        if header.table != RouteHeader::RT_TABLE_MAIN || header.protocol != protocol {
            return None;
        }
        let prefix = header.destination_prefix_length;
        let (gateway, source, index, metric) = (None, None, 0, 0);
        let mut route = Route { to: any, prefix, gateway, source, index, metric };
        for attribute in &message.attributes {
            #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
            match attribute {
                RouteAttribute::Destination(to) => route.to = plain(to)?,
                RouteAttribute::Gateway(gateway) => route.gateway = plain(gateway),
                RouteAttribute::Via(RouteVia::Inet6(gateway)) => {
                    route.gateway = Some((*gateway).into());
                }
                RouteAttribute::PrefSource(RouteAddress::Inet(source)) => {
                    route.source = Some(*source);
                }
                RouteAttribute::Oif(index) => route.index = *index,
                RouteAttribute::Priority(metric) => route.metric = *metric,
                _ => {}
            }
        }
        Some(Self { route, message })
    }
}

fn plain(address: &RouteAddress) -> Option<IpAddr> {
    #[allow(clippy::wildcard_enum_match_arm, reason = "labels and unknown families are none")]
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

/// Writes a setting below `/proc/sys/net`.
pub(super) fn set(name: &str, value: &str) -> io::Result<()> {
    std::fs::write(format!("/proc/sys/net/{name}"), value)
}

fn address_facts(message: AddressMessage) -> Option<AddressFacts> {
    let find = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| {
        message.attributes.iter().find_map(wanted)
    };
    // On a point-to-point link `Address` is the other end and `Local` is ours.
    #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
    let local = find(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
    let address = local.or_else(|| {
        find(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })?;
    let prefix = message.header.prefix_len;
    let assigned = AssignedAddress { address, prefix };
    Some(AddressFacts { index: message.header.index, assigned, message })
}

fn default_route(message: &RouteMessage) -> Option<DefaultRoute> {
    let is_main = message.header.table == RouteHeader::RT_TABLE_MAIN;
    if !is_main || message.header.destination_prefix_length != 0 {
        return None;
    }
    let mut metric = 0;
    let mut gateway = None;
    for attribute in &message.attributes {
        #[allow(clippy::wildcard_enum_match_arm, reason = "the kernel tells more than we ask")]
        match attribute {
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Gateway(RouteAddress::Inet(address)) => {
                gateway = Some((*address).into())
            }
            RouteAttribute::Gateway(RouteAddress::Inet6(address)) => {
                gateway = Some((*address).into());
            }
            _ => {}
        }
    }
    Some(DefaultRoute { metric, gateway: gateway? })
}

/// Waits for what the kernel says to a request, as long as that may take.
async fn answered<T>(
    request: impl Future<Output = Result<T, rtnetlink::Error>>,
) -> Result<T, Refusal> {
    within(ANSWER_LIMIT, request).await
}

async fn within<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, rtnetlink::Error>>,
) -> Result<T, Refusal> {
    let answer = tokio::time::timeout(limit, request).await;
    answer.map_err(|_| Refusal::Silent)?.map_err(Refusal::Said)
}

fn failed(operation: impl FnOnce() -> String) -> impl FnOnce(Refusal) -> KernelError {
    |source| KernelError { operation: operation(), source }
}

fn absent_is_fine(result: Result<(), KernelError>) -> Result<(), KernelError> {
    match result {
        Err(error) if error.is_done_already() => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_that_was_lost_is_not_waited_for_for_ever() {
        let lost = std::future::pending::<Result<(), rtnetlink::Error>>();
        let refusal = within(Duration::from_millis(1), lost).await.expect_err("nobody answers");
        let error = failed(|| "take interface 3 up".to_owned())(refusal);
        assert!(matches!(error.source, Refusal::Silent) && !error.is_done_already());
        assert_eq!(error.to_string(), "cannot take interface 3 up");
    }
}
