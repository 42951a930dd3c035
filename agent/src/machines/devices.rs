//! The node's devices and who holds them. Pure.

use types::{
    ids::MachineId,
    node::{Bdf, DeviceState, PciDevice},
};

/// Every device that is not a bridge.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    list: Vec<PciDevice>,
}

impl Devices {
    /// Starts from what the inventory's rules say.
    pub fn new(list: Vec<PciDevice>) -> Self {
        Self { list }
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
        let mut groups = std::collections::BTreeMap::<_, Vec<_>>::new();
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
