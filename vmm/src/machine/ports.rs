//! From the tree of ports to ports on the bus: what each says of itself, where the windows are, who
//! sits behind it.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use types::topology::PortRegisters;

use super::{
    build::BuildError,
    hotplug::Spare,
    map::AddressMap,
    tree::{Holds, Tree, TreeError},
};
use crate::{
    acpi,
    irq::InterruptSource,
    pci::{
        allocate::{self, Above, Bridge, Demand, Plan, Request},
        apertures::Share,
        bus::{Address, Bus},
        config::ConfigError,
        function::{BarKind, PciFunction},
        port::{
            Alarm, AtomicOps, Behind, Kept, Kind, Link, LinkState, Port, SlotSpec, SlotWatch,
            Windows,
        },
    },
    smbios::{self, Usage},
};

/// What a port says that knows of no link below it: the slowest there is.
const SLOWEST: LinkState = Link { speed: 1, width: 1 }.fixed();
/// I/O ports that firmware keeps for a device that comes later.
const SPARE_IO: u64 = 0x1000;

/// Why ports cannot be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum PortError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error("slot {slot} cannot have an interrupt")]
    Interrupt { slot: u16, source: io::Error },
}

/// A function, and what is above it.
pub(super) struct Seat {
    pub(super) address: Address,
    pub(super) above: Above,
    pub(super) function: Arc<Mutex<dyn PciFunction>>,
}

/// The tree as it is built.
pub(super) struct Ports {
    pub(super) tree: Tree,
    /// In the order of the tree's ports.
    pub(super) ports: Vec<Arc<Mutex<Port>>>,
}

impl Ports {
    /// Makes the ports of `tree`. `devices` are what is passed through, in order.
    pub(super) fn new(
        tree: Tree,
        devices: &[Behind],
        interrupts: &dyn InterruptSource,
        watch: &Arc<dyn SlotWatch>,
    ) -> Result<Self, PortError> {
        let (bridges, mut ports) = (tree.bridges(), Vec::new());
        for (number, seat) in tree.ports.iter().enumerate() {
            let registers = registers(&tree, number, devices);
            let slot = match seat.slot {
                Some(slot) => Some(SlotSpec {
                    number: slot,
                    alarm: alarm(&tree, number, interrupts, watch)
                        .map_err(|source| PortError::Interrupt { slot, source })?,
                    kept: kept(&seat.holds, &bridges[number]),
                }),
                None => None,
            };
            let mut port = Port::new(seat.kind, &registers, slot)?;
            port.set_buses(seat.address.bus, seat.buses.0, seat.buses.1);
            ports.push(Arc::new(Mutex::new(port)));
        }
        Ok(Self { tree, ports })
    }

    /// Places all BARs and opens the bridges' windows for them.
    pub(super) fn place(&self, seats: &[Seat], map: &AddressMap) -> Result<Plan, BuildError> {
        let mut requests = Vec::new();
        for (function, seat) in seats.iter().enumerate() {
            let bars = locked(&seat.function).bars();
            let above = seat.above;
            requests.extend(bars.into_iter().map(|bar| Request { function, above, bar }));
        }
        let bridges = self.tree.bridges();
        let (roots, low, bits) = (self.tree.roots.len(), map.low, map.bits);
        let plan = map.place(|ram_end| {
            let requests = &requests;
            allocate::place(&Demand { requests, bridges: &bridges, roots, low, ram_end, bits })
        })?;
        for placed in &plan.placed {
            locked(&seats[placed.function].function).place_bar(placed.index, placed.address);
        }
        for (port, windows) in self.ports.iter().zip(&plan.bridges) {
            locked(port).set_windows(*windows);
        }
        Ok(plan)
    }

    /// Returns the root complexes as firmware tables tell them.
    pub(super) fn roots(&self, plan: &Plan) -> Vec<acpi::Root> {
        let roots = self.tree.roots.iter().zip(&plan.roots);
        roots
            .map(|(root, windows)| acpi::Root {
                buses: (root.first, root.last),
                apertures: (*windows).into(),
                node: root.node,
            })
            .collect()
    }

    /// Returns what each root complex needs of the address space, and what it was given.
    pub(super) fn shares(&self, seats: &[Seat], plan: &Plan) -> Vec<Share> {
        let share = |placed: &Windows| Share { placed: *placed, ..Share::default() };
        let mut shares: Vec<Share> = plan.roots.iter().map(share).collect();
        for (number, (seat, windows)) in self.tree.ports.iter().zip(&plan.bridges).enumerate() {
            let share = &mut shares[self.tree.root_of(number)];
            if let Holds::Spare(_) = seat.holds {
                share.io += SPARE_IO;
            }
            if let Above::Root(_) = seat.above {
                let Windows { io, memory, prefetchable } = *windows;
                share.io += io.map_or(0, |(base, last)| u64::from(last - base) + 1);
                share.low.add(memory.map_or(0, |(base, last)| u64::from(last - base) + 1));
                share.high.add(prefetchable.map_or(0, |(base, last)| last - base + 1));
            }
        }
        for placed in &plan.placed {
            let Above::Root(root) = seats[placed.function].above else { continue };
            match placed.kind {
                BarKind::Io => shares[root].io += placed.size,
                BarKind::Memory32 | BarKind::Memory64 => shares[root].low.add(placed.size),
                BarKind::Memory64Prefetchable => shares[root].high.add(placed.size),
            }
        }
        shares
    }

    /// Returns the slots as inventories tell them.
    pub(super) fn slots(&self) -> Vec<smbios::Slot> {
        let all = self.tree.ports.iter().zip(&self.ports);
        all.filter_map(|(seat, port)| {
            Some(smbios::Slot {
                number: seat.slot?,
                bus: seat.buses.0,
                link: locked(port).link(),
                usage: match seat.holds {
                    Holds::Spare(_) => Usage::Spare,
                    Holds::Device(_) | Holds::Bridges => Usage::Taken,
                },
            })
        })
        .collect()
    }

    /// Returns the ports for devices that come later.
    pub(super) fn spares(&self, plan: &Plan) -> Vec<Spare> {
        let all = self.tree.ports.iter().enumerate();
        let spares = all.filter(|(_, seat)| matches!(seat.holds, Holds::Spare(_)));
        spares
            .map(|(number, seat)| {
                let Windows { memory, prefetchable, .. } = plan.bridges[number];
                Spare {
                    number: seat.slot.unwrap_or_default(),
                    port: Arc::clone(&self.ports[number]),
                    address: seat.address,
                    behind: Address { bus: seat.buses.0, device: 0, function: 0 },
                    route: self.tree.pin_route(number),
                    memory: memory.map_or(0, |(base, last)| u64::from(last - base) + 1),
                    prefetchable: prefetchable.map_or(0, |(base, last)| last - base + 1),
                }
            })
            .collect()
    }

    /// Puts ports and functions on a bus.
    pub(super) fn seat(&self, seats: Vec<Seat>) -> Bus {
        let mut bus = Bus::default();
        for (seat, port) in self.tree.ports.iter().zip(&self.ports) {
            let port = Arc::<Mutex<Port>>::clone(port);
            self.add(&mut bus, Seat { address: seat.address, above: seat.above, function: port });
        }
        seats.into_iter().for_each(|seat| self.add(&mut bus, seat));
        bus
    }

    fn add(&self, bus: &mut Bus, seat: Seat) {
        match seat.above {
            Above::Root(_) => bus.add(seat.address, seat.function),
            Above::Bridge(number) => {
                let above = self.tree.ports[number].address;
                bus.add_behind(above, seat.address, seat.function);
            }
        }
    }
}

/// What a port says: what the host's says, or else the link of what is below, and of a switch that of
/// its first device. A port that is not where the host's is says of AtomicOps what the host does for the
/// devices below.
fn registers(tree: &Tree, number: usize, devices: &[Behind]) -> PortRegisters {
    let seat = &tree.ports[number];
    let below = || {
        tree.ports.iter().enumerate().filter_map(|(port, seat)| match seat.holds {
            Holds::Device(index) if is_below(tree, port, number) => devices.get(index).copied(),
            Holds::Device(_) | Holds::Spare(_) | Holds::Bridges => None,
        })
    };
    let told = seat
        .registers
        .unwrap_or_else(|| below().next().map_or(SLOWEST, |first| first.link).registers());
    if !is_made_up(tree, number) {
        return told;
    }
    AtomicOps::common(below().map(|device| device.atomics)).told(seat.kind, told)
}

/// Whether port `port` is port `above` or below it.
fn is_below(tree: &Tree, mut port: usize, above: usize) -> bool {
    loop {
        if port == above {
            return true;
        }
        match tree.ports[port].above {
            Above::Bridge(next) => port = next,
            Above::Root(_) => return false,
        }
    }
}

/// Whether the host has no such port, or none there: a root port of it may be one of a switch here.
fn is_made_up(tree: &Tree, number: usize) -> bool {
    let seat = &tree.ports[number];
    let moved = match (seat.kind, seat.above) {
        (Kind::Downstream, Above::Bridge(above)) => tree.ports[above].registers.is_none(),
        (Kind::Root | Kind::Upstream | Kind::Downstream, _) => false,
    };
    seat.registers.is_none() || moved
}

fn kept(holds: &Holds, bridge: &Bridge) -> Option<Kept> {
    let Bridge { memory, prefetchable, .. } = *bridge;
    matches!(holds, Holds::Spare(_)).then_some(Kept { memory, prefetchable })
}

fn alarm(
    tree: &Tree,
    number: usize,
    interrupts: &dyn InterruptSource,
    watch: &Arc<dyn SlotWatch>,
) -> io::Result<Option<Alarm>> {
    let Holds::Spare(_) = tree.ports[number].holds else { return Ok(None) };
    let route = tree.pin_route(number);
    let (vector, line) = (interrupts.allocate_msi()?, interrupts.line(route.slot, route.pin(1))?);
    Ok(Some(Alarm { vector, line, watch: Arc::clone(watch) }))
}

fn locked<T: ?Sized>(device: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "ports_tests.rs"]
mod tests;
