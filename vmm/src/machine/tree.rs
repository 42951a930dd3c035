//! The tree of ports above a machine's devices: from the specification to bus numbers, slots and
//! interrupt pins. Pure; `build` makes ports from it.
//!
//! Buses are numbered depth first, as a guest does that enumerates anew. Root complexes
//! share the 256 buses evenly if that is enough for each; else each has what it needs and its share
//! of what is left.

use std::collections::BTreeSet;

use types::{
    topology::{Below, Port, PortRegisters, RootComplex, SparePort, Topology},
    vm::{Boot, PciWindows, VmSpec},
};

use crate::{
    irq::PinRoute,
    pci::{
        allocate::{Above, Bridge},
        bus::Address,
        port::Kind,
    },
    sys::kvm,
};

/// Slot of the first root port on bus 0.
pub(super) const FIRST_PORT: u8 = 2;
/// Slot of the first of the VMM's own functions on bus 0.
pub(super) const FIRST_VIRTIO: u8 = kvm::FIRST_OWN_SLOT;
/// Most root complexes.
const MAX_ROOTS: usize = 16;
/// Most devices on a bus.
const MAX_SLOTS: usize = 32;
/// Most switches one below the other. PCI Express has no limit, hosts have two.
const MAX_DEPTH: usize = 4;
/// Buses of a segment.
const BUSES: usize = 256;
/// Largest windows that a spare port can keep, in MiB.
const MAX_SPARE_MEMORY: u64 = 256;
const MAX_SPARE_PREFETCHABLE: u64 = 1 << 20;

/// Why a tree cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum TreeError {
    #[error("{found} root complexes; 1 to {MAX_ROOTS} are possible")]
    Roots { found: usize },
    #[error("root complex {root} has {found} ports; {most} are possible")]
    RootPorts { root: usize, found: usize, most: usize },
    #[error("a switch has {found} downstream ports; 1 to {MAX_SLOTS} are possible")]
    SwitchPorts { found: usize },
    #[error("switches are nested deeper than {MAX_DEPTH}")]
    Depth,
    #[error("the tree needs {found} buses; there are {BUSES}")]
    Buses { found: usize },
    #[error("the tree has device {index}, but passthrough.devices has {devices}")]
    NoDevice { index: u32, devices: usize },
    #[error("device {index} of passthrough.devices is not in the tree exactly once")]
    Misplaced { index: usize },
    #[error("a spare port is on root complex {root}; there are {roots}")]
    NoRoot { root: u32, roots: usize },
    #[error(
        "a spare port keeps {memory} MiB and {prefetchable} MiB; 1 to 256 MiB of 32-bit and at \
         most 1 TiB of 64-bit memory are possible"
    )]
    SpareWindow { memory: u64, prefetchable: u64 },
}

/// What a port leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// A switch's inside, or its downstream ports.
    Bridges,
    /// A device passed through, by its index.
    Device(usize),
    /// Nothing yet: a spare port, by its index.
    Spare(usize),
}

/// One port of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// Where it is at the start.
    pub address: Address,
    /// What is above it.
    pub above: Above,
    /// Which end of a link it is.
    pub kind: Kind,
    /// What the host's port says.
    pub registers: Option<PortRegisters>,
    /// Buses behind it: secondary and subordinate.
    pub buses: (u8, u8),
    /// Number of its slot, if it leads to a device.
    pub slot: Option<u16>,
    /// What it leads to.
    pub holds: Holds,
}

/// One root complex.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Its bus.
    pub first: u8,
    /// The last bus that is its own.
    pub last: u8,
    /// NUMA node that is near.
    pub node: Option<u32>,
}

/// The tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// Root complexes, in the order of the specification.
    pub roots: Vec<Root>,
    /// Ports, each after the one above it.
    pub ports: Vec<Seat>,
    spares: Vec<SparePort>,
}

impl Tree {
    /// Numbers the tree of `spec`.
    pub fn new(spec: &VmSpec) -> Result<Self, TreeError> {
        let devices = spec.passthrough.as_ref().map_or(0, |passed| passed.devices.len());
        let flat = flat(devices, spec.spare_ports.len());
        let asked = spec.topology.as_ref().unwrap_or(&flat);
        let roots = asked.roots.len();
        if !(1..=MAX_ROOTS).contains(&roots) {
            return Err(TreeError::Roots { found: roots });
        }
        for spare in &spec.spare_ports {
            check_spare(spare, roots)?;
        }
        let (topology, spares) = match spec.boot {
            Boot::Linux { .. } | Boot::Uefi { pci_windows: PciWindows::Told, .. } => {
                (asked.clone(), spec.spare_ports.clone())
            }
            Boot::Uefi { pci_windows: PciWindows::Found, .. } => gathered(asked, &spec.spare_ports),
        };
        let first_buses = share_buses(&topology, &spares)?;
        let mut tree = Self { roots: Vec::new(), ports: Vec::new(), spares };
        for (number, root) in topology.roots.iter().enumerate() {
            let first = first_buses[number];
            let last = first_buses.get(number + 1).map_or(u8::MAX, |next| next - 1);
            tree.roots.push(Root { first, last, node: root.node });
            tree.add_root(number, &root.ports)?;
        }
        tree.check_devices(devices)?;
        Ok(tree)
    }

    fn add_root(&mut self, number: usize, ports: &[Port]) -> Result<(), TreeError> {
        let first_slot = if number == 0 { FIRST_PORT } else { 0 };
        // No port has a pin of the VMM's own functions (`kvm::pci_gsi`).
        let most = FIRST_VIRTIO - first_slot;
        let spares = self.spares.iter().enumerate();
        let spares: Vec<usize> =
            spares.filter(|(_, spare)| spare.root as usize == number).map(|(n, _)| n).collect();
        let (found, most) = (ports.len() + spares.len(), usize::from(most));
        if found > most {
            return Err(TreeError::RootPorts { root: number, found, most });
        }
        let bus = self.roots[number].first;
        let (mut device, mut next) = (first_slot, bus);
        let at = |device| Address { bus, device, function: 0 };
        for port in ports {
            next = self.add(port, Kind::Root, (at(device), Above::Root(number)), next)?;
            device += 1;
        }
        for spare in spares {
            next = next.saturating_add(1);
            let seat = Seat {
                address: at(device),
                above: Above::Root(number),
                kind: Kind::Root,
                registers: None,
                buses: (next, next),
                slot: Some(self.next_slot()),
                holds: Holds::Spare(spare),
            };
            self.ports.push(seat);
            device += 1;
        }
        Ok(())
    }

    /// Adds a port and what is below; `last` is the last bus taken so far. Returns the last taken
    /// then.
    fn add(
        &mut self,
        port: &Port,
        kind: Kind,
        (address, above): (Address, Above),
        last: u8,
    ) -> Result<u8, TreeError> {
        let secondary = last.saturating_add(1);
        let (number, registers) = (self.ports.len(), port.registers);
        let buses = (secondary, secondary);
        let (slot, holds) = match &port.below {
            Below::Device { index } => (Some(self.next_slot()), Holds::Device(*index as usize)),
            Below::Switch { .. } => (None, Holds::Bridges),
        };
        self.ports.push(Seat { address, above, kind, registers, buses, slot, holds });
        let Below::Switch { upstream, ports } = &port.below else { return Ok(secondary) };
        let inside = secondary.saturating_add(1);
        let upstream = Seat {
            address: Address { bus: secondary, device: 0, function: 0 },
            above: Above::Bridge(number),
            kind: Kind::Upstream,
            registers: *upstream,
            buses: (inside, inside),
            slot: None,
            holds: Holds::Bridges,
        };
        self.ports.push(upstream);
        let mut last = inside;
        for (device, port) in (0u8..).zip(ports) {
            let address = Address { bus: inside, device, function: 0 };
            let above = Above::Bridge(number + 1);
            last = self.add(port, Kind::Downstream, (address, above), last)?;
        }
        self.ports[number].buses.1 = last;
        self.ports[number + 1].buses.1 = last;
        Ok(last)
    }

    fn next_slot(&self) -> u16 {
        let taken = self.ports.iter().filter(|port| port.slot.is_some()).count();
        u16::try_from(taken + 1).unwrap_or(u16::MAX)
    }

    fn check_devices(&self, devices: usize) -> Result<(), TreeError> {
        let mut seen = BTreeSet::new();
        for port in &self.ports {
            if let Holds::Device(index) = port.holds {
                if index >= devices {
                    let index = u32::try_from(index).unwrap_or(u32::MAX);
                    return Err(TreeError::NoDevice { index, devices });
                }
                if !seen.insert(index) {
                    return Err(TreeError::Misplaced { index });
                }
            }
        }
        let missing = (0..devices).find(|index| !seen.contains(index));
        missing.map_or(Ok(()), |index| Err(TreeError::Misplaced { index }))
    }

    /// Returns what is not as the specification has it, if anything is not.
    pub fn note(&self, spec: &VmSpec) -> Option<String> {
        let asked = spec.topology.as_ref().map_or(1, |topology| topology.roots.len());
        (asked != self.roots.len()).then(|| {
            format!(
                "the ports of all {asked} root complexes are below one, and the guest does not see \
                 which NUMA node each device is near: the firmware finds its PCI windows itself \
                 (boot.pci_windows is \"found\"; firmware of edk2 2024.11 or later can be \"told\")"
            )
        })
    }

    /// Returns the ports as the allocator sees them.
    pub fn bridges(&self) -> Vec<Bridge> {
        let bridge = |seat: &Seat| {
            let (memory, prefetchable) = match seat.holds {
                Holds::Spare(number) => {
                    let SparePort { memory_mib, prefetchable_mib, .. } = &self.spares[number];
                    (memory_mib.to_bytes().unwrap_or(0), prefetchable_mib.to_bytes().unwrap_or(0))
                }
                Holds::Device(_) | Holds::Bridges => (0, 0),
            };
            Bridge { above: seat.above, memory, prefetchable }
        };
        self.ports.iter().map(bridge).collect()
    }

    /// Returns the number of the root complex above port `number`.
    pub fn root_of(&self, number: usize) -> usize {
        match self.ports[number].above {
            Above::Root(root) => root,
            Above::Bridge(above) => self.root_of(above),
        }
    }

    /// Returns how interrupt pins of the device behind port `number` go.
    pub fn pin_route(&self, number: usize) -> PinRoute {
        let Seat { address, above, .. } = &self.ports[number];
        match above {
            Above::Root(_) => PinRoute { slot: address.device, turn: 0 },
            Above::Bridge(above) => {
                let PinRoute { slot, turn } = self.pin_route(*above);
                PinRoute { slot, turn: (turn + address.device) % 4 }
            }
        }
    }

    /// Returns the ports that lead to devices, in the order of `passthrough.devices`.
    pub fn device_ports(&self) -> Vec<usize> {
        let mut found: Vec<(usize, usize)> = Vec::new();
        for (number, port) in self.ports.iter().enumerate() {
            if let Holds::Device(index) = port.holds {
                found.push((index, number));
            }
        }
        found.sort_unstable();
        found.into_iter().map(|(_, number)| number).collect()
    }
}

/// A root port for each device, as far as there are slots for them beside `spares` spare ports.
fn flat(devices: usize, spares: usize) -> Topology {
    let port = |index| Port { registers: None, below: Below::Device { index } };
    let ports = (0..u32::try_from(devices).unwrap_or(u32::MAX)).map(port).collect();
    Topology { roots: vec![RootComplex { node: None, ports: folded(ports, spares) }] }
}

/// Puts what the first root complex has no slots for, beside `spares` spare ports, below a switch behind
/// its last port.
fn folded(mut ports: Vec<Port>, spares: usize) -> Vec<Port> {
    let most = usize::from(FIRST_VIRTIO - FIRST_PORT).saturating_sub(spares);
    if most > 0 && ports.len() > most {
        let rest = ports.split_off(most - 1);
        let below = Below::Switch { upstream: None, ports: rest };
        ports.push(Port { registers: None, below });
    }
    ports
}

fn check_spare(spare: &SparePort, roots: usize) -> Result<(), TreeError> {
    if spare.root as usize >= roots {
        return Err(TreeError::NoRoot { root: spare.root, roots });
    }
    let (memory, prefetchable) = (spare.memory_mib.0, spare.prefetchable_mib.0);
    if !(1..=MAX_SPARE_MEMORY).contains(&memory) || prefetchable > MAX_SPARE_PREFETCHABLE {
        return Err(TreeError::SpareWindow { memory, prefetchable });
    }
    Ok(())
}

/// The same ports below one root complex, which is near a node if all are near that one: firmware
/// that finds its own windows knows of no more.
fn gathered(topology: &Topology, spares: &[SparePort]) -> (Topology, Vec<SparePort>) {
    let mut nodes = topology.roots.iter().map(|root| root.node);
    let first = nodes.next().flatten();
    let node = first.filter(|_| nodes.all(|node| node == first));
    let ports = topology.roots.iter().flat_map(|root| root.ports.clone()).collect();
    let ports = folded(ports, spares.len());
    let spares = spares.iter().map(|spare| SparePort { root: 0, ..spare.clone() }).collect();
    (Topology { roots: vec![RootComplex { node, ports }] }, spares)
}

/// Returns the first bus of each root complex.
fn share_buses(topology: &Topology, spares: &[SparePort]) -> Result<Vec<u8>, TreeError> {
    let mut needs = Vec::new();
    for (number, root) in topology.roots.iter().enumerate() {
        let mine = spares.iter().filter(|spare| spare.root as usize == number).count();
        let mut need = 1 + mine;
        for port in &root.ports {
            need += buses(port, MAX_DEPTH)?;
        }
        needs.push(need);
    }
    let found: usize = needs.iter().sum();
    let left = BUSES.checked_sub(found).ok_or(TreeError::Buses { found })?;
    let even = BUSES / needs.len();
    let is_even = needs.iter().all(|need| *need <= even);
    let mut next = 0;
    let firsts = needs.iter().map(|need| {
        let first = next;
        next += if is_even { even } else { need + left / needs.len() };
        u8::try_from(first).unwrap_or(u8::MAX)
    });
    Ok(firsts.collect())
}

/// Returns how many buses a port needs.
fn buses(port: &Port, depth: usize) -> Result<usize, TreeError> {
    let Below::Switch { ports, .. } = &port.below else { return Ok(1) };
    if depth == 0 {
        return Err(TreeError::Depth);
    }
    if !(1..=MAX_SLOTS).contains(&ports.len()) {
        return Err(TreeError::SwitchPorts { found: ports.len() });
    }
    let mut need = 2;
    for port in ports {
        need += buses(port, depth - 1)?;
    }
    Ok(need)
}

#[cfg(test)]
#[path = "tree_tests.rs"]
pub(super) mod tests;
