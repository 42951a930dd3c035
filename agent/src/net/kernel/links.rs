//! Bonds, VLANs and neighbours, over routing netlink. Thin: it decides nothing.

use std::{fs, net::IpAddr, path::Path};

use futures_util::TryStreamExt;
use netlink_packet_route::{
    AddressFamily,
    link::{BondLacpRate, BondMode as KernelMode, BondXmitHashPolicy, LinkMessage},
    neighbour::{
        NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
    },
};
use rtnetlink::{LinkBond, LinkUnspec, LinkVlan};
use types::{
    node::Bdf,
    uplinks::{Bond, BondHash, BondMode, LacpRate},
};

use super::{Kernel, KernelError, answered, failed};
use crate::net::{
    layout::Action,
    links::{Kind, LinkFacts},
};

/// Where the kernel shows devices behind interfaces.
const DEVICES: &str = "/sys/class/net";

/// Whether a neighbour answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::net) enum Neighbour {
    /// It has answered lately.
    Answers,
    /// It is being asked.
    Asked,
    /// It was asked and has not answered.
    Silent,
}

impl Kernel {
    pub(in crate::net) async fn links(&self) -> Result<Vec<LinkFacts>, KernelError> {
        let found = answered(self.handle.link().get().execute().try_collect()).await;
        let messages: Vec<LinkMessage> =
            found.map_err(failed(|| "list the interfaces".to_owned()))?;
        let mut links: Vec<LinkFacts> =
            messages.iter().filter_map(LinkFacts::read).map(with_device).collect();
        super::bridge::hide(&mut links);
        Ok(links)
    }

    /// Does one step towards the wanted layout.
    pub(in crate::net) async fn carry_out(&self, action: &Action) -> Result<(), KernelError> {
        let link = || self.handle.link();
        let done = match action {
            Action::AddBond { name, bond, .. } => {
                answered(link().add(bond_message(name, bond)).execute()).await
            }
            Action::AddVlan { name, parent, id, .. } => {
                answered(link().add(LinkVlan::new(name, *parent, *id).build()).execute()).await
            }
            Action::Mark { index, alias } => return self.set_alias(*index, alias).await,
            Action::Attach { card, bond } => {
                // A bond takes no card that is up, and none that another one has.
                let off = LinkUnspec::new_with_index(*card).down().nocontroller().build();
                match answered(link().set(off).execute()).await {
                    Ok(()) => {
                        let on = LinkUnspec::new_with_index(*card).controller(*bond).build();
                        answered(link().set(on).execute()).await
                    }
                    refused => refused,
                }
            }
            Action::Detach { card } => {
                answered(
                    link().set(LinkUnspec::new_with_index(*card).nocontroller().build()).execute(),
                )
                .await
            }
            Action::SetMtu { index, mtu } => {
                answered(link().set(LinkUnspec::new_with_index(*index).mtu(*mtu).build()).execute())
                    .await
            }
            Action::SwitchOn { index } => return self.set_up(*index, None).await,
            Action::Delete { index } => return self.delete_link(*index).await,
        };
        done.map_err(failed(|| action.to_string()))
    }

    /// Asks a neighbour to show that it is there, and returns what was known before.
    pub(in crate::net) async fn probe(
        &self,
        index: u32,
        address: IpAddr,
    ) -> Result<Neighbour, KernelError> {
        let known = self.neighbour(index, address).await?;
        #[allow(clippy::wildcard_enum_match_arm, reason = "unknown states need a question, too")]
        let (wakes, answer) = match known {
            Some(NeighbourState::Reachable | NeighbourState::Stale | NeighbourState::Delay) => {
                (false, Neighbour::Answers)
            }
            Some(NeighbourState::Permanent | NeighbourState::Noarp) => {
                return Ok(Neighbour::Answers);
            }
            Some(NeighbourState::Probe | NeighbourState::Incomplete) => {
                return Ok(Neighbour::Asked);
            }
            Some(NeighbourState::Failed) => (true, Neighbour::Silent),
            Some(_) | None => (true, Neighbour::Asked),
        };
        let request = self.handle.neighbours().add(index, address).replace();
        let request = if wakes {
            request.state(NeighbourState::None).flags(NeighbourFlags::Use)
        } else {
            // Unicast requests, one a second; silence ends in a failed entry.
            request.state(NeighbourState::Probe)
        };
        let done = answered(request.execute()).await;
        done.map_err(failed(|| format!("ask {address} on interface {index} whether it is there")))?;
        Ok(answer)
    }

    async fn neighbour(
        &self,
        index: u32,
        address: IpAddr,
    ) -> Result<Option<NeighbourState>, KernelError> {
        let family = match address {
            IpAddr::V4(_) => AddressFamily::Inet,
            IpAddr::V6(_) => AddressFamily::Inet6,
        };
        let request = self.handle.neighbours().get().set_address_family(family);
        let found = answered(request.execute().try_collect()).await;
        let all: Vec<NeighbourMessage> =
            found.map_err(failed(|| "list the neighbours".to_owned()))?;
        let wanted = NeighbourAttribute::Destination(match address {
            IpAddr::V4(address) => NeighbourAddress::Inet(address),
            IpAddr::V6(address) => NeighbourAddress::Inet6(address),
        });
        let found = all
            .into_iter()
            .find(|known| known.header.ifindex == index && known.attributes.contains(&wanted));
        Ok(found.map(|known| known.header.state))
    }
}

fn bond_message(name: &str, bond: &Bond) -> LinkMessage {
    let builder = LinkBond::new(name).mode(match bond.mode {
        BondMode::Lacp => KernelMode::Ieee8023Ad,
        BondMode::ActiveBackup => KernelMode::ActiveBackup,
    });
    let builder = match bond.mode {
        BondMode::Lacp => builder
            .ad_lacp_rate(match bond.lacp_rate {
                LacpRate::Slow => BondLacpRate::Slow,
                LacpRate::Fast => BondLacpRate::Fast,
            })
            .xmit_hash_policy(match bond.hash {
                BondHash::Layer2 => BondXmitHashPolicy::Layer2,
                BondHash::Layer23 => BondXmitHashPolicy::Layer23,
                BondHash::Layer34 => BondXmitHashPolicy::Layer34,
            }),
        BondMode::ActiveBackup => builder,
    };
    if bond.arp_ms > 0 {
        return builder.arp_interval(bond.arp_ms).arp_ip_target(bond.arp_targets.clone()).build();
    }
    builder.miimon(bond.mii_ms).build()
}

/// Adds what sysfs tells of a card.
fn with_device(mut facts: LinkFacts) -> LinkFacts {
    if facts.kind == Kind::Card {
        let device = Path::new(DEVICES).join(&facts.name).join("device");
        let driver = fs::read_link(device.join("driver")).ok();
        let named = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
        facts.driver = driver.and_then(|driver| named(&driver));
        // A virtio card is a device below the PCI function that has the address.
        let place = fs::canonicalize(device).unwrap_or_default();
        facts.path = place.ancestors().find_map(|part| named(part)?.parse::<Bdf>().ok());
    }
    facts
}
