//! The bridge of machines, over routing netlink. Thin: it decides nothing.
//! Source: Linux `Documentation/networking/bridge.rst`.

use netlink_packet_route::{
    link::InfoBridge,
    neighbour::{NeighbourFlags, NeighbourState},
};
use rtnetlink::{LinkBridge, LinkBridgePort, LinkUnspec};

use super::{Kernel, KernelError, answered, failed};
use crate::net::{HardwareAddress, links::LinkFacts};

/// Name of the bridge, and what its alias says, so that one that somebody else made is left alone.
pub(in crate::net) const BRIDGE: &str = "machines0";
const ALIAS: &str = "holdfast machines";

/// What a port of the bridge is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::net) enum Port {
    /// The provider's network.
    Uplink,
    /// A machine that reaches the uplink only.
    Apart,
    /// A machine that reaches others of the node, too.
    Together,
}

/// Returns the bridge among the interfaces.
pub(in crate::net) fn find(links: &[LinkFacts]) -> Option<&LinkFacts> {
    links.iter().find(|link| link.name == BRIDGE && link.alias == ALIAS)
}

/// Lets ports of our bridge count as interfaces that stand alone: the bridge has no addresses, and
/// whoever wants to know what an uplink is must find it where the configuration puts it.
pub(super) fn hide(links: &mut [LinkFacts]) {
    let Some(index) = find(links).map(|bridge| bridge.index) else { return };
    for link in links.iter_mut().filter(|link| link.controller == Some(index)) {
        link.controller = None;
    }
}

impl Kernel {
    /// Makes the bridge, unless it is there, and returns its index. It is off.
    pub(in crate::net) async fn make_bridge(&self) -> Result<u32, KernelError> {
        if let Some(bridge) = find(&self.links().await?) {
            return Ok(bridge.index);
        }
        // Its only way out is one uplink, so no spanning tree is needed to find loops, and a port
        // forwards at once. Who wants which multicast is the provider's switches' business.
        let message = LinkBridge::new(BRIDGE)
            .append_info_data(InfoBridge::MulticastSnooping(false))
            .append_info_data(InfoBridge::ForwardDelay(0))
            .build();
        let done = answered(self.handle.link().add(message).execute()).await;
        done.map_err(failed(|| format!("make the bridge {BRIDGE}")))?;
        let links = self.links().await?;
        let index = links.iter().find(|link| link.name == BRIDGE).map_or(0, |link| link.index);
        self.set_alias(index, ALIAS).await?;
        Ok(index)
    }

    /// Removes the bridge, if the node made one. Its ports stand alone then.
    pub(in crate::net) async fn remove_bridge(&self) -> Result<(), KernelError> {
        match find(&self.links().await?) {
            Some(bridge) => self.delete_link(bridge.index).await,
            None => Ok(()),
        }
    }

    /// Makes an interface a port of the bridge, if it is none, and sets what passes it.
    pub(in crate::net) async fn plug(
        &self,
        index: u32,
        bridge: u32,
        port: Port,
    ) -> Result<(), KernelError> {
        let plug = LinkUnspec::new_with_index(index).controller(bridge).build();
        let done = answered(self.handle.link().set(plug).execute()).await;
        done.map_err(failed(|| format!("plug interface {index} into the bridge {BRIDGE}")))?;
        let message = LinkBridgePort::new(index);
        let message = match port {
            // Stations are learned where there are many; a machine has one address, which is known.
            Port::Uplink => message.isolated(false).learning(true).flood(true),
            Port::Apart => message.isolated(true).learning(false).flood(false),
            Port::Together => message.isolated(false).learning(false).flood(false),
        };
        let done = answered(self.handle.link().set_port(message.build()).execute()).await;
        done.map_err(failed(|| format!("set interface {index} up as a port of {BRIDGE}")))
    }

    /// Says which hardware address is behind a port, for good: a frame with this source that comes in
    /// elsewhere, reflected or forged, does not move it (`br_fdb_update` in Linux
    /// `net/bridge/br_fdb.c` moves all entries but sticky ones).
    pub(in crate::net) async fn place(
        &self,
        index: u32,
        hardware: HardwareAddress,
    ) -> Result<(), KernelError> {
        let request = self.handle.neighbours().add_bridge(index, &hardware.0);
        // NUD_NOARP is a static entry; a permanent one would be the bridge's own address.
        let flags = NeighbourFlags::Controller | NeighbourFlags::Sticky;
        let request = request.state(NeighbourState::Noarp).flags(flags);
        let done = answered(request.replace().execute()).await;
        done.map_err(failed(|| format!("place {hardware} behind interface {index}")))
    }
}
