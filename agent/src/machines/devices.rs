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
    /// What is kept from renters while a device is reset, by that device, and the states that it gets back.
    held: BTreeMap<Bdf, Vec<(Bdf, DeviceState)>>,
}

impl Devices {
    /// Starts from what the inventory's rules say.
    pub fn new(list: Vec<PciDevice>) -> Self {
        let refused = |device: &&PciDevice| matches!(device.state, DeviceState::Refused { .. });
        let refused = list.iter().filter(refused);
        let refused = refused.map(|device| (device.address, device.state.clone())).collect();
        Self { list, refused, held: BTreeMap::new() }
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

    /// Takes a device that is going to be reset, and what may lose its state with it: what is `beside` it below one
    /// bridge, if nobody has any of that. It counts as being reset, too, until it is [let go](Self::let_go).
    /// Returns all of them.
    pub fn hold(&mut self, address: Bdf, beside: &[Bdf]) -> Vec<Bdf> {
        self.let_go(address);
        let unused = |other: &Bdf| match self.get(*other)?.state.clone() {
            state @ (DeviceState::Free | DeviceState::Quarantined { .. }) => Some((*other, state)),
            DeviceState::Leased { .. } | DeviceState::Resetting | DeviceState::Refused { .. } => {
                None
            }
        };
        let others: Option<Vec<_>> = beside.iter().map(unused).collect();
        let others = others.unwrap_or_default();
        let set: Vec<Bdf> =
            [address].into_iter().chain(others.iter().map(|(other, _)| *other)).collect();
        for taken in &set {
            self.set(*taken, DeviceState::Resetting);
        }
        self.held.insert(address, others);
        set
    }

    /// Gives back their states to what was held beside a device, which will not take them with it any more.
    pub fn let_go(&mut self, address: Bdf) {
        for (other, state) in self.held.remove(&address).unwrap_or_default() {
            self.set(other, state);
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

    fn device(address: &str, state: DeviceState) -> PciDevice {
        PciDevice {
            address: address.parse().expect("an address"),
            vendor: 0x10de,
            device: 0x2335,
            class: 0x03_0200,
            iommu_group: Some(4),
            numa_node: None,
            linked: Vec::new(),
            fabric: false,
            state,
        }
    }

    #[test]
    fn nobody_gets_what_may_be_reset_with_another() {
        let broken = DeviceState::Quarantined { reason: "gone".to_owned(), since: None };
        let mut devices = Devices::new(vec![
            device("0000:01:00.0", broken.clone()),
            device("0000:01:00.1", DeviceState::Free),
            device("0000:01:00.2", broken.clone()),
        ]);
        let [first, second, third] = [0, 1, 2].map(|at| devices.list()[at].address);
        let states = |devices: &Devices| {
            devices.list().iter().map(|device| device.state.clone()).collect::<Vec<_>>()
        };
        assert_eq!(devices.hold(first, &[second, third]), [first, second, third]);
        assert_eq!(states(&devices), vec![DeviceState::Resetting; 3]);
        // None of them is another's to take along meanwhile.
        assert_eq!(devices.clone().hold(second, &[first, third]), [second]);
        devices.let_go(first);
        let free = DeviceState::Free;
        assert_eq!(states(&devices), [DeviceState::Resetting, free, broken.clone()]);
        devices.let_go(first);

        // One of them is a machine's, so none is reset with the first.
        let machine = MachineId::from_bytes([1; 16]);
        devices.lease(&[second], machine);
        assert_eq!(devices.hold(first, &[second, third]), [first]);
        let leased = DeviceState::Leased { machine };
        assert_eq!(states(&devices), [DeviceState::Resetting, leased, broken]);
    }

    #[test]
    fn what_the_rules_refuse_is_not_free_after_a_machine_had_it() {
        let refused = DeviceState::Refused { reason: "not listed in machines.devices".to_owned() };
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
