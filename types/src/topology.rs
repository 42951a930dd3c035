//! The shape of a guest: NUMA nodes, and the tree of PCI Express ports above its devices. Both
//! mirror the host, because GPU drivers and collective libraries choose their paths by them.

use serde::{Deserialize, Serialize};

use crate::units::Mebibytes;

/// Distance of a NUMA node to itself (ACPI 6.5 §5.2.17).
pub const LOCAL_DISTANCE: u8 = 10;

/// One NUMA node of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaNode {
    /// Proximity domain, its own among all nodes.
    pub id: u32,
    /// Virtual CPUs of the node, each in one node only.
    pub vcpus: Vec<u32>,
    /// Memory of the node. Guest memory is that of all nodes one after the other, in their order in
    /// the list.
    pub memory_mib: Mebibytes,
    /// Distance to every node of the list, in its order: 10 to itself, 11 to 254 to others.
    pub distances: Vec<u8>,
}

/// Where a virtual CPU is in the tree of packages, caches and cores. Each number counts inside what it
/// is part of: cores of two caches are two, whatever their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuPlace {
    /// The package that it is in: what fits one socket.
    pub package: u32,
    /// The last-level cache of the package that it reaches memory through.
    pub cache: u32,
    /// The core behind the cache that it is a thread of.
    pub core: u32,
}

/// The ports of a guest: one root complex for each NUMA node of the host that gives a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Root complexes, 1..=16. The first has bus 0, with it the VMM's own devices.
    pub roots: Vec<RootComplex>,
}

/// One host bridge and the root ports below it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootComplex {
    /// NUMA node of the guest that is near (`_PXM`), an id of `VmSpec.numa`.
    pub node: Option<u32>,
    /// Root ports.
    pub ports: Vec<Port>,
}

/// A root port, or a downstream port of a switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// What the host's port says of itself. Without it the port has the link of what is below, and
    /// the AtomicOps that the host completes for it.
    pub registers: Option<PortRegisters>,
    /// What is behind it.
    pub below: Below,
}

/// What is behind a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum Below {
    /// A device passed through.
    Device {
        /// Its index in `Passthrough.devices`.
        index: u32,
    },
    /// A switch.
    Switch {
        /// What the host's upstream port says of itself.
        upstream: Option<PortRegisters>,
        /// Downstream ports, 1..=32.
        ports: Vec<Port>,
    },
}

/// Registers of a host's port that the guest's port repeats: those of the PCI Express capability
/// (PCI Express 6.0 §7.5.3) by their offset in it, and access control.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortRegisters {
    /// 0x04: device capabilities.
    pub device_capabilities: u32,
    /// 0x08: device control.
    pub device_control: u16,
    /// 0x0c: link capabilities.
    pub link_capabilities: u32,
    /// 0x10: link control.
    pub link_control: u16,
    /// 0x12: link status.
    pub link_status: u16,
    /// 0x24: device capabilities 2.
    pub device_capabilities2: u32,
    /// 0x28: device control 2.
    pub device_control2: u16,
    /// 0x2c: link capabilities 2.
    pub link_capabilities2: u32,
    /// 0x30: link control 2.
    pub link_control2: u16,
    /// 0x32: link status 2.
    pub link_status2: u16,
    /// Access control services, where the port has them.
    pub access_control: Option<AccessControl>,
}

/// Access control services of a port (PCI Express 6.0 §7.7.11).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessControl {
    /// 0x04 of the extended capability.
    pub capabilities: u16,
    /// 0x06 of the extended capability.
    pub control: u16,
}

/// An empty root port into which a device can be plugged while the guest runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SparePort {
    /// Index of its root complex in [`Topology::roots`]; 0 without a topology.
    #[serde(default)]
    pub root: u32,
    /// 32-bit memory kept for the device's BARs, in MiB, 1..=256.
    pub memory_mib: Mebibytes,
    /// 64-bit prefetchable memory kept for them: at least the largest BAR twice when the device has
    /// more than one. At most 1 TiB; 0 for none.
    pub prefetchable_mib: Mebibytes,
}
