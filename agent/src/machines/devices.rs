//! The node's devices and who holds them. Pure.

use std::collections::BTreeMap;

use types::{
    ids::MachineId,
    node::{Bdf, DeviceState, PciDevice},
};

/// Every device that is not a bridge.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    list: Vec<PciDevice>,
    /// What the rules keep from renters, with the reason.
    refused: BTreeMap<Bdf, DeviceState>,
}

impl Devices {
    /// Starts from what the inventory's rules say.
    pub fn new(list: Vec<PciDevice>) -> Self {
        let refused = |device: &&PciDevice| matches!(device.state, DeviceState::Refused { .. });
        let refused = list.iter().filter(refused);
        let refused = refused.map(|device| (device.address, device.state.clone())).collect();
        Self { list, refused }
    }

    /// Returns the state of a device that nobody has and nothing is wrong with: free, unless the rules
    /// refuse it. One that they refuse may be a machine's, whose lease is older than they are.
    pub fn verdict(&self, address: Bdf) -> DeviceState {
        self.refused.get(&address).cloned().unwrap_or(DeviceState::Free)
    }

    /// Returns all of them.
    pub fn list(&self) -> &[PciDevice] {
        &self.list
    }

    /// Returns the device at an address.
    pub fn get(&self, address: Bdf) -> Option<&PciDevice> {
        self.list.iter().find(|device| device.address == address)
    }

    /// Returns the free devices, one list per IOMMU group.
    pub fn free_groups(&self) -> Vec<Vec<Bdf>> {
        let mut groups = BTreeMap::<_, Vec<_>>::new();
        for device in self.list.iter().filter(|device| device.state == DeviceState::Free) {
            groups.entry(device.iommu_group).or_default().push(device.address);
        }
        groups.into_values().collect()
    }

    /// Sets a device's state. An address without device changes nothing.
    pub fn set(&mut self, address: Bdf, state: DeviceState) {
        if let Some(device) = self.list.iter_mut().find(|device| device.address == address) {
            device.state = state;
        }
    }

    /// Gives devices to a machine.
    pub fn lease(&mut self, addresses: &[Bdf], machine: MachineId) {
        for address in addresses {
            self.set(*address, DeviceState::Leased { machine });
        }
    }

    /// Counts the free ones.
    pub fn free(&self) -> usize {
        self.list.iter().filter(|device| device.state == DeviceState::Free).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_rules_refuse_is_not_free_after_a_machine_had_it() {
        let refused = DeviceState::Refused { reason: "not listed in machines.devices".to_owned() };
        let device = |address: &str, state| PciDevice {
            address: address.parse().expect("an address"),
            vendor: 0x10de,
            device: 0x2335,
            class: 0x03_0200,
            iommu_group: Some(4),
            numa_node: None,
            state,
        };
        let unbound = DeviceState::Quarantined { reason: "no driver".to_owned(), since: None };
        let list = vec![
            device("0000:01:00.0", refused.clone()),
            device("0000:02:00.0", DeviceState::Free),
            device("0000:03:00.0", unbound),
        ];
        let addresses: Vec<Bdf> = list.iter().map(|device| device.address).collect();
        let mut devices = Devices::new(list);
        devices.lease(&addresses, MachineId::from_bytes([1; 16]));
        let verdicts: Vec<_> = addresses.iter().map(|device| devices.verdict(*device)).collect();
        assert_eq!(verdicts, [refused, DeviceState::Free, DeviceState::Free]);
    }
}
