//! Which GPUs are told that they reach each other directly (NVIDIA's GPUDirect cliques). Pure.
//!
//! The guest's driver uses direct transfers only inside a clique, so a clique is told where they are
//! sure to arrive: between NVIDIA GPUs of one model that are below one switch of the host, whose
//! downstream ports redirect what peers send each other to the root port above (access control
//! services). There the IOMMU translates it, as it does everything else that the devices send, and
//! the root port sends it back down the link that it came from. Ports that route peers' requests
//! themselves would take a guest's addresses for the host's; GPUs below different root ports depend
//! on what the processor forwards. Neither is told.
//! Source: PCI Express 6.0 §6.12 (access control services), §7.7.11 (its registers).

use std::collections::BTreeMap;

use types::node::Bdf;

use crate::inventory::ports::{Ancestry, PortKind};

/// NVIDIA, and the base class of displays.
const NVIDIA: u16 = 0x10de;
const DISPLAY: u32 = 0x03;
/// Control register of access control: requests and completions of peers are redirected, and what
/// comes from below a downstream port goes up.
const REDIRECTED: u16 = 1 << 2 | 1 << 3 | 1 << 4;
/// Numbers of cliques.
const MAX_CLIQUES: usize = 16;

/// A device that a machine gets.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Its address.
    pub address: Bdf,
    /// Vendor and device id.
    pub identity: (u16, u16),
    /// Class code.
    pub class: u32,
    /// What is above it.
    pub above: &'a Ancestry,
}

/// Returns the cliques of `devices`, each of two at least, in the order of their numbers.
pub fn cliques(devices: &[Candidate<'_>]) -> Vec<Vec<Bdf>> {
    let mut sets: BTreeMap<(Bdf, u16), Vec<Bdf>> = BTreeMap::new();
    for device in devices {
        let gpu = device.identity.0 == NVIDIA && device.class >> 16 == DISPLAY;
        if let Some(switch) = switch(device.above).filter(|_| gpu) {
            sets.entry((switch, device.identity.1)).or_default().push(device.address);
        }
    }
    sets.into_values().filter(|set| set.len() > 1).take(MAX_CLIQUES).collect()
}

/// Returns the number of a device's clique.
pub fn number(cliques: &[Vec<Bdf>], device: Bdf) -> Option<u8> {
    let at = cliques.iter().position(|set| set.contains(&device))?;
    u8::try_from(at).ok()
}

/// Returns the upstream port of the switch that a device is right below, when it redirects.
fn switch(above: &Ancestry) -> Option<Bdf> {
    let [.., root, upstream, downstream] = above.ports.as_slice() else { return None };
    let kinds = (root.kind, upstream.kind, downstream.kind);
    if kinds != (PortKind::Root, PortKind::Upstream, PortKind::Downstream) {
        return None;
    }
    let control = downstream.registers.access_control?.control;
    (control & REDIRECTED == REDIRECTED).then_some(upstream.address)
}

#[cfg(test)]
mod tests {
    use types::topology::{AccessControl, PortRegisters};

    use super::*;
    use crate::inventory::ports::HostPort;

    fn at(bus: u8) -> Bdf {
        Bdf { segment: 0, bus, device: 0, function: 0 }
    }

    fn port(bus: u8, kind: PortKind, control: u16) -> HostPort {
        let access_control = Some(AccessControl { capabilities: 0x7f, control });
        let registers = PortRegisters { access_control, ..PortRegisters::default() };
        HostPort { address: at(bus), kind, registers }
    }

    fn below(switch: u8, control: u16) -> Ancestry {
        let ports = vec![
            port(switch - 1, PortKind::Root, 0),
            port(switch, PortKind::Upstream, 0),
            port(switch + 1, PortKind::Downstream, control),
        ];
        Ancestry { ports, node: None }
    }

    fn found(devices: &[(u8, u16, u16, &Ancestry)]) -> Vec<Vec<Bdf>> {
        let all = devices.iter().map(|(bus, vendor, model, above)| Candidate {
            address: at(*bus),
            identity: (*vendor, *model),
            class: 0x03_02_00,
            above,
        });
        cliques(&all.collect::<Vec<_>>())
    }

    #[test]
    fn gpus_below_one_switch_that_redirects_are_one() {
        let (one, other) = (below(10, 0x1d), below(20, 0x1d));
        let devices = [
            (30, NVIDIA, 0x2330, &one),
            (31, NVIDIA, 0x2330, &one),
            (32, NVIDIA, 0x2330, &other),
            (33, NVIDIA, 0x2330, &other),
        ];
        let all = found(&devices);
        assert_eq!(all, [vec![at(30), at(31)], vec![at(32), at(33)]]);
        assert_eq!(number(&all, at(33)), Some(1));
        assert_eq!(number(&all, at(34)), None);
    }

    #[test]
    fn no_other_gpus_are() {
        let (one, direct, other) = (below(10, 0x1d), below(10, 0), below(20, 0x1d));
        let flat = Ancestry { ports: vec![port(1, PortKind::Root, 0x1d)], node: None };
        let pair = |a: &Ancestry, b: &Ancestry, models: (u16, u16), vendor| {
            found(&[(30, vendor, models.0, a), (31, vendor, models.1, b)])
        };
        let same = (0x2330, 0x2330);
        assert!(pair(&direct, &direct, same, NVIDIA).is_empty(), "ports that route themselves");
        assert!(pair(&one, &other, same, NVIDIA).is_empty(), "below two root ports");
        assert!(pair(&flat, &flat, same, NVIDIA).is_empty(), "no switch");
        assert!(pair(&one, &one, (0x2330, 0x2331), NVIDIA).is_empty(), "two models");
        assert!(pair(&one, &one, same, 0x1002).is_empty(), "another vendor");
        assert_eq!(pair(&one, &one, same, NVIDIA).len(), 1);
    }
}
