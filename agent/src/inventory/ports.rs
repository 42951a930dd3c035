//! The ports above PCI devices, as sysfs and their configuration space tell them, and the tree that
//! a machine gets for its devices from them. [`topology`] is pure.
//! Source: PCI Express Base Specification 6.0 §7.5.3 (PCI Express capability), §7.7.11 (access
//! control services).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use types::{
    node::Bdf,
    topology::{AccessControl, Below, Port, PortRegisters, RootComplex, Topology},
};

/// Capability identifier of PCI Express, and extended one of access control.
const EXPRESS: u8 = 0x10;
const ACCESS_CONTROL: u16 = 0x0d;
/// Where the list of capabilities begins, and that of extended ones.
const CAPABILITIES: usize = 0x34;
const EXTENDED: usize = 0x100;
/// Most capabilities that fit a configuration space; a list that is longer runs in a circle.
const MAX_CAPABILITIES: usize = 960;
/// Switches one below the other that a machine can have; what is deeper is left out.
const MAX_SWITCHES: usize = 4;
/// Ports that a machine can have on its first root complex, on another one, and in a switch.
const MAX_FIRST_ROOT: usize = 14;
const MAX_ROOT: usize = 16;
const MAX_PORTS: usize = 32;

/// Which end of a link a port is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortKind {
    /// Below a root complex.
    Root,
    /// The upper end of a switch.
    Upstream,
    /// A lower end of a switch.
    Downstream,
}

/// One port of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPort {
    /// Where it is.
    pub address: Bdf,
    /// Which end of a link it is.
    pub kind: PortKind,
    /// What it says of itself.
    pub registers: PortRegisters,
}

/// What is above one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ancestry {
    /// Ports, from the root port down to the one that the device is behind.
    pub ports: Vec<HostPort>,
    /// NUMA node that is near.
    pub node: Option<u32>,
}

/// Reads what is above `devices`, below `root`.
pub fn read(root: &Path, devices: &[Bdf]) -> BTreeMap<Bdf, Ancestry> {
    devices.iter().map(|device| (*device, ancestry(root, *device))).collect()
}

fn ancestry(root: &Path, device: Bdf) -> Ancestry {
    let link = root.join("sys/bus/pci/devices").join(device.to_string());
    let Ok(real) = fs::canonicalize(link) else { return Ancestry::default() };
    let node = super::text(&real.join("numa_node")).and_then(|value| value.parse().ok());
    let mut above: Vec<&Path> = real.ancestors().skip(1).collect();
    above.reverse();
    let ports = above.into_iter().filter_map(|path| {
        let address: Bdf = path.file_name()?.to_str()?.parse().ok()?;
        let (kind, registers) = port(&fs::read(path.join("config")).ok()?)?;
        Some(HostPort { address, kind, registers })
    });
    Ancestry { ports: ports.collect(), node }
}

/// Reads what a port says of itself from its configuration space; `None` for what is no port.
pub fn port(config: &[u8]) -> Option<(PortKind, PortRegisters)> {
    let at = capability(config)?;
    let kind = match half(config, at + 0x02)? >> 4 & 0xf {
        4 => PortKind::Root,
        5 => PortKind::Upstream,
        6 => PortKind::Downstream,
        _ => return None,
    };
    let registers = PortRegisters {
        device_capabilities: word(config, at + 0x04)?,
        device_control: half(config, at + 0x08)?,
        link_capabilities: word(config, at + 0x0c)?,
        link_control: half(config, at + 0x10)?,
        link_status: half(config, at + 0x12)?,
        // Ports of version 1 of the capability end before these.
        device_capabilities2: word(config, at + 0x24).unwrap_or(0),
        device_control2: half(config, at + 0x28).unwrap_or(0),
        link_capabilities2: word(config, at + 0x2c).unwrap_or(0),
        link_control2: half(config, at + 0x30).unwrap_or(0),
        link_status2: half(config, at + 0x32).unwrap_or(0),
        access_control: access_control(config),
    };
    Some((kind, registers))
}

fn capability(config: &[u8]) -> Option<usize> {
    let mut at = usize::from(*config.get(CAPABILITIES)? & !3);
    for _ in 0..MAX_CAPABILITIES {
        if at < 0x40 {
            return None;
        }
        if *config.get(at)? == EXPRESS {
            return Some(at);
        }
        at = usize::from(*config.get(at + 1)? & !3);
    }
    None
}

fn access_control(config: &[u8]) -> Option<AccessControl> {
    let mut at = EXTENDED;
    for _ in 0..MAX_CAPABILITIES {
        let header = word(config, at).filter(|header| *header != 0 && *header != u32::MAX)?;
        if header & 0xffff == u32::from(ACCESS_CONTROL) {
            let (capabilities, control) = (half(config, at + 4)?, half(config, at + 6)?);
            return Some(AccessControl { capabilities, control });
        }
        at = usize::try_from(header >> 20 & 0xffc).ok().filter(|next| *next >= EXTENDED)?;
    }
    None
}

fn half(config: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(config.get(at..at + 2)?.try_into().ok()?))
}

fn word(config: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?))
}

/// Returns the tree for a machine with `devices`, in their order: devices below one switch of the
/// host are below one switch of the machine's, and each NUMA node of the host's that gives a device
/// has a root complex. `nodes` are the machine's own NUMA nodes, which root complexes are near to
/// where they have the host's number. `None` when the tree would be larger than a machine's can be;
/// then each device has a root port of its own.
pub fn topology(
    host: &BTreeMap<Bdf, Ancestry>,
    devices: &[Bdf],
    nodes: &[u32],
) -> Option<Topology> {
    let nothing = Ancestry::default();
    let above = |device: &Bdf| host.get(device).unwrap_or(&nothing);
    let near: BTreeSet<u32> = devices.iter().filter_map(|device| above(device).node).collect();
    let first = near.first().copied();
    let all: Vec<Option<u32>> =
        if near.is_empty() { vec![None] } else { near.into_iter().map(Some).collect() };
    let mut roots = Vec::new();
    for node in all {
        // What is near no node is on the first root complex.
        let mine = (0u32..).zip(devices).filter(|(_, device)| above(device).node.or(first) == node);
        let leaves: Vec<Leaf<'_>> =
            mine.map(|(index, device)| Leaf { index, above: &above(device).ports }).collect();
        let ports = below(&leaves, 0);
        let most = if roots.is_empty() { MAX_FIRST_ROOT } else { MAX_ROOT };
        if ports.len() > most || !ports.iter().all(fits) {
            return None;
        }
        roots.push(RootComplex { node: node.filter(|node| nodes.contains(node)), ports });
    }
    Some(Topology { roots })
}

/// A device, by its index, and the ports above it that are not built yet.
#[derive(Clone, Copy)]
struct Leaf<'a> {
    index: u32,
    above: &'a [HostPort],
}

/// Builds the ports that lead to `leaves`, in the order of their first devices.
fn below(leaves: &[Leaf<'_>], switches: usize) -> Vec<Port> {
    let mut ports = Vec::new();
    let mut done = BTreeSet::new();
    for leaf in leaves {
        let Some((port, rest)) = leaf.above.split_first() else {
            ports.push(leads_to(None, leaf.index));
            continue;
        };
        let upstream = rest.first().filter(|next| next.kind == PortKind::Upstream);
        let Some(upstream) = upstream.filter(|_| rest.len() > 1 && switches < MAX_SWITCHES) else {
            // The device is right behind; of what is too deep, the last port counts.
            let last = leaf.above.last().unwrap_or(port);
            ports.push(leads_to(Some(last.registers), leaf.index));
            continue;
        };
        if !done.insert(port.address) {
            continue;
        }
        let inside = |other: &&Leaf<'_>| {
            other.above.len() > 2
                && other.above[0].address == port.address
                && other.above[1].address == upstream.address
        };
        let inside: Vec<Leaf<'_>> = leaves
            .iter()
            .filter(inside)
            .map(|other| Leaf { index: other.index, above: &other.above[2..] })
            .collect();
        let (upstream, ports_below) = (Some(upstream.registers), below(&inside, switches + 1));
        ports.push(Port {
            registers: Some(port.registers),
            below: Below::Switch { upstream, ports: ports_below },
        });
    }
    ports
}

/// Whether no switch has more ports than a bus has devices: many functions may share a host's port.
fn fits(port: &Port) -> bool {
    match &port.below {
        Below::Device { .. } => true,
        Below::Switch { ports, .. } => ports.len() <= MAX_PORTS && ports.iter().all(fits),
    }
}

fn leads_to(registers: Option<PortRegisters>, index: u32) -> Port {
    Port { registers, below: Below::Device { index } }
}

#[cfg(test)]
#[path = "ports_tests.rs"]
mod tests;
