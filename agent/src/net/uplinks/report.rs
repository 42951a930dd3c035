//! What an uplink looks like, and where each of its values comes from.

use std::net::IpAddr;

use super::task::Uplink;
use crate::net::{
    AssignedAddress, HardwareAddress, InterfaceStatus, LeaseStatus, Value, ValueSource,
    dhcp6::client::DelegatedPrefix, kernel::AddressFacts, rdnss::NameServers,
};

impl Uplink {
    /// Returns its status, with the addresses that the kernel has.
    pub(super) fn status(
        &self,
        addresses: &[AddressFacts],
        advertised: &NameServers,
    ) -> InterfaceStatus {
        let own = addresses.iter().filter(|known| known.index == self.facts.index);
        let addresses: Vec<AssignedAddress> = own.map(|known| known.assigned).collect();
        InterfaceStatus {
            name: self.facts.name.clone(),
            label: self.addressing.label.clone(),
            index: self.facts.index,
            hardware: self.facts.hardware.unwrap_or(HardwareAddress([0; 6])),
            carrier: self.facts.carrier,
            mtu: self.facts.mtu,
            lease: self.lease.as_ref().map(|lease| LeaseStatus {
                address: lease.address,
                server: lease.server,
                expires: lease.expires,
            }),
            reach: self.watch.reach(),
            values: self.values(&addresses, advertised),
            addresses,
        }
    }

    fn values(&self, addresses: &[AssignedAddress], advertised: &NameServers) -> Vec<Value> {
        let value = |text: String, source| Value { text, source };
        let dhcp = self.lease.as_ref().map(|lease| ValueSource::Dhcp(lease.server));
        let mut values = Vec::new();
        for assigned in addresses {
            let AssignedAddress { address, prefix } = assigned;
            values.push(value(format!("{address}/{prefix}"), self.source(assigned)));
        }
        for delegated in self.lease6.iter().flat_map(|lease| &lease.prefixes) {
            let DelegatedPrefix { prefix, length } = delegated;
            values.push(value(format!("delegated {prefix}/{length}"), ValueSource::Dhcp6));
        }
        let document =
            self.addressing.gateways.iter().map(|gateway| (*gateway, ValueSource::Document));
        let leased = self.lease.iter().flat_map(|lease| &lease.routes);
        let leased = leased.filter(|(to, _)| to.length() == 0);
        let leased = leased.filter_map(|(_, gateway)| Some((IpAddr::V4(*gateway), dhcp?)));
        for (gateway, source) in document.chain(leased) {
            values.push(value(format!("gateway {gateway}"), source));
        }
        let document = self.addressing.dns.iter().map(|server| (*server, ValueSource::Document));
        let leased = self.lease.iter().flat_map(|lease| &lease.dns);
        let leased = leased.filter_map(|server| Some((IpAddr::V4(*server), dhcp?)));
        let leased6 = self.lease6.iter().flat_map(|lease| &lease.dns);
        let leased6 = leased6.map(|server| (IpAddr::V6(*server), ValueSource::Dhcp6));
        let advertised = advertised.on(self.facts.index);
        let advertised = advertised.map(|server| (server.into(), ValueSource::Advertisement));
        for (server, source) in document.chain(leased).chain(leased6).chain(advertised) {
            values.push(value(format!("name server {server}"), source));
        }
        let by_dhcp = self.lease.as_ref().and_then(|lease| lease.mtu);
        let source = match (self.addressing.mtu, by_dhcp, dhcp) {
            (Some(mtu), ..) if mtu == self.facts.mtu => ValueSource::Document,
            (None, Some(_), Some(dhcp)) => dhcp,
            (Some(_), ..) | (None, ..) => ValueSource::Card,
        };
        values.push(value(format!("MTU {}", self.facts.mtu), source));
        values
    }

    fn source(&self, assigned: &AssignedAddress) -> ValueSource {
        let leased =
            self.lease.as_ref().filter(|lease| lease.address.address() == assigned.address);
        let mut leased6 = self.lease6.iter().flat_map(|lease| &lease.addresses);
        match assigned.address {
            _ if self.addressing.addresses.contains(assigned) => ValueSource::Document,
            IpAddr::V4(_) => {
                leased.map_or(ValueSource::Card, |lease| ValueSource::Dhcp(lease.server))
            }
            IpAddr::V6(address) if address.is_unicast_link_local() => ValueSource::Card,
            IpAddr::V6(address) if leased6.any(|leased| leased.address == address) => {
                ValueSource::Dhcp6
            }
            IpAddr::V6(_) => ValueSource::Advertisement,
        }
    }
}
